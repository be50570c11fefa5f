//! Logits and log-probabilities of given tokens: one sequence alone on the device, in the chunks the configuration
//! asks for. This is how parity with other implementations and perplexity are measured.

use super::Engine;
use super::cache::Holding;
use super::device::{Input, SequenceOutput, SequenceStep, Step, Want};
use super::request::RequestId;
use crate::{Error, Result};

impl Engine {
    /// The logits after each of the last `last` tokens, one row of vocabulary length each.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the tokens are empty, too long for the cache or outside the vocabulary, when the engine
    /// is not idle, or when logits are not finite.
    pub fn logits(&mut self, tokens: &[u32], last: usize) -> Result<Vec<Vec<f32>>> {
        let last = last.min(tokens.len());
        let first_row = tokens.len() - last;
        let mut rows = Vec::with_capacity(last);
        self.prefill(
            tokens,
            |start, end| match end.saturating_sub(first_row.max(start)) {
                0 => Want::Nothing,
                rows => Want::Logits { rows },
            },
            |output| rows.extend(output.logits),
        )?;
        Ok(rows)
    }

    /// ln p(tokens[i + 1] | tokens[..= i]) for each i: one value fewer than tokens.
    ///
    /// # Errors
    /// As [`Engine::logits`].
    pub fn logprobs(&mut self, tokens: &[u32]) -> Result<Vec<f32>> {
        let Some((_, context)) = tokens.split_last() else {
            return Err(no_tokens());
        };
        self.check_tokens(tokens)?;
        let mut values = Vec::with_capacity(context.len());
        if !context.is_empty() {
            self.prefill(
                context,
                |start, end| Want::LogProbOf { targets: &tokens[start + 1..end + 1] },
                |output| values.extend(output.logprobs),
            )?;
        }
        Ok(values)
    }

    /// Runs `tokens` through the model from an empty state, a chunk a step; `want` is given each chunk's range.
    fn prefill<'a>(
        &mut self,
        tokens: &'a [u32],
        want: impl Fn(usize, usize) -> Want<'a>,
        mut take: impl FnMut(SequenceOutput),
    ) -> Result<()> {
        if tokens.is_empty() {
            return Err(no_tokens());
        }
        self.check_tokens(tokens)?;
        if tokens.len() > self.plan.max_model_len {
            return Err(Error::invalid(
                format!("{} tokens are more than max_model_len = {}", tokens.len(), self.plan.max_model_len),
                format!("set max_model_len={} or more", tokens.len()),
            ));
        }
        if !self.is_idle() {
            return Err(Error::invalid(
                "logits were asked for while requests run",
                "wait until every request has finished",
            ));
        }
        let mut holding = Holding::default();
        let admitted = self.scheduler.cache_mut().admit(&mut holding, &[], None, |_| Some(tokens.len()));
        let result = match admitted {
            Ok(_) => self.run_chunks(tokens, &holding, want, &mut take),
            Err(_) => Err(Error::invalid(
                format!("{} tokens do not fit the cache of {} blocks", tokens.len(), self.plan.kv_blocks),
                "raise kv_blocks or give fewer tokens",
            )),
        };
        self.scheduler.cache_mut().release(&mut holding);
        result
    }

    fn run_chunks<'a>(
        &mut self,
        tokens: &'a [u32],
        holding: &Holding,
        want: impl Fn(usize, usize) -> Want<'a>,
        take: &mut impl FnMut(SequenceOutput),
    ) -> Result<()> {
        let request = RequestId(self.next_request);
        self.next_request += 1;
        let chunk = self.plan.max_num_batched_tokens;
        for start in (0..tokens.len()).step_by(chunk) {
            let end = tokens.len().min(start + chunk);
            let sequence = SequenceStep {
                request,
                state_slot: holding.slot,
                blocks: &holding.blocks,
                context_tokens: start,
                input: Input::Known(&tokens[start..end]),
                drafts: &[],
                want: want(start, end),
            };
            let ticket = self.session.submit(&Step { sequences: vec![sequence], trace: false })?;
            self.session.wait(ticket)?.sequences.into_iter().for_each(&mut *take);
        }
        Ok(())
    }
}

fn no_tokens() -> Error {
    Error::invalid("no tokens were given", "give at least one token id")
}
