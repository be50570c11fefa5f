//! trace.json.gz: what the device did, for Perfetto or chrome://tracing.
//!
//! One process an arm. In it a track of scheduler steps, one of kernels (with bytes, FLOPs, GB/s and share of the roof),
//! one a request, and counters of running and waiting requests and of the blocks in use. Times are microseconds from
//! the start of the traced pass, which is not one of the measured ones. Kernels that start before the one in front of them
//! has ended go to further tracks, since spans of one track must not cross. A pass may launch a million kernels: those of the
//! first steps of each kind are here, and kernels.csv counts all.

use std::collections::BTreeMap;
use std::io::Write;

use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::{Value, json};

use crate::engine::account::Ceilings;
use crate::measure::kernels::{exclusive_s, floor_s};
use crate::measure::recorder::{ArmRecord, RequestRecord, StepRecord};
use crate::{Error, Result};

/// Tracks within an arm's process; requests follow from `FIRST_REQUEST` on.
const STEPS: u64 = 1;
const KERNELS: u64 = 2;
const MAX_KERNEL_TRACKS: usize = 8;
/// Steps of a kind whose kernels are shown, for each arm.
const KERNEL_STEPS: usize = 50;
const FIRST_REQUEST: u64 = 100;

#[derive(Debug, Default)]
pub struct ChromeTrace {
    /// Events as JSON, separated by commas.
    events: String,
    arms: u64,
}

impl ChromeTrace {
    /// Adds one arm's traced pass.
    pub fn add(&mut self, arm: &str, record: &ArmRecord, ceilings: Option<&Ceilings>) {
        self.arms += 1;
        let process = self.arms;
        self.name(process, None, arm);
        self.name(process, Some(STEPS), "scheduler steps");
        // When the last kernel of each kernel track ends.
        let mut tracks: Vec<f64> = Vec::new();
        let mut seen: BTreeMap<&str, usize> = BTreeMap::new();
        for step in &record.steps {
            self.step(process, step);
            let seen = seen.entry(step.report.kind.as_str()).or_default();
            *seen += 1;
            if *seen <= KERNEL_STEPS {
                self.kernels(process, step, ceilings, &mut tracks);
            }
        }
        let all = seen.values().all(|&steps| steps <= KERNEL_STEPS);
        let of = if all { String::new() } else { format!(" (first {KERNEL_STEPS} steps of a kind)") };
        for track in 0..tracks.len() {
            let name =
                if track == 0 { format!("kernels{of}") } else { format!("kernels, overlapping {track}") };
            self.name(process, Some(KERNELS + track as u64), &name);
        }
        for request in &record.requests {
            self.request(process, request);
        }
    }

    fn push(&mut self, event: &Value) {
        if !self.events.is_empty() {
            self.events.push(',');
        }
        self.events += &event.to_string();
    }

    fn name(&mut self, process: u64, thread: Option<u64>, name: &str) {
        let kind = if thread.is_some() { "thread_name" } else { "process_name" };
        self.push(&json!({
            "ph": "M", "name": kind, "pid": process, "tid": thread.unwrap_or(0), "args": {"name": name},
        }));
    }

    fn span(&mut self, process: u64, thread: u64, name: &str, start_s: f64, end_s: f64, args: Value) {
        self.push(&json!({
            "ph": "X", "name": name, "pid": process, "tid": thread,
            "ts": start_s * 1e6, "dur": (end_s - start_s).max(0.0) * 1e6, "args": args,
        }));
    }

    fn counter(&mut self, process: u64, name: &str, at_s: f64, value: f64) {
        self.push(&json!({"ph": "C", "name": name, "pid": process, "ts": at_s * 1e6, "args": {name: value}}));
    }

    fn step(&mut self, process: u64, step: &StepRecord) {
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
    }

