//! The gated delta net, token by token (cuda/delta.cu).

use crate::engine::config::CacheDtype;
use crate::engine::device::cuda::driver::{Gpu, Kernel};
use crate::engine::device::cuda::launch::{Arg, Launch, Stream, bytes_of};
use crate::engine::device::cuda::units;
use crate::engine::device::cuda::weights::DeltaWeights;
use crate::engine::model::spec::DeltaNet;
use crate::{Error, Result};

/// Blocks that share a head of 128 x 128 on Hopper and later, as a cluster.
const SPLIT: u32 = 4;
/// Shared memory of `delta_stream`: three states.
const STREAM_SHARED: u32 = 3 * 128 * 128 * 4;
/// (sequence, head) pairs for each multiprocessor from which streaming the states wins.
const STREAM_TASKS: usize = 2;

/// A sequence's part of a step, as the kernels read it. `slot` below 0 marks padding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct DeltaSequence {
    pub slot: i32,
    pub context: i32,
    pub start: i32,
    pub count: i32,
}

#[derive(Debug, Clone)]
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
    /// For many sequences with one token each, where there is shared memory for it; and the multiprocessors.
    stream: Option<(Kernel, usize)>,
}

impl Delta {
    /// # Errors
    /// A shape or a state type the kernels are not made for.
    pub fn new(
        gpu: &Gpu,
        shape: &DeltaNet,
        state: CacheDtype,
        eps: f32,
        pitch: usize,
        ring: usize,
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
            (CacheDtype::Auto, ..) => return Err(Error::failed("state_dtype is not resolved", "")),
        };
        let room = gpu.facts().shared_bytes >= STREAM_SHARED + 8192;
        let stream = if split && state == CacheDtype::F32 && room {
            let kernel = gpu.kernel(&units::DELTA_STREAM, "delta_stream")?;
            Some((kernel, gpu.facts().multiprocessors as usize))
        } else {
            None
        };
        Ok(Self {
            stream,
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

    /// Bytes a slot takes in one layer's state pool, and in its window pool.
    pub fn slot_bytes(&self) -> (u64, u64) {
        let window = self.ring * self.shape.conv_channels() * 2;
        ((self.shape.state_elements() * self.state_bytes) as u64, window as u64)
    }

    /// Runs `sequences` sequences (device address of [`DeltaSequence`]s) with `tokens` new tokens in all, `longest` at most
    /// in one: mixed to `out`, both from their first row on, state and window of this layer updated.
    ///
    /// # Safety
    /// Pointers are valid for the rows and slots that the sequences name, and no slot is named twice.
    #[expect(clippy::too_many_arguments, reason = "the operands of one kernel")]
    pub unsafe fn step(
        &self,
        stream: &Stream,
        weights: &DeltaWeights,
        mixed: u64,
        state: u64,
        window: u64,
        out: u64,
        (sequences, count): (u64, usize),
        (tokens, longest): (usize, usize),
    ) -> Result<()> {
        let shape = &self.shape;
        let (state_bytes, _) = self.slot_bytes();
        let channels = shape.conv_channels();
        // Window: three positions read, one written a token; mixed and out once.
        let row_bytes = 2 * (self.pitch + shape.value_size() + channels);
        let bytes = count as u64 * (2 * state_bytes + 6 * channels as u64) + (tokens * row_bytes) as u64;
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
            state.into(),
            window.into(),
            out.into(),
            sequences.into(),
            Arg::Struct(bytes_of(&numbers)),
        ];
        let heads = shape.value_heads as u32;
        if let Some((kernel, multiprocessors)) = &self.stream {
            let tasks = count * shape.value_heads;
            if longest == 1 && tasks >= STREAM_TASKS * multiprocessors {
                args.push((count as u32).into());
                let launch = Launch::new(tasks.min(*multiprocessors) as u32, 512).shared(STREAM_SHARED);
                // SAFETY: the kernel's parameters in order; the rest is the caller's promise.
                return unsafe { stream.launch(kernel, launch.overlapping().cost(bytes, flops), &args) };
            }
        }
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
        if longest > self.ring - 3 {
            // SAFETY: the same pointers.
            unsafe { self.save_window(stream, mixed, window, (sequences, count))? };
        }
        Ok(())
    }

    /// Keeps the raw inputs of the last three positions of each sequence whose chunk is longer than the window can take
    /// while others read it.
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
