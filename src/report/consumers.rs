//! The largest consumers of a step, from the kernels of a traced pass.

use super::format::Format;
use super::table;
use crate::Result;
use crate::measure::kernels::{BETWEEN, dominant};
use crate::measure::rows::KernelRow;
use crate::numbers::{DASH, bytes, number, percent};
use crate::results::LARGEST_KERNELS;
use crate::results::RunResults;

const HEADER: [&str; 10] =
    ["arm", "step", "kernel", "launches", "ms", "of step", "bytes", "per s", "floor ms", "of floor"];
const RIGHT: [usize; 7] = [3, 4, 5, 6, 7, 8, 9];

/// `None` for a run that was not traced.
///
/// # Errors
/// A fault of the program alone.
pub fn render(results: &RunResults, format: Format) -> Result<Option<String>> {
    let mut rows = Vec::new();
    for arm in results.arms() {
        let all = dominant(&results.kernels, arm);
        let largest = results.largest_kernels(arm);
        let Some(first) = largest.first() else { continue };
        let step_ms: f64 = all.iter().map(|row| row.time_ms).sum();
        let between: f64 = all.iter().filter(|row| row.kernel == BETWEEN).map(|row| row.time_ms).sum();
        let rest = step_ms - between - largest.iter().map(|row| row.time_ms).sum::<f64>();
        let others = all.len() - largest.len() - usize::from(between > 0.0);
        let mut push = |name: &str, kernel: &str, time_ms: f64, row: Option<&KernelRow>| {
            let floor = row.filter(|_| results.has_roofs());
            let per_s = row.filter(|row| row.bytes > 0.0).map(|row| row.bytes / row.time_ms * 1e3);
            rows.push(vec![
                name.to_string(),
                first.kind.clone(),
                kernel.to_string(),
                row.map_or(DASH.to_string(), |row| number(row.launches)),
                number(time_ms),
                percent((step_ms > 0.0).then(|| time_ms / step_ms)),
                row.map_or(DASH.to_string(), |row| bytes(row.bytes)),
                per_s.filter(|rate| rate.is_finite()).map_or(DASH.to_string(), bytes),
                floor.map_or(DASH.to_string(), |row| number(row.floor_ms)),
                percent(floor.and_then(|row| row.of_floor)),
            ]);
        };
        for row in &largest {
            push(arm, &row.kernel, row.time_ms, Some(row));
        }
        if others > 0 {
            push(arm, &format!("({others} others)"), rest, None);
        }
        push(arm, BETWEEN, between, None);
    }
    if rows.is_empty() {
        return Ok(None);
    }
    let table = table::render(format, &HEADER, &rows, &RIGHT)?;
    Ok(Some(format!(
        "The {LARGEST_KERNELS} largest consumers of a step, means over the steps of a traced pass, which is none of the measured ones. A \
         kernel may start while the one in front of it still runs: its time here begins where that one ended, so that times add \
         up to the step. Its floor is what its own bytes and FLOPs take at the measured ceilings; data still in a cache can beat \
         it:\n\n{table}"
    )))
}
