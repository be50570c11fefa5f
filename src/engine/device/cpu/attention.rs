//! Softmax attention over the paged cache.
//!
//! One item of work is a sequence, a KV head and a few query tokens: its rows (tokens times the heads that share the KV
//! head) form tiles like those of a matrix product. Scores are tiles of K against the queries, the output tiles of V
//! against the weights of the softmax; both add in the order of head dims and of keys, so a row's result depends on its
//! own sequence alone.

use super::batch::Sequence;
use super::cache::KvPool;
use super::gemm::{self, MAX_TILE, Tile, Values, max_tile};
use super::isa::{Arch, Isa, LANES, Work};
use super::lanes::{self, Lanes};
use super::memory::Shared;
use super::pool::{LINE, prefetch_line, touch_line};
use crate::engine::model::spec::Attention;

/// Angles of every position up to the longest sequence.
pub struct RopeTable {
    half: usize,
    /// [position][cos of each pair, sin of each pair]
    values: Vec<f32>,
}

impl RopeTable {
    pub fn new(attention: &Attention, positions: usize) -> Self {
        let frequencies = attention.rope.inverse_frequencies();
        let half = frequencies.len();
        let mut values = Vec::with_capacity(positions * 2 * half);
        for position in 0..positions {
            let angles = frequencies.iter().map(|frequency| position as f64 * frequency);
            values.extend(angles.clone().map(|angle| angle.cos() as f32));
            values.extend(angles.map(|angle| angle.sin() as f32));
        }
        Self { half, values }
    }

    /// Rotates pairs (i, i + half) of a head in place.
    #[inline(always)]
    fn rotate(&self, position: usize, head: &mut [f32]) {
        let at = position * 2 * self.half;
        let (cos, sin) = self.values[at..at + 2 * self.half].split_at(self.half);
        let (low, rest) = head.split_at_mut(self.half);
        for (((low, high), cos), sin) in low.iter_mut().zip(rest).zip(cos).zip(sin) {
            let (a, b) = (*low, *high);
            *low = a * cos - b * sin;
            *high = b * cos + a * sin;
        }
    }
}

/// Small weights of an attention layer.
#[derive(Debug, Default)]
pub struct AttentionWeights {
    /// Biases of q, k and v one after the other; empty without bias.
    pub bias: Vec<f32>,
    /// Norm weights of a q and a k head (one added where the family stores them minus one); empty without norm.
    pub q_norm: Vec<f32>,
    pub k_norm: Vec<f32>,
}

/// All that the threads of one layer's attention share.
pub struct Layer<'a> {
    pub spec: &'a Attention,
    pub eps: f32,
    pub weights: &'a AttentionWeights,
    pub rope: &'a RopeTable,
    pub kv: &'a KvPool,
    /// Index among the attention layers.
    pub index: usize,
    /// Projections, [rows][q | k | v].
    pub qkv: Shared<f32>,
    pub width: usize,
    /// [rows][heads * head_dim]
    pub output: Shared<f32>,
    pub isa: Isa,
}

impl Layer<'_> {
    /// Elements from one query head to the next.
    fn q_stride(&self) -> usize {
        self.spec.head_dim * if self.spec.output_gate { 2 } else { 1 }
    }
}

/// Bias, norm and rotation of one row's q and k heads that belong to some KV heads; K and V go to the cache, q is scaled
/// and stays.
pub struct Prepare<'a> {
    pub layer: &'a Layer<'a>,
    pub sequence: &'a Sequence,
    /// Which of the sequence's new tokens.
    pub token: usize,
    pub kv_heads: std::ops::Range<usize>,
}

