//! Records of a step's phases with their compulsory bytes and FLOPs, kept only while tracing.

use super::batch::Batch;
use super::matrix::Matrix;
use crate::engine::clock::Clock;
use crate::engine::device::KernelRecord;
use crate::engine::model::spec::{Attention, DeltaNet};

pub struct Trace {
    clock: Clock,
    on: bool,
    records: Vec<KernelRecord>,
}

impl Trace {
    pub fn new(clock: &Clock, on: bool) -> Self {
        Self { clock: clock.clone(), on, records: Vec::new() }
    }

    /// When a phase starts; 0 while not tracing.
    pub fn start(&self) -> f64 {
        if self.on { self.clock.now() } else { 0.0 }
    }

    pub fn end(&mut self, name: &str, start_s: f64, bytes: u64, flops: u64) {
        if self.on {
            let end_s = self.clock.now();
            self.records.push(KernelRecord { name: name.to_string(), start_s, end_s, bytes, flops });
        }
    }

    /// Matrices streamed once, `rows` rows multiplied with each, inputs read and outputs written.
    pub fn products<'a>(
        &mut self,
        name: &str,
        start_s: f64,
        matrices: impl Iterator<Item = &'a Matrix>,
        rows: usize,
    ) {
        if self.on {
            let (mut bytes, mut flops) = (0, 0);
            for matrix in matrices {
                bytes += matrix.bytes() as u64;
                flops += 2 * (matrix.rows * matrix.cols * rows) as u64;
            }
            self.end(name, start_s, bytes, flops);
        }
    }

    /// K and V of each context read once, of new tokens written; 4 FLOPs a head dim and key.
    pub fn attention(&mut self, start_s: f64, batch: &Batch, spec: &Attention, element_bytes: usize) {
        if self.on {
            let row = 2 * spec.kv_heads * spec.head_dim * element_bytes;
            let (mut bytes, mut flops) = (0, 0);
            for sequence in &batch.sequences {
                let tokens = sequence.tokens();
                bytes += (row * (sequence.context + 2 * tokens)) as u64;
                let keys = tokens * sequence.context + tokens * (tokens + 1) / 2;
                flops += (4 * spec.heads * spec.head_dim * keys) as u64;
            }
            self.end("attention", start_s, bytes, flops);
        }
    }

    /// States and windows read and written once a sequence; 7 FLOPs a state element and token.
    pub fn delta_net(&mut self, start_s: f64, batch: &Batch, spec: &DeltaNet, element_bytes: usize) {
        if self.on {
            let per_sequence = 2 * (spec.state_elements() * element_bytes + 4 * spec.window_elements());
            let bytes = (batch.sequences.len() * per_sequence) as u64;
            let flops = (7 * spec.state_elements() * batch.rows) as u64;
            self.end("delta_net", start_s, bytes, flops);
        }
    }

    pub fn take(self) -> Vec<KernelRecord> {
        self.records
    }
}
