//! run.json: everything about a run that is not a row of a table.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::OnceLock;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::claims::Verdict;
use super::folder::{RUN_FILE, working_folder};
use crate::engine::account::Ceilings;
use crate::engine::config::EngineConfig;
use crate::engine::device::{Compiled, DeviceInfo, DeviceKind};
use crate::experiment::plan::{Plan, PlanOptions};
use crate::measure::roofs::{self, ArmCeilings};
use crate::measure::summary::SCHEMA;
use crate::workload::seeds::repeat_seed;
use crate::{Error, Result};

/// `0.1.0+<commit>`: version and commit of this binary.
pub fn build_id() -> String {
    format!("{}+{}", env!("CARGO_PKG_VERSION"), env!("INFERWALL_COMMIT"))
}

/// What was typed, program name left out. (A path need not be Unicode; here it is as near as can be.)
pub fn command_line() -> Vec<String> {
    std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned()).collect()
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// Also what a killed run keeps saying.
    Running,
    Complete,
    Interrupted,
    Failed,
}

impl Status {
    /// Of a run that ended so.
    pub fn of<T>(outcome: &Result<T>) -> Self {
        match outcome {
            Ok(_) => Self::Complete,
            Err(Error::Interrupted { .. }) => Self::Interrupted,
            Err(_) => Self::Failed,
        }
    }
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RunRecord {
    pub schema: u32,
    pub experiment: String,
    pub status: Status,
    /// As typed, program name left out.
    pub command: Vec<String>,
    pub version: String,
    pub commit: String,
    pub build: String,
    pub started: String,
    pub ended: Option<String>,
    /// When it was resumed, if it was.
    #[serde(default)]
    pub resumed: Vec<String>,
    /// Resumed with --force although something differed; what did.
    #[serde(default)]
    pub forced: Vec<String>,
    pub options: PlanOptions,
    pub plan: Plan,
    pub plan_hash: String,
    /// Seed of each repeat.
    pub seeds: Vec<u64>,
    pub device: DeviceRecord,
    /// As measured (or nominal) when the first model had been loaded; `None` before, and for a device that has none.
    pub ceilings: Option<Ceilings>,
    /// Where they wander: as measured around every repeat of an arm that has rows, in the order in which they ran.
    #[serde(default)]
    pub arm_ceilings: Vec<ArmCeilings>,
    pub models: Vec<ModelRecord>,
    /// Empty on a simulated device.
    #[serde(default)]
    pub cold_start: Option<ColdStart>,
    /// Every arm's engine as it ran, with the pools it got.
    pub arms: Vec<ResolvedArm>,
    /// Arms left out, and why.
    #[serde(default)]
    pub skipped: Vec<SkippedArm>,
    #[serde(default)]
    pub warnings: Vec<String>,
    /// Filled when the run is complete.
    #[serde(default)]
    pub claims: Vec<Verdict>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DeviceRecord {
    pub kind: DeviceKind,
    pub id: String,
    pub name: String,
    pub simulated: bool,
    pub memory_bytes: u64,
    /// Driver, CUDA version, CPU features, threads, clocks: whatever the device says.
    pub facts: BTreeMap<String, String>,
    /// Facts that had changed when the run ended.
    #[serde(default)]
    pub facts_at_end: BTreeMap<String, String>,
    /// Why `--device auto` chose it; empty when it was asked for.
    pub chosen_because: String,
}

impl DeviceRecord {
    pub fn new(info: &DeviceInfo, chosen_because: &str) -> Self {
        Self {
            kind: info.kind,
            id: info.id.clone(),
            name: info.name.clone(),
            simulated: info.simulated(),
            memory_bytes: info.memory_bytes,
            facts: info.facts.iter().cloned().collect(),
            facts_at_end: BTreeMap::new(),
            chosen_because: chosen_because.to_string(),
        }
    }
}

/// From nothing to the first step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ColdStart {
    /// The model that was loaded first.
    pub model: String,
    /// From the program's start to the end of its first step, the measurement of ceilings and perplexity left out.
    pub seconds: f64,
    /// Time those measurements took, meanwhile.
    pub ceilings_s: f64,
    /// What was compiled until then, and what came from the kernel cache.
    pub compiled: Option<Compiled>,
}

static START: OnceLock<Instant> = OnceLock::new();

/// Seconds since the first call, which the command line makes as the program starts.
pub fn seconds_since_start() -> f64 {
    START.get_or_init(Instant::now).elapsed().as_secs_f64()
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ModelRecord {
    /// As asked for.
    pub reference: String,
    pub name: String,
    pub hash: String,
    /// `real` or `synthetic`.
    pub weights: String,
    /// Bytes of all weights, and of those one step streams.
    pub weight_bytes: u64,
    pub streamed_bytes: u64,
    /// Time its first load took; `None` while it has not been loaded.
    pub load_s: Option<f64>,
    /// The first step after the first load: cold, and never part of a measured row.
    pub cold_step_ms: Option<f64>,
    /// Of the built-in passage, for real weights in a run of several models.
    #[serde(default)]
    pub perplexity: Option<f64>,
}

impl ModelRecord {
    /// Takes over what another part of the run measured and this one did not.
    fn fill_from(&mut self, other: &Self) {
        self.load_s = self.load_s.or(other.load_s);
        self.cold_step_ms = self.cold_step_ms.or(other.cold_step_ms);
        self.perplexity = self.perplexity.or(other.perplexity);
    }
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ResolvedArm {
    pub name: String,
    pub model: String,
    pub config_hash: String,
    pub engine: EngineConfig,
    pub kv_blocks: usize,
    pub kv_block_tokens: usize,
    pub state_slots: usize,
    pub kv_dtype: String,
    pub state_dtype: String,
    #[serde(default)]
    pub seats: Seats,
}

/// Requests of an arm's longest length that memory holds at once, `max_num_seqs` at most, in each cache layout; `None`
/// where not one fits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seats {
    pub split: Option<usize>,
    pub unified: Option<usize>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SkippedArm {
    pub arm: String,
    pub reason: String,
}

/// Keys of a plan that earlier versions wrote.
const KEYS_NO_MORE: [&str; 1] = ["victim_stagger_s"];

fn drop_keys(value: &mut serde_json::Value, dropped: &mut Vec<String>) {
    match value {
        serde_json::Value::Object(object) => {
            for key in KEYS_NO_MORE {
                if let Some(was) = object.remove(key) {
                    let text = format!("{key} = {was}");
                    if !dropped.contains(&text) {
                        dropped.push(text);
                    }
                }
            }
            object.values_mut().for_each(|value| drop_keys(value, dropped));
        }
        serde_json::Value::Array(array) => array.iter_mut().for_each(|value| drop_keys(value, dropped)),
        _ => {}
    }
}

/// The build that a record names, whatever else is in it.
fn build_of(text: &str) -> Option<String> {
    let value: serde_json::Value = serde_json::from_str(text).ok()?;
    value.get("build")?.as_str().map(str::to_string)
}

/// The seed of each repeat.
pub fn seeds(seed: u64, repeats: usize) -> Vec<u64> {
    (0..repeats).map(|repeat| repeat_seed(seed, repeat as u32)).collect()
}

pub fn now() -> String {
    jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

impl RunRecord {
    /// Reads the run.json of a results folder, also as earlier versions wrote it.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a folder without one, one that is damaged, and one of a version this one does not know,
    /// which is named.
    pub fn read(folder: &Path) -> Result<Self> {
        let path = folder.join(RUN_FILE);
        let text = std::fs::read_to_string(&path).map_err(|error| {
            let what = if folder.is_dir() { "is not a results folder" } else { "is not a folder" };
            Error::invalid(
                format!("{} {what}: {}: {error}", folder.display(), RUN_FILE),
                "give the folder of a run, the one with run.json and summary.csv in it",
            )
        })?;
        let mut record: Self = match serde_json::from_str(&text) {
            Ok(record) => record,
            Err(error) => Self::read_older(&text).ok_or_else(|| {
                let this = build_id();
                let hint = match build_of(&text) {
                    Some(build) if build != this => {
                        format!(
                            "version {build} wrote it, this one is {this}: read it with the one that wrote it"
                        )
                    }
                    _ => "it is damaged: its tables (summary.csv and the others) may still be whole"
                        .to_string(),
                };
                Error::invalid(format!("{}: {error}", path.display()), hint)
            })?,
        };
        if record.plan.arms.is_empty() {
            return Err(Error::invalid(
                format!("{}: its plan has no arms", path.display()),
                "it is damaged: its tables (summary.csv and the others) may still be whole",
            ));
        }
        if !(1..=SCHEMA).contains(&record.schema) {
            return Err(Error::invalid(
                format!("{} has schema {}, this version reads 1 to {SCHEMA}", path.display(), record.schema),
                "use the version that wrote it",
            ));
        }
        // (Earlier versions wrote zeros where there are none.)
        record.ceilings = record.ceilings.filter(|ceilings| ceilings.read_bytes_per_s > 0.0);
        record.plan.folder = working_folder(folder);
        record.options.folder.clone_from(&record.plan.folder);
        Ok(record)
    }

    /// What a repeat of an arm was judged by.
    pub fn ceilings_at(&self, arm: &str, repeat: u32) -> Option<Ceilings> {
        let around = self.arm_ceilings.iter().find(|around| around.arm == arm && around.repeat == repeat);
        around.map(ArmCeilings::best).or(self.ceilings)
    }

    /// What the repeats of the arms that are `wanted` were judged by, in the median.
    pub fn typical_ceilings(&self, wanted: impl Fn(&str) -> bool) -> Option<Ceilings> {
        let all = self.arm_ceilings.iter().filter(|around| wanted(&around.arm));
        roofs::typical(all).or(self.ceilings)
    }

    /// The same of the arms whose ceilings may be compared with those of `arm`, itself among them.
    pub fn ceilings_like(&self, arm: &str) -> Option<Ceilings> {
        let kind = self.kind_of_ceilings(arm);
        self.typical_ceilings(|other| self.kind_of_ceilings(other) == kind)
    }

    /// Whether the ceilings of all these arms may be compared.
    pub fn like_ceilings(&self, arms: &[&str]) -> bool {
        let kinds = arms.iter().map(|arm| self.kind_of_ceilings(arm));
        kinds.collect::<std::collections::HashSet<_>>().len() <= 1
    }

    /// Equal for arms whose ceilings may be compared: another model, number of threads or arithmetic has others.
    fn kind_of_ceilings(&self, name: &str) -> String {
        let arm = self.plan.arms.iter().find(|arm| arm.name == name);
        arm.map_or(String::new(), |arm| {
            format!("{} {:?} {:?}", arm.model, arm.engine.threads, arm.engine.cpu_math)
        })
    }

    /// Takes over what another part of the run knows of arms and models.
    pub fn add_facts(&mut self, arms: &[ResolvedArm], models: &[ModelRecord]) {
        for arm in arms {
            if !self.arms.iter().any(|own| own.name == arm.name) {
                self.arms.push(arm.clone());
            }
        }
        for model in models {
            match self.models.iter_mut().find(|own| own.reference == model.reference) {
                Some(own) if own.hash == model.hash => own.fill_from(model),
                Some(_) => {}
                None => self.models.push(model.clone()),
            }
        }
    }

    /// An arm as it ran; `None` also for one that is not in the plan any more (`--force`), whose load nobody knows.
    pub fn resolved(&self, arm: &str) -> Option<&ResolvedArm> {
        let planned = self.plan.arms.iter().any(|planned| planned.name == arm);
        self.arms.iter().find(|resolved| planned && resolved.name == arm)
    }

    /// Notes what the ceilings were around an arm, in place of an earlier pass that left no rows.
    pub fn add_ceilings(&mut self, around: ArmCeilings) {
        self.arm_ceilings.retain(|other| other.arm != around.arm || other.repeat != around.repeat);
        self.arm_ceilings.push(around);
    }

    /// Puts what is to be said of the ceilings of the whole run in place of what was said before it was resumed.
    pub fn warn_of_ceilings(&mut self) {
        self.warnings.retain(|warning| !warning.starts_with(roofs::WARNING));
        let warnings = roofs::warnings(&self.arm_ceilings, |name| self.kind_of_ceilings(name));
        self.warnings.extend(warnings);
    }

    /// Reads a record of an earlier version, without the keys that are no more; what they were is a warning.
    fn read_older(text: &str) -> Option<Self> {
        let mut value: serde_json::Value = serde_json::from_str(text).ok()?;
        let mut dropped = Vec::new();
        drop_keys(&mut value["plan"], &mut dropped);
        if dropped.is_empty() {
            return None;
        }
        let mut record: Self = serde_json::from_value(value).ok()?;
        let build = &record.build;
        record
            .warnings
            .push(format!("written by version {build}: {} is no more, and ignored", dropped.join(", ")));
        Some(record)
    }

    /// The bytes of run.json.
    ///
    /// # Errors
    /// A fault of the program alone.
    pub fn json(&self) -> Result<Vec<u8>> {
        let mut bytes = serde_json::to_vec_pretty(self)
            .map_err(|error| Error::bug(format!("cannot write {RUN_FILE}: {error}")))?;
        bytes.push(b'\n');
        Ok(bytes)
    }

    /// What keeps rows of `other` from standing in one table with this run's, in words.
    pub fn differences(&self, other: &Self) -> Vec<String> {
        let mut all = Vec::new();
        let mut compare = |what: &str, one: &str, two: &str| {
            if one != two {
                all.push(format!("{what}: {one} against {two}"));
            }
        };
        compare("schema", &self.schema.to_string(), &other.schema.to_string());
        compare("plan", &self.plan_hash, &other.plan_hash);
        compare("build", &self.build, &other.build);
        compare("device", &self.device.id, &other.device.id);
        compare("device name", &self.device.name, &other.device.name);
        // (A forced run may have kept models of arms that are not in its plan.)
        let hashes = |record: &Self| {
            let planned =
                |model: &&ModelRecord| record.plan.arms.iter().any(|arm| arm.model == model.reference);
            let hashes = record.models.iter().filter(planned).map(|model| model.hash.as_str());
            hashes.collect::<Vec<_>>().join(" ")
        };
        compare("weights", &hashes(self), &hashes(other));
        all
    }
}
