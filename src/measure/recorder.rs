//! Turns submissions and step reports into an [`ArmRecord`]: what happened to every request and in every step.
//!
//! Latency counts from the *intended* arrival, so an engine or generator that falls behind cannot hide it. Times in
//! the record are seconds from `origin_s`, the start of the measured run.

use std::collections::HashMap;

use super::rows::{RequestRow, StepRow, TokenTimes};
use crate::engine::account::Ceilings;
use crate::engine::device::KernelRecord;
use crate::engine::request::{FinishReason, RequestId};
use crate::engine::step_report::{Event, HeldBack, StepReport};
use crate::workload::feed::Due;
use crate::workload::schedule::Role;

/// How a request ended.
#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    Finished(FinishReason),
    /// The engine would not take it.
    Refused(String),
    /// The run ended first.
    Unfinished,
}

#[derive(Debug, Clone, PartialEq)]
pub struct RequestRecord {
    pub index: usize,
    pub role: Role,
    pub intended_s: f64,
    /// Handed to the engine; `None` when refused.
    pub submitted_s: Option<f64>,
    /// Start of the first step it took part in, and of the first one after each preemption.
    pub scheduled_s: Vec<f64>,
    /// End of the step before which it was preempted, for each preemption.
    pub preempted_s: Vec<f64>,
    pub recomputed_tokens: usize,
    /// When each generated token arrived; tokens of one speculative step have equal times.
    pub tokens_s: Vec<f64>,
    /// The generated tokens.
    pub output: Vec<u32>,
    pub finish_s: Option<f64>,
    pub input_tokens: usize,
    pub outcome: Outcome,
}

impl RequestRecord {
    pub fn completed(&self) -> bool {
        matches!(self.outcome, Outcome::Finished(FinishReason::Length | FinishReason::Stop))
    }

    pub fn schedule_delay_s(&self) -> Option<f64> {
        Some(self.submitted_s? - self.intended_s)
    }

    /// Intended arrival to the start of the first step.
    pub fn queue_s(&self) -> Option<f64> {
        Some(self.scheduled_s.first()? - self.intended_s)
    }

    /// Intended arrival to the first token.
    pub fn ttft_s(&self) -> Option<f64> {
        Some(self.tokens_s.first()? - self.intended_s)
    }

    /// Intended arrival to the end.
    pub fn e2el_s(&self) -> Option<f64> {
        Some(self.finish_s? - self.intended_s)
    }

    /// Mean time per token after the first: (E2EL - TTFT) / (tokens - 1). `None` for a single token.
    pub fn tpot_s(&self) -> Option<f64> {
        let gaps = self.tokens_s.len().checked_sub(1).filter(|&gaps| gaps > 0)?;
        Some((self.e2el_s()? - self.ttft_s()?) / gaps as f64)
    }

    /// Gap before each token but the first; 0 between tokens that arrived together.
    pub fn gaps_s(&self) -> impl Iterator<Item = f64> + '_ {
        self.tokens_s.windows(2).map(|pair| pair[1] - pair[0])
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct StepRecord {
    /// Without its events; times are relative to the record's origin.
    pub report: StepReport,
    /// Wall time from the end of the step before, or from the moment work arrived when there was none, to its end.
    pub wall_s: f64,
    /// When its tokens reached the client.
    pub delivered_s: f64,
    /// Tokens it delivered.
    pub tokens: usize,
}

/// Everything measured in one repeat of one arm.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ArmRecord {
    /// In order of index.
    pub requests: Vec<RequestRecord>,
    pub steps: Vec<StepRecord>,
    /// From the start of the run to the last answer.
    pub duration_s: f64,
    /// When the first injector was due, and when the last was answered: Part 2's window.
    pub injection_window_s: Option<(f64, f64)>,
    /// The start of the run on the session's clock.
    pub origin_s: f64,
}

pub struct Recorder {
    origin_s: f64,
    requests: Vec<RequestRecord>,
    by_id: HashMap<RequestId, usize>,
    steps: Vec<StepRecord>,
    in_flight: usize,
    answered: usize,
    tokens: usize,
    /// End of the last step, or the moment that ended an idle time: where the next step's wall time starts.
    wall_from_s: f64,
}

impl Recorder {
    /// `origin_s` is the start of the measured run on the session's clock.
    pub fn new(origin_s: f64) -> Self {
        Self {
            origin_s,
            requests: Vec::new(),
            by_id: HashMap::new(),
            steps: Vec::new(),
            in_flight: 0,
            answered: 0,
            tokens: 0,
            wall_from_s: 0.0,
        }
    }

