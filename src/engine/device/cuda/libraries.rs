//! Finds CUDA's shared libraries without linking to them, so that one binary runs with and without a GPU.
//!
//! Order: what the loader finds by itself, then CUDA_HOME and CUDA_PATH, the toolkits under /usr/local and /opt, WSL's
//! driver folder, and last the `nvidia-*` wheels of the Python on PATH (or of the active environment). Nothing is
//! executed to look; a missing library is a sentence with a hint, never a panic.

use std::env;
use std::path::{Path, PathBuf};

use libloading::Library;

/// Opens the first of `names` that loads: bare names through the loader, then each in every known folder.
pub fn open(names: &[&str]) -> Option<(Library, PathBuf)> {
    candidates(names).into_iter().find_map(|path| open_path(&path).map(|library| (library, path)))
}

/// Every place a library of one of these names may be, best first; bare names stand for the loader's own search.
pub fn candidates(names: &[&str]) -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> = names.iter().map(PathBuf::from).collect();
    for folder in library_folders() {
        paths.extend(names.iter().map(|name| folder.join(name)).filter(|path| path.exists()));
    }
    paths
}

pub fn open_path(path: &Path) -> Option<Library> {
    // SAFETY: loading runs the library's initialisers; only NVIDIA's own libraries, by their names, are asked for.
    unsafe { Library::new(path) }.ok()
}

/// Folders that CUDA's installers, distributions and wheels put libraries in, those that exist.
fn library_folders() -> Vec<PathBuf> {
    let mut roots = Vec::new();
    for variable in ["CUDA_HOME", "CUDA_PATH", "CUDA_ROOT"] {
        roots.extend(env::var_os(variable).map(PathBuf::from));
    }
    roots.extend(sorted_children(Path::new("/usr/local"), "cuda"));
    roots.extend(sorted_children(Path::new("/opt"), "cuda"));
    let mut folders = Vec::new();
    for root in roots {
        for below in
            ["lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib", "extras/CUPTI/lib64"]
        {
            folders.push(root.join(below));
        }
    }
    folders.extend(
        ["/usr/local/nvidia/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/wsl/lib", "/usr/lib64"]
            .map(PathBuf::from),
    );
    folders.extend(wheel_folders());
    folders.retain(|folder| folder.is_dir());
    folders
}

/// `site-packages/nvidia/<package>/lib` of the active environment and of the `python3` and `python` on PATH.
fn wheel_folders() -> Vec<PathBuf> {
    let mut prefixes: Vec<PathBuf> = Vec::new();
    for variable in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
        prefixes.extend(env::var_os(variable).map(PathBuf::from));
    }
    if let Some(path) = env::var_os("PATH") {
        for folder in env::split_paths(&path) {
            for name in ["python3", "python"] {
                let python = folder.join(name);
                if python.exists() {
                    // An environment's python is a link to the base one: both prefixes may hold wheels.
                    prefixes.extend(folder.parent().map(Path::to_path_buf));
                    let real = python.canonicalize().ok();
                    prefixes.extend(real.and_then(|real| Some(real.parent()?.parent()?.to_path_buf())));
                }
            }
        }
    }
    if let Some(home) = env::var_os("HOME") {
        prefixes.push(PathBuf::from(home).join(".local"));
    }
    let mut seen = Vec::new();
    let mut folders = Vec::new();
    for prefix in prefixes {
        if seen.contains(&prefix) {
            continue;
        }
        for lib in sorted_children(&prefix.join("lib"), "python3") {
            for packages in ["site-packages", "dist-packages"] {
                let nvidia = lib.join(packages).join("nvidia");
                folders.extend(sorted_children(&nvidia, "").into_iter().map(|package| package.join("lib")));
            }
        }
        seen.push(prefix);
    }
    folders
}

/// Children of a folder whose names begin with `prefix`, the highest version first.
fn sorted_children(folder: &Path, prefix: &str) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut children: Vec<PathBuf> = entries
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix))
        .map(|entry| entry.path())
        .collect();
    children.sort_by_cached_key(|path| std::cmp::Reverse(version_key(path)));
    children
}

/// A file's name as text and numbers in turn, so that 12.10 comes after 12.9.
fn version_key(path: &Path) -> Vec<(String, u64)> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let mut parts = vec![(String::new(), 0u64)];
    for c in name.chars() {
        match (c.to_digit(10), parts.last_mut()) {
            (Some(digit), Some((_, number))) => {
                *number = number.saturating_mul(10).saturating_add(digit.into())
            }
            (None, Some((text, 0))) => text.push(c),
            _ => parts.push((c.to_string(), 0)),
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn higher_versions_come_first() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["cuda-9.2", "cuda-12.9", "cuda-13.0", "cuda-12.10", "other-99"] {
            std::fs::create_dir(folder.path().join(name)).unwrap();
        }
        let names = sorted_children(folder.path(), "cuda");
        let names: Vec<_> = names.iter().map(|path| path.file_name().unwrap().to_str().unwrap()).collect();
        assert_eq!(names, ["cuda-13.0", "cuda-12.10", "cuda-12.9", "cuda-9.2"]);
    }
}
