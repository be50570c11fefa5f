//! How products of 96 to 256 rows (cuda/products_wide.cu) are cut into blocks: rows of W by what keeps all multiprocessors equally
//! busy.

use super::{BLOCK_BYTES, MAX_STAGES, MULTIPROCESSOR_BYTES, TILE_COLUMNS};

/// Rows of x that a block may have.
const BATCHES: [usize; 2] = [128, 256];
/// Blocks of a cluster, which share x.
pub(super) const CLUSTER: usize = 2;
/// Rows of W that there are kernels for; a block may have fewer.
const TALLEST: [usize; 5] = [80, 96, 112, 128, 144];
/// What a tile takes besides its rows of W, in rows of W: its x, and its share of a block's start and end.
const BESIDES_ROWS: usize = 8;
/// Blocks with more sums than these have a third group of four warps, to take registers from.
const EQUAL_REGISTERS_SUMS: usize = 256 * 128;
/// By the rows of W, then those of x.
pub(in super::super) const NAMES: [[&str; 2]; 5] = [
    ["product_wide_128_80", "product_wide_256_80"],
    ["product_wide_128_96", "product_wide_256_96"],
    ["product_wide_128_112", "product_wide_256_112"],
    ["product_wide_128_128", "product_wide_256_128"],
    ["product_wide_128_144", "product_wide_256_144"],
];

/// How a product is cut into blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Cut {
    /// Rows of x in a block, and those that each block of a cluster asks for.
    pub(super) batch: usize,
    pub(super) x_rows: usize,
    /// Rows of W in a block.
    pub(super) rows: usize,
    /// Parts of k.
    pub(super) parts: usize,
    /// Tiles in the ring.
    pub(super) stages: usize,
}

impl Cut {
    /// Cuts a product of W [n, k] for the least work of the busiest multiprocessor. `multiple`: of what blocks' rows are multiples.
    pub(super) fn new(
        rows: usize,
        n: usize,
        k: usize,
        max_parts: usize,
        multiple: usize,
        multiprocessors: usize,
    ) -> Self {
        let batch = if rows <= BATCHES[0] { BATCHES[0] } else { BATCHES[1] };
        let x_rows = rows.min(batch).div_ceil(CLUSTER).next_multiple_of(8);
        let tiles_of_k = k.div_ceil(TILE_COLUMNS);
        let mut cut = Self { batch, x_rows, rows: 0, parts: 0, stages: 0 };
        let mut least = usize::MAX;
        for parts in 1..=max_parts.min(tiles_of_k) {
            for waves in 1.. {
                let tiles = (multiprocessors * waves / (parts * CLUSTER) * CLUSTER).max(1);
                let rows = n.div_ceil(tiles).next_multiple_of(multiple);
                let Some(tallest) = tallest(rows) else { continue };
                let work = waves * tiles_of_k.div_ceil(parts) * (tallest + BESIDES_ROWS);
                if work < least {
                    (cut.rows, cut.parts, least) = (rows, parts, work);
                }
                if tallest == TALLEST[0] {
                    break;
                }
            }
        }
        let room = MULTIPROCESSOR_BYTES - BLOCK_BYTES - cut.slack();
        cut.stages = (room / cut.stage_bytes()).min(MAX_STAGES);
        cut
    }

    fn tallest(&self) -> usize {
        tallest(self.rows).unwrap_or(self.rows)
    }

    /// Index among all of [`NAMES`].
    pub(super) fn kernel(&self) -> usize {
        let before = |sizes: &[usize], size: usize| sizes.iter().take_while(|&&other| other < size).count();
        before(&TALLEST, self.rows) * BATCHES.len() + before(&BATCHES, self.batch)
    }

    pub(super) fn threads(&self) -> usize {
        256 + if self.batch * self.tallest() > EQUAL_REGISTERS_SUMS { 128 } else { 32 }
    }

    fn stage_bytes(&self) -> usize {
        (self.rows + CLUSTER * self.x_rows) * 2 * TILE_COLUMNS
    }

    /// What is read past the last stage's tiles, of rows that nobody looks at.
    fn slack(&self) -> usize {
        let x = self.batch.saturating_sub(CLUSTER * self.x_rows + self.rows);
        x.max(self.tallest() - self.rows) * 2 * TILE_COLUMNS
    }

    /// The ring, what may be read past its end, and room to align it to 1024 bytes.
    pub(super) fn shared_bytes(&self) -> usize {
        1024 + self.stages * self.stage_bytes() + self.slack()
    }
}

/// Rows of W that the kernel for so many of them in a block is made for.
fn tallest(rows: usize) -> Option<usize> {
    TALLEST.into_iter().find(|&tallest| rows <= tallest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuts_keep_the_multiprocessors_equally_busy_and_fit_them() {
        for (n, k, max_parts, multiple, blocks) in [
            (12352, 2560, 1, 8, 129),
            (10240, 2560, 1, 8, 128),
            (2560, 4096, 8, 8, 128),
            (18432, 2560, 1, 16, 128),
            (2560, 9216, 8, 8, 128),
            (248_320, 2560, 1, 8, 1940),
            (16, 64, 1, 16, 1),
            (24, 72, 8, 8, 6),
        ] {
            for rows in [65, 128, 129, 200, 256, 300] {
                let cut = Cut::new(rows, n, k, max_parts, multiple, 132);
                let what = format!("{rows} rows, {n} x {k}: {cut:?}");
                assert!(cut.rows.is_multiple_of(multiple) && (1..=max_parts).contains(&cut.parts), "{what}");
                assert!(cut.stages >= 4 && cut.shared_bytes() + 256 <= 227 << 10, "{what}");
                let name = format!("product_wide_{}_{}", cut.batch, cut.tallest());
                assert_eq!(NAMES.as_flattened()[cut.kernel()], name);
                assert_eq!(n.div_ceil(cut.rows) * cut.parts, blocks, "{what}");
                // A warp's 16 rows of fp16 results lie in the ring.
                assert!(8 * 16 * (2 * cut.tallest() + 16) <= cut.stages * cut.stage_bytes(), "{what}");
            }
        }
    }
}
