//! Measured beside simulated: what each arm gave, and what the device's profile says it should.

use serde::Serialize;

use super::run::simulated_arm;
use crate::Result;
use crate::engine::device::sim::SimDevice;
use crate::measure::quantile::Distribution;
use crate::measure::recorder::RequestRecord;
use crate::measure::summary::Summary;
use crate::report::results::RunResults;
use crate::simulation::SimulatedRun;

/// One figure of one arm.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SimComparison {
    pub arm: String,
    pub metric: &'static str,
    /// Median over the repeats.
    pub measured: Option<f64>,
    pub simulated: Option<f64>,
    /// simulated/measured - 1.
    pub error: Option<f64>,
}

type Metric = (&'static str, fn(&Summary) -> Option<f64>, fn(&SimulatedRun) -> Option<f64>);

fn distribution(run: &SimulatedRun, of: impl Fn(&RequestRecord) -> Option<f64>) -> Option<Distribution> {
    Distribution::of(run.record.requests.iter().filter_map(of).map(|seconds| seconds * 1e3))
}

fn gaps(run: &SimulatedRun) -> Option<Distribution> {
    Distribution::of(run.record.requests.iter().flat_map(RequestRecord::gaps_s).map(|gap_s| gap_s * 1e3))
}

const METRICS: [Metric; 6] = [
    (
        "output_throughput",
        |summary| summary.output_throughput,
        |run| {
            let tokens: usize = run.record.requests.iter().map(|request| request.tokens_s.len()).sum();
            Some(tokens as f64 / run.record.duration_s)
        },
    ),
    (
        "step_ms_p50",
        |summary| summary.step_ms_p50,
        |run| Some(Distribution::of(run.record.steps.iter().map(|step| step.wall_s * 1e3))?.p50),
    ),
    ("ttft_p50_ms", |summary| summary.ttft_p50_ms, |run| Some(distribution(run, RequestRecord::ttft_s)?.p50)),
    ("itl_p50_ms", |summary| summary.itl_p50_ms, |run| Some(gaps(run)?.p50)),
    ("itl_p99_ms", |summary| summary.itl_p99_ms, |run| Some(gaps(run)?.p99)),
    ("e2el_p50_ms", |summary| summary.e2el_p50_ms, |run| Some(distribution(run, RequestRecord::e2el_s)?.p50)),
];

/// Every finished arm of the run on `device`.
///
/// # Errors
/// An arm that cannot be simulated.
pub fn compare(results: &RunResults, device: &SimDevice) -> Result<Vec<SimComparison>> {
    let mut rows = Vec::new();
    for arm in results.arms() {
        let Some(resolved) = results.record.arms.iter().find(|resolved| resolved.name == arm) else {
            continue;
        };
        let run = simulated_arm(results, resolved)?.run(device)?;
        for (metric, measured, simulated) in METRICS {
            let measured = results.median(arm, measured);
            let simulated = simulated(&run);
            let error = measured.zip(simulated).map(|(measured, simulated)| simulated / measured - 1.0);
            rows.push(SimComparison { arm: arm.to_string(), metric, measured, simulated, error });
        }
    }
    Ok(rows)
}
