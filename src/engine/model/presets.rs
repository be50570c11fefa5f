//! Built-in shapes of published models, for synthetic weights, planning and simulation: nothing is read or allocated.
//!
//! Shapes of the Qwen3.5 family are those of the published `config.json` files; their parameter counts equal the
//! published safetensors totals (vision tower and MTP head left out).

use super::layout::{ModelLayout, WeightFormat};
use super::spec::{Attention, DeltaNet, Family, Linear, Mixer, ModelSpec, Role, Rope, RopeScaling};
use crate::{Error, Result};

/// A named shape and which of its matrices are 4-bit.
#[derive(Debug, Clone, Copy)]
pub struct Preset {
    pub name: &'static str,
    shape: Shape,
    quantized: Quantized,
}

#[derive(Debug, Clone, Copy)]
enum Shape {
    Hybrid(Hybrid),
    /// Qwen2.5-7B.
    Qwen25,
}

#[derive(Debug, Clone, Copy)]
struct Hybrid {
    hidden: usize,
    intermediate: usize,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    value_heads: usize,
    vocab: usize,
    real_vocab: usize,
    tied: bool,
}

/// Which linears are int4 (group 128 with zero points); the rest is fp16.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Quantized {
    Nothing,
    /// All but `in_proj_a`, `in_proj_b` and the head.
    LargeLinears,
    /// The MLPs of all layers but the first: what the published 9B AWQ file holds.
    MlpFromLayer1,
}

const QWEN35: Hybrid = Hybrid {
    hidden: 2560,
    intermediate: 9216,
    layers: 32,
    heads: 16,
    kv_heads: 4,
    value_heads: 32,
    vocab: 248_320,
    // 248,044 base tokens and 33 added ones; the other rows are padding.
    real_vocab: 248_077,
    tied: true,
};
const QWEN35_9B: Hybrid = Hybrid { hidden: 4096, intermediate: 12_288, tied: false, ..QWEN35 };
const SMALL: Hybrid = Hybrid { layers: 24, heads: 8, kv_heads: 2, value_heads: 16, ..QWEN35 };

const fn preset(name: &'static str, shape: Shape, quantized: Quantized) -> Preset {
    Preset { name, shape, quantized }
}

const PRESETS: [Preset; 8] = [
    preset("demo", Shape::Hybrid(DEMO), Quantized::Nothing),
    preset(
        "qwen3.5-0.8b",
        Shape::Hybrid(Hybrid { hidden: 1024, intermediate: 3584, ..SMALL }),
        Quantized::Nothing,
    ),
    preset(
        "qwen3.5-2b",
        Shape::Hybrid(Hybrid { hidden: 2048, intermediate: 6144, ..SMALL }),
        Quantized::Nothing,
    ),
    preset("qwen3.5-4b", Shape::Hybrid(QWEN35), Quantized::Nothing),
    preset("qwen3.5-9b", Shape::Hybrid(QWEN35_9B), Quantized::Nothing),
    preset("qwen3.5-9b-awq", Shape::Hybrid(QWEN35_9B), Quantized::LargeLinears),
    preset("qwen3.5-9b-awq-mlp", Shape::Hybrid(QWEN35_9B), Quantized::MlpFromLayer1),
    preset("qwen2.5-7b", Shape::Qwen25, Quantized::Nothing),
];

/// Small enough that any CPU decodes it at a readable pace, large enough that decode is bound by memory.
const DEMO: Hybrid = Hybrid {
    hidden: 768,
    intermediate: 2048,
    layers: 12,
    heads: 8,
    kv_heads: 2,
    value_heads: 16,
    vocab: 32_000,
    real_vocab: 32_000,
    tied: true,
};

/// All presets, in the order help and messages list them.
pub fn names() -> impl Iterator<Item = &'static str> {
    PRESETS.iter().map(|preset| preset.name)
}

