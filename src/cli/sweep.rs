//! `inferwall sweep`: knobs crossed or paired, with no experiment declared.

use clap::Args;

use super::execute::{self, Request};
use super::flags::{PartFlags, PlanFlags, RunOutputFlags};
use crate::experiment::knobs;
use crate::experiment::sweep::SWEEP;
use crate::{Error, Result};

#[derive(Debug, Args)]
pub struct SweepFlags {
    /// A knob to sweep; several are crossed
    #[arg(long, value_name = "KNOB")]
    knob: Vec<String>,

    /// Values of the knob before it: a,b,c, FROM..TO, FROM..TO+STEP or FROM..TO*FACTOR
    #[arg(long, value_name = "A,B,C", allow_negative_numbers = true)]
    values: Vec<String>,

    /// Pair the knobs' values instead of crossing them
    #[arg(long)]
    zip: bool,

    /// Limits in ms, for example ttft_p99=500,itl_p99=100: fills the column goodput
    #[arg(long, value_name = "LIMITS")]
    slo: Option<String>,

    #[command(flatten)]
    plan: PlanFlags,

    #[command(flatten)]
    part: PartFlags,

    #[command(flatten)]
    output: RunOutputFlags,
}

impl SweepFlags {
    /// # Errors
    /// Knobs and values that do not pair; as [`execute::execute`].
    pub fn run(self) -> Result<()> {
        let mut options = execute::recorded_options(&self.output)?.unwrap_or_default();
        options.experiment = SWEEP.to_string();
        // A name that no knob has is what is wrong, whatever else is.
        self.knob.iter().try_for_each(|knob| knobs::find(knob).map(|_| ()))?;
        if self.knob.len() != self.values.len() {
            return Err(Error::invalid(
                format!("{} --knob and {} --values were given", self.knob.len(), self.values.len()),
                "give each --knob its own --values, for example --knob max_num_seqs --values 1..64*2",
            ));
        }
        if !self.knob.is_empty() {
            options.sweep = self.knob.iter().cloned().zip(self.values.iter().cloned()).collect();
        }
        if options.sweep.is_empty() {
            return Err(Error::invalid(
                "no knob was given",
                "for example `inferwall sweep --knob max_num_seqs --values 1,4,16`",
            ));
        }
        options.zip |= self.zip;
        options.slo = self.slo.or(options.slo.take());
        self.plan.lay_over(&mut options);
        self.part.lay_over(&mut options)?;
        execute::execute(&Request { options, output: self.output })
    }
}
