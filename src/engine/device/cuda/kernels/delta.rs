//! The gated delta net, token by token (cuda/delta.cu), and with states that are written every few tokens only
//! (cuda/delta_stream.cu).

use crate::engine::config::CacheDtype;
use crate::engine::device::cuda::batch::SHORT_TOKENS;
use crate::engine::device::cuda::driver::{DeviceBuffer, Gpu, Kernel};
use crate::engine::device::cuda::launch::{Arg, Launch, Stream, bytes_of};
use crate::engine::device::cuda::units;
use crate::engine::device::cuda::weights::DeltaWeights;
use crate::engine::device::deferred_states::defers_states;
use crate::engine::model::spec::DeltaNet;
use crate::{Error, Result};

/// Blocks that share a head of 128 x 128 on Hopper and later, as a cluster.
const SPLIT: u32 = 4;
/// Bytes that `cuda/delta_stream.cu` keeps for a token and head: key, correction and decay, padded.
const PAIR_BYTES: usize = 260 * 4;
/// Tokens a stored state may be behind, as `delta_stream` is compiled.
pub const MOST_PENDING: usize = 8;
/// And as `delta_stream_drafts` is: the tokens of an interval and the drafts of a step.
const MOST_WITH_DRAFTS: usize = 32;
/// Shared memory of `delta_stream`: three states, and the tokens that each is behind.
const STREAM_SHARED: u32 = 3 * (128 * 128 * 4 + MOST_PENDING * PAIR_BYTES) as u32;
/// And what it declares itself.
const STREAM_STATIC: u32 = 10_880;
/// The same of `delta_stream_drafts`: two states, and the tokens that each is behind.
const DRAFTS_SHARED: u32 = 2 * (128 * 128 * 4 + MOST_WITH_DRAFTS * PAIR_BYTES) as u32;
const DRAFTS_THREADS: u32 = 288;
/// Threads of `delta_stream`: four warps for the rows, eight that prepare, one that copies.
const STREAM_THREADS: u32 = 416;
/// Sequences from which streaming the states wins. With fewer its shared memory makes the multiprocessors change their
/// cache's split between it and the products of few rows, which want L1: 20 us a layer.
const STREAM_SEQUENCES: usize = 9;
/// The same where those products are fed by rings in shared memory and want no L1: all but one sequence on Hopper.
const STREAM_SEQUENCES_BESIDE_RINGS: usize = 2;

/// A sequence's part of a step, as the kernels read it. `slot` below 0 marks padding.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C, align(16))]
pub struct DeltaSequence {
    pub slot: i32,
    pub context: i32,
    pub start: i32,
    pub count: i32,
    /// Tokens of `context` that are not in the stored state yet.
    pub pending: i32,
    /// 1: the pending tokens are folded into the state, and it is stored, before the new tokens.
    pub write: i32,
    pub unused: [i32; 2],
}

/// A layer's recurrent states, convolution windows, and the tokens that the states are behind (0 where there is no room
/// for them): device addresses.
#[derive(Debug, Clone, Copy)]
pub struct StatePools {
    pub state: u64,
    pub window: u64,
    pub pairs: u64,
}

#[derive(Debug)]
pub struct Delta {
    step: Kernel,
    save_window: Kernel,
    shape: DeltaNet,
    eps: f32,
    /// Rows of `mixed` are this many halves.
    pitch: usize,
    /// Positions the convolution window holds.
    ring: usize,
    state_bytes: usize,
    /// Kernels for 128 x 128, with blocks in clusters of [`SPLIT`] or alone; else the general one.
    fast: Option<u32>,
    deferred: Option<Deferred>,
}

/// States that are written every few tokens only: for sequences with one token each, where there is shared memory.
#[derive(Debug)]
struct Deferred {
    few: Kernel,
    one: Kernel,
    stream: Kernel,
    /// Sequences from which it is `stream`, not `few`.
    stream_from: usize,
    settle: Kernel,
    multiprocessors: usize,
    /// Two counters of `stream`: tasks drawn, blocks that draw no more. A launch leaves them zero, as it finds them.
    drawn: DeviceBuffer,
    /// Tokens from one write to the next: the most that a state is left behind, drafts aside.
    interval: usize,
    /// Tokens that there is room for in memory: those, and the drafts of a step.
    capacity: usize,
    /// Steps may bring drafts: states are written by what is known to stay, so every short step runs on `stream`.
    drafts: bool,
}

