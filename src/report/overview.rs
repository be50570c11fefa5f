//! The before/after table: a row an arm, each figure the median over its repeats, set against the baseline.

use super::format::Format;
use super::{limits, table};
use crate::Result;
use crate::hardware;
use crate::measure::quantile::supported;
use crate::measure::summary::Summary;
use crate::numbers::{DASH, number, optional, percent, ratio};
use crate::results::RunResults;
use crate::results::record::RunRecord;

const HEADER: [&str; 13] = [
    "arm", "req/s", "tok/s", "vs base", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "E2E p50", "running",
    "step p50", "of roof", "bound by",
];
/// Where `goodput` stands in a run with limits.
const GOODPUT_AT: usize = 2;

pub fn header(results: &RunResults) -> Vec<&'static str> {
    let mut header = HEADER.to_vec();
    if limits::set(results) {
        header.insert(GOODPUT_AT, "goodput");
    }
    header
}

pub fn rows(results: &RunResults) -> Vec<Vec<String>> {
    let baseline = results.baseline().map(str::to_string);
    let base_throughput =
        baseline.as_deref().and_then(|arm| results.median(arm, |summary| summary.output_throughput));
    results
        .arms()
        .into_iter()
        .map(|arm| {
            let median = |value: fn(&Summary) -> Option<f64>| results.median(arm, value);
            let requests: usize = results.of_arm(arm).map(|summary| summary.completed).max().unwrap_or(0);
            let tail = |value: fn(&Summary) -> Option<f64>| {
                if supported(requests, 0.99) { optional(median(value)) } else { DASH.to_string() }
            };
            let tokens =
                median(|summary| Some(summary.output_throughput? * summary.duration_s)).unwrap_or(0.0);
            let gaps = tokens as usize - (tokens as usize).min(requests);
            let throughput = median(|summary| summary.output_throughput);
            let change = if baseline.as_deref() == Some(arm) {
                "base".to_string()
            } else {
                ratio(throughput.zip(base_throughput).map(|(now, base)| now / base))
            };
            let mut cells = vec![
                arm.to_string(),
                optional(median(|summary| summary.request_throughput)),
                optional(throughput),
                change,
                optional(median(|summary| summary.ttft_p50_ms)),
                tail(|summary| summary.ttft_p99_ms),
                optional(median(|summary| summary.itl_p50_ms)),
                if supported(gaps, 0.99) {
                    optional(median(|summary| summary.itl_p99_ms))
                } else {
                    DASH.into()
                },
                optional(median(|summary| summary.e2el_p50_ms)),
                optional(median(|summary| summary.running_mean)),
                optional(median(|summary| summary.step_ms_p50)),
                percent(median(roof).filter(|_| results.has_roofs())),
                bound_by(results, arm),
            ];
            if limits::set(results) {
                cells.insert(GOODPUT_AT, optional(median(|summary| summary.goodput)));
            }
            cells
        })
        .collect()
}

/// How near the arm came to the nearer of its two roofs: bandwidth or arithmetic.
pub fn roof(summary: &Summary) -> Option<f64> {
    match (summary.bandwidth_fraction, summary.flops_fraction) {
        (Some(bandwidth), Some(flops)) => Some(bandwidth.max(flops)),
        (bandwidth, flops) => bandwidth.or(flops),
    }
}

/// What bound most of the arm's repeats, as tables show it.
pub fn bound_by(results: &RunResults, arm: &str) -> String {
    match results.mostly_bound_by(arm) {
        "" => DASH.to_string(),
        word => word.to_string(),
    }
}

/// Title, table and legend.
///
/// # Errors
/// A fault of the program alone.
pub fn render(results: &RunResults, format: Format) -> Result<String> {
    let header = header(results);
    let numbers: Vec<usize> = (1..header.len() - 1).collect();
    let table = table::render(format, &header, &rows(results), &numbers)?;
    Ok(format!("{}\n\n{table}\n{}\n{}", title(results), legend(results), limits::lines(results)))
}

