//! Devices execute *steps*: a batch of sequences, each with some new tokens, against the paged KV cache and the
//! recurrent states. Everything above this trait is the same for CUDA, the CPU and a simulation.
//!
//! The only place in the crate with `unsafe`, SIMD or CUDA.

pub mod check;
pub mod cpu;
pub mod cuda;
pub mod deferred_states;
pub mod mapped_file;
pub mod sim;

use serde::{Deserialize, Serialize};

use super::account::Ceilings;
use super::clock::Clock;
use super::config::{CacheDtype, CpuMath, CudaKernels, EngineConfig, KvLayout, LastLayer};
use super::model::layout::ModelLayout;
use super::model::spec::Mixer;
use super::model::weights::WeightSource;
use super::request::{RequestId, SamplingParams};
use crate::{Error, Result};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceKind {
    Cpu,
    Cuda,
    Sim,
}

/// What a report says of the device.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DeviceInfo {
    pub kind: DeviceKind,
    /// As typed after `--device`: `cpu`, `cuda:0`, `sim:a10g`.
    pub id: String,
    /// The product's name: `NVIDIA H200`, `AMD EPYC 9B45`.
    pub name: String,
    /// Memory the device has, bytes.
    pub memory_bytes: u64,
    /// Facts for run.json and `doctor`: driver, CUDA version, CPU features, threads.
    pub facts: Vec<(String, String)>,
}

impl DeviceInfo {
    pub fn simulated(&self) -> bool {
        self.kind == DeviceKind::Sim
    }
}

/// Pieces of code compiled at run time, those found compiled in a cache, and the time compiling took, summed over threads.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Compiled {
    pub compiled: usize,
    pub cached: usize,
    pub compile_s: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadProgress {
    pub done_bytes: u64,
    pub total_bytes: u64,
}

/// Choices that are fixed when weights are loaded.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LoadOptions {
    pub cpu_math: CpuMath,
    pub threads: Option<usize>,
}

pub trait Device: Send {
    fn info(&self) -> &DeviceInfo;

    /// A new clock of the kind this device lives on.
    fn clock(&self) -> Clock {
        Clock::real()
    }

    /// Makes ready what every model needs, such as compiling kernels that are in no cache yet. Does nothing a second time.
    ///
    /// # Errors
    /// A kernel that does not compile.
    fn prepare(&mut self) -> Result<()> {
        Ok(())
    }

    /// Code compiled for this device since the program started; `None` where nothing is.
    fn compiled(&self) -> Option<Compiled> {
        None
    }

    /// Bytes free for weights and caches now.
    fn free_bytes(&self) -> u64;

    /// Measured ceilings (data sheet values for a simulation); `None` for a device that has none. Measured on the first call,
    /// which takes seconds.
    ///
    /// # Errors
    /// The memory to measure with is not there; a lost device.
    fn ceilings(&mut self) -> Result<Option<Ceilings>>;

    /// The ceilings of this moment, in a fraction of a second, where they wander: on a CPU whose memory other programs and
    /// other machines of the same host use too. `None` where [`Device::ceilings`] hold throughout. No step may be in flight.
    ///
    /// # Errors
    /// The memory to measure with is not there.
    fn ceilings_now(&mut self) -> Result<Option<Ceilings>> {
        Ok(None)
    }

    /// `kv_dtype`/`state_dtype` that `auto` stands for here.
    fn default_dtypes(&self) -> (CacheDtype, CacheDtype);

    /// Steps in flight that `async_scheduling` defaults to here.
    fn default_async_scheduling(&self) -> usize {
        1
    }

    /// Sets knobs that were left open and that this rig fixes (a simulated rig's pool), before a plan is made.
    ///
    /// # Errors
    /// [`Error::Invalid`]: a knob's value that this device does not have, before anything is loaded.
    fn configure(&self, _layout: &ModelLayout, _config: &mut EngineConfig) -> Result<()>;

    /// Seconds from a request's arrival until the engine has it, and the least gap between two that come in
    /// together: the client and the server in front of a simulated rig. Zero for the embedded engine.
    fn submission_delay_s(&self) -> (f64, f64) {
        (0.0, 0.0)
    }

