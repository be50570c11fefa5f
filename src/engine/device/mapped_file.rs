//! A file mapped read-only into memory: weights are read where they lie, page by page, with no copy of the file.

use std::fs::File;
use std::path::Path;

use crate::{Error, Result};

#[derive(Debug)]
pub struct MappedFile(memmap2::Mmap);

impl MappedFile {
    /// # Errors
    /// The file does not exist, is no regular file or cannot be read.
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(|error| Error::read(path, &error))?;
        let metadata = file.metadata().map_err(|error| Error::read(path, &error))?;
        if !metadata.is_file() {
            return Err(Error::invalid(
                format!("{} is not a file", path.display()),
                "check the path of the checkpoint",
            ));
        }
        // SAFETY: the mapping is private to this process and read-only. Nothing in this program writes to or
        // truncates a checkpoint; another program that does so while it is mapped is outside what can be guarded
        // against, as for every reader that maps files.
        let map = unsafe { memmap2::Mmap::map(&file) }.map_err(|error| Error::read(path, &error))?;
        Ok(Self(map))
    }

    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Gives the pages read so far back to the system; whoever reads them again reads the file again.
    pub fn release(&self) {
        #[cfg(unix)]
        // SAFETY: the mapping is of a file and nothing was written to it, so dropped pages come back with the same bytes.
        // A refusal only means that they stay.
        let _ = unsafe { self.0.unchecked_advise(memmap2::UncheckedAdvice::DontNeed) };
    }
}
