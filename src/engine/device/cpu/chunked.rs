//! The chunked form of the delta rule: up to [`CHUNK`] tokens of one value head at once.
//!
//! With G the running sum of the log decays within the chunk, D_ij = e^(G_i - G_j) for j <= i (its exponent is never above 0) and S
//! the state before it:
//!     A   = b_i (k_i·k_j) D_ij for j < i
//!     W   = solution of (I + A) W = b (V - e^G K S), by forward substitution
//!     O   = e^G Q S + (q_i·k_j D_ij for j <= i) W
//!     S   = e^G_last S + Kᵀ (e^(G_last - G) W)
//! The three products with the state are tiles of matrix products, so the state is read twice and written once a chunk
//! where the recurrent form does so for every token. Both forms agree up to rounding.

use super::gemm::{self, MAX_TILE, Tile, max_tile};
use super::isa::{Arch, Isa, LANES, Work, fma};
use super::lanes::{self, Lanes};

/// Whether the chunked form is the faster one. Where 64 value dims of a state stay in the L1 it is not: with 128 key dims the
/// recurrent form takes 4,096 vector operations a token and head, this one 3,450 and as much again in packing operands (measured
/// with AVX-512: 130 and 80 GFLOP/s by the recurrence's count).
pub fn pays(key_dim: usize) -> bool {
    4 * LANES * key_dim * size_of::<f32>() > 32 << 10
}

/// Tokens of a chunk: two tiles of the widest set. The work within a chunk grows with its square.
pub const CHUNK: usize = 24;
/// Fewer tokens than this take the recurrent form.
pub const MIN_TOKENS: usize = 8;

/// What a token brings to a value head.
#[derive(Debug, Clone, Copy, Default)]
pub struct Gate {
    /// g, the log of the decay.
    pub log_decay: f32,
    /// e^g
    pub decay: f32,
    pub beta: f32,
}

/// Buffers of one thread.
#[derive(Debug, Default)]
pub struct Workspace {
    /// k_i·k_j and q_i·k_j, [2][CHUNK][CHUNK]; the same for all value heads of a key head.
    pub dots: Vec<f32>,
    /// Tile operands, [key_dim][T] or [tokens][T].
    packed: Vec<f32>,
    /// K S, then Q S, [tokens][value_lanes] each.
    with_state: Vec<f32>,
    /// W, [tokens][value_lanes].
    writes: Vec<f32>,
}

/// One chunk of one value head. Token i's q, k, v and o lie at `tokens + i * token_size` plus 0, `key_dim`, `v_at` and
/// `v_at + value_lanes`.
pub struct Chunk<'a> {
    pub isa: Isa,
    pub count: usize,
    pub key_dim: usize,
    /// Value dims, in whole tiles of 16.
    pub value_lanes: usize,
    pub tokens: &'a mut [f32],
    pub token_size: usize,
    pub v_at: usize,
    /// Of token i at `i * gate_stride`.
    pub gates: &'a [Gate],
    pub gate_stride: usize,
    /// [value_lanes / 16][key_dim][16]
    pub state: &'a mut [f32],
    pub workspace: &'a mut Workspace,
}

fn grow(values: &mut Vec<f32>, len: usize) {
    if values.len() < len {
        values.resize(len, 0.0);
    }
}

