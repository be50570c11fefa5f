//! Picks tokens from logits: the reference that other devices repeat.
//!
//! A draw is a function of (seed, position) alone, so a request's tokens do not depend on the batch it ran in, on
//! preemption or on speculation. [`draw_bits`] is two rounds of the splitmix64 finaliser; a GPU repeats it with
//! 64-bit multiplies and shifts.

use std::cmp::Ordering;

use super::request::SamplingParams;
use crate::{Error, Result};

/// The splitmix64 finaliser: a bijection of 64-bit words in which every input bit reaches every output bit.
pub fn mix64(mut word: u64) -> u64 {
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

/// 64 random bits for the token at `position` of a request with this seed:
/// `mix64(mix64(seed + G) + (position + 1) * G)`, all modulo 2^64, with G = 0x9e3779b97f4a7c15.
pub fn draw_bits(seed: u64, position: u64) -> u64 {
    const G: u64 = 0x9e37_79b9_7f4a_7c15;
    mix64(mix64(seed.wrapping_add(G)).wrapping_add(position.wrapping_add(1).wrapping_mul(G)))
}

/// The draw as a number in [0, 1): the top 24 bits, exact in f32.
pub fn draw_uniform(seed: u64, position: u64) -> f32 {
    (draw_bits(seed, position) >> 40) as f32 * (1.0 / 16_777_216.0)
}

/// Picks a token from one row of logits. Keep one a thread: it reuses its buffers.
///
/// Temperature divides the logits; then the `top_k` largest are kept (equal logits: the lower id first); then, of
/// their softmax, the smallest set of the most likely whose sum reaches `top_p`. The kept ones are laid end to end in
/// order of id, and the one in which `uniform * sum` falls is taken.
#[derive(Debug, Default)]
pub struct Sampler {
    kept: Vec<(f32, u32)>,
}

impl Sampler {
    /// Rows at or beyond `real_vocab_size` are padding and never sampled.
    ///
    /// # Errors
    /// [`Error::Invalid`] when a logit is not finite.
    pub fn sample(
        &mut self,
        logits: &[f32],
        real_vocab_size: usize,
        params: &SamplingParams,
        seed: u64,
        position: u64,
    ) -> Result<u32> {
        let logits = &logits[..real_vocab_size.min(logits.len())];
        let best = argmax(logits)?;
        if params.temperature <= 0.0 || params.top_k == 1 {
            return Ok(best);
        }
        let largest = logits[best as usize];
        let inverse_temperature = 1.0 / params.temperature;
        self.kept.clear();
        let weighed = logits.iter().zip(0u32..);
        self.kept.extend(weighed.map(|(&logit, id)| (((logit - largest) * inverse_temperature).exp(), id)));
        if params.top_k > 0 && params.top_k < self.kept.len() {
            // By logit, not by weight: far below the largest, weights are all 0.
            self.kept.select_nth_unstable_by(params.top_k - 1, |a, b| {
                logits[b.1 as usize].total_cmp(&logits[a.1 as usize]).then(a.1.cmp(&b.1))
            });
            self.kept.truncate(params.top_k);
        }
        if params.top_p < 1.0 {
            self.kept.sort_unstable_by(most_likely_first);
            let enough = params.top_p * self.kept.iter().map(|&(weight, _)| weight).sum::<f32>();
            let mut sum = 0.0;
            let reached = self.kept.iter().position(|&(weight, _)| {
                sum += weight;
                sum >= enough
            });
            self.kept.truncate(reached.map_or(self.kept.len(), |last| last + 1));
        }
        if params.top_k > 0 || params.top_p < 1.0 {
            self.kept.sort_unstable_by_key(|&(_, id)| id);
        }
        let total: f32 = self.kept.iter().map(|&(weight, _)| weight).sum();
        let target = draw_uniform(seed, position) * total;
        let mut sum = 0.0;
        for &(weight, id) in &self.kept {
            sum += weight;
            if target < sum {
                return Ok(id);
            }
        }
        // Rounding left the sum just short of the target: the last one that has any weight.
        Ok(self.kept.iter().rev().find(|&&(weight, _)| weight > 0.0).map_or(best, |&(_, id)| id))
    }
}

fn most_likely_first(a: &(f32, u32), b: &(f32, u32)) -> Ordering {
    b.0.total_cmp(&a.0).then(a.1.cmp(&b.1))
}

/// The id of the largest logit; of equal ones the lowest id.
///
/// # Errors
/// [`Error::Invalid`] when a logit is not finite, or there are none.
pub fn argmax(logits: &[f32]) -> Result<u32> {
    let mut best = 0;
    let mut largest = f32::NEG_INFINITY;
    let mut finite = !logits.is_empty();
    for (&logit, id) in logits.iter().zip(0u32..) {
        finite &= logit.is_finite();
        if logit > largest {
            (best, largest) = (id, logit);
        }
    }
    if finite { Ok(best) } else { Err(not_finite(logits)) }
}

/// ln of the softmax probability of `target`, in f64.
///
/// # Errors
/// [`Error::Invalid`] when a logit is not finite.
pub fn log_probability(logits: &[f32], target: u32) -> Result<f32> {
    let largest = f64::from(logits[argmax(logits)? as usize]);
    let sum: f64 = logits.iter().map(|&logit| (f64::from(logit) - largest).exp()).sum();
    let Some(&logit) = logits.get(target as usize) else {
        return Err(Error::invalid(
            format!("token {target} is outside the vocabulary of {}", logits.len()),
            "check that the tokens come from this model's tokenizer",
        ));
    };
    Ok((f64::from(logit) - largest - sum.ln()) as f32)
}

/// The error for a row of logits that holds NaN or an infinity.
pub fn not_finite(logits: &[f32]) -> Error {
    let fact = match logits.iter().position(|logit| !logit.is_finite()) {
        Some(id) => format!("the logit of token {id} is {}", logits[id]),
        None => "the model gave no logits".to_string(),
    };
    Error::invalid(fact, "the weights hold NaN or infinity, or overflow in this precision; try cpu_math=f32")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn params(temperature: f32, top_k: usize, top_p: f32) -> SamplingParams {
        SamplingParams { temperature, top_k, top_p }
    }

    /// Shares of each token over many positions.
    fn shares(logits: &[f32], real: usize, params: SamplingParams) -> Vec<f64> {
        const DRAWS: u64 = 20_000;
        let mut sampler = Sampler::default();
        let mut counts = vec![0.0; logits.len()];
        for position in 0..DRAWS {
            let token = sampler.sample(logits, real, &params, 7, position).unwrap();
            counts[token as usize] += 1.0;
        }
        counts.iter().map(|count| count / DRAWS as f64).collect()
    }

    #[test]
    fn draws_are_pinned() {
        // Known answers: a device that repeats the hash must find these.
        assert_eq!(draw_bits(0, 0), mix64(mix64(0x9e37_79b9_7f4a_7c15).wrapping_add(0x9e37_79b9_7f4a_7c15)));
        assert_eq!(mix64(0x9e37_79b9_7f4a_7c15), 0xe220_a839_7b1d_cdaf); // splitmix64's first output from seed 0
        let uniforms: Vec<f32> = (0..4096).map(|position| draw_uniform(3, position)).collect();
        assert!(uniforms.iter().all(|u| (0.0..1.0).contains(u)));
        let mean = uniforms.iter().sum::<f32>() / 4096.0;
        assert!((mean - 0.5).abs() < 0.02, "mean {mean}");
    }

    #[test]
    fn greedy_takes_the_lowest_id_of_equals_and_never_padding() {
        let mut sampler = Sampler::default();
        let logits = [1.0, 5.0, 5.0, 9.0];
        assert_eq!(sampler.sample(&logits, 3, &params(0.0, 0, 1.0), 0, 0).unwrap(), 1);
        assert_eq!(sampler.sample(&logits, 4, &params(0.0, 0, 1.0), 0, 0).unwrap(), 3);
    }

    #[test]
    fn sampling_follows_the_softmax() {
        let logits = [0.0, 1.0, 2.0, 50.0];
        let weights = [1.0, 1f64.exp(), 2f64.exp()];
        let total: f64 = weights.iter().sum();
        let found = shares(&logits, 3, params(1.0, 0, 1.0));
        for (share, weight) in found.iter().zip(weights) {
            assert!((share - weight / total).abs() < 0.012, "{found:?}");
        }
        assert_eq!(found[3], 0.0);
        // Half the temperature doubles every difference.
        let found = shares(&logits, 3, params(0.5, 0, 1.0));
        assert!((found[2] - 4f64.exp() / (1.0 + 2f64.exp() + 4f64.exp())).abs() < 0.012, "{found:?}");
    }

    #[test]
    fn top_k_and_top_p_cut_the_tail() {
        let logits = [2.0, 0.0, 2.0, 1.0, 2.0];
        let found = shares(&logits, 5, params(1.0, 2, 1.0));
        assert!(
            found[0] > 0.45 && found[2] > 0.45 && found[4] == 0.0,
            "equal logits: lower ids first: {found:?}"
        );
        // Probabilities 0.64, 0.24, 0.09, 0.03: 0.8 is reached with the second.
        let found = shares(&[3.0, 2.0, 1.0, 0.0], 4, params(1.0, 0, 0.8));
        assert!(found[1] > 0.2 && found[2] == 0.0 && found[3] == 0.0, "{found:?}");
        let found = shares(&[3.0, 2.0, 1.0, 0.0], 4, params(1.0, 0, 1e-6));
        assert_eq!(found[0], 1.0);
        assert_eq!(shares(&[0.0, 3.0], 2, params(1.0, 1, 1.0))[1], 1.0);
    }

    #[test]
    fn non_finite_logits_are_errors() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let error = Sampler::default().sample(&[0.0, bad], 2, &params(0.0, 0, 1.0), 0, 0).unwrap_err();
            assert!(error.to_string().contains("token 1"), "{error}");
        }
        assert!(Sampler::default().sample(&[], 0, &params(0.0, 0, 1.0), 0, 0).is_err());
        // Padding may hold anything.
        assert!(Sampler::default().sample(&[0.0, f32::NAN], 1, &params(1.0, 0, 1.0), 0, 0).is_ok());
    }

    #[test]
    fn log_probabilities_sum_to_one() {
        let logits = [0.5, -2.0, 30.0, 29.0];
        let sum: f32 = (0..4).map(|token| log_probability(&logits, token).unwrap().exp()).sum();
        assert!((sum - 1.0).abs() < 1e-6, "{sum}");
        assert!(log_probability(&logits, 4).is_err());
    }
}
