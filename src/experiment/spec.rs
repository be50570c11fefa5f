//! experiments.toml as it is written: one table an experiment.
//!
//! The file is read twice from the same text. Strictly, with `load` and `engine` as the types they end up in, so that
//! an unknown key or a wrong type is reported with its line and column; and as plain tables, so that a rig's, a quick
//! run's or an arm's override can be laid over the experiment's own keys before they become those types.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};
use toml::de::{DeTable, DeValue};
use toml::{Table, Value};

use super::{knobs, messages};
use crate::engine::config::EngineConfig;
use crate::engine::device::DeviceKind;
use crate::measure::summary::Summary;
use crate::workload::spec::LoadSpec;
use crate::{Error, Result};

/// The experiments that come with the binary.
pub const BUILT_IN: &str = include_str!("../../experiments.toml");

/// Metrics of a claim that are facts of an arm's model, not of its rows.
pub const MODEL_METRICS: [&str; 3] = ["weight_bytes", "streamed_bytes", "perplexity"];

/// `L` and `E` are `load` and `engine`: typed when checking, plain tables when laying overrides over them.
#[derive(Debug, Clone, Deserialize)]
#[serde(
    deny_unknown_fields,
    bound(deserialize = "L: Default + Deserialize<'de>, E: Default + Deserialize<'de>")
)]
pub struct ExperimentSpec<L = Table, E = Table> {
    /// What the reader wants to know.
    pub question: String,
    /// Part of the series, where it is one.
    pub part: Option<u32>,
    /// `synthetic:<preset>`, a hub id or a folder: the model on a GPU and in a simulation.
    pub model: String,
    /// The swept knob, its values, and the value the others are compared with (the first unless said).
    pub knob: Option<String>,
    #[serde(default)]
    pub values: Vec<Value>,
    pub baseline: Option<Value>,
    #[serde(default)]
    pub load: L,
    #[serde(default)]
    pub engine: E,
    pub repeats: Option<usize>,
    /// Where one knob is not enough.
    #[serde(default)]
    pub arms: Vec<ArmSpec<L, E>>,
    /// What a class of rig does differently.
    #[serde(default)]
    pub rig: BTreeMap<RigKey, Override<L, E>>,
    /// What `--quick` does differently on every rig.
    pub quick: Option<QuickOverride<L, E>>,
    #[serde(default)]
    pub claims: Vec<ClaimSpec>,
}

/// An arm, or one arm a value of its own `knob` (the experiment's unless said). `name` may hold `{value}`.
#[derive(Debug, Clone, Deserialize)]
#[serde(
    deny_unknown_fields,
    bound(deserialize = "L: Default + Deserialize<'de>, E: Default + Deserialize<'de>")
)]
pub struct ArmSpec<L = Table, E = Table> {
    pub name: Option<String>,
    pub model: Option<String>,
    #[serde(default)]
    pub load: L,
    #[serde(default)]
    pub engine: E,
    pub knob: Option<String>,
    #[serde(default)]
    pub values: Vec<Value>,
    pub prompts: Option<usize>,
    #[serde(default)]
    pub baseline: bool,
    /// Leave the arm out, with a note, on a rig that cannot run it (too little memory, a format it has no kernels for).
    #[serde(default)]
    pub optional: bool,
}

/// Whom an override is for: a class of rig (`cpu`, `cuda`, `sim`) or a device by its id (`sim:series`).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(try_from = "String")]
pub struct RigKey(String);

impl TryFrom<String> for RigKey {
    type Error = String;

    fn try_from(key: String) -> Result<Self, String> {
        if ["cpu", "cuda", "sim"].contains(&key.as_str())
            || key.starts_with("sim:")
            || key.starts_with("cuda:")
        {
            Ok(Self(key))
        } else {
            Err(format!("unknown rig `{key}`, expected cpu, cuda, sim or a device id such as sim:series"))
        }
    }
}

/// Where a plan is to run: the class chooses defaults, the id chooses overrides made for that device alone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rig {
    pub kind: DeviceKind,
    /// As [`crate::engine::device::DeviceInfo::id`].
    pub id: String,
}

impl Rig {
    pub fn class(&self) -> &'static str {
        match self.kind {
            DeviceKind::Cpu => "cpu",
            DeviceKind::Cuda => "cuda",
            DeviceKind::Sim => "sim",
        }
    }
}

