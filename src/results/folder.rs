//! A run's results folder, written as the run goes.
//!
//! Invariant: the rows of a cell (one arm of one repeat) count only once a line of `cells.jsonl` names the cell and
//! the length of every file with its rows in. A run that is killed in the middle of a write leaves a longer file;
//! resuming cuts it back to the last named length, so rows are never there twice or in half. Nothing that was
//! finished is ever overwritten: a new run makes a new folder, and run.json is replaced by renaming over it.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::Write;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::csv::Rows;
use super::journal::{FinishedCell, JOURNAL, Journal};
use crate::{Error, Result};

pub const RUN_FILE: &str = "run.json";
/// Written whole after each traced pass, like the trace itself.
pub const KERNELS_FILE: &str = "kernels.csv";

#[derive(Debug)]
pub struct ResultsFolder {
    path: PathBuf,
    finished: Vec<FinishedCell>,
    /// Length of each file with only finished rows in it.
    lengths: BTreeMap<String, u64>,
    /// Locked while the folder is written to; the system lets go when the process ends, however it does.
    _lock: File,
}

/// # Errors
/// Another process writes to the folder.
fn lock(folder: &Path) -> Result<File> {
    let file = File::open(folder).map_err(|error| Error::read(folder, &error))?;
    match file.try_lock() {
        Err(TryLockError::WouldBlock) => Err(Error::invalid(
            format!("{}: this run is still going, in another process", folder.display()),
            "wait for it, or end it, before it is resumed",
        )),
        // (Where the system has no locks there is none.)
        Ok(()) | Err(TryLockError::Error(_)) => Ok(file),
    }
}

/// A results folder that cannot be written is the user's to mend, whatever the run was doing.
fn unwritable(path: &Path, source: &std::io::Error) -> Error {
    Error::invalid(
        format!("cannot write {}: {source}", path.display()),
        "free some space, or choose a folder you may write to with --out; finished arms are kept, and --resume \
         continues",
    )
}

impl ResultsFolder {
    /// Makes `<root>/<experiment>/<date>-<rig>-<id>`, which must not exist yet.
    ///
    /// # Errors
    /// [`Error::Invalid`] when it cannot be made, [`Error::Failed`] when no name is free.
    pub fn create(root: &Path, experiment: &str, rig: &str, identity: &str) -> Result<Self> {
        let parent = root.join(experiment);
        std::fs::create_dir_all(&parent).map_err(|error| unwritable(&parent, &error))?;
        let date = jiff::Timestamp::now().strftime("%Y%m%d-%H%M%S").to_string();
        let slug: String =
            rig.chars().map(|c| if c.is_ascii_alphanumeric() || c == '.' { c } else { '-' }).collect();
        for attempt in 0..1000u32 {
            let unique = format!(
                "{identity} {} {} {attempt}",
                std::process::id(),
                jiff::Timestamp::now().as_nanosecond()
            );
            let id: String =
                Sha256::digest(unique).iter().take(3).map(|byte| format!("{byte:02x}")).collect();
            let path = parent.join(format!("{date}-{slug}-{id}"));
            match std::fs::create_dir(&path) {
                Ok(()) => {
                    let _lock = lock(&path)?;
                    return Ok(Self { path, finished: Vec::new(), lengths: BTreeMap::new(), _lock });
                }
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(unwritable(&path, &error)),
            }
        }
        Err(Error::failed(
            format!("no free name under {}", parent.display()),
            "choose another folder with --out",
        ))
    }

