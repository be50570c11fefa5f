//! A session of the CPU device over a golden checkpoint, and the answers that came with it.
#![allow(dead_code)]

use std::path::{Path, PathBuf};

use inferwall::engine::clock::Clock;
use inferwall::engine::config::{CacheDtype, CpuMath, CudaKernels, EngineConfig, KvLayout, LastLayer};
use inferwall::engine::device::cpu::CpuDevice;
use inferwall::engine::device::{
    CachePlan, Device, Input, LoadOptions, Model, SequenceStep, Session, Step, StepOutput, Want,
};
use inferwall::engine::model::{ModelRef, OpenOptions, open};
use inferwall::engine::request::{RequestId, SamplingParams};

pub const GREEDY: SamplingParams = SamplingParams { temperature: 0.0, top_k: 0, top_p: 1.0 };
pub const SLOTS: usize = 12;

pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

pub struct Rig {
    pub session: Box<dyn Session>,
    pub model: Box<dyn Model>,
    block_tokens: usize,
    blocks_per_slot: usize,
}

/// What a rig's pools and arithmetic are like.
#[derive(Clone, Copy)]
pub struct Options {
    pub threads: usize,
    pub block_tokens: usize,
    pub math: CpuMath,
    pub kv_dtype: CacheDtype,
    pub state_dtype: CacheDtype,
    pub state_write_interval: usize,
    /// Of a device that has it.
    pub last_layer: LastLayer,
    pub max_drafts: usize,
    pub cuda_kernels: CudaKernels,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            threads: 2,
            block_tokens: 16,
            math: CpuMath::F32,
            kv_dtype: CacheDtype::F32,
            state_dtype: CacheDtype::F32,
            state_write_interval: 1,
            last_layer: LastLayer::All,
            max_drafts: 6,
            cuda_kernels: CudaKernels::Auto,
        }
    }
}

/// A sequence's part of a step, by slot.
#[derive(Clone, Copy)]
pub struct Part<'a> {
    pub slot: usize,
    pub context: usize,
    pub tokens: &'a [u32],
    pub drafts: &'a [u32],
    pub want: Want<'a>,
}

impl<'a> Part<'a> {
    pub fn new(slot: usize, context: usize, tokens: &'a [u32], want: Want<'a>) -> Self {
        Self { slot, context, tokens, drafts: &[], want }
    }

    pub fn logits(slot: usize, context: usize, tokens: &'a [u32]) -> Self {
        Self::new(slot, context, tokens, Want::Logits { rows: tokens.len() })
    }
}

impl Rig {
    pub fn open(folder: &Path, options: Options) -> Self {
        let opened = open(&ModelRef::Folder(folder.to_path_buf()), &OpenOptions::default()).unwrap();
        let mut device = CpuDevice::new(Some(options.threads)).unwrap();
        let load = LoadOptions { cpu_math: options.math, threads: None };
        let model = device.load(&opened.layout, &opened.weights, &load, &mut |_| {}).unwrap();
        Self::of_model(model, options)
    }

    pub fn of_model(model: Box<dyn Model>, options: Options) -> Self {
        let blocks_per_slot = 256usize.div_ceil(options.block_tokens);
        let plan = CachePlan {
            layout: KvLayout::Split,
            block_tokens: options.block_tokens,
            kv_blocks: blocks_per_slot * SLOTS,
            state_slots: if model.layout().spec.is_hybrid() { SLOTS } else { 0 },
            kv_dtype: options.kv_dtype,
            state_dtype: options.state_dtype,
            state_write_interval: options.state_write_interval,
            last_layer: options.last_layer,
            max_model_len: 256,
            max_num_seqs: SLOTS,
            max_num_batched_tokens: 1024,
            max_drafts: options.max_drafts,
        };
        let config = EngineConfig { cuda_kernels: options.cuda_kernels, ..EngineConfig::default() };
        let session = model.open(&plan, &config, &Clock::real()).unwrap();
        Self { session, model, block_tokens: options.block_tokens, blocks_per_slot }
    }

    /// A slot's blocks, scattered over the pool.
    pub fn blocks(&self, slot: usize) -> Vec<u32> {
        (0..self.blocks_per_slot)
            .map(|i| ((i * 7 + 3) % self.blocks_per_slot * SLOTS + slot) as u32)
            .collect()
    }