impl Chunk<'_> {
    /// out[t] = rows of `packed` ([columns][T]) times the 16-lane columns at `w0` and `w1`, 64 bytes apart.
    fn tile(&self, w0: *const f32, w1: *const f32, stride: usize, columns: usize, tokens: usize) -> Tile {
        debug_assert!(tokens <= MAX_TILE);
        let packed = self.workspace.packed.as_ptr();
        Tile::dense(w0.cast(), w1.cast(), 4 * stride, columns, packed).prefetching(w0.cast(), w1.cast())
    }

    /// `with_state[i]` = x_i S for the vectors at `at` of every token.
    #[inline(always)]
    fn read_state(&mut self, at: usize, out: usize) {
        let (dim, lanes) = (self.key_dim, self.value_lanes);
        let tile_elements = dim * LANES;
        let mut first = 0;
        while first < self.count {
            let tokens = (self.count - first).min(max_tile(self.isa));
            for t in 0..tokens {
                let x = &self.tokens[(first + t) * self.token_size + at..][..dim];
                for (slot, value) in self.workspace.packed[t..].iter_mut().step_by(tokens).zip(x) {
                    *slot = *value;
                }
            }
            let run = gemm::dense(self.isa, gemm::Element::F32, tokens);
            let mut result = [[0f32; 2 * LANES]; MAX_TILE];
            for value_tile in (0..lanes / LANES).step_by(2) {
                let pair = (value_tile + 1) * LANES < lanes;
                let w0 = self.state[value_tile * tile_elements..].as_ptr();
                let w1 = if pair { w0.wrapping_add(tile_elements) } else { w0 };
                let tile =
                    self.tile(w0, w1, LANES, dim, tokens).into(result.as_mut_ptr().cast(), 2 * LANES, false);
                // SAFETY: value tiles hold key_dim columns of 16, `packed` [key_dim][tokens], the result MAX_TILE rows.
                unsafe { run(&tile) };
                let width = if pair { 2 * LANES } else { LANES };
                for t in 0..tokens {
                    let to = out + (first + t) * lanes + value_tile * LANES;
                    self.workspace.with_state[to..to + width].copy_from_slice(&result[t][..width]);
                }
            }
            first += tokens;
        }
    }

    /// S = e^G_last S + Kᵀ (e^(G_last - G) W)
    #[inline(always)]
    fn write_state(&mut self, logs: &[f32; CHUNK]) {
        let (dim, lanes, count) = (self.key_dim, self.value_lanes, self.count);
        let tile_elements = dim * LANES;
        let last = logs[count - 1];
        let kept = last.exp();
        let mut rest = [0f32; CHUNK];
        for i in 0..count {
            rest[i] = (last - logs[i]).exp();
        }
        let mut first = 0;
        while first < dim {
            let rows = (dim - first).min(max_tile(self.isa));
            for i in 0..count {
                let k = &self.tokens[i * self.token_size + dim + first..][..rows];
                for (slot, value) in self.workspace.packed[i * rows..].iter_mut().zip(k) {
                    *slot = value * rest[i];
                }
            }
            let run = gemm::dense(self.isa, gemm::Element::F32, rows);
            for value_tile in (0..lanes / LANES).step_by(2) {
                let pair = (value_tile + 1) * LANES < lanes;
                let w0 = self.workspace.writes[value_tile * LANES..].as_ptr();
                let w1 = if pair { w0.wrapping_add(LANES) } else { w0 };
                let mut result = [[0f32; 2 * LANES]; MAX_TILE];
                let tile =
                    self.tile(w0, w1, lanes, count, rows).into(result.as_mut_ptr().cast(), 2 * LANES, false);
                // SAFETY: `writes` holds `count` rows of value_lanes, `packed` [count][rows], the result MAX_TILE rows.
                unsafe { run(&tile) };
                for half in 0..1 + usize::from(pair) {
                    let at = (value_tile + half) * tile_elements + first * LANES;
                    let state = &mut self.state[at..at + rows * LANES];
                    for (state, added) in state.chunks_exact_mut(LANES).zip(&result) {
                        for lane in 0..LANES {
                            state[lane] = kept * state[lane] + added[half * LANES + lane];
                        }
                    }
                }
            }
            first += rows;
        }
    }
}

impl Work for Chunk<'_> {
    type Output = ();

    #[inline(always)]
    fn run<A: Arch>(mut self) {
        let (dim, lanes, count) = (self.key_dim, self.value_lanes, self.count);
        grow(&mut self.workspace.packed, MAX_TILE * dim.max(CHUNK));
        grow(&mut self.workspace.with_state, 2 * CHUNK * lanes);
        grow(&mut self.workspace.writes, CHUNK * lanes + LANES);
        let mut logs = [0f32; CHUNK];
        let mut sum = 0.0;
        for i in 0..count {
            sum += self.gates[i * self.gate_stride].log_decay;
            logs[i] = sum;
        }
        self.read_state(dim, 0);
        self.read_state(0, CHUNK * lanes);
        for i in 0..count {
            let beta = self.gates[i * self.gate_stride].beta;
            let decay = logs[i].exp();
            let token = &mut self.tokens[i * self.token_size + self.v_at..][..2 * lanes];
            let (v, o) = token.split_at_mut(lanes);
            let (done, open) = self.workspace.writes.split_at_mut(i * lanes);
            let write = &mut open[..lanes];
            let with_k = &self.workspace.with_state[i * lanes..][..lanes];
            let with_q = &self.workspace.with_state[(CHUNK + i) * lanes..][..lanes];
            for lane in 0..lanes {
                write[lane] = beta * (v[lane] - decay * with_k[lane]);
                o[lane] = decay * with_q[lane];
            }
            let mut kk = [0f32; CHUNK];
            let mut qk = [0f32; CHUNK];
            for j in 0..CHUNK {
                // Past the diagonal the exponent would be positive; those are not used.
                let between = lanes::exp::<A>((logs[i] - logs[j]).min(0.0));
                kk[j] = -beta * self.workspace.dots[i * CHUNK + j] * between;
                qk[j] = self.workspace.dots[(CHUNK + i) * CHUNK + j] * between;
            }
            for tile in (0..lanes).step_by(LANES) {
                let write: &mut [f32] = &mut write[tile..tile + LANES];
                let o: &mut [f32] = &mut o[tile..tile + LANES];
                let (mut w, mut out): (Lanes, Lanes) = ([0.0; LANES], [0.0; LANES]);
                w.copy_from_slice(write);
                out.copy_from_slice(o);
                for j in 0..i {
                    let earlier = &done[j * lanes + tile..][..LANES];
                    for lane in 0..LANES {
                        w[lane] = fma::<A>(kk[j], earlier[lane], w[lane]);
                        out[lane] = fma::<A>(qk[j], earlier[lane], out[lane]);
                    }
                }
                write.copy_from_slice(&w);
                o.copy_from_slice(&out);
            }
            let own = self.workspace.dots[(CHUNK + i) * CHUNK + i];
            for lane in 0..lanes {
                o[lane] = fma::<A>(own, write[lane], o[lane]);
            }
        }
        self.write_state(&logs);
    }
}

