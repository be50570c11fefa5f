//! The end of a step: the last norm and the head for the rows that are wanted, and what is made of their logits.

use super::{Forward, OnLogits, StepView};
use crate::engine::device::cuda::kernels::norm::Addend;
use crate::engine::device::cuda::kernels::sample::{Logits, Sink};
use crate::engine::device::cuda::launch::Stream;
use crate::engine::device::cuda::matrix::Output;
use crate::{Error, Result};

impl Forward {
    /// The last sum and norm for the rows that are wanted, the head, and what is made of its logits.
    ///
    /// # Safety
    /// As [`Self::run`].
    pub(super) unsafe fn outputs(
        &self,
        stream: &Stream,
        view: &StepView,
        residual: u64,
        addend: Addend,
        on_logits: &mut OnLogits,
    ) -> Result<()> {
        let (batch, buffers) = (view.batch, &self.buffers);
        let sampled = batch.samples.len();
        if sampled > self.limits.outputs {
            return Err(Error::bug(format!(
                "a step of {sampled} sampled rows, and buffers for {}",
                self.limits.outputs
            )));
        }
        let sink = Sink { header: view.at(view.offsets.header), ring: view.ring, host: view.host };
        let logits = Logits {
            at: buffers.logits.pointer(),
            pitch: self.spec.vocab_size,
            vocab: self.spec.real_vocab_size,
        };
        let to_logits = Output::Float { to: logits.at, stride: logits.pitch };
        if sampled > 0 {
            // SAFETY: as `run`, with room for `limits.outputs` rows.
            unsafe {
                let by_keys = !batch.draws && self.linear.finds_best(sampled, self.weights.head());
                let output = if by_keys { self.samplers.best(logits.vocab) } else { to_logits };
                self.head(stream, view, (residual, addend), 0, sampled, output)?;
                stream.set_role("sample");
                if by_keys {
                    self.samplers.greedy_from_keys(stream, sampled, sink)?;
                } else if batch.draws {
                    self.samplers.sample(stream, sampled, logits, view.at(view.offsets.samples), sink)?;
                } else {
                    self.samplers.greedy(stream, sampled, logits, sink)?;
                }
            }
        }
        let mut first = sampled;
        // Logits and log probabilities are not mixed in a piece, so that a callback sees one kind.
        let kinds = [sampled + batch.logit_rows, batch.select.len()];
        for end in kinds {
            while first < end {
                let count = (end - first).min(self.limits.outputs);
                // SAFETY: as `run`, with room for `limits.outputs` rows.
                unsafe { self.head(stream, view, (residual, addend), first, count, to_logits)? };
                stream.set_role("sample");
                on_logits(stream, first, count, buffers.logits.pointer())?;
                first += count;
            }
        }
        Ok(())
    }

    /// The head's product of output rows `first..first + count`.
    ///
    /// # Safety
    /// As [`Self::run`]; `count` is at most `limits.outputs`, and `output` takes as many rows.
    unsafe fn head(
        &self,
        stream: &Stream,
        view: &StepView,
        (residual, addend): (u64, Addend),
        first: usize,
        count: usize,
        output: Output,
    ) -> Result<()> {
        let (buffers, weights) = (&self.buffers, &self.weights);
        let select = view.at(view.offsets.select + 4 * first);
        let normed = buffers.normed.pointer();
        // SAFETY: `select` names rows of the batch; `normed` and `logits` hold `limits.outputs` rows.
        unsafe {
            stream.set_role("norm");
            self.norms.add(
                stream,
                count,
                residual,
                addend,
                weights.final_norm.pointer(),
                Some(select),
                normed,
            )?;
            stream.set_role("head");
            self.linear.launch(stream, normed, count, weights.head(), output)?;
        }
        Ok(())
    }
}
