//! The header of a `.safetensors` file: eight bytes of length, JSON, then the tensors' bytes.
//!
//! Everything in it is checked before a byte is used: each tensor's range must hold exactly what its type and shape
//! say, lie inside the file, and the ranges together must cover the data with no hole and no overlap.

use std::fmt;
use std::ops::Range;

use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::layout::WeightFormat;
use crate::{Error, Result};

/// Longest header that readers of this format accept.
const MOST_HEADER_BYTES: u64 = 100_000_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Dtype {
    Bool,
    U8,
    I8,
    #[serde(rename = "F8_E5M2")]
    F8E5m2,
    #[serde(rename = "F8_E4M3")]
    F8E4m3,
    I16,
    U16,
    F16,
    Bf16,
    I32,
    U32,
    F32,
    I64,
    U64,
    F64,
}

impl Dtype {
    pub fn bytes(self) -> u64 {
        match self {
            Self::Bool | Self::U8 | Self::I8 | Self::F8E5m2 | Self::F8E4m3 => 1,
            Self::I16 | Self::U16 | Self::F16 | Self::Bf16 => 2,
            Self::I32 | Self::U32 | Self::F32 => 4,
            Self::I64 | Self::U64 | Self::F64 => 8,
        }
    }

    /// As files spell it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bool => "BOOL",
            Self::U8 => "U8",
            Self::I8 => "I8",
            Self::F8E5m2 => "F8_E5M2",
            Self::F8E4m3 => "F8_E4M3",
            Self::I16 => "I16",
            Self::U16 => "U16",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::I32 => "I32",
            Self::U32 => "U32",
            Self::F32 => "F32",
            Self::I64 => "I64",
            Self::U64 => "U64",
            Self::F64 => "F64",
        }
    }

    /// The format of a 16-bit or 32-bit float matrix.
    pub fn weight_format(self) -> Option<WeightFormat> {
        match self {
            Self::F32 => Some(WeightFormat::F32),
            Self::F16 => Some(WeightFormat::F16),
            Self::Bf16 => Some(WeightFormat::Bf16),
            _ => None,
        }
    }
}

/// One tensor as the header describes it. `range` counts from the start of the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorEntry {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub range: Range<usize>,
}

impl TensorEntry {
    pub fn elements(&self) -> u64 {
        self.shape.iter().map(|&size| size as u64).product()
    }
}

/// The tensors of a file, in the order of their bytes.
///
/// # Errors
/// [`Error::Invalid`] naming `file`, the tensor, what was found and what was expected.
pub fn read_header(file: &str, bytes: &[u8]) -> Result<Vec<TensorEntry>> {
    let (header, data_start) = split_header(file, bytes)?;
    let text = std::str::from_utf8(header).map_err(|error| {
        damaged(file, format!("its header is not JSON: bytes that are not UTF-8 at {}", error.valid_up_to()))
    })?;
    let raw: RawHeader = serde_json::from_str(text)
        .map_err(|error| damaged(file, format!("its header is not the JSON it should be: {error}")))?;
    let data_len = (bytes.len() - data_start) as u64;
    let mut entries = Vec::with_capacity(raw.0.len());
    for (name, tensor) in raw.0 {
        entries.push(checked(file, name, tensor, data_start, data_len)?);
    }
    entries.sort_by_key(|a| (a.range.start, a.range.end));
    check_cover(file, &entries, data_start, bytes.len())?;
    Ok(entries)
}

/// The start of a file that holds `tensors`, (name, type, shape), one after the other: length and header. Also the
/// bytes of the data that is to follow.
pub fn header_bytes<'a>(tensors: impl Iterator<Item = (&'a str, Dtype, &'a [usize])>) -> (Vec<u8>, u64) {
    let mut header = Map::new();
    header.insert("__metadata__".to_string(), json!({ "format": "pt" }));
    let mut end = 0;
    for (name, dtype, shape) in tensors {
        let start = end;
        end += shape.iter().map(|&size| size as u64).product::<u64>() * dtype.bytes();
        let entry = json!({ "dtype": dtype.name(), "shape": shape, "data_offsets": [start, end] });
        header.insert(name.to_string(), entry);
    }
    let mut header = Value::Object(header).to_string();
    // Readers like the data to start at a multiple of eight.
    header.extend(std::iter::repeat_n(' ', header.len().next_multiple_of(8) - header.len()));
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    (bytes, end)
}

/// The header's bytes and where the data starts.
pub fn split_header<'a>(file: &str, bytes: &'a [u8]) -> Result<(&'a [u8], usize)> {
    let Some(length) = bytes.first_chunk::<8>() else {
        return Err(damaged(
            file,
            format!("it has {} bytes, fewer than the 8 of a header's length", bytes.len()),
        ));
    };
    let length = u64::from_le_bytes(*length);
    if length > MOST_HEADER_BYTES || length > bytes.len() as u64 - 8 {
        return Err(damaged(
            file,
            format!("its header claims {length} bytes, but the file has {} in all", bytes.len()),
        ));
    }
    let data_start = 8 + length as usize;
    Ok((&bytes[8..data_start], data_start))
}

