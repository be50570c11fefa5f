//! A run's results folder, written as the run goes.
//!
//! Invariant: the rows of a cell (one arm of one repeat) count only once a line of `cells.jsonl` names the cell and
//! the length and the digest of every file with its rows in. A run that is killed in the middle of a write leaves a longer
//! file; resuming cuts it back to the last named length, so rows are never there twice or in half. Nothing that was
//! finished is ever overwritten: a new run makes a new folder, run.json is replaced by renaming over it, and a folder whose
//! finished rows are not as they were written is not resumed.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::csv::Rows;
use super::journal::{FinishedCell, JOURNAL, Journal, digest};
use crate::{Error, Result, paths};

pub const RUN_FILE: &str = "run.json";
/// Written whole after each traced pass, like the trace itself.
pub const KERNELS_FILE: &str = "kernels.csv";
/// Files that grow by the rows of each cell; summary.csv, with one row a cell, is the last to be written.
pub const ROW_FILES: [&str; 7] =
    ["cold.csv", "populations.csv", "checks.csv", "requests.csv", "tokens.csv", "steps.csv", SUMMARY_FILE];
pub const SUMMARY_FILE: &str = "summary.csv";
/// The way to the working folder of the run, which paths in run.json are relative to. It may name folders of the machine,
/// so it is not for publishing.
const WORKING_FOLDER_FILE: &str = "working-folder.txt";

