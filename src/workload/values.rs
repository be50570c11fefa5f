//! Values of a sweep as typed: lists and ranges, and several knobs together.
//!
//! `1,4,16` is a list. `1..256*2` multiplies: 1, 2, 4, ... 256. `0..10+5` adds: 0, 5, 10. `3..6` counts: 3, 4, 5, 6. A
//! range includes its end when a step lands on it. Parts are joined by commas: `1..8*2,inf`.

use crate::{Error, Result};

/// More values than this are a slip of the pen.
const MOST: usize = 10_000;

/// # Errors
/// [`Error::Invalid`] naming the part that cannot be read.
pub fn parse(text: &str) -> Result<Vec<String>> {
    let mut values = Vec::new();
    for part in text.split(',').map(str::trim) {
        if part.is_empty() {
            return Err(wrong(text, "it has an empty part"));
        }
        match part.split_once("..") {
            None => values.push(part.to_string()),
            Some((from, rest)) => values.extend(range(part, from, rest)?),
        }
        if values.len() > MOST {
            return Err(wrong(part, "it gives more than 10,000 values"));
        }
    }
    Ok(values)
}

fn range(part: &str, from: &str, rest: &str) -> Result<Vec<String>> {
    let number = |text: &str| {
        let number = text.trim().parse::<f64>().ok().filter(|number| number.is_finite());
        number.ok_or_else(|| wrong(part, &format!("`{}` is not a number", text.trim())))
    };
    let (to, step, multiply) = match (rest.split_once('*'), rest.split_once('+')) {
        (Some((to, factor)), _) => (number(to)?, number(factor)?, true),
        (None, Some((to, step))) => (number(to)?, number(step)?, false),
        (None, None) => (number(rest)?, 1.0, false),
    };
    let from = number(from)?;
    if multiply && !(from > 0.0 && step > 1.0) || !multiply && step <= 0.0 {
        return Err(wrong(part, "its steps do not rise"));
    }
    if to < from {
        return Err(wrong(part, "its end is below its start"));
    }
    let mut values = Vec::new();
    for index in 0..=MOST as i32 {
        // From the start each time, so that rounding does not add up; and a hair of grace at the end.
        let value = if multiply { from * step.powi(index) } else { from + step * f64::from(index) };
        if value > to * (1.0 + 1e-9) {
            break;
        }
        values.push(plain(value));
    }
    Ok(values)
}

/// Without digits that are only rounding.
fn plain(value: f64) -> String {
    let rounded = (value * 1e9).round() / 1e9;
    rounded.to_string()
}

fn wrong(part: &str, what: &str) -> Error {
    Error::invalid(
        format!("cannot read the values `{part}`: {what}"),
        "write a list (1,4,16), or ranges: 1..256*2 multiplies, 0..10+5 adds, 3..6 counts",
    )
}

/// How the values of several knobs are put together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Combine {
    /// Every value of one with every value of the others; the last knob changes fastest.
    Grid,
    /// First with first, second with second.
    Zip,
}

/// One setting of each knob an arm.
///
/// # Errors
/// [`Error::Invalid`] for a zip of lists of different lengths.
pub fn combine(knobs: &[(String, Vec<String>)], how: Combine) -> Result<Vec<Vec<(String, String)>>> {
    match how {
        Combine::Grid => Ok(knobs.iter().fold(vec![Vec::new()], |arms, (knob, values)| {
            let extended = arms.iter().flat_map(|arm| {
                values.iter().map(move |value| {
                    let mut longer: Vec<(String, String)> = arm.clone();
                    longer.push((knob.clone(), value.clone()));
                    longer
                })
            });
            extended.collect()
        })),
        Combine::Zip => {
            let length = knobs.first().map_or(0, |(_, values)| values.len());
            if let Some((knob, values)) = knobs.iter().find(|(_, values)| values.len() != length) {
                return Err(Error::invalid(
                    format!("{knob} has {} values and {} has {length}", values.len(), knobs[0].0),
                    "to zip knobs give each the same number of values",
                ));
            }
            let arm = |index: usize| {
                let settings = knobs.iter().map(|(knob, values)| (knob.clone(), values[index].clone()));
                settings.collect()
            };
            Ok((0..length).map(arm).collect())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_and_ranges() {
        assert_eq!(parse("1, 4,inf").unwrap(), ["1", "4", "inf"]);
        assert_eq!(parse("1..256*2").unwrap(), ["1", "2", "4", "8", "16", "32", "64", "128", "256"]);
        assert_eq!(parse("1..100*4,inf").unwrap(), ["1", "4", "16", "64", "inf"]);
        assert_eq!(parse("0..10+5").unwrap(), ["0", "5", "10"]);
        assert_eq!(parse("3..6").unwrap(), ["3", "4", "5", "6"]);
        assert_eq!(parse("0.1..0.5+0.1").unwrap(), ["0.1", "0.2", "0.3", "0.4", "0.5"]);
        assert_eq!(parse("split,unified").unwrap(), ["split", "unified"]);
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        for (text, part) in [
            ("1,,2", "empty"),
            ("1..x*2", "`x`"),
            ("8..1*2", "below"),
            ("1..8*1", "do not rise"),
            ("0..8*2", "do not rise"),
            ("1..8+0", "do not rise"),
            ("1..1000000", "10,000"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.to_string().contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn knobs_make_a_grid_or_a_zip() {
        let knobs = |b: &[&str]| {
            let list = |values: &[&str]| values.iter().map(|value| value.to_string()).collect::<Vec<_>>();
            [("a".to_string(), list(&["1", "2"])), ("b".to_string(), list(b))]
        };
        let flat = |arms: Vec<Vec<(String, String)>>| -> Vec<String> {
            arms.iter().map(|arm| arm.iter().map(|(_, value)| value.as_str()).collect()).collect()
        };
        assert_eq!(flat(combine(&knobs(&["x", "y"]), Combine::Grid).unwrap()), ["1x", "1y", "2x", "2y"]);
        assert_eq!(flat(combine(&knobs(&["x", "y"]), Combine::Zip).unwrap()), ["1x", "2y"]);
        assert!(combine(&knobs(&["x"]), Combine::Zip).unwrap_err().to_string().contains("b has 1"));
    }
}
