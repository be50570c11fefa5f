//! Bytes and FLOPs of a step, counted from the model's shape: what it must move and compute, whatever the device.
//!
//! Real devices are judged against these counts and simulated devices are charged by them. A step is seen as three
//! dependent phases, since a layer's products and its token mixing wait for each other while weights wait for nobody:
//! - weights: every matrix once, against the products of all new tokens;
//! - state: recurrent states and convolution windows read and written, against the delta rule;
//! - attention: K and V of the context read and of the new tokens written, against the scores.
//!
//! Counts that depend on the model alone are taken once, in [`CostModel::new`]; [`CostModel::cost`] runs every step.

use serde::{Deserialize, Serialize};

use super::config::{CacheDtype, LastLayer};
use super::device::CachePlan;
use super::model::layout::ModelLayout;
use super::model::spec::{ModelSpec, Role};

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
    /// What the floor is made of.
    pub phases: StepPhases,
}

impl StepCost {
    /// Sets the floor to that on other ceilings; 0 without any.
    pub fn judge_by(&mut self, ceilings: Option<&Ceilings>) {
        self.floor_s = ceilings.map_or(0.0, |ceilings| self.phases.floor_s(ceilings));
    }
}

/// The device's limits, measured (or from the data sheet, for a simulation). Rates are above 0: where a device has no limits
/// (`sim:fixed`), or none were measured, there are no ceilings.
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

impl Ceilings {
    /// The better of two measurements, figure by figure.
    pub fn best_of(&self, other: &Self) -> Self {
        Self {
            read_bytes_per_s: self.read_bytes_per_s.max(other.read_bytes_per_s),
            copy_bytes_per_s: self.copy_bytes_per_s.max(other.copy_bytes_per_s),
            flops_per_s: self.flops_per_s.max(other.flops_per_s),
            launch_s: self.launch_s.min(other.launch_s),
            measured: self.measured && other.measured,
        }
    }
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

/// One dependent phase of a step: its bytes and FLOPs may overlap with each other, not with another phase's.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Phase {
    pub bytes: u64,
    pub flops: u64,
}

impl Phase {
    /// max(bytes/bandwidth, FLOPs/rate), seconds.
    pub fn floor_s(&self, ceilings: &Ceilings) -> f64 {
        (self.bytes as f64 / ceilings.read_bytes_per_s).max(self.flops as f64 / ceilings.flops_per_s)
    }
}

/// What a step moves and computes, by dependent phase.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepPhases {
    pub weights: Phase,
    pub state: Phase,
    pub attention: Phase,
    /// Bytes of layer inputs and outputs. In no phase: at decode sizes they stay in on-chip caches, and in
    /// prefill they hide behind the products.
    pub activation_bytes: u64,
}

impl StepPhases {
    pub fn floor_s(&self, ceilings: &Ceilings) -> f64 {
        self.weights.floor_s(ceilings) + self.state.floor_s(ceilings) + self.attention.floor_s(ceilings)
    }
}

/// Sums over the sequences of a step that its cost depends on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StepCounts {
    pub decode_sequences: u64,
    pub prefill_sequences: u64,
    pub decode_tokens: u64,
    pub prefill_tokens: u64,
    /// Rows that go through the head, and those of them that end a prompt.
    pub rows: u64,
    pub prefill_rows: u64,
    /// Times a sequence's state crosses the memory bus: a read and a write, or the write alone where a sequence starts.
    pub state_moves: u64,
    /// Tokens in the caches of all sequences before the step.
    pub context_tokens: u64,
    /// (query, key) pairs of attention.
    pub decode_pairs: u64,
    pub prefill_pairs: u64,
    /// Those of `prefill_rows` among the latter.
    pub prefill_row_pairs: u64,
}

