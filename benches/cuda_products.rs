//! Times the products of a step of the 4B, each launch on another copy of the weights, so that none is in the L2: matrix by
//! matrix (all of one shape after another) and as the chain of 129 that a step is, in captured graphs.
//! `cargo bench --bench cuda_products [rows,rows,...]`; the tables come last.

use std::time::Instant;

use inferwall::engine::device::cuda::driver::{DeviceBuffer, Event, Gpu};
use inferwall::engine::device::cuda::launch::Stream;
use inferwall::engine::device::cuda::matrix::{Matrix, MatrixFormat, Output};
use inferwall::engine::device::cuda::products::Products;
use inferwall::{Error, Result};

/// Name, rows and columns of W, and what is done with the result.
const SHAPES: [(&str, usize, usize, Kind); 6] = [
    ("delta in", 12352, 2560, Kind::Half),
    ("attention in", 10240, 2560, Kind::Half),
    ("mixer out", 2560, 4096, Kind::Parts),
    ("gate and up", 18432, 2560, Kind::Silu),
    ("down", 2560, 9216, Kind::Parts),
    ("head", 248_320, 2560, Kind::Float),
];
const LAYERS: usize = 32;
const MAX_PARTS: usize = 8;

#[derive(Clone, Copy)]
enum Kind {
    Half,
    Float,
    Silu,
    Parts,
}

/// The matrices of a step in their order, each with its index in [`SHAPES`].
fn matrices(gpu: &Gpu) -> Result<Vec<(usize, Matrix)>> {
    // Varied small values of both signs: what the tensor cores multiply decides what power they draw.
    let pattern: Vec<u16> = (0..1 << 20)
        .map(|i: u32| i.wrapping_mul(2_654_435_761))
        .map(|hash| (0x2000 | (hash >> 20 & 0x0fff) | (hash >> 4 & 0x8000)) as u16)
        .collect();
    let bytes = 2 * pattern.len() as u64;
    let pattern = gpu.upload(&pattern)?;
    let stream = Stream::new(gpu)?;
    let layers = (0..LAYERS).flat_map(|layer| [usize::from(layer % 4 == 3), 2, 3, 4]);
    let mut all = Vec::new();
    for shape in layers.chain([5]) {
        let (_, rows, cols, _) = SHAPES[shape];
        let weights = gpu.allocate((2 * rows * cols) as u64)?;
        for at in (0..weights.bytes()).step_by(bytes as usize) {
            // SAFETY: within both buffers, which outlive the wait below.
            unsafe {
                stream.copy_within(weights.at(at), pattern.pointer(), bytes.min(weights.bytes() - at))?;
            }
        }
        let matrix = Matrix { format: MatrixFormat::F16, rows, cols, weights, scales: None, bias: None };
        all.push((shape, matrix));
    }
    stream.synchronize()?;
    Ok(all)
}

struct Bench {
    gpu: Gpu,
    matrices: Vec<(usize, Matrix)>,
    x: DeviceBuffer,
    y: DeviceBuffer,
}

impl Bench {
    /// Median seconds of the matrices of one shape, or of all, one after another.
    fn time(&self, products: &Products, rows: usize, only: Option<usize>) -> Result<f64> {
        let stream = Stream::new(&self.gpu)?;
        let to = self.y.pointer();
        let run = || {
            for (shape, matrix) in &self.matrices {
                if only.is_some_and(|only| only != *shape) {
                    continue;
                }
                let n = matrix.rows;
                let output = match SHAPES[*shape].3 {
                    Kind::Half => Output::Half { to, stride: n },
                    Kind::Float => Output::Float { to, stride: n },
                    Kind::Silu => Output::SiluMul { to, stride: n / 2 },
                    Kind::Parts => Output::Partials { to, part_stride: rows * n, max_parts: MAX_PARTS },
                };
                // SAFETY: x holds `rows` rows of the most columns, y as many fp32 as any output needs; both outlive the work.
                unsafe { products.launch(&stream, self.x.pointer(), rows, matrix, output)? };
            }
            Ok(())
        };
        run()?;
        // SAFETY: x, y and the weights outlive the graph.
        let graph = unsafe { stream.capture(run)? };
        let (start, end) = (Event::new(&self.gpu)?, Event::new(&self.gpu)?);
        let mut times = Vec::new();
        for _ in 0..9 {
            stream.record(&start)?;
            stream.launch_graph(&graph)?;
            stream.record(&end)?;
            end.synchronize()?;
            times.push(end.seconds_since(&start)?);
        }
        times.sort_by(f64::total_cmp);
        Ok(times[times.len() / 2])
    }
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
    let list = std::env::args()
        .skip(1)
        .find(|arg| !arg.starts_with('-'))
        .unwrap_or_else(|| "1,8,16,32,64,128,256".into());
    let bad = |_| Error::invalid(format!("rows: `{list}` is no list of numbers"), "give them like 1,8,64");
    let rows: Vec<usize> = list.split(',').map(str::parse).collect::<Result<_, _>>().map_err(bad)?;
    let most = rows.iter().copied().max().unwrap_or(1);
    let roof = inferwall::engine::device::cuda::ceilings::measure(&gpu)?;
    let matrices = matrices(&gpu)?;
    let x = gpu.allocate((2 * most * 9216) as u64)?;
    let some = &matrices[0].1.weights;
    // SAFETY: both buffers are that long, and live until the wait.
    unsafe {
        let stream = Stream::new(&gpu)?;
        stream.copy_within(x.pointer(), some.pointer(), x.bytes().min(some.bytes()))?;
        stream.synchronize()?;
    }
    let y = gpu.allocate((4 * most * (248_320).max(MAX_PARTS * 2560)) as u64)?;
    let bench = Bench { gpu: gpu.clone(), matrices, x, y };
    let new = |portable| Products::new(&gpu, most, 18432, 0, portable);
    let mut lines = Vec::new();
    for (label, products) in [
        ("best", new(false)?),
        ("library", new(false)?.without_hopper()),
        ("own", new(false)?.without_library()),
        ("portable", new(true)?),
    ] {
        for &rows in &rows {
            for (shape, (name, n, k, _)) in SHAPES.into_iter().enumerate() {
                let count = bench.matrices.iter().filter(|(of, _)| *of == shape).count();
                let seconds = bench.time(&products, rows, Some(shape))? / count as f64;
                let (bytes, flops) = ((2 * n * k) as f64, (2 * rows * n * k) as f64);
                lines.push(format!(
                    "{label:8} {rows:5} rows  {name:12} {n:6} x {k:4}  {:8.1} us  {:6.0} GB/s  {:6.1} TFLOP/s",
                    seconds * 1e6,
                    bytes / seconds / 1e9,
                    flops / seconds / 1e12
                ));
            }
            let seconds = bench.time(&products, rows, None)?;
            lines
                .push(format!("{label:8} {rows:5} rows  all of a step in a chain  {:8.3} ms", seconds * 1e3));
        }
    }
    println!("{}: {roof:?}; {:.0} s", gpu.facts().name, began.elapsed().as_secs_f64());
    println!("{}", lines.join("\n"));
    Ok(())
}
