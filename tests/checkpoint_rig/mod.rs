//! A copy of a golden checkpoint that a test may break: its config edited, its tensors renamed, reshaped, rewritten.
// Each test binary uses its own part.
#![allow(dead_code)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use inferwall::Error;
use inferwall::engine::model::{ModelRef, OpenOptions, OpenedModel, open};
use serde_json::{Map, Value, json};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

#[derive(Debug, Clone)]
pub struct Tensor {
    pub dtype: String,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

pub struct Folder {
    dir: tempfile::TempDir,
}

impl Folder {
    /// Without the answers, which a reader does not look at.
    pub fn copy_of(name: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        for entry in std::fs::read_dir(fixture(name)).unwrap() {
            let path = entry.unwrap().path();
            if !path.file_name().unwrap().to_str().unwrap().starts_with("expected") {
                std::fs::write(dir.path().join(path.file_name().unwrap()), std::fs::read(&path).unwrap())
                    .unwrap();
            }
        }
        Self { dir }
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    pub fn open(&self) -> Result<OpenedModel, Error> {
        open(&ModelRef::Folder(self.path().to_path_buf()), &OpenOptions::default())
    }

    /// The error of opening it, with its hint; exit code 2 like all errors of files.
    pub fn error(&self) -> String {
        match self.open() {
            Ok(_) => panic!("it opened"),
            Err(error) => {
                assert_eq!(error.exit_code(), 2, "{error}");
                assert!(!error.hint().is_empty(), "{error}");
                format!("{error} | {}", error.hint())
            }
        }
    }

    pub fn edit_json(&self, file: &str, edit: impl FnOnce(&mut Value)) {
        let path = self.path().join(file);
        let mut value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        edit(&mut value);
        std::fs::write(path, value.to_string()).unwrap();
    }

    /// Edits the text part of config.json.
    pub fn edit_text(&self, edit: impl FnOnce(&mut Value)) {
        self.edit_json("config.json", |root| match root.get_mut("text_config") {
            Some(text) => edit(text),
            None => edit(root),
        });
    }

    pub fn edit_tensors(&self, edit: impl FnOnce(&mut BTreeMap<String, Tensor>)) {
        let path = self.path().join("model.safetensors");
        let mut tensors = read(&std::fs::read(&path).unwrap());
        edit(&mut tensors);
        std::fs::write(path, write(&tensors)).unwrap();
    }
}

fn read(file: &[u8]) -> BTreeMap<String, Tensor> {
    let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let header: Map<String, Value> = serde_json::from_slice(&file[8..8 + length]).unwrap();
    let data = &file[8 + length..];
    let entries = header.into_iter().filter(|(name, _)| name != "__metadata__");
    entries
        .map(|(name, entry)| {
            let at = |i: usize| entry["data_offsets"][i].as_u64().unwrap() as usize;
            let tensor = Tensor {
                dtype: entry["dtype"].as_str().unwrap().to_string(),
                shape: serde_json::from_value(entry["shape"].clone()).unwrap(),
                bytes: data[at(0)..at(1)].to_vec(),
            };
            (name, tensor)
        })
        .collect()
}

fn write(tensors: &BTreeMap<String, Tensor>) -> Vec<u8> {
    let (mut header, mut data) = (Map::new(), Vec::<u8>::new());
    for (name, tensor) in tensors {
        let start = data.len();
        data.extend(&tensor.bytes);
        let entry =
            json!({ "dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, data.len()] });
        header.insert(name.clone(), entry);
    }
    let header = Value::Object(header).to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend(data);
    file
}
