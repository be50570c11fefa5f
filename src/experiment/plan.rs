//! From an experiment and the flags of a run to a plan: every arm with its load, engine settings and model, resolved
//! and checked, and the order they run in.
//!
//! Layers, each over the one before: the experiment, its rig's overrides, the quick tables, the arm, the arm's swept
//! value, then the flags (`--model`, `--prompts`, `--set`). Repeats are the outer loop and arms the inner one, so that
//! a drift of the machine hits all arms alike.

mod axes;
mod options;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use toml::{Table, Value};

use super::knobs::{self, Knob, Section, Setting};
use super::messages;
use super::spec::{ArmSpec, ClaimSpec, ExperimentSpec, Rig};
use crate::engine::config::EngineConfig;
use crate::workload::slo::Slo;
use crate::workload::spec::LoadSpec;
use crate::{Error, Result};

pub use options::{PlanOptions, SearchSpan, Shard};

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Arm {
    pub name: String,
    /// The swept axis; empty for an arm that sweeps nothing.
    pub knob: String,
    pub value: String,
    pub baseline: bool,
    /// Left out, with a note, where the rig cannot run it.
    pub optional: bool,
    pub model: String,
    pub load: LoadSpec,
    pub engine: EngineConfig,
}

impl Arm {
    /// Identifies what an arm runs, whatever it is called.
    pub fn config_hash(&self) -> String {
        hash(&(&self.model, &self.load, &self.engine))
    }
}

/// More are a slip of the keyboard, and a plan has to fit in memory and in a table.
const MOST_REPEATS: usize = 10_000;
const MOST_CELLS: usize = 1_000_000;

/// One arm of one repeat: the unit that is run, written and resumed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cell {
    pub arm: usize,
    pub repeat: usize,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    pub experiment: String,
    pub question: String,
    pub part: Option<u32>,
    pub repeats: usize,
    pub seed: u64,
    pub quick: bool,
    pub arms: Vec<Arm>,
    pub claims: Vec<ClaimSpec>,
    /// Claims of arms that `--arms` left out, which are not among `claims`.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub claims_left_out: usize,
    /// A flag changed what the arms run, so figures published for the declared ones don't apply.
    pub altered: bool,
    pub shard: Option<Shard>,
    /// Where relative paths of models and files are looked for first, then in the working folder: the working folder of
    /// the run, where that is another one. Kept beside run.json, not in it.
    #[serde(skip)]
    pub folder: PathBuf,
}

fn is_zero(count: &usize) -> bool {
    *count == 0
}

impl Plan {
    /// Cells in the order they run, those of other shards left out.
    pub fn cells(&self) -> Vec<Cell> {
        let all =
            (0..self.repeats).flat_map(|repeat| (0..self.arms.len()).map(move |arm| Cell { arm, repeat }));
        match self.shard {
            None => all.collect(),
            Some(shard) => all
                .enumerate()
                .filter(|(i, _)| i % shard.of == shard.index - 1)
                .map(|(_, cell)| cell)
                .collect(),
        }
    }

    /// Equal for plans whose rows may stand in one table. Shards of one plan share it.
    pub fn hash(&self) -> String {
        hash(&(&self.experiment, self.repeats, self.seed, self.quick, &self.arms))
    }

    pub fn baseline(&self) -> &Arm {
        self.arms.iter().find(|arm| arm.baseline).unwrap_or(&self.arms[0])
    }
}

/// First 12 hex digits of the SHA-256 of a value's JSON.
pub fn hash(value: &impl Serialize) -> String {
    let json = serde_json::to_string(value).unwrap_or_default();
    Sha256::digest(json.as_bytes()).iter().take(6).map(|byte| format!("{byte:02x}")).collect()
}

/// What the arms of a rig are made of, before the arms' own keys.
struct Base {
    model: String,
    values: Vec<Value>,
    load: Table,
    engine: Table,
    repeats: usize,
    arms: Vec<ArmSpec>,
}

impl Base {
    fn new(spec: &ExperimentSpec, rig: &Rig, quick: bool) -> Self {
        let mut base = Self {
            model: spec.model.clone(),
            values: spec.values.clone(),
            load: spec.load.clone(),
            engine: spec.engine.clone(),
            repeats: spec.repeats.unwrap_or(1),
            arms: spec.arms.clone(),
        };
        let overrides = spec.overrides(rig);
        for over in &overrides {
            base.model = over.model.clone().unwrap_or(base.model);
            lay_values(&mut base.values, &over.values);
            lay(&mut base.load, &over.load);
            lay(&mut base.engine, &over.engine);
            base.repeats = over.repeats.unwrap_or(base.repeats);
            base.arms = over.arms.clone().unwrap_or(base.arms);
        }
        let quicks = spec.quick.iter().chain(overrides.iter().filter_map(|over| over.quick.as_ref()));
        for table in quicks.filter(|_| quick) {
            lay_values(&mut base.values, &table.values);
            lay(&mut base.load, &table.load);
            base.repeats = table.repeats.unwrap_or(base.repeats);
            base.arms = table.arms.clone().unwrap_or(base.arms);
        }
        base
    }
}