impl StepCounts {
    pub fn new(shapes: &[SequenceShape]) -> Self {
        let mut counts = Self::default();
        for shape in shapes {
            let new = shape.new_tokens as u64;
            let context = shape.context_tokens as u64;
            let pairs = new * context + new * (new + 1) / 2;
            if shape.decode {
                counts.decode_sequences += 1;
                counts.decode_tokens += new;
                counts.decode_pairs += pairs;
            } else {
                counts.prefill_sequences += 1;
                counts.prefill_tokens += new;
                counts.prefill_pairs += pairs;
                // The last rows see most: `context + new`, one less, and so on.
                let rows = new.min(shape.sampled_rows as u64);
                counts.prefill_rows += rows;
                counts.prefill_row_pairs += rows * (context + new) - rows * rows.saturating_sub(1) / 2;
            }
            counts.rows += shape.sampled_rows as u64;
            // A sequence's first chunk starts from zero: nothing to read.
            counts.state_moves += if context == 0 { 1 } else { 2 };
            counts.context_tokens += context;
        }
        counts
    }
}

/// Counts of a model that do not depend on the step.
#[derive(Debug, Clone, PartialEq)]
pub struct CostModel {
    /// Bytes of every matrix and vector of the layers and the final norm; the head is apart, since a step that
    /// samples nothing leaves it out.
    pub layer_weight_bytes: u64,
    pub head_weight_bytes: u64,
    /// Products of one token through all layers, and of one row through the head.
    pub layer_flops_per_token: u64,
    pub head_flops_per_row: u64,
    /// What a prompt token without an output leaves out of the former where the last layer runs on rows with one: the layer's
    /// products but those of K and V. And of each (query, key) pair. Else 0. (A device may run a step in which the rows with an
    /// output are many, or its prompt pieces a few tokens, on all rows: it then computes more than is counted.)
    pub skipped_flops_per_token: u64,
    pub skipped_flops_per_pair: u64,
    /// Recurrent states and windows of one sequence over all layers, one way.
    pub state_bytes_per_sequence: u64,
    /// What a decode step moves less than a read and a write of those, where the state is written every few tokens only.
    pub deferred_bytes_per_decode: u64,
    /// Delta rule and convolution of one token over all layers: recurrent form, and form of 64-token chunks.
    pub recurrent_flops_per_token: u64,
    pub chunked_flops_per_token: u64,
    pub kv_bytes_per_token: u64,
    /// Scores and weighted values of one (query, key) pair over all attention layers.
    pub attention_flops_per_pair: u64,
    pub activation_bytes_per_token: u64,
}

/// Tokens in a chunk of the delta rule's chunked form.
const DELTA_CHUNK_TOKENS: u64 = 64;

/// Bytes an element takes. `Auto` has been resolved before a plan is made; it counts as two bytes.
pub fn dtype_bytes(dtype: CacheDtype) -> u64 {
    match dtype {
        CacheDtype::F32 => 4,
        CacheDtype::F16 | CacheDtype::Bf16 | CacheDtype::Auto => 2,
    }
}

/// K and V bytes of one token over all attention layers.
pub fn kv_bytes_per_token(spec: &ModelSpec, kv_dtype: CacheDtype) -> u64 {
    spec.kv_elements_per_token() as u64 * dtype_bytes(kv_dtype)
}

/// Bytes of one sequence's recurrent states and convolution windows over all layers. Windows count as stored like K
/// and V (the CPU device always keeps them in f32).
pub fn state_bytes_per_sequence(spec: &ModelSpec, state_dtype: CacheDtype, kv_dtype: CacheDtype) -> u64 {
    let Some(delta) = &spec.delta_net else { return 0 };
    // The state is 32-bit unless a narrower type was asked for.
    let state_element = if state_dtype == CacheDtype::Auto { 4 } else { dtype_bytes(state_dtype) };
    let layer = delta.state_elements() as u64 * state_element
        + delta.window_elements() as u64 * dtype_bytes(kv_dtype);
    layer * spec.delta_net_layers() as u64
}

