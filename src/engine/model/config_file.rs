//! `config.json` -> [`ModelSpec`]: every variant of the published files, validated before anything else is read.
//!
//! Text fields are taken from `text_config` if there is one, else from the root; `tie_word_embeddings` from the root
//! first; rotation from `rope_parameters`, or from `rope_theta` and `rope_scaling` as older exports have it.
//! Sizes are bounded, so that no product of two of them can overflow and nothing is allocated on a file's word.

use serde_json::{Map, Value};

use super::json::Object;
use super::quantization::{self, Scheme};
use super::spec::{Attention, DeltaNet, Family, Mixer, ModelSpec, Rope, RopeScaling};
use crate::{Error, Result};

/// What `config.json` says.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// `tied_head` is only settled if `tied_head_given`; else the tensors decide.
    pub spec: ModelSpec,
    pub tied_head_given: bool,
    pub quantization: Scheme,
}

const MOST_HIDDEN: usize = 1 << 17;
const MOST_INTERMEDIATE: usize = 1 << 20;
const MOST_VOCAB: usize = 1 << 22;
const MOST_LAYERS: usize = 1024;
const MOST_HEADS: usize = 4096;
const MOST_HEAD_DIM: usize = 4096;

/// Reads the parsed `config.json`; `file` is the name that messages show, `name` the model's name.
pub fn read_config(file: &str, root: &Map<String, Value>, name: &str) -> Result<ModelConfig> {
    let root = Object::new(file, "", root);
    let text = root.object("text_config", "text_config.")?.unwrap_or(root);
    let family = family(&root, &text)?;
    refuse_what_would_change_the_equations(&text, family)?;

    let hidden_size = text.required_integer("hidden_size", 1..=MOST_HIDDEN)?;
    let vocab_size = text.required_integer("vocab_size", 1..=MOST_VOCAB)?;
    let tied = match root.flag("tie_word_embeddings")? {
        Some(flag) => Some(flag),
        None => text.flag("tie_word_embeddings")?,
    };
    let layers = layers(&text, family)?;
    let hybrid = layers.contains(&Mixer::DeltaNet);
    let mut eos_tokens = text.token_ids("eos_token_id", vocab_size)?;
    if eos_tokens.is_empty() {
        eos_tokens = root.token_ids("eos_token_id", vocab_size)?;
    }
    let spec = ModelSpec {
        family,
        name: name.to_string(),
        hidden_size,
        intermediate_size: text.required_integer("intermediate_size", 1..=MOST_INTERMEDIATE)?,
        vocab_size,
        layers,
        attention: attention(&root, &text, family, hidden_size)?,
        delta_net: if hybrid { Some(delta_net(&text)?) } else { None },
        norm_eps: text.number("rms_norm_eps", 1e-30..=1.0)?.unwrap_or(1e-6) as f32,
        norm_plus_one: family == Family::Qwen35,
        tied_head: tied.unwrap_or(false),
        max_position: text.required_integer("max_position_embeddings", 1..=1 << 30)?,
        eos_tokens,
        real_vocab_size: vocab_size,
    };
    let quantization = match root.object("quantization_config", "quantization_config.")? {
        Some(found) => quantization::read_scheme(&found)?,
        None => match text.object("quantization_config", "text_config.quantization_config.")? {
            Some(found) => quantization::read_scheme(&found)?,
            None => Scheme::None,
        },
    };
    Ok(ModelConfig { spec, tied_head_given: tied.is_some(), quantization })
}

const FAMILIES: [(&str, &str, Family); 5] = [
    ("qwen3_5", "Qwen3_5ForConditionalGeneration", Family::Qwen35),
    ("qwen3_5_text", "Qwen3_5ForCausalLM", Family::Qwen35),
    ("qwen2", "Qwen2ForCausalLM", Family::Qwen2),
    ("qwen3", "Qwen3ForCausalLM", Family::Qwen3),
    ("llama", "LlamaForCausalLM", Family::Llama),
];

/// By `model_type`, or by `architectures` where that is absent.
fn family(root: &Object, text: &Object) -> Result<Family> {
    let types = FAMILIES.iter().map(|(model_type, ..)| *model_type);
    let (key, found) = match (root.text("model_type")?, text.text("model_type")?) {
        (Some(found), _) | (None, Some(found)) => ("model_type", found),
        (None, None) => {
            match root.get("architectures").and_then(|list| list.get(0)).and_then(Value::as_str) {
                Some(found) => ("architectures", found),
                None => return Err(root.missing("model_type", &types.collect::<Vec<_>>().join(", "))),
            }
        }
    };
    let known =
        FAMILIES.iter().find(|(model_type, architecture, _)| found == *model_type || found == *architecture);
    if let Some((_, _, family)) = known {
        return Ok(*family);
    }
    let all = types.clone().collect::<Vec<_>>().join(", ");
    let nearest = types
        .max_by(|a, b| strsim::jaro_winkler(a, found).total_cmp(&strsim::jaro_winkler(b, found)))
        .unwrap_or_default();
    Err(root.unsupported(
        key,
        &format!("architectures are {all}"),
        &format!("the nearest architecture is `{nearest}`; give a model of one of these"),
    ))
}

