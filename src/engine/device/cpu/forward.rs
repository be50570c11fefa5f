//! One step through the layers: embedding, mixers, MLPs. The residual stream is f32, [rows][hidden].
//!
//! A layer is six parallel phases: norm and products into the mixer, the mixer, its output product added to the residual
//! stream, norm and gate and up products joined by SiLU, the down product. Every matrix is read once a step, and a thread
//! that is through with a phase asks for the first weights of the next one while it waits.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use super::attention::{self, Attend, Prepare, RopeTable};
use super::batch::Batch;
use super::cache::{KvPool, StatePool};
use super::capture::Capture;
use super::delta::{self, Mix};
use super::gemm::grouped::{GroupUnit, Grouped, GroupedActivations, form_of};
use super::gemm::{
    Activations, Arithmetic, MAX_TILE, Packed, Product, TileSpace, first_read, first_read_of_pair,
    for_each_tile, max_tile, prefetches_ahead,
};
use super::isa::{Arch, Isa, Work};
use super::lanes;
use super::matrix::{Matrix, PANEL, Packing};
use super::memory::{Scratch, Shared};
use super::model::{LayerWeights, MixerWeights, Weights};
use super::pool::{Ahead, Pool};
use super::trace::Trace;
use crate::Result;
use crate::engine::model::quantize::inputs::Point;

/// Buffers of a session, grown to the largest step seen.
#[derive(Default)]
pub struct Buffers {
    /// Residual stream.
    pub x: Scratch<f32>,
    /// What the input products of a mixer give.
    mixed: Scratch<f32>,
    pub normed: Activations,
    /// Outputs of a mixer, [rows][size], and packed.
    mixer_rows: Scratch<f32>,
    mixer_out: Activations,
    mlp: Activations,
    /// The input of products of another kind than the others of a mixer's input.
    copied: Activations,
    /// The input of the product at hand by groups, once for each size of them.
    grouped: Vec<GroupedActivations>,
    threads: Vec<ThreadSpace>,
}

/// Buffers of one thread.
#[derive(Default)]
struct ThreadSpace {
    /// Rows of a tile, normed.
    rows: Vec<f32>,
    attention: attention::Workspace,
    /// (item, layer) whose keys and values attention has prefetched.
    next_item: Option<(usize, usize)>,
    delta: delta::Workspace,
}

/// Everything a step needs.
pub struct Forward<'a> {
    pub pool: &'a mut Pool,
    pub weights: &'a Weights,
    pub buffers: &'a mut Buffers,
    pub kv: Option<&'a KvPool>,
    pub state: Option<&'a StatePool>,
    pub rope: &'a RopeTable,
    pub batch: &'a Batch,
    pub trace: &'a mut Trace,
    /// (layer << 32 | row) of the first residual row found not finite; all ones when none was.
    pub not_finite: AtomicU64,
    pub capture: Option<&'a mut Capture>,
}

/// Bytes of a mixer's rows: the products it reads, its output written, read and packed.
fn mixer_bytes(rows: usize, width: usize, size: usize, packed: &Packed) -> usize {
    4 * rows * (width + 2 * size) + packed.bytes()
}

