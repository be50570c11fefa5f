//! One step, from tokens to logits: which kernels run, in which order, on which buffers.
//!
//! Everything is allocated when a session opens and nothing in a step waits for the host, so the same code runs a step
//! at once or records it into a graph. The residual stream is fp32; each product that feeds it leaves fp32 sums that
//! the next norm adds where it reads the row anyway.

use std::sync::Arc;

use super::batch::{Batch, Offsets};
use super::delta_prefill::{self, DeltaPrefill, DeltaShape};
use super::driver::{DeviceBuffer, Gpu};
use super::kernels::attention::{LayerCache, RowAttention, StepRows};
use super::kernels::delta::{Delta, DeltaSequence, StatePools};
use super::kernels::norm::{Addend, Norms};
use super::kernels::sample::{Logits, Samplers, Sink};
use super::launch::Stream;
use super::matrix::{Matrix, Output};
use super::prefill_attention::{Gate, PagedKv, PrefillAttention, Rows, Tiles};
use super::products::Products;
use super::units;
use super::weights::{AttentionWeights, DeltaWeights, GpuWeights, MixerWeights, Parts};
use crate::engine::config::CacheDtype;
use crate::engine::device::CachePlan;
use crate::engine::model::spec::{Mixer, ModelSpec};
use crate::{Error, Result};

/// Parts that a product may split its sums into.
const MAX_PARTS: usize = 8;

/// Sizes that buffers are made for.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Most rows in a step.
    pub rows: usize,
    /// Most output rows that pass through the head at a time.
    pub outputs: usize,
    /// Only the kernels that every GPU runs (`cuda_kernels = portable`).
    pub portable: bool,
}

struct Buffers {
    residual: DeviceBuffer,
    normed: DeviceBuffer,
    /// Output of the mixer's input product.
    mixed: DeviceBuffer,
    /// q after norm and rotation.
    query: DeviceBuffer,
    /// Output of the mixer itself.
    mixer: DeviceBuffer,
    activation: DeviceBuffer,
    partials: DeviceBuffer,
    logits: DeviceBuffer,
}

enum LayerPool {
    Delta { state: DeviceBuffer, window: DeviceBuffer, pairs: Option<DeviceBuffer> },
    Attention { keys: DeviceBuffer, values: DeviceBuffer },
}

/// What varies from step to step, as device addresses and counts.
pub struct StepView<'a> {
    pub batch: &'a Batch,
    pub offsets: Offsets,
    /// Address of the step's metadata.
    pub metadata: u64,
    pub tiles: &'a Tiles,
    /// Sampled tokens by ring word, on the device and in page-locked memory.
    pub ring: u64,
    pub host: u64,
}

impl StepView<'_> {
    fn at(&self, offset: usize) -> u64 {
        self.metadata + offset as u64
    }
}

/// Called for each piece of unsampled output rows, whose logits are in the buffer: first output row, how many, address.
pub type OnLogits<'a> = dyn FnMut(&Stream, usize, usize, u64) -> Result<()> + 'a;

pub struct Forward {
    weights: Arc<GpuWeights>,
    spec: ModelSpec,
    limits: Limits,
    norms: Norms,
    linear: Products,
    delta: Option<Delta>,
    /// Prompt chunks of delta nets with heads of 128 x 128; others run token by token.
    delta_chunks: Option<DeltaPrefill>,
    rows: Option<RowAttention>,
    chunks: Option<PrefillAttention>,
    pub samplers: Samplers,
    buffers: Buffers,
    pools: Vec<LayerPool>,
    mixed_pitch: usize,
    qkv_pitch: usize,
    block_tokens: usize,
    kv_blocks: usize,
}

