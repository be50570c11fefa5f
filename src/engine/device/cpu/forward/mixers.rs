//! The mixers of a layer: softmax attention and the gated delta net between their input and output products.

use std::cmp::Reverse;

use super::{Forward, PackUnit, Upcoming, grain, grain_of};
use crate::Result;
use crate::engine::device::cpu::attention::{self, Attend, Prepare};
use crate::engine::device::cpu::delta::{self, Mix};
use crate::engine::device::cpu::gemm::{Packed, max_tile, prefetches_ahead};
use crate::engine::device::cpu::matrix::Matrix;
use crate::engine::device::cpu::memory::Shared;
use crate::engine::device::cpu::model::LayerWeights;
use crate::engine::model::quantize::inputs::Point;

/// Bytes of a mixer's rows: the products it reads, its output written, read and packed.
fn mixer_bytes(rows: usize, width: usize, size: usize, packed: &Packed) -> usize {
    4 * rows * (width + 2 * size) + packed.bytes()
}

/// Weights that are read after a mixer's input products: the mixer itself reads none to speak of.
fn behind_mixer(output: &Matrix) -> Upcoming<'_> {
    Upcoming::Matrices(std::slice::from_ref(output))
}

/// What a mixer reads and where it writes.
struct Projected {
    /// [rows][`width`].
    inputs: Shared<f32>,
    width: usize,
    /// [rows][size of the mixer's output].
    output: Shared<f32>,
}

impl Forward<'_> {
    /// The norm of a mixer's input and the products by `inputs`, behind which `next` is read, and room for `size` numbers a row of its output.
    fn project(
        &mut self,
        phase: &'static str,
        layer_index: usize,
        layer: &LayerWeights,
        inputs: &[Matrix],
        next: Upcoming<'_>,
        size: usize,
    ) -> Result<Projected> {
        let math = self.weights.arithmetic_of_inputs(inputs);
        let packed = self.norm(layer_index, &layer.input_norm, None, math)?;
        self.capture(layer_index, Point::MixerIn, &packed);
        let (inputs, width) = self.products(phase, inputs, &packed, next)?;
        self.buffers.mixer_rows.reserve(self.batch.rows * size)?;
        Ok(Projected { inputs, width, output: self.buffers.mixer_rows.ptr() })
    }

    pub(super) fn attention(
        &mut self,
        layer_index: usize,
        index: usize,
        layer: &LayerWeights,
        small: &attention::AttentionWeights,
        inputs: &[Matrix],
        output_matrix: &Matrix,
    ) -> Result<Packed> {
        let spec = self.weights.spec();
        let attention = &spec.attention;
        let size = attention.heads * attention.head_dim;
        let next = behind_mixer(output_matrix);
        let Projected { inputs: qkv, width, output } =
            self.project("attention_in", layer_index, layer, inputs, next, size)?;
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
        // The longest contexts first, so that none is left to the end of the phase. Of a prompt a thread stays with a KV head, whose
        // keys and values are then in its L2.
        items.sort_by_key(|(which, kv_head, tokens)| {
            let sequence = &batch.sequences[*which];
            let end = |tokens: usize| Reverse(sequence.context + tokens);
            (end(sequence.tokens()), *which, *kv_head, end(tokens.end))
        });
        let space = Shared(self.buffers.threads.as_mut_ptr());
        // Runs of a few items stream on from one to the next; enough runs that threads end together.
        let threads = self.pool.threads();
        let grain = (items.len() / (8 * threads)).clamp(1, attention.kv_heads);
        let ahead = |thread: usize| next.of(threads, thread);
        // Where tiles do not prefetch ahead, each item reads its own blocks side by side.
        let prefetches = prefetches_ahead(self.isa());
        self.pool.split_before(&ahead, items.len(), grain, &|range, thread| {
            // SAFETY: each thread has its own space.
            let space = unsafe { &mut space.part(thread, 1)[0] };
            for index in range {
                let (which, kv_head, tokens) = &items[index];
                let sequence = &batch.sequences[*which];
                let next = items.get(index + 1).map(|next| (&batch.sequences[next.0], next.1));
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

    pub(super) fn delta_net(
        &mut self,
        layer_index: usize,
        index: usize,
        layer: &LayerWeights,
        small: &delta::DeltaWeights,
        inputs: &[Matrix],
        output_matrix: &Matrix,
    ) -> Result<Packed> {
        let spec = self.weights.spec();
        let size = spec.delta_net.as_ref().map_or(0, |delta| delta.value_size());
        let next = behind_mixer(output_matrix);
        let Projected { inputs: projections, width, output } =
            self.project("delta_in", layer_index, layer, inputs, next, size)?;
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
}
