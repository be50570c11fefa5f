//! Rows of the result files: requests.csv, tokens.csv, steps.csv, kernels.csv, populations.csv and checks.csv.
//!
//! Field names are the literal headers. Units are in the names: `_s` seconds from the start of the arm's measured run,
//! `_ms` milliseconds, `_tokens`, `_bytes`; a field that does not apply is empty. Times come from the session's clock.

use serde::{Deserialize, Serialize};

/// requests.csv: a row a request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RequestRow {
    /// Name of the arm, and repeat counted from 0.
    pub arm: String,
    pub repeat: u32,
    /// Place in the arm's schedule.
    pub request: usize,
    /// `load`, `victim` or `injector`.
    pub role: String,
    /// When it was due, and when it was handed to the engine.
    pub intended_s: f64,
    pub submitted_s: Option<f64>,
    /// Start of the first step it took part in.
    pub scheduled_s: Option<f64>,
    pub first_token_s: Option<f64>,
    pub finish_s: Option<f64>,
    pub input_tokens: usize,
    /// Generated.
    pub output_tokens: usize,
    pub preemptions: usize,
    /// Prompt and generated tokens computed again after preemptions.
    pub recomputed_tokens: usize,
    /// From `intended_s`: to being handed over, to the first step, to the first token, to the end.
    pub schedule_delay_ms: Option<f64>,
    pub queue_ms: Option<f64>,
    pub ttft_ms: Option<f64>,
    pub e2el_ms: Option<f64>,
    /// (e2el - ttft) / (output_tokens - 1).
    pub tpot_ms: Option<f64>,
    /// `length`, `stop`, `cancelled`, `refused` or `unfinished`.
    pub status: String,
    pub error: String,
}

/// tokens.csv: a row a request. Tokens that arrived together have the same time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TokenTimes {
    pub arm: String,
    pub repeat: u32,
    pub request: usize,
    /// When each generated token arrived, seconds to the microsecond, separated by `;`.
    pub times_s: String,
}

impl TokenTimes {
    pub fn new(arm: &str, repeat: u32, request: usize, times_s: &[f64]) -> Self {
        let times: Vec<String> = times_s.iter().map(|time_s| format!("{time_s:.6}")).collect();
        Self { arm: arm.to_string(), repeat, request, times_s: times.join(";") }
    }

    pub fn times(&self) -> Vec<f64> {
        self.times_s.split(';').filter_map(|time| time.parse().ok()).collect()
    }
}

/// steps.csv: a row an engine step.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct StepRow {
    pub arm: String,
    pub repeat: u32,
    pub step: u64,
    /// When the device began it.
    pub start_s: f64,
    /// Wall time from the end of the step before (or from the arrival that ended an idle time) to its own end.
    pub duration_ms: f64,
    /// Host time spent on it, and time the device was busy with it.
    pub host_ms: f64,
    pub device_ms: f64,
    /// `decode`, `prefill` or `mixed`.
    pub kind: String,
    pub decode_sequences: usize,
    pub decode_tokens: usize,
    pub prefill_sequences: usize,
    pub prefill_tokens: usize,
    pub recomputed_tokens: usize,
    pub drafted: usize,
    pub accepted: usize,
    /// Computed for requests that had already stopped, then dropped.
    pub overrun_tokens: usize,
    /// Sequences in the step, and requests left waiting when it was scheduled.
    pub running: usize,
    pub waiting: usize,
    pub blocks_used: usize,
    pub blocks_total: usize,
    pub slots_used: usize,
    pub slots_total: usize,
    /// `seats`, `state_slots`, `blocks` or `token_budget`: what kept the head of the queue waiting; empty when nothing.
    pub held_back_by: String,
    /// Compulsory bytes by class, FLOPs, and the least time they take on the device's ceilings.
    pub weights_bytes: u64,
    pub state_bytes: u64,
    pub kv_bytes: u64,
    pub activation_bytes: u64,
    pub flops: u64,
    pub floor_ms: f64,
}

/// kernels.csv: a row a kernel and kind of step, from the arm's traced pass, which is none of the measured ones. Figures are
/// means over the steps of that kind.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KernelRow {
    pub arm: String,
    pub repeat: u32,
    /// `decode`, `prefill` or `mixed`.
    pub kind: String,
    /// Traced steps of that kind.
    pub steps: usize,
    /// As the trace names it, or `(between kernels)` for the rest of a step.
    pub kernel: String,
    pub launches: f64,
    /// From the end of the kernel in front of it (or its own start where that is later) to its end, over all its launches in
    /// a step; and the share of the step. Both add up to the step.
    pub time_ms: f64,
    pub share: f64,
    /// Declared by the launches: each input read once, each output written once.
    pub bytes: f64,
    pub flops: f64,
    /// max(bytes / read bandwidth, FLOPs / rate), launch by launch, on the run's ceilings; and that over `time_ms`.
    pub floor_ms: f64,
    pub of_floor: Option<f64>,
}

/// populations.csv: a row a named population of latencies.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PopulationRow {
    pub arm: String,
    pub repeat: u32,
    /// Which gaps or latencies: see `measure::populations`.
    pub population: String,
    pub n: usize,
    pub mean_ms: Option<f64>,
    pub p50_ms: Option<f64>,
    pub p90_ms: Option<f64>,
    pub p99_ms: Option<f64>,
    pub max_ms: Option<f64>,
}

/// checks.csv: a row a figure about the run itself: Little's law, lateness of the generator, fairness, interference.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CheckRow {
    pub arm: String,
    pub repeat: u32,
    /// Name, with its unit where it has one.
    pub check: String,
    pub value: Option<f64>,
    /// `ok`, `warning`, or `info` where nothing is judged.
    pub status: String,
    pub note: String,
}