#[derive(Debug, Clone, Deserialize)]
#[serde(
    deny_unknown_fields,
    bound(deserialize = "L: Default + Deserialize<'de>, E: Default + Deserialize<'de>")
)]
pub struct Override<L = Table, E = Table> {
    pub model: Option<String>,
    #[serde(default)]
    pub values: Vec<Value>,
    #[serde(default)]
    pub load: L,
    #[serde(default)]
    pub engine: E,
    pub repeats: Option<usize>,
    /// In place of the experiment's arms.
    pub arms: Option<Vec<ArmSpec<L, E>>>,
    pub quick: Option<QuickOverride<L, E>>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(
    deny_unknown_fields,
    bound(deserialize = "L: Default + Deserialize<'de>, E: Default + Deserialize<'de>")
)]
pub struct QuickOverride<L = Table, E = Table> {
    #[serde(default)]
    pub values: Vec<Value>,
    #[serde(default)]
    pub load: L,
    pub repeats: Option<usize>,
    /// In place of the arms.
    pub arms: Option<Vec<ArmSpec<L, E>>>,
}

/// A published or physical statement, checked on every run. The number it speaks of is `metric` of `arm` (of one of its
/// named populations where `population` is given), divided by the same of `over` where given; or a term of the
/// step-time fit. It holds within `tolerance` (relative) of `expect`,
/// or between `at_least` and `at_most`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClaimSpec {
    pub text: String,
    /// A column of summary.csv, or of populations.csv, or a fact of the arm's model: weight_bytes, streamed_bytes (by a
    /// decode step), perplexity.
    pub metric: Option<String>,
    pub population: Option<String>,
    pub arm: Option<String>,
    pub over: Option<String>,
    /// Of all arms of the model of `arm`, over that of `over`; with a `*` in it, of the arms it means alone.
    pub fit: Option<FitTerm>,
    pub expect: Option<f64>,
    pub tolerance: Option<f64>,
    pub at_least: Option<f64>,
    pub at_most: Option<f64>,
    /// Where it was published: a device by id (`sim:series`) or name (`NVIDIA H200`), a class (`cpu`, `cuda`, `sim`),
    /// or `any` for what holds everywhere.
    #[serde(default = "any_rig")]
    pub rig: String,
}

fn any_rig() -> String {
    "any".to_string()
}

/// Terms of step time = shared + private x sequences, fitted over the decode steps of one model's arms.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FitTerm {
    SharedMs,
    PrivateMs,
    /// Sequences at which the private part equals the shared one.
    CrossingSequences,
}

impl ExperimentSpec {
    /// Overrides for a rig, the general one first.
    pub fn overrides(&self, rig: &Rig) -> Vec<&Override> {
        let keys = [rig.class().to_string(), rig.id.clone()];
        keys.into_iter().filter_map(|key| self.rig.get(&RigKey(key))).collect()
    }
}

pub type Experiments = BTreeMap<String, ExperimentSpec>;

/// Reads and checks a whole file.
///
/// # Errors
/// [`Error::Invalid`] with file, line and column.
pub fn parse(text: &str, file: &str) -> Result<Experiments> {
    let broken = |error: toml::de::Error| {
        let place = error.span().map_or_else(String::new, |span| line_and_column(text, span.start));
        let message = messages::in_words(error.message());
        let hint = match messages::nearest_expected(&message) {
            Some(nearest) => format!("did you mean `{nearest}`?"),
            None => match DeTable::parse(text) {
                Err(_) => "this is no TOML: a key, `=` and a value a line; texts in quotes, lists in [brackets]",
                Ok(document)
                    if document.get_ref().values().any(|value| matches!(value.get_ref(), DeValue::Array(_))) =>
                {
                    "an experiment is one table, [name]; [[name.arms]] and [[name.claims]] are lists"
                }
                Ok(_) => {
                    "keys of a table: question, part, model, knob, values, baseline, load, engine, repeats, arms, \
                     rig, quick, claims"
                }
            }
            .to_string(),
        };
        Error::invalid(format!("{file}{place}: {message}"), hint)
    };
    toml::from_str::<BTreeMap<String, ExperimentSpec<LoadSpec, EngineConfig>>>(text).map_err(broken)?;
    let experiments: Experiments = toml::from_str(text).map_err(broken)?;
    if experiments.is_empty() {
        return Err(Error::invalid(
            format!("{file} holds no experiment"),
            "an experiment is a table: [name], then question, model, knob and values",
        ));
    }
    for (name, spec) in &experiments {
        check(name, spec).map_err(|Wrong { path, error }| {
            let place = place_of(text, name, &path);
            error.context(format!("{file}{place}: [{name}]"))
        })?;
    }
    Ok(experiments)
}

