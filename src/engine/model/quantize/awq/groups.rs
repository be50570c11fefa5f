//! Which modules share an input, and what comes before them that can take the inverse of their input's scales.
//!
//! | input | modules | taken by |
//! |---|---|---|
//! | input norm's output | q, k, v, or the delta net's projections | the norm's weight |
//! | attention's output | o | rows (and bias) of v, one scale for the query heads that share a value head |
//! | delta net's output | out_proj | the gated norm's weight, one scale for all value heads |
//! | post-attention norm's output | gate, up | the norm's weight |
//! | SiLU(gate) up | down | rows of up |
//!
//! Each is exact: the functions in between (attention, the output gate, SiLU(gate) times) are linear, channel by channel,
//! in what is scaled.

use super::super::super::spec::{Linear, Mixer, ModelSpec, Role};
use super::super::inputs::Point;

/// Modules that share an input.
#[derive(Debug, Clone)]
pub struct Group {
    pub layer: usize,
    pub point: Point,
    pub linears: Vec<Linear>,
    pub before: Before,
    /// For each input channel, the element of what comes before it.
    pub classes: Vec<usize>,
}

/// What produces the input, channel by channel.
#[derive(Debug, Clone, PartialEq)]
pub enum Before {
    /// A norm's weight; `plus_one`: stored minus one.
    Norm { vector: String, plus_one: bool },
    /// Rows of a module, and its bias where it has one.
    Linear { linear: Linear, bias: Option<String> },
}

pub fn groups(spec: &ModelSpec) -> Vec<Group> {
    let linears = spec.linears();
    let mut all = Vec::new();
    for (layer, mixer) in spec.layers.iter().enumerate() {
        let of = |roles: &[Role]| -> Vec<Linear> {
            let mine = linears.iter().filter(|linear| linear.layer == Some(layer));
            mine.filter(|linear| roles.contains(&linear.role)).copied().collect()
        };
        let norm = |name: &str| Before::Norm {
            vector: format!("layers.{layer}.{name}.weight"),
            plus_one: spec.norm_plus_one,
        };
        let mut push = |point, roles: &[Role], before, classes| {
            all.push(Group { layer, point, linears: of(roles), before, classes });
        };
        let hidden: Vec<usize> = (0..spec.hidden_size).collect();
        match (mixer, &spec.delta_net) {
            (Mixer::DeltaNet, Some(delta)) => {
                let roles = [Role::InQkv, Role::InZ, Role::InB, Role::InA];
                push(Point::MixerIn, &roles, norm("input_layernorm"), hidden.clone());
                let vector = format!("layers.{layer}.linear_attn.norm.weight");
                let classes = (0..delta.value_size()).map(|channel| channel % delta.value_dim).collect();
                let before = Before::Norm { vector, plus_one: false };
                push(Point::MixerOut, &[Role::DeltaOut], before, classes);
            }
            _ => {
                let roles = [Role::Q, Role::K, Role::V];
                push(Point::MixerIn, &roles, norm("input_layernorm"), hidden.clone());
                let attention = &spec.attention;
                let (dim, share) = (attention.head_dim, attention.heads / attention.kv_heads);
                let classes = (0..attention.heads * dim).map(|c| c / dim / share * dim + c % dim).collect();
                for linear in of(&[Role::V]) {
                    let bias = attention.qkv_bias.then(|| format!("{}.bias", linear.name()));
                    let before = Before::Linear { linear, bias };
                    push(Point::MixerOut, &[Role::O], before, Vec::clone(&classes));
                }
            }
        }
        push(Point::MlpIn, &[Role::Gate, Role::Up], norm("post_attention_layernorm"), hidden);
        for linear in of(&[Role::Up]) {
            let before = Before::Linear { linear, bias: None };
            push(Point::MlpOut, &[Role::Down], before, (0..linear.rows).collect());
        }
    }
    all
}