/// Bytes of what one drafted token brings to the recurrences of all layers, in f32.
pub fn drafted_token_bytes(spec: &ModelSpec) -> u64 {
    let Some(delta) = &spec.delta_net else { return 0 };
    (delta.token_elements() * size_of::<f32>() * spec.delta_net_layers()) as u64
}

/// Bytes that stand for one token that the stored states of a sequence do not hold yet, over all layers: for each value
/// head the key, the correction and the decay, padded to 16 bytes, in f32.
pub fn pending_token_bytes(spec: &ModelSpec) -> u64 {
    let Some(delta) = &spec.delta_net else { return 0 };
    (delta.value_heads * (delta.key_dim + delta.value_dim + 4) * 4 * spec.delta_net_layers()) as u64
}

/// What a decode step saves when states are written every `interval` tokens: all writes but one in `interval`, less the
/// tokens kept meanwhile, of which (interval + 1) / 2 are read on average and one is written.
fn deferred_bytes(spec: &ModelSpec, state_dtype: CacheDtype, interval: u64) -> u64 {
    let (Some(delta), 2..) = (&spec.delta_net, interval) else { return 0 };
    let state = (delta.state_elements() * spec.delta_net_layers()) as u64 * dtype_bytes(state_dtype);
    (state - state / interval).saturating_sub(pending_token_bytes(spec) * (interval + 3) / 2)
}

impl CostModel {
    pub fn new(layout: &ModelLayout, plan: &CachePlan) -> Self {
        let mut model = Self::with_dtypes(layout, plan.kv_dtype, plan.state_dtype);
        model.deferred_bytes_per_decode =
            deferred_bytes(&layout.spec, plan.state_dtype, plan.state_write_interval as u64);
        if plan.last_layer == LastLayer::Outputs {
            let spec = &layout.spec;
            let last = layout.linears.iter().filter(|(linear, _)| {
                linear.layer == Some(spec.layers.len() - 1) && !matches!(linear.role, Role::K | Role::V)
            });
            model.skipped_flops_per_token =
                last.map(|(linear, _)| 2 * linear.rows as u64 * linear.cols as u64).sum();
            model.skipped_flops_per_pair = model.attention_flops_per_pair / spec.attention_layers() as u64;
        }
        model
    }

    pub fn with_dtypes(layout: &ModelLayout, kv_dtype: CacheDtype, state_dtype: CacheDtype) -> Self {
        let spec = &layout.spec;
        let head_weight_bytes = layout.head_bytes();
        let layer_elements: u64 = layout
            .linears
            .iter()
            .filter(|(linear, _)| linear.layer.is_some())
            .map(|(linear, _)| linear.rows as u64 * linear.cols as u64)
            .sum();
        let (recurrent, chunked) = spec.delta_net.as_ref().map_or((0, 0), |delta| {
            let heads = delta.value_heads as u64;
            let (key, value) = (delta.key_dim as u64, delta.value_dim as u64);
            // Decay, read, correct, write, read: seven operations an element of the state.
            let recurrent = 7 * key * value * heads;
            let chunk = DELTA_CHUNK_TOKENS;
            let per_head = 6 * key * value + 2 * chunk * (3 * key + 2 * value) + 2 * chunk * chunk / 3;
            let convolution = 2 * (delta.conv_channels() * delta.conv_width) as u64;
            let layers = spec.delta_net_layers() as u64;
            ((recurrent + convolution) * layers, (per_head * heads + convolution) * layers)
        });
        let attention = &spec.attention;
        let hidden = spec.hidden_size as u64;
        Self {
            layer_weight_bytes: layout.streamed_bytes() - head_weight_bytes,
            head_weight_bytes,
            layer_flops_per_token: 2 * layer_elements,
            head_flops_per_row: 2 * spec.vocab_size as u64 * hidden,
            skipped_flops_per_token: 0,
            skipped_flops_per_pair: 0,
            state_bytes_per_sequence: state_bytes_per_sequence(spec, state_dtype, kv_dtype),
            deferred_bytes_per_decode: 0,
            recurrent_flops_per_token: recurrent,
            chunked_flops_per_token: chunked,
            kv_bytes_per_token: kv_bytes_per_token(spec, kv_dtype),
            attention_flops_per_pair: 4
                * (attention.heads * attention.head_dim) as u64
                * spec.attention_layers() as u64,
            activation_bytes_per_token: layout.embedding.bytes(1, spec.hidden_size)
                + 2 * hidden * dtype_bytes(kv_dtype) * spec.layers.len() as u64,
        }
    }

