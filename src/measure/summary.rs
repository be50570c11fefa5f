//! summary.csv: a row per arm and repeat.
//!
//! Units are in the names: `_s` seconds, `_ms` milliseconds; rates and throughputs are per second; fractions are of 1.
//! A value that does not apply or was not measured is empty; rate `inf` is the string `inf`. `steady_*` is the steady
//! window, everything else the whole run, from its start to the last answer.

use serde::{Deserialize, Serialize};

use super::axis::AxisValue;
use crate::workload::rate::Rate;

/// Version of the result files' columns: 2 added `schedule_delay_*` to summary.csv, and cold.csv. Files of earlier
/// versions are read, with the new columns empty.
pub const SCHEMA: u32 = 2;

/// Field order is column order.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    pub experiment: String,
    pub arm: String,
    /// The swept axis and this arm's value on it.
    pub knob: String,
    pub value: AxisValue,
    pub repeat: u32,
    pub device: String,
    pub simulated: bool,
    /// Requests handed out, answered in full, and not.
    pub requests: usize,
    pub completed: usize,
    pub failed: usize,
    pub duration_s: f64,
    /// Nominal arrivals a second (empty in a closed loop), and those that were reached.
    pub offered_rate: Option<Rate>,
    pub achieved_rate: Option<Rate>,
    /// Completed requests, generated tokens (whole run; best whole second), and prompt plus generated tokens, a second.
    pub request_throughput: Option<f64>,
    pub output_throughput: Option<f64>,
    pub peak_output_throughput: Option<f64>,
    pub total_throughput: Option<f64>,
    /// Intended arrival to first token.
    pub ttft_mean_ms: Option<f64>,
    pub ttft_p50_ms: Option<f64>,
    pub ttft_p90_ms: Option<f64>,
    pub ttft_p99_ms: Option<f64>,
    /// (E2EL - TTFT) / (tokens - 1), a value a request.
    pub tpot_mean_ms: Option<f64>,
    pub tpot_p50_ms: Option<f64>,
    pub tpot_p90_ms: Option<f64>,
    pub tpot_p99_ms: Option<f64>,
    /// Gaps between consecutive tokens of a request, all requests pooled.
    pub itl_mean_ms: Option<f64>,
    pub itl_p50_ms: Option<f64>,
    pub itl_p90_ms: Option<f64>,
    pub itl_p99_ms: Option<f64>,
    /// Intended arrival to the end.
    pub e2el_mean_ms: Option<f64>,
    pub e2el_p50_ms: Option<f64>,
    pub e2el_p90_ms: Option<f64>,
    pub e2el_p99_ms: Option<f64>,
    /// Intended arrival to the start of the first step.
    pub queue_mean_ms: Option<f64>,
    pub queue_p50_ms: Option<f64>,
    pub queue_p90_ms: Option<f64>,
    pub queue_p99_ms: Option<f64>,
    /// Intended arrival to being handed to the engine: the generator's own part of the wait.
    pub schedule_delay_mean_ms: Option<f64>,
    pub schedule_delay_p50_ms: Option<f64>,
    pub schedule_delay_p90_ms: Option<f64>,
    pub schedule_delay_p99_ms: Option<f64>,
    /// Sequences in a step: mean over the time steps took, and most; most requests left waiting.
    pub running_mean: Option<f64>,
    pub running_max: usize,
    pub waiting_max: usize,
    /// Most blocks in use over blocks there are.
    pub kv_usage_max: Option<f64>,
    pub preemptions: usize,
    pub recomputed_tokens: usize,
    pub drafted: usize,
    pub accepted: usize,
    /// Wall time between the ends of consecutive steps; and the device's part of it.
    pub step_ms_p50: Option<f64>,
    pub step_ms_p99: Option<f64>,
    pub device_ms_p50: Option<f64>,
    /// Compulsory bytes moved for each generated token.
    pub bytes_per_token: Option<f64>,
    /// Compulsory bytes over step time and the measured read bandwidth; FLOPs over step time and the dense rate.
    pub bandwidth_fraction: Option<f64>,
    pub flops_fraction: Option<f64>,
    /// Bytes that launches declared (each input read once, each output written once) over compulsory bytes, which count
    /// what a fused engine must move: 1 or more. On devices that count them.
    pub traffic_ratio: Option<f64>,
    /// weights, state, kv, compute, seats, blocks, token_budget, arrivals or host.
    pub bound_by: String,
    /// (wall - device busy) / wall over all steps.
    pub host_fraction: Option<f64>,
    /// The steady window: where it starts and how long it is, and completed requests and generated tokens a second in it.
    pub steady_start_s: Option<f64>,
    pub steady_s: Option<f64>,
    pub steady_request_throughput: Option<f64>,
    pub steady_output_throughput: Option<f64>,
    /// Completed requests that met every limit, a second; where limits are given.
    pub goodput: Option<f64>,
    pub schema: u32,
    pub model: String,
    /// `real` or `synthetic`.
    pub weights: String,
    pub load: String,
    pub seed: u64,
    pub quick: bool,
    /// Arithmetic of the CPU device; empty on others.
    pub cpu_math: String,
    pub config_hash: String,
    pub build: String,
}

