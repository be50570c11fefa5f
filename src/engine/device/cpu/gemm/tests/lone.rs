//! A lone row times 4-bit weights, by products of bytes.

use super::super::pieces;
use super::*;

/// Instruction sets that multiply a lone row by bytes in f32.
fn sets() -> Vec<Isa> {
    let sets: Vec<_> = Isa::available().into_iter().filter(|isa| pieces::in_f32(*isa, 32)).collect();
    if sets.is_empty() {
        eprintln!("SKIPPED: products of bytes, which this CPU does not have");
    }
    sets
}

/// Random bits (a linear congruence).
fn random(seed: usize, len: usize) -> impl Iterator<Item = u32> {
    (0..len).scan(seed as u64, |state, _| {
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        Some((*state >> 33) as u32)
    })
}

/// Numbers of a bell curve, nearly.
fn bell(seed: usize, len: usize) -> Vec<f32> {
    let uniform: Vec<f32> = random(seed, 12 * len).map(|bits| (bits >> 8) as f32 / 8_388_608.0).collect();
    uniform.chunks_exact(12).map(|parts| parts.iter().sum::<f32>() - 6.0).collect()
}

/// Random weights, zero points and scales: errors of many rows say nothing where rows are alike.
fn random_matrix(rows: usize, cols: usize, group: usize) -> Matrix {
    let groups = cols / group;
    let bytes =
        |seed: usize, len: usize| -> Vec<u8> { random(seed, len).map(|bits| (bits >> 20) as u8).collect() };
    let scale = |bits: u32| f16::from_f32(0.01 + (bits % 2048) as f32 * 1e-5).to_le_bytes();
    let scales: Vec<u8> = random(2, rows * groups).flat_map(scale).collect();
    let data = MatrixData::CompressedTensors {
        group,
        packed: &bytes(1, rows * cols / 2),
        scales: &scales,
        scale_format: WeightFormat::F16,
        zero_points: Some(&bytes(3, rows.div_ceil(8) * 4 * groups)),
    };
    pack(&data, rows, cols, CpuMath::F32)
}

/// Rows of activations with what makes sums err: (what, values).
fn inputs(cols: usize, group: usize, seed: usize) -> Vec<(&'static str, Vec<f32>)> {
    let bell_curve = bell(5 + seed, cols);
    let by = |value: &dyn Fn(usize, f32) -> f32| -> Vec<f32> {
        bell_curve.iter().enumerate().map(|(i, x)| value(i, *x)).collect()
    };
    let place = |i: usize| (i / group * 13 + 5) % group;
    vec![
        ("a bell curve", bell_curve.clone()),
        ("products of two", bell_curve.iter().zip(bell(77 + seed, cols)).map(|(a, b)| a * b).collect()),
        ("one of a group 4 times the rest", by(&|i, x| if i % group == place(i) { 4.0 } else { x })),
        ("one of a group 1,000 times the rest", by(&|i, x| if i % group == place(i) { 1e3 } else { x })),
        ("the first of each group 1,000 times the rest", by(&|i, x| if i % group == 0 { 1e3 } else { x })),
        ("two of a group 100 times the rest", by(&|i, x| if i % group < 2 { 100.0 + x } else { x })),
        ("magnitudes of 2^-20 to 1", by(&|i, x| x * (-((i * 7 % 21) as f32)).exp2())),
        ("all of one sign", by(&|_, x| 5.0 + x)),
        ("some groups of zeros", by(&|i, x| if i / group % 3 == 0 { 0.0 } else { x })),
        ("some groups 1,000 times the rest", by(&|i, x| if i / group % 5 == 0 { 1e3 * x } else { x })),
        ("of 1e-33", by(&|_, x| 1e-33 * x)),
        ("of 1e30", by(&|_, x| 1e30 * x)),
    ]
}

#[test]
fn lone_rows_err_no_more_than_multiply_adds() {
    const ROWS: usize = 512;
    for isa in sets() {
        for (cols, group) in [(768, 32), (768, 128), (512, 64), (384, 8), (2048, 32)] {
            let matrix = random_matrix(ROWS, cols, group);
            let mut weights = vec![vec![0f32; cols]; ROWS];
            weights.iter_mut().enumerate().for_each(|(row, weights)| matrix.read_row(row, weights));
            // Sums of squares of errors by what the inputs are: of lone rows, and of chains.
            let mut squares: Vec<(&str, [f64; 2])> = Vec::new();
            for seed in 0..4 {
                for (which, (what, x)) in inputs(cols, group, seed).into_iter().enumerate() {
                    let both = [x.clone(), x.clone()].concat();
                    let lone = multiply(isa, &matrix, &x, 1, Arithmetic::F32);
                    let chains = multiply(isa, &matrix, &both, 2, Arithmetic::F32);
                    let size = x.iter().fold(0f64, |size, x| size.max(f64::from(x.abs())));
                    if which == squares.len() {
                        squares.push((what, [0.0; 2]));
                    }
                    for (row, weights) in weights.iter().enumerate() {
                        let pairs = weights.iter().zip(&x);
                        let right: f64 = pairs.map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
                        for (squares, found) in squares[which].1.iter_mut().zip([&lone[0], &chains[0]]) {
                            *squares += ((f64::from(found[row]) - right) / size).powi(2);
                        }
                    }
                }
            }
            // Where both round alike chance decides which errs more: of 2,048 products, by a few hundredths.
            for (what, [lone, chains]) in squares {
                assert!(lone <= 1.1 * chains, "{isa:?} {cols} g{group} {what}: {lone:e}, chains {chains:e}");
            }
        }
    }
}

