//! Launches of the chunked gated delta rule for prompt chunks (cuda/delta_prefill.cu, delta_scan.cu, delta_scan_hopper.cu): heads
//! of 128 x 128.

use super::driver::{DeviceBuffer, Gpu, Kernel};
use super::launch::{Arg, Launch, Stream, bytes_of};
use super::units;
use crate::Result;

/// Tokens of a chunk of the algorithm.
pub const CHUNK: usize = 64;
/// Key and value size of a head.
pub const HEAD: usize = 128;
/// Bytes of a tile of 64 tokens of a head, and of 64 x 64 halves.
const TILE: u32 = (CHUNK * HEAD * 2) as u32;
const SQUARE: u32 = (CHUNK * CHUNK * 2) as u32;
/// Shared memory of `delta_chunks`: two fp32 tiles of 64 x 68, which K and Q fit into, two rows of 64.
const CHUNKS_SHARED: u32 = (2 * CHUNK * 68 * 4 + 2 * CHUNK * 4) as u32;
/// Blocks that share a head in the scan for any GPU, and its shared memory: S, the residual and two V tiles; one or two stages of K,
/// Q, T, P and a quarter of V.
const SPLIT: u32 = 4;
const SCAN_SHARED: u32 = (HEAD * 64 + 3 * CHUNK * 64) as u32;
const SCAN_STAGE: u32 = 2 * TILE + 2 * SQUARE + TILE / SPLIT;
/// The same on Hopper, whose scan makes the outputs too: three stages of K, Q, T, P, half of V and the decays, two half tiles of
/// outputs, and what aligns them.
const HOPPER_SPLIT: u32 = 2;
const HOPPER_STAGE: u32 = 2 * TILE + 2 * SQUARE + TILE / HOPPER_SPLIT;
const HOPPER_SHARED: u32 = 3 * (HOPPER_STAGE + 2 * CHUNK as u32 * 4) + 2 * TILE / HOPPER_SPLIT + 1024;

/// A prompt chunk of a step: `count` new tokens at row `start`, after `context` cached ones. As the kernels' `Piece`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Piece {
    pub slot: i32,
    pub context: i32,
    pub start: i32,
    pub count: i32,
    pub first_chunk: i32,
}

/// Work of a step, made once and used by every layer. Uploaded by the caller as flat i32.
#[derive(Debug, Clone, Default)]
pub struct Work {
    pub pieces: Vec<Piece>,
    /// (piece, first token in it) of each chunk.
    pub chunks: Vec<[i32; 2]>,
    pub rows: usize,
}

impl Work {
    /// From (slot, context, start row, count) of each prompt chunk.
    pub fn new(parts: impl IntoIterator<Item = (i32, i32, i32, i32)>) -> Self {
        let mut work = Self::default();
        for (slot, context, start, count) in parts {
            let first_chunk = work.chunks.len() as i32;
            let piece = work.pieces.len() as i32;
            work.pieces.push(Piece { slot, context, start, count, first_chunk });
            work.chunks.extend((0..count).step_by(CHUNK).map(|first| [piece, first]));
            work.rows += count as usize;
        }
        work
    }

    /// Chunks that `rows` rows in at most `pieces` pieces can make.
    pub fn max_chunks(rows: usize, pieces: usize) -> usize {
        rows.div_ceil(CHUNK) + pieces
    }
}

/// Layout of a layer, as the kernels' `Shape`.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C)]
pub struct DeltaShape {
    pub key_heads: i32,
    pub value_heads: i32,
    /// Elements of a row of `mixed`.
    pub pitch: i32,
    /// Positions the convolution window holds.
    pub ring: i32,
    /// 0 fp32, 1 fp16, 2 bf16.
    pub state_type: i32,
    pub norm_eps: f32,
}

impl DeltaShape {
    fn channels(&self) -> usize {
        (2 * self.key_heads + self.value_heads) as usize * HEAD
    }
}

/// One layer's tensors on the device; see the kernels for shapes.
#[derive(Debug, Clone, Copy)]
pub struct Layer {
    /// fp16 [rows, pitch]: u, z, b, a of the in-projections.
    pub mixed: u64,
    /// fp32 `[4][channels]`.
    pub taps: u64,
    pub a_log: u64,
    pub dt_bias: u64,
    pub norm_weight: u64,
    pub state: u64,
    pub window: u64,
    /// fp16 [rows, value_heads * 128].
    pub out: u64,
}