    /// Rates are over a kernel's whole span; `alone_us` is the part of it after everything in front of it had ended.
    fn kernels(
        &mut self,
        process: u64,
        step: &StepRecord,
        ceilings: Option<&Ceilings>,
        tracks: &mut Vec<f64>,
    ) {
        let kernels = &step.report.kernels;
        for (kernel, alone_s) in kernels.iter().zip(exclusive_s(kernels)) {
            let seconds = kernel.end_s - kernel.start_s;
            let per_s = |amount: f64| if seconds > 0.0 { amount / seconds } else { 0.0 };
            let floor_s = floor_s(kernel, ceilings);
            let args = json!({
                "bytes": kernel.bytes,
                "flops": kernel.flops,
                "GB/s": per_s(kernel.bytes as f64) / 1e9,
                "share of roof": per_s(floor_s),
                "floor_us": floor_s * 1e6,
                "alone_us": alone_s * 1e6,
            });
            let free = tracks.iter().position(|&end_s| end_s <= kernel.start_s);
            let track = free.unwrap_or_else(|| {
                if tracks.len() < MAX_KERNEL_TRACKS {
                    tracks.push(0.0);
                }
                tracks.len() - 1
            });
            tracks[track] = kernel.end_s;
            let thread = KERNELS + track as u64;
            self.span(process, thread, &kernel.name, kernel.start_s, kernel.end_s, args);
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
            self.push(&json!({
                "ph": "i", "s": "t", "name": "preempted", "pid": process, "tid": thread, "ts": at_s * 1e6,
            }));
        }
    }

    /// The trace as gzipped JSON.
    ///
    /// # Errors
    /// A fault of the program alone.
    pub fn gzip(&self) -> Result<Vec<u8>> {
        let failed = |error: std::io::Error| Error::bug(format!("cannot pack the trace: {error}"));
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        let (before, after) = ("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[", "]}");
        for part in [before, &self.events, after] {
            encoder.write_all(part.as_bytes()).map_err(failed)?;
        }
        encoder.finish().map_err(failed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::device::KernelRecord;
    use crate::engine::step_report::StepKind;
    use crate::measure::testing::{record_of, step};
    use std::io::Read;

    fn unpack(trace: &ChromeTrace) -> Value {
        let mut text = String::new();
        flate2::read::GzDecoder::new(trace.gzip().unwrap().as_slice()).read_to_string(&mut text).unwrap();
        serde_json::from_str(&text).unwrap()
    }

    #[test]
    fn a_packed_trace_is_json_with_named_tracks() {
        let mut trace = ChromeTrace::default();
        trace.add("a=1", &ArmRecord::default(), None);
        let json = unpack(&trace);
        let names: Vec<_> =
            json["traceEvents"].as_array().unwrap().iter().map(|event| &event["args"]["name"]).collect();
        assert_eq!(names, ["a=1", "scheduler steps"]);
    }

    #[test]
    fn kernels_that_overlap_lie_on_tracks_of_their_own() {
        let kernel = |start_s: f64, end_s: f64| KernelRecord {
            name: "k".to_string(),
            start_s,
            end_s,
            bytes: 2_000_000,
            flops: 0,
        };
        let mut decode = step(StepKind::Decode, 0.0, 0.010);
        decode.report.kernels = vec![kernel(0.0, 0.004), kernel(0.002, 0.006), kernel(0.004, 0.008)];
        let ceilings = Ceilings {
            read_bytes_per_s: 1e9,
            copy_bytes_per_s: 1e9,
            flops_per_s: 1e12,
            launch_s: 0.0,
            measured: true,
        };
        let mut trace = ChromeTrace::default();
        trace.add("a", &record_of(Vec::new(), vec![decode]), Some(&ceilings));
        let json = unpack(&trace);
        let spans: Vec<&Value> =
            json["traceEvents"].as_array().unwrap().iter().filter(|event| event["name"] == "k").collect();
        let tracks: Vec<_> = spans.iter().map(|span| span["tid"].as_u64().unwrap()).collect();
        assert_eq!(tracks, [KERNELS, KERNELS + 1, KERNELS]);
        let args = &spans[1]["args"];
        let near = |key: &str, value: f64| (args[key].as_f64().unwrap() - value).abs() < 1e-9 * value;
        // 2 MB in 4 ms, of which the first 2 ms were spent beside the kernel in front.
        assert!(near("GB/s", 0.5) && near("share of roof", 0.5) && near("alone_us", 2000.0), "{args}");
    }
}
