//! Launches of the products of more than a few rows with 4-bit weights on Hopper (cuda/int4_batch_hopper.cu), and how each is cut
//! into tiles.

use super::{HALF, Job, PARTS, SILU, cost, destination};
use crate::engine::device::cuda::compile::Unit;
use crate::engine::device::cuda::driver::plain::Plain;
use crate::engine::device::cuda::driver::{DeviceBuffer, Gpu, Kernel};
use crate::engine::device::cuda::launch::{Arg, Launch, Stream, bytes_of};
use crate::engine::device::cuda::matrix::{MatrixFormat, Output};
use crate::engine::device::cuda::tensor_map::TensorMap;
use crate::engine::device::cuda::units;
use crate::{Error, Result};

/// Columns of k in a step of the kernels.
const STEP_COLUMNS: usize = 128;
/// Groups of at least so many columns have one scale a step (GROUP_SCALES 1 of the kernels).
const LARGE_GROUP: usize = 128;
/// Shared memory of a block without its barriers, as `ROOM` of the kernels.
const ROOM_BYTES: usize = (227 << 10) - 256;
/// Bytes a nanosecond of sums in parts, written and read again.
const PART_BYTES_PER_NS: usize = 4200;

/// Slots of the ring that a block asks for before the previous kernel has ended, to 128 rows: x, and what the kernels in front
/// still read, would wait behind more.
const AHEAD: u32 = 2;
/// All of them.
const WHOLE_RING: u32 = 16;

/// One kernel, and what its tiles were measured to take (on an H200; how the kernels compare is what counts).
#[derive(Debug)]
struct Shape {
    name: &'static str,
    /// Rows of x in a tile.
    batch: usize,
    /// Warpgroups, of 64 rows of W each.
    groups: usize,
    /// Blocks of a cluster that take neighbouring tiles of W and share x.
    across: usize,
    /// Blocks of a cluster that take parts of k of the same tile, for outputs that are whole.
    deep: usize,
    /// A step of a tile, and what a tile takes besides.
    step_ns: usize,
    tile_ns: usize,
}

const SHAPES: [Shape; 10] = [
    shape("int4_batch_16", (16, 3), (1, 1), (390, 3300)),
    shape("int4_batch_16_deep", (16, 3), (1, 2), (390, 3800)),
    shape("int4_batch_32", (32, 3), (1, 1), (440, 3700)),
    shape("int4_batch_32_deep", (32, 3), (1, 2), (440, 4200)),
    shape("int4_batch_48", (48, 3), (1, 1), (645, 3000)),
    shape("int4_batch_48_deep", (48, 3), (1, 2), (645, 3500)),
    shape("int4_batch_64", (64, 3), (1, 1), (670, 3000)),
    shape("int4_batch_64_deep", (64, 3), (1, 2), (670, 3500)),
    shape("int4_batch_128", (128, 3), (2, 1), (1100, 3000)),
    shape("int4_batch_256", (256, 2), (2, 1), (1360, 3000)),
];

/// The kernels' names.
pub const NAMES: &[&str] = &{
    let mut names = [""; SHAPES.len()];
    let mut index = 0;
    while index < names.len() {
        names[index] = SHAPES[index].name;
        index += 1;
    }
    names
};

const fn shape(
    name: &'static str,
    (batch, groups): (usize, usize),
    (across, deep): (usize, usize),
    (step_ns, tile_ns): (usize, usize),
) -> Shape {
    Shape { name, batch, groups, across, deep, step_ns, tile_ns }
}

impl Shape {
    /// Rows of W that the blocks of a cluster take together.
    fn rows(&self) -> usize {
        64 * self.groups * self.across
    }

    fn cluster(&self) -> usize {
        self.across * self.deep
    }

    fn threads(&self) -> u32 {
        128 * (self.groups as u32 + 1)
    }

    /// Blocks of 64 columns in a slot of the ring.
    fn blocks(&self) -> usize {
        if self.batch <= 128 { 2 } else { 1 }
    }

    /// Rows of x whose sums leave together: of a tile, each block of a cluster that is deep writes its share.
    fn out_rows(&self) -> u32 {
        (self.batch / self.deep) as u32
    }

    /// The ring, the output of each warpgroup, and the barriers: `Ring` of the kernels.
    fn shared_bytes(&self, large_groups: bool) -> usize {
        let units = 4 * self.groups;
        let sets = if large_groups { 1 } else { 2 * self.blocks() };
        let slot = self.blocks() * (128 * self.batch + 512 * units) + 40 * units * sets;
        let out = self.groups * 128 * self.batch;
        let slots = ((ROOM_BYTES - out) / slot).min(15);
        slots * slot + out + 16 * slots + 8
    }
}

/// `Int4Batch` of cuda/int4_batch_hopper.cu.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Arguments {
    w: [u64; 16],
    x: [u64; 16],
    y: [u64; 16],
    scales: u64,
    bias: u64,
    n: u32,
    k: u32,
    shift: u32,
    zero_points: u32,
    output: u32,
    parts: u32,
    w_tiles: u32,
    x_tiles: u32,
    ahead: u32,
    /// What the alignment of the maps, 64 bytes, adds to the structure.
    unused: [u32; 3],
}

