//! What a session allocates before its first step.

use std::sync::Arc;

use super::{Buffers, Forward, LayerPool, Limits, MAX_PARTS};
use crate::engine::config::{CacheDtype, LastLayer};
use crate::engine::device::CachePlan;
use crate::engine::device::cuda::delta_prefill::{self, DeltaPrefill, DeltaShape};
use crate::engine::device::cuda::driver::Gpu;
use crate::engine::device::cuda::kernels::attention::RowAttention;
use crate::engine::device::cuda::kernels::delta::Delta;
use crate::engine::device::cuda::kernels::norm::Norms;
use crate::engine::device::cuda::kernels::sample::Samplers;
use crate::engine::device::cuda::matrix::Output;
use crate::engine::device::cuda::prefill_attention::PrefillAttention;
use crate::engine::device::cuda::products::{Products, RING_GROUP};
use crate::engine::device::cuda::units;
use crate::engine::device::cuda::weights::{GpuWeights, MixerWeights};
use crate::engine::model::spec::{Mixer, ModelSpec};
use crate::{Error, Result};

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
        // Products of few rows are fed by rings in shared memory, but those of 4-bit weights in other groups want the L1
        // (products/int4_ring.rs).
        let rings =
            units::PRODUCTS_HOPPER[0].supports(gpu.facts().capability) && weights.groups_are(RING_GROUP);
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
                _ => return Err(Error::bug("a delta-net layer in a model without delta nets")),
            });
        }
        let value_size = spec.delta_net.as_ref().map_or(0, |delta| delta.value_size());
        let of = |elements: usize, bytes: usize| gpu.allocate_zeroed((limits.rows * elements * bytes) as u64);
        let partial_rows = limits.rows.max(MAX_PARTS * limits.rows.min(256));
        let buffers = Buffers {
            residual: of(hidden, 4)?,
            normed: gpu.allocate_zeroed((limits.rows.max(limits.outputs) * hidden * 2) as u64)?,
            own_residual: gpu.allocate_zeroed((limits.outputs * hidden * 4) as u64)?,
            own_normed: gpu.allocate_zeroed((limits.outputs * hidden * 2) as u64)?,
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
            narrows: plan.last_layer == LastLayer::Outputs && spec.layers.last() == Some(&Mixer::Attention),
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
            // The last layer's queries, keys and values are multiplied apart only where a step narrows to its outputs.
            if let (MixerWeights::Attention(attention), true) = (&layer.mixer, self.narrows) {
                let apart = attention.apart.iter().flat_map(|apart| apart.queries.iter().chain(&apart.keys));
                uses.extend(apart.map(|(matrix, _)| (matrix, to_mixed(stride))));
            }
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
}
