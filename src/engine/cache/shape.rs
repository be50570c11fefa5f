//! Bytes of cache pages, and the arithmetic of the unified layout.
//!
//! vLLM keeps hybrid models in one pool of equal blocks. A block id owns one page in each layer of a group; the
//! attention layers are one group, the delta-net layers as many groups of the same size. A page must hold either
//! `block_tokens` tokens of K and V, or one layer's recurrent state with its convolution window, so `block_tokens` is
//! the smallest multiple of 16 whose attention page is at least a state page: 528 for Qwen3.5 4B and 9B with 16-bit KV
//! and 32-bit states (544 with five drafts, which widen the window). A request then costs ceil(tokens / 528) attention
//! blocks and, for each delta-net group, 1 + drafts state blocks; and one block is the null block.

use crate::engine::account::dtype_bytes;
use crate::engine::config::CacheDtype;
use crate::engine::device::CachePlan;
use crate::engine::model::spec::ModelSpec;

/// Attention blocks of the unified layout hold a multiple of this many tokens.
const BLOCK_TOKENS_STEP: usize = 16;

/// Cache sizes of one model under resolved types.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheShape {
    /// K and V of one token in one attention layer.
    pub kv_token_layer_bytes: u64,
    pub attention_layers: u64,
    /// Recurrent state and convolution window of one delta-net layer; 0 for a dense model.
    pub state_layer_bytes: u64,
    pub delta_net_layers: u64,
    pub drafts: usize,
}

impl CacheShape {
    /// `drafts` is the most drafted tokens a step may bring: the window keeps as many more columns, to rewind.
    pub fn new(spec: &ModelSpec, kv_dtype: CacheDtype, state_dtype: CacheDtype, drafts: usize) -> Self {
        let attention = &spec.attention;
        let state_layer_bytes = spec.delta_net.as_ref().map_or(0, |delta| {
            let window_columns = delta.conv_width - 1 + drafts;
            delta.state_elements() as u64 * dtype_bytes(state_dtype)
                + (delta.conv_channels() * window_columns) as u64 * dtype_bytes(kv_dtype)
        });
        Self {
            kv_token_layer_bytes: (2 * attention.kv_heads * attention.head_dim) as u64
                * dtype_bytes(kv_dtype),
            attention_layers: spec.attention_layers() as u64,
            state_layer_bytes,
            delta_net_layers: spec.delta_net_layers() as u64,
            drafts,
        }
    }

    pub fn is_hybrid(&self) -> bool {
        self.delta_net_layers > 0
    }

    /// K and V of one token over all attention layers.
    pub fn kv_token_bytes(&self) -> u64 {
        self.kv_token_layer_bytes * self.attention_layers
    }

    /// Recurrent state and windows of one sequence over all delta-net layers.
    pub fn state_bytes(&self) -> u64 {
        self.state_layer_bytes * self.delta_net_layers
    }

    /// Tokens an attention block of the unified layout holds; `dense_block_tokens` for a dense model.
    pub fn unified_block_tokens(&self, dense_block_tokens: usize) -> usize {
        if !self.is_hybrid() || self.kv_token_layer_bytes == 0 {
            return dense_block_tokens;
        }
        let step_bytes = BLOCK_TOKENS_STEP as u64 * self.kv_token_layer_bytes;
        BLOCK_TOKENS_STEP * self.state_layer_bytes.div_ceil(step_bytes) as usize
    }

    /// Delta-net groups, each of as many layers as there are attention layers.
    pub fn state_groups(&self) -> usize {
        if self.attention_layers == 0 {
            0
        } else {
            self.delta_net_layers.div_ceil(self.attention_layers) as usize
        }
    }

    /// State blocks one live request holds in the unified layout, whatever its length.
    pub fn unified_state_blocks(&self) -> usize {
        self.state_groups() * (1 + self.drafts)
    }

    /// Bytes of one block over the layers of its group.
    pub fn block_bytes(&self, block_tokens: usize) -> u64 {
        block_tokens as u64 * self.kv_token_bytes()
    }

    /// Unified blocks that a request of `tokens` tokens holds.
    pub fn unified_request_blocks(&self, tokens: usize, block_tokens: usize) -> usize {
        tokens.div_ceil(block_tokens) + self.unified_state_blocks()
    }
}

/// Figures that vLLM prints at start for a unified pool (and, with one group, for a dense model).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct UnifiedFigures {
    /// "Maximum concurrency" for requests of the longest length: blocks over blocks a request, the null block included.
    pub max_concurrency: f64,
    /// "GPU KV cache size" in tokens: an accounting figure, not what one sequence could hold.
    pub kv_cache_tokens: usize,
    /// Requests of `seat_tokens` tokens that fit at once.
    pub seats: usize,
}

