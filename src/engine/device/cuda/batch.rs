//! A step as the kernels see it: flat rows, and one packed block of metadata that reaches the GPU in a single copy.
//!
//! Sequences are put in two groups: *short* ones (a decode token, drafts, the last few tokens of a prompt), whose rows
//! each run on their own, and *chunks*, whose rows share their keys. Rows of the short ones come first. Output rows are
//! those that pass through the head: sampled ones first, then those whose logits or log probabilities are wanted.
//!
//! The block's layout depends only on the counts of rows, sequences and outputs, so that a captured step of one batch size
//! finds everything at fixed addresses; the block table, whose width changes, comes last, its width in the header.

use std::ops::Range;

use super::delta_prefill::{Piece, Work};
use super::driver::plain::Plain;
use super::kernels::attention::AttentionRow;
use super::kernels::delta::DeltaSequence;
use super::kernels::sample::SampleRow;
use super::launch::bytes_of;
use super::prefill_attention::Chunk;
use crate::engine::device::{Input, Step, Want};
use crate::{Error, Result};

/// New tokens up to which a sequence's rows run one by one.
pub const SHORT_TOKENS: usize = 8;
/// Marks a token that is an index into the ring of sampled tokens.
const FROM_RING: u32 = 1 << 31;

/// As the kernels' `Header`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct Header {
    pub ring_offset: u32,
    pub table_pitch: u32,
    pub unused: [u32; 6],
}

// SAFETY: four-byte numbers without padding.
unsafe impl Plain for Header {}
// SAFETY: four-byte numbers without padding.
unsafe impl Plain for AttentionRow {}
// SAFETY: four-byte numbers without padding.
unsafe impl Plain for DeltaSequence {}
// SAFETY: numbers whose sizes add up to the structure's: no padding.
unsafe impl Plain for SampleRow {}
// SAFETY: four-byte numbers without padding.
unsafe impl Plain for Chunk {}
// SAFETY: four-byte numbers without padding.
unsafe impl Plain for Piece {}

/// Counts that fix the layout of the metadata.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Counts {
    pub rows: usize,
    pub sequences: usize,
    pub outputs: usize,
    pub chunks: usize,
    pub tiles: usize,
    /// Chunks of the delta rule, over all prompt chunks.
    pub delta_chunks: usize,
    /// Rows that go through the whole of the last layer, in a narrowed batch.
    pub last: usize,
}

/// Byte offsets of the parts of the metadata, each 16-byte aligned.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Offsets {
    pub header: usize,
    pub sequences: usize,
    pub rows: usize,
    pub tokens: usize,
    pub select: usize,
    pub samples: usize,
    pub targets: usize,
    pub chunks: usize,
    pub tiles: usize,
    pub pieces: usize,
    pub delta_chunks: usize,
    pub last: usize,
    pub last_rows: usize,
    pub table: usize,
}

impl Offsets {
    pub fn new(counts: &Counts) -> Self {
        let mut end = 0;
        let mut take = |bytes: usize| {
            let at = end;
            end += bytes.next_multiple_of(16);
            at
        };
        Self {
            header: take(size_of::<Header>()),
            sequences: take(counts.sequences * size_of::<DeltaSequence>()),
            rows: take(counts.rows * size_of::<AttentionRow>()),
            tokens: take(4 * counts.rows),
            select: take(4 * counts.outputs),
            samples: take(counts.outputs * size_of::<SampleRow>()),
            targets: take(4 * counts.outputs),
            chunks: take(counts.chunks * size_of::<Chunk>()),
            tiles: take(8 * counts.tiles),
            pieces: take(counts.chunks * size_of::<Piece>()),
            delta_chunks: take(8 * counts.delta_chunks),
            last: take(4 * counts.last),
            last_rows: take(counts.last * size_of::<AttentionRow>()),
            table: take(0),
        }
    }

    /// Most bytes a step can need.
    pub fn capacity(max_rows: usize, max_sequences: usize, max_blocks: usize) -> usize {
        let counts = Counts {
            rows: max_rows,
            sequences: max_sequences,
            outputs: max_rows,
            chunks: max_sequences,
            // A tile has at least 64 rows, and each chunk may end in a partial one.
            tiles: max_rows / 64 + max_sequences,
            delta_chunks: Work::max_chunks(max_rows, max_sequences),
            last: max_rows,
        };
        Self::new(&counts).table + 4 * max_sequences * max_blocks
    }
}