    /// Puts the weights into the device's memory, tensor by tensor. Bytes needed are known before
    /// (`ModelLayout::weight_bytes`), and the caller has compared them with `free_bytes`.
    ///
    /// # Errors
    /// A tensor that cannot be read or is not finite, a format the device has no kernels for, memory that is not there.
    fn load(
        &mut self,
        layout: &ModelLayout,
        source: &WeightSource,
        options: &LoadOptions,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Box<dyn Model>>;
}

/// What a device without CUDA says to `cuda_kernels = portable`.
fn refuse_cuda_kernels(config: &EngineConfig, because: &str) -> Result<()> {
    match config.cuda_kernels {
        CudaKernels::Auto => Ok(()),
        CudaKernels::Portable => Err(Error::invalid(
            format!("cuda_kernels = portable picks among kernels of CUDA: {because}"),
            "leave cuda_kernels at auto, or take --device cuda",
        )),
    }
}

/// What a device that runs the last layer on all rows says to `last_layer = outputs`.
fn refuse_last_layer(config: &EngineConfig, because: &str) -> Result<()> {
    match config.last_layer {
        LastLayer::Auto | LastLayer::All => Ok(()),
        LastLayer::Outputs => {
            Err(Error::invalid(format!("last_layer = outputs: {because}"), "leave last_layer at auto"))
        }
    }
}

/// Leaves the last layer to the rows with an output where its mixer is attention, unless all are asked for.
///
/// # Errors
/// [`Error::Invalid`]: only those were asked for, of a model whose last layer has a recurrent state, which every row moves on.
fn choose_last_layer(layout: &ModelLayout, config: &mut EngineConfig) -> Result<()> {
    if layout.spec.layers.last() != Some(&Mixer::Attention) {
        return refuse_last_layer(config, "the last layer of this model is no attention layer");
    }
    if config.last_layer == LastLayer::Auto {
        config.last_layer = LastLayer::Outputs;
    }
    Ok(())
}

/// Weights on a device. Cheap to keep while sessions come and go.
pub trait Model: Send {
    fn layout(&self) -> &ModelLayout;

    /// Bytes of device memory the weights take.
    fn memory_bytes(&self) -> u64;

    /// Allocates the pools of `plan`. At most one session is open at a time.
    ///
    /// # Errors
    /// Memory that is not there; a model, cache type or block size that the device has no kernels for.
    fn open(&self, plan: &CachePlan, config: &EngineConfig, clock: &Clock) -> Result<Box<dyn Session>>;
}

/// Sizes of the pools of one session; made by `engine::cache`, which accounts for every byte of them.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CachePlan {
    pub layout: KvLayout,
    /// Tokens a KV block holds.
    pub block_tokens: usize,
    /// KV blocks the device allocates. Block 0 is the null block in the unified layout and is never written.
    pub kv_blocks: usize,
    /// Recurrent-state slots the device allocates (0 for a dense model).
    pub state_slots: usize,
    pub kv_dtype: CacheDtype,
    pub state_dtype: CacheDtype,
    /// Decoded tokens from one write of a recurrent state to the next; 1 writes with every token.
    pub state_write_interval: usize,
    /// `All` or `Outputs`.
    pub last_layer: LastLayer,
    pub max_model_len: usize,
    pub max_num_seqs: usize,
    pub max_num_batched_tokens: usize,
    /// Most drafted tokens a sequence may bring to a step (0: speculation off).
    pub max_drafts: usize,
}

/// Names a submitted step; tickets count up from 0 within a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// One step. Slices live only for the call: a device copies what it needs.
#[derive(Debug, Clone)]
pub struct Step<'a> {
    pub sequences: Vec<SequenceStep<'a>>,
    /// Record kernels with their bytes and times.
    pub trace: bool,
}

/// The part of a step that belongs to one sequence. Its new tokens are `input` followed by `drafts`; they take
/// positions `context_tokens..`. Blocks cover all of them, and the state slot holds the recurrent state after exactly
/// `context_tokens` tokens (a slot whose `context_tokens` is 0 is taken as zero, whatever it held before).
/// After a step with drafts the next step's `context_tokens` says how many were kept: the device restores
/// state and convolution window to that point.
#[derive(Debug, Clone)]
pub struct SequenceStep<'a> {
    pub request: RequestId,
    /// `None` for dense models.
    pub state_slot: Option<u32>,
    /// KV block ids in order of position.
    pub blocks: &'a [u32],
    pub context_tokens: usize,
    pub input: Input<'a>,
    pub drafts: &'a [u32],
    pub want: Want<'a>,
}

