//! Times the products on the shapes of the 4B: each launch of a captured graph reads another copy of the weights, so that
//! none is in the L2. `cargo bench --bench cuda_products [rows,rows,...]`; the table comes last.

use std::time::Instant;

use inferwall::engine::device::cuda::driver::{Event, Gpu};
use inferwall::engine::device::cuda::launch::Stream;
use inferwall::engine::device::cuda::matrix::{Matrix, MatrixFormat, Output};
use inferwall::engine::device::cuda::products::Products;
use inferwall::{Error, Result};

/// Name, rows and columns of W, and what is done with the result.
const SHAPES: [(&str, usize, usize, Kind); 6] = [
    ("delta in", 12352, 2560, Kind::Half),
    ("delta out", 2560, 4096, Kind::Parts),
    ("attention in", 10240, 2560, Kind::Half),
    ("gate and up", 18432, 2560, Kind::Silu),
    ("down", 2560, 9216, Kind::Parts),
    ("head", 248_320, 2560, Kind::Float),
];
/// Bytes of weights a measurement goes through, many times the L2.
const BYTES: usize = 2_000_000_000;

#[derive(Clone, Copy)]
enum Kind {
    Half,
    Float,
    Silu,
    Parts,
}

/// Median seconds of one launch.
fn time(gpu: &Gpu, products: &Products, rows: usize, (n, k): (usize, usize), kind: Kind) -> Result<f64> {
    let stream = Stream::new(gpu)?;
    let copies = (BYTES / (2 * n * k)).max(3);
    // Varied small values, the same pattern in each copy.
    let pattern: Vec<u16> =
        (0..1 << 20).map(|i: u32| 0x2000 | (i.wrapping_mul(2_654_435_761) >> 17) as u16).collect();
    let mut matrices = Vec::new();
    for _ in 0..copies {
        let weights = gpu.allocate((2 * n * k) as u64)?;
        for at in (0..n * k).step_by(pattern.len()) {
            weights.write(2 * at as u64, &pattern[..pattern.len().min(n * k - at)])?;
        }
        matrices.push(Matrix {
            format: MatrixFormat::F16,
            rows: n,
            cols: k,
            weights,
            scales: None,
            bias: None,
        });
    }
    let x = gpu.upload(&pattern[..rows * k])?;
    let y = gpu.allocate((8 * rows * n * 4) as u64)?;
    let to = y.pointer();
    let output = match kind {
        Kind::Half => Output::Half { to, stride: n },
        Kind::Float => Output::Float { to, stride: n },
        Kind::Silu => Output::SiluMul { to, stride: n / 2 },
        Kind::Parts => Output::Partials { to, part_stride: rows * n, max_parts: 8 },
    };
    let run = || {
        for matrix in &matrices {
            // SAFETY: x holds `rows` rows of k, y as many fp32 as eight parts need; both outlive the stream's work.
            unsafe { products.launch(&stream, x.pointer(), rows, matrix, output)? };
        }
        Ok(())
    };
    run()?;
    let graph = stream.capture(run)?;
    let (start, end) = (Event::new(gpu)?, Event::new(gpu)?);
    let mut times = Vec::new();
    for _ in 0..9 {
        stream.record(&start)?;
        stream.launch_graph(&graph)?;
        stream.record(&end)?;
        end.synchronize()?;
        times.push(end.seconds_since(&start)? / copies as f64);
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}

fn main() -> Result<()> {
    let gpu = match Gpu::open(0) {
        Ok(gpu) => gpu,
        Err(error) => {
            eprintln!("SKIPPED cuda_products: {error}");
            return Ok(());
        }
    };
    let began = Instant::now();
    let list =
        std::env::args().skip(1).find(|arg| !arg.starts_with('-')).unwrap_or_else(|| "1,8,32,64,256".into());
    let bad = |_| Error::invalid(format!("rows: `{list}` is no list of numbers"), "give them like 1,8,64");
    let rows: Vec<usize> = list.split(',').map(str::parse).collect::<Result<_, _>>().map_err(bad)?;
    let roof = inferwall::engine::device::cuda::ceilings::measure(&gpu)?;
    let mut lines = Vec::new();
    for portable in [false, true] {
        let products = Products::new(&gpu, *rows.iter().max().unwrap_or(&1), 18432, 0, portable)?;
        for &rows in &rows {
            for (name, n, k, kind) in SHAPES {
                let seconds = time(&gpu, &products, rows, (n, k), kind)?;
                let (bytes, flops) = ((2 * n * k) as f64, (2 * rows * n * k) as f64);
                let own = if portable { "own" } else { "best" };
                lines.push(format!(
                    "{own:4} {rows:5} rows  {name:12} {n:6} x {k:4}  {:8.1} us  {:6.0} GB/s  {:6.1} TFLOP/s",
                    seconds * 1e6,
                    bytes / seconds / 1e9,
                    flops / seconds / 1e12
                ));
            }
        }
    }
    println!("{}: {roof:?}; {:.0} s", gpu.facts().name, began.elapsed().as_secs_f64());
    println!("{}", lines.join("\n"));
    Ok(())
}
