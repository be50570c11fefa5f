//! 16-bit checkpoints to 4-bit ones, in the two published formats: AutoAWQ GEMM and compressed-tensors pack-quantized.
//!
//! [`selection`] names the modules, [`grid`] rounds them to nearest, [`write`] streams the new files out: one module is in
//! memory at a time.

mod config;
mod grid;
mod selection;
mod write;

use std::path::Path;

use super::folder::{self, Loaded};
use crate::{Error, Result};

/// The format of the files to write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileFormat {
    /// AutoAWQ GEMM, with zero points.
    Awq,
    /// compressed-tensors pack-quantized, symmetric.
    CompressedTensors,
}

#[derive(Debug, Clone)]
pub struct Options {
    pub format: FileFormat,
    /// Columns that share a scale.
    pub group: usize,
    /// Parts of the paths of modules that stay in 16 bits.
    pub skip: Vec<String>,
}

/// What was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Written {
    pub modules: usize,
    /// Bytes of all tensors.
    pub bytes: u64,
}

/// Quantises the checkpoint folder `source` into the new folder `out`. `progress` is told what is being done, and how
/// much of it: (what, done, total).
///
/// # Errors
/// A module that the format cannot hold, a folder that is not empty.
pub fn run(
    source: &Path,
    name: &str,
    options: &Options,
    out: &Path,
    progress: &mut dyn FnMut(&str, u64, u64),
) -> Result<Written> {
    if out.exists() && std::fs::read_dir(out).map_err(|error| Error::read(out, &error))?.next().is_some() {
        return Err(Error::invalid(
            format!("{} is not empty", out.display()),
            "choose a new folder with --out",
        ));
    }
    let Loaded { checkpoint, layout, .. } = folder::load(source, name)?;
    let spec = &layout.spec;
    let chosen = selection::select(&checkpoint, spec, options.format, options.group, &options.skip)?;
    std::fs::create_dir_all(out).map_err(|error| Error::write(out, &error))?;
    let work = write::Work {
        checkpoint: &checkpoint,
        spec,
        chosen: &chosen,
        format: options.format,
        group: options.group,
    };
    let bytes = work.write(&out.join("model.safetensors"), &mut |done, total| {
        progress("writing bytes", done, total);
    })?;
    config::copy_companions(source, out)?;
    // Last, so that a folder with a config.json is whole.
    config::write(source, out, options, &checkpoint, &chosen)?;
    Ok(Written { modules: chosen.len(), bytes })
}
