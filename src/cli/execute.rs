//! What `run` and `sweep` share: from options to a finished results folder and a table on stdout.

use std::path::{Path, PathBuf};

use super::flags::RunOutputFlags;
use super::output;
use super::progress::Bar;
use crate::experiment::plan::{Plan, PlanOptions};
use crate::experiment::sweep::{self, SATURATE, SWEEP};
use crate::explain::compare;
use crate::report::format::Format;
use crate::report::{self, consumers, export, json};
use crate::results::RunResults;
use crate::results::claims::{self, Outcome, Verdict};
use crate::results::folder::{RUN_FILE, ResultsFolder};
use crate::results::record::RunRecord;
use crate::run::device;
use crate::run::runner::Ending;
use crate::run::{Ready, Run};
use crate::{Error, Result, interrupt};

/// Where runs go unless `--out` says otherwise.
pub const DEFAULT_ROOT: &str = "results/local";

pub struct Request {
    pub options: PlanOptions,
    pub output: RunOutputFlags,
}

/// The options of the run that `--resume` names; flags given now are laid over them.
///
/// # Errors
/// `--force` alone; a folder that is none of a run, or of a `saturate`.
pub fn recorded_options(flags: &RunOutputFlags) -> Result<Option<PlanOptions>> {
    match &flags.resume {
        None if flags.force => Err(Error::invalid("--force without --resume", "--force belongs to --resume")),
        None => Ok(None),
        Some(folder) => {
            let earlier = RunRecord::read(folder)?;
            if earlier.experiment == SATURATE {
                return Err(Error::invalid(
                    format!("{} is a search for the highest rate", folder.display()),
                    format!("continue it with `inferwall saturate --resume {}`", folder.display()),
                ));
            }
            Ok(Some(earlier.options))
        }
    }
}

/// Runs what is asked for, to the reports and the table.
///
/// # Errors
/// A plan that cannot be, a device or model that cannot be opened, a run that failed or was interrupted, a folder that cannot
/// be resumed or written to; with `--check` a claim that does not hold, or none that could be compared.
pub fn execute(request: &Request) -> Result<()> {
    let options = &request.options;
    let flags = &request.output;
    let until = flags.deadline()?;
    let (rig, reason) = device::rig(&options.device)?;
    let plan = sweep::plan_of(options, &rig)?;
    if flags.check {
        require_claims(&plan)?;
    }
    let mut bar = Bar::new();
    let ready = Ready::open(options, plan, &reason, &mut bar)?;
    let mut run = match &flags.resume {
        Some(path) => resume(ready, path, flags.force, &mut bar)?,
        None => {
            let root = flags.out.clone().unwrap_or_else(|| PathBuf::from(DEFAULT_ROOT));
            ready.begin(&root, &mut bar)?
        }
    };
    interrupt::set_hint(format!("finished arms are kept; continue with {}", resume_command(&run)));
    let ending = run.run(until, &mut bar)?;
    if let Ending::OutOfTime(left) = ending {
        output::note(&format!("the budget is spent, {left} runs of an arm are left: {}", interrupt::hint()));
    }
    report(&run.folder, &mut run.record, flags.format)?;
    if flags.compare_sim {
        compare_with_simulation(&run.folder, flags.format)?;
    }
    if flags.trace && ending == Ending::Complete {
        trace(&mut run, flags.format)?;
    }
    if flags.check { check(&run.record.claims, run.folder.path(), ending) } else { Ok(()) }
}

/// What `--check` makes of the claims.
fn check(claims: &[Verdict], folder: &Path, ending: Ending) -> Result<()> {
    let of = |outcome| claims.iter().filter(move |verdict| verdict.outcome == outcome);
    let broken: Vec<&str> = of(Outcome::DoesNotHold).map(|verdict| verdict.text.as_str()).collect();
    if !broken.is_empty() {
        return Err(Error::failed(
            format!("{} claim(s) do not hold: {}", broken.len(), broken.join("; ")),
            format!("see why with `inferwall explain {}`", folder.display()),
        ));
    }
    if let Ending::OutOfTime(left) = ending {
        return Err(Error::undecided(
            format!("{left} runs of an arm are left, which claims may need"),
            interrupt::hint(),
        ));
    }
    let holding = of(Outcome::Holds).count();
    if holding == 0 {
        let mut reasons: Vec<&str> =
            of(Outcome::NotComparable).map(|verdict| verdict.reason.as_str()).collect();
        reasons.sort_unstable();
        reasons.dedup();
        return Err(Error::undecided(
            format!("none of the {} claim(s) could be compared: {}", claims.len(), reasons.join("; ")),
            "nothing was found to hold or not to hold: run it where the claims were published, and without flags that \
             change what is run",
        ));
    }
    output::note(&format!("claims: {holding} hold, {} could not be compared", claims.len() - holding));
    Ok(())
}

