//! Drives a load through the engine on any device, as one loop over one clock, and hands back what was recorded.

use std::time::Instant;

use inferwall::engine::Engine;
use inferwall::engine::account::Ceilings;
use inferwall::engine::cache::plan::{plan_cache, plan_simulated_cache};
use inferwall::engine::config::{CpuMath, EngineConfig};
use inferwall::engine::device::sim::fixed::no_weights;
use inferwall::engine::device::{Device, LoadOptions, Model};
use inferwall::engine::model::OpenedModel;
use inferwall::engine::model::synthetic_layout;
use inferwall::measure::recorder::{ArmRecord, Recorder};
use inferwall::measure::summarize::{Conditions, summarize};
use inferwall::measure::summary::{ArmLabel, Summary};
use inferwall::workload::feed::Feed;
use inferwall::workload::rate::Rate;
use inferwall::workload::schedule::ScheduleContext;
use inferwall::workload::slo::Slo;
use inferwall::workload::spec::LoadSpec;

/// What a clock of the test's own saw, in seconds from its start.
#[allow(dead_code, reason = "each test binary uses its own part")]
pub struct Watch {
    /// At most this long lies between its start and the record's origin.
    pub start_to_origin_s: f64,
    /// Just before and just after the call that returned each step.
    pub steps_s: Vec<(f64, f64)>,
}

pub struct Rig {
    model: Box<dyn Model>,
    device: Box<dyn Device>,
    pub ceilings: Option<Ceilings>,
    pub config: EngineConfig,
}

#[allow(dead_code, reason = "each test binary uses its own part")]
impl Rig {
    /// A simulated device with the shape of a preset.
    pub fn simulated(mut device: Box<dyn Device>, preset: &str, config: EngineConfig) -> Self {
        let layout = synthetic_layout(preset).unwrap();
        let options = LoadOptions { cpu_math: CpuMath::F32, threads: None };
        let model = device.load(&layout, &no_weights(), &options, &mut |_| ()).unwrap();
        let ceilings = device.ceilings().unwrap();
        Self { model, device, ceilings, config }
    }

    /// A real device with a checkpoint, without ceilings: measuring them takes seconds and no test reads them.
    pub fn real(mut device: Box<dyn Device>, opened: &OpenedModel, config: EngineConfig) -> Self {
        let options = LoadOptions { cpu_math: CpuMath::F32, threads: None };
        let model = device.load(&opened.layout, &opened.weights, &options, &mut |_| ()).unwrap();
        Self { model, device, ceilings: None, config }
    }

    /// One measured run in a fresh session.
    pub fn run(&self, load: &LoadSpec, seed: u64) -> (ArmRecord, Option<Rate>) {
        let (record, offered, _) = self.run_watched(load, seed);
        (record, offered)
    }

    /// The same, watched by a clock of the test's own.
    pub fn run_watched(&self, load: &LoadSpec, seed: u64) -> (ArmRecord, Option<Rate>, Watch) {
        let spec = &self.model.layout().spec;
        let context = ScheduleContext {
            vocab_size: spec.real_vocab_size,
            special_tokens: &[],
            stop_tokens: &[],
            seats: self.config.max_num_seqs,
            seed,
            encode: None,
        };
        let schedule = load.schedule(&context).unwrap();
        let offered = schedule.offered_rate;
        let memory = self.device.free_bytes();
        let make_plan = if self.device.info().simulated() { plan_simulated_cache } else { plan_cache };
        let plan = make_plan(
            self.model.layout(),
            &self.config,
            memory,
            self.device.info().memory_bytes,
            self.device.default_dtypes(),
            Some(schedule.longest_request_tokens()),
        )
        .unwrap();
        let clock = self.device.clock();
        let mut engine =
            Engine::new(self.model.as_ref(), plan, self.config.clone(), self.ceilings, clock.clone())
                .unwrap();
        let start = Instant::now();
        let origin_s = clock.now();
        let mut watch = Watch { start_to_origin_s: start.elapsed().as_secs_f64(), steps_s: Vec::new() };
        let mut feed = Feed::new(schedule, origin_s);
        let mut recorder = Recorder::new(origin_s);
        loop {
            while let Some(due) = feed.take_due(clock.now()) {
                let id = engine.submit(due.request.clone()).unwrap();
                feed.submitted(due.index, id);
                recorder.submitted(&due, id, clock.now());
            }
            let before_s = start.elapsed().as_secs_f64();
            match engine.step().unwrap() {
                Some(report) => {
                    let now_s = clock.now();
                    feed.observe(&report, now_s);
                    recorder.step(report, now_s);
                    watch.steps_s.push((before_s, start.elapsed().as_secs_f64()));
                }
                None => match feed.next_due_s() {
                    Some(due_s) => clock.wait_until(due_s),
                    None => break,
                },
            }
        }
        assert!(feed.is_done(), "the engine is idle and the load is not done");
        (recorder.finish(), offered, watch)
    }

    pub fn summary(&self, load: &LoadSpec, seed: u64) -> Summary {
        let (record, offered_rate) = self.run(load, seed);
        let slo = Slo::default();
        let conditions = Conditions { offered_rate, ceilings: self.ceilings.as_ref(), slo: &slo };
        summarize(&record, &ArmLabel { arm: "arm".into(), seed, ..ArmLabel::default() }, &conditions)
    }
}