fn lay(under: &mut Table, over: &Table) {
    under.extend(over.iter().map(|(key, value)| (key.clone(), value.clone())));
}

/// The same, tables within tables key by key: what a flag leaves out stays as the experiment has it.
fn lay_deep(under: &mut Table, over: &Table) {
    for (key, value) in over {
        match (under.get_mut(key), value) {
            (Some(Value::Table(under)), Value::Table(over)) => lay_deep(under, over),
            _ => {
                under.insert(key.clone(), value.clone());
            }
        }
    }
}

fn lay_values(under: &mut Vec<Value>, over: &[Value]) {
    if !over.is_empty() {
        *under = over.to_vec();
    }
}

/// Resolves the plan of a declared experiment for a rig.
///
/// # Errors
/// [`Error::Invalid`] for a knob, value or combination that cannot be.
pub fn build(spec: &ExperimentSpec, options: &PlanOptions, rig: &Rig) -> Result<Plan> {
    let base = Base::new(spec, rig, options.quick);
    let sets = assignments(options)?;
    let mut values_used = false;
    let mut arms = Vec::new();
    let mut specs = base.arms.clone();
    if !base.values.is_empty() {
        // The experiment's own axis comes first; listed arms follow.
        specs.insert(0, ArmSpec { values: base.values.clone(), ..empty_arm() });
    }
    for arm_spec in &specs {
        let knob = match arm_spec.knob.as_ref().or(spec.knob.as_ref()) {
            Some(name) if !arm_spec.values.is_empty() => Some(knobs::find(name)?),
            _ => None,
        };
        // `--values` replaces the experiment's own axis, wherever it stands as a list; arms with one value of
        // their own are not a list.
        let own_axis = knob.is_some_and(|knob| spec.knob.as_deref() == Some(knob.name))
            && (arm_spec.name.is_none()
                || arm_spec.name.as_ref().is_some_and(|name| name.contains("{value}")));
        let settings: Vec<Option<Setting>> = match (knob, &options.values) {
            (Some(knob), Some(text)) if own_axis => {
                values_used = true;
                knobs::parse_values(knob, text)?.into_iter().map(Some).collect()
            }
            (Some(knob), _) => {
                let values: Result<Vec<Setting>> =
                    arm_spec.values.iter().map(|value| knob.from_toml(value)).collect();
                values?.into_iter().map(Some).collect()
            }
            (None, _) => vec![None],
        };
        for setting in settings {
            let axis = match (knob, &setting) {
                (Some(knob), Some(setting)) => vec![(knob, setting.clone())],
                _ => Vec::new(),
            };
            let baseline = arm_spec.baseline || is_baseline(spec, axis.first())?;
            arms.push(resolve(&base, arm_spec, &axis, &sets, options, baseline)?);
        }
    }
    if options.values.is_some() && !values_used {
        return Err(Error::invalid(
            format!(
                "experiment `{}` sweeps no single knob, so --values has nothing to replace",
                options.experiment
            ),
            "use --set knob=value, or `inferwall sweep`",
        ));
    }
    finish(spec, options, base.repeats, arms)
}

