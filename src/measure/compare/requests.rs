//! requests.csv as samples: a value a repeat where there are repeats, batch means of the one run otherwise.
//!
//! Requests themselves are never samples: those of one run share its queue and are not independent.

use std::collections::BTreeMap;

use super::ArmSamples;
use super::read::{Row, entry, number};
use crate::measure::quantile::{Distribution, supported};
use crate::measure::statistics::batch_means;
use crate::{Error, Result};

const LATENCIES: [&str; 4] = ["ttft", "tpot", "e2el", "queue"];

pub(super) fn arms(rows: &[Row]) -> Result<Vec<ArmSamples>> {
    // (arm, repeat) in order of first appearance.
    let mut runs: Vec<((String, String), Vec<&Row>)> = Vec::new();
    for row in rows {
        let key =
            (row.get("arm").cloned().unwrap_or_default(), row.get("repeat").cloned().unwrap_or_default());
        match runs.iter_mut().find(|(known, _)| *known == key) {
            Some((_, run)) => run.push(row),
            None => runs.push((key, vec![row])),
        }
    }
    let mut repeats: BTreeMap<&str, usize> = BTreeMap::new();
    runs.iter().for_each(|((arm, _), _)| *repeats.entry(arm.as_str()).or_default() += 1);
    let mut arms = Vec::new();
    for ((name, _), run) in &runs {
        let arm = entry(&mut arms, name);
        let completed = completed(run)?;
        if repeats[name.as_str()] >= 2 {
            add_repeat(arm, run.len(), &completed)?;
        } else {
            add_batches(arm, &completed)?;
        }
    }
    Ok(arms)
}

/// Requests that ended as they should, in order of intended arrival.
fn completed<'a>(run: &[&'a Row]) -> Result<Vec<&'a Row>> {
    let mut completed = Vec::new();
    for row in run
        .iter()
        .filter(|row| row.get("status").is_some_and(|status| status == "length" || status == "stop"))
    {
        let intended_s = number(row, "intended_s")?
            .ok_or_else(|| Error::invalid("a request has no intended_s", "every row must have one"))?;
        completed.push((intended_s, *row));
    }
    completed.sort_by(|a, b| a.0.total_cmp(&b.0));
    Ok(completed.into_iter().map(|(_, row)| row).collect())
}

fn latency(rows: &[&Row], name: &str) -> Result<Vec<f64>> {
    let column = format!("{name}_ms");
    let mut values = Vec::new();
    for row in rows {
        values.extend(number(row, &column)?);
    }
    Ok(values)
}

fn add_repeat(arm: &mut ArmSamples, requests: usize, completed: &[&Row]) -> Result<()> {
    let mut duration_s: f64 = 0.0;
    let mut tokens = 0.0;
    for row in completed {
        duration_s = duration_s.max(number(row, "finish_s")?.unwrap_or(0.0));
        tokens += number(row, "output_tokens")?.unwrap_or(0.0);
    }
    let mut add = |metric: String, value: f64| arm.values.entry(metric).or_default().push(value);
    add("failed".to_string(), (requests - completed.len()) as f64);
    if duration_s > 0.0 {
        add("request_throughput".to_string(), completed.len() as f64 / duration_s);
        add("output_throughput".to_string(), tokens / duration_s);
    }
    for name in LATENCIES {
        let Some(values) = Distribution::of(latency(completed, name)?) else { continue };
        add(format!("{name}_mean_ms"), values.mean);
        for (word, quantile, value) in
            [("p50", 0.5, values.p50), ("p90", 0.9, values.p90), ("p99", 0.99, values.p99)]
        {
            if supported(values.n, quantile) {
                add(format!("{name}_{word}_ms"), value);
            }
        }
    }
    Ok(())
}

fn add_batches(arm: &mut ArmSamples, completed: &[&Row]) -> Result<()> {
    for name in LATENCIES {
        let values = latency(completed, name)?;
        if values.is_empty() {
            continue;
        }
        let samples = batch_means(&values).unwrap_or_else(|| vec![crate::measure::statistics::mean(&values)]);
        arm.batches |= samples.len() > 1;
        arm.values.insert(format!("{name}_mean_ms"), samples);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(repeat: u32, intended_s: f64, ttft_ms: f64, status: &str) -> Row {
        let cells = [
            ("arm", "a".to_string()),
            ("repeat", repeat.to_string()),
            ("intended_s", intended_s.to_string()),
            ("finish_s", (intended_s + 1.0).to_string()),
            ("output_tokens", "10".to_string()),
            ("ttft_ms", ttft_ms.to_string()),
            ("status", status.to_string()),
        ];
        cells.into_iter().map(|(name, cell)| (name.to_string(), cell)).collect()
    }

    #[test]
    fn repeats_give_a_value_each() {
        let rows: Vec<Row> = (0..2)
            .flat_map(|repeat| {
                (0..9).map(move |index| row(repeat, f64::from(index), f64::from(repeat * 10), "length"))
            })
            .chain([row(0, 3.0, 900.0, "refused")])
            .collect();
        let arms = arms(&rows).unwrap();
        assert_eq!(arms[0].values["ttft_mean_ms"], [0.0, 10.0]);
        assert_eq!(arms[0].values["request_throughput"], [1.0, 1.0]);
        assert_eq!(arms[0].values["output_throughput"], [10.0, 10.0]);
        assert_eq!(arms[0].values["failed"], [1.0, 0.0]);
        assert!(!arms[0].batches && !arms[0].values.contains_key("ttft_p99_ms"));
    }

    #[test]
    fn a_single_run_gives_batch_means_in_order_of_arrival() {
        // Rows come in any order; latency grows with arrival.
        let rows: Vec<Row> =
            (0..100).rev().map(|index| row(0, f64::from(index), f64::from(index), "length")).collect();
        let arms = arms(&rows).unwrap();
        let samples = &arms[0].values["ttft_mean_ms"];
        assert!(arms[0].batches && samples.len() == 10);
        assert_eq!((samples[0], samples[9]), (4.5, 94.5));
    }

    #[test]
    fn few_requests_of_one_run_are_one_sample() {
        let rows: Vec<Row> = (0..5).map(|index| row(0, f64::from(index), 1.0, "length")).collect();
        assert_eq!(arms(&rows).unwrap()[0].values["ttft_mean_ms"], [1.0]);
    }
}
