//! Every knob of the engine, with its default and bounds. Names follow vLLM where vLLM has one.

use std::fmt::Display;
use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// Bounds of the knobs, wide enough for every GPU there is and narrow enough that products of them fit into 64 bits.
pub const SEQUENCES: RangeInclusive<usize> = 1..=1 << 20;
pub const TOKENS: RangeInclusive<usize> = 1..=1 << 24;
pub const BLOCKS: RangeInclusive<usize> = 1..=1 << 32;
pub const THREADS: RangeInclusive<usize> = 1..=1024;
pub const DRAFTS: RangeInclusive<usize> = 1..=16;
pub const NGRAM_LENGTHS: RangeInclusive<usize> = 1..=16;
pub const STATE_WRITE_INTERVALS: RangeInclusive<usize> = 1..=8;
pub const STEPS_IN_FLIGHT: RangeInclusive<usize> = 0..=2;
pub const MEMORY_SHARE: RangeInclusive<f64> = 0.01..=1.0;
pub const SIM_NOISE: RangeInclusive<f64> = 0.0..=1000.0;

/// How cache memory is divided between KV blocks and recurrent states.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvLayout {
    /// Two pools: small KV blocks, and one state slot a sequence.
    Split,
    /// vLLM's hybrid pool: one pool of pages, each as large as a recurrent-state page.
    Unified,
}

/// Storage type of the KV cache or of the recurrent state. `Auto` is the device's own choice:
/// f32 on the CPU (the reference), f16 for KV and f32 for states on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CacheDtype {
    Auto,
    F32,
    F16,
    Bf16,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Preemption {
    /// Admit on the prompt alone; when blocks run out, evict the newest request and recompute it later.
    Recompute,
    /// Admit only when the whole request, output included, has blocks; never evict.
    Never,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Speculation {
    Off,
    /// Look the last tokens up in the request's own text and propose what followed.
    Ngram,
}

/// Arithmetic of the CPU device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CpuMath {
    /// 32-bit products and sums: the reference for every kernel. (Where the CPU has AMX, from 9 rows on 16-bit weights and
    /// activations are split exactly into bf16 for it: errors are no larger, but last bits differ from those of fewer rows.)
    F32,
    /// Operands rounded to bf16, 32-bit sums, on CPUs with AVX512-BF16.
    Bf16,
    /// 4-bit weights times activations of 16 bits, one scale for each group of columns; everything else as in `F32`.
    Int16,
}

/// Which kernels the CUDA device picks from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CudaKernels {
    /// The best for this GPU: warpgroup products and Hopper's copy engine where it has them, cuBLASLt where it is installed.
    Auto,
    /// Our own, of the instructions that every supported GPU has.
    Portable,
}

/// Which rows of a step go through the whole of the last layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LastLayer {
    /// The device's choice.
    Auto,
    All,
    /// Those that an output is made of. Of the others, most of a prompt, only K and V are made: nothing else is read again.
    Outputs,
}

