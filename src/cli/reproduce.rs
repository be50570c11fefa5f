//! `inferwall reproduce`: the series' published cells beside its simulated rig.

use std::time::Instant;

use clap::Args;

use super::output;
use crate::engine::device::Device;
use crate::engine::device::sim::SimDevice;
use crate::report::format::Format;
use crate::simulation::reproduce::{self, Mark, PARTS, PartResult, Verdict, mechanisms, report};
use crate::{Error, Result};

#[derive(Debug, Args)]
pub struct ReproduceFlags {
    /// A part of the series: 1, 2, 3, 5, 6 or 7; all of them when left out
    #[arg(value_name = "PART")]
    part: Option<u32>,

    /// The simulated rig; another, or other figures as in sim:series:gb_per_s=600, is set beside the cells and not judged
    #[arg(long, value_name = "DEVICE", default_value = "sim:series")]
    device: String,

    /// Seed of arrivals and lengths; the series used 0
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,

    /// Only cells that are predictions
    #[arg(long)]
    unseen: bool,

    /// Leave out the mechanisms that are switched off one at a time
    #[arg(long)]
    no_mechanisms: bool,

    /// Exit with 1 if a judged cell that was not calibrated on is outside its gate, with 3 if none is judged
    #[arg(long)]
    check: bool,

    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
}

impl ReproduceFlags {
    /// # Errors
    /// A part or device that is wrong; by `--check` a judged cell outside its gate, or none that is judged.
    pub fn run(self) -> Result<()> {
        let device = SimDevice::parse(&self.device)?;
        if self.check && device.info().id != "sim:series" {
            return Err(Error::invalid(
                format!(
                    "{} is not the series' rig: nothing is judged that --check could ask of",
                    device.info().id
                ),
                "leave --check or --device out",
            ));
        }
        let parts = match self.part {
            None => PARTS.to_vec(),
            Some(part) if PARTS.contains(&part) => vec![part],
            Some(part) => {
                return Err(Error::invalid(
                    format!("part {part} has no experiment that the simulated rig can run"),
                    "parts: 1, 2, 3, 5, 6, 7 (4 looks inside attention, 8 compares kernels, 9 is a CPU)",
                ));
            }
        };
        let mut results = Vec::new();
        for &part in &parts {
            crate::interrupt::check()?;
            let began = Instant::now();
            let mut result = reproduce::run_part(part, &device, self.seed)?;
            let took_s = began.elapsed().as_secs_f64();
            output::note(&format!(
                "part {part}: {:.0} s simulated in {took_s:.2} s ({:.0} times as fast)",
                result.simulated_s,
                result.simulated_s / took_s.max(1e-9)
            ));
            if self.unseen {
                result.cells.retain(|cell| cell.cell.mark == Mark::Unseen);
            }
            results.push(result);
        }
        let switched = if self.no_mechanisms || self.format == Format::Csv {
            Vec::new()
        } else {
            mechanisms::run(&parts, &device, self.seed)?
        };
        output::data(&self.rendered(&results, &switched)?)?;
        if self.check { check(&results) } else { Ok(()) }
    }

    fn rendered(&self, results: &[PartResult], switched: &[mechanisms::Mechanism]) -> Result<String> {
        match self.format {
            Format::Csv => report::csv(results),
            Format::Json => {
                let all = serde_json::json!({
                    "simulated": true,
                    "device": self.device,
                    "seed": self.seed,
                    "parts": results,
                    "mechanisms": switched,
                });
                serde_json::to_string_pretty(&all)
                    .map(|text| text + "\n")
                    .map_err(|error| Error::failed(format!("cannot write json: {error}"), "try --format csv"))
            }
            Format::Table | Format::Md => {
                let mut text: String = results.iter().map(|part| report::markdown(part) + "\n").collect();
                if results.len() > 1 {
                    text += &report::overview(results);
                }
                if !switched.is_empty() {
                    text += &report::mechanisms_markdown(switched);
                }
                Ok(text)
            }
        }
    }
}

/// What `--check` makes of the cells.
fn check(results: &[PartResult]) -> Result<()> {
    let cells = results.iter().flat_map(|part| &part.cells);
    let judged: Vec<Verdict> = cells
        .filter(|cell| cell.cell.mark != Mark::Calibrated && cell.verdict != Verdict::Printed)
        .map(|cell| cell.verdict)
        .collect();
    let outside = judged.iter().filter(|verdict| **verdict != Verdict::Holds).count();
    if outside > 0 {
        return Err(Error::failed(
            format!("{outside} judged cells are outside their gates"),
            "each is marked `does not hold` in the table, with its reason below it",
        ));
    }
    if judged.is_empty() {
        return Err(Error::undecided(
            "none of these cells is judged",
            "nothing was found to hold or not to hold: take another part, or leave --unseen out",
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_check_of_no_judged_cell_is_neither_passed_nor_failed() {
        assert_eq!(check(&[]).unwrap_err().exit_code(), 3);
    }
}