/// The experiments built in, or those of a file.
///
/// # Errors
/// A file that cannot be read, or is wrong: with the line, and the nearest key.
pub fn load(file: Option<&Path>) -> Result<Experiments> {
    match file {
        None => parse(BUILT_IN, "experiments.toml"),
        Some(path) => {
            let text = std::fs::read_to_string(path).map_err(|error| Error::read(path, &error))?;
            parse(&text, &path.display().to_string())
        }
    }
}

/// # Errors
/// [`Error::Invalid`] that offers the nearest name.
pub fn find<'a>(experiments: &'a Experiments, name: &str) -> Result<&'a ExperimentSpec> {
    experiments.get(name).ok_or_else(|| {
        let hint = match knobs::nearest(name, experiments.keys().map(String::as_str)) {
            Some(nearest) => format!("did you mean `{nearest}`? `inferwall list` shows all"),
            None => "`inferwall list` shows all experiments".to_string(),
        };
        Error::invalid(format!("unknown experiment `{name}`"), hint)
    })
}

/// Something that the types let pass, and where in the experiment's table it is: keys, and places in lists.
struct Wrong {
    path: Vec<String>,
    error: Error,
}

type Checked = std::result::Result<(), Wrong>;

fn wrong(path: &[&str], fact: impl Into<String>, hint: impl Into<String>) -> Checked {
    at::<()>(path, Err(Error::invalid(fact, hint)))
}

fn at<T>(path: &[&str], result: Result<T>) -> Checked {
    let path = || path.iter().map(|key| (*key).to_string()).collect();
    result.map(|_| ()).map_err(|error| Wrong { path: path(), error })
}

/// What the types cannot say: names of knobs, their values, and what a claim must hold.
fn check(name: &str, spec: &ExperimentSpec) -> Checked {
    if name.is_empty()
        || !name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
        || name.starts_with('.')
    {
        let fact = "the name of an experiment is also a folder: use letters, digits, `-`, `_` and `.`";
        return wrong(&[], fact, "rename the table");
    }
    let knob = spec.knob.as_deref();
    check_values(knob, &[], &spec.values, &["values"])?;
    if let Some(baseline) = &spec.baseline {
        check_value(knob, baseline, &["baseline"])?;
    }
    if spec.values.is_empty() && spec.arms.is_empty() {
        return wrong(&[], "neither `values` nor `arms`", "give the knob's values, or a list of arms");
    }
    if spec.repeats == Some(0) {
        return wrong(&["repeats"], "repeats = 0", "repeats must be 1 or more");
    }
    if let Some(quick) = &spec.quick {
        check_values(knob, &[], &quick.values, &["quick", "values"])?;
        check_arms(knob, quick.arms.as_deref().unwrap_or_default(), &["quick"])?;
    }
    check_arms(knob, &spec.arms, &[])?;
    for (RigKey(key), rig) in &spec.rig {
        check_values(knob, &[], &rig.values, &["rig", key, "values"])?;
        if let Some(quick) = &rig.quick {
            check_values(knob, &[], &quick.values, &["rig", key, "quick", "values"])?;
            check_arms(knob, quick.arms.as_deref().unwrap_or_default(), &["rig", key, "quick"])?;
        }
        check_arms(knob, rig.arms.as_deref().unwrap_or_default(), &["rig", key])?;
    }
    for (index, claim) in spec.claims.iter().enumerate() {
        at(&["claims", &index.to_string()], check_claim(claim))?;
    }
    Ok(())
}

fn check_arms(knob: Option<&str>, arms: &[ArmSpec], path: &[&str]) -> Checked {
    for (index, arm) in arms.iter().enumerate() {
        let index = index.to_string();
        let here = [path, &["arms", index.as_str()]].concat();
        let inside = |key| [here.as_slice(), &[key]].concat();
        check_values(arm.knob.as_deref().or(knob), &inside("knob"), &arm.values, &inside("values"))?;
        if arm.name.as_ref().map_or(arm.values.is_empty(), |name| name.trim().is_empty()) {
            return wrong(&here, "an arm with neither `name` nor `values`", "give it a name");
        }
        let named_twice =
            arm.values.len() > 1 && arm.name.as_ref().is_some_and(|name| !name.contains("{value}"));
        if named_twice {
            return wrong(
                &inside("name"),
                format!("arm `{}` has several values and one name", arm.name.as_deref().unwrap_or("")),
                "put {value} into its name",
            );
        }
    }
    Ok(())
}

