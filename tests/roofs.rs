//! Ceilings that wander, on a fake rig: a simulated device whose memory is said to be slower or faster at each reading.
//! Steps run at the device's true bandwidth, so what a share should be is known.

use std::collections::VecDeque;

use inferwall::Result;
use inferwall::engine::account::Ceilings;
use inferwall::engine::clock::Clock;
use inferwall::engine::config::{CacheDtype, EngineConfig};
use inferwall::engine::device::sim::SimDevice;
use inferwall::engine::device::{Device, DeviceInfo, DeviceKind, LoadOptions, LoadProgress, Model};
use inferwall::engine::model::layout::ModelLayout;
use inferwall::engine::model::weights::WeightSource;
use inferwall::experiment::plan::PlanOptions;
use inferwall::experiment::spec::Rig;
use inferwall::experiment::sweep;
use inferwall::explain::compare;
use inferwall::explain::run::explain_run;
use inferwall::report::format::Format;
use inferwall::report::{self, export};
use inferwall::results::RunResults;
use inferwall::results::folder::RUN_FILE;
use inferwall::results::record::RunRecord;
use inferwall::run::Ready;
use inferwall::run::progress::Progress;
use inferwall::run::runner::Ending;

/// Gives the true ceilings times a factor: one for the measurement at the start, then those of a script, one a reading.
struct Wandering {
    true_device: SimDevice,
    at_start: f64,
    later: VecDeque<f64>,
}

impl Wandering {
    fn times(&self, factor: f64) -> Ceilings {
        let ceilings = self.true_device.nominal_ceilings();
        Ceilings {
            read_bytes_per_s: factor * ceilings.read_bytes_per_s,
            flops_per_s: factor * ceilings.flops_per_s,
            ..ceilings
        }
    }
}

impl Device for Wandering {
    fn info(&self) -> &DeviceInfo {
        self.true_device.info()
    }

    fn clock(&self) -> Clock {
        self.true_device.clock()
    }

    fn free_bytes(&self) -> u64 {
        self.true_device.free_bytes()
    }

    fn ceilings(&mut self) -> Result<Option<Ceilings>> {
        Ok(Some(self.times(self.at_start)))
    }

    fn ceilings_now(&mut self) -> Result<Option<Ceilings>> {
        Ok(self.later.pop_front().map(|factor| self.times(factor)))
    }

    fn default_dtypes(&self) -> (CacheDtype, CacheDtype) {
        self.true_device.default_dtypes()
    }

    fn configure(&self, layout: &ModelLayout, config: &mut EngineConfig) -> Result<()> {
        self.true_device.configure(layout, config)
    }