/// Resolves a sweep over the crossed (or paired) values of its knobs.
///
/// # Errors
/// A knob given twice, values that do not pair; as [`build`].
pub fn build_sweep(spec: &ExperimentSpec, options: &PlanOptions, rig: &Rig) -> Result<Plan> {
    let base = Base::new(spec, rig, options.quick);
    let sets = assignments(options)?;
    let mut axes: Vec<(&'static Knob, Vec<Setting>)> = Vec::new();
    for (name, values) in &options.sweep {
        let knob = knobs::find(name)?;
        if axes.iter().any(|(other, _)| other.name == knob.name) {
            return Err(Error::invalid(
                format!("--knob {name} is given twice"),
                "give each knob once, with all of its values in its --values",
            ));
        }
        axes.push((knob, knobs::parse_values(knob, values)?));
    }
    let points = if options.zip { axes::zipped(&axes)? } else { axes::crossed(&axes)? };
    let arms: Result<Vec<Arm>> = points
        .iter()
        .enumerate()
        .map(|(i, point)| resolve(&base, &empty_arm(), point, &sets, options, i == 0))
        .collect();
    finish(spec, options, base.repeats, arms?)
}

fn assignments(options: &PlanOptions) -> Result<Vec<(&'static Knob, Setting)>> {
    options.set.iter().map(|text| knobs::parse_assignment(text)).collect()
}

/// Whether one of these texts of `--load` sets a key, or a part of it.
pub fn load_says(texts: &[String], key: &str) -> bool {
    texts.iter().any(|text| load_keys(text).is_ok_and(|keys| keys.contains_key(key)))
}

/// What one `--load` says.
fn load_keys(text: &str) -> Result<Table> {
    let wrong = |error: toml::de::Error| {
        let message = messages::in_words(error.message());
        let hint = messages::nearest_expected(&message).map_or_else(
            || {
                "write a key of the load as in experiments.toml, texts in quotes: --load 'arrivals = \"constant\"'"
                    .to_string()
            },
            |nearest| format!("did you mean `{nearest}`?"),
        );
        Error::invalid(format!("--load {text}: {message}"), hint)
    };
    toml::from_str::<LoadSpec>(text).map_err(wrong)?;
    toml::from_str(text).map_err(wrong)
}

fn empty_arm() -> ArmSpec {
    ArmSpec {
        name: None,
        model: None,
        load: Table::new(),
        engine: Table::new(),
        knob: None,
        values: Vec::new(),
        prompts: None,
        baseline: false,
        optional: false,
    }
}

fn is_baseline(spec: &ExperimentSpec, axis: Option<&(&'static Knob, Setting)>) -> Result<bool> {
    match (&spec.baseline, axis) {
        (Some(value), Some((knob, setting))) if spec.knob.as_deref() == Some(knob.name) => {
            Ok(knob.from_toml(value)? == *setting)
        }
        _ => Ok(false),
    }
}

fn resolve(
    base: &Base,
    arm: &ArmSpec,
    axis: &[(&'static Knob, Setting)],
    sets: &[(&'static Knob, Setting)],
    options: &PlanOptions,
    baseline: bool,
) -> Result<Arm> {
    let (mut load, mut engine) = (base.load.clone(), base.engine.clone());
    lay(&mut load, &arm.load);
    lay(&mut engine, &arm.engine);
    if let Some(prompts) = arm.prompts {
        load.insert("prompts".to_string(), Value::Integer(prompts as i64));
    }
    if let Some(limits) = &options.slo {
        let limits: Slo = limits.parse()?;
        let limits = limits.limits().map(|limit| (limit.name.to_string(), limit.limit_ms.into()));
        load.insert("slo".to_string(), Value::Table(limits.collect()));
    }
    for text in &options.load {
        lay_deep(&mut load, &load_keys(text)?);
    }
    for (knob, setting) in axis {
        knob.set(&mut engine, &mut load, setting);
    }
    for (knob, setting) in sets {
        if axis.iter().any(|(swept, _)| swept.name == knob.name) {
            return Err(Error::invalid(
                format!("--set {}={setting} would override the swept knob", knob.name),
                format!("use --values to choose the values of {}", knob.name),
            ));
        }
        knob.set(&mut engine, &mut load, setting);
    }
    if let Some(prompts) = options.prompts {
        if prompts == 0 {
            return Err(Error::invalid("--prompts 0 asks for no requests", "give 1 or more"));
        }
        // An arm with a number of its own is what it is by that number.
        if arm.prompts.is_none() && !arm.load.contains_key("prompts") {
            load.insert("prompts".to_string(), Value::Integer(prompts as i64));
        }
    }
    if load.contains_key("replay") {
        for (knob, _) in axis.iter().chain(sets) {
            if REPLACED_BY_A_TRACE.contains(&knob.name) {
                return Err(Error::invalid(
                    format!("{} has no effect in a replay: the trace says it", knob.name),
                    "leave it out, or the replay",
                ));
            }
        }
        if !says_prompts(arm, &load, axis, sets, options) {
            load.insert("prompts".to_string(), Value::String("all".to_string()));
        }
    }
    let joined =
        |part: fn(&(&'static Knob, Setting)) -> String| axis.iter().map(part).collect::<Vec<_>>().join(" ");
    let value = joined(|(_, setting)| setting.to_string());
    let name = match &arm.name {
        Some(name) => name.replace("{value}", &value),
        None => joined(|(knob, setting)| format!("{}={setting}", knob.name)),
    };
    let in_arm = |error: toml::de::Error| {
        Error::invalid(
            format!("arm `{name}`: {}", messages::in_words(error.message())),
            "see `inferwall show` for what it resolves to",
        )
    };
    let load: LoadSpec = Value::Table(load).try_into().map_err(in_arm)?;
    let engine: EngineConfig = Value::Table(engine).try_into().map_err(in_arm)?;
    let named = |error: Error| error.context(format!("arm `{name}`"));
    engine.validate().map_err(named)?;
    load.validate().map_err(named)?;
    let model = options.model.clone().or_else(|| arm.model.clone()).unwrap_or_else(|| base.model.clone());
    let mut forms = axis.iter().chain(sets).filter(|(knob, _)| knob.section == Section::Model);
    let model = forms.try_fold(model, |model, (_, form)| knobs::quantized(&model, form))?;
    let knob = joined(|(knob, _)| knob.name.to_string());
    Ok(Arm { name, knob, value, baseline, optional: arm.optional, model, load, engine })
}

/// Knobs that a replay takes from its trace.
const REPLACED_BY_A_TRACE: [&str; 4] = ["input_len", "output_len", "burstiness", "think_time_s"];

/// Whether someone who knew of the replay said how many of its rows are wanted. Otherwise all are, in every arm.
fn says_prompts(
    arm: &ArmSpec,
    load: &Table,
    axis: &[(&'static Knob, Setting)],
    sets: &[(&'static Knob, Setting)],
    options: &PlanOptions,
) -> bool {
    let by_flag = options.prompts.is_some()
        || load_says(&options.load, "prompts")
        || axis.iter().chain(sets).any(|(knob, _)| knob.name == "prompts");
    let declared = !load_says(&options.load, "replay")
        && (arm.prompts.is_some() || load.get("prompts").is_some_and(Value::is_integer));
    by_flag || declared
}

/// Whether a pattern means a name: `*` stands for any letters, none included.
pub fn means(pattern: &str, name: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == name,
        Some((start, rest)) => name.strip_prefix(start).is_some_and(|name| {
            (0..=name.len()).any(|at| name.is_char_boundary(at) && means(rest, &name[at..]))
        }),
    }
}

/// Keeps the arms that one of `names` means; all where there are none.
fn only(names: &[String], arms: &mut Vec<Arm>) -> Result<()> {
    if let Some(name) = names.iter().find(|name| !arms.iter().any(|arm| means(name, &arm.name))) {
        let all: Vec<&str> = arms.iter().map(|arm| arm.name.as_str()).collect();
        return Err(Error::invalid(
            format!("no arm is called `{name}`"),
            format!("arms: {}", all.join(", ")),
        ));
    }
    arms.retain(|arm| names.is_empty() || names.iter().any(|name| means(name, &arm.name)));
    Ok(())
}

/// Whether every arm that a claim names is among `arms`.
fn speaks_of(claim: &ClaimSpec, arms: &[Arm]) -> bool {
    let mut named = [&claim.arm, &claim.over].into_iter().flatten();
    named.all(|name| arms.iter().any(|arm| means(name, &arm.name)))
}

fn finish(spec: &ExperimentSpec, options: &PlanOptions, repeats: usize, mut arms: Vec<Arm>) -> Result<Plan> {
    for (index, arm) in arms.iter().enumerate() {
        if arms[..index].iter().any(|other| other.name == arm.name) {
            return Err(Error::invalid(
                format!("two arms are called `{}`", arm.name),
                "rename one in the experiment, or change --values",
            ));
        }
    }
    if arms.is_empty() {
        return Err(Error::invalid("the plan has no arms", "give the experiment values or arms"));
    }
    only(&options.arms, &mut arms)?;
    if !arms.iter().any(|arm| arm.baseline) {
        arms[0].baseline = true;
    }
    let repeats = options.repeats.unwrap_or(repeats);
    if repeats == 0 {
        return Err(Error::invalid("--repeats 0 asks for no runs", "give 1 or more"));
    }
    if repeats > MOST_REPEATS || repeats * arms.len() > MOST_CELLS {
        return Err(Error::invalid(
            format!("{repeats} repeats of {} arms are out of bounds", arms.len()),
            format!("--repeats is {MOST_REPEATS} at most, and all runs of an arm {MOST_CELLS}"),
        ));
    }
    // (Unless arms were chosen all stay, also of arms that this rig does not have: they say what was published.)
    let chosen = !options.arms.is_empty() || options.values.is_some();
    let mut claims = spec.claims.clone();
    claims.retain(|claim| !chosen || speaks_of(claim, &arms));
    let altered = !options.set.is_empty()
        || !options.load.is_empty()
        || options.prompts.is_some()
        || options.model.is_some()
        || options.quick;
    Ok(Plan {
        experiment: options.experiment.clone(),
        question: spec.question.clone(),
        part: spec.part,
        repeats,
        seed: options.seed.unwrap_or(0),
        quick: options.quick,
        arms,
        claims_left_out: spec.claims.len() - claims.len(),
        claims,
        altered,
        shard: options.shard,
        folder: options.folder.clone(),
    })
}

#[cfg(test)]
mod tests;
