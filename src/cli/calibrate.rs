//! `inferwall calibrate RUN`: the parameters of a simulated device from the steps of a run.

use std::path::PathBuf;

use clap::Args;

use super::output;
use crate::numbers::number;
use crate::report::format::Format;
use crate::report::table;
use crate::results::RunResults;
use crate::simulation::calibrate::{Residuals, calibrate};
use crate::{Error, Result};

#[derive(Debug, Args)]
pub struct CalibrateFlags {
    /// Folder of a run: the one with run.json in it
    #[arg(value_name = "RUN")]
    run: PathBuf,

    /// Only the steps of this arm
    #[arg(long, value_name = "NAME")]
    arm: Option<String>,

    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
}

impl CalibrateFlags {
    /// # Errors
    /// A folder that is none of a run, or is damaged; steps that determine no parameter.
    pub fn run(self) -> Result<()> {
        let results = RunResults::read(&self.run)?;
        let arms = results.arms_named(self.arm.as_deref())?;
        if !results.record.like_ceilings(&arms) {
            output::note(
                "the arms differ in model, threads or arithmetic: one set of parameters is fitted to all of them, \
                 from the median of their ceilings; --arm NAME fits one",
            );
        }
        let chosen = |arm: &str| self.arm.as_deref().is_none_or(|only| arm == only);
        let steps: Vec<_> = results.steps.iter().filter(|step| chosen(&step.arm)).cloned().collect();
        let Some(ceilings) = results.record.typical_ceilings(chosen) else {
            return Err(Error::invalid(
                format!("{}: {} has no ceilings to begin from", self.run.display(), results.record.device.id),
                "calibrate on a run on a CPU, a GPU or sim:GPU",
            ));
        };
        let calibration = calibrate(&steps, (ceilings.read_bytes_per_s, ceilings.flops_per_s))
            .map_err(|error| error.context(self.run.display()))?;
        let device = calibration.device(results.record.device.memory_bytes);
        if self.format == Format::Json {
            let all = serde_json::json!({
                "device": device,
                "measured_on": results.record.device.name,
                "simulated": results.record.device.simulated,
                "calibration": calibration,
            });
            let text = serde_json::to_string_pretty(&all).map_err(|error| {
                Error::failed(format!("cannot write json: {error}"), "try --format table")
            })?;
            return output::data(&(text + "\n"));
        }
        let rows: Vec<Vec<String>> = calibration
            .parameters
            .iter()
            .map(|fitted| {
                vec![
                    fitted.parameter.name().to_string(),
                    if self.format == Format::Csv { fitted.value.to_string() } else { number(fitted.value) },
                    match fitted.relative_error {
                        Some(error) => format!("{:.1} %", error * 100.0),
                        None => "not determined".to_string(),
                    },
                    fitted.parameter.meaning().to_string(),
                ]
            })
            .collect();
        let mut text =
            table::render(self.format, &["parameter", "value", "standard error", "meaning"], &rows, &[1, 2])?;
        if self.format != Format::Csv {
            let line = |name: &str, residuals: &Residuals| {
                format!(
                    "{name}: {} steps, median error {:.1} %, p90 {:.1} %, bias {:+.1} %\n",
                    residuals.steps,
                    residuals.median * 100.0,
                    residuals.p90 * 100.0,
                    residuals.bias * 100.0
                )
            };
            text += "\n";
            text += &line("fitted on", &calibration.fitted);
            text += &line("held back", &calibration.held_out);
            text += &line("  decode", &calibration.held_out_decode);
            text += &line("  with a prompt", &calibration.held_out_prefill);
            // What a step moves depends on how often states are written, which a device of fitted figures does not know.
            let interval = results.record.arms.iter().filter_map(|arm| arm.engine.state_write_interval).max();
            let set = interval.filter(|&tokens| tokens > 1);
            let set = set.map_or(String::new(), |tokens| format!(" --set state_write_interval={tokens}"));
            text += &format!("\n--device {device}{set}\n");
        }
        output::data(&text)
    }
}
