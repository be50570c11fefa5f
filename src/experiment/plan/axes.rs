//! Points of a sweep over several knobs: their values crossed or paired.

use crate::experiment::knobs::{Knob, Setting};
use crate::{Error, Result};

/// A value of each knob.
pub type Point = Vec<(&'static Knob, Setting)>;

/// More are a slip of the keyboard, and a plan has to fit in memory and in a table.
const MOST_ARMS: usize = 10_000;

/// Every combination, the last knob's values fastest.
///
/// # Errors
/// More than [`MOST_ARMS`] of them.
pub fn crossed(axes: &[(&'static Knob, Vec<Setting>)]) -> Result<Vec<Point>> {
    let sizes = || axes.iter().map(|(_, settings)| settings.len());
    let arms = sizes().fold(1usize, usize::saturating_mul);
    if arms > MOST_ARMS {
        return Err(Error::invalid(
            format!("values of {} knobs crossed make {arms} arms, {MOST_ARMS} at most", axes.len()),
            "give fewer values, or pair them with --zip",
        ));
    }
    Ok(axes.iter().fold(vec![Vec::new()], |points: Vec<Point>, (knob, settings)| {
        let extend = |point: &Point, setting: &Setting| {
            let mut longer = point.clone();
            longer.push((*knob, setting.clone()));
            longer
        };
        points.iter().flat_map(|point| settings.iter().map(move |setting| extend(point, setting))).collect()
    }))
}

/// The first values of all knobs, then the second ones, and so on.
///
/// # Errors
/// Knobs with different numbers of values.
pub fn zipped(axes: &[(&'static Knob, Vec<Setting>)]) -> Result<Vec<Point>> {
    let lengths: Vec<usize> = axes.iter().map(|(_, settings)| settings.len()).collect();
    if lengths.iter().any(|&length| length != lengths[0]) {
        return Err(Error::invalid(
            format!("--zip pairs the values of all knobs, but they have {lengths:?} values"),
            "give every --values the same number of values, or leave out --zip to cross them",
        ));
    }
    Ok((0..lengths.first().copied().unwrap_or(0))
        .map(|i| axes.iter().map(|(knob, settings)| (*knob, settings[i].clone())).collect())
        .collect())
}
