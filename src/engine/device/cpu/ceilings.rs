//! What this CPU can do at most with the given threads: read and copy bandwidth, multiply-add rate.
//!
//! A figure is the best over several kernels, sizes and kinds of page, since a ceiling is what anything could reach.

use std::sync::atomic::{Ordering, compiler_fence};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use super::gemm::Peak;
use super::isa::{Arch, Isa, LANES, Work};
use super::memory::{Buffer, Shared};
use super::model::lock;
use super::pool::{Pool, prefetch_line, prefetch_line_to_l2};
use crate::Result;
use crate::engine::account::Ceilings;

/// Sizes of the block read, in MiB, and whether it lies on huge pages: well beyond any L3, and those of small models, so
/// that a step's share can't pass 1.
const READ_BLOCKS: [(usize, bool); 3] = [(512, true), (256, true), (256, false)];
const PASSES: usize = 12;
/// Passes by which a short measurement chooses its reader.
const CHOOSING_PASSES: usize = 2;
/// Bytes that a short measurement reads: as many as a step of the model, between these.
pub const SHORT_BLOCK: std::ops::RangeInclusive<usize> = 8 << 20..=256 << 20;
/// Threads take the block in parts of this size, so that a busy neighbour costs its share of time and no more.
const PART_BYTES: usize = 1 << 20;

/// Reads a slice; the result depends on all of it.
type ReadFn = fn(Isa, &[f32]) -> f32;

/// As many streams side by side as (1, 2, 4 or 8), prefetched or left to the hardware. Which is best depends on the CPU.
const READERS: [ReadFn; 8] = [
    |isa, part| isa.run(ReadAll::<1, 0>(part)),
    |isa, part| isa.run(ReadAll::<2, 0>(part)),
    |isa, part| isa.run(ReadAll::<4, 0>(part)),
    |isa, part| isa.run(ReadAll::<8, 0>(part)),
    |isa, part| isa.run(ReadAll::<1, AHEAD>(part)),
    |isa, part| isa.run(ReadAll::<2, AHEAD>(part)),
    |isa, part| isa.run(ReadAll::<4, AHEAD>(part)),
    |isa, part| isa.run(ReadAll::<1, FAR>(part)),
];

/// Measures all ceilings; about two seconds.
///
/// # Errors
/// Memory that the system does not give.
pub fn measure(pool: &mut Pool, isa: Isa, peak: &Peak) -> Result<Ceilings> {
    let mut read = 0f64;
    for (mib, huge) in READ_BLOCKS {
        let buffer =
            if huge { Buffer::zeroed(mib << 20)? } else { Buffer::zeroed_on_small_pages(mib << 20)? };
        fill(pool, &buffer);
        let mut rates = [const { Vec::new() }; READERS.len()];
        for _ in 0..PASSES {
            for (rates, reader) in rates.iter_mut().zip(READERS) {
                rates.push(read_rate(pool, isa, reader, &buffer));
            }
        }
        read = rates.iter_mut().fold(read, |read, rates| read.max(upper_quartile(rates)));
    }
    let (from, to) = (Buffer::zeroed(256 << 20)?, Buffer::zeroed(256 << 20)?);
    fill(pool, &from);
    fill(pool, &to);
    let copy = upper_quartile(&mut (0..PASSES).map(|_| copy_rate(pool, &from, &to)).collect::<Vec<_>>());
    let flops = (0..PASSES).map(|_| peak.flops_per_s(pool)).fold(0.0, f64::max);
    Ok(Ceilings {
        read_bytes_per_s: read,
        copy_bytes_per_s: copy,
        flops_per_s: flops,
        launch_s: 0.0,
        measured: true,
    })
}

/// Read bandwidth of a block of `bytes` (within [`SHORT_BLOCK`], on the pages that weights get) and multiply-add rate, at
/// this moment: a sixth of a second at 46 GB/s. The block is given back, so that it is never in a plan's way.
///
/// A model that a step finds in the L3 in part is set beside a block that is found there in the same part.
///
/// # Errors
/// Memory that the system does not give.
pub fn now(pool: &mut Pool, isa: Isa, peak: &Peak, bytes: usize) -> Result<(f64, f64)> {
    let bytes = bytes.clamp(*SHORT_BLOCK.start(), *SHORT_BLOCK.end()) / PART_BYTES * PART_BYTES;
    let buffer = Buffer::zeroed(bytes)?;
    fill(pool, &buffer);
    let best_of_a_few = |pool: &mut Pool, reader: ReadFn| {
        (0..CHOOSING_PASSES).map(|_| read_rate(pool, isa, reader, &buffer)).fold(0.0, f64::max)
    };
    let rates = READERS.map(|reader| (reader, best_of_a_few(pool, reader)));
    let (reader, _) = rates.into_iter().max_by(|a, b| a.1.total_cmp(&b.1)).unwrap_or((READERS[0], 0.0));
    let mut rates: Vec<f64> = (0..PASSES).map(|_| read_rate(pool, isa, reader, &buffer)).collect();
    let flops = (0..PASSES).map(|_| peak.flops_per_s(pool)).fold(0.0, f64::max);
    Ok((upper_quartile(&mut rates), flops))
}

