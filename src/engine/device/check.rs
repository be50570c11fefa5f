//! What every device checks of a step before it touches memory.

use super::{CachePlan, Input, SequenceStep, Step, Want};
use crate::engine::model::spec::ModelSpec;
use crate::{Error, Result};

/// Bounds of one session's steps: the pools of its plan and the model's vocabulary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepBounds {
    /// Positions of the longest sequence, drafts included.
    pub positions: usize,
    block_tokens: usize,
    /// 0: a model without attention.
    kv_blocks: usize,
    /// `None`: a model without recurrent states.
    state_slots: Option<usize>,
    max_drafts: usize,
    vocab_size: usize,
}

impl StepBounds {
    pub fn new(spec: &ModelSpec, plan: &CachePlan) -> Self {
        Self {
            // Drafts may reach past the longest request.
            positions: plan.max_model_len + plan.max_drafts + 1,
            block_tokens: plan.block_tokens,
            kv_blocks: if spec.attention_layers() > 0 { plan.kv_blocks } else { 0 },
            state_slots: spec.delta_net.as_ref().map(|_| plan.state_slots),
            max_drafts: plan.max_drafts,
            vocab_size: spec.vocab_size,
        }
    }

    /// # Errors
    /// [`Error::Invalid`]: a token outside the vocabulary. [`Error::Failed`]: anything else that would read or write outside
    /// the pools, since the caller's bookkeeping is wrong then.
    pub fn check(&self, step: &Step<'_>) -> Result<()> {
        step.sequences.iter().try_for_each(|sequence| self.check_sequence(sequence))
    }

    fn check_sequence(&self, sequence: &SequenceStep<'_>) -> Result<()> {
        let fault = |what: String| Err(Error::bug(format!("request {}: {what}", sequence.request.0)));
        let tokens = sequence.input.tokens() + sequence.drafts.len();
        if sequence.input.tokens() == 0 {
            return fault("a step without a new token".to_string());
        }
        let end = sequence.context_tokens + tokens;
        if end > self.positions {
            return fault(format!("{end} tokens, where the session was opened for {}", self.positions));
        }
        if self.kv_blocks > 0 {
            let covered = sequence.blocks.len() * self.block_tokens;
            if covered < end {
                return fault(format!("blocks cover {covered} tokens of {end}"));
            }
            if let Some(bad) = outside(sequence.blocks, self.kv_blocks) {
                return fault(format!("block {bad} of {}", self.kv_blocks));
            }
        }
        if let Some(slots) = self.state_slots {
            if sequence.state_slot.is_none_or(|slot| slot as usize >= slots) {
                return fault(format!("state slot {:?} of {slots}", sequence.state_slot));
            }
            if sequence.drafts.len() > self.max_drafts {
                return fault(format!("{} drafts of at most {}", sequence.drafts.len(), self.max_drafts));
            }
        }
        match sequence.want {
            Want::Logits { rows } if rows > tokens => {
                return fault(format!("{rows} rows of {tokens} tokens"));
            }
            Want::LogProbOf { targets } if targets.len() != tokens => {
                return fault(format!("{} targets for {tokens} tokens", targets.len()));
            }
            Want::LogProbOf { targets } => self.check_vocabulary(targets)?,
            Want::Nothing | Want::Sample { .. } | Want::Logits { .. } => {}
        }
        if let Input::Known(ids) = sequence.input {
            self.check_vocabulary(ids)?;
        }
        self.check_vocabulary(sequence.drafts)
    }

    fn check_vocabulary(&self, tokens: &[u32]) -> Result<()> {
        let vocab = self.vocab_size;
        outside(tokens, vocab).map_or(Ok(()), |token| {
            Err(Error::invalid(
                format!("token {token} is outside the vocabulary of {vocab}"),
                "check that the tokens come from this model's tokenizer",
            ))
        })
    }
}

/// The largest of `ids` if it is `bound` or more. (Without an early end, so that long lists are compared many at a time.)
fn outside(ids: &[u32], bound: usize) -> Option<u32> {
    ids.iter().copied().max().filter(|&id| id as usize >= bound)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::config::{CacheDtype, KvLayout, LastLayer};
    use crate::engine::model::synthetic_layout;
    use crate::engine::request::RequestId;

    #[test]
    fn steps_that_would_leave_the_pools_are_refused() {
        let plan = CachePlan {
            layout: KvLayout::Split,
            block_tokens: 16,
            kv_blocks: 8,
            state_slots: 2,
            kv_dtype: CacheDtype::F16,
            state_dtype: CacheDtype::F32,
            state_write_interval: 1,
            last_layer: LastLayer::All,
            max_model_len: 64,
            max_num_seqs: 2,
            max_num_batched_tokens: 64,
            max_drafts: 2,
        };
        let spec = synthetic_layout("demo").unwrap().spec;
        let bounds = StepBounds::new(&spec, &plan);
        let vocab = spec.vocab_size as u32;
        let good = SequenceStep {
            request: RequestId(7),
            state_slot: Some(1),
            blocks: &[7, 0],
            context_tokens: 16,
            input: Input::Known(&[1, vocab - 1]),
            drafts: &[3],
            want: Want::Logits { rows: 3 },
        };
        let check =
            |sequence: SequenceStep<'_>| bounds.check(&Step { sequences: vec![sequence], trace: false });
        assert!(check(good.clone()).is_ok());
        let bad = [
            (SequenceStep { blocks: &[8, 0], ..good.clone() }, "block 8 of 8"),
            (SequenceStep { blocks: &[7], ..good.clone() }, "blocks cover 16 tokens of 19"),
            (SequenceStep { context_tokens: 65, blocks: &[0; 5], ..good.clone() }, "opened for 67"),
            (SequenceStep { state_slot: Some(2), ..good.clone() }, "state slot Some(2) of 2"),
            (SequenceStep { state_slot: None, ..good.clone() }, "state slot None of 2"),
            (SequenceStep { drafts: &[1, 2, 3], ..good.clone() }, "3 drafts of at most 2"),
            (SequenceStep { want: Want::Logits { rows: 4 }, ..good.clone() }, "4 rows of 3 tokens"),
            (SequenceStep { want: Want::LogProbOf { targets: &[1, 2] }, ..good.clone() }, "2 targets for 3"),
            (
                SequenceStep { want: Want::LogProbOf { targets: &[1, 2, vocab] }, ..good.clone() },
                "vocabulary",
            ),
            (SequenceStep { input: Input::Known(&[1, vocab]), ..good.clone() }, "vocabulary"),
            (SequenceStep { drafts: &[vocab], ..good.clone() }, "vocabulary"),
            (SequenceStep { input: Input::Known(&[]), ..good.clone() }, "without a new token"),
        ];
        for (sequence, expected) in bad {
            let error = check(sequence).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}: expected {expected}");
        }
    }
}