/// # Errors
/// [`Error::Invalid`] offering the nearest name.
pub fn find(name: &str) -> Result<Preset> {
    if let Some(found) = PRESETS.iter().find(|preset| preset.name == name) {
        return Ok(*found);
    }
    let all = names().collect::<Vec<_>>().join(", ");
    if name.contains("awq") {
        let forms = PRESETS.iter().filter(|preset| !matches!(preset.quantized, Quantized::Nothing));
        let forms: Vec<&str> = forms.map(|preset| preset.name).collect();
        return Err(Error::invalid(
            format!("unknown synthetic preset `{name}`"),
            format!("in 4 bits there are {}. Presets: {all}", forms.join(" and ")),
        ));
    }
    let nearest =
        names().max_by(|a, b| strsim::jaro_winkler(a, name).total_cmp(&strsim::jaro_winkler(b, name)));
    Err(Error::invalid(
        format!("unknown synthetic preset `{name}`"),
        format!("did you mean `{}`? Presets: {all}", nearest.unwrap_or("demo")),
    ))
}

/// Shape and formats of a preset (with or without `synthetic:` before its name), for planning and simulation.
///
/// # Errors
/// An unknown name, with the nearest one.
pub fn synthetic_layout(preset: &str) -> Result<ModelLayout> {
    let preset = find(preset.strip_prefix("synthetic:").unwrap_or(preset))?;
    let spec = match preset.shape {
        Shape::Hybrid(shape) => hybrid_spec(preset.name, &shape),
        Shape::Qwen25 => qwen25_7b_spec(preset.name),
    };
    let linears =
        spec.linears().into_iter().map(|linear| (linear, preset.quantized.format(&linear))).collect();
    Ok(ModelLayout {
        spec,
        linears,
        embedding: WeightFormat::F16,
        synthetic: true,
        hash: format!("synthetic:{}", preset.name),
    })
}

impl Quantized {
    fn format(self, linear: &Linear) -> WeightFormat {
        let int4 = match (self, linear.role) {
            (Self::Nothing, _) => false,
            (Self::LargeLinears, role) => !matches!(role, Role::InA | Role::InB | Role::Head),
            (Self::MlpFromLayer1, Role::Gate | Role::Up | Role::Down) => linear.layer != Some(0),
            (Self::MlpFromLayer1, _) => false,
        };
        if int4 { WeightFormat::Int4 { group: 128, zero_points: true } } else { WeightFormat::F16 }
    }
}

fn hybrid_spec(name: &str, shape: &Hybrid) -> ModelSpec {
    let layers =
        (1..=shape.layers).map(|i| if i % 4 == 0 { Mixer::Attention } else { Mixer::DeltaNet }).collect();
    ModelSpec {
        family: Family::Qwen35,
        name: name.to_string(),
        hidden_size: shape.hidden,
        intermediate_size: shape.intermediate,
        vocab_size: shape.vocab,
        layers,
        attention: Attention {
            heads: shape.heads,
            kv_heads: shape.kv_heads,
            head_dim: 256,
            output_gate: true,
            qk_norm: true,
            qkv_bias: false,
            rope: Rope { theta: 1e7, rotary_dim: 64, scaling: RopeScaling::None },
        },
        delta_net: Some(DeltaNet {
            key_heads: 16,
            value_heads: shape.value_heads,
            key_dim: 128,
            value_dim: 128,
            conv_width: 4,
        }),
        norm_eps: 1e-6,
        norm_plus_one: true,
        tied_head: shape.tied,
        max_position: 262_144,
        // Noise must not stop by accident.
        eos_tokens: Vec::new(),
        real_vocab_size: shape.real_vocab,
    }
}

