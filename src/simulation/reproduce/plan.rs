//! The series' experiments as data ([`plan.toml`](plan.toml)): groups of arms, each one server and one load.

use serde::Deserialize;
use toml::{Table, Value};

use crate::engine::config::EngineConfig;
use crate::engine::model::presets::synthetic_layout;
use crate::simulation::SimulatedArm;
use crate::workload::spec::{LOAD_KNOBS, LoadSpec};
use crate::{Error, Result};

const PLAN: &str = include_str!("plan.toml");

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Plan {
    defaults: Defaults,
    group: Vec<Group>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Defaults {
    load: Table,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Group {
    part: u32,
    name: String,
    model: String,
    knob: Option<String>,
    #[serde(default)]
    values: Vec<Value>,
    #[serde(default)]
    load: Table,
    #[serde(default)]
    engine: Table,
    watch_s: Option<(f64, f64)>,
    #[serde(default)]
    stall_s: f64,
}

/// One arm of the plan.
#[derive(Debug, Clone)]
pub struct PlannedArm {
    pub name: String,
    pub model: String,
    pub engine: EngineConfig,
    pub load: LoadSpec,
    /// Look only at steps inside this window, and stop at its end, seconds.
    pub watch_s: Option<(f64, f64)>,
    pub stall_s: f64,
}

impl PlannedArm {
    /// # Errors
    /// A model that is no preset.
    pub fn simulated(&self, seed: u64) -> Result<SimulatedArm> {
        Ok(SimulatedArm {
            layout: synthetic_layout(&self.model)?,
            engine: self.engine.clone(),
            load: self.load.clone(),
            seed,
            stop_s: self.watch_s.map(|(_, end_s)| end_s),
            stall_s: self.stall_s,
        })
    }
}

/// The arms of a part, in the order of the plan.
///
/// # Errors
/// [`Error::Invalid`] when the plan cannot be read: it is part of the program, so this is a defect.
pub fn arms(part: u32) -> Result<Vec<PlannedArm>> {
    let plan: Plan = toml::from_str(PLAN).map_err(|error| defect(&error))?;
    let mut arms = Vec::new();
    for group in plan.group.iter().filter(|group| group.part == part) {
        let load = merged(&plan.defaults.load, &group.load);
        match &group.knob {
            None => arms.push(arm(group, group.name.clone(), load, group.engine.clone())?),
            Some(knob) => {
                for value in &group.values {
                    let (mut load, mut engine) = (load.clone(), group.engine.clone());
                    let target = if LOAD_KNOBS.contains(&knob.as_str()) { &mut load } else { &mut engine };
                    target.insert(knob.clone(), value.clone());
                    let shown = value.as_str().map_or_else(|| value.to_string(), str::to_string);
                    arms.push(arm(group, group.name.replace("{value}", &shown), load, engine)?);
                }
            }
        }
    }
    Ok(arms)
}

fn merged(base: &Table, over: &Table) -> Table {
    let mut all = base.clone();
    all.extend(over.clone());
    all
}

fn arm(group: &Group, name: String, load: Table, engine: Table) -> Result<PlannedArm> {
    let load = Value::Table(load).try_into().map_err(|error| defect(&error).context(&name))?;
    let engine = Value::Table(engine).try_into().map_err(|error| defect(&error).context(&name))?;
    let model = group.model.clone();
    Ok(PlannedArm { name, model, engine, load, watch_s: group.watch_s, stall_s: group.stall_s })
}

fn defect(error: &dyn std::fmt::Display) -> Error {
    Error::bug(format!("the series' plan cannot be read: {error}"))
}
