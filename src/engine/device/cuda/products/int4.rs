//! Products with 4-bit weights (cuda/int4.cu, cuda/int4_ring_hopper.cu, cuda/int4_batch_hopper.cu), and the choice among them.
//!
//! | rows of x | product |
//! |---|---|
//! | 1 to 8 on Hopper, groups of 128 | `int4_ring_1` and `_8` ([`int4_ring`](super::int4_ring)): x stays in registers, W passes through a ring |
//! | 1 to 8 elsewhere, and where the ring has no cut | `int4_stream_8*`: memory-bound, straight to registers |
//! | 9 to 64 elsewhere | `int4_stream_16` and `_32`, 32 rows at a time |
//! | all others on Hopper | `int4_batch_*` ([`int4_batch`](super::int4_batch)): weights dequantised on their way to warpgroup products |
//! | more elsewhere | `int4_expand` and cuBLASLt, or without it, from 33 rows, `int4_tile_*` |

use super::int4_batch::Int4BatchProducts;
use super::int4_ring::Int4RingProducts;
use super::{Job, Products, parts_for};
use crate::engine::device::cuda::driver::{DeviceBuffer, Gpu, Kernel};
use crate::engine::device::cuda::launch::{Arg, Launch, Stream};
use crate::engine::device::cuda::matrix::{Matrix, MatrixFormat, Output};
use crate::engine::device::cuda::units;
use crate::{Error, Result};

/// Rows from which expanding is faster than reading the matrix once for each 32 rows.
const EXPAND_ROWS: usize = 65;
/// Rows from which `int4_batch_*` add to the residual stream: with fewer, a matrix as narrow as the stream has too few tiles to
/// fill the GPU without parts of k.
const ADD_ROWS: usize = 769;
/// `int4_stream_8` makes two units of 16 rows in a thread block; where the output takes no parts and units are fewer than this,
/// its thread blocks are too few to end evenly, and `int4_stream_8_short` with a quarter of the work in each is faster.
const FEW_UNITS: usize = 1024;

/// Shared memory of `int4_tile_*`: four stages of that many rows of 128 bytes and eight units of 512.
const fn tile_shared(rows: u32) -> u32 {
    4 * (rows * 128 + 8 * 512)
}

pub(super) struct Int4Products {
    ring: Option<Int4RingProducts>,
    few: Kernel,
    short: Kernel,
    small_groups: Kernel,
    /// To 16 and 32 rows.
    stream: [Kernel; 2],
    batch: Option<Int4BatchProducts>,
    tile: [Kernel; 2],
    expand: Kernel,
    /// fp16 room for the largest 4-bit matrix, where it is expanded for cuBLASLt.
    expanded: Option<DeviceBuffer>,
}

impl Int4Products {
    /// With room to expand a matrix of `elements` (0: none is expanded), where that is done. `portable`: none but kernels for every GPU.
    pub fn new(gpu: &Gpu, elements: usize, portable: bool) -> Result<Self> {
        let unit = &units::INT4;
        let hopper = !portable && units::INT4_BATCH.supports(gpu.facts().capability);
        Ok(Self {
            ring: if hopper { Some(Int4RingProducts::new(gpu)?) } else { None },
            few: gpu.kernel(unit, "int4_stream_8")?,
            short: gpu.kernel(unit, "int4_stream_8_short")?,
            small_groups: gpu.kernel(unit, "int4_stream_8_small_groups")?,
            stream: [gpu.kernel(unit, "int4_stream_16")?, gpu.kernel(unit, "int4_stream_32")?],
            batch: if hopper { Some(Int4BatchProducts::new(gpu)?) } else { None },
            tile: [gpu.kernel(unit, "int4_tile_64")?, gpu.kernel(unit, "int4_tile_128")?],
            expand: gpu.kernel(unit, "int4_expand")?,
            expanded: if elements > 0 && !hopper { Some(gpu.allocate(2 * elements as u64)?) } else { None },
        })
    }

    /// Whether products of so many rows add to the residual stream themselves.
    pub fn adds(&self, rows: usize) -> bool {
        rows >= ADD_ROWS && self.batch.is_some()
    }
}

