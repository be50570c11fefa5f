//! cells.jsonl: which cells of a run are finished, and how long every file with their rows is.
//!
//! A cell is named by its arm's name and not by the arm's place in the plan: under another plan (`--force`) another
//! arm may stand there. Earlier versions wrote the place; it is looked up in the plan that their run.json has.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Component, Path};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::folder::SUMMARY_FILE;
use super::record::{RunRecord, Status};
use crate::experiment::plan::{Arm, Cell};
use crate::{Error, Result};

pub const JOURNAL: &str = "cells.jsonl";

/// A cell whose rows are in the folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FinishedCell {
    pub arm: String,
    /// What the arm ran, whatever it is called ([`Arm::config_hash`]).
    pub config_hash: String,
    pub repeat: usize,
}

impl FinishedCell {
    pub fn new(arm: &Arm, repeat: usize) -> Self {
        Self { arm: arm.name.clone(), config_hash: arm.config_hash(), repeat }
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct Line {
    #[serde(flatten)]
    cell: FinishedCell,
    lengths: BTreeMap<String, u64>,
    /// Lines of earlier versions have none.
    #[serde(default)]
    digests: BTreeMap<String, String>,
}

/// As versions up to 0.1.0 wrote it.
#[derive(Debug, Deserialize)]
struct OldLine {
    cell: Cell,
    lengths: BTreeMap<String, u64>,
}

/// A journal, read.
#[derive(Debug, Default)]
pub struct Journal {
    pub cells: Vec<FinishedCell>,
    /// Length of each file with only finished rows in it, bytes.
    pub lengths: BTreeMap<String, u64>,
    /// [`digest`] of that part of each file, where the journal has it.
    pub digests: BTreeMap<String, String>,
    /// Of its whole lines. What follows was cut short by a kill.
    pub valid_bytes: u64,
    /// Some lines name arms by their place.
    pub old: bool,
}

impl Journal {
    /// Reads the journal of a folder, which may have none yet.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a file that cannot be read; for lines of an earlier version where the plan they belong to
    /// is not known.
    pub fn read(folder: &Path) -> Result<Self> {
        let path = folder.join(JOURNAL);
        let mut bytes = match std::fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Self::default()),
            Err(error) => return Err(Error::read(&path, &error)),
        };
        // (What follows the last whole line may end within a character.)
        bytes.truncate(bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1));
        let text = String::from_utf8(bytes)
            .map_err(|_| Error::invalid(format!("{}: it is no text", path.display()), CHANGED))?;
        let mut journal = Self::default();
        let mut record: Option<RunRecord> = None;
        for (index, line) in text.split_inclusive('\n').enumerate() {
            let Line { cell, lengths, digests } = if let Ok(line) = serde_json::from_str(line) {
                line
            } else if let Ok(OldLine { cell, lengths }) = serde_json::from_str(line) {
                let record = match &mut record {
                    Some(record) => record,
                    none => none.insert(RunRecord::read(folder)?),
                };
                journal.old = true;
                Line { cell: by_place(folder, record, cell)?, lengths, digests: BTreeMap::new() }
            } else {
                return Err(Error::invalid(
                    format!("{}: line {} is not that of a finished arm", path.display(), index + 1),
                    CHANGED,
                ));
            };
            if let Some(name) = lengths.keys().find(|name| !is_plain(name)) {
                return Err(Error::invalid(
                    format!("{}: line {} names {name:?}, no file of this folder", path.display(), index + 1),
                    CHANGED,
                ));
            }
            journal.cells.push(cell);
            // (A file that grew by a line without a digest has none.)
            journal.digests.retain(|name, _| !lengths.contains_key(name));
            journal.lengths.extend(lengths);
            journal.digests.extend(digests);
            journal.valid_bytes += line.len() as u64;
        }
        Ok(journal)
    }

    /// The part of a file that finished rows are in, and its hash. `bytes` are all that the file has, `name` is what the
    /// journal calls it.
    ///
    /// # Errors
    /// [`Error::Invalid`] where rows are missing, are not as the run wrote them, or are more than a kill leaves.
    pub fn finished<'a>(&self, path: &Path, name: &str, bytes: &'a [u8]) -> Result<(&'a [u8], Sha256)> {
        let length = self.lengths.get(name).copied().unwrap_or(0);
        let part = usize::try_from(length).ok().and_then(|length| bytes.get(..length)).ok_or_else(|| {
            let found =
                format!("{} has {} bytes, but the journal names {length}", path.display(), bytes.len());
            Error::invalid(format!("{found}{}", foreign(bytes)), CHANGED)
        })?;
        let hash = Sha256::new_with_prefix(part);
        let as_written = match self.digests.get(name) {
            Some(expected) => *expected == digest(&hash),
            None => part.is_empty() || part.ends_with(b"\n") && foreign(part).is_empty(),
        };
        if !as_written {
            let what = "the rows of finished arms are not as the run wrote them";
            return Err(Error::invalid(format!("{}: {what}{}", path.display(), foreign(bytes)), CHANGED));
        }
        if name == SUMMARY_FILE {
            self.require_one_unfinished(path, part, &bytes[part.len()..])?;
        }
        Ok((part, hash))
    }

    /// A kill leaves at most one row of summary.csv that no line of the journal names, and a run that ended none, so more of them
    /// are a journal that lost lines, or was never there.
    fn require_one_unfinished(&self, path: &Path, finished: &[u8], rest: &[u8]) -> Result<()> {
        let header = usize::from(finished.is_empty());
        let rows = rest.iter().filter(|byte| **byte == b'\n').count().saturating_sub(header);
        let ended = || {
            let record = path.parent().map(RunRecord::read);
            self.cells.is_empty()
                && record.is_some_and(|record| record.is_ok_and(|r| r.status == Status::Complete))
        };
        if rows == 0 || rows == 1 && !ended() {
            return Ok(());
        }
        Err(Error::invalid(
            format!("{} has {rows} row(s) that {JOURNAL} does not name as finished", path.display()),
            "the folder has to be as the run left it, with all its files: put them back, or start the run again; nothing \
             was changed now",
        ))
    }

    /// The line of a finished cell.
    ///
    /// # Errors
    /// A fault of the program alone.
    pub fn line(
        cell: &FinishedCell,
        lengths: &BTreeMap<String, u64>,
        digests: &BTreeMap<String, String>,
    ) -> Result<String> {
        let line = Line { cell: cell.clone(), lengths: lengths.clone(), digests: digests.clone() };
        let json = serde_json::to_string(&line)
            .map_err(|error| Error::bug(format!("cannot write {JOURNAL}: {error}")))?;
        Ok(json + "\n")
    }
}

