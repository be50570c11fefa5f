//! Bytes and FLOPs of a step's phases: each input read once, each output written once. Sums are kept always, records with
//! their times only while tracing.

use super::batch::Batch;
use super::gemm::Packed;
use super::matrix::Matrix;
use crate::engine::clock::Clock;
use crate::engine::device::KernelRecord;
use crate::engine::model::spec::{Attention, DeltaNet};

pub struct Trace {
    clock: Clock,
    on: bool,
    bytes: u64,
    records: Vec<KernelRecord>,
}

impl Trace {
    pub fn new(clock: &Clock, on: bool) -> Self {
        Self { clock: clock.clone(), on, bytes: 0, records: Vec::new() }
    }

    /// When a phase starts; 0 while not tracing.
    pub fn start(&self) -> f64 {
        if self.on { self.clock.now() } else { 0.0 }
    }

    pub fn end(&mut self, name: &str, start_s: f64, bytes: u64, flops: u64) {
        self.bytes += bytes;
        if self.on {
            let end_s = self.clock.now();
            self.records.push(KernelRecord { name: name.to_string(), start_s, end_s, bytes, flops });
        }
    }

    /// Matrices streamed once and multiplied with the rows of `input`, for each of which `results` 32-bit numbers are read
    /// or written.
    pub fn products<'a>(
        &mut self,
        name: &str,
        start_s: f64,
        matrices: impl Iterator<Item = &'a Matrix>,
        input: &Packed,
        results: usize,
    ) {
        let rows = input.tiling.rows;
        let (mut bytes, mut flops) = (input.bytes() + 4 * rows * results, 0);
        for matrix in matrices {
            bytes += matrix.bytes();
            flops += 2 * (matrix.rows * matrix.cols * rows) as u64;
        }
        self.end(name, start_s, bytes as u64, flops);
    }

    /// K and V of each context read once, of new tokens written and read; 4 FLOPs a head dim and key. `rows_bytes`: the
    /// inputs and outputs of the new tokens.
    pub fn attention(
        &mut self,
        start_s: f64,
        batch: &Batch,
        spec: &Attention,
        element_bytes: usize,
        rows_bytes: usize,
    ) {
        let row = 2 * spec.kv_heads * spec.head_dim * element_bytes;
        let (mut bytes, mut flops) = (rows_bytes, 0);
        for sequence in &batch.sequences {
            let tokens = sequence.tokens();
            bytes += row * (sequence.context + 2 * tokens);
            let keys = tokens * sequence.context + tokens * (tokens + 1) / 2;
            flops += (4 * spec.heads * spec.head_dim * keys) as u64;
        }
        self.end("attention", start_s, bytes as u64, flops);
    }

    /// States and windows read, but at a sequence's start, and written; 7 FLOPs a state element and token. `rows_bytes`: the
    /// inputs and outputs of the new tokens.
    pub fn delta_net(
        &mut self,
        start_s: f64,
        batch: &Batch,
        spec: &DeltaNet,
        element_bytes: usize,
        rows_bytes: usize,
    ) {
        let one_way = spec.state_elements() * element_bytes + 4 * spec.window_elements();
        let ways: usize = batch.sequences.iter().map(|sequence| 1 + usize::from(sequence.context > 0)).sum();
        let flops = (7 * spec.state_elements() * batch.rows) as u64;
        self.end("delta_net", start_s, (ways * one_way + rows_bytes) as u64, flops);
    }

    /// Bytes of all phases, and their records while tracing.
    pub fn take(self) -> (u64, Vec<KernelRecord>) {
        (self.bytes, self.records)
    }
}
