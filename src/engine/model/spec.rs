//! The shape of a model: what its `config.json` says, validated, in the words of the equations.

use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Family {
    /// Hybrid: gated delta net and gated full attention.
    #[serde(rename = "qwen3_5")]
    Qwen35,
    Qwen2,
    Qwen3,
    Llama,
}

/// What mixes tokens in a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mixer {
    DeltaNet,
    Attention,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ModelSpec {
    pub family: Family,
    /// The name shown to people: a folder's name, a hub id, `qwen3.5-4b`.
    pub name: String,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub vocab_size: usize,
    pub layers: Vec<Mixer>,
    pub attention: Attention,
    /// `Some` if and only if a layer is [`Mixer::DeltaNet`].
    pub delta_net: Option<DeltaNet>,
    pub norm_eps: f32,
    /// RMSNorm weights (input, post-attention, final, q, k) are stored minus one: multiply by `1 + w`.
    pub norm_plus_one: bool,
    /// The head is the embedding.
    pub tied_head: bool,
    pub max_position: usize,
    /// Generation stops at any of these.
    pub eos_tokens: Vec<u32>,
    /// Rows of the vocabulary that hold a token; the rest is padding and never sampled.
    pub real_vocab_size: usize,
}

/// Softmax attention with grouped heads.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Attention {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// `q_proj` has twice the rows: per head, `head_dim` of query then `head_dim` of gate; the output is
    /// multiplied by sigmoid(gate) before `o_proj`.
    pub output_gate: bool,
    /// RMSNorm over the head dims of q and k before rotation.
    pub qk_norm: bool,
    pub qkv_bias: bool,
    pub rope: Rope,
}

/// Rotation of the first `rotary_dim` dims of a head, in pairs (i, i + rotary_dim/2).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Rope {
    /// Base of the angles: position * theta^(-2i / rotary_dim) for pair i.
    pub theta: f64,
    pub rotary_dim: usize,
    pub scaling: RopeScaling,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RopeScaling {
    None,
    Linear { factor: f64 },
    Llama3 { factor: f64, low_freq_factor: f64, high_freq_factor: f64, original_max_position: usize },
}

impl Rope {
    /// Angle per position of each of the `rotary_dim / 2` pairs, in radians.
    pub fn inverse_frequencies(&self) -> Vec<f64> {
        (0..self.rotary_dim / 2)
            .map(|i| {
                let frequency = self.theta.powf(-2.0 * i as f64 / self.rotary_dim as f64);
                match self.scaling {
                    RopeScaling::None => frequency,
                    RopeScaling::Linear { factor } => frequency / factor,
                    RopeScaling::Llama3 {
                        factor,
                        low_freq_factor,
                        high_freq_factor,
                        original_max_position,
                    } => {
                        let turns = original_max_position as f64 * frequency / std::f64::consts::TAU;
                        let smooth = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor))
                            .clamp(0.0, 1.0);
                        frequency * ((1.0 - smooth) / factor + smooth)
                    }
                }
            })
            .collect()
    }
}

/// Gated delta net (linear attention with a recurrent state).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DeltaNet {
    pub key_heads: usize,
    pub value_heads: usize,
    pub key_dim: usize,
    pub value_dim: usize,
    /// Taps of the causal depthwise convolution.
    pub conv_width: usize,
}

impl DeltaNet {
    /// Channels of the convolution: q, k and v.
    pub fn conv_channels(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
    }

    /// Numbers that a token brings to the recurrence: inputs of the convolution, b and a.
    pub fn token_elements(&self) -> usize {
        self.conv_channels() + 2 * self.value_heads
    }

