//! Figures of a simulated arm under the names that cells.csv and summary.csv use, by the definitions of the measuring
//! layer; and those that only the series has (its victims' percentiles, step fits).

use std::collections::BTreeMap;

use super::Figures;
use super::plan::PlannedArm;
use crate::engine::cache::shape::{CacheShape, UnifiedFigures};
use crate::engine::config::KvLayout;
use crate::measure::quantile::{Distribution, weighted_quantile};
use crate::measure::recorder::{ArmRecord, RequestRecord};
use crate::simulation::SimulatedRun;
use crate::workload::schedule::Role;

type Metrics = BTreeMap<&'static str, f64>;

/// All figures of one arm.
pub fn of(run: &SimulatedRun, arm: &PlannedArm) -> Metrics {
    let mut metrics = Metrics::new();
    let record = &run.record;
    pool(run, arm, &mut metrics);
    if let Some((from_s, to_s)) = arm.watch_s {
        decode_steps(record, from_s, to_s, &mut metrics);
        return metrics;
    }
    if arm.load.probe.is_some() {
        victims(record, &mut metrics);
        prefill_steps(record, &mut metrics);
        return metrics;
    }
    throughput(record, &mut metrics);
    latencies(record, &mut metrics);
    let steps = || record.steps.iter();
    metrics.insert("preemptions", record.requests.iter().map(|r| r.preempted_s.len()).sum::<usize>() as f64);
    metrics.insert(
        "recomputed_tokens",
        record.requests.iter().map(|request| request.recomputed_tokens).sum::<usize>() as f64,
    );
    let drafted: usize = steps().map(|step| step.report.drafted).sum();
    if drafted > 0 {
        let accepted: usize = steps().map(|step| step.report.accepted).sum();
        let decodes: usize = steps().map(|step| step.report.decode_sequences).sum();
        metrics.insert("drafted_per_sequence_step", drafted as f64 / decodes as f64);
        metrics.insert("acceptance", accepted as f64 / drafted as f64);
    }
    metrics
}

/// Seats and what vLLM prints at start.
fn pool(run: &SimulatedRun, arm: &PlannedArm, metrics: &mut Metrics) {
    let steps = || run.record.steps.iter().map(|step| &step.report);
    if let Some(most) = steps().map(|report| report.running).max() {
        metrics.insert("running_max", most as f64);
    }
    // The batch that held longest after the first peak.
    let weights: Vec<(usize, f64)> =
        run.record.steps.iter().map(|step| (step.report.running, step.wall_s)).collect();
    let mut time_at = BTreeMap::new();
    for (running, wall_s) in &weights {
        *time_at.entry(*running).or_insert(0.0) += wall_s;
    }
    if let Some((running, _)) = time_at.iter().max_by(|a, b| a.1.total_cmp(b.1)) {
        metrics.insert("running_settled", *running as f64);
    }
    let Ok(layout) = crate::engine::model::presets::synthetic_layout(&arm.model) else { return };
    let plan = &run.plan;
    let shape = CacheShape::new(&layout.spec, plan.kv_dtype, plan.state_dtype, plan.max_drafts);
    if plan.layout == KvLayout::Unified {
        let figures = UnifiedFigures::new(&shape, plan, arm.load.input_len + arm.load.output_len);
        metrics.insert("max_concurrency", figures.max_concurrency);
        metrics.insert("kv_cache_tokens", figures.kv_cache_tokens as f64);
    } else {
        // vLLM counts the block that it keeps empty.
        let request = plan.max_model_len.div_ceil(plan.block_tokens);
        metrics.insert("max_concurrency", (plan.kv_blocks + 1) as f64 / request as f64);
    }
}

fn throughput(record: &ArmRecord, metrics: &mut Metrics) {
    let completed = record.requests.iter().filter(|request| request.completed()).count();
    let tokens: usize = record.requests.iter().map(|request| request.tokens_s.len()).sum();
    metrics.insert("request_throughput", completed as f64 / record.duration_s);
    metrics.insert("output_throughput", tokens as f64 / record.duration_s);
    let mut seconds: BTreeMap<u64, usize> = BTreeMap::new();
    for time_s in record.requests.iter().flat_map(|request| &request.tokens_s) {
        *seconds.entry(*time_s as u64).or_default() += 1;
    }
    if let Some(peak) = seconds.values().max() {
        metrics.insert("peak_output_throughput", *peak as f64);
    }
}

