//! The gated delta net: convolution window, gates, recurrence, gated norm.
//!
//! One item of work is a sequence and a key head, with the value heads that share it: it owns their channels of the
//! convolution window, their part of the stash and their states, so items never meet. Tokens are taken in chunks: first
//! the convolutions and gates of a chunk, then each state's recurrence through the chunk while 64 of its value dims
//! stay in the L1, then the gated norm.
//!
//! With q, k of length 1 (q scaled), decay e^g, state S [key_dim, value_dim]:
//!     p = e^g Sᵀk,  d = b (v - p),  o = e^g Sᵀq + (k·q) d,  S = e^g S + k dᵀ
//! which is "decay, read, write, read" with the last read taken from the same pass over S as the first.
//!
//! Rollback: a step commits its sure tokens to the state and leaves the drafts' inputs in the stash. The next step replays as
//! many of them as were kept, by the same code in the same order, so a kept draft leaves the very bits it would have
//! left as an ordinary token, and a rejected one leaves nothing.

use super::batch::Sequence;
use super::cache::{StatePool, fetch, store};
use super::chunked::{self, CHUNK, Chunk, Gate};
use super::gemm::Element;
use super::isa::{Arch, Isa, LANES, Work, fma};
use super::lanes::{self, Lanes};
use super::memory::Shared;
use super::recurrence;
use crate::engine::model::spec::DeltaNet;

/// Small weights of a delta-net layer.
#[derive(Debug, Default)]
pub struct DeltaWeights {
    /// [taps][channels], the last tap is the current token's.
    pub conv: Vec<f32>,
    /// -exp(A_log)
    pub decay: Vec<f32>,
    pub dt_bias: Vec<f32>,
    /// Weight of the gated norm, [value_dim], used as it is.
    pub norm: Vec<f32>,
}

/// All that the threads of one layer's delta net share.
pub struct Layer<'a> {
    pub spec: &'a DeltaNet,
    pub eps: f32,
    pub weights: &'a DeltaWeights,
    pub state: &'a StatePool,
    /// Index among the delta-net layers.
    pub index: usize,
    /// Projections, [rows][q | k | v | z | b | a].
    pub inputs: Shared<f32>,
    pub width: usize,
    /// [rows][value_heads * value_dim]
    pub output: Shared<f32>,
    pub isa: Isa,
}

/// Buffers of one thread.
#[derive(Debug, Default)]
pub struct Workspace {
    /// Per token of a chunk: q, k, then each value head's v and o.
    tokens: Vec<f32>,
    /// Per token and value head.
    gates: Vec<Gate>,
    chunked: chunked::Workspace,
    /// k·q of each token.
    products: Vec<f32>,
    /// A state in f32, where the pool's type is another or drafts must not touch it.
    state: Vec<f32>,
    /// The next window of this item's channels.
    window: Vec<f32>,
}

/// One sequence and key head.
pub struct Mix<'a> {
    pub layer: &'a Layer<'a>,
    pub sequence: &'a Sequence,
    pub key_head: usize,
    pub workspace: &'a mut Workspace,
}

/// Where channel ranges of a key head begin: q, k, then its value heads.
fn channel_ranges(spec: &DeltaNet, key_head: usize) -> [(usize, usize); 3] {
    let repeats = spec.value_heads / spec.key_heads;
    let keys = spec.key_heads * spec.key_dim;
    let values = repeats * spec.value_dim;
    [
        (key_head * spec.key_dim, spec.key_dim),
        (keys + key_head * spec.key_dim, spec.key_dim),
        (2 * keys + key_head * values, values),
    ]
}

impl Work for Mix<'_> {
    type Output = ();

    #[inline(always)]
    fn run<A: Arch>(self) {
        let Self { layer, sequence, key_head, workspace } = self;
        let item = Item {
            layer,
            sequence,
            key_head,
            fresh: sequence.context == 0,
            repeats: layer.spec.value_heads / layer.spec.key_heads,
        };
        let committed = sequence.replay + sequence.kept;
        let total = sequence.replay + sequence.tokens();
        let mut start = 0;
        while start < total {
            // A chunk never spans the line between tokens that stay and drafts, nor replayed and new ones.
            let end = [sequence.replay, committed, total]
                .into_iter()
                .find(|&line| start < line)
                .map_or(total, |line| line.min(start + CHUNK));
            item.chunk::<A>(start, end, start >= committed, start == committed, workspace);
            start = end;
        }
        item.finish(committed, workspace);
    }
}

struct Item<'a> {
    layer: &'a Layer<'a>,
    sequence: &'a Sequence,
    key_head: usize,
    /// The slot's old content is not this sequence's.
    fresh: bool,
    repeats: usize,
}

