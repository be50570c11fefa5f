//! From a record to its row of summary.csv, by the definitions in [`super::summary`].

use super::bound;
use super::quantile::{Distribution, quantile};
use super::recorder::{ArmRecord, RequestRecord};
use super::steady;
use super::summary::{ArmLabel, SCHEMA, Summary};
use crate::engine::account::Ceilings;
use crate::workload::rate::Rate;
use crate::workload::slo::Slo;

/// What turns a record into a summary besides the record.
#[derive(Debug, Clone, Copy)]
pub struct Conditions<'a> {
    /// Nominal arrivals a second: [`crate::workload::schedule::Schedule::offered_rate`].
    pub offered_rate: Option<Rate>,
    /// Where there are none, no share of them is given.
    pub ceilings: Option<&'a Ceilings>,
    pub slo: &'a Slo,
}

pub fn summarize(record: &ArmRecord, label: &ArmLabel, conditions: &Conditions) -> Summary {
    let mut summary = Summary {
        experiment: label.experiment.clone(),
        arm: label.arm.clone(),
        knob: label.knob.clone(),
        value: label.value.clone(),
        repeat: label.repeat,
        device: label.device.clone(),
        simulated: label.simulated,
        offered_rate: conditions.offered_rate,
        schema: SCHEMA,
        model: label.model.clone(),
        weights: if label.synthetic_weights { "synthetic" } else { "real" }.to_string(),
        load: label.load.clone(),
        seed: label.seed,
        quick: label.quick,
        cpu_math: label.cpu_math.clone(),
        config_hash: label.config_hash.clone(),
        build: label.build.clone(),
        ..Summary::default()
    };
    throughputs(&mut summary, record, conditions);
    latencies(&mut summary, record);
    steps(&mut summary, record, conditions.ceilings);
    if let Some(window) = steady::window(record) {
        summary.steady_start_s = Some(window.start_s);
        summary.steady_s = Some(window.length_s());
        summary.steady_request_throughput = Some(window.requests(record) as f64 / window.length_s());
        summary.steady_output_throughput = Some(window.tokens(record) as f64 / window.length_s());
    }
    let bound_by = bound::bound_by(record, conditions.ceilings, conditions.offered_rate);
    summary.bound_by = bound_by.map_or(String::new(), |by| by.as_str().to_string());
    summary
}

fn throughputs(summary: &mut Summary, record: &ArmRecord, conditions: &Conditions) {
    let completed = || record.requests.iter().filter(|request| request.completed());
    summary.requests = record.requests.len();
    summary.completed = completed().count();
    summary.failed = summary.requests - summary.completed;
    summary.duration_s = record.duration_s;
    let last_s = record.requests.iter().filter_map(|request| request.submitted_s).fold(0.0, f64::max);
    let submitted = record.requests.iter().filter(|request| request.submitted_s.is_some()).count();
    summary.achieved_rate = Rate::new(submitted as f64 / last_s).ok();
    if record.duration_s > 0.0 {
        let per_s = |count: usize| Some(count as f64 / record.duration_s);
        let output: usize = record.requests.iter().map(|request| request.tokens_s.len()).sum();
        let input: usize = completed().map(|request| request.input_tokens).sum();
        summary.request_throughput = per_s(summary.completed);
        summary.output_throughput = per_s(output);
        summary.total_throughput = per_s(input + output);
        summary.peak_output_throughput = peak_second(record);
        if !conditions.slo.is_empty() {
            summary.goodput = per_s(completed().filter(|request| meets(request, conditions.slo)).count());
        }
    }
}

/// Most tokens in one of the whole seconds counted from the start of the run.
fn peak_second(record: &ArmRecord) -> Option<f64> {
    let mut counts = vec![0usize; record.duration_s.floor() as usize + 1];
    for &time_s in record.requests.iter().flat_map(|request| &request.tokens_s) {
        if let Some(count) = counts.get_mut(time_s.max(0.0) as usize) {
            *count += 1;
        }
    }
    counts.into_iter().max().map(|count| count as f64)
}

/// Whether a request keeps every limit. A limit on gaps is held by that statistic of the request's own gaps; every
/// other latency is one value a request, which must be within the limit whatever statistic the limit names.
pub fn meets(request: &RequestRecord, slo: &Slo) -> bool {
    slo.limits().all(|limit| {
        let value_s = match limit.latency {
            "ttft" => request.ttft_s(),
            "tpot" => request.tpot_s().or(Some(0.0)),
            "e2el" => request.e2el_s(),
            "queue" => request.queue_s(),
            _ => {
                let mut gaps: Vec<f64> = request.gaps_s().collect();
                gaps.sort_by(f64::total_cmp);
                match limit.statistic {
                    "mean" => Some(gaps.iter().sum::<f64>() / gaps.len().max(1) as f64),
                    "p50" => quantile(&gaps, 0.50).or(Some(0.0)),
                    "p90" => quantile(&gaps, 0.90).or(Some(0.0)),
                    _ => quantile(&gaps, 0.99).or(Some(0.0)),
                }
            }
        };
        value_s.is_some_and(|value_s| value_s * 1e3 <= limit.limit_ms)
    })
}

