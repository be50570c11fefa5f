//! Launches of the products (cuda/products.cu), and the choice among them.
//!
//! | rows of x | product |
//! |---|---|
//! | to 256, W of at most 128 rows, from Hopper on | `product_small_*` ([`small`]): k cut across a cluster, since nothing of it is bandwidth |
//! | to 128 on Hopper, 256 without cuBLASLt | `product_batch_*`, `product_wide_*` ([`batch_product`](super::batch_product)): one block a multiprocessor, fed by the copy engine |
//! | more than 448 on Hopper (256 without cuBLASLt) | `gemm_*` ([`gemm`](super::gemm)), or cuBLASLt where that was found faster |
//! | few elsewhere (1 to 8, to 32 without cuBLASLt) | `product_stream_*`: memory-bound, W read once at the speed of the memory |
//! | more | cuBLASLt where it is installed, else `product_tile_*` on tensor cores |
//! | any, odd shapes | `linear` (cuda/linear.cu) |
//!
//! 4-bit matrices: [`int4`].

mod int4;
mod int4_batch;
mod int4_ring;
mod small;

pub use int4_ring::GROUP as RING_GROUP;

use self::int4::Int4Products;
pub(super) use self::int4_batch::NAMES as INT4_BATCH_NAMES;
pub(super) use self::int4_ring::NAMES as INT4_RING_NAMES;
pub(super) use self::small::NAMES as SMALL_NAMES;
use self::small::SmallProducts;
use super::batch_product::{BatchProducts, FASTER_ROWS};
use super::cublaslt::{CublasLt, Family, Rival, Shape, Sums};
use super::driver::plain::Plain;
use super::driver::{DeviceBuffer, Gpu, Kernel};
use super::gemm::{Gemm, Operands};
use super::launch::{Arg, Launch, LaunchCost, Stream, bytes_of};
use super::linear::PlainLinear;
use super::matrix::{Matrix, MatrixFormat, Output};
use super::units;
use crate::{Error, Result};

/// Rows from which cuBLASLt is faster than `product_stream_*`.
const LIBRARY_ROWS: usize = 9;
/// `product_stream_8_short` is the faster one to this many columns, from four units of 16 rows a multiprocessor to so many
/// that start and end no longer matter.
const SHORT_COLS: usize = 4096;
/// Elements of W below which `product_stream_*` stays the one for few rows on Hopper too: a matrix so small is all start and end.
const SMALL_ELEMENTS: usize = 1 << 20;
const MANY_UNITS: usize = 8192;
/// Rows of gate and up that are kept at a time between cuBLASLt and `product_silu`: they stay in the L2.
const SILU_ROWS: usize = 1024;
/// Rows from which `gemm_*` is used where there is no cuBLASLt, and from which it is a candidate beside cuBLASLt, which has
/// finer tiles for fewer.
const GEMM_ROWS: usize = 257;
const GEMM_ROWS_BESIDE_LIBRARY: usize = 449;
/// Rows from which products can add to the residual stream themselves.
const ADD_ROWS: usize = 257;
/// Shared memory of `product_tile_*`: three stages of (rows + 128) rows of 128 bytes.
const fn tile_shared(rows: u32) -> u32 {
    3 * (rows + 128) * 128
}

/// `Product` of cuda/product.cuh.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Arguments {
    pub(super) x: u64,
    pub(super) w: u64,
    scales: u64,
    pub(super) bias: u64,
    pub(super) y: u64,
    pub(super) part_stride: u64,
    pub(super) rows: u32,
    pub(super) n: u32,
    pub(super) k: u32,
    pub(super) stride: u32,
    pub(super) output: u32,
    pub(super) parts: u32,
    group: u32,
    zero_points: u32,
}

// SAFETY: integers only, and the last field makes the size a multiple of the alignment: no padding.
unsafe impl Plain for Arguments {}

// `OUTPUT_*` of cuda/product.cuh.
pub(super) const HALF: u32 = 0;
pub(super) const FLOAT: u32 = 1;
pub(super) const SILU: u32 = 2;
pub(super) const PARTS: u32 = 3;
/// `gemm_*`, cuBLASLt and `int4_batch_*`.
const RESIDUAL: u32 = 4;
/// `product_batch_*` and `product_wide_*`.
const BEST: u32 = 5;

