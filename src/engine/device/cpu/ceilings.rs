//! What this CPU can do at most with the given threads: read and copy bandwidth, multiply-add rate.
//!
//! A figure is the best over several kernels and sizes, on huge pages where there are any, since a ceiling is what anything
//! could reach.

use std::time::Instant;

use super::gemm;
use super::isa::{Arch, Isa, LANES, Work};
use super::memory::{Buffer, Shared};
use super::pool::Pool;
use crate::Result;
use crate::engine::account::Ceilings;
use crate::engine::config::CpuMath;

/// Sizes of the block read, in MiB: well beyond any L3, and those of small models, so that a step's share can't pass 1.
const READ_MIB: [usize; 2] = [512, 256];
const PASSES: usize = 12;

/// Measures all ceilings; about two seconds.
pub fn measure(pool: &mut Pool, isa: Isa, math: CpuMath) -> Result<Ceilings> {
    let mut read = 0f64;
    for mib in READ_MIB {
        // Huge pages where the system gives them; nothing reads faster from small ones.
        let buffer = Buffer::zeroed(mib << 20)?;
        fill(pool, &buffer);
        let mut rates = [const { Vec::new() }; 3];
        for _ in 0..PASSES {
            rates[0].push(read_rate::<1>(pool, isa, &buffer));
            rates[1].push(read_rate::<2>(pool, isa, &buffer));
            rates[2].push(read_rate::<4>(pool, isa, &buffer));
        }
        read = rates.iter_mut().fold(read, |read, rates| read.max(upper_quartile(rates)));
    }
    let (from, to) = (Buffer::zeroed(256 << 20)?, Buffer::zeroed(256 << 20)?);
    fill(pool, &from);
    fill(pool, &to);
    let copy = upper_quartile(&mut (0..PASSES).map(|_| copy_rate(pool, &from, &to)).collect::<Vec<_>>());
    let flops = (0..PASSES).map(|_| flop_rate(pool, isa, math)).fold(0.0, f64::max);
    Ok(Ceilings {
        read_bytes_per_s: read,
        copy_bytes_per_s: copy,
        flops_per_s: flops,
        launch_s: 0.0,
        measured: true,
    })
}

/// What a kernel sustains: disturbed passes lie below, and on a shared host the memory is at times half as fast again for a
/// moment, which a step of the engine cannot count on.
fn upper_quartile(rates: &mut [f64]) -> f64 {
    rates.sort_by(f64::total_cmp);
    rates[rates.len() * 3 / 4]
}

/// Touches every page from the thread that will read it.
fn fill(pool: &mut Pool, buffer: &Buffer) {
    let base = Shared(buffer.as_mut_ptr());
    for_each_share(pool, buffer.len(), &|start, len| {
        // SAFETY: shares are disjoint parts of the buffer.
        unsafe { base.part(start, len) }.fill(1);
    });
}

fn for_each_share(pool: &mut Pool, len: usize, body: &(dyn Fn(usize, usize) + Sync)) {
    let threads = pool.threads();
    let share = (len / threads) & !4095;
    pool.run(&|thread| body(thread * share, share));
}

/// Reads a slice as `S` streams side by side.
struct ReadAll<'a, const S: usize>(&'a [f32]);

/// How far ahead of each stream lines are prefetched, floats.
const AHEAD: usize = 1024;

impl<const S: usize> Work for ReadAll<'_, S> {
    type Output = f32;

    #[inline(always)]
    fn run<A: Arch>(self) -> f32 {
        let stream = self.0.len() / S;
        let mut sums = [[0f32; LANES]; 4];
        for at in (0..stream / (4 * LANES) * (4 * LANES)).step_by(4 * LANES) {
            for s in 0..S {
                let chunk = &self.0[s * stream + at..][..4 * LANES];
                for (part, sum) in sums.iter_mut().enumerate() {
                    prefetch(chunk.as_ptr().wrapping_add(AHEAD + part * LANES));
                    for lane in 0..LANES {
                        sum[lane] += chunk[part * LANES + lane];
                    }
                }
            }
        }
        sums.iter().flatten().sum()
    }
}

#[inline(always)]
fn prefetch(at: *const f32) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch never faults, wherever it points.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

fn read_rate<const S: usize>(pool: &mut Pool, isa: Isa, buffer: &Buffer) -> f64 {
    let base = Shared(buffer.as_mut_ptr().cast::<f32>());
    let start = Instant::now();
    for_each_share(pool, buffer.len(), &|start, len| {
        // SAFETY: the buffer is only read.
        let part = unsafe { &*base.part(start / 4, len / 4) };
        std::hint::black_box(isa.run(ReadAll::<S>(part)));
    });
    let read = pool.threads() * ((buffer.len() / pool.threads()) & !4095);
    read as f64 / start.elapsed().as_secs_f64()
}

fn copy_rate(pool: &mut Pool, from: &Buffer, to: &Buffer) -> f64 {
    let (source, target) = (Shared(from.as_mut_ptr()), Shared(to.as_mut_ptr()));
    let start = Instant::now();
    for_each_share(pool, from.len(), &|start, len| {
        // SAFETY: shares are disjoint parts of two buffers.
        unsafe { target.part(start, len).copy_from_slice(source.part(start, len)) };
    });
    2.0 * from.len() as f64 / start.elapsed().as_secs_f64()
}

/// Multiply-adds a second, as FLOPs, of the widest arithmetic the engine uses here: as many independent sums as hide the
/// latency of the multipliers.
fn flop_rate(pool: &mut Pool, isa: Isa, math: CpuMath) -> f64 {
    let rounds = 400_000;
    let threads = pool.threads();
    let flops_per_round = gemm::multiply_add_flops(isa, math);
    let start = Instant::now();
    pool.run(&|_| {
        std::hint::black_box(gemm::multiply_add_rounds(isa, math, rounds));
    });
    (rounds * threads * flops_per_round) as f64 / start.elapsed().as_secs_f64()
}