    /// Recurrent states and windows that one sequence moves in a decode step, over all layers.
    pub fn decode_state_bytes(&self) -> u64 {
        2 * self.state_bytes_per_sequence - self.deferred_bytes_per_decode
    }

    /// Products of a prompt token that no output is made of.
    pub fn prefill_flops_per_token(&self) -> u64 {
        self.layer_flops_per_token - self.skipped_flops_per_token
    }

    /// Scores and weighted values of the prompts of a step.
    pub fn prefill_attention_flops(&self, counts: &StepCounts) -> u64 {
        counts.prefill_pairs * self.attention_flops_per_pair
            - (counts.prefill_pairs - counts.prefill_row_pairs) * self.skipped_flops_per_pair
    }

    /// What a step of these sequences moves and computes. Nothing at all for an empty step.
    pub fn phases(&self, shapes: &[SequenceShape]) -> StepPhases {
        self.phases_of(&StepCounts::new(shapes))
    }

    pub fn phases_of(&self, counts: &StepCounts) -> StepPhases {
        let tokens = counts.decode_tokens + counts.prefill_tokens;
        if tokens == 0 {
            return StepPhases::default();
        }
        let head_bytes = if counts.rows > 0 { self.head_weight_bytes } else { 0 };
        StepPhases {
            weights: Phase {
                bytes: self.layer_weight_bytes + head_bytes,
                flops: tokens * self.layer_flops_per_token + counts.rows * self.head_flops_per_row
                    - (counts.prefill_tokens - counts.prefill_rows) * self.skipped_flops_per_token,
            },
            state: Phase {
                bytes: counts.state_moves * self.state_bytes_per_sequence
                    - counts.decode_sequences * self.deferred_bytes_per_decode,
                flops: counts.decode_tokens * self.recurrent_flops_per_token
                    + counts.prefill_tokens * self.chunked_flops_per_token,
            },
            attention: Phase {
                bytes: (counts.context_tokens + tokens) * self.kv_bytes_per_token,
                flops: counts.decode_pairs * self.attention_flops_per_pair
                    + self.prefill_attention_flops(counts),
            },
            activation_bytes: tokens * self.activation_bytes_per_token,
        }
    }

    /// What a step of these sequences moves and computes, and its floor: 0 without ceilings.
    pub fn cost(&self, shapes: &[SequenceShape], ceilings: Option<&Ceilings>) -> StepCost {
        let phases = self.phases(shapes);
        StepCost {
            bytes: ByteClasses {
                weights: phases.weights.bytes,
                state: phases.state.bytes,
                kv: phases.attention.bytes,
                activations: phases.activation_bytes,
            },
            flops: phases.weights.flops + phases.state.flops + phases.attention.flops,
            floor_s: ceilings.map_or(0.0, |ceilings| phases.floor_s(ceilings)),
            phases,
        }
    }
}

/// [`CostModel::cost`] for a caller that has no [`CostModel`] at hand. Builds one: not for every step.
pub fn step_cost(
    layout: &ModelLayout,
    plan: &CachePlan,
    shapes: &[SequenceShape],
    ceilings: &Ceilings,
) -> StepCost {
    CostModel::new(layout, plan).cost(shapes, Some(ceilings))
}

#[cfg(test)]
mod tests;
