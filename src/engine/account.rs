//! Bytes and FLOPs of a step, counted from the model's shape: what it must move and compute, whatever the device.
//!
//! Real devices are judged against these counts and simulated devices are charged by them.

use serde::{Deserialize, Serialize};

/// Compulsory bytes of a step by class.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ByteClasses {
    /// Weights, each streamed once whatever the batch.
    pub weights: u64,
    /// Recurrent states and convolution windows, read and written.
    pub state: u64,
    /// K and V, read for the context and written for new tokens.
    pub kv: u64,
    /// Layer inputs and outputs that a fused engine must still move.
    pub activations: u64,
}

impl ByteClasses {
    pub fn total(&self) -> u64 {
        self.weights + self.state + self.kv + self.activations
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct StepCost {
    pub bytes: ByteClasses,
    pub flops: u64,
    /// Least time on the given ceilings: the sum over dependent phases of max(bytes/bandwidth, FLOPs/rate), seconds.
    pub floor_s: f64,
}

/// The device's limits, measured (or from the data sheet, for a simulation).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Ceilings {
    /// Sustained read bandwidth, bytes a second.
    pub read_bytes_per_s: f64,
    /// Bytes read plus bytes written by a copy, a second.
    pub copy_bytes_per_s: f64,
    /// Dense multiply-add rate in the arithmetic the engine uses, FLOP a second (a multiply-add is two).
    pub flops_per_s: f64,
    /// Time one empty launch adds, seconds; 0 where there are no launches.
    pub launch_s: f64,
    /// True when measured on this machine.
    pub measured: bool,
}

/// One sequence's part of a step, as far as cost goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SequenceShape {
    /// New tokens: prompt chunk, one decode token, or one plus drafts.
    pub new_tokens: usize,
    /// Tokens already in the cache.
    pub context_tokens: usize,
    /// Rows that go through the head.
    pub sampled_rows: usize,
    /// A decode (one token plus drafts) rather than a prompt chunk.
    pub decode: bool,
}
