//! Reads whatever holds results into a [`ResultSet`]: the kind is told from the content, not from the name.

use std::collections::BTreeMap;
use std::path::Path;

use super::metrics::{METRICS, per_request, quantile_of};
use super::{ArmSamples, IDENTITY, ResultSet, requests, vllm};
use crate::measure::quantile::supported;
use crate::measure::summary_file;
use crate::{Error, Result};

pub(super) const HINT: &str = "give a summary.csv, a requests.csv, a run folder, the output of --format json, or the file of \
                    `vllm bench serve --save-result`";

/// # Errors
/// [`Error::Invalid`] naming the file and what was found in it.
pub fn read(path: &Path) -> Result<ResultSet> {
    if path.is_dir() {
        let files = ["summary.csv", "requests.csv"].map(|name| path.join(name));
        let Some(file) = files.iter().find(|file| file.is_file()) else {
            return Err(Error::invalid(format!("{} has no summary.csv", path.display()), HINT));
        };
        return read(file);
    }
    let text = std::fs::read_to_string(path).map_err(|error| Error::read(path, &error))?;
    let arms = parse(&text).map_err(|error| error.context(path.display()))?;
    if arms.is_empty() {
        return Err(Error::invalid(format!("{} has no rows", path.display()), HINT));
    }
    Ok(ResultSet { source: path.to_path_buf(), arms })
}

/// A row of a table, by column; empty fields are left out.
pub(super) type Row = BTreeMap<String, String>;

fn parse(text: &str) -> Result<Vec<ArmSamples>> {
    let start = text.trim_start();
    if start.is_empty() {
        return Err(Error::invalid("it is empty", HINT));
    }
    if start.starts_with('{') || start.starts_with('[') {
        let objects = json_objects(text)?;
        if objects.first().is_some_and(|object| object.contains_key("arm")) {
            let rows: Vec<Row> = objects.iter().map(plain_row).collect();
            for (index, (object, row)) in objects.iter().zip(&rows).enumerate() {
                let names: Vec<String> = object.keys().cloned().collect();
                let cells = names.iter().map(|name| row.get(name).map_or("", String::as_str));
                summary_file::check_row(&names, cells, &format!("row {}", index + 1))?;
            }
            return summaries(&rows);
        }
        return vllm::arms(&objects);
    }
    let mut reader = csv::Reader::from_reader(text.as_bytes());
    let wrong = |error: csv::Error| Error::invalid(error.to_string(), HINT);
    let names: Vec<String> = reader.headers().map_err(wrong)?.iter().map(str::to_string).collect();
    let has = |column: &str| names.iter().any(|name| name == column);
    let mut rows: Vec<Row> = Vec::new();
    for record in reader.records() {
        let record = record.map_err(wrong)?;
        let cells = names.iter().cloned().zip(record.iter().map(str::to_string));
        rows.push(cells.filter(|(_, cell)| !cell.is_empty()).collect());
    }
    if has("arm") && (has("request_throughput") || has("schema")) {
        summary_file::check_csv(text)?;
        summaries(&rows)
    } else if has("arm") && has("intended_s") {
        requests::arms(&rows)
    } else {
        Err(Error::invalid(format!("its columns ({}) are of no result file", names.join(", ")), HINT))
    }
}

pub(super) type Object = serde_json::Map<String, serde_json::Value>;

/// One object, an array of objects, or an object a line (`--append-result`).
fn json_objects(text: &str) -> Result<Vec<Object>> {
    let wrong = |error: serde_json::Error| Error::invalid(format!("it is not JSON: {error}"), HINT);
    let values = serde_json::Deserializer::from_str(text).into_iter::<serde_json::Value>();
    let mut objects = Vec::new();
    for value in values {
        match value.map_err(wrong)? {
            serde_json::Value::Object(object) => objects.push(object),
            serde_json::Value::Array(array) => {
                objects.extend(array.into_iter().filter_map(|value| match value {
                    serde_json::Value::Object(object) => Some(object),
                    _ => None,
                }));
            }
            other => return Err(Error::invalid(format!("it holds {other}, not result objects"), HINT)),
        }
    }
    Ok(objects)
}

fn plain_row(object: &Object) -> Row {
    let cells = object.iter().filter_map(|(name, value)| {
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_string);
        (!value.is_null() && !text.is_empty()).then(|| (name.clone(), text))
    });
    cells.collect()
}

/// A number in a row; `None` when the field is empty.
///
/// # Errors
/// A field that is no number.
pub(super) fn number(row: &Row, column: &str) -> Result<Option<f64>> {
    let Some(text) = row.get(column) else { return Ok(None) };
    let number = text.parse::<f64>().ok().filter(|number| number.is_finite());
    number.map(Some).ok_or_else(|| {
        Error::invalid(
            format!("column {column} holds `{text}`"),
            format!("{column} must be a number or empty"),
        )
    })
}

