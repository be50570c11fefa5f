//! The most FLOPs a second that a model's products can reach, from the rates of the units that they run on.
//!
//! A FLOP is one of the product's: what f32 arithmetic by products of tiles multiplies in pieces counts once, so that its peak
//! is a third of the tiles' rate with weights in bf16 and a fifth with weights in f16, or the multiply-adds' where those are faster.

use super::{Arithmetic, multiply_add_flops, multiply_add_rounds};
use crate::engine::config::CpuMath;
use crate::engine::device::cpu::isa::{Isa, tile_products};
use crate::engine::device::cpu::matrix::Packing;
use crate::engine::device::cpu::pool::Pool;
use crate::engine::model::layout::{ModelLayout, WeightFormat};
use crate::engine::model::spec::Role;
use crate::engine::model::weights::MatrixData;

/// Rounds of a measurement: about a millisecond of multiply-adds.
const ROUNDS: usize = 400_000;

/// What share of a model's multiplications can run where.
#[derive(Debug, Clone, PartialEq)]
pub struct Peak {
    isa: Isa,
    /// Of the units that are not for tiles.
    vectors: Arithmetic,
    /// (share, products of tiles for one multiplication; `None`: not by tiles) in the layers alone, and with the head.
    layers: Vec<(f64, Option<usize>)>,
    all: Vec<(f64, Option<usize>)>,
}

/// Of a matrix in `packing`.
fn products_of_tiles(math: CpuMath, isa: Isa, packing: Packing) -> Option<usize> {
    match Arithmetic::of_packings(math, isa, [packing]) {
        #[cfg(target_arch = "x86_64")]
        Arithmetic::F32Tiles { .. } => super::tiles::products_in_f32(packing),
        // Of bytes a product takes twice the columns, and int16 arithmetic two of them.
        Arithmetic::Bf16Tiles | Arithmetic::Int16Tiles { .. } => Some(1),
        _ => None,
    }
}

impl Peak {
    /// For any model with weights in f16.
    pub fn of_math(isa: Isa, math: CpuMath) -> Self {
        let packing = if math == CpuMath::Bf16 { Packing::Bf16 } else { Packing::F16 };
        let all = vec![(1.0, products_of_tiles(math, isa, packing))];
        Self { isa, vectors: Arithmetic::of_packings(math, isa, [Packing::F32]), layers: all.clone(), all }
    }

    pub fn of_model(isa: Isa, math: CpuMath, layout: &ModelLayout) -> Self {
        let packed =
            |format: WeightFormat| Packing::of(&MatrixData::Synthetic { format, seed: 0, std: 0.0 }, math);
        let (mut layers, mut all): (Vec<_>, Vec<_>) = (Vec::new(), Vec::new());
        for (linear, format) in &layout.linears {
            let head = linear.role == Role::Head;
            let format = if head && layout.spec.tied_head { layout.embedding } else { *format };
            let part = ((linear.rows * linear.cols) as f64, products_of_tiles(math, isa, packed(format)));
            all.push(part);
            if !head {
                layers.push(part);
            }
        }
        let shares = |parts: Vec<(f64, Option<usize>)>| {
            let whole: f64 = parts.iter().map(|part| part.0).sum();
            parts.into_iter().map(|(size, tiles)| (size / whole.max(1.0), tiles)).collect()
        };
        let vectors = Arithmetic::of_packings(math, isa, [Packing::F32]);
        Self { isa, vectors, layers: shares(layers), all: shares(all) }
    }

    /// Measures the units on all threads of `pool`.
    pub fn flops_per_s(&self, pool: &mut Pool) -> f64 {
        let mut rate = |math: Arithmetic, rounds: usize| {
            let start = std::time::Instant::now();
            pool.run(&|_| {
                std::hint::black_box(multiply_add_rounds(self.isa, math, rounds));
            });
            (rounds * pool.threads() * multiply_add_flops(self.isa, math)) as f64
                / start.elapsed().as_secs_f64()
        };
        let vectors = rate(self.vectors, ROUNDS);
        // (The rate is taken with tiles of bf16, which a CPU may lack that has those of bytes.)
        let by_tiles = tile_products().bf16 && self.all.iter().any(|part| part.1.is_some());
        let tiles = if by_tiles { rate(Arithmetic::Bf16Tiles, ROUNDS / 4) } else { 0.0 };
        // Seconds of a FLOP of each part, by the better of both units.
        let mixed = |parts: &[(f64, Option<usize>)]| {
            let seconds = parts.iter().map(|&(share, products)| {
                let of_tiles = products.map_or(0.0, |products| tiles / products as f64);
                share / vectors.max(of_tiles)
            });
            1.0 / seconds.sum::<f64>()
        };
        [&self.layers, &self.all]
            .into_iter()
            .filter(|parts| !parts.is_empty())
            .map(|parts| mixed(parts))
            .fold(0.0, f64::max)
    }
}
