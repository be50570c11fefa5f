//! The inner loop of the delta rule: one token on 16 value dims times `V` tiles of a state, [key_dim][16] each.
//!
//! Two passes over the tiles, which stay in the L1: the first reads Sᵀk and Sᵀq, 2 multiply-adds an element; the second
//! writes e^g S + k dᵀ, a multiply and a multiply-add. Lanes are value dims, so nothing is added across lanes, and every
//! instruction set adds in the order of key dims.

use super::isa::{Arch, Isa, LANES, Plain, fma};

/// One token of one value head.
#[derive(Debug, Clone, Copy)]
pub struct Token {
    /// [key_dim], of length 1 (q scaled).
    pub q: *const f32,
    pub k: *const f32,
    /// k·q
    pub product: f32,
    /// e^g
    pub decay: f32,
    pub beta: f32,
    /// [16 V]
    pub v: *const f32,
    /// [16 V]
    pub o: *mut f32,
}

/// Runs a token through `V` tiles.
///
/// # Safety
/// `state` covers V tiles of [key_dim][16], the token's pointers what they say, and the CPU has the instruction set the
/// function was chosen for.
pub type StepFn = unsafe fn(state: *mut f32, key_dim: usize, token: &Token);

/// The function for 4 tiles or for 1.
pub fn choose(isa: Isa, tiles: usize) -> StepFn {
    match (isa, tiles) {
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512, 4) => avx512::step::<4>,
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512, _) => avx512::step::<1>,
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx2, 4) => avx2::step::<4>,
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx2, _) => avx2::step::<1>,
        (_, 4) => portable::<Plain, 4>,
        _ => portable::<Plain, 1>,
    }
}