fn qwen25_7b_spec(name: &str) -> ModelSpec {
    ModelSpec {
        family: Family::Qwen2,
        name: name.to_string(),
        hidden_size: 3584,
        intermediate_size: 18_944,
        vocab_size: 152_064,
        layers: vec![Mixer::Attention; 28],
        attention: Attention {
            heads: 28,
            kv_heads: 4,
            head_dim: 128,
            output_gate: false,
            qk_norm: false,
            qkv_bias: true,
            rope: Rope { theta: 1e6, rotary_dim: 128, scaling: RopeScaling::None },
        },
        delta_net: None,
        norm_eps: 1e-6,
        norm_plus_one: false,
        tied_head: false,
        max_position: 32_768,
        eos_tokens: Vec::new(),
        // 151,643 base tokens and 22 added ones.
        real_vocab_size: 151_665,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameter_counts_equal_the_published_ones() {
        for (preset, published) in [
            ("qwen3.5-0.8b", 752_393_024),
            ("qwen3.5-2b", 1_881_825_088),
            ("qwen3.5-4b", 4_205_751_296),
            ("qwen3.5-9b", 8_953_803_264),
            ("qwen3.5-9b-awq", 8_953_803_264),
            ("qwen3.5-9b-awq-mlp", 8_953_803_264),
            ("qwen2.5-7b", 7_615_616_512),
        ] {
            assert_eq!(synthetic_layout(preset).unwrap().parameters(), published, "{preset}");
        }
        assert_eq!(synthetic_layout("synthetic:demo").unwrap().parameters(), 168_957_600);
    }

    #[test]
    fn streamed_bytes_equal_the_byte_table() {
        let streamed = |preset: &str| synthetic_layout(preset).unwrap().streamed_bytes();
        assert_eq!(streamed("qwen3.5-4b"), 8_411_502_592);
        // GB to three decimals, as the table gives them.
        let gb = |bytes: u64| (bytes as f64 / 1e6).round() / 1e3;
        assert_eq!(gb(streamed("qwen3.5-0.8b")), 1.505);
        assert_eq!(gb(streamed("qwen3.5-2b")), 3.764);
        assert_eq!(gb(streamed("qwen3.5-9b")), 15.873);
        assert_eq!(gb(streamed("qwen3.5-9b-awq-mlp")), 8.944);
        assert_eq!(gb(streamed("qwen3.5-9b-awq")), 5.640);
        assert_eq!(synthetic_layout("qwen3.5-9b").unwrap().weight_bytes(), 17_907_606_528);
    }

    #[test]
    fn components_equal_the_byte_table() {
        let elements = |preset: &str, roles: &[Role]| -> u64 {
            let layout = synthetic_layout(preset).unwrap();
            let chosen = layout.linears.iter().filter(|(linear, _)| roles.contains(&linear.role));
            chosen.map(|(linear, _)| (linear.rows * linear.cols) as u64).sum()
        };
        for (roles, of_4b, of_9b) in [
            (&[Role::Gate, Role::Up, Role::Down][..], 2_264_924_160, 4_831_838_208),
            (&[Role::InQkv], 503_316_480, 805_306_368),
            (&[Role::InZ], 251_658_240, 402_653_184),
            (&[Role::DeltaOut], 251_658_240, 402_653_184),
            (&[Role::InA, Role::InB], 3_932_160, 6_291_456),
            (&[Role::Q], 167_772_160, 268_435_456),
            (&[Role::K, Role::V], 41_943_040, 67_108_864),
            (&[Role::O], 83_886_080, 134_217_728),
            (&[Role::Head], 635_699_200, 1_017_118_720),
        ] {
            assert_eq!(elements("qwen3.5-4b", roles), of_4b, "{roles:?}");
            assert_eq!(elements("qwen3.5-9b", roles), of_9b, "{roles:?}");
        }
        let small = |preset: &str| synthetic_layout(preset).unwrap().small_elements();
        assert_eq!(small("qwen3.5-4b"), 791_040 + 170_496);
        assert_eq!(small("qwen3.5-9b"), 791_040 + 270_336);
    }

    #[test]
    fn states_have_the_published_sizes() {
        let spec = synthetic_layout("qwen3.5-4b").unwrap().spec;
        let delta = spec.delta_net.as_ref().unwrap();
        assert_eq!(4 * delta.state_elements() * spec.delta_net_layers(), 50_331_648);
        assert_eq!(2 * delta.window_elements() * spec.delta_net_layers(), 1_179_648);
        assert_eq!(2 * spec.kv_elements_per_token(), 32_768);
    }
}