/// The arm of this name, made when it is new.
pub(super) fn entry<'a>(arms: &'a mut Vec<ArmSamples>, name: &str) -> &'a mut ArmSamples {
    let index = arms.iter().position(|arm| arm.arm == name).unwrap_or_else(|| {
        arms.push(ArmSamples { arm: name.to_string(), ..ArmSamples::default() });
        arms.len() - 1
    });
    &mut arms[index]
}

fn summaries(rows: &[Row]) -> Result<Vec<ArmSamples>> {
    let mut arms = Vec::new();
    for row in rows {
        let Some(name) = row.get("arm") else {
            return Err(Error::invalid("a row has no arm", "summary.csv names the arm of every row"));
        };
        let arm = entry(&mut arms, name);
        for column in IDENTITY {
            if let Some(value) = row.get(column) {
                arm.identity.entry(column.to_string()).or_insert_with(|| value.clone());
            }
        }
        let completed = number(row, "completed")?.unwrap_or(0.0);
        let tokens =
            number(row, "output_throughput")?.unwrap_or(0.0) * number(row, "duration_s")?.unwrap_or(0.0);
        for metric in METRICS {
            let n = if per_request(metric.name) { completed } else { tokens };
            let latency = per_request(metric.name) || metric.name.starts_with("itl_");
            let backed =
                !latency || quantile_of(metric.name).is_none_or(|quantile| supported(n as usize, quantile));
            if let Some(value) = number(row, metric.name)?.filter(|_| backed) {
                arm.values.entry(metric.name.to_string()).or_default().push(value);
            }
        }
    }
    Ok(arms)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::summary::{SCHEMA, Summary};

    fn summary(arm: &str, repeat: u32, throughput: f64) -> Summary {
        Summary {
            arm: arm.into(),
            repeat,
            device: "sim:fixed".into(),
            schema: SCHEMA,
            completed: 50,
            duration_s: 10.0,
            output_throughput: Some(100.0),
            request_throughput: Some(throughput),
            ttft_p50_ms: Some(5.0),
            ttft_p99_ms: Some(9.0),
            itl_p99_ms: Some(3.0),
            ..Summary::default()
        }
    }

    fn csv_of(summaries: &[Summary]) -> String {
        let mut writer = csv::Writer::from_writer(Vec::new());
        summaries.iter().for_each(|summary| writer.serialize(summary).unwrap());
        String::from_utf8(writer.into_inner().unwrap()).unwrap()
    }

    #[test]
    fn summaries_are_read_from_csv_and_json_alike() {
        let rows = [summary("a", 0, 5.0), summary("b", 0, 6.0), summary("a", 1, 5.5)];
        let arms = parse(&csv_of(&rows)).unwrap();
        assert_eq!(arms.len(), 2);
        assert_eq!(arms[0].values["request_throughput"], [5.0, 5.5]);
        assert_eq!(arms[0].identity["device"], "sim:fixed");
        assert_eq!(parse(&serde_json::to_string(&rows).unwrap()).unwrap(), arms);
    }

    #[test]
    fn percentiles_that_few_requests_cannot_support_are_left_out() {
        let arms = parse(&csv_of(&[summary("a", 0, 5.0)])).unwrap();
        assert!(arms[0].values.contains_key("ttft_p50_ms"));
        assert!(!arms[0].values.contains_key("ttft_p99_ms"));
        assert!(arms[0].values.contains_key("itl_p99_ms"), "1,000 gaps support it");
    }

    #[test]
    fn what_is_no_result_is_refused_with_what_was_found() {
        let error = parse("x,y\n1,2\n").unwrap_err();
        assert!(error.to_string().contains("x, y") && error.hint().contains("summary.csv"));
        assert!(parse("[1, 2").is_err());
        let broken = csv_of(&[summary("a", 0, 5.0)]).replace("5.0", "fast");
        assert!(parse(&broken).unwrap_err().to_string().contains("fast"));
        assert!(read(Path::new("/nowhere/at/all.csv")).unwrap_err().to_string().contains("all.csv"));
    }

    #[test]
    fn a_folder_is_read_by_its_summary() {
        let folder = tempfile::tempdir().unwrap();
        assert!(read(folder.path()).unwrap_err().to_string().contains("no summary.csv"));
        std::fs::write(folder.path().join("summary.csv"), csv_of(&[summary("a", 0, 5.0)])).unwrap();
        assert_eq!(read(folder.path()).unwrap().arms[0].arm, "a");
    }
}
