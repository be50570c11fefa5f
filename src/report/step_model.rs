//! What a decode step of each model is made of: the bytes it streams by class, the seats that memory gives it, and the
//! fitted step time taken apart: into the streams of weights, states and KV at the device's bandwidth, what the products
//! need beyond the stream that they overlap, and the rest.
//!
//! A line is fitted to each part over the same batch sizes as to the whole, so the parts of both terms add up.

use super::format::Format;
use super::table;
use crate::Result;
use crate::engine::account::Ceilings;
use crate::measure::rows::StepRow;
use crate::measure::step_fit::{self, StepFit};
use crate::numbers::{DASH, bytes, number, optional};
use crate::results::RunResults;

/// Milliseconds that all sequences share, and that each one adds.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Term {
    pub shared_ms: f64,
    pub private_ms: f64,
}

/// The parts of a fitted step; they add up to `total`.
#[derive(Debug, Clone, PartialEq)]
pub struct StepParts {
    pub total: StepFit,
    pub weights: Term,
    pub state: Term,
    pub kv: Term,
    /// What products and scores need beyond the streams that they overlap with.
    pub compute: Term,
    pub rest: Term,
}

/// `None` where too few batch sizes were met. `ceilings` gives what a step was judged by.
pub fn parts<'a>(
    steps: impl Iterator<Item = &'a StepRow>,
    ceilings: &dyn Fn(&StepRow) -> Option<Ceilings>,
) -> Option<StepParts> {
    let steps: Vec<&StepRow> = steps.collect();
    let total = step_fit::fit(&step_fit::decode_points(steps.iter().copied(), |step| step.duration_ms))?;
    let line = |value: &dyn Fn(&StepRow) -> f64| {
        let fit = step_fit::fit(&step_fit::decode_points(steps.iter().copied(), value));
        fit.map_or(Term::default(), |fit| Term { shared_ms: fit.shared_ms, private_ms: fit.private_ms })
    };
    let ms = |step: &StepRow, moved: u64| {
        ceilings(step).map_or(0.0, |ceilings| moved as f64 / ceilings.read_bytes_per_s * 1e3)
    };
    let weights = line(&|step| ms(step, step.weights_bytes));
    let state = line(&|step| ms(step, step.state_bytes));
    let kv = line(&|step| ms(step, step.kv_bytes));
    let compute = line(&|step| {
        (step.floor_ms - ms(step, step.weights_bytes + step.state_bytes + step.kv_bytes)).max(0.0)
    });
    let rest = |term: fn(&Term) -> f64, whole: f64| {
        whole - [&weights, &state, &kv, &compute].into_iter().map(term).sum::<f64>()
    };
    let rest = Term {
        shared_ms: rest(|term| term.shared_ms, total.shared_ms),
        private_ms: rest(|term| term.private_ms, total.private_ms),
    };
    Some(StepParts { total, weights, state, kv, compute, rest })
}

/// Bytes of pure decode steps: weights a step, the rest a sequence, means over the steps.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct StepBytes {
    weights: f64,
    state: f64,
    kv: f64,
    activations: f64,
    flops: f64,
}

impl StepBytes {
    fn of<'a>(steps: impl Iterator<Item = &'a StepRow>) -> Option<Self> {
        let mut sum = Self::default();
        let (mut count, mut sequences) = (0f64, 0f64);
        for step in steps.filter(|step| step_fit::is_pure_decode(step)) {
            count += 1.0;
            sequences += step.decode_sequences as f64;
            sum.weights += step.weights_bytes as f64;
            sum.state += step.state_bytes as f64;
            sum.kv += step.kv_bytes as f64;
            sum.activations += step.activation_bytes as f64;
            sum.flops += step.flops as f64;
        }
        (sequences > 0.0).then(|| Self {
            weights: sum.weights / count,
            state: sum.state / sequences,
            kv: sum.kv / sequences,
            activations: sum.activations / sequences,
            flops: sum.flops / sequences,
        })
    }
}

/// Both tables; empty for a run of one model, whose fit says it all, and where nothing decoded.
///
/// # Errors
/// A fault of the program alone.
pub fn render(results: &RunResults, format: Format) -> Result<String> {
    let models = results.models();
    if models.len() < 2 {
        return Ok(String::new());
    }
    let mut moved = Vec::new();
    let mut times = Vec::new();
    for model in &models {
        let steps: Vec<&StepRow> = results.steps_of_model(model).collect();
        let Some(step) = StepBytes::of(steps.iter().copied()) else { continue };
        moved.push(moved_row(results, model, &step));
        let ceilings = |step: &StepRow| results.record.ceilings_at(&step.arm, step.repeat);
        if let Some(parts) = parts(steps.iter().copied(), &ceilings) {
            times.push(time_row(model, &parts, results.has_roofs()));
        }
    }
    if moved.is_empty() {
        return Ok(String::new());
    }
    let mut text =
        "What a decode step of each model moves, and the requests that memory seats:\n\n".to_string();
    let header = [
        "model",
        "held",
        "weights a step",
        "state a sequence",
        "KV a sequence",
        "activations",
        "FLOPs",
        "seats split",
        "seats unified",
        "perplexity",
    ];
    text += &table::render(format, &header, &moved, &[1, 2, 3, 4, 5, 6, 7, 8, 9])?;
    text += "\n`held`: weights in memory; activations and FLOPs are a sequence's; seats: requests of the run's longest \
             length at once, up to max_num_seqs; perplexity: of the built-in passage, for real weights\n";
    if !times.is_empty() {
        text += "\nThe fitted decode step taken apart, ms:\n\n";
        let header = [
            "model",
            "shared",
            "weights",
            "compute",
            "rest",
            "each sequence",
            "state",
            "KV",
            "compute ",
            "rest ",
        ];
        text += &table::render(format, &header, &times, &[1, 2, 3, 4, 5, 6, 7, 8, 9])?;
        text += "\nstreams at the device's read bandwidth; `compute`: what products need beyond the stream of weights, a line \
                 through a bend, so that its shared part is below 0 where large batches are bound by it; `rest`: launches, \
                 sampling, and what the device takes beyond its floor\n";
    }
    Ok(text)
}

