//! NumPy's new generator as far as lengths need it: `default_rng(seed).integers(low, high)`, bit for bit.
//!
//! PCG64 (XSL-RR 128/64, M. O'Neill 2014) seeded through `SeedSequence`, bounded by Lemire's method (2019) on 32-bit
//! draws. `vllm bench serve` draws variable lengths with it. Pinned by numbers NumPy printed.

const MULTIPLIER: u128 = (2_549_297_995_355_413_924 << 64) | 4_865_540_595_714_422_341;

pub struct DefaultRng {
    state: u128,
    increment: u128,
    /// A 64-bit draw gives two 32-bit ones: low half first; this is the high half.
    spare: Option<u32>,
}

impl DefaultRng {
    pub fn new(seed: u64) -> Self {
        let words = seed_sequence(seed);
        let wide = |high: u64, low: u64| (u128::from(high) << 64) | u128::from(low);
        let increment = (wide(words[2], words[3]) << 1) | 1;
        let state = increment.wrapping_add(wide(words[0], words[1])); // one step from 0, then the initial state added
        let mut random = Self { state, increment, spare: None };
        random.step();
        random
    }

    fn step(&mut self) {
        self.state = self.state.wrapping_mul(MULTIPLIER).wrapping_add(self.increment);
    }

    fn next_u64(&mut self) -> u64 {
        self.step();
        let folded = (self.state >> 64) as u64 ^ self.state as u64;
        folded.rotate_right((self.state >> 122) as u32)
    }

    fn next_u32(&mut self) -> u32 {
        self.spare.take().unwrap_or_else(|| {
            let draw = self.next_u64();
            self.spare = Some((draw >> 32) as u32);
            draw as u32
        })
    }

    /// Uniform in `low..high`; `high - low` is between 1 and 2^32 - 1.
    pub fn integer(&mut self, low: u64, high: u64) -> u64 {
        let span = high - low;
        debug_assert!((1..1 << 32).contains(&span));
        if span == 1 {
            return low;
        }
        let mut product = u64::from(self.next_u32()) * span;
        if (product & 0xffff_ffff) < span {
            let threshold = ((1 << 32) - span) % span;
            while (product & 0xffff_ffff) < threshold {
                product = u64::from(self.next_u32()) * span;
            }
        }
        low + (product >> 32)
    }
}

/// `SeedSequence(seed).generate_state(4, uint64)`.
fn seed_sequence(seed: u64) -> [u64; 4] {
    const MULTIPLY_A: u32 = 0x931e_8875;
    let entropy = [seed as u32, (seed >> 32) as u32, 0, 0];
    let mut constant: u32 = 0x43b0_d7e5;
    let mut hash = |value: u32| {
        let mut value = value ^ constant;
        constant = constant.wrapping_mul(MULTIPLY_A);
        value = value.wrapping_mul(constant);
        value ^ (value >> 16)
    };
    let mut pool = entropy.map(&mut hash);
    for source in 0..4 {
        for target in (0..4).filter(|&target| target != source) {
            let hashed = hash(pool[source]);
            let mixed = pool[target].wrapping_mul(0xca01_f9dd).wrapping_sub(hashed.wrapping_mul(0x4973_f715));
            pool[target] = mixed ^ (mixed >> 16);
        }
    }
    let mut constant: u32 = 0x8b51_f9dd;
    let mut words = (0..8).map(|index| {
        let mut word = pool[index % 4] ^ constant;
        constant = constant.wrapping_mul(0x58f3_8ded);
        word = word.wrapping_mul(constant);
        u64::from(word ^ (word >> 16))
    });
    let mut next = || words.next().unwrap_or(0);
    [(); 4].map(|()| next() | (next() << 32))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeding_and_raw_draws_are_those_of_numpy() {
        assert_eq!(
            seed_sequence(0),
            [15793235383387715774, 12390638538380655177, 2361836109651742017, 3188717715514472916]
        );
        assert_eq!(
            seed_sequence((1 << 40) + 5),
            [15772757452565124875, 9517702402565589804, 2676762931694213328, 4810540664340266707]
        );
        let mut random = DefaultRng::new(7);
        let draws = [0; 4].map(|_| random.next_u64());
        assert_eq!(
            draws,
            [11530976094092348043, 16550673365885938325, 14308875409591826786, 4154339397315733314]
        );
    }

    #[test]
    fn bounded_integers_are_those_of_numpy() {
        let mut random = DefaultRng::new(3);
        let draws = [0; 12].map(|_| random.integer(0, 10));
        assert_eq!(draws, [8, 0, 1, 2, 1, 8, 8, 5, 0, 0, 3, 4]);
        assert_eq!(random.integer(5, 6), 5);
    }

    /// The variable lengths of Part 5: the published totals are 108,378 tokens in and 105,567 out.
    #[test]
    fn lengths_of_the_series_have_the_published_sums() {
        let mut random = DefaultRng::new(0);
        let inputs: Vec<u64> = (0..200).map(|_| random.integer(51, 974)).collect();
        let outputs: Vec<u64> = (0..200).map(|_| random.integer(51, 974)).collect();
        assert_eq!(inputs[..8], [836, 638, 522, 300, 335, 88, 120, 66]);
        assert_eq!(outputs[..8], [262, 494, 352, 265, 874, 791, 179, 903]);
        assert_eq!((inputs.iter().sum::<u64>(), outputs.iter().sum::<u64>()), (108_378, 105_567));
    }
}
