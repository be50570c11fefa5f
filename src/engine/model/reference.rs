//! What `--model` names: built-in synthetic weights, a folder, or a repository of the Hugging Face hub.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use super::presets;
use crate::{Error, Result, paths};

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelRef {
    /// `synthetic:<preset>`: seeded random weights of a real shape.
    Synthetic { preset: String },
    /// A folder in the published Hugging Face layout.
    Folder(PathBuf),
    /// `owner/name` or `owner/name@revision`, found in the local cache or downloaded.
    Hub { repo: String, revision: Option<String> },
}

impl FromStr for ModelRef {
    type Err = Error;

    /// As [`Self::find`], relative to the working folder.
    fn from_str(text: &str) -> Result<Self> {
        Self::find(text, Path::new(""))
    }
}

impl ModelRef {
    /// What `text` names: an existing path is a folder, whatever it looks like; `owner/name` that is no path is a hub id.
    /// A relative path is looked for in `folder` (empty: the working folder), then in the working folder.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a name that is none of these.
    pub fn find(text: &str, folder: &Path) -> Result<Self> {
        if let Some(preset) = text.strip_prefix("synthetic:") {
            presets::find(preset)?;
            return Ok(Self::Synthetic { preset: preset.to_string() });
        }
        if text.is_empty() {
            return Err(Error::invalid("the model's name is empty", WHAT_IS_ALLOWED));
        }
        let path = paths::find(folder, Path::new(text));
        if path.exists() {
            return Ok(Self::Folder(path));
        }
        let (repo, revision) = match text.split_once('@') {
            Some((repo, revision)) => (repo, Some(revision.to_string())),
            None => (text, None),
        };
        if is_hub_id(repo) && revision.as_deref().is_none_or(is_revision) {
            return Ok(Self::Hub { repo: repo.to_string(), revision });
        }
        if presets::find(text).is_ok() {
            return Err(Error::invalid(
                format!("`{text}` is neither a folder nor a hub id"),
                format!("for seeded random weights of that shape write `synthetic:{text}`"),
            ));
        }
        let places = match folder.as_os_str().is_empty() || Path::new(text).is_absolute() {
            true => String::new(),
            false => format!(", neither in {} nor in the working folder", folder.display()),
        };
        Err(Error::invalid(format!("there is no model folder at `{text}`{places}"), WHAT_IS_ALLOWED))
    }
}

const WHAT_IS_ALLOWED: &str =
    "give a folder that exists, a hub id such as Qwen/Qwen3.5-4B, or synthetic:<preset>";

impl fmt::Display for ModelRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Synthetic { preset } => write!(f, "synthetic:{preset}"),
            Self::Folder(path) => write!(f, "{}", path.display()),
            Self::Hub { repo, revision: None } => write!(f, "{repo}"),
            Self::Hub { repo, revision: Some(revision) } => write!(f, "{repo}@{revision}"),
        }
    }
}

fn is_hub_id(text: &str) -> bool {
    let part = |part: &str| {
        !part.is_empty()
            && !part.starts_with('.')
            && part.len() <= 96
            && part.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
    };
    text.split_once('/').is_some_and(|(owner, name)| part(owner) && part(name))
}

fn is_revision(text: &str) -> bool {
    !text.is_empty()
        && !text.contains("..")
        && text.chars().all(|c| c.is_ascii_alphanumeric() || "-_./".contains(c))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_three_kinds_are_told_apart() {
        assert_eq!("synthetic:demo".parse::<ModelRef>().unwrap().to_string(), "synthetic:demo");
        assert_eq!(
            "Qwen/Qwen3.5-4B".parse::<ModelRef>().unwrap(),
            ModelRef::Hub { repo: "Qwen/Qwen3.5-4B".into(), revision: None }
        );
        assert_eq!(
            "Qwen/Qwen3.5-4B@v1".parse::<ModelRef>().unwrap(),
            ModelRef::Hub { repo: "Qwen/Qwen3.5-4B".into(), revision: Some("v1".into()) }
        );
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().to_str().unwrap();
        assert_eq!(path.parse::<ModelRef>().unwrap(), ModelRef::Folder(path.into()));
    }

    #[test]
    fn wrong_names_get_a_hint() {
        let unknown = "synthetic:qwen3.5-3b".parse::<ModelRef>().unwrap_err();
        assert!(unknown.to_string().contains("qwen3.5-3b"), "{unknown}");
        assert!(
            unknown.hint().contains("qwen3.5-4b") || unknown.hint().contains("qwen3.5-2b"),
            "{}",
            unknown.hint()
        );
        let bare = "demo".parse::<ModelRef>().unwrap_err();
        assert!(bare.hint().contains("synthetic:demo"));
        for bad in ["", "/no/such/folder", "../x/y", "a/b@../c"] {
            assert_eq!(bad.parse::<ModelRef>().unwrap_err().exit_code(), 2, "{bad}");
        }
    }
}