impl Forward {
    /// # Errors
    /// A model or a cache the kernels are not made for; a full GPU.
    pub fn new(
        gpu: &Gpu,
        spec: &ModelSpec,
        weights: Arc<GpuWeights>,
        plan: &CachePlan,
        limits: Limits,
    ) -> Result<Self> {
        if plan.kv_dtype != CacheDtype::F16 {
            return Err(Error::invalid(
                format!("kv_dtype = {:?}: the CUDA device keeps K and V in f16", plan.kv_dtype),
                "set kv_dtype=f16 or auto",
            ));
        }
        let (hidden, attention) = (spec.hidden_size, &spec.attention);
        let query = attention.heads * attention.head_dim;
        let qkv =
            query * if attention.output_gate { 2 } else { 1 } + 2 * attention.kv_heads * attention.head_dim;
        let qkv_pitch = qkv.next_multiple_of(8);
        let mixed_pitch = spec.delta_net.as_ref().map_or(0, |delta| {
            (delta.conv_channels() + delta.value_size() + 2 * delta.value_heads).next_multiple_of(8)
        });
        // Positions in the convolution window: three to read and one to write, and one for each draft.
        let ring = 4 + plan.max_drafts;
        let rings = units::PRODUCTS_HOPPER.supports(gpu.facts().capability) && weights.int4_elements() == 0;
        let delta = match &spec.delta_net {
            Some(shape) => {
                let delta = Delta::new(
                    gpu,
                    shape,
                    plan.state_dtype,
                    spec.norm_eps,
                    mixed_pitch,
                    ring,
                    plan.state_write_interval,
                    limits.portable,
                )?;
                Some(if rings { delta.beside_rings() } else { delta })
            }
            None => None,
        };
        let delta_chunks = match &spec.delta_net {
            Some(shape) if shape.key_dim == delta_prefill::HEAD && shape.value_dim == delta_prefill::HEAD => {
                let shape = DeltaShape {
                    key_heads: shape.key_heads as i32,
                    value_heads: shape.value_heads as i32,
                    pitch: mixed_pitch as i32,
                    ring: ring as i32,
                    state_type: match plan.state_dtype {
                        CacheDtype::F16 => 1,
                        CacheDtype::Bf16 => 2,
                        _ => 0,
                    },
                    norm_eps: spec.norm_eps,
                };
                Some(DeltaPrefill::new(gpu, shape, limits.rows, plan.max_num_seqs, limits.portable)?)
            }
            _ => None,
        };
        let has_attention = spec.layers.contains(&Mixer::Attention);
        let rows = if has_attention {
            let positions = plan.max_model_len + plan.max_drafts + 1;
            Some(RowAttention::new(gpu, attention, spec.norm_eps, plan.block_tokens, qkv_pitch, positions)?)
        } else {
            None
        };
        // A head size without a chunk kernel runs its chunks row by row.
        let chunks = if has_attention && matches!(attention.head_dim, 64 | 128 | 256) {
            Some(PrefillAttention::new(gpu, attention.head_dim, limits.portable)?)
        } else {
            None
        };
        let mut pools = Vec::with_capacity(spec.layers.len());
        for mixer in &spec.layers {
            pools.push(match (mixer, &delta, &rows) {
                (Mixer::DeltaNet, Some(delta), _) => {
                    let (state, window, pairs) = delta.slot_bytes();
                    let slots = plan.state_slots as u64;
                    LayerPool::Delta {
                        state: gpu.allocate_zeroed(state * slots)?,
                        window: gpu.allocate_zeroed(window * slots)?,
                        pairs: if pairs > 0 { Some(gpu.allocate_zeroed(pairs * slots)?) } else { None },
                    }
                }
                (_, _, Some(rows)) => {
                    let bytes = rows.pool_bytes(plan.kv_blocks);
                    LayerPool::Attention {
                        keys: gpu.allocate_zeroed(bytes)?,
                        values: gpu.allocate_zeroed(bytes)?,
                    }
                }
                _ => return Err(Error::failed("a delta-net layer in a model without delta nets", "")),
            });
        }
        let value_size = spec.delta_net.as_ref().map_or(0, |delta| delta.value_size());
        let of = |elements: usize, bytes: usize| gpu.allocate_zeroed((limits.rows * elements * bytes) as u64);
        let partial_rows = limits.rows.max(MAX_PARTS * limits.rows.min(256));
        let buffers = Buffers {
            residual: of(hidden, 4)?,
            normed: gpu.allocate_zeroed((limits.rows.max(limits.outputs) * hidden * 2) as u64)?,
            mixed: of(mixed_pitch.max(qkv_pitch), 2)?,
            query: of(query, 2)?,
            mixer: of(query.max(value_size), 2)?,
            activation: of(spec.intermediate_size, 2)?,
            partials: gpu.allocate((partial_rows * hidden * 4) as u64)?,
            logits: gpu.allocate((limits.outputs * spec.vocab_size * 4) as u64)?,
        };
        let forward = Self {
            norms: Norms::new(gpu, hidden, spec.norm_eps)?,
            linear: Products::new(
                gpu,
                limits.rows.max(limits.outputs),
                2 * spec.intermediate_size,
                weights.int4_elements(),
                limits.portable,
            )?,
            samplers: Samplers::new(gpu, limits.outputs)?,
            spec: spec.clone(),
            weights,
            limits,
            delta,
            delta_chunks,
            rows,
            chunks,
            buffers,
            pools,
            mixed_pitch,
            qkv_pitch,
            block_tokens: plan.block_tokens,
            kv_blocks: plan.kv_blocks,
        };
        forward.tune()?;
        Ok(forward)
    }

