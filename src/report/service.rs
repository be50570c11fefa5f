//! How a run served its requests beside each other: interference, fairness, what a victim of an injection saw, and the
//! cold start that no row holds. From checks.csv, populations.csv and cold.csv; each figure is the median over an arm's repeats.

use super::format::Format;
use super::table;
use crate::Result;
use crate::measure::summary::Summary;
use crate::numbers::{self, optional, percent};
use crate::results::RunResults;

/// The population that says what a stream's reader lives through while prompts are injected.
const VICTIMS: &str = "victim_window_itl";

/// How requests were served beside each other, and the cold start: text with tables.
///
/// # Errors
/// A fault of the program alone.
pub fn render(results: &RunResults, format: Format) -> Result<String> {
    let mut text = String::new();
    let probed = results.populations.iter().any(|row| row.population == VICTIMS);
    let rows: Vec<Vec<String>> = results.arms().into_iter().map(|arm| row(results, arm, probed)).collect();
    if !results.checks.is_empty() {
        let mut header = vec!["arm", "interference", "Jain", "longest wait ms", "overtaken"];
        if probed {
            header.extend(["victims' gaps in window", "p50 ms", "p99 ms", "max ms"]);
        }
        let right: Vec<usize> = (1..header.len()).collect();
        text += "How requests were served beside each other:\n\n";
        text += &table::render(format, &header, &rows, &right)?;
        text += "\n`interference`: mean gap between tokens in steps with a prefill over without, minus 1; `Jain`: index of \
                 slowdown, 1 is even; `overtaken`: by a request due later\n";
    }
    text += &cold(results);
    Ok(text)
}

/// What the first requests after loading a model saw, beside the warm rows of the same arm: once a model. Times to first
/// token hold the wait for other requests, so they stand beside the warm ones only where those were as many.
fn cold(results: &RunResults) -> String {
    let mut text = String::new();
    for cold in results.cold.iter().filter(|row| row.after_load) {
        let warm = |value: fn(&Summary) -> Option<f64>| optional(results.median(&cold.arm, value));
        let alike = results.of_arm(&cold.arm).all(|summary| summary.requests == cold.requests);
        text += &format!(
            "\nCold, and in no row (cold.csv has every arm): the first round of {} after loading {}, {} requests: first \
             step {} ms, steps p50 {} and at most {} ms",
            cold.arm,
            cold.model,
            cold.requests,
            optional(cold.first_step_ms),
            optional(cold.step_ms_p50),
            optional(cold.step_ms_max),
        );
        if alike {
            text += &format!(
                ", TTFT p50 {} and at most {} ms",
                optional(cold.ttft_p50_ms),
                optional(cold.ttft_max_ms)
            );
        }
        text += &format!("; warm: step p50 {} ms", warm(|row| row.step_ms_p50));
        if alike {
            text += &format!(", TTFT p50 {} ms", warm(|row| row.ttft_p50_ms));
        }
        text += ".\n";
    }
    text
}

fn row(results: &RunResults, arm: &str, probed: bool) -> Vec<String> {
    let check = |name: &str| {
        let of_arm = results.checks.iter().filter(|row| row.arm == arm && row.check == name);
        numbers::median(of_arm.filter_map(|row| row.value))
    };
    let mut cells = vec![
        arm.to_string(),
        optional(check("interference_factor")),
        optional(check("jain_slowdown")),
        optional(check("max_wait_ms")),
        percent(check("overtaken_share")),
    ];
    if probed {
        let of_arm = || results.populations.iter().filter(|row| row.arm == arm && row.population == VICTIMS);
        let n = of_arm().map(|row| row.n).min().unwrap_or(0);
        cells.push(n.to_string());
        cells.push(optional(numbers::median(of_arm().filter_map(|row| row.p50_ms))));
        let p99_ms = numbers::median(of_arm().filter_map(|row| row.p99_ms));
        cells.push(optional(p99_ms.filter(|_| crate::measure::quantile::supported(n, 0.99))));
        cells.push(optional(numbers::median(of_arm().filter_map(|row| row.max_ms))));
    }
    cells
}
