//! Runs a prepared plan cell by cell, and writes each cell's rows as soon as it is finished.
//!
//! Models are loaded when the next cell needs another one, and sessions opened when the next cell needs other pools
//! or settings. On a virtual clock every cell opens its own session, so that its times start at 0 and a resumed run
//! gives the same bits as an undisturbed one.

use std::time::Instant;

use super::prepare::{self, Prepared, PreparedArm, weights_word};
use super::progress::Progress;
use super::quality;
use super::warm::{WarmUp, warm_up};
use crate::engine::Engine;
use crate::engine::account::Ceilings;
use crate::engine::clock::Clock;
use crate::engine::config::EngineConfig;
use crate::engine::device::{CachePlan, Device, DeviceKind, LoadOptions, Model};
use crate::experiment::plan::{Arm, Cell, Plan};
use crate::experiment::sweep::SWEEP;
use crate::measure::checks::check_rows;
use crate::measure::drive::{Submission, drive};
use crate::measure::kernels::kernel_rows;
use crate::measure::populations::population_rows;
use crate::measure::recorder::ArmRecord;
use crate::measure::roofs::ArmCeilings;
use crate::measure::rows::KernelRow;
use crate::measure::saturate::OverSaturation;
use crate::measure::summarize::{Conditions, summarize};
use crate::measure::summary::{ArmLabel, Summary};
use crate::measure::target::Embedded;
use crate::report::chrome_trace::ChromeTrace;
use crate::report::overview;
use crate::results::csv::{self, Rows, rows};
use crate::results::folder::{KERNELS_FILE, RUN_FILE, ResultsFolder};
use crate::results::journal::FinishedCell;
use crate::results::record::{self, ColdStart, RunRecord, SkippedArm, build_id};
use crate::workload::rate::Rate;
use crate::workload::seeds::repeat_seed;
use crate::{Error, Result, interrupt};

pub struct Runner<'a> {
    pub plan: &'a Plan,
    pub prepared: &'a mut Prepared,
    pub device: &'a mut dyn Device,
    pub ceilings: Option<Ceilings>,
    pub folder: &'a mut ResultsFolder,
    pub record: &'a mut RunRecord,
    /// Begin no further cell after this moment.
    pub until: Option<Instant>,
    pub progress: &'a mut dyn Progress,
}

/// How a run ended that did not fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    Complete,
    /// The time given to it is over; this many cells are left.
    OutOfTime(usize),
}

/// What is on the device now. Kept by the caller, so that it outlives a runner.
pub struct Loaded {
    reference: String,
    options: LoadOptions,
    model: Box<dyn Model>,
    clock: Clock,
    /// Seconds since the program's start at the start of `clock`, ceilings left out, and the time those took.
    clock_start_s: f64,
    ceilings_s: f64,
    session: Option<OpenSession>,
    /// Nothing has run on it yet.
    fresh: bool,
}

struct OpenSession {
    config: EngineConfig,
    pools: CachePlan,
    engine: Engine,
}

