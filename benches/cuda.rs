//! Times decode steps, prompts and the ceilings of a GPU:
//! `cargo bench --bench cuda -- [preset] [batches] [prompts] [batches at 8,192 or 4,096 tokens] [--portable]`, lists as `1,8,32`.
//!
//! A decode step is the wall time of 64 steps after 16 warm ones, at a context of 128 tokens, two steps in flight. Beside it
//! stands the floor that `account.rs` gives on the measured ceilings. Last come the kernels, by total time, of a step of one
//! sequence, of the largest batch and of a prompt. Prints that it was skipped where there is no usable GPU.

use std::collections::BTreeMap;
use std::time::Instant;

use inferwall::engine::account::{SequenceShape, step_cost};
use inferwall::engine::cache::plan::plan_cache;
use inferwall::engine::clock::Clock;
use inferwall::engine::config::{CpuMath, CudaKernels, EngineConfig};
use inferwall::engine::device::cuda::CudaDevice;
use inferwall::engine::device::{Device, Input, LoadOptions, SequenceStep, Session, Step, Ticket, Want};
use inferwall::engine::model::{ModelRef, OpenOptions, open};
use inferwall::engine::request::{RequestId, SamplingParams};

const CONTEXT: usize = 128;
const WARM: usize = 16;
const STEPS: usize = 64;

struct Bench {
    session: Box<dyn Session>,
    blocks: Vec<Vec<u32>>,
    hybrid: bool,
}

fn sequence<'a>(
    blocks: &'a [Vec<u32>],
    hybrid: bool,
    index: usize,
    context: usize,
    input: Input<'a>,
) -> SequenceStep<'a> {
    SequenceStep {
        request: RequestId(index as u64),
        state_slot: hybrid.then_some(index as u32),
        blocks: &blocks[index][..(context + input.tokens()).div_ceil(16)],
        context_tokens: context,
        input,
        drafts: &[],
        want: Want::Sample { seed: 0, position: context as u64 + 1, params: SamplingParams::default() },
    }
}

impl Bench {
    fn submit_prompt(&mut self, ids: &[u32], trace: bool) -> Ticket {
        let sequences = vec![sequence(&self.blocks, self.hybrid, 0, 0, Input::Known(ids))];
        self.session.submit(&Step { sequences, trace }).unwrap()
    }

    fn submit(&mut self, batch: usize, context: usize, previous: Option<Ticket>, trace: bool) -> Ticket {
        let sequences = (0..batch)
            .map(|index| {
                let input = match previous {
                    Some(ticket) => Input::SampledBy { ticket, sequence: index },
                    None => Input::Known(&[7]),
                };
                sequence(&self.blocks, self.hybrid, index, context, input)
            })
            .collect();
        let step = Step { sequences, trace };
        self.session.submit(&step).unwrap()
    }

    /// Seconds a decode step takes, and the share the device was busy.
    fn decode(&mut self, batch: usize, context: usize) -> (f64, f64) {
        let mut previous: Option<Ticket> = None;
        let mut start = Instant::now();
        let mut device_s = 0.0;
        for step in 0..WARM + STEPS {
            if step == WARM {
                start = Instant::now();
                device_s = 0.0;
            }
            let ticket = self.submit(batch, context + step, previous, false);
            if let Some(previous) = previous {
                device_s += self.session.wait(previous).unwrap().device_s;
            }
            previous = Some(ticket);
        }
        let wall = start.elapsed().as_secs_f64();
        self.session.wait(previous.unwrap()).unwrap();
        (wall / STEPS as f64, device_s / wall)
    }

    fn prefill(&mut self, tokens: usize) -> f64 {
        let ids: Vec<u32> = (0..tokens as u32).map(|i| (i * 7919 + 13) % 30_000).collect();
        let mut best = f64::INFINITY;
        for _ in 0..3 {
            let start = Instant::now();
            let ticket = self.submit_prompt(&ids, false);
            self.session.wait(ticket).unwrap();
            best = best.min(start.elapsed().as_secs_f64());
        }
        best
    }

