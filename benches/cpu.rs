//! How near the CPU device comes to this machine's ceilings:
//! `cargo bench --bench cpu [-- FILTER] [row=ROW|phases] [pairs=N] [threads=N]`.
//!
//! Decode: one token for each of 1 to 16 sequences. `of read` is the bytes of weights, states and KV over the time and the
//! read bandwidth; `of floor` is the step's floor (sum over dependent phases of max(bytes/bandwidth, FLOPs/rate)) over
//! the time. Prefill: one prompt, `of peak` is its FLOPs over the time and the multiply-add rate.
//!
//! The memory of a shared machine is now half as fast again, now half as fast, within seconds, so a ceiling measured once
//! says nothing about a step measured later. Ceilings and steps therefore alternate: the same threads read a block of the
//! model's size (huge pages, by the reader that was fastest at the start) and multiply registers for a millisecond, run a few
//! steps, read and multiply again. A pair's share sets the steps beside the better of the readings before and after, as a run
//! does (`measure::roofs`): the mean of both gave shares over 100 % where the memory had just slowed down or sped up. A row
//! gives the median of its pairs' shares and their quartiles. Times and rates are medians too.
//! Phases are those of the fastest of several traced steps. Weights are synthetic: speed does not depend on their values.

mod cpu_rig;

use cpu_rig::{CONTEXT, decode, prefill, prefill_slot};
use inferwall::engine::account::{Ceilings, CostModel, SequenceShape};
use inferwall::engine::clock::Clock;
use inferwall::engine::config::{CpuMath, EngineConfig};
use inferwall::engine::device::cpu::CpuDevice;
use inferwall::engine::device::cpu::ceilings::Probe;
use inferwall::engine::device::{Device, KernelRecord, LoadOptions};
use inferwall::engine::model::layout::{ModelLayout, WeightFormat};
use inferwall::engine::model::spec::{Attention, Family, Mixer, ModelSpec, Role, Rope, RopeScaling};
use inferwall::engine::model::synthetic::SyntheticWeights;
use inferwall::engine::model::synthetic_layout;
use inferwall::engine::model::weights::WeightSource;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    let threads =
        arguments.iter().find_map(|a| a.strip_prefix("threads=")).map(|n| n.parse().expect("threads=N"));
    let filter = arguments.iter().find(|a| !a.contains('=')).cloned().unwrap_or_default();
    let only = arguments.iter().find_map(|a| a.strip_prefix("row=")).unwrap_or_default();
    let pairs = arguments.iter().find_map(|a| a.strip_prefix("pairs=")).map(|n| n.parse().expect("pairs=N"));
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    let threads = threads.unwrap_or(cores);
    let mut device = CpuDevice::new(Some(threads)).expect("a CPU");
    println!("# CPU device bench\n");
    for (name, value) in &device.info().facts {
        println!("- {name}: {value}");
    }
    let cases = [
        ("demo f16, f32 math", demo(WeightFormat::F16), CpuMath::F32),
        ("demo f16, bf16 math", demo(WeightFormat::F16), CpuMath::Bf16),
        ("demo int4 g32 zp, f32 math", demo(int4(32)), CpuMath::F32),
        ("demo int4 g128 zp, f32 math", demo(int4(128)), CpuMath::F32),
        ("demo int4 g32 zp, bf16 math", demo(int4(32)), CpuMath::Bf16),
        ("demo int4 g32 zp, int16 math", demo(int4(32)), CpuMath::Int16),
        ("demo int4 g128 zp, int16 math", demo(int4(128)), CpuMath::Int16),
        ("SmolLM2-135M f16, f32 math", smollm2(WeightFormat::F16), CpuMath::F32),
        ("SmolLM2-135M bf16, f32 math", smollm2(WeightFormat::Bf16), CpuMath::F32),
        ("SmolLM2-135M bf16, bf16 math", smollm2(WeightFormat::Bf16), CpuMath::Bf16),
        ("SmolLM2-135M int4 g32 zp, f32 math", smollm2(int4(32)), CpuMath::F32),
        ("SmolLM2-135M int4 g32 zp, bf16 math", smollm2(int4(32)), CpuMath::Bf16),
        ("SmolLM2-135M int4 g32 zp, int16 math", smollm2(int4(32)), CpuMath::Int16),
    ];
    for (name, layout, math) in cases {
        if name.contains(&filter) {
            case(&mut device, name, &layout, math, only, pairs);
        }
    }
    let comparisons = [
        ("demo int4 g32 zp against f16, f32 math", int4(32), CpuMath::F32),
        ("demo int4 g128 zp against f16, f32 math", int4(128), CpuMath::F32),
        ("demo int4 g32 zp against f16, int16 math", int4(32), CpuMath::Int16),
        ("demo int4 g128 zp against f16, int16 math", int4(128), CpuMath::Int16),
    ];
    for (name, format, math) in comparisons {
        if name.contains(&filter) && only.is_empty() {
            compare(&mut device, name, format, math, pairs.unwrap_or(60));
        }
    }
}

