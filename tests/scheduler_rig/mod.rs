//! An engine on `sim:fixed` with a built-in shape, and what a drained run left behind.

#[allow(dead_code, reason = "each test binary uses its own part")]
pub mod memory_device;

use inferwall::engine::Engine;
use inferwall::engine::cache::plan::plan_simulated_cache;
use inferwall::engine::config::{CpuMath, EngineConfig};
use inferwall::engine::device::sim::fixed::{FixedDevice, no_weights};
use inferwall::engine::device::{Device, LoadOptions, Model};
use inferwall::engine::model::layout::ModelLayout;
use inferwall::engine::model::synthetic_layout;
use inferwall::engine::request::{FinishReason, Request, RequestId, SamplingParams};
use inferwall::engine::step_report::{Event, StepKind, StepReport};

#[allow(dead_code, reason = "each test binary uses its own part")]
/// A request of `prompt` made-up tokens and exactly `output` tokens.
pub fn request(prompt: usize, output: usize) -> Request {
    Request {
        prompt: (0..prompt as u32).map(|token| token % 7).collect(),
        max_tokens: output,
        sampling: SamplingParams::default(),
        seed: 1,
        stop_tokens: Vec::new(),
        ignore_eos: true,
    }
}

pub struct Rig {
    pub engine: Engine,
}

#[allow(dead_code, reason = "each test binary uses its own part")]
impl Rig {
    pub fn new(preset: &str, config: EngineConfig) -> Self {
        Self::with_layout(synthetic_layout(preset).unwrap(), config)
    }

    pub fn with_layout(layout: ModelLayout, config: EngineConfig) -> Self {
        let mut device = FixedDevice::new(1.0);
        let memory = device.free_bytes();
        let plan =
            plan_simulated_cache(&layout, &config, memory, memory, device.default_dtypes(), None).unwrap();
        let model = load(&mut device, &layout);
        let ceilings = device.ceilings().unwrap();
        let engine = Engine::new(model.as_ref(), plan, config, ceilings, device.clock()).unwrap();
        Self { engine }
    }

    pub fn submit(&mut self, request: Request) {
        self.engine.submit(request).unwrap();
    }

    pub fn drain(&mut self) -> Run {
        let mut reports = Vec::new();
        while let Some(report) = self.engine.step().unwrap() {
            reports.push(report);
        }
        Run { reports }
    }
}

pub fn load(device: &mut FixedDevice, layout: &ModelLayout) -> Box<dyn Model> {
    let options = LoadOptions { cpu_math: CpuMath::F32, threads: None };
    device.load(layout, &no_weights(), &options, &mut |_| ()).unwrap()
}

pub struct Run {
    pub reports: Vec<StepReport>,
}

#[allow(dead_code, reason = "each test binary uses its own part")]
impl Run {
    /// A letter a step: Prefill, Decode, Mixed.
    pub fn kinds(&self) -> String {
        let letter = |report: &StepReport| match report.kind {
            StepKind::Prefill => 'P',
            StepKind::Decode => 'D',
            StepKind::Mixed => 'M',
        };
        self.reports.iter().map(letter).collect()
    }

    pub fn events(&self) -> impl Iterator<Item = &Event> {
        self.reports.iter().flat_map(|report| &report.events)
    }

    pub fn tokens_of(&self, id: u64) -> Vec<u32> {
        let mut all = Vec::new();
        for event in self.events() {
            match event {
                Event::Tokens { request, tokens } if *request == RequestId(id) => all.extend(tokens),
                _ => (),
            }
        }
        all
    }

    pub fn finish_of(&self, id: u64) -> Vec<FinishReason> {
        let finished = self.events().filter_map(|event| match event {
            Event::Finished { request, reason } if *request == RequestId(id) => Some(*reason),
            _ => None,
        });
        finished.collect()
    }

    pub fn preemptions(&self) -> usize {
        self.events().filter(|event| matches!(event, Event::Preempted { .. })).count()
    }
}
