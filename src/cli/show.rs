//! `inferwall show`: the plan as it would run here, and what was published.

use clap::Args;

use super::flags::{ExperimentsFlag, PartFlags, PlanFlags};
use super::output;
use crate::Result;
use crate::engine::config::EngineConfig;
use crate::engine::model::{ModelRef, OpenOptions, open};
use crate::experiment::estimate;
use crate::experiment::plan::{Arm, Plan, PlanOptions};
use crate::experiment::spec::Rig;
use crate::experiment::sweep;
use crate::numbers::{bytes, duration};
use crate::report::format::Format;
use crate::report::{json, table};
use crate::results::claims;
use crate::run::device;
use crate::run::prepare::prepare;

#[derive(Debug, Args)]
pub struct ShowFlags {
    /// Name of the experiment
    experiment: String,

    /// The swept knob's values, in place of those declared
    #[arg(long, value_name = "A,B,C")]
    values: Option<String>,

    #[command(flatten)]
    experiments: ExperimentsFlag,

    #[command(flatten)]
    plan: PlanFlags,

    #[command(flatten)]
    part: PartFlags,

    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
}

impl ShowFlags {
    /// # Errors
    /// An experiment or flag that is wrong; what `run` would refuse.
    pub fn run(self) -> Result<()> {
        let mut options = PlanOptions {
            experiment: self.experiment.clone(),
            experiments_file: self.experiments.experiments.clone(),
            values: self.values.clone(),
            ..PlanOptions::default()
        };
        self.plan.lay_over(&mut options);
        self.part.lay_over(&mut options)?;
        let (rig, reason) = device::rig(&options.device)?;
        let plan = sweep::plan_of(&options, &rig)?;
        match self.format {
            Format::Json => output::data(&json::array(std::slice::from_ref(&plan))?),
            Format::Csv => output::data(&arms(&plan, Format::Csv)?),
            Format::Table | Format::Md => output::data(&text(&plan, &rig, &reason, self.format)?),
        }?;
        check(plan, &options)
    }
}

/// What `run` would refuse before it loads anything, refused here too; the plan has been shown by then.
fn check(mut plan: Plan, options: &PlanOptions) -> Result<()> {
    // A model that would have to be downloaded first says nothing yet.
    let here = |arm: &Arm| {
        let reference: Result<ModelRef> = arm.model.parse();
        !matches!(&reference, Ok(hub @ ModelRef::Hub { .. }) if open(hub, &OpenOptions::default()).is_err())
    };
    plan.arms.retain(here);
    let Some(first) = plan.arms.first() else { return Ok(()) };
    let device = match device::open(&options.device, first.engine.threads) {
        Ok(chosen) => chosen.device,
        // (A plan for a GPU may be looked at anywhere.)
        Err(error) if rig_is_elsewhere(options) => {
            output::note(&format!(
                "not checked against memory and kernels, as the device is not here: {error}"
            ));
            return Ok(());
        }
        Err(error) => return Err(error),
    };
    for skipped in prepare(&plan, device.as_ref())?.skipped {
        output::warning(&format!("left out: {}: {}", skipped.arm, skipped.reason));
    }
    Ok(())
}

fn rig_is_elsewhere(options: &PlanOptions) -> bool {
    options.device.starts_with("cuda")
}

fn text(plan: &Plan, rig: &Rig, reason: &str, format: Format) -> Result<String> {
    let part = plan.part.map_or_else(String::new, |part| format!(" (part {part} of the series)"));
    let mut text = format!("{}{part}\n{}\n\n", plan.experiment, plan.question);
    let because = if reason.is_empty() { String::new() } else { format!(" ({reason})") };
    text += &format!("device: {}{because}\n", rig.id);
    for model in models(plan) {
        text += &format!("model: {model}{}\n", size(model)?);
    }
    let cells = plan.cells().len();
    let shard = plan.shard.map_or_else(String::new, |shard| format!(", shard {}/{}", shard.index, shard.of));
    text += &format!(
        "repeats: {}, {cells} runs of an arm{shard}, seed {}{}\n",
        plan.repeats,
        plan.seed,
        if plan.quick { ", quick" } else { "" }
    );
    if let Some(seconds) = estimate::plan_seconds(plan, rig) {
        let simulated = matches!(rig.class(), "sim");
        let what = if simulated { "simulated time" } else { "expected time" };
        text += &format!("{what}: about {}\n", duration(seconds));
    }
    text.push('\n');
    text += &arms(plan, format)?;
    let left_out = claims::left_out(plan);
    if !plan.claims.is_empty() || left_out.is_some() {
        text += "\nClaims, checked on every run:\n\n";
        for claim in &plan.claims {
            let rig = if claim.rig == "any" { String::new() } else { format!(" [{}]", claim.rig) };
            text += &format!("- {}: expected {}{rig}\n", claim.text, claims::expected(claim));
        }
        text += &left_out.map_or_else(String::new, |left_out| format!("- {left_out}\n"));
    }
    Ok(text)
}

fn arms(plan: &Plan, format: Format) -> Result<String> {
    let rows: Vec<Vec<String>> = plan
        .arms
        .iter()
        .map(|arm| {
            let name = if arm.baseline { format!("{} (baseline)", arm.name) } else { arm.name.clone() };
            vec![name, arm.model.clone(), arm.load.describe(arm.engine.max_num_seqs), engine_words(arm)]
        })
        .collect();
    table::render(format, &["arm", "model", "load", "engine"], &rows, &[])
}

fn models(plan: &Plan) -> Vec<&str> {
    let mut models: Vec<&str> = plan.arms.iter().map(|arm| arm.model.as_str()).collect();
    models.sort_unstable();
    models.dedup();
    models
}

/// Bytes of a built-in shape or of a folder; a hub id is not looked for.
///
/// # Errors
/// A name that can be no model, a folder that holds none.
fn size(model: &str) -> Result<String> {
    let reference: ModelRef = model.parse()?;
    if matches!(reference, ModelRef::Hub { .. }) {
        return Ok(String::new());
    }
    let layout = open(&reference, &OpenOptions::default())?.layout;
    Ok(format!(
        " ({} of weights, {} streamed by a step)",
        bytes(layout.weight_bytes() as f64),
        bytes(layout.streamed_bytes() as f64)
    ))
}

/// Engine settings that are not the defaults.
fn engine_words(arm: &Arm) -> String {
    let (now, default) = (serde_json::to_value(&arm.engine), serde_json::to_value(EngineConfig::default()));
    let (Ok(now), Ok(default)) = (now, default) else { return String::new() };
    let fields = now.as_object().into_iter().flatten();
    let changed = fields.filter(|(key, value)| default.get(*key) != Some(*value));
    changed
        .map(|(key, value)| format!("{key}={}", value.to_string().trim_matches('"')))
        .collect::<Vec<_>>()
        .join(" ")
}