#[derive(Debug, Clone, Copy)]
pub enum Input<'a> {
    Known(&'a [u32]),
    /// One token: the last one sampled for `sequence` (an index into that step's sequences) by a step still in flight.
    SampledBy {
        ticket: Ticket,
        sequence: usize,
    },
}

impl Input<'_> {
    pub fn tokens(&self) -> usize {
        match self {
            Self::Known(ids) => ids.len(),
            Self::SampledBy { .. } => 1,
        }
    }
}

#[derive(Debug, Clone, Copy)]
pub enum Want<'a> {
    /// A prompt chunk that is not the last one.
    Nothing,
    /// A token after the last input token, and after each draft accepted. `position` is the position the first
    /// sampled token will take; the draw of each is keyed by (seed, its position).
    Sample { seed: u64, position: u64, params: SamplingParams },
    /// The logits after each of the last `rows` new tokens.
    Logits { rows: usize },
    /// The natural log of the probability of `targets[i]` after new token i; as long as the new tokens.
    LogProbOf { targets: &'a [u32] },
}

#[derive(Debug, Clone, Default, PartialEq)]
pub struct SequenceOutput {
    /// Sampled tokens: 0 (nothing wanted), 1, or up to 1 + drafts.
    pub tokens: Vec<u32>,
    /// Drafts that were kept.
    pub accepted: usize,
    /// One row of vocabulary length for each row asked for.
    pub logits: Vec<Vec<f32>>,
    /// ln p of each target asked for.
    pub logprobs: Vec<f32>,
}

/// Times are seconds on the session's clock.
#[derive(Debug, Clone, PartialEq)]
pub struct StepOutput {
    pub sequences: Vec<SequenceOutput>,
    pub start_s: f64,
    pub end_s: f64,
    /// Time the device was busy.
    pub device_s: f64,
    /// Bytes that the launches of the step declared, each input read once and each output written once; `None` where
    /// the device does not count them.
    pub moved_bytes: Option<u64>,
    /// Of a traced step, unless [`Session::finish_trace`] gives them.
    pub kernels: Vec<KernelRecord>,
}

/// One kernel (or one phase of a step on the CPU), as a trace shows it. Kernels of a step are in the order of their
/// launches; one may start before the kernel in front of it has ended, and then waits for it in the time given here.
#[derive(Debug, Clone, PartialEq)]
pub struct KernelRecord {
    /// What it is for, and on a GPU also the kernel: `mlp_in: product_stream_8`.
    pub name: String,
    pub start_s: f64,
    pub end_s: f64,
    /// Bytes and FLOPs declared by the launch: each input read once, each output written once.
    pub bytes: u64,
    pub flops: u64,
}

/// What is only known when a traced pass is over.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TraceEnd {
    /// Kernels of the traced steps whose [`Session::wait`] did not give them.
    pub kernels: Vec<(Ticket, Vec<KernelRecord>)>,
    /// What a reader of the trace has to know of how kernels were timed.
    pub notes: Vec<String>,
    /// The kernels were lost, and a second traced pass will time them in another way.
    pub again: bool,
}

pub trait Session: Send {
    /// Queues a step and returns without waiting for it. Tickets are given in order.
    ///
    /// # Errors
    /// What [`check::StepBounds::check`] says: blocks, slots, positions and tokens must lie in the plan and the vocabulary.
    /// More steps in flight than the device has room for.
    fn submit(&mut self, step: &Step) -> Result<Ticket>;

    /// Blocks until the step is done. Steps are waited for in the order they were submitted. On a virtual clock, moves
    /// the clock to the end of the step.
    ///
    /// # Errors
    /// Non-finite logits, a lost device.
    fn wait(&mut self, ticket: Ticket) -> Result<StepOutput>;

    /// Ends a traced pass; all its steps have been waited for.
    ///
    /// # Errors
    /// A lost device.
    fn finish_trace(&mut self) -> Result<TraceEnd> {
        Ok(TraceEnd::default())
    }
}