impl Forward<'_> {
    fn isa(&self) -> Isa {
        self.weights.isa
    }

    /// Runs all layers; the residual stream is left in `buffers.x`.
    pub fn run(&mut self, tokens: &[u32]) -> Result<()> {
        let weights = self.weights;
        let hidden = weights.spec().hidden_size;
        self.buffers.threads.resize_with(self.pool.threads(), ThreadSpace::default);
        self.buffers.x.reserve(self.batch.rows * hidden)?;
        let x = self.buffers.x.ptr();
        let started = self.trace.start();
        self.pool.split(self.batch.rows, grain(self.batch.rows, 4), &|rows, _| {
            for row in rows {
                // SAFETY: one thread writes a row.
                let out = unsafe { x.part(row * hidden, hidden) };
                weights.embedding.read_row(tokens[row] as usize, out);
            }
        });
        let row_bytes = weights.embedding.bytes() / weights.embedding.rows + 4 * hidden;
        self.trace.end("embed", started, (self.batch.rows * row_bytes) as u64, 0);
        let (mut attention, mut delta) = (0, 0);
        for (index, layer) in weights.layers.iter().enumerate() {
            match &layer.mixer {
                MixerWeights::Attention { small, inputs, output } => {
                    let packed = self.attention(index, attention, layer, small, inputs, output)?;
                    self.capture(index, Point::MixerOut, &packed);
                    self.add_product(
                        "attention_out",
                        output,
                        &packed,
                        Upcoming::Pair(&layer.gate, &layer.up),
                    )?;
                    attention += 1;
                }
                MixerWeights::DeltaNet { small, inputs, output } => {
                    let packed = self.delta_net(index, delta, layer, small, inputs, output)?;
                    self.capture(index, Point::MixerOut, &packed);
                    self.add_product("delta_out", output, &packed, Upcoming::Pair(&layer.gate, &layer.up))?;
                    delta += 1;
                }
            }
            self.mlp(index, layer)?;
        }
        Ok(())
    }

    fn capture(&mut self, layer: usize, point: Point, packed: &Packed) {
        if let Some(capture) = &mut self.capture {
            capture.take(layer, point, packed);
        }
    }

    /// Norm of the given rows of the residual stream (all, or those listed), packed for a product.
    pub fn norm(
        &mut self,
        layer: usize,
        weight: &[f32],
        rows: Option<&[usize]>,
        math: Arithmetic,
    ) -> Result<Packed> {
        let isa = self.isa();
        let spec = self.weights.spec();
        let (hidden, eps) = (spec.hidden_size, spec.norm_eps);
        let count = rows.map_or(self.batch.rows, <[usize]>::len);
        let packed = self.buffers.normed.shape(isa, math, count, hidden)?;
        let started = self.trace.start();
        let x = self.buffers.x.ptr();
        let space = Shared(self.buffers.threads.as_mut_ptr());
        let not_finite = &self.not_finite;
        self.pool.split(packed.units(), grain_of(&packed), &|units, thread| {
            // SAFETY: each thread has its own space.
            let space = unsafe { &mut space.part(thread, 1)[0] };
            space.rows.resize(MAX_TILE * hidden, 0.0);
            for unit in units {
                let (start, tokens) = packed.unit(unit);
                for t in 0..tokens {
                    let row = rows.map_or(start + t, |rows| rows[start + t]);
                    // SAFETY: the residual stream is only read in this phase.
                    let x = unsafe { x.part(row * hidden, hidden) };
                    let out = &mut space.rows[t * hidden..(t + 1) * hidden];
                    if !isa.run(Norm { x, weight, eps, out }).is_finite() {
                        not_finite.fetch_min((layer as u64) << 32 | row as u64, Ordering::Relaxed);
                    }
                }
                isa.run(PackUnit { packed: &packed, unit, rows: &space.rows });
            }
        });
        self.trace.end("norm", started, (4 * count * hidden + packed.bytes()) as u64, 0);
        Ok(packed)
    }

    /// Packs the mixer's output rows for the product with `output`.
    fn pack_mixer_rows(&mut self, size: usize, output: &Matrix) -> Result<Packed> {
        let isa = self.isa();
        let math = self.weights.arithmetic([output]);
        let packed = self.buffers.mixer_out.shape(isa, math, self.batch.rows, size)?;
        let rows = self.buffers.mixer_rows.ptr();
        self.pool.split(packed.units(), grain_of(&packed), &|units, _| {
            for unit in units {
                let (start, tokens) = packed.unit(unit);
                // SAFETY: the rows are only read in this phase.
                let rows = unsafe { rows.part(start * size, tokens * size) };
                isa.run(PackUnit { packed: &packed, unit, rows });
            }
        });
        Ok(packed)
    }

    /// The input of products with 4-bit matrices by groups, for each size of group that is among them.
    pub fn grouped<'m>(
        &mut self,
        packed: &Packed,
        matrices: impl Iterator<Item = &'m Matrix>,
    ) -> Result<Vec<Grouped>> {
        let isa = self.isa();
        let mut all: Vec<Grouped> = Vec::new();
        for needed in matrices.filter_map(|matrix| form_of(isa, matrix.packing, packed)) {
            if all.iter().any(|grouped| (grouped.group, grouped.form) == needed) {
                continue;
            }
            if self.buffers.grouped.len() == all.len() {
                self.buffers.grouped.push(GroupedActivations::default());
            }
            let grouped = self.buffers.grouped[all.len()].shape(packed, needed)?;
            self.pool.split(packed.units(), grain_of(packed), &|units, _| {
                for unit in units {
                    isa.run(GroupUnit { packed, grouped: &grouped, unit });
                }
            });
            all.push(grouped);
        }
        Ok(all)
    }

    /// Products of `packed` with several matrices side by side: row r of the result is [first | second | ...].
    fn products(
        &mut self,
        name: &'static str,
        matrices: &[Matrix],
        packed: &Packed,
        next: Upcoming<'_>,
    ) -> Result<(Shared<f32>, usize)> {
        let width: usize = matrices.iter().map(|matrix| matrix.rows).sum();
        self.buffers.mixed.reserve(packed.tiling.rows * width)?;
        let out = self.buffers.mixed.ptr();
        let started = self.trace.start();
        // Of an input held for products of tiles of bytes, matrices of other kinds take a copy in a run before.
        let alike = |matrix: &Matrix| {
            !packed.math().is_int16_tiles() || matches!(matrix.packing, Packing::Int4 { .. })
        };
        if !matrices.iter().all(alike) {
            let copy =
                self.buffers.copied.shape(self.isa(), Arithmetic::Int16, packed.tiling.rows, packed.cols)?;
            self.pool.split(copy.units(), grain_of(&copy), &|units, _| {
                // SAFETY: one thread writes a unit.
                units.into_iter().for_each(|unit| unsafe { copy.copy_unit(unit, packed) });
            });
            self.run_products(matrices, &|matrix| !alike(matrix), &copy, out, width, None)?;
        }
        self.run_products(matrices, &alike, packed, out, width, Some(next))?;
        self.trace.products(name, started, matrices.iter(), packed, width);
        Ok((out, width))
    }

    /// One run of [`Self::products`], for the matrices that are `taken`.
    fn run_products(
        &mut self,
        matrices: &[Matrix],
        taken: &dyn Fn(&Matrix) -> bool,
        packed: &Packed,
        out: Shared<f32>,
        width: usize,
        next: Option<Upcoming<'_>>,
    ) -> Result<()> {
        let grouped = self.grouped(packed, matrices.iter().filter(|matrix| taken(matrix)))?;
        let mut parts = Vec::with_capacity(matrices.len());
        let (mut panels, mut column) = (0, 0);
        for matrix in matrices {
            if taken(matrix) {
                let product = Product::new(self.isa(), matrix, *packed, &grouped);
                parts.push((matrix, panels, column, product));
                panels += matrix.panels();
            }
            column += matrix.rows;
        }
        let threads = self.pool.threads();
        let ahead = |thread: usize| next.map_or(Ahead::NOTHING, |next| next.of(threads, thread));
        for_each_tile(self.pool, packed, panels, &ahead, &|panels, tile| {
            for (matrix, first, column, product) in &parts {
                let start = panels.start.max(*first);
                let end = panels.end.min(first + matrix.panels());
                if start < end {
                    let panels = start - first..end - first;
                    store_tile(product, matrix.rows, panels, tile, packed, out, width, *column);
                }
            }
        });
        Ok(())
    }

    /// Adds the product to the residual stream.
    fn add_product(
        &mut self,
        name: &'static str,
        matrix: &Matrix,
        packed: &Packed,
        next: Upcoming<'_>,
    ) -> Result<()> {
        let started = self.trace.start();
        let grouped = self.grouped(packed, std::iter::once(matrix))?;
        let product = Product::new(self.isa(), matrix, *packed, &grouped);
        let x = self.buffers.x.ptr();
        let threads = self.pool.threads();
        let ahead = |thread: usize| next.of(threads, thread);
        for_each_tile(self.pool, packed, matrix.panels(), &ahead, &|panels, tile| {
            let mut space = TileSpace::new();
            for (index, result) in product.tile(panels.clone(), tile, &mut space).iter().enumerate() {
                let (row, panel) = packed.place(&panels, tile, index);
                let rows = PANEL.min(matrix.rows - panel * PANEL);
                // SAFETY: one thread computes a panel's tile and owns these elements.
                let to = unsafe { x.part(row * matrix.rows + panel * PANEL, rows) };
                for (to, value) in to.iter_mut().zip(result) {
                    *to += value;
                }
            }
        });
        // (The residual stream is read and written.)
        self.trace.products(name, started, std::iter::once(matrix), packed, 2 * matrix.rows);
        Ok(())
    }

    fn attention(
        &mut self,
        layer_index: usize,
        index: usize,
        layer: &LayerWeights,
        small: &attention::AttentionWeights,
        inputs: &[Matrix],
        output_matrix: &Matrix,
    ) -> Result<Packed> {
        let spec = self.weights.spec();
        let math = self.weights.arithmetic_of_inputs(inputs);
        let packed = self.norm(layer_index, &layer.input_norm, None, math)?;
        self.capture(layer_index, Point::MixerIn, &packed);
        // The mixer between the two products reads no weights to speak of.
        let next = Upcoming::Matrices(std::slice::from_ref(output_matrix));
        let (qkv, width) = self.products("attention_in", inputs, &packed, next)?;
        let attention = &spec.attention;
        let size = attention.heads * attention.head_dim;
        self.buffers.mixer_rows.reserve(self.batch.rows * size)?;
        let output = self.buffers.mixer_rows.ptr();
        let Some(kv) = self.kv else { return self.pack_mixer_rows(size, output_matrix) };
        let shared = attention::Layer {
            spec: attention,
            eps: spec.norm_eps,
            weights: small,
            rope: self.rope,
            kv,
            index,
            qkv,
            width,
            output,
            isa: self.isa(),
        };
        let batch = self.batch;
        let started = self.trace.start();
        let group = attention.heads / attention.kv_heads;
        let step = (max_tile(self.isa()) / group).max(1);
        // Sequences whose tokens are one item of work are prepared by that item.
        let long: Vec<(usize, usize)> = (batch.sequences.iter().enumerate())
            .filter(|(_, sequence)| sequence.tokens() > step)
            .flat_map(|(which, sequence)| (0..sequence.tokens()).map(move |token| (which, token)))
            .collect();
        self.pool.split(long.len(), grain(long.len(), 4), &|rows, _| {
            for &(which, token) in &long[rows] {
                let sequence = &batch.sequences[which];
                let kv_heads = 0..attention.kv_heads;
                shared.isa.run(Prepare { layer: &shared, sequence, token, kv_heads });
            }
        });
        let mut items = Vec::new();
        for (which, sequence) in batch.sequences.iter().enumerate() {
            for kv_head in 0..attention.kv_heads {
                for start in (0..sequence.tokens()).step_by(step) {
                    items.push((which, kv_head, start..(start + step).min(sequence.tokens())));
                }
            }
        }
        // The longest contexts first, so that none is left to the end of the phase.
        items.sort_by_key(|item| std::cmp::Reverse(batch.sequences[item.0].context + item.2.end));
        let space = Shared(self.buffers.threads.as_mut_ptr());
        // Runs of a few items stream on from one to the next; enough runs that threads end together.
        let threads = self.pool.threads();
        let grain = (items.len() / (8 * threads)).clamp(1, attention.kv_heads);
        let ahead = |thread: usize| next.of(threads, thread);
        // Where tiles do not prefetch for the next item, each one reads its own blocks side by side.
        let prefetches = prefetches_ahead(self.isa());
        self.pool.split_before(&ahead, items.len(), grain, &|range, thread| {
            // SAFETY: each thread has its own space.
            let space = unsafe { &mut space.part(thread, 1)[0] };
            for index in range {
                let (which, kv_head, tokens) = &items[index];
                let sequence = &batch.sequences[*which];
                let next = items.get(index + 1).filter(|_| prefetches);
                let next = next.map(|next| (&batch.sequences[next.0], next.1));
                shared.isa.run(Attend {
                    layer: &shared,
                    sequence,
                    kv_head: *kv_head,
                    tokens: tokens.clone(),
                    prepare: sequence.tokens() <= step,
                    next,
                    prefetched: space.next_item == Some((index, shared.index)),
                    workspace: &mut space.attention,
                });
                space.next_item = (prefetches && sequence.tokens() == 1).then_some((index + 1, shared.index));
            }
        });
        let packed = self.pack_mixer_rows(size, output_matrix)?;
        let rows_bytes = mixer_bytes(batch.rows, width, size, &packed);
        self.trace.attention(started, batch, attention, kv.element.bytes(), rows_bytes);
        Ok(packed)
    }

    fn delta_net(
        &mut self,
        layer_index: usize,
        index: usize,
        layer: &LayerWeights,
        small: &delta::DeltaWeights,
        inputs: &[Matrix],
        output_matrix: &Matrix,
    ) -> Result<Packed> {
        let spec = self.weights.spec();
        let math = self.weights.arithmetic_of_inputs(inputs);
        let packed = self.norm(layer_index, &layer.input_norm, None, math)?;
        self.capture(layer_index, Point::MixerIn, &packed);
        // The mixer between the two products reads no weights to speak of.
        let next = Upcoming::Matrices(std::slice::from_ref(output_matrix));
        let (projections, width) = self.products("delta_in", inputs, &packed, next)?;
        let size = spec.delta_net.as_ref().map_or(0, |delta| delta.value_size());
        self.buffers.mixer_rows.reserve(self.batch.rows * size)?;
        let output = self.buffers.mixer_rows.ptr();
        let (Some(delta), Some(state)) = (&spec.delta_net, self.state) else {
            return self.pack_mixer_rows(size, output_matrix);
        };
        let shared = delta::Layer {
            spec: delta,
            eps: spec.norm_eps,
            weights: small,
            state,
            index,
            inputs: projections,
            width,
            output,
            isa: self.isa(),
        };
        let batch = self.batch;
        let started = self.trace.start();
        let space = Shared(self.buffers.threads.as_mut_ptr());
        let threads = self.pool.threads();
        let ahead = |thread: usize| next.of(threads, thread);
        self.pool.split_before(&ahead, batch.sequences.len() * delta.key_heads, 1, &|items, thread| {
            // SAFETY: each thread has its own space.
            let space = unsafe { &mut space.part(thread, 1)[0] };
            for item in items {
                let sequence = &batch.sequences[item / delta.key_heads];
                let key_head = item % delta.key_heads;
                shared.isa.run(Mix { layer: &shared, sequence, key_head, workspace: &mut space.delta });
            }
        });
        let packed = self.pack_mixer_rows(size, output_matrix)?;
        let rows_bytes = mixer_bytes(batch.rows, width, size, &packed);
        self.trace.delta_net(started, batch, delta, state.element.bytes(), rows_bytes);
        Ok(packed)
    }

    fn mlp(&mut self, layer_index: usize, layer: &LayerWeights) -> Result<()> {
        let isa = self.isa();
        let mut math = self.weights.arithmetic([&layer.gate, &layer.up]);
        let mut joined_math = self.weights.arithmetic([&layer.down]);
        if math != joined_math {
            // Tiles of what is read are tiles of what is written.
            math = self.weights.arithmetic([&layer.gate, &layer.up, &layer.down]);
            joined_math = math;
        }
        let packed = self.norm(layer_index, &layer.post_norm, None, math)?;
        self.capture(layer_index, Point::MlpIn, &packed);
        let size = layer.gate.rows;
        let joined = self.buffers.mlp.shape(isa, joined_math, self.batch.rows, size)?;
        let started = self.trace.start();
        let grouped = self.grouped(&packed, [&layer.gate, &layer.up].into_iter())?;
        let gate = Product::new(isa, &layer.gate, packed, &grouped);
        let up = Product::new(isa, &layer.up, packed, &grouped);
        let threads = self.pool.threads();
        let next = Upcoming::Matrices(std::slice::from_ref(&layer.down));
        let ahead = |thread: usize| next.of(threads, thread);
        for_each_tile(self.pool, &packed, layer.gate.panels(), &ahead, &|panels, tile| {
            let mut space = [TileSpace::new(), TileSpace::new()];
            let [of_gate, of_up] = &mut space;
            let gate = gate.tile(panels.clone(), tile, of_gate);
            let up = up.tile(panels.clone(), tile, of_up);
            let column = panels.start * PANEL;
            let columns = (panels.len() * PANEL).min(size - column);
            isa.run(SwiGlu { gate, up, tile, column, columns, joined: &joined });
        });
        let matrices = [&layer.gate, &layer.up].into_iter();
        // (What is written is the next product's input.)
        self.trace.products("mlp_in", started, matrices, &packed, joined.bytes() / (4 * self.batch.rows));
        self.capture(layer_index, Point::MlpOut, &joined);
        self.add_product("mlp_out", &layer.down, &joined, after_layer(self.weights, layer_index))
    }
}

