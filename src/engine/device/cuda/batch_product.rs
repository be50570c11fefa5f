//! Launches of the products on Hopper (cuda/products_hopper.cu; from 96 rows on cuda/products_wide.cu), and how each is cut
//! into blocks.

mod wide;

use super::compile::Unit;
use super::driver::plain::Plain;
use super::driver::{Gpu, Kernel};
use super::launch::{Arg, Launch, LaunchCost, Stream, bytes_of};
use super::matrix::GATE_UP_INTERLEAVE;
use super::products::{Arguments, PARTS, SILU};
use super::tensor_map::TensorMap;
use super::units;
use crate::Result;

/// Columns of k in a tile: 128 bytes, the widest swizzle.
const TILE_COLUMNS: usize = 64;
/// `MAX_STAGES` of the kernels.
const MAX_STAGES: usize = 16;
/// Rows of W that a group of four warps multiplies.
const GROUP_ROWS: usize = 64;
/// Shared memory of a multiprocessor, in which each block also takes 1 KB for the system, 512 bytes for barriers and up to
/// 1 KB to align its ring.
const MULTIPROCESSOR_BYTES: usize = 228 << 10;
const BLOCK_BYTES: usize = (2 << 10) + 512;

/// Products that may be split along k have parts enough to give a block at least so many rows of W (fewer read x too often, more
/// leave more sums to add), and then as many more as divide the multiprocessors with the smallest remainder.
const PART_ROWS: usize = 80;
/// Blocks a multiprocessor from which all have [`MANY_WAVES_ROWS`] rows.
const FEW_WAVES: usize = 4;
const MANY_WAVES_ROWS: usize = 128;
/// Weights on their way to a multiprocessor at a time, to 32 rows of x: with less the memory is not always busy, with more all that is
/// read beside them waits longer (docs/perf-log.md).
const AHEAD_BYTES: usize = 56 << 10;
/// The same where less waits: of a single row, and of products in parts (in both cases not where the ring takes all tiles: its block
/// stands beside a mixer that is still at work).
const MORE_AHEAD_BYTES: usize = 62 << 10;
/// Rows of x up to which a step's products together are faster than cuBLASLt's.
pub const FASTER_ROWS: usize = 128;
/// Rows of x from which the batch is the product's M side.
const WIDE_ROWS: usize = 96;

/// Rows of x that a block takes, and the most groups there is a kernel for.
const BATCHES: [(usize, usize); 5] = [(8, 3), (16, 3), (32, 3), (64, 3), (128, 3)];
pub(super) use wide::NAMES as WIDE_NAMES;
/// By the rows of x and the groups.
pub(super) const NAMES: [[&str; 3]; 5] = [
    ["product_batch_8_1", "product_batch_8_2", "product_batch_8_3"],
    ["product_batch_16_1", "product_batch_16_2", "product_batch_16_3"],
    ["product_batch_32_1", "product_batch_32_2", "product_batch_32_3"],
    ["product_batch_64_1", "product_batch_64_2", "product_batch_64_3"],
    ["product_batch_128_1", "product_batch_128_2", "product_batch_128_3"],
];

/// `BatchProduct` of cuda/products_hopper.cuh.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct BatchArguments {
    w: [u64; 16],
    x: [u64; 16],
    bias: u64,
    y: u64,
    part_stride: u64,
    rows: u32,
    n: u32,
    k: u32,
    stride: u32,
    output: u32,
    parts: u32,
    block_rows: u32,
    x_rows: u32,
    stages: u32,
    ahead: u32,
}

// SAFETY: integers only, and each field begins where the one before it ends: no padding.
unsafe impl Plain for BatchArguments {}

/// How a product is launched.
struct Plan<'a> {
    kernel: &'a Kernel,
    threads: usize,
    shared_bytes: usize,
    cluster: usize,
    /// Rows of W and of x in a block, and those of x that one copy brings.
    block_rows: usize,
    batch: usize,
    x_rows: usize,
    /// Blocks along W, a multiple of the cluster's.
    tiles: usize,
    parts: usize,
    stages: usize,
    /// Tiles of W on their way to a block.
    ahead: usize,
}

/// How a product is cut into blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Cut {
    /// Rows of x in a block.
    batch: usize,
    /// Rows of W in a block.
    rows: usize,
    /// Parts of k.
    parts: usize,
    /// Tiles in the ring.
    stages: usize,
}

impl Cut {
    fn groups(&self) -> usize {
        self.rows.div_ceil(GROUP_ROWS)
    }

    fn kernel(&self) -> usize {
        let before = BATCHES.iter().take_while(|(batch, _)| *batch < self.batch);
        before.map(|(_, groups)| groups).sum::<usize>() + self.groups() - 1
    }

    fn stage_bytes(&self) -> usize {
        (self.rows + self.batch) * 2 * TILE_COLUMNS
    }

    /// Tiles of W that a block takes at most.
    fn tiles(&self, k: usize) -> usize {
        k.div_ceil(TILE_COLUMNS).div_ceil(self.parts)
    }

