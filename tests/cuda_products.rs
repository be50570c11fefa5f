//! Products on the GPU against plain loops in f64: every kind of output, every kernel, odd numbers of rows and columns.
//! Skipped loudly where there is no usable GPU.

mod skip;

use half::f16;
use inferwall::engine::device::cuda::driver::Gpu;
use inferwall::engine::device::cuda::launch::Stream;
use inferwall::engine::device::cuda::matrix::{Matrix, MatrixFormat, Output};
use inferwall::engine::device::cuda::products::Products;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use skip::skip;

fn gpu(test: &str) -> Option<Gpu> {
    match Gpu::open(0) {
        Ok(gpu) => Some(gpu),
        Err(error) => {
            skip(test, &error);
            None
        }
    }
}

fn halves(rng: &mut ChaCha8Rng, count: usize, scale: f32) -> Vec<f16> {
    (0..count).map(|_| f16::from_f32(rng.random_range(-scale..scale))).collect()
}

fn bits(values: &[f16]) -> Vec<u16> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// x Wᵀ + bias in f64, [rows, n].
fn reference(x: &[f16], w: &[f16], bias: &[f32], (rows, n, k): (usize, usize, usize)) -> Vec<f64> {
    let (x, w): (Vec<f64>, Vec<f64>) =
        (x.iter().map(|v| v.to_f64()).collect(), w.iter().map(|v| v.to_f64()).collect());
    let mut y = Vec::with_capacity(rows * n);
    for row in 0..rows {
        for column in 0..n {
            let (x, w) = (&x[row * k..][..k], &w[column * k..][..k]);
            let sum: f64 = x.iter().zip(w).map(|(a, b)| a * b).sum();
            y.push(sum + bias.get(column).map_or(0.0, |&b| f64::from(b)));
        }
    }
    y
}

/// ||found - expected|| / ||expected||, NaN if a value is.
fn distance(found: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let square = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>();
    let apart = square(&mut found.iter().zip(expected).map(|(a, b)| a - b));
    (apart / square(&mut expected.iter().copied())).sqrt()
}

const POISON: u16 = 0x7e00;

struct Case<'a> {
    gpu: &'a Gpu,
    stream: &'a Stream,
    products: &'a Products,
    x: u64,
    rows: usize,
    matrix: &'a Matrix,
}

impl Case<'_> {
    /// Runs with `elements` poisoned fp16 or fp32 values as output, and gives them back with the parts.
    fn run(&self, elements: usize, float: bool, output: impl FnOnce(u64) -> Output) -> (Vec<f64>, usize) {
        let to = self.gpu.upload(&vec![POISON; elements * if float { 2 } else { 1 }]).unwrap();
        let poisoned = vec![f32::NAN; if float { elements } else { 0 }];
        to.write(0, &poisoned).unwrap();
        // SAFETY: x holds the rows, the output as many elements as its kind needs, and both outlive the wait.
        let parts = unsafe {
            self.products.launch(self.stream, self.x, self.rows, self.matrix, output(to.pointer()))
        }
        .unwrap();
        self.stream.synchronize().unwrap();
        let values = if float {
            to.read::<f32>(0, elements).unwrap().into_iter().map(f64::from).collect()
        } else {
            let bits = to.read::<u16>(0, elements).unwrap();
            bits.into_iter().map(|bits| f16::from_bits(bits).to_f64()).collect()
        };
        (values, parts)
    }
}

