//! Divides a device's memory into weights, working space and the two kinds of cache, before anything is loaded.
//!
//! budget = memory x `gpu_memory_utilization`, and no more than is free; pools = budget - weights - working space.
//! Pools never grow beyond what `max_num_seqs` of the longest requests can use, so a big machine is not filled for
//! nothing. A simulated device allocates nothing, so there the unified pool is one pool, as in vLLM; a real device
//! keeps KV blocks and state slots apart, and both must fit.

use super::shape::CacheShape;
use crate::engine::account::{drafted_token_bytes, pending_token_bytes};
use crate::engine::config::{CacheDtype, EngineConfig, KvLayout, LastLayer, Speculation};
use crate::engine::device::CachePlan;
use crate::engine::model::layout::ModelLayout;
use crate::{Error, Result};

/// Plans the pools of a device that allocates them.
///
/// `free_bytes` is what is free before the weights are loaded, `total_bytes` all the memory; `default_dtypes` are what
/// `auto` stands for (KV, state); `longest_request_tokens` is prompt plus output of the longest request, if known.
///
/// # Errors
/// [`Error::Invalid`] with the numbers when the memory cannot hold the weights and one longest request.
pub fn plan_cache(
    layout: &ModelLayout,
    config: &EngineConfig,
    free_bytes: u64,
    total_bytes: u64,
    default_dtypes: (CacheDtype, CacheDtype),
    longest_request_tokens: Option<usize>,
) -> Result<CachePlan> {
    Planner::new(layout, config, default_dtypes, longest_request_tokens)?.plan(free_bytes, total_bytes, true)
}

/// Plans the pools of a simulated device: the same, but in the unified layout states live inside the pool and take no
/// memory beside it.
///
/// # Errors
/// As [`plan_cache`].
pub fn plan_simulated_cache(
    layout: &ModelLayout,
    config: &EngineConfig,
    free_bytes: u64,
    total_bytes: u64,
    default_dtypes: (CacheDtype, CacheDtype),
    longest_request_tokens: Option<usize>,
) -> Result<CachePlan> {
    Planner::new(layout, config, default_dtypes, longest_request_tokens)?.plan(free_bytes, total_bytes, false)
}

/// Bytes a device needs beside weights and caches: the layer inputs and outputs of a full step, in f32, and the logits
/// of every sequence.
pub fn workspace_bytes(layout: &ModelLayout, config: &EngineConfig) -> u64 {
    let spec = &layout.spec;
    let widest_mixer =
        layout.linears.iter().filter(|(linear, _)| linear.layer == Some(0)).map(|(linear, _)| linear.rows);
    let widths = 4 * spec.hidden_size + 2 * spec.intermediate_size + widest_mixer.sum::<usize>();
    let drafts = drafts(config);
    let tokens = config.max_num_batched_tokens.max(config.max_num_seqs);
    let rows = config.max_num_seqs.min(config.max_num_batched_tokens) * (1 + drafts);
    4 * (tokens * widths + rows * spec.vocab_size) as u64
}

fn drafts(config: &EngineConfig) -> usize {
    if config.speculation == Speculation::Off { 0 } else { config.speculative_tokens }
}

struct Planner<'a> {
    layout: &'a ModelLayout,
    config: &'a EngineConfig,
    shape: CacheShape,
    kv_dtype: CacheDtype,
    state_dtype: CacheDtype,
    block_tokens: usize,
    /// Prompt plus output of the longest request that must fit.
    longest: usize,
}

