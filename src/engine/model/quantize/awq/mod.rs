//! AWQ (Lin et al., 2023, arXiv:2306.00978): channels that carry more of the input get finer steps. Each input channel
//! of a group of modules is multiplied by a scale before rounding, and what comes before is divided by it, so that
//! nothing but rounding changes. Then each group of weights is clipped where that brings the outputs nearer.

mod clip;
pub(super) mod groups;
mod kernels;
mod search;

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

pub use self::clip::Clip;
use self::groups::{Before, Group, groups};
use self::search::{Found, Module, search, taken_by_norm};
use super::super::checkpoint::Checkpoint;
use super::super::layout::WeightFormat;
use super::super::spec::{Linear, ModelSpec};
use super::super::weights::Weights;
use super::grid::Grid;
use super::inputs::Inputs;
use crate::{Error, Result};

/// What changes in the checkpoint besides rounding.
#[derive(Debug, Default)]
pub struct Folds {
    /// Factor of each column of a module, rounded or not.
    pub columns: HashMap<Linear, Vec<f32>>,
    /// Divisor of each row.
    pub rows: HashMap<Linear, Vec<f32>>,
    /// New values of norms and biases, by canonical name.
    pub vectors: HashMap<String, Vec<f32>>,
    /// How a rounded module is clipped.
    pub clips: HashMap<Linear, Clip>,
}

/// What the search made of the outputs' squared errors, the mean of the groups' ratios.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Gain {
    pub groups: usize,
    pub scaled: usize,
    pub error_ratio: f64,
}

/// What the search of one group came to.
type Searched = Result<(Found, Folds)>;

/// Finds scales for every group with a module in `grids`, those to be rounded.
///
/// # Errors
/// A tensor that cannot be read.
pub fn plan(
    checkpoint: &Checkpoint,
    spec: &ModelSpec,
    grids: &HashMap<Linear, Grid>,
    inputs: &Inputs,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(Folds, Gain)> {
    let groups: Vec<Group> = groups(spec)
        .into_iter()
        .filter(|group| group.linears.iter().any(|linear| grids.contains_key(linear)))
        .collect();
    let next = AtomicUsize::new(0);
    let found = Mutex::new(groups.iter().map(|_| None).collect::<Vec<Option<Searched>>>());
    let work = || {
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(group) = groups.get(index) else { return };
            let result = one(checkpoint, group, grids, inputs);
            locked(&found)[index] = Some(result);
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        while !workers.iter().all(std::thread::ScopedJoinHandle::is_finished) {
            progress(next.load(Ordering::Relaxed).min(groups.len()) as u64, groups.len() as u64);
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
    });
    let (mut folds, mut gain) = (Folds::default(), Gain::default());
    for result in std::mem::take(&mut *locked(&found)).into_iter().flatten() {
        let (found, fold) = result?;
        folds.columns.extend(fold.columns);
        folds.rows.extend(fold.rows);
        folds.vectors.extend(fold.vectors);
        folds.clips.extend(fold.clips);
        gain.groups += 1;
        gain.scaled += usize::from(found.after < found.before);
        gain.error_ratio += if found.before > 0.0 { found.after / found.before } else { 1.0 };
    }
    gain.error_ratio /= gain.groups.max(1) as f64;
    Ok((folds, gain))
}

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// One group's scales and what they change.
fn one(
    checkpoint: &Checkpoint,
    group: &Group,
    grids: &HashMap<Linear, Grid>,
    inputs: &Inputs,
) -> Result<(Found, Folds)> {
    let rows = inputs.rows(group.layer, group.point);
    if rows.cols != group.classes.len() {
        return Err(Error::failed(
            format!(
                "the calibration has {} channels into the modules after {}",
                rows.cols,
                group.before.name()
            ),
            "this is a fault of the program: please report it",
        ));
    }
    let mut modules = Vec::new();
    for linear in group.linears.iter().filter(|linear| grids.contains_key(linear)) {
        modules.push(Module { linear: *linear, data: checkpoint.linear(linear)?, grid: grids[linear] });
    }
    let norm = match &group.before {
        Before::Norm { vector, .. } => Some(checkpoint.stored_vector(vector)?),
        Before::Linear { .. } => None,
    };
    let taken = |wished: &[f32]| match (&group.before, &norm) {
        (Before::Norm { plus_one, .. }, Some((stored, format))) => {
            taken_by_norm(stored, *plus_one, &|value| rounded(*format, value), wished)
        }
        _ => (wished.to_vec(), Vec::new()),
    };
    let found = search(&modules, rows, &group.classes, &|wished| taken(wished).0);
    let mut folds = Folds::default();
    let columns: Vec<f32> = group.classes.iter().map(|&class| found.scales[class]).collect();
    for module in &modules {
        folds.clips.insert(module.linear, Clip::new(rows, module.grid.group, &columns));
    }
    if found.scales.iter().all(|&scale| scale == 1.0) {
        return Ok((found, folds));
    }
    for linear in &group.linears {
        folds.columns.insert(*linear, columns.clone());
    }
    match &group.before {
        Before::Norm { vector, .. } => {
            folds.vectors.insert(vector.clone(), taken(&found.scales).1);
        }
        Before::Linear { linear, bias } => {
            if let Some(bias) = bias {
                let (mut values, _) = checkpoint.stored_vector(bias)?;
                values.iter_mut().zip(&found.scales).for_each(|(value, scale)| *value /= scale);
                folds.vectors.insert(bias.clone(), values);
            }
            folds.rows.insert(*linear, found.scales.clone());
        }
    }
    Ok((found, folds))
}

/// `value` as a tensor of `format` holds it.
fn rounded(format: WeightFormat, value: f32) -> f32 {
    match format {
        WeightFormat::F16 => half::f16::from_f32(value).to_f32(),
        WeightFormat::Bf16 => half::bf16::from_f32(value).to_f32(),
        _ => value,
    }
}

/// Independent values of no mean and variance 1/3, nearly normal.
#[cfg(test)]
fn noise(seed: u64, len: usize) -> Vec<f32> {
    use rand::{Rng, SeedableRng};
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(seed);
    (0..len).map(|_| (0..4).map(|_| rng.random::<f32>() - 0.5).sum()).collect()
}
