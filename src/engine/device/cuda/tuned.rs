//! Which product was found fastest, one of cuBLASLt's algorithms or our own kernel, kept between runs beside the kernel cache.
//!
//! One text file for each GPU model, version of the library (an algorithm's eight words mean nothing to another version) and
//! version of our kernel, a line a shape: rows, n, k, stride, what becomes of the sums, and the words in hexadecimal, or `own`. A
//! file that cannot be read or written costs time, nothing else; lines that cannot be read are left out.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use super::compile::cache_folder;
use super::cublaslt::{Shape, Sums};

/// `cublasLtMatmulAlgo_t`.
type Words = [u64; 8];

/// Raised when our kernels change so much that what was found says nothing any more.
const OWN_VERSION: u32 = 1;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Choice {
    Own,
    Library(Words),
}

#[derive(Debug, Default)]
pub struct Tuned {
    file: Option<PathBuf>,
    found: BTreeMap<[usize; 5], Choice>,
}

impl Tuned {
    /// What is known for a GPU of this name and a version of the library.
    pub fn open(gpu: &str, version: usize) -> Self {
        let name: String = gpu
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' })
            .collect();
        let file = cache_folder()
            .map(|folder| folder.join(format!("products-{OWN_VERSION}-cublaslt-{version}-{name}.txt")));
        let text = file.as_ref().and_then(|file| fs::read_to_string(file).ok()).unwrap_or_default();
        Self { file, found: parse(&text) }
    }

    pub fn get(&self, shape: &Shape) -> Option<Choice> {
        self.found.get(&key(shape)).copied()
    }

    pub fn put(&mut self, shape: Shape, choice: Choice) {
        self.found.insert(key(&shape), choice);
    }

    /// Writes the file, with what other processes have found meanwhile.
    pub fn save(&self) {
        let Some(file) = &self.file else { return };
        let mut all = parse(&fs::read_to_string(file).unwrap_or_default());
        all.extend(&self.found);
        let partial = file.with_extension(format!("{}.partial", std::process::id()));
        let written = file
            .parent()
            .map_or(Ok(()), fs::create_dir_all)
            .and_then(|()| fs::write(&partial, print(&all)))
            .and_then(|()| fs::rename(&partial, file));
        if written.is_err() {
            let _ = fs::remove_file(&partial);
        }
    }
}

fn key(shape: &Shape) -> [usize; 5] {
    let sums = match shape.sums {
        Sums::Half => 0,
        Sums::Float => 1,
        Sums::Added => 2,
    };
    [shape.rows, shape.n, shape.k, shape.stride, sums]
}

fn print(found: &BTreeMap<[usize; 5], Choice>) -> String {
    let line = |(key, choice): (&[usize; 5], &Choice)| {
        let key = key.map(|number| number.to_string()).join(" ");
        let choice = match choice {
            Choice::Own => "own".to_string(),
            Choice::Library(words) => words.map(|word| format!("{word:016x}")).join(" "),
        };
        format!("{key} {choice}\n")
    };
    found.iter().map(line).collect()
}

fn parse(text: &str) -> BTreeMap<[usize; 5], Choice> {
    let line = |line: &str| {
        let fields: Vec<&str> = line.split(' ').collect();
        let (key, choice) = fields.split_at_checked(5)?;
        let key: Vec<usize> = key.iter().map(|field| field.parse().ok()).collect::<Option<_>>()?;
        let choice = if choice == ["own"] {
            Choice::Own
        } else {
            let words: Vec<u64> =
                choice.iter().map(|field| u64::from_str_radix(field, 16).ok()).collect::<Option<_>>()?;
            Choice::Library(words.try_into().ok()?)
        };
        Some((key.try_into().ok()?, choice))
    };
    text.lines().filter_map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_found_survives_the_file_and_broken_lines_do_not() {
        let shape = Shape { rows: 512, n: 2560, k: 9216, stride: 2560, sums: Sums::Added };
        let words = [0x42, u64::MAX, 0, 1, 2, 3, 4, 5];
        let mut tuned = Tuned::default();
        tuned.put(shape, Choice::Library(words));
        tuned.put(Shape { rows: 1024, ..shape }, Choice::Own);
        let text = print(&tuned.found);
        let broken = format!("{text}512 2560 9216 2560 0 12 34\nnonsense\n\n");
        let read = Tuned { file: None, found: parse(&broken) };
        assert_eq!(read.get(&shape), Some(Choice::Library(words)));
        assert_eq!(read.get(&Shape { rows: 1024, ..shape }), Some(Choice::Own));
        assert_eq!(read.found.len(), 2);
        assert_eq!(read.get(&Shape { sums: Sums::Float, ..shape }), None);
    }
}