impl Products {
    /// # Safety
    /// As [`Self::launch`].
    pub(super) unsafe fn int4(&self, stream: &Stream, job: Job) -> Result<usize> {
        let Job { rows, w, .. } = job;
        let MatrixFormat::Int4 { group, .. } = w.format else {
            return Err(Error::bug("a 16-bit matrix given as 4-bit"));
        };
        let Some(int4) = &self.int4 else {
            return Err(Error::bug("a 4-bit matrix, and products made without"));
        };
        let expanded = int4.expanded.as_ref().filter(|room| room.bytes() >= (2 * w.rows * w.cols) as u64);
        let library = self.library.as_ref().zip(expanded);
        // SAFETY: the caller's promise; `expanded` holds the matrix, and the stream orders its users.
        unsafe {
            if let Some(ring) = &int4.ring
                && let Some(parts) = ring.launch(stream, job, None)?
            {
                return Ok(parts);
            }
            if rows <= 8 {
                return self.int4_few(stream, int4, group, job);
            }
            if let Some(batch) = &int4.batch {
                return batch.launch(stream, job);
            }
            match library {
                Some((library, expanded)) if rows >= EXPAND_ROWS => {
                    self.int4_expand(stream, &int4.expand, w, expanded)?;
                    self.by_library(stream, library, expanded.pointer(), job)
                }
                None if rows > 32 => self.many_rows(stream, &int4.tile, tile_shared, job),
                _ => {
                    let mut parts = 1;
                    for first in (0..rows).step_by(32) {
                        let piece = Job {
                            x: job.x + 2 * (first * w.cols) as u64,
                            rows: (rows - first).min(32),
                            w,
                            output: from_row(job.output, first, w.rows),
                        };
                        let units = w.rows / 16;
                        parts = parts_for(units, w.cols / 64, 8, self.multiprocessors, job.output);
                        let launch = Launch::grid([units as u32, parts as u32, 1], 256);
                        let kernel = &int4.stream[usize::from(piece.rows > 16)];
                        self.put(stream, kernel, launch, piece, parts)?;
                    }
                    Ok(parts)
                }
            }
        }
    }

    /// Queues the products of the same x with a 4-bit matrix and a small fp16 one as one launch, where there is a kernel for that;
    /// returns whether it did.
    ///
    /// # Errors
    /// A launch that the driver refuses, in its words.
    ///
    /// # Safety
    /// As [`Self::launch`], for both.
    pub unsafe fn launch_both(
        &self,
        stream: &Stream,
        (x, rows): (u64, usize),
        (w, output): (&Matrix, Output),
        (small, small_output): (&Matrix, Output),
    ) -> Result<bool> {
        let Some(ring) = self.int4.as_ref().and_then(|int4| int4.ring.as_ref()) else { return Ok(false) };
        if self.small(rows, small).is_none() {
            return Ok(false);
        }
        let job = Job { x, rows, w, output };
        let beside = Job { x, rows, w: small, output: small_output };
        // SAFETY: the caller's promise.
        Ok(unsafe { ring.launch(stream, job, Some(beside))? }.is_some())
    }

    /// # Safety
    /// As [`Self::launch`].
    unsafe fn int4_few(&self, stream: &Stream, int4: &Int4Products, group: usize, job: Job) -> Result<usize> {
        let units = job.w.rows / 16;
        let parted = matches!(job.output, Output::Partials { .. });
        let (kernel, threads, together) = if group < 128 {
            (&int4.small_groups, 256, 1)
        } else if !parted && units < FEW_UNITS {
            (&int4.short, 128, 1)
        } else {
            (&int4.few, 256, 2)
        };
        let blocks = units.div_ceil(together);
        let parts = parts_for(blocks, job.w.cols / 64, 16, self.multiprocessors, job.output);
        let launch = Launch::grid([blocks as u32, parts as u32, 1], threads);
        // SAFETY: the caller's promise; the shape is one that `int4::empty` makes.
        unsafe { self.put(stream, kernel, launch, job, parts)? };
        Ok(parts)
    }

    /// W in fp16, row-major, to `to`.
    ///
    /// # Safety
    /// `to` holds the matrix until the work is done.
    unsafe fn int4_expand(
        &self,
        stream: &Stream,
        kernel: &Kernel,
        w: &Matrix,
        to: &DeviceBuffer,
    ) -> Result<()> {
        let MatrixFormat::Int4 { group, zero_points } = w.format else {
            return Err(Error::bug("a 16-bit matrix given as 4-bit"));
        };
        let launch = Launch::grid([(w.cols / 64).div_ceil(8) as u32, (w.rows / 16) as u32, 1], 256);
        let bytes = w.bytes() + (2 * w.rows * w.cols) as u64;
        let args: [Arg; 7] = [
            (&w.weights).into(),
            w.scales.as_ref().map_or(0, DeviceBuffer::pointer).into(),
            to.into(),
            (w.rows as u32).into(),
            (w.cols as u32).into(),
            (group as u32).into(),
            u32::from(zero_points).into(),
        ];
        // SAFETY: the kernel's parameters in order; the caller's promise.
        unsafe { stream.launch(kernel, launch.overlapping().cost(bytes, 0), &args) }
    }
}

/// The same output from row `first` on.
fn from_row(output: Output, first: usize, n: usize) -> Output {
    let down = |to: u64, stride: usize, element: usize| to + (first * stride * element) as u64;
    match output {
        Output::Half { to, stride } => Output::Half { to: down(to, stride, 2), stride },
        Output::Float { to, stride } => Output::Float { to: down(to, stride, 4), stride },
        Output::SiluMul { to, stride } => Output::SiluMul { to: down(to, stride, 2), stride },
        Output::Partials { to, part_stride, max_parts } => {
            Output::Partials { to: down(to, n, 4), part_stride, max_parts }
        }
        Output::Residual { to } => Output::Residual { to: down(to, n, 4) },
        Output::Best { .. } => output,
    }
}