impl Delta {
    /// `ring`: positions the convolution window holds, four and one for each draft that a step may bring.
    ///
    /// # Errors
    /// A shape, a state type, an interval or drafts that the kernels are not made for.
    #[expect(clippy::too_many_arguments, reason = "what fixes the kernels and their shapes")]
    pub fn new(
        gpu: &Gpu,
        shape: &DeltaNet,
        state: CacheDtype,
        eps: f32,
        pitch: usize,
        ring: usize,
        write_interval: usize,
        portable: bool,
    ) -> Result<Self> {
        let wrong = |what: String| Err(Error::invalid(what, "use --device cpu for this model"));
        if !shape.key_dim.is_multiple_of(4) || shape.key_dim.max(shape.value_dim) > 1024 {
            return wrong(format!(
                "linear heads of {} x {}: the CUDA kernels need key sizes that are multiples of 4, and at most 1,024",
                shape.key_dim, shape.value_dim
            ));
        }
        if !shape.value_heads.is_multiple_of(shape.key_heads) {
            return wrong(format!("{} value heads over {} key heads", shape.value_heads, shape.key_heads));
        }
        let fast = (shape.key_dim, shape.value_dim) == (128, 128);
        let split = fast && gpu.is_hopper_or_newer() && !portable;
        let (name, state_bytes) = match (state, fast, split) {
            (CacheDtype::F32, true, true) => ("delta_f32_split", 4),
            (CacheDtype::F32, true, false) => ("delta_f32", 4),
            (CacheDtype::F32, false, _) => ("delta_any_f32", 4),
            (CacheDtype::F16, true, true) => ("delta_f16_split", 2),
            (CacheDtype::F16, true, false) => ("delta_f16", 2),
            (CacheDtype::F16, false, _) => ("delta_any_f16", 2),
            (CacheDtype::Bf16, true, true) => ("delta_bf16_split", 2),
            (CacheDtype::Bf16, true, false) => ("delta_bf16", 2),
            (CacheDtype::Bf16, false, _) => ("delta_any_bf16", 2),
            (CacheDtype::Auto, ..) => return Err(Error::bug("state_dtype is not resolved")),
        };
        let drafts = ring - 4;
        let deferred = if Self::defers(gpu, shape, state, portable) {
            let stream = if drafts > 0 { "delta_stream_drafts" } else { "delta_stream" };
            Some(Deferred {
                few: gpu.kernel(&units::DELTA_STREAM, "delta_few")?,
                one: gpu.kernel(&units::DELTA_STREAM, "delta_one")?,
                stream: gpu.kernel(&units::DELTA_STREAM, stream)?,
                stream_from: STREAM_SEQUENCES,
                settle: gpu.kernel(&units::DELTA_STREAM, "delta_settle")?,
                multiprocessors: gpu.facts().multiprocessors as usize,
                drawn: gpu.allocate_zeroed(8)?,
                interval: write_interval,
                // Every short sequence fits, once its pending tokens are written.
                capacity: if drafts > 0 {
                    (write_interval + drafts).max(SHORT_TOKENS)
                } else {
                    write_interval
                },
                drafts: drafts > 0,
            })
        } else if drafts > 0 {
            return Err(Error::invalid(
                "speculation: on this GPU recurrent states cannot go back behind rejected drafts",
                "set speculation=off, or use --device cpu; otherwise it takes a Hopper GPU, heads of 128 x 128 and \
                 state_dtype=f32",
            ));
        } else if write_interval > 1 {
            return Err(Error::invalid(
                format!(
                    "state_write_interval = {write_interval}: this GPU's kernels write recurrent states with every token"
                ),
                "leave state_write_interval at auto; other intervals take a Hopper GPU, heads of 128 x 128 and \
                 state_dtype=f32",
            ));
        } else {
            None
        };
        Ok(Self {
            deferred,
            step: gpu.kernel(&units::DELTA, name)?,
            save_window: gpu.kernel(&units::DELTA, "delta_save_window")?,
            shape: shape.clone(),
            eps,
            pitch,
            ring,
            state_bytes,
            fast: fast.then_some(if split { SPLIT } else { 1 }),
        })
    }