/// y = x Wᵀ for `rows` rows at `x`.
#[derive(Clone, Copy)]
struct Job<'a> {
    x: u64,
    rows: usize,
    w: &'a Matrix,
    output: Output,
}

pub struct Products {
    stream: [Kernel; 3],
    short: Kernel,
    tile: [Kernel; 2],
    /// Where the model has 4-bit matrices.
    int4: Option<Int4Products>,
    silu: Kernel,
    bias: Kernel,
    plain: PlainLinear,
    library: Option<CublasLt>,
    hopper: Option<BatchProducts>,
    small: Option<SmallProducts>,
    gemm: Option<Gemm>,
    /// fp16 [rows made at a time, columns of gate and up], with cuBLASLt.
    gate_up: Option<DeviceBuffer>,
    multiprocessors: usize,
}

impl Products {
    /// For steps of at most `rows` rows, with gate and up matrices of at most `gate_up` rows and 4-bit matrices of at
    /// most `int4_elements`. `portable`: only what every GPU runs, and no cuBLASLt.
    ///
    /// # Errors
    /// A cuBLASLt that does not work; a full GPU.
    pub fn new(gpu: &Gpu, rows: usize, gate_up: usize, int4_elements: usize, portable: bool) -> Result<Self> {
        let unit = &units::PRODUCTS;
        let library = if portable { None } else { CublasLt::open(gpu)? };
        let gemm = if portable { None } else { Gemm::open(gpu)? };
        let silu_rows = if gemm.is_some() { GEMM_ROWS_BESIDE_LIBRARY - 1 } else { SILU_ROWS };
        let scratch = (2 * rows.min(silu_rows) * gate_up) as u64;
        Ok(Self {
            stream: [
                gpu.kernel(unit, "product_stream_8")?,
                gpu.kernel(unit, "product_stream_16")?,
                gpu.kernel(unit, "product_stream_32")?,
            ],
            short: gpu.kernel(unit, "product_stream_8_short")?,
            tile: [gpu.kernel(unit, "product_tile_64")?, gpu.kernel(unit, "product_tile_128")?],
            int4: if int4_elements > 0 {
                let expanded = if library.is_some() { int4_elements } else { 0 };
                Some(Int4Products::new(gpu, expanded, portable)?)
            } else {
                None
            },
            silu: gpu.kernel(unit, "product_silu")?,
            bias: gpu.kernel(unit, "product_bias")?,
            plain: PlainLinear::new(gpu)?,
            gate_up: if library.is_some() { Some(gpu.allocate(scratch)?) } else { None },
            library,
            hopper: if portable { None } else { BatchProducts::open(gpu)? },
            small: if portable { None } else { SmallProducts::open(gpu)? },
            gemm,
            multiprocessors: gpu.facts().multiprocessors as usize,
        })
    }

    /// The same as if cuBLASLt were not installed.
    pub fn without_library(self) -> Self {
        Self { library: None, gate_up: None, ..self }
    }

    /// The same without Hopper's kernels for 16-bit weights (gate and up still in the smaller pieces that fit beside them).
    pub fn without_hopper(self) -> Self {
        Self { hopper: None, small: None, gemm: None, ..self }
    }

    /// Whether the product of so many rows takes [`Output::Residual`].
    pub fn adds(&self, rows: usize, w: &Matrix) -> bool {
        match w.format {
            MatrixFormat::F16 => {
                rows >= ADD_ROWS
                    && (self.library.is_some() || self.gemm.is_some())
                    && w.rows.is_multiple_of(8)
                    && w.cols.is_multiple_of(8)
            }
            MatrixFormat::Int4 { .. } => self.int4.as_ref().is_some_and(|int4| int4.adds(rows)),
        }
    }