impl Runner<'_> {
    /// Runs every cell that is not finished yet.
    ///
    /// # Errors
    /// [`Error::Interrupted`] after Ctrl-C; what a device or the disk says. Finished cells are kept.
    pub fn run(&mut self, loaded: &mut Option<Loaded>) -> Result<Ending> {
        let cells = self.plan.cells();
        let mut ending = Ending::Complete;
        for (position, &cell) in cells.iter().enumerate() {
            if !self.is_left(cell) || self.is_over_saturated(cell)? {
                continue;
            }
            if self.until.is_some_and(|until| Instant::now() >= until) {
                let left = cells[position..].iter().filter(|&&cell| self.is_left(cell)).count();
                ending = Ending::OutOfTime(left);
                break;
            }
            self.run_cell(loaded, cell, (position + 1, cells.len()))?;
        }
        Ok(ending)
    }

    /// Whether a cell is still to be run: it can be, and has no rows yet.
    fn is_left(&self, cell: Cell) -> bool {
        self.prepared.arms[cell.arm].is_some() && !self.is_finished(cell)
    }

    /// A traced pass of every arm. After all that is measured: what times a GPU's kernels slows its launches down until the
    /// program ends.
    ///
    /// # Errors
    /// As [`Self::run`]. What was traced until then is kept.
    pub fn trace(&mut self, loaded: &mut Option<Loaded>) -> Result<()> {
        let cells = self.plan.cells();
        let mut trace = ChromeTrace::default();
        let mut kernels: Vec<KernelRow> = Vec::new();
        for &cell in cells.iter().filter(|cell| cell.repeat == first_repeat(&cells, cell.arm)) {
            if !self.is_finished(cell) || !self.load(loaded, cell.arm)? {
                continue;
            }
            let Some(on_device) = loaded.as_mut() else { continue };
            let before = self.device.ceilings_now()?;
            let mut record = self.trace_arm(on_device, cell)?;
            let around = before.zip(self.device.ceilings_now()?);
            let ceilings = around.map(|(before, after)| before.best_of(&after)).or(self.ceilings);
            record.judge_by(ceilings.as_ref());
            let arm = &self.plan.arms[cell.arm].name;
            trace.add(arm, &record, ceilings.as_ref());
            kernels.extend(kernel_rows(&record, arm, cell.repeat as u32, ceilings.as_ref()));
            self.folder.replace("trace.json.gz", &trace.gzip()?)?;
            if !kernels.is_empty() {
                let Rows { header, rows } = rows(&kernels)?;
                self.folder.replace(KERNELS_FILE, (header + &rows).as_bytes())?;
            }
        }
        Ok(())
    }

    /// Warms up, measures and writes one cell, the `position.0`th of `position.1`. `None` when the arm is an optional
    /// one that turns out not to run here.
    ///
    /// # Errors
    /// A model that cannot be loaded, a step that failed, an interruption, a folder that cannot be written to.
    pub fn run_cell(
        &mut self,
        loaded: &mut Option<Loaded>,
        cell: Cell,
        position: (usize, usize),
    ) -> Result<Option<Summary>> {
        interrupt::check()?;
        if !self.load(loaded, cell.arm)? {
            return Ok(None);
        }
        match loaded.as_mut() {
            Some(on_device) => self.measure(on_device, cell, position).map(Some),
            None => Ok(None),
        }
    }

    fn is_finished(&self, cell: Cell) -> bool {
        self.folder.has(&self.plan.arms[cell.arm].name, cell.repeat)
    }

    /// Whether a sweep over rising rates has already shown, in this repeat, that a rate this high teaches nothing more.
    fn is_over_saturated(&mut self, cell: Cell) -> Result<bool> {
        let arm = &self.plan.arms[cell.arm];
        if self.plan.experiment != SWEEP || arm.knob != "request_rate" {
            return Ok(false);
        }
        let path = self.folder.file("summary.csv");
        let mut rows: Vec<Summary> = if path.exists() { csv::read(&path)? } else { Vec::new() };
        rows.retain(|row| row.repeat == cell.repeat as u32);
        rows.sort_by(|a, b| {
            let rate = |row: &Summary| row.offered_rate.map_or(f64::INFINITY, Rate::per_s);
            rate(a).total_cmp(&rate(b))
        });
        let mut rule = OverSaturation::default();
        for row in &rows {
            if let (Some(rate), Some(throughput)) = (row.offered_rate, row.request_throughput) {
                rule.observe(rate, throughput);
            }
        }
        let skips = rule.skips(arm.load.request_rate);
        if skips {
            let reason = "a lower rate was already far beyond what the engine completes".to_string();
            self.progress.line(&format!("{}: left out: {reason}", arm.name));
            if !self.record.skipped.iter().any(|skipped| skipped.arm == arm.name) {
                self.record.skipped.push(SkippedArm { arm: arm.name.clone(), reason });
            }
        }
        Ok(skips)
    }

    /// Puts the arm's model onto the device if another one is there. False when an optional arm turns out not to run
    /// here, which is then noted.
    fn load(&mut self, loaded: &mut Option<Loaded>, index: usize) -> Result<bool> {
        let arm = &self.plan.arms[index];
        let options = LoadOptions { cpu_math: arm.engine.cpu_math, threads: arm.engine.threads };
        let there = loaded.as_ref();
        if there.is_some_and(|there| there.reference == arm.model && there.options == options) {
            return Ok(true);
        }
        // The old model goes first: the device may not hold both.
        *loaded = None;
        let opened = &self.prepared.models[&arm.model];
        self.device.prepare()?;
        let began = Instant::now();
        let progress = &mut *self.progress;
        progress.begin(0, 0, &format!("loading {}", arm.model), opened.layout.weight_bytes());
        let result = self.device.load(&opened.layout, &opened.weights, &options, &mut |progress_bytes| {
            progress.advance(progress_bytes.done_bytes);
        });
        match result {
            Ok(model) => {
                if let Some(record) =
                    self.record.models.iter_mut().find(|record| record.reference == arm.model)
                {
                    record.load_s.get_or_insert(began.elapsed().as_secs_f64());
                }
                let before_s = record::seconds_since_start();
                self.measure_quality(arm, model.as_ref(), &options)?;
                // Of the arithmetic this model was loaded for.
                self.ceilings = self.device.ceilings()?;
                let ceilings_s = record::seconds_since_start() - before_s;
                if self.record.ceilings.is_none() && self.ceilings.is_some() {
                    self.record.ceilings = self.ceilings;
                    self.save_record()?;
                }
                let clock = self.device.clock();
                *loaded = Some(Loaded {
                    reference: arm.model.clone(),
                    options,
                    model,
                    clock,
                    clock_start_s: record::seconds_since_start() - ceilings_s,
                    ceilings_s,
                    session: None,
                    fresh: true,
                });
                Ok(true)
            }
            Err(error @ Error::Invalid { .. }) if arm.optional => {
                self.progress.line(&format!("{}: left out: {error}", arm.name));
                self.record.skipped.push(SkippedArm { arm: arm.name.clone(), reason: error.to_string() });
                self.prepared.arms[index] = None;
                Ok(false)
            }
            Err(error) => Err(error.context(format!("arm `{}`", arm.name))),
        }
    }

    /// Where models with real weights are compared, what each one's weights are worth. The arms are what was asked for:
    /// a passage that cannot be measured is a warning.
    fn measure_quality(&mut self, arm: &Arm, model: &dyn Model, options: &LoadOptions) -> Result<()> {
        let several = self.record.models.len() > 1;
        let opened = &self.prepared.models[&arm.model];
        let record = self.record.models.iter_mut().find(|record| record.reference == arm.model);
        let Some(record) = record.filter(|record| several && record.perplexity.is_none()) else {
            return Ok(());
        };
        if opened.layout.synthetic || self.device.info().simulated() {
            return Ok(());
        }
        match quality::perplexity(self.device, opened, model, options, arm.engine.max_num_batched_tokens) {
            Ok(perplexity) => record.perplexity = perplexity,
            Err(interrupted @ Error::Interrupted { .. }) => return Err(interrupted),
            Err(error) => {
                let warning = format!("{}: its perplexity was not measured: {error}", arm.model);
                if !self.record.warnings.contains(&warning) {
                    self.record.warnings.push(warning);
                }
            }
        }
        self.save_record()
    }

    /// A session for the arm: the one that is open when it fits, else a new one.
    fn session<'s>(&self, loaded: &'s mut Loaded, ready: &PreparedArm) -> Result<&'s mut Engine> {
        let fits = loaded.session.as_ref().is_some_and(|session| {
            !loaded.clock.is_virtual()
                && !ready.config.prefix_caching
                && session.config == ready.config
                && session.pools == ready.pools
                && session.engine.is_idle()
        });
        let session = match loaded.session.take() {
            Some(session) if fits => session,
            old => {
                // Its pools are given back before new ones are asked for.
                drop(old);
                if loaded.clock.is_virtual() {
                    loaded.clock = self.device.clock();
                }
                let engine = Engine::new(
                    loaded.model.as_ref(),
                    ready.pools.clone(),
                    ready.config.clone(),
                    self.ceilings,
                    loaded.clock.clone(),
                )?;
                OpenSession { config: ready.config.clone(), pools: ready.pools.clone(), engine }
            }
        };
        Ok(&mut loaded.session.insert(session).engine)
    }

    fn measure(
        &mut self,
        loaded: &mut Loaded,
        cell: Cell,
        (position, of): (usize, usize),
    ) -> Result<Summary> {
        let arm = &self.plan.arms[cell.arm];
        let Some(ready) = &self.prepared.arms[cell.arm] else {
            return Err(Error::bug(format!("arm `{}` was not prepared", arm.name)));
        };
        let model = &self.prepared.models[&arm.model];
        let schedule = prepare::schedule(self.plan, arm, model, cell.repeat)?;
        let what = match self.plan.repeats {
            1 => arm.name.clone(),
            repeats => format!("{} (repeat {}/{repeats})", arm.name, cell.repeat + 1),
        };
        let (delay_s, gap_s) = self.device.submission_delay_s();
        let submission = Submission { delay_s, gap_s };
        let after_load = std::mem::replace(&mut loaded.fresh, false);
        let (clock_start_s, ceilings_s) = (loaded.clock_start_s, loaded.ceilings_s);
        let engine = self.session(loaded, ready)?;
        engine.set_trace(false);

        // A simulated device has nothing to warm.
        let mut warmed = if self.device.info().simulated() {
            WarmUp::default()
        } else {
            let label = format!("{what}: warm-up");
            warm_up(engine, self.plan, arm, model, cell, self.progress, (&label, (position, of)))?
        };
        if let Some(cold) = &mut warmed.cold {
            cold.after_load = after_load;
        }
        if let Some(model) = self.record.models.iter_mut().find(|model| model.reference == arm.model) {
            let cold_ms = warmed.cold.as_ref().and_then(|cold| cold.first_step_ms);
            model.cold_step_ms = model.cold_step_ms.or(cold_ms);
        }
        if let (None, Some(end_s)) = (&self.record.cold_start, warmed.first_step_end_s) {
            self.record.cold_start = Some(ColdStart {
                model: arm.model.clone(),
                seconds: clock_start_s + end_s,
                ceilings_s,
                compiled: self.device.compiled(),
            });
        }

        let expected = schedule.requests.len() as u64;
        let offered_rate = schedule.offered_rate;
        let before = self.device.ceilings_now()?;
        self.progress.begin(position, of, &what, expected);
        let progress = &mut *self.progress;
        let mut record = drive(&mut Embedded { engine }, schedule, submission, None, &mut |done| {
            progress.advance(done as u64)
        })?;
        // (The arm is done: it is not lost for a reading that fails.)
        let after = self.device.ceilings_now().unwrap_or_else(|error| {
            self.record.warnings.push(format!("{}: ceilings after it were not measured: {error}", arm.name));
            before
        });
        let around = before.zip(after).map(|(before, after)| ArmCeilings {
            arm: arm.name.clone(),
            repeat: cell.repeat as u32,
            before,
            after,
        });
        if let Some(around) = &around {
            record.judge_by(Some(&around.best()));
        }
        self.write(cell, &record, offered_rate, warmed, around)
    }

    fn write(
        &mut self,
        cell: Cell,
        record: &ArmRecord,
        offered_rate: Option<Rate>,
        warmed: WarmUp,
        around: Option<ArmCeilings>,
    ) -> Result<Summary> {
        let arm = &self.plan.arms[cell.arm];
        let repeat = cell.repeat as u32;
        let label = self.label(arm, cell);
        let ceilings = around.as_ref().map(ArmCeilings::best).or(self.ceilings);
        let conditions = Conditions { offered_rate, ceilings: ceilings.as_ref(), slo: &arm.load.slo };
        let summary = summarize(record, &label, &conditions);
        let limited = arm.load.concurrency.is_some();
        let mut checks = check_rows(record, &arm.name, repeat, limited);
        checks.extend(warmed.check);
        if let Some(around) = around {
            checks.extend(around.check_rows(&summary));
            self.record.add_ceilings(around);
            // Before the rows: what they were judged by is known even if the run is killed.
            self.save_record()?;
        }
        for check in checks.iter().filter(|check| check.status == "warning") {
            self.record
                .warnings
                .push(format!("{}, repeat {repeat}: {}: {}", arm.name, check.check, check.note));
        }
        let mut files = vec![
            ("populations.csv", rows(population_rows(record, &arm.name, repeat))?),
            ("checks.csv", rows(&checks)?),
            ("requests.csv", rows(record.request_rows(&arm.name, repeat))?),
            ("tokens.csv", rows(record.token_rows(&arm.name, repeat))?),
            ("steps.csv", rows(record.step_rows(&arm.name, repeat))?),
            ("summary.csv", rows([&summary])?),
        ];
        // Once an arm: later repeats find warm what an earlier one warmed.
        if cell.repeat == first_repeat(&self.plan.cells(), cell.arm)
            && let Some(cold) = &warmed.cold
        {
            files.insert(0, ("cold.csv", rows([cold])?));
        }
        self.folder.append(FinishedCell::new(arm, cell.repeat), &files)?;
        self.progress.line(&overview::one_line(&summary, self.plan.repeats));
        Ok(summary)
    }

    fn label(&self, arm: &Arm, cell: Cell) -> ArmLabel {
        let layout = &self.prepared.models[&arm.model].layout;
        let info = self.device.info();
        let math = format!("{:?}", arm.engine.cpu_math).to_lowercase();
        ArmLabel {
            experiment: self.plan.experiment.clone(),
            arm: arm.name.clone(),
            knob: arm.knob.clone(),
            value: arm.value.as_str().into(),
            repeat: cell.repeat as u32,
            device: info.id.clone(),
            simulated: info.simulated(),
            model: arm.model.clone(),
            synthetic_weights: weights_word(layout.synthetic) == "synthetic",
            load: arm.load.with_files_in(&self.plan.folder).describe(arm.engine.max_num_seqs),
            seed: repeat_seed(self.plan.seed, cell.repeat as u32),
            quick: self.plan.quick,
            cpu_math: if info.kind == DeviceKind::Cpu { math } else { String::new() },
            config_hash: arm.config_hash(),
            build: build_id(),
        }
    }

    /// One more pass of an arm with kernels recorded, or two where the device asks for another. Its measured rows go
    /// nowhere.
    fn trace_arm(&mut self, loaded: &mut Loaded, cell: Cell) -> Result<ArmRecord> {
        let arm = &self.plan.arms[cell.arm];
        let Some(ready) = &self.prepared.arms[cell.arm] else { return Ok(ArmRecord::default()) };
        let model = &self.prepared.models[&arm.model];
        let (delay_s, gap_s) = self.device.submission_delay_s();
        let mut again = true;
        let mut record = ArmRecord::default();
        for _ in 0..2 {
            if !again {
                break;
            }
            let schedule = prepare::schedule(self.plan, arm, model, cell.repeat)?;
            let engine = self.session(loaded, ready)?;
            engine.set_trace(true);
            self.progress.begin(0, 0, &format!("{}: tracing", arm.name), schedule.requests.len() as u64);
            let progress = &mut *self.progress;
            let driven =
                drive(&mut Embedded { engine }, schedule, Submission { delay_s, gap_s }, None, &mut |done| {
                    progress.advance(done as u64);
                });
            let end = engine.finish_trace()?;
            record = driven?;
            for (ticket, kernels) in end.kernels {
                record.add_kernels(ticket.0, kernels);
            }
            for note in end.notes {
                let note = format!("trace: {note}");
                if !self.record.warnings.contains(&note) {
                    self.progress.line(&note);
                    self.record.warnings.push(note);
                }
            }
            again = end.again;
        }
        Ok(record)
    }

    /// Writes run.json as it stands.
    ///
    /// # Errors
    /// A folder that cannot be written to.
    pub fn save_record(&self) -> Result<()> {
        self.folder.replace(RUN_FILE, &self.record.json()?)
    }
}

/// The first repeat of an arm that is in the plan.
fn first_repeat(cells: &[Cell], arm: usize) -> usize {
    cells.iter().filter(|cell| cell.arm == arm).map(|cell| cell.repeat).min().unwrap_or(0)
}
