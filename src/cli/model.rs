//! `model`: look at a checkpoint, fetch one, write a synthetic one, quantise one, measure its perplexity.

mod eval;
mod inspect;
mod quantize;

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::output;
use crate::engine::model::hub::Hub;
use crate::engine::model::{ModelRef, OpenOptions, save, synthetic_layout};
use crate::report::format::Format;
use crate::{Error, Result, interrupt};

#[derive(Debug, Args)]
pub struct ModelFlags {
    #[command(subcommand)]
    command: ModelCommand,
}

#[derive(Debug, Subcommand)]
enum ModelCommand {
    /// Architecture, parameters, bytes by component, what is quantised, what is skipped
    Inspect(InspectFlags),
    /// Download a model of the Hugging Face hub into its cache, or say where it lies
    Fetch(FetchFlags),
    /// Write a preset's seeded random weights as a checkpoint folder
    Synth(SynthFlags),
    /// Write a 4-bit version of a checkpoint folder
    Quantize(quantize::QuantizeFlags),
    /// Perplexity of a text
    Eval(eval::EvalFlags),
}

#[derive(Debug, Args)]
struct InspectFlags {
    /// A folder, a hub id that is in the cache, or synthetic:PRESET
    model: String,

    /// What goes to stdout: table or json
    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
}

#[derive(Debug, Args)]
struct FetchFlags {
    /// A hub id: OWNER/NAME or OWNER/NAME@REVISION
    model: String,
}

#[derive(Debug, Args)]
struct SynthFlags {
    /// demo, qwen3.5-0.8b, qwen3.5-2b, qwen3.5-4b, qwen3.5-9b, qwen3.5-9b-awq, qwen3.5-9b-awq-mlp, qwen2.5-7b
    preset: String,

    /// The folder to make
    #[arg(long, value_name = "DIR")]
    out: PathBuf,

    /// Seed of the weights
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
}

impl ModelFlags {
    /// # Errors
    /// What the command failed with.
    pub fn run(self) -> Result<()> {
        match self.command {
            ModelCommand::Inspect(flags) => inspect(&flags),
            ModelCommand::Fetch(flags) => fetch(&flags),
            ModelCommand::Synth(flags) => synth(&flags),
            ModelCommand::Quantize(flags) => quantize::run(&flags),
            ModelCommand::Eval(flags) => eval::run(&flags),
        }
    }
}

fn inspect(flags: &InspectFlags) -> Result<()> {
    let json = json_wanted(flags.format)?;
    let model = open(&flags.model, false)?;
    let report = inspect::Report::new(&model);
    output::data(&if json { report.json()? } else { report.text() })
}

fn fetch(flags: &FetchFlags) -> Result<()> {
    let ModelRef::Hub { repo, revision } = flags.model.parse()? else {
        return Err(Error::invalid(
            format!("`{}` is not a hub id", flags.model),
            "give OWNER/NAME; a folder or synthetic weights need no fetching",
        ));
    };
    let hub = Hub::from_env()?;
    let folder = match hub.find(&repo, revision.as_deref()) {
        Some(folder) => folder,
        None => hub.fetch(&repo, revision.as_deref(), true)?,
    };
    output::data(&format!("{}\n", folder.display()))
}

fn synth(flags: &SynthFlags) -> Result<()> {
    let layout = synthetic_layout(&flags.preset)?;
    interrupt::set_hint(unfinished(&flags.out));
    let bytes = save::synthetic(&layout, flags.seed, &flags.out)?;
    output::note(&format!("wrote {:.3} GB", bytes as f64 / 1e9));
    output::data(&format!("{}\n", flags.out.display()))
}

/// What Ctrl-C leaves behind.
fn unfinished(out: &std::path::Path) -> String {
    format!("{} is not finished: remove it before you begin again", out.display())
}

/// Opens a model for a command; `download` if it may come from the hub.
fn open(model: &str, download: bool) -> Result<crate::engine::model::OpenedModel> {
    let options = OpenOptions { seed: 0, download, show_progress: true };
    crate::engine::model::open(&model.parse()?, &options)
}

fn json_wanted(format: Format) -> Result<bool> {
    match format {
        Format::Json => Ok(true),
        Format::Table => Ok(false),
        Format::Csv | Format::Md => Err(Error::invalid(
            "this command prints a table or json",
            "leave out --format, or use --format json",
        )),
    }
}
