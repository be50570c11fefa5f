//! Fits the few parameters of a simulated GPU to the steps of a real run, keeping every other step back to say how well
//! they predict steps that they have not seen.
//!
//! ```text
//! t = fixed + sqrt((weights/BW)^2 + (FLOPs/RATE)^2) + (state x mu + KV)/BW + mixed      mu, mixed: only beside a prompt
//! ```
//! Least squares on relative errors (Levenberg-Marquardt over the logarithms of the parameters), with large residuals
//! weighted down (Huber), since a real run has steps that a neighbour disturbed.

use serde::Serialize;

use crate::measure::quantile::quantile;
use crate::measure::rows::StepRow;
use crate::{Error, Result};

/// What a fitted parameter is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Parameter {
    GbPerS,
    Tflops,
    FixedMs,
    MixedMs,
    MixedStateFactor,
}

impl Parameter {
    /// As after `sim:custom:`.
    pub fn name(self) -> &'static str {
        match self {
            Self::GbPerS => "gb_per_s",
            Self::Tflops => "tflops",
            Self::FixedMs => "fixed_ms",
            Self::MixedMs => "mixed_ms",
            Self::MixedStateFactor => "mixed_state_factor",
        }
    }

    pub fn meaning(self) -> &'static str {
        match self {
            Self::GbPerS => "effective bandwidth of weights, states, K and V",
            Self::Tflops => "effective rate of products and attention",
            Self::FixedMs => "launches and small kernels of every step",
            Self::MixedMs => "what a step with a prompt chunk adds",
            Self::MixedStateFactor => "state cost beside a prompt, times that of a pure decode",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Fitted {
    pub parameter: Parameter,
    pub value: f64,
    /// Relative standard error; `None` for a parameter that the steps do not determine and that kept its start value.
    pub relative_error: Option<f64>,
}

/// Distances of predictions from measured steps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Residuals {
    pub steps: usize,
    /// Mean of (predicted - measured)/measured, and the median and 90th percentile of its size.
    pub bias: f64,
    pub median: f64,
    pub p90: f64,
}

#[derive(Debug, Clone, Serialize)]
pub struct Calibration {
    pub parameters: Vec<Fitted>,
    pub fitted: Residuals,
    pub held_out: Residuals,
    /// Held-out residuals of pure decode steps and of those with a prompt chunk.
    pub held_out_decode: Residuals,
    pub held_out_prefill: Residuals,
}

/// One step as the fit sees it.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Sample {
    seconds: f64,
    weights_bytes: f64,
    flops: f64,
    state_bytes: f64,
    kv_bytes: f64,
    prefill: bool,
}

impl Sample {
    fn of(step: &StepRow) -> Option<Self> {
        let seconds = step.device_ms * 1e-3;
        // (Drafts leave states behind in ways that the bytes of a row do not show.)
        (seconds > 0.0 && step.weights_bytes > 0 && step.drafted == 0).then_some(Self {
            seconds,
            weights_bytes: step.weights_bytes as f64,
            flops: step.flops as f64,
            state_bytes: step.state_bytes as f64,
            kv_bytes: step.kv_bytes as f64,
            prefill: step.prefill_tokens > 0,
        })
    }
}

const ALL: [Parameter; 5] = [
    Parameter::GbPerS,
    Parameter::Tflops,
    Parameter::FixedMs,
    Parameter::MixedMs,
    Parameter::MixedStateFactor,
];
const COUNT: usize = ALL.len();

/// Values in the units of their names.
type Values = [f64; COUNT];

fn predict(values: &Values, sample: &Sample) -> f64 {
    let [gb_per_s, tflops, fixed_ms, mixed_ms, state_factor] = *values;
    let bandwidth = gb_per_s * 1e9;
    let overlapped = (sample.weights_bytes / bandwidth).hypot(sample.flops / (tflops * 1e12));
    let (factor, mixed_s) = if sample.prefill { (state_factor, mixed_ms * 1e-3) } else { (1.0, 0.0) };
    fixed_ms * 1e-3 + overlapped + (sample.state_bytes * factor + sample.kv_bytes) / bandwidth + mixed_s
}

fn relative(values: &Values, sample: &Sample) -> f64 {
    predict(values, sample) / sample.seconds - 1.0
}