/// What a sequence of the step gets back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wanted {
    Nothing,
    /// The output row that its token is sampled from.
    Token(usize),
    /// The output row of the token after the input, one for each draft behind it, and the drafts.
    Drafted {
        first: usize,
        drafts: Vec<u32>,
    },
    /// Rows of the step's logits.
    Logits(Range<usize>),
    /// Rows of the step's log probabilities.
    LogProbs(Range<usize>),
}

/// A step laid out flat.
#[derive(Debug, Clone, Default)]
pub struct Batch {
    pub rows: Vec<AttentionRow>,
    pub tokens: Vec<u32>,
    pub sequences: Vec<DeltaSequence>,
    /// Rows and sequences of the short group, which come first.
    pub short_rows: usize,
    pub short_sequences: usize,
    /// Most new tokens of a sequence in either group.
    pub longest_short: usize,
    pub longest_chunk: usize,
    pub chunks: Vec<Chunk>,
    /// The same, as the delta rule's chunks of 64.
    pub work: Work,
    pub samples: Vec<SampleRow>,
    /// A sampled row is not greedy.
    pub draws: bool,
    /// Residual rows that pass through the head: sampled, then logits, then log probabilities. In a narrowed batch they are
    /// counted in `last`.
    pub select: Vec<u32>,
    /// Only the rows `last` go through the last layer behind its K and V (`narrow`).
    pub narrowed: bool,
    pub last: Vec<u32>,
    /// Tokens that those rows see, in all.
    pub last_context: u64,
    pub logit_rows: usize,
    pub targets: Vec<u32>,
    pub table: Vec<u32>,
    pub table_pitch: usize,
    /// By index in the step.
    pub wanted: Vec<Wanted>,
    /// Tokens that the short rows see, in all.
    pub short_context: u64,
    /// States of the sequences from this one on are brought up to date in front of each delta net; none are, mostly.
    pub settle_from: Option<usize>,
}

impl Batch {
    /// Lays `step` out. `sampled_by(ticket, sequence)` is the ring's word of a token sampled by a step in flight.
    ///
    /// # Errors
    /// A reference to a step or sequence that sampled nothing.
    pub fn new(step: &Step, sampled_by: impl Fn(u64, usize) -> Option<u32>) -> Result<Self> {
        let mut batch = Self { wanted: vec![Wanted::Nothing; step.sequences.len()], ..Self::default() };
        let new_tokens = |index: usize| {
            let sequence = &step.sequences[index];
            sequence.input.tokens() + sequence.drafts.len()
        };
        let (short, chunks): (Vec<_>, Vec<_>) = (0..step.sequences.len()).partition(|&index| {
            new_tokens(index) <= SHORT_TOKENS || !step.sequences[index].drafts.is_empty()
        });
        batch.table_pitch =
            step.sequences.iter().map(|sequence| sequence.blocks.len()).max().unwrap_or(0).max(1);
        let mut last_rows = vec![0; step.sequences.len()];
        for (place, &index) in short.iter().chain(&chunks).enumerate() {
            let sequence = &step.sequences[index];
            let (start, count) = (batch.rows.len(), new_tokens(index));
            let context = sequence.context_tokens;
            batch.sequences.push(DeltaSequence {
                slot: sequence.state_slot.map_or(0, |slot| slot as i32),
                context: context as i32,
                start: start as i32,
                count: count as i32,
                ..DeltaSequence::default()
            });
            let positions = context..context + count;
            batch.rows.extend(
                positions.map(|position| AttentionRow { sequence: place as i32, position: position as i32 }),
            );
            match sequence.input {
                Input::Known(ids) => batch.tokens.extend(ids),
                Input::SampledBy { ticket, sequence } => {
                    let word = sampled_by(ticket.0, sequence).ok_or_else(|| {
                        Error::bug(format!("step {} sampled no token for sequence {sequence}", ticket.0))
                    })?;
                    batch.tokens.push(FROM_RING | word);
                }
            }
            batch.tokens.extend(sequence.drafts);
            batch.table.extend(sequence.blocks);
            batch.table.resize((place + 1) * batch.table_pitch, 0);
            last_rows[index] = start + count - 1;
            if place < short.len() {
                batch.short_rows += count;
                batch.short_sequences += 1;
                batch.longest_short = batch.longest_short.max(count);
                batch.short_context += (0..count).map(|i| (context + i + 1) as u64).sum::<u64>();
            } else {
                batch.longest_chunk = batch.longest_chunk.max(count);
                batch.chunks.push(Chunk {
                    first_row: start as i32,
                    new_tokens: count as i32,
                    context_tokens: context as i32,
                    table: place as i32,
                });
            }
        }
        let pieces = batch.sequences[batch.short_sequences..].iter();
        batch.work = Work::new(pieces.map(|piece| (piece.slot, piece.context, piece.start, piece.count)));
        batch.outputs(step, &last_rows);
        Ok(batch)
    }

