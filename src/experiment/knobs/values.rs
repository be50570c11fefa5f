//! Values of knobs as typed: one assignment, lists and ranges, sizes in bytes.

use super::{Knob, Setting, find};
use crate::{Error, Result};

/// `24GB`, `22.5 GiB`, `512MiB`, `1000`: bytes.
pub(super) fn parse_bytes(text: &str) -> Option<i64> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = text[digits.len()..].to_ascii_lowercase();
    let scale = match unit.as_str() {
        "" | "b" => 1.0,
        "kb" => 1e3,
        "mb" => 1e6,
        "gb" => 1e9,
        "kib" => 1024.0,
        "mib" => 1_048_576.0,
        "gib" => 1_073_741_824.0,
        _ => return None,
    };
    let number: f64 = digits.trim().replace('_', "").parse().ok()?;
    let bytes = number * scale;
    (1.0..9e18).contains(&bytes).then_some(bytes as i64)
}

/// Splits `knob=value` as given to `--set`.
///
/// # Errors
/// No `=`, an unknown knob (with the nearest), a value that it does not take.
pub fn parse_assignment(text: &str) -> Result<(&'static Knob, Setting)> {
    let Some((name, value)) = text.split_once('=') else {
        return Err(Error::invalid(
            format!("--set {text} has no `=`"),
            "write --set knob=value, for example --set max_num_seqs=16",
        ));
    };
    let knob = find(name.trim())?;
    Ok((knob, knob.parse(value)?))
}

/// A list of values as typed: `1,4,16`, and ranges `1..256*2` (times 2) or `1..9+4` (plus 4; `1..4` steps by 1),
/// both ends included.
///
/// # Errors
/// A value that the knob does not take, one given twice, none at all.
pub fn parse_values(knob: &Knob, text: &str) -> Result<Vec<Setting>> {
    let mut settings = Vec::new();
    for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        match part.split_once("..") {
            Some((from, rest)) => settings.extend(range(knob, part, from, rest)?),
            None => settings.push(knob.parse(part)?),
        }
    }
    if settings.is_empty() {
        return Err(Error::invalid(
            format!("no values for {}", knob.name),
            "give at least one, separated by commas",
        ));
    }
    for (index, setting) in settings.iter().enumerate() {
        if settings[..index].contains(setting) {
            return Err(Error::invalid(
                format!("value {setting} of {} is given twice", knob.name),
                "give each value once; use --repeats to run it more often",
            ));
        }
    }
    Ok(settings)
}

fn range(knob: &Knob, part: &str, from: &str, rest: &str) -> Result<Vec<Setting>> {
    let wrong = || {
        Error::invalid(
            format!("`{part}` is not a range of {}", knob.name),
            "write FROM..TO, FROM..TO+STEP or FROM..TO*FACTOR, for example 1..256*2",
        )
    };
    let (to, step, times) = if let Some((to, factor)) = rest.split_once('*') {
        (to, factor, true)
    } else if let Some((to, step)) = rest.split_once('+') {
        (to, step, false)
    } else {
        (rest, "1", false)
    };
    let number = |text: &str| text.trim().parse::<f64>().map_err(|_| wrong());
    let (from, to, step) = (number(from)?, number(to)?, number(step)?);
    if !(to >= from && if times { step > 1.0 && from > 0.0 } else { step > 0.0 }) {
        return Err(wrong());
    }
    let mut settings = Vec::new();
    let mut value = from;
    while value <= to * (1.0 + 1e-12) {
        settings.push(knob.parse(&value.to_string())?);
        value = if times { value * step } else { value + step };
        if settings.len() > 10_000 {
            return Err(wrong());
        }
    }
    Ok(settings)
}

/// Of a text that is repeated in a message: its beginning, where it is long.
pub(super) fn shortened(text: &str) -> String {
    const MOST: usize = 40;
    let letters = text.chars().count();
    if letters <= MOST {
        return text.to_string();
    }
    format!("{}... ({letters} letters)", text.chars().take(MOST / 2).collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_hundreds_of_digits_stay_readable() {
        let digits = "9".repeat(300);
        let error = find("max_num_seqs").unwrap().parse(&digits).unwrap_err().to_string();
        assert!(error.contains("(300 letters)") && error.len() < 100, "{error}");
        assert_eq!(find("request_rate").unwrap().parse(&digits).unwrap().to_string(), "1e300");
    }
}