impl<'a> Planner<'a> {
    fn new(
        layout: &'a ModelLayout,
        config: &'a EngineConfig,
        default_dtypes: (CacheDtype, CacheDtype),
        longest_request_tokens: Option<usize>,
    ) -> Result<Self> {
        config.validate()?;
        let longest = longest_request_tokens.unwrap_or(config.max_model_len).max(1);
        if longest > config.max_model_len {
            return Err(Error::invalid(
                format!(
                    "the longest request has {longest} tokens, max_model_len is {}",
                    config.max_model_len
                ),
                format!("set max_model_len={longest} or more, or shorten the requests"),
            ));
        }
        if config.max_model_len > layout.spec.max_position {
            return Err(Error::invalid(
                format!(
                    "max_model_len = {}, but {} has positions up to {} (max_position_embeddings)",
                    config.max_model_len, layout.spec.name, layout.spec.max_position
                ),
                format!("set max_model_len={} or less", layout.spec.max_position),
            ));
        }
        let resolve = |dtype, default| if dtype == CacheDtype::Auto { default } else { dtype };
        let kv_dtype = resolve(config.kv_dtype, default_dtypes.0);
        let state_dtype = resolve(config.state_dtype, default_dtypes.1);
        let shape = CacheShape::new(&layout.spec, kv_dtype, state_dtype, drafts(config));
        let block_tokens = match config.kv_layout {
            KvLayout::Split => config.kv_block_tokens,
            KvLayout::Unified => shape.unified_block_tokens(config.kv_block_tokens),
        };
        Ok(Self { layout, config, shape, kv_dtype, state_dtype, block_tokens, longest })
    }

    fn plan(&self, free_bytes: u64, total_bytes: u64, allocates: bool) -> Result<CachePlan> {
        let pool_bytes = self.pool_bytes(free_bytes, total_bytes)?;
        let (kv_blocks, state_slots) = match self.config.kv_layout {
            KvLayout::Split => self.split(pool_bytes)?,
            KvLayout::Unified => self.unified(pool_bytes, allocates)?,
        };
        Ok(CachePlan {
            layout: self.config.kv_layout,
            block_tokens: self.block_tokens,
            kv_blocks,
            state_slots,
            kv_dtype: self.kv_dtype,
            state_dtype: self.state_dtype,
            state_write_interval: self.config.state_write_interval.unwrap_or(1),
            last_layer: match self.config.last_layer {
                LastLayer::Auto => LastLayer::All,
                chosen => chosen,
            },
            max_model_len: self.config.max_model_len,
            max_num_seqs: self.config.max_num_seqs,
            max_num_batched_tokens: self.config.max_num_batched_tokens,
            max_drafts: self.shape.drafts,
        })
    }

    /// Memory left for caches.
    fn pool_bytes(&self, free_bytes: u64, total_bytes: u64) -> Result<u64> {
        let config = self.config;
        if let Some(pretended) = config.gpu_memory.filter(|&pretended| pretended > total_bytes) {
            return Err(Error::invalid(
                format!("gpu_memory = {pretended} bytes, but the device has {total_bytes}"),
                "gpu_memory can only make a device look smaller",
            ));
        }
        let memory = config.gpu_memory.unwrap_or(total_bytes);
        let budget = ((memory as f64 * config.gpu_memory_utilization) as u64).min(free_bytes);
        let weights = self.layout.weight_bytes();
        let workspace = workspace_bytes(self.layout, config);
        budget.checked_sub(weights + workspace).ok_or_else(|| {
            Error::invalid(
                format!(
                    "{} does not fit: weights {} and working space {} are more than the {} that may be used \
                     (gpu_memory_utilization {} of {}, {} free)",
                    self.layout.spec.name,
                    gib(weights),
                    gib(workspace),
                    gib(budget),
                    config.gpu_memory_utilization,
                    gib(memory),
                    gib(free_bytes)
                ),
                "choose a smaller or quantised model, lower max_num_batched_tokens, or raise gpu_memory_utilization",
            )
        })
    }

    /// A slot of the state pool: the state, and room for the tokens that it is behind.
    fn state_bytes(&self) -> u64 {
        let (spec, drafts) = (&self.layout.spec, self.shape.drafts);
        let behind = match self.config.state_write_interval {
            // (Drafting devices have room for the eight tokens that a step may run one by one.)
            Some(interval) if drafts > 0 => (interval + drafts).max(8) as u64 * pending_token_bytes(spec),
            Some(interval) if interval > 1 => interval as u64 * pending_token_bytes(spec),
            // A device that writes with every token keeps the inputs of drafts until it knows which were accepted.
            _ => drafts as u64 * drafted_token_bytes(spec),
        };
        self.shape.state_bytes() + behind
    }

    /// KV blocks that `max_num_seqs` longest requests hold; twice as many where prefixes stay behind.
    fn most_useful_blocks(&self) -> u64 {
        let kept = if self.config.prefix_caching { 2 } else { 1 };
        kept * self.config.max_num_seqs as u64 * self.longest.div_ceil(self.block_tokens) as u64
    }

