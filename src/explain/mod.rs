//! Why an arm came out as it did, from its own steps: which resource took which share of the time, what kept requests
//! waiting, which wall comes next and where; and whether that holds, by runs on a simulated device in which one
//! resource at a time is doubled. The same for real and for simulated devices.

pub mod compare;
pub mod counterfactual;
pub mod run;
pub mod shares;
pub mod text;

use serde::Serialize;

use crate::Result;
use crate::engine::account::{Ceilings, CostModel};
use crate::engine::device::sim::SimDevice;
use crate::measure::rows::{KernelRow, StepRow};
use crate::simulation::SimulatedArm;
use crate::simulation::walls::{self, Wall};

pub use counterfactual::{Check, Counterfactual};
pub use shares::{HeldShares, TimeShares};

/// What there is to go by: one arm's steps (all repeats), what it ran, and a simulated device to ask "what if" on.
pub struct Evidence<'a> {
    pub arm: &'a str,
    pub steps: &'a [StepRow],
    pub was_simulated: bool,
    /// Of all repeats together, seconds.
    pub duration_s: f64,
    /// What the summary says bound it; empty if nothing.
    pub bound_by: &'a str,
    pub largest_kernels: Vec<KernelRow>,
    pub ceilings: Option<Ceilings>,
    pub simulated: &'a SimulatedArm,
    pub device: &'a SimDevice,
}

#[derive(Debug, Clone, Serialize)]
pub struct Explanation {
    pub arm: String,
    /// The run was; counterfactuals always are.
    pub simulated: bool,
    pub bound_by: String,
    pub time: TimeShares,
    pub held_back: HeldShares,
    pub walls: Vec<Wall>,
    /// Empty when counterfactuals were not asked for.
    pub counterfactuals: Vec<Counterfactual>,
    pub check: Option<Check>,
    /// The largest kernels of the kind of step that took most of a traced pass; empty for a run that was not traced.
    pub largest_kernels: Vec<KernelRow>,
}

/// # Errors
/// A counterfactual that cannot run.
pub fn explain(evidence: &Evidence, with_counterfactuals: bool) -> Result<Explanation> {
    let time = TimeShares::of(evidence.steps, evidence.duration_s, evidence.ceilings.as_ref());
    let held_back = HeldShares::of(evidence.steps.iter());
    // (Counterfactuals run first: their baseline has the pools that walls are computed from.)
    let base = evidence.simulated.run(evidence.device)?;
    let costs = CostModel::new(&evidence.simulated.layout, &base.plan);
    let walls = walls::of(
        &evidence.simulated.layout,
        &base.plan,
        &costs,
        evidence.ceilings.as_ref(),
        &evidence.simulated.load,
    );
    let (counterfactuals, check) = if with_counterfactuals {
        let all = counterfactual::run(evidence.simulated, evidence.device, &base)?;
        let check = counterfactual::check(evidence.bound_by, &all);
        (all, check)
    } else {
        (Vec::new(), None)
    };
    Ok(Explanation {
        arm: evidence.arm.to_string(),
        simulated: evidence.was_simulated,
        bound_by: evidence.bound_by.to_string(),
        time,
        held_back,
        walls,
        counterfactuals,
        check,
        largest_kernels: evidence.largest_kernels.clone(),
    })
}
