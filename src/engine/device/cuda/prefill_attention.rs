//! Launches of causal attention over the paged cache for prompt chunks (cuda/prefill_attention*.cu).

use super::driver::{Gpu, Kernel};
use super::launch::{Arg, Launch, Stream, bytes_of};
use super::tensor_map::TensorMap;
use super::units;
use crate::{Error, Result};

/// Keys a block works on at a time, in the portable file and in Hopper's.
const TILE_KEYS: usize = 64;
const TILE_KEYS_HOPPER: usize = 80;
/// Keys of a copy on Hopper, which never crosses a block of the cache.
const BOX_KEYS: usize = 16;

/// A prompt chunk: `new_tokens` rows of q from `first_row` on, after `context_tokens` cached ones, whose blocks are in row
/// `table` of the block tables. As the kernel's `Chunk`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Chunk {
    pub first_row: i32,
    pub new_tokens: i32,
    pub context_tokens: i32,
    pub table: i32,
}

/// K and V of one layer in the paged cache, fp16: element d of token t of kv head h lies at
/// `table[t / block_tokens] * block_stride + (t % block_tokens) * token_stride + h * head_stride + d` (strides in
/// elements, multiples of 8). `block_tokens` is a multiple of 16.
#[derive(Debug, Clone, Copy)]
pub struct PagedKv {
    /// Device addresses.
    pub keys: u64,
    pub values: u64,
    pub block_stride: u64,
    pub token_stride: u32,
    pub head_stride: u32,
    pub block_tokens: u32,
    /// Blocks in the pool.
    pub blocks: u64,
    /// i32 [sequences, table_stride] block ids.
    pub tables: u64,
    pub table_stride: i32,
}

/// Rows of halves on the device: `pointer` is the first, rows are `stride` elements apart.
#[derive(Debug, Clone, Copy)]
pub struct Rows {
    pub pointer: u64,
    pub stride: i32,
}

/// The output gate: the row of head h begins `head_stride * h` elements into a row.
#[derive(Debug, Clone, Copy)]
pub struct Gate {
    pub rows: Rows,
    pub head_stride: i32,
}

/// Work of one launch, made once a step and used by every layer.
#[derive(Debug, Clone, Default)]
pub struct Tiles {
    /// (chunk, first query) pairs, those with most keys first so that the last blocks to start are short.
    pub list: Vec<[i32; 2]>,
    /// Pairs of (query, key) that see each other, for the FLOP count.
    pub visible_pairs: u64,
    /// Rows of q, and keys of all chunks.
    pub rows: u64,
    pub keys: u64,
}

/// Attention kernels of one head size.
#[derive(Debug, Clone, Copy)]
pub struct PrefillAttention {
    kernel: Kernel,
    head_dim: usize,
    tile_rows: usize,
    threads: u32,
    shared_bytes: u32,
    hopper: bool,
}

impl PrefillAttention {
    /// The kernel for `head_dim` on this GPU: warpgroup products on Hopper, else the portable one. `portable` forces the latter.
    ///
    /// # Errors
    /// A head size other than 64, 128 or 256; compilation or loading.
    pub fn new(gpu: &Gpu, head_dim: usize, portable: bool) -> Result<Self> {
        let name = match head_dim {
            64 => "prefill_attention_64",
            128 => "prefill_attention_128",
            256 => "prefill_attention_256",
            _ => {
                return Err(Error::invalid(
                    format!("head_dim = {head_dim}: the CUDA attention kernels are made for 64, 128 and 256"),
                    "use --device cpu for this model",
                ));
            }
        };
        let tile_bytes = (TILE_KEYS * head_dim * 2) as u32;
        let capability = gpu.facts().capability;
        if units::PREFILL_ATTENTION_HOPPER.supports(capability) && head_dim >= 128 && !portable {
            let kernel = gpu.kernel(&units::PREFILL_ATTENTION_HOPPER, name)?;
            let key_bytes = (TILE_KEYS_HOPPER * head_dim * 2) as u32;
            // Two query tiles of 64, two K slots, two V slots, and room to align them to 1024 bytes.
            return Ok(Self {
                kernel,
                head_dim,
                tile_rows: 128,
                threads: 384,
                shared_bytes: 2 * tile_bytes + 4 * key_bytes + 1024,
                hopper: true,
            });
        }
        // As WARPS in the file: only these parts have shared memory for eight warps' rows.
        let warps = if matches!(capability, 80 | 90 | 100) { 8 } else { 4 };
        let tile_rows = 16 * warps;
        Ok(Self {
            kernel: gpu.kernel(&units::PREFILL_ATTENTION, name)?,
            head_dim,
            tile_rows,
            threads: 32 * warps as u32,
            shared_bytes: (tile_rows * head_dim * 2) as u32 + 2 * tile_bytes,
            hopper: false,
        })
    }

