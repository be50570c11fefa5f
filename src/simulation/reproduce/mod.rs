//! The series "The Inference Wall", cell by cell: what was published, what its simulated rig gives, and how far they
//! are apart.
//!
//! The rig ([`crate::engine::device::sim::series`]) was calibrated on a few cells and its form found with others in
//! view, so each cell says which it is: only `unseen` ones are predictions.

pub mod cells;
pub mod mechanisms;
mod metrics;
pub mod plan;
mod reasons;
pub mod report;

use std::collections::BTreeMap;

use crate::Result;
use crate::engine::device::Device;
use crate::engine::device::sim::SimDevice;

pub use cells::{Cell, Mark, Verdict};
use plan::PlannedArm;

/// One published cell beside its simulation.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Compared {
    #[serde(flatten)]
    pub cell: Cell,
    /// `None` where the simulation has no such figure.
    pub simulated: Option<f64>,
    /// simulated/published - 1.
    pub error: Option<f64>,
    pub verdict: Verdict,
}

/// All figures of the arms that ran, by arm and metric.
pub type Figures = BTreeMap<String, BTreeMap<&'static str, f64>>;

/// A part's arms and their cells.
#[derive(Debug, Clone, serde::Serialize)]
pub struct PartResult {
    pub part: u32,
    /// The device, where it is not the rig that the cells were published of: nothing is judged then.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub other_rig: Option<String>,
    pub cells: Vec<Compared>,
    /// Figures of every arm, those without a published counterpart included.
    pub figures: Figures,
    pub simulated_s: f64,
}

/// Runs the arms of `part` on the simulated rig and compares.
///
/// # Errors
/// A device or load that cannot run the plan.
pub fn run_part(part: u32, device: &SimDevice, seed: u64) -> Result<PartResult> {
    let mut figures = Figures::new();
    let mut simulated_s = 0.0;
    for arm in plan::arms(part)? {
        let (metrics, seconds) = run_arm(&arm, device, seed)?;
        simulated_s += seconds;
        figures.insert(arm.name, metrics);
    }
    metrics::add_derived(&mut figures);
    let other_rig = Some(&device.info().id).filter(|id| *id != SERIES).cloned();
    let cells = cells::published(part)?
        .into_iter()
        .map(|cell| {
            let simulated =
                figures.get(&cell.arm).and_then(|metrics| metrics.get(cell.metric.as_str())).copied();
            compare(cell, simulated, other_rig.is_none())
        })
        .collect();
    Ok(PartResult { part, other_rig, cells, figures, simulated_s })
}

/// Runs one arm and takes its figures.
///
/// # Errors
/// As [`run_part`].
pub fn run_arm(
    arm: &PlannedArm,
    device: &SimDevice,
    seed: u64,
) -> Result<(BTreeMap<&'static str, f64>, f64)> {
    let run = arm.simulated(seed)?.run(device)?;
    Ok((metrics::of(&run, arm), run.simulated_s))
}

fn compare(cell: Cell, simulated: Option<f64>, same_rig: bool) -> Compared {
    let error = simulated.map(|value| value / cell.published - 1.0);
    let verdict = match simulated {
        None => Verdict::NotSimulated,
        Some(value) if same_rig => cell.judge(value),
        Some(_) => Verdict::Printed,
    };
    Compared { cell, simulated, error, verdict }
}

/// The rig that the cells were published of.
const SERIES: &str = "sim:series";

/// The parts that the simulated rig can run.
pub const PARTS: [u32; 6] = [1, 2, 3, 5, 6, 7];
