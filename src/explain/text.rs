//! An explanation in sentences.

use super::Explanation;

fn percent(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}

fn gain(share: f64) -> String {
    format!("{:+.0} %", share * 100.0)
}

/// One paragraph an arm, a line a statement.
pub fn lines(explanation: &Explanation) -> Vec<String> {
    let mut lines = Vec::new();
    let shares: Vec<String> = explanation
        .time
        .sorted()
        .into_iter()
        .filter(|(_, share)| *share >= 0.005)
        .map(|(name, share)| format!("{} {name}", percent(share)))
        .collect();
    lines.push(format!("time: {}", shares.join(", ")));
    lines.push(match explanation.held_back.longest() {
        Some((limit, share)) => {
            format!("queue: held back by {limit} for {} of the step time", percent(share))
        }
        None => "queue: nothing was ever held back".to_string(),
    });
    for wall in &explanation.walls {
        lines.push(format!("wall: {}", wall.text));
    }
    if let Some(check) = &explanation.check {
        let verdict = if check.holds { "holds" } else { "does not hold" };
        lines.push(format!(
            "bound by {}: {verdict} on the simulated device: doubling it gains {} tok/s, the most any gains is {} ({})",
            check.claimed,
            gain(check.claimed_gain),
            gain(check.largest_gain),
            check.largest
        ));
    }
    for counterfactual in &explanation.counterfactuals {
        let (throughput, latency) = (counterfactual.output_throughput, counterfactual.e2el_p50_ms);
        lines.push(format!(
            "what if {}: {:.0} -> {:.0} tok/s ({:+.0} %), end to end p50 {:.0} -> {:.0} ms ({:+.0} %), simulated",
            counterfactual.change,
            throughput.0,
            throughput.1,
            (throughput.1 / throughput.0 - 1.0) * 100.0,
            latency.0,
            latency.1,
            (latency.1 / latency.0 - 1.0) * 100.0,
        ));
    }
    lines
}
