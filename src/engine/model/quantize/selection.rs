//! Which modules become 4-bit, and the refusals: a module that the format cannot hold is named before a byte is written.

use std::collections::HashMap;

use super::super::checkpoint::Checkpoint;
use super::super::layout::WeightFormat;
use super::super::spec::{Linear, ModelSpec, Role};
use super::super::weights::{MatrixData, Weights};
use super::FileFormat;
use super::grid::Grid;
use crate::{Error, Result};

/// Roles that stay in 16 bits: the head, and the gates of the delta net, whose few rows decide how fast a state decays.
const KEPT: [Role; 3] = [Role::Head, Role::InA, Role::InB];

/// The modules to quantise, and how. `skip`: parts of module paths that stay as they are.
pub fn select(
    checkpoint: &Checkpoint,
    spec: &ModelSpec,
    format: FileFormat,
    group: usize,
    skip: &[String],
) -> Result<HashMap<Linear, Grid>> {
    if group < 8 || !group.is_multiple_of(8) {
        return Err(Error::invalid(
            format!("--group {group} is not a multiple of 8"),
            "eight weights share a word: give 32, 64 or 128",
        ));
    }
    let linears = spec.linears();
    for pattern in skip {
        if pattern.is_empty() || !linears.iter().any(|linear| path(linear).contains(pattern.as_str())) {
            return Err(Error::invalid(
                format!("--skip {pattern}: no module of {} has that in its path", spec.name),
                "give a part of a path such as layers.0. or mlp.down_proj",
            ));
        }
    }
    let mut chosen = HashMap::new();
    for linear in linears {
        let name = path(&linear);
        if KEPT.contains(&linear.role) || skip.iter().any(|pattern| name.contains(pattern.as_str())) {
            continue;
        }
        let weights = check(checkpoint, &linear, &name, format, group)?;
        chosen.insert(linear, Grid { format, group, scale_format: scale_format(format, weights) });
    }
    if chosen.is_empty() {
        return Err(Error::invalid("every module is skipped", "leave out a --skip"));
    }
    Ok(chosen)
}

/// The name that patterns are matched against and messages show.
fn path(linear: &Linear) -> String {
    format!("model.{}", linear.name())
}

/// What the module's weights are stored in now.
fn check(
    checkpoint: &Checkpoint,
    linear: &Linear,
    name: &str,
    format: FileFormat,
    group: usize,
) -> Result<WeightFormat> {
    let Linear { rows, cols, .. } = *linear;
    let MatrixData::Dense { format: weights, .. } = checkpoint.linear(linear)? else {
        return Err(Error::invalid(
            format!("tensor `{name}` is already 4-bit"),
            "quantise the model's 16-bit version",
        ));
    };
    if !cols.is_multiple_of(group) {
        let fitting: Vec<String> = [128, 64, 32, 16, 8]
            .into_iter()
            .filter(|&size| cols.is_multiple_of(size))
            .map(|size| size.to_string())
            .collect();
        let sizes = if fitting.is_empty() {
            String::new()
        } else {
            format!("give --group {}, or ", fitting.join(" or "))
        };
        return Err(Error::invalid(
            format!(
                "tensor `{name}.weight` of [{rows}, {cols}]: groups of {group} do not divide its {cols} columns"
            ),
            format!("{sizes}keep it in 16 bits with --skip"),
        ));
    }
    if format == FileFormat::Awq && !rows.is_multiple_of(8) {
        return Err(Error::invalid(
            format!(
                "tensor `{name}.weight` of [{rows}, {cols}]: AutoAWQ packs 8 rows a word, which do not divide {rows}"
            ),
            "use --format compressed-tensors, or keep it in 16 bits with --skip",
        ));
    }
    Ok(weights)
}

/// The 16-bit type of the scales: AutoAWQ's is fp16, compressed-tensors has the weights' own.
fn scale_format(format: FileFormat, weights: WeightFormat) -> WeightFormat {
    match (format, weights) {
        (FileFormat::CompressedTensors, WeightFormat::Bf16) => WeightFormat::Bf16,
        _ => WeightFormat::F16,
    }
}
