//! NumPy's legacy generator, `RandomState(seed)`: MT19937 and the gamma sampler on top of it, bit for bit.
//!
//! `vllm bench serve` draws its arrival times with it, and percentiles past the knee depend on that very trace.
//! Sources: M. Matsumoto and T. Nishimura, "Mersenne Twister" (1998); gaussians by Marsaglia's polar method; gamma by
//! Marsaglia and Tsang (2000) for shape above 1 and Ahrens-Dieter rejection below. Pinned by numbers NumPy printed.

const WORDS: usize = 624;
const OFFSET: usize = 397;

pub struct RandomState {
    key: [u32; WORDS],
    position: usize,
    /// The polar method makes gaussians in pairs; this is the second one.
    spare_gauss: Option<f64>,
}

impl RandomState {
    pub fn new(seed: u32) -> Self {
        let mut key = [0; WORDS];
        let mut word = seed;
        for (index, slot) in key.iter_mut().enumerate() {
            *slot = word;
            word = (word ^ (word >> 30)).wrapping_mul(1_812_433_253).wrapping_add(index as u32 + 1);
        }
        Self { key, position: WORDS, spare_gauss: None }
    }

    fn next_u32(&mut self) -> u32 {
        if self.position == WORDS {
            self.twist();
        }
        let mut word = self.key[self.position];
        self.position += 1;
        word ^= word >> 11;
        word ^= (word << 7) & 0x9d2c_5680;
        word ^= (word << 15) & 0xefc6_0000;
        word ^ (word >> 18)
    }

    fn twist(&mut self) {
        for index in 0..WORDS {
            let joined = (self.key[index] & 0x8000_0000) | (self.key[(index + 1) % WORDS] & 0x7fff_ffff);
            let twisted = (joined >> 1) ^ if joined & 1 == 1 { 0x9908_b0df } else { 0 };
            self.key[index] = self.key[(index + OFFSET) % WORDS] ^ twisted;
        }
        self.position = 0;
    }

    /// Uniform in [0, 1) with 53 bits.
    pub fn uniform(&mut self) -> f64 {
        let high = f64::from(self.next_u32() >> 5);
        let low = f64::from(self.next_u32() >> 6);
        (high * 67_108_864.0 + low) / 9_007_199_254_740_992.0
    }

    pub fn standard_normal(&mut self) -> f64 {
        if let Some(spare) = self.spare_gauss.take() {
            return spare;
        }
        loop {
            let x = 2.0 * self.uniform() - 1.0;
            let y = 2.0 * self.uniform() - 1.0;
            let r2 = x * x + y * y;
            if r2 < 1.0 && r2 != 0.0 {
                let scale = (-2.0 * r2.ln() / r2).sqrt();
                self.spare_gauss = Some(scale * x);
                return scale * y;
            }
        }
    }

    fn standard_exponential(&mut self) -> f64 {
        -(1.0 - self.uniform()).ln()
    }

    /// `shape` above 0.
    pub fn gamma(&mut self, shape: f64, scale: f64) -> f64 {
        scale * self.standard_gamma(shape)
    }

    fn standard_gamma(&mut self, shape: f64) -> f64 {
        if shape == 1.0 {
            return self.standard_exponential();
        }
        if shape < 1.0 {
            return self.standard_gamma_below_one(shape);
        }
        let b = shape - 1.0 / 3.0;
        let c = 1.0 / (9.0 * b).sqrt();
        loop {
            let (x, v) = loop {
                let x = self.standard_normal();
                let v = 1.0 + c * x;
                if v > 0.0 {
                    break (x, v * v * v);
                }
            };
            let u = self.uniform();
            if u < 1.0 - 0.0331 * (x * x) * (x * x) || u.ln() < 0.5 * x * x + b * (1.0 - v + v.ln()) {
                return b * v;
            }
        }
    }

    fn standard_gamma_below_one(&mut self, shape: f64) -> f64 {
        loop {
            let u = self.uniform();
            let v = self.standard_exponential();
            if u <= 1.0 - shape {
                let x = u.powf(1.0 / shape);
                if x <= v {
                    return x;
                }
            } else {
                let y = -((1.0 - u) / shape).ln();
                let x = (1.0 - shape + shape * y).powf(1.0 / shape);
                if x <= v + y {
                    return x;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(got: f64, expected: f64) {
        assert!((got - expected).abs() <= 1e-14 * expected.abs(), "{got} against {expected}");
    }

    #[test]
    fn words_and_uniforms_are_those_of_numpy() {
        let mut random = RandomState::new(0);
        let words: Vec<u32> = (0..4).map(|_| random.next_u32()).collect();
        assert_eq!(words, [2_357_136_044, 2_546_248_239, 3_071_714_933, 3_626_093_760]);
        let mut random = RandomState::new(0);
        for expected in [0.5488135039273248, 0.7151893663724195, 0.6027633760716439] {
            assert_eq!(random.uniform(), expected);
        }
    }

    #[test]
    fn gaussians_are_those_of_numpy() {
        let mut random = RandomState::new(0);
        for expected in [1.764052345967664, 0.4001572083672233, 0.9787379841057392, 2.240893199201458] {
            close(random.standard_normal(), expected);
        }
    }

    #[test]
    fn gammas_are_those_of_numpy_for_every_branch() {
        let draw = |shape, scale| {
            let mut random = RandomState::new(0);
            [0; 5].map(|_| random.gamma(shape, scale))
        };
        let poisson = draw(1.0, 1.0 / 8.0);
        let expected = [
            0.09948431352038875,
            0.15699134537072973,
            0.1154028932255086,
            0.09840014403965884,
            0.0688810613869374,
        ];
        poisson.iter().zip(expected).for_each(|(got, expected)| close(*got, expected));
        let even = draw(3.5, 1.0);
        let expected =
            [7.45736787022153, 3.9334605059335597, 7.788169465592803, 1.7265190221232043, 2.9865158626151667];
        even.iter().zip(expected).for_each(|(got, expected)| close(*got, expected));
        let bursty = draw(0.5, 1.0);
        let expected = [
            0.3040018897607044,
            0.37827172006781556,
            0.1794833890028876,
            0.19148256746066028,
            0.8796085396811957,
        ];
        bursty.iter().zip(expected).for_each(|(got, expected)| close(*got, expected));
    }

    #[test]
    fn long_runs_stay_in_step_with_numpy() {
        let mut random = RandomState::new(0);
        let sum: f64 = (0..200).map(|_| random.gamma(1.0, 1.0 / 8.0)).sum();
        assert!((sum - 24.625950796679035).abs() < 1e-10, "{sum}");
        let mut random = RandomState::new(1);
        let sums = [0.25, 5.0].map(|shape| (0..1000).map(|_| random.gamma(shape, 1.0)).sum::<f64>());
        assert!((sums[0] - 234.72004319959638).abs() < 1e-9, "{sums:?}");
        assert!((sums[1] - 4931.0112386002).abs() < 1e-8, "{sums:?}");
    }
}