/// Phases that read nothing but matrices which an int4 model quantises.
const QUANTIZED: [&str; 5] = ["delta_out", "mlp_in", "mlp_out", "attention_in", "attention_out"];

/// Decode of one sequence with f16 and with int4 weights, a few steps of each in turns: how much faster, beside how many fewer
/// bytes. The first step after a change of model is not counted: the caches hold the other one.
fn compare(device: &mut CpuDevice, name: &str, format: WeightFormat, math: CpuMath, pairs: usize) {
    let layouts = [demo(WeightFormat::F16), demo(format)];
    let plan = cpu_rig::plan(&layouts[0].spec);
    let mut sessions = Vec::new();
    for (layout, math) in layouts.iter().zip([CpuMath::F32, math]) {
        let source: WeightSource = Box::new(SyntheticWeights::new(layout.clone(), 1));
        let options = LoadOptions { cpu_math: math, threads: None };
        let model = device.load(layout, &source, &options, &mut |_| {}).expect("a model");
        let mut session = model.open(&plan, &EngineConfig::default(), &Clock::real()).expect("a session");
        prefill_slot(session.as_mut(), 0, CONTEXT);
        sessions.push((session, model));
    }
    const STEPS: usize = 4;
    // Of each pair of runs, f16 over int4: (seconds of the step, of the quantised matrices, bytes of the step, of those).
    let mut ratios = [const { Vec::new() }; 4];
    for pair in 0..pairs {
        let found = [0, 1].map(|which| {
            let session = sessions[which].0.as_mut();
            let steps = (0..STEPS).map(|step| decode(session, 1, CONTEXT + STEPS * pair + step, true).1);
            let all = phases(steps.skip(1).flatten().collect());
            let of = |value: &dyn Fn(&Phase) -> f64, only: &[&str]| -> f64 {
                all.iter().filter(|phase| only.is_empty() || only.contains(&&*phase.name)).map(value).sum()
            };
            let (time, bytes) = (|phase: &Phase| phase.seconds, |phase: &Phase| phase.bytes);
            [of(&time, &[]), of(&time, &QUANTIZED), of(&bytes, &[]), of(&bytes, &QUANTIZED)]
        });
        for (ratios, (f16, int4)) in ratios.iter_mut().zip(found[0].iter().zip(found[1])) {
            ratios.push(f16 / int4);
        }
    }
    println!(
        "\n## {name}\n\nf16 over int4, {} steps of each in turns; medians of {pairs} pairs (quartiles).\n",
        STEPS - 1
    );
    println!("| of | times as fast | times as few bytes | share |\n|---|---|---|---|");
    for (what, at) in [("whole steps", 0), ("the quantised matrices", 1)] {
        let ([low, median, high], bytes) = (quartiles(&ratios[at]), quartiles(&ratios[at + 2])[1]);
        println!("| {what} | {median:.2} ({low:.2} to {high:.2}) | {bytes:.2} | {:.2} |", median / bytes);
    }
}

fn int4(group: usize) -> WeightFormat {
    WeightFormat::Int4 { group, zero_points: true }
}

/// A layout with every matrix in `format`; int4 leaves the head and the small gate projections in 16 bits.
fn with_format(mut layout: ModelLayout, format: WeightFormat) -> ModelLayout {
    let quantized = matches!(format, WeightFormat::Int4 { .. });
    let dense = if quantized { WeightFormat::F16 } else { format };
    layout.embedding = dense;
    for (linear, stored) in &mut layout.linears {
        *stored = if matches!(linear.role, Role::InA | Role::InB | Role::Head) { dense } else { format };
    }
    layout
}

fn demo(format: WeightFormat) -> ModelLayout {
    with_format(synthetic_layout("demo").expect("a preset"), format)
}

