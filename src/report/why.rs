//! Why the numbers are what they are: what a step shares and what each sequence adds, where the bytes go, and which
//! resource bound each arm.

use std::collections::BTreeMap;

use super::format::Format;
use super::{consumers, overview, step_model, table};
use crate::Result;
use crate::explain::HeldShares;
use crate::measure::bound::BoundBy;
use crate::measure::rows::StepRow;
use crate::measure::step_fit::StepFit;
use crate::numbers::{DASH, bytes, median, number, optional, percent};
use crate::results::RunResults;

/// Share of the step time from which on a queue is worth a word.
const WORTH_SAYING: f64 = 0.05;

/// Share of the offered rate below which an arm with a queue counts as overloaded. (The wait for the last answers takes
/// part of any run.)
const OVERLOADED_BELOW: f64 = 0.9;

/// What an arm moved (bytes by class) and computed (FLOPs) for each generated token, and how near it came to its floor.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ArmCost {
    pub weights: f64,
    pub state: f64,
    pub kv: f64,
    pub activations: f64,
    pub flops: f64,
    pub floor_ms_p50: Option<f64>,
    /// Sum of the floors over sum of the step times.
    pub floor_share: Option<f64>,
}

pub fn arm_cost(results: &RunResults, arm: &str) -> ArmCost {
    let steps: Vec<&StepRow> = results.steps_of(arm).collect();
    // (Tokens that requests received, summed over repeats, as the steps are.)
    let tokens: f64 = results
        .of_arm(arm)
        .filter_map(|row| Some(row.output_throughput? * row.duration_s))
        .sum::<f64>()
        .max(1.0);
    let sum = |value: fn(&StepRow) -> f64| steps.iter().map(|step| value(step)).sum::<f64>();
    let time_ms = sum(|step| step.duration_ms);
    ArmCost {
        weights: sum(|step| step.weights_bytes as f64) / tokens,
        state: sum(|step| step.state_bytes as f64) / tokens,
        kv: sum(|step| step.kv_bytes as f64) / tokens,
        activations: sum(|step| step.activation_bytes as f64) / tokens,
        flops: sum(|step| step.flops as f64) / tokens,
        floor_ms_p50: median(steps.iter().map(|step| step.floor_ms)),
        floor_share: (time_ms > 0.0).then(|| sum(|step| step.floor_ms) / time_ms),
    }
}

/// The whole explanation as text with tables.
///
/// # Errors
/// A fault of the program alone.
pub fn render(results: &RunResults, format: Format) -> Result<String> {
    let mut text = String::new();
    for model in results.models() {
        if let Some(fit) = results.step_fit(&model) {
            text += &fit_text(results, &model, &fit);
            text.push('\n');
        }
    }
    let step_model = step_model::render(results, format)?;
    if !step_model.is_empty() {
        text += &format!("{step_model}\n");
    }
    text += "Where the bytes of a token go, and how near a step is to its floor:\n\n";
    let header = [
        "arm",
        "weights",
        "state",
        "KV",
        "activations",
        "FLOPs",
        "step p50",
        "floor p50",
        "of floor",
        "bound by",
    ];
    let rows: Vec<Vec<String>> = results.arms().into_iter().map(|arm| cost_row(results, arm)).collect();
    text += &table::render(format, &header, &rows, &[1, 2, 3, 4, 5, 6, 7, 8])?;
    if let Some(largest) = consumers::render(results, format)? {
        text += &format!("\n{largest}");
    }
    let mut reasons = reasons(results);
    reasons.extend(queues(results));
    if !reasons.is_empty() {
        text += &format!("\n{}\n", reasons.join("\n"));
    }
    for skipped in &results.record.skipped {
        text += &format!("left out: {}: {}\n", skipped.arm, skipped.reason);
    }
    Ok(text)
}

fn cost_row(results: &RunResults, arm: &str) -> Vec<String> {
    let cost = arm_cost(results, arm);
    let moved = |value: f64| if value > 0.0 { bytes(value) } else { DASH.to_string() };
    vec![
        arm.to_string(),
        moved(cost.weights),
        moved(cost.state),
        moved(cost.kv),
        moved(cost.activations),
        if cost.flops > 0.0 { format!("{} G", number(cost.flops / 1e9)) } else { DASH.to_string() },
        optional(results.median(arm, |summary| summary.step_ms_p50)),
        optional(cost.floor_ms_p50.filter(|_| results.has_roofs())),
        percent(cost.floor_share.filter(|_| results.has_roofs())),
        overview::bound_by(results, arm),
    ]
}

