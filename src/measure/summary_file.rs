//! Whether a summary.csv is one: its version, its columns and what they hold. Every command that reads one asks here, so
//! that a file that was edited by hand is refused alike.

use super::summary::{SCHEMA, columns};
use crate::{Error, Result};

/// Columns of words; all others are numbers or empty.
const WORDS: [&str; 14] = [
    "experiment",
    "arm",
    "knob",
    "value",
    "device",
    "simulated",
    "bound_by",
    "model",
    "weights",
    "load",
    "quick",
    "cpu_math",
    "config_hash",
    "build",
];
/// Numbers that may be `inf`: a flood's.
const RATES: [&str; 2] = ["offered_rate", "achieved_rate"];
/// A wait that ends as it begins may come out this far below 0, in milliseconds: two readings of a clock.
const CLOCK_MS: f64 = 1.0;

/// # Errors
/// [`Error::Invalid`] naming column and line.
pub fn check_csv(text: &str) -> Result<()> {
    let mut reader = csv::Reader::from_reader(text.as_bytes());
    let wrong =
        |error: csv::Error| Error::invalid(error.to_string(), "every line must have the header's columns");
    let names: Vec<String> = reader.headers().map_err(wrong)?.iter().map(str::to_string).collect();
    for record in reader.records() {
        let record = record.map_err(wrong)?;
        let line = record.position().map_or(0, csv::Position::line);
        check_row(&names, record.iter(), &format!("line {line}"))?;
    }
    Ok(())
}

/// The same of one row, which is at `place`.
///
/// # Errors
/// As [`check_csv`].
pub fn check_row<'a>(
    names: &[String],
    cells: impl Iterator<Item = &'a str> + Clone,
    place: &str,
) -> Result<()> {
    let cells = || names.iter().map(String::as_str).zip(cells.clone());
    // (Tables of other tools name no schema, and may have some of the columns.)
    if let Some((_, schema)) = cells().find(|(name, _)| *name == "schema") {
        match schema.parse::<u32>() {
            Ok(SCHEMA) => check_names(names)?,
            Ok(1..SCHEMA) => {}
            _ => {
                return Err(Error::invalid(
                    format!("{place}: column schema holds `{schema}`, this version reads 1 to {SCHEMA}"),
                    "use the version that wrote it",
                ));
            }
        }
    }
    cells().filter(|(name, cell)| !WORDS.contains(name) && !cell.is_empty()).try_for_each(|(name, cell)| {
        if RATES.contains(&name) && cell == "inf" {
            return Ok(());
        }
        let least =
            if name.starts_with("queue_") || name.starts_with("schedule_delay_") { -CLOCK_MS } else { 0.0 };
        match cell.parse::<f64>() {
            Ok(number) if number.is_finite() && number >= least => Ok(()),
            _ => Err(Error::invalid(
                format!("{place}: column {name} holds `{cell}`"),
                format!("{name} must be a number of 0 or more, or empty"),
            )),
        }
    })
}

fn check_names(names: &[String]) -> Result<()> {
    let wanted = columns();
    let Some(missing) = wanted.iter().find(|column| !names.contains(column)) else { return Ok(()) };
    let unknown: Vec<&str> = names.iter().filter(|name| !wanted.contains(name)).map(String::as_str).collect();
    let hint = match unknown.as_slice() {
        [] => "it was cut out of the file: take the file as the run wrote it".to_string(),
        unknown => {
            format!("no such column is known: {}; names are as the run wrote them", unknown.join(", "))
        }
    };
    Err(Error::invalid(format!("line 1: column {missing} is missing"), hint))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::summary::Summary;
    use crate::workload::rate::Rate;

    fn text() -> String {
        let summary = Summary {
            arm: "a".into(),
            schema: SCHEMA,
            offered_rate: Some(Rate::FLOOD),
            ttft_p50_ms: Some(12.5),
            queue_mean_ms: Some(-0.002),
            ..Summary::default()
        };
        let mut writer = csv::Writer::from_writer(Vec::new());
        writer.serialize(&summary).unwrap();
        String::from_utf8(writer.into_inner().unwrap()).unwrap()
    }

    #[test]
    fn a_file_as_it_was_written_is_one() {
        check_csv(&text()).unwrap();
        check_csv("arm,request_throughput\na,3\n").unwrap();
    }

    #[test]
    fn what_was_edited_is_named_by_column_and_line() {
        for wrong in ["nan", "inf", "-12.5", "fast"] {
            let error = check_csv(&text().replace("12.5", wrong)).unwrap_err().to_string();
            assert_eq!(error, format!("line 2: column ttft_p50_ms holds `{wrong}`"));
        }
        let renamed = check_csv(&text().replace("ttft_p50_ms", "ttft_median_ms")).unwrap_err();
        assert_eq!(renamed.to_string(), "line 1: column ttft_p50_ms is missing");
        assert!(renamed.hint().contains("ttft_median_ms"), "{}", renamed.hint());
        let later = "arm,schema\na,99\n";
        assert!(check_csv(later).unwrap_err().to_string().contains("column schema holds `99`"));
    }
}
