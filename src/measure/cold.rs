//! cold.csv: the first round of an arm's warm-up, kept apart from every measured row.
//!
//! A server's first requests pay for what later ones find ready (page faults, compiled kernels, captured graphs, clocks
//! at rest), and a table that holds them lies: the series has one with a TTFT p99 of 29 s where the warm one is 138 ms.
//! These are the figures such a table would have had. Times are as in the other files; a value that does not apply is
//! empty.

use serde::{Deserialize, Serialize};

use super::quantile::Distribution;
use super::recorder::{ArmRecord, RequestRecord};

/// A row an arm, of its first repeat.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ColdRow {
    pub arm: String,
    pub repeat: u32,
    pub model: String,
    /// Nothing had run since this model was loaded.
    pub after_load: bool,
    pub requests: usize,
    pub duration_s: f64,
    pub steps: usize,
    /// The very first step, then all steps of the round: wall time between the ends of consecutive steps.
    pub first_step_ms: Option<f64>,
    pub step_ms_p50: Option<f64>,
    pub step_ms_p99: Option<f64>,
    pub step_ms_max: Option<f64>,
    /// Intended arrival to first token.
    pub ttft_p50_ms: Option<f64>,
    pub ttft_p90_ms: Option<f64>,
    pub ttft_p99_ms: Option<f64>,
    pub ttft_max_ms: Option<f64>,
    /// Gaps between consecutive tokens of a request.
    pub itl_p50_ms: Option<f64>,
    pub itl_p99_ms: Option<f64>,
}

impl ColdRow {
    /// Of a first round, before it is known which model it is of.
    pub fn of(record: &ArmRecord, arm: &str, repeat: u32) -> Self {
        let ms = |seconds: f64| seconds * 1e3;
        let steps = Distribution::of(record.steps.iter().map(|step| ms(step.wall_s)));
        let ttft = Distribution::of(record.requests.iter().filter_map(RequestRecord::ttft_s).map(ms));
        let gaps = Distribution::of(record.requests.iter().flat_map(RequestRecord::gaps_s).map(ms));
        Self {
            arm: arm.to_string(),
            repeat,
            requests: record.requests.len(),
            duration_s: record.duration_s,
            steps: record.steps.len(),
            first_step_ms: record.steps.first().map(|step| ms(step.wall_s)),
            step_ms_p50: steps.map(|steps| steps.p50),
            step_ms_p99: steps.map(|steps| steps.p99),
            step_ms_max: steps.map(|steps| steps.max),
            ttft_p50_ms: ttft.map(|ttft| ttft.p50),
            ttft_p90_ms: ttft.map(|ttft| ttft.p90),
            ttft_p99_ms: ttft.map(|ttft| ttft.p99),
            ttft_max_ms: ttft.map(|ttft| ttft.max),
            itl_p50_ms: gaps.map(|gaps| gaps.p50),
            itl_p99_ms: gaps.map(|gaps| gaps.p99),
            ..Self::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::step_report::StepKind;
    use crate::measure::testing::{answered, record_of, step};

    #[test]
    fn the_first_step_stands_beside_the_others() {
        let steps = vec![
            step(StepKind::Prefill, 0.0, 2.0),
            step(StepKind::Decode, 2.0, 2.1),
            step(StepKind::Decode, 2.1, 2.2),
        ];
        let record = record_of(vec![answered(0.0, 0.0, &[2.0, 2.1, 2.2])], steps);
        let row = ColdRow::of(&record, "a", 0);
        assert_eq!((row.first_step_ms, row.ttft_max_ms, row.steps), (Some(2000.0), Some(2000.0), 3));
        assert!((row.step_ms_p50.unwrap() - 100.0).abs() < 1e-6, "{row:?}");
        assert!((row.itl_p99_ms.unwrap() - 100.0).abs() < 1e-6, "{row:?}");
        assert_eq!(ColdRow::of(&ArmRecord::default(), "a", 0).first_step_ms, None);
    }
}
