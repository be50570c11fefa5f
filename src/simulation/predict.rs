//! What a capacity planner wants to know of a model on a GPU before there is a run: where the memory goes, how many
//! sequences fit, what a step takes at each batch, where it stops scaling, and what the load will see. All of it simulated.

use serde::Serialize;

use crate::Result;
use crate::engine::account::{SequenceShape, StepCounts};
use crate::engine::config::KvLayout;
use crate::engine::device::Device;
use crate::engine::device::sim::{SimDevice, StepExtras, StepTime};
use crate::measure::quantile::Distribution;
use crate::measure::recorder::RequestRecord;
use crate::simulation::walls::{self, Wall};
use crate::simulation::{SimulatedArm, SimulatedRun};
use crate::workload::rate::Rate;
use crate::workload::spec::{Count, WarmUp};

/// Bytes of the device's memory by use.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MemorySplit {
    pub memory_bytes: u64,
    /// What `gpu_memory_utilization` leaves to the engine.
    pub budget_bytes: u64,
    pub weight_bytes: u64,
    /// Streamed by every step: the rest of the weights is only looked up.
    pub streamed_bytes: u64,
    pub cache_bytes: u64,
}

/// A layout of the cache.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LayoutSeats {
    pub layout: KvLayout,
    pub blocks: usize,
    pub block_tokens: usize,
    pub state_slots: usize,
    /// Sequences of the given lengths at once, `max_num_seqs` aside.
    pub seats: usize,
}

/// A pure decode step.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct BatchRow {
    pub batch: usize,
    pub step_ms: f64,
    pub tokens_per_s: f64,
    /// The largest part of the step.
    pub bound_by: &'static str,
    pub time: StepTime,
}

/// A prompt alone on the device.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PromptRow {
    pub tokens: usize,
    pub ttft_ms: f64,
}

#[derive(Debug, Clone, Serialize)]
pub struct Prediction {
    pub simulated: bool,
    pub model: String,
    pub device: String,
    pub input_len: usize,
    pub output_len: usize,
    pub memory: MemorySplit,
    /// The layout that was asked for first.
    pub layouts: Vec<LayoutSeats>,
    pub batches: Vec<BatchRow>,
    pub prompts: Vec<PromptRow>,
    /// Sequences at which what each adds to a decode step equals what all share; `None` when that is never.
    pub crossover: Option<f64>,
    /// Of a flood of four times the seats: requests and tokens a second, running sequences.
    pub saturation_rate: f64,
    pub saturation_tokens_per_s: f64,
    pub saturation_running: usize,
    /// Token gaps of that flood, and what the steps of the flood spent their time on.
    pub flood_itl_p50_ms: f64,
    pub flood_itl_p99_ms: f64,
    pub walls: Vec<Wall>,
}

/// Predicts for the lengths of `arm`'s load; its rate and counts are replaced.
///
/// # Errors
/// A model that does not fit the device, lengths longer than `max_model_len`.
pub fn predict(arm: &SimulatedArm, device: &SimDevice, prompts: &[usize]) -> Result<Prediction> {
    let mut flood = arm.clone();
    flood.load.request_rate = Rate::FLOOD;
    flood.load.concurrency = None;
    flood.load.warmup = WarmUp { prompts: Count::Exact(0), ..WarmUp::default() };
    // One request tells the pools, and so the seats and the size of the flood.
    flood.load.prompts = Count::Exact(1);
    let single = flood.run(device)?;
    let tokens = arm.load.input_len + arm.load.output_len;
    let layouts = both_layouts(&flood, device, &single, tokens)?;
    let seats = layouts.first().map_or(1, |layout| layout.seats).clamp(1, single.plan.max_num_seqs);
    flood.load.prompts = Count::Exact(4 * seats);
    let full = flood.run(device)?;
    let gaps = full.record.requests.iter().flat_map(RequestRecord::gaps_s).map(|gap_s| gap_s * 1e3);
    let itl = Distribution::of(gaps);
    let generated: usize = full.record.requests.iter().map(|request| request.tokens_s.len()).sum();
    let batches = batches(arm, device, &single, seats);
    let ceilings = device.nominal_ceilings();
    Ok(Prediction {
        simulated: true,
        model: arm.layout.spec.name.clone(),
        device: device.info().id.clone(),
        input_len: arm.load.input_len,
        output_len: arm.load.output_len,
        memory: memory(arm, device, &single),
        crossover: crossover(&batches),
        batches,
        layouts,
        prompts: prompts_rows(&flood, device, prompts)?,
        saturation_rate: full.record.requests.len() as f64 / full.record.duration_s,
        saturation_tokens_per_s: generated as f64 / full.record.duration_s,
        saturation_running: full.record.steps.iter().map(|step| step.report.running).max().unwrap_or(0),
        flood_itl_p50_ms: itl.map_or(f64::NAN, |itl| itl.p50),
        flood_itl_p99_ms: itl.map_or(f64::NAN, |itl| itl.p99),
        walls: walls::of(&arm.layout, &single.plan, &single.costs, Some(&ceilings), &arm.load),
    })
}

fn memory(arm: &SimulatedArm, device: &SimDevice, run: &SimulatedRun) -> MemorySplit {
    let memory_bytes = arm.engine.gpu_memory.unwrap_or(device.info().memory_bytes);
    let plan = &run.plan;
    let blocks = plan.kv_blocks as u64 * plan.block_tokens as u64 * run.costs.kv_bytes_per_token;
    let states = match plan.layout {
        KvLayout::Split => plan.state_slots as u64 * run.costs.state_bytes_per_sequence,
        // States live inside the pool.
        KvLayout::Unified => 0,
    };
    MemorySplit {
        memory_bytes,
        budget_bytes: (memory_bytes as f64 * arm.engine.gpu_memory_utilization) as u64,
        weight_bytes: arm.layout.weight_bytes(),
        streamed_bytes: arm.layout.streamed_bytes(),
        cache_bytes: blocks + states,
    }
}