    /// A request that was due has been handed to the engine at `now_s` (session clock).
    pub fn submitted(&mut self, due: &Due, id: RequestId, now_s: f64) {
        let now_s = now_s - self.origin_s;
        if self.in_flight == 0 {
            self.wall_from_s = self.wall_from_s.max(now_s);
        }
        self.in_flight += 1;
        self.by_id.insert(id, self.requests.len());
        self.push(due, Some(now_s), Outcome::Unfinished);
    }

    /// A request that was due has been refused by the engine.
    pub fn refused(&mut self, due: &Due, error: &crate::Error) {
        self.push(due, None, Outcome::Refused(error.to_string()));
    }

    fn push(&mut self, due: &Due, submitted_s: Option<f64>, outcome: Outcome) {
        self.requests.push(RequestRecord {
            index: due.index,
            role: due.role,
            intended_s: due.intended_s - self.origin_s,
            submitted_s,
            scheduled_s: Vec::new(),
            preempted_s: Vec::new(),
            recomputed_tokens: 0,
            tokens_s: Vec::new(),
            output: Vec::new(),
            finish_s: None,
            input_tokens: due.request.prompt.len(),
            outcome,
        });
    }

    /// A step has ended and its tokens reached the client at `now_s` (session clock).
    pub fn step(&mut self, mut report: StepReport, now_s: f64) {
        let delivered_s = now_s - self.origin_s;
        report.start_s -= self.origin_s;
        report.end_s -= self.origin_s;
        for kernel in &mut report.kernels {
            kernel.start_s -= self.origin_s;
            kernel.end_s -= self.origin_s;
        }
        let mut tokens_in_step = 0;
        for event in std::mem::take(&mut report.events) {
            match event {
                Event::Scheduled { request, .. } => {
                    if let Some(record) = self.record(request) {
                        record.scheduled_s.push(report.start_s);
                    }
                }
                Event::Tokens { request, tokens } => {
                    if let Some(record) = self.record(request) {
                        record.tokens_s.extend(std::iter::repeat_n(delivered_s, tokens.len()));
                        tokens_in_step += tokens.len();
                        record.output.extend(tokens);
                    }
                }
                Event::Preempted { request, computed_tokens } => {
                    if let Some(record) = self.record(request) {
                        record.preempted_s.push(report.start_s);
                        record.recomputed_tokens += computed_tokens;
                    }
                }
                Event::Finished { request, reason } => {
                    if let Some(index) = self.by_id.remove(&request) {
                        self.requests[index].finish_s = Some(delivered_s);
                        self.requests[index].outcome = Outcome::Finished(reason);
                        self.in_flight -= 1;
                        self.answered += 1;
                    }
                }
            }
        }
        self.tokens += tokens_in_step;
        let wall_s = report.end_s - self.wall_from_s.min(report.start_s);
        self.wall_from_s = report.end_s;
        self.steps.push(StepRecord { report, wall_s, delivered_s, tokens: tokens_in_step });
    }

    fn record(&mut self, id: RequestId) -> Option<&mut RequestRecord> {
        self.by_id.get(&id).map(|&index| &mut self.requests[index])
    }

    /// Requests answered so far.
    pub fn finished(&self) -> usize {
        self.answered
    }

    /// Tokens received so far.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    pub fn finish(mut self) -> ArmRecord {
        self.requests.sort_by_key(|request| request.index);
        let injectors = || self.requests.iter().filter(|request| request.role == Role::Injector);
        let first = injectors().map(|request| request.intended_s).min_by(f64::total_cmp);
        let last = injectors().filter_map(|request| request.finish_s).max_by(f64::total_cmp);
        let duration_s = self.requests.iter().filter_map(|request| request.finish_s).fold(0.0, f64::max);
        ArmRecord {
            injection_window_s: first.zip(last),
            duration_s,
            requests: self.requests,
            steps: self.steps,
            origin_s: self.origin_s,
        }
    }
}

impl ArmRecord {
    /// Sets the floor of every step to that on these ceilings; 0 without any.
    pub fn judge_by(&mut self, ceilings: Option<&Ceilings>) {
        self.steps.iter_mut().for_each(|step| step.report.cost.judge_by(ceilings));
    }

    /// Adds the kernels of a step that became known after it; `index` is the step's own, times are the session's.
    pub fn add_kernels(&mut self, index: u64, mut kernels: Vec<KernelRecord>) {
        for kernel in &mut kernels {
            kernel.start_s -= self.origin_s;
            kernel.end_s -= self.origin_s;
        }
        if let Ok(place) = self.steps.binary_search_by_key(&index, |step| step.report.index) {
            self.steps[place].report.kernels = kernels;
        }
    }

