//! What a row's bits depend on: whether it is multiplied alone, or among few or many, where that decides how.

use super::super::pieces;
use super::*;

/// Row 0 among each of `among` rows has the same bits; gives them.
fn bits_among(isa: Isa, matrix: &Matrix, x: &[f32], math: Arithmetic, among: &[usize]) -> Vec<f32> {
    let mut all = among.iter().map(|rows| multiply(isa, matrix, x, *rows, math).swap_remove(0));
    let first = all.next().unwrap();
    for (found, rows) in all.zip(&among[1..]) {
        assert_eq!(found, first, "{isa:?} {math:?}: row 0 among {} and {rows}", among[0]);
    }
    first
}

/// Both are products of the same operands, rounded otherwise.
fn assert_close(what: &str, matrix: &Matrix, x: &[f32], one: &[f32], other: &[f32]) {
    let mut weights = vec![0f32; matrix.cols];
    for (row, (one, other)) in one.iter().zip(other).enumerate() {
        matrix.read_row(row, &mut weights);
        let size: f32 = weights.iter().zip(x).map(|(w, x)| (w * x).abs()).sum();
        assert!((one - other).abs() <= 1e-6 * size, "{what}: row {row}: {one} and {other}");
    }
}

#[test]
fn a_row_of_4_bit_products_alone_and_in_company() {
    let (rows, cols) = (70, 256);
    let x = noise(5, 14 * cols);
    for group in [32, 128] {
        let matrix = int4_matrix(rows, cols, group, true, false);
        for isa in Isa::available() {
            let alone = bits_among(isa, &matrix, &x, Arithmetic::F32, &[1]);
            let company = bits_among(isa, &matrix, &x, Arithmetic::F32, &[2, 3, 4, 7, 14]);
            if pieces::in_f32(isa, group) {
                assert_close("alone and in company", &matrix, &x, &alone, &company);
            } else {
                assert_eq!(alone, company, "{isa:?}");
            }
            bits_among(isa, &matrix, &x, Arithmetic::Int16, &[1, 2, 3, 4, 7, 14]);
        }
    }
}

#[test]
fn a_row_below_and_above_the_number_that_tiles_take() {
    if !isa::tile_products().bf16 {
        eprintln!("SKIPPED: products of tiles of bf16, which this CPU does not have");
        return;
    }
    let (rows, cols) = (70, 300);
    let x = noise(2, 20 * cols);
    for format in [WeightFormat::F16, WeightFormat::Bf16] {
        let (matrix, _) = dense_matrix(format, rows, cols, CpuMath::F32);
        let isa = Isa::detect();
        let math = Arithmetic::of(CpuMath::F32, isa, [&matrix]);
        let Arithmetic::F32Tiles { from_rows } = math else { panic!("{math:?} of {format:?}") };
        let few = bits_among(isa, &matrix, &x, math, &[1, 2, from_rows - 1]);
        let many = bits_among(isa, &matrix, &x, math, &[from_rows, from_rows + 1, 20]);
        assert_close("among few and many", &matrix, &x, &few, &many);
    }
}