    /// Whether the product of so many rows takes [`Output::Best`].
    pub fn finds_best(&self, rows: usize, w: &Matrix) -> bool {
        w.format == MatrixFormat::F16
            && rows < GEMM_ROWS
            && self.small(rows, w).is_none()
            && self.hopper(rows, w).is_some()
    }

    fn small(&self, rows: usize, w: &Matrix) -> Option<&SmallProducts> {
        self.small.as_ref().filter(|small| small.takes(rows, w))
    }

    /// The warpgroup products, where they are there and the fastest.
    fn hopper(&self, rows: usize, w: &Matrix) -> Option<&BatchProducts> {
        let eights = w.rows.is_multiple_of(8) && w.cols.is_multiple_of(8);
        let large = rows >= LIBRARY_ROWS || w.rows * w.cols >= SMALL_ELEMENTS;
        let beats = |hopper: &&BatchProducts| self.library.is_none() || hopper.beats_library(rows);
        self.hopper.as_ref().filter(|_| eights && large).filter(beats)
    }

    /// Lets cuBLASLt find the fastest algorithms for the 16-bit matrices of `uses` with up to `rows` rows. Returns how many
    /// shapes had to be timed.
    ///
    /// # Errors
    /// As [`CublasLt::tune`](super::cublaslt::CublasLt::tune).
    ///
    /// # Safety
    /// Outputs are valid for `rows` rows, and x for `x_bytes` of fp16; what the outputs hold is lost.
    pub unsafe fn tune(
        &self,
        uses: &[(&Matrix, Output)],
        rows: usize,
        x: u64,
        x_bytes: u64,
    ) -> Result<usize> {
        let Some(library) = &self.library else { return Ok(0) };
        let (mut families, mut adding, mut gated): (Vec<Family>, Vec<Family>, Vec<Family>) =
            (Vec::new(), Vec::new(), Vec::new());
        for (w, output) in uses {
            if w.format != MatrixFormat::F16 || !w.rows.is_multiple_of(8) || !w.cols.is_multiple_of(8) {
                continue;
            }
            let (_, y, stride, _, _) = destination(w, *output);
            let (y, stride, most, sums) = match output {
                Output::Half { .. } => (y, stride, rows, Sums::Half),
                Output::Float { .. } => (y, stride, rows, Sums::Float),
                Output::SiluMul { .. } => {
                    let Some(scratch) = &self.gate_up else { continue };
                    (scratch.pointer(), w.rows, scratch.bytes() as usize / (2 * w.rows), Sums::Half)
                }
                Output::Partials { .. } => (y, stride, rows.min(ADD_ROWS - 1), Sums::Float),
                Output::Residual { .. } => (y, stride, rows, Sums::Added),
                Output::Best { .. } => continue,
            };
            let shape = Shape { rows: most, n: w.rows, k: w.cols, stride, sums };
            let list = match output {
                Output::Residual { .. } => &mut adding,
                Output::SiluMul { .. } => &mut gated,
                _ => &mut families,
            };
            match list.iter_mut().find(|family| family.shape == shape) {
                Some(family) => family.weights.push(w.weights.pointer()),
                None => list.push(Family { shape, weights: vec![w.weights.pointer()], y }),
            }
        }
        let own = |stream: &Stream, shape: Shape, w: u64, y: u64| {
            let Shape { rows, n, k, stride, sums } = shape;
            let output = match sums {
                Sums::Half => HALF,
                Sums::Float => FLOAT,
                Sums::Added => RESIDUAL,
            };
            let Some(gemm) = &self.gemm else { return Ok(()) };
            // SAFETY: the caller's promise.
            unsafe {
                gemm.launch(
                    stream,
                    Operands { x, w, bias: 0, y, rows, n, k, stride, output },
                    LaunchCost::default(),
                )
            }
        };
        let rival: Option<(usize, Rival)> =
            self.gemm.as_ref().map(|_| (GEMM_ROWS_BESIDE_LIBRARY, &own as Rival));
        let least = if self.hopper.is_some() { FASTER_ROWS + 1 } else { LIBRARY_ROWS };
        // Gate and up of as many rows go to our own product untimed: the SiLU that it saves is more than the library is ever ahead.
        // SAFETY: the caller's promise.
        unsafe {
            let timed = library.tune(&families, least, x, x_bytes, rival)?
                + library.tune(&gated, least, x, x_bytes, None)?;
            Ok(timed + library.tune(&adding, ADD_ROWS, x, x_bytes, rival)?)
        }
    }

