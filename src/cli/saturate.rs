//! `inferwall saturate`: the highest request rate that keeps limits on latency.

use std::path::{Path, PathBuf};

use clap::Args;

use super::flags::PlanFlags;
use super::progress::Bar;
use super::{execute, output};
use crate::engine::config::KvLayout;
use crate::experiment::plan::{self, Cell, Plan, PlanOptions, SearchSpan};
use crate::experiment::sweep::{self, SATURATE};
use crate::measure::saturate::{SearchOptions, Trial, search};
use crate::measure::summary::Summary;
use crate::report;
use crate::report::format::Format;
use crate::results::csv;
use crate::results::folder::ResultsFolder;
use crate::results::record::{self, RunRecord, Status};
use crate::run::device;
use crate::run::prepare::{Prepared, prepare_more};
use crate::run::progress::Progress;
use crate::run::{Ready, Run};
use crate::workload::slo::Slo;
use crate::workload::spec::{Count, MOST_REQUESTS};
use crate::{Error, Result, interrupt};

#[derive(Debug, Args)]
pub struct SaturateFlags {
    /// Limits in milliseconds, for example ttft_p99=500,itl_p99=100 (may be left out with --resume)
    #[arg(long, value_name = "LIMITS")]
    slo: Option<String>,

    /// Rate to begin at, requests a second (1 unless said)
    #[arg(long, value_name = "RATE", allow_negative_numbers = true)]
    start: Option<f64>,

    /// End when the rates on both sides of the answer differ by this share (0.05 unless said)
    #[arg(long, value_name = "SHARE", allow_negative_numbers = true)]
    precision: Option<f64>,

    #[command(flatten)]
    plan: PlanFlags,

    /// Folder that results go under
    #[arg(long, value_name = "DIR", default_value = execute::DEFAULT_ROOT)]
    out: PathBuf,

    /// Continue the search in this folder
    #[arg(long, value_name = "RUN")]
    resume: Option<PathBuf>,

    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
}

/// Requests of each run unless --prompts says otherwise: enough for a p99.
const PROMPTS: usize = 200;

impl SaturateFlags {
    /// # Errors
    /// Limits or bounds that are wrong, a search that cannot be resumed; a run that failed or was interrupted.
    pub fn run(self) -> Result<()> {
        let earlier = self.resume.as_deref().map(read_earlier).transpose()?;
        let (options, span) = self.options(earlier.as_ref())?;
        let slo: Slo = options.slo.as_deref().unwrap_or_default().parse()?;
        let (rig, reason) = device::rig(&options.device)?;
        let mut plan = sweep::plan_of(&options, &rig)?;
        if plan.arms[0].load.probe.is_some() {
            return Err(Error::invalid(
                "a probe has no request rate to search",
                "leave `probe` out of --load, or run it with `inferwall sweep`",
            ));
        }
        plan.question = format!("What is the highest request rate that keeps {slo}?");

        let mut bar = Bar::new();
        let mut ready = Ready::open(&options, plan, &reason, &mut bar)?;
        // A rate is tried as often as it takes, whatever the plan says of its first.
        let most_repeats = options.repeats.unwrap_or(5);
        ready.record.seeds = record::seeds(ready.plan.seed, most_repeats);
        let mut run = match (&self.resume, &earlier) {
            (Some(path), Some(earlier)) => resume(ready, path, earlier, &mut bar)?,
            _ => ready.begin(&self.out, &mut bar)?,
        };
        interrupt::set_hint(format!(
            "the rates tried so far are kept; continue with `inferwall saturate --resume {}`",
            run.folder.path().display()
        ));

        let search_options = SearchOptions {
            slo,
            start: span.start,
            precision: span.precision,
            most_repeats: most_repeats as u32,
            prompts: options.prompts.unwrap_or(PROMPTS),
            flood_prompts: flood_prompts(&run.plan, &run.prepared),
            ..SearchOptions::default()
        };
        let base_prompts = search_options.prompts;
        let found = search(&search_options, |trial, repeat| {
            let arm = arm_of(&mut run, trial, base_prompts)?;
            let cell = Cell { arm, repeat: repeat as usize };
            // The search goes by what it finds, so a resumed one asks for the same rates in the same order.
            let name = &run.plan.arms[arm].name;
            if run.folder.has(name, cell.repeat) {
                return finished_row(&run.folder, name, repeat);
            }
            // A search that is killed leaves every arm that has rows in its plan.
            if run.record.plan.arms.len() < run.plan.arms.len() {
                run.save()?;
            }
            let summary = run.run_cell(cell, (arm + 1, arm + 1), &mut bar)?;
            summary.ok_or_else(|| Error::bug("an arm of a search was left out"))
        });
        bar.end();
        let saved = run.finish(Status::of(&found));
        let found = found?;
        saved?;
        output::data(&report::saturate::render(self.format, &found)?)?;
        output::note(&format!("results: {}", run.folder.path().display()));
        Ok(())
    }