fn latencies(summary: &mut Summary, record: &ArmRecord) {
    let completed = || record.requests.iter().filter(|request| request.completed());
    let of = |value: fn(&RequestRecord) -> Option<f64>| {
        Distribution::of(completed().filter_map(value).map(|seconds| seconds * 1e3))
    };
    let mut set = |distribution: Option<Distribution>, fields: [fn(&mut Summary) -> &mut Option<f64>; 4]| {
        let Some(distribution) = distribution else { return };
        let values = [distribution.mean, distribution.p50, distribution.p90, distribution.p99];
        for (field, value) in fields.into_iter().zip(values) {
            *field(summary) = Some(value);
        }
    };
    set(
        of(RequestRecord::ttft_s),
        [|s| &mut s.ttft_mean_ms, |s| &mut s.ttft_p50_ms, |s| &mut s.ttft_p90_ms, |s| &mut s.ttft_p99_ms],
    );
    set(
        of(RequestRecord::tpot_s),
        [|s| &mut s.tpot_mean_ms, |s| &mut s.tpot_p50_ms, |s| &mut s.tpot_p90_ms, |s| &mut s.tpot_p99_ms],
    );
    set(
        of(RequestRecord::e2el_s),
        [|s| &mut s.e2el_mean_ms, |s| &mut s.e2el_p50_ms, |s| &mut s.e2el_p90_ms, |s| &mut s.e2el_p99_ms],
    );
    set(
        of(RequestRecord::queue_s),
        [|s| &mut s.queue_mean_ms, |s| &mut s.queue_p50_ms, |s| &mut s.queue_p90_ms, |s| &mut s.queue_p99_ms],
    );
    set(
        of(RequestRecord::schedule_delay_s),
        [
            |s| &mut s.schedule_delay_mean_ms,
            |s| &mut s.schedule_delay_p50_ms,
            |s| &mut s.schedule_delay_p90_ms,
            |s| &mut s.schedule_delay_p99_ms,
        ],
    );
    set(
        Distribution::of(completed().flat_map(|request| request.gaps_s()).map(|seconds| seconds * 1e3)),
        [|s| &mut s.itl_mean_ms, |s| &mut s.itl_p50_ms, |s| &mut s.itl_p90_ms, |s| &mut s.itl_p99_ms],
    );
}

