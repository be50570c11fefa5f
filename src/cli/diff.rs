//! `inferwall diff`: two results, metric by metric, with intervals and verdicts.

use std::path::PathBuf;

use clap::Args;

use super::output;
use crate::measure::compare::{self, Comparison, DiffRow};
use crate::measure::verdict::{NO_CHANGE_BAND, NOISE_FLOOR, Verdict};
use crate::numbers::{DASH, number};
use crate::report::format::Format;
use crate::report::table;
use crate::{Error, Result, paths};

#[derive(Debug, Args)]
pub struct DiffFlags {
    /// summary.csv, requests.csv, a run folder, JSON rows, or the JSON of `vllm bench serve --save-result`
    before: PathBuf,

    /// The same, after the change
    after: PathBuf,

    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,

    /// Exit with 1 if any metric of any arm came out so: "regressed", "improved", "within noise", "no change" or "not told apart"; with 3 if all have too few repeats
    #[arg(long, value_name = "VERDICT")]
    fail_on: Option<String>,
}

/// What to do about verdicts that few repeats do not allow, before the rows that bear them; `None` where there are none.
fn too_few_repeats(rows: &[DiffRow]) -> Option<String> {
    let count = rows.iter().filter(|row| row.verdict == Verdict::TooFewRepeats).count();
    (count > 0).then(|| {
        format!(
            "hint: {count} of {} rows say `too few repeats`: a change needs two repeats or more on each side to be told \
             from noise, four to be told among all metrics; run both again with --repeats 5",
            rows.len()
        )
    })
}

impl DiffFlags {
    /// # Errors
    /// A file that cannot be read or has no arm in common with the other; 1 or 3 by `--fail-on`.
    pub fn run(self) -> Result<()> {
        let fail_on = self.fail_on.as_deref().map(str::parse::<Verdict>).transpose()?;
        let comparison = compare::compare(&compare::read(&self.before)?, &compare::read(&self.after)?)?;
        if paths::same(&self.before, &self.after) {
            output::warning(&format!("{} is compared with itself", self.before.display()));
        }
        for warning in &comparison.warnings {
            output::warning(warning);
        }
        // Before the rows, which may be many.
        if let Some(hint) = too_few_repeats(&comparison.rows) {
            output::note(&hint);
        }
        output::data(&match self.format {
            Format::Json => compare::to_json(&comparison.rows)? + "\n",
            Format::Csv => compare::to_csv(&comparison.rows)?,
            format => draw(format, &comparison.rows)? + &notes(&comparison),
        })?;
        match fail_on {
            Some(verdict) if comparison.has(verdict) => {
                let failing: Vec<String> = comparison
                    .rows
                    .iter()
                    .filter(|row| row.verdict == verdict)
                    .map(|row| format!("{} {}", row.arm, row.metric))
                    .collect();
                Err(Error::failed(
                    format!("{verdict}: {}", failing.join(", ")),
                    "--fail-on asked for this; the table has the intervals",
                ))
            }
            Some(_) if comparison.rows.iter().all(|row| row.verdict == Verdict::TooFewRepeats) => {
                Err(Error::undecided(
                    "--fail-on had nothing to go by: all rows say `too few repeats`",
                    "run both again with --repeats 5",
                ))
            }
            _ => Ok(()),
        }
    }
}

/// What the verdicts mean, and which side is simulated.
fn notes(comparison: &Comparison) -> String {
    let mut text = String::new();
    for (side, devices) in ["before", "after"].into_iter().zip(&comparison.simulated) {
        if !devices.is_empty() {
            text += &format!("\n{side} is SIMULATED: {}", devices.join(", "));
        }
    }
    format!(
        "{text}\n`no change`: the whole interval lies within {:.0} % to either side; `within noise`: a change that may be \
         below {:.0} %; `not told apart`: these repeats cannot say\n",
        NO_CHANGE_BAND * 100.0,
        NOISE_FLOOR * 100.0
    )
}

fn p_value(p: f64) -> String {
    if p < 0.001 { "<0.001".to_string() } else { format!("{p:.3}") }
}

fn draw(format: Format, rows: &[DiffRow]) -> Result<String> {
    let percent =
        |value: Option<f64>| value.map_or(DASH.to_string(), |value| format!("{:+.1} %", value * 100.0));
    let cells: Vec<Vec<String>> = rows
        .iter()
        .map(|row| {
            let interval = match (row.low, row.high) {
                (Some(_), Some(_)) => format!("{} to {}", percent(row.low), percent(row.high)),
                _ => DASH.to_string(),
            };
            vec![
                row.arm.clone(),
                row.metric.to_string(),
                number(row.before),
                number(row.after),
                percent(row.change),
                interval,
                row.p.map_or(DASH.to_string(), p_value),
                row.effect_size.map_or(DASH.to_string(), number),
                row.verdict.to_string(),
            ]
        })
        .collect();
    let header = ["arm", "metric", "before", "after", "change", "95 % interval", "p", "effect", "verdict"];
    table::render(format, &header, &cells, &[2, 3, 4, 5, 6, 7])
}
