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
    model.cost(shapes, Some(&h200())).floor_s * 1e3
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
        let bytes = model.cost(&shapes, Some(&h200())).bytes;
        let found = (bytes.weights + bytes.state + bytes.kv) as f64 / 1e9;
        close(found, gigabytes, 0.006 * gigabytes.max(1.0) / 8.0);
    }
}

#[test]
fn decode_floors_equal_those_measured_against() {
    // 128 outputs after 128-token prompts: a mean context of 192.
    let four = cost_model(&layout(false, |_, _| false));
    let all =
        cost_model(&layout(true, |layer, role| layer.is_some() && !matches!(role, Role::InA | Role::InB)));
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
        let chunk = [SequenceShape { new_tokens: prompt, context_tokens: 0, sampled_rows: 1, decode: false }];
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
    assert_eq!(four.cost(&[], Some(&h200())), StepCost::default());
}
