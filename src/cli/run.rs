//! `inferwall run`: every arm of a declared experiment.

use clap::Args;

use super::execute::{self, Request};
use super::flags::{ExperimentsFlag, PartFlags, PlanFlags, RunOutputFlags};
use super::usage::NO_EXPERIMENT;
use crate::experiment::plan::PlanOptions;
use crate::{Error, Result};

#[derive(Debug, Args)]
pub struct RunFlags {
    /// Name of the experiment (may be left out with --resume)
    experiment: Option<String>,

    /// The swept knob's values, in place of those declared: a,b,c or FROM..TO*FACTOR
    #[arg(long, value_name = "A,B,C", allow_negative_numbers = true)]
    values: Option<String>,

    /// Limits in ms, for example ttft_p99=500,itl_p99=100: fills the column goodput
    #[arg(long, value_name = "LIMITS")]
    slo: Option<String>,

    #[command(flatten)]
    experiments: ExperimentsFlag,

    #[command(flatten)]
    plan: PlanFlags,

    #[command(flatten)]
    part: PartFlags,

    #[command(flatten)]
    output: RunOutputFlags,
}

impl RunFlags {
    /// # Errors
    /// No experiment; as [`execute::execute`].
    pub fn run(self) -> Result<()> {
        let mut options = execute::recorded_options(&self.output)?.unwrap_or_default();
        match &self.experiment {
            Some(experiment) => options.experiment.clone_from(experiment),
            None if !options.experiment.is_empty() => {}
            None => {
                return Err(Error::invalid("no experiment was named", NO_EXPERIMENT));
            }
        }
        self.lay_over(&mut options)?;
        execute::execute(&Request { options, output: self.output })
    }

    fn lay_over(&self, options: &mut PlanOptions) -> Result<()> {
        options.values = self.values.clone().or(options.values.take());
        options.slo = self.slo.clone().or(options.slo.take());
        options.experiments_file = self.experiments.experiments.clone().or(options.experiments_file.take());
        self.plan.lay_over(options);
        self.part.lay_over(options)
    }
}
