//! How near the CPU device comes to this machine's ceilings: `cargo bench --bench cpu [-- FILTER] [threads=N]`.
//!
//! Decode: one token for each of 1 to 16 sequences. `of read` is the bytes of weights, states and KV over the time and the
//! measured read bandwidth; `of floor` is the step's floor (sum over dependent phases of max(bytes/bandwidth,
//! FLOPs/rate)) over the time. Prefill: one prompt, `of peak` is its FLOPs over the time and the multiply-add rate. Times are the
//! best and the median of the repeats; shares are of the median. On a shared machine the memory's rate changes within
//! minutes, so ceilings are measured between all rows and a row's shares are of the mean of those before and after it.
//! Phases are those of the fastest of several traced steps. Weights are synthetic: speed does not depend on their values.

use std::time::Instant;

use inferwall::engine::account::{Ceilings, CostModel, SequenceShape};
use inferwall::engine::clock::Clock;
use inferwall::engine::config::{CacheDtype, CpuMath, EngineConfig, KvLayout};
use inferwall::engine::device::cpu::CpuDevice;
use inferwall::engine::device::{
    CachePlan, Device, Input, KernelRecord, LoadOptions, SequenceStep, Session, Step, Want,
};
use inferwall::engine::model::layout::{ModelLayout, WeightFormat};
use inferwall::engine::model::spec::{Attention, Family, Mixer, ModelSpec, Role, Rope, RopeScaling};
use inferwall::engine::model::synthetic::SyntheticWeights;
use inferwall::engine::model::synthetic_layout;
use inferwall::engine::model::weights::WeightSource;
use inferwall::engine::request::{RequestId, SamplingParams};

