//! Measured beside simulated: what each arm gave, and what the device's profile says it should.

use serde::Serialize;

use super::run::{simulated_arm, stand_in};
use crate::Result;
use crate::engine::device::sim::SimDevice;
use crate::engine::device::{Device, DeviceKind};
use crate::hardware;
use crate::measure::quantile::Distribution;
use crate::measure::recorder::RequestRecord;
use crate::measure::summary::Summary;
use crate::results::RunResults;
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

/// The figures of a run's arms, and the simulated devices that they ran on, each with its arms.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Comparison {
    pub rows: Vec<SimComparison>,
    pub devices: Vec<(String, Vec<String>)>,
}

impl Comparison {
    /// The device; where there are several, each with its arms.
    pub fn devices_in_words(&self) -> String {
        match self.devices.as_slice() {
            [(device, _)] => device.clone(),
            several => {
                let of_arms =
                    several.iter().map(|(device, arms)| format!("{device} for {}", arms.join(", ")));
                of_arms.collect::<Vec<_>>().join("; ")
            }
        }
    }
}

/// Every finished arm of the run, or the one named, on `device`, else on the profile of the run's own GPU, else on the
/// ceilings measured of arms like it.
///
/// # Errors
/// An arm that is not there or cannot be simulated.
pub fn compare(results: &RunResults, device: Option<&SimDevice>, only: Option<&str>) -> Result<Comparison> {
    let mut all = Comparison::default();
    for arm in results.arms_named(only)? {
        let Some(resolved) = results.record.resolved(arm) else {
            continue;
        };
        let device = device.map_or_else(|| stand_in(results, arm, true), |device| Ok(device.clone()))?;
        let id = &device.info().id;
        match all.devices.iter_mut().find(|(other, _)| other == id) {
            Some((_, arms)) => arms.push(arm.to_string()),
            None => all.devices.push((id.clone(), vec![arm.to_string()])),
        }
        let run = simulated_arm(results, resolved)?.run(&device)?;
        for (metric, measured, simulated) in METRICS {
            let measured = results.median(arm, measured);
            let simulated = simulated(&run);
            let error = measured.zip(simulated).map(|(measured, simulated)| simulated / measured - 1.0);
            all.rows.push(SimComparison { arm: arm.to_string(), metric, measured, simulated, error });
        }
    }
    Ok(all)
}

/// Whether a report sets measured beside simulated without being asked: on a real GPU that the table knows.
pub fn by_default(results: &RunResults) -> bool {
    let device = &results.record.device;
    device.kind == DeviceKind::Cuda && hardware::by_product_name(&device.name).is_some()
}