fn both_layouts(
    arm: &SimulatedArm,
    device: &SimDevice,
    run: &SimulatedRun,
    tokens: usize,
) -> Result<Vec<LayoutSeats>> {
    let of = |run: &SimulatedRun| LayoutSeats {
        layout: run.plan.layout,
        blocks: run.plan.kv_blocks,
        block_tokens: run.plan.block_tokens,
        state_slots: run.plan.state_slots,
        seats: walls::seats(&arm.layout, &run.plan, tokens).0,
    };
    let mut layouts = vec![of(run)];
    if arm.layout.spec.is_hybrid() && !device.is_series() {
        let mut other = arm.clone();
        other.engine.kv_layout = match run.plan.layout {
            KvLayout::Split => KvLayout::Unified,
            KvLayout::Unified => KvLayout::Split,
        };
        layouts.push(of(&other.run(device)?));
    }
    Ok(layouts)
}

/// Decode steps of 1, 2, 4 ... sequences up to the seats, half way through their answers.
fn batches(arm: &SimulatedArm, device: &SimDevice, run: &SimulatedRun, seats: usize) -> Vec<BatchRow> {
    let parameters = device.parameters(&arm.layout);
    let context_tokens = arm.load.input_len + arm.load.output_len / 2;
    let mut sizes: Vec<usize> =
        std::iter::successors(Some(1), |size| Some(size * 2)).take_while(|size| *size < seats).collect();
    sizes.push(seats);
    sizes
        .into_iter()
        .map(|batch| {
            let shape = SequenceShape { new_tokens: 1, context_tokens, sampled_rows: 1, decode: true };
            let counts = StepCounts::new(&vec![shape; batch]);
            let random_rows = if arm.load.temperature > 0.0 { batch as u64 } else { 0 };
            let extras = StepExtras { random_rows, ..StepExtras::default() };
            let time = parameters.step_time(&run.costs, &arm.layout.spec, &counts, &extras);
            let step_s = time.total_s();
            BatchRow {
                batch,
                step_ms: step_s * 1e3,
                tokens_per_s: batch as f64 / step_s,
                bound_by: time.largest(),
                time,
            }
        })
        .collect()
}

/// Where the line through the first and the last step has its private part equal to its shared one.
fn crossover(batches: &[BatchRow]) -> Option<f64> {
    let (first, last) = (batches.first()?, batches.last()?);
    let sequences = last.batch as f64 - first.batch as f64;
    let private = (last.step_ms - first.step_ms) / sequences;
    (sequences > 0.0 && private > 0.0).then(|| (first.step_ms - private * first.batch as f64) / private)
}

fn prompts_rows(arm: &SimulatedArm, device: &SimDevice, prompts: &[usize]) -> Result<Vec<PromptRow>> {
    prompts
        .iter()
        .map(|&tokens| {
            let mut alone = arm.clone();
            alone.load.prompts = Count::Exact(1);
            alone.load.input_len = tokens;
            alone.load.prefix_len = 0;
            alone.load.output_len = 1;
            alone.engine.max_model_len = alone.engine.max_model_len.max(tokens + 1);
            let run = alone.run(device)?;
            let ttft_s = run.record.requests.first().and_then(RequestRecord::ttft_s);
            Ok(PromptRow { tokens, ttft_ms: ttft_s.map_or(f64::NAN, |seconds| seconds * 1e3) })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::config::EngineConfig;
    use crate::engine::model::presets::synthetic_layout;
    use crate::workload::spec::LoadSpec;

    fn arm(model: &str) -> SimulatedArm {
        SimulatedArm {
            layout: synthetic_layout(model).unwrap(),
            engine: EngineConfig::default(),
            load: LoadSpec::default(),
            seed: 0,
            stop_s: None,
            stall_s: 0.0,
        }
    }

    #[test]
    fn the_series_rig_gives_its_seats_and_saturation() {
        let device = SimDevice::parse("sim:series").unwrap();
        let mut arm = arm("qwen3.5-4b");
        arm.load.temperature = 1.0;
        let prediction = predict(&arm, &device, &[256]).unwrap();
        assert_eq!(prediction.layouts[0].seats, 146);
        assert_eq!(prediction.saturation_running, 146);
        // Part 1's flood: 8.53 requests/s; its fit crosses at 61 sequences.
        assert!((prediction.saturation_rate / 8.53 - 1.0).abs() < 0.05, "{}", prediction.saturation_rate);
        let crossover = prediction.crossover.unwrap();
        assert!((50.0..70.0).contains(&crossover), "{crossover}");
    }

    #[test]
    fn twice_the_bandwidth_helps_small_batches_and_not_prompts() {
        let h100 = SimDevice::parse("sim:h100").unwrap();
        let faster = SimDevice::parse("sim:h100:gb_per_s=6034").unwrap();
        let arm = arm("qwen3.5-4b");
        let (base, fast) = (predict(&arm, &h100, &[2048]).unwrap(), predict(&arm, &faster, &[2048]).unwrap());
        assert!(fast.batches[0].step_ms < 0.7 * base.batches[0].step_ms);
        assert!(fast.prompts[0].ttft_ms > 0.9 * base.prompts[0].ttft_ms);
        assert_eq!(base.batches[0].bound_by, "weights");
    }

    #[test]
    fn a_model_that_does_not_fit_is_refused_with_the_numbers() {
        let device = SimDevice::parse("sim:l4:gb=16").unwrap();
        let error = predict(&arm("qwen3.5-9b"), &device, &[]).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains("GiB"), "{error}");
    }
}
