//! The first half of a layer: the products into a mixer, and the mixer itself.

use super::{Forward, Live, StepView};
use crate::engine::device::cuda::delta_prefill;
use crate::engine::device::cuda::kernels::attention::{LayerCache, Part, StepRows};
use crate::engine::device::cuda::kernels::delta::{DeltaSequence, StatePools};
use crate::engine::device::cuda::launch::Stream;
use crate::engine::device::cuda::matrix::{Matrix, Output};
use crate::engine::device::cuda::prefill_attention::{Gate, PagedKv, Rows};
use crate::engine::device::cuda::weights::{Apart, AttentionWeights, DeltaWeights};
use crate::{Error, Result};

impl Forward {
    /// # Safety
    /// As [`Self::run`].
    unsafe fn input_product(
        &self,
        stream: &Stream,
        (x, rows): (u64, usize),
        parts: &[(Matrix, usize)],
        stride: usize,
    ) -> Result<()> {
        let to = |column: usize| Output::Half { to: self.buffers.mixed.at(2 * column as u64), stride };
        if let [(first, a), (second, b)] = parts {
            // SAFETY: as below.
            let both =
                unsafe { self.linear.launch_both(stream, (x, rows), (first, to(*a)), (second, to(*b)))? };
            if both {
                return Ok(());
            }
        }
        for (matrix, column) in parts {
            let output = to(*column);
            // SAFETY: `mixed` holds `limits.rows` rows of at least `stride`.
            unsafe { self.linear.launch(stream, x, rows, matrix, output)? };
        }
        Ok(())
    }

    /// # Safety
    /// As [`Self::run`].
    pub(super) unsafe fn delta_net(
        &self,
        stream: &Stream,
        view: &StepView,
        weights: &DeltaWeights,
        pools: StatePools,
    ) -> Result<()> {
        let Some(delta) = &self.delta else {
            return Err(Error::bug("a delta-net layer without its kernels"));
        };
        let (batch, buffers) = (view.batch, &self.buffers);
        let (mixed, out) = (buffers.mixed.pointer(), buffers.mixer.pointer());
        let sequences = view.at(view.offsets.sequences);
        // SAFETY: as `run`; starts in the sequences are rows of the whole batch.
        unsafe {
            stream.set_role("delta_net");
            if let Some(first) = batch.settle_from {
                let from = sequences + (first * size_of::<DeltaSequence>()) as u64;
                delta.settle(stream, pools, (from, batch.sequences.len() - first))?;
            }
            stream.set_role("delta_in");
            let x = (buffers.normed.pointer(), batch.rows.len());
            self.input_product(stream, x, &weights.input, self.mixed_pitch)?;
            stream.set_role("delta_net");
            let Some(chunks) = &self.delta_chunks else {
                let group = (sequences, batch.sequences.len());
                let tokens = (batch.rows.len(), batch.longest_short.max(batch.longest_chunk));
                return delta.step(stream, weights, mixed, pools, out, group, tokens);
            };
            if batch.short_sequences > 0 {
                let group = (sequences, batch.short_sequences);
                let tokens = (batch.short_rows, batch.longest_short);
                delta.step(stream, weights, mixed, pools, out, group, tokens)?;
            }
            let layer = delta_prefill::Layer {
                mixed,
                taps: weights.taps.pointer(),
                a_log: weights.a_log.pointer(),
                dt_bias: weights.dt_bias.pointer(),
                norm_weight: weights.norm.pointer(),
                state: pools.state,
                window: pools.window,
                out,
            };
            let (pieces, list) = (view.at(view.offsets.pieces), view.at(view.offsets.delta_chunks));
            chunks.launch(stream, &layer, &batch.work, pieces, list)
        }
    }