/// The resolved settings of one engine session. Fields are the knobs; `None` means derived from memory.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EngineConfig {
    /// Most sequences in one step. 1 or more.
    pub max_num_seqs: usize,
    /// Most new tokens in one step, decodes included. 1 or more.
    pub max_num_batched_tokens: usize,
    /// Split prompts to fill the token budget; off: a prompt runs whole, in one step.
    pub chunked_prefill: bool,
    /// Longest request, prompt plus output, in tokens.
    pub max_model_len: usize,
    /// KV blocks in the pool (`split`), or all blocks with the null one (`unified`). `None`: what memory holds.
    pub kv_blocks: Option<usize>,
    /// Tokens a KV block holds in the `split` layout.
    pub kv_block_tokens: usize,
    pub kv_layout: KvLayout,
    pub kv_dtype: CacheDtype,
    pub state_dtype: CacheDtype,
    /// Decoded tokens from one write of a recurrent state to the next, 1 to 8; the tokens between are kept as rank-1
    /// terms. `None`: the device's choice (1 where it writes with every token).
    pub state_write_interval: Option<usize>,
    pub last_layer: LastLayer,
    /// Recurrent-state slots (`split`). `None`: from `max_num_seqs` and memory.
    pub state_slots: Option<usize>,
    /// Share of device memory the engine may use, 0 to 1.
    pub gpu_memory_utilization: f64,
    /// Pretend the device has this many bytes.
    pub gpu_memory: Option<u64>,
    /// Reuse KV blocks of equal prompt prefixes (dense models only).
    pub prefix_caching: bool,
    pub preemption: Preemption,
    pub speculation: Speculation,
    /// Drafted tokens a step when speculation is on, 1 to 16.
    pub speculative_tokens: usize,
    /// Shortest and longest suffix that n-gram speculation looks up.
    pub ngram_min: usize,
    pub ngram_max: usize,
    /// Steps in flight: 0 and 1 schedule a step from the results of the one before (1 hides the host's
    /// bookkeeping behind the device), 2 schedules one step ahead of the results. `None`: the device's choice.
    pub async_scheduling: Option<usize>,
    /// Capture decode steps as CUDA graphs.
    pub cuda_graphs: bool,
    pub cuda_kernels: CudaKernels,
    pub cpu_math: CpuMath,
    /// Worker threads of the CPU device. `None`: one a core.
    pub threads: Option<usize>,
    /// Scale of the seeded noise of a simulated device; 0 is none.
    pub sim_noise: f64,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            max_num_seqs: 256,
            max_num_batched_tokens: 2048,
            chunked_prefill: true,
            max_model_len: 2048,
            kv_blocks: None,
            kv_block_tokens: 16,
            kv_layout: KvLayout::Split,
            kv_dtype: CacheDtype::Auto,
            state_dtype: CacheDtype::Auto,
            state_write_interval: None,
            last_layer: LastLayer::Auto,
            state_slots: None,
            gpu_memory_utilization: 0.9,
            gpu_memory: None,
            prefix_caching: false,
            preemption: Preemption::Recompute,
            speculation: Speculation::Off,
            speculative_tokens: 5,
            ngram_min: 2,
            ngram_max: 4,
            async_scheduling: None,
            cuda_graphs: true,
            cuda_kernels: CudaKernels::Auto,
            cpu_math: CpuMath::F32,
            threads: None,
            sim_noise: 0.0,
        }
    }
}

impl EngineConfig {
    /// Checks every bound that does not depend on the model.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the knob, its value and what is allowed.
    pub fn validate(&self) -> Result<()> {
        let counts = [
            ("max_num_seqs", Some(self.max_num_seqs), SEQUENCES),
            ("max_num_batched_tokens", Some(self.max_num_batched_tokens), TOKENS),
            ("max_model_len", Some(self.max_model_len), TOKENS),
            ("kv_block_tokens", Some(self.kv_block_tokens), TOKENS),
            ("kv_blocks", self.kv_blocks, BLOCKS),
            ("state_slots", self.state_slots, BLOCKS),
            ("state_write_interval", self.state_write_interval, STATE_WRITE_INTERVALS),
            ("speculative_tokens", Some(self.speculative_tokens), DRAFTS),
            ("ngram_min", Some(self.ngram_min), NGRAM_LENGTHS),
            ("ngram_max", Some(self.ngram_max), NGRAM_LENGTHS),
            ("async_scheduling", self.async_scheduling, STEPS_IN_FLIGHT),
            ("threads", self.threads, THREADS),
        ];
        for (knob, value, allowed) in counts {
            check(knob, value, &allowed)?;
        }
        check("gpu_memory_utilization", Some(self.gpu_memory_utilization), &MEMORY_SHARE)?;
        check("sim_noise", Some(self.sim_noise), &SIM_NOISE)?;
        if self.ngram_max < self.ngram_min {
            return Err(out_of_bounds("ngram_max", self.ngram_max, "at least ngram_min"));
        }
        if !self.chunked_prefill && self.max_num_batched_tokens < self.max_model_len {
            return Err(Error::invalid(
                format!(
                    "max_num_batched_tokens = {} is below max_model_len = {} while chunked_prefill is off: \
                     a prompt that long could never run",
                    self.max_num_batched_tokens, self.max_model_len
                ),
                format!("set max_num_batched_tokens={} or more, or chunked_prefill=true", self.max_model_len),
            ));
        }
        Ok(())
    }
}

fn check<T: PartialOrd + Display>(knob: &str, value: Option<T>, allowed: &RangeInclusive<T>) -> Result<()> {
    match value {
        Some(value) if !allowed.contains(&value) => {
            Err(out_of_bounds(knob, value, &format!("{} to {}", allowed.start(), allowed.end())))
        }
        _ => Ok(()),
    }
}

fn out_of_bounds(knob: &str, value: impl Display, allowed: &str) -> Error {
    Error::invalid(format!("{knob} = {value} is out of bounds"), format!("{knob} must be {allowed}"))
}
