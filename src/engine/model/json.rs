//! Reading values out of a JSON file with errors that name the file, the key, what was found and what was expected.

use std::ops::RangeInclusive;
use std::path::Path;

use serde_json::{Map, Value};

use crate::{Error, Result};

/// Larger JSON files than this are not configuration.
const MOST_BYTES: u64 = 256 << 20;

/// The file's bytes.
pub fn read_file(path: &Path) -> Result<Vec<u8>> {
    let size = std::fs::metadata(path).map_err(|error| Error::read(path, &error))?.len();
    if size > MOST_BYTES {
        return Err(Error::invalid(
            format!("{} has {size} bytes, expected a JSON file of at most {MOST_BYTES}", path.display()),
            "check that the file is what its name says",
        ));
    }
    std::fs::read(path).map_err(|error| Error::read(path, &error))
}

/// Parses the bytes of a JSON object; `file` is the name that messages show.
pub fn parse_object(file: &str, bytes: &[u8]) -> Result<Map<String, Value>> {
    match serde_json::from_slice::<Value>(bytes) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(other) => Err(Error::invalid(
            format!("{file} holds {}, expected a JSON object", kind(&other)),
            "the file may be damaged: fetch it again",
        )),
        Err(error) => Err(Error::invalid(
            format!("{file} is not valid JSON: {error}"),
            "the file may be damaged or cut short: fetch it again",
        )),
    }
}

/// One object of a file, with the path that leads to it.
#[derive(Debug, Clone, Copy)]
pub struct Object<'a> {
    file: &'a str,
    /// `` or `text_config.`.
    prefix: &'a str,
    map: &'a Map<String, Value>,
}

impl<'a> Object<'a> {
    pub fn new(file: &'a str, prefix: &'a str, map: &'a Map<String, Value>) -> Self {
        Self { file, prefix, map }
    }

    /// The value of `key`; `null` counts as absent.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// The object under `key`; its keys are shown with `prefix` in front.
    pub fn object(&self, key: &str, prefix: &'a str) -> Result<Option<Object<'a>>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Object { file: self.file, prefix, map })),
            Some(_) => Err(self.wrong(key, "an object")),
        }
    }

    pub fn text(&self, key: &str) -> Result<Option<&'a str>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(self.wrong(key, "a string")),
        }
    }

    pub fn flag(&self, key: &str) -> Result<Option<bool>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(_) => Err(self.wrong(key, "true or false")),
        }
    }

    pub fn integer(&self, key: &str, bounds: RangeInclusive<usize>) -> Result<Option<usize>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        // Some exporters write whole numbers as 4096.0.
        let whole = value.as_u64().or_else(|| {
            value.as_f64().filter(|f| f.fract() == 0.0 && (0.0..=9e15).contains(f)).map(|f| f as u64)
        });
        match whole.and_then(|n| usize::try_from(n).ok()).filter(|n| bounds.contains(n)) {
            Some(n) => Ok(Some(n)),
            None => Err(self.wrong(key, &format!("an integer from {} to {}", bounds.start(), bounds.end()))),
        }
    }

    pub fn required_integer(&self, key: &str, bounds: RangeInclusive<usize>) -> Result<usize> {
        let expected = format!("an integer from {} to {}", bounds.start(), bounds.end());
        self.integer(key, bounds)?.ok_or_else(|| self.missing(key, &expected))
    }

    pub fn number(&self, key: &str, bounds: RangeInclusive<f64>) -> Result<Option<f64>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_f64().filter(|n| bounds.contains(n)) {
            Some(n) => Ok(Some(n)),
            None => {
                Err(self.wrong(key, &format!("a number from {:e} to {:e}", bounds.start(), bounds.end())))
            }
        }
    }

    /// One token id, a list of them, or nothing.
    pub fn token_ids(&self, key: &str, vocab_size: usize) -> Result<Vec<u32>> {
        let values = match self.get(key) {
            None => return Ok(Vec::new()),
            Some(Value::Array(values)) => values.as_slice(),
            Some(single) => std::slice::from_ref(single),
        };
        let expected = format!("token ids below the vocabulary size {vocab_size}");
        values
            .iter()
            .map(|value| {
                let id = value.as_u64().filter(|&id| id < vocab_size as u64);
                id.and_then(|id| u32::try_from(id).ok()).ok_or_else(|| self.wrong(key, &expected))
            })
            .collect()
    }

    /// `config.json: text_config.hidden_size`.
    pub fn place(&self, key: &str) -> String {
        format!("{}: `{}{key}`", self.file, self.prefix)
    }

    /// The error for a value that is not what was expected.
    pub fn wrong(&self, key: &str, expected: &str) -> Error {
        let found = self.map.get(key).map_or_else(|| "absent".to_string(), short);
        Error::invalid(
            format!("{} is {found}, expected {expected}", self.place(key)),
            "check the file against the model's published one",
        )
    }

    pub fn missing(&self, key: &str, expected: &str) -> Error {
        Error::invalid(
            format!("{} is missing, expected {expected}", self.place(key)),
            "check the file against the model's published one",
        )
    }

    /// The error for a value that is valid but that this engine does not support.
    pub fn unsupported(&self, key: &str, why: &str, hint: &str) -> Error {
        let found = self.map.get(key).map_or_else(|| "absent".to_string(), short);
        Error::invalid(format!("{} is {found}, which is not supported: {why}", self.place(key)), hint)
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// The value as JSON, cut to what fits in a message.
fn short(value: &Value) -> String {
    match value {
        Value::Object(_) => "an object".to_string(),
        other => {
            let text = other.to_string();
            match text.char_indices().nth(60) {
                Some((end, _)) => format!("{}...", &text[..end]),
                None => text,
            }
        }
    }
}
