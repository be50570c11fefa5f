//! Text to tokens and back: a checkpoint's `tokenizer.json`, or bytes for models that have none.
//!
//! Decoding is safe to stream: a character split over several tokens is held back until it is whole.

use std::path::Path;

use crate::{Error, Result};

/// What stands for bytes that are no UTF-8.
const REPLACEMENT: char = '\u{fffd}';

#[derive(Debug)]
pub enum Tokenizer {
    /// Token id = byte. Ids from 256 on decode to `<id>`: synthetic models write them.
    Bytes,
    HuggingFace(Box<tokenizers::Tokenizer>),
}

impl Tokenizer {
    /// Reads a `tokenizer.json`.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the file when it cannot be read or is no tokenizer.
    pub fn from_file(path: &Path) -> Result<Self> {
        let bytes = std::fs::read(path).map_err(|source| Error::read(path, &source))?;
        let tokenizer = tokenizers::Tokenizer::from_bytes(&bytes).map_err(|source| {
            Error::invalid(
                format!("{} is not a tokenizer this build can read: {source}", path.display()),
                "it should be the tokenizer.json of the model's repository, complete",
            )
        })?;
        Ok(Self::HuggingFace(Box::new(tokenizer)))
    }

    /// Ids of `text`; with `special`, the ones the tokenizer puts around a text (a leading BOS) included.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the tokenizer cannot encode it.
    pub fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>> {
        match self {
            Self::Bytes => Ok(text.bytes().map(u32::from).collect()),
            Self::HuggingFace(tokenizer) => match tokenizer.encode_fast(text, special) {
                Ok(encoding) => Ok(encoding.get_ids().to_vec()),
                Err(source) => Err(Error::invalid(
                    format!("the tokenizer cannot encode the text: {source}"),
                    "check that tokenizer.json belongs to this model",
                )),
            },
        }
    }

    /// Text of `ids`. Special tokens are left out; bytes that are no UTF-8 become U+FFFD.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the tokenizer cannot decode them.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        match self {
            Self::Bytes => Ok(decode_bytes(ids)),
            Self::HuggingFace(tokenizer) => tokenizer.decode(ids, true).map_err(|source| {
                Error::invalid(
                    format!("the tokenizer cannot decode the tokens: {source}"),
                    "check that tokenizer.json belongs to this model",
                )
            }),
        }
    }

    /// Decodes a growing list of tokens piece by piece.
    pub fn stream(&self) -> TextStream<'_> {
        TextStream { tokenizer: self, ids: Vec::new(), read: 0 }
    }

    /// Ids it can produce; `None` where any id decodes.
    pub fn vocab_size(&self) -> Option<usize> {
        match self {
            Self::Bytes => None,
            Self::HuggingFace(tokenizer) => Some(tokenizer.get_vocab_size(true)),
        }
    }
}

fn decode_bytes(ids: &[u32]) -> String {
    let mut bytes = Vec::with_capacity(ids.len());
    for &id in ids {
        match u8::try_from(id) {
            Ok(byte) => bytes.push(byte),
            Err(_) => bytes.extend_from_slice(format!("<{id}>").as_bytes()),
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Text that has come out so far is never taken back: the pieces joined are the whole text.
#[derive(Debug)]
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    /// The tokens of the last piece, then those not turned into text yet. The former are decoded again in front of
    /// the latter, since a token's text may depend on its neighbour (a leading space).
    ids: Vec<u32>,
    /// How many of `ids` have been turned into text.
    read: usize,
}

impl TextStream<'_> {
    /// The text that has become certain with token `id`; empty while a character is incomplete.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`].
    pub fn push(&mut self, id: u32) -> Result<String> {
        self.ids.push(id);
        let piece = self.piece()?;
        if piece.is_empty() || piece.ends_with(REPLACEMENT) {
            return Ok(String::new());
        }
        self.advance();
        Ok(piece)
    }

    /// What is left at the end: an incomplete character shows as U+FFFD.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`].
    pub fn finish(&mut self) -> Result<String> {
        let piece = self.piece()?;
        self.advance();
        Ok(piece)
    }

    fn piece(&self) -> Result<String> {
        let before = self.tokenizer.decode(&self.ids[..self.read])?;
        let all = self.tokenizer.decode(&self.ids)?;
        Ok(all.get(before.len()..).unwrap_or_default().to_string())
    }

    fn advance(&mut self) {
        self.ids.drain(..self.read);
        self.read = self.ids.len();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn streamed(tokenizer: &Tokenizer, ids: &[u32]) -> Vec<String> {
        let mut stream = tokenizer.stream();
        let mut pieces: Vec<String> = ids.iter().map(|&id| stream.push(id).unwrap()).collect();
        pieces.push(stream.finish().unwrap());
        pieces
    }

    #[test]
    fn bytes_round_trip_and_stream_whole_characters() {
        let text = "née 😀!";
        let ids = Tokenizer::Bytes.encode(text, true).unwrap();
        assert_eq!(ids.len(), text.len());
        assert_eq!(Tokenizer::Bytes.decode(&ids).unwrap(), text);
        let pieces = streamed(&Tokenizer::Bytes, &ids);
        assert_eq!(pieces.concat(), text);
        assert_eq!(pieces[1..3], ["", "é"]);
        assert_eq!(Tokenizer::Bytes.decode(&[65, 300, 66]).unwrap(), "A<300>B");
    }

    #[test]
    fn an_incomplete_character_comes_out_at_the_end() {
        let pieces = streamed(&Tokenizer::Bytes, &[65, 0xf0, 0x9f]);
        assert_eq!(pieces[0], "A");
        assert_eq!(pieces.concat(), "A\u{fffd}");
    }

    /// Byte-level BPE over a handful of bytes, one merge, one special token.
    fn small() -> Tokenizer {
        let json = r#"{"version":"1.0","truncation":null,"padding":null,
            "added_tokens":[{"id":7,"content":"<|end|>","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}],
            "normalizer":null,
            "pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":false,"use_regex":false},
            "post_processor":null,
            "decoder":{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":false,"use_regex":false},
            "model":{"type":"BPE","dropout":null,"unk_token":null,"continuing_subword_prefix":null,"end_of_word_suffix":null,
                "fuse_unk":false,"byte_fallback":false,"ignore_merges":false,
                "vocab":{"a":0,"b":1,"ab":2,"Ġ":3,"Ã":4,"©":5,"n":6},"merges":[["a","b"]]}}"#;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        std::fs::write(&path, json).unwrap();
        Tokenizer::from_file(&path).unwrap()
    }

    #[test]
    fn a_tokenizer_file_encodes_decodes_and_streams() {
        let tokenizer = small();
        let ids = tokenizer.encode("ab né", true).unwrap();
        assert_eq!(ids, [2, 3, 6, 4, 5]);
        assert_eq!(tokenizer.decode(&ids).unwrap(), "ab né");
        assert_eq!(tokenizer.decode(&[2, 7]).unwrap(), "ab");
        assert_eq!(streamed(&tokenizer, &ids), ["ab", " ", "n", "", "é", ""]);
        assert_eq!(tokenizer.vocab_size(), Some(8));
    }

    #[test]
    fn a_broken_file_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        assert!(Tokenizer::from_file(&path).unwrap_err().to_string().contains("tokenizer.json"));
        std::fs::write(&path, "{\"model\": 1}").unwrap();
        let error = Tokenizer::from_file(&path).unwrap_err();
        assert!(error.to_string().contains("tokenizer.json") && error.exit_code() == 2, "{error}");
    }
}