fn check(gpu: &Gpu, products: &Products, (rows, n, k): (usize, usize, usize), with_bias: bool, label: &str) {
    let stream = Stream::new(gpu).unwrap();
    let mut rng = ChaCha8Rng::seed_from_u64((rows * 7919 + n * 31 + k) as u64);
    let (x, w) = (halves(&mut rng, rows * k, 1.0), halves(&mut rng, n * k, 0.1));
    let bias: Vec<f32> = (0..if with_bias { n } else { 0 }).map(|_| rng.random_range(-1.0..1.0)).collect();
    let expected = reference(&x, &w, &bias, (rows, n, k));
    let on_gpu = gpu.upload(&bits(&x)).unwrap();
    let matrix = Matrix {
        format: MatrixFormat::F16,
        rows: n,
        cols: k,
        weights: gpu.upload(&bits(&w)).unwrap(),
        scales: None,
        bias: if with_bias { Some(gpu.upload(&bias).unwrap()) } else { None },
    };
    let case = Case { gpu, stream: &stream, products, x: on_gpu.pointer(), rows, matrix: &matrix };
    let what = format!("{label}: {rows} rows, {n} x {k}");

    // Rows of the output are further apart than they are long; what lies between is left alone.
    let stride = n.next_multiple_of(8) + 8;
    let dense = |values: &[f64], stride: usize, width: usize| -> Vec<f64> {
        for row in values.chunks(stride) {
            assert!(row[width..].iter().all(|v| v.is_nan()), "{what}: wrote past a row");
        }
        values.chunks(stride).flat_map(|row| row[..width].to_vec()).collect()
    };
    let (found, parts) = case.run(rows * stride, false, |to| Output::Half { to, stride });
    assert_eq!(parts, 1);
    let error = distance(&dense(&found, stride, n), &expected);
    assert!(error < 1e-3, "{what}: half: {error}");

    let (found, _) = case.run(rows * stride, true, |to| Output::Float { to, stride });
    let error = distance(&dense(&found, stride, n), &expected);
    assert!(error < 3e-5, "{what}: float: {error}");

    if products.finds_best(rows, &matrix) {
        check_best(&case, &found, stride, &what);
    }

    let (part_stride, max_parts) = (rows * n, 8);
    let (found, parts) =
        case.run(max_parts * part_stride, true, |to| Output::Partials { to, part_stride, max_parts });
    assert!((1..=max_parts).contains(&parts), "{what}: {parts} parts");
    if !with_bias {
        let sums: Vec<f64> =
            (0..part_stride).map(|i| found.iter().skip(i).step_by(part_stride).take(parts).sum()).collect();
        let error = distance(&sums, &expected);
        assert!(error < 3e-5, "{what}: {parts} parts: {error}");
    }

    if products.adds(rows, &matrix) {
        let before: Vec<f32> = (0..rows * n).map(|_| rng.random_range(-1.0..1.0)).collect();
        let y = gpu.upload(&before).unwrap();
        let output = Output::Residual { to: y.pointer() };
        // SAFETY: x and y hold the rows, and both outlive the wait.
        unsafe { products.launch(&stream, on_gpu.pointer(), rows, &matrix, output).unwrap() };
        stream.synchronize().unwrap();
        let found: Vec<f64> = y.read::<f32>(0, rows * n).unwrap().into_iter().map(f64::from).collect();
        let sums: Vec<f64> = expected.iter().zip(&before).map(|(sum, &old)| sum + f64::from(old)).collect();
        let error = distance(&found, &sums);
        assert!(error < 3e-5, "{what}: added: {error}");
    }

    if n.is_multiple_of(16) {
        let width = n / 2;
        let stride = width + 8;
        let silu = |x: f64| x / (1.0 + (-x).exp());
        let gated: Vec<f64> = (0..rows * width)
            .map(|i| {
                let (row, column) = (i / width, i % width);
                let at = row * n + column / 8 * 16 + column % 8;
                silu(expected[at]) * expected[at + 8]
            })
            .collect();
        let (found, _) = case.run(rows * stride, false, |to| Output::SiluMul { to, stride });
        let error = distance(&dense(&found, stride, width), &gated);
        assert!(error < 3e-3, "{what}: silu: {error}");
    }
}

/// The key of each row's largest among the first logits: the same sums as `logits` [rows, stride], so exactly. What a key holds
/// already stays if it is larger.
fn check_best(case: &Case, logits: &[f64], stride: usize, what: &str) {
    let ordered = |value: f32| {
        let bits = value.to_bits();
        if bits >> 31 == 1 { !bits } else { bits | 1 << 31 }
    };
    for vocab in [case.matrix.rows, case.matrix.rows.div_ceil(2) + 1] {
        let mut keys = vec![0u64; case.rows];
        keys[case.rows - 1] = u64::MAX;
        let on_gpu = case.gpu.upload(&keys).unwrap();
        let output = Output::Best { keys: on_gpu.pointer(), vocab };
        // SAFETY: x holds the rows, and the keys are as many; both outlive the wait.
        unsafe { case.products.launch(case.stream, case.x, case.rows, case.matrix, output).unwrap() };
        case.stream.synchronize().unwrap();
        let found: Vec<u64> = on_gpu.read(0, case.rows).unwrap();
        for (row, logits) in logits.chunks(stride).enumerate().take(case.rows - 1) {
            let mut best = 0;
            for id in 1..vocab {
                if logits[id] > logits[best] {
                    best = id;
                }
            }
            let key = u64::from(ordered(logits[best] as f32)) << 32 | u64::from(!(best as u32));
            assert_eq!(found[row], key, "{what}: best of {vocab} in row {row}");
        }
        assert_eq!(found[case.rows - 1], u64::MAX, "{what}: a larger key was lost");
    }
}

