//! Why the numbers are what they are: what a step shares and what each sequence adds, where the bytes go, and which
//! resource bound each arm.

use std::collections::BTreeMap;

use super::numbers::{DASH, bytes, median, number, optional, percent};
use super::results::RunResults;
use super::{consumers, overview, step_model, table};
use crate::Result;
use crate::cli::flags::Format;
use crate::measure::rows::StepRow;

/// Step time = shared + private x sequences, by least squares over the median step of each batch size.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepFit {
    pub shared_ms: f64,
    pub private_ms: f64,
    pub r_squared: f64,
    /// Batch sizes it went over.
    pub points: usize,
    pub smallest: usize,
    pub largest: usize,
}

/// Fewest steps of a batch size that count as a point, and fewest points that make a line worth stating.
const STEPS_A_POINT: usize = 3;
const POINTS: usize = 3;

impl StepFit {
    /// What the line says a sequence adds is less than a thousandth of the step.
    pub fn is_flat(&self) -> bool {
        self.private_ms < 1e-3 * self.shared_ms.abs() / self.largest.max(1) as f64
    }

    /// Sequences at which the private part of a step equals the shared one; `None` when nothing is private.
    pub fn crossing(&self) -> Option<f64> {
        (!self.is_flat() && self.shared_ms > 0.0).then(|| self.shared_ms / self.private_ms)
    }
}

/// A step of decodes alone, each of one token.
pub fn is_pure_decode(step: &StepRow) -> bool {
    step.kind == "decode" && step.drafted == 0
}

/// Median of `value` over pure decode steps, by number of sequences.
pub fn decode_points<'a>(
    steps: impl Iterator<Item = &'a StepRow>,
    value: impl Fn(&StepRow) -> f64,
) -> BTreeMap<usize, f64> {
    let mut by_batch: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
    for step in steps.filter(|step| is_pure_decode(step)) {
        by_batch.entry(step.decode_sequences).or_default().push(value(step));
    }
    by_batch
        .into_iter()
        .filter(|(_, times)| times.len() >= STEPS_A_POINT)
        .filter_map(|(batch, times)| Some((batch, median(times)?)))
        .collect()
}

/// `None` where too few batch sizes were met.
pub fn fit(points: &BTreeMap<usize, f64>) -> Option<StepFit> {
    if points.len() < POINTS {
        return None;
    }
    let count = points.len() as f64;
    let mean_x = points.keys().map(|&x| x as f64).sum::<f64>() / count;
    let mean_y = points.values().sum::<f64>() / count;
    let (mut xx, mut xy, mut yy) = (0.0, 0.0, 0.0);
    for (&x, &y) in points {
        let (dx, dy) = (x as f64 - mean_x, y - mean_y);
        xx += dx * dx;
        xy += dx * dy;
        yy += dy * dy;
    }
    let private_ms = xy / xx;
    Some(StepFit {
        shared_ms: mean_y - private_ms * mean_x,
        private_ms,
        // (Equal values differ by rounding at most: the line explains them all.)
        r_squared: if yy > 1e-12 * mean_y * mean_y { xy * xy / (xx * yy) } else { 1.0 },
        points: points.len(),
        smallest: *points.keys().next()?,
        largest: *points.keys().next_back()?,
    })
}

/// The fit of a run whose arms share one model; `None` for several models or too few batch sizes.
pub fn run_fit(results: &RunResults) -> Option<StepFit> {
    let models = models(results);
    if models.len() != 1 { None } else { model_fit(results, &models[0]) }
}

pub fn models(results: &RunResults) -> Vec<String> {
    let mut models: Vec<String> = results.summaries.iter().map(|summary| summary.model.clone()).collect();
    models.sort_unstable();
    models.dedup();
    models
}

pub fn model_fit(results: &RunResults, model: &str) -> Option<StepFit> {
    fit(&decode_points(steps_of_model(results, model), |step| step.duration_ms))
}

/// The steps of all arms of a model.
pub fn steps_of_model<'a>(
    results: &'a RunResults,
    model: &str,
) -> impl Iterator<Item = &'a StepRow> + use<'a> {
    let arms: Vec<&str> = results
        .summaries
        .iter()
        .filter(|summary| summary.model == model)
        .map(|summary| summary.arm.as_str())
        .collect();
    results.steps.iter().filter(move |step| arms.contains(&step.arm.as_str()))
}

/// What an arm moved and computed for each generated token, and how near it came to its floor.
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
pub fn render(results: &RunResults, format: Format) -> Result<String> {
    let mut text = String::new();
    for model in models(results) {
        if let Some(fit) = model_fit(results, &model) {
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
    let reasons = reasons(results);
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
    let ceilings = &results.record.ceilings;
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
    if let Some(record) = record.filter(|_| results.has_roofs()) {
        let stream_ms = record.streamed_bytes as f64 / ceilings.read_bytes_per_s * 1e3;
        text += &format!(
            "Shared is the stream of the weights: {} at {}/s would take {} ms. Private is each sequence's state, KV and \
             arithmetic.\n",
            bytes(record.streamed_bytes as f64),
            bytes(ceilings.read_bytes_per_s),
            number(stream_ms),
        );
    }
    match fit.crossing() {
        Some(crossing) if crossing >= 1.0 => {
            text += &format!(
                "They cross at {} sequences: below it a further sequence rides almost free, beyond it each one costs \
                 nearly its full price, and tokens/s level off towards {}.\n",
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
        "arrivals" => "bound by arrivals: the engine was waiting for requests",
        "host" => "bound by host: the device idled while the host prepared steps",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_published_decode_points_give_the_published_fit() {
        // Part 1: 20.2, 21.9, 37.1 and 65.6 ms at 1, 8, 64 and 146 sequences.
        let points = BTreeMap::from([(1, 20.2), (8, 21.9), (64, 37.1), (146, 65.6)]);
        let fit = fit(&points).unwrap();
        assert!((fit.shared_ms - 19.07).abs() < 0.05, "{fit:?}");
        assert!((fit.private_ms - 0.3129).abs() < 0.0005, "{fit:?}");
        assert!((fit.crossing().unwrap() - 60.95).abs() < 0.2, "{fit:?}");
    }

    #[test]
    fn flat_steps_have_nothing_private_and_no_crossing() {
        let fit = fit(&BTreeMap::from([(1, 2.0), (2, 2.0), (4, 2.0)])).unwrap();
        assert_eq!((fit.shared_ms, fit.private_ms, fit.crossing()), (2.0, 0.0, None));
    }

    #[test]
    fn two_points_are_no_fit() {
        assert_eq!(fit(&BTreeMap::from([(1, 2.0), (2, 3.0)])), None);
    }
}
