//! The command line: what is typed. Each command has a file, with its flags and a `run` that resolves and does them.

pub mod calibrate;
pub mod diff;
pub mod doctor;
pub mod execute;
pub mod explain;
pub mod flags;
pub mod generate;
pub mod list;
pub mod logits;
pub mod merge;
pub mod model;
pub mod output;
pub mod predict;
pub mod progress;
pub mod report;
pub mod reproduce;
pub mod run;
pub mod saturate;
pub mod session;
pub mod show;
pub mod sweep;
pub mod usage;

use clap::{Parser, Subcommand};

use crate::Result;
use crate::results::record::command_line;

/// Below the list of commands.
const BEGIN: &str = "Begin with `inferwall doctor` and `inferwall run part3-batching-cliff --quick`: a real engine and a small model \
                     with random weights, on a CPU too.\n\nExit codes: 0 done; 1 it failed, or --check or --fail-on found \
                     what it looks for; 2 the request was wrong; 3 --check or --fail-on had nothing to compare; 130 interrupted.";

/// Turn one knob of an LLM server until something breaks, and see which resource ran out and why.
#[derive(Debug, Parser)]
#[command(name = "inferwall", version, max_term_width = 110, arg_required_else_help = true, after_help = BEGIN)]
pub struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Experiments: name, question, knob, values
    List(list::ListFlags),
    /// The resolved plan of an experiment: arms, load, model, expected time, published figures
    Show(show::ShowFlags),
    /// Run every arm of an experiment, print the table, write a results folder
    Run(run::RunFlags),
    /// Sweep knobs with no experiment declared
    Sweep(sweep::SweepFlags),
    /// Why the arms of a results folder came out as they did, and what would move them
    Explain(explain::ExplainFlags),
    /// Seats, step times, crossover, saturation and first tokens of a model on a GPU, without a run
    Predict(predict::PredictFlags),
    /// Fit a simulated device to the steps of a run, and say how well it predicts steps it has not seen
    Calibrate(calibrate::CalibrateFlags),
    /// The series' published figures, cell by cell, beside its simulated rig
    Reproduce(reproduce::ReproduceFlags),
    /// The highest request rate that keeps limits on latency
    Saturate(saturate::SaturateFlags),
    /// Compare two results: change, interval and verdict for each metric
    Diff(diff::DiffFlags),
    /// Text from a model
    Generate(generate::GenerateFlags),
    /// Logits of given tokens as JSON, on the CPU in f32 arithmetic whatever cpu_math says
    Logits(logits::LogitsFlags),
    /// Look at a model, fetch one, write a synthetic or a 4-bit one, measure perplexity
    Model(model::ModelFlags),
    /// What this machine has: CPU, memory, GPU, libraries, measured ceilings
    Doctor(doctor::DoctorFlags),
    /// Join the results of sharded runs
    Merge(merge::MergeFlags),
    /// Make report.md and report.html of results folders anew
    Report(report::ReportFlags),
}

/// The command line as typed. Asking for help or the version prints it and ends the process.
///
/// # Errors
/// [`crate::Error::Invalid`] for an unknown command or flag, with the nearest one.
pub fn parse() -> Result<Arguments> {
    Arguments::try_parse().map_err(|error| usage::explained(&error, &command_line()))
}

/// # Errors
/// Whatever the command failed with; its exit code is [`crate::Error::exit_code`].
pub fn run(arguments: Arguments) -> Result<()> {
    crate::results::record::seconds_since_start();
    crate::interrupt::install()?;
    match arguments.command {
        Command::List(flags) => flags.run(),
        Command::Show(flags) => flags.run(),
        Command::Run(flags) => flags.run(),
        Command::Sweep(flags) => flags.run(),
        Command::Explain(flags) => flags.run(),
        Command::Predict(flags) => flags.run(),
        Command::Calibrate(flags) => flags.run(),
        Command::Reproduce(flags) => flags.run(),
        Command::Saturate(flags) => flags.run(),
        Command::Diff(flags) => flags.run(),
        Command::Generate(flags) => flags.run(),
        Command::Logits(flags) => flags.run(),
        Command::Model(flags) => flags.run(),
        Command::Doctor(flags) => flags.run(),
        Command::Merge(flags) => flags.run(),
        Command::Report(flags) => flags.run(),
    }
}