    /// Lets cuBLASLt's algorithms be chosen by timing, on this model's matrices. Nothing is in the buffers yet.
    fn tune(&self) -> Result<()> {
        let (buffers, weights) = (&self.buffers, &self.weights);
        let to_mixed = |stride| Output::Half { to: buffers.mixed.pointer(), stride };
        let activation = Output::SiluMul { to: 0, stride: 0 };
        let partials = Output::Partials { to: buffers.partials.pointer(), part_stride: 0, max_parts: 1 };
        let residual = Output::Residual { to: buffers.residual.pointer() };
        let mut uses = Vec::new();
        for layer in &weights.layers {
            let (input, output, stride) = match &layer.mixer {
                MixerWeights::Delta(delta) => (&delta.input, &delta.output, self.mixed_pitch),
                MixerWeights::Attention(attention) => (&attention.input, &attention.output, self.qkv_pitch),
            };
            uses.extend(input.iter().map(|(matrix, _)| (matrix, to_mixed(stride))));
            uses.push((&layer.gate_up, activation));
            for matrix in [output, &layer.down] {
                uses.extend([(matrix, partials), (matrix, residual)]);
            }
        }
        let (x, x_bytes) = (weights.embedding.weights.pointer(), weights.embedding.weights.bytes());
        // SAFETY: the buffers hold `limits.rows` rows, and the embedding is as many fp16 numbers as it says.
        unsafe { self.linear.tune(&uses, self.limits.rows, x, x_bytes)? };
        Ok(())
    }

    /// Cuts the chunks of a batch into the tiles of its attention kernel.
    pub fn tiles(&self, batch: &Batch) -> Tiles {
        self.chunks.as_ref().map_or_else(Tiles::default, |kernel| kernel.tiles(&batch.chunks))
    }

    /// Tokens that the states of `batch`'s short sequences may be behind after it (0: they are written), and those that
    /// there is room for, new ones included.
    pub fn most_pending(&self, batch: &Batch) -> (usize, usize) {
        let delta = self.delta.as_ref().filter(|_| self.delta_chunks.is_some());
        delta.map_or((0, 0), |delta| (delta.most_pending(batch.longest_short), delta.capacity()))
    }