fn checked(
    file: &str,
    name: String,
    tensor: RawTensor,
    data_start: usize,
    data_len: u64,
) -> Result<TensorEntry> {
    let [begin, end] = tensor.data_offsets;
    if begin > end || end > data_len {
        return Err(damaged(
            file,
            format!(
                "tensor `{name}` has data_offsets {begin}..{end}, which reach past the end of the file's \
                 {data_len} bytes of data or run backwards"
            ),
        ));
    }
    let elements = tensor.shape.iter().try_fold(1u64, |product, &size| product.checked_mul(size));
    let expected = elements.and_then(|elements| elements.checked_mul(tensor.dtype.bytes()));
    if expected != Some(end - begin) {
        return Err(damaged(
            file,
            format!(
                "tensor `{name}` of {} {:?} takes {} bytes by its data_offsets, expected {}",
                tensor.dtype.name(),
                tensor.shape,
                end - begin,
                expected.map_or_else(|| "more than a file can have".to_string(), |bytes| bytes.to_string())
            ),
        ));
    }
    // Every dim fits in memory unless another is zero; such a shape is of no use either way.
    let shape = tensor.shape.iter().map(|&size| usize::try_from(size)).collect::<Result<Vec<_>, _>>();
    let shape = shape.map_err(|_| damaged(file, format!("tensor `{name}` has shape {:?}", tensor.shape)))?;
    // Both are at most the file's length, which is a usize.
    let range = data_start + begin as usize..data_start + end as usize;
    Ok(TensorEntry { name, dtype: tensor.dtype, shape, range })
}

fn check_cover(file: &str, entries: &[TensorEntry], data_start: usize, file_len: usize) -> Result<()> {
    let mut covered_to = data_start;
    let mut before = "the header";
    for entry in entries {
        if entry.range.start != covered_to {
            let what = if entry.range.start < covered_to { "overlaps" } else { "leaves a gap after" };
            return Err(damaged(
                file,
                format!("tensor `{}` {what} `{before}` by its data_offsets", entry.name),
            ));
        }
        covered_to = entry.range.end;
        before = &entry.name;
    }
    if covered_to != file_len {
        return Err(damaged(file, format!("{} bytes at its end belong to no tensor", file_len - covered_to)));
    }
    Ok(())
}

fn damaged(file: &str, what: impl fmt::Display) -> Error {
    Error::invalid(format!("{file}: {what}"), "the file may be damaged or cut short: fetch it again")
}

#[derive(Debug, Deserialize)]
struct RawTensor {
    dtype: Dtype,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

/// All entries but `__metadata__`. A name that comes twice is an error, where a map would keep the last.
struct RawHeader(Vec<(String, RawTensor)>);

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = RawHeader;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let mut entries = Vec::new();
                let mut seen = std::collections::HashSet::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<IgnoredAny>()?;
                        continue;
                    }
                    if !seen.insert(name.clone()) {
                        return Err(serde::de::Error::custom(format!("tensor `{name}` is there twice")));
                    }
                    entries.push((name, map.next_value()?));
                }
                Ok(RawHeader(entries))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(header: &str, data: usize) -> Vec<u8> {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.resize(bytes.len() + data, 0);
        bytes
    }

    fn error(header: &str, data: usize) -> String {
        read_header("x.safetensors", &file(header, data)).unwrap_err().to_string()
    }

    #[test]
    fn a_good_header_is_read_in_the_order_of_its_bytes() {
        let header = r#"{"__metadata__":{"format":"pt"},
            "b":{"dtype":"BF16","shape":[2,3],"data_offsets":[4,16]},
            "a":{"dtype":"F32","shape":[],"data_offsets":[0,4]},
            "none":{"dtype":"I64","shape":[0],"data_offsets":[16,16]}}"#;
        let entries = read_header("x.safetensors", &file(header, 16)).unwrap();
        assert_eq!(entries.iter().map(|e| e.name.as_str()).collect::<Vec<_>>(), ["a", "b", "none"]);
        assert_eq!(entries[1].shape, [2, 3]);
        assert_eq!(entries[1].range.len(), 12);
    }

    #[test]
    fn lies_are_found() {
        let tensor =
            |offsets: &str| format!(r#"{{"w":{{"dtype":"F16","shape":[4],"data_offsets":{offsets}}}}}"#);
        assert!(error(&tensor("[0,9]"), 9).contains("`w`"));
        assert!(error(&tensor("[0,8]"), 7).contains("past the end"));
        assert!(error(&tensor("[8,0]"), 8).contains("backwards"));
        assert!(error(&tensor("[0,8]"), 12).contains("belong to no tensor"));
        assert!(error(&tensor("[4,12]"), 12).contains("gap"));
        assert!(error(&tensor("[0,-8]"), 8).contains("JSON"));
        assert!(error(r#"{"w":{"dtype":"F99","shape":[4],"data_offsets":[0,8]}}"#, 8).contains("F99"));
        let huge = r#"{"w":{"dtype":"F32","shape":[9223372036854775807,4],"data_offsets":[0,8]}}"#;
        assert!(error(huge, 8).contains("more than a file can have"));
        let twice = r#"{"w":{"dtype":"F16","shape":[1],"data_offsets":[0,2]},"w":{"dtype":"F16","shape":[1],"data_offsets":[2,4]}}"#;
        assert!(error(twice, 4).contains("twice"));
        let overlap = r#"{"v":{"dtype":"F16","shape":[2],"data_offsets":[0,4]},"w":{"dtype":"F16","shape":[2],"data_offsets":[2,6]}}"#;
        assert!(error(overlap, 6).contains("overlaps"));
        assert!(error("[1]", 0).contains("JSON"));
    }

    #[test]
    fn short_files_are_found() {
        for length in 0..8 {
            assert!(read_header("x", &vec![0; length]).is_err());
        }
        let mut bytes = u64::MAX.to_le_bytes().to_vec();
        bytes.push(b'{');
        assert!(read_header("x", &bytes).unwrap_err().to_string().contains("claims"));
    }
}