impl Work for Prepare<'_> {
    type Output = ();

    #[inline(always)]
    fn run<A: Arch>(self) {
        let Self { layer, sequence, token, kv_heads } = self;
        let spec = layer.spec;
        let dim = spec.head_dim;
        let (kv_size, q_size) = (spec.kv_heads * dim, spec.heads * layer.q_stride());
        let row = (sequence.first_row + token) * layer.width;
        let position = sequence.context + token;
        let scale = 1.0 / (dim as f32).sqrt();
        let mut head_values = [0f32; MAX_HEAD_DIM];
        let head_values = &mut head_values[..dim];
        let (block, within) = sequence.locate(position, layer.kv.block_tokens);
        let group_size = spec.heads / spec.kv_heads * layer.q_stride();
        let biased = |at: usize, len: usize| {
            // SAFETY: one thread prepares a row's heads of a KV head.
            let values = unsafe { layer.qkv.part(row + at, len) };
            if !layer.weights.bias.is_empty() {
                for (value, bias) in values.iter_mut().zip(&layer.weights.bias[at..at + len]) {
                    *value += bias;
                }
            }
            values
        };
        for kv_head in kv_heads {
            let queries = biased(kv_head * group_size, group_size);
            for head in queries.chunks_exact_mut(layer.q_stride()) {
                let q = &mut head[..dim];
                normalise::<A>(q, &layer.weights.q_norm, layer.eps, head_values);
                layer.rope.rotate(position, q);
                q.iter_mut().for_each(|value| *value *= scale);
            }
            let key = biased(q_size + kv_head * dim, dim);
            let value = biased(q_size + kv_size + kv_head * dim, dim);
            normalise::<A>(key, &layer.weights.k_norm, layer.eps, head_values);
            layer.rope.rotate(position, key);
            // SAFETY: a token's cache rows belong to its row of the step, and a head's to its thread.
            unsafe { layer.kv.write(layer.index, block, kv_head, within, key, value) };
        }
    }
}

/// Head dims above this are refused when a model is loaded.
pub const MAX_HEAD_DIM: usize = 512;

#[inline(always)]
fn normalise<A: Arch>(head: &mut [f32], weight: &[f32], eps: f32, scratch: &mut [f32]) {
    if !weight.is_empty() {
        lanes::rms_norm::<A>(head, weight, eps, scratch);
        head.copy_from_slice(scratch);
    }
}

/// Buffers of one thread.
#[derive(Debug, Default)]
pub struct Workspace {
    /// Queries, [head_dim][rows].
    queries: Vec<f32>,
    /// Scores, then softmax weights, [rows][slots].
    scores: Vec<f32>,
    /// Softmax weights as tiles read them, [slots][rows].
    weights: Vec<f32>,
    /// Outputs, [rows][value_stride].
    outputs: Vec<f32>,
}

impl Workspace {
    fn grow(values: &mut Vec<f32>, len: usize) {
        if values.len() < len {
            values.resize(len.next_power_of_two(), 0.0);
        }
    }
}

/// Query tokens `tokens` of one sequence against one KV head.
pub struct Attend<'a> {
    pub layer: &'a Layer<'a>,
    pub sequence: &'a Sequence,
    pub kv_head: usize,
    pub tokens: std::ops::Range<usize>,
    /// These are all of the sequence's tokens and their heads are still to be prepared: K and V that a thread writes here
    /// it reads right after.
    pub prepare: bool,
    /// The sequence and KV head that this thread most likely takes next: a decode step prefetches its keys and, where tiles
    /// prefetch ahead ([`gemm::prefetches_ahead`]), its values.
    pub next: Option<(&'a Sequence, usize)>,
    /// All of this item's keys and values were so prefetched.
    pub prefetched: bool,
    pub workspace: &'a mut Workspace,
}

impl Work for Attend<'_> {
    type Output = ();

    #[inline(always)]
    fn run<A: Arch>(self) {
        let group = self.layer.spec.heads / self.layer.spec.kv_heads;
        let rows = self.tokens.len() * group;
        if self.prepare {
            for token in self.tokens.clone() {
                let kv_heads = self.kv_head..self.kv_head + 1;
                Prepare { layer: self.layer, sequence: self.sequence, token, kv_heads }.run::<A>();
            }
        }
        let mut first = 0;
        while first < rows {
            let count = (rows - first).min(max_tile(self.layer.isa));
            attend_rows::<A>(
                self.layer,
                self.sequence,
                self.kv_head,
                self.tokens.start * group + first,
                count,
                self.next,
                self.prefetched,
                self.workspace,
            );
            first += count;
        }
    }
}

