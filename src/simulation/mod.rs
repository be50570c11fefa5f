//! Runs one arm on a simulated device, start to end, on a virtual clock: what reproduction, counterfactuals and capacity
//! planning share. Scheduler, caches, workload and measurement are those of real runs.

pub mod calibrate;
pub mod predict;
pub mod reproduce;
pub mod walls;

use crate::Result;
use crate::engine::Engine;
use crate::engine::account::CostModel;
use crate::engine::cache::plan::plan_simulated_cache;
use crate::engine::config::{CpuMath, EngineConfig};
use crate::engine::device::sim::SimDevice;
use crate::engine::device::sim::fixed::no_weights;
use crate::engine::device::{CachePlan, Device, LoadOptions};
use crate::engine::model::layout::ModelLayout;
use crate::measure::drive::{Submission, drive};
use crate::measure::recorder::ArmRecord;
use crate::measure::target::Embedded;
use crate::workload::schedule::{Schedule, ScheduleContext};
use crate::workload::spec::LoadSpec;

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
        let ceilings = Some(device.nominal_ceilings());
        let mut engine =
            Engine::new(model.as_ref(), plan.clone(), engine_config.clone(), ceilings, device.clock())?;
        let (delay_s, gap_s) = device.submission_delay_s();
        let submission = Submission { delay_s: delay_s + self.stall_s, gap_s };
        let mut target = Embedded { engine: &mut engine };
        let record = drive(&mut target, schedule, submission, self.stop_s, &mut |_| {})?;
        let simulated_s = engine.clock().now() - record.origin_s;
        let costs = CostModel::new(&self.layout, &plan);
        Ok(SimulatedRun { record, plan, engine: engine_config, costs, simulated_s })
    }
}
