//! Plots as SVG: what an arm reached, and step time against batch with its fitted line.

use plotters::prelude::*;

use crate::measure::step_fit;
use crate::results::RunResults;
use crate::{Error, Result};

const SIZE: (u32, u32) = (640, 360);
const BLUE: RGBColor = RGBColor(31, 95, 175);
const RED: RGBColor = RGBColor(190, 60, 40);

/// A titled SVG.
pub struct Plot {
    pub title: String,
    pub svg: String,
}

fn failed(error: impl std::fmt::Display) -> Error {
    Error::bug(format!("cannot draw a plot: {error}"))
}

/// Every plot the results support.
///
/// # Errors
/// A fault of the program alone.
pub fn all(results: &RunResults) -> Result<Vec<Plot>> {
    let mut plots = Vec::new();
    let arms = results.arms();
    let throughput: Vec<(String, f64)> = arms
        .iter()
        .filter_map(|arm| Some((arm.to_string(), results.median(arm, |summary| summary.output_throughput)?)))
        .collect();
    if !throughput.is_empty() {
        plots.push(bars("output tokens/s by arm", &throughput, false)?);
    }
    let tail: Vec<(String, f64)> = arms
        .iter()
        .filter_map(|arm| Some((arm.to_string(), results.median(arm, |summary| summary.e2el_p99_ms)?)))
        .filter(|(_, value)| *value > 0.0)
        .collect();
    if !tail.is_empty() {
        plots.push(bars("end-to-end latency p99, ms (log scale)", &tail, true)?);
    }
    if let Some(plot) = step_time(results)? {
        plots.push(plot);
    }
    Ok(plots)
}

/// A bar an arm, in the plan's order.
fn bars(title: &str, values: &[(String, f64)], log: bool) -> Result<Plot> {
    let scale = |value: f64| if log { value.max(1e-3).log10() } else { value };
    let top = values.iter().map(|(_, value)| scale(*value)).fold(f64::MIN, f64::max);
    let bottom = if log {
        values.iter().map(|(_, value)| scale(*value)).fold(f64::MAX, f64::min).floor()
    } else {
        0.0
    };
    let top = if top > bottom { top + (top - bottom) * 0.05 } else { bottom + 1.0 };
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        let mut chart = ChartBuilder::on(&root)
            .margin(10)
            .x_label_area_size(40)
            .y_label_area_size(64)
            .build_cartesian_2d(0f64..values.len() as f64, bottom..top)
            .map_err(failed)?;
        let label = |x: &f64| {
            let index = *x as usize;
            let centred = (x - index as f64 - 0.5).abs() < 0.01;
            values.get(index).filter(|_| centred).map_or(String::new(), |(name, _)| short(name))
        };
        chart
            .configure_mesh()
            .disable_x_mesh()
            .x_labels(values.len() * 2 + 1)
            .x_label_formatter(&label)
            .y_label_formatter(&|y| crate::numbers::number(if log { 10f64.powf(*y) } else { *y }))
            .draw()
            .map_err(failed)?;
        let bars = values.iter().enumerate().map(|(index, (_, value))| {
            let left = index as f64;
            Rectangle::new([(left + 0.15, bottom), (left + 0.85, scale(*value))], BLUE.filled())
        });
        chart.draw_series(bars).map_err(failed)?;
        root.present().map_err(failed)?;
    }
    Ok(Plot { title: title.to_string(), svg })
}

/// The value after `=`, else the name's end: labels have little room.
fn short(name: &str) -> String {
    let tail = name.rsplit('=').next().unwrap_or(name);
    let letters = tail.chars().count();
    tail.chars().skip(letters.saturating_sub(14)).collect()
}

fn step_time(results: &RunResults) -> Result<Option<Plot>> {
    let Some(fit) = results.only_step_fit() else { return Ok(None) };
    let points = step_fit::decode_points(results.steps.iter(), |step| step.duration_ms);
    let right = fit.largest as f64 * 1.05;
    let top = points.values().copied().fold(0.0, f64::max) * 1.1;
    if top <= 0.0 {
        return Ok(None);
    }
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        let mut chart = ChartBuilder::on(&root)
            .margin(10)
            .x_label_area_size(40)
            .y_label_area_size(64)
            .build_cartesian_2d(0f64..right, 0f64..top)
            .map_err(failed)?;
        chart.configure_mesh().x_desc("sequences in the step").y_desc("ms").draw().map_err(failed)?;
        let line = [0.0, right].map(|x| (x, fit.shared_ms + fit.private_ms * x));
        chart.draw_series(LineSeries::new(line, RED.stroke_width(2))).map_err(failed)?;
        let dots = points.iter().map(|(&x, &y)| Circle::new((x as f64, y), 3, BLUE.filled()));
        chart.draw_series(dots).map_err(failed)?;
        root.present().map_err(failed)?;
    }
    Ok(Some(Plot {
        title: "decode step, ms, against sequences in it, with the fitted line".to_string(),
        svg,
    }))
}
