//! The comparison as a table a person reads, as csv and as json.

use comfy_table::presets::ASCII_MARKDOWN;
use comfy_table::{CellAlignment, Table};

use super::mechanisms::Mechanism;
use super::{Compared, Mark, PartResult, Verdict, reasons};
use crate::Result;

/// A number with the digits its size deserves.
pub fn number(value: f64) -> String {
    let size = value.abs();
    if size >= 1000.0 || value == value.round() {
        format!("{value:.0}")
    } else if size >= 100.0 {
        format!("{value:.1}")
    } else if size >= 10.0 {
        format!("{value:.2}")
    } else {
        format!("{value:.3}")
    }
}

fn percent(error: f64) -> String {
    format!("{:+.1} %", error * 100.0)
}

/// How many judged cells hold, and the median distance, by mark. Cells that a parameter was chosen on are never judged.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Total {
    pub mark: Mark,
    pub cells: usize,
    pub judged: usize,
    pub holds: usize,
    /// Distances from the published figures, as shares of them.
    pub median_error: f64,
    pub worst_judged_error: f64,
}

pub fn totals(cells: &[Compared]) -> Vec<Total> {
    [Mark::Unseen, Mark::FormSeen, Mark::Calibrated]
        .into_iter()
        .filter_map(|mark| {
            let of_mark = || cells.iter().filter(move |cell| cell.cell.mark == mark && cell.error.is_some());
            let judged = || of_mark().filter(|cell| is_judged(cell));
            let mut errors: Vec<f64> = of_mark().filter_map(|cell| cell.error).map(f64::abs).collect();
            errors.sort_by(f64::total_cmp);
            Some(Total {
                mark,
                cells: errors.len(),
                judged: judged().count(),
                holds: judged().filter(|cell| cell.verdict == Verdict::Holds).count(),
                median_error: crate::measure::quantile::quantile(&errors, 0.5)?,
                worst_judged_error: judged().filter_map(|cell| cell.error).map(f64::abs).fold(0.0, f64::max),
            })
        })
        .collect()
}

fn is_judged(compared: &Compared) -> bool {
    compared.cell.mark != Mark::Calibrated
        && matches!(compared.verdict, Verdict::Holds | Verdict::DoesNotHold)
}

fn total_line(totals: &[Total]) -> String {
    totals
        .iter()
        .map(|total| {
            let judged = if total.judged == 0 {
                "none judged".to_string()
            } else {
                format!("{} of {} judged hold", total.holds, total.judged)
            };
            format!(
                "{}: {} cells, {judged}, median error {:.1} %",
                total.mark.as_str(),
                total.cells,
                total.median_error * 100.0
            )
        })
        .collect::<Vec<_>>()
        .join("; ")
}