/// The knob exists and takes these values. `own_knob` is where an arm names one of its own.
fn check_values(knob: Option<&str>, own_knob: &[&str], values: &[Value], path: &[&str]) -> Checked {
    match knob {
        None if values.is_empty() => return Ok(()),
        None => return wrong(path, "`values` without a `knob`", "add knob = \"...\""),
        Some(knob) => at(if own_knob.is_empty() { &["knob"] } else { own_knob }, knobs::find(knob))?,
    }
    values.iter().enumerate().try_for_each(|(index, value)| {
        check_value(knob, value, &[path, &[index.to_string().as_str()]].concat())
    })
}

fn check_value(knob: Option<&str>, value: &Value, path: &[&str]) -> Checked {
    match knob {
        None => wrong(path, "a value without a `knob`", "add knob = \"...\""),
        Some(knob) => at(path, knobs::find(knob).and_then(|knob| knob.from_toml(value))),
    }
}

fn check_claim(claim: &ClaimSpec) -> Result<()> {
    let context = |fact: &str, hint: &str| Error::invalid(format!("claim \"{}\": {fact}", claim.text), hint);
    match (&claim.metric, claim.fit) {
        (Some(_), None) if claim.arm.is_some() => {}
        (None, Some(_)) if claim.arm.is_some() || claim.over.is_none() => {}
        _ => {
            return Err(context(
                "what it measures is unclear",
                "give `metric` or `fit`, and the `arm` (and `over`) it is of; a fit without `arm` is of a run of one model",
            ));
        }
    }
    // (Populations have columns of their own, and what they are depends on the load.)
    if let Some(metric) = claim.metric.as_deref().filter(|_| claim.population.is_none()) {
        let columns = serde_json::to_value(Summary::default()).unwrap_or_default();
        let columns: Vec<&str> =
            columns.as_object().into_iter().flatten().map(|(key, _)| key.as_str()).collect();
        let known = || columns.iter().copied().chain(MODEL_METRICS);
        if !known().any(|name| name == metric) {
            let hint = match knobs::nearest(metric, known()) {
                Some(nearest) => format!("did you mean `{nearest}`?"),
                None => format!("columns of summary.csv, or {}", MODEL_METRICS.join(", ")),
            };
            return Err(context(&format!("there is no metric `{metric}`"), &hint));
        }
    }
    let band = claim.expect.is_some() && claim.tolerance.is_some_and(|tolerance| tolerance > 0.0);
    let bound = claim.at_least.is_some() || claim.at_most.is_some();
    if band == bound || (!band && claim.expect.is_some()) {
        return Err(context("no limits", "give `expect` and `tolerance`, or `at_least` and/or `at_most`"));
    }
    Ok(())
}

/// `:line:column` of what a path leads to below an experiment's table, or of as much of the path as there is.
fn place_of(text: &str, name: &str, path: &[String]) -> String {
    let Ok(document) = DeTable::parse(text) else { return String::new() };
    let Some((key, table)) = document.get_ref().get_key_value(name) else { return String::new() };
    // A table's own place is its name, not its first key.
    let (mut place, mut value) = (key.span(), table);
    for step in path {
        let next = match value.get_ref() {
            DeValue::Table(table) => table.get(step.as_str()),
            DeValue::Array(array) => step.parse().ok().and_then(|index: usize| array.get(index)),
            _ => None,
        };
        let Some(next) = next else { break };
        (place, value) = (next.span(), next);
    }
    line_and_column(text, place.start)
}

/// `:line:column`, both counted from 1; the column in characters.
fn line_and_column(text: &str, offset: usize) -> String {
    let before = text.get(..offset).unwrap_or(text);
    let line = before.matches('\n').count() + 1;
    let column = before.rsplit('\n').next().map_or(0, |line| line.chars().count()) + 1;
    format!(":{line}:{column}")
}

#[cfg(test)]
mod tests;