    /// Sums of a block, which go where the ring was.
    fn sum_bytes(&self) -> usize {
        4 * self.batch * (GROUP_ROWS * self.groups() + 4)
    }

    /// Tiles of W that a block asks for ahead of their arrival: [`AHEAD_BYTES`] or [`MORE_AHEAD_BYTES`], but all of the ring where
    /// every multiprocessor has many blocks and nothing waits behind them.
    fn ahead(&self, multiprocessors: usize, rows: usize, n: usize, k: usize) -> usize {
        let alone = n.div_ceil(self.rows) > FEW_WAVES * multiprocessors;
        let comes_round = self.tiles(k) > self.stages;
        let bytes = if comes_round && (self.parts > 1 || rows == 1) { MORE_AHEAD_BYTES } else { AHEAD_BYTES };
        let ahead = if alone { self.stages } else { bytes / (self.rows * 2 * TILE_COLUMNS) };
        ahead.clamp(1, self.stages)
    }

    /// The ring, what the last group may read past its end, and room to align it to 1024 bytes.
    fn shared_bytes(&self) -> usize {
        1024 + self.stages * self.stage_bytes() + slack(self.batch, self.rows)
    }
}

fn slack(batch: usize, rows: usize) -> usize {
    (rows.next_multiple_of(GROUP_ROWS)).saturating_sub(rows + batch) * 2 * TILE_COLUMNS
}

/// A matrix [rows, columns] of fp16 at `at` as boxes of `box_rows` rows by 64 columns for the copy engine.
fn tensor_map(at: u64, rows: usize, columns: usize, box_rows: usize) -> Result<[u64; 16]> {
    Ok(TensorMap::streamed_matrix(at, (rows, columns), (box_rows, TILE_COLUMNS))?.into_words())
}

pub struct BatchProducts {
    kernels: Vec<Kernel>,
    wide: Vec<Kernel>,
    multiprocessors: usize,
}

impl BatchProducts {
    /// `None` where the GPU has no warpgroup products.
    ///
    /// # Errors
    /// Compilation or loading.
    pub fn open(gpu: &Gpu) -> Result<Option<Self>> {
        if !units::PRODUCTS_HOPPER[0].supports(gpu.facts().capability) {
            return Ok(None);
        }
        let all = |units: &[Unit]| {
            let names = units.iter().flat_map(|unit| unit.hot.iter().map(move |name| (unit, name)));
            names.map(|(unit, name)| gpu.kernel(unit, name)).collect::<Result<Vec<_>>>()
        };
        let (kernels, wide) = (all(&units::PRODUCTS_HOPPER)?, all(&units::PRODUCTS_WIDE)?);
        Ok(Some(Self { kernels, wide, multiprocessors: gpu.facts().multiprocessors as usize }))
    }

    /// Whether they are to be used where cuBLASLt is installed too.
    pub fn beats_library(&self, rows: usize) -> bool {
        rows <= FASTER_ROWS
    }

    fn plan(&self, arguments: &Arguments, max_parts: usize) -> Plan<'_> {
        let Arguments { rows, n, k, output, .. } = *arguments;
        let (rows, n, k) = (rows as usize, n as usize, k as usize);
        let max_parts = if output == PARTS { max_parts } else { 1 };
        let multiple = if output == SILU { 2 * GATE_UP_INTERLEAVE } else { 8 };
        if rows < WIDE_ROWS {
            let cut = cut(rows, n, k, max_parts, multiple, self.multiprocessors);
            Plan {
                kernel: &self.kernels[cut.kernel()],
                threads: 128 * cut.groups() + 64,
                shared_bytes: cut.shared_bytes(),
                cluster: 1,
                block_rows: cut.rows,
                batch: cut.batch,
                x_rows: rows.min(cut.batch),
                tiles: n.div_ceil(cut.rows),
                parts: cut.parts,
                stages: cut.stages,
                ahead: cut.ahead(self.multiprocessors, rows, n, k),
            }
        } else {
            let cut = wide::Cut::new(rows, n, k, max_parts, multiple, self.multiprocessors);
            Plan {
                kernel: &self.wide[cut.kernel()],
                threads: cut.threads(),
                shared_bytes: cut.shared_bytes(),
                cluster: wide::CLUSTER,
                block_rows: cut.rows,
                batch: cut.batch,
                x_rows: cut.x_rows,
                tiles: n.div_ceil(cut.rows).next_multiple_of(wide::CLUSTER),
                parts: cut.parts,
                stages: cut.stages,
                ahead: cut.stages,
            }
        }
    }

    /// Queues the product that `arguments` tells of. Returns the parts written.
    ///
    /// # Safety
    /// As [`super::products::Products::launch`]; rows of x and W are multiples of 16 bytes.
    pub(super) unsafe fn launch(
        &self,
        stream: &Stream,
        arguments: Arguments,
        max_parts: usize,
        cost: LaunchCost,
    ) -> Result<usize> {
        let plan = self.plan(&arguments, max_parts);
        let (rows, n, k) = (arguments.rows as usize, arguments.n as usize, arguments.k as usize);
        let block = BatchArguments {
            w: tensor_map(arguments.w, n, k, plan.block_rows)?,
            x: tensor_map(arguments.x, rows, k, plan.x_rows)?,
            bias: arguments.bias,
            y: arguments.y,
            part_stride: arguments.part_stride,
            rows: arguments.rows,
            n: arguments.n,
            k: arguments.k,
            stride: arguments.stride,
            output: arguments.output,
            parts: plan.parts as u32,
            block_rows: plan.block_rows as u32,
            x_rows: plan.x_rows as u32,
            stages: plan.stages as u32,
            ahead: plan.ahead as u32,
        };
        debug_assert!(rows <= plan.batch, "a block has all rows of x");
        let launch = Launch::grid([plan.tiles as u32, plan.parts as u32, 1], plan.threads as u32)
            .shared(plan.shared_bytes as u32)
            .cluster(plan.cluster as u32)
            .cost(cost.bytes, cost.flops)
            .overlapping();
        // SAFETY: the one parameter of these kernels is this structure; pointers are the caller's promise.
        unsafe { stream.launch(plan.kernel, launch, &[Arg::Struct(bytes_of(&[block]))])? };
        Ok(plan.parts)
    }
}

