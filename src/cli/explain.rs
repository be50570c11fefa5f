//! `inferwall explain RUN`: why the arms of a results folder came out as they did.

use std::path::PathBuf;

use clap::Args;

use super::output;
use crate::engine::device::sim::SimDevice;
use crate::explain::{compare, run, text};
use crate::report::format::Format;
use crate::results::RunResults;
use crate::{Error, Result, report};

#[derive(Debug, Args)]
pub struct ExplainFlags {
    /// Folder of a run: the one with run.json in it
    #[arg(value_name = "RUN")]
    run: PathBuf,

    /// Only this arm
    #[arg(long, value_name = "NAME")]
    arm: Option<String>,

    /// The simulated device that stands for the run's own, as in sim:h100 or sim:custom:...
    #[arg(long, value_name = "DEVICE")]
    sim: Option<String>,

    /// Leave out the runs in which one resource at a time is doubled
    #[arg(long)]
    no_counterfactuals: bool,

    /// Set measured beside simulated for each arm
    #[arg(long)]
    compare_sim: bool,

    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
}

impl ExplainFlags {
    /// # Errors
    /// A folder that is none of a run, or is damaged, a model that is no longer there.
    pub fn run(self) -> Result<()> {
        if self.format == Format::Csv && !self.compare_sim {
            return Err(Error::invalid(
                "an explanation is text: it has no CSV form",
                "take --format table, md or json; the numbers are in summary.csv and steps.csv",
            ));
        }
        let results = RunResults::read(&self.run)?;
        results.require_rows()?;
        for warning in &results.record.warnings {
            output::warning(warning);
        }
        let title = format!("{}\n\n", report::overview::title(&results));
        if self.sim.is_none() && !results.has_roofs() {
            results.arms().into_iter().try_for_each(|arm| run::require_steps(&results, arm))?;
            output::note("this device has no roofs: only what the steps themselves show");
            return output::data(&format!("{title}{}", report::why::render(&results, self.format)?));
        }
        let device = self.sim.as_deref().map(SimDevice::parse).transpose()?;
        if self.compare_sim {
            return self.compare(&results, device.as_ref());
        }
        let explanations =
            run::explain_run(&results, device.as_ref(), self.arm.as_deref(), !self.no_counterfactuals)?;
        if self.format == Format::Json {
            return json(&explanations);
        }
        let mut text = title + &report::why::render(&results, self.format)?;
        for explanation in &explanations {
            text += &format!("\n{}: bound by {}\n", explanation.arm, explanation.bound_by);
            for line in text::lines(explanation) {
                text += &format!("  - {line}\n");
            }
        }
        output::data(&text)
    }

    fn compare(&self, results: &RunResults, device: Option<&SimDevice>) -> Result<()> {
        let all = compare::compare(results, device, self.arm.as_deref())?;
        if self.format == Format::Json {
            return json(&all.rows);
        }
        output::note(&format!("simulated on {}", all.devices_in_words()));
        output::data(&report::compare::draw(&all.rows, self.format)?)
    }
}

fn json(value: &impl serde::Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(value)
        .map_err(|error| Error::failed(format!("cannot write json: {error}"), "try --format table"))?;
    output::data(&(text + "\n"))
}
