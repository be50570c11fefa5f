//! The number of real tokens: the largest id in `tokenizer.json` plus one. A model's embedding is often padded
//! beyond it, and the padding must never be sampled. Read as a stream, without keeping the vocabulary.

use std::fmt;
use std::path::Path;

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::json;
use crate::{Error, Result};

/// # Errors
/// The file is not a `tokenizer.json` with a vocabulary.
pub fn size(path: &Path) -> Result<usize> {
    let bytes = json::read_file(path)?;
    parse(&bytes).map_err(|error| {
        Error::invalid(
            format!("{} is not a tokenizer: {error}", path.display()),
            "the file may be damaged or cut short: fetch it again",
        )
    })
}

fn parse(bytes: &[u8]) -> Result<usize, serde_json::Error> {
    let tokenizer: Tokenizer = serde_json::from_slice(bytes)?;
    let added = tokenizer.added_tokens.iter().map(|token| token.id as usize + 1).max().unwrap_or(0);
    Ok(added.max(tokenizer.model.vocab.0))
}

#[derive(Deserialize)]
struct Tokenizer {
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
    model: Model,
}

#[derive(Deserialize)]
struct AddedToken {
    id: u32,
}

#[derive(Deserialize)]
struct Model {
    vocab: Ids,
}

/// Largest id plus one, of a map of tokens to ids or a list of tokens.
struct Ids(usize);

impl<'de> Deserialize<'de> for Ids {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Largest;
        impl<'de> Visitor<'de> for Largest {
            type Value = Ids;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a vocabulary")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Ids, A::Error> {
                let mut size = 0;
                while let Some((IgnoredAny, id)) = map.next_entry::<IgnoredAny, u32>()? {
                    size = size.max(id as usize + 1);
                }
                Ok(Ids(size))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Ids, A::Error> {
                let mut size = 0;
                while list.next_element::<IgnoredAny>()?.is_some() {
                    size += 1;
                }
                Ok(Ids(size))
            }
        }
        deserializer.deserialize_any(Largest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_id_counts_wherever_it_is() {
        let added_last =
            br#"{"added_tokens":[{"id":9,"content":"x"}],"model":{"type":"BPE","vocab":{"a":0,"b":3}}}"#;
        assert_eq!(parse(added_last).unwrap(), 10);
        let added_first = br#"{"added_tokens":[{"id":0}],"model":{"vocab":{"a":1,"b":2}}}"#;
        assert_eq!(parse(added_first).unwrap(), 3);
        assert_eq!(parse(br#"{"model":{"vocab":[["a",-1.5],["b",-2]]}}"#).unwrap(), 2);
        assert!(parse(br#"{"model":{}}"#).is_err());
        assert!(parse(br#"{"model":{"vocab":{"a":-1}}}"#).is_err());
    }
}
