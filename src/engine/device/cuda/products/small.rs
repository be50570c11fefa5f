//! Launches of the products with small 16-bit matrices (cuda/products_small.cu), such as the gates of a delta net whose other
//! projections have 4 bits.

use super::{Job, Output, arguments, cost};
use crate::Result;
use crate::engine::device::cuda::driver::{Gpu, Kernel};
use crate::engine::device::cuda::launch::{Arg, Launch, Stream, bytes_of};
use crate::engine::device::cuda::matrix::{Matrix, MatrixFormat};
use crate::engine::device::cuda::units;

/// Rows of x of a thread block, and its kernel.
const ROWS: [usize; 4] = [8, 16, 32, 64];
pub(in crate::engine::device::cuda) const NAMES: [&str; 4] =
    ["product_small_8", "product_small_16", "product_small_32", "product_small_64"];
/// Blocks of a cluster, each with a part of k: `CLUSTER` of the kernels.
const CLUSTER: usize = 8;
/// Most rows of W: more fill the GPU without cutting k.
const MOST_W_ROWS: usize = 128;
/// Most rows of x.
const MOST_ROWS: usize = 256;

pub(super) struct SmallProducts {
    kernels: [Kernel; 4],
    multiprocessors: usize,
}

/// The kernel with the fewest rows of x for each block that still gives every multiprocessor one block at most.
fn kernel(rows: usize, clusters: usize, multiprocessors: usize) -> usize {
    let fits = |tile: &usize| clusters * CLUSTER * rows.div_ceil(*tile) <= multiprocessors;
    ROWS.iter().position(fits).unwrap_or(ROWS.len() - 1)
}

impl SmallProducts {
    /// `None` where the GPU has no clusters.
    pub fn open(gpu: &Gpu) -> Result<Option<Self>> {
        let unit = &units::PRODUCTS_SMALL;
        if !unit.supports(gpu.facts().capability) {
            return Ok(None);
        }
        let kernel = |at: usize| gpu.kernel(unit, NAMES[at]);
        Ok(Some(Self {
            kernels: [kernel(0)?, kernel(1)?, kernel(2)?, kernel(3)?],
            multiprocessors: gpu.facts().multiprocessors as usize,
        }))
    }

    pub fn takes(&self, rows: usize, w: &Matrix) -> bool {
        w.format == MatrixFormat::F16
            && rows <= MOST_ROWS
            && w.rows <= MOST_W_ROWS
            && w.rows.is_multiple_of(16)
            && w.cols.is_multiple_of(64)
    }

    /// Queues a product that [`Self::takes`] agrees to, any output but the residual stream and the best.
    ///
    /// # Safety
    /// As [`super::Products::launch`].
    pub unsafe fn launch(&self, stream: &Stream, job: Job) -> Result<usize> {
        debug_assert!(!matches!(job.output, Output::Residual { .. } | Output::Best { .. }));
        let clusters = job.w.rows / 16;
        let at = kernel(job.rows, clusters, self.multiprocessors);
        let grid = [clusters * CLUSTER, 1, job.rows.div_ceil(ROWS[at])];
        let launch =
            Launch::grid(grid.map(|blocks| blocks as u32), 256).cluster(CLUSTER as u32).overlapping();
        let launch = Launch { cost: cost(job, 1), ..launch };
        // SAFETY: the one parameter of these kernels is this structure; pointers are the caller's promise.
        unsafe { stream.launch(&self.kernels[at], launch, &[Arg::Struct(bytes_of(&[arguments(job, 1)]))])? };
        Ok(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_as_many_as_multiprocessors_or_few_more() {
        // 64 rows of W, the gates of the 9B.
        let rows: Vec<usize> =
            [1, 32, 33, 64, 65, 128, 129, 256].iter().map(|&rows| ROWS[kernel(rows, 4, 132)]).collect();
        assert_eq!(rows, [8, 8, 16, 16, 32, 32, 64, 64]);
        assert_eq!(ROWS[kernel(256, 8, 132)], 64);
    }
}