impl Item<'_> {
    /// Raw inputs of a token, counted from the first replayed one; negative ones lie in the window, `None` is zero.
    #[inline(always)]
    fn raw(&self, token: isize) -> Option<*const f32> {
        let (layer, sequence) = (self.layer, self.sequence);
        let replay = sequence.replay as isize;
        if token >= replay {
            let row = sequence.first_row + (token - replay) as usize;
            return Some(layer.inputs.get().wrapping_add(row * layer.width));
        }
        if token >= 0 {
            return Some(layer.state.stash(layer.index, sequence.slot, token as usize));
        }
        let kept = layer.spec.conv_width as isize - 1;
        let window = layer.state.window(layer.index, sequence.slot);
        (!self.fresh)
            .then(|| window.wrapping_add((kept + token) as usize * layer.spec.conv_channels()).cast_const())
    }

    /// (b, a) of a token and value head.
    #[inline(always)]
    fn gates(&self, token: usize, value_head: usize) -> (f32, f32) {
        let spec = self.layer.spec;
        let replayed = token < self.sequence.replay;
        let after = spec.conv_channels() + if replayed { 0 } else { spec.value_size() };
        let Some(base) = self.raw(token as isize) else { return (0.0, 0.0) };
        // SAFETY: b and a follow the channels (and z, in a row of the step), value_heads of each.
        unsafe {
            (base.add(after + value_head).read(), base.add(after + spec.value_heads + value_head).read())
        }
    }

    /// Runs tokens `start..end` (counted from the first replayed). Drafts run on a copy of the state.
    #[inline(always)]
    fn chunk<A: Arch>(
        &self,
        start: usize,
        end: usize,
        drafts: bool,
        first_draft: bool,
        workspace: &mut Workspace,
    ) {
        let spec = self.layer.spec;
        let value_lanes = self.layer.state.value_tiles * LANES;
        let token_size = 2 * spec.key_dim + 2 * self.repeats * value_lanes;
        let count = end - start;
        workspace.tokens.resize(workspace.tokens.len().max(CHUNK * token_size), 0.0);
        workspace.gates.resize(workspace.gates.len().max(CHUNK * self.repeats), Gate::default());
        workspace.products.resize(workspace.products.len().max(CHUNK), 0.0);

        for i in 0..count {
            let token = &mut workspace.tokens[i * token_size..(i + 1) * token_size];
            self.convolve::<A>(start + i, value_lanes, token);
            let (q, rest) = token.split_at_mut(spec.key_dim);
            let k = &mut rest[..spec.key_dim];
            unit_length::<A>(q, 1.0 / (spec.key_dim as f32).sqrt());
            unit_length::<A>(k, 1.0);
            workspace.products[i] = dot::<A>(q, k);
            for repeat in 0..self.repeats {
                let head = self.key_head * self.repeats + repeat;
                let (b, a) = self.gates(start + i, head);
                let weights = self.layer.weights;
                let log_decay = weights.decay[head] * lanes::softplus(a + weights.dt_bias[head]);
                workspace.gates[i * self.repeats + repeat] =
                    Gate { log_decay, decay: log_decay.exp(), beta: lanes::sigmoid::<A>(b) };
            }
        }
        // Tokens that may be replayed or dropped, and few of them, take the recurrent form, whose bits do not depend on how
        // many come at once.
        let in_chunk = count >= chunked::MIN_TOKENS
            && chunked::pays(spec.key_dim)
            && !drafts
            && start >= self.sequence.replay;
        if in_chunk {
            let dots = &mut workspace.chunked.dots;
            dots.resize(2 * CHUNK * CHUNK, 0.0);
            for i in 0..count {
                for j in 0..=i {
                    let of = |token: usize, at: usize| {
                        &workspace.tokens[token * token_size + at..][..spec.key_dim]
                    };
                    let k = of(j, spec.key_dim);
                    dots[i * CHUNK + j] = dot::<A>(of(i, spec.key_dim), k);
                    dots[(CHUNK + i) * CHUNK + j] = dot::<A>(of(i, 0), k);
                }
            }
        }
        for repeat in 0..self.repeats {
            self.recur(
                repeat,
                count,
                token_size,
                value_lanes,
                drafts,
                first_draft,
                start == 0,
                in_chunk,
                workspace,
            );
        }
        if end > self.sequence.replay {
            self.emit::<A>(start, count, token_size, value_lanes, workspace);
        }
    }

    /// Convolution and SiLU of one token's q, k and v channels.
    #[inline(always)]
    fn convolve<A: Arch>(&self, token: usize, value_lanes: usize, out: &mut [f32]) {
        let spec = self.layer.spec;
        let channels = spec.conv_channels();
        let taps = spec.conv_width;
        let [q, k, v] = channel_ranges(spec, self.key_head);
        let mut parts = [(0, 0, 0); 2 + MAX_REPEATS];
        parts[0] = (q.0, q.1, 0);
        parts[1] = (k.0, k.1, spec.key_dim);
        for repeat in 0..self.repeats {
            let at = 2 * spec.key_dim + 2 * repeat * value_lanes;
            parts[2 + repeat] = (v.0 + repeat * spec.value_dim, spec.value_dim, at);
        }
        for &(channel, len, at) in &parts[..2 + self.repeats] {
            let out = &mut out[at..at + len];
            out.fill(0.0);
            for tap in 0..taps {
                let Some(raw) = self.raw(token as isize + tap as isize + 1 - taps as isize) else { continue };
                // SAFETY: every source of raw inputs holds all channels, and nobody writes them in this phase but
                // this item, when it has finished reading.
                let raw = unsafe { std::slice::from_raw_parts(raw.add(channel), len) };
                let weight = &self.layer.weights.conv[tap * channels + channel..][..len];
                for ((out, raw), weight) in out.iter_mut().zip(raw).zip(weight) {
                    *out = fma::<A>(*raw, *weight, *out);
                }
            }
            out.iter_mut().for_each(|value| *value = lanes::silu::<A>(*value));
        }
    }

    /// One value head's recurrence through a chunk.
    #[inline(always)]
    #[allow(clippy::too_many_arguments)]
    fn recur(
        &self,
        repeat: usize,
        count: usize,
        token_size: usize,
        value_lanes: usize,
        drafts: bool,
        first_draft: bool,
        first: bool,
        in_chunk: bool,
        workspace: &mut Workspace,
    ) {
        let pool = self.layer.state;
        let key_dim = self.layer.spec.key_dim;
        let head = self.key_head * self.repeats + repeat;
        let stored = pool.state(self.layer.index, self.sequence.slot, head);
        let elements = pool.head_elements();
        let in_place = pool.element == Element::F32 && !drafts;
        if !in_place {
            workspace.state.resize(workspace.state.len().max(self.repeats * elements), 0.0);
        }
        let zero = first && self.fresh;
        let state: *mut f32 = if in_place {
            stored.cast()
        } else {
            let copy = &mut workspace.state[repeat * elements..(repeat + 1) * elements];
            if !drafts || first_draft {
                for (i, value) in copy.iter_mut().enumerate() {
                    // SAFETY: the stored head has `elements` elements.
                    *value = if zero { 0.0 } else { unsafe { fetch(pool.element, stored, i) } };
                }
            }
            copy.as_mut_ptr()
        };
        if in_place && zero {
            // SAFETY: the head's state belongs to this item.
            unsafe { std::slice::from_raw_parts_mut(state, elements) }.fill(0.0);
        }
        let tile_elements = key_dim * LANES;
        let v_at = 2 * key_dim + 2 * repeat * value_lanes;
        if in_chunk {
            // SAFETY: the head's state, or this thread's copy of it, has `elements` elements.
            let state = unsafe { std::slice::from_raw_parts_mut(state, elements) };
            self.layer.isa.run(Chunk {
                isa: self.layer.isa,
                count,
                key_dim,
                value_lanes,
                tokens: &mut workspace.tokens,
                token_size,
                v_at,
                gates: &workspace.gates[repeat..],
                gate_stride: self.repeats,
                state,
                workspace: &mut workspace.chunked,
            });
        }
        let mut tile = if in_chunk { pool.value_tiles } else { 0 };
        while tile < pool.value_tiles {
            let tiles = if pool.value_tiles - tile >= 4 { 4 } else { 1 };
            let step = recurrence::choose(self.layer.isa, tiles);
            for i in 0..count {
                let token = &mut workspace.tokens[i * token_size..(i + 1) * token_size];
                let Gate { decay, beta, .. } = workspace.gates[i * self.repeats + repeat];
                let at = v_at + tile * LANES;
                let base = token.as_mut_ptr();
                // SAFETY: a token holds q, k and, from `v_at`, v and o of this head; the tiles belong to this item.
                unsafe {
                    let token = recurrence::Token {
                        q: base,
                        k: base.add(key_dim),
                        product: workspace.products[i],
                        decay,
                        beta,
                        v: base.add(at),
                        o: base.add(at + value_lanes),
                    };
                    step(state.add(tile * tile_elements), key_dim, &token);
                }
            }
            tile += tiles;
        }
        if !in_place && !drafts {
            for (i, value) in workspace.state[repeat * elements..(repeat + 1) * elements].iter().enumerate() {
                // SAFETY: as above.
                unsafe { store(pool.element, stored, i, *value) };
            }
        }
    }

    /// Gated norm of a chunk's outputs into the input rows of the output projection.
    #[inline(always)]
    fn emit<A: Arch>(
        &self,
        start: usize,
        count: usize,
        token_size: usize,
        value_lanes: usize,
        workspace: &mut Workspace,
    ) {
        let (layer, spec) = (self.layer, self.layer.spec);
        for i in 0..count {
            let row = self.sequence.first_row + start + i - self.sequence.replay;
            for repeat in 0..self.repeats {
                let head = self.key_head * self.repeats + repeat;
                let at = i * token_size + 2 * spec.key_dim + 2 * repeat * value_lanes;
                let (normed, o) = workspace.tokens[at..at + 2 * value_lanes].split_at_mut(value_lanes);
                let normed = &mut normed[..spec.value_dim];
                lanes::rms_norm::<A>(&o[..spec.value_dim], &layer.weights.norm, layer.eps, normed);
                let z_at = row * layer.width + spec.conv_channels() + head * spec.value_dim;
                // SAFETY: z was written in an earlier phase; nobody writes it now.
                let z = unsafe { layer.inputs.part(z_at, spec.value_dim) };
                for (value, z) in normed.iter_mut().zip(z.iter()) {
                    *value *= lanes::silu::<A>(*z);
                }
                // SAFETY: this item alone writes this row's columns of this head.
                unsafe { layer.output.part(row * spec.value_size() + head * spec.value_dim, spec.value_dim) }
                    .copy_from_slice(normed);
            }
        }
    }

    /// Moves the window to the last committed token and leaves the drafts' inputs in the stash.
    #[inline(always)]
    fn finish(&self, committed: usize, workspace: &mut Workspace) {
        let (layer, spec, sequence) = (self.layer, self.layer.spec, self.sequence);
        let ranges = channel_ranges(spec, self.key_head);
        let kept = spec.conv_width - 1;
        let size: usize = ranges.iter().map(|range| range.1).sum();
        workspace.window.clear();
        for i in 0..kept {
            let raw = self.raw(committed as isize + i as isize - kept as isize);
            for (channel, len) in ranges {
                match raw {
                    // SAFETY: every source of raw inputs holds all channels.
                    Some(raw) => workspace
                        .window
                        .extend_from_slice(unsafe { std::slice::from_raw_parts(raw.add(channel), len) }),
                    None => workspace.window.extend(std::iter::repeat_n(0.0, len)),
                }
            }
        }
        let window = Shared(layer.state.window(layer.index, sequence.slot));
        for i in 0..kept {
            let mut from = i * size;
            for (channel, len) in ranges {
                // SAFETY: these channels of this slot's window belong to this item.
                let to = unsafe { window.part(i * spec.conv_channels() + channel, len) };
                to.copy_from_slice(&workspace.window[from..from + len]);
                from += len;
            }
        }
        for draft in 0..sequence.drafts.len() {
            let row =
                layer.inputs.get().wrapping_add((sequence.first_row + sequence.kept + draft) * layer.width);
            let to = Shared(layer.state.stash(layer.index, sequence.slot, draft));
            let gates = spec.conv_channels() + self.key_head * self.repeats;
            let pairs = ranges.map(|(channel, len)| (channel, channel, len));
            let b_and_a = [
                (gates + spec.value_size(), gates, self.repeats),
                (gates + spec.value_size() + spec.value_heads, gates + spec.value_heads, self.repeats),
            ];
            for (from, at, len) in pairs.into_iter().chain(b_and_a) {
                // SAFETY: these elements of the stash belong to this item, and all replayed reads are done.
                unsafe { to.part(at, len) }
                    .copy_from_slice(unsafe { std::slice::from_raw_parts(row.add(from), len) });
            }
        }
    }
}

/// Value heads that may share a key head; more are refused when a model is loaded.
pub const MAX_REPEATS: usize = 16;

#[inline(always)]
fn dot<A: Arch>(a: &[f32], b: &[f32]) -> f32 {
    let mut sums: Lanes = [0.0; LANES];
    let (a_lanes, b_lanes) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest = a_lanes.remainder().iter().zip(b_lanes.remainder());
    for (a, b) in a_lanes.zip(b_lanes) {
        for lane in 0..LANES {
            sums[lane] = fma::<A>(a[lane], b[lane], sums[lane]);
        }
    }
    for (sum, (a, b)) in sums.iter_mut().zip(rest) {
        *sum = fma::<A>(*a, *b, *sum);
    }
    lanes::add_up(sums)
}

/// x / sqrt(sum of squares + 1e-6) * scale
#[inline(always)]
fn unit_length<A: Arch>(x: &mut [f32], scale: f32) {
    let factor = scale / (lanes::sum_of_squares::<A>(x) + 1e-6).sqrt();
    x.iter_mut().for_each(|value| *value *= factor);
}
