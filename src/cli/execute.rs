//! What `run` and `sweep` share: from options to a finished results folder and a table on stdout.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::flags::{Format, RunOutputFlags};
use super::output;
use super::progress::Bar;
use super::session::warn_of_memory;
use crate::engine::account::Ceilings;
use crate::engine::device::Device;
use crate::experiment::claims::{self, Outcome};
use crate::experiment::device;
use crate::experiment::folder::{RUN_FILE, ResultsFolder};
use crate::experiment::interrupt;
use crate::experiment::plan::{self, Plan, PlanOptions};
use crate::experiment::prepare::{Prepared, prepare};
use crate::experiment::record::{self, DeviceRecord, RunRecord, Status};
use crate::experiment::runner::{Ending, Loaded, Runner};
use crate::experiment::spec::{self, Rig};
use crate::explain::compare;
use crate::measure::nvml::{GpuMonitor, WhichGpu};
use crate::measure::summary::SCHEMA;
use crate::report::results::RunResults;
use crate::report::{consumers, export, json};
use crate::{Error, Result};

/// The experiment name of a sweep.
pub const SWEEP: &str = "sweep";

/// The experiment name of a search for the highest rate.
pub const SATURATE: &str = "saturate";

/// The load a sweep starts from; any of it can be set.
pub const SWEEP_SPEC: &str = include_str!("sweep.toml");

/// Where runs go unless `--out` says otherwise.
pub const DEFAULT_ROOT: &str = "results/local";

pub struct Request {
    pub options: PlanOptions,
    pub output: RunOutputFlags,
}

/// The options of the run that `--resume` names; flags given now are laid over them.
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

/// Resolves a plan for a rig.
pub fn build_plan(options: &PlanOptions, rig: &Rig) -> Result<Plan> {
    if options.experiment == SWEEP && !options.sweep.is_empty() {
        let experiments = spec::parse(SWEEP_SPEC, "the sweep's own load")?;
        return plan::build_sweep(spec::find(&experiments, SWEEP)?, options, rig);
    }
    let experiments = spec::load(options.experiments_file.as_deref())?;
    plan::build(spec::find(&experiments, &options.experiment)?, options, rig)
}

/// Threads that a CPU device opens with for a plan. Where arms differ they are its own number, which `auto` then means.
fn device_threads(plan: &Plan) -> Option<usize> {
    let all: BTreeSet<Option<usize>> = plan.arms.iter().map(|arm| arm.engine.threads).collect();
    all.first().copied().flatten().filter(|_| all.len() == 1)
}

pub fn execute(request: &Request) -> Result<()> {
    let options = &request.options;
    let flags = &request.output;
    let until = flags.deadline()?;
    let (rig, reason) = device::rig(&options.device)?;
    let plan = build_plan(options, &rig)?;
    let mut device = device::open(&options.device, device_threads(&plan))?.device;
    warn_of_memory(device.as_ref());
    let mut prepared = prepare(&plan, device.as_ref())?;
    if !reason.is_empty() {
        output::note(&format!("device: {} ({reason})", device.info().id));
    }
    for skipped in &prepared.skipped {
        output::warning(&format!("left out: {}: {}", skipped.arm, skipped.reason));
    }
    let mut record = new_record(options, &plan, device.as_ref(), &prepared, &reason);
    let mut folder = match &flags.resume {
        Some(path) => resume(path, &mut record, flags.force)?,
        None => {
            let root = flags.out.clone().unwrap_or_else(|| PathBuf::from(DEFAULT_ROOT));
            let folder = ResultsFolder::create(&root, &plan.experiment, &rig.id, &record.plan_hash)?;
            folder.replace(RUN_FILE, &record.json()?).inspect_err(|_| {
                // A folder with no run in it helps nobody. (Refused where there is anything in it.)
                let _ = std::fs::remove_dir(folder.path());
            })?;
            folder
        }
    };
    interrupt::set_hint(format!(
        "finished arms are kept; continue with {}",
        resume_command(&record, folder.path())
    ));
    folder.replace(RUN_FILE, &record.json()?)?;

    let monitor = watch_gpu(device.as_ref());
    let mut bar = Bar::new();
    let mut loaded = None;
    let outcome = Runner {
        plan: &plan,
        prepared: &mut prepared,
        device: device.as_mut(),
        ceilings: record.ceilings,
        folder: &mut folder,
        record: &mut record,
        until,
        progress: &mut bar,
    }
    .run(&mut loaded);
    record.ended = Some(record::now());
    record.warn_of_ceilings();
    let at_end = DeviceRecord::new(device.info(), "").facts;
    record.device.facts_at_end =
        at_end.into_iter().filter(|(key, value)| record.device.facts.get(key) != Some(value)).collect();
    if let Some(state) = monitor.and_then(GpuMonitor::stop) {
        record.device.facts_at_end.extend(state.facts());
        record.warnings.extend(state.warnings());
    }
    record.status = match &outcome {
        Ok(Ending::Complete) => Status::Complete,
        Ok(Ending::OutOfTime(_)) => Status::Interrupted,
        Err(Error::Interrupted { .. }) => Status::Interrupted,
        Err(_) => Status::Failed,
    };
    let saved = record.json().and_then(|json| folder.replace(RUN_FILE, &json));
    let ending = outcome?;
    saved?;
    if let Ending::OutOfTime(left) = ending {
        output::note(&format!("the budget is spent, {left} runs of an arm are left: {}", interrupt::hint()));
    }
    report(&folder, &mut record, flags.format)?;
    if flags.compare_sim {
        compare_with_simulation(&folder, flags.format)?;
    }
    if flags.trace && ending == Ending::Complete {
        let mut runner = Runner {
            plan: &plan,
            prepared: &mut prepared,
            device: device.as_mut(),
            ceilings: record.ceilings,
            folder: &mut folder,
            record: &mut record,
            until: None,
            progress: &mut Bar::new(),
        };
        trace(&mut runner, &mut loaded, flags.format)?;
    }
    let broken = record.claims.iter().filter(|verdict| verdict.outcome == Outcome::DoesNotHold);
    let broken: Vec<&str> = broken.map(|verdict| verdict.text.as_str()).collect();
    if flags.check && !broken.is_empty() {
        return Err(Error::failed(
            format!("{} claim(s) do not hold: {}", broken.len(), broken.join("; ")),
            format!("see why with `inferwall explain {}`", folder.path().display()),
        ));
    }
    Ok(())
}