    fn split(&self, pool_bytes: u64) -> Result<(usize, usize)> {
        let config = self.config;
        let block_bytes = self.shape.block_bytes(self.block_tokens);
        let request_blocks = self.longest.div_ceil(self.block_tokens) as u64;
        let state_bytes = self.state_bytes();
        let seat_bytes = state_bytes + request_blocks * block_bytes;
        let slots = if self.shape.is_hybrid() {
            let seats = match config.kv_blocks {
                // The blocks are settled; the rest of the memory is for states.
                Some(blocks) => {
                    pool_bytes.saturating_sub((blocks as u64).saturating_mul(block_bytes))
                        / state_bytes.max(1)
                }
                None => pool_bytes / seat_bytes.max(1),
            };
            config.state_slots.map_or(seats.min(config.max_num_seqs as u64), |slots| slots as u64)
        } else {
            0
        };
        let left = pool_bytes.checked_sub(slots.saturating_mul(state_bytes));
        let blocks = match (config.kv_blocks, left) {
            (Some(blocks), _) => blocks as u64,
            (None, Some(left)) => (left / block_bytes.max(1)).min(self.most_useful_blocks()),
            (None, None) => 0,
        };
        let needed = slots.saturating_mul(state_bytes).saturating_add(blocks.saturating_mul(block_bytes));
        let no_seat = self.shape.is_hybrid() && slots == 0;
        if needed > pool_bytes || no_seat || (blocks < request_blocks && config.kv_blocks.is_none()) {
            let asked = if no_seat || config.kv_blocks.is_none() { seat_bytes.max(needed) } else { needed };
            return Err(self.too_small(asked, pool_bytes));
        }
        self.check_blocks(blocks, request_blocks)?;
        Ok((blocks as usize, slots as usize))
    }

    fn unified(&self, pool_bytes: u64, allocates: bool) -> Result<(usize, usize)> {
        let config = self.config;
        let block_bytes = self.shape.block_bytes(self.block_tokens).max(1);
        let state_blocks = self.shape.unified_state_blocks();
        let request_blocks = self.shape.unified_request_blocks(self.longest, self.block_tokens) as u64;
        // Every live request holds its state blocks and at least one attention block.
        let slots = |blocks: u64| {
            let seats = blocks.saturating_sub(1) / (1 + state_blocks) as u64;
            if self.shape.is_hybrid() { seats.min(config.max_num_seqs as u64) } else { 0 }
        };
        let bytes = |blocks: u64| {
            let states = if allocates { slots(blocks).saturating_mul(self.state_bytes()) } else { 0 };
            blocks.saturating_mul(block_bytes).saturating_add(states)
        };
        let blocks = match config.kv_blocks {
            Some(blocks) => blocks as u64,
            None => {
                let useful = 1 + self.most_useful_blocks() + (config.max_num_seqs * state_blocks) as u64;
                largest(pool_bytes / block_bytes, |blocks| bytes(blocks) <= pool_bytes).min(useful)
            }
        };
        if bytes(blocks) > pool_bytes || (config.kv_blocks.is_none() && blocks <= request_blocks) {
            return Err(self.too_small(bytes(blocks.max(1 + request_blocks)), pool_bytes));
        }
        self.check_blocks(blocks.saturating_sub(1), request_blocks)?;
        Ok((blocks as usize, slots(blocks) as usize))
    }

    fn check_blocks(&self, usable: u64, request_blocks: u64) -> Result<()> {
        if usable >= request_blocks {
            return Ok(());
        }
        Err(Error::invalid(
            format!(
                "kv_blocks: {usable} usable blocks of {} tokens cannot hold one request of {} tokens, which takes \
                 {request_blocks}",
                self.block_tokens, self.longest
            ),
            "raise kv_blocks, or lower max_model_len to the longest request you will send",
        ))
    }

    fn too_small(&self, needed_bytes: u64, pool_bytes: u64) -> Error {
        Error::invalid(
            format!(
                "the caches need {} and {} are left beside the weights of {} ({}): a sequence of {} tokens takes {} of \
                 KV and {} of recurrent state",
                gib(needed_bytes),
                gib(pool_bytes),
                self.layout.spec.name,
                gib(self.layout.weight_bytes()),
                self.longest,
                gib(self.longest as u64 * self.shape.kv_token_bytes()),
                gib(self.shape.state_bytes())
            ),
            "lower max_num_seqs, max_model_len, kv_blocks or state_slots, or use 16-bit kv_dtype and state_dtype",
        )
    }
}