    fn outputs(&mut self, step: &Step, last_rows: &[usize]) {
        for (index, sequence) in step.sequences.iter().enumerate() {
            if let Want::Sample { seed, position, params } = sequence.want {
                let (first, drafts) = (self.select.len(), sequence.drafts);
                self.wanted[index] = if drafts.is_empty() {
                    Wanted::Token(first)
                } else {
                    Wanted::Drafted { first, drafts: drafts.to_vec() }
                };
                for later in 0..=drafts.len() {
                    self.select.push((last_rows[index] - drafts.len() + later) as u32);
                    let sample = SampleRow::new(&params, seed, position + later as u64);
                    self.draws |= sample.inverse_temperature != 0.0;
                    self.samples.push(sample);
                }
            }
        }
        for (index, sequence) in step.sequences.iter().enumerate() {
            if let Want::Logits { rows } = sequence.want {
                self.wanted[index] = Wanted::Logits(self.logit_rows..self.logit_rows + rows);
                self.select.extend((last_rows[index] + 1 - rows..=last_rows[index]).map(|row| row as u32));
                self.logit_rows += rows;
            }
        }
        for (index, sequence) in step.sequences.iter().enumerate() {
            if let Want::LogProbOf { targets } = sequence.want {
                self.wanted[index] = Wanted::LogProbs(self.targets.len()..self.targets.len() + targets.len());
                let first = last_rows[index] + 1 - targets.len();
                self.select.extend((first..=last_rows[index]).map(|row| row as u32));
                self.targets.extend(targets);
            }
        }
    }

    /// Leaves the last layer's queries and everything behind them to the rows that outputs are made of, where a prompt
    /// chunk has many more and `most` is enough for them. Of the other rows only K and V are of use there: nothing reads
    /// what would become of them. (Of the products of a prompt, 2.9 % in a model of 32 layers.)
    pub fn narrow(&mut self, most: usize) {
        let count = self.select.len();
        self.narrowed = !self.chunks.is_empty() && count <= most && 2 * count <= self.rows.len();
        if self.narrowed {
            self.last = std::mem::replace(&mut self.select, (0..count as u32).collect());
            let position = |&row: &u32| self.rows[row as usize].position as u64;
            self.last_context = self.last.iter().map(|row| position(row) + 1).sum();
        }
    }

    /// Says of each sequence how far its stored state is behind and whether the step writes it. `stored` holds, by slot, the
    /// tokens that are in the stored state, and is moved on to what it will be after the step. Short sequences may be
    /// left up to `most_pending` tokens behind; where that is 0, and for chunks, states are written by the step. `capacity`:
    /// pending and new tokens of a short one that there is room for.
    ///
    /// # Errors
    /// A stored state that cannot be brought to its sequence's context: the caller's bookkeeping is wrong.
    pub fn place_states(&mut self, stored: &mut [usize], most_pending: usize, capacity: usize) -> Result<()> {
        let deferred = if most_pending > 0 { self.short_sequences } else { 0 };
        self.settle_from = None;
        for (place, sequence) in self.sequences.iter_mut().enumerate() {
            let Some(stored) = usize::try_from(sequence.slot).ok().and_then(|slot| stored.get_mut(slot))
            else {
                continue;
            };
            let context = sequence.context as usize;
            let pending = match context.checked_sub(*stored) {
                // A slot that was last used elsewhere starts afresh.
                _ if context == 0 => 0,
                Some(pending) if pending <= capacity => pending,
                _ => {
                    let slot = sequence.slot;
                    return Err(Error::bug(format!(
                        "state slot {slot} holds {stored} tokens, a step asks for {context}"
                    )));
                }
            };
            sequence.pending = pending as i32;
            if place < deferred {
                // Sequences that came together take turns, so that steps stay alike.
                let turn = (context + sequence.slot as usize).is_multiple_of(most_pending);
                let full = pending >= most_pending || pending + sequence.count as usize > capacity;
                let write = pending > 0 && (turn || full);
                sequence.write = i32::from(write);
                *stored = if write { context } else { context - pending };
            } else {
                if pending > 0 && self.settle_from.is_none() {
                    self.settle_from = Some(deferred);
                }
                *stored = context + sequence.count as usize;
            }
        }
        Ok(())
    }