fn latencies(record: &ArmRecord, metrics: &mut Metrics) {
    fn all(record: &ArmRecord, of: impl Fn(&RequestRecord) -> Option<f64>) -> Option<Distribution> {
        Distribution::of(record.requests.iter().filter_map(of).map(|seconds| seconds * 1e3))
    }
    if let Some(ttft) = all(record, RequestRecord::ttft_s) {
        metrics.insert("ttft_p50_ms", ttft.p50);
        metrics.insert("ttft_p99_ms", ttft.p99);
    }
    if let Some(tpot) = all(record, RequestRecord::tpot_s) {
        metrics.insert("tpot_mean_ms", tpot.mean);
    }
    if let Some(e2el) = all(record, RequestRecord::e2el_s) {
        metrics.insert("e2el_p50_ms", e2el.p50);
        metrics.insert("e2el_p99_ms", e2el.p99);
    }
    // vLLM's client sees the tokens of one speculative step as one message: gaps are between messages.
    let gaps = record.requests.iter().flat_map(RequestRecord::gaps_s).filter(|gap_s| *gap_s > 0.0);
    if let Some(itl) = Distribution::of(gaps.map(|gap_s| gap_s * 1e3)) {
        metrics.insert("itl_p50_ms", itl.p50);
        metrics.insert("itl_p99_ms", itl.p99);
    }
}

/// The median step of a window, all of it decode.
fn decode_steps(record: &ArmRecord, from_s: f64, to_s: f64, metrics: &mut Metrics) {
    let inside = record.steps.iter().filter(|step| (from_s..to_s).contains(&step.report.start_s));
    let steps: Vec<_> = inside.filter(|step| step.report.prefill_tokens == 0).collect();
    if let Some(durations) = Distribution::of(steps.iter().map(|step| step.wall_s * 1e3)) {
        metrics.insert("decode_step_ms", durations.p50);
        let batch: usize = steps.iter().map(|step| step.report.decode_sequences).max().unwrap_or(0);
        metrics.insert("decode_batch", batch as f64);
    }
}

/// Part 2: the gaps of all victims, the first of each answer being its time to first token, over the run and inside the
/// injection window.
fn victims(record: &ArmRecord, metrics: &mut Metrics) {
    let mut all = Vec::new();
    let mut window = Vec::new();
    for request in record.requests.iter().filter(|request| request.role == Role::Victim) {
        let mut before_s = request.intended_s;
        for &time_s in &request.tokens_s {
            let gap_ms = (time_s - before_s) * 1e3;
            all.push(gap_ms);
            if record.injection_window_s.is_some_and(|(from_s, to_s)| time_s >= from_s && time_s <= to_s) {
                window.push(gap_ms);
            }
            before_s = time_s;
        }
    }
    metrics.insert("victims_window_tokens", window.len() as f64);
    for (values, [p50, p99, max]) in [
        (&mut all, ["victims_all_p50_ms", "victims_all_p99_ms", "victims_all_max_ms"]),
        (&mut window, ["victims_window_p50_ms", "victims_window_p99_ms", "victims_window_max_ms"]),
    ] {
        values.sort_by(f64::total_cmp);
        let Some(largest) = values.last() else { continue };
        metrics.insert(max, *largest);
        metrics.insert(p50, exclusive_percentile(values, 50));
        metrics.insert(p99, exclusive_percentile(values, 99));
    }
}

/// Python's `statistics.quantiles(values, n=100)[percent - 1]`, which the series used: position percent (n + 1) / 100,
/// counted from 1, extrapolated at the ends.
fn exclusive_percentile(sorted: &[f64], percent: usize) -> f64 {
    let n = sorted.len();
    if n < 2 {
        return sorted.first().copied().unwrap_or(f64::NAN);
    }
    let position = percent * (n + 1);
    let below = (position / 100).clamp(1, n - 1);
    let share = (position as f64 - 100.0 * below as f64) / 100.0;
    sorted[below - 1] + (sorted[below] - sorted[below - 1]) * share
}

