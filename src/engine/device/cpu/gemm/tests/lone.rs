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

/// Numbers of a bell curve, nearly.
fn bell(seed: usize, len: usize) -> Vec<f32> {
    let parts: Vec<_> = (0..6).map(|part| noise(seed + 7 * part, len)).collect();
    (0..len).map(|i| parts.iter().map(|part| part[i]).sum()).collect()
}

/// Rows of activations with what makes sums err: (what, values).
fn inputs(cols: usize, group: usize) -> Vec<(&'static str, Vec<f32>)> {
    let bell_curve = bell(5, cols);
    let by = |value: &dyn Fn(usize, f32) -> f32| -> Vec<f32> {
        bell_curve.iter().enumerate().map(|(i, x)| value(i, *x)).collect()
    };
    let place = |i: usize| (i / group * 13 + 5) % group;
    vec![
        ("a bell curve", bell_curve.clone()),
        ("products of two", bell(5, cols).iter().zip(bell(77, cols)).map(|(a, b)| a * b).collect()),
        ("one of a group 4 times the rest", by(&|i, x| if i % group == place(i) { 4.0 } else { x })),
        ("one of a group 1,000 times the rest", by(&|i, x| if i % group == place(i) { 1e3 } else { x })),
        ("the first of each group 1,000 times the rest", by(&|i, x| if i % group == 0 { 1e3 } else { x })),
        ("two of a group 100 times the rest", by(&|i, x| if i % group < 2 { 100.0 + x } else { x })),
        ("magnitudes of 2^-20 to 1", by(&|i, x| x * (-((i * 7 % 21) as f32)).exp2())),
        ("all of one sign", by(&|_, x| 5.0 + x)),
        ("some groups of zeros", by(&|i, x| if (i / group).is_multiple_of(3) { 0.0 } else { x })),
        (
            "some groups 1,000 times the rest",
            by(&|i, x| if (i / group).is_multiple_of(5) { 1e3 * x } else { x }),
        ),
        ("of 1e-33", by(&|_, x| 1e-33 * x)),
        ("of 1e30", by(&|_, x| 1e30 * x)),
    ]
}

#[test]
fn lone_rows_err_no_more_than_multiply_adds() {
    for isa in sets() {
        for (rows, cols, group) in
            [(256, 768, 32), (256, 768, 128), (128, 512, 64), (256, 384, 8), (64, 2048, 32)]
        {
            let matrix = int4_matrix(rows, cols, group, true, false);
            let mut weights = vec![0f32; cols];
            for (what, x) in inputs(cols, group) {
                let both = [x.clone(), x.clone()].concat();
                let lone = multiply(isa, &matrix, &x, 1, Arithmetic::F32);
                let chains = multiply(isa, &matrix, &both, 2, Arithmetic::F32);
                let mut squares = [0f64; 2];
                for row in 0..rows {
                    matrix.read_row(row, &mut weights);
                    let right: f64 = weights.iter().zip(&x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
                    for (squares, found) in squares.iter_mut().zip([lone[0][row], chains[0][row]]) {
                        *squares += ((f64::from(found) - right) / f64::from(x[cols - 1]).abs()).powi(2);
                    }
                }
                // (Where both round alike, chance decides which errs more.)
                assert!(
                    squares[0] <= 1.05 * squares[1],
                    "{isa:?} [{rows}, {cols}] g{group} {what}: squares of errors {squares:?}"
                );
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