// SAFETY: integers only, and each field begins where the one before it ends: no padding.
unsafe impl Plain for Arguments {}

/// A product's kernel, tiles and parts of k.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Cut {
    shape: usize,
    w_tiles: usize,
    x_tiles: usize,
    parts: usize,
}

/// The fastest cut of W [n, k] for `rows` rows, by the time its tiles take. `whole`: the output takes no parts, and sums may be
/// exchanged in a cluster.
fn cut([rows, n, k]: [usize; 3], max_parts: usize, whole: bool, multiprocessors: usize) -> Cut {
    let steps = k.div_ceil(STEP_COLUMNS);
    // A block has at least a step.
    let able = |shape: &Shape| shape.deep == 1 || (whole && steps >= shape.deep);
    let cuts = SHAPES.iter().enumerate().filter(|(_, shape)| able(shape)).flat_map(|(index, shape)| {
        let (w_tiles, x_tiles) = (n.div_ceil(shape.rows()), rows.div_ceil(shape.batch));
        (1..=max_parts.min(steps)).map(move |parts| {
            let waves = (w_tiles * x_tiles * parts).div_ceil(multiprocessors / shape.cluster());
            let tiles = waves * (steps.div_ceil(parts * shape.deep) * shape.step_ns + shape.tile_ns);
            let sums = if max_parts > 1 { 8 * parts * rows * n / PART_BYTES_PER_NS } else { 0 };
            (tiles + sums, Cut { shape: index, w_tiles, x_tiles, parts })
        })
    });
    cuts.min_by_key(|(time, _)| *time)
        .map_or(Cut { shape: 0, w_tiles: 1, x_tiles: 1, parts: 1 }, |(_, cut)| cut)
}

pub(super) struct Int4BatchProducts {
    /// For groups of [`LARGE_GROUP`] and more, and for smaller ones.
    kernels: [[Kernel; SHAPES.len()]; 2],
    multiprocessors: usize,
}

impl Int4BatchProducts {
    pub fn new(gpu: &Gpu) -> Result<Self> {
        let kernels = |unit: &'static Unit| -> Result<[Kernel; SHAPES.len()]> {
            let found: Result<Vec<Kernel>> =
                SHAPES.iter().map(|shape| gpu.kernel(unit, shape.name)).collect();
            <[Kernel; SHAPES.len()]>::try_from(found?)
                .map_err(|_| Error::failed("as many kernels as shapes", ""))
        };
        Ok(Self {
            kernels: [kernels(&units::INT4_BATCH)?, kernels(&units::INT4_BATCH_SMALL_GROUPS)?],
            multiprocessors: gpu.facts().multiprocessors as usize,
        })
    }

    /// Queues the product, any output. Returns the parts written.
    ///
    /// # Safety
    /// As [`super::Products::launch`].
    pub unsafe fn launch(&self, stream: &Stream, job: Job) -> Result<usize> {
        let Job { x, rows, w, output } = job;
        let MatrixFormat::Int4 { group, zero_points } = w.format else {
            return Err(Error::failed("a 16-bit matrix given as 4-bit", ""));
        };
        let max_parts = if let Output::Partials { max_parts, .. } = output { max_parts } else { 1 };
        let whole = matches!(output, Output::Half { .. } | Output::Float { .. });
        let cut = cut([rows, w.rows, w.cols], max_parts, whole, self.multiprocessors);
        let shape = &SHAPES[cut.shape];
        let large_groups = group >= LARGE_GROUP;
        let (kind, y, stride, part_stride, _) = destination(w, output);
        let arguments = Arguments {
            w: packed_map(shape, w.weights.pointer(), w.rows, w.cols)?,
            x: rows_map(shape, x, rows, w.cols)?,
            y: output_map(shape, kind, y, [w.rows, rows, cut.parts], stride, part_stride)?,
            scales: w.scales.as_ref().map_or(0, DeviceBuffer::pointer),
            bias: w.bias.as_ref().map_or(0, DeviceBuffer::pointer),
            n: w.rows as u32,
            k: w.cols as u32,
            shift: group.ilog2(),
            zero_points: u32::from(zero_points),
            output: kind,
            parts: cut.parts as u32,
            w_tiles: cut.w_tiles as u32,
            x_tiles: cut.x_tiles as u32,
            ahead: if shape.batch <= 128 { AHEAD } else { WHOLE_RING },
            unused: [0; 3],
        };
        // Every block takes tiles in turn, as many blocks as there are multiprocessors; those that exchange sums take one.
        let tiles = cut.w_tiles * cut.x_tiles * cut.parts;
        let clusters = if shape.deep > 1 { tiles } else { tiles.min(self.multiprocessors / shape.cluster()) };
        let launch = Launch::new((clusters * shape.cluster()) as u32, shape.threads())
            .shared(shape.shared_bytes(large_groups) as u32)
            .cluster(shape.cluster() as u32)
            .overlapping();
        let launch = Launch { cost: cost(job, cut.parts), ..launch };
        let kernel = &self.kernels[usize::from(!large_groups)][cut.shape];
        // SAFETY: the one parameter of these kernels is this structure; pointers are the caller's promise.
        unsafe { stream.launch(kernel, launch, &[Arg::Struct(bytes_of(&[arguments]))])? };
        Ok(cut.parts)
    }
}