#[derive(Debug)]
pub struct ResultsFolder {
    path: PathBuf,
    finished: Vec<FinishedCell>,
    /// Length of each file with only finished rows in it, bytes, and the hash of what it has.
    lengths: BTreeMap<String, u64>,
    hashes: BTreeMap<String, Sha256>,
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
                    return Ok(Self {
                        path,
                        finished: Vec::new(),
                        lengths: BTreeMap::new(),
                        hashes: BTreeMap::new(),
                        _lock,
                    });
                }
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                Err(error) => return Err(unwritable(&path, &error)),
            }
        }
        Err(Error::failed(
            format!("no free name under {}", parent.display()),
            "choose another folder with --out",
        ))
    }

    /// Opens a folder to continue in, and cuts off what a kill left half written. Nothing is changed where any of it is
    /// refused.
    ///
    /// # Errors
    /// [`Error::Invalid`] when another process writes to it, when rows that the journal names are missing or changed, when
    /// summary.csv has more rows than a kill leaves, for a link in a table's place, and for a journal that cannot be read (see [`Journal::read`]).
    pub fn reopen(path: &Path) -> Result<Self> {
        let _lock = lock(path)?;
        let journal = Journal::read(path)?;
        // (Files of other versions are kept as those of this one.)
        let names: BTreeSet<&str> = journal.lengths.keys().map(String::as_str).chain(ROW_FILES).collect();
        let mut hashes = BTreeMap::new();
        for name in names.into_iter().filter(|name| *name != KERNELS_FILE) {
            let file = path.join(name);
            let bytes = match std::fs::read(&file) {
                Ok(bytes) => bytes,
                // (A file that is gone lost all of its rows.)
                Err(error) if error.kind() == ErrorKind::NotFound => Vec::new(),
                Err(error) => return Err(Error::read(&file, &error)),
            };
            let (_, hash) = journal.finished(&file, name, &bytes)?;
            if !bytes.is_empty() {
                hashes.insert(name.to_string(), hash);
            }
        }
        let Journal { cells, lengths, valid_bytes, old, .. } = journal;
        let folder = Self { path: path.to_path_buf(), finished: cells, lengths, hashes, _lock };
        if old {
            // While its run.json still has the plan that the lines are of.
            folder.rewrite_journal()?;
        } else {
            folder.cut(JOURNAL, valid_bytes)?;
        }
        folder
            .hashes
            .keys()
            .try_for_each(|name| folder.cut(name, folder.lengths.get(name).copied().unwrap_or(0)))?;
        Ok(folder)
    }

    fn rewrite_journal(&self) -> Result<()> {
        let none = BTreeMap::new();
        let digests = self.hashes.iter().map(|(name, hash)| (name.clone(), digest(hash))).collect();
        let last = self.finished.len().saturating_sub(1);
        let lines = self.finished.iter().enumerate().map(|(index, cell)| {
            // (Only the last of them count.)
            if index == last {
                Journal::line(cell, &self.lengths, &digests)
            } else {
                Journal::line(cell, &none, &BTreeMap::new())
            }
        });
        self.replace(JOURNAL, lines.collect::<Result<String>>()?.as_bytes())
    }

    /// Shortens a file to `length` bytes, if it is there. What a link leads to is not the run's.
    fn cut(&self, name: &str, length: u64) -> Result<()> {
        let path = self.file(name);
        match std::fs::symlink_metadata(&path) {
            Ok(metadata) if !metadata.is_file() => {
                return Err(Error::invalid(
                    format!("{} is no plain file", path.display()),
                    "put the file itself there to resume the run",
                ));
            }
            Ok(metadata) if metadata.len() > length => {}
            Ok(_) => return Ok(()),
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(Error::read(&path, &error)),
        }
        let file = OpenOptions::new().write(true).open(&path).map_err(|error| unwritable(&path, &error))?;
        file.set_len(length).map_err(|error| unwritable(&path, &error))
    }

    /// Notes the folder that paths of the run are relative to, empty for the working folder.
    ///
    /// # Errors
    /// [`Error::Invalid`] when it cannot be written.
    pub fn note_working_folder(&self, folder: &Path) -> Result<()> {
        let here = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
        // (A name that is no Unicode cannot be noted: its paths are looked for in the working folder.)
        match paths::way_up(&self.path, here).as_deref().and_then(Path::to_str) {
            Some(way) => self.replace(WORKING_FOLDER_FILE, format!("{way}\n").as_bytes()),
            None => Ok(()),
        }
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
        let (mut lengths, mut hashes) = (BTreeMap::new(), BTreeMap::new());
        for (name, Rows { header, rows }) in files {
            let path = self.file(name);
            let before = self.lengths.get(*name).copied().unwrap_or(0);
            let text = if before == 0 { format!("{header}{rows}") } else { rows.clone() };
            append_text(&path, &text)?;
            lengths.insert((*name).to_string(), before + text.len() as u64);
            let hash = if before == 0 { None } else { self.hashes.get(*name).cloned() };
            hashes.insert((*name).to_string(), hash.unwrap_or_default().chain_update(&text));
        }
        let digests = hashes.iter().map(|(name, hash)| (name.clone(), digest(hash))).collect();
        append_text(&self.file(JOURNAL), &Journal::line(&cell, &lengths, &digests)?)?;
        self.lengths.extend(lengths);
        self.hashes.extend(hashes);
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

/// The working folder of the run in a results folder; empty where that is the working folder, or is not known.
pub fn working_folder(folder: &Path) -> PathBuf {
    let Ok(way) = std::fs::read_to_string(folder.join(WORKING_FOLDER_FILE)) else { return PathBuf::new() };
    let there = folder.join(way.trim_end_matches(['\r', '\n']));
    if paths::same(&there, Path::new(".")) { PathBuf::new() } else { there }
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
        let mut journal = std::fs::read(path.join(JOURNAL)).unwrap();
        journal.extend(b"{\"arm\":\"a=\xc3");
        std::fs::write(path.join(JOURNAL), journal).unwrap();
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

    /// A folder with two finished cells, and the text of its summary.csv.
    fn two_cells(root: &Path) -> (PathBuf, String) {
        let mut folder = ResultsFolder::create(root, "e", "cpu", "plan").unwrap();
        folder.append(cell(0), &files("1,2.0\n")).unwrap();
        folder.append(cell(1), &files("3,4.0\n")).unwrap();
        (folder.path().to_path_buf(), std::fs::read_to_string(folder.file("summary.csv")).unwrap())
    }

    #[test]
    fn a_file_that_another_program_saved_is_refused_and_kept() {
        let root = tempfile::tempdir().unwrap();
        let (path, text) = two_cells(root.path());
        let file = path.join("summary.csv");
        let saved = [
            (text.replace('\n', "\r\n"), "CR LF"),
            (text.replace("a,b", "\"a\",\"b\""), "quoted"),
            (format!("\u{feff}{text}"), "byte order mark"),
            (text.replace("2.0", "2.1"), "not as the run wrote them"),
            // Shorter rows, then the rows of a cell that was never finished.
            (text.replace(".0", "") + "5,6\n", "not as the run wrote them"),
        ];
        for (saved, found) in saved {
            // (The torn end would be cut off if anything were.)
            let saved = saved + "7,";
            std::fs::write(&file, &saved).unwrap();
            let error = ResultsFolder::reopen(&path).unwrap_err();
            assert!(error.exit_code() == 2 && error.to_string().contains(found), "{error}");
            assert!(error.hint().contains("put the file back"), "{}", error.hint());
            assert_eq!(std::fs::read_to_string(&file).unwrap(), saved);
        }
        std::fs::write(&file, text.clone() + "7,").unwrap();
        assert_eq!(ResultsFolder::reopen(&path).unwrap().finished().len(), 2);
        assert_eq!(std::fs::read_to_string(&file).unwrap(), text);
    }

    #[test]
    fn lines_without_digests_are_judged_by_the_ends_of_lines() {
        let root = tempfile::tempdir().unwrap();
        let (path, text) = two_cells(root.path());
        let journal = std::fs::read_to_string(path.join(JOURNAL)).unwrap();
        let lines = journal.lines().map(|line| {
            let mut line: serde_json::Value = serde_json::from_str(line).unwrap();
            line.as_object_mut().unwrap().remove("digests").unwrap();
            format!("{line}\n")
        });
        std::fs::write(path.join(JOURNAL), lines.collect::<String>()).unwrap();
        std::fs::write(path.join("summary.csv"), text.replace('\n', "\r\n")).unwrap();
        let error = ResultsFolder::reopen(&path).unwrap_err().to_string();
        assert!(error.contains("CR LF"), "{error}");
        std::fs::write(path.join("summary.csv"), &text).unwrap();
        let mut folder = ResultsFolder::reopen(&path).unwrap();
        folder.append(cell(2), &files("5,6\n")).unwrap();
        drop(folder);
        assert_eq!(ResultsFolder::reopen(&path).unwrap().finished().len(), 3);
    }

    #[test]
    fn rows_without_a_journal_are_refused_and_kept() {
        let root = tempfile::tempdir().unwrap();
        let (path, text) = two_cells(root.path());
        let journal = std::fs::read_to_string(path.join(JOURNAL)).unwrap();
        let damaged = journal.replacen("lengths", "lngths", 1);
        for (found, kept) in [("2 row(s)", None), ("2 row(s)", Some("")), ("line 1", Some(damaged.as_str()))]
        {
            match kept {
                None => std::fs::remove_file(path.join(JOURNAL)).unwrap(),
                Some(kept) => std::fs::write(path.join(JOURNAL), kept).unwrap(),
            }
            let error = ResultsFolder::reopen(&path).unwrap_err();
            assert!(error.exit_code() == 2 && error.to_string().contains(found), "{error}");
            assert_eq!(std::fs::read_to_string(path.join("summary.csv")).unwrap(), text);
        }
    }

    #[test]
    #[cfg(unix)]
    fn nothing_outside_the_folder_is_cut() {
        let root = tempfile::tempdir().unwrap();
        let (path, _) = two_cells(root.path());
        let other = root.path().join("other");
        std::fs::write(&other, "kept").unwrap();
        std::os::unix::fs::symlink(&other, path.join("cold.csv")).unwrap();
        assert!(ResultsFolder::reopen(&path).unwrap_err().to_string().contains("no plain file"));
        std::fs::remove_file(path.join("cold.csv")).unwrap();
        let journal = std::fs::read_to_string(path.join(JOURNAL)).unwrap();
        for name in ["../other", other.to_str().unwrap()] {
            let named = journal.replacen("\"lengths\":{", &format!("\"lengths\":{{\"{name}\":0,"), 1);
            std::fs::write(path.join(JOURNAL), named).unwrap();
            assert!(ResultsFolder::reopen(&path).unwrap_err().to_string().contains("no file of this folder"));
        }
        assert_eq!(std::fs::read_to_string(&other).unwrap(), "kept");
    }

    #[test]
    fn tables_of_others_are_left_alone() {
        let root = tempfile::tempdir().unwrap();
        let (path, _) = two_cells(root.path());
        std::fs::write(path.join("mine.csv"), "x\n1\n").unwrap();
        ResultsFolder::reopen(&path).unwrap();
        assert_eq!(std::fs::read_to_string(path.join("mine.csv")).unwrap(), "x\n1\n");
    }

    #[test]
    fn two_runs_never_share_a_folder() {
        let root = tempfile::tempdir().unwrap();
        let first = ResultsFolder::create(root.path(), "e", "cpu", "plan").unwrap();
        let second = ResultsFolder::create(root.path(), "e", "cpu", "plan").unwrap();
        assert_ne!(first.path(), second.path());
    }
}
