//! Limits on latency beside what the arms gave: which arm broke which.

use crate::numbers::number;
use crate::results::RunResults;
use crate::workload::slo::Slo;

/// Whether any arm of the run has limits, and so a goodput.
pub fn set(results: &RunResults) -> bool {
    results.summaries.iter().any(|summary| summary.goodput.is_some())
}

fn slo_of<'a>(results: &'a RunResults, arm: &str) -> Option<&'a Slo> {
    let arm = results.record.plan.arms.iter().find(|planned| planned.name == arm)?;
    Some(&arm.load.slo).filter(|slo| !slo.is_empty())
}

/// A line for each set of limits, and one for each arm that breaks some; empty for a run without limits.
pub fn lines(results: &RunResults) -> String {
    let mut text = String::new();
    let mut said: Vec<String> = Vec::new();
    for arm in results.arms() {
        let Some(slo) = slo_of(results, arm) else { continue };
        if !said.contains(&slo.to_string()) {
            said.push(slo.to_string());
            text += &format!("\nlimits in ms: {slo}; `goodput`: answers a second that kept every limit\n");
        }
        let broken = broken(results, arm, slo);
        if !broken.is_empty() {
            text += &format!("- {arm} breaks {}\n", broken.join(", "));
        }
    }
    text
}

/// The limits that the median over an arm's repeats is beyond, in words.
fn broken(results: &RunResults, arm: &str, slo: &Slo) -> Vec<String> {
    let beyond = slo.limits().filter_map(|limit| {
        let column = format!("{}_ms", limit.name);
        let value_ms = results.median(arm, |summary| summary.metric(&column))?;
        (value_ms > limit.limit_ms).then(|| format!("{} ({} ms)", limit.name, number(value_ms)))
    });
    let failed: usize = results.of_arm(arm).map(|summary| summary.failed).sum();
    beyond.chain((failed > 0).then(|| format!("all of them ({failed} requests failed)"))).collect()
}
