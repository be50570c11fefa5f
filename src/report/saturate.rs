//! What a search for the highest rate found: the rates tried, the answer, and how sure each judgement is.

use serde::Serialize;
use serde_json::json;

use super::format::Format;
use super::table;
use crate::measure::saturate::{CONFIDENCE, Judged, Judgement, Saturation};
use crate::measure::summary::Summary;
use crate::numbers::{DASH, median, number, optional};
use crate::results::csv;
use crate::workload::rate::Rate;
use crate::{Error, Result};

/// One rate that was tried. Latencies in milliseconds and `goodput` (completed requests a second that kept every limit) are
/// medians over the repeats, as in every other table; `confidence` is empty where no interval decided.
#[derive(Debug, Serialize)]
struct Row {
    rate: Rate,
    limits: &'static str,
    basis: &'static str,
    confidence: Option<f64>,
    repeats: usize,
    ttft_p99_ms: Option<f64>,
    itl_p99_ms: Option<f64>,
    goodput: Option<f64>,
    simulated: bool,
}

impl Row {
    fn of(judged: &Judged) -> Self {
        let median_of = |value: fn(&Summary) -> Option<f64>| median(judged.repeats.iter().filter_map(value));
        Self {
            rate: judged.rate,
            limits: if judged.judgement == Judgement::Keeps { "keeps" } else { "breaks" },
            basis: judged.basis(),
            confidence: judged.confidence(),
            repeats: judged.repeats.len(),
            ttft_p99_ms: median_of(|summary| summary.ttft_p99_ms),
            itl_p99_ms: median_of(|summary| summary.itl_p99_ms),
            goodput: judged.goodput(),
            simulated: judged.repeats.iter().any(|summary| summary.simulated),
        }
    }
}

/// The answer with the rates that were tried.
///
/// # Errors
/// A fault of the program alone.
pub fn render(format: Format, found: &Saturation) -> Result<String> {
    let rows: Vec<Row> = found.tried.iter().map(Row::of).collect();
    match format {
        Format::Json => {
            let one = |judged: &Option<Judged>| {
                judged.as_ref().map(|judged| {
                    json!({"rate": judged.rate, "certain": judged.certain, "confidence": judged.confidence(),
                           "basis": judged.basis(), "goodput": judged.goodput(),
                           "repeats": judged.repeats.len()})
                })
            };
            let answer = json!({"keeps": one(&found.keeps), "breaks": one(&found.breaks), "tried": rows,
                                "flood_throughput": found.flood_throughput, "simulated": rows.iter().any(|row| row.simulated)});
            let text = serde_json::to_string_pretty(&answer)
                .map_err(|error| Error::bug(format!("cannot write JSON: {error}")))?;
            Ok(text + "\n")
        }
        Format::Csv => csv::rows(&rows).map(|csv| csv.header + &csv.rows),
        Format::Table | Format::Md => {
            let header =
                ["rate /s", "limits", "decided by", "repeats", "TTFT p99 ms", "ITL p99 ms", "goodput /s"];
            let cells: Vec<Vec<String>> = rows.iter().map(cells).collect();
            let table = table::render(format, &header, &cells, &[0, 3, 4, 5, 6])?;
            Ok(simulated(found) + &table + &answer(found))
        }
    }
}

/// A line above the table, unless every figure was measured.
fn simulated(found: &Saturation) -> String {
    let repeats = found.tried.iter().flat_map(|judged| &judged.repeats);
    let device = repeats.filter(|summary| summary.simulated).map(|summary| &summary.device).next();
    device.map_or(String::new(), |device| format!("on {device} — SIMULATED\n\n"))
}

fn cells(row: &Row) -> Vec<String> {
    vec![
        number(row.rate.per_s()),
        row.limits.to_string(),
        row.basis.to_string(),
        row.repeats.to_string(),
        optional(row.ttft_p99_ms),
        optional(row.itl_p99_ms),
        optional(row.goodput),
    ]
}

fn answer(found: &Saturation) -> String {
    let sure = |judged: &Judged| match judged.confidence() {
        Some(confidence) => format!("with {} % confidence", confidence * 100.0),
        None if judged.certain && judged.basis() == "twofold" => "clear by a factor of two".to_string(),
        None if judged.unsustained => "not sustained".to_string(),
        None if judged.certain => "a request failed".to_string(),
        None => format!("by the means of {} repeats, not decided", judged.repeats.len()),
    };
    let kept =
        found.keeps.as_ref().map_or(format!("no rate that was tried keeps the limits ({DASH})"), |judged| {
            format!(
                "{} requests/s keep the limits ({}), goodput {}",
                judged.rate,
                sure(judged),
                optional(judged.goodput())
            )
        });
    let broken = found.breaks.as_ref().map_or("no rate that was tried breaks them".to_string(), |judged| {
        format!("{} break them ({})", judged.rate, sure(judged))
    });
    let flood = found.flood_throughput.map_or(String::new(), |per_s| {
        format!("; a flood completes {} requests/s, and none higher was tried", number(per_s))
    });
    format!(
        "\n{kept}; {broken}{flood}\nfigures are medians over the repeats, limits are judged by their means; `{} %`: one-sided, of the mean over repeats, shared out among the looks; `twofold`: one \
         repeat, clear of a limit by a factor of two; `by the means`: still open after the last repeat; `not sustained`: the \
         limits were kept only while requests still came in, faster than they were completed or too few of them to tell\n",
        CONFIDENCE * 100.0
    )
}
