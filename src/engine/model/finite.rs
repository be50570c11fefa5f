//! Weights that are not numbers: found when a tensor is read, before they turn every logit into NaN.

use super::layout::WeightFormat;
use super::weights::MatrixData;
use crate::{Error, Result};

/// Fails if the matrix `name` (or its scales) holds a NaN or an infinity. Reads it once, at memory speed; a device may
/// instead look at the values while it converts them, and report with [`not_finite`].
///
/// # Errors
/// As [`check`].
pub fn check_matrix(name: &str, data: &MatrixData<'_>) -> Result<()> {
    match *data {
        MatrixData::Dense { format, bytes } => check(name, format, bytes),
        MatrixData::Awq { scales, .. } => check(&format!("{name}.scales"), WeightFormat::F16, scales),
        MatrixData::CompressedTensors { scales, scale_format, .. } => {
            check(&format!("{name}.weight_scale"), scale_format, scales)
        }
        MatrixData::Synthetic { .. } => Ok(()),
    }
}

/// Fails if any of the little-endian floats is a NaN or an infinity.
///
/// # Errors
/// [`Error::Invalid`] naming `name` and the element.
pub fn check(name: &str, format: WeightFormat, bytes: &[u8]) -> Result<()> {
    match first_non_finite(format, bytes) {
        Some(index) => Err(not_finite(name, index)),
        None => Ok(()),
    }
}

/// Index of the first element whose exponent bits are all ones. Int4 data has none.
pub fn first_non_finite(format: WeightFormat, bytes: &[u8]) -> Option<usize> {
    let chunk_bytes = 4096;
    let starts = bytes.chunks(chunk_bytes).enumerate();
    let (size, found) = match format {
        WeightFormat::F32 => {
            (4, starts.clone().find(|(_, chunk)| any::<4>(chunk, |b| is_special_f32(u32::from_le_bytes(b)))))
        }
        WeightFormat::F16 => {
            (2, starts.clone().find(|(_, chunk)| any::<2>(chunk, |b| is_special_f16(u16::from_le_bytes(b)))))
        }
        WeightFormat::Bf16 => {
            (2, starts.clone().find(|(_, chunk)| any::<2>(chunk, |b| is_special_bf16(u16::from_le_bytes(b)))))
        }
        WeightFormat::Int4 { .. } => return None,
    };
    let (chunk_index, chunk) = found?;
    let inside = match format {
        WeightFormat::F32 => {
            chunk.chunks_exact(4).position(|b| is_special_f32(u32::from_le_bytes([b[0], b[1], b[2], b[3]])))
        }
        WeightFormat::F16 => {
            chunk.chunks_exact(2).position(|b| is_special_f16(u16::from_le_bytes([b[0], b[1]])))
        }
        _ => chunk.chunks_exact(2).position(|b| is_special_bf16(u16::from_le_bytes([b[0], b[1]]))),
    };
    Some(chunk_index * chunk_bytes / size + inside?)
}

/// The error for element `index` (row-major) of tensor `name`.
pub fn not_finite(name: &str, index: usize) -> Error {
    Error::invalid(
        format!("tensor `{name}` holds a NaN or an infinity at element {index}, expected finite weights"),
        "the checkpoint is damaged or overflowed when it was converted: fetch it again, or use a bf16 version of it",
    )
}

/// No early exit, so that the loop vectorises; `chunk` is a few kilobytes.
#[inline(always)]
fn any<const N: usize>(chunk: &[u8], special: impl Fn([u8; N]) -> bool) -> bool {
    let (elements, _) = chunk.as_chunks::<N>();
    elements.iter().fold(false, |found, &element| found | special(element))
}

fn is_special_f32(bits: u32) -> bool {
    bits & 0x7F80_0000 == 0x7F80_0000
}

fn is_special_f16(bits: u16) -> bool {
    bits & 0x7C00 == 0x7C00
}

fn is_special_bf16(bits: u16) -> bool {
    bits & 0x7F80 == 0x7F80
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_special_value_is_found_in_each_format() {
        for (format, size) in [(WeightFormat::F32, 4), (WeightFormat::F16, 2), (WeightFormat::Bf16, 2)] {
            let special: [(u32, u32, u32); 3] =
                [(0x7F80_0000, 0x7C00, 0x7F80), (0xFFC0_0000, 0xFE00, 0xFFC0), (0x7F80_0001, 0x7C01, 0xFF81)];
            for (wide, half, brain) in special {
                let bits = match format {
                    WeightFormat::F32 => wide,
                    WeightFormat::F16 => half,
                    _ => brain,
                };
                let mut bytes = vec![0x12u8; 20_000];
                assert_eq!(first_non_finite(format, &bytes), None);
                for index in [4_321usize, 17] {
                    bytes[index * size..][..size].copy_from_slice(&bits.to_le_bytes()[..size]);
                    assert_eq!(first_non_finite(format, &bytes), Some(index), "{format:?} {bits:x}");
                }
            }
        }
    }
}
