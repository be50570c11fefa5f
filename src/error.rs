//! The one error type of the crate: a fact, and a hint with the next thing to try.
//!
//! A message names the file and key or tensor, what was found and what was expected. The variant
//! decides the exit code, so a caller that builds an error also decides whose fault it is.

use std::io::ErrorKind;
use std::path::Path;

pub type Result<T, E = Error> = std::result::Result<T, E>;

#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// What the user asked for, or a file they gave, is wrong: exit code 2.
    #[error("{fact}")]
    Invalid { fact: String, hint: String },
    /// The request was right and the work failed: exit code 1.
    #[error("{fact}")]
    Failed { fact: String, hint: String },
    /// The work was done and could not answer what was asked of it, such as a check of claims of which none could be
    /// compared: exit code 3.
    #[error("{fact}")]
    Undecided { fact: String, hint: String },
    /// The user pressed Ctrl-C: exit code 130.
    #[error("interrupted")]
    Interrupted { hint: String },
}

impl Error {
    pub fn invalid(fact: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Invalid { fact: fact.into(), hint: hint.into() }
    }

    pub fn failed(fact: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Failed { fact: fact.into(), hint: hint.into() }
    }

    pub fn undecided(fact: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Undecided { fact: fact.into(), hint: hint.into() }
    }

    /// What cannot happen unless the program is wrong.
    pub fn bug(fact: impl Into<String>) -> Self {
        Self::failed(fact, "this is a fault of the program: please report it")
    }

    /// A file that could not be read as input: the user's to mend.
    pub fn read(path: &Path, source: &std::io::Error) -> Self {
        let hint = match source.kind() {
            ErrorKind::IsADirectory => "that is a folder: give a file",
            ErrorKind::InvalidData => "it is no text: check that it is the file you meant",
            _ => "check that the path exists and that you may read it",
        };
        Self::invalid(format!("cannot read {}: {source}", path.display()), hint)
    }

    /// A file or folder that could not be written where the user wants it (a full disk, a read-only folder): theirs to mend.
    pub fn write(path: &Path, source: &std::io::Error) -> Self {
        Self::invalid(
            format!("cannot write {}: {source}", path.display()),
            "free some space, or choose a folder you may write to with --out",
        )
    }

    /// The next thing to try; empty when there is nothing to add.
    pub fn hint(&self) -> &str {
        match self {
            Self::Invalid { hint, .. }
            | Self::Failed { hint, .. }
            | Self::Undecided { hint, .. }
            | Self::Interrupted { hint } => hint,
        }
    }

    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Failed { .. } => 1,
            Self::Invalid { .. } => 2,
            Self::Undecided { .. } => 3,
            Self::Interrupted { .. } => 130,
        }
    }

    /// The same error with `context: ` before its fact.
    pub fn context(self, context: impl std::fmt::Display) -> Self {
        match self {
            Self::Invalid { fact, hint } => Self::Invalid { fact: format!("{context}: {fact}"), hint },
            Self::Failed { fact, hint } => Self::Failed { fact: format!("{context}: {fact}"), hint },
            Self::Undecided { fact, hint } => Self::Undecided { fact: format!("{context}: {fact}"), hint },
            interrupted => interrupted,
        }
    }
}