/// Each arm beside its simulation, where the report does not have that already (on a GPU in the table).
fn compare_with_simulation(folder: &ResultsFolder, format: Format) -> Result<()> {
    let results = RunResults::read(folder.path())?;
    if compare::by_default(&results) {
        return Ok(());
    }
    let text = compare::section(&results, format);
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
fn trace(runner: &mut Runner, loaded: &mut Option<Loaded>, format: Format) -> Result<()> {
    interrupt::set_hint(format!(
        "the run is complete, only its trace is not: for that add --trace to {}",
        resume_command(runner.record, runner.folder.path())
    ));
    match runner.trace(loaded) {
        Err(interrupted @ Error::Interrupted { .. }) => return Err(interrupted),
        Err(error) => {
            let warning = format!("the traced pass failed: {error}");
            output::warning(&warning);
            runner.record.warnings.push(warning);
        }
        Ok(()) => {}
    }
    runner.save_record()?;
    let results = RunResults::read(runner.folder.path())?;
    write_report_files(runner.folder, &results)?;
    if let (Format::Table | Format::Md, Some(largest)) = (format, consumers::render(&results, format)?) {
        output::data(&format!("\n{largest}"))?;
    }
    Ok(())
}

/// Checks the claims, writes run.json and the report files, and prints the table.
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
    output::note(&format!("results: {}", folder.path().display()));
    Ok(())
}

fn write_report_files(folder: &ResultsFolder, results: &RunResults) -> Result<()> {
    export::report_files(results)?
        .into_iter()
        .try_for_each(|(name, text)| folder.replace(name, text.as_bytes()))
}

/// Samples clocks, power and temperature of a GPU while the run goes on; says why not where it cannot.
pub fn watch_gpu(device: &dyn Device) -> Option<GpuMonitor> {
    let gpu = WhichGpu::of(device.info())?;
    match GpuMonitor::start(gpu, Duration::from_millis(500)) {
        Ok(monitor) => Some(monitor),
        Err(reason) => {
            output::warning(&reason);
            None
        }
    }
}

pub fn new_record(
    options: &PlanOptions,
    plan: &Plan,
    device: &dyn Device,
    prepared: &Prepared,
    reason: &str,
) -> RunRecord {
    RunRecord {
        schema: SCHEMA,
        experiment: plan.experiment.clone(),
        status: Status::Running,
        command: record::command_line(),
        version: env!("CARGO_PKG_VERSION").to_string(),
        commit: env!("INFERWALL_COMMIT").to_string(),
        build: record::build_id(),
        started: record::now(),
        ended: None,
        resumed: Vec::new(),
        forced: Vec::new(),
        options: options.clone(),
        plan: plan.clone(),
        plan_hash: plan.hash(),
        seeds: record::seeds(plan.seed, plan.repeats),
        device: DeviceRecord::new(device.info(), reason),
        ceilings: Ceilings {
            read_bytes_per_s: 0.0,
            copy_bytes_per_s: 0.0,
            flops_per_s: 0.0,
            launch_s: 0.0,
            measured: false,
        },
        arm_ceilings: Vec::new(),
        models: prepared.model_records(),
        cold_start: None,
        arms: prepared.arm_records(plan),
        skipped: prepared.skipped.clone(),
        warnings: Vec::new(),
        claims: Vec::new(),
    }
}