/// A block of a model's size on huge pages, to be read now and again: the ceiling of what ran right before and after.
pub struct Probe {
    pool: Arc<Mutex<Pool>>,
    isa: Isa,
    buffer: Buffer,
    reader: ReadFn,
    peak: Peak,
}

impl Probe {
    /// # Errors
    /// The system refuses the memory.
    pub fn new(pool: &Arc<Mutex<Pool>>, isa: Isa, peak: &Peak, bytes: usize) -> Result<Self> {
        let buffer = Buffer::zeroed(bytes)?;
        let mut guard = lock(pool);
        fill(&mut guard, &buffer);
        let mut rates = READERS.map(|reader| (reader, Vec::new()));
        for _ in 0..PASSES {
            for (reader, rates) in &mut rates {
                rates.push(read_rate(&mut guard, isa, *reader, &buffer));
            }
        }
        let best = rates.into_iter().map(|(reader, mut rates)| (reader, upper_quartile(&mut rates)));
        let (reader, _) = best.max_by(|a, b| a.1.total_cmp(&b.1)).unwrap_or((READERS[0], 0.0));
        drop(guard);
        Ok(Self { pool: Arc::clone(pool), isa, buffer, reader, peak: peak.clone() })
    }

    /// Bytes a second of one pass over the block, by the reader that was best when the probe was made.
    pub fn read_bytes_per_s(&self) -> f64 {
        read_rate(&mut lock(&self.pool), self.isa, self.reader, &self.buffer)
    }

    /// The most FLOPs a second of the model's products; about a millisecond.
    pub fn flops_per_s(&self) -> f64 {
        self.peak.flops_per_s(&mut lock(&self.pool))
    }
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

/// Reads a slice as `S` streams side by side, prefetching `A` floats ahead of each unless `A` is 0.
struct ReadAll<'a, const S: usize, const A: usize>(&'a [f32]);

/// 4 KB, in f32 values.
const AHEAD: usize = 1024;
/// 16 KB, at which lines are asked for into the L2, and into the L1 a quarter of it ahead: best on the Intel CPU measured.
const FAR: usize = 4096;

impl<const S: usize, const A: usize> Work for ReadAll<'_, S, A> {
    type Output = f32;

    #[inline(always)]
    fn run<X: Arch>(self) -> f32 {
        let stream = self.0.len() / S;
        let mut sums = [[0f32; LANES]; 4];
        for at in (0..stream / (4 * LANES) * (4 * LANES)).step_by(4 * LANES) {
            for s in 0..S {
                let chunk = &self.0[s * stream + at..][..4 * LANES];
                for (part, sum) in sums.iter_mut().enumerate() {
                    let line = chunk.as_ptr().wrapping_add(part * LANES);
                    if A == FAR {
                        prefetch_line_to_l2(line.wrapping_add(FAR).cast());
                        prefetch_line(line.wrapping_add(FAR / 4).cast());
                    } else if A > 0 {
                        prefetch_line(line.wrapping_add(A).cast());
                    }
                    if A > 0 {
                        // One line at a time: gathered, as a compiler would have them, prefetches keep loads waiting.
                        compiler_fence(Ordering::SeqCst);
                    }
                    for lane in 0..LANES {
                        sum[lane] += chunk[part * LANES + lane];
                    }
                }
            }
        }
        sums.iter().flatten().sum()
    }
}

fn read_rate(pool: &mut Pool, isa: Isa, reader: ReadFn, buffer: &Buffer) -> f64 {
    let base = Shared(buffer.as_mut_ptr().cast::<f32>());
    let parts = buffer.len() / PART_BYTES;
    let start = Instant::now();
    pool.split(parts, 1, &|range, _| {
        for part in range {
            // SAFETY: the buffer is only read.
            let part = unsafe { &*base.part(part * PART_BYTES / 4, PART_BYTES / 4) };
            std::hint::black_box(reader(isa, part));
        }
    });
    (parts * PART_BYTES) as f64 / start.elapsed().as_secs_f64()
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
