//! What a run leaves behind: run.json ([`record`]), the folder it is in and which of its rows count ([`folder`],
//! [`journal`]), its tables ([`csv`]), and all of it read back ([`RunResults`]), which every report is made from and claims
//! are checked against ([`claims`]).

pub mod claims;
pub mod csv;
pub mod folder;
pub mod journal;
pub mod record;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::engine::account::Ceilings;
use crate::measure::cold::ColdRow;
use crate::measure::kernels::{BETWEEN, dominant};
use crate::measure::rows::{CheckRow, KernelRow, PopulationRow, StepRow};
use crate::measure::step_fit::{self, StepFit};
use crate::measure::summary::Summary;
use crate::measure::summary_file;
use crate::{Error, Result, numbers};

use self::folder::KERNELS_FILE;
use self::record::RunRecord;

/// Kernels listed for an arm.
pub const LARGEST_KERNELS: usize = 5;

pub struct RunResults {
    pub folder: PathBuf,
    pub record: RunRecord,
    /// In the order of the plan: by arm, then repeat.
    pub summaries: Vec<Summary>,
    pub steps: Vec<StepRow>,
    pub populations: Vec<PopulationRow>,
    pub checks: Vec<CheckRow>,
    pub cold: Vec<ColdRow>,
    /// Empty for a run that was not traced.
    pub kernels: Vec<KernelRow>,
}

impl RunResults {
    /// # Errors
    /// [`crate::Error::Invalid`] when it is no results folder, or a file of it is damaged.
    pub fn read(folder: &Path) -> Result<Self> {
        let record = RunRecord::read(folder)?;
        let order: BTreeMap<&str, usize> =
            record.plan.arms.iter().enumerate().map(|(index, arm)| (arm.name.as_str(), index)).collect();
        let summary_file = folder.join("summary.csv");
        let mut summaries: Vec<Summary> = read_if_there(&summary_file)?;
        if !summaries.is_empty() {
            let text =
                std::fs::read_to_string(&summary_file).map_err(|error| Error::read(&summary_file, &error))?;
            summary_file::check_csv(&text).map_err(|error| error.context(summary_file.display()))?;
        }
        summaries.sort_by_key(|row| (order.get(row.arm.as_str()).copied(), row.repeat));
        let steps = read_if_there(&folder.join("steps.csv"))?;
        let populations = read_if_there(&folder.join("populations.csv"))?;
        let checks = read_if_there(&folder.join("checks.csv"))?;
        let cold = read_if_there(&folder.join("cold.csv"))?;
        let kernels = read_if_there(&folder.join(KERNELS_FILE))?;
        let folder = folder.to_path_buf();
        Ok(Self { folder, record, summaries, steps, populations, checks, cold, kernels })
    }

    /// # Errors
    /// [`crate::Error::Invalid`] when no arm has finished: there is nothing to report or explain.
    pub fn require_rows(&self) -> Result<()> {
        if !self.summaries.is_empty() {
            return Ok(());
        }
        Err(Error::invalid(
            format!("{} has no rows", self.folder.join("summary.csv").display()),
            "no arm of the run has finished, or the file was taken away: continue the run with --resume",
        ))
    }

    /// Arms that have a finished row, in the order of the plan.
    pub fn arms(&self) -> Vec<&str> {
        let mut names: Vec<&str> = Vec::new();
        for summary in &self.summaries {
            if names.last() != Some(&summary.arm.as_str()) {
                names.push(&summary.arm);
            }
        }
        names
    }

    /// The same, or the one that is called `only`.
    ///
    /// # Errors
    /// No finished arm has that name.
    pub fn arms_named(&self, only: Option<&str>) -> Result<Vec<&str>> {
        let mut arms = self.arms();
        let Some(name) = only else { return Ok(arms) };
        if !arms.contains(&name) {
            return Err(Error::invalid(
                format!("{} has no finished arm `{name}`", self.folder.display()),
                format!("arms: {}", arms.join(", ")),
            ));
        }
        arms.retain(|arm| *arm == name);
        Ok(arms)
    }