/// Opens the folder of an earlier run, if its rows may stand beside those of `record`.
fn resume(path: &Path, record: &mut RunRecord, force: bool) -> Result<ResultsFolder> {
    let earlier = RunRecord::read(path)?;
    let mut differences = earlier.differences(record);
    if earlier.plan.shard != record.plan.shard {
        differences.push("another shard of the plan".to_string());
    }
    if !differences.is_empty() && !force {
        return Err(Error::invalid(
            format!("{} cannot be continued: {}", path.display(), differences.join("; ")),
            "give the flags it was started with (or none), start a new run, or mix them with --force, which marks it",
        ));
    }
    let folder = continue_in(path, &earlier, record)?;
    record.forced.extend(differences);
    for note in rows_of_other_plans(&folder, record) {
        if !record.forced.contains(&note) {
            output::warning(&note);
            record.forced.push(note);
        }
    }
    Ok(folder)
}

/// What `--force` leaves in a folder that the plan would not have put there, a line an arm.
fn rows_of_other_plans(folder: &ResultsFolder, record: &RunRecord) -> Vec<String> {
    let mut notes = Vec::new();
    for cell in folder.finished() {
        let note = match record.plan.arms.iter().find(|arm| arm.name == cell.arm) {
            Some(arm) if arm.config_hash() == cell.config_hash => continue,
            Some(_) => format!("arm {}: its finished rows are of another model, load or engine", cell.arm),
            None => format!("arm {}: the plan has none, its finished rows stay", cell.arm),
        };
        if !notes.contains(&note) {
            notes.push(note);
        }
    }
    notes
}

/// Opens the folder of an earlier run and takes over what its record says of the past.
pub fn continue_in(path: &Path, earlier: &RunRecord, record: &mut RunRecord) -> Result<ResultsFolder> {
    let folder = ResultsFolder::reopen(path)?;
    record.started.clone_from(&earlier.started);
    record.resumed = earlier.resumed.clone();
    record.cold_start.clone_from(&earlier.cold_start);
    record.ceilings = earlier.ceilings;
    record.arm_ceilings.clone_from(&earlier.arm_ceilings);
    record.resumed.push(record::now());
    record.forced = earlier.forced.clone();
    record.warnings = earlier.warnings.clone();
    // (Arms of another plan keep what was said of them.)
    let kept = |arm: &str| folder.finished().iter().any(|cell| cell.arm == arm);
    let arms: Vec<_> = earlier.arms.iter().filter(|arm| kept(&arm.name)).cloned().collect();
    let models: Vec<_> = earlier
        .models
        .iter()
        .filter(|model| {
            record.models.iter().any(|other| other.reference == model.reference)
                || arms.iter().any(|arm| arm.model == model.reference)
        })
        .cloned()
        .collect();
    record.add_facts(&arms, &models);
    Ok(folder)
}

fn resume_command(record: &RunRecord, folder: &Path) -> String {
    let command =
        if record.experiment == SWEEP { "sweep".to_string() } else { format!("run {}", record.experiment) };
    format!("`inferwall {command} --resume {}`", folder.display())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::device::DeviceKind;

    #[test]
    fn auto_threads_beside_a_number_are_the_devices_own() {
        let threads = |knob: &str, values: &str, set: &[&str]| {
            let options = PlanOptions {
                experiment: SWEEP.to_string(),
                sweep: vec![(knob.to_string(), values.to_string())],
                set: set.iter().map(ToString::to_string).collect(),
                ..PlanOptions::default()
            };
            let plan = build_plan(&options, &Rig { kind: DeviceKind::Cpu, id: "cpu".to_string() }).unwrap();
            (device_threads(&plan), plan.arms.iter().map(|arm| arm.engine.threads).collect::<Vec<_>>())
        };
        assert_eq!(threads("threads", "auto,1", &[]), (None, vec![None, Some(1)]));
        assert_eq!(threads("threads", "1,auto", &[]), (None, vec![Some(1), None]));
        assert_eq!(threads("threads", "1,2", &[]), (None, vec![Some(1), Some(2)]));
        assert_eq!(threads("threads", "2", &[]), (Some(2), vec![Some(2)]));
        assert_eq!(threads("max_num_seqs", "1,2", &["threads=3"]), (Some(3), vec![Some(3); 2]));
        assert_eq!(threads("max_num_seqs", "1,2", &["threads=auto"]), (None, vec![None; 2]));
    }
}