/// The packed words [n, k]: units of 16 rows, of them four rows of 128 bytes for each 64 columns.
fn packed_map(shape: &Shape, at: u64, n: usize, k: usize) -> Result<[u64; 16]> {
    let (units, lines) = (n as u64 / 16, k as u64 / 16);
    let extent = [64, 4 * shape.blocks() as u32, 4 * shape.groups as u32, 1];
    let strides = [64, 64 * lines, 64 * lines * units];
    Ok(TensorMap::halves_in_order(at, [64, lines, units, 1], strides, extent)?.into_words())
}

/// x [rows, k], blocks of 64 columns apart.
fn rows_map(shape: &Shape, at: u64, rows: usize, k: usize) -> Result<[u64; 16]> {
    let (rows, k) = (rows as u64, k as u64);
    let together = if shape.across == 1 { shape.blocks() } else { 1 };
    let extent = [64, (shape.batch / shape.across) as u32, together as u32, 1];
    Ok(TensorMap::halves(at, [64, rows, k / 64, 1], [k, 64, k * rows], extent)?.into_words())
}

/// y, fp16 or fp32, [parts, rows, n or with silu half of it].
fn output_map(
    shape: &Shape,
    kind: u32,
    at: u64,
    [n, rows, parts]: [usize; 3],
    stride: usize,
    part_stride: usize,
) -> Result<[u64; 16]> {
    let columns = if kind == SILU { n / 2 } else { n } as u64;
    let far = if kind == PARTS { part_stride } else { stride * rows } as u64;
    let sizes = [columns, rows as u64, parts as u64, 1];
    let strides = [stride as u64, far, far * parts as u64];
    let (batch, half_batch) = (shape.out_rows(), (shape.batch / 2) as u32);
    let map = match kind {
        HALF => TensorMap::halves(at, sizes, strides, [64, batch, 1, 1])?,
        SILU => TensorMap::halves(at, sizes, strides, [32, batch, 1, 1])?,
        _ => TensorMap::floats(at, sizes, strides, [32, half_batch, 1, 1])?,
    };
    Ok(map.into_words())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_agree_with_the_kernels() {
        assert_eq!(size_of::<Arguments>() % 64, 0);
        for shape in &SHAPES {
            for large_groups in [true, false] {
                assert!(shape.shared_bytes(large_groups) <= 227 << 10, "{shape:?}");
            }
        }
    }

    #[test]
    fn cuts_fill_the_gpu() {
        let name = |rows, n, k, max_parts, whole| {
            let cut = cut([rows, n, k], max_parts, whole, 132);
            let shape = &SHAPES[cut.shape];
            (shape.batch, cut.w_tiles * cut.x_tiles * cut.parts * shape.deep, cut.parts)
        };
        // The 9B: inputs of mixers, gate and up, down, mixer output.
        assert_eq!(name(32, 12288, 4096, 1, true), (32, 128, 1));
        assert_eq!(name(64, 12288, 4096, 1, true), (64, 128, 1));
        assert_eq!(name(64, 10240, 4096, 1, true), (64, 108, 1));
        assert_eq!(name(128, 12288, 4096, 1, true), (64, 128, 1));
        assert_eq!(name(32, 24576, 4096, 1, false), (32, 128, 1));
        assert_eq!(name(64, 24576, 4096, 1, false), (64, 128, 1));
        assert_eq!(name(128, 24576, 4096, 1, false), (128, 64, 1));
        assert_eq!(name(128, 4096, 12288, 8, false), (128, 66, 6));
        for (rows, batch) in [(9, 16), (16, 16), (17, 32), (32, 32), (33, 48), (48, 48), (49, 64), (64, 64)] {
            assert_eq!(name(rows, 4096, 4096, 8, false), (batch, 132, 6));
            assert_eq!(name(rows, 4096, 12288, 8, false), (batch, 132, 6));
        }
        assert_eq!(name(256, 12288, 4096, 1, true), (128, 64, 1));
        assert_eq!(name(256, 24576, 4096, 1, false), (128, 128, 1));
        for (n, whole) in [(24576, false), (12288, true), (4096, false)] {
            assert_eq!(name(8192, n, 4096, 1, whole).0, 256);
        }
        // Smaller than a tile, and less than a step for each part.
        assert_eq!(name(65, 16, 64, 8, false).2, 1);
        assert_eq!(name(9, 16, 64, 1, true).1, 1);
    }
}
