//! Runs one arm on a simulated device, start to end, on a virtual clock: what reproduction, counterfactuals and capacity
//! planning share. Scheduler, caches, workload and measurement are those of real runs.

pub mod calibrate;
pub mod predict;
pub mod reproduce;

use std::collections::VecDeque;

use crate::engine::Engine;
use crate::engine::account::CostModel;
use crate::engine::cache::plan::plan_simulated_cache;
use crate::engine::config::{CpuMath, EngineConfig};
use crate::engine::device::sim::SimDevice;
use crate::engine::device::sim::fixed::no_weights;
use crate::engine::device::{CachePlan, Device, LoadOptions};
use crate::engine::model::layout::ModelLayout;
use crate::measure::recorder::{ArmRecord, Recorder};
use crate::workload::feed::{Due, Feed};
use crate::workload::schedule::{Schedule, ScheduleContext};
use crate::workload::spec::LoadSpec;
use crate::{Error, Result};

/// One arm: a model, an engine and a load. `Clone` to change one thing and run again.
#[derive(Debug, Clone)]
pub struct SimulatedArm {
    pub layout: ModelLayout,
    pub engine: EngineConfig,
    pub load: LoadSpec,
    pub seed: u64,
    /// Stop the clock here, whatever is still running, seconds.
    pub stop_s: Option<f64>,
    /// A cold stall: the engine sees no request before, seconds.
    pub stall_s: f64,
}

/// What came of it.
#[derive(Debug, Clone)]
pub struct SimulatedRun {
    pub record: ArmRecord,
    pub plan: CachePlan,
    pub engine: EngineConfig,
    pub costs: CostModel,
    /// Simulated seconds from the first arrival to the end of the last step.
    pub simulated_s: f64,
}

impl SimulatedArm {
    /// The schedule the load draws for this model and cap.
    ///
    /// # Errors
    /// A load out of bounds.
    pub fn schedule(&self) -> Result<Schedule> {
        let spec = &self.layout.spec;
        self.load.validate()?;
        self.load.schedule(&ScheduleContext {
            vocab_size: spec.real_vocab_size,
            special_tokens: &[],
            stop_tokens: &spec.eos_tokens,
            seats: self.engine.max_num_seqs,
            seed: self.seed,
            encode: None,
        })
    }

    /// # Errors
    /// A load or engine out of bounds, memory that cannot hold the arm.
    pub fn run(&self, device: &SimDevice) -> Result<SimulatedRun> {
        let schedule = self.schedule()?;
        let mut device = device.clone();
        let mut engine_config = self.engine.clone();
        device.configure(&self.layout, &mut engine_config)?;
        engine_config.async_scheduling.get_or_insert(device.default_async_scheduling());
        let bytes = device.free_bytes();
        let plan = plan_simulated_cache(
            &self.layout,
            &engine_config,
            bytes,
            bytes,
            device.default_dtypes(),
            Some(schedule.longest_request_tokens()),
        )?;
        let options = LoadOptions { cpu_math: CpuMath::F32, threads: None };
        let model = device.load(&self.layout, &no_weights(), &options, &mut |_| {})?;
        let ceilings = device.ceilings()?;
        let mut engine =
            Engine::new(model.as_ref(), plan.clone(), engine_config.clone(), ceilings, device.clock())?;
        let (delay_s, gap_s) = device.submission_delay_s();
        let stop_s = self.stop_s.unwrap_or(f64::INFINITY);
        let (record, simulated_s) = drive(&mut engine, schedule, (delay_s + self.stall_s, gap_s), stop_s)?;
        let costs = CostModel::new(&self.layout, &plan);
        Ok(SimulatedRun { record, plan, engine: engine_config, costs, simulated_s })
    }
}

/// Feeds a schedule to the engine until all is answered. A request reaches the engine `delay_s` after it was sent, and no
/// sooner than `gap_s` after the one before; its latency counts from when it was sent.
fn drive(
    engine: &mut Engine,
    schedule: Schedule,
    (delay_s, gap_s): (f64, f64),
    stop_s: f64,
) -> Result<(ArmRecord, f64)> {
    let clock = engine.clock().clone();
    let origin_s = clock.now();
    let mut feed = Feed::new(schedule, origin_s);
    let mut recorder = Recorder::new(origin_s);
    let mut on_the_way: VecDeque<(f64, Due)> = VecDeque::new();
    let mut last_ready_s = f64::NEG_INFINITY;
    loop {
        let now_s = clock.now();
        if now_s - origin_s >= stop_s {
            break;
        }
        while let Some(due) = feed.take_due(now_s) {
            let ready_s = (due.intended_s + delay_s).max(last_ready_s + gap_s);
            last_ready_s = ready_s;
            on_the_way.push_back((ready_s, due));
        }
        while on_the_way.front().is_some_and(|(ready_s, _)| *ready_s <= now_s) {
            let Some((_, due)) = on_the_way.pop_front() else { break };
            match engine.submit(due.request.clone()) {
                Ok(id) => {
                    feed.submitted(due.index, id);
                    recorder.submitted(&due, id, now_s);
                }
                Err(error) => {
                    feed.refused(due.index, now_s);
                    recorder.refused(&due, &error);
                }
            }
        }
        if let Some(report) = engine.step()? {
            let ended_s = clock.now();
            feed.observe(&report, ended_s);
            recorder.step(report, ended_s);
            continue;
        }
        let next_ready_s = on_the_way.front().map(|(ready_s, _)| *ready_s);
        match [feed.next_due_s(), next_ready_s].into_iter().flatten().min_by(f64::total_cmp) {
            Some(at_s) => clock.wait_until(at_s),
            None if feed.is_done() => break,
            None => {
                return Err(Error::failed(
                    "the load waits for an answer that will not come",
                    "this is a defect: please report it with the command line",
                ));
            }
        }
    }
    let simulated_s = clock.now() - origin_s;
    Ok((recorder.finish(), simulated_s))
}