    /// # Safety
    /// As [`Self::run`].
    pub(super) unsafe fn attention(
        &self,
        stream: &Stream,
        view: &StepView,
        weights: &AttentionWeights,
        cache: LayerCache,
    ) -> Result<()> {
        let Some(attention) = &self.rows else {
            return Err(Error::bug("attention without its kernels"));
        };
        let (batch, buffers, shape) = (view.batch, &self.buffers, &self.spec.attention);
        let rows = batch.rows.len();
        let (qkv, query, out) = (buffers.mixed.pointer(), buffers.query.pointer(), buffers.mixer.pointer());
        let step = StepRows {
            rows: view.at(view.offsets.rows),
            table: view.at(view.offsets.table),
            header: view.at(view.offsets.header),
        };
        let by_rows = if self.chunks.is_some() { batch.short_rows } else { rows };
        // SAFETY: as `run`; chunk rows begin after the short ones.
        unsafe {
            stream.set_role("attention_in");
            self.input_product(stream, (buffers.normed.pointer(), rows), &weights.input, self.qkv_pitch)?;
            stream.set_role("attention");
            let norms = (weights.q_norm.as_ref(), weights.k_norm.as_ref());
            attention.prepare(stream, rows, Part::All, qkv, norms, query, cache, step)?;
            if by_rows > 0 {
                let recent = if by_rows < rows {
                    batch.longest_short
                } else {
                    batch.longest_short.max(batch.longest_chunk)
                };
                let context = batch.short_context;
                attention.attend(stream, by_rows, context, recent, query, qkv, cache, out, step)?;
            }
            let Some(kernel) = self.chunks.as_ref().filter(|_| !batch.chunks.is_empty()) else {
                return Ok(());
            };
            let width = shape.heads * shape.head_dim;
            let packed = |pointer| Rows { pointer, stride: width as i32 };
            let gate = shape.output_gate.then(|| Gate {
                rows: Rows { pointer: qkv + 2 * shape.head_dim as u64, stride: self.qkv_pitch as i32 },
                head_stride: 2 * shape.head_dim as i32,
            });
            let head_stride = self.block_tokens * shape.head_dim;
            let paged = PagedKv {
                keys: cache.keys,
                values: cache.values,
                block_stride: (shape.kv_heads * head_stride) as u64,
                token_stride: shape.head_dim as u32,
                head_stride: head_stride as u32,
                block_tokens: self.block_tokens as u32,
                blocks: self.kv_blocks as u64,
                tables: step.table,
                table_stride: batch.table_pitch as i32,
            };
            kernel.launch(
                stream,
                packed(query),
                gate,
                packed(out),
                &paged,
                shape.heads,
                shape.kv_heads,
                view.at(view.offsets.chunks),
                view.tiles,
                view.at(view.offsets.tiles),
            )
        }
    }

    /// Attention of the last layer for a narrowed batch: K and V of all rows go into the cache; only the rows that outputs
    /// are made of, which are returned, have a query, and go on. Each of them runs on its own, as a decode token does.
    ///
    /// # Safety
    /// As [`Self::run`].
    pub(super) unsafe fn last_attention(
        &self,
        stream: &Stream,
        view: &StepView,
        weights: &AttentionWeights,
        cache: LayerCache,
    ) -> Result<Live> {
        let Some(attention) = &self.rows else {
            return Err(Error::bug("attention without its kernels"));
        };
        let (batch, buffers) = (view.batch, &self.buffers);
        let (rows, count) = (batch.rows.len(), batch.last.len());
        let live = Live {
            rows: count,
            residual: buffers.own_residual.pointer(),
            normed: buffers.own_normed.pointer(),
        };
        let (residual, normed) = (buffers.residual.pointer(), buffers.normed.pointer());
        let (qkv, query, out) = (buffers.mixed.pointer(), buffers.query.pointer(), buffers.mixer.pointer());
        let (table, header) = (view.at(view.offsets.table), view.at(view.offsets.header));
        let all = StepRows { rows: view.at(view.offsets.rows), table, header };
        let own = StepRows { rows: view.at(view.offsets.last_rows), table, header };
        let norms = (weights.q_norm.as_ref(), weights.k_norm.as_ref());
        let Some(Apart { queries, keys }) = &weights.apart else {
            return Err(Error::bug("a last layer whose queries are not apart"));
        };
        // Queries, of `count` rows, and K and V, of all, are different columns of the same buffer.
        // SAFETY: as `run`; `last` names rows of the batch, at most `limits.outputs`.
        unsafe {
            stream.set_role("attention_in");
            self.input_product(stream, (normed, rows), keys, self.qkv_pitch)?;
            stream.set_role("attention");
            attention.prepare(stream, rows, Part::KeysAndValues, qkv, norms, query, cache, all)?;
            if count == 0 {
                return Ok(live);
            }
            stream.set_role("norm");
            let last = view.at(view.offsets.last);
            self.norms.gather(stream, count, (residual, normed), last, (live.residual, live.normed))?;
            stream.set_role("attention_in");
            self.input_product(stream, (live.normed, count), queries, self.qkv_pitch)?;
            stream.set_role("attention");
            attention.prepare(stream, count, Part::Queries, qkv, norms, query, cache, own)?;
            let recent = batch.longest_short.max(batch.longest_chunk);
            attention.attend(stream, count, batch.last_context, recent, query, qkv, cache, out, own)?;
        }
        Ok(live)
    }
}