/// The shape of SmolLM2-135M.
fn smollm2(format: WeightFormat) -> ModelLayout {
    let spec = ModelSpec {
        family: Family::Llama,
        name: "smollm2-135m".to_string(),
        hidden_size: 576,
        intermediate_size: 1536,
        vocab_size: 49_152,
        layers: vec![Mixer::Attention; 30],
        attention: Attention {
            heads: 9,
            kv_heads: 3,
            head_dim: 64,
            output_gate: false,
            qk_norm: false,
            qkv_bias: false,
            rope: Rope { theta: 1e5, rotary_dim: 64, scaling: RopeScaling::None },
        },
        delta_net: None,
        norm_eps: 1e-5,
        norm_plus_one: false,
        tied_head: true,
        max_position: 8192,
        eos_tokens: Vec::new(),
        real_vocab_size: 49_152,
    };
    let linears = spec.linears().into_iter().map(|linear| (linear, WeightFormat::F16)).collect();
    let layout = ModelLayout {
        spec,
        linears,
        embedding: WeightFormat::F16,
        synthetic: true,
        hash: "bench".to_string(),
    };
    with_format(layout, format)
}

fn case(
    device: &mut CpuDevice,
    name: &str,
    layout: &ModelLayout,
    math: CpuMath,
    only: &str,
    pairs: Option<usize>,
) {
    let source: WeightSource = Box::new(SyntheticWeights::new(layout.clone(), 1));
    let options = LoadOptions { cpu_math: math, threads: None };
    let model = match device.load(layout, &source, &options, &mut |_| {}) {
        Ok(model) => model,
        Err(error) => {
            println!("\n## {name}\n\nskipped: {error}");
            return;
        }
    };
    let probe = device.probe(layout.streamed_bytes() as usize).expect("memory");
    let plan = cpu_rig::plan(&layout.spec);
    let cost = CostModel::new(layout, &plan);
    let mut session = model.open(&plan, &EngineConfig::default(), &Clock::real()).expect("a session");
    println!("\n## {name}\n\n{:.1} MB streamed a step\n", layout.streamed_bytes() as f64 / 1e6);
    println!(
        "| step | pairs | ms | tok/s | GB/s | read GB/s | of read (quartiles) | GFLOP/s | peak GFLOP/s | of peak (quartiles) | of floor (quartiles) |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|");
    for tokens in [256, 512] {
        let name = format!("prefill {tokens}");
        if !name.starts_with(only) {
            continue;
        }
        let shape = SequenceShape { new_tokens: tokens, context_tokens: 0, sampled_rows: 1, decode: false };
        let mut row = Row::new(&probe, &cost, vec![shape]);
        row.measure(pairs.unwrap_or(8), 1, || prefill(session.as_mut(), tokens, false).0);
        row.print(&name, tokens);
    }
    for batch in [1, 2, 4, 8, 16] {
        let name = format!("decode {batch}");
        if !(name.starts_with(only) && (name == only || !only.ends_with('1'))) {
            continue;
        }
        for slot in 0..batch {
            prefill_slot(session.as_mut(), slot, CONTEXT);
        }
        let (pairs, steps) = (pairs.unwrap_or(if batch == 1 { 40 } else { 15 }), 3);
        let mut context = CONTEXT;
        let middle = CONTEXT + pairs * steps / 2;
        let shape = SequenceShape { new_tokens: 1, context_tokens: middle, sampled_rows: 1, decode: true };
        let mut row = Row::new(&probe, &cost, vec![shape; batch]);
        row.measure(pairs, steps, || {
            let time = decode(session.as_mut(), batch, context, false).0;
            context += 1;
            time
        });
        row.print(&name, batch);
    }
    if !only.is_empty() && only != "phases" {
        return;
    }
    println!("\n| phase | of decode 1 | GB/s | of decode 16 | GB/s | GFLOP/s | of prefill 512 | GFLOP/s |");
    println!("|---|---|---|---|---|---|---|---|");
    let prompt = phases(prefill(session.as_mut(), 512, true).1);
    for slot in 0..16 {
        prefill_slot(session.as_mut(), slot, CONTEXT);
    }
    // Steps follow each other: a recurrent state can't go back.
    let mut fastest = |batch: usize, context: usize| {
        (context..context + 12)
            .map(|context| phases(decode(session.as_mut(), batch, context, true).1))
            .min_by(|a, b| seconds(a).total_cmp(&seconds(b)))
            .unwrap_or_default()
    };
    let full = fastest(16, CONTEXT);
    let one = fastest(1, CONTEXT + 12);
    for ((a, b), c) in one.iter().zip(&full).zip(&prompt) {
        println!(
            "| {} | {:.1} % | {:.1} | {:.1} % | {:.1} | {:.0} | {:.1} % | {:.0} |",
            a.name,
            100.0 * a.seconds / seconds(&one),
            a.bytes / a.seconds / 1e9,
            100.0 * b.seconds / seconds(&full),
            b.bytes / b.seconds / 1e9,
            b.flops / b.seconds / 1e9,
            100.0 * c.seconds / seconds(&prompt),
            c.flops / c.seconds / 1e9,
        );
    }
}