impl UnifiedFigures {
    pub fn new(shape: &CacheShape, plan: &CachePlan, seat_tokens: usize) -> Self {
        let request = |tokens| shape.unified_request_blocks(tokens, plan.block_tokens).max(1);
        Self {
            max_concurrency: plan.kv_blocks as f64 / request(plan.max_model_len) as f64,
            kv_cache_tokens: plan.kv_blocks / (1 + shape.state_groups()) * plan.block_tokens,
            seats: plan.kv_blocks.saturating_sub(1) / request(seat_tokens),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::config::{EngineConfig, KvLayout, LastLayer, Speculation};
    use crate::engine::device::CachePlan;
    use crate::engine::model::synthetic_layout;

    fn shape(preset: &str, drafts: usize) -> CacheShape {
        let spec = synthetic_layout(preset).unwrap().spec;
        CacheShape::new(&spec, CacheDtype::F16, CacheDtype::F32, drafts)
    }

    fn unified(shape: &CacheShape, blocks: usize, max_model_len: usize) -> CachePlan {
        let config = EngineConfig::default();
        CachePlan {
            layout: KvLayout::Unified,
            block_tokens: shape.unified_block_tokens(16),
            kv_blocks: blocks,
            state_slots: 0,
            kv_dtype: CacheDtype::F16,
            state_dtype: CacheDtype::F32,
            state_write_interval: 1,
            last_layer: LastLayer::All,
            max_model_len,
            max_num_seqs: config.max_num_seqs,
            max_num_batched_tokens: config.max_num_batched_tokens,
            max_drafts: shape.drafts,
        }
    }

    #[test]
    fn pages_have_the_published_sizes() {
        let four = shape("qwen3.5-4b", 0);
        assert_eq!(four.state_layer_bytes, 2_146_304);
        assert_eq!(four.unified_block_tokens(16), 528);
        assert_eq!(four.block_bytes(528), 8 * 2_162_688);
        // Five drafts widen the window to eight columns: 544 tokens hold it without padding.
        let drafting = shape("qwen3.5-4b", 5);
        assert_eq!(drafting.state_layer_bytes, 2_228_224);
        assert_eq!(drafting.unified_block_tokens(16), 544);
        assert_eq!(544 * drafting.kv_token_layer_bytes, drafting.state_layer_bytes);
        for (preset, tokens) in [("qwen3.5-0.8b", 544), ("qwen3.5-2b", 544), ("qwen3.5-9b-awq", 528)] {
            assert_eq!(shape(preset, 0).unified_block_tokens(16), tokens, "{preset}");
        }
        assert_eq!(shape("qwen2.5-7b", 0).unified_block_tokens(16), 16);
        // 9.45 GiB is what vLLM found beside the 4B: 586 blocks.
        assert_eq!((9.45 * f64::from(1 << 30)) as u64 / four.block_bytes(528), 586);
    }

    #[test]
    fn concurrency_tokens_and_seats_equal_what_vllm_printed() {
        for (preset, drafts, blocks, length, concurrency, tokens, seats) in [
            ("qwen3.5-4b", 0, 586, 2048, 83.71, 77_088, 146),
            ("qwen3.5-4b", 0, 586, 8192, 30.84, 77_088, 146),
            ("qwen3.5-9b-awq", 0, 413, 2048, 59.00, 54_384, 103),
            ("qwen3.5-4b", 5, 542, 2048, 24.64, 73_440, 28),
            ("qwen2.5-7b", 0, 5781, 2048, 45.16, 92_496, 240),
            ("qwen3.5-4b", 0, 40, 2048, 5.71, 5_280, 9),
        ] {
            let shape = shape(preset, drafts);
            let figures = UnifiedFigures::new(&shape, &unified(&shape, blocks, length), 256 + 128);
            let printed = (figures.max_concurrency * 100.0).round() / 100.0;
            assert_eq!(
                (printed, figures.kv_cache_tokens, figures.seats),
                (concurrency, tokens, seats),
                "{preset} with {blocks} blocks and {drafts} drafts"
            );
        }
        // The draft count of the other arm: 13 blocks a request.
        let three = shape("qwen3.5-4b", 3);
        assert_eq!(three.unified_request_blocks(384, three.unified_block_tokens(16)), 13);
    }

    #[test]
    fn a_knob_that_turns_speculation_on_changes_the_page() {
        let layout = synthetic_layout("qwen3.5-4b").unwrap();
        let config = EngineConfig {
            kv_layout: KvLayout::Unified,
            speculation: Speculation::Ngram,
            kv_blocks: Some(542),
            ..EngineConfig::default()
        };
        let dtypes = (CacheDtype::F16, CacheDtype::F32);
        let memory = 40 << 30;
        let plan =
            crate::engine::cache::plan::plan_cache(&layout, &config, memory, memory, dtypes, None).unwrap();
        assert_eq!((plan.block_tokens, plan.kv_blocks, plan.max_drafts, plan.state_slots), (544, 542, 5, 28));
    }
}
