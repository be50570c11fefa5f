//! `model quantize`: a 16-bit checkpoint folder to a 4-bit one that other engines read too.

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};

use super::super::output;
use super::super::progress::Bar;
use crate::engine::device::cpu::CpuDevice;
use crate::engine::model::OpenedModel;
use crate::engine::model::quantize::inputs::Inputs;
use crate::engine::model::quantize::{self, Calibrate, FileFormat, Options, Progress, Written};
use crate::engine::tokenizer::Tokenizer;
use crate::run::progress::Progress as _;
use crate::{Error, Result, interrupt};

/// Calibration runs windows of this many tokens, at most so many of them, and keeps one row of activations in eight.
const WINDOW: usize = 512;
const WINDOWS: usize = 8;
const EVERY: usize = 8;
/// Fewer tokens say little about which channels matter.
const LEAST_TOKENS: usize = 256;

#[derive(Debug, Args)]
pub struct QuantizeFlags {
    /// The checkpoint folder, or a hub id
    model: String,

    /// awq has zero points, compressed-tensors is symmetric
    #[arg(long, value_enum)]
    format: Format,

    /// Columns that share a scale: 32, 64, 128 or another multiple of 8 that divides every module's columns
    #[arg(long, value_name = "N")]
    group: usize,

    /// rtn rounds to nearest; awq scales and clips by what the text shows to matter
    #[arg(long, value_enum, default_value_t = Method::Rtn)]
    method: Method,

    /// Calibration text for --method awq: of the kind that the model is to be used on, 4,096 tokens of it are read
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,

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

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Method {
    Rtn,
    Awq,
}

pub fn run(flags: &QuantizeFlags) -> Result<()> {
    let text = match (flags.method, &flags.text) {
        (Method::Rtn, None) => None,
        (Method::Awq, Some(text)) => Some(text.as_path()),
        (Method::Rtn, Some(_)) => {
            return Err(Error::invalid("--text is read by --method awq only", "add --method awq"));
        }
        (Method::Awq, None) => {
            return Err(Error::invalid(
                "--method awq needs calibration text",
                "give a text file of a few thousand words with --text",
            ));
        }
    };
    let opened = super::open(&flags.model, false)?;
    let Some(folder) = opened.folder.clone() else {
        return Err(Error::invalid(
            format!("{} has no files to quantise", flags.model),
            "write them first with `inferwall model synth`",
        ));
    };
    let name = opened.layout.spec.name.clone();
    let tokens = text.map(|text| tokens(&opened, text)).transpose()?;
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
    let mut progress = |what: &str, done, total| {
        if shown != what {
            shown = what.to_string();
            bar.begin(1, 1, what, total);
        }
        bar.advance(done);
    };
    let mut calibrate =
        |progress: Progress<'_>| inputs(&opened, tokens.as_deref().unwrap_or_default(), progress);
    let calibrate = text.is_some().then_some(&mut calibrate as Calibrate<'_>);
    if !flags.out.exists() {
        interrupt::set_hint(format!("if {} is there, it is not finished: remove it", flags.out.display()));
    }
    let written = quantize::run(&folder, &name, &options, calibrate, &flags.out, &mut progress);
    bar.end();
    output::note(&describe(&written?));
    output::data(&format!("{}\n", flags.out.display()))
}

fn describe(written: &Written) -> String {
    let how = match written.gain {
        None => "rounded to nearest".to_string(),
        Some(gain) => format!(
            "by AWQ: scales for {} of {} groups of modules, whose outputs' squared error fell to {:.0} % of \
             that of rounding to nearest, before clipping",
            gain.scaled,
            gain.groups,
            100.0 * gain.error_ratio
        ),
    };
    format!("wrote {:.3} GB, {} modules in 4 bits, {how}", written.bytes as f64 / 1e9, written.modules)
}

/// The tokens to calibrate with.
fn tokens(opened: &OpenedModel, text: &Path) -> Result<Vec<u32>> {
    let Some(tokenizer) = &opened.tokenizer else {
        return Err(Error::invalid(
            format!("{} has no tokenizer.json to read --text with", opened.layout.spec.name),
            "put the model's tokenizer.json beside its weights",
        ));
    };
    let content = std::fs::read_to_string(text).map_err(|error| Error::read(text, &error))?;
    let mut tokens = Tokenizer::from_file(tokenizer)?.encode(&content, true)?;
    if tokens.len() < LEAST_TOKENS {
        return Err(Error::invalid(
            format!("{} has {} tokens, expected {LEAST_TOKENS} or more", text.display(), tokens.len()),
            "give a longer text",
        ));
    }
    tokens.truncate(WINDOW * WINDOWS);
    Ok(tokens)
}

fn inputs(opened: &OpenedModel, tokens: &[u32], progress: Progress<'_>) -> Result<Inputs> {
    let windows: Vec<&[u32]> = tokens.chunks(WINDOW.min(opened.layout.spec.max_position)).collect();
    let mut device = CpuDevice::new(None)?;
    device.capture_inputs(&opened.layout, &opened.weights, &windows, EVERY, &mut |done, total| {
        progress("calibration tokens", done, total);
    })
}