/// What a summary says of the arm besides what was measured.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ArmLabel {
    pub experiment: String,
    pub arm: String,
    pub knob: String,
    pub value: AxisValue,
    pub repeat: u32,
    pub device: String,
    pub simulated: bool,
    pub model: String,
    pub synthetic_weights: bool,
    pub load: String,
    pub seed: u64,
    pub quick: bool,
    pub cpu_math: String,
    pub config_hash: String,
    pub build: String,
}

/// The columns in order, as the file's header has them.
pub fn columns() -> Vec<String> {
    match serde_json::to_value(Summary::default()) {
        Ok(serde_json::Value::Object(fields)) => fields.keys().cloned().collect(),
        _ => Vec::new(),
    }
}

impl Summary {
    /// A numeric column by name; `None` when the column is unknown, empty or no number.
    pub fn metric(&self, column: &str) -> Option<f64> {
        serde_json::to_value(self).ok()?.get(column)?.as_f64()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_the_agreed_ones_in_order() {
        let latency =
            |name: &str| ["mean", "p50", "p90", "p99"].map(|part| format!("{name}_{part}_ms")).join(" ");
        let expected = format!(
            "experiment arm knob value repeat device simulated requests completed failed duration_s offered_rate \
             achieved_rate request_throughput output_throughput peak_output_throughput total_throughput \
             {} {} {} {} {} {} running_mean running_max waiting_max kv_usage_max preemptions recomputed_tokens drafted \
             accepted step_ms_p50 step_ms_p99 device_ms_p50 bytes_per_token bandwidth_fraction flops_fraction \
             traffic_ratio bound_by host_fraction steady_start_s steady_s steady_request_throughput \
             steady_output_throughput goodput schema model weights load seed quick cpu_math config_hash build",
            latency("ttft"),
            latency("tpot"),
            latency("itl"),
            latency("e2el"),
            latency("queue"),
            latency("schedule_delay")
        );
        assert_eq!(columns().join(" "), expected);
    }

    #[test]
    fn a_row_survives_csv_with_empty_fields_and_inf() {
        let summary = Summary {
            arm: "request_rate=inf".into(),
            value: "inf".into(),
            offered_rate: Some(Rate::FLOOD),
            ttft_p50_ms: Some(12.5),
            seed: u64::MAX,
            ..Summary::default()
        };
        let mut writer = csv::Writer::from_writer(Vec::new());
        writer.serialize(&summary).unwrap();
        let text = String::from_utf8(writer.into_inner().unwrap()).unwrap();
        assert_eq!(text.lines().next().unwrap(), columns().join(","));
        assert!(text.contains(",inf,,"), "{text}");
        let read: Summary = csv::Reader::from_reader(text.as_bytes()).deserialize().next().unwrap().unwrap();
        assert_eq!(read, summary);
        // As schema 1 had it.
        let earlier = text.replace("schedule_delay_p50_ms,", "unknown,");
        let read: Summary =
            csv::Reader::from_reader(earlier.as_bytes()).deserialize().next().unwrap().unwrap();
        assert_eq!(read, summary);
        assert_eq!((read.metric("ttft_p50_ms"), read.metric("ttft_p99_ms")), (Some(12.5), None));
    }
}