/// Residuals beyond this are weighted down.
const HUBER: f64 = 0.05;
const ITERATIONS: usize = 200;
/// Fewest steps to fit on.
const LEAST_STEPS: usize = 20;
/// A parameter whose standard error is beyond this share of it is not determined by the run.
const UNDETERMINED: f64 = 0.3;

/// Fits to `steps`; `start` is the bandwidth (bytes a second) and rate (FLOP a second) to begin from: the measured
/// ceilings. Every other step is kept back.
///
/// # Errors
/// [`Error::Invalid`] with too few steps that carry bytes and a device time.
pub fn calibrate(steps: &[StepRow], (bytes_per_s, flops_per_s): (f64, f64)) -> Result<Calibration> {
    let samples: Vec<Sample> = steps.iter().filter_map(Sample::of).collect();
    if samples.len() < 2 * LEAST_STEPS {
        return Err(Error::invalid(
            format!("{} steps with bytes and a device time are too few to fit on", samples.len()),
            format!("calibrate on a run of {} steps or more", 2 * LEAST_STEPS),
        ));
    }
    let even: Vec<Sample> = samples.iter().step_by(2).copied().collect();
    let odd: Vec<Sample> = samples.iter().skip(1).step_by(2).copied().collect();
    let shortest_ms = even.iter().map(|sample| sample.seconds * 1e3).fold(f64::INFINITY, f64::min);
    let mut values: Values =
        [bytes_per_s / 1e9, flops_per_s / 1e12, 0.05 * shortest_ms, 0.05 * shortest_ms, 1.0];

    let mixed = even.iter().filter(|sample| sample.prefill).count() >= LEAST_STEPS / 2;
    let stateful = even.iter().any(|sample| sample.prefill && sample.state_bytes > 0.0);
    if !mixed {
        values[3] = 0.0;
    }
    let mut free = [true, true, true, mixed, mixed && stateful];
    // A parameter that the steps do not determine goes back to its start value, and the rest is fitted again.
    let start = values;
    let errors = loop {
        fit(&even, &mut values, &free);
        let errors = standard_errors(&even, &values, &free);
        let worst =
            (0..COUNT).filter(|&i| free[i] && errors[i].is_none_or(|error| error > UNDETERMINED)).max_by(
                |&a, &b| errors[a].unwrap_or(f64::INFINITY).total_cmp(&errors[b].unwrap_or(f64::INFINITY)),
            );
        let Some(worst) = worst else { break errors };
        free[worst] = false;
        values = start;
        if worst == 2 || worst == 3 {
            values[worst] = 0.0;
        }
        for i in (0..COUNT).filter(|&i| !free[i] && (i == 2 || i == 3)) {
            values[i] = 0.0;
        }
    };
    let parameters = (0..COUNT)
        .map(|i| Fitted {
            parameter: ALL[i],
            value: values[i],
            relative_error: errors[i].filter(|_| free[i]),
        })
        .collect();
    let of = |kept: &dyn Fn(&Sample) -> bool| {
        residuals(odd.iter().filter(|sample| kept(sample)).map(|sample| relative(&values, sample)))
    };
    Ok(Calibration {
        parameters,
        fitted: residuals(even.iter().map(|sample| relative(&values, sample))),
        held_out: of(&|_| true),
        held_out_decode: of(&|sample| !sample.prefill),
        held_out_prefill: of(&|sample| sample.prefill),
    })
}

fn residuals(errors: impl Iterator<Item = f64>) -> Residuals {
    let errors: Vec<f64> = errors.collect();
    let mut sizes: Vec<f64> = errors.iter().map(|error| error.abs()).collect();
    sizes.sort_by(f64::total_cmp);
    Residuals {
        steps: errors.len(),
        bias: errors.iter().sum::<f64>() / errors.len().max(1) as f64,
        median: quantile(&sizes, 0.5).unwrap_or(0.0),
        p90: quantile(&sizes, 0.9).unwrap_or(0.0),
    }
}

fn loss(samples: &[Sample], values: &Values) -> f64 {
    samples
        .iter()
        .map(|sample| {
            let size = relative(values, sample).abs();
            if size <= HUBER { 0.5 * size * size } else { HUBER * (size - 0.5 * HUBER) }
        })
        .sum()
}