#[test]
fn lone_rows_do_not_hide_what_is_not_finite() {
    for isa in sets() {
        let matrix = int4_matrix(40, 96, 32, true, false);
        for math in [Arithmetic::F32, Arithmetic::Int16] {
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut x = noise(5, 96);
                x[40] = bad;
                let found = multiply(isa, &matrix, &x, 1, math);
                assert!(found[0].iter().all(|value| value.is_nan()), "{isa:?} {math:?}: {bad} was lost");
            }
        }
    }
}

#[test]
fn lone_rows_of_zeros_and_of_the_smallest_numbers() {
    for isa in sets() {
        let matrix = int4_matrix(40, 96, 32, true, false);
        for math in [Arithmetic::F32, Arithmetic::Int16] {
            let found = multiply(isa, &matrix, &[0.0; 96], 1, math);
            assert!(found[0].iter().all(|value| *value == 0.0), "{isa:?} {math:?}");
        }
        let mut weights = vec![0f32; 96];
        for size in [1e-34, 1e-36, 1e-38, 1e-40, 3e-45] {
            let x: Vec<f32> = noise(5, 96).iter().map(|x| x * size).collect();
            let found = multiply(isa, &matrix, &x, 1, Arithmetic::F32);
            for row in 0..40 {
                matrix.read_row(row, &mut weights);
                let pairs = weights.iter().zip(&x);
                let (right, all) = pairs.fold((0f64, 0f64), |(sum, all), (w, x)| {
                    let product = f64::from(*w) * f64::from(*x);
                    (sum + product, all + product.abs())
                });
                let error = (f64::from(found[0][row]) - right).abs();
                // (Activations are kept to 2^-142, sums of this row to the last bit of the smallest f32.)
                let steps = weights.iter().map(|w| f64::from(w.abs())).sum::<f64>() * (-142f64).exp2();
                let most = 1e-6 * all + steps + 4.0 * (-149f64).exp2();
                assert!(error <= most, "{isa:?} {size}: row {row} off by {error}, {most} is allowed");
            }
        }
    }
}

/// All bytes of the matrix and of the activations as large as they can be.
#[test]
fn sums_of_the_largest_bytes_fit() {
    for isa in Isa::available() {
        for (cols, group) in [(32, 32), (96, 96), (40, 8), (4096, 4096), (1024, 128)] {
            let (rows, groups) = (40, cols / group);
            let scales = vec![0x3cu8; 2 * rows * groups];
            let data = MatrixData::CompressedTensors {
                group,
                packed: &vec![0xff; rows * cols / 2],
                scales: &scales,
                scale_format: WeightFormat::F16,
                zero_points: Some(&vec![0; rows.div_ceil(8) * 4 * groups]),
            };
            let matrix = pack(&data, rows, cols, CpuMath::F32);
            let scale = f64::from(f16::from_bits(0x3c3c).to_f32());
            // 256 * 127 + 127, and 256 a - 128 for the lowest byte at its end.
            for other in [32639.0, -32639.0, 32384.0, -32640.0 + 128.0, -128.0] {
                let mut x = vec![other; cols];
                (0..groups).for_each(|g| x[g * group] = 32639.0);
                let right = x.iter().map(|x| 15.0 * scale * f64::from(*x)).sum::<f64>();
                for math in [Arithmetic::F32, Arithmetic::Int16] {
                    if math == Arithmetic::F32 && !pieces::in_f32(isa, group) {
                        continue;
                    }
                    let found = multiply(isa, &matrix, &x, 1, math);
                    for value in &found[0] {
                        let error = (f64::from(*value) - right).abs();
                        let most = 1e-6 * x.iter().map(|x| 15.0 * scale * f64::from(x.abs())).sum::<f64>();
                        assert!(error <= most, "{isa:?} {math:?} g{group} {other}: {value} for {right}");
                    }
                }
            }
        }
    }
}