struct Phase {
    name: String,
    seconds: f64,
    bytes: f64,
    flops: f64,
}

fn seconds(phases: &[Phase]) -> f64 {
    phases.iter().map(|phase| phase.seconds).sum()
}

/// Records of one step, summed by name in order of appearance.
fn phases(records: Vec<KernelRecord>) -> Vec<Phase> {
    let mut all: Vec<Phase> = Vec::new();
    for record in records {
        if !all.iter().any(|phase| phase.name == record.name) {
            all.push(Phase { name: record.name.clone(), seconds: 0.0, bytes: 0.0, flops: 0.0 });
        }
        if let Some(phase) = all.iter_mut().find(|phase| phase.name == record.name) {
            phase.seconds += record.end_s - record.start_s;
            phase.bytes += record.bytes as f64;
            phase.flops += record.flops as f64;
        }
    }
    all
}

/// Measured pairs of one row.
struct Row<'a> {
    probe: &'a Probe,
    cost: &'a CostModel,
    shapes: Vec<SequenceShape>,
    /// Of one step.
    bytes: f64,
    flops: f64,
    times: Vec<f64>,
    reads: Vec<f64>,
    rates: Vec<f64>,
    of_read: Vec<f64>,
    of_peak: Vec<f64>,
    of_floor: Vec<f64>,
}

impl<'a> Row<'a> {
    fn new(probe: &'a Probe, cost: &'a CostModel, shapes: Vec<SequenceShape>) -> Self {
        let none = Vec::new;
        let (times, reads, rates) = (none(), none(), none());
        let (of_read, of_peak, of_floor) = (none(), none(), none());
        let (bytes, flops) = (0.0, 0.0);
        Self { probe, cost, shapes, bytes, flops, times, reads, rates, of_read, of_peak, of_floor }
    }

    /// `step` gives the seconds of one step.
    fn measure(&mut self, pairs: usize, steps: usize, mut step: impl FnMut() -> f64) {
        // As many passes as steps: where the L3 holds a part of the model, a step that follows another one finds it there.
        let ceilings = || {
            let seconds: f64 = (0..steps).map(|_| self.probe.read_bytes_per_s().recip()).sum();
            (steps as f64 / seconds, self.probe.flops_per_s())
        };
        step();
        let mut before = ceilings();
        for _ in 0..pairs {
            let time = (0..steps).map(|_| step()).sum::<f64>() / steps as f64;
            let after = ceilings();
            let (read, rate) = (before.0.max(after.0), before.1.max(after.1));
            let cost = self.cost.cost(
                &self.shapes,
                Some(&Ceilings {
                    read_bytes_per_s: read,
                    copy_bytes_per_s: read,
                    flops_per_s: rate,
                    launch_s: 0.0,
                    measured: true,
                }),
            );
            self.bytes = (cost.bytes.weights + cost.bytes.state + cost.bytes.kv) as f64;
            self.flops = cost.flops as f64;
            self.times.push(time);
            self.reads.push(read);
            self.rates.push(rate);
            self.of_read.push(100.0 * self.bytes / time / read);
            self.of_peak.push(100.0 * self.flops / time / rate);
            self.of_floor.push(100.0 * cost.floor_s / time);
            before = after;
        }
    }

    fn print(&self, name: &str, tokens: usize) {
        let median = |values: &[f64]| quartiles(values)[1];
        let share = |values: &[f64]| {
            let [low, median, high] = quartiles(values);
            format!("**{median:.0} %** ({low:.0} to {high:.0})")
        };
        let (time, read, rate) = (median(&self.times), median(&self.reads), median(&self.rates));
        println!(
            "| {name} | {} | {:.2} | {:.0} | {:.1} | {:.1} | {} | {:.0} | {:.0} | {} | {} |",
            self.times.len(),
            1e3 * time,
            tokens as f64 / time,
            self.bytes / time / 1e9,
            read / 1e9,
            share(&self.of_read),
            self.flops / time / 1e9,
            rate / 1e9,
            share(&self.of_peak),
            share(&self.of_floor),
        );
    }
}

/// First quartile, median and third quartile.
fn quartiles(values: &[f64]) -> [f64; 3] {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    [1, 2, 3].map(|quarter| sorted[(sorted.len() - 1) * quarter / 4])
}
