//! `model quantize`: a 16-bit checkpoint folder to a 4-bit one that other engines read too.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::super::output;
use super::super::progress::Bar;
use crate::engine::model::quantize::{self, FileFormat, Options};
use crate::experiment::runner::Progress;
use crate::{Error, Result};

#[derive(Debug, Args)]
pub struct QuantizeFlags {
    /// The checkpoint folder, or a hub id
    model: String,

    /// awq has zero points, compressed-tensors is symmetric
    #[arg(long, value_enum)]
    format: Format,

    /// Columns that share a scale: 32, 128 or another multiple of 8 that divides every module's columns
    #[arg(long, value_name = "N")]
    group: usize,

    /// Keep modules with this in their path in 16 bits, for example layers.0. or down_proj
    #[arg(long, value_name = "PATTERN")]
    skip: Vec<String>,

    /// The folder to make
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    Awq,
    CompressedTensors,
}

pub fn run(flags: &QuantizeFlags) -> Result<()> {
    let opened = super::open(&flags.model, false)?;
    let Some(folder) = opened.folder.clone() else {
        return Err(Error::invalid(
            format!("{} has no files to quantise", flags.model),
            "write them first with `inferwall model synth`",
        ));
    };
    let name = opened.layout.spec.name.clone();
    drop(opened);
    let options = Options {
        format: match flags.format {
            Format::Awq => FileFormat::Awq,
            Format::CompressedTensors => FileFormat::CompressedTensors,
        },
        group: flags.group,
        skip: flags.skip.clone(),
    };
    let mut bar = Bar::new();
    let mut shown = String::new();
    let written = quantize::run(&folder, &name, &options, &flags.out, &mut |what, done, total| {
        if shown != what {
            shown = what.to_string();
            bar.begin(1, 1, what, total);
        }
        bar.advance(done);
    });
    bar.end();
    let written = written?;
    output::note(&format!(
        "wrote {:.3} GB, {} modules in 4 bits, rounded to nearest",
        written.bytes as f64 / 1e9,
        written.modules
    ));
    output::data(&format!("{}\n", flags.out.display()))
}
