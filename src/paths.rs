//! Where a path leads that was written relative to some folder, and the way from one folder to another.

use std::path::{Path, PathBuf};

/// What `path` names in `folder`, if there is such a file or folder; else as it is, relative to the working folder. An
/// empty `folder` is the working folder.
pub fn find(folder: &Path, path: &Path) -> PathBuf {
    let there = folder.join(path);
    if there.exists() { there } else { path.to_path_buf() }
}

/// The way from a folder up to `above`, or the whole path of `above` where it is not above it; `None` where one of them does
/// not exist. Steps up name no folder of the machine, and hold when both folders are moved together.
pub fn way_up(from: &Path, above: &Path) -> Option<PathBuf> {
    let (from, above) = (from.canonicalize().ok()?, above.canonicalize().ok()?);
    Some(match from.strip_prefix(&above) {
        Ok(below) => below.components().map(|_| "..").collect(),
        Err(_) => above,
    })
}

/// Whether two paths lead to one existing file or folder.
pub fn same(one: &Path, other: &Path) -> bool {
    one.canonicalize().ok().zip(other.canonicalize().ok()).is_some_and(|(one, other)| one == other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_relative_path_is_looked_for_in_its_folder_first() {
        let root = tempfile::tempdir().unwrap();
        std::fs::write(root.path().join("a"), "").unwrap();
        assert_eq!(find(root.path(), Path::new("a")), root.path().join("a"));
        assert_eq!(find(root.path(), Path::new("src")), Path::new("src"));
        assert_eq!(find(Path::new(""), Path::new("src")), Path::new("src"));
        assert_eq!(find(Path::new("src"), root.path()), root.path());
    }

    #[test]
    fn the_way_up_names_no_folder_below_the_other() {
        let root = tempfile::tempdir().unwrap();
        let (deep, beside) = (root.path().join("a/b"), root.path().join("c"));
        std::fs::create_dir_all(&deep).unwrap();
        std::fs::create_dir(&beside).unwrap();
        assert_eq!(way_up(&deep, root.path()).unwrap(), Path::new("../.."));
        assert_eq!(way_up(&deep, &beside).unwrap(), beside.canonicalize().unwrap());
        assert_eq!(way_up(&deep, &root.path().join("none")), None);
        assert!(same(&deep.join("../.."), root.path()) && !same(&deep, &beside));
    }
}
