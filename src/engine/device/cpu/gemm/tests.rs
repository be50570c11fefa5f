//! Every tile function against a scalar chain of multiply-adds, bit for bit where multiply-adds are fused.

use half::{bf16, f16};

use super::*;
use crate::engine::config::CpuMath;
use crate::engine::model::layout::WeightFormat;
use crate::engine::model::weights::MatrixData;

use super::super::matrix::{Arena, Matrix, PANEL};
use super::super::pool::Pool;

mod company;
mod lone;

fn noise(seed: usize, len: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 31 + seed * 977) as f32 * 0.737).sin()).collect()
}

/// A matrix of 16-bit or 32-bit weights, and its values.
fn dense_matrix(format: WeightFormat, rows: usize, cols: usize, math: CpuMath) -> (Matrix, Vec<f32>) {
    let values = noise(1, rows * cols);
    let bytes: Vec<u8> = values
        .iter()
        .flat_map(|&value| match format {
            WeightFormat::F32 => value.to_le_bytes().to_vec(),
            WeightFormat::F16 => f16::from_f32(value).to_le_bytes().to_vec(),
            _ => bf16::from_f32(value).to_le_bytes().to_vec(),
        })
        .collect();
    (pack(&MatrixData::Dense { format, bytes: &bytes }, rows, cols, math), values)
}

fn pack(data: &MatrixData<'_>, rows: usize, cols: usize, math: CpuMath) -> Matrix {
    let mut arena = Arena::new(Packing::of(data, math).bytes(rows, cols)).unwrap();
    Matrix::pack(&mut arena, &mut Pool::new(1), "test", (rows, cols), data, math).unwrap()
}

/// Symmetric and asymmetric groups of 4-bit weights with scales of both kinds.
fn int4_matrix(rows: usize, cols: usize, group: usize, zeros: bool, bf16_scales: bool) -> Matrix {
    let packed: Vec<u8> = (0..rows * cols / 2).map(|i| (i * 89 + i / 7) as u8).collect();
    let scales: Vec<u8> = noise(3, rows * cols / group)
        .iter()
        .flat_map(|s| {
            let s = 0.01 + s.abs() * 0.02;
            if bf16_scales { bf16::from_f32(s).to_le_bytes() } else { f16::from_f32(s).to_le_bytes() }
        })
        .collect();
    let zero_points: Vec<u8> =
        (0..rows.div_ceil(8) * 4 * (cols / group)).map(|i| (i * 57 + 3) as u8).collect();
    let data = MatrixData::CompressedTensors {
        group,
        packed: &packed,
        scales: &scales,
        scale_format: if bf16_scales { WeightFormat::Bf16 } else { WeightFormat::F16 },
        zero_points: zeros.then_some(&zero_points),
    };
    pack(&data, rows, cols, CpuMath::F32)
}

/// Products of `tokens` rows with all of a matrix, in one tile at a time.
fn multiply(isa: Isa, matrix: &Matrix, x: &[f32], tokens: usize, math: Arithmetic) -> Vec<Vec<f32>> {
    let mut activations = Activations::default();
    let packed = activations.shape(isa, math, tokens, matrix.cols).unwrap();
    for unit in 0..packed.units() {
        let (start, _) = packed.unit(unit);
        // SAFETY: one thread.
        unsafe { packed.write_unit(unit, &x[start * matrix.cols..], matrix.cols) };
    }
    let mut by_group = grouped::GroupedActivations::default();
    let mut grouped = Vec::new();
    if let Some(needed) = grouped::form_of(isa, matrix.packing, &packed) {
        grouped.push(by_group.shape(&packed, needed).unwrap());
        for unit in 0..packed.units() {
            isa.run(grouped::GroupUnit { packed: &packed, grouped: &grouped[0], unit });
        }
    }
    let product = Product::new(isa, matrix, packed, &grouped);
    let mut all = vec![vec![0f32; matrix.rows]; tokens];
    let together = if tokens == 1 { ROW_PANELS } else { 1 };
    for first in (0..matrix.panels()).step_by(together) {
        let panels = first..matrix.panels().min(first + together);
        for tile in 0..packed.tiling.tiles {
            let mut space = TileSpace::new();
            for (index, out) in product.tile(panels.clone(), tile, &mut space).iter().enumerate() {
                let (row, panel) = packed.place(&panels, tile, index);
                for lane in 0..PANEL.min(matrix.rows - panel * PANEL) {
                    all[row][panel * PANEL + lane] = out[lane];
                }
            }
        }
    }
    all
}

