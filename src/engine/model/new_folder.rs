//! A folder that a command makes: whole, or not there. Only files made here are ever removed, and the folder only where it
//! was made here and holds nothing else.

use std::path::{Path, PathBuf};

use crate::{Error, Result};

pub struct NewFolder {
    path: PathBuf,
    /// It was not there before.
    made: bool,
    files: Vec<PathBuf>,
    kept: bool,
}

impl NewFolder {
    /// # Errors
    /// Something is at `path` that is not an empty folder.
    pub fn check(path: &Path) -> Result<()> {
        if path.exists() && !path.is_dir() {
            return Err(Error::invalid(
                format!("{} is not a folder", path.display()),
                "choose a new folder with --out",
            ));
        }
        if path.exists()
            && std::fs::read_dir(path).map_err(|error| Error::read(path, &error))?.next().is_some()
        {
            return Err(Error::invalid(
                format!("{} is not empty", path.display()),
                "choose a new folder with --out",
            ));
        }
        Ok(())
    }

    /// # Errors
    /// As [`NewFolder::check`]; a place that cannot be written.
    pub fn create(path: &Path) -> Result<Self> {
        Self::check(path)?;
        let made = !path.exists();
        std::fs::create_dir_all(path).map_err(|error| Error::write(path, &error))?;
        Ok(Self { path: path.to_path_buf(), made, files: Vec::new(), kept: false })
    }

    /// The path of a file that is to be made.
    pub fn file(&mut self, name: &str) -> PathBuf {
        let path = self.path.join(name);
        self.files.push(path.clone());
        path
    }

    /// All of it is written.
    pub fn keep(mut self) {
        self.kept = true;
    }
}

impl Drop for NewFolder {
    fn drop(&mut self) {
        if self.kept {
            return;
        }
        for file in &self.files {
            let _ = std::fs::remove_file(file);
        }
        if self.made {
            // (Refused where something else has come into it.)
            let _ = std::fs::remove_dir(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_finished_is_taken_away_and_nothing_else() {
        let root = tempfile::tempdir().unwrap();
        let (new, empty) = (root.path().join("new"), root.path().join("empty"));
        std::fs::create_dir(&empty).unwrap();
        for path in [&new, &empty] {
            let mut folder = NewFolder::create(path).unwrap();
            std::fs::write(folder.file("a"), "half").unwrap();
            folder.file("never-written");
        }
        assert!(!new.exists() && std::fs::read_dir(&empty).unwrap().next().is_none());
        let mut folder = NewFolder::create(&new).unwrap();
        std::fs::write(folder.file("a"), "half").unwrap();
        std::fs::write(new.join("of-the-user"), "").unwrap();
        drop(folder);
        assert!(new.join("of-the-user").exists() && !new.join("a").exists());
        assert!(NewFolder::create(&new).is_err_and(|error| error.to_string().contains("not empty")));
        let mut folder = NewFolder::create(&empty).unwrap();
        std::fs::write(folder.file("a"), "whole").unwrap();
        folder.keep();
        assert!(empty.join("a").exists());
    }
}