    fn load(
        &mut self,
        layout: &ModelLayout,
        source: &WeightSource,
        options: &LoadOptions,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Box<dyn Model>> {
        self.true_device.load(layout, source, options, progress)
    }
}

struct Quiet;

impl Progress for Quiet {
    fn begin(&mut self, _position: usize, _of: usize, _what: &str, _total: u64) {}
    fn advance(&mut self, _done: u64) {}
    fn line(&mut self, _text: &str) {}
    fn warning(&mut self, _text: &str) {}
    fn end(&mut self) {}
}

const EXPERIMENT: &str = r#"
[wander]
question = "What if the memory wanders?"
model = "synthetic:qwen3.5-4b"
knob = "max_num_seqs"
values = [1, 2]
repeats = 2
load = { prompts = 4, input_len = 16, output_len = 16, warmup = { prompts = 2, max_rounds = 1 } }
engine = { max_model_len = 64 }
"#;

/// Runs two arms of two repeats each on a device whose readings are `at_start`, then `later`; two readings a repeat.
fn run(at_start: f64, later: &[f64]) -> (tempfile::TempDir, RunResults) {
    let place = tempfile::tempdir().unwrap();
    let experiments = place.path().join("e.toml");
    std::fs::write(&experiments, EXPERIMENT).unwrap();
    let true_device = SimDevice::parse("sim:h100").unwrap();
    let rig = Rig { kind: true_device.info().kind, id: true_device.info().id.clone() };
    let device = Wandering { true_device, at_start, later: later.iter().copied().collect() };
    let options = PlanOptions {
        experiment: "wander".to_string(),
        experiments_file: Some(experiments),
        device: rig.id.clone(),
        ..PlanOptions::default()
    };
    let plan = sweep::plan_of(&options, &rig).unwrap();
    let ready = Ready::on(Box::new(device), &options, plan, "", &mut Quiet).unwrap();
    let mut run = ready.begin(&place.path().join("out"), &mut Quiet).unwrap();
    assert_eq!(run.run(None, &mut Quiet).unwrap(), Ending::Complete);
    let results = RunResults::read(run.folder.path()).unwrap();
    (place, results)
}

fn shares(results: &RunResults) -> Vec<f64> {
    results.summaries.iter().map(|row| row.bandwidth_fraction.unwrap()).collect()
}

/// The largest floor of a step over its time.
fn worst_floor(results: &RunResults) -> f64 {
    results.steps.iter().map(|step| step.floor_ms / step.duration_ms).fold(0.0, f64::max)
}

#[test]
fn a_memory_that_was_slow_at_the_start_gives_no_share_beyond_one() {
    // Ceilings that hold throughout, as they are: the shares as they should be.
    let (_place, plain) = run(1.0, &[]);
    let expected = shares(&plain);
    assert!(expected.iter().all(|&share| 0.5 < share && share <= 1.0), "{expected:?}");
    assert!(plain.record.arm_ceilings.is_empty() && plain.record.warnings.is_empty());
    // Measured at the start alone, at half the speed: the fault.
    let (_place, stale) = run(0.5, &[]);
    assert!(shares(&stale).iter().all(|&share| share > 1.0) && worst_floor(&stale) > 1.0);
    // Measured around every arm, one reading of each pair in the slow state: shares as expected, floors below times.
    let (_place, mended) = run(0.5, &[1.0, 0.5, 0.5, 1.0, 1.0, 1.0, 1.0, 0.5]);
    assert_eq!(shares(&mended), expected);
    assert!(worst_floor(&mended) <= 1.0, "{}", worst_floor(&mended));
    assert_eq!(mended.record.arm_ceilings.len(), 4);
}

#[test]
fn what_moved_is_said_in_checks_and_warnings() {
    let (_place, results) = run(1.0, &[1.0, 1.0, 1.0, 0.5, 1.0, 1.0, 1.0, 1.0]);
    let moved: Vec<_> = results
        .checks
        .iter()
        .filter(|check| check.check == "read_ceiling_change" && check.status == "warning")
        .collect();
    assert_eq!((moved.len(), moved[0].repeat, moved[0].value), (1, 0, Some(-0.5)));
    assert!(results.record.warnings.iter().any(|warning| warning.starts_with("ceilings: the memory gave")));
    let files = export::report_files(&results).unwrap();
    let text = &files.iter().find(|(name, _)| name.ends_with(".md")).unwrap().1;
    assert!(text.contains("measured right before and after the arm"), "{text}");
    // All readings too low, as when the memory is faster only while an arm runs: the share itself is marked.
    let (_place, beyond) = run(0.5, &[0.5; 8]);
    let marked = |check: &str| {
        let all = beyond.checks.iter().filter(|row| row.check == check);
        all.filter(|row| row.status == "warning").count()
    };
    assert_eq!((marked("share_of_ceiling"), marked("read_ceiling_change")), (4, 0));
}

#[test]
fn records_from_before_are_read_and_judged_by_their_one_measurement() {
    let (_place, results) = run(1.0, &[0.9; 8]);
    let path = results.folder.join(RUN_FILE);
    let mut json: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    assert!(json.as_object_mut().unwrap().remove("arm_ceilings").is_some());
    std::fs::write(&path, json.to_string()).unwrap();
    let old = RunRecord::read(&results.folder).unwrap();
    assert_eq!(old.ceilings_at("max_num_seqs=1", 0), old.ceilings);
    assert_eq!(old.typical_ceilings(|_| true), old.ceilings);
    let new = &results.record;
    let (at_start, read) =
        (old.ceilings.unwrap().read_bytes_per_s, |all: Option<Ceilings>| all.unwrap().read_bytes_per_s);
    assert_eq!(read(new.ceilings_at("max_num_seqs=1", 0)), 0.9 * at_start);
    assert_eq!(read(new.typical_ceilings(|_| true)), 0.9 * at_start);
}

/// A model under other threads or other arithmetic has ceilings of its own, and is simulated on them.
#[test]
fn an_arm_is_simulated_on_the_ceilings_of_arms_like_it() {
    // Both repeats of the first arm at 1, those of the second at a half.
    let (_place, mut results) = run(1.0, &[1.0, 1.0, 0.5, 0.5, 1.0, 1.0, 0.5, 0.5]);
    // (A simulated device, or a GPU of the table, would stand for itself.)
    results.record.device.kind = DeviceKind::Cpu;
    results.record.device.name = "none of the table".to_string();
    // The bandwidths simulated with, as shares of the true one, each with its arms.
    let bandwidths = |results: &RunResults| -> Vec<(f64, Vec<String>)> {
        let share = |device: &str| {
            let figure = device.strip_prefix("sim:custom:gb_per_s=").unwrap().split(',').next().unwrap();
            figure.parse::<f64>().unwrap() * 1e9 / results.record.ceilings.unwrap().read_bytes_per_s
        };
        let devices = compare::compare(results, None, None).unwrap().devices;
        devices.into_iter().map(|(device, arms)| ((share(&device) * 100.0).round() / 100.0, arms)).collect()
    };
    let (one, two) = ("max_num_seqs=1".to_string(), "max_num_seqs=2".to_string());
    // Alike, they share the median.
    assert_eq!(bandwidths(&results), [(0.75, vec![one.clone(), two.clone()])]);
    results.record.plan.arms[1].engine.threads = Some(1);
    assert_eq!(bandwidths(&results), [(1.0, vec![one.clone()]), (0.5, vec![two.clone()])]);
    let section = report::compare::section(&results, Format::Table);
    assert!(section.contains(" for max_num_seqs=1; sim:custom:"), "{section}");
    // An explanation asks "what if" of the same device.
    let explained = explain_run(&results, None, Some(&two), true).unwrap();
    let rows = compare::compare(&results, None, None).unwrap().rows;
    let row = rows.iter().find(|row| row.arm == two && row.metric == "output_throughput").unwrap();
    assert_eq!(Some(explained[0].counterfactuals[0].output_throughput.0), row.simulated);
    assert!(!results.record.like_ceilings(&[&one, &two]) && results.record.like_ceilings(&[&two]));
    let of_two = compare::compare(&results, None, Some(&two)).unwrap().rows;
    assert!(!of_two.is_empty() && of_two.iter().all(|row| row.arm == two));
    let named = SimDevice::parse("sim:h100").unwrap();
    assert_eq!(compare::compare(&results, Some(&named), None).unwrap().devices_in_words(), "sim:h100");
}
