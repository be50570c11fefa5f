//! Launches of the products of few rows with 4-bit weights on Hopper (cuda/int4_ring_hopper.cu), and how each is cut into blocks.

use super::{Arguments, Job, arguments, cost};
use crate::Result;
use crate::engine::device::cuda::driver::plain::Plain;
use crate::engine::device::cuda::driver::{Gpu, Kernel};
use crate::engine::device::cuda::launch::{Arg, Launch, Stream, bytes_of};
use crate::engine::device::cuda::matrix::{MatrixFormat, Output, UNIT};
use crate::engine::device::cuda::units;

/// Columns of k that share a scale, and of a stage.
pub const GROUP: usize = 128;
/// Packed bytes of a unit of 16 rows of W and a stage; of its scales and zero points.
const STAGE_BYTES: usize = UNIT * GROUP / 2;
const SCALE_BYTES: usize = 40;
/// Units whose sums may wait in shared memory: `MEETINGS` of the kernels.
const MEETINGS: usize = 4;
/// Most units of a block: their scales stay in shared memory.
const MOST_UNITS: usize = 48;
/// Most units of a matrix beside W, and the bytes between its rows in shared memory (`BESIDE_PAD`).
const MOST_BESIDE: usize = 8;
const BESIDE_PAD: usize = 64;
/// Shared memory of a block besides its barriers.
const ROOM_BYTES: usize = 225 << 10;

/// A block asks for more than half of a multiprocessor's, even where it needs less: with two beside each other the small kernels
/// between products wait for room, and a step takes longer though more of W is asked for early.
const ALONE_BYTES: usize = 118 << 10;
/// Pieces of a warp's ring (`SLOTS` of the kernels) for one row and for more. A block stays within the 132 KB that the hardware can set
/// apart beside 124 of L1, with its barriers and the kilobyte that is reserved: where less L1 is left, a step takes longer.
const SLOTS: [usize; 2] = [3, 2];

/// One row of x, and to [`ROWS`].
pub(in crate::engine::device::cuda) const NAMES: &[&str] = &["int4_ring_1", "int4_ring_8"];
const ROWS: usize = 8;
/// Warps of a block, and stages of k that each keeps x of.
const WARPS: usize = 8;
const WARP_STAGES: usize = 4;

/// `Int4Ring` of cuda/int4_ring_hopper.cu.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct RingArguments {
    product: Arguments,
    beside: Arguments,
    unit_room: u32,
    group_room: u32,
    blocks: u32,
    unused: u32,
}

// SAFETY: integers only, and each field begins where the one before it ends: no padding.
unsafe impl Plain for RingArguments {}

/// A product's kernel and blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Cut {
    /// Blocks along W, and parts of k.
    blocks: usize,
    parts: usize,
    /// Most units of a block, and stages of a part.
    units: usize,
    stages: usize,
    /// Pieces of a warp's ring.
    slots: usize,
    /// Columns of the matrix beside W; 0: none.
    beside: usize,
}

impl Cut {
    fn shared_bytes(&self) -> usize {
        let sums = WARPS * 512;
        let ring = WARPS * self.slots * WARP_STAGES * STAGE_BYTES;
        let beside = if self.beside > 0 { UNIT * (2 * self.beside + BESIDE_PAD) } else { 0 };
        (ring + self.units * self.stages * SCALE_BYTES + MEETINGS * sums).max(beside).max(ALONE_BYTES)
    }
}

/// One block for each multiprocessor, or as few for each as their units allow, in the fewest parts of k whose x the warps can
/// keep; `None` where the output does not take them, or parts do not hold pairs of groups. The blocks of a matrix of `beside` units
/// beside W have multiprocessors of their own.
fn cut(
    rows: usize,
    (n, k): (usize, usize),
    max_parts: usize,
    beside: usize,
    multiprocessors: usize,
) -> Option<Cut> {
    let stages = k / GROUP;
    let fewest = stages.div_ceil(WARPS * WARP_STAGES);
    let parts = (fewest..=max_parts).find(|&parts| parts > 0 && stages.is_multiple_of(2 * parts))?;
    let units = n / UNIT;
    let at_once = (multiprocessors.saturating_sub(beside) / parts).max(1);
    let blocks = (at_once * units.div_ceil(at_once * MOST_UNITS)).min(units);
    let beside_cols = if beside > 0 { k } else { 0 };
    let (units, stages) = (units.div_ceil(blocks), stages / parts);
    let slots = SLOTS[usize::from(rows > 1)];
    Some(Cut { blocks, parts, units, stages, slots, beside: beside_cols })
        .filter(|cut| rows <= ROWS && k.is_multiple_of(GROUP) && cut.shared_bytes() <= ROOM_BYTES)
        .filter(|_| beside == 0 || (parts == 1 && beside <= MOST_BESIDE))
}