    pub fn try_run(&mut self, parts: &[Part<'_>]) -> inferwall::Result<StepOutput> {
        let blocks: Vec<Vec<u32>> = parts.iter().map(|part| self.blocks(part.slot)).collect();
        let hybrid = self.model.layout().spec.is_hybrid();
        let sequences = parts
            .iter()
            .zip(&blocks)
            .map(|(part, blocks)| {
                let end = part.context + part.tokens.len() + part.drafts.len();
                SequenceStep {
                    request: RequestId(part.slot as u64),
                    state_slot: hybrid.then_some(part.slot as u32),
                    blocks: &blocks[..end.div_ceil(self.block_tokens)],
                    context_tokens: part.context,
                    input: Input::Known(part.tokens),
                    drafts: part.drafts,
                    want: part.want,
                }
            })
            .collect();
        let ticket = self.session.submit(&Step { sequences, trace: false })?;
        self.session.wait(ticket)
    }

    pub fn run(&mut self, parts: &[Part<'_>]) -> StepOutput {
        self.try_run(parts).unwrap()
    }

    /// Logits of a whole sequence cut into pieces of these lengths (the last one as often as needed).
    pub fn logits(&mut self, slot: usize, tokens: &[u32], pieces: &[usize]) -> Vec<Vec<f32>> {
        let mut rows = Vec::new();
        let mut pieces = pieces.iter().copied().chain(std::iter::repeat(*pieces.last().unwrap()));
        while rows.len() < tokens.len() {
            let end = (rows.len() + pieces.next().unwrap()).min(tokens.len());
            let start = rows.len();
            let output = self.run(&[Part::logits(slot, start, &tokens[start..end])]);
            rows.extend(output.sequences.into_iter().next().unwrap().logits);
        }
        rows
    }
}

/// A golden folder's answers.
pub struct Golden {
    pub name: String,
    pub json: serde_json::Value,
    pub ids: Vec<u32>,
    /// Row 0 is the logits after token `first`.
    pub logits: Vec<Vec<f32>>,
    pub first: usize,
    pub greedy: Vec<u32>,
    pub greedy_logits: Vec<Vec<f32>>,
}

pub fn ids(value: &serde_json::Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

pub fn tensor(folder: &Path, name: &str) -> Vec<Vec<f32>> {
    let bytes = std::fs::read(folder.join("expected.safetensors")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let view = tensors.tensor(name).unwrap();
    let values: Vec<f32> =
        view.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    values.chunks_exact(view.shape()[1]).map(<[f32]>::to_vec).collect()
}

impl Golden {
    pub fn read(folder: &Path) -> Self {
        let text = std::fs::read_to_string(folder.join("expected.json")).unwrap();
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        let (name, prompt) = json["prompts"].as_object().unwrap().iter().next().unwrap();
        Self {
            name: name.clone(),
            ids: ids(&prompt["ids"]),
            logits: tensor(folder, &format!("{name}.logits")),
            first: prompt["logits_first_position"].as_u64().unwrap() as usize,
            greedy: ids(&prompt["greedy"]["ids"]),
            greedy_logits: tensor(folder, &format!("{name}.greedy_logits")),
            json: prompt.clone(),
        }
    }
}

/// (largest absolute error, rms error over rms logit)
pub fn errors(found: &[Vec<f32>], right: &[Vec<f32>]) -> (f64, f64) {
    assert_eq!(found.len(), right.len());
    let (mut worst, mut error, mut size) = (0f64, 0f64, 0f64);
    for (found, right) in found.iter().flatten().zip(right.iter().flatten()) {
        let difference = f64::from(*found) - f64::from(*right);
        // A NaN must not hide in a maximum.
        worst = if difference.is_nan() { f64::INFINITY } else { worst.max(difference.abs()) };
        error += difference * difference;
        size += f64::from(*right).powi(2);
    }
    (worst, (error / size).sqrt())
}

/// The limits for f32: max abs 1e-3 and rms rel 5e-5.
pub fn assert_close(what: &str, found: &[Vec<f32>], right: &[Vec<f32>]) {
    let (worst, relative) = errors(found, right);
    assert!(worst < 1e-3 && relative < 5e-5, "{what}: max abs {worst:.2e}, rms rel {relative:.2e}");
}

pub fn assert_same_bits(what: &str, found: &[Vec<f32>], right: &[Vec<f32>]) {
    assert_eq!(found.len(), right.len(), "{what}");
    for (row, (found, right)) in found.iter().zip(right).enumerate() {
        let differs = found.iter().zip(right).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
        assert_eq!(differs, 0, "{what}: row {row} differs in {differs} of {} logits", found.len());
    }
}