    pub fn value_size(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Elements of one layer's recurrent state, stored as `[value_heads][value_dim][key_dim]`.
    pub fn state_elements(&self) -> usize {
        self.value_heads * self.value_dim * self.key_dim
    }

    /// Elements of one layer's convolution window: the raw inputs of the last `conv_width - 1` tokens.
    pub fn window_elements(&self) -> usize {
        self.conv_channels() * (self.conv_width - 1)
    }
}

impl ModelSpec {
    pub fn delta_net_layers(&self) -> usize {
        self.layers.iter().filter(|&&mixer| mixer == Mixer::DeltaNet).count()
    }

    pub fn attention_layers(&self) -> usize {
        self.layers.len() - self.delta_net_layers()
    }

    pub fn is_hybrid(&self) -> bool {
        self.delta_net.is_some()
    }

    /// K and V elements a token adds over all attention layers.
    pub fn kv_elements_per_token(&self) -> usize {
        self.attention_layers() * 2 * self.attention.kv_heads * self.attention.head_dim
    }

    /// Linear modules in the order a step uses them, the head last. The embedding is not one of them.
    pub fn linears(&self) -> Vec<Linear> {
        let mut all = Vec::new();
        let hidden = self.hidden_size;
        for (layer, mixer) in self.layers.iter().enumerate() {
            let mut push = |role: Role, rows: usize, cols: usize| {
                all.push(Linear { layer: Some(layer), role, rows, cols });
            };
            match (mixer, &self.delta_net) {
                (Mixer::DeltaNet, Some(delta)) => {
                    push(Role::InQkv, delta.conv_channels(), hidden);
                    push(Role::InZ, delta.value_size(), hidden);
                    push(Role::InB, delta.value_heads, hidden);
                    push(Role::InA, delta.value_heads, hidden);
                    push(Role::DeltaOut, hidden, delta.value_size());
                }
                _ => {
                    let attention = &self.attention;
                    let query = attention.heads * attention.head_dim;
                    let kv = attention.kv_heads * attention.head_dim;
                    push(Role::Q, if attention.output_gate { 2 * query } else { query }, hidden);
                    push(Role::K, kv, hidden);
                    push(Role::V, kv, hidden);
                    push(Role::O, hidden, query);
                }
            }
            push(Role::Gate, self.intermediate_size, hidden);
            push(Role::Up, self.intermediate_size, hidden);
            push(Role::Down, hidden, self.intermediate_size);
        }
        all.push(Linear { layer: None, role: Role::Head, rows: self.vocab_size, cols: hidden });
        all
    }
}

/// Which matrix of a layer a linear module is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    InQkv,
    InZ,
    InB,
    InA,
    DeltaOut,
    Q,
    K,
    V,
    O,
    Gate,
    Up,
    Down,
    Head,
}

impl Role {
    /// Module path below `layers.{i}.` (or from the root for the head), as in the checkpoint.
    pub fn path(self) -> &'static str {
        match self {
            Self::InQkv => "linear_attn.in_proj_qkv",
            Self::InZ => "linear_attn.in_proj_z",
            Self::InB => "linear_attn.in_proj_b",
            Self::InA => "linear_attn.in_proj_a",
            Self::DeltaOut => "linear_attn.out_proj",
            Self::Q => "self_attn.q_proj",
            Self::K => "self_attn.k_proj",
            Self::V => "self_attn.v_proj",
            Self::O => "self_attn.o_proj",
            Self::Gate => "mlp.gate_proj",
            Self::Up => "mlp.up_proj",
            Self::Down => "mlp.down_proj",
            Self::Head => "lm_head",
        }
    }
}

/// One linear module: y = x Wᵀ with W of shape [rows, cols].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Linear {
    /// `None` for the head.
    pub layer: Option<usize>,
    pub role: Role,
    pub rows: usize,
    pub cols: usize,
}

impl Linear {
    /// Canonical module name, without a checkpoint's prefix: `layers.3.mlp.gate_proj`, `lm_head`.
    pub fn name(&self) -> String {
        match self.layer {
            Some(layer) => format!("layers.{layer}.{}", self.role.path()),
            None => self.role.path().to_string(),
        }
    }
}