    /// Rows of one arm, a repeat each.
    pub fn of_arm<'a>(&'a self, arm: &'a str) -> impl Iterator<Item = &'a Summary> + 'a {
        self.summaries.iter().filter(move |summary| summary.arm == arm)
    }

    /// Median over an arm's repeats.
    pub fn median(&self, arm: &str, value: impl Fn(&Summary) -> Option<f64>) -> Option<f64> {
        numbers::median(self.of_arm(arm).filter_map(value))
    }

    /// What bound most of the arm's repeats; empty if nothing.
    pub fn mostly_bound_by<'a>(&'a self, arm: &'a str) -> &'a str {
        let mut words: Vec<&str> = self.of_arm(arm).map(|summary| summary.bound_by.as_str()).collect();
        words.sort_unstable();
        let most = words.chunk_by(|a, b| a == b).max_by_key(|same| same.len());
        most.and_then(|same| same.first()).copied().unwrap_or_default()
    }

    /// The arm others are compared with: the plan's baseline, else the first there is.
    pub fn baseline(&self) -> Option<&str> {
        let arms = self.arms();
        let planned = self.record.plan.baseline().name.as_str();
        arms.iter().find(|arm| **arm == planned).or(arms.first()).copied()
    }

    /// Whether the device has roofs to be judged against. A device of fixed cost has none.
    pub fn has_roofs(&self) -> bool {
        self.record.ceilings.is_some()
    }

    /// What the arms of a model were judged by, in the median.
    pub fn typical_ceilings(&self, model: &str) -> Option<Ceilings> {
        let of_model = |arm: &str| self.of_arm(arm).any(|summary| summary.model == model);
        self.record.typical_ceilings(of_model)
    }

    pub fn steps_of<'a>(&'a self, arm: &'a str) -> impl Iterator<Item = &'a StepRow> + Clone + 'a {
        self.steps.iter().filter(move |step| step.arm == arm)
    }

    /// The largest kernels of the kind of step that took most of the arm's traced time.
    pub fn largest_kernels(&self, arm: &str) -> Vec<&KernelRow> {
        let mut rows = dominant(&self.kernels, arm);
        rows.retain(|row| row.kernel != BETWEEN);
        rows.truncate(LARGEST_KERNELS);
        rows
    }

    /// The models of the arms, each once.
    pub fn models(&self) -> Vec<String> {
        let mut models: Vec<String> = self.summaries.iter().map(|summary| summary.model.clone()).collect();
        models.sort_unstable();
        models.dedup();
        models
    }

    /// The steps of all arms of a model.
    pub fn steps_of_model<'a>(&'a self, model: &str) -> impl Iterator<Item = &'a StepRow> + use<'a> {
        let arms: Vec<&str> = self
            .summaries
            .iter()
            .filter(|summary| summary.model == model)
            .map(|summary| summary.arm.as_str())
            .collect();
        self.steps.iter().filter(move |step| arms.contains(&step.arm.as_str()))
    }

    /// The line through the decode steps of a model; `None` where too few batch sizes were met.
    pub fn step_fit(&self, model: &str) -> Option<StepFit> {
        step_fit::fit(&step_fit::decode_points(self.steps_of_model(model), |step| step.duration_ms))
    }

    /// The line through the decode steps of some arms alone; `None` for arms of several models.
    pub fn step_fit_of(&self, means: impl Fn(&str) -> bool) -> Option<StepFit> {
        let mut rows = self.summaries.iter().filter(|summary| means(&summary.arm));
        let model = &rows.next()?.model;
        if !rows.all(|summary| summary.model == *model) {
            return None;
        }
        let steps = self.steps.iter().filter(|step| means(&step.arm));
        step_fit::fit(&step_fit::decode_points(steps, |step| step.duration_ms))
    }

    /// The same of a run whose arms share one model; `None` for several models.
    pub fn only_step_fit(&self) -> Option<StepFit> {
        let models = self.models();
        if models.len() != 1 { None } else { self.step_fit(&models[0]) }
    }
}

/// No rows yet means no file yet.
fn read_if_there<T: serde::de::DeserializeOwned>(path: &Path) -> Result<Vec<T>> {
    match std::fs::metadata(path) {
        Ok(metadata) if metadata.len() > 0 => csv::read(path),
        _ => Ok(Vec::new()),
    }
}