    /// Queues the whole step. Sampled tokens go to the ring and to the host; the logits of other output rows are handed to
    /// `on_logits`, piece by piece.
    ///
    /// # Safety
    /// The metadata at `view.metadata` is that of `view.batch`, its slots and blocks are inside the pools, and all
    /// pointers stay valid until the work is done.
    pub unsafe fn run(&self, stream: &Stream, view: &StepView, on_logits: &mut OnLogits) -> Result<()> {
        let batch = view.batch;
        let rows = batch.rows.len();
        if rows > self.limits.rows {
            return Err(Error::failed(
                format!("a step of {rows} rows, and buffers for {}", self.limits.rows),
                "",
            ));
        }
        let buffers = &self.buffers;
        let weights = &self.weights;
        let (residual, normed) = (buffers.residual.pointer(), buffers.normed.pointer());
        let first_norm = weights.layers.first().map_or(&weights.final_norm, |layer| &layer.input_norm);
        stream.set_role("embed");
        // SAFETY: buffers hold `limits.rows` rows; the rest is the caller's promise, here and in what follows.
        unsafe {
            self.norms.embed(
                stream,
                rows,
                weights.embedding.weights.pointer(),
                view.at(view.offsets.tokens),
                view.ring,
                first_norm.pointer(),
                residual,
                normed,
            )?;
        }
        for (index, layer) in weights.layers.iter().enumerate() {
            // SAFETY: as above.
            unsafe {
                match (&layer.mixer, &self.pools[index]) {
                    (MixerWeights::Delta(delta), LayerPool::Delta { state, window, pairs }) => {
                        let pools = StatePools {
                            state: state.pointer(),
                            window: window.pointer(),
                            pairs: pairs.as_ref().map_or(0, DeviceBuffer::pointer),
                        };
                        self.delta_net(stream, view, delta, pools)?;
                    }
                    (MixerWeights::Attention(attention), LayerPool::Attention { keys, values }) => {
                        let cache = LayerCache { keys: keys.pointer(), values: values.pointer() };
                        self.attention(stream, view, attention, cache)?;
                    }
                    _ => {
                        return Err(Error::failed(
                            format!("layer {index}: weights and pools differ in kind"),
                            "",
                        ));
                    }
                }
                let (role, output) = match &layer.mixer {
                    MixerWeights::Delta(delta) => ("delta_out", &delta.output),
                    MixerWeights::Attention(attention) => ("attention_out", &attention.output),
                };
                stream.set_role(role);
                let addend = self.residual_product(stream, buffers.mixer.pointer(), rows, output)?;
                stream.set_role("norm");
                self.norms.add(stream, rows, residual, addend, layer.post_norm.pointer(), None, normed)?;
                stream.set_role("mlp_in");
                let activation =
                    Output::SiluMul { to: buffers.activation.pointer(), stride: self.spec.intermediate_size };
                self.linear.launch(stream, normed, rows, &layer.gate_up, activation)?;
                stream.set_role("mlp_out");
                let addend =
                    self.residual_product(stream, buffers.activation.pointer(), rows, &layer.down)?;
                stream.set_role("norm");
                match weights.layers.get(index + 1) {
                    Some(next) => {
                        self.norms.add(
                            stream,
                            rows,
                            residual,
                            addend,
                            next.input_norm.pointer(),
                            None,
                            normed,
                        )?;
                    }
                    None => self.outputs(stream, view, addend, on_logits)?,
                }
            }
        }
        Ok(())
    }

    /// # Safety
    /// As [`Self::run`].
    unsafe fn residual_product(&self, stream: &Stream, x: u64, rows: usize, w: &Matrix) -> Result<Addend> {
        let hidden = self.spec.hidden_size;
        let partials = &self.buffers.partials;
        if self.linear.adds(rows, w) {
            let output = Output::Residual { to: self.buffers.residual.pointer() };
            // SAFETY: the residual stream holds `limits.rows` rows; the rest is the caller's promise.
            unsafe { self.linear.launch(stream, x, rows, w, output)? };
            return Ok(Addend { partials: partials.pointer(), parts: 0, stride: 0 });
        }
        let max_parts = (partials.bytes() as usize / (4 * rows * hidden)).clamp(1, MAX_PARTS);
        let (to, stride) = (partials.pointer(), rows * hidden);
        let output = Output::Partials { to, part_stride: stride, max_parts };
        // SAFETY: the partial sums fit by the line above; the rest is the caller's promise.
        let parts = unsafe { self.linear.launch(stream, x, rows, w, output)? };
        Ok(Addend { partials: to, parts, stride })
    }

    /// # Safety
    /// As [`Self::run`].
    unsafe fn input_product(&self, stream: &Stream, rows: usize, parts: &Parts, stride: usize) -> Result<()> {
        for (matrix, column) in parts {
            let output = Output::Half { to: self.buffers.mixed.at(2 * *column as u64), stride };
            // SAFETY: `mixed` holds `limits.rows` rows of at least `stride`.
            unsafe { self.linear.launch(stream, self.buffers.normed.pointer(), rows, matrix, output)? };
        }
        Ok(())
    }