    /// Queues y = x Wᵀ + bias for x fp16 [rows, W's columns]. Returns the parts written (1 unless the output is parts).
    ///
    /// # Errors
    /// A launch that the driver or cuBLASLt refuses.
    ///
    /// # Safety
    /// `x` and the output are valid for `rows` rows until the work is done.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        x: u64,
        rows: usize,
        w: &Matrix,
        output: Output,
    ) -> Result<usize> {
        let job = Job { x, rows, w, output };
        if matches!(w.format, MatrixFormat::Int4 { .. }) {
            // SAFETY: the caller's promise.
            return unsafe { self.int4(stream, job) };
        }
        if let Some(small) = self.small(rows, w) {
            // SAFETY: the caller's promise.
            return unsafe { small.launch(stream, job) };
        }
        let streams = w.rows.is_multiple_of(16) && w.cols.is_multiple_of(64);
        let hopper = self.hopper(rows, w);
        let few = match (hopper, &self.library) {
            (Some(_), _) => 0,
            (None, Some(_)) => LIBRARY_ROWS - 1,
            (None, None) => 32,
        };
        let eights = w.rows.is_multiple_of(8) && w.cols.is_multiple_of(8);
        let library = self.library.as_ref().filter(|_| eights);
        let gemm = self.gemm.as_ref().filter(|_| eights && self.prefers_gemm(&job));
        // SAFETY: the caller's promise, for each.
        unsafe {
            if streams && rows <= few {
                self.few_rows(stream, job)
            } else if let Some(gemm) = gemm {
                gemm.launch(stream, operands(job), cost(job, 1))?;
                Ok(1)
            } else if let Some(hopper) = hopper {
                let most_parts = if let Output::Partials { max_parts, .. } = output { max_parts } else { 1 };
                hopper.launch(stream, arguments(job, 1), most_parts, cost(job, 1))
            } else if let Some(library) = library {
                self.by_library(stream, library, w.weights.pointer(), job)
            } else if w.rows.is_multiple_of(16) && w.cols.is_multiple_of(8) {
                self.many_rows(stream, &self.tile, tile_shared, job)
            } else {
                self.plain.launch(stream, x, rows, w, output)
            }
        }
    }

    /// Whether `gemm_*` is the faster one for a product, where it is there.
    fn prefers_gemm(&self, job: &Job) -> bool {
        let Some(library) = &self.library else { return job.rows >= GEMM_ROWS };
        let (kind, _, stride, _, _) = destination(job.w, job.output);
        job.rows >= GEMM_ROWS_BESIDE_LIBRARY
            && (kind == SILU || library.prefers_own(shape(job, job.rows, stride, sums_of(kind))))
    }

    /// # Safety
    /// As [`Self::launch`].
    unsafe fn few_rows(&self, stream: &Stream, job: Job) -> Result<usize> {
        let (rows, w) = (job.rows, job.w);
        let units = w.rows / 16;
        let parts = parts_for(units, w.cols / 64, 8, self.multiprocessors, job.output);
        let mut kernel = &self.stream[if rows <= 8 { 0 } else { usize::from(rows > 16) + 1 }];
        let mut threads = 256;
        // Where units abound and k is short, half as many warps each let thread blocks end and begin more evenly.
        let abound = units >= 4 * self.multiprocessors && w.cols <= SHORT_COLS && units < MANY_UNITS;
        if rows <= 8 && abound {
            (kernel, threads) = (&self.short, 128);
        }
        let grid = [units as u32, parts as u32, 1];
        // SAFETY: the caller's promise; the shape was checked.
        unsafe { self.put(stream, kernel, Launch::grid(grid, threads), job, parts)? };
        Ok(parts)
    }

    /// # Safety
    /// As [`Self::launch`].
    unsafe fn many_rows(
        &self,
        stream: &Stream,
        kernels: &[Kernel; 2],
        shared: fn(u32) -> u32,
        job: Job,
    ) -> Result<usize> {
        let tall = usize::from(job.rows > 64);
        let tile_rows = [64, 128][tall];
        let tiles = [job.rows.div_ceil(tile_rows), job.w.rows.div_ceil(128)];
        let blocks = job.w.cols.div_ceil(64);
        let parts = parts_for(tiles[0] * tiles[1], blocks, 4, self.multiprocessors, job.output);
        let launch = Launch::grid([tiles[0] as u32, tiles[1] as u32, parts as u32], 256)
            .shared(shared(tile_rows as u32));
        // SAFETY: the caller's promise; the shape was checked.
        unsafe { self.put(stream, &kernels[tall], launch, job, parts)? };
        Ok(parts)
    }

    /// # Safety
    /// As [`Self::launch`].
    unsafe fn put(
        &self,
        stream: &Stream,
        kernel: &Kernel,
        launch: Launch,
        job: Job,
        parts: usize,
    ) -> Result<()> {
        let arguments = arguments(job, parts);
        let launch = Launch { cost: cost(job, parts), ..launch }.overlapping();
        // SAFETY: the one parameter of these kernels is this structure; pointers are the caller's promise.
        unsafe { stream.launch(kernel, launch, &[Arg::Struct(bytes_of(&[arguments]))]) }
    }

    /// `weights`: W in fp16, row-major.
    ///
    /// # Safety
    /// As [`Self::launch`].
    unsafe fn by_library(
        &self,
        stream: &Stream,
        library: &CublasLt,
        weights: u64,
        job: Job,
    ) -> Result<usize> {
        let Job { x, rows, w, output } = job;
        let (kind, y, stride, _, _) = destination(w, output);
        // SAFETY: the caller's promise; `gate_up` holds as many rows as are made at a time.
        unsafe {
            if kind != SILU {
                library.product(stream, x, weights, y, shape(&job, rows, stride, sums_of(kind)))?;
                self.add_bias(stream, w, y, rows, stride, kind == HALF)?;
                return Ok(1);
            }
            let Some(scratch) = &self.gate_up else {
                return Err(Error::bug("no room for gate and up"));
            };
            let columns = w.rows / 2;
            let most = (scratch.bytes() as usize / (2 * w.rows)).max(1);
            for first in (0..rows).step_by(most) {
                let count = most.min(rows - first);
                let from = x + 2 * (first * w.cols) as u64;
                let between = scratch.pointer();
                library.product(stream, from, weights, between, shape(&job, count, w.rows, Sums::Half))?;
                self.add_bias(stream, w, between, count, w.rows, true)?;
                let launch = Launch::grid([columns.div_ceil(8 * 256) as u32, count as u32, 1], 256)
                    .overlapping()
                    .cost((count * columns * 6) as u64, (count * columns * 5) as u64);
                let to = y + 2 * (first * stride) as u64;
                let args: [Arg; 4] =
                    [between.into(), to.into(), (columns as u32).into(), (stride as u32).into()];
                stream.launch(&self.silu, launch, &args)?;
            }
        }
        Ok(1)
    }

    /// y += bias, if W has one.
    ///
    /// # Safety
    /// `y` is valid for `rows` rows of `stride` until the work is done.
    unsafe fn add_bias(
        &self,
        stream: &Stream,
        w: &Matrix,
        y: u64,
        rows: usize,
        stride: usize,
        half: bool,
    ) -> Result<()> {
        let Some(bias) = &w.bias else { return Ok(()) };
        let elements = (rows * w.rows) as u64;
        let launch = Launch::grid([w.rows.div_ceil(256) as u32, rows as u32, 1], 256)
            .overlapping()
            .cost(elements * if half { 4 } else { 8 }, elements);
        let args: [Arg; 5] =
            [y.into(), bias.into(), (w.rows as u32).into(), (stride as u32).into(), u32::from(half).into()];
        // SAFETY: the kernel's parameters in order; the bias holds W's rows, the rest is the caller's promise.
        unsafe { stream.launch(&self.bias, launch, &args) }
    }
}