/// Blocks that are read into the cache side by side, before a tile asks for them: blocks lie anywhere, and the hardware finds
/// its way only within one, at a fraction of the memory's speed.
const BLOCKS_AT_ONCE: usize = 8;

/// # Safety
/// Each of `starts` can be read for `bytes`, and nobody writes there.
#[inline(always)]
unsafe fn read_side_by_side(starts: &[*const u8], bytes: usize) {
    for at in (0..bytes).step_by(64) {
        for start in starts {
            // SAFETY: promised by the caller.
            unsafe { touch_line(start.add(at)) };
        }
    }
}

/// Rows `first..first + count` of a sequence and KV head; row r is token r / group, head r % group.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn attend_rows<A: Arch>(
    layer: &Layer<'_>,
    sequence: &Sequence,
    kv_head: usize,
    first: usize,
    count: usize,
    next_item: Option<(&Sequence, usize)>,
    prefetched: bool,
    workspace: &mut Workspace,
) {
    let (spec, kv) = (layer.spec, layer.kv);
    let dim = spec.head_dim;
    let group = spec.heads / spec.kv_heads;
    let position = |row: usize| sequence.context + (first + row) / group;
    let row_start = |row: usize| {
        let token = (first + row) / group;
        let head = kv_head * group + (first + row) % group;
        (sequence.first_row + token) * layer.width + head * layer.q_stride()
    };
    let keys = position(count - 1) + 1;
    // A block's keys take whole tiles of 16 slots; positions and slots differ only where blocks are not whole tiles.
    let block_slots = kv.block_tokens.next_multiple_of(LANES);
    let slot_of = |key: usize| key / kv.block_tokens * block_slots + key % kv.block_tokens;
    let slots = slot_of(keys - 1) + 1;
    let score_stride = slots.next_multiple_of(LANES) + LANES;

    Workspace::grow(&mut workspace.queries, dim * count);
    for row in 0..count {
        // SAFETY: the query was prepared in an earlier phase; nobody writes it now.
        let query = unsafe { layer.qkv.part(row_start(row), dim) };
        for (out, value) in workspace.queries[row..].iter_mut().step_by(count).zip(query.iter()) {
            *out = *value;
        }
    }

    Workspace::grow(&mut workspace.scores, count * score_stride);
    let tile_fn = gemm::dense(layer.isa, kv.element, count);
    let key_stride = LANES * kv.element.bytes();
    let key_tile = |slot: usize| {
        let block = sequence.blocks[slot / block_slots] as usize;
        kv.key_tile(layer.index, block, kv_head, slot % block_slots)
    };
    let values_of =
        |slot: usize| kv.value_row(layer.index, sequence.blocks[slot / block_slots] as usize, kv_head, 0);
    // Of a decode step every key is new to the caches. Where tiles prefetch ahead, each item does so for the next one's keys while
    // it multiplies its own, and for the values while it works on the softmax. Else it reads its blocks side by side before it
    // uses them, and asks for the next one's keys at an even pace while it multiplies (scores only of three rows and more): as much as memory can bring meanwhile.
    // A prompt's tiles find them there.
    let decode = sequence.tokens() == 1;
    let cold = decode && !prefetched;
    let (next_item, paced) = match next_item.filter(|_| decode) {
        next if gemm::prefetches_ahead(layer.isa) => (next, None),
        // (Which tile is asked for when is reckoned for blocks of one tile.)
        next => (None, next.filter(|_| block_slots == LANES)),
    };
    let key_tile_bytes = key_stride * dim;
    // One tile of the next item's keys for each pair of tiles of scores, and one in between for as many values.
    let paced_tile = |slot: usize| {
        let (next, head) = paced.filter(|(next, _)| slot / block_slots < next.blocks.len())?;
        Some(
            kv.key_tile(layer.index, next.blocks[slot / block_slots] as usize, head, slot % block_slots)
                .cast_const(),
        )
    };
    let next_block =
        |next: &Sequence, slot: usize| next.blocks[(slot / block_slots).min(next.blocks.len() - 1)] as usize;
    let read_blocks = |slot: usize, start: &dyn Fn(usize) -> *const u8, bytes: usize| {
        if cold && slot.is_multiple_of(BLOCKS_AT_ONCE * block_slots) {
            let mut starts = [std::ptr::null(); BLOCKS_AT_ONCE];
            let blocks = (slots - slot).div_ceil(block_slots).min(BLOCKS_AT_ONCE);
            for (block, to) in starts.iter_mut().enumerate().take(blocks) {
                *to = start(slot + block * block_slots);
            }
            // SAFETY: whole blocks, whose rows of this head belong to this item.
            unsafe { read_side_by_side(&starts[..blocks], bytes) };
        }
    };
    let (key_bytes, value_bytes) = kv.block_bytes();
    let mut slot = 0;
    while slot < slots {
        read_blocks(slot, &|slot| key_tile(slot).cast_const(), key_bytes);
        let second = if slot + LANES < slots { slot + LANES } else { slot };
        // SAFETY: a row of scores has room for the second tile of the last pair.
        let out = unsafe { workspace.scores.as_mut_ptr().add(slot) };
        // Blocks lie anywhere, so what comes next must be named to be prefetched: the next item's keys, else this one's later
        // ones and behind the last of them the first values.
        let ahead = |slot: usize| match next_item {
            Some((next, head)) => kv.key_tile(layer.index, next_block(next, slot), head, slot % block_slots),
            None if slot + 2 * LANES < slots => key_tile(slot + 2 * LANES),
            None => values_of((slot + 2 * LANES - slots) / LANES * block_slots % slots),
        };
        let tile = Tile::dense(key_tile(slot), key_tile(second), key_stride, dim, workspace.queries.as_ptr())
            .into(out, score_stride, false)
            .prefetching(ahead(slot), ahead(slot + LANES));
        let tile = Tile { next: paced_tile(slot).map_or(tile.next, |start| (start, key_tile_bytes)), ..tile };
        // SAFETY: K tiles hold head_dim columns of 16 keys, queries [head_dim][count], scores `count` rows.
        unsafe { tile_fn(&tile) };
        slot += 2 * LANES;
    }

    let of_blocks = gemm::values(layer.isa, kv.element, count);
    Workspace::grow(&mut workspace.weights, slots.next_multiple_of(LANES) * count);
    let mut inverse_sums = [0f32; MAX_TILE];
    for row in 0..count {
        let scores = &mut workspace.scores[row * score_stride..][..slots.next_multiple_of(LANES)];
        let valid = slot_of(position(row)) + 1;
        // This row's share of the next item's values in the 16 slots at hand.
        let ahead = |slot: usize| {
            if let Some((next, head)) = next_item {
                let base = kv.value_row(layer.index, next_block(next, slot), head, slot % block_slots);
                let bytes = LANES * kv.value_stride * kv.element.bytes();
                for at in (bytes * row / count..bytes * (row + 1) / count).step_by(LINE) {
                    prefetch_line(base.wrapping_add(at));
                }
            }
        };
        inverse_sums[row] = 1.0 / softmax::<A>(scores, valid, kv.block_tokens, block_slots, ahead);
        if of_blocks.is_none() {
            let out = workspace.weights[row..].iter_mut().step_by(count);
            out.zip(scores).for_each(|(out, weight)| *out = *weight);
        }
    }

    Workspace::grow(&mut workspace.outputs, count * kv.value_stride);
    workspace.outputs[..count * kv.value_stride].fill(0.0);
    let mut slot = 0;
    while slot < slots {
        read_blocks(slot, &|slot| values_of(slot).cast_const(), value_bytes);
        if let Some(function) = of_blocks {
            let tokens = (slots - slot).min(BLOCKS_AT_ONCE * block_slots);
            let starts: [_; BLOCKS_AT_ONCE] = std::array::from_fn(|block| {
                values_of((slot + block * block_slots).min(slots - 1)).cast_const()
            });
            let next: [_; BLOCKS_AT_ONCE / 2] = std::array::from_fn(|pair| {
                paced_tile(slot + (2 * pair + 1) * block_slots).unwrap_or(std::ptr::null())
            });
            let operands = Values {
                next: (&next, key_tile_bytes),
                blocks: &starts[..tokens.div_ceil(block_slots)],
                block_tokens: block_slots,
                tokens,
                width: kv.value_stride,
                weights: workspace.scores[slot..].as_ptr(),
                weight_stride: score_stride,
                out: workspace.outputs.as_mut_ptr(),
            };
            // SAFETY: a block's value rows follow each other, and the softmax left a row of weights in each row of scores; outputs
            // hold `count` rows of value_stride.
            unsafe { function(&operands) };
            slot += BLOCKS_AT_ONCE * block_slots;
            continue;
        }
        let value_bytes = kv.element.bytes();
        let base = values_of(slot);
        let two_on = slot + 2 * block_slots;
        let ahead = if next_item.is_none() && two_on < slots { values_of(two_on) } else { base };
        for d in (0..kv.value_stride).step_by(2 * LANES) {
            let cols = block_slots.min(slots - slot);
            // SAFETY: value rows are padded to whole panels and a block's rows follow each other; the softmax wrote
            // `count` weights a slot.
            let tile = unsafe {
                Tile::dense(
                    base.add(d * value_bytes),
                    base.add((d + LANES) * value_bytes),
                    kv.value_stride * value_bytes,
                    cols,
                    workspace.weights.as_ptr().add(slot * count),
                )
                .into(workspace.outputs.as_mut_ptr().add(d), kv.value_stride, true)
                .prefetching(
                    ahead.wrapping_add(d * value_bytes),
                    ahead.wrapping_add((d + LANES) * value_bytes),
                )
            };
            // SAFETY: as above; outputs hold `count` rows of value_stride.
            unsafe { tile_fn(&tile) };
        }
        slot += block_slots;
    }

    for row in 0..count {
        let output = &mut workspace.outputs[row * kv.value_stride..][..dim];
        output.iter_mut().for_each(|value| *value *= inverse_sums[row]);
        if spec.output_gate {
            // SAFETY: the gate lies after the query; nobody writes it now.
            let gate = unsafe { layer.qkv.part(row_start(row) + dim, dim) };
            for (value, gate) in output.iter_mut().zip(gate.iter()) {
                *value *= lanes::sigmoid::<A>(*gate);
            }
        }
        let head = kv_head * group + (first + row) % group;
        let at = ((sequence.first_row + (first + row) / group) * spec.heads + head) * dim;
        // SAFETY: this item alone writes this row's columns of this head.
        unsafe { layer.output.part(at, dim) }.copy_from_slice(output);
    }
}

