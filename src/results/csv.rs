//! Rows to and from CSV files. The header is the row type's own field names.

use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::{Error, Result};

/// Header line and rows as text; both empty when there are no rows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rows {
    pub header: String,
    pub rows: String,
}

/// Rows with the header of their type.
///
/// # Errors
/// A fault of the program alone.
pub fn rows<T: Serialize>(items: impl IntoIterator<Item = T>) -> Result<Rows> {
    let mut writer = csv::Writer::from_writer(Vec::new());
    for item in items {
        writer.serialize(item).map_err(|error| Error::bug(format!("cannot write CSV: {error}")))?;
    }
    let bytes = writer.into_inner().map_err(|error| Error::bug(format!("cannot write CSV: {error}")))?;
    let text = String::from_utf8_lossy(&bytes);
    let (header, rows) = text.split_once('\n').unwrap_or(("", ""));
    let header = if header.is_empty() { String::new() } else { format!("{header}\n") };
    Ok(Rows { header, rows: rows.to_string() })
}

/// Reads a whole file.
///
/// # Errors
/// [`Error::Invalid`] naming file and line.
pub fn read<T: DeserializeOwned>(path: &Path) -> Result<Vec<T>> {
    let file = std::fs::File::open(path).map_err(|error| Error::read(path, &error))?;
    let mut reader = csv::Reader::from_reader(std::io::BufReader::new(file));
    let names = reader.headers().cloned().unwrap_or_default();
    let parsed: std::result::Result<Vec<T>, csv::Error> = reader.deserialize().collect();
    parsed.map_err(|error| {
        Error::invalid(
            format!("{}: {}", path.display(), described(&error, &names)),
            "it was written by another version, or is damaged",
        )
    })
}

/// The error with the line and the name of the column.
fn described(error: &csv::Error, names: &csv::StringRecord) -> String {
    let csv::ErrorKind::Deserialize { pos, err } = error.kind() else { return error.to_string() };
    let line = pos.as_ref().map_or(String::new(), |pos| format!("line {}: ", pos.line()));
    let name = err.field().and_then(|field| names.get(field as usize));
    let column = name.map_or(String::new(), |name| format!("column {name}: "));
    format!("{line}{column}{}", err.kind())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::summary::Summary;
    use crate::workload::rate::Rate;

    #[test]
    fn a_summary_reads_back_as_it_was() {
        let summary = Summary {
            arm: "a=1".into(),
            value: "inf".into(),
            offered_rate: Some(Rate::FLOOD),
            output_throughput: Some(1.0 / 3.0),
            ..Default::default()
        };
        let text = rows([&summary]).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("summary.csv");
        std::fs::write(&path, text.header + &text.rows).unwrap();
        assert_eq!(read::<Summary>(&path).unwrap(), [summary]);
    }

    #[test]
    fn a_damaged_file_is_named_with_its_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("summary.csv");
        std::fs::write(&path, "experiment,arm\nx,y\n").unwrap();
        let error = read::<Summary>(&path).unwrap_err();
        assert!(error.to_string().contains("summary.csv") && error.exit_code() == 2);
        let text = rows([&Summary::default()]).unwrap();
        std::fs::write(&path, text.header + &text.rows.replacen(",0,", ",many,", 1)).unwrap();
        let error = read::<Summary>(&path).unwrap_err().to_string();
        assert!(error.contains("line 2: column repeat: "), "{error}");
    }
}
