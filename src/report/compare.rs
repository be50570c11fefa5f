//! Measured beside simulated, as a table.

use super::format::Format;
use super::table;
use crate::Result;
use crate::explain::compare::{SimComparison, compare};
use crate::numbers::{optional, percent};
use crate::results::RunResults;

/// The comparison as a section of a report. What cannot be simulated is said in a line: a report must not fail for it.
pub fn section(results: &RunResults, format: Format) -> String {
    let rendered = compare(results, None, None).and_then(|all| {
        let table = draw(&all.rows, format)?;
        Ok(format!("Measured beside simulated ({}):\n\n{table}", all.devices_in_words()))
    });
    match rendered {
        Ok(text) => text,
        Err(error) => format!("Measured beside simulated: {error}\n"),
    }
}

/// A row a figure; plain numbers in csv.
///
/// # Errors
/// Never on rows of [`compare`].
pub fn draw(rows: &[SimComparison], format: Format) -> Result<String> {
    let plain = format == Format::Csv;
    let shown = |value: Option<f64>| {
        if plain { value.map_or(String::new(), |value| value.to_string()) } else { optional(value) }
    };
    let cells: Vec<Vec<String>> = rows
        .iter()
        .map(|row| {
            vec![
                row.arm.clone(),
                row.metric.to_string(),
                shown(row.measured),
                shown(row.simulated),
                if plain { shown(row.error) } else { percent(row.error) },
            ]
        })
        .collect();
    table::render(format, &["arm", "metric", "measured", "simulated", "error"], &cells, &[2, 3, 4])
}
