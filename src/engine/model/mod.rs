//! A model as files describe it: its shape ([`spec`]), the formats its weights are stored in ([`layout`]) and where
//! their bytes come from ([`weights`]).
//!
//! [`open`] turns what `--model` names ([`ModelRef`]) into an [`OpenedModel`], validated to the last tensor before
//! anything is loaded; [`synthetic_layout`] gives the shape of a built-in preset without any weights.

mod checkpoint;
mod config_file;
mod convention;
pub mod dequant;
pub mod finite;
mod folder;
pub mod hub;
mod json;
pub mod layout;
mod new_folder;
mod open;
mod packed;
pub mod presets;
mod quantization;
pub mod quantize;
mod reference;
mod safetensors_file;
pub mod save;
pub mod spec;
pub mod synthetic;
mod tensor_files;
mod vocabulary;
pub mod weights;

pub use open::{Component, GenerationDefaults, OpenOptions, OpenedModel, Skipped, open};
pub use presets::synthetic_layout;
pub use reference::ModelRef;
