//! Attention of single rows over the paged cache, and the norms, rotation and cache write before it (cuda/attention.cu).

use crate::engine::device::cuda::driver::{DeviceBuffer, Gpu, Kernel};
use crate::engine::device::cuda::launch::{Arg, Launch, Stream, bytes_of};
use crate::engine::device::cuda::units;
use crate::engine::model::spec::Attention;
use crate::{Error, Result};

/// Warps of a block and tiles in a warp's ring, as in the file.
const WARPS: usize = 4;
const SLOTS: usize = 2;
/// The fewest tiles of 16 tokens worth a block of its own, in contexts that are not short (`SHORT_TILES` of the file).
const MIN_TILES: i32 = 8;
/// Blocks a multiprocessor that a step's contexts are split into at most.
const SPLIT_BLOCKS: usize = 2;
/// Most blocks that share a row and head.
const MAX_SPLITS: usize = 32;

/// Position of a row, and the row of the block table that lists its sequence's blocks (below 0: padding).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct AttentionRow {
    pub sequence: i32,
    pub position: i32,
}

/// K and V of one layer.
#[derive(Debug, Clone, Copy)]
pub struct LayerCache {
    pub keys: u64,
    pub values: u64,
}

/// Device addresses that all layers of a step share.
#[derive(Debug, Clone, Copy)]
pub struct StepRows {
    pub rows: u64,
    pub table: u64,
    pub header: u64,
}

/// Which part of qkv's rows [`RowAttention::prepare`] works on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    All,
    Queries,
    KeysAndValues,
}

pub struct RowAttention {
    prepare: Kernel,
    attend: Kernel,
    shape: Attention,
    block_tokens: usize,
    qkv_pitch: usize,
    eps: f32,
    multiprocessors: usize,
    /// cos and sin of every position.
    angles: DeviceBuffer,
    parts: DeviceBuffer,
    counters: DeviceBuffer,
}

impl RowAttention {
    /// # Errors
    /// A head size or block size the kernels are not made for.
    pub fn new(
        gpu: &Gpu,
        shape: &Attention,
        eps: f32,
        block_tokens: usize,
        qkv_pitch: usize,
        positions: usize,
    ) -> Result<Self> {
        let (prepare, attend) = match shape.head_dim {
            32 => ("attention_prepare_32", "attention_rows_32"),
            64 => ("attention_prepare_64", "attention_rows_64"),
            128 => ("attention_prepare_128", "attention_rows_128"),
            256 => ("attention_prepare_256", "attention_rows_256"),
            other => {
                return Err(Error::invalid(
                    format!(
                        "head_dim = {other}: the CUDA attention kernels are made for 32, 64, 128 and 256"
                    ),
                    "use --device cpu for this model",
                ));
            }
        };
        if !block_tokens.is_multiple_of(16) {
            return Err(Error::invalid(
                format!("kv_block_tokens = {block_tokens}: the CUDA attention kernels need a multiple of 16"),
                "set kv_block_tokens=16",
            ));
        }
        let multiprocessors = gpu.facts().multiprocessors as usize;
        let blocks = (SPLIT_BLOCKS * multiprocessors) as u64;
        let part_bytes = ((8 * shape.head_dim + 16) * 4) as u64;
        Ok(Self {
            prepare: gpu.kernel(&units::ATTENTION, prepare)?,
            attend: gpu.kernel(&units::ATTENTION, attend)?,
            shape: shape.clone(),
            block_tokens,
            qkv_pitch,
            eps,
            multiprocessors,
            angles: rotation_table(gpu, shape, positions)?,
            parts: gpu.allocate(blocks * part_bytes)?,
            counters: gpu.allocate_zeroed(4 * blocks)?,
        })
    }

    /// Blocks of a row before its context is split: one for eight query heads of a kv head.
    fn blocks_a_row(shape: &Attention) -> usize {
        shape.kv_heads * (shape.heads / shape.kv_heads).div_ceil(8)
    }

    /// Bytes of K and V of one layer for `blocks` blocks, each.
    pub fn pool_bytes(&self, blocks: usize) -> u64 {
        (blocks * self.block_tokens * self.shape.kv_heads * self.shape.head_dim) as u64 * 2
    }

    /// Norms and rotates q into `q` fp16 [rows, heads * head_dim], and k into the cache with v, or one `part` of that.
    ///
    /// # Errors
    /// A launch that the driver refuses, in its words.
    ///
    /// # Safety
    /// Pointers are valid for `rows` rows, and every row's block is inside the cache.
    #[expect(clippy::too_many_arguments, reason = "the operands of one kernel")]
    pub unsafe fn prepare(
        &self,
        stream: &Stream,
        rows: usize,
        part: Part,
        qkv: u64,
        (q_norm, k_norm): (Option<&DeviceBuffer>, Option<&DeviceBuffer>),
        q: u64,
        cache: LayerCache,
        step: StepRows,
    ) -> Result<()> {
        let shape = &self.shape;
        let all = shape.heads + 2 * shape.kv_heads;
        let units = match part {
            Part::All => 0..all,
            Part::Queries => 0..shape.heads,
            Part::KeysAndValues => shape.heads..all,
        };
        let (rotation, heads) = (self.rotation(), self.heads());
        let address = |norm: Option<&DeviceBuffer>| norm.map_or(0, DeviceBuffer::pointer);
        let args = [
            qkv.into(),
            address(q_norm).into(),
            address(k_norm).into(),
            (&self.angles).into(),
            q.into(),
            cache.keys.into(),
            cache.values.into(),
            step.rows.into(),
            step.table.into(),
            step.header.into(),
            Arg::Struct(bytes_of(&heads)),
            Arg::Struct(bytes_of(&rotation)),
            (units.start as i32).into(),
            (units.end as i32).into(),
        ];
        let bytes = (rows * units.len() * shape.head_dim * 4) as u64;
        let launch =
            Launch::grid([rows as u32, units.len().div_ceil(4) as u32, 1], 128).overlapping().cost(bytes, 0);
        // SAFETY: the kernel's parameters in order; the rest is the caller's promise.
        unsafe { stream.launch(&self.prepare, launch, &args) }
    }