    /// Cuts chunks into the tiles of this kernel.
    pub fn tiles(&self, chunks: &[Chunk]) -> Tiles {
        let mut tiles = Tiles::default();
        for (index, chunk) in chunks.iter().enumerate() {
            let (new, context) = (chunk.new_tokens as u64, chunk.context_tokens as u64);
            tiles.visible_pairs += new * context + new * (new + 1) / 2;
            tiles.rows += new;
            tiles.keys += new + context;
            for first in (0..chunk.new_tokens).step_by(self.tile_rows) {
                tiles.list.push([index as i32, first]);
            }
        }
        tiles.list.sort_by_key(|&[chunk, first]| -(chunks[chunk as usize].context_tokens + first));
        tiles
    }

    /// Queues out = softmax(q kᵀ / sqrt(head_dim)) v, times sigmoid(gate) where there is one. `chunks` and `tiles_on_device`
    /// are device addresses of what [`Self::tiles`] was made from and its list.
    ///
    /// # Errors
    /// A launch that the driver refuses, in its words.
    ///
    /// # Safety
    /// Every pointer is valid for the rows, blocks and tables that the chunks name, until the work is done.
    #[expect(clippy::too_many_arguments, reason = "the operands of one product")]
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        q: Rows,
        gate: Option<Gate>,
        out: Rows,
        cache: &PagedKv,
        heads: usize,
        kv_heads: usize,
        chunks: u64,
        tiles: &Tiles,
        tiles_on_device: u64,
    ) -> Result<()> {
        if tiles.list.is_empty() {
            return Ok(());
        }
        let (gate_pointer, gate_stride, gate_head_stride) =
            gate.map_or((0, 0, 0), |gate| (gate.rows.pointer, gate.rows.stride, gate.head_stride));
        let scale_log2 = std::f32::consts::LOG2_E / (self.head_dim as f32).sqrt();
        let row_bytes = (2 * self.head_dim) as u64;
        let q_rows = tiles.rows * heads as u64 * if gate.is_some() { 3 } else { 2 };
        let bytes = row_bytes * (q_rows + 2 * tiles.keys * kv_heads as u64);
        let flops = 4 * self.head_dim as u64 * heads as u64 * tiles.visible_pairs;
        // Query heads of one key-value head that share what they read.
        let cluster = if self.hopper && (heads / kv_heads).is_multiple_of(2) { 2 } else { 1 };
        let launch = Launch::grid([heads as u32, tiles.list.len() as u32, 1], self.threads)
            .shared(self.shared_bytes)
            .cluster(cluster)
            .overlapping()
            .cost(bytes, flops);
        let mut args = vec![
            Arg::from(q.pointer),
            Arg::from(q.stride),
            Arg::from(gate_pointer),
            Arg::from(gate_stride),
            Arg::from(gate_head_stride),
            Arg::from(out.pointer),
            Arg::from(out.stride),
        ];
        let work = [
            Arg::from(chunks),
            Arg::from(tiles_on_device),
            Arg::from((heads / kv_heads) as i32),
            Arg::from(scale_log2),
        ];
        // The last word of either structure ends in padding.
        let tokens = u64::from(cache.block_tokens);
        let stride = cache.table_stride as u64 & 0xffff_ffff;
        if self.hopper {
            let map = |address| {
                TensorMap::halves(
                    address,
                    [self.head_dim as u64, tokens, kv_heads as u64, cache.blocks],
                    [u64::from(cache.token_stride), u64::from(cache.head_stride), cache.block_stride],
                    [64, BOX_KEYS as u32, 1, 1],
                )
            };
            let (keys, values) = (map(cache.keys)?, map(cache.values)?);
            let tables = [cache.tables, stride | tokens << 32];
            args.extend([keys.words(), values.words(), &tables].map(|words| Arg::Struct(bytes_of(words))));
            args.extend(work);
            // SAFETY: the arguments are those of Hopper's kernels, in their order; pointers are the caller's promise.
            return unsafe { stream.launch(&self.kernel, launch, &args) };
        }
        let strides = u64::from(cache.token_stride) | u64::from(cache.head_stride) << 32;
        let paged = [cache.keys, cache.values, cache.block_stride, strides, tokens, cache.tables, stride];
        args.push(Arg::Struct(bytes_of(&paged)));
        args.extend(work);
        // SAFETY: the arguments are those of the portable kernels, in their order; pointers are the caller's promise.
        unsafe { stream.launch(&self.kernel, launch, &args) }
    }
}