/// What is read first after a layer: the next one's inputs, or the head.
fn after_layer(weights: &Weights, layer: usize) -> Upcoming<'_> {
    match weights.layers.get(layer + 1) {
        Some(next) => Upcoming::of_layer(next),
        None => Upcoming::Matrices(std::slice::from_ref(weights.head())),
    }
}

/// The weights that the phase after this one reads.
#[derive(Clone, Copy)]
pub enum Upcoming<'a> {
    /// One after the other.
    Matrices(&'a [Matrix]),
    /// Side by side.
    Pair(&'a Matrix, &'a Matrix),
}

impl<'a> Upcoming<'a> {
    pub fn of_layer(layer: &'a LayerWeights) -> Self {
        match &layer.mixer {
            MixerWeights::Attention { inputs, .. } | MixerWeights::DeltaNet { inputs, .. } => {
                Self::Matrices(inputs)
            }
        }
    }

    pub fn of(self, threads: usize, thread: usize) -> Ahead {
        match self {
            Self::Matrices(matrices) => first_read(matrices, threads, thread),
            Self::Pair(a, b) => first_read_of_pair([a, b], threads, thread),
        }
    }
}

/// Units a thread packs at a time: all, where one thread is done before another has heard of it.
fn grain_of(packed: &Packed) -> usize {
    if packed.tiling.rows * packed.cols <= 8 * 1024 { packed.units() } else { 1 }
}

