//! A checkpoint folder in the published Hugging Face layout -> [`OpenedModel`].

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use super::checkpoint::Checkpoint;
use super::config_file::{ModelConfig, read_config};
use super::convention;
use super::json::{self, Object};
use super::layout::ModelLayout;
use super::open::{GenerationDefaults, OpenedModel};
use super::save;
use super::spec::ModelSpec;
use super::tensor_files::TensorFiles;
use super::vocabulary;
use crate::{Error, Result};

/// A folder's files, matched and checked.
pub struct Loaded {
    pub checkpoint: Checkpoint,
    pub layout: ModelLayout,
    pub generation: GenerationDefaults,
    pub tokenizer: Option<PathBuf>,
}

/// Opens `folder`, whose model is shown as `name`.
pub fn open(folder: &Path, name: &str) -> Result<OpenedModel> {
    let Loaded { checkpoint, layout, generation, tokenizer } = load(folder, name)?;
    Ok(OpenedModel {
        layout,
        skipped: checkpoint.files().skipped.clone(),
        weights: Box::new(checkpoint),
        tokenizer,
        generation,
        folder: Some(folder.to_path_buf()),
    })
}

/// Reads the configuration and matches every tensor with it.
pub fn load(folder: &Path, name: &str) -> Result<Loaded> {
    let config_path = folder.join("config.json");
    if !folder.is_dir() {
        return Err(Error::invalid(
            format!("{} is not a folder", folder.display()),
            "give the folder that holds config.json and model.safetensors",
        ));
    }
    if !config_path.exists() {
        return Err(Error::invalid(
            format!("{}: there is no config.json", folder.display()),
            "give a folder that holds config.json and model.safetensors",
        ));
    }
    let config_bytes = json::read_file(&config_path)?;
    let shown = config_path.display().to_string();
    let root = json::parse_object(&shown, &config_bytes)?;
    let ModelConfig { mut spec, tied_head_given, quantization } = read_config(&shown, &root, name)?;

    let files = TensorFiles::open(folder)?;
    if !tied_head_given {
        spec.tied_head = files.get("lm_head.weight").is_none();
    }
    let mut hash = Sha256::new();
    hash.update(&config_bytes);
    hash.update(files.hash);
    let hash: String = hash.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect();

    let generation = generation_defaults(folder, &mut spec)?;
    let tokenizer = Some(folder.join("tokenizer.json")).filter(|path| path.exists());
    if let Some(path) = &tokenizer {
        spec.real_vocab_size = vocabulary::size(path)?.clamp(1, spec.vocab_size);
    }
    let checkpoint = Checkpoint::new(files, &spec, &quantization)?;
    convention::check(&checkpoint, &spec)?;
    let layout = ModelLayout {
        linears: checkpoint.formats(&spec),
        embedding: checkpoint.embedding_format(),
        spec,
        synthetic: save::is_synthetic(&root),
        hash,
    };
    Ok(Loaded { checkpoint, layout, generation, tokenizer })
}

/// Reads `generation_config.json` if there is one, and joins its stop tokens with those of `config.json`.
fn generation_defaults(folder: &Path, spec: &mut ModelSpec) -> Result<GenerationDefaults> {
    let path = folder.join("generation_config.json");
    let shown = path.display().to_string();
    let root = if path.exists() { json::parse_object(&shown, &json::read_file(&path)?)? } else { Map::new() };
    let object = Object::new(&shown, "", &root);
    for token in object.token_ids("eos_token_id", spec.vocab_size)? {
        if !spec.eos_tokens.contains(&token) {
            spec.eos_tokens.push(token);
        }
    }
    let sampling = !matches!(root.get("do_sample"), Some(Value::Bool(false)));
    let given = |value: Option<f64>| value.filter(|_| sampling).map(|value| value as f32);
    Ok(GenerationDefaults {
        eos_tokens: spec.eos_tokens.clone(),
        temperature: given(object.number("temperature", 0.0..=1e3)?),
        top_k: object.integer("top_k", 0..=spec.vocab_size.max(1 << 20))?.filter(|_| sampling),
        top_p: given(object.number("top_p", 0.0..=1.0)?),
    })
}