fn sums_of(kind: u32) -> Sums {
    match kind {
        HALF => Sums::Half,
        RESIDUAL => Sums::Added,
        _ => Sums::Float,
    }
}

/// What cuBLASLt makes of `rows` rows of a product.
fn shape(job: &Job, rows: usize, stride: usize, sums: Sums) -> Shape {
    Shape { rows, n: job.w.rows, k: job.w.cols, stride, sums }
}

/// What `gemm_*` is told of a product.
fn operands(job: Job) -> Operands {
    let Job { x, rows, w, output } = job;
    let (output, y, stride, _, _) = destination(w, output);
    let bias = w.bias.as_ref().map_or(0, DeviceBuffer::pointer);
    Operands { x, w: w.weights.pointer(), bias, y, rows, n: w.rows, k: w.cols, stride, output }
}

/// What the kernels are told of a product in `parts` parts.
fn arguments(job: Job, parts: usize) -> Arguments {
    let Job { x, rows, w, output } = job;
    let (kind, y, stride, part_stride, _) = destination(w, output);
    let (group, zero_points) = match w.format {
        MatrixFormat::F16 => (0, 0),
        MatrixFormat::Int4 { group, zero_points } => (group as u32, u32::from(zero_points)),
    };
    Arguments {
        x,
        w: w.weights.pointer(),
        scales: w.scales.as_ref().map_or(0, DeviceBuffer::pointer),
        bias: w.bias.as_ref().map_or(0, DeviceBuffer::pointer),
        y,
        part_stride: part_stride as u64,
        rows: rows as u32,
        n: if let Output::Best { vocab, .. } = output { vocab } else { w.rows } as u32,
        k: w.cols as u32,
        stride: stride as u32,
        output: kind,
        parts: parts as u32,
        group,
        zero_points,
    }
}

