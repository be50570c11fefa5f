//! Times the prompt kernels on the GPU at the shapes of Qwen3.5-4B: one layer's attention and one layer's delta net.
//! Inputs are random, figures are medians of 9. `cargo bench --bench cuda_prefill`.

use half::f16;
use inferwall::Result;
use inferwall::engine::device::cuda::delta_prefill::{DeltaPrefill, DeltaShape, HEAD, Layer, Work};
use inferwall::engine::device::cuda::driver::{DeviceBuffer, Event, Gpu};
use inferwall::engine::device::cuda::launch::{Record, Stream};
use inferwall::engine::device::cuda::prefill_attention::{Chunk, Gate, PagedKv, PrefillAttention, Rows};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

const REPEATS: usize = 9;

fn noise(gpu: &Gpu, rng: &mut ChaCha8Rng, count: usize) -> Result<DeviceBuffer> {
    // A random megabyte, repeated: the values matter to the power drawn, their order does not.
    let part: Vec<f16> = (0..1 << 19).map(|_| f16::from_f32(rng.random_range(-1.0..1.0))).collect();
    let all: Vec<f16> = part.iter().copied().cycle().take(count).collect();
    gpu.upload(&all)
}

/// Median seconds of `body`, after two warm-up runs.
fn median(gpu: &Gpu, stream: &Stream, mut body: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut times = Vec::new();
    for run in 0..REPEATS + 2 {
        let (start, end) = (Event::new(gpu)?, Event::new(gpu)?);
        stream.record(&start)?;
        body()?;
        stream.record(&end)?;
        end.synchronize()?;
        if run >= 2 {
            times.push(end.seconds_since(&start)?);
        }
    }
    times.sort_by(f64::total_cmp);
    Ok(times[REPEATS / 2])
}

fn attention(gpu: &Gpu, new: usize, context: usize, prompts: usize, portable: bool) -> Result<()> {
    let (heads, kv_heads, d, block_tokens) = (16, 4, 256, 16);
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let stream = Stream::new(gpu)?;
    let kernel = PrefillAttention::new(gpu, d, portable)?;
    let table_stride = (new + context).div_ceil(block_tokens);
    let chunks: Vec<Chunk> = (0..prompts as i32)
        .map(|i| Chunk {
            first_row: i * new as i32,
            new_tokens: new as i32,
            context_tokens: context as i32,
            table: i,
        })
        .collect();
    let rows = new * prompts;
    let mixed = noise(gpu, &mut rng, rows * (2 * heads + 2 * kv_heads) * d)?;
    let (q, out) = (noise(gpu, &mut rng, rows * heads * d)?, noise(gpu, &mut rng, rows * heads * d)?);
    let pool = prompts * table_stride * block_tokens * kv_heads * d;
    let (keys, values) = (noise(gpu, &mut rng, pool)?, noise(gpu, &mut rng, pool)?);
    let ids: Vec<i32> = (0..(prompts * table_stride) as i32).rev().collect();
    let tables = gpu.upload(&ids)?;
    let tiles = kernel.tiles(&chunks);
    let flat: Vec<i32> =
        chunks.iter().flat_map(|c| [c.first_row, c.new_tokens, c.context_tokens, c.table]).collect();
    let chunk_list = gpu.upload(&flat)?;
    let tile_list = gpu.upload(&tiles.list.concat())?;
    let cache = PagedKv {
        keys: keys.pointer(),
        values: values.pointer(),
        block_stride: (block_tokens * kv_heads * d) as u64,
        token_stride: d as u32,
        head_stride: (block_tokens * d) as u32,
        block_tokens: block_tokens as u32,
        blocks: (prompts * table_stride) as u64,
        tables: tables.pointer(),
        table_stride: table_stride as i32,
    };
    let width = (heads * d) as i32;
    let gate_stride = ((2 * heads + 2 * kv_heads) * d) as i32;
    let gate = Gate {
        rows: Rows { pointer: mixed.at(2 * d as u64), stride: gate_stride },
        head_stride: 2 * d as i32,
    };
    let time = median(gpu, &stream, || {
        // SAFETY: every buffer lives past the last event.
        unsafe {
            kernel.launch(
                &stream,
                Rows { pointer: q.pointer(), stride: width },
                Some(gate),
                Rows { pointer: out.pointer(), stride: width },
                &cache,
                heads,
                kv_heads,
                chunk_list.pointer(),
                &tiles,
                tile_list.pointer(),
            )
        }
    })?;
    let flops = 4.0 * (d * heads) as f64 * tiles.visible_pairs as f64;
    let name = if portable { "portable" } else { "best" };
    println!(
        "attention {name:<9} {prompts:>3} x {new:>5} after {context:>5}: {:>9.1} us {:>6.0} TFLOP/s",
        time * 1e6,
        flops / time / 1e12
    );
    Ok(())
}

