//! The GPU's ceilings, measured once: read bandwidth, copy bandwidth, dense fp16 rate, cost of a launch.
//!
//! Each is the best of several runs on data far larger than the L2: a ceiling is what the hardware reached, so the best
//! run is the right one. The dense rate is that of tensor instructions on operands that never leave the multiprocessor,
//! noise rather than zeros, run long enough for the power limit to show.

use super::driver::{Event, Gpu};
use super::launch::{Launch, Stream};
use super::units;
use crate::engine::account::Ceilings;
use crate::{Error, Result};

const RUNS: usize = 8;

/// Measures all ceilings by kernels of their own.
///
/// # Errors
/// A kernel that does not compile or load; no memory; a failure of the driver.
pub fn measure(gpu: &Gpu) -> Result<Ceilings> {
    let stream = Stream::new(gpu)?;
    let facts = gpu.facts();
    let (free, _) = gpu.memory()?;
    // Two buffers of 2 GiB, less on a small or full GPU; well beyond the L2 all the same.
    let bytes = (2u64 << 30).min(free / 4) & !0xfff;
    if bytes < 4 * facts.l2_bytes {
        return Err(Error::failed(
            format!("{free} bytes of GPU memory are free, too few to measure its bandwidth"),
            "end what else uses the GPU (nvidia-smi)",
        ));
    }
    let (from, to) = (gpu.allocate_zeroed(bytes)?, gpu.allocate(bytes)?);
    let fill = gpu.kernel(&units::WEIGHTS, "weights_synthetic")?;
    let cols = 1024u32;
    let place = [u32::MAX, 0, 0];
    let args = [
        (&from).into(),
        0u64.into(),
        (bytes / 2).into(),
        cols.into(),
        super::launch::Arg::Struct(super::launch::bytes_of(&place)),
        1u32.into(),
        2u32.into(),
        1e-7f32.into(),
        0i32.into(),
    ];
    // SAFETY: the kernel's parameters in order; `from` holds bytes / 2 halves in rows of 1,024.
    unsafe { stream.launch(&fill, Launch::new((bytes / 16).div_ceil(256) as u32, 256), &args)? };

    let vectors = bytes / 16;
    let read = gpu.kernel(&units::PROBE, "probe_read")?;
    let copy = gpu.kernel(&units::PROBE, "probe_copy")?;
    let mut read_s = f64::INFINITY;
    let mut copy_s = f64::INFINITY;
    for blocks_each in [2, 4, 8, 16] {
        let launch = Launch::new(facts.multiprocessors * blocks_each, 512);
        let read_args = [(&from).into(), vectors.into(), (&to).into()];
        let copy_args = [(&from).into(), (&to).into(), vectors.into()];
        // SAFETY: the kernels' parameters in order; both buffers hold `vectors` 16-byte words.
        unsafe {
            read_s = read_s.min(best(gpu, &stream, || stream.launch(&read, launch, &read_args))?);
            copy_s = copy_s.min(best(gpu, &stream, || stream.launch(&copy, launch, &copy_args))?);
        }
    }
    Ok(Ceilings {
        read_bytes_per_s: bytes as f64 / read_s,
        copy_bytes_per_s: 2.0 * bytes as f64 / copy_s,
        flops_per_s: dense_rate(gpu, &stream)?,
        launch_s: launch_cost(gpu, &stream)?,
        measured: true,
    })
}

/// Least time of `work`, by events around it.
fn best(gpu: &Gpu, stream: &Stream, work: impl Fn() -> Result<()>) -> Result<f64> {
    let (start, end) = (Event::new(gpu)?, Event::new(gpu)?);
    let mut least = f64::INFINITY;
    for _ in 0..RUNS {
        stream.record(&start)?;
        work()?;
        stream.record(&end)?;
        end.synchronize()?;
        least = least.min(end.seconds_since(&start)?);
    }
    Ok(least)
}

fn dense_rate(gpu: &Gpu, stream: &Stream) -> Result<f64> {
    let facts = gpu.facts();
    let out = gpu.allocate(16)?;
    let warpgroup = facts.capability == 90;
    let (name, blocks_each, flops_a_round) = if warpgroup {
        // Two warpgroups of four products.
        ("probe_warpgroup", 1, 2.0 * 4.0 * 2.0 * 64.0 * 256.0 * 16.0)
    } else {
        // Eight warps of sixteen products.
        ("probe_tensor", 2, 8.0 * 16.0 * 2.0 * 16.0 * 8.0 * 16.0)
    };
    let kernel = gpu.kernel(&units::PROBE, name)?;
    let rounds = if warpgroup { 40_000 } else { 60_000 };
    let blocks = facts.multiprocessors * blocks_each;
    let args = [(&out).into(), rounds.into()];
    // SAFETY: the kernel's parameters in order; it writes at most one float.
    let seconds = best(gpu, stream, || unsafe { stream.launch(&kernel, Launch::new(blocks, 256), &args) })?;
    Ok(f64::from(blocks) * f64::from(rounds) * flops_a_round / seconds)
}

/// What one more empty launch adds to a captured graph.
fn launch_cost(gpu: &Gpu, stream: &Stream) -> Result<f64> {
    let kernel = gpu.kernel(&units::PROBE, "probe_empty")?;
    let graph_of = |launches: usize| {
        // SAFETY: nothing is pointed to.
        unsafe {
            stream.capture(|| {
                for _ in 0..launches {
                    // SAFETY: a kernel without parameters.
                    stream.launch(&kernel, Launch::new(1, 32), &[])?;
                }
                Ok(())
            })
        }
    };
    let (few, many) = (graph_of(100)?, graph_of(600)?);
    let few_s = best(gpu, stream, || stream.launch_graph(&few))?;
    let many_s = best(gpu, stream, || stream.launch_graph(&many))?;
    Ok(((many_s - few_s) / 500.0).max(0.0))
}