// Small ones, k of which a cluster shares; the widest has more units of 16 rows than four for each multiprocessor.
const SHAPES: [(usize, usize); 10] = [
    (16, 64),
    (48, 320),
    (64, 4096),
    (128, 4672),
    (2560, 256),
    (272, 2560),
    (144, 9216),
    (208, 264),
    (24, 72),
    (8464, 128),
];

#[test]
fn products_of_own_kernels_agree_with_plain_loops() {
    let Some(gpu) = gpu("products_of_own_kernels_agree_with_plain_loops") else { return };
    let products = Products::new(&gpu, 300, 2 * 2560, 0, true).unwrap();
    for (n, k) in SHAPES {
        for rows in [1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 129, 200] {
            check(&gpu, &products, (rows, n, k), rows == 7 && n.is_multiple_of(16), "own");
        }
    }
}

#[test]
fn products_with_the_library_agree_with_plain_loops() {
    let Some(gpu) = gpu("products_with_the_library_agree_with_plain_loops") else { return };
    let products = Products::new(&gpu, 300, 2 * 2560, 0, false).unwrap();
    for (n, k) in SHAPES {
        for rows in [1, 5, 9, 33, 128, 200, 257] {
            check(&gpu, &products, (rows, n, k), rows == 33 && n.is_multiple_of(16), "library");
        }
    }
}

/// On Hopper these are the warpgroup products; elsewhere the portable ones once more.
#[test]
fn products_without_the_library_agree_with_plain_loops() {
    let Some(gpu) = gpu("products_without_the_library_agree_with_plain_loops") else { return };
    let products = Products::new(&gpu, 300, 2 * 2560, 0, false).unwrap().without_library();
    for (n, k) in SHAPES {
        for rows in [1, 2, 8, 9, 17, 33, 65, 100, 129, 193, 255, 300] {
            check(&gpu, &products, (rows, n, k), rows == 33 && n.is_multiple_of(16), "no library");
        }
    }
}

/// More rows than 256: on Hopper tiles that blocks take in turn, with tails in every direction.
#[test]
fn products_of_many_rows_agree_with_plain_loops() {
    let Some(gpu) = gpu("products_of_many_rows_agree_with_plain_loops") else { return };
    let products = Products::new(&gpu, 1024, 2 * 2560, 0, false).unwrap().without_library();
    let mut rng = ChaCha8Rng::seed_from_u64(257);
    // Several tiles for each block, a k shorter than one stage, k of many stages.
    let mut sizes = vec![(520, 8464, 72), (257, 16, 8), (300, 208, 3200)];
    for _ in 0..12 {
        sizes.push((rng.random_range(257..800), 8 * rng.random_range(1..80), 8 * rng.random_range(1..60)));
    }
    for (case, size) in sizes.into_iter().enumerate() {
        check(&gpu, &products, size, case % 3 == 2, "many rows");
    }
}

/// Equal logits: the lowest id. One that is not finite: a key of all ones.
#[test]
fn the_best_of_equal_logits_is_the_first() {
    let Some(gpu) = gpu("the_best_of_equal_logits_is_the_first") else { return };
    let products = Products::new(&gpu, 256, 2 * 2560, 0, false).unwrap();
    let stream = Stream::new(&gpu).unwrap();
    let (n, k) = (8464, 128);
    let matrix = Matrix {
        format: MatrixFormat::F16,
        rows: n,
        cols: k,
        weights: gpu.upload(&vec![f16::ONE.to_bits(); n * k]).unwrap(),
        scales: None,
        bias: None,
    };
    for rows in [3, 40, 120, 200] {
        if !products.finds_best(rows, &matrix) {
            skip("the_best_of_equal_logits_is_the_first", format_args!("{rows} rows: no warpgroup products"));
            continue;
        }
        let mut x = vec![f16::ONE; rows * k];
        x[k + 5] = f16::INFINITY;
        let (x, keys) = (gpu.upload(&bits(&x)).unwrap(), gpu.upload(&vec![0u64; rows]).unwrap());
        let output = Output::Best { keys: keys.pointer(), vocab: n - 3 };
        // SAFETY: x and the keys hold the rows, and outlive the wait.
        unsafe { products.launch(&stream, x.pointer(), rows, &matrix, output).unwrap() };
        stream.synchronize().unwrap();
        let found: Vec<u64> = keys.read(0, rows).unwrap();
        for (row, key) in found.into_iter().enumerate() {
            let expected = if row == 1 {
                u64::MAX
            } else {
                u64::from((k as f32).to_bits() | 1 << 31) << 32 | 0xffff_ffff
            };
            assert_eq!(key, expected, "{rows} rows, row {row}");
        }
    }
}