#[cfg(test)]
mod tests {
    use super::super::recurrence;
    use super::*;

    fn noise(seed: usize, len: usize) -> Vec<f32> {
        (0..len).map(|i| ((i * 53 + seed * 7919) as f32 * 0.811).sin()).collect()
    }

    fn dot(a: &[f32], b: &[f32]) -> f32 {
        a.iter().zip(b).map(|(a, b)| a * b).sum()
    }

    /// Every chunk length, several head sizes, slow and fast decay: the same as token by token.
    #[test]
    fn chunks_equal_the_recurrence() {
        for (key_dim, value_lanes) in [(16, 16), (128, 128), (50, 48)] {
            for count in 1..=CHUNK {
                for speed in [0.001f32, 0.3, 40.0] {
                    let token_size = 2 * key_dim + 2 * value_lanes;
                    let mut tokens = noise(count, CHUNK * token_size);
                    for token in tokens.chunks_exact_mut(token_size) {
                        for head in token[..2 * key_dim].chunks_exact_mut(key_dim) {
                            let length = dot(head, head).sqrt();
                            head.iter_mut().for_each(|value| *value /= length);
                        }
                    }
                    let gates: Vec<Gate> = noise(3, count)
                        .iter()
                        .map(|g| {
                            let log_decay = -speed * g.abs();
                            Gate { log_decay, decay: log_decay.exp(), beta: 0.5 + 0.4 * g }
                        })
                        .collect();
                    let start = noise(5, value_lanes * key_dim);
                    let (mut state, mut right) = (start.clone(), tokens.clone());
                    for i in 0..count {
                        let base = right[i * token_size..].as_mut_ptr();
                        let q = &tokens[i * token_size..][..key_dim];
                        let k = &tokens[i * token_size + key_dim..][..key_dim];
                        for tile in 0..value_lanes / LANES {
                            // SAFETY: offsets inside one token, one tile of the state.
                            unsafe {
                                let token = recurrence::Token {
                                    q: base,
                                    k: base.add(key_dim),
                                    product: dot(q, k),
                                    decay: gates[i].decay,
                                    beta: gates[i].beta,
                                    v: base.add(2 * key_dim + tile * LANES),
                                    o: base.add(2 * key_dim + value_lanes + tile * LANES),
                                };
                                let state = state[tile * key_dim * LANES..].as_mut_ptr();
                                recurrence::choose(Isa::detect(), 1)(state, key_dim, &token);
                            }
                        }
                    }
                    let mut workspace =
                        Workspace { dots: vec![0.0; 2 * CHUNK * CHUNK], ..Workspace::default() };
                    for i in 0..count {
                        for j in 0..=i {
                            let of = |token: usize, at: usize| &tokens[token * token_size + at..][..key_dim];
                            workspace.dots[i * CHUNK + j] = dot(of(i, key_dim), of(j, key_dim));
                            workspace.dots[(CHUNK + i) * CHUNK + j] = dot(of(i, 0), of(j, key_dim));
                        }
                    }
                    for isa in Isa::available() {
                        let (mut found_state, mut found) = (start.clone(), tokens.clone());
                        isa.run(Chunk {
                            isa,
                            count,
                            key_dim,
                            value_lanes,
                            tokens: &mut found,
                            token_size,
                            v_at: 2 * key_dim,
                            gates: &gates,
                            gate_stride: 1,
                            state: &mut found_state,
                            workspace: &mut workspace,
                        });
                        let worst = |a: &[f32], b: &[f32]| {
                            a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max)
                        };
                        let (o, s) = (worst(&found, &right), worst(&found_state, &state));
                        assert!(
                            o < 2e-5 && s < 2e-5,
                            "{isa:?} {key_dim} {value_lanes}, {count} tokens, {speed}: outputs {o}, state {s}"
                        );
                    }
                }
            }
        }
    }
}