    /// Rows of requests.csv.
    pub fn request_rows<'a>(&'a self, arm: &'a str, repeat: u32) -> impl Iterator<Item = RequestRow> + 'a {
        let ms = |seconds: Option<f64>| seconds.map(|seconds| seconds * 1e3);
        self.requests.iter().map(move |request| RequestRow {
            arm: arm.to_string(),
            repeat,
            request: request.index,
            role: request.role.as_str().to_string(),
            intended_s: request.intended_s,
            submitted_s: request.submitted_s,
            scheduled_s: request.scheduled_s.first().copied(),
            first_token_s: request.tokens_s.first().copied(),
            finish_s: request.finish_s,
            input_tokens: request.input_tokens,
            output_tokens: request.tokens_s.len(),
            preemptions: request.preempted_s.len(),
            recomputed_tokens: request.recomputed_tokens,
            schedule_delay_ms: ms(request.schedule_delay_s()),
            queue_ms: ms(request.queue_s()),
            ttft_ms: ms(request.ttft_s()),
            e2el_ms: ms(request.e2el_s()),
            tpot_ms: ms(request.tpot_s()),
            status: match &request.outcome {
                Outcome::Finished(FinishReason::Length) => "length",
                Outcome::Finished(FinishReason::Stop) => "stop",
                Outcome::Finished(FinishReason::Cancelled) => "cancelled",
                Outcome::Refused(_) => "refused",
                Outcome::Unfinished => "unfinished",
            }
            .to_string(),
            error: match &request.outcome {
                Outcome::Refused(error) => error.clone(),
                _ => String::new(),
            },
        })
    }

    /// Rows of tokens.csv.
    pub fn token_rows<'a>(&'a self, arm: &'a str, repeat: u32) -> impl Iterator<Item = TokenTimes> + 'a {
        self.requests
            .iter()
            .map(move |request| TokenTimes::new(arm, repeat, request.index, &request.tokens_s))
    }

    /// Rows of steps.csv.
    pub fn step_rows<'a>(&'a self, arm: &'a str, repeat: u32) -> impl Iterator<Item = StepRow> + 'a {
        self.steps.iter().map(move |step| {
            let report = &step.report;
            StepRow {
                arm: arm.to_string(),
                repeat,
                step: report.index,
                start_s: report.start_s,
                duration_ms: step.wall_s * 1e3,
                host_ms: report.host_s * 1e3,
                device_ms: report.device_s * 1e3,
                kind: report.kind.as_str().to_string(),
                decode_sequences: report.decode_sequences,
                decode_tokens: report.decode_tokens,
                prefill_sequences: report.prefill_sequences,
                prefill_tokens: report.prefill_tokens,
                recomputed_tokens: report.recomputed_tokens,
                drafted: report.drafted,
                accepted: report.accepted,
                overrun_tokens: report.overrun_tokens,
                running: report.running,
                waiting: report.waiting,
                blocks_used: report.blocks_used,
                blocks_total: report.blocks_total,
                slots_used: report.slots_used,
                slots_total: report.slots_total,
                held_back_by: report.held_back_by.map_or("", held_back_name).to_string(),
                weights_bytes: report.cost.bytes.weights,
                state_bytes: report.cost.bytes.state,
                kv_bytes: report.cost.bytes.kv,
                activation_bytes: report.cost.bytes.activations,
                flops: report.cost.flops,
                floor_ms: report.cost.floor_s * 1e3,
            }
        })
    }
}

