//! Launches of the plain product (cuda/linear.cu), for any 16-bit matrix and number of rows.

use super::driver::{Gpu, Kernel};
use super::launch::{Launch, Stream};
use super::matrix::{Matrix, MatrixFormat, Output};
use super::units;
use crate::{Error, Result};

#[derive(Debug, Clone, Copy)]
pub struct PlainLinear {
    kernel: Kernel,
}

impl PlainLinear {
    /// The product with its kernel loaded.
    ///
    /// # Errors
    /// A kernel that does not compile or load.
    pub fn new(gpu: &Gpu) -> Result<Self> {
        Ok(Self { kernel: gpu.kernel(&units::LINEAR, "linear")? })
    }

    /// Queues y = x Wᵀ + bias for x fp16 [rows, W's columns]. Returns the parts written, 1 for every output.
    ///
    /// # Errors
    /// A matrix or output that it is not for; a launch that the driver refuses.
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
        if w.format != MatrixFormat::F16 {
            return Err(Error::bug("the plain product takes 16-bit matrices"));
        }
        let (to, stride, kind, out_bytes) = match output {
            Output::Half { to, stride } => (to, stride, 0, 2 * w.rows),
            Output::Float { to, stride } => (to, stride, 1, 4 * w.rows),
            Output::SiluMul { to, stride } => (to, stride, 2, w.rows),
            Output::Partials { to, .. } => (to, w.rows, 1, 4 * w.rows),
            Output::Residual { .. } | Output::Best { .. } => {
                return Err(Error::bug("the plain product only writes its sums"));
            }
        };
        let grid = [w.rows.div_ceil(64) as u32, rows.div_ceil(64) as u32, 1];
        let bytes = w.bytes() + (rows * (2 * w.cols + out_bytes)) as u64;
        let flops = 2 * rows as u64 * w.rows as u64 * w.cols as u64;
        let args = [
            x.into(),
            (&w.weights).into(),
            w.bias.as_ref().map_or(0, |bias| bias.pointer()).into(),
            to.into(),
            (rows as u32).into(),
            (w.rows as u32).into(),
            (w.cols as u32).into(),
            (stride as u64).into(),
            kind.into(),
        ];
        // SAFETY: the kernel's parameters in order; the matrix holds rows x cols, the rest is the caller's promise.
        unsafe {
            stream.launch(&self.kernel, Launch::grid(grid, 128).overlapping().cost(bytes, flops), &args)?
        };
        Ok(1)
    }
}