    /// # Safety
    /// As [`Self::run`].
    unsafe fn delta_net(
        &self,
        stream: &Stream,
        view: &StepView,
        weights: &DeltaWeights,
        pools: StatePools,
    ) -> Result<()> {
        let Some(delta) = &self.delta else {
            return Err(Error::failed("a delta-net layer without its kernels", ""));
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
            self.input_product(stream, batch.rows.len(), &weights.input, self.mixed_pitch)?;
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
    unsafe fn attention(
        &self,
        stream: &Stream,
        view: &StepView,
        weights: &AttentionWeights,
        cache: LayerCache,
    ) -> Result<()> {
        let Some(attention) = &self.rows else {
            return Err(Error::failed("attention without its kernels", ""));
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
            self.input_product(stream, rows, &weights.input, self.qkv_pitch)?;
            stream.set_role("attention");
            let norms = (weights.q_norm.as_ref(), weights.k_norm.as_ref());
            attention.prepare(stream, rows, qkv, norms, query, cache, step)?;
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

    /// The last sum and norm for the rows that are wanted, the head, and what is made of its logits.
    ///
    /// # Safety
    /// As [`Self::run`].
    unsafe fn outputs(
        &self,
        stream: &Stream,
        view: &StepView,
        addend: Addend,
        on_logits: &mut OnLogits,
    ) -> Result<()> {
        let (batch, buffers) = (view.batch, &self.buffers);
        let sampled = batch.samples.len();
        if sampled > self.limits.outputs {
            return Err(Error::failed(
                format!("a step of {sampled} sampled rows, and buffers for {}", self.limits.outputs),
                "",
            ));
        }
        let sink = Sink { header: view.at(view.offsets.header), ring: view.ring, host: view.host };
        let logits = Logits {
            at: buffers.logits.pointer(),
            pitch: self.spec.vocab_size,
            vocab: self.spec.real_vocab_size,
        };
        let to_logits = Output::Float { to: logits.at, stride: logits.pitch };
        if sampled > 0 {
            // SAFETY: as `run`, with room for `limits.outputs` rows.
            unsafe {
                let by_keys = !batch.draws && self.linear.finds_best(sampled, self.weights.head());
                let output = if by_keys { self.samplers.best(logits.vocab) } else { to_logits };
                self.head(stream, view, addend, 0, sampled, output)?;
                stream.set_role("sample");
                if by_keys {
                    self.samplers.greedy_from_keys(stream, sampled, sink)?;
                } else if batch.draws {
                    self.samplers.sample(stream, sampled, logits, view.at(view.offsets.samples), sink)?;
                } else {
                    self.samplers.greedy(stream, sampled, logits, sink)?;
                }
            }
        }
        let mut first = sampled;
        // Logits and log probabilities are not mixed in a piece, so that a callback sees one kind.
        let kinds = [sampled + batch.logit_rows, batch.select.len()];
        for end in kinds {
            while first < end {
                let count = (end - first).min(self.limits.outputs);
                // SAFETY: as `run`, with room for `limits.outputs` rows.
                unsafe { self.head(stream, view, addend, first, count, to_logits)? };
                stream.set_role("sample");
                on_logits(stream, first, count, buffers.logits.pointer())?;
                first += count;
            }
        }
        Ok(())
    }

    /// The head's product of output rows `first..first + count`.
    ///
    /// # Safety
    /// As [`Self::run`]; `count` is at most `limits.outputs`, and `output` takes as many rows.
    unsafe fn head(
        &self,
        stream: &Stream,
        view: &StepView,
        addend: Addend,
        first: usize,
        count: usize,
        output: Output,
    ) -> Result<()> {
        let (buffers, weights) = (&self.buffers, &self.weights);
        let select = view.at(view.offsets.select + 4 * first);
        let normed = buffers.normed.pointer();
        // SAFETY: `select` names rows of the batch; `normed` and `logits` hold `limits.outputs` rows.
        unsafe {
            stream.set_role("norm");
            self.norms.add(
                stream,
                count,
                buffers.residual.pointer(),
                addend,
                weights.final_norm.pointer(),
                Some(select),
                normed,
            )?;
            stream.set_role("head");
            self.linear.launch(stream, normed, count, weights.head(), output)?;
        }
        Ok(())
    }
}
