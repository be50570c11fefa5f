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
}

/// The device's limits, measured (or from the data sheet, for a simulation). 0 where there is none (`sim:fixed`).
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

/// One dependent phase of a step: its bytes and FLOPs may overlap with each other, not with another phase's.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Phase {
    pub bytes: u64,
    pub flops: u64,
}

impl Phase {
    /// max(bytes/bandwidth, FLOPs/rate), seconds. A ceiling of 0 is none.
    pub fn floor_s(&self, ceilings: &Ceilings) -> f64 {
        let time_s = |amount: u64, ceiling: f64| if ceiling > 0.0 { amount as f64 / ceiling } else { 0.0 };
        time_s(self.bytes, ceilings.read_bytes_per_s).max(time_s(self.flops, ceilings.flops_per_s))
    }
}

/// What a step moves and computes, by dependent phase.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
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
    /// products but those of K and V. And of each (query, key) pair. Else 0.
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

/// Bytes of one sequence's recurrent states and convolution windows over all layers. Windows are stored like K and V.
pub fn state_bytes_per_sequence(spec: &ModelSpec, state_dtype: CacheDtype, kv_dtype: CacheDtype) -> u64 {
    let Some(delta) = &spec.delta_net else { return 0 };
    // The state is 32-bit unless a narrower type was asked for.
    let state_element = if state_dtype == CacheDtype::Auto { 4 } else { dtype_bytes(state_dtype) };
    let layer = delta.state_elements() as u64 * state_element
        + delta.window_elements() as u64 * dtype_bytes(kv_dtype);
    layer * spec.delta_net_layers() as u64
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

    pub fn cost(&self, shapes: &[SequenceShape], ceilings: &Ceilings) -> StepCost {
        let phases = self.phases(shapes);
        StepCost {
            bytes: ByteClasses {
                weights: phases.weights.bytes,
                state: phases.state.bytes,
                kv: phases.attention.bytes,
                activations: phases.activation_bytes,
            },
            flops: phases.weights.flops + phases.state.flops + phases.attention.flops,
            floor_s: phases.floor_s(ceilings),
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
    CostModel::new(layout, plan).cost(shapes, ceilings)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::model::layout::WeightFormat;
    use crate::engine::model::spec::{Attention, DeltaNet, Family, Mixer, Role, Rope, RopeScaling};

    /// Qwen3.5 4B, or with `nine` the 9B; `int4` says which modules are packed in groups of 128 with zero points.
    fn layout(nine: bool, int4: impl Fn(Option<usize>, Role) -> bool) -> ModelLayout {
        let spec = ModelSpec {
            family: Family::Qwen35,
            name: "test".into(),
            hidden_size: if nine { 4096 } else { 2560 },
            intermediate_size: if nine { 12288 } else { 9216 },
            vocab_size: 248_320,
            layers: (0..32)
                .map(|layer| if layer % 4 == 3 { Mixer::Attention } else { Mixer::DeltaNet })
                .collect(),
            attention: Attention {
                heads: 16,
                kv_heads: 4,
                head_dim: 256,
                output_gate: true,
                qk_norm: true,
                qkv_bias: false,
                rope: Rope { theta: 1e7, rotary_dim: 64, scaling: RopeScaling::None },
            },
            delta_net: Some(DeltaNet {
                key_heads: 16,
                value_heads: 32,
                key_dim: 128,
                value_dim: 128,
                conv_width: 4,
            }),
            norm_eps: 1e-6,
            norm_plus_one: true,
            tied_head: !nine,
            max_position: 262_144,
            eos_tokens: vec![248_044],
            real_vocab_size: 248_077,
        };
        let linears = spec
            .linears()
            .into_iter()
            .map(|linear| {
                let packed = int4(linear.layer, linear.role);
                let int4 = WeightFormat::Int4 { group: 128, zero_points: true };
                (linear, if packed { int4 } else { WeightFormat::F16 })
            })
            .collect();
        ModelLayout { spec, linears, embedding: WeightFormat::F16, synthetic: true, hash: String::new() }
    }

    fn is_mlp(role: Role) -> bool {
        matches!(role, Role::Gate | Role::Up | Role::Down)
    }

    fn cost_model(layout: &ModelLayout) -> CostModel {
        CostModel::with_dtypes(layout, CacheDtype::F16, CacheDtype::F32)
    }

    fn h200() -> Ceilings {
        Ceilings {
            read_bytes_per_s: 4.63e12,
            copy_bytes_per_s: 4.2e12,
            flops_per_s: 790e12,
            launch_s: 0.0,
            measured: true,
        }
    }

    fn plan(state_write_interval: usize, last_layer: LastLayer) -> CachePlan {
        CachePlan {
            layout: crate::engine::config::KvLayout::Split,
            block_tokens: 16,
            kv_blocks: 1,
            state_slots: 1,
            kv_dtype: CacheDtype::F16,
            state_dtype: CacheDtype::F32,
            state_write_interval,
            last_layer,
            max_model_len: 1,
            max_num_seqs: 1,
            max_num_batched_tokens: 1,
            max_drafts: 0,
        }
    }

    #[test]
    fn a_prompt_leaves_out_the_last_layer_but_its_k_and_v() {
        let model = layout(false, |_, _| false);
        let (all, outputs) = (
            CostModel::new(&model, &plan(1, LastLayer::All)),
            CostModel::new(&model, &plan(1, LastLayer::Outputs)),
        );
        // q with its gate, o, and the MLP's three.
        let skipped = 2 * 2560 * (8192 + 4096 + 3 * 9216);
        let chunk = |new, context, rows| {
            [SequenceShape { new_tokens: new, context_tokens: context, sampled_rows: rows, decode: false }]
        };
        let less = |shapes: &[SequenceShape]| {
            let (all, outputs) = (all.phases(shapes), outputs.phases(shapes));
            (all.weights.flops - outputs.weights.flops, all.attention.flops - outputs.attention.flops)
        };
        let pair = 4 * 16 * 256;
        assert_eq!(less(&chunk(100, 50, 1)), (99 * skipped, (100 * 50 + 5050 - 150) * pair));
        assert_eq!(less(&chunk(100, 50, 2)), (98 * skipped, (100 * 50 + 5050 - 150 - 149) * pair));
        assert_eq!(less(&chunk(100, 0, 0)), (100 * skipped, 5050 * pair));
        assert_eq!(less(&decode(3, 500)), (0, 0));
    }

    #[test]
    fn states_written_every_eighth_token_move_three_fifths() {
        let model = layout(false, |_, _| false);
        let plan = |interval| plan(interval, LastLayer::All);
        // 24 layers of 32 heads: 64 KB of state each, and 1,040 bytes a token that the state is behind.
        let heads = 24 * 32;
        assert_eq!(pending_token_bytes(&model.spec), heads * 1040);
        let (always, eighth) = (CostModel::new(&model, &plan(1)), CostModel::new(&model, &plan(8)));
        assert_eq!(always.decode_state_bytes(), 2 * always.state_bytes_per_sequence);
        let saved = heads * (65_536 * 7 / 8 - 1040 * 11 / 2);
        assert_eq!(always.decode_state_bytes() - eighth.decode_state_bytes(), saved);
        let state = |model: &CostModel, shape| model.phases(&[shape]).state.bytes;
        let token = decode(1, 128)[0];
        assert_eq!(state(&always, token) - state(&eighth, token), saved);
        // Prompt chunks write what they read.
        let chunk = SequenceShape { new_tokens: 64, decode: false, ..token };
        assert_eq!(state(&always, chunk), state(&eighth, chunk));
    }

    fn decode(batch: usize, context: usize) -> Vec<SequenceShape> {
        vec![SequenceShape { new_tokens: 1, context_tokens: context, sampled_rows: 1, decode: true }; batch]
    }

    fn floor_ms(model: &CostModel, shapes: &[SequenceShape]) -> f64 {
        model.cost(shapes, &h200()).floor_s * 1e3
    }

    #[track_caller]
    fn close(found: f64, expected: f64, tolerance: f64) {
        assert!((found - expected).abs() <= tolerance, "found {found}, expected {expected} +- {tolerance}");
    }

    #[test]
    fn constants_equal_the_published_tables() {
        let four = cost_model(&layout(false, |_, _| false));
        assert_eq!(four.layer_weight_bytes + four.head_weight_bytes, 8_411_502_592);
        assert_eq!(four.state_bytes_per_sequence, 50_331_648 + 1_179_648);
        assert_eq!(four.kv_bytes_per_token, 32_768);
        assert_eq!(four.attention_flops_per_pair, 131_072);
        // 7 dk dv Hv over 24 layers, and the chunked form; the convolution is 2 * 8192 * 4 a layer.
        let convolution = 24 * 2 * 8192 * 4;
        assert_eq!(four.recurrent_flops_per_token - convolution, 88_080_384);
        close((four.chunked_flops_per_token - convolution) as f64, 140.5e6, 0.1e6);
        close((four.layer_flops_per_token + four.head_flops_per_row) as f64, 8.4e9, 0.02e9);
        let nine = cost_model(&layout(true, |_, _| false));
        close((nine.layer_flops_per_token + nine.head_flops_per_row) as f64, 15.9e9, 0.05e9);
        close((nine.layer_weight_bytes + nine.head_weight_bytes) as f64, 15.873e9, 1e6);
    }

    #[test]
    fn a_decode_step_moves_the_bytes_of_the_published_table() {
        let four = cost_model(&layout(false, |_, _| false));
        let nine = cost_model(&layout(true, |layer, role| is_mlp(role) && layer != Some(0)));
        // (batch, context, GB); a step also writes the new token's K and V, 0.03 MB a sequence.
        for (model, batch, context, gigabytes) in [
            (&four, 1, 0, 8.51),
            (&four, 4, 1024, 8.96),
            (&four, 16, 4096, 12.21),
            (&four, 64, 1024, 17.15),
            (&nine, 1, 1024, 9.08),
            (&nine, 16, 4096, 12.74),
            (&nine, 64, 16_384, 49.90),
        ] {
            let mut shapes = decode(batch, context.max(1));
            if context == 0 {
                shapes[0].context_tokens = 1;
            }
            let bytes = model.cost(&shapes, &h200()).bytes;
            let found = (bytes.weights + bytes.state + bytes.kv) as f64 / 1e9;
            close(found, gigabytes, 0.006 * gigabytes.max(1.0) / 8.0);
        }
    }

    #[test]
    fn decode_floors_equal_those_measured_against() {
        // 128 outputs after 128-token prompts: a mean context of 192.
        let four = cost_model(&layout(false, |_, _| false));
        let all = cost_model(&layout(true, |layer, role| {
            layer.is_some() && !matches!(role, Role::InA | Role::InB)
        }));
        let mlp = cost_model(&layout(true, |layer, role| is_mlp(role) && layer != Some(0)));
        for (batch, fp16, awq, awq_mlp) in [
            (1, 1.84, 1.24, 1.96),
            (8, 2.01, 1.41, 2.12),
            (32, 2.57, 1.97, 2.69),
            (64, 3.33, 2.80, 3.44),
            (128, 4.84, 5.59, 5.59),
            (256, 8.77, 11.2, 11.2),
        ] {
            for (model, expected) in [(&four, fp16), (&all, awq), (&mlp, awq_mlp)] {
                close(floor_ms(model, &decode(batch, 192)), expected, 0.006 * expected);
            }
        }
        close(floor_ms(&four, &decode(32, 8192)), 4.39, 0.02);
        close(floor_ms(&all, &decode(64, 4096)), 4.58, 0.02);
    }

    #[test]
    fn prefill_floors_equal_those_measured_against() {
        let four = cost_model(&layout(false, |_, _| false));
        let nine = cost_model(&layout(true, |layer, role| is_mlp(role) && layer != Some(0)));
        for (prompt, fp16, awq_mlp) in
            [(256, 2.4, 4.5), (2048, 19.2, 36.6), (8192, 81.0, 151.0), (28_000, 323.0, 561.0)]
        {
            let chunk =
                [SequenceShape { new_tokens: prompt, context_tokens: 0, sampled_rows: 1, decode: false }];
            close(floor_ms(&four, &chunk), fp16, 0.02 * fp16);
            close(floor_ms(&nine, &chunk), awq_mlp, 0.02 * awq_mlp);
        }
    }

    #[test]
    fn chunks_of_a_prompt_count_its_attention_once_and_leave_the_head_out() {
        let four = cost_model(&layout(false, |_, _| false));
        let chunk = |new, context, rows| {
            [SequenceShape { new_tokens: new, context_tokens: context, sampled_rows: rows, decode: false }]
        };
        let whole = four.phases(&chunk(3000, 0, 1));
        let first = four.phases(&chunk(2048, 0, 0));
        let last = four.phases(&chunk(952, 2048, 1));
        assert_eq!(first.attention.flops + last.attention.flops, whole.attention.flops);
        assert_eq!(first.weights.bytes, four.layer_weight_bytes);
        assert_eq!(last.weights.bytes, four.layer_weight_bytes + four.head_weight_bytes);
        // The first chunk has no state to read, the second does.
        assert_eq!(first.state.bytes, four.state_bytes_per_sequence);
        assert_eq!(last.state.bytes, 2 * four.state_bytes_per_sequence);
    }

    #[test]
    fn an_empty_step_costs_nothing() {
        let four = cost_model(&layout(false, |_, _| false));
        assert_eq!(four.cost(&[], &h200()), StepCost::default());
    }
}