    /// Opens a folder to continue in, and cuts off what a kill left half written.
    ///
    /// # Errors
    /// [`Error::Invalid`] when another process writes to it, when rows that the journal names are missing, and for a
    /// journal that cannot be read (see [`Journal::read`]).
    pub fn reopen(path: &Path) -> Result<Self> {
        let _lock = lock(path)?;
        let Journal { cells, lengths, valid_bytes, old } = Journal::read(path)?;
        let folder = Self { path: path.to_path_buf(), finished: cells, lengths, _lock };
        if old {
            // While its run.json still has the plan that the lines are of.
            folder.rewrite_journal()?;
        } else {
            folder.cut(JOURNAL, valid_bytes)?;
        }
        // (A file that is gone lost all of its rows.)
        folder.lengths.iter().try_for_each(|(name, &length)| folder.cut(name, length))?;
        let entries = std::fs::read_dir(path).map_err(|error| Error::read(path, &error))?;
        for entry in entries.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.ends_with(".csv") && name != KERNELS_FILE {
                folder.cut(&name, folder.lengths.get(&name).copied().unwrap_or(0))?;
            }
        }
        Ok(folder)
    }

    fn rewrite_journal(&self) -> Result<()> {
        let none = BTreeMap::new();
        let last = self.finished.len().saturating_sub(1);
        let lines = self.finished.iter().enumerate().map(|(index, cell)| {
            // (Only the last lengths count.)
            Journal::line(cell, if index == last { &self.lengths } else { &none })
        });
        self.replace(JOURNAL, lines.collect::<Result<String>>()?.as_bytes())
    }

    /// Shortens a file to `length`. A file shorter than that lost finished rows.
    fn cut(&self, name: &str, length: u64) -> Result<()> {
        let path = self.file(name);
        let found = match std::fs::metadata(&path) {
            Ok(metadata) => metadata.len(),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound && length == 0 => return Ok(()),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => 0,
            Err(error) => return Err(Error::read(&path, &error)),
        };
        if found < length {
            return Err(Error::invalid(
                format!("{} has {found} bytes, but the journal names {length}", path.display()),
                "rows are missing: start the run again instead of resuming it",
            ));
        }
        if found > length {
            let file =
                OpenOptions::new().write(true).open(&path).map_err(|error| unwritable(&path, &error))?;
            file.set_len(length).map_err(|error| unwritable(&path, &error))?;
        }
        Ok(())
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    pub fn finished(&self) -> &[FinishedCell] {
        &self.finished
    }

    /// Whether the arm of this name has rows of the repeat.
    pub fn has(&self, arm: &str, repeat: usize) -> bool {
        self.finished.iter().any(|cell| cell.arm == arm && cell.repeat == repeat)
    }

    /// Adds the rows of a finished cell to files by name; the header goes before the first rows.
    ///
    /// # Errors
    /// [`Error::Invalid`] when a file cannot be written; the cell then does not count as finished.
    pub fn append(&mut self, cell: FinishedCell, files: &[(&str, Rows)]) -> Result<()> {
        let mut lengths = BTreeMap::new();
        for (name, Rows { header, rows }) in files {
            let path = self.file(name);
            let before = self.lengths.get(*name).copied().unwrap_or(0);
            let text = if before == 0 { format!("{header}{rows}") } else { rows.clone() };
            append_text(&path, &text)?;
            lengths.insert((*name).to_string(), before + text.len() as u64);
        }
        append_text(&self.file(JOURNAL), &Journal::line(&cell, &lengths)?)?;
        self.lengths.extend(lengths);
        self.finished.push(cell);
        Ok(())
    }

    /// Writes a whole file under a temporary name, then renames it into place.
    ///
    /// # Errors
    /// [`Error::Invalid`] when it cannot be written; what was there before stays.
    pub fn replace(&self, name: &str, bytes: &[u8]) -> Result<()> {
        Self::write_whole(&self.path, name, bytes)
    }

    /// The same for a folder that is not being run in.
    ///
    /// # Errors
    /// As [`Self::replace`].
    pub fn write_whole(folder: &Path, name: &str, bytes: &[u8]) -> Result<()> {
        let path = folder.join(name);
        let temporary = folder.join(format!(".{name}.new"));
        let written = File::create(&temporary).and_then(|mut file| {
            file.write_all(bytes)?;
            file.sync_data()
        });
        written.and_then(|()| std::fs::rename(&temporary, &path)).map_err(|error| {
            let _ = std::fs::remove_file(&temporary);
            unwritable(&path, &error)
        })
    }
}

fn append_text(path: &Path, text: &str) -> Result<()> {
    let written = OpenOptions::new().create(true).append(true).open(path).and_then(|mut file| {
        file.write_all(text.as_bytes())?;
        file.sync_data()
    });
    written.map_err(|error| unwritable(path, &error))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(rows: &str) -> Vec<(&'static str, Rows)> {
        vec![("summary.csv", Rows { header: "a,b\n".to_string(), rows: rows.to_string() })]
    }

    fn cell(arm: usize) -> FinishedCell {
        FinishedCell { arm: format!("a={arm}"), config_hash: "c0ffee".to_string(), repeat: 0 }
    }

    #[test]
    fn a_torn_write_is_cut_off_on_resume() {
        let root = tempfile::tempdir().unwrap();
        let mut folder = ResultsFolder::create(root.path(), "e", "sim:fixed", "plan").unwrap();
        folder.append(cell(0), &files("1,2\n")).unwrap();
        let path = folder.path().to_path_buf();
        append_text(&path.join("summary.csv"), "3,").unwrap();
        append_text(&path.join(JOURNAL), "{\"arm\":\"a=").unwrap();
        drop(folder);
        let mut folder = ResultsFolder::reopen(&path).unwrap();
        assert_eq!(folder.finished(), [cell(0)]);
        folder.append(cell(1), &files("3,4\n")).unwrap();
        assert_eq!(std::fs::read_to_string(path.join("summary.csv")).unwrap(), "a,b\n1,2\n3,4\n");
        drop(folder);
        assert_eq!(ResultsFolder::reopen(&path).unwrap().finished(), [cell(0), cell(1)]);
    }

    #[test]
    fn a_folder_that_is_written_to_is_opened_once() {
        let root = tempfile::tempdir().unwrap();
        let folder = ResultsFolder::create(root.path(), "e", "cpu", "plan").unwrap();
        let error = ResultsFolder::reopen(folder.path()).unwrap_err();
        assert!(error.to_string().contains("still going"), "{error}");
        let path = folder.path().to_path_buf();
        drop(folder);
        ResultsFolder::reopen(&path).unwrap();
    }

    #[test]
    fn rows_that_went_missing_are_refused() {
        let root = tempfile::tempdir().unwrap();
        let mut folder = ResultsFolder::create(root.path(), "e", "cpu", "plan").unwrap();
        folder.append(cell(0), &files("1,2\n")).unwrap();
        std::fs::write(folder.file("summary.csv"), "a,").unwrap();
        let path = folder.path().to_path_buf();
        drop(folder);
        for _ in 0..2 {
            let error = ResultsFolder::reopen(&path).unwrap_err();
            assert!(error.exit_code() == 2 && error.to_string().contains("the journal names"), "{error}");
            let _ = std::fs::remove_file(path.join("summary.csv"));
        }
    }

    #[test]
    fn two_runs_never_share_a_folder() {
        let root = tempfile::tempdir().unwrap();
        let first = ResultsFolder::create(root.path(), "e", "cpu", "plan").unwrap();
        let second = ResultsFolder::create(root.path(), "e", "cpu", "plan").unwrap();
        assert_ne!(first.path(), second.path());
    }
}