const GREEDY: SamplingParams = SamplingParams { temperature: 0.0, top_k: 0, top_p: 1.0 };
const BLOCK_TOKENS: usize = 16;
const MAX_LEN: usize = 1024;
/// Context that decode starts from.
const CONTEXT: usize = 128;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    let threads =
        arguments.iter().find_map(|a| a.strip_prefix("threads=")).map(|n| n.parse().expect("threads=N"));
    let filter = arguments.iter().find(|a| !a.contains('=')).cloned().unwrap_or_default();
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
        ("SmolLM2-135M f16, f32 math", smollm2(WeightFormat::F16), CpuMath::F32),
        ("SmolLM2-135M bf16, f32 math", smollm2(WeightFormat::Bf16), CpuMath::F32),
        ("SmolLM2-135M bf16, bf16 math", smollm2(WeightFormat::Bf16), CpuMath::Bf16),
        ("SmolLM2-135M int4 g32 zp, f32 math", smollm2(int4(32)), CpuMath::F32),
        ("SmolLM2-135M int4 g32 zp, bf16 math", smollm2(int4(32)), CpuMath::Bf16),
    ];
    for (name, layout, math) in cases {
        if name.contains(&filter) {
            case(&mut device, threads, name, &layout, math);
        }
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

fn case(device: &mut CpuDevice, threads: usize, name: &str, layout: &ModelLayout, math: CpuMath) {
    let source: WeightSource = Box::new(SyntheticWeights::new(layout.clone(), 1));
    let options = LoadOptions { cpu_math: math, threads: None };
    let model = match device.load(layout, &source, &options, &mut |_| {}) {
        Ok(model) => model,
        Err(error) => {
            println!("\n## {name}\n\nskipped: {error}");
            return;
        }
    };
    // A device of its own each time: one keeps what it measured first.
    let measure = || {
        let mut fresh = CpuDevice::new(Some(threads)).expect("a CPU");
        fresh.set_math(math);
        fresh.ceilings().expect("ceilings")
    };
    let plan = CachePlan {
        layout: KvLayout::Split,
        block_tokens: BLOCK_TOKENS,
        kv_blocks: 16 * MAX_LEN / BLOCK_TOKENS,
        state_slots: if layout.spec.is_hybrid() { 16 } else { 0 },
        kv_dtype: CacheDtype::F32,
        state_dtype: CacheDtype::F32,
        state_write_interval: 1,
        max_model_len: MAX_LEN,
        max_num_seqs: 16,
        max_num_batched_tokens: 2048,
        max_drafts: 0,
    };
    let cost = CostModel::new(layout, &plan);
    let mut session = model.open(&plan, &EngineConfig::default(), &Clock::real()).expect("a session");
    println!("\n## {name}\n\n{:.1} MB streamed a step\n", layout.streamed_bytes() as f64 / 1e6);
    println!(
        "| step | best ms | median ms | tok/s | GB/s | read GB/s | of read | GFLOP/s | peak GFLOP/s | of peak | of floor |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|");
    let mut before = measure();
    let mut row = |name: &str, times: &[f64], tokens: usize, shapes: &[SequenceShape]| {
        let after = measure();
        print_row(name, times, tokens, &cost, shapes, &between(&before, &after));
        before = after;
    };
    for tokens in [256, 512] {
        let times = repeat(8, || prefill(session.as_mut(), tokens, false).0);
        let shape = SequenceShape { new_tokens: tokens, context_tokens: 0, sampled_rows: 1, decode: false };
        row(&format!("prefill {tokens}"), &times, tokens, &[shape]);
    }
    for batch in [1, 2, 4, 8, 16] {
        for slot in 0..batch {
            prefill_slot(session.as_mut(), slot, CONTEXT);
        }
        let mut context = CONTEXT;
        let times = repeat(40, || {
            let time = decode(session.as_mut(), batch, context, false).0;
            context += 1;
            time
        });
        let shape =
            SequenceShape { new_tokens: 1, context_tokens: CONTEXT + 20, sampled_rows: 1, decode: true };
        row(&format!("decode {batch}"), &times, batch, &vec![shape; batch]);
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

/// What held on average between two measurements of bandwidth; a multiply-add rate only falls by a disturbance.
fn between(before: &Ceilings, after: &Ceilings) -> Ceilings {
    Ceilings {
        read_bytes_per_s: (before.read_bytes_per_s + after.read_bytes_per_s) / 2.0,
        copy_bytes_per_s: (before.copy_bytes_per_s + after.copy_bytes_per_s) / 2.0,
        flops_per_s: before.flops_per_s.max(after.flops_per_s),
        ..*after
    }
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

fn repeat(times: usize, mut step: impl FnMut() -> f64) -> Vec<f64> {
    step();
    let mut all: Vec<f64> = (0..times).map(|_| step()).collect();
    all.sort_by(f64::total_cmp);
    all
}

fn print_row(
    name: &str,
    times: &[f64],
    tokens: usize,
    cost: &CostModel,
    shapes: &[SequenceShape],
    ceilings: &Ceilings,
) {
    let median = times[times.len() / 2];
    let cost = cost.cost(shapes, ceilings);
    let bytes = (cost.bytes.weights + cost.bytes.state + cost.bytes.kv) as f64;
    println!(
        "| {name} | {:.3} | {:.3} | {:.0} | {:.1} | {:.1} | {:.0} % | {:.0} | {:.0} | {:.0} % | {:.0} % |",
        1e3 * times[0],
        1e3 * median,
        tokens as f64 / median,
        bytes / median / 1e9,
        ceilings.read_bytes_per_s / 1e9,
        100.0 * bytes / median / ceilings.read_bytes_per_s,
        cost.flops as f64 / median / 1e9,
        ceilings.flops_per_s / 1e9,
        100.0 * cost.flops as f64 / median / ceilings.flops_per_s,
        100.0 * cost.floor_s / median
    );
}

fn blocks(slot: usize) -> Vec<u32> {
    (0..MAX_LEN / BLOCK_TOKENS).map(|i| (i * 16 + slot) as u32).collect()
}

fn prefill(session: &mut dyn Session, tokens: usize, trace: bool) -> (f64, Vec<KernelRecord>) {
    let ids: Vec<u32> = (0..tokens).map(|i| (i * 7919 % 30_000) as u32).collect();
    run(session, &[(0, 0, &ids)], trace)
}

fn prefill_slot(session: &mut dyn Session, slot: usize, tokens: usize) {
    let ids: Vec<u32> = (0..tokens).map(|i| ((i + slot) * 7919 % 30_000) as u32).collect();
    run(session, &[(slot, 0, &ids)], false);
}

fn decode(session: &mut dyn Session, batch: usize, context: usize, trace: bool) -> (f64, Vec<KernelRecord>) {
    let ids: Vec<[u32; 1]> = (0..batch).map(|slot| [(slot * 31 + context) as u32]).collect();
    let parts: Vec<(usize, usize, &[u32])> =
        ids.iter().enumerate().map(|(slot, ids)| (slot, context, &ids[..])).collect();
    run(session, &parts, trace)
}

/// Seconds of one step of (slot, context, tokens), each sampled greedily.
fn run(session: &mut dyn Session, parts: &[(usize, usize, &[u32])], trace: bool) -> (f64, Vec<KernelRecord>) {
    let tables: Vec<Vec<u32>> = parts.iter().map(|part| blocks(part.0)).collect();
    let sequences = parts
        .iter()
        .zip(&tables)
        .map(|(&(slot, context, ids), table)| SequenceStep {
            request: RequestId(slot as u64),
            state_slot: Some(slot as u32),
            blocks: &table[..(context + ids.len()).div_ceil(BLOCK_TOKENS)],
            context_tokens: context,
            input: Input::Known(ids),
            drafts: &[],
            want: Want::Sample { seed: 0, position: (context + ids.len()) as u64, params: GREEDY },
        })
        .collect();
    let start = Instant::now();
    let ticket = session.submit(&Step { sequences, trace }).expect("a step");
    let output = session.wait(ticket).expect("a step's output");
    (start.elapsed().as_secs_f64(), output.kernels)
}