/// One line on what ran where.
pub fn title(results: &RunResults) -> String {
    let record = &results.record;
    let mut models: Vec<&str> = results.summaries.iter().map(|summary| summary.model.as_str()).collect();
    models.sort_unstable();
    models.dedup();
    let synthetic = results.summaries.iter().any(|summary| summary.weights == "synthetic");
    let weights = if synthetic { " (weights: synthetic)" } else { "" };
    let simulated = if record.device.simulated { " — SIMULATED" } else { "" };
    let quick = if record.plan.quick { ", quick" } else { "" };
    format!(
        "{} on {}{simulated}: {}{weights}{quick}",
        record.experiment,
        if record.device.simulated { &record.device.id } else { &record.device.name },
        models.join(", "),
    )
}

fn legend(results: &RunResults) -> String {
    let record = &results.record;
    let repeats = record.plan.repeats;
    let over = if repeats > 1 { format!(", median of {repeats} repeats") } else { String::new() };
    format!(
        "{}times in ms{over}; `running`: mean sequences in a step; `of roof`: share of the nearer {} roof, \
         bandwidth or arithmetic{}{}",
        loads(results),
        if record.ceilings.is_some_and(|ceilings| ceilings.measured) { "measured" } else { "nominal" },
        if record.arm_ceilings.is_empty() { "" } else { ", as measured right before and after the arm" },
        sheet(record),
    )
}

/// Most different loads that are told apart in words.
const MOST_LOADS: usize = 16;

/// The load of all arms; where they differ a line each, since figures of unlike loads are not to be compared blindly.
fn loads(results: &RunResults) -> String {
    let mut loads: Vec<(&str, Vec<&str>)> = Vec::new();
    for summary in &results.summaries {
        match loads.iter_mut().find(|(load, _)| *load == summary.load) {
            Some((_, arms)) if arms.contains(&summary.arm.as_str()) => {}
            Some((_, arms)) => arms.push(&summary.arm),
            None => loads.push((&summary.load, vec![&summary.arm])),
        }
    }
    if let [(load, _)] = loads[..] {
        return format!("load: {load}; ");
    }
    let mut text = "loads differ between arms:\n".to_string();
    for (load, arms) in loads.iter().take(MOST_LOADS) {
        text += &format!("- {load}: {}\n", arms.join(", "));
    }
    if loads.len() > MOST_LOADS {
        text += &format!("- and {} more: column `load` of summary.csv\n", loads.len() - MOST_LOADS);
    }
    text + "\n"
}

/// Of a real GPU that is known: its measured roofs with the data sheet's beside them.
fn sheet(record: &RunRecord) -> String {
    let gpu = hardware::by_product_name(&record.device.name).filter(|_| !record.device.simulated);
    gpu.zip(record.ceilings).map_or(String::new(), |(gpu, ceilings)| {
        format!(
            ": {:.2} TB/s and {:.0} TFLOP/s here, {:.2} and {:.0} on the data sheet",
            ceilings.read_bytes_per_s / 1e12,
            ceilings.flops_per_s / 1e12,
            gpu.sheet_bytes_per_s / 1e12,
            gpu.sheet_flops_per_s / 1e12,
        )
    })
}

/// One line for a finished arm, on stderr while the run goes on.
pub fn one_line(summary: &Summary, repeats: usize) -> String {
    let repeat =
        if repeats > 1 { format!(" (repeat {}/{repeats})", summary.repeat + 1) } else { String::new() };
    let failed = if summary.failed > 0 { format!(", {} failed", summary.failed) } else { String::new() };
    format!(
        "{}{repeat}: {} tok/s, TTFT p50 {} ms, ITL p50 {} ms, {} s{failed}",
        summary.arm,
        optional(summary.output_throughput),
        optional(summary.ttft_p50_ms),
        optional(summary.itl_p50_ms),
        number(summary.duration_s),
    )
}
