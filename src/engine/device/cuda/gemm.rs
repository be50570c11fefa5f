//! Launches of the products of many rows on Hopper (cuda/gemm_hopper.cu).

use super::driver::plain::Plain;
use super::driver::{Gpu, Kernel};
use super::launch::{Arg, Launch, LaunchCost, Stream, bytes_of};
use super::products::{FLOAT, HALF, PARTS, SILU};
use super::tensor_map::TensorMap;
use super::units;
use crate::Result;

/// Rows of x and of W that a block makes, as the kernel's name says.
const TILE_ROWS: usize = 128;
const TILE_COLUMNS: usize = 192;
pub(super) const NAME: &str = "gemm_128x192";
/// Rows of tiles that are made column by column, so that the rows of x and W in use at a time stay in the L2.
const GROUP: u32 = 8;
/// Columns of k in a stage of the ring: 128 bytes.
const STAGE_COLUMNS: usize = 64;
/// Threads of a block: two groups that multiply, and one that asks for what they read.
const THREADS: u32 = 384;
/// Rows of y that a warp hands to the copy engine at a time, of 128 bytes; each of eight warps has two such pieces.
const PIECE_ROWS: usize = 16;
const PIECES_BYTES: usize = 16 * PIECE_ROWS * 128;
/// Shared memory of a block, in which the barriers take up to 256 bytes and aligning the ring up to 1 KB.
const BLOCK_BYTES: usize = 227 << 10;

/// `Gemm` of cuda/gemm_hopper.cu.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Arguments {
    x: [u64; 16],
    w: [u64; 16],
    y: [u64; 16],
    bias: u64,
    rows: u32,
    n: u32,
    k: u32,
    output: u32,
    group: u32,
    /// What the alignment of the maps, 64 bytes, adds to the structure.
    unused: [u32; 9],
}

// SAFETY: integers only, and each field begins where the one before it ends: no padding.
unsafe impl Plain for Arguments {}

/// y[rows, n] = x[rows, k] W[n, k]ᵀ + bias, rows of y `stride` elements apart; n, k and `stride` are multiples of 8, and all
/// addresses of 16 bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Operands {
    pub x: u64,
    pub w: u64,
    /// fp32, or 0 for none.
    pub bias: u64,
    pub y: u64,
    pub rows: usize,
    pub n: usize,
    pub k: usize,
    pub stride: usize,
    /// `OUTPUT_*` of cuda/product.cuh.
    pub output: u32,
}

pub(super) struct Gemm {
    kernel: Kernel,
    multiprocessors: usize,
}

impl Gemm {
    /// `None` where the GPU has no warpgroup products.
    ///
    /// # Errors
    /// Compilation or loading.
    pub fn open(gpu: &Gpu) -> Result<Option<Self>> {
        let unit = &units::GEMM_HOPPER;
        if !unit.supports(gpu.facts().capability) {
            return Ok(None);
        }
        let multiprocessors = gpu.facts().multiprocessors as usize;
        Ok(Some(Self { kernel: gpu.kernel(unit, NAME)?, multiprocessors }))
    }

    /// Queues a product.
    ///
    /// # Safety
    /// Operands are valid until the work is done.
    pub unsafe fn launch(&self, stream: &Stream, of: Operands, cost: LaunchCost) -> Result<()> {
        let Operands { rows, n, k, stride, output, .. } = of;
        // The blocks of a cluster make the same columns; each asks for one half of W's rows.
        let x = TensorMap::halves_matrix(of.x, (rows, k), k, (TILE_ROWS, STAGE_COLUMNS))?;
        let w = TensorMap::halves_matrix(of.w, (n, k), k, (TILE_COLUMNS / 2, STAGE_COLUMNS))?;
        let y = match output {
            HALF => TensorMap::halves_matrix(of.y, (rows, n), stride, (PIECE_ROWS, 64))?,
            SILU => TensorMap::halves_matrix(of.y, (rows, n / 2), stride, (PIECE_ROWS, 32))?,
            _ => TensorMap::floats_matrix(of.y, (rows, n), stride, (PIECE_ROWS, 32))?,
        };
        let arguments = Arguments {
            x: x.into_words(),
            w: w.into_words(),
            y: y.into_words(),
            bias: of.bias,
            rows: rows as u32,
            n: n as u32,
            k: k as u32,
            output: if output == PARTS { FLOAT } else { output },
            group: GROUP,
            unused: [0; 9],
        };
        let clusters = rows.div_ceil(2 * TILE_ROWS) * n.div_ceil(TILE_COLUMNS);
        let blocks = 2 * clusters.min(self.multiprocessors / 2);
        let launch = Launch::new(blocks as u32, THREADS).cluster(2).shared(shared_bytes() as u32);
        let launch = Launch { cost, ..launch }.overlapping();
        // SAFETY: the one parameter of the kernel is this structure; what it points to is the caller's promise.
        unsafe { stream.launch(&self.kernel, launch, &[Arg::Struct(bytes_of(&[arguments]))]) }
    }
}

/// The ring, as many stages as there is room for, the pieces of y, and room to align them to 1024 bytes: as the kernel has it.
fn shared_bytes() -> usize {
    let stage = (TILE_ROWS + TILE_COLUMNS) * 2 * STAGE_COLUMNS;
    let stages = (BLOCK_BYTES - 1024 - 256 - PIECES_BYTES) / stage;
    1024 + stages * stage + PIECES_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_agree_with_the_kernel() {
        assert_eq!(size_of::<Arguments>() % 64, 0);
        assert_eq!(NAME, format!("gemm_{TILE_ROWS}x{TILE_COLUMNS}"));
        assert!(shared_bytes() + 256 <= BLOCK_BYTES);
    }
}
