//! Seeded noise of a simulated device: a factor for the whole run (lognormal, 1 %), one for each step (3 %), and one
//! step in a thousand that takes five times as long. `sim_noise` scales all of it.

const RUN_SIGMA: f64 = 0.01;
const STEP_SIGMA: f64 = 0.03;
const OUTLIER_RATE: f64 = 1e-3;
const OUTLIER_FACTOR: f64 = 5.0;

/// A hash whose every output bit depends on every bit of `value` (the finaliser of SplitMix64).
pub fn hash(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Uniform in [0, 1) from (seed, counter, stream).
pub fn uniform(seed: u64, counter: u64, stream: u64) -> f64 {
    let bits = hash(hash(seed ^ stream.rotate_left(48)) ^ counter);
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

fn normal(seed: u64, counter: u64, stream: u64) -> f64 {
    let radius = (-2.0 * (1.0 - uniform(seed, counter, stream)).ln()).sqrt();
    radius * (std::f64::consts::TAU * uniform(seed, counter, stream + 1)).cos()
}

/// Factors of step durations.
#[derive(Debug, Clone)]
pub struct Noise {
    scale: f64,
    /// Taken from the first request that samples, so that repeats with other seeds have other noise.
    seed: Option<u64>,
    run_factor: f64,
    steps: u64,
}

impl Noise {
    pub fn new(scale: f64) -> Self {
        Self { scale, seed: None, run_factor: 1.0, steps: 0 }
    }

    pub fn needs_seed(&self) -> bool {
        self.scale > 0.0 && self.seed.is_none()
    }

    pub fn set_seed(&mut self, seed: u64) {
        self.seed = Some(seed);
        self.run_factor = (RUN_SIGMA * self.scale * normal(seed, 0, 1)).exp();
    }

    /// The factor of the next step. Exactly 1 without noise.
    pub fn next_factor(&mut self) -> f64 {
        self.steps += 1;
        if self.scale == 0.0 {
            return 1.0;
        }
        let seed = self.seed.unwrap_or(0);
        let step = (STEP_SIGMA * self.scale * normal(seed, self.steps, 3)).exp();
        let outlier = uniform(seed, self.steps, 5) < OUTLIER_RATE;
        let outlier = if outlier { 1.0 + (OUTLIER_FACTOR - 1.0) * self.scale } else { 1.0 };
        self.run_factor * step * outlier
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn noise_has_the_stated_size_and_repeats_for_a_seed() {
        let factors = |seed| {
            let mut noise = Noise::new(1.0);
            noise.set_seed(seed);
            (0..20_000).map(|_| noise.next_factor()).collect::<Vec<_>>()
        };
        let first = factors(7);
        assert_eq!(first, factors(7));
        assert_ne!(first, factors(8));
        let outliers = first.iter().filter(|factor| **factor > 3.0).count();
        assert!((8..=36).contains(&outliers), "{outliers} outliers in 20,000 steps, 20 expected");
        let logs: Vec<f64> = first.iter().filter(|factor| **factor < 3.0).map(|f| f.ln()).collect();
        let mean = logs.iter().sum::<f64>() / logs.len() as f64;
        let sigma = (logs.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / logs.len() as f64).sqrt();
        assert!((sigma - STEP_SIGMA).abs() < 0.002, "step sigma {sigma}");
        assert!(mean.abs() < 4.0 * RUN_SIGMA, "run factor e^{mean}");
    }

    #[test]
    fn no_noise_is_exactly_one() {
        let mut noise = Noise::new(0.0);
        assert!((0..100).all(|_| noise.next_factor() == 1.0));
    }
}