    /// The same between products of few rows that are fed by rings in shared memory.
    pub fn beside_rings(mut self) -> Self {
        if let Some(deferred) = &mut self.deferred {
            deferred.stream_from = STREAM_SEQUENCES_BESIDE_RINGS;
        }
        self
    }

    /// Whether there is a kernel that leaves states unwritten for a few tokens.
    pub fn defers(gpu: &Gpu, shape: &DeltaNet, state: CacheDtype, portable: bool) -> bool {
        !portable
            && defers_states(gpu.facts().capability, shape, state)
            && gpu.facts().shared_bytes >= STREAM_SHARED + STREAM_STATIC
    }

    /// Bytes a slot takes in one layer's pools of states, of windows and of pending tokens.
    pub fn slot_bytes(&self) -> (u64, u64, u64) {
        let window = self.ring * self.shape.conv_channels() * 2;
        let pairs = self
            .deferred
            .as_ref()
            .map_or(0, |deferred| self.shape.value_heads * deferred.capacity * PAIR_BYTES);
        ((self.shape.state_elements() * self.state_bytes) as u64, window as u64, pairs as u64)
    }

    /// Tokens that states may be behind after a step of sequences with `longest` new tokens at most: 0 where
    /// [`Self::step`] writes the states.
    pub fn most_pending(&self, longest: usize) -> usize {
        self.deferred
            .as_ref()
            .filter(|deferred| longest == 1 || deferred.drafts)
            .map_or(0, |deferred| deferred.interval)
    }

    /// Tokens that a state's pending ones and a step's new ones may be together, before the pending ones are written.
    pub fn capacity(&self) -> usize {
        self.deferred.as_ref().map_or(0, |deferred| deferred.capacity)
    }

    /// Runs `sequences` sequences (device address of [`DeltaSequence`]s) with `tokens` new tokens in all, `longest` at most
    /// in one: mixed to `out`, both from their first row on, state and window of this layer updated.
    ///
    /// # Errors
    /// A launch that the driver refuses, in its words.
    ///
    /// # Safety
    /// Pointers are valid for the rows and slots that the sequences name, and no slot is named twice. All steps are on one stream.
    #[expect(clippy::too_many_arguments, reason = "the operands of one kernel")]
    pub unsafe fn step(
        &self,
        stream: &Stream,
        weights: &DeltaWeights,
        mixed: u64,
        pools: StatePools,
        out: u64,
        (sequences, count): (u64, usize),
        (tokens, longest): (usize, usize),
    ) -> Result<()> {
        let shape = &self.shape;
        let (state_bytes, ..) = self.slot_bytes();
        let channels = shape.conv_channels();
        // Window: three positions read, one written a token; mixed and out once.
        let row_bytes = 2 * (self.pitch + shape.value_size() + channels);
        let small_bytes = count as u64 * 6 * channels as u64 + (tokens * row_bytes) as u64;
        let flops = 7 * tokens as u64 * shape.state_elements() as u64;
        let numbers = [
            shape.key_heads as i32,
            shape.value_heads as i32,
            self.pitch as i32,
            self.ring as i32,
            self.eps.to_bits() as i32,
        ];
        let mut args = vec![
            mixed.into(),
            (&weights.taps).into(),
            (&weights.a_log).into(),
            (&weights.dt_bias).into(),
            (&weights.norm).into(),
            pools.state.into(),
            pools.window.into(),
            out.into(),
            sequences.into(),
            Arg::Struct(bytes_of(&numbers)),
        ];
        let heads = shape.value_heads as u32;
        if let Some(deferred) = self.deferred.as_ref().filter(|_| self.most_pending(longest) > 0) {
            let tasks = count * shape.value_heads;
            args.extend([
                Arg::from(pools.pairs),
                Arg::from(deferred.capacity as u32),
                Arg::from(count as u32),
            ]);
            // On average: a state read, its share of a write, half the tokens of an interval read and one written.
            let new_tokens = tokens.div_ceil(count.max(1)).min(deferred.interval);
            let state_bytes = tasks * (128 * 128 * 4 * new_tokens / deferred.interval + 128 * 128 * 4);
            let pair_bytes = tasks * PAIR_BYTES * (deferred.interval + 1 + 2 * new_tokens) / 2;
            let cost = (small_bytes + (state_bytes + pair_bytes) as u64, flops);
            let blocks = tasks.min(deferred.multiprocessors) as u32;
            let (kernel, launch) = if !deferred.drafts && count == 1 {
                (&deferred.one, Launch::new(heads, 512))
            } else if !deferred.drafts && count < deferred.stream_from {
                let grid = [SPLIT * shape.value_heads as u32, count as u32, 1];
                (&deferred.few, Launch::grid(grid, 128).cluster(SPLIT))
            } else {
                args.push((&deferred.drawn).into());
                let (threads, shared) = if deferred.drafts {
                    (DRAFTS_THREADS, DRAFTS_SHARED)
                } else {
                    (STREAM_THREADS, STREAM_SHARED)
                };
                (&deferred.stream, Launch::new(blocks, threads).shared(shared))
            };
            // SAFETY: the kernels' parameters in order; the rest is the caller's promise.
            unsafe { stream.launch(kernel, launch.overlapping().cost(cost.0, cost.1), &args)? };
            // SAFETY: the same pointers.
            return unsafe {
                self.save_long_windows(stream, mixed, pools.window, (sequences, count), longest)
            };
        }
        let bytes = small_bytes + 2 * count as u64 * state_bytes;
        let launch = match self.fast {
            Some(split) => {
                Launch::grid([heads * split, count as u32, 1], 512 / split).cluster(split).overlapping()
            }
            None => {
                args.extend([Arg::from(shape.key_dim as u32), Arg::from(shape.value_dim as u32)]);
                let threads = shape.key_dim.max(shape.value_dim).next_multiple_of(32);
                Launch::grid([heads, count as u32, 1], threads as u32)
                    .shared((4 * (2 * shape.key_dim + shape.value_dim)) as u32)
                    .overlapping()
            }
        };
        // SAFETY: the kernel's parameters in order; the rest is the caller's promise.
        unsafe { stream.launch(&self.step, launch.cost(bytes, flops), &args)? };
        // SAFETY: the same pointers.
        unsafe { self.save_long_windows(stream, mixed, pools.window, (sequences, count), longest) }
    }

