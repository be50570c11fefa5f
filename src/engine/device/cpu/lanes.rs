//! Elementary functions over arrays of 16 floats, written so that every compiler vectorises them: norms, exp, SiLU.
//!
//! Sums over a row run in 16 lanes and are added up in one fixed order, so a row's result depends on nothing but the row.

use super::isa::{Arch, LANES, fma};

pub type Lanes = [f32; LANES];

/// Adds the lanes pairwise: (0 + 8), (0 + 4), (0 + 2), (0 + 1).
#[inline(always)]
pub fn add_up(mut lanes: Lanes) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}

#[inline(always)]
pub fn sum_of_squares<A: Arch>(values: &[f32]) -> f32 {
    let mut lanes = [0.0; LANES];
    let chunks = values.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for i in 0..LANES {
            lanes[i] = fma::<A>(chunk[i], chunk[i], lanes[i]);
        }
    }
    for (lane, value) in lanes.iter_mut().zip(rest) {
        *lane = fma::<A>(*value, *value, *lane);
    }
    add_up(lanes)
}

/// out = x / rms(x) * weight. Returns the sum of squares, which is not finite if an element is not (or is above 1e19).
#[inline(always)]
pub fn rms_norm<A: Arch>(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) -> f32 {
    let squares = sum_of_squares::<A>(x);
    let scale = 1.0 / (squares / x.len() as f32 + eps).sqrt();
    for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
        *out = x * scale * weight;
    }
    squares
}

/// e^x to within 2 units in the last place; 0 below -87.3, and inf never (x is held below 88.3).
#[inline(always)]
#[allow(clippy::excessive_precision)]
pub fn exp<A: Arch>(x: f32) -> f32 {
    const TO_INTEGER: f32 = 12_582_912.0;
    let clamped = x.clamp(-87.33, 88.37);
    let shifted = fma::<A>(clamped, std::f32::consts::LOG2_E, TO_INTEGER);
    let n = shifted - TO_INTEGER;
    // ln 2 in two parts, the first with trailing zeros, so that n times it is exact.
    let r = fma::<A>(n, -0.693_359_375, clamped);
    let r = fma::<A>(n, 2.121_944_4e-4, r);
    let mut p = 1.987_569_1e-4;
    p = fma::<A>(p, r, 1.398_199_9e-3);
    p = fma::<A>(p, r, 8.333_452e-3);
    p = fma::<A>(p, r, 4.166_579_6e-2);
    p = fma::<A>(p, r, 1.666_666_5e-1);
    p = fma::<A>(p, r, 0.5);
    let p = fma::<A>(p * r, r, r) + 1.0;
    let power = f32::from_bits(shifted.to_bits().wrapping_add(127) << 23);
    let result = p * power;
    if x < -87.33 { 0.0 } else { result }
}

#[inline(always)]
pub fn sigmoid<A: Arch>(x: f32) -> f32 {
    1.0 / (1.0 + exp::<A>(-x))
}

#[inline(always)]
pub fn silu<A: Arch>(x: f32) -> f32 {
    x / (1.0 + exp::<A>(-x))
}

/// ln(1 + e^x), x itself above 20.
#[inline(always)]
pub fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

#[cfg(test)]
mod tests {
    use super::super::isa::Fused;
    use super::*;

    #[test]
    fn exp_is_close_everywhere() {
        let mut worst = 0f64;
        for i in -8_733..8_830 {
            let x = i as f32 * 0.01;
            let found = f64::from(exp::<Fused>(x));
            let right = f64::from(x).exp();
            worst = worst.max(((found - right) / right).abs());
        }
        assert!(worst < 2.4e-7, "worst relative error {worst}");
        assert_eq!(exp::<Fused>(-100.0), 0.0);
        assert_eq!(exp::<Fused>(0.0), 1.0);
        assert!(exp::<Fused>(f32::NAN).is_nan());
    }

    #[test]
    fn norm_and_gates_match_plain_formulas() {
        let x: Vec<f32> = (0..37).map(|i| (i as f32 * 0.7).sin() * 3.0).collect();
        let weight = vec![2.0; 37];
        let mut out = vec![0.0; 37];
        rms_norm::<Fused>(&x, &weight, 1e-6, &mut out);
        let mean = x.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / 37.0;
        for (out, x) in out.iter().zip(&x) {
            let right = 2.0 * f64::from(*x) / (mean + 1e-6).sqrt();
            assert!((f64::from(*out) - right).abs() < 1e-6);
            let sigmoid_right = 1.0 / (1.0 + (-f64::from(*x)).exp());
            assert!((f64::from(sigmoid::<Fused>(*x)) - sigmoid_right).abs() < 1e-6);
            assert!((f64::from(silu::<Fused>(*x)) - f64::from(*x) * sigmoid_right).abs() < 1e-6);
        }
        assert!((softplus(-3.0) - 0.048_587_35).abs() < 1e-7);
        assert_eq!(softplus(30.0), 30.0);
    }
}