fn fused(isa: Isa) -> bool {
    isa != Isa::Portable || cfg!(target_arch = "aarch64")
}

fn assert_equal(what: &str, isa: Isa, found: f32, right: f32) {
    if fused(isa) {
        assert_eq!(found.to_bits(), right.to_bits(), "{what}: {found} instead of {right}");
    } else {
        assert!((found - right).abs() < 1e-4 * (1.0 + right.abs()), "{what}: {found} instead of {right}");
    }
}

#[test]
fn dense_tiles_are_chains_of_multiply_adds() {
    for format in [WeightFormat::F32, WeightFormat::F16, WeightFormat::Bf16] {
        for (rows, cols) in [(1, 1), (32, 16), (45, 7), (70, 50), (96, 129), (150, 20)] {
            let (matrix, _) = dense_matrix(format, rows, cols, CpuMath::F32);
            let mut weights = vec![0f32; cols];
            let x = noise(2, 30 * cols);
            for isa in Isa::available() {
                for tokens in (1..=13).chain([16, 25, 30]) {
                    let found = multiply(isa, &matrix, &x, tokens, Arithmetic::F32);
                    for row in 0..rows {
                        matrix.read_row(row, &mut weights);
                        for t in 0..tokens {
                            let pairs = weights.iter().zip(&x[t * cols..]);
                            let right = pairs.fold(0f32, |sum, (w, x)| w.mul_add(*x, sum));
                            let what = format!("{format:?} {isa:?} [{rows}, {cols}] {tokens}: {t} {row}");
                            assert_equal(&what, isa, found[t][row], right);
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn int4_tiles_are_chains_within_groups() {
    for (rows, cols, group) in [(8, 8, 8), (40, 96, 32), (72, 256, 128)] {
        for (zeros, bf16_scales) in [(false, false), (false, true), (true, false), (true, true)] {
            let matrix = int4_matrix(rows, cols, group, zeros, bf16_scales);
            let x = noise(5, 14 * cols);
            let mut weights = vec![0f32; cols];
            for isa in Isa::available() {
                for tokens in [1, 2, 3, 4, 5, 6, 7, 12, 14] {
                    let found = multiply(isa, &matrix, &x, tokens, Arithmetic::F32);
                    for row in 0..rows {
                        matrix.read_row(row, &mut weights);
                        for t in 0..tokens {
                            // By what the weights are; the chain itself is pinned by equality between sets below.
                            let pairs = weights.iter().zip(&x[t * cols..]);
                            let right: f64 = pairs.map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
                            let error = (f64::from(found[t][row]) - right).abs();
                            assert!(
                                error < 1e-4,
                                "{isa:?} [{rows}, {cols}] {tokens}: {t} {row}, off by {error}"
                            );
                        }
                    }
                    // (A lone row is multiplied otherwise: `pieces.rs`.)
                    if tokens > 1 {
                        let pair = multiply(isa, &matrix, &x, 2, Arithmetic::F32);
                        assert_eq!(
                            found[0], pair[0],
                            "{isa:?}: a token in company of one and among {tokens}"
                        );
                    }
                    if fused(isa) {
                        let best = multiply(Isa::detect(), &matrix, &x, tokens, Arithmetic::F32);
                        assert_eq!(found, best, "{isa:?} and {:?}", Isa::detect());
                    }
                }
            }
        }
    }
}

/// A group of activations in 16 bits: (integers, scale).
fn round_group(x: &[f32]) -> (Vec<i64>, f32) {
    let largest = x.iter().fold(0f32, |largest, x| largest.max(x.abs()));
    let scale = largest * (1.0 / 32639.0);
    let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
    (x.iter().map(|x| (x * inverse).round_ties_even() as i64).collect(), scale)
}

#[test]
fn int16_tiles_are_exact_within_groups() {
    let mut kinds: Vec<_> = Isa::available().into_iter().map(|isa| (isa, Arithmetic::Int16)).collect();
    if isa::tile_products().int8 {
        // (From one row on, to try all numbers of them.)
        kinds.push((Isa::detect(), Arithmetic::Int16Tiles { from_rows: 1 }));
    } else {
        eprintln!("SKIPPED: products of tiles of bytes, which this CPU does not have");
    }
    let shapes = [(8, 8, 8), (40, 96, 32), (72, 256, 128), (200, 64, 64), (33, 768, 192), (32, 1024, 512)];
    for (rows, cols, group) in shapes {
        for (zeros, bf16_scales) in [(false, false), (false, true), (true, false), (true, true)] {
            let matrix = int4_matrix(rows, cols, group, zeros, bf16_scales);
            let mut x = noise(5, 150 * cols);
            x[2 * cols..2 * cols + group].fill(0.0);
            x[3 * cols] = 3e4;
            x[4 * cols + group - 1] = -3e4;
            for &(isa, math) in &kinds {
                let tiles = math.is_int16_tiles();
                if tiles && !Arithmetic::of(CpuMath::Int16, isa, [&matrix]).is_int16_tiles() {
                    continue;
                }
                for tokens in (1..=14).chain(if tiles { vec![16, 17, 37, 128, 150] } else { vec![] }) {
                    let found = multiply(isa, &matrix, &x, tokens, math);
                    for row in 0..rows {
                        for t in (0..tokens).filter(|t| *t < 14 || (row + t) % 7 == 0) {
                            let mut right = 0f32;
                            for g in 0..cols / group {
                                let columns = g * group..(g + 1) * group;
                                let (integers, x_scale) = round_group(&x[t * cols..][columns.clone()]);
                                let (scale, quants) = matrix.group(row, g);
                                let exact: i64 = quants.iter().zip(&integers).map(|(q, i)| q * i).sum();
                                right = (scale * x_scale).mul_add(exact as f32, right);
                                for (i, x) in integers.iter().zip(&x[t * cols..][columns]) {
                                    let off = (*i as f32 * x_scale - x).abs();
                                    assert!(off <= 0.51 * x_scale, "{x} became {i} times {x_scale}");
                                }
                            }
                            let what =
                                format!("{isa:?} {math:?} [{rows}, {cols}] g{group} {tokens}: {t} {row}");
                            assert_equal(&what, isa, found[t][row], right);
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn int16_products_do_not_hide_what_is_not_finite() {
    let matrix = int4_matrix(40, 96, 32, true, false);
    let tiles = Arithmetic::of(CpuMath::Int16, Isa::detect(), [&matrix]);
    let kinds =
        Isa::available().into_iter().map(|isa| (isa, Arithmetic::Int16)).chain([(Isa::detect(), tiles)]);
    for (isa, math) in kinds {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = noise(5, 9 * 96);
            x[96 + 40] = bad;
            for tokens in [3, 9] {
                let found = multiply(isa, &matrix, &x, tokens, math);
                assert!(found[0].iter().chain(&found[2]).all(|value| value.is_finite()));
                assert!(found[1].iter().all(|value| value.is_nan()), "{isa:?} {math:?}: {bad} was lost");
            }
        }
    }
}

#[test]
fn bf16_tiles_are_products_of_rounded_operands() {
    let mut kinds: Vec<_> = Isa::available().into_iter().map(|isa| (isa, Arithmetic::Bf16InF32)).collect();
    if super::super::isa::has_bf16() {
        kinds.push((Isa::detect(), Arithmetic::Bf16Pairs));
    } else {
        eprintln!("SKIPPED: pairs of bf16, since this CPU has no products of them");
    }
    let round = |value: f32| f64::from(bf16::from_f32(value).to_f32());
    for (rows, cols) in [(33, 31), (64, 96)] {
        let (dense, _) = dense_matrix(WeightFormat::F16, rows, cols, CpuMath::Bf16);
        let mut matrices = vec![dense];
        if cols % 32 == 0 {
            matrices.push(int4_matrix(rows, cols, 32, true, false));
            matrices.push(int4_matrix(rows, cols, 32, false, true));
        }
        let x = noise(7, 26 * cols);
        let mut weights = vec![0f32; cols];
        for ((isa, math), matrix) in kinds.iter().flat_map(|kind| matrices.iter().map(move |m| (*kind, m))) {
            let alone = multiply(isa, matrix, &x, 1, math);
            for tokens in [1, 2, 5, 12, 13, 26] {
                let found = multiply(isa, matrix, &x, tokens, math);
                for row in 0..rows {
                    matrix.read_row(row, &mut weights);
                    for t in 0..tokens {
                        let pairs = weights.iter().zip(&x[t * cols..]);
                        let right: f64 = pairs.map(|(w, x)| f64::from(*w) * round(*x)).sum();
                        let error = (f64::from(found[t][row]) - right).abs();
                        assert!(
                            error < 1e-4,
                            "{isa:?} {math:?} {:?} {tokens}: {t} {row}, off by {error}",
                            matrix.packing
                        );
                    }
                }
                assert_eq!(found[0], alone[0], "{isa:?} {math:?}: one token alone and among {tokens}");
            }
        }
    }
}

/// The first `pieces` of a number's pieces of eight significant bits.
fn pieces_of(mut value: f32, pieces: usize) -> Vec<f32> {
    let mut all = Vec::new();
    for _ in 0..pieces {
        let piece = f32::from_bits(value.to_bits() & 0xffff_0000);
        all.push(piece);
        value -= piece;
    }
    all
}

/// sum + products of a block of columns as tiles add them up.
fn add_block(sum: f32, w: &[f32], x: &[f32]) -> f32 {
    let chain = |odd: usize| {
        let columns = (odd..w.len()).step_by(2);
        columns.fold(0f32, |sum, column| w[column].mul_add(x[column], sum))
    };
    sum + (chain(0) + chain(1))
}

/// By tiles however few the rows.
const F32_TILES: Arithmetic = Arithmetic::F32Tiles { from_rows: 1 };

#[test]
fn products_of_tiles_add_up_blocks_of_columns_in_order() {
    if !isa::tile_products().bf16 {
        eprintln!("SKIPPED: products of tiles of bf16, which this CPU does not have");
        return;
    }
    let isa = Isa::detect();
    let kinds = [
        (WeightFormat::F16, CpuMath::F32, F32_TILES),
        (WeightFormat::Bf16, CpuMath::F32, F32_TILES),
        (WeightFormat::F16, CpuMath::Bf16, Arithmetic::Bf16Tiles),
    ];
    for (format, cpu_math, math) in kinds {
        for (rows, cols) in [(1, 1), (45, 7), (70, 50), (96, 129), (33, 320), (40, 300)] {
            let (matrix, _) = dense_matrix(format, rows, cols, cpu_math);
            let chosen = match Arithmetic::of(cpu_math, isa, [&matrix]) {
                Arithmetic::F32Tiles { .. } => F32_TILES,
                other => other,
            };
            assert_eq!(chosen, math);
            let x = noise(2, 260 * cols);
            let mut weights = vec![0f32; cols];
            let mut right = vec![vec![0f32; rows]; 260];
            for row in 0..rows {
                matrix.read_row(row, &mut weights);
                let split: Vec<_> = weights.iter().map(|w| pieces_of(*w, 2)).collect();
                let piece_of_w = |piece: usize| split.iter().map(|w| w[piece]).collect::<Vec<_>>();
                let (h, l) = (piece_of_w(0), piece_of_w(1));
                assert!(h.iter().zip(&l).zip(&weights).all(|((h, l), w)| h + l == *w));
                for (t, right) in right.iter_mut().enumerate() {
                    let x = &x[t * cols..][..cols];
                    let pieces: Vec<_> = match math {
                        Arithmetic::Bf16Tiles => {
                            x.iter().map(|x| vec![bf16::from_f32(*x).to_f32()]).collect()
                        }
                        _ => x.iter().map(|x| pieces_of(*x, 3)).collect(),
                    };
                    let piece_of_x = |piece: usize| pieces.iter().map(|x| x[piece]).collect::<Vec<_>>();
                    let mut sum = 0f32;
                    for block in (0..cols).step_by(32) {
                        let columns = block..cols.min(block + 32);
                        let mut add = |w: &[f32], x: &[f32]| {
                            sum = add_block(sum, &w[columns.clone()], &x[columns.clone()]);
                        };
                        if math == F32_TILES {
                            add(&h, &piece_of_x(2));
                            add(&h, &piece_of_x(1));
                        }
                        add(&h, &piece_of_x(0));
                        if format == WeightFormat::F16 && math == F32_TILES {
                            add(&l, &piece_of_x(0));
                            add(&l, &piece_of_x(1));
                        }
                    }
                    right[row] = sum;
                }
            }
            for tokens in [1, 2, 15, 16, 17, 31, 32, 33, 48, 49, 64, 100, 128, 129, 200, 257, 260] {
                let found = multiply(isa, &matrix, &x, tokens, math);
                for t in 0..tokens {
                    for row in 0..rows {
                        assert_eq!(
                            found[t][row].to_bits(),
                            right[t][row].to_bits(),
                            "{format:?} {math:?} [{rows}, {cols}] {tokens}: {t} {row}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn split_products_err_no_more_than_multiply_adds() {
    if !isa::tile_products().bf16 {
        eprintln!("SKIPPED: products of tiles of bf16, which this CPU does not have");
        return;
    }
    let (rows, cols, tokens) = (64, 2048, 20);
    for format in [WeightFormat::F16, WeightFormat::Bf16] {
        let (matrix, _) = dense_matrix(format, rows, cols, CpuMath::F32);
        let x = noise(2, tokens * cols);
        let mut weights = vec![0f32; cols];
        let errors = [Arithmetic::F32, F32_TILES].map(|math| {
            let found = multiply(Isa::detect(), &matrix, &x, tokens, math);
            let mut squares = 0f64;
            for row in 0..rows {
                matrix.read_row(row, &mut weights);
                for t in 0..tokens {
                    let pairs = weights.iter().zip(&x[t * cols..]);
                    let right: f64 = pairs.map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
                    squares += (f64::from(found[t][row]) - right).powi(2);
                }
            }
            squares
        });
        assert!(errors[1] <= errors[0], "{format:?}: squares of errors {errors:?}");
    }
}

#[test]
fn products_of_tiles_do_not_hide_what_is_not_finite() {
    if !isa::tile_products().bf16 {
        eprintln!("SKIPPED: products of tiles of bf16, which this CPU does not have");
        return;
    }
    for math in [CpuMath::F32, CpuMath::Bf16] {
        let (matrix, _) = dense_matrix(WeightFormat::F16, 40, 96, math);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = noise(5, 3 * 96);
            x[96 + 40] = bad;
            let arithmetic = Arithmetic::of(math, Isa::detect(), [&matrix]);
            let found = multiply(Isa::detect(), &matrix, &x, 3, arithmetic);
            assert!(found[0].iter().chain(&found[2]).all(|value| value.is_finite()));
            assert!(found[1].iter().all(|value| !value.is_finite()), "{bad} was lost");
        }
    }
}

#[test]
fn activations_in_blocks_are_read_back_exactly() {
    let (rows, cols) = (150, 70);
    let x = noise(2, rows * cols);
    let mut activations = Activations::default();
    for math in [Arithmetic::F32, F32_TILES] {
        let packed = activations.shape(Isa::detect(), math, rows, cols).unwrap();
        for unit in 0..packed.units() {
            // SAFETY: one thread.
            unsafe { packed.write_unit(unit, &x[packed.unit(unit).0 * cols..], cols) };
        }
        let mut found = Vec::new();
        (0..rows).for_each(|row| packed.read_row(row, &mut found));
        assert_eq!(found, x, "{math:?}");
    }
}

#[test]
fn tilings_cover_every_row_once() {
    for rows in 1..60 {
        for max in [4, 6, 12] {
            let tiling = Tiling::new(rows, max);
            let mut next = 0;
            for tile in 0..tiling.tiles {
                let (start, count) = tiling.tile(tile);
                assert_eq!(start, next);
                assert!((1..=max).contains(&count), "{rows} rows: {count} in tile {tile}");
                next += count;
            }
            assert_eq!(next, rows);
        }
    }
}

#[test]
fn weights_that_are_not_finite_are_refused_by_name() {
    let mut values = noise(1, 40 * 8);
    values[35 * 8 + 2] = f32::NAN;
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let data = MatrixData::Dense { format: WeightFormat::F32, bytes: &bytes };
    let mut arena = Arena::new(Packing::F32.bytes(40, 8)).unwrap();
    let pool = &mut Pool::new(2);
    let error = Matrix::pack(&mut arena, pool, "layers.3.mlp.up_proj", (40, 8), &data, CpuMath::F32);
    let error = error.unwrap_err();
    assert!(error.to_string().contains("layers.3.mlp.up_proj: row 35"), "{error}");
    let short = MatrixData::Dense { format: WeightFormat::F16, bytes: &bytes };
    let error = Matrix::pack(&mut arena, pool, "lm_head", (40, 8), &short, CpuMath::F32).unwrap_err();
    assert!(error.to_string().contains("1280 bytes"), "{error}");
}