/// Cuts a product of W [n, k] into one block for each multiprocessor, or as few for each as its kernels allow. `multiple`: of
/// what blocks' rows are multiples.
fn cut(rows: usize, n: usize, k: usize, max_parts: usize, multiple: usize, multiprocessors: usize) -> Cut {
    let most = BATCHES[BATCHES.len() - 1];
    let (batch, groups) = BATCHES.into_iter().find(|(batch, _)| *batch >= rows).unwrap_or(most);
    let max_parts = max_parts.min(k.div_ceil(TILE_COLUMNS));
    let fewest = (PART_ROWS * multiprocessors).div_ceil(n).min(max_parts);
    let parts = (fewest..=max_parts).min_by_key(|parts| multiprocessors % parts).unwrap_or(1);
    let rows_for = |waves: usize| {
        let tiles = (multiprocessors * waves / parts).max(1);
        n.div_ceil(tiles).next_multiple_of(multiple)
    };
    let tallest = GROUP_ROWS * groups;
    let mut waves = 1;
    while rows_for(waves) > tallest {
        waves += 1;
    }
    // Where every multiprocessor has many, blocks of whole groups waste least.
    let block_rows = if waves > FEW_WAVES { MANY_WAVES_ROWS } else { rows_for(waves) };
    let mut cut = Cut { batch, rows: block_rows, parts, stages: 0 };
    let room = MULTIPROCESSOR_BYTES - BLOCK_BYTES - slack(batch, block_rows);
    // No more slots than a block has tiles (or its sums need), so that the mixer in front fits beside it.
    let enough = cut.tiles(k).max(2).max(cut.sum_bytes().div_ceil(cut.stage_bytes()));
    cut.stages = (room / cut.stage_bytes()).min(MAX_STAGES).min(enough);
    cut
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_agree_with_the_kernels() {
        assert_eq!(size_of::<BatchArguments>() % 64, 0);
        let groups: usize = BATCHES.iter().map(|(_, groups)| groups).sum();
        assert_eq!(groups, NAMES.as_flattened().len());
        for (batch, rows) in [(8, 64), (16, 64), (32, 144), (64, 65), (128, 192)] {
            let cut = Cut { batch, rows, parts: 1, stages: 4 };
            assert_eq!(
                NAMES.as_flattened()[cut.kernel()],
                format!("product_batch_{batch}_{}", rows.div_ceil(64))
            );
        }
    }

    #[test]
    fn cuts_fill_the_multiprocessors_and_fit_them() {
        for rows in [1, 8, 9, 16, 17, 64, 65, 128, 256] {
            for (n, k, max_parts, multiple) in [
                (12352, 2560, 1, 8),
                (10240, 2560, 1, 8),
                (2560, 4096, 8, 8),
                (18432, 2560, 1, 16),
                (2560, 9216, 8, 8),
                (248_320, 2560, 1, 8),
                (16, 64, 1, 16),
                (24, 72, 8, 8),
            ] {
                let cut = cut(rows, n, k, max_parts, multiple, 132);
                let what = format!("{rows} rows, {n} x {k}: {cut:?}");
                assert!(cut.rows.is_multiple_of(multiple) && (1..=max_parts).contains(&cut.parts), "{what}");
                assert!(cut.kernel() < NAMES.as_flattened().len() && cut.stages >= 2, "{what}");
                assert!(cut.shared_bytes() + 512 <= 227 << 10, "{what}");
                assert!(cut.sum_bytes() <= cut.stages * cut.stage_bytes(), "{what}");
                assert!((1..=cut.stages).contains(&cut.ahead(132, rows, n, k)), "{what}");
                let blocks = n.div_ceil(cut.rows) * cut.parts;
                if (2560..20_000).contains(&n) {
                    assert!((120..=132).contains(&blocks), "{what}: {blocks} blocks");
                    // Six parts of 22 blocks each, not five of 25.
                    assert!(n != 2560 || rows > 64 || blocks == 132, "{what}: {blocks} blocks");
                }
            }
        }
    }
}