/// Makes scores exp(score - max) of the valid slots and 0 of the others, and returns the sum. `ahead(slot)` prefetches while
/// slots `slot..slot + 16` are worked on.
#[inline(always)]
fn softmax<A: Arch>(
    scores: &mut [f32],
    valid: usize,
    block_tokens: usize,
    block_slots: usize,
    ahead: impl Fn(usize),
) -> f32 {
    scores[valid..].fill(f32::NEG_INFINITY);
    if block_slots != block_tokens {
        for block in scores.chunks_mut(block_slots) {
            let end = block_tokens.min(block.len());
            block[end..].fill(f32::NEG_INFINITY);
        }
    }
    let mut largest: Lanes = [f32::NEG_INFINITY; LANES];
    for chunk in scores.chunks_exact(LANES) {
        for i in 0..LANES {
            largest[i] = if chunk[i] > largest[i] { chunk[i] } else { largest[i] };
        }
    }
    let largest = largest.into_iter().fold(f32::NEG_INFINITY, f32::max);
    let mut sums: Lanes = [0.0; LANES];
    for (index, chunk) in scores.chunks_exact_mut(LANES).enumerate() {
        ahead(index * LANES);
        for i in 0..LANES {
            chunk[i] = lanes::exp::<A>(chunk[i] - largest);
            sums[i] += chunk[i];
        }
    }
    lanes::add_up(sums)
}
