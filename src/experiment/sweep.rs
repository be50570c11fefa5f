//! The plan that options ask for, and what `sweep` and `saturate` have in place of a declared experiment.

use super::plan::{self, Plan, PlanOptions};
use super::spec::{self, Rig};
use crate::{Result, paths};

/// The experiment name of a sweep.
pub const SWEEP: &str = "sweep";

/// The experiment name of a search for the highest rate.
pub const SATURATE: &str = "saturate";

/// The load that both start from; any of it can be set.
const SPEC: &str = include_str!("sweep.toml");

/// Resolves the plan for a rig: of a declared experiment, or of the knobs to sweep.
///
/// # Errors
/// An experiment that is not declared; as [`plan::build`].
pub fn plan_of(options: &PlanOptions, rig: &Rig) -> Result<Plan> {
    if options.sweep.is_empty() || ![SWEEP, SATURATE].contains(&options.experiment.as_str()) {
        let file = options.experiments_file.as_ref().map(|file| paths::find(&options.folder, file));
        let experiments = spec::load(file.as_deref())?;
        return plan::build(spec::find(&experiments, &options.experiment)?, options, rig);
    }
    let experiments = spec::parse(SPEC, "the sweep's own load")?;
    plan::build_sweep(spec::find(&experiments, SWEEP)?, options, rig)
}