/// A part as markdown: cell by cell, totals, reasons.
pub fn markdown(part: &PartResult) -> String {
    let mut table = Table::new();
    table.load_preset(ASCII_MARKDOWN);
    table.set_header(["arm", "metric", "published", "simulated", "error", "gate", "verdict", "cell is"]);
    for column in 2..=4 {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    for compared in &part.cells {
        let cell = &compared.cell;
        // Calibrated cells are shown with their distance and not judged.
        let verdict = match (cell.mark, compared.verdict) {
            (Mark::Calibrated, Verdict::Holds | Verdict::DoesNotHold) => "(fitted)",
            (_, verdict) => verdict.as_str(),
        };
        table.add_row([
            cell.arm.clone(),
            cell.metric.clone(),
            number(cell.published),
            compared.simulated.map_or("-".into(), number),
            compared.error.map_or("-".into(), percent),
            if cell.gate.is_empty() { "-".into() } else { cell.gate.clone() },
            verdict.into(),
            cell.mark.as_str().into(),
        ]);
    }
    let mut text = format!("## Part {}, simulated\n\n{table}\n\n", part.part);
    text += &format!("Total: {}.\n", total_line(&totals(&part.cells)));
    if let Some(rig) = &part.other_rig {
        // Reasons and artefacts are the series' rig's.
        text += &format!(
            "\nThe published cells are of the series' rig and {rig} is another: the distances say how far the two are apart, \
             and nothing is judged.\n"
        );
        return text;
    }
    let reasons = reasons_of(part);
    if !reasons.is_empty() {
        text += "\nWhy cells differ:\n\n";
        for line in reasons {
            text += &format!("- {line}\n");
        }
    }
    let artefacts = reasons::artefacts(part.part);
    if !artefacts.is_empty() {
        text += "\nKnown artefacts of this part:\n\n";
        for artefact in artefacts {
            text += &format!("- {artefact}\n");
        }
    }
    text
}

/// The reasons of the cells that are outside their gate, or far off without one, each with its cells.
fn reasons_of(part: &PartResult) -> Vec<String> {
    let far = |cell: &&Compared| {
        cell.cell.mark != Mark::Calibrated
            && (cell.verdict == Verdict::DoesNotHold
                || (cell.verdict == Verdict::Printed && cell.error.is_some_and(|error| error.abs() > 0.10)))
    };
    let mut lines = Vec::new();
    let mut unexplained = Vec::new();
    let mut seen: Vec<(&str, Vec<String>)> = Vec::new();
    for compared in part.cells.iter().filter(far) {
        let name = format!("{} {}", compared.cell.arm, compared.cell.metric);
        match (seen.iter_mut().find(|(key, _)| *key == compared.cell.reason), &*compared.cell.reason) {
            (_, "") => unexplained.push(name),
            (Some((_, names)), _) => names.push(name),
            (None, key) => seen.push((key, vec![name])),
        }
    }
    for (key, names) in seen {
        lines.push(format!("{} ({})", reasons::text(key).unwrap_or(key), names.join("; ")));
    }
    if !unexplained.is_empty() {
        lines.push(format!("no reason known: {}", unexplained.join("; ")));
    }
    lines
}

/// The mechanisms as markdown.
pub fn mechanisms_markdown(mechanisms: &[Mechanism]) -> String {
    let mut table = Table::new();
    table.load_preset(ASCII_MARKDOWN);
    table.set_header(["mechanism", "figure", "published", "with it", "without it"]);
    for mechanism in mechanisms {
        table.add_row([
            mechanism.name.to_string(),
            mechanism.figure.to_string(),
            mechanism.published.to_string(),
            mechanism.with.clone(),
            mechanism.without.clone(),
        ]);
    }
    format!("## Mechanisms, switched off one at a time (simulated)\n\n{table}\n")
}

/// All cells as csv: the columns of cells.csv, then simulated, error and verdict.
///
/// # Errors
/// Never on well-formed cells.
pub fn csv(parts: &[PartResult]) -> Result<String> {
    let failed = |error: &dyn std::fmt::Display| {
        crate::Error::failed(format!("cannot write the cells as csv: {error}"), "try --format json")
    };
    let mut writer = csv::Writer::from_writer(Vec::new());
    writer
        .write_record([
            "part",
            "arm",
            "metric",
            "published",
            "simulated",
            "error",
            "gate",
            "verdict",
            "mark",
            "reason",
        ])
        .map_err(|error| failed(&error))?;
    for compared in parts.iter().flat_map(|part| &part.cells) {
        let cell = &compared.cell;
        writer
            .write_record([
                cell.part.to_string(),
                cell.arm.clone(),
                cell.metric.clone(),
                cell.published.to_string(),
                compared.simulated.map_or(String::new(), |value| format!("{value}")),
                compared.error.map_or(String::new(), |value| format!("{value:.5}")),
                cell.gate.clone(),
                compared.verdict.as_str().to_string(),
                cell.mark.as_str().to_string(),
                cell.reason.clone(),
            ])
            .map_err(|error| failed(&error))?;
    }
    let bytes = writer.into_inner().map_err(|error| failed(&error))?;
    String::from_utf8(bytes).map_err(|error| failed(&error))
}

/// Totals of all parts in one table.
pub fn overview(parts: &[PartResult]) -> String {
    let mut table = Table::new();
    table.load_preset(ASCII_MARKDOWN);
    table.set_header(["part", "cells are", "cells", "judged", "hold", "median error", "worst judged error"]);
    for part in parts {
        for total in totals(&part.cells) {
            table.add_row([
                part.part.to_string(),
                total.mark.as_str().to_string(),
                total.cells.to_string(),
                if total.judged == 0 { "-".into() } else { total.judged.to_string() },
                if total.judged == 0 { "-".into() } else { total.holds.to_string() },
                format!("{:.1} %", total.median_error * 100.0),
                if total.judged == 0 {
                    "-".into()
                } else {
                    format!("{:.1} %", total.worst_judged_error * 100.0)
                },
            ]);
        }
    }
    format!("## All parts, simulated\n\n{table}\n\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::device::sim::SimDevice;
    use crate::simulation::reproduce::run_part;

    #[test]
    fn calibrated_cells_are_judged_nowhere() {
        let part = run_part(3, &SimDevice::parse("sim:series").unwrap(), 0).unwrap();
        let totals = totals(&part.cells);
        let calibrated = totals.iter().find(|total| total.mark == Mark::Calibrated).unwrap();
        assert_eq!((calibrated.judged, calibrated.holds), (0, 0));
        assert!(calibrated.cells > 0 && totals.iter().any(|total| total.judged > 0));
        assert!(total_line(&totals).contains("calibrated: ") && total_line(&totals).contains("none judged"));
    }

    #[test]
    fn cells_of_another_rig_are_not_judged() {
        for device in ["sim:h100", "sim:series:gb_per_s=900"] {
            let part = run_part(3, &SimDevice::parse(device).unwrap(), 0).unwrap();
            assert!(totals(&part.cells).iter().all(|total| total.judged == 0));
            let text = markdown(&part);
            assert!(
                text.contains(&format!("{device} is another")) && !text.contains("Why cells differ"),
                "{text}"
            );
        }
    }
}
