//! Seed streams: what makes two arms of one repeat see the same load, and two repeats a different one.
//!
//! Repeat r draws from stream (seed, r), with r = 0 the seed itself. Within a repeat each purpose (arrivals, lengths,
//! prompts, ...) has its own stream, so that a change of one knob never moves the draws of another.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    Arrivals = 1,
    Lengths = 2,
    Prompts = 3,
    ThinkTime = 4,
    Sampling = 5,
    WarmUp = 6,
}

/// The seed of repeat `repeat`: the seed itself for repeat 0, a hash of both otherwise.
pub fn repeat_seed(seed: u64, repeat: u32) -> u64 {
    if repeat == 0 { seed } else { mix(seed ^ mix(u64::from(repeat))) }
}

/// A generator for one purpose of one repeat's seed.
pub fn stream(seed: u64, purpose: Purpose) -> ChaCha8Rng {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(purpose as u64);
    rng
}

/// The seed of request `index`'s own draws.
pub fn request_seed(seed: u64, index: usize) -> u64 {
    mix(mix(seed ^ Purpose::Sampling as u64) ^ index as u64)
}

/// SplitMix64's step: every bit of the input reaches every bit of the output.
fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::RngCore;

    #[test]
    fn repeat_zero_is_the_seed_itself_and_others_differ() {
        assert_eq!(repeat_seed(7, 0), 7);
        let seeds: std::collections::HashSet<u64> =
            (0..100).flat_map(|seed| (0..100).map(move |repeat| repeat_seed(seed, repeat))).collect();
        assert_eq!(seeds.len(), 100 * 100);
    }

    #[test]
    fn purposes_draw_from_different_streams() {
        let first = |purpose| stream(0, purpose).next_u64();
        assert_eq!(first(Purpose::Arrivals), first(Purpose::Arrivals));
        assert_ne!(first(Purpose::Arrivals), first(Purpose::Lengths));
    }
}
