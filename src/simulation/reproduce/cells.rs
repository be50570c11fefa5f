//! The published cells ([`cells.csv`](cells.csv)): part, arm, metric, value, gate, how far the simulation knew it, and
//! why it may differ. A gate is a tolerance in percent (`5%`), in the unit of the cell (`+-2`), a range (`104..108`)
//! or `exact` (to the digits published); an empty one means that the cell is printed and not judged.

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

const CELLS: &str = include_str!("cells.csv");

/// What the simulated rig knew of a cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Mark {
    /// A parameter was chosen on it.
    #[serde(rename = "calibrated")]
    Calibrated,
    /// Its table was in view when the form of the model was found.
    #[serde(rename = "form seen")]
    FormSeen,
    /// A prediction.
    #[serde(rename = "unseen")]
    Unseen,
}

impl Mark {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Calibrated => "calibrated",
            Self::FormSeen => "form seen",
            Self::Unseen => "unseen",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    Holds,
    DoesNotHold,
    /// No gate.
    Printed,
    NotSimulated,
}

impl Verdict {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Holds => "holds",
            Self::DoesNotHold => "does not hold",
            Self::Printed => "-",
            Self::NotSimulated => "not simulated",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Cell {
    pub part: u32,
    pub arm: String,
    pub metric: String,
    pub published: f64,
    pub gate: String,
    pub mark: Mark,
    /// Key of a reason in [`super::reasons`]; empty for none.
    pub reason: String,
}

impl Cell {
    /// Whether `simulated` is inside the gate.
    pub fn judge(&self, simulated: f64) -> Verdict {
        let inside = match self.gate.as_str() {
            "" => return Verdict::Printed,
            "exact" => (simulated - self.published).abs() < 0.5 * last_digit(self.published) + 1e-9,
            gate => match (gate.strip_suffix('%'), gate.strip_prefix("+-"), gate.split_once("..")) {
                (Some(percent), _, _) => {
                    let tolerance = number(percent) / 100.0;
                    (simulated / self.published - 1.0).abs() <= tolerance
                }
                (_, Some(plus_minus), _) => (simulated - self.published).abs() <= number(plus_minus),
                (_, _, Some((low, high))) => (number(low)..=number(high)).contains(&simulated),
                _ => false,
            },
        };
        if inside { Verdict::Holds } else { Verdict::DoesNotHold }
    }
}

/// A gate that is no number admits nothing; a test reads every one of them.
fn number(text: &str) -> f64 {
    text.parse().unwrap_or(f64::NAN)
}

/// The unit of the last digit that was published: 0.01 for 83.71, 1 for 146.
fn last_digit(value: f64) -> f64 {
    let text = value.to_string();
    let decimals = text.split_once('.').map_or(0, |(_, decimals)| decimals.len());
    10f64.powi(-(decimals as i32))
}

/// The cells of a part.
///
/// # Errors
/// [`Error::Failed`] when the table cannot be read: it is part of the program.
pub fn published(part: u32) -> Result<Vec<Cell>> {
    let cells: Result<Vec<Cell>, csv::Error> =
        csv::Reader::from_reader(CELLS.as_bytes()).deserialize().collect();
    let cells = cells.map_err(|error| Error::bug(format!("the series' cells cannot be read: {error}")))?;
    Ok(cells.into_iter().filter(|cell| cell.part == part).collect())
}

#[cfg(test)]
mod tests {
    use super::super::{PARTS, reasons};
    use super::*;

    fn cell(published: f64, gate: &str) -> Cell {
        Cell {
            part: 1,
            arm: String::new(),
            metric: String::new(),
            published,
            gate: gate.into(),
            mark: Mark::Unseen,
            reason: String::new(),
        }
    }

    #[test]
    fn gates_admit_what_they_say() {
        for (published, gate, inside, outside) in [
            (100.0, "5%", 104.9, 105.1),
            (17.0, "+-2", 15.0, 14.9),
            (104.0, "104..108", 108.0, 109.0),
            (83.71, "exact", 83.714, 83.72),
            (146.0, "exact", 146.0, 147.0),
        ] {
            assert_eq!(cell(published, gate).judge(inside), Verdict::Holds, "{gate} {inside}");
            assert_eq!(cell(published, gate).judge(outside), Verdict::DoesNotHold, "{gate} {outside}");
        }
    }

    #[test]
    fn every_cell_has_a_gate_that_admits_its_own_value_and_a_reason_that_exists() {
        for part in PARTS {
            let cells = published(part).unwrap();
            assert!(!cells.is_empty());
            for cell in cells {
                assert_ne!(cell.judge(cell.published), Verdict::DoesNotHold, "{cell:?}");
                assert!(cell.reason.is_empty() || reasons::text(&cell.reason).is_some(), "{cell:?}");
            }
        }
    }
}