/// The largest count up to `most` for which `fits` holds; `fits` must hold up to some count and fail above it.
fn largest(most: u64, fits: impl Fn(u64) -> bool) -> u64 {
    let (mut low, mut high) = (0, most);
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if fits(middle) { low = middle } else { high = middle - 1 }
    }
    low
}

fn gib(bytes: u64) -> String {
    const MIB: f64 = 1024.0 * 1024.0;
    let mib = bytes as f64 / MIB;
    if mib < 1024.0 { format!("{mib:.1} MiB") } else { format!("{:.2} GiB", mib / 1024.0) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::model::synthetic_layout;

    const GIB: u64 = 1 << 30;
    const F16_F32: (CacheDtype, CacheDtype) = (CacheDtype::F16, CacheDtype::F32);

    fn plan(preset: &str, config: &EngineConfig, memory: u64, longest: Option<usize>) -> Result<CachePlan> {
        plan_cache(&synthetic_layout(preset).unwrap(), config, memory, memory, F16_F32, longest)
    }

    fn needed_bytes(preset: &str, config: &EngineConfig, plan: &CachePlan) -> u64 {
        let layout = synthetic_layout(preset).unwrap();
        let shape = CacheShape::new(&layout.spec, plan.kv_dtype, plan.state_dtype, plan.max_drafts);
        layout.weight_bytes()
            + workspace_bytes(&layout, config)
            + plan.kv_blocks as u64 * shape.block_bytes(plan.block_tokens)
            + plan.state_slots as u64 * shape.state_bytes()
    }

    #[test]
    fn split_seats_as_many_of_the_expected_length_as_memory_holds() {
        let config = EngineConfig::default();
        let long = plan("qwen3.5-4b", &config, 22 * GIB, None).unwrap();
        let short = plan("qwen3.5-4b", &config, 22 * GIB, Some(384)).unwrap();
        // A state is as much as 1,536 tokens of KV, so short requests nearly double the seats.
        assert!(long.state_slots < short.state_slots && short.state_slots < 256, "{long:?} {short:?}");
        for (plan, tokens) in [(&long, 2048), (&short, 384)] {
            assert!(plan.kv_blocks >= plan.state_slots * tokens / 16, "every seat has its blocks: {plan:?}");
            let needed = needed_bytes("qwen3.5-4b", &config, plan);
            let budget = (22.0 * GIB as f64 * 0.9) as u64;
            assert!(needed <= budget && needed + GIB / 8 > budget, "{needed} of {budget}");
        }
    }

    #[test]
    fn a_big_machine_is_not_filled_for_nothing() {
        let config = EngineConfig { max_num_seqs: 16, ..EngineConfig::default() };
        let huge = plan("demo", &config, 4096 * GIB, Some(96)).unwrap();
        assert_eq!((huge.kv_blocks, huge.state_slots), (16 * 6, 16));
        let dense = plan("qwen2.5-7b", &config, 4096 * GIB, None).unwrap();
        assert_eq!((dense.kv_blocks, dense.state_slots), (16 * 128, 0));
        let unified = EngineConfig { kv_layout: KvLayout::Unified, ..config };
        let huge = plan("qwen3.5-4b", &unified, 4096 * GIB, None).unwrap();
        assert_eq!((huge.kv_blocks, huge.state_slots), (1 + 16 * 7, 16));
    }

    #[test]
    fn overrides_are_kept_and_the_rest_follows() {
        let config = EngineConfig { kv_blocks: Some(500), ..EngineConfig::default() };
        let planned = plan("qwen3.5-4b", &config, 22 * GIB, None).unwrap();
        assert_eq!(planned.kv_blocks, 500);
        assert!(planned.state_slots > 150, "memory not used by blocks is for states: {planned:?}");
        let config = EngineConfig { state_slots: Some(3), ..EngineConfig::default() };
        assert_eq!(plan("qwen3.5-4b", &config, 22 * GIB, None).unwrap().state_slots, 3);
        // Half the pretended memory, and what is free bounds it too.
        let config = EngineConfig { gpu_memory: Some(22 * GIB), ..EngineConfig::default() };
        let pretended = plan("qwen3.5-4b", &config, 80 * GIB, None).unwrap();
        assert_eq!(pretended, plan("qwen3.5-4b", &EngineConfig::default(), 22 * GIB, None).unwrap());
    }

    #[test]
    fn unified_blocks_are_one_pool_only_where_nothing_is_allocated() {
        let config = EngineConfig { kv_layout: KvLayout::Unified, ..EngineConfig::default() };
        let layout = synthetic_layout("qwen3.5-4b").unwrap();
        let memory = 22 * GIB;
        let simulated = plan_simulated_cache(&layout, &config, memory, memory, F16_F32, None).unwrap();
        let real = plan("qwen3.5-4b", &config, memory, None).unwrap();
        assert!(real.kv_blocks < simulated.kv_blocks, "{real:?} {simulated:?}");
        assert!(needed_bytes("qwen3.5-4b", &config, &real) <= (memory as f64 * 0.9) as u64);
        assert_eq!(simulated.state_slots, 256.min((simulated.kv_blocks - 1) / 4));
        let seats = EngineConfig { kv_blocks: Some(586), ..config };
        let planned = plan_simulated_cache(&layout, &seats, memory, memory, F16_F32, None).unwrap();
        assert_eq!((planned.kv_blocks, planned.state_slots), (586, 146));
    }

    #[test]
    fn what_cannot_fit_is_refused_with_the_numbers() {
        let config = EngineConfig::default();
        for (error, part) in [
            (plan("qwen3.5-9b", &config, 16 * GIB, None), "weights 1"),
            (
                plan(
                    "qwen3.5-4b",
                    &EngineConfig { kv_blocks: Some(100_000), ..config.clone() },
                    22 * GIB,
                    None,
                ),
                "the caches need",
            ),
            (
                plan(
                    "qwen3.5-4b",
                    &EngineConfig { state_slots: Some(4000), ..config.clone() },
                    22 * GIB,
                    None,
                ),
                "the caches need",
            ),
            (
                plan("qwen3.5-4b", &EngineConfig { kv_blocks: Some(100), ..config.clone() }, 22 * GIB, None),
                "cannot hold one request of 2048 tokens",
            ),
            (
                plan(
                    "qwen3.5-4b",
                    &EngineConfig { gpu_memory: Some(90 * GIB), ..config.clone() },
                    22 * GIB,
                    None,
                ),
                "gpu_memory",
            ),
            (plan("qwen3.5-4b", &config, 22 * GIB, Some(3000)), "max_model_len is 2048"),
            (
                plan(
                    "qwen3.5-4b",
                    &EngineConfig { max_model_len: 1 << 20, ..config.clone() },
                    22 * GIB,
                    None,
                ),
                "max_position_embeddings",
            ),
            (
                plan(
                    "qwen3.5-4b",
                    &EngineConfig { gpu_memory_utilization: 1.5, ..config.clone() },
                    22 * GIB,
                    None,
                ),
                "gpu_memory_utilization",
            ),
        ] {
            let error = error.expect_err(part);
            assert!(error.to_string().contains(part), "{error}");
            assert_eq!(error.exit_code(), 2);
            assert!(!error.hint().is_empty());
        }
        // Just enough for one long request, and one token too many.
        let tight = EngineConfig { max_num_seqs: 1, max_model_len: 32_768, ..EngineConfig::default() };
        let fits = |memory| plan("qwen3.5-4b", &tight, memory, None).is_ok();
        let least = largest(64 * GIB, |memory| !fits(memory)) + 1;
        let planned = plan("qwen3.5-4b", &tight, least, None).unwrap();
        assert_eq!((planned.kv_blocks, planned.state_slots), (2048, 1));
    }

    #[test]
    fn dtypes_come_from_the_knob_or_the_device() {
        let config = EngineConfig { kv_dtype: CacheDtype::Bf16, ..EngineConfig::default() };
        let planned = plan("demo", &config, 64 * GIB, None).unwrap();
        assert_eq!((planned.kv_dtype, planned.state_dtype), (CacheDtype::Bf16, CacheDtype::F32));
    }
}