pub(super) struct Int4RingProducts {
    kernels: [Kernel; 2],
    multiprocessors: usize,
}

impl Int4RingProducts {
    pub fn new(gpu: &Gpu) -> Result<Self> {
        Ok(Self {
            kernels: [gpu.kernel(&units::INT4_RING, NAMES[0])?, gpu.kernel(&units::INT4_RING, NAMES[1])?],
            multiprocessors: gpu.facts().multiprocessors as usize,
        })
    }

    /// Queues the product, any output of few rows, and returns the parts written; `None` where these kernels do not have it. With it
    /// that of the same rows of x and a small fp16 matrix, any output but parts.
    ///
    /// # Safety
    /// As [`super::Products::launch`], for both.
    pub unsafe fn launch(&self, stream: &Stream, job: Job, beside: Option<Job>) -> Result<Option<usize>> {
        let Job { rows, w, output, .. } = job;
        let max_parts = if let Output::Partials { max_parts, .. } = output { max_parts } else { 1 };
        let beside_units = beside.map_or(0, |beside| beside.w.rows / UNIT);
        let grouped = matches!(w.format, MatrixFormat::Int4 { group: GROUP, .. });
        let Some(cut) =
            cut(rows, (w.rows, w.cols), max_parts, beside_units, self.multiprocessors).filter(|_| grouped)
        else {
            return Ok(None);
        };
        let arguments = RingArguments {
            product: arguments(job, cut.parts),
            beside: beside.map_or_else(Arguments::default, |beside| arguments(beside, 1)),
            unit_room: cut.units as u32,
            group_room: cut.stages as u32,
            blocks: cut.blocks as u32,
            unused: 0,
        };
        let grid = [cut.blocks + beside_units, cut.parts, 1].map(|blocks| blocks as u32);
        let launch = Launch::grid(grid, 32 * WARPS as u32).shared(cut.shared_bytes() as u32).overlapping();
        let costs = [Some(cost(job, cut.parts)), beside.map(|beside| cost(beside, 1))].into_iter().flatten();
        let (bytes, flops) = costs.fold((0, 0), |sum, cost| (sum.0 + cost.bytes, sum.1 + cost.flops));
        // SAFETY: the one parameter of these kernels is this structure; pointers are the caller's promise.
        unsafe {
            stream.launch(
                &self.kernels[usize::from(job.rows > 1)],
                launch.cost(bytes, flops),
                &[Arg::Struct(bytes_of(&[arguments]))],
            )?
        };
        Ok(Some(cut.parts))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_agree_with_the_kernels() {
        assert_eq!(size_of::<RingArguments>(), 2 * size_of::<Arguments>() + 16);
        assert_eq!(size_of::<RingArguments>() % 8, 0);
    }

    /// 132 KB less what the hardware keeps and what the kernels declare.
    const LITTLE_L1: usize = (132 << 10) - 1024 - 1664;

    #[test]
    fn cuts_give_each_multiprocessor_one_block() {
        let of = |rows, n, k, max_parts| cut(rows, (n, k), max_parts, 0, 132).unwrap();
        // The 9B: delta-net input, attention input, gate and up; mixer output, down.
        for (n, k, max_parts, parts) in [
            (12288, 4096, 1, 1),
            (10240, 4096, 1, 1),
            (24576, 4096, 1, 1),
            (4096, 4096, 8, 1),
            (4096, 12288, 8, 3),
        ] {
            for rows in [1, 2, 8] {
                let cut = of(rows, n, k, max_parts);
                assert!(cut.shared_bytes() <= LITTLE_L1, "{cut:?}");
                assert_eq!((cut.blocks * cut.parts, cut.parts), (132, parts), "{cut:?}");
                assert!(2 * cut.shared_bytes() > 228 << 10, "{cut:?}");
            }
        }
        // Four multiprocessors for the gates: the others have six units each, as the most have without.
        let cut = cut(1, (12288, 4096), 1, 4, 132).unwrap();
        assert_eq!((cut.blocks, cut.units), (128, 6));
        assert!((16 * 2 * 4096..=LITTLE_L1).contains(&cut.shared_bytes()));
        // A matrix as large as a head comes in several blocks a multiprocessor.
        let head = of(1, 248_320, 4096, 1);
        assert_eq!((head.blocks, head.units), (3 * 132, 40));
    }

    #[test]
    fn what_has_no_cut_is_left_to_the_other_kernels() {
        assert_eq!(cut(9, (4096, 4096), 1, 0, 132), None);
        assert_eq!(cut(8, (4096, 12288), 1, 0, 132), None);
        assert_eq!(cut(8, (4096, 128), 8, 0, 132), None);
        assert_eq!(cut(8, (4096, 192), 8, 0, 132), None);
        assert_eq!(
            cut(8, (272, 1280), 1, 0, 132).map(|cut| (cut.blocks, cut.units, cut.stages)),
            Some((17, 1, 10))
        );
    }
}
