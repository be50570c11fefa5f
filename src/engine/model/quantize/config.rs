//! The files beside the weights: `config.json` with the `quantization_config` that readers of each format expect, and
//! copies of the tokenizer's and generation's files.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use serde_json::{Value, json};

use super::super::checkpoint::Checkpoint;
use super::super::json;
use super::super::new_folder::NewFolder;
use super::super::spec::{Linear, Role};
use super::super::tensor_files::canonical;
use super::grid::Grid;
use super::{FileFormat, Options};
use crate::{Error, Result};

/// Writes the file `to`: the source's config.json, with `quantization_config`.
pub fn write(
    source: &Path,
    to: &Path,
    options: &Options,
    checkpoint: &Checkpoint,
    chosen: &HashMap<Linear, Grid>,
) -> Result<()> {
    let path = source.join("config.json");
    let mut root = json::parse_object(&path.display().to_string(), &json::read_file(&path)?)?;
    root.insert("quantization_config".to_string(), quantization(options, &kept(checkpoint, chosen)));
    let text = serde_json::to_string_pretty(&root).map_err(|error| {
        Error::failed(
            format!("cannot write config.json: {error}"),
            "this is a fault of the program: please report it",
        )
    })?;
    std::fs::write(to, text + "\n").map_err(|error| Error::write(to, &error))
}

/// Modules of the layers that stay in 16 bits, by their full names in the files.
fn kept(checkpoint: &Checkpoint, chosen: &HashMap<Linear, Grid>) -> Vec<String> {
    let chosen: HashSet<String> = chosen.keys().map(Linear::name).collect();
    let stays = |linear: &Linear| {
        !matches!(linear.role, Role::Head | Role::InA | Role::InB) && !chosen.contains(&linear.name())
    };
    let kept: HashSet<String> =
        checkpoint.linears().filter(|linear| stays(linear)).map(Linear::name).collect();
    let names = checkpoint.files().all().map(|stored| stored.entry.name.as_str());
    let modules = names.filter_map(|name| name.strip_suffix(".weight"));
    modules.filter(|module| kept.contains(canonical(module))).map(str::to_string).collect()
}

/// What both formats keep in 16 bits, whether or not the model has it: the head, the vision tower, the
/// multi-token-prediction layers and the delta net's gates.
fn quantization(options: &Options, kept: &[String]) -> Value {
    let list = |names: &[&str]| -> Vec<String> {
        names.iter().map(ToString::to_string).chain(kept.iter().cloned()).collect()
    };
    match options.format {
        FileFormat::Awq => json!({
            "quant_method": "awq",
            "bits": 4,
            "group_size": options.group,
            "zero_point": true,
            "version": "gemm",
            "modules_to_not_convert": list(&["lm_head", "visual", "mtp", "in_proj_a", "in_proj_b"]),
        }),
        FileFormat::CompressedTensors => json!({
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": { "group_0": {
                "targets": ["Linear"],
                "input_activations": null,
                "output_activations": null,
                "weights": { "num_bits": 4, "type": "int", "strategy": "group", "group_size": options.group,
                             "symmetric": true, "dynamic": false, "actorder": null },
            } },
            "ignore": list(&["lm_head", "re:.*visual.*", "re:.*mtp.*", "re:.*linear_attn.in_proj_[ab]$"]),
        }),
    }
}

/// Copies the small files that go with any version of the weights: tokenizer, chat template, generation, licence.
pub fn copy_companions(source: &Path, out: &mut NewFolder) -> Result<()> {
    for entry in std::fs::read_dir(source).map_err(|error| Error::read(source, &error))?.flatten() {
        let (from, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
        if from.is_file() && is_companion(&name) {
            let to = out.file(&name);
            std::fs::copy(&from, &to).map_err(|error| Error::write(&to, &error))?;
        }
    }
    Ok(())
}

fn is_companion(name: &str) -> bool {
    let kinds = [".json", ".txt", ".jinja", ".model", ".tiktoken"];
    let licence = name.starts_with("LICENSE") || name.starts_with("NOTICE");
    let of_weights = name == "config.json" || name.ends_with(".index.json");
    !of_weights && (licence || kinds.iter().any(|kind| name.ends_with(kind)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_and_their_config_are_no_companions() {
        let yes =
            ["tokenizer.json", "generation_config.json", "merges.txt", "chat_template.jinja", "LICENSE"];
        assert!(yes.into_iter().all(is_companion));
        let no = ["config.json", "model.safetensors", "model.safetensors.index.json", "a.gguf", "README.md"];
        assert!(!no.into_iter().any(is_companion));
    }
}