/// The median step that fills the budget with one prompt's chunk, and that of a whole injected prompt.
fn prefill_steps(record: &ArmRecord, metrics: &mut Metrics) {
    let median = |least: usize, most: usize| {
        let steps = record.steps.iter().filter(|step| (least..=most).contains(&step.report.prefill_tokens));
        weighted_quantile(&steps.map(|step| (step.wall_s * 1e3, 1.0)).collect::<Vec<_>>(), 0.5)
    };
    if let Some(chunk) = median(2000, 2048) {
        metrics.insert("chunk_step_ms", chunk);
    }
    if let Some(prompt) = median(5400, 5500) {
        metrics.insert("prompt_step_ms", prompt);
    }
}

/// Figures over several arms: step fits and ratios.
pub fn add_derived(figures: &mut Figures) {
    let mut derived = Figures::new();
    let mut points: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
    for (arm, metrics) in figures.iter() {
        if let (Some((family, _)), Some(batch), Some(ms)) =
            (arm.rsplit_once(' '), metrics.get("decode_batch"), metrics.get("decode_step_ms"))
        {
            points.entry(family.to_string()).or_default().push((*batch, *ms));
        }
    }
    for (family, points) in points {
        if let Some((fixed, slope)) = least_squares(&points) {
            let metrics = derived.entry(family).or_default();
            metrics.insert("fit_fixed_ms", fixed);
            metrics.insert("fit_per_sequence_ms", slope);
            metrics.insert("fit_crossover", fixed / slope);
        }
    }
    let ratio = |over: &str, under: &str, metric| {
        let value = |arm: &str| figures.get(arm).and_then(|metrics| metrics.get(metric)).copied();
        Some(value(over)? / value(under)?)
    };
    if let Some(ratio) = ratio("chunked off, heavy", "chunked on, heavy", "victims_all_p99_ms") {
        derived.entry("off over on, heavy".into()).or_default().insert("victims_all_p99_ratio", ratio);
    }
    if let Some(ratio) = ratio("cap 256", "cap 1", "output_throughput") {
        derived.entry("cap 256 over cap 1".into()).or_default().insert("output_throughput_ratio", ratio);
    }
    figures.extend(derived);
}

/// Intercept and slope of a straight line through points.
pub fn least_squares(points: &[(f64, f64)]) -> Option<(f64, f64)> {
    let n = points.len() as f64;
    let mean_x = points.iter().map(|(x, _)| x).sum::<f64>() / n;
    let mean_y = points.iter().map(|(_, y)| y).sum::<f64>() / n;
    let spread = points.iter().map(|(x, _)| (x - mean_x).powi(2)).sum::<f64>();
    if spread == 0.0 || points.len() < 2 {
        return None;
    }
    let slope = points.iter().map(|(x, y)| (x - mean_x) * (y - mean_y)).sum::<f64>() / spread;
    Some((mean_y - slope * mean_x, slope))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_those_of_pythons_statistics_module() {
        // statistics.quantiles(range(1, 101), n=100)[98] and [49]; of four values, [98] extrapolates.
        let values: Vec<f64> = (1..=100).map(f64::from).collect();
        assert!((exclusive_percentile(&values, 99) - 99.99).abs() < 1e-9);
        assert!((exclusive_percentile(&values, 50) - 50.5).abs() < 1e-9);
        assert!((exclusive_percentile(&[1.0, 2.0, 3.0, 4.0], 99) - 4.95).abs() < 1e-9);
    }

    #[test]
    fn the_published_step_points_give_the_published_fit() {
        let (fixed, slope) = least_squares(&[(1.0, 20.2), (8.0, 21.9), (64.0, 37.1), (146.0, 65.6)]).unwrap();
        assert!((fixed - 19.07).abs() < 0.01 && (slope - 0.3129).abs() < 0.0005, "{fixed} + {slope} N");
    }
}
