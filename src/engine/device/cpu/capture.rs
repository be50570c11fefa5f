//! Activations for a calibration: rows of what goes into the linear modules, kept while text runs through the model.

use super::CpuDevice;
use super::gemm::Packed;
use super::model::CpuModel;
use super::session::CpuSession;
use crate::engine::clock::Clock;
use crate::engine::config::{CacheDtype, CpuMath, KvLayout, LastLayer};
use crate::engine::device::{CachePlan, Input, LoadOptions, SequenceStep, Session, Step, Want};
use crate::engine::model::layout::ModelLayout;
use crate::engine::model::quantize::inputs::{Inputs, Point};
use crate::engine::model::weights::WeightSource;
use crate::engine::request::RequestId;
use crate::{Error, Result};

const BLOCK_TOKENS: usize = 16;

/// Keeps one row in `every` of a step.
pub struct Capture {
    every: usize,
    inputs: Inputs,
}

impl Capture {
    pub fn take(&mut self, layer: usize, point: Point, packed: &Packed) {
        let kept = self.inputs.rows_mut(layer, point);
        kept.cols = packed.cols;
        for row in (0..packed.tiling.rows).step_by(self.every) {
            packed.read_row(row, &mut kept.values);
        }
    }
}

impl CpuDevice {
    /// Runs each of `windows` through the model from an empty state, in f32 arithmetic, and keeps one row in `every` of
    /// what goes into the linear modules. `progress` is told (tokens done, tokens in all).
    ///
    /// # Errors
    /// As loading a model and running steps; windows of no tokens.
    pub fn capture_inputs(
        &mut self,
        layout: &ModelLayout,
        source: &WeightSource,
        windows: &[&[u32]],
        every: usize,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Inputs> {
        let longest = windows.iter().map(|window| window.len()).max().unwrap_or(0);
        if longest == 0 || windows.iter().any(|window| window.is_empty()) || every == 0 {
            return Err(Error::invalid("no tokens to calibrate with", "give a longer text"));
        }
        let options = LoadOptions { cpu_math: CpuMath::F32, threads: None };
        let model = CpuModel::load(&self.pool, self.threads, layout, source, &options, &mut |_| {})?;
        let plan = CachePlan {
            layout: KvLayout::Split,
            block_tokens: BLOCK_TOKENS,
            kv_blocks: longest.div_ceil(BLOCK_TOKENS),
            state_slots: usize::from(layout.spec.is_hybrid()),
            kv_dtype: CacheDtype::F32,
            state_dtype: CacheDtype::F32,
            max_model_len: longest,
            max_num_seqs: 1,
            max_num_batched_tokens: longest,
            max_drafts: 0,
            state_write_interval: 1,
            last_layer: LastLayer::All,
        };
        let mut session = CpuSession::open(model.weights(), &self.pool, &plan, &Clock::real())?;
        session.capture = Some(Capture { every, inputs: Inputs::new(layout.spec.layers.len()) });
        let blocks: Vec<u32> = (0..plan.kv_blocks as u32).collect();
        let total: usize = windows.iter().map(|window| window.len()).sum();
        let mut done = 0;
        for (index, window) in windows.iter().enumerate() {
            let sequence = SequenceStep {
                request: RequestId(index as u64),
                state_slot: layout.spec.is_hybrid().then_some(0),
                blocks: &blocks[..window.len().div_ceil(BLOCK_TOKENS)],
                context_tokens: 0,
                input: Input::Known(window),
                drafts: &[],
                want: Want::Nothing,
            };
            let ticket = session.submit(&Step { sequences: vec![sequence], trace: false })?;
            session.wait(ticket)?;
            done += window.len();
            progress(done as u64, total as u64);
        }
        Ok(session.capture.map(|capture| capture.inputs).unwrap_or_default())
    }
}
