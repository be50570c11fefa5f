//! One step, from tokens to logits: which kernels run, in which order, on which buffers.
//!
//! Everything is allocated when a session opens and nothing in a step waits for the host, so the same code runs a step
//! at once or records it into a graph. The residual stream is fp32; each product that feeds it leaves fp32 sums that
//! the next norm adds where it reads the row anyway.

mod mixers;
mod open;
mod outputs;

use std::sync::Arc;

use super::batch::{Batch, Offsets};
use super::delta_prefill::DeltaPrefill;
use super::driver::DeviceBuffer;
use super::kernels::attention::{LayerCache, RowAttention};
use super::kernels::delta::{Delta, StatePools};
use super::kernels::norm::{Addend, Norms};
use super::kernels::sample::Samplers;
use super::launch::Stream;
use super::matrix::{Matrix, Output};
use super::prefill_attention::{PrefillAttention, Tiles};
use super::products::Products;
use super::weights::{GpuWeights, MixerWeights};
use crate::engine::model::spec::ModelSpec;
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
    /// The same of the rows that go through the whole of the last layer, where those are few.
    own_residual: DeviceBuffer,
    own_normed: DeviceBuffer,
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

/// The rows that a part of a step runs on, one after the other: those of the batch, or its last ones (`Batch::narrow`).
#[derive(Debug, Clone, Copy)]
struct Live {
    rows: usize,
    residual: u64,
    normed: u64,
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
    /// The last layer is attention, and only rows with an output go through all of it.
    narrows: bool,
}

impl Forward {
    /// Cuts the chunks of a batch into the tiles of its attention kernel.
    pub fn tiles(&self, batch: &Batch) -> Tiles {
        self.chunks.as_ref().map_or_else(Tiles::default, |kernel| kernel.tiles(&batch.chunks))
    }

    /// Leaves the last layer to few rows of `batch` where the plan says so: see [`Batch::narrow`].
    pub fn narrow(&self, batch: &mut Batch) {
        if self.narrows {
            batch.narrow(self.limits.outputs);
        }
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
    /// # Errors
    /// A step larger than the buffers; a launch that the driver or a library refuses; what `on_logits` returns.
    ///
    /// # Safety
    /// The metadata at `view.metadata` is that of `view.batch`, its slots and blocks are inside the pools, and all
    /// pointers stay valid until the work is done.
    pub unsafe fn run(&self, stream: &Stream, view: &StepView, on_logits: &mut OnLogits) -> Result<()> {
        let batch = view.batch;
        let rows = batch.rows.len();
        if rows > self.limits.rows {
            return Err(Error::bug(format!("a step of {rows} rows, and buffers for {}", self.limits.rows)));
        }
        let buffers = &self.buffers;
        let weights = &self.weights;
        let (residual, normed) = (buffers.residual.pointer(), buffers.normed.pointer());
        let mut live = Live { rows, residual, normed };
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
                        if batch.narrowed && index + 1 == weights.layers.len() {
                            live = self.last_attention(stream, view, attention, cache)?;
                            if live.rows == 0 {
                                return Ok(());
                            }
                        } else {
                            self.attention(stream, view, attention, cache)?;
                        }
                    }
                    _ => {
                        return Err(Error::bug(format!("layer {index}: weights and pools differ in kind")));
                    }
                }
                let (role, output) = match &layer.mixer {
                    MixerWeights::Delta(delta) => ("delta_out", &delta.output),
                    MixerWeights::Attention(attention) => ("attention_out", &attention.output),
                };
                stream.set_role(role);
                let addend = self.residual_product(stream, buffers.mixer.pointer(), live, output)?;
                stream.set_role("norm");
                let post_norm = layer.post_norm.pointer();
                self.norms.add(stream, live.rows, live.residual, addend, post_norm, None, live.normed)?;
                stream.set_role("mlp_in");
                let activation =
                    Output::SiluMul { to: buffers.activation.pointer(), stride: self.spec.intermediate_size };
                self.linear.launch(stream, live.normed, live.rows, &layer.gate_up, activation)?;
                stream.set_role("mlp_out");
                let addend =
                    self.residual_product(stream, buffers.activation.pointer(), live, &layer.down)?;
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
                    None => self.outputs(stream, view, live.residual, addend, on_logits)?,
                }
            }
        }
        Ok(())
    }

    /// # Safety
    /// As [`Self::run`].
    unsafe fn residual_product(&self, stream: &Stream, x: u64, live: Live, w: &Matrix) -> Result<Addend> {
        let Live { rows, residual, .. } = live;
        let hidden = self.spec.hidden_size;
        let partials = &self.buffers.partials;
        if self.linear.adds(rows, w) {
            let output = Output::Residual { to: residual };
            // SAFETY: the residual stream holds the live rows; the rest is the caller's promise.
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
}