const CHANGED: &str = "something else changed it since (nothing was changed now): put the file back as the run wrote it, or \
                       start the run again";

/// First 16 hex digits of the SHA-256 of what was hashed so far.
pub fn digest(hash: &Sha256) -> String {
    hash.clone().finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

/// What other programs leave in a CSV file that they save and this one never writes; empty for a file without it.
fn foreign(bytes: &[u8]) -> &'static str {
    if bytes.starts_with(b"\xef\xbb\xbf") {
        ": it begins with a byte order mark"
    } else if bytes.starts_with(b"\"") {
        ": the names of its columns are quoted"
    } else if bytes.windows(2).any(|pair| pair == b"\r\n") {
        ": its lines end in CR LF"
    } else {
        ""
    }
}

/// Whether `name` is that of a file in the folder itself.
fn is_plain(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None))
}

fn by_place(folder: &Path, record: &RunRecord, cell: Cell) -> Result<FinishedCell> {
    let refused = |why: &str| {
        Error::invalid(
            format!(
                "{}: arm {} of {JOURNAL} is named by its place in the plan, {why}",
                folder.display(),
                cell.arm
            ),
            "an earlier version wrote it: its tables are whole, but start the run again instead of resuming or merging it",
        )
    };
    if record.forced.iter().any(|forced| forced.starts_with("plan: ")) {
        return Err(refused("and the run went on with another plan (--force)"));
    }
    let arm = record.plan.arms.get(cell.arm).ok_or_else(|| refused("which has no such arm"))?;
    Ok(FinishedCell::new(arm, cell.repeat))
}
