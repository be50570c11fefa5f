//! Where weights come from. A device asks for one tensor at a time, in the order it wants, and copies or repacks it
//! into its own memory, so that peak memory is one copy of the model plus the largest tensor.

use super::layout::WeightFormat;
use super::spec::Linear;
use crate::Result;

/// A source of named tensors. Names are canonical, without a checkpoint's prefix: `embed_tokens.weight`,
/// `layers.0.input_layernorm.weight`, `norm.weight`.
pub trait Weights: Send + Sync {
    /// A linear module's matrix as stored.
    ///
    /// # Errors
    /// A tensor that is missing, damaged or of another shape, naming it.
    fn linear(&self, linear: &Linear) -> Result<MatrixData<'_>>;

    /// The embedding table, [vocab_size, hidden_size].
    ///
    /// # Errors
    /// As [`Self::linear`].
    fn embedding(&self) -> Result<MatrixData<'_>>;

    /// Any other tensor (norm, bias, convolution, A_log, dt_bias) widened to f32, with `elements` values.
    ///
    /// # Errors
    /// As [`Self::linear`].
    fn vector(&self, name: &str, elements: usize) -> Result<Vec<f32>>;

    /// All that was asked for so far has been copied: the memory it was read into may go back to the system.
    fn release(&self) {}
}

pub type WeightSource = Box<dyn Weights>;

/// A matrix of shape [rows, cols] in one of the forms files have it.
#[derive(Debug, Clone, Copy)]
pub enum MatrixData<'a> {
    /// Row-major elements, little-endian; `format` is F32, F16 or Bf16.
    Dense { format: WeightFormat, bytes: &'a [u8] },
    /// AutoAWQ GEMM: `qweight` i32 [cols, rows/8], `qzeros` i32 [cols/group, rows/8], `scales` f16 [cols/group, rows];
    /// nibble i of a word holds row `8c + [0,2,4,6,1,3,5,7][i]`. w = (q - z) * s.
    Awq { group: usize, qweight: &'a [u8], qzeros: &'a [u8], scales: &'a [u8] },
    /// compressed-tensors pack-quantized: `packed` i32 [rows, cols/8], element 8w+i in bits 4i, `scales` [rows, cols/group],
    /// `zero_points` i32 [rows/8, cols/group] packed along rows when asymmetric. w = (q - z) * s with z = 8 when symmetric.
    CompressedTensors {
        group: usize,
        packed: &'a [u8],
        scales: &'a [u8],
        /// F16 or Bf16.
        scale_format: WeightFormat,
        zero_points: Option<&'a [u8]>,
    },
    /// Seeded noise of the given format, made where it is needed: see [`super::synthetic`].
    Synthetic { format: WeightFormat, seed: u64, std: f32 },
}