    /// out = attention of each row, fp16 [rows, heads * head_dim], times sigmoid(gate) where the model has one.
    ///
    /// Of a sequence's tokens this step's `prepare` wrote at most the `recent` last: older ones are read early. (Blocks shared
    /// with another sequence are of earlier steps: `Cache::publish`.)
    /// `context` is the sum of the rows' visible tokens, for the byte count (0 where it is not known, in a capture).
    ///
    /// # Errors
    /// A launch that the driver refuses, in its words.
    ///
    /// # Safety
    /// As [`Self::prepare`]; the rows' other tokens are in the cache.
    #[expect(clippy::too_many_arguments, reason = "the operands of one kernel")]
    pub unsafe fn attend(
        &self,
        stream: &Stream,
        rows: usize,
        context: u64,
        recent: usize,
        q: u64,
        qkv: u64,
        cache: LayerCache,
        out: u64,
        step: StepRows,
    ) -> Result<()> {
        let shape = &self.shape;
        let blocks = rows * Self::blocks_a_row(shape);
        let splits = (SPLIT_BLOCKS * self.multiprocessors / blocks).clamp(1, MAX_SPLITS);
        let scale = std::f32::consts::LOG2_E / (shape.head_dim as f32).sqrt();
        let split = [splits as i32, MIN_TILES, scale.to_bits() as i32, recent as i32];
        let heads = self.heads();
        let args = [
            q.into(),
            qkv.into(),
            cache.keys.into(),
            cache.values.into(),
            out.into(),
            step.rows.into(),
            step.table.into(),
            step.header.into(),
            (&self.parts).into(),
            (&self.counters).into(),
            Arg::Struct(bytes_of(&heads)),
            Arg::Struct(bytes_of(&split)),
        ];
        let token_bytes = (4 * shape.head_dim * shape.kv_heads) as u64;
        let bytes = context * token_bytes + (rows * shape.heads * shape.head_dim * 4) as u64;
        let flops = 4 * context * (shape.heads * shape.head_dim) as u64;
        let grid = [rows as u32, splits as u32, Self::blocks_a_row(shape) as u32];
        let shared = shared_bytes(shape.head_dim);
        let launch =
            Launch::grid(grid, 32 * WARPS as u32).shared(shared as u32).overlapping().cost(bytes, flops);
        // SAFETY: the kernel's parameters in order; `parts` and `counters` hold SPLIT_BLOCKS blocks a multiprocessor,
        // and no more are split; the rest is the caller's promise.
        unsafe { stream.launch(&self.attend, launch, &args) }
    }

    /// The kernels' `Rotation`.
    fn rotation(&self) -> [i32; 3] {
        let shape = &self.shape;
        [shape.rope.rotary_dim as i32, i32::from(shape.qk_norm), self.eps.to_bits() as i32]
    }

    /// The kernels' `Heads`.
    fn heads(&self) -> [i32; 5] {
        let shape = &self.shape;
        [
            shape.heads as i32,
            shape.kv_heads as i32,
            self.block_tokens as i32,
            self.qkv_pitch as i32,
            i32::from(shape.output_gate),
        ]
    }
}

/// Shared memory that the attention kernels ask for at launch (see the file).
fn shared_bytes(head_dim: usize) -> usize {
    WARPS * SLOTS * 32 * head_dim + 16 * head_dim
}

fn rotation_table(gpu: &Gpu, shape: &Attention, positions: usize) -> Result<DeviceBuffer> {
    let frequencies: Vec<u64> = shape.rope.inverse_frequencies().iter().map(|f| f.to_bits()).collect();
    let frequencies = gpu.upload(&frequencies)?;
    let pairs = shape.rope.rotary_dim / 2;
    let total = (positions * pairs) as u64;
    let angles = gpu.allocate(8 * total)?;
    let stream = Stream::new(gpu)?;
    let kernel = gpu.kernel(&units::ATTENTION, "rotation_table")?;
    let args = [(&frequencies).into(), (&angles).into(), (pairs as u32).into(), total.into()];
    // SAFETY: the kernel's parameters in order; `angles` holds `total` pairs of floats.
    unsafe {
        stream.launch(
            &kernel,
            Launch::new(total.div_ceil(256).max(1) as u32, 256).cost(8 * total, 0),
            &args,
        )?
    };
    stream.synchronize()?;
    Ok(angles)
}