/// cuBLASLt with algorithms chosen by timing, all kinds of sums; what was found is not timed again.
#[test]
fn tuned_products_agree_and_are_remembered() {
    let Some(gpu) = gpu("tuned_products_agree_and_are_remembered") else { return };
    let (rows, n, k) = (300, 2560, 2048);
    let mut rng = ChaCha8Rng::seed_from_u64(77);
    let (x, w) = (halves(&mut rng, 512 * k, 1.0), halves(&mut rng, n * k, 0.1));
    let before: Vec<f32> = (0..512 * n).map(|_| rng.random_range(-1.0..1.0)).collect();
    let on_gpu = gpu.upload(&bits(&x)).unwrap();
    let matrix = Matrix {
        format: MatrixFormat::F16,
        rows: n,
        cols: k,
        weights: gpu.upload(&bits(&w)).unwrap(),
        scales: None,
        bias: None,
    };
    let y = gpu.upload(&before).unwrap();
    let to = y.pointer();
    let outputs = [
        Output::Half { to, stride: n },
        Output::Partials { to, part_stride: 0, max_parts: 1 },
        Output::Residual { to },
    ];
    let uses: Vec<(&Matrix, Output)> = outputs.iter().map(|&output| (&matrix, output)).collect();
    let make = || {
        let products = Products::new(&gpu, 512, 2 * n, 0, false).unwrap();
        // SAFETY: x and y hold 512 rows.
        let timed = unsafe { products.tune(&uses, 512, on_gpu.pointer(), on_gpu.bytes()).unwrap() };
        (products, timed)
    };
    let (products, _) = make();
    if !products.adds(rows, &matrix) {
        skip("tuned_products_agree_and_are_remembered", "cuBLASLt was not found");
        return;
    }
    let some = [0, 1, 137, 298, 299];
    let x_of_some: Vec<f16> = some.iter().flat_map(|&row| x[row * k..][..k].to_vec()).collect();
    let expected = reference(&x_of_some, &w, &[], (some.len(), n, k));
    let stream = Stream::new(&gpu).unwrap();
    for output in outputs {
        y.write(0, &before).unwrap();
        // SAFETY: x and y hold `rows` rows, and outlive the wait.
        unsafe { products.launch(&stream, on_gpu.pointer(), rows, &matrix, output).unwrap() };
        stream.synchronize().unwrap();
        let (mut found, mut wanted) = (Vec::new(), expected.clone());
        for (i, &row) in some.iter().enumerate() {
            match output {
                Output::Half { .. } => {
                    let row = y.read::<u16>((2 * row * n) as u64, n).unwrap();
                    found.extend(row.into_iter().map(|bits| f16::from_bits(bits).to_f64()));
                }
                _ => {
                    let values = y.read::<f32>((4 * row * n) as u64, n).unwrap();
                    found.extend(values.into_iter().map(f64::from));
                }
            }
            if matches!(output, Output::Residual { .. }) {
                let old = &before[row * n..][..n];
                wanted[i * n..][..n].iter_mut().zip(old).for_each(|(sum, &old)| *sum += f64::from(old));
            }
        }
        let error = distance(&found, &wanted);
        let most = if matches!(output, Output::Half { .. }) { 1e-3 } else { 3e-5 };
        assert!(error < most, "{output:?}: {error}");
    }
    if inferwall::engine::device::cuda::compile::cache_folder().is_some() {
        assert_eq!(make().1, 0, "shapes timed twice");
    }
}