/// The name of a limit in files.
pub fn held_back_name(limit: HeldBack) -> &'static str {
    match limit {
        HeldBack::Seats => "seats",
        HeldBack::StateSlots => "state_slots",
        HeldBack::Blocks => "blocks",
        HeldBack::TokenBudget => "token_budget",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::request::{Request, SamplingParams};
    use crate::engine::step_report::StepKind;
    use crate::measure::testing::report;

    fn due(index: usize, intended_s: f64) -> Due {
        let request = Request {
            prompt: vec![1, 2, 3],
            max_tokens: 4,
            sampling: SamplingParams::default(),
            seed: 0,
            stop_tokens: Vec::new(),
            ignore_eos: true,
        };
        Due { index, intended_s, role: Role::Load, request }
    }

    fn tokens(id: u64, tokens: &[u32]) -> Event {
        Event::Tokens { request: RequestId(id), tokens: tokens.to_vec() }
    }

    fn scheduled(id: u64) -> Event {
        Event::Scheduled { request: RequestId(id), again: false }
    }

    fn finished(id: u64) -> Event {
        Event::Finished { request: RequestId(id), reason: FinishReason::Length }
    }

    fn step(recorder: &mut Recorder, start_s: f64, end_s: f64, events: Vec<Event>) {
        let mut report = report(StepKind::Decode, start_s, end_s);
        report.events = events;
        recorder.step(report, end_s);
    }

    #[test]
    fn times_count_from_the_intended_arrival_and_the_run_s_origin() {
        let mut recorder = Recorder::new(100.0);
        recorder.submitted(&due(0, 100.5), RequestId(7), 100.75);
        step(&mut recorder, 101.0, 102.0, vec![scheduled(7), tokens(7, &[5])]);
        step(&mut recorder, 102.0, 102.5, vec![tokens(7, &[6]), finished(7)]);
        let record = recorder.finish();
        let request = &record.requests[0];
        assert_eq!((request.intended_s, request.schedule_delay_s()), (0.5, Some(0.25)));
        assert_eq!(
            (request.queue_s(), request.ttft_s(), request.e2el_s()),
            (Some(0.5), Some(1.5), Some(2.0))
        );
        assert_eq!((request.tpot_s(), request.output.as_slice()), (Some(0.5), [5, 6].as_slice()));
        assert_eq!(record.duration_s, 2.5);
        let row = record.request_rows("a", 0).next().unwrap();
        assert_eq!((row.ttft_ms, row.status.as_str(), row.output_tokens), (Some(1500.0), "length", 2));
        assert_eq!(record.token_rows("a", 0).next().unwrap().times_s, "2.000000;2.500000");
    }

    #[test]
    fn tokens_of_one_speculative_step_arrive_together() {
        let mut recorder = Recorder::new(0.0);
        recorder.submitted(&due(0, 0.0), RequestId(0), 0.0);
        step(&mut recorder, 0.0, 1.0, vec![scheduled(0), tokens(0, &[1])]);
        step(&mut recorder, 1.0, 2.0, vec![tokens(0, &[2, 3, 4]), finished(0)]);
        let record = recorder.finish();
        assert_eq!(record.requests[0].gaps_s().collect::<Vec<_>>(), [1.0, 0.0, 0.0]);
        assert_eq!(record.steps[1].tokens, 3);
    }

    #[test]
    fn step_time_runs_from_end_to_end_and_leaves_idle_time_out() {
        let mut recorder = Recorder::new(0.0);
        recorder.submitted(&due(0, 0.0), RequestId(0), 0.0);
        step(&mut recorder, 0.25, 1.0, vec![tokens(0, &[1])]);
        step(&mut recorder, 1.5, 2.0, vec![tokens(0, &[2]), finished(0)]);
        // Nothing to do until a request comes at 5 s.
        recorder.submitted(&due(1, 5.0), RequestId(1), 5.0);
        step(&mut recorder, 5.5, 6.0, vec![tokens(1, &[1]), finished(1)]);
        let walls: Vec<f64> = recorder.finish().steps.iter().map(|step| step.wall_s).collect();
        assert_eq!(walls, [1.0, 1.0, 1.0]);
    }

    #[test]
    fn preemptions_and_refusals_are_kept_with_the_request() {
        let mut recorder = Recorder::new(0.0);
        recorder.submitted(&due(1, 0.0), RequestId(0), 0.0);
        recorder.refused(&due(0, 0.0), &crate::Error::invalid("too long", ""));
        step(&mut recorder, 0.0, 1.0, vec![scheduled(0), tokens(0, &[1])]);
        let preempted = Event::Preempted { request: RequestId(0), computed_tokens: 4 };
        step(&mut recorder, 1.0, 2.0, vec![preempted, scheduled(0), tokens(0, &[2])]);
        assert_eq!((recorder.finished(), recorder.tokens()), (0, 2));
        let record = recorder.finish();
        let rows: Vec<RequestRow> = record.request_rows("a", 2).collect();
        assert_eq!((rows[0].status.as_str(), rows[0].error.as_str()), ("refused", "too long"));
        assert_eq!(
            (rows[1].status.as_str(), rows[1].preemptions, rows[1].recomputed_tokens),
            ("unfinished", 1, 4)
        );
        assert_eq!(
            record.requests[1].queue_s(),
            Some(0.0),
            "the first scheduling counts, not the one after preemption"
        );
    }
}