    /// Windows that the step's kernel leaves alone, since others still read what it would write over.
    ///
    /// # Safety
    /// As [`Self::step`].
    unsafe fn save_long_windows(
        &self,
        stream: &Stream,
        mixed: u64,
        window: u64,
        sequences: (u64, usize),
        longest: usize,
    ) -> Result<()> {
        if longest <= self.ring - 3 {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { self.save_window(stream, mixed, window, sequences) }
    }

    /// Brings the states of all sequences that have pending tokens up to date, for kernels that read whole states.
    ///
    /// # Errors
    /// A launch that the driver refuses, in its words.
    ///
    /// # Safety
    /// As [`Self::step`].
    pub unsafe fn settle(
        &self,
        stream: &Stream,
        pools: StatePools,
        (sequences, count): (u64, usize),
    ) -> Result<()> {
        let Some(deferred) = &self.deferred else { return Ok(()) };
        let heads = self.shape.value_heads as u32;
        let args = [
            pools.state.into(),
            pools.pairs.into(),
            sequences.into(),
            Arg::from(heads),
            Arg::from(deferred.capacity as u32),
        ];
        let bytes = 2 * count as u64 * self.slot_bytes().0;
        let launch = Launch::grid([heads, count as u32, 1], 128).cost(bytes, 0);
        // SAFETY: the kernel's parameters in order; the rest is the caller's promise.
        unsafe { stream.launch(&deferred.settle, launch, &args) }
    }

    /// Keeps the raw inputs of the last three positions of each sequence whose chunk is longer than the window can take
    /// while others read it.
    ///
    /// # Errors
    /// A launch that the driver refuses, in its words.
    ///
    /// # Safety
    /// As [`Self::step`].
    pub unsafe fn save_window(
        &self,
        stream: &Stream,
        mixed: u64,
        window: u64,
        (sequences, count): (u64, usize),
    ) -> Result<()> {
        let channels = self.shape.conv_channels();
        let args = [
            mixed.into(),
            window.into(),
            sequences.into(),
            (self.pitch as u32).into(),
            (channels as u32).into(),
            (self.ring as u32).into(),
        ];
        let launch = Launch::grid([channels.div_ceil(256) as u32, count as u32, 1], 256)
            .overlapping()
            .cost((12 * channels * count) as u64, 0);
        // SAFETY: the kernel's parameters in order; the rest is the caller's promise.
        unsafe { stream.launch(&self.save_window, launch, &args) }
    }
}
