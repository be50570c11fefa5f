//! `inferwall saturate`: the highest request rate that keeps limits on latency.

use std::path::PathBuf;

use clap::Args;
use serde_json::json;

use super::execute::{self, SWEEP, SWEEP_SPEC};
use super::flags::{Format, PlanFlags};
use super::output;
use super::progress::Bar;
use crate::experiment::folder::ResultsFolder;
use crate::experiment::plan::{self, Cell, Plan, PlanOptions};
use crate::experiment::prepare::{Prepared, prepare, prepare_more};
use crate::experiment::record::{self, Status};
use crate::experiment::runner::{Loaded, Progress, Runner};
use crate::experiment::{device, interrupt, spec};
use crate::measure::saturate::{CONFIDENCE, Judged, Judgement, Saturation, SearchOptions, search};
use crate::report::numbers::{DASH, number, optional};
use crate::report::table;
use crate::workload::slo::Slo;
use crate::{Error, Result};

#[derive(Debug, Args)]
pub struct SaturateFlags {
    /// Limits in milliseconds, for example ttft_p99=500,itl_p99=100
    #[arg(long, value_name = "LIMITS")]
    slo: String,

    /// Rate to begin at, requests a second
    #[arg(long, value_name = "RATE", default_value_t = 1.0)]
    start: f64,

    /// End when the rates on both sides of the answer differ by this share
    #[arg(long, value_name = "SHARE", default_value_t = 0.05)]
    precision: f64,

    #[command(flatten)]
    plan: PlanFlags,

    /// Folder that results go under
    #[arg(long, value_name = "DIR", default_value = execute::DEFAULT_ROOT)]
    out: PathBuf,

    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
}

/// Requests of each run unless --prompts says otherwise: enough for a p99.
const PROMPTS: usize = 200;

impl SaturateFlags {
    pub fn run(self) -> Result<()> {
        let slo: Slo = self.slo.parse()?;
        if !(self.start > 0.0 && self.start.is_finite() && self.precision > 0.0 && self.precision < 1.0) {
            return Err(Error::invalid(
                format!("--start {} --precision {} is out of bounds", self.start, self.precision),
                "the start is a rate above 0, the precision a share between 0 and 1",
            ));
        }
        let mut options = PlanOptions { experiment: SWEEP.to_string(), ..PlanOptions::default() };
        options.sweep = vec![("request_rate".to_string(), self.start.to_string())];
        self.plan.lay_over(&mut options)?;
        options.prompts.get_or_insert(PROMPTS);
        let (rig, reason) = device::rig(&options.device)?;
        let experiments = spec::parse(SWEEP_SPEC, "the sweep's own load")?;
        let mut plan = plan::build_sweep(spec::find(&experiments, SWEEP)?, &options, &rig)?;
        plan.experiment = "saturate".to_string();
        plan.question = format!("What is the highest request rate that keeps {slo}?");
        plan.arms[0].load.slo = slo.clone();

        let mut device = device::open(&options.device, plan.arms[0].engine.threads)?.device;
        let mut prepared = prepare(&plan, device.as_ref())?;
        let mut record = execute::new_record(&options, &plan, device.as_ref(), &prepared, &reason);
        let mut folder = ResultsFolder::create(&self.out, &plan.experiment, &rig.id, &record.plan_hash)?;
        folder.replace("run.json", &record.json()?)?;
        interrupt::set_hint(format!("the rates tried so far are in {}", folder.path().display()));

        let search_options = SearchOptions {
            slo,
            start: self.start,
            precision: self.precision,
            most_repeats: options.repeats.unwrap_or(5) as u32,
            ..SearchOptions::default()
        };
        let monitor = execute::watch_gpu(device.as_ref());
        let mut loaded: Option<Loaded> = None;
        let mut bar = Bar::new();
        let found = search(&search_options, |rate, repeat| {
            let arm = arm_of(&mut plan, &rate.to_string(), rate, &mut prepared, device.as_ref())?;
            let ceilings = record.ceilings;
            let mut runner = Runner {
                plan: &plan,
                prepared: &mut prepared,
                device: device.as_mut(),
                ceilings,
                folder: &mut folder,
                record: &mut record,
                trace: false,
                until: None,
                progress: &mut bar,
            };
            let cell = Cell { arm, repeat: repeat as usize };
            let summary = runner.run_cell(&mut loaded, cell, (arm + 1, arm + 1))?;
            summary.ok_or_else(|| Error::failed("the arm was left out", ""))
        });
        bar.end();
        if let Some(state) = monitor.and_then(|monitor| monitor.stop()) {
            record.device.facts_at_end.extend(state.facts());
            record.warnings.extend(state.warnings());
        }
        record.ended = Some(record::now());
        record.status = if found.is_ok() { Status::Complete } else { Status::Interrupted };
        record.plan_hash = plan.hash();
        record.plan = plan;
        let saved = record.json().and_then(|json| folder.replace("run.json", &json));
        let found = found?;
        saved?;
        output::data(&render(self.format, &found)?)?;
        output::note(&format!("results: {}", folder.path().display()));
        Ok(())
    }
}

