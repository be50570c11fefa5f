//! report.md.

use super::format::Format;
use super::{export, overview};
use crate::Result;
use crate::results::RunResults;

/// The whole report.
///
/// # Errors
/// A fault of the program alone.
pub fn report(results: &RunResults) -> Result<String> {
    let record = &results.record;
    let body = export::text(results, Format::Md)?;
    // The first line of the text is its title.
    let rest = body.split_once('\n').map_or("", |(_, rest)| rest);
    let mut notes = vec![
        format!("command: `inferwall {}`", record.command.join(" ")),
        format!("build {}, started {}", record.build, record.started),
    ];
    if !record.device.chosen_because.is_empty() {
        notes.push(record.device.chosen_because.clone());
    }
    if !record.forced.is_empty() {
        notes.push(format!("RESUMED WITH --force although these differed: {}", record.forced.join("; ")));
    }
    notes.extend(record.warnings.iter().map(|warning| format!("warning: {warning}")));
    let notes: String = notes.iter().map(|note| format!("- {note}\n")).collect();
    Ok(format!("# {}\n\n{}\n\n{notes}{rest}", overview::title(results), record.plan.question))
}
