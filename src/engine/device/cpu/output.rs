//! The end of a step: final norm and head for the rows whose logits are wanted, then sampling, logits or probabilities.
//!
//! Rows go through the head a block at a time, so that the logits of a long prompt never all exist at once. The head's
//! product also leaves the largest logit of each panel of 32, so that a greedy pick reads 1/32 of a row.

use std::sync::Mutex;
use std::sync::atomic::Ordering;

use super::batch::{OwnedWant, Sequence};
use super::forward::{Forward, Upcoming};
use super::gemm::{MAX_TILE, Product, TileSpace, for_each_tile};
use super::matrix::PANEL;
use super::memory::{Scratch, Shared};
use super::pool::Ahead;
use crate::engine::device::SequenceOutput;
use crate::engine::sampling::{self, Sampler};
use crate::{Error, Result};

/// Rows through the head at once.
const BLOCK_ROWS: usize = 4 * MAX_TILE;

#[derive(Default)]
pub struct HeadBuffers {
    logits: Scratch<f32>,
    /// Largest logit of each row's panels, NaN where one is not finite.
    panels: Scratch<f32>,
    samplers: Vec<Sampler>,
}

/// What one wanted row gives.
enum RowOutput {
    Token(u32),
    Logits(Vec<f32>),
    LogProb(f32),
}

pub struct Head<'a, 'b> {
    forward: &'a mut Forward<'b>,
    buffers: &'a mut HeadBuffers,
}

impl<'a, 'b> Head<'a, 'b> {
    pub fn new(forward: &'a mut Forward<'b>, buffers: &'a mut HeadBuffers) -> Self {
        Self { forward, buffers }
    }

    pub fn run(mut self) -> Result<Vec<SequenceOutput>> {
        let batch = self.forward.batch;
        self.check_finite()?;
        // (sequence, token within it) of each wanted row.
        let wanted: Vec<(usize, usize)> = batch
            .sequences
            .iter()
            .enumerate()
            .flat_map(|(which, sequence)| sequence.wanted().map(move |token| (which, token)))
            .collect();
        let mut rows = Vec::with_capacity(wanted.len());
        for block in wanted.chunks(BLOCK_ROWS) {
            self.block(block, &mut rows)?;
        }
        self.check_finite()?;
        let mut rows = rows.into_iter();
        Ok(batch.sequences.iter().map(|sequence| collect(sequence, &mut rows)).collect())
    }

    /// # Errors
    /// A row of the residual stream that was not finite at some layer.
    fn check_finite(&self) -> Result<()> {
        let found = self.forward.not_finite.load(Ordering::Relaxed);
        if found == u64::MAX {
            return Ok(());
        }
        let (layer, row) = ((found >> 32) as usize, (found & 0xffff_ffff) as usize);
        let sequence = self.forward.batch.sequences.iter().rev().find(|sequence| sequence.first_row <= row);
        let (request, position) = sequence.map_or((0, row), |s| (s.request.0, s.context + row - s.first_row));
        let layers = self.forward.weights.layers.len();
        let place = if layer < layers {
            format!("going into layer {layer} of {layers}")
        } else {
            "after the last layer".to_string()
        };
        Err(Error::invalid(
            format!(
                "request {request}, token {position}: the activations {place} are not finite, \
                 so its logits would be non-finite (NaN or infinity)"
            ),
            "the weights hold NaN or infinity, or overflow: check the checkpoint, or try cpu_math=f32",
        ))
    }

    fn block(&mut self, block: &[(usize, usize)], out: &mut Vec<RowOutput>) -> Result<()> {
        let forward = &mut *self.forward;
        let weights = forward.weights;
        let batch = forward.batch;
        let rows: Vec<usize> =
            block.iter().map(|&(which, token)| batch.sequences[which].first_row + token).collect();
        let head = weights.head();
        let math = weights.arithmetic([head]);
        let packed = forward.norm(weights.layers.len(), &weights.final_norm, Some(&rows), math)?;
        let started = forward.trace.start();
        let (vocab, panels) = (head.rows, head.panels());
        let real = weights.spec().real_vocab_size.min(vocab);
        self.buffers.logits.reserve(rows.len() * vocab)?;
        self.buffers.panels.reserve(rows.len() * panels)?;
        let (logits, largest) = (self.buffers.logits.ptr(), self.buffers.panels.ptr());
        let product =
            Product::new(weights.isa, head, packed, &forward.grouped(&packed, std::iter::once(head))?);
        let threads = forward.pool.threads();
        // The next step starts with the first layer.
        let ahead = |thread: usize| {
            let first = weights.layers.first().map(Upcoming::of_layer);
            first.map_or(Ahead::NOTHING, |first| first.of(threads, thread))
        };
        for_each_tile(forward.pool, &packed, panels, &ahead, &|run, tile| {
            let mut space = TileSpace::new();
            for (index, result) in product.tile(run.clone(), tile, &mut space).iter().enumerate() {
                let (row, panel) = packed.place(&run, tile, index);
                let columns = PANEL.min(vocab - panel * PANEL);
                let sampled = real.saturating_sub(panel * PANEL).min(columns);
                // SAFETY: one thread computes a panel's tile and owns these elements.
                unsafe {
                    logits.part(row * vocab + panel * PANEL, columns).copy_from_slice(&result[..columns]);
                    largest.part(row * panels + panel, 1)[0] = panel_max(&result[..sampled]);
                }
            }
        });
        forward.trace.products("head", started, std::iter::once(head), &packed, vocab + panels);

        let started = forward.trace.start();
        self.buffers.samplers.resize_with(forward.pool.threads(), Sampler::default);
        let samplers = Shared(self.buffers.samplers.as_mut_ptr());
        let results: Vec<Mutex<Option<Result<RowOutput>>>> = block.iter().map(|_| Mutex::new(None)).collect();
        let work = |index: usize, thread: usize| {
            let (which, token) = block[index];
            // SAFETY: logits and panel maxima were written in an earlier phase; each thread has its own sampler.
            let (logits, largest, sampler) = unsafe {
                (
                    &*logits.part(index * vocab, vocab),
                    &*largest.part(index * panels, panels),
                    &mut samplers.part(thread, 1)[0],
                )
            };
            let sequence = &batch.sequences[which];
            let result = row_output(sequence, token, logits, largest, real, sampler).map_err(|error| {
                error.context(format!("request {}, token {}", sequence.request.0, sequence.context + token))
            });
            *results[index].lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(result);
        };
        // Greedy picks are done before another thread would have woken.
        let grain = if block.iter().all(|&(which, _)| is_greedy(&batch.sequences[which])) { 16 } else { 1 };
        forward.pool.split(block.len(), grain, &|range, thread| {
            for index in range {
                work(index, thread);
            }
        });
        forward.trace.end("sample", started, (4 * rows.len() * vocab) as u64, 0);
        for result in results {
            match result.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner) {
                Some(result) => out.push(result?),
                None => {
                    return Err(Error::failed(
                        "a row of logits was not looked at",
                        "this is a fault of the program: please report it",
                    ));
                }
            }
        }
        Ok(())
    }
}