/// Each of W, x and the output once.
fn cost(job: Job, parts: usize) -> LaunchCost {
    let Job { rows, w, output, .. } = job;
    let element = destination(w, output).4;
    let bytes = w.bytes() + (rows * (2 * w.cols + parts * element * w.rows)) as u64;
    LaunchCost::new(bytes, 2 * (rows * w.rows * w.cols) as u64)
}

/// Kind, address, stride, stride of parts and bytes of an element for each element of W's rows.
fn destination(w: &Matrix, output: Output) -> (u32, u64, usize, usize, usize) {
    match output {
        Output::Half { to, stride } => (HALF, to, stride, 0, 2),
        Output::Float { to, stride } => (FLOAT, to, stride, 0, 4),
        Output::SiluMul { to, stride } => (SILU, to, stride, 0, 1),
        Output::Partials { to, part_stride, .. } => (PARTS, to, w.rows, part_stride, 4),
        Output::Residual { to } => (RESIDUAL, to, w.rows, 0, 4),
        Output::Best { keys, .. } => (BEST, keys, 0, 0, 0),
    }
}

/// Parts of k: as many as fill the GPU, if the output takes parts, of no fewer than `least` blocks each.
fn parts_for(tiles: usize, blocks: usize, least: usize, multiprocessors: usize, output: Output) -> usize {
    let Output::Partials { max_parts, .. } = output else { return 1 };
    let wanted = multiprocessors.div_ceil(tiles.max(1));
    wanted.min(max_parts).min(blocks / least).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_fill_the_gpu_and_stay_within_the_output() {
        let parts = |max_parts| Output::Partials { to: 0, part_stride: 0, max_parts };
        assert_eq!(parts_for(160, 144, 8, 132, parts(8)), 1);
        assert_eq!(parts_for(40, 144, 8, 132, parts(8)), 4);
        assert_eq!(parts_for(40, 144, 8, 132, parts(2)), 2);
        assert_eq!(parts_for(40, 9, 8, 132, parts(8)), 1);
        assert_eq!(parts_for(4, 4, 8, 132, parts(8)), 1);
        assert_eq!(parts_for(4, 144, 8, 132, Output::Half { to: 0, stride: 8 }), 1);
    }
}