    fn print_kernels(&mut self, what: &str, ticket: Ticket, read_bytes_per_s: f64) {
        let mut kernels = self.session.wait(ticket).unwrap().kernels;
        // Where CUPTI times them, they come with the end of the trace.
        let end = self.session.finish_trace().unwrap();
        kernels.extend(end.kernels.into_iter().filter(|(of, _)| *of == ticket).flat_map(|(_, found)| found));
        let mut by_name: BTreeMap<&str, (usize, f64, u64, u64)> = BTreeMap::new();
        for kernel in &kernels {
            let entry = by_name.entry(&kernel.name).or_default();
            entry.0 += 1;
            entry.1 += kernel.end_s - kernel.start_s;
            entry.2 += kernel.bytes;
            entry.3 += kernel.flops;
        }
        let mut rows: Vec<_> = by_name.into_iter().collect();
        rows.sort_by(|a, b| b.1.1.total_cmp(&a.1.1));
        println!("\nkernels of {what}");
        end.notes.iter().for_each(|note| println!("({note})"));
        println!(
            "{:<28} {:>5} {:>9} {:>9} {:>8} {:>8} {:>6}",
            "kernel", "runs", "total ms", "us each", "GB/s", "TFLOP/s", "roof"
        );
        for (name, (runs, seconds, bytes, flops)) in rows {
            println!(
                "{name:<28} {runs:>5} {:>9.3} {:>9.2} {:>8.0} {:>8.1} {:>5.0}%",
                1e3 * seconds,
                1e6 * seconds / runs as f64,
                bytes as f64 / seconds * 1e-9,
                flops as f64 / seconds * 1e-12,
                100.0 * bytes as f64 / seconds / read_bytes_per_s
            );
        }
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let (flags, arguments): (Vec<String>, Vec<String>) =
        arguments.into_iter().partition(|argument| argument.starts_with("--"));
    let portable = flags.iter().any(|flag| flag == "--portable");
    let preset = arguments.first().map_or("qwen3.5-4b", String::as_str);
    let numbers = |text: &str| -> Vec<usize> { text.split(',').filter_map(|n| n.parse().ok()).collect() };
    let batches = arguments.get(1).map_or_else(|| vec![1, 8, 32, 64, 128, 256], |list| numbers(list));
    let prefills = arguments.get(2).map_or_else(|| vec![256, 2048, 8192], |list| numbers(list));
    let long = arguments.get(3).map_or_else(Vec::new, |list| numbers(list));
    let start = Instant::now();
    let mut device = match CudaDevice::new(0) {
        Ok(device) => device,
        Err(error) => {
            println!("SKIPPED the CUDA bench: {error}; {}", error.hint());
            return;
        }
    };
    let ceilings = device.ceilings().unwrap().expect("a GPU has ceilings");
    println!("{}: {ceilings:?}", device.info().name);
    println!("device and ceilings after {:.2} s", start.elapsed().as_secs_f64());
    let loading = Instant::now();
    let opened = open(&ModelRef::Synthetic { preset: preset.to_string() }, &OpenOptions::default()).unwrap();
    let load = LoadOptions { cpu_math: CpuMath::F32, threads: None };
    let (free, total) = (device.free_bytes(), device.info().memory_bytes);
    let model = device.load(&opened.layout, &opened.weights, &load, &mut |_| {}).unwrap();
    println!("{preset} loaded in {:.2} s", loading.elapsed().as_secs_f64());
    let most = batches.iter().chain(&long).copied().max().unwrap_or(1);
    let longest = prefills.iter().copied().max().unwrap_or(0).max(CONTEXT + WARM + STEPS + 1);
    let longest = if long.is_empty() { longest } else { longest.max(8192 + WARM + STEPS + 1) };
    let mut config = EngineConfig {
        max_num_seqs: most,
        max_num_batched_tokens: prefills.iter().copied().max().unwrap_or(2048).max(2048),
        max_model_len: longest,
        cuda_kernels: if portable { CudaKernels::Portable } else { CudaKernels::Auto },
        ..EngineConfig::default()
    };
    device.configure(&opened.layout, &mut config).unwrap();
    let plan =
        plan_cache(&opened.layout, &config, free, total, device.default_dtypes(), Some(longest)).unwrap();
    let opening = Instant::now();
    let hybrid = opened.layout.spec.is_hybrid();
    let session = model.open(&plan, &config, &Clock::real()).unwrap();
    println!("session opened in {:.2} s", opening.elapsed().as_secs_f64());
    let each = plan.kv_blocks / most;
    let blocks =
        (0..most).map(|i| (0..each).map(|b| (1 + b * most + i) as u32 % plan.kv_blocks as u32).collect());
    let mut bench = Bench { session, blocks: blocks.collect(), hybrid };

    println!("\n{:<24} {:>9} {:>9} {:>6} {:>6}", "row", "ms", "floor ms", "roof", "busy");
    let shape = |new_tokens, context_tokens, decode| SequenceShape {
        new_tokens,
        context_tokens,
        sampled_rows: 1,
        decode,
    };
    let floor = |shapes: &[SequenceShape]| step_cost(&opened.layout, &plan, shapes, &ceilings).floor_s;
    let row = |name: String, seconds: f64, floor_s: f64, busy: f64| {
        println!(
            "{name:<24} {:>9.3} {:>9.3} {:>5.0}% {:>5.0}%",
            1e3 * seconds,
            1e3 * floor_s,
            100.0 * floor_s / seconds,
            100.0 * busy
        );
    };
    for &batch in &batches {
        let (seconds, busy) = bench.decode(batch, CONTEXT);
        row(format!("decode {batch}"), seconds, floor(&vec![shape(1, CONTEXT, true); batch]), busy);
    }
    for &batch in &long {
        let context = if batch >= 64 { 4096 } else { 8192 };
        let (seconds, busy) = bench.decode(batch, context);
        row(
            format!("decode {batch} at {context}"),
            seconds,
            floor(&vec![shape(1, context, true); batch]),
            busy,
        );
    }
    for &tokens in &prefills {
        let seconds = bench.prefill(tokens);
        row(format!("prefill {tokens}"), seconds, floor(&[shape(tokens, 0, false)]), 1.0);
    }
    for batch in [1, most] {
        let ticket = bench.submit(batch, CONTEXT, None, true);
        bench.print_kernels(&format!("decode {batch}"), ticket, ceilings.read_bytes_per_s);
        if most == 1 {
            break;
        }
    }
    let ids: Vec<u32> = (0..longest.min(2048) as u32).collect();
    let ticket = bench.submit_prompt(&ids, true);
    bench.print_kernels(&format!("prefill {}", ids.len()), ticket, ceilings.read_bytes_per_s);
}
