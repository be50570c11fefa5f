//! `quantization_config` -> [`Scheme`]: which 4-bit format the packed tensors of a checkpoint have.
//!
//! Whether a module is quantised is not taken from here: it is if and only if its packed tensor is in the file.

use serde_json::Value;

use super::json::Object;
use crate::Result;

/// The format that packed tensors must have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Scheme {
    None,
    /// AutoAWQ GEMM, 4 bits with zero points. `group` columns share a scale; `None`: a whole row.
    Awq {
        group: Option<usize>,
    },
    /// compressed-tensors pack-quantized, 4 bits: the (group, symmetric) pairs of its config groups.
    CompressedTensors {
        groups: Vec<(Option<usize>, bool)>,
    },
}

const HINT: &str =
    "use a checkpoint in AutoAWQ GEMM int4 or compressed-tensors pack-quantized int4, or a 16-bit one";

pub fn read_scheme(config: &Object) -> Result<Scheme> {
    match config.text("quant_method")? {
        Some("awq") => awq(config),
        Some("compressed-tensors") => compressed_tensors(config),
        // Files of AutoAWQ itself have no quant_method.
        None if config.get("w_bit").is_some() => awq(config),
        None => Err(config.missing("quant_method", "awq or compressed-tensors")),
        Some(_) => Err(config.unsupported("quant_method", "formats are awq and compressed-tensors", HINT)),
    }
}

fn awq(config: &Object) -> Result<Scheme> {
    let bits_key = if config.get("w_bit").is_some() { "w_bit" } else { "bits" };
    if config.required_integer(bits_key, 1..=64)? != 4 {
        return Err(config.unsupported(bits_key, "packed weights have 4 bits", HINT));
    }
    match config.text("version")?.map(str::to_ascii_lowercase).as_deref() {
        None | Some("gemm") => {}
        Some(_) => return Err(config.unsupported("version", "the packing is GEMM's", HINT)),
    }
    if config.flag("zero_point")? == Some(false) {
        return Err(config.unsupported("zero_point", "AWQ weights have zero points here", HINT));
    }
    let group_key = if config.get("q_group_size").is_some() { "q_group_size" } else { "group_size" };
    Ok(Scheme::Awq { group: group_size(config, group_key)?.flatten() })
}

/// `Some(None)`: -1, one scale a row. `None`: absent.
fn group_size(config: &Object, key: &str) -> Result<Option<Option<usize>>> {
    match config.get(key).and_then(Value::as_i64) {
        Some(-1) => Ok(Some(None)),
        _ => Ok(config.integer(key, 8..=1 << 17)?.map(Some)),
    }
}

fn compressed_tensors(config: &Object) -> Result<Scheme> {
    if config.text("format")? != Some("pack-quantized") {
        return Err(config.unsupported("format", "the format is pack-quantized", HINT));
    }
    if let Some(sparsity) = config.object("sparsity_config", "quantization_config.sparsity_config.")?
        && !matches!(sparsity.text("format")?, None | Some("dense"))
    {
        return Err(sparsity.unsupported("format", "sparse weights cannot be read", HINT));
    }
    if let Some(Value::Object(transforms)) = config.get("transform_config")
        && !transforms.is_empty()
    {
        return Err(config.unsupported("transform_config", "rotated weights cannot be read", HINT));
    }
    let groups = match config.get("config_groups") {
        Some(Value::Object(groups)) if !groups.is_empty() => groups,
        _ => return Err(config.wrong("config_groups", "an object with at least one group")),
    };
    let groups =
        groups.iter().map(|(name, group)| config_group(config, name, group)).collect::<Result<_>>()?;
    Ok(Scheme::CompressedTensors { groups })
}

fn config_group(config: &Object, name: &str, group: &Value) -> Result<(Option<usize>, bool)> {
    let file = config.place("config_groups");
    let Value::Object(group) = group else { return Err(config.wrong("config_groups", "objects")) };
    let prefix = format!("{name}.");
    let group = Object::new(&file, &prefix, group);
    if group.get("input_activations").is_some() {
        return Err(group.unsupported("input_activations", "activations stay in 16 or 32 bits", HINT));
    }
    if !matches!(group.text("format")?, None | Some("pack-quantized")) {
        return Err(group.unsupported("format", "the format is pack-quantized", HINT));
    }
    let prefix = format!("{name}.weights.");
    let Some(weights) = group.object("weights", &prefix)? else {
        return Err(group.missing("weights", "an object"));
    };
    if weights.required_integer("num_bits", 1..=64)? != 4 {
        return Err(weights.unsupported("num_bits", "packed weights have 4 bits", HINT));
    }
    if !matches!(weights.text("type")?, None | Some("int")) {
        return Err(weights.unsupported("type", "packed weights are integers", HINT));
    }
    // true and "group" reorder the columns by a weight_g_idx tensor; "weight" stores them in order.
    if !matches!(weights.get("actorder"), None | Some(Value::Bool(false)))
        && weights.text("actorder").ok().flatten() != Some("weight")
    {
        let why = "columns reordered by activation (act-order) cannot be read";
        return Err(weights.unsupported("actorder", why, HINT));
    }
    let group_size = match weights.text("strategy")? {
        None | Some("group") => match group_size(&weights, "group_size")? {
            Some(size) => size,
            None => return Err(weights.missing("group_size", "the columns that share a scale")),
        },
        Some("channel") => None,
        Some(_) => return Err(weights.unsupported("strategy", "scales are per group or per channel", HINT)),
    };
    Ok((group_size, weights.flag("symmetric")?.unwrap_or(true)))
}