/// The normal equations of one step in the logarithms of the free parameters: J^T W J and -J^T W r.
fn normal_equations(samples: &[Sample], values: &Values, free: &[bool; COUNT]) -> (Matrix, Values) {
    const STEP: f64 = 1e-6;
    let mut matrix = [[0.0; COUNT]; COUNT];
    let mut right = [0.0; COUNT];
    for sample in samples {
        let error = relative(values, sample);
        let weight = if error.abs() <= HUBER { 1.0 } else { HUBER / error.abs() };
        let mut slopes = [0.0; COUNT];
        for i in (0..COUNT).filter(|&i| free[i]) {
            let mut moved = *values;
            moved[i] *= 1.0 + STEP;
            slopes[i] = (relative(&moved, sample) - error) / STEP;
        }
        for i in 0..COUNT {
            for j in 0..COUNT {
                matrix[i][j] += weight * slopes[i] * slopes[j];
            }
            right[i] -= weight * slopes[i] * error;
        }
    }
    (matrix, right)
}

type Matrix = [[f64; COUNT]; COUNT];

fn fit(samples: &[Sample], values: &mut Values, free: &[bool; COUNT]) {
    let mut damping = 1e-3;
    let mut best = loss(samples, values);
    for _ in 0..ITERATIONS {
        let (matrix, right) = normal_equations(samples, values, free);
        let mut damped = matrix;
        for i in 0..COUNT {
            damped[i][i] = if free[i] { matrix[i][i] * (1.0 + damping) + 1e-12 } else { 1.0 };
        }
        let Some(inverse) = inverted(damped) else { return };
        let mut moved = *values;
        let mut largest: f64 = 0.0;
        for i in (0..COUNT).filter(|&i| free[i]) {
            let change: f64 = (0..COUNT).map(|j| inverse[i][j] * right[j]).sum::<f64>().clamp(-1.0, 1.0);
            moved[i] *= change.exp();
            largest = largest.max(change.abs());
        }
        let after = loss(samples, &moved);
        if after <= best {
            *values = moved;
            best = after;
            damping = (damping * 0.3).max(1e-12);
            if largest < 1e-9 {
                return;
            }
        } else {
            damping *= 4.0;
            if damping > 1e9 {
                return;
            }
        }
    }
}

/// Relative standard errors of the free parameters; `None` where the steps say nothing of one.
fn standard_errors(samples: &[Sample], values: &Values, free: &[bool; COUNT]) -> [Option<f64>; COUNT] {
    let (mut matrix, _) = normal_equations(samples, values, free);
    let count = free.iter().filter(|free| **free).count();
    for (i, row) in matrix.iter_mut().enumerate() {
        if !free[i] {
            row[i] = 1.0;
        }
    }
    let degrees = samples.len().saturating_sub(count).max(1) as f64;
    let squares: f64 = samples.iter().map(|sample| relative(values, sample).min(HUBER).powi(2)).sum();
    // Noise of a perfect fit is that of the clock: never quite nothing.
    let variance = (squares / degrees).max(1e-8);
    let inverse = inverted(matrix);
    std::array::from_fn(|i| {
        let diagonal = inverse.as_ref().filter(|_| free[i])?[i][i];
        (diagonal > 0.0).then(|| (variance * diagonal).sqrt())
    })
}

/// Gauss-Jordan with partial pivoting; `None` for a singular matrix.
fn inverted(mut matrix: Matrix) -> Option<Matrix> {
    let mut inverse: Matrix = std::array::from_fn(|i| std::array::from_fn(|j| f64::from(u8::from(i == j))));
    for column in 0..COUNT {
        let pivot =
            (column..COUNT).max_by(|&a, &b| matrix[a][column].abs().total_cmp(&matrix[b][column].abs()))?;
        if matrix[pivot][column].abs() < 1e-14 {
            return None;
        }
        matrix.swap(column, pivot);
        inverse.swap(column, pivot);
        let scale = matrix[column][column];
        for j in 0..COUNT {
            matrix[column][j] /= scale;
            inverse[column][j] /= scale;
        }
        for row in (0..COUNT).filter(|&row| row != column) {
            let factor = matrix[row][column];
            for j in 0..COUNT {
                matrix[row][j] -= factor * matrix[column][j];
                inverse[row][j] -= factor * inverse[column][j];
            }
        }
    }
    Some(inverse)
}

