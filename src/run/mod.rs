//! The life of a run, whichever command asks for it: device and models are opened and checked, a results folder is begun
//! or taken up again, cells are run, and run.json says at every moment how far it came.

pub mod device;
pub mod prepare;
pub mod progress;
mod quality;
pub mod runner;
mod warm;

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use self::prepare::{Prepared, prepare};
use self::progress::Progress;
use self::runner::{Ending, Loaded, Runner};
use crate::Result;
use crate::engine::device::Device;
use crate::experiment::plan::{Cell, Plan, PlanOptions};
use crate::measure::nvml::{GpuMonitor, WhichGpu};
use crate::measure::summary::{SCHEMA, Summary};
use crate::results::folder::{RUN_FILE, ResultsFolder};
use crate::results::record::{self, DeviceRecord, RunRecord, Status};

/// Everything is checked and nothing is written yet.
pub struct Ready {
    pub plan: Plan,
    pub device: Box<dyn Device>,
    pub prepared: Prepared,
    pub record: RunRecord,
}

/// A run with its folder.
pub struct Run {
    /// First, so that it is dropped before the device that it is on.
    loaded: Option<Loaded>,
    pub plan: Plan,
    pub device: Box<dyn Device>,
    pub prepared: Prepared,
    pub record: RunRecord,
    pub folder: ResultsFolder,
    monitor: Option<GpuMonitor>,
}

impl Ready {
    /// Opens the device that the options name, which `reason` says more of (see [`device::rig`]), and all models.
    ///
    /// # Errors
    /// What the device says is missing; as [`prepare()`].
    pub fn open(options: &PlanOptions, plan: Plan, reason: &str, told: &mut dyn Progress) -> Result<Self> {
        let device = device::open(&options.device, device_threads(&plan))?.device;
        if let Some(warning) = device::memory_warning(device.as_ref()) {
            told.warning(&warning);
        }
        Self::on(device, options, plan, reason, told)
    }

    /// The same on a device that is open.
    ///
    /// # Errors
    /// As [`prepare()`].
    pub fn on(
        device: Box<dyn Device>,
        options: &PlanOptions,
        plan: Plan,
        reason: &str,
        told: &mut dyn Progress,
    ) -> Result<Self> {
        let prepared = prepare(&plan, device.as_ref())?;
        if !reason.is_empty() {
            told.line(&format!("device: {} ({reason})", device.info().id));
        }
        for skipped in &prepared.skipped {
            told.warning(&format!("left out: {}: {}", skipped.arm, skipped.reason));
        }
        let record = new_record(options, &plan, device.as_ref(), &prepared, reason);
        Ok(Self { plan, device, prepared, record })
    }

    /// Begins a run in a folder of its own under `root`.
    ///
    /// # Errors
    /// A folder that cannot be made or written to.
    pub fn begin(self, root: &Path, told: &mut dyn Progress) -> Result<Run> {
        let record = &self.record;
        let folder =
            ResultsFolder::create(root, &self.plan.experiment, &record.device.id, &record.plan_hash)?;
        folder.replace(RUN_FILE, &record.json()?).inspect_err(|_| {
            // A folder with no run in it helps nobody. (Refused where there is anything in it.)
            let _ = std::fs::remove_dir(folder.path());
        })?;
        folder.note_working_folder(&self.plan.folder)?;
        Ok(self.in_folder(folder, told))
    }

    /// Takes up the run in the folder `path`, whose record is `earlier`. What differs and is let pass (`forced`) marks
    /// the result; that it may be is the caller's to decide.
    ///
    /// # Errors
    /// As [`ResultsFolder::reopen`]; a folder that cannot be written to.
    pub fn resume(
        mut self,
        path: &Path,
        earlier: &RunRecord,
        forced: Vec<String>,
        told: &mut dyn Progress,
    ) -> Result<Run> {
        let folder = ResultsFolder::reopen(path)?;
        continue_record(&mut self.record, earlier, &folder);
        if !forced.is_empty() {
            self.record.forced.extend(forced);
            for note in rows_of_other_plans(&folder, &self.record) {
                if !self.record.forced.contains(&note) {
                    told.warning(&note);
                    self.record.forced.push(note);
                }
            }
        }
        folder.note_working_folder(&self.plan.folder)?;
        folder.replace(RUN_FILE, &self.record.json()?)?;
        Ok(self.in_folder(folder, told))
    }

    fn in_folder(self, folder: ResultsFolder, told: &mut dyn Progress) -> Run {
        let monitor = watch_gpu(self.device.as_ref(), told);
        let Self { plan, device, prepared, record } = self;
        Run { plan, device, prepared, record, folder, loaded: None, monitor }
    }
}

impl Run {
    /// Runs every cell that has no rows yet, begins none after `until`, and ends the run.
    ///
    /// # Errors
    /// As [`Runner::run`]; a run.json that cannot be written.
    pub fn run(&mut self, until: Option<Instant>, progress: &mut dyn Progress) -> Result<Ending> {
        let (mut runner, loaded) = self.runner(until, progress);
        let outcome = runner.run(loaded);
        progress.end();
        let saved = self.finish(match &outcome {
            Ok(Ending::OutOfTime(_)) => Status::Interrupted,
            outcome => Status::of(outcome),
        });
        let ending = outcome?;
        saved.map(|()| ending)
    }