fn delta(gpu: &Gpu, new: usize, prompts: usize, portable: bool) -> Result<()> {
    let mut rng = ChaCha8Rng::seed_from_u64(2);
    let (key_heads, value_heads) = (16usize, 32usize);
    let channels = (2 * key_heads + value_heads) * HEAD;
    let pitch = channels + value_heads * HEAD + 2 * value_heads;
    let shape = DeltaShape {
        key_heads: key_heads as i32,
        value_heads: value_heads as i32,
        pitch: pitch as i32,
        ring: 8,
        state_type: 0,
        norm_eps: 1e-6,
    };
    let rows = new * prompts;
    let stream = Stream::new(gpu)?;
    let prefill = DeltaPrefill::new(gpu, shape, rows, prompts, portable)?;
    let work = Work::new((0..prompts as i32).map(|i| (i, 0, i * new as i32, new as i32)));
    let flat: Vec<i32> =
        work.pieces.iter().flat_map(|p| [p.slot, p.context, p.start, p.count, p.first_chunk]).collect();
    let (pieces, chunks) = (gpu.upload(&flat)?, gpu.upload(&work.chunks.concat())?);
    let mixed = noise(gpu, &mut rng, rows * pitch)?;
    let out = noise(gpu, &mut rng, rows * value_heads * HEAD)?;
    let floats = |rng: &mut ChaCha8Rng, count: usize| {
        gpu.upload(&(0..count).map(|_| rng.random_range(-0.5..0.5f32)).collect::<Vec<_>>())
    };
    let (taps, a_log) = (floats(&mut rng, 4 * channels)?, floats(&mut rng, value_heads)?);
    let (dt_bias, norm) = (floats(&mut rng, value_heads)?, floats(&mut rng, HEAD)?);
    let state = gpu.allocate_zeroed((prompts * value_heads * HEAD * HEAD * 4) as u64)?;
    let window = gpu.allocate_zeroed((prompts * 8 * channels * 2) as u64)?;
    let layer = Layer {
        mixed: mixed.pointer(),
        taps: taps.pointer(),
        a_log: a_log.pointer(),
        dt_bias: dt_bias.pointer(),
        norm_weight: norm.pointer(),
        state: state.pointer(),
        window: window.pointer(),
        out: out.pointer(),
    };
    // SAFETY: every buffer lives past the last event.
    let run = || unsafe { prefill.launch(&stream, &layer, &work, pieces.pointer(), chunks.pointer()) };
    let time = median(gpu, &stream, run)?;
    stream.start_recording(Record::Time)?;
    run()?;
    let (launches, events) = stream.stop_recording();
    gpu.synchronize()?;
    let name = if portable { "portable" } else { "best" };
    print!("delta net {name:<9} {prompts:>3} x {new:>5}            : {:>9.1} us; alone:", time * 1e6);
    for (i, launched) in launches.iter().enumerate() {
        let seconds = events[i + 1].seconds_since(&events[i])?;
        let (bytes, flops) = (launched.cost.bytes as f64, launched.cost.flops as f64);
        print!(
            " {} {:.1} us ({:.2} TB/s, {:.0} TFLOP/s)",
            launched.name,
            seconds * 1e6,
            bytes / seconds / 1e12,
            flops / seconds / 1e12
        );
    }
    println!();
    Ok(())
}

fn main() {
    let gpu = match Gpu::open(0) {
        Ok(gpu) => gpu,
        Err(error) => return println!("SKIPPED: {error}"),
    };
    let all = || -> Result<()> {
        for portable in [false, true] {
            attention(&gpu, 256, 0, 1, portable)?;
            attention(&gpu, 256, 0, 8, portable)?;
            attention(&gpu, 2048, 0, 1, portable)?;
            attention(&gpu, 8192, 0, 1, portable)?;
            attention(&gpu, 8192, 19808, 1, portable)?;
            delta(&gpu, 256, 1, portable)?;
            delta(&gpu, 256, 8, portable)?;
            delta(&gpu, 2048, 1, portable)?;
            delta(&gpu, 8192, 1, portable)?;
        }
        Ok(())
    };
    if let Err(error) = all() {
        println!("{error}; {}", error.hint());
        std::process::exit(1);
    }
}