impl Calibration {
    pub fn value(&self, parameter: Parameter) -> f64 {
        self.parameters
            .iter()
            .find(|fitted| fitted.parameter == parameter)
            .map_or(f64::NAN, |fitted| fitted.value)
    }

    /// The simulated device these parameters make, with `memory_bytes` of memory.
    pub fn device(&self, memory_bytes: u64) -> String {
        let figures: Vec<String> = self
            .parameters
            .iter()
            .map(|fitted| format!("{}={:.5}", fitted.parameter.name(), fitted.value))
            .collect();
        format!("sim:custom:{},gb={:.3},launch_us=0", figures.join(","), memory_bytes as f64 / 1e9)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::config::EngineConfig;
    use crate::engine::device::sim::SimDevice;
    use crate::engine::model::presets::synthetic_layout;
    use crate::simulation::SimulatedArm;
    use crate::workload::spec::{Count, LoadSpec};

    /// Steps of floods at several caps, on `device`, with noise.
    fn steps(device: &str, noise: f64) -> Vec<StepRow> {
        let device = SimDevice::parse(device).unwrap();
        let mut rows = Vec::new();
        for cap in [1, 8, 64] {
            let engine = EngineConfig { max_num_seqs: cap, sim_noise: noise, ..EngineConfig::default() };
            let load = LoadSpec { prompts: Count::Exact(4 * cap), ..LoadSpec::default() };
            let layout = synthetic_layout("qwen3.5-4b").unwrap();
            let arm = SimulatedArm { layout, engine, load, seed: 0, stop_s: None, stall_s: 0.0 };
            let run = arm.run(&device).unwrap();
            rows.extend(run.record.step_rows("arm", 0));
        }
        rows
    }

    #[track_caller]
    fn near(found: f64, expected: f64, share: f64) {
        assert!((found / expected - 1.0).abs() < share, "found {found}, expected {expected}");
    }

    #[test]
    fn the_parameters_of_a_noisy_device_are_found_again() {
        let rows =
            steps("sim:custom:gb_per_s=1000,tflops=150,gb=80,launch_us=0,fixed_ms=1.5,mixed_ms=2", 1.0);
        let calibration = calibrate(&rows, (1.2e12, 200e12)).unwrap();
        near(calibration.value(Parameter::GbPerS), 1000.0, 0.04);
        near(calibration.value(Parameter::Tflops), 150.0, 0.06);
        assert!(calibration.held_out.median < 0.03, "{:?}", calibration.held_out);
        assert!(calibration.held_out_prefill.steps > 0);
        // What was fitted can be run.
        SimDevice::parse(&calibration.device(80_000_000_000)).unwrap();
    }

    #[test]
    fn the_state_factor_of_the_series_rig_is_found_again() {
        let calibration = calibrate(&steps("sim:series", 0.0), (483e9, 70e12)).unwrap();
        near(calibration.value(Parameter::GbPerS), 483.0, 0.03);
        near(calibration.value(Parameter::MixedStateFactor), 4.5, 0.15);
        assert!(calibration.held_out.p90 < 0.03, "{:?}", calibration.held_out);
    }

    #[test]
    fn what_the_steps_do_not_show_is_said_to_be_undetermined() {
        let device = SimDevice::parse("sim:custom:gb_per_s=1000,tflops=150,gb=80,launch_us=0").unwrap();
        let load =
            LoadSpec { prompts: Count::Exact(1), input_len: 4, output_len: 200, ..LoadSpec::default() };
        let layout = synthetic_layout("qwen3.5-4b").unwrap();
        let engine = EngineConfig { sim_noise: 1.0, ..EngineConfig::default() };
        let arm = SimulatedArm { layout, engine, load, seed: 0, stop_s: None, stall_s: 0.0 };
        let rows: Vec<StepRow> = arm.run(&device).unwrap().record.step_rows("arm", 0).collect();
        let calibration = calibrate(&rows, (1.0e12, 150e12)).unwrap();
        let rate =
            calibration.parameters.iter().find(|fitted| fitted.parameter == Parameter::Tflops).unwrap();
        assert_eq!(rate.relative_error, None, "{calibration:?}");
        assert_eq!(rate.value, 150.0);
    }

    #[test]
    fn too_few_steps_are_refused() {
        assert_eq!(calibrate(&[], (1e12, 1e14)).unwrap_err().exit_code(), 2);
    }
}