/// `--check` of a plan without claims is a slip, told before hours are spent on it.
fn require_claims(plan: &Plan) -> Result<()> {
    if !plan.claims.is_empty() {
        return Ok(());
    }
    let (fact, hint) = match claims::left_out(plan) {
        Some(left_out) => (
            format!("claims: {left_out}"),
            "choose the arms that claims are made of (`inferwall show` lists them)",
        ),
        None => (format!("no claims are made of {}", plan.experiment), "leave --check out"),
    };
    Err(Error::invalid(format!("--check has nothing to check: {fact}"), hint))
}

/// Each arm beside its simulation, where the report does not have that already (on a GPU in the table).
fn compare_with_simulation(folder: &ResultsFolder, format: Format) -> Result<()> {
    let results = RunResults::read(folder.path())?;
    if compare::by_default(&results) {
        return Ok(());
    }
    let text = report::compare::section(&results, format);
    match format {
        Format::Table | Format::Md => output::data(&format!("\n{text}")),
        // Data on stdout stays what it is.
        Format::Csv | Format::Json => {
            output::note(&text);
            Ok(())
        }
    }
}

/// The traced pass of a run that is complete and reported: whatever becomes of the trace, the run stays that.
fn trace(run: &mut Run, format: Format) -> Result<()> {
    interrupt::set_hint(format!(
        "the run is complete, only its trace is not: for that add --trace to {}",
        resume_command(run)
    ));
    match run.trace(&mut Bar::new()) {
        Err(interrupted @ Error::Interrupted { .. }) => return Err(interrupted),
        Err(error) => {
            let warning = format!("the traced pass failed: {error}");
            output::warning(&warning);
            run.record.warnings.push(warning);
        }
        Ok(()) => {}
    }
    run.save()?;
    let results = RunResults::read(run.folder.path())?;
    write_report_files(&run.folder, &results)?;
    if let (Format::Table | Format::Md, Some(largest)) = (format, consumers::render(&results, format)?) {
        output::data(&format!("\n{largest}"))?;
    }
    Ok(())
}

/// Checks the claims, writes run.json and the report files, and prints the table and what has to be known of it.
///
/// # Errors
/// A folder that cannot be written to, tables that were damaged since, stdout.
pub fn report(folder: &ResultsFolder, record: &mut RunRecord, format: Format) -> Result<()> {
    folder.replace(RUN_FILE, &record.json()?)?;
    let mut results = RunResults::read(folder.path())?;
    record.claims = claims::check(&results);
    folder.replace(RUN_FILE, &record.json()?)?;
    results.record = record.clone();
    write_report_files(folder, &results)?;
    output::data(&match format {
        Format::Table | Format::Md => export::text(&results, format)?,
        Format::Csv => std::fs::read_to_string(folder.file("summary.csv"))
            .map_err(|error| Error::read(&folder.file("summary.csv"), &error))?,
        Format::Json => json::array(&results.summaries)?,
    })?;
    record.warnings.iter().for_each(|warning| output::warning(warning));
    output::note(&format!("results: {}", folder.path().display()));
    Ok(())
}

fn write_report_files(folder: &ResultsFolder, results: &RunResults) -> Result<()> {
    export::report_files(results)?
        .into_iter()
        .try_for_each(|(name, text)| folder.replace(name, text.as_bytes()))
}

/// Takes up the run of a folder, if its rows may stand beside those of this one.
fn resume(ready: Ready, path: &Path, force: bool, bar: &mut Bar) -> Result<Run> {
    let earlier = RunRecord::read(path)?;
    let mut differences = earlier.differences(&ready.record);
    if earlier.plan.shard != ready.plan.shard {
        differences.push("another shard of the plan".to_string());
    }
    if !differences.is_empty() && !force {
        return Err(Error::invalid(
            format!("{} cannot be continued: {}", path.display(), differences.join("; ")),
            "give the flags it was started with (or none), start a new run, or mix them with --force, which marks it",
        ));
    }
    ready.resume(path, &earlier, differences, bar)
}

fn resume_command(run: &Run) -> String {
    let experiment = &run.plan.experiment;
    let command = if experiment == SWEEP { SWEEP.to_string() } else { format!("run {experiment}") };
    format!("`inferwall {command} --resume {}`", run.folder.path().display())
}
