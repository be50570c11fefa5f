//! Opening a model: everything about it is known and checked here, before a device allocates a byte.

use std::path::{Path, PathBuf};

use serde::Serialize;

use super::folder;
use super::hub::Hub;
use super::layout::ModelLayout;
use super::presets::synthetic_layout;
use super::reference::ModelRef;
use super::synthetic::SyntheticWeights;
use super::weights::WeightSource;
use crate::{Error, Result};

#[derive(Debug, Clone, Default)]
pub struct OpenOptions {
    /// Seed of synthetic weights.
    pub seed: u64,
    /// Download a hub id that is not in the local cache (else that is an error).
    pub download: bool,
    /// Show a progress bar on stderr while downloading.
    pub show_progress: bool,
}

/// A model that can be loaded: its shape, a source of its weights, and what came with it.
pub struct OpenedModel {
    pub layout: ModelLayout,
    pub weights: WeightSource,
    /// `tokenizer.json`; `None` for synthetic weights (bytes are their tokens) or when the folder has none.
    pub tokenizer: Option<PathBuf>,
    pub generation: GenerationDefaults,
    /// Tensors of the files that this engine does not load.
    pub skipped: Skipped,
    /// The folder the files are in; `None` for synthetic weights.
    pub folder: Option<PathBuf>,
}

/// What `generation_config.json` suggests.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct GenerationDefaults {
    /// Stop tokens of `generation_config.json` and of `config.json`, without repeats; also in `spec.eos_tokens`.
    pub eos_tokens: Vec<u32>,
    pub temperature: Option<f32>,
    pub top_k: Option<usize>,
    pub top_p: Option<f32>,
}

/// Tensors left in the files.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Skipped {
    pub vision: Component,
    /// The multi-token-prediction head.
    pub mtp: Component,
    /// Copies and tables that follow from the rest.
    pub other: Component,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Component {
    pub tensors: usize,
    pub parameters: u64,
    pub bytes: u64,
}

/// Opens what `reference` names and checks all of it.
///
/// # Errors
/// [`Error::Invalid`] naming the file and the key or tensor, what was found and what was expected.
pub fn open(reference: &ModelRef, options: &OpenOptions) -> Result<OpenedModel> {
    match reference {
        ModelRef::Synthetic { preset } => {
            let mut layout = synthetic_layout(preset)?;
            layout.hash = format!("synthetic:{preset}:{}", options.seed);
            Ok(OpenedModel {
                weights: Box::new(SyntheticWeights::new(layout.clone(), options.seed)),
                layout,
                tokenizer: None,
                generation: GenerationDefaults::default(),
                skipped: Skipped::default(),
                folder: None,
            })
        }
        ModelRef::Folder(path) => folder::open(path, &folder_name(path)),
        ModelRef::Hub { repo, revision } => {
            let hub = Hub::from_env()?;
            let path = match hub.find(repo, revision.as_deref()) {
                Some(path) => path,
                None if options.download => hub.fetch(repo, revision.as_deref(), options.show_progress)?,
                None => {
                    return Err(Error::invalid(
                        format!("{reference} is not in the Hugging Face cache, and is no folder here"),
                        format!("download it with `inferwall model fetch {reference}`"),
                    ));
                }
            };
            folder::open(&path, repo)
        }
    }
}

/// The last part of a path, whatever way it was written.
fn folder_name(path: &Path) -> String {
    let full = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
    full.file_name().map_or_else(|| path.display().to_string(), |name| name.to_string_lossy().into_owned())
}
