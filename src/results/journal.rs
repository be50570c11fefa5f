//! cells.jsonl: which cells of a run are finished, and how long every file with their rows is.
//!
//! A cell is named by its arm's name and not by the arm's place in the plan: under another plan (`--force`) another
//! arm may stand there. Earlier versions wrote the place; it is looked up in the plan that their run.json has.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::record::RunRecord;
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
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Self::default()),
            Err(error) => return Err(Error::read(&path, &error)),
        };
        let mut journal = Self::default();
        let mut record: Option<RunRecord> = None;
        for line in text.split_inclusive('\n').take_while(|line| line.ends_with('\n')) {
            let (cell, lengths) = if let Ok(Line { cell, lengths }) = serde_json::from_str(line) {
                (cell, lengths)
            } else if let Ok(OldLine { cell, lengths }) = serde_json::from_str(line) {
                let record = match &mut record {
                    Some(record) => record,
                    none => none.insert(RunRecord::read(folder)?),
                };
                journal.old = true;
                (by_place(folder, record, cell)?, lengths)
            } else {
                break;
            };
            journal.cells.push(cell);
            journal.lengths.extend(lengths);
            journal.valid_bytes += line.len() as u64;
        }
        Ok(journal)
    }

    /// The line of a finished cell.
    ///
    /// # Errors
    /// A fault of the program alone.
    pub fn line(cell: &FinishedCell, lengths: &BTreeMap<String, u64>) -> Result<String> {
        let line = Line { cell: cell.clone(), lengths: lengths.clone() };
        let json = serde_json::to_string(&line)
            .map_err(|error| Error::bug(format!("cannot write {JOURNAL}: {error}")))?;
        Ok(json + "\n")
    }
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
