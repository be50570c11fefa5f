//! Each module of the crate imports only from those in front of it, so that none can be understood only with what is
//! built on it.

use std::path::Path;

/// In the order of `src/lib.rs`'s first lines; what they share comes first.
const LAYERS: [&str; 15] = [
    "error",
    "paths",
    "hardware",
    "interrupt",
    "engine",
    "workload",
    "measure",
    "numbers",
    "experiment",
    "results",
    "simulation",
    "explain",
    "report",
    "run",
    "cli",
];

fn sources(folder: &Path, found: &mut Vec<std::path::PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let path = entry.path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// Modules that a text names after `crate::`, alone or in braces.
fn named(text: &str) -> Vec<&str> {
    let after = text.match_indices("crate::").map(|(at, word)| &text[at + word.len()..]);
    after
        .flat_map(|rest| {
            let list =
                rest.strip_prefix('{').and_then(|rest| rest.split_once('}')).map_or(rest, |(list, _)| list);
            let several = rest.starts_with('{');
            let parts = list.split(',').take(if several { usize::MAX } else { 1 });
            parts.map(|part| {
                let part = part.trim_start();
                let end = part.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(part.len());
                &part[..end]
            })
        })
        .collect()
}

#[test]
fn modules_import_from_the_layers_below() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    sources(&root, &mut files);
    assert!(files.len() > 100);
    let layer = |name: &str| LAYERS.iter().position(|layer| *layer == name);
    let mut upward = Vec::new();
    for file in files {
        let path = file.strip_prefix(&root).unwrap();
        let top = path.iter().next().unwrap().to_str().unwrap().trim_end_matches(".rs");
        if ["lib", "main"].contains(&top) {
            continue;
        }
        let own = layer(top).unwrap_or_else(|| panic!("{top} is in no layer"));
        let text = std::fs::read_to_string(&file).unwrap();
        upward.extend(
            named(&text)
                .into_iter()
                .filter(|name| layer(name).is_some_and(|other| other > own))
                .map(|name| format!("{} imports from {name}", path.display())),
        );
    }
    assert!(upward.is_empty(), "{upward:#?}");
}

#[test]
fn names_are_found() {
    let text =
        "use crate::engine::Engine;\nuse crate::{Error, Result, interrupt};\nlet a = crate::measure::b();";
    assert_eq!(named(text), ["engine", "Error", "Result", "interrupt", "measure"]);
}