/// Kernels and the workspace that all layers share.
#[derive(Debug)]
pub struct DeltaPrefill {
    prepare: Kernel,
    chunks: Kernel,
    scan: Kernel,
    /// None with the scan of delta_scan_hopper.cu.
    finish: Option<Finish>,
    shape: DeltaShape,
    conv: DeviceBuffer,
    t: DeviceBuffer,
    p: DeviceBuffer,
    g: DeviceBuffer,
    beta: DeviceBuffer,
    decays: DeviceBuffer,
}

/// What the scan for any GPU needs: stages of its loads, its outputs, the kernel that finishes them.
#[derive(Debug)]
struct Finish {
    stages: i32,
    o: DeviceBuffer,
    kernel: Kernel,
}

impl DeltaPrefill {
    /// Bytes of workspace for steps of at most `rows` prompt tokens in at most `pieces` prompt chunks: conv, T, P, G, beta, decays, and
    /// o where the scan leaves its outputs to another kernel.
    fn sizes(shape: &DeltaShape, rows: usize, pieces: usize) -> [u64; 7] {
        let chunks = Work::max_chunks(rows, pieces);
        let tiles = (chunks * shape.value_heads as usize) as u64;
        [
            (2 * chunks * CHUNK * shape.channels()) as u64,
            tiles * u64::from(SQUARE),
            tiles * u64::from(SQUARE),
            tiles * (CHUNK * 4) as u64,
            tiles * (CHUNK * 4) as u64,
            tiles * (2 * CHUNK * 4) as u64,
            tiles * u64::from(TILE),
        ]
    }

    /// `portable` forces the scan that any GPU can run.
    ///
    /// # Errors
    /// Compilation, loading, a full GPU.
    pub fn new(gpu: &Gpu, shape: DeltaShape, rows: usize, pieces: usize, portable: bool) -> Result<Self> {
        let unit = &units::DELTA_PREFILL;
        let hopper = units::DELTA_SCAN_HOPPER.supports(gpu.facts().capability) && !portable;
        let [conv, t, p, g, beta, decays, o] = Self::sizes(&shape, rows, pieces);
        Ok(Self {
            prepare: gpu.kernel(unit, "delta_prepare")?,
            chunks: gpu.kernel(unit, "delta_chunks")?,
            scan: gpu
                .kernel(if hopper { &units::DELTA_SCAN_HOPPER } else { &units::DELTA_SCAN }, "delta_scan")?,
            finish: if hopper {
                None
            } else {
                let two_stages = gpu.facts().shared_bytes >= SCAN_SHARED + 2 * SCAN_STAGE + 1024;
                Some(Finish {
                    stages: if two_stages { 2 } else { 1 },
                    o: gpu.allocate(o)?,
                    kernel: gpu.kernel(unit, "delta_finish")?,
                })
            },
            shape,
            conv: gpu.allocate(conv)?,
            t: gpu.allocate(t)?,
            p: gpu.allocate(p)?,
            g: gpu.allocate(g)?,
            beta: gpu.allocate(beta)?,
            decays: gpu.allocate(decays)?,
        })
    }