fn moved_row(results: &RunResults, model: &str, step: &StepBytes) -> Vec<String> {
    let record = results.record.models.iter().find(|record| record.reference == model);
    let arm = results.record.arms.iter().find(|arm| arm.model == model);
    let seats = |layout: fn(&crate::results::record::Seats) -> Option<usize>| {
        arm.and_then(|arm| layout(&arm.seats)).map_or(DASH.to_string(), |seats| seats.to_string())
    };
    let moved = |value: f64| if value > 0.0 { bytes(value) } else { DASH.to_string() };
    vec![
        model.to_string(),
        record.map_or(DASH.to_string(), |record| bytes(record.weight_bytes as f64)),
        moved(step.weights),
        moved(step.state),
        moved(step.kv),
        moved(step.activations),
        format!("{} G", number(step.flops / 1e9)),
        seats(|seats| seats.split),
        seats(|seats| seats.unified),
        optional(record.and_then(|record| record.perplexity)),
    ]
}

fn time_row(model: &str, parts: &StepParts, roofs: bool) -> Vec<String> {
    let part = |value: f64| if roofs { number(value) } else { DASH.to_string() };
    // States and KV are private but for rounding, weights shared.
    let shared_rest = parts.rest.shared_ms + parts.state.shared_ms + parts.kv.shared_ms;
    let private_rest = parts.rest.private_ms + parts.weights.private_ms;
    vec![
        model.to_string(),
        number(parts.total.shared_ms),
        part(parts.weights.shared_ms),
        part(parts.compute.shared_ms),
        part(shared_rest),
        number(parts.total.private_ms),
        part(parts.state.private_ms),
        part(parts.kv.private_ms),
        part(parts.compute.private_ms),
        part(private_rest),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    const CEILINGS: Ceilings = Ceilings {
        read_bytes_per_s: 1e11,
        copy_bytes_per_s: 1e11,
        flops_per_s: 1e13,
        launch_s: 0.0,
        measured: true,
    };

    /// 10 ms of weights, 0.1 ms of state and 0.02 ms of KV a sequence, 0.5 ms of launches; FLOPs take 0.2 ms a sequence
    /// and hide behind the weights up to 50 sequences.
    fn step(batch: usize) -> StepRow {
        let n = batch as u64;
        let floor_ms = 10f64.max(0.2 * n as f64) + 0.12 * n as f64;
        StepRow {
            kind: "decode".into(),
            decode_sequences: batch,
            decode_tokens: batch,
            weights_bytes: 1_000_000_000,
            state_bytes: 10_000_000 * n,
            kv_bytes: 2_000_000 * n,
            flops: 2_000_000_000 * n,
            floor_ms,
            duration_ms: floor_ms + 0.5,
            ..StepRow::default()
        }
    }

    fn close(found: f64, right: f64) -> bool {
        (found - right).abs() < 1e-6
    }

    #[test]
    fn below_the_bend_each_part_is_what_it_was_made_of() {
        let steps: Vec<StepRow> = [1, 8, 16, 48].into_iter().flat_map(|n| vec![step(n); 3]).collect();
        let parts = parts(steps.iter(), &|_| Some(CEILINGS)).unwrap();
        assert!(close(parts.weights.shared_ms, 10.0) && close(parts.weights.private_ms, 0.0), "{parts:?}");
        assert!(close(parts.state.private_ms, 0.1) && close(parts.kv.private_ms, 0.02), "{parts:?}");
        assert!(close(parts.compute.shared_ms, 0.0) && close(parts.compute.private_ms, 0.0), "{parts:?}");
        assert!(close(parts.rest.shared_ms, 0.5) && close(parts.rest.private_ms, 0.0), "{parts:?}");
    }

    #[test]
    fn beyond_it_products_are_private_and_the_parts_add_up() {
        let steps: Vec<StepRow> = [1, 16, 64, 128].into_iter().flat_map(|n| vec![step(n); 3]).collect();
        let parts = parts(steps.iter(), &|_| Some(CEILINGS)).unwrap();
        assert!(parts.compute.private_ms > 0.05 && parts.compute.shared_ms < 0.0, "{parts:?}");
        let all = [parts.weights, parts.state, parts.kv, parts.compute, parts.rest];
        assert!(close(all.iter().map(|term| term.shared_ms).sum(), parts.total.shared_ms));
        assert!(close(all.iter().map(|term| term.private_ms).sum(), parts.total.private_ms));
        assert!(close(parts.rest.private_ms, 0.0) && close(parts.rest.shared_ms, 0.5), "{parts:?}");
    }

    #[test]
    fn bytes_are_a_step_of_weights_and_a_sequence_of_the_rest() {
        let steps = [step(2), step(6)];
        let found = StepBytes::of(steps.iter()).unwrap();
        assert_eq!((found.weights, found.state, found.kv), (1e9, 1e7, 2e6));
        let prefill = StepRow { kind: "prefill".into(), ..step(2) };
        assert_eq!(StepBytes::of([prefill].iter()), None);
    }
}
