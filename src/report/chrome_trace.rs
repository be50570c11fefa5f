//! trace.json.gz: what the device did, for Perfetto or chrome://tracing.
//!
//! One process an arm. In it a track of scheduler steps, one of kernels (with bytes, FLOPs, GB/s and share of the roof),
//! one a request, and counters of running and waiting requests and of the blocks in use. Times are microseconds from
//! the start of the traced pass, which is not one of the measured ones.

use std::io::Write;

use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::{Value, json};

use crate::engine::account::Ceilings;
use crate::measure::recorder::{ArmRecord, RequestRecord, StepRecord};
use crate::{Error, Result};

/// Tracks within an arm's process; requests follow from `FIRST_REQUEST` on.
const STEPS: u64 = 1;
const KERNELS: u64 = 2;
const FIRST_REQUEST: u64 = 100;

#[derive(Debug, Default)]
pub struct ChromeTrace {
    events: Vec<Value>,
    arms: u64,
}

impl ChromeTrace {
    /// Adds one arm's traced pass.
    pub fn add(&mut self, arm: &str, record: &ArmRecord, ceilings: &Ceilings) {
        self.arms += 1;
        let process = self.arms;
        self.name(process, None, arm);
        self.name(process, Some(STEPS), "scheduler steps");
        for step in &record.steps {
            self.step(process, step, ceilings);
        }
        if record.steps.iter().any(|step| !step.report.kernels.is_empty()) {
            self.name(process, Some(KERNELS), "kernels");
        }
        for request in &record.requests {
            self.request(process, request);
        }
    }

    fn name(&mut self, process: u64, thread: Option<u64>, name: &str) {
        let kind = if thread.is_some() { "thread_name" } else { "process_name" };
        self.events.push(json!({
            "ph": "M", "name": kind, "pid": process, "tid": thread.unwrap_or(0), "args": {"name": name},
        }));
    }

    fn span(&mut self, process: u64, thread: u64, name: &str, start_s: f64, end_s: f64, args: Value) {
        self.events.push(json!({
            "ph": "X", "name": name, "pid": process, "tid": thread,
            "ts": start_s * 1e6, "dur": (end_s - start_s).max(0.0) * 1e6, "args": args,
        }));
    }

    fn counter(&mut self, process: u64, name: &str, at_s: f64, value: f64) {
        self.events
            .push(json!({"ph": "C", "name": name, "pid": process, "ts": at_s * 1e6, "args": {name: value}}));
    }

    fn step(&mut self, process: u64, step: &StepRecord, ceilings: &Ceilings) {
        let report = &step.report;
        let name = format!("{} {}", report.kind.as_str(), report.running);
        let args = json!({
            "step": report.index,
            "decode_tokens": report.decode_tokens,
            "prefill_tokens": report.prefill_tokens,
            "drafted": report.drafted,
            "accepted": report.accepted,
            "weights_bytes": report.cost.bytes.weights,
            "state_bytes": report.cost.bytes.state,
            "kv_bytes": report.cost.bytes.kv,
            "flops": report.cost.flops,
            "floor_ms": report.cost.floor_s * 1e3,
            "wall_ms": step.wall_s * 1e3,
            "host_ms": report.host_s * 1e3,
        });
        self.span(process, STEPS, &name, report.start_s, report.end_s, args);
        self.counter(process, "running", report.start_s, report.running as f64);
        self.counter(process, "waiting", report.start_s, report.waiting as f64);
        let usage = report.blocks_used as f64 / report.blocks_total.max(1) as f64;
        self.counter(process, "KV usage", report.start_s, usage);
        for kernel in &report.kernels {
            let seconds = kernel.end_s - kernel.start_s;
            let per_s = |amount: u64| if seconds > 0.0 { amount as f64 / seconds } else { 0.0 };
            let share = |rate: f64, roof: f64| if roof > 0.0 { rate / roof } else { 0.0 };
            let of_roof = share(per_s(kernel.bytes), ceilings.read_bytes_per_s)
                .max(share(per_s(kernel.flops), ceilings.flops_per_s));
            let args = json!({
                "bytes": kernel.bytes,
                "flops": kernel.flops,
                "GB/s": per_s(kernel.bytes) / 1e9,
                "share of roof": of_roof,
            });
            self.span(process, KERNELS, &kernel.name, kernel.start_s, kernel.end_s, args);
        }
    }

    /// Queue, prefill and decode of a request, one after the other on its own track.
    fn request(&mut self, process: u64, request: &RequestRecord) {
        let thread = FIRST_REQUEST + request.index as u64;
        self.name(process, Some(thread), &format!("request {}", request.index));
        let args = json!({"input_tokens": request.input_tokens, "output_tokens": request.tokens_s.len()});
        let scheduled_s = request.scheduled_s.first().copied();
        let first_token_s = request.tokens_s.first().copied();
        let phases = [
            ("queue", Some(request.intended_s), scheduled_s),
            ("prefill", scheduled_s, first_token_s),
            ("decode", first_token_s, request.finish_s),
        ];
        for (name, start, end) in phases {
            if let (Some(start_s), Some(end_s)) = (start, end) {
                self.span(process, thread, name, start_s, end_s, args.clone());
            }
        }
        for &at_s in &request.preempted_s {
            self.events.push(json!({
                "ph": "i", "s": "t", "name": "preempted", "pid": process, "tid": thread, "ts": at_s * 1e6,
            }));
        }
    }

    pub fn json(&self) -> Value {
        json!({"displayTimeUnit": "ms", "traceEvents": self.events})
    }

    pub fn gzip(&self) -> Result<Vec<u8>> {
        let failed = |error: std::io::Error| Error::failed(format!("cannot pack the trace: {error}"), "");
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(self.json().to_string().as_bytes()).map_err(failed)?;
        encoder.finish().map_err(failed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    #[test]
    fn a_packed_trace_is_json_with_named_tracks() {
        let ceilings = crate::experiment::device::NO_CEILINGS;
        let mut trace = ChromeTrace::default();
        trace.add("a=1", &ArmRecord::default(), &ceilings);
        let mut text = String::new();
        flate2::read::GzDecoder::new(trace.gzip().unwrap().as_slice()).read_to_string(&mut text).unwrap();
        let json: Value = serde_json::from_str(&text).unwrap();
        let names: Vec<_> =
            json["traceEvents"].as_array().unwrap().iter().map(|event| &event["args"]["name"]).collect();
        assert_eq!(names, ["a=1", "scheduler steps"]);
    }
}