fn is_greedy(sequence: &Sequence) -> bool {
    matches!(&sequence.want, OwnedWant::Sample { params, .. } if params.temperature <= 0.0 || params.top_k == 1)
}

/// The largest value, NaN if one is not finite.
fn panel_max(values: &[f32]) -> f32 {
    let mut largest = f32::NEG_INFINITY;
    // Zero times anything finite is zero, times anything else NaN.
    let mut poison = 0.0;
    for &value in values {
        largest = if value > largest { value } else { largest };
        poison += value * 0.0;
    }
    largest + poison
}

/// The id of the largest logit, the lowest of equal ones, by way of the panels' largest.
fn greedy(logits: &[f32], largest: &[f32]) -> Result<u32> {
    let (mut best, mut best_panel) = (f32::NEG_INFINITY, None);
    for (panel, &value) in largest.iter().enumerate() {
        if value.is_nan() {
            return Err(sampling::not_finite(logits));
        }
        if value > best {
            (best, best_panel) = (value, Some(panel));
        }
    }
    let first = best_panel.map_or(0, |panel| panel * PANEL);
    match logits[first..].iter().position(|&value| value == best) {
        Some(lane) if best_panel.is_some() => Ok((first + lane) as u32),
        _ => Err(sampling::not_finite(logits)),
    }
}

fn row_output(
    sequence: &Sequence,
    token: usize,
    logits: &[f32],
    largest: &[f32],
    real: usize,
    sampler: &mut Sampler,
) -> Result<RowOutput> {
    match &sequence.want {
        OwnedWant::Sample { .. } if is_greedy(sequence) => greedy(logits, largest).map(RowOutput::Token),
        OwnedWant::Sample { seed, position, params } => {
            let position = position + (token + 1 - sequence.kept) as u64;
            sampler.sample(logits, real, params, *seed, position).map(RowOutput::Token)
        }
        OwnedWant::LogProbOf { targets } => {
            sampling::log_probability(logits, targets[token]).map(RowOutput::LogProb)
        }
        OwnedWant::Logits { .. } | OwnedWant::Nothing => {
            sampling::argmax(&logits[..real])?;
            Ok(RowOutput::Logits(logits.to_vec()))
        }
    }
}

/// Takes a sequence's rows. Of sampled ones, those up to the first that is not the next draft count: a draft is kept when it
/// is the very token that would have been sampled, which is exact for greedy and for random draws alike.
fn collect(sequence: &Sequence, rows: &mut impl Iterator<Item = RowOutput>) -> SequenceOutput {
    let mut output = SequenceOutput::default();
    let mut open = true;
    for (index, row) in rows.take(sequence.wanted().len()).enumerate() {
        match row {
            RowOutput::Token(token) => {
                if open {
                    output.tokens.push(token);
                    open = sequence.drafts.get(index) == Some(&token);
                    output.accepted += usize::from(open);
                }
            }
            RowOutput::Logits(logits) => output.logits.push(logits),
            RowOutput::LogProb(value) => output.logprobs.push(value),
        }
    }
    output
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn greedy_by_panels_is_the_lowest_largest() {
        let mut logits = vec![0.5f32; 100];
        logits[70] = 2.0;
        logits[71] = 2.0;
        logits[99] = 2.0;
        let maxima = |logits: &[f32]| logits.chunks(PANEL).map(panel_max).collect::<Vec<_>>();
        assert_eq!(greedy(&logits, &maxima(&logits)).unwrap(), 70);
        assert_eq!(sampling::argmax(&logits).unwrap(), 70);
        logits[3] = f32::NAN;
        assert!(greedy(&logits, &maxima(&logits)).is_err());
        logits[3] = f32::NEG_INFINITY;
        assert!(greedy(&logits, &maxima(&logits)).is_err());
    }
}