    /// Queues one layer's mixer for all prompt chunks: reads `mixed`, state and window, writes `out`, state and window.
    /// `pieces` and `chunks` are device addresses of the work's lists.
    ///
    /// # Errors
    /// A launch that the driver refuses, in its words.
    ///
    /// # Safety
    /// The layer's pointers are valid for the rows and slots of `work`, which fits the workspace, until the work is done.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        layer: &Layer,
        work: &Work,
        pieces: u64,
        chunks: u64,
    ) -> Result<()> {
        if work.pieces.is_empty() {
            return Ok(());
        }
        let shape = &self.shape;
        let (heads, key_heads) = (shape.value_heads as u32, shape.key_heads as u32);
        let (rows, tiles) = (work.rows as u64, (work.chunks.len() * heads as usize) as u64);
        let (channels, width) = (shape.channels() as u64, u64::from(heads) * HEAD as u64);
        let words = [
            shape.key_heads,
            shape.value_heads,
            shape.pitch,
            shape.ring,
            shape.state_type,
            shape.norm_eps.to_bits() as i32,
        ];
        let shape_arg = Arg::Struct(bytes_of(&words));
        let chunk_count = work.chunks.len() as u32;
        let tile_flops = (CHUNK * CHUNK * HEAD) as u64;

        let (conv_blocks, gate_blocks) = ((channels as u32 / HEAD as u32).div_ceil(2), heads.div_ceil(4));
        let prepare = Launch::grid([conv_blocks + gate_blocks, chunk_count, 1], 128)
            .overlapping()
            .cost(4 * rows * channels, 9 * rows * channels);
        let args = [
            Arg::from(layer.mixed),
            Arg::from(layer.taps),
            Arg::from(layer.a_log),
            Arg::from(layer.dt_bias),
            Arg::from(layer.window),
            Arg::from(&self.conv),
            Arg::from(&self.g),
            Arg::from(&self.beta),
            Arg::from(pieces),
            Arg::from(chunks),
            shape_arg,
        ];
        // SAFETY: the arguments are those of delta_prepare; pointers are the caller's promise.
        unsafe { stream.launch(&self.prepare, prepare, &args) }?;

        // Compulsory: K Kᵀ and Q Kᵀ a key head; T a value head.
        let products = u64::from(key_heads) * u64::from(chunk_count) * 4 * tile_flops
            + tiles * (CHUNK * CHUNK * CHUNK) as u64 * 2 / 3;
        let written = tiles * (2 * u64::from(SQUARE) + 8 * CHUNK as u64);
        let inner = Launch::grid([heads, chunk_count, 1], 128)
            .shared(CHUNKS_SHARED)
            .overlapping()
            .cost(2 * rows * (channels - width) + written, products);
        let args = [
            Arg::from(&self.conv),
            Arg::from(&self.g),
            Arg::from(&self.beta),
            Arg::from(&self.t),
            Arg::from(&self.p),
            Arg::from(&self.decays),
            shape_arg,
        ];
        // SAFETY: the arguments are those of delta_chunks; the workspace holds `work`'s chunks.
        unsafe { stream.launch(&self.chunks, inner, &args) }?;

        let state_element = if shape.state_type == 0 { 4 } else { 2 };
        let state = 2 * state_element * work.pieces.len() as u64 * width * HEAD as u64;
        let (threads, split, cluster, shared) = match &self.finish {
            None => (384, HOPPER_SPLIT, HOPPER_SPLIT, HOPPER_SHARED),
            Some(finish) => (256, SPLIT, 1, SCAN_SHARED + finish.stages as u32 * SCAN_STAGE),
        };
        let read = written + 2 * rows * channels;
        let outputs = rows * width * if self.finish.is_some() { 2 } else { 2 + 2 };
        let scan = Launch::grid([heads * split, work.pieces.len() as u32, 1], threads)
            .shared(shared)
            .cluster(cluster)
            .overlapping()
            .cost(read + state + outputs, tiles * (6 * (CHUNK * HEAD * HEAD) as u64 + 4 * tile_flops));
        let inputs = [
            Arg::from(&self.conv),
            Arg::from(&self.t),
            Arg::from(&self.p),
            Arg::from(&self.decays),
            Arg::from(layer.state),
        ];
        let Some(finish) = &self.finish else {
            let rest = [
                Arg::from(layer.mixed),
                Arg::from(layer.norm_weight),
                Arg::from(layer.window),
                Arg::from(layer.out),
                Arg::from(pieces),
                shape_arg,
            ];
            let args: Vec<Arg> = inputs.into_iter().chain(rest).collect();
            // SAFETY: the arguments are those of Hopper's delta_scan.
            return unsafe { stream.launch(&self.scan, scan, &args) };
        };
        let rest = [Arg::from(&finish.o), Arg::from(pieces), shape_arg, Arg::from(finish.stages)];
        let args: Vec<Arg> = inputs.into_iter().chain(rest).collect();
        // SAFETY: the arguments are those of delta_scan.
        unsafe { stream.launch(&self.scan, scan, &args) }?;

        let launch = Launch::grid([heads, chunk_count, 1], 128)
            .overlapping()
            .cost(rows * width * (2 + 2 + 2), 8 * rows * width);
        let args = [
            Arg::from(&finish.o),
            Arg::from(layer.mixed),
            Arg::from(layer.norm_weight),
            Arg::from(layer.window),
            Arg::from(layer.out),
            Arg::from(pieces),
            Arg::from(chunks),
            shape_arg,
        ];
        // SAFETY: the arguments are those of delta_finish.
        unsafe { stream.launch(&finish.kernel, launch, &args) }
    }
}