    /// The flags given, over those of the search that is continued.
    fn options(&self, earlier: Option<&RunRecord>) -> Result<(PlanOptions, SearchSpan)> {
        let mut options = earlier.map(|record| record.options.clone()).unwrap_or_default();
        options.experiment = SATURATE.to_string();
        options.slo = self.slo.clone().or(options.slo);
        if options.slo.is_none() {
            return Err(Error::invalid(
                "there are no limits to keep",
                "give --slo, for example --slo ttft_p99=500,itl_p99=100",
            ));
        }
        let before = options.search.unwrap_or(SearchSpan { start: 1.0, precision: 0.05 });
        let span = SearchSpan {
            start: self.start.unwrap_or(before.start),
            precision: self.precision.unwrap_or(before.precision),
        };
        // (Rates nearer to each other than that have no names a person can read, and in the end no number between them.)
        let precision_ok = (1e-4..1.0).contains(&span.precision);
        if !(span.start > 0.0 && span.start.is_finite() && precision_ok) {
            return Err(Error::invalid(
                format!("--start {} --precision {} is out of bounds", span.start, span.precision),
                "the start is a rate above 0, the precision a share from 0.0001 to below 1",
            ));
        }
        options.search = Some(span);
        options.sweep = vec![("request_rate".to_string(), span.start.to_string())];
        self.plan.lay_over(&mut options);
        if !plan::load_says(&options.load, "prompts") {
            options.prompts.get_or_insert(PROMPTS);
        }
        Ok((options, span))
    }
}

fn read_earlier(path: &Path) -> Result<RunRecord> {
    let earlier = RunRecord::read(path)?;
    if earlier.experiment != SATURATE {
        return Err(Error::invalid(
            format!("{} is a run of {}, not of saturate", path.display(), earlier.experiment),
            "continue it with `inferwall run --resume` or `inferwall sweep --resume`",
        ));
    }
    Ok(earlier)
}

/// Takes up a search that was interrupted, if this one would have asked for the same rates.
fn resume(ready: Ready, path: &Path, earlier: &RunRecord, bar: &mut Bar) -> Result<Run> {
    // The arms after the first came with the search.
    let mut begun = earlier.clone();
    begun.plan.arms.truncate(1);
    begun.plan_hash = begun.plan.hash();
    let mut differences = begun.differences(&ready.record);
    if begun.options.search != ready.record.options.search {
        differences.push("start or precision".to_string());
    }
    if !differences.is_empty() {
        return Err(Error::invalid(
            format!("{} cannot be continued: {}", path.display(), differences.join("; ")),
            "give the flags it was started with (or none), or start a new search",
        ));
    }
    ready.resume(path, earlier, Vec::new(), bar)
}

/// The row that a finished cell left.
fn finished_row(folder: &ResultsFolder, arm: &str, repeat: u32) -> Result<Summary> {
    let path = folder.file("summary.csv");
    let rows: Vec<Summary> = csv::read(&path)?;
    rows.into_iter().find(|row| row.arm == arm && row.repeat == repeat).ok_or_else(|| {
        Error::invalid(
            format!("{} has no row of arm `{arm}`, repeat {repeat}, which cells.jsonl names", path.display()),
            "the folder is of another search, or damaged: start a new one",
        )
    })
}

/// Requests of a flood that fills the seats four times over. A ramp or a recorded trace has a pace of its own.
fn flood_prompts(plan: &Plan, prepared: &Prepared) -> Option<usize> {
    let arm = &plan.arms[0];
    let ready = prepared.arms[0].as_ref()?;
    let seats = match ready.config.kv_layout {
        KvLayout::Split => ready.seats.split,
        KvLayout::Unified => ready.seats.unified,
    };
    let floods = arm.load.ramp.is_none() && arm.load.replay.is_none();
    floods.then(|| arm.load.prompts.resolve(1).max(4 * seats.unwrap_or(1)).min(MOST_REQUESTS))
}

/// The arm of a rate (and of a number of requests where it is not that of the plan), made when it is first asked for.
fn arm_of(run: &mut Run, Trial { rate, prompts }: Trial, base_prompts: usize) -> Result<usize> {
    let more = if prompts == base_prompts { String::new() } else { format!(" prompts={prompts}") };
    let name = format!("request_rate={rate}{more}");
    if let Some(index) = run.plan.arms.iter().position(|arm| arm.name == name) {
        return Ok(index);
    }
    let mut arm = run.plan.arms[0].clone();
    arm.name = name;
    arm.value = rate.to_string();
    arm.baseline = false;
    arm.load.request_rate = rate;
    arm.load.prompts = Count::Exact(prompts);
    run.plan.arms.push(arm);
    prepare_more(&run.plan, &mut run.prepared, run.device.as_ref())?;
    Ok(run.plan.arms.len() - 1)
}