fn steps(summary: &mut Summary, record: &ArmRecord, ceilings: Option<&Ceilings>) {
    let steps = &record.steps;
    let reports = || steps.iter().map(|step| &step.report);
    summary.running_max = reports().map(|report| report.running).max().unwrap_or(0);
    summary.waiting_max = reports().map(|report| report.waiting).max().unwrap_or(0);
    summary.kv_usage_max = reports()
        .filter(|report| report.blocks_total > 0)
        .map(|report| report.blocks_used as f64 / report.blocks_total as f64)
        .max_by(f64::total_cmp);
    summary.preemptions = record.requests.iter().map(|request| request.preempted_s.len()).sum();
    summary.recomputed_tokens = reports().map(|report| report.recomputed_tokens).sum();
    summary.drafted = reports().map(|report| report.drafted).sum();
    summary.accepted = reports().map(|report| report.accepted).sum();
    let wall_s: f64 = steps.iter().map(|step| step.wall_s).sum();
    if wall_s <= 0.0 {
        return;
    }
    let weighted: f64 = steps.iter().map(|step| step.report.running as f64 * step.wall_s).sum();
    summary.running_mean = Some(weighted / wall_s);
    if let Some(wall) = Distribution::of(steps.iter().map(|step| step.wall_s * 1e3)) {
        summary.step_ms_p50 = Some(wall.p50);
        summary.step_ms_p99 = Some(wall.p99);
    }
    summary.device_ms_p50 =
        Distribution::of(reports().map(|report| report.device_s * 1e3)).map(|device| device.p50);
    let device_s: f64 = reports().map(|report| report.device_s).sum();
    summary.host_fraction = Some(((wall_s - device_s) / wall_s).max(0.0));
    let bytes: u64 = reports().map(|report| report.cost.bytes.total()).sum();
    let flops: u64 = reports().map(|report| report.cost.flops).sum();
    let tokens: usize = steps.iter().map(|step| step.tokens).sum();
    if bytes > 0 {
        summary.bytes_per_token = (tokens > 0).then(|| bytes as f64 / tokens as f64);
        summary.bandwidth_fraction =
            ceilings.map(|ceilings| bytes as f64 / wall_s / ceilings.read_bytes_per_s);
    }
    // (A device counts the bytes of all its steps or of none.)
    let moved: Option<u64> = reports().map(|report| report.moved_bytes).sum();
    summary.traffic_ratio = moved.filter(|_| bytes > 0).map(|moved| moved as f64 / bytes as f64);
    if flops > 0 {
        summary.flops_fraction = ceilings.map(|ceilings| flops as f64 / wall_s / ceilings.flops_per_s);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::account::{ByteClasses, StepCost};
    use crate::engine::step_report::StepKind;
    use crate::measure::testing::{answered, record_of, step};

    const CEILINGS: Ceilings = Ceilings {
        read_bytes_per_s: 1000.0,
        copy_bytes_per_s: 1000.0,
        flops_per_s: 10_000.0,
        launch_s: 0.0,
        measured: true,
    };

    fn summary(record: &ArmRecord, slo: &str) -> Summary {
        let slo: Slo = slo.parse().unwrap();
        let offered_rate = Some(Rate::FLOOD);
        let conditions = Conditions { offered_rate, ceilings: Some(&CEILINGS), slo: &slo };
        summarize(record, &ArmLabel::default(), &conditions)
    }

    fn record() -> ArmRecord {
        let mut requests = vec![answered(0.0, 0.0, &[1.0, 1.5, 2.0]), answered(0.0, 0.5, &[3.0, 3.0, 4.0])];
        requests[1].submitted_s = Some(0.25);
        let mut steps: Vec<_> =
            (0..4).map(|index| step(StepKind::Decode, index as f64, index as f64 + 1.0)).collect();
        for step in &mut steps {
            let bytes = ByteClasses { weights: 300, state: 100, kv: 75, activations: 25 };
            step.report.cost = StepCost { bytes, flops: 1000, floor_s: 0.5, ..StepCost::default() };
            step.report.device_s = 0.75;
            step.report.running = 2;
        }
        record_of(requests, steps)
    }

    #[test]
    fn throughput_latency_and_shares_of_the_roof() {
        let summary = summary(&record(), "");
        assert_eq!((summary.request_throughput, summary.output_throughput), (Some(0.5), Some(1.5)));
        assert_eq!(summary.total_throughput, Some(26.0 / 4.0));
        assert_eq!((summary.ttft_mean_ms, summary.ttft_p50_ms), (Some(2000.0), Some(2000.0)));
        // Gaps 0.5, 0.5, 0 and 1 s; TPOT (2 - 1)/2 and (4 - 3)/2.
        assert_eq!((summary.itl_mean_ms, summary.itl_p50_ms), (Some(500.0), Some(500.0)));
        assert_eq!(summary.tpot_p99_ms, Some(500.0));
        // One was handed over at once, the other after 0.25 s; it was first scheduled after 0.5 s.
        assert_eq!((summary.schedule_delay_mean_ms, summary.queue_mean_ms), (Some(125.0), Some(250.0)));
        assert_eq!((summary.bandwidth_fraction, summary.flops_fraction), (Some(0.5), Some(0.1)));
        assert_eq!((summary.bytes_per_token, summary.host_fraction), (Some(500.0), Some(0.25)));
        assert_eq!((summary.peak_output_throughput, summary.goodput), (Some(2.0), None));
        assert_eq!(summary.bound_by, "weights");
    }

    #[test]
    fn goodput_counts_requests_that_keep_every_limit() {
        let goodput = |slo| summary(&record(), slo).goodput;
        assert_eq!(goodput("ttft_p99=3000,e2el_p99=4000"), Some(0.5));
        assert_eq!(goodput("ttft_p99=1000"), Some(0.25));
        assert_eq!(goodput("ttft_p99=1000,itl_p99=400"), Some(0.0));
        assert_eq!(goodput("itl_p50=500"), Some(0.5));
        assert_eq!(goodput("itl_p99=900"), Some(0.25));
    }

    #[test]
    fn a_run_without_requests_has_empty_fields() {
        let summary = summary(&ArmRecord::default(), "ttft_p99=1");
        assert_eq!((summary.requests, summary.ttft_p50_ms, summary.request_throughput), (0, None, None));
        assert_eq!((summary.bound_by.as_str(), summary.steady_s), ("", None));
    }
}