    /// Runs one cell, the `position.0`th of `position.1`.
    ///
    /// # Errors
    /// As [`Runner::run_cell`].
    pub fn run_cell(
        &mut self,
        cell: Cell,
        position: (usize, usize),
        progress: &mut dyn Progress,
    ) -> Result<Option<Summary>> {
        let (mut runner, loaded) = self.runner(None, progress);
        runner.run_cell(loaded, cell, position)
    }

    /// A traced pass of every arm that has rows.
    ///
    /// # Errors
    /// As [`Runner::trace`].
    pub fn trace(&mut self, progress: &mut dyn Progress) -> Result<()> {
        let (mut runner, loaded) = self.runner(None, progress);
        let traced = runner.trace(loaded);
        progress.end();
        traced
    }

    fn runner<'a>(
        &'a mut self,
        until: Option<Instant>,
        progress: &'a mut dyn Progress,
    ) -> (Runner<'a>, &'a mut Option<Loaded>) {
        let runner = Runner {
            plan: &self.plan,
            prepared: &mut self.prepared,
            device: self.device.as_mut(),
            ceilings: self.record.ceilings,
            folder: &mut self.folder,
            record: &mut self.record,
            until,
            progress,
        };
        (runner, &mut self.loaded)
    }

    /// Ends what is measured: run.json says how, in what state the device was, and which arms the plan came to have.
    ///
    /// # Errors
    /// A run.json that cannot be written.
    pub fn finish(&mut self, status: Status) -> Result<()> {
        let record = &mut self.record;
        record.ended = Some(record::now());
        record.warn_of_ceilings();
        let at_end = DeviceRecord::new(self.device.info(), "").facts;
        record.device.facts_at_end =
            at_end.into_iter().filter(|(key, value)| record.device.facts.get(key) != Some(value)).collect();
        if let Some(state) = self.monitor.take().and_then(GpuMonitor::stop) {
            record.device.facts_at_end.extend(state.facts());
            record.warnings.extend(state.warnings());
        }
        record.status = status;
        self.save()
    }

    /// Writes run.json as it stands, with the arms that the plan has by now.
    ///
    /// # Errors
    /// A run.json that cannot be written.
    pub fn save(&mut self) -> Result<()> {
        self.record.plan.clone_from(&self.plan);
        self.record.plan_hash = self.plan.hash();
        self.record.add_facts(&self.prepared.arm_records(&self.plan), &[]);
        self.folder.replace(RUN_FILE, &self.record.json()?)
    }
}

/// Threads that a CPU device opens with for a plan. Where arms differ they are its own number, which `auto` then means.
fn device_threads(plan: &Plan) -> Option<usize> {
    let all: BTreeSet<Option<usize>> = plan.arms.iter().map(|arm| arm.engine.threads).collect();
    all.first().copied().flatten().filter(|_| all.len() == 1)
}

/// Samples clocks, power and temperature of a GPU while the run goes on; says why not where it cannot.
fn watch_gpu(device: &dyn Device, told: &mut dyn Progress) -> Option<GpuMonitor> {
    let gpu = WhichGpu::of(device.info())?;
    GpuMonitor::start(gpu, Duration::from_millis(500)).inspect_err(|reason| told.warning(reason)).ok()
}

fn new_record(
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
        ceilings: None,
        arm_ceilings: Vec::new(),
        models: prepared.model_records(),
        cold_start: None,
        arms: prepared.arm_records(plan),
        skipped: prepared.skipped.clone(),
        warnings: Vec::new(),
        claims: Vec::new(),
    }
}

/// Takes over what the record of a run that goes on says of its past.
fn continue_record(record: &mut RunRecord, earlier: &RunRecord, folder: &ResultsFolder) {
    record.started.clone_from(&earlier.started);
    record.resumed.clone_from(&earlier.resumed);
    record.resumed.push(record::now());
    record.cold_start.clone_from(&earlier.cold_start);
    record.ceilings = earlier.ceilings;
    record.arm_ceilings.clone_from(&earlier.arm_ceilings);
    record.forced.clone_from(&earlier.forced);
    record.warnings.clone_from(&earlier.warnings);
    // (Arms of another plan that have rows keep what was said of them.)
    let kept = |arm: &str| folder.finished().iter().any(|cell| cell.arm == arm);
    let arms: Vec<_> = earlier.arms.iter().filter(|arm| kept(&arm.name)).cloned().collect();
    let known = |model: &str| {
        record.models.iter().any(|other| other.reference == model)
            || arms.iter().any(|arm| arm.model == model)
    };
    let models: Vec<_> = earlier.models.iter().filter(|model| known(&model.reference)).cloned().collect();
    record.add_facts(&arms, &models);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::device::DeviceKind;
    use crate::experiment::spec::Rig;
    use crate::experiment::sweep::{self, SWEEP};

    #[test]
    fn auto_threads_beside_a_number_are_the_devices_own() {
        let threads = |knob: &str, values: &str, set: &[&str]| {
            let options = PlanOptions {
                experiment: SWEEP.to_string(),
                sweep: vec![(knob.to_string(), values.to_string())],
                set: set.iter().map(ToString::to_string).collect(),
                ..PlanOptions::default()
            };
            let rig = Rig { kind: DeviceKind::Cpu, id: "cpu".to_string() };
            let plan = sweep::plan_of(&options, &rig).unwrap();
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