/// Items a thread takes at a time so that there are about `parts` runs.
fn grain(items: usize, parts: usize) -> usize {
    items.div_ceil(parts.max(1)).max(1)
}

/// Computes one tile and stores it at its rows, `column` on.
#[allow(clippy::too_many_arguments)]
fn store_tile(
    product: &Product<'_>,
    matrix_rows: usize,
    panels: Range<usize>,
    tile: usize,
    packed: &Packed,
    out: Shared<f32>,
    width: usize,
    column: usize,
) {
    let mut space = TileSpace::new();
    for (index, result) in product.tile(panels.clone(), tile, &mut space).iter().enumerate() {
        let (row, panel) = packed.place(&panels, tile, index);
        let rows = PANEL.min(matrix_rows - panel * PANEL);
        // SAFETY: one thread computes a panel's tile and owns these elements.
        let to = unsafe { out.part(row * width + column + panel * PANEL, rows) };
        to.copy_from_slice(&result[..rows]);
    }
}

struct Norm<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    eps: f32,
    out: &'a mut [f32],
}

impl Work for Norm<'_> {
    /// The sum of squares.
    type Output = f32;

    #[inline(always)]
    fn run<A: Arch>(self) -> f32 {
        lanes::rms_norm::<A>(self.x, self.weight, self.eps, self.out)
    }
}

