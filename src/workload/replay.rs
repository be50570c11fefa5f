//! Recorded traces: arrival, input length and output length of each request, from CSV or JSONL.
//!
//! Columns are told apart by name (case and outer blanks aside), as the traces are published:
//!
//! | trace | arrival | unit | input | output |
//! |---|---|---|---|---|
//! | inferwall | `arrival_s` | s | `input_tokens` | `output_tokens` |
//! | Mooncake | `timestamp` | ms | `input_length` | `output_length` |
//! | BurstGPT | `Timestamp` | s | `Request tokens` | `Response tokens` |
//! | Azure LLM | `TIMESTAMP` | date and time | `ContextTokens` | `GeneratedTokens` |
//!
//! Rows without an answer (0 tokens out, as BurstGPT logs failures) are left out and counted.

use std::collections::BTreeMap;
use std::path::Path;

use crate::{Error, Result};

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TraceRow {
    /// From the first arrival of the trace.
    pub arrival_s: f64,
    pub input_tokens: usize,
    pub output_tokens: usize,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Trace {
    /// In order of arrival.
    pub rows: Vec<TraceRow>,
    /// Rows left out because they had no input or no answer.
    pub skipped: usize,
}

/// Names of the columns of one kind of trace, in lower case, and how to read its arrivals.
struct Columns {
    arrival: &'static str,
    input: &'static str,
    output: &'static str,
    seconds: fn(&str) -> Option<f64>,
}

const KINDS: [Columns; 4] = [
    Columns { arrival: "arrival_s", input: "input_tokens", output: "output_tokens", seconds },
    Columns { arrival: "timestamp", input: "input_length", output: "output_length", seconds: milliseconds },
    Columns { arrival: "timestamp", input: "request tokens", output: "response tokens", seconds },
    Columns {
        arrival: "timestamp",
        input: "contexttokens",
        output: "generatedtokens",
        seconds: date_and_time,
    },
];

fn seconds(text: &str) -> Option<f64> {
    text.parse().ok().filter(|seconds: &f64| seconds.is_finite())
}

fn milliseconds(text: &str) -> Option<f64> {
    seconds(text).map(|milliseconds| milliseconds / 1e3)
}

/// Seconds since the epoch of `2023-11-16 18:17:03.9799600`, with or without an offset; without one it is UTC.
fn date_and_time(text: &str) -> Option<f64> {
    let timestamp = text.parse::<jiff::Timestamp>().ok().or_else(|| {
        let civil: jiff::civil::DateTime = text.parse().ok()?;
        civil.to_zoned(jiff::tz::TimeZone::UTC).ok().map(|zoned| zoned.timestamp())
    })?;
    Some(timestamp.as_second() as f64 + f64::from(timestamp.subsec_nanosecond()) / 1e9)
}

/// # Errors
/// [`Error::Invalid`] naming file and row, what was found and which columns are known.
pub fn read(file: &Path) -> Result<Trace> {
    let text = std::fs::read_to_string(file).map_err(|error| Error::read(file, &error))?;
    parse(&text).map_err(|error| error.context(format!("trace {}", file.display())))
}

fn parse(text: &str) -> Result<Trace> {
    let records = if text.trim_start().starts_with('{') { json_lines(text)? } else { csv_records(text)? };
    let Some(first) = records.first() else {
        return Err(Error::invalid("it has no rows", "give a CSV file with a header, or JSON lines"));
    };
    let known = |kind: &&Columns| {
        [kind.arrival, kind.input, kind.output].iter().all(|name| first.contains_key(*name))
    };
    let Some(kind) = KINDS.iter().find(known) else {
        let found: Vec<&str> = first.keys().map(String::as_str).collect();
        return Err(Error::invalid(
            format!("its columns ({}) are of no known kind of trace", found.join(", ")),
            "columns must be arrival_s, input_tokens, output_tokens, or Mooncake's, BurstGPT's or the Azure LLM trace's",
        ));
    };
    let mut rows = Vec::with_capacity(records.len());
    let mut skipped = 0;
    for (index, record) in records.iter().enumerate() {
        let cell = |name: &str| record.get(name).map_or("", String::as_str);
        let wrong = |name: &str, expected: &str| {
            Error::invalid(
                format!("row {}: {name} is `{}`", index + 1, cell(name)),
                format!("{name} must be {expected}"),
            )
        };
        let whole = |name: &str| -> Result<usize> {
            let number = seconds(cell(name)).filter(|number| *number >= 0.0 && number.fract() == 0.0);
            number.map(|number| number as usize).ok_or_else(|| wrong(name, "a whole number of tokens"))
        };
        let arrival_s = (kind.seconds)(cell(kind.arrival)).ok_or_else(|| wrong(kind.arrival, "a time"))?;
        let (input_tokens, output_tokens) = (whole(kind.input)?, whole(kind.output)?);
        if input_tokens == 0 || output_tokens == 0 {
            skipped += 1;
        } else {
            rows.push(TraceRow { arrival_s, input_tokens, output_tokens });
        }
    }
    rows.sort_by(|a, b| a.arrival_s.total_cmp(&b.arrival_s));
    let Some(start_s) = rows.first().map(|row| row.arrival_s) else {
        return Err(Error::invalid(
            "none of its rows has both input and output tokens",
            "check the columns' order",
        ));
    };
    rows.iter_mut().for_each(|row| row.arrival_s -= start_s);
    Ok(Trace { rows, skipped })
}

type Record = BTreeMap<String, String>;

fn csv_records(text: &str) -> Result<Vec<Record>> {
    let mut reader = csv::ReaderBuilder::new().trim(csv::Trim::All).from_reader(text.as_bytes());
    let wrong =
        |error: csv::Error| Error::invalid(error.to_string(), "give a CSV file with a header and equal rows");
    let names: Vec<String> = reader.headers().map_err(wrong)?.iter().map(column_name).collect();
    reader
        .records()
        .map(|record| {
            Ok(names.iter().cloned().zip(record.map_err(wrong)?.iter().map(str::to_string)).collect())
        })
        .collect()
}

fn json_lines(text: &str) -> Result<Vec<Record>> {
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    lines
        .map(|(index, line)| {
            let object: serde_json::Map<String, serde_json::Value> =
                serde_json::from_str(line).map_err(|error| {
                    Error::invalid(
                        format!("line {}: {error}", index + 1),
                        "each line must be one JSON object",
                    )
                })?;
            let text = |value: serde_json::Value| match value {
                serde_json::Value::String(text) => text,
                other => other.to_string(),
            };
            Ok(object.into_iter().map(|(name, value)| (column_name(&name), text(value))).collect())
        })
        .collect()
}

/// Lower case, without outer blanks or a byte order mark.
fn column_name(name: &str) -> String {
    name.trim_start_matches('\u{feff}').trim().to_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(text: &str) -> Vec<(f64, usize, usize)> {
        let trace = parse(text).unwrap();
        trace.rows.iter().map(|row| (row.arrival_s, row.input_tokens, row.output_tokens)).collect()
    }

    #[test]
    fn own_columns_in_any_order_of_arrival() {
        let text = "arrival_s,input_tokens,output_tokens\n2.5,20,4\n1,10,3\n";
        assert_eq!(rows(text), [(0.0, 10, 3), (1.5, 20, 4)]);
    }

    #[test]
    fn mooncake_is_json_lines_in_milliseconds() {
        let text = r#"{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2]}
{"timestamp": 3052, "input_length": 7322, "output_length": 490, "hash_ids": [0, 14]}
"#;
        assert_eq!(rows(text), [(0.0, 6758, 500), (3.052, 7322, 490)]);
    }

    #[test]
    fn burstgpt_is_csv_in_seconds_and_its_failures_are_left_out() {
        let text = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n\
                    5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,1087,0,1087,Conversation log\n\
                    118,GPT-4,417,276,693,API log\n";
        assert_eq!(rows(text), [(0.0, 472, 18), (113.0, 417, 276)]);
        assert_eq!(parse(text).unwrap().skipped, 1);
    }

    #[test]
    fn azure_is_csv_with_dates_of_both_years() {
        let of_2023 = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n\
                       2023-11-16 18:17:04.0319569,3180,8\n";
        let got = rows(of_2023);
        assert!((got[1].0 - 0.0519969).abs() < 1e-6, "{got:?}");
        let of_2024 = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 23:59:59.500000+00:00,2162,5\n\
                       2024-05-11 00:00:00.009930+00:00,2399,6\n";
        assert!((rows(of_2024)[1].0 - 0.50993).abs() < 1e-6);
    }

    #[test]
    fn what_is_wrong_is_said_with_its_row() {
        let error = parse("when,in,out\n1,2,3\n").unwrap_err();
        assert!(error.to_string().contains("when") && error.hint().contains("arrival_s"));
        let error = parse("arrival_s,input_tokens,output_tokens\n1,2,3\n2,-4,1\n").unwrap_err();
        assert!(error.to_string().contains("row 2: input_tokens is `-4`"), "{error}");
        assert!(parse("arrival_s,input_tokens,output_tokens\n").is_err());
        assert!(parse("{\"timestamp\": 0,").is_err());
        assert!(parse("arrival_s,input_tokens,output_tokens\nnan,2,3\n").is_err());
    }
}