/// The arm of a rate, made when it is first asked for.
fn arm_of(
    plan: &mut Plan,
    value: &str,
    rate: crate::workload::rate::Rate,
    prepared: &mut Prepared,
    device: &dyn crate::engine::device::Device,
) -> Result<usize> {
    if let Some(index) = plan.arms.iter().position(|arm| arm.value == value) {
        return Ok(index);
    }
    let mut arm = plan.arms[0].clone();
    arm.name = format!("request_rate={value}");
    arm.value = value.to_string();
    arm.baseline = false;
    arm.load.request_rate = rate;
    plan.arms.push(arm);
    prepare_more(plan, prepared, device)?;
    Ok(plan.arms.len() - 1)
}

fn render(format: Format, found: &Saturation) -> Result<String> {
    if format == Format::Json {
        let one = |judged: &Option<Judged>| {
            judged.as_ref().map(|judged| {
                json!({"rate": judged.rate, "certain": judged.certain, "confidence": CONFIDENCE,
                       "basis": judged.basis(), "goodput": judged.goodput(),
                       "repeats": judged.repeats.len()})
            })
        };
        let answer = json!({"keeps": one(&found.keeps), "breaks": one(&found.breaks)});
        return Ok(serde_json::to_string_pretty(&answer).unwrap_or_default() + "\n");
    }
    let rows: Vec<Vec<String>> = found
        .tried
        .iter()
        .map(|judged| {
            // Means, as the judgement itself goes by them.
            let mean = |value: fn(&crate::measure::summary::Summary) -> Option<f64>| {
                let values: Vec<f64> = judged.repeats.iter().filter_map(value).collect();
                (!values.is_empty()).then(|| crate::measure::statistics::mean(&values))
            };
            vec![
                number(judged.rate.per_s()),
                if judged.judgement == Judgement::Keeps { "keeps" } else { "breaks" }.to_string(),
                judged.basis().to_string(),
                judged.repeats.len().to_string(),
                optional(mean(|summary| summary.ttft_p99_ms)),
                optional(mean(|summary| summary.itl_p99_ms)),
                optional(judged.goodput()),
            ]
        })
        .collect();
    let header = ["rate", "limits", "confidence", "repeats", "TTFT p99", "ITL p99", "goodput"];
    let mut text = table::render(format, &header, &rows, &[0, 3, 4, 5, 6])?;
    if matches!(format, Format::Table | Format::Md) {
        text += &match (&found.keeps, &found.breaks) {
            (Some(keeps), breaks) => format!(
                "\n{} requests/s keep the limits (goodput {}); {}\n",
                number(keeps.rate.per_s()),
                optional(keeps.goodput()),
                breaks.as_ref().map_or("no rate that was tried breaks them".to_string(), |breaks| {
                    format!("{} break them", number(breaks.rate.per_s()))
                })
            ),
            (None, _) => format!("\nno rate that was tried keeps the limits ({DASH})\n"),
        };
        text += &format!(
            "confidence: `{} %`, one-sided, of the mean over repeats; `twofold`: one repeat, clear of a limit by a factor \
             of two; `by the means`: still open after the last repeat\n",
            CONFIDENCE * 100.0
        );
    }
    Ok(text)
}