fn fit_text(results: &RunResults, model: &str, fit: &StepFit) -> String {
    let mut text = format!(
        "A decode step of {model} takes {} ms that all sequences share, plus {} ms for each of them (least squares over \
         {} batch sizes from {} to {}, R2 {:.3}).\n",
        number(fit.shared_ms),
        number(if fit.is_flat() { 0.0 } else { fit.private_ms }),
        fit.points,
        fit.smallest,
        fit.largest,
        fit.r_squared,
    );
    let record = results.record.models.iter().find(|record| record.reference == model);
    if let Some((record, ceilings)) = record.zip(results.typical_ceilings(model)) {
        let stream_ms = record.streamed_bytes as f64 / ceilings.read_bytes_per_s * 1e3;
        text += &format!(
            "Shared is the stream of the weights: {} at {}/s would take {} ms. Private is each sequence's state, KV and \
             arithmetic.\n",
            bytes(record.streamed_bytes as f64),
            bytes(ceilings.read_bytes_per_s),
            number(stream_ms),
        );
        if fit.shared_ms < stream_ms {
            text += "The line begins below that, since the largest batches are bound by arithmetic, which steepens it.\n";
        }
    }
    match fit.crossing() {
        Some(crossing) if crossing >= 1.0 => {
            text += &format!(
                "They cross at {} sequences: below it a further sequence rides almost free, beyond it each one costs \
                 nearly its full price, and decoding alone would level off towards {} tokens/s.\n",
                number(crossing),
                number(1e3 / fit.private_ms),
            );
        }
        Some(_) => {
            text +=
                "The private part is the larger one at every batch size: sharing a step buys little here.\n"
        }
        None => text += "No private part shows: every further sequence rides free at these batch sizes.\n",
    }
    text
}

/// A sentence for each resource that bound an arm.
fn reasons(results: &RunResults) -> Vec<String> {
    let mut arms_by: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for arm in results.arms() {
        arms_by.entry(overview::bound_by(results, arm)).or_default().push(arm);
    }
    arms_by
        .into_iter()
        .filter_map(|(resource, arms)| Some(format!("- {}: {}", arms.join(", "), reason(&resource)?)))
        .collect()
}

/// Which arms had a queue, what it waited for, and which of them were offered more than they could answer.
fn queues(results: &RunResults) -> Vec<String> {
    let mut held: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    let mut overloaded = Vec::new();
    for arm in results.arms() {
        if let Some((limit, share)) = HeldShares::of(results.steps_of(arm)).longest()
            && share >= WORTH_SAYING
        {
            held.entry(limit).or_default().push(format!("{arm} {}", percent(Some(share))));
        }
        overloaded.extend(overload(results, arm));
    }
    let mut lines: Vec<String> = held
        .into_iter()
        .map(|(limit, arms)| format!("- held back by {limit}, share of the step time: {}", arms.join(", ")))
        .collect();
    if !overloaded.is_empty() {
        lines.push(format!("- overloaded, with a queue that grew: {}", overloaded.join("; ")));
    }
    lines
}

/// In words, if an arm was offered more requests a second than it answered, and they queued.
fn overload(results: &RunResults, arm: &str) -> Option<String> {
    let offered = results.median(arm, |summary| summary.offered_rate?.finite())?;
    let completed = results.median(arm, |summary| summary.request_throughput)?;
    let waiting = results.of_arm(arm).map(|summary| summary.waiting_max).max().unwrap_or(0);
    let kept_up = results.mostly_bound_by(arm) == BoundBy::Arrivals.as_str();
    (!kept_up && waiting > 0 && completed < OVERLOADED_BELOW * offered).then(|| {
        format!(
            "{arm} ({} requests/s offered, {} completed, up to {waiting} waiting)",
            number(offered),
            number(completed)
        )
    })
}

fn reason(resource: &str) -> Option<&'static str> {
    Some(match resource {
        "weights" => "bound by weights: most of a step is one stream of the weights, whatever the batch",
        "state" => "bound by state: reading and writing each sequence's recurrent state takes the most time",
        "kv" => "bound by kv: reading the KV cache of the contexts takes the most time",
        "compute" => {
            "bound by compute: the matrix products of the batch take longer than streaming the weights"
        }
        "seats" => {
            "bound by seats: requests waited for a seat (max_num_seqs) while a further one would have been cheap"
        }
        "blocks" => "bound by blocks: requests waited for cache memory (KV blocks or state slots)",
        "token_budget" => "bound by token_budget: requests waited because a step may hold no more new tokens",
        "arrivals" => {
            "bound by arrivals: the engine kept up with what came, and seats or steps stood idle for want of more"
        }
        "host" => "bound by host: the device idled while the host prepared steps",
        _ => return None,
    })
}