unsafe fn portable<A: Arch, const V: usize>(state: *mut f32, key_dim: usize, token: &Token) {
    for tile in 0..V {
        // SAFETY: the contract of `StepFn` covers every access below.
        unsafe {
            let state = state.add(tile * key_dim * LANES).cast::<[f32; LANES]>();
            let (mut with_k, mut with_q) = ([0f32; LANES], [0f32; LANES]);
            for i in 0..key_dim {
                let s = state.add(i).read_unaligned();
                let (k, q) = (*token.k.add(i), *token.q.add(i));
                for lane in 0..LANES {
                    with_k[lane] = fma::<A>(s[lane], k, with_k[lane]);
                    with_q[lane] = fma::<A>(s[lane], q, with_q[lane]);
                }
            }
            let v = token.v.add(tile * LANES).cast::<[f32; LANES]>().read_unaligned();
            let (mut write, mut out) = ([0f32; LANES], [0f32; LANES]);
            for lane in 0..LANES {
                write[lane] = token.beta * (v[lane] - token.decay * with_k[lane]);
                out[lane] = fma::<A>(token.product, write[lane], token.decay * with_q[lane]);
            }
            token.o.add(tile * LANES).cast::<[f32; LANES]>().write_unaligned(out);
            for i in 0..key_dim {
                let mut s = state.add(i).read_unaligned();
                let k = *token.k.add(i);
                for lane in 0..LANES {
                    s[lane] = fma::<A>(k, write[lane], token.decay * s[lane]);
                }
                state.add(i).write_unaligned(s);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use std::arch::x86_64::*;

    use super::{LANES, Token};

    #[target_feature(enable = "avx512f")]
    pub unsafe fn step<const V: usize>(state: *mut f32, key_dim: usize, token: &Token) {
        // SAFETY: the contract of `StepFn` covers every access below.
        unsafe {
            let tile = key_dim * LANES;
            let mut with_k = [_mm512_setzero_ps(); V];
            let mut with_q = [_mm512_setzero_ps(); V];
            for i in 0..key_dim {
                let k = _mm512_set1_ps(*token.k.add(i));
                let q = _mm512_set1_ps(*token.q.add(i));
                for t in 0..V {
                    let s = _mm512_loadu_ps(state.add(t * tile + i * LANES));
                    with_k[t] = _mm512_fmadd_ps(s, k, with_k[t]);
                    with_q[t] = _mm512_fmadd_ps(s, q, with_q[t]);
                }
            }
            let decay = _mm512_set1_ps(token.decay);
            let beta = _mm512_set1_ps(token.beta);
            let product = _mm512_set1_ps(token.product);
            let mut write = [_mm512_setzero_ps(); V];
            for t in 0..V {
                let v = _mm512_loadu_ps(token.v.add(t * LANES));
                write[t] = _mm512_mul_ps(beta, _mm512_sub_ps(v, _mm512_mul_ps(decay, with_k[t])));
                let out = _mm512_fmadd_ps(product, write[t], _mm512_mul_ps(decay, with_q[t]));
                _mm512_storeu_ps(token.o.add(t * LANES), out);
            }
            for i in 0..key_dim {
                let k = _mm512_set1_ps(*token.k.add(i));
                for t in 0..V {
                    let at = state.add(t * tile + i * LANES);
                    let kept = _mm512_mul_ps(decay, _mm512_loadu_ps(at));
                    _mm512_storeu_ps(at, _mm512_fmadd_ps(k, write[t], kept));
                }
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::x86_64::*;

    use super::{LANES, Token};

    /// Two tiles' halves of 8 lanes at a time would spill; one tile is two registers of each sum.
    #[target_feature(enable = "avx2,fma")]
    pub unsafe fn step<const V: usize>(state: *mut f32, key_dim: usize, token: &Token) {
        for tile in 0..V {
            // SAFETY: the contract of `StepFn` covers every access below.
            unsafe {
                let state = state.add(tile * key_dim * LANES);
                let mut with_k = [_mm256_setzero_ps(); 2];
                let mut with_q = [_mm256_setzero_ps(); 2];
                for i in 0..key_dim {
                    let k = _mm256_set1_ps(*token.k.add(i));
                    let q = _mm256_set1_ps(*token.q.add(i));
                    for half in 0..2 {
                        let s = _mm256_loadu_ps(state.add(i * LANES + 8 * half));
                        with_k[half] = _mm256_fmadd_ps(s, k, with_k[half]);
                        with_q[half] = _mm256_fmadd_ps(s, q, with_q[half]);
                    }
                }
                let decay = _mm256_set1_ps(token.decay);
                let beta = _mm256_set1_ps(token.beta);
                let product = _mm256_set1_ps(token.product);
                let mut write = [_mm256_setzero_ps(); 2];
                for half in 0..2 {
                    let at = tile * LANES + 8 * half;
                    let v = _mm256_loadu_ps(token.v.add(at));
                    let read = _mm256_mul_ps(decay, with_k[half]);
                    write[half] = _mm256_mul_ps(beta, _mm256_sub_ps(v, read));
                    let out = _mm256_fmadd_ps(product, write[half], _mm256_mul_ps(decay, with_q[half]));
                    _mm256_storeu_ps(token.o.add(at), out);
                }
                for i in 0..key_dim {
                    let k = _mm256_set1_ps(*token.k.add(i));
                    for half in 0..2 {
                        let at = state.add(i * LANES + 8 * half);
                        let kept = _mm256_mul_ps(decay, _mm256_loadu_ps(at));
                        _mm256_storeu_ps(at, _mm256_fmadd_ps(k, write[half], kept));
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::isa::Fused;
    use super::*;

    #[test]
    fn every_set_gives_the_reference_bits() {
        for key_dim in [2, 16, 50, 128] {
            let noise = |seed: usize, len: usize| -> Vec<f32> {
                (0..len).map(|i| ((i * 37 + seed * 101) as f32 * 0.61).sin() * 0.3).collect()
            };
            let (q, k, v) = (noise(1, key_dim), noise(2, key_dim), noise(3, 4 * LANES));
            let start = noise(4, 4 * key_dim * LANES);
            let run = |step: &dyn Fn(*mut f32, usize, &Token)| {
                let (mut state, mut o) = (start.clone(), vec![0f32; 4 * LANES]);
                for _ in 0..3 {
                    let token = Token {
                        q: q.as_ptr(),
                        k: k.as_ptr(),
                        product: 0.7,
                        decay: 0.93,
                        beta: 0.4,
                        v: v.as_ptr(),
                        o: o.as_mut_ptr(),
                    };
                    step(state.as_mut_ptr(), key_dim, &token);
                }
                (state, o)
            };
            // SAFETY: four tiles of state, and functions of sets this CPU has.
            let right = run(&|state, dim, token| unsafe { portable::<Fused, 4>(state, dim, token) });
            for isa in Isa::available() {
                if isa == Isa::Portable && !Plain::FMA {
                    continue;
                }
                let four = choose(isa, 4);
                // SAFETY: as above.
                assert_eq!(run(&|state, dim, token| unsafe { four(state, dim, token) }), right, "{isa:?}");
                let one = choose(isa, 1);
                let by_one = run(&|state, dim, token| {
                    for tile in 0..4 {
                        // SAFETY: tile by tile over the same four.
                        unsafe {
                            let part = Token {
                                v: token.v.add(tile * LANES),
                                o: token.o.add(tile * LANES),
                                ..*token
                            };
                            one(state.add(tile * dim * LANES), dim, &part);
                        }
                    }
                });
                assert_eq!(by_one, right, "{isa:?}, tile by tile");
            }
        }
    }
}