/// Options that valid files of these families may have and that this engine does not compute.
fn refuse_what_would_change_the_equations(text: &Object, family: Family) -> Result<()> {
    let choose = "choose a model without it";
    if !matches!(text.text("hidden_act")?, None | Some("silu" | "swish")) {
        return Err(text.unsupported(
            "hidden_act",
            "the MLP is computed with silu",
            "choose a model that uses silu",
        ));
    }
    let refused_flags = [
        ("use_sliding_window", "attention over a window is not computed"),
        ("mlp_bias", "the MLP has no bias here"),
    ];
    for (key, why) in refused_flags {
        if text.flag(key)? == Some(true) {
            return Err(text.unsupported(key, why, choose));
        }
    }
    if family != Family::Qwen2 && text.flag("attention_bias")? == Some(true) {
        return Err(text.unsupported("attention_bias", "this family has no attention biases here", choose));
    }
    if text.integer("num_experts", 0..=1 << 20)?.unwrap_or(0) > 0 {
        return Err(text.unsupported(
            "num_experts",
            "mixtures of experts are not computed",
            "choose a dense model",
        ));
    }
    if !matches!(text.text("output_gate_type")?, None | Some("silu" | "swish")) {
        let why = "the gated norm of the linear layers is computed with silu";
        return Err(text.unsupported("output_gate_type", why, choose));
    }
    Ok(())
}

/// `layer_types` wins over `full_attention_interval`.
fn layers(text: &Object, family: Family) -> Result<Vec<Mixer>> {
    let count = text.required_integer("num_hidden_layers", 1..=MOST_LAYERS)?;
    let Some(list) = text.get("layer_types") else {
        if family != Family::Qwen35 {
            return Ok(vec![Mixer::Attention; count]);
        }
        let interval = text.integer("full_attention_interval", 1..=MOST_LAYERS)?.unwrap_or(4);
        let mixer =
            |i: usize| if (i + 1).is_multiple_of(interval) { Mixer::Attention } else { Mixer::DeltaNet };
        return Ok((0..count).map(mixer).collect());
    };
    let list = list.as_array().ok_or_else(|| text.wrong("layer_types", "a list"))?;
    if list.len() != count {
        return Err(Error::invalid(
            format!(
                "{} has {} entries, expected num_hidden_layers = {count}",
                text.place("layer_types"),
                list.len()
            ),
            "check the file against the model's published one",
        ));
    }
    let mixer = |(i, value): (usize, &Value)| match value.as_str() {
        Some("full_attention") => Ok(Mixer::Attention),
        Some("linear_attention") if family == Family::Qwen35 => Ok(Mixer::DeltaNet),
        _ => Err(Error::invalid(
            format!(
                "{} has {value} for layer {i}, expected \"full_attention\"{}",
                text.place("layer_types"),
                if family == Family::Qwen35 { " or \"linear_attention\"" } else { "" }
            ),
            "choose a model whose layers are of these kinds",
        )),
    };
    list.iter().enumerate().map(mixer).collect()
}

fn attention(root: &Object, text: &Object, family: Family, hidden_size: usize) -> Result<Attention> {
    let heads = text.required_integer("num_attention_heads", 1..=MOST_HEADS)?;
    let kv_heads = text.integer("num_key_value_heads", 1..=MOST_HEADS)?.unwrap_or(heads);
    if heads % kv_heads != 0 {
        return Err(Error::invalid(
            format!(
                "{} is {heads} and `num_key_value_heads` is {kv_heads}: {heads} query heads cannot share \
                 {kv_heads} key/value heads evenly",
                text.place("num_attention_heads")
            ),
            "num_attention_heads must be a multiple of num_key_value_heads",
        ));
    }
    let head_dim = match (text.integer("head_dim", 2..=MOST_HEAD_DIM)?, family) {
        (Some(dim), _) => dim,
        (None, Family::Qwen35) => 256,
        (None, Family::Qwen3) => 128,
        (None, Family::Qwen2 | Family::Llama) if hidden_size.is_multiple_of(heads) => hidden_size / heads,
        (None, _) => {
            return Err(Error::invalid(
                format!(
                    "{} is {hidden_size}, which {heads} attention heads do not divide, and there is no `head_dim`",
                    text.place("hidden_size")
                ),
                "hidden_size must be a multiple of num_attention_heads where head_dim is absent",
            ));
        }
    };
    if head_dim > MOST_HEAD_DIM {
        return Err(text.wrong("hidden_size", &format!("heads of at most {MOST_HEAD_DIM}")));
    }
    Ok(Attention {
        heads,
        kv_heads,
        head_dim,
        output_gate: family == Family::Qwen35 && text.flag("attn_output_gate")?.unwrap_or(true),
        qk_norm: matches!(family, Family::Qwen35 | Family::Qwen3),
        qkv_bias: family == Family::Qwen2,
        rope: rope(root, text, family, head_dim)?,
    })
}