/// Packs rows that follow each other into a unit.
struct PackUnit<'a> {
    packed: &'a Packed,
    unit: usize,
    rows: &'a [f32],
}

impl Work for PackUnit<'_> {
    type Output = ();

    #[inline(always)]
    fn run<A: Arch>(self) {
        // SAFETY: one thread packs a unit.
        unsafe { self.packed.write_unit(self.unit, self.rows, self.packed.cols) };
    }
}

struct SwiGlu<'a> {
    gate: &'a mut [[f32; PANEL]],
    up: &'a [[f32; PANEL]],
    tile: usize,
    column: usize,
    columns: usize,
    joined: &'a Packed,
}

impl Work for SwiGlu<'_> {
    type Output = ();

    #[inline(always)]
    fn run<A: Arch>(self) {
        for (gate, up) in self.gate.iter_mut().zip(self.up) {
            for i in 0..PANEL {
                gate[i] = lanes::silu::<A>(gate[i]) * up[i];
            }
        }
        let alone = self.joined.tiling.rows == 1;
        let value = |t: usize, i: usize| {
            if alone { self.gate[i / PANEL][i % PANEL] } else { self.gate[t][i] }
        };
        // SAFETY: one thread computes a panel's tile and owns these columns of it.
        unsafe { self.joined.write(self.tile, self.column, self.columns, value) };
    }
}