    /// A decode step that a captured graph can run: one token a sequence, one sample each, nothing else.
    pub fn is_plain_decode(&self) -> bool {
        self.chunks.is_empty()
            && self.longest_short == 1
            && self.samples.len() == self.rows.len()
            && self.select.len() == self.samples.len()
    }

    /// Pads a plain decode step to `size` sequences; the added rows touch no cache and their tokens are dropped.
    pub fn pad(&mut self, size: usize) {
        self.rows.resize(size, AttentionRow { sequence: -1, position: 0 });
        self.sequences.resize(size, DeltaSequence { slot: -1, count: 1, ..DeltaSequence::default() });
        for (place, sequence) in
            self.sequences.iter_mut().enumerate().filter(|(_, sequence)| sequence.slot < 0)
        {
            sequence.start = place as i32;
        }
        self.tokens.resize(size, 0);
        self.select.extend(self.select.len() as u32..size as u32);
        self.samples.resize(size, SampleRow::greedy());
        self.short_rows = size;
        self.short_sequences = size;
    }

    pub fn counts(&self, tiles: usize) -> Counts {
        Counts {
            rows: self.rows.len(),
            sequences: self.sequences.len(),
            outputs: self.select.len(),
            chunks: self.chunks.len(),
            tiles,
            delta_chunks: self.work.chunks.len(),
            last: self.last.len(),
        }
    }

    /// Writes the metadata and returns its length in bytes.
    pub fn write(&self, offsets: &Offsets, ring_offset: u32, tiles: &[[i32; 2]], to: &mut [u8]) -> usize {
        let mut put = |at: usize, bytes: &[u8]| to[at..at + bytes.len()].copy_from_slice(bytes);
        let header = Header { ring_offset, table_pitch: self.table_pitch as u32, unused: [0; 6] };
        put(offsets.header, bytes_of(&[header]));
        put(offsets.sequences, bytes_of(&self.sequences));
        put(offsets.rows, bytes_of(&self.rows));
        put(offsets.tokens, bytes_of(&self.tokens));
        put(offsets.select, bytes_of(&self.select));
        put(offsets.samples, bytes_of(&self.samples));
        // A target for each output row, those before the log probabilities unused.
        let first_target = self.select.len() - self.targets.len();
        put(offsets.targets + 4 * first_target, bytes_of(&self.targets));
        put(offsets.chunks, bytes_of(&self.chunks));
        put(offsets.tiles, bytes_of(tiles.as_flattened()));
        put(offsets.pieces, bytes_of(&self.work.pieces));
        put(offsets.delta_chunks, bytes_of(self.work.chunks.as_flattened()));
        let last_rows: Vec<AttentionRow> = self.last.iter().map(|&row| self.rows[row as usize]).collect();
        put(offsets.last, bytes_of(&self.last));
        put(offsets.last_rows, bytes_of(&last_rows));
        put(offsets.table, bytes_of(&self.table));
        offsets.table + 4 * self.table.len()
    }
}

/// The batch size a decode step of `sequences` is captured and padded to: fine steps where a row costs most.
pub fn graph_size(sequences: usize, most: usize) -> usize {
    let step = match sequences {
        0..=8 => 1,
        9..=32 => 4,
        33..=128 => 8,
        _ => 16,
    };
    sequences.next_multiple_of(step).min(most.max(sequences))
}

#[cfg(test)]
mod tests;
