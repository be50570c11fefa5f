//! Tokens from logits, and log probabilities of given ones (cuda/sample.cu).

use crate::Result;
use crate::engine::device::cuda::driver::{DeviceBuffer, Gpu, Kernel};
use crate::engine::device::cuda::launch::{Launch, Stream};
use crate::engine::device::cuda::matrix::Output;
use crate::engine::device::cuda::units;
use crate::engine::request::SamplingParams;

/// What a sampled row holds in place of a token when a logit was not finite.
pub const NOT_FINITE: u32 = u32::MAX;

/// How a row's token is picked, as the kernels read it.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C)]
pub struct SampleRow {
    /// 0: greedy.
    pub inverse_temperature: f32,
    pub top_p: f32,
    pub top_k: u32,
    pub unused: u32,
    pub seed: u64,
    pub position: u64,
}

impl SampleRow {
    pub fn new(params: &SamplingParams, seed: u64, position: u64) -> Self {
        let greedy = params.temperature <= 0.0;
        Self {
            inverse_temperature: if greedy { 0.0 } else { 1.0 / params.temperature },
            top_p: params.top_p,
            top_k: params.top_k.min(u32::MAX as usize) as u32,
            unused: 0,
            seed,
            position,
        }
    }

    pub fn greedy() -> Self {
        Self::new(&SamplingParams::default(), 0, 0)
    }
}

/// Logits on the device: fp32 [rows, pitch].
#[derive(Debug, Clone, Copy)]
pub struct Logits {
    pub at: u64,
    pub pitch: usize,
    /// Rows of the vocabulary that hold a token.
    pub vocab: usize,
}

/// Where sampled tokens go: device ring and page-locked host memory, both offset by the header's word.
#[derive(Debug, Clone, Copy)]
pub struct Sink {
    pub header: u64,
    pub ring: u64,
    pub host: u64,
}

pub struct Samplers {
    greedy: Kernel,
    from_keys: Kernel,
    rows: Kernel,
    log_probability: Kernel,
    keys: DeviceBuffer,
    counters: DeviceBuffer,
    multiprocessors: usize,
}

impl Samplers {
    /// The kernels, for steps of up to `max_rows` sampled rows.
    ///
    /// # Errors
    /// A kernel that does not compile or load; no memory.
    pub fn new(gpu: &Gpu, max_rows: usize) -> Result<Self> {
        Ok(Self {
            greedy: gpu.kernel(&units::SAMPLE, "sample_greedy")?,
            from_keys: gpu.kernel(&units::SAMPLE, "sample_keys")?,
            rows: gpu.kernel(&units::SAMPLE, "sample_rows")?,
            log_probability: gpu.kernel(&units::SAMPLE, "log_probability")?,
            keys: gpu.allocate_zeroed(8 * max_rows as u64)?,
            counters: gpu.allocate_zeroed(4 * max_rows as u64)?,
            multiprocessors: gpu.facts().multiprocessors as usize,
        })
    }

    /// The largest logit of each row.
    ///
    /// # Errors
    /// A launch that the driver refuses, in its words.
    ///
    /// # Safety
    /// Pointers are valid for `rows` rows, at most the `max_rows` this was made with.
    pub unsafe fn greedy(&self, stream: &Stream, rows: usize, logits: Logits, sink: Sink) -> Result<()> {
        let parts = (8 * self.multiprocessors).div_ceil(rows).clamp(1, 64) as u32;
        let args = [
            logits.at.into(),
            (logits.pitch as u64).into(),
            (logits.vocab as u32).into(),
            (&self.keys).into(),
            (&self.counters).into(),
            sink.header.into(),
            sink.ring.into(),
            sink.host.into(),
        ];
        let launch = Launch::grid([parts, rows as u32, 1], 256)
            .overlapping()
            .cost(4 * (rows * logits.vocab) as u64, 0);
        // SAFETY: the kernel's parameters in order; the rest is the caller's promise.
        unsafe { stream.launch(&self.greedy, launch, &args) }
    }

    /// Where the head's product leaves the largest logit of each row, for [`Self::greedy_from_keys`].
    pub fn best(&self, vocab: usize) -> Output {
        Output::Best { keys: self.keys.pointer(), vocab }
    }

    /// The largest logit of each row, from what a product with the output [`Self::best`] found.
    ///
    /// # Errors
    /// A launch that the driver refuses, in its words.
    ///
    /// # Safety
    /// As [`Self::greedy`].
    pub unsafe fn greedy_from_keys(&self, stream: &Stream, rows: usize, sink: Sink) -> Result<()> {
        let args = [
            (&self.keys).into(),
            (rows as u32).into(),
            sink.header.into(),
            sink.ring.into(),
            sink.host.into(),
        ];
        let launch = Launch::new(rows.div_ceil(256) as u32, 256).overlapping().cost(16 * rows as u64, 0);
        // SAFETY: the kernel's parameters in order; the rest is the caller's promise.
        unsafe { stream.launch(&self.from_keys, launch, &args) }
    }

    /// A token for each row as its [`SampleRow`] says (`samples`: their device address).
    ///
    /// # Errors
    /// A launch that the driver refuses, in its words.
    ///
    /// # Safety
    /// Pointers are valid for `rows` rows.
    pub unsafe fn sample(
        &self,
        stream: &Stream,
        rows: usize,
        logits: Logits,
        samples: u64,
        sink: Sink,
    ) -> Result<()> {
        let args = [
            logits.at.into(),
            (logits.pitch as u64).into(),
            (logits.vocab as u32).into(),
            samples.into(),
            sink.header.into(),
            sink.ring.into(),
            sink.host.into(),
        ];
        let launch = Launch::new(rows as u32, 1024).overlapping().cost(4 * (rows * logits.vocab) as u64, 0);
        // SAFETY: the kernel's parameters in order; the rest is the caller's promise.
        unsafe { stream.launch(&self.rows, launch, &args) }
    }

    /// ln `p(targets[row])` of each row, fp32 to `result`, over the whole vocabulary (`logits.vocab` of it).
    ///
    /// # Errors
    /// A launch that the driver refuses, in its words.
    ///
    /// # Safety
    /// Pointers are valid for `rows` rows, and targets are below `logits.vocab`.
    pub unsafe fn log_probability(
        &self,
        stream: &Stream,
        rows: usize,
        logits: Logits,
        targets: u64,
        result: u64,
    ) -> Result<()> {
        let args = [
            logits.at.into(),
            (logits.pitch as u64).into(),
            (logits.vocab as u32).into(),
            targets.into(),
            result.into(),
        ];
        let launch = Launch::new(rows as u32, 1024).overlapping().cost(4 * (rows * logits.vocab) as u64, 0);
        // SAFETY: the kernel's parameters in order; the rest is the caller's promise.
        unsafe { stream.launch(&self.log_probability, launch, &args) }
    }
}
