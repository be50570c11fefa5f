//! The tokens a simulated device "generates": a function of (request seed, position), so that a preempted and recomputed
//! request gets the same ones. No stop token is among them.
//!
//! For n-gram speculation the text repeats itself at a given rate (a pair of tokens comes again, so the proposer finds
//! what followed it), and drafts are kept with a given chance by position.

use super::noise::{hash, uniform};

/// How often a text repeats a pair of its own tokens, and how many drafts then hold.
#[derive(Debug, Clone, PartialEq)]
pub struct DraftModel {
    /// Share of positions that end a repeated pair.
    pub repeat_rate: f64,
    /// Share of drafts kept at each position; later positions repeat the last one. Falling.
    pub acceptance: Vec<f64>,
}

const REPEATS: u64 = 11;
const ACCEPTANCE: u64 = 12;

#[derive(Debug, Clone)]
pub struct Text {
    vocab: u64,
    stop_tokens: Vec<u32>,
    drafts: DraftModel,
}

impl Text {
    pub fn new(vocab: usize, stop_tokens: &[u32], drafts: DraftModel) -> Self {
        Self { vocab: vocab.max(1) as u64, stop_tokens: stop_tokens.to_vec(), drafts }
    }

    fn ends_pair(&self, seed: u64, position: u64) -> bool {
        self.drafts.repeat_rate > 0.0 && uniform(seed, position, REPEATS) < self.drafts.repeat_rate
    }

    /// The token at `position` of the request with `seed`.
    pub fn token(&self, seed: u64, position: u64) -> u32 {
        let key = if self.ends_pair(seed, position) {
            u64::MAX
        } else if self.ends_pair(seed, position.wrapping_add(1)) {
            u64::MAX - 1
        } else {
            position
        };
        let mut bits = hash(hash(seed) ^ key);
        loop {
            let token = (bits % self.vocab) as u32;
            if !self.stop_tokens.contains(&token) || self.stop_tokens.len() as u64 >= self.vocab {
                return token;
            }
            bits = hash(bits);
        }
    }

    /// How many of `drafts` drafted tokens from `position` on are kept.
    pub fn accepted(&self, seed: u64, position: u64, drafts: usize) -> usize {
        let draw = uniform(seed, position, ACCEPTANCE);
        let Some(last) = self.drafts.acceptance.last() else { return 0 };
        (0..drafts).take_while(|&i| draw < *self.drafts.acceptance.get(i).unwrap_or(last)).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(repeat_rate: f64) -> Text {
        Text::new(1000, &[0, 1], DraftModel { repeat_rate, acceptance: vec![0.6, 0.3] })
    }

    #[test]
    fn tokens_are_in_the_vocabulary_and_never_stop() {
        let text = text(0.05);
        for position in 0..5000 {
            let token = text.token(3, position);
            assert!((2..1000).contains(&token), "token {token} at {position}");
            assert_eq!(token, text.token(3, position));
        }
    }

    #[test]
    fn a_pair_comes_again_at_the_given_rate() {
        let text = text(0.05);
        let pair = (text.token(9, u64::MAX - 1), text.token(9, u64::MAX));
        let positions = 20_000u64;
        let seen =
            (1..positions).filter(|&p| (text.token(9, p - 1), text.token(9, p)) == pair).count() as f64;
        // Two ends in a row spoil the first of them: 0.05 * 0.95.
        let rate = seen / positions as f64;
        assert!((0.035..0.06).contains(&rate), "rate {rate}");
    }

    #[test]
    fn drafts_are_kept_with_the_given_chances() {
        let text = text(0.0);
        let kept: Vec<usize> = (0..20_000).map(|position| text.accepted(5, position, 3)).collect();
        let share = |least| kept.iter().filter(|&&n| n >= least).count() as f64 / kept.len() as f64;
        assert!((share(1) - 0.6).abs() < 0.015, "{}", share(1));
        assert!((share(2) - 0.3).abs() < 0.015, "{}", share(2));
        assert!((share(3) - 0.3).abs() < 0.015, "{}", share(3));
    }
}
