//! Arrival times of an open load, drawn whole and scaled so that the nominal rate is the realised one.
//!
//! Gaps are drawn at unit rate, cumulated and divided by their sum: points in (0, 1] whose last is 1. At rate r, n
//! requests then span n/r seconds exactly; a ramp bends the same points by the inverse of its cumulated rate.

use rand_distr::{Distribution, Gamma};

use super::numpy_legacy::RandomState;
use super::rate::Rate;
use super::seeds::{Purpose, stream};
use super::spec::{Arrivals, Ramp, RampShape};

/// Arrival times in seconds, ascending.
pub fn arrival_times(
    count: usize,
    rate: Rate,
    arrivals: Arrivals,
    burstiness: f64,
    ramp: Option<Ramp>,
    seed: u64,
) -> Vec<f64> {
    let Some(per_s) = rate.finite() else {
        return vec![0.0; count];
    };
    let points = unit_points(count, arrivals, burstiness, seed);
    match ramp {
        None => points.iter().map(|point| point * count as f64 / per_s).collect(),
        Some(ramp) => points.iter().map(|&point| on_ramp(point, count as f64, per_s, ramp)).collect(),
    }
}

fn unit_points(count: usize, arrivals: Arrivals, shape: f64, seed: u64) -> Vec<f64> {
    let gaps: Vec<f64> = match arrivals {
        Arrivals::Constant => vec![1.0; count],
        Arrivals::NumpyGamma => {
            // NumPy takes 32-bit seeds here; streams of later repeats are hashes, of which 32 bits do.
            let mut random = RandomState::new(seed as u32);
            (0..count).map(|_| random.gamma(shape, 1.0 / shape)).collect()
        }
        Arrivals::Gamma => {
            let mut random = stream(seed, Purpose::Arrivals);
            match Gamma::new(shape, 1.0 / shape) {
                Ok(gamma) => (0..count).map(|_| gamma.sample(&mut random)).collect(),
                // The shape was checked to be above 0 and finite; gaps of a shape beyond f64 are even.
                Err(_) => vec![1.0; count],
            }
        }
    };
    let total: f64 = gaps.iter().sum();
    let mut cumulated = 0.0;
    gaps.iter()
        .map(|gap| {
            cumulated += gap;
            cumulated / total
        })
        .collect()
}

/// The time by which a share `point` of `count` arrivals has come, with a rate from `from` to `ramp.to`.
fn on_ramp(point: f64, count: f64, from: f64, ramp: Ramp) -> f64 {
    let to = ramp.to.per_s();
    let ratio = to / from;
    if (ratio - 1.0).abs() < 1e-9 {
        return point * count / from;
    }
    match ramp.shape {
        RampShape::Linear => {
            // from t + (to - from) t^2 / 2T = point count, with T = 2 count / (from + to)
            let slope = (to * to - from * from) / (2.0 * count);
            ((from * from + 2.0 * slope * point * count).sqrt() - from) / slope
        }
        RampShape::Exponential => {
            let duration_s = count * ratio.ln() / (to - from);
            duration_s * (1.0 + point * (ratio - 1.0)).ln() / ratio.ln()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(rate: f64, arrivals: Arrivals, burstiness: f64, ramp: Option<Ramp>) -> Vec<f64> {
        arrival_times(4000, Rate::new(rate).unwrap(), arrivals, burstiness, ramp, 0)
    }

    fn squared_variation(times: &[f64]) -> f64 {
        let gaps: Vec<f64> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
        variance / (mean * mean)
    }

    #[test]
    fn the_nominal_rate_is_the_realised_one() {
        for arrivals in [Arrivals::Gamma, Arrivals::Constant, Arrivals::NumpyGamma] {
            for burstiness in [0.2, 1.0, 7.0] {
                let last = times(8.0, arrivals, burstiness, None)[3999];
                assert!((last - 500.0).abs() < 1e-9, "{arrivals:?} {burstiness}: {last}");
            }
        }
    }

    #[test]
    fn burstiness_is_the_inverse_of_the_gaps_squared_variation() {
        for burstiness in [0.25, 1.0, 4.0] {
            let variation = squared_variation(&times(8.0, Arrivals::Gamma, burstiness, None));
            assert!((variation * burstiness - 1.0).abs() < 0.2, "{burstiness}: {variation}");
        }
        assert!(squared_variation(&times(8.0, Arrivals::Constant, 1.0, None)) < 1e-9);
    }

    #[test]
    fn the_trace_of_the_series_starts_as_numpy_draws_it() {
        // RandomState(0).gamma(1, 1/8), 200 draws whose sum is 24.6259507967, scaled to end at 25 s.
        let times = arrival_times(200, Rate::new(8.0).unwrap(), Arrivals::NumpyGamma, 1.0, None, 0);
        assert!((times[0] - 0.09948431352038875 * 25.0 / 24.625950796679035).abs() < 1e-12);
        assert!((times[199] - 25.0).abs() < 1e-12);
    }

    #[test]
    fn ramps_begin_and_end_at_their_rates() {
        for shape in [RampShape::Linear, RampShape::Exponential] {
            for (from, to) in [(2.0, 32.0), (32.0, 2.0), (4.0, 4.0)] {
                let ramp = Some(Ramp { shape, to: Rate::new(to).unwrap() });
                let times = times(from, Arrivals::Constant, 1.0, ramp);
                let rate_at = |index: usize| 2.0 / (times[index + 1] - times[index - 1]);
                assert!((rate_at(1) / from - 1.0).abs() < 0.1, "{shape:?} {from} -> {to}");
                assert!((rate_at(3998) / to - 1.0).abs() < 0.05, "{shape:?} {from} -> {to}");
            }
        }
        let ramp = |shape| Some(Ramp { shape, to: Rate::new(32.0).unwrap() });
        let last = |shape| times(2.0, Arrivals::Constant, 1.0, ramp(shape))[3999];
        assert!((last(RampShape::Linear) - 8000.0 / 34.0).abs() < 1e-6);
        assert!((last(RampShape::Exponential) - 4000.0 * 16f64.ln() / 30.0).abs() < 1e-6);
    }

    #[test]
    fn a_flood_comes_at_once() {
        assert_eq!(arrival_times(3, Rate::FLOOD, Arrivals::Gamma, 1.0, None, 0), [0.0; 3]);
    }
}