fn rope(root: &Object, text: &Object, family: Family, head_dim: usize) -> Result<Rope> {
    let holders = [text, root];
    let mut parameters = None;
    for (holder, key, prefix) in [
        (text, "rope_parameters", "rope_parameters."),
        (root, "rope_parameters", "rope_parameters."),
        (text, "rope_scaling", "rope_scaling."),
        (root, "rope_scaling", "rope_scaling."),
    ] {
        if parameters.is_none() {
            parameters = holder.object(key, prefix)?;
        }
    }
    // A value may stand in the rope object or beside it.
    let number = |key: &str, bounds: std::ops::RangeInclusive<f64>| -> Result<Option<f64>> {
        for holder in parameters.iter().chain(holders) {
            if let Some(value) = holder.number(key, bounds.clone())? {
                return Ok(Some(value));
            }
        }
        Ok(None)
    };
    let theta = match (number("rope_theta", 1.0..=1e15)?, family) {
        (Some(theta), _) => theta,
        (None, Family::Qwen35) => {
            return Err(text.missing("rope_theta", "the base of the rotation, 10000000"));
        }
        (None, _) => 10_000.0,
    };
    let whole = if family == Family::Qwen35 { 0.25 } else { 1.0 };
    let share = number("partial_rotary_factor", 0.0..=1.0)?.unwrap_or(whole);
    let rotary_dim = (head_dim as f64 * share) as usize;
    if rotary_dim < 2 || !rotary_dim.is_multiple_of(2) {
        return Err(Error::invalid(
            format!(
                "{} = {share} rotates {rotary_dim} of {head_dim} dims, expected an even number of 2 or more",
                text.place("partial_rotary_factor")
            ),
            "check the file against the model's published one",
        ));
    }
    let scaling = match &parameters {
        Some(parameters) => rope_scaling(parameters)?,
        None => RopeScaling::None,
    };
    Ok(Rope { theta, rotary_dim, scaling })
}

fn rope_scaling(parameters: &Object) -> Result<RopeScaling> {
    let key = if parameters.get("rope_type").is_some() { "rope_type" } else { "type" };
    let factor = || -> Result<f64> {
        parameters
            .number("factor", 1.0..=1e6)?
            .ok_or_else(|| parameters.missing("factor", "a number of 1 or more"))
    };
    match parameters.text(key)? {
        // With text alone the three axes of mrope hold the same position: the plain rotation.
        None | Some("default" | "mrope") => Ok(RopeScaling::None),
        Some("linear") => Ok(RopeScaling::Linear { factor: factor()? }),
        Some("llama3") => {
            let required = |key: &str| -> Result<f64> {
                let value = parameters.number(key, 1e-6..=1e9)?;
                value.ok_or_else(|| parameters.missing(key, "a positive number"))
            };
            let (low, high) = (required("low_freq_factor")?, required("high_freq_factor")?);
            if low >= high {
                return Err(
                    parameters.wrong("low_freq_factor", &format!("less than high_freq_factor = {high}"))
                );
            }
            Ok(RopeScaling::Llama3 {
                factor: factor()?,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position: parameters
                    .required_integer("original_max_position_embeddings", 1..=1 << 30)?,
            })
        }
        Some(_) => Err(parameters.unsupported(
            key,
            "rotations are default, linear or llama3",
            "if the file adds the scaling only for contexts longer than the model's own, remove it",
        )),
    }
}

fn delta_net(text: &Object) -> Result<DeltaNet> {
    let delta = DeltaNet {
        key_heads: text.required_integer("linear_num_key_heads", 1..=MOST_HEADS)?,
        value_heads: text.required_integer("linear_num_value_heads", 1..=MOST_HEADS)?,
        key_dim: text.required_integer("linear_key_head_dim", 1..=MOST_HEAD_DIM)?,
        value_dim: text.required_integer("linear_value_head_dim", 1..=MOST_HEAD_DIM)?,
        conv_width: text.integer("linear_conv_kernel_dim", 2..=16)?.unwrap_or(4),
    };
    if !delta.value_heads.is_multiple_of(delta.key_heads) {
        return Err(Error::invalid(
            format!(
                "{} is {} and `linear_num_key_heads` is {}: value heads cannot share key heads evenly",
                text.place("linear_num_value_heads"),
                delta.value_heads,
                delta.key_heads
            ),
            "linear_num_value_heads must be a multiple of linear_num_key_heads",
        ));
    }
    Ok(delta)
}
