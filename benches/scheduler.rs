//! Host time of a step: scheduling, building the device's step, accounting, taking in results and reporting, with
//! 256 sequences decoding on `sim:fixed`, whose own work is next to nothing. It has to hide behind a GPU's step of
//! a few milliseconds.
//!
//! `cargo bench --bench scheduler` prints microseconds a step, median and worst of the steady steps.

use std::time::Instant;

use inferwall::engine::Engine;
use inferwall::engine::cache::plan::plan_simulated_cache;
use inferwall::engine::config::{CpuMath, EngineConfig, Speculation};
use inferwall::engine::device::sim::fixed::{FixedDevice, no_weights};
use inferwall::engine::device::{Device, LoadOptions};
use inferwall::engine::model::synthetic_layout;
use inferwall::engine::request::{Request, SamplingParams};

fn main() -> inferwall::Result<()> {
    let chat = |length: u32| (0..length).map(|token| token % 97).collect::<Vec<u32>>();
    for (name, prompt, speculation) in [
        ("256 sequences, 256-token prompts", 256, Speculation::Off),
        ("256 sequences, 7,000-token prompts", 7000, Speculation::Off),
        ("256 sequences, 256-token prompts, n-gram speculation", 256, Speculation::Ngram),
    ] {
        let config = EngineConfig {
            max_model_len: 8192,
            max_num_batched_tokens: 8192,
            speculation,
            async_scheduling: Some(2),
            ..EngineConfig::default()
        };
        let layout = synthetic_layout("qwen3.5-4b")?;
        let mut device = FixedDevice::new(1.0);
        let memory = device.free_bytes();
        let dtypes = device.default_dtypes();
        let plan = plan_simulated_cache(&layout, &config, memory, memory, dtypes, None)?;
        let options = LoadOptions { cpu_math: CpuMath::F32, threads: None };
        let model = device.load(&layout, &no_weights(), &options, &mut |_| ())?;
        let ceilings = device.ceilings()?;
        let mut engine = Engine::new(model.as_ref(), plan, config, ceilings, device.clock())?;
        for seed in 0..256 {
            engine.submit(Request {
                prompt: chat(prompt),
                max_tokens: 1000,
                sampling: SamplingParams::default(),
                seed,
                stop_tokens: vec![1],
                ignore_eos: true,
            })?;
        }
        let mut step_us = Vec::new();
        loop {
            let start = Instant::now();
            let Some(report) = engine.step()? else { break };
            if report.decode_sequences == 256 {
                step_us.push(start.elapsed().as_secs_f64() * 1e6);
            }
        }
        step_us.sort_by(f64::total_cmp);
        let (median, p99) = (step_us[step_us.len() / 2], step_us[step_us.len() * 99 / 100]);
        println!("{name}: median {median:.1} us, p99 {p99:.1} us over {} steps", step_us.len());
    }
    Ok(())
}
