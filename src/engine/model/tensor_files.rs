//! The weight files of a folder: one `.safetensors` file or several with an index, mapped into memory, and every tensor in
//! them by name.
//!
//! Names are canonical inside: the prefix `model.language_model.`, `language_model.model.` or `model.` is gone.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::Value;
use sha2::{Digest, Sha256};

use super::finite;
use super::json;
use super::open::{Component, Skipped};
use super::safetensors_file::{Dtype, TensorEntry, read_header, split_header};
use crate::engine::device::mapped_file::MappedFile;
use crate::{Error, Result};

/// Prefixes of the text model's tensors; the first that matches is taken off.
const PREFIXES: [&str; 4] = ["model.language_model.", "language_model.model.", "language_model.", "model."];

/// Bytes of a tensor that tell one set of weights from another of the same shape: a page, so that opening reads no more.
const HASHED: usize = 4096;

/// Names listed in a message before it ends with a count.
const MOST_NAMED: usize = 5;

/// All tensors of a folder, by canonical name.
pub struct TensorFiles {
    files: Vec<(PathBuf, MappedFile)>,
    tensors: BTreeMap<String, Stored>,
    /// Tensors that no model here loads: vision, multi-token prediction.
    unloaded: Vec<Stored>,
    pub skipped: Skipped,
    /// SHA-256 of the headers and sizes of all files and of the first [`HASHED`] bytes of every tensor.
    pub hash: [u8; 32],
}

/// A tensor and the file it is in.
#[derive(Debug, Clone)]
pub struct Stored {
    file: usize,
    pub entry: TensorEntry,
}

impl TensorFiles {
    /// Gives the pages of all files back to the system.
    pub fn release(&self) {
        self.files.iter().for_each(|(_, file)| file.release());
    }

    /// Maps the files of `folder` and reads their headers.
    pub fn open(folder: &Path) -> Result<Self> {
        let mut hash = Sha256::new();
        let (mut files, mut all) = (Vec::new(), Vec::new());
        for path in weight_files(folder)? {
            let map = MappedFile::open(&path)?;
            let shown = path.display().to_string();
            let (header, _) = split_header(&shown, map.bytes())?;
            hash.update((map.bytes().len() as u64).to_le_bytes());
            hash.update(header);
            let entries = read_header(&shown, map.bytes())?;
            for entry in &entries {
                let range = entry.range.start..entry.range.end.min(entry.range.start + HASHED);
                hash.update(&map.bytes()[range]);
            }
            all.push(entries);
            files.push((path, map));
        }
        let mut this = Self {
            files,
            tensors: BTreeMap::new(),
            unloaded: Vec::new(),
            skipped: Skipped::default(),
            hash: hash.finalize().into(),
        };
        for (file, entries) in all.into_iter().enumerate() {
            for entry in entries {
                this.add(file, entry)?;
            }
        }
        this.check_index(folder)?;
        Ok(this)
    }

    fn add(&mut self, file: usize, entry: TensorEntry) -> Result<()> {
        let name = canonical(&entry.name);
        let component = match name {
            _ if name.starts_with("visual.") || name.starts_with("vision_tower.") => &mut self.skipped.vision,
            _ if name.starts_with("mtp.") => &mut self.skipped.mtp,
            // Tables that old exports carry and that follow from the configuration.
            _ if name.ends_with(".rotary_emb.inv_freq") => &mut self.skipped.other,
            _ => {
                let name = name.to_string();
                if let Some(first) = self.tensors.get(&name) {
                    return Err(Error::invalid(
                        format!(
                            "tensor `{}` of {} is also in {} as `{}`",
                            entry.name,
                            self.files[file].0.display(),
                            self.files[first.file].0.display(),
                            first.entry.name
                        ),
                        "keep one of the two files",
                    ));
                }
                self.tensors.insert(name, Stored { file, entry });
                return Ok(());
            }
        };
        component.add(&entry);
        self.unloaded.push(Stored { file, entry });
        Ok(())
    }

    /// Every tensor of the index must be in the file that the index says.
    fn check_index(&self, folder: &Path) -> Result<()> {
        let path = folder.join(INDEX);
        if !path.exists() {
            return Ok(());
        }
        for (name, file) in read_index(&path)? {
            let Some(stored) = self.tensors.get(canonical(&name)) else { continue };
            let found = self.files[stored.file].0.file_name().unwrap_or_default();
            if found != file.as_str() {
                return Err(Error::invalid(
                    format!("{}: `{name}` should be in {file} but is in {}", path.display(), found.display()),
                    "the index and the files are of different versions: fetch them again",
                ));
            }
        }
        Ok(())
    }

    /// Counts a tensor among those that no model here loads.
    pub fn skip(&mut self, name: &str) {
        if let Some(stored) = self.tensors.get(name) {
            self.skipped.other.add(&stored.entry);
        }
    }

    pub fn get(&self, name: &str) -> Option<&Stored> {
        self.tensors.get(name)
    }

    /// Every tensor of the files, loaded or not, in the order they lie in.
    pub fn all(&self) -> impl Iterator<Item = &Stored> {
        let mut all: Vec<&Stored> = self.tensors.values().chain(&self.unloaded).collect();
        all.sort_by_key(|stored| (stored.file, stored.entry.range.start));
        all.into_iter()
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    pub fn bytes(&self, stored: &Stored) -> &[u8] {
        &self.files[stored.file].1.bytes()[stored.entry.range.clone()]
    }

    /// `model.safetensors: tensor `model.layers.0...``.
    pub fn place(&self, stored: &Stored) -> String {
        format!("{}: tensor `{}`", self.files[stored.file].0.display(), stored.entry.name)
    }

    /// The error for a tensor that is not as it should be.
    pub fn wrong(
        &self,
        stored: &Stored,
        found: impl std::fmt::Display,
        expected: impl std::fmt::Display,
    ) -> Error {
        Error::invalid(
            format!("{} has {found}, expected {expected}", self.place(stored)),
            "config.json and the weights may be of different models: fetch both again",
        )
    }

    pub fn first_path(&self) -> String {
        self.files.first().map(|(path, _)| path.display().to_string()).unwrap_or_default()
    }
}

impl Component {
    fn add(&mut self, entry: &TensorEntry) {
        self.tensors += 1;
        self.parameters += entry.elements();
        self.bytes += entry.range.len() as u64;
    }
}

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// The weight files of a folder: those of the index, or the one there is.
fn weight_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let index = folder.join(INDEX);
    if index.exists() {
        let names = indexed_files(&index)?;
        let missing: Vec<&str> =
            names.iter().map(String::as_str).filter(|name| !folder.join(name).exists()).collect();
        if !missing.is_empty() {
            return Err(Error::invalid(
                format!("{}: files of the index are missing: {}", index.display(), some_of(&missing)),
                "fetch the whole repository again",
            ));
        }
        return Ok(names.into_iter().map(|name| folder.join(name)).collect());
    }
    let single = folder.join(SINGLE);
    if single.exists() {
        return Ok(vec![single]);
    }
    let entries = std::fs::read_dir(folder).map_err(|error| Error::read(folder, &error))?;
    let mut names: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    names.sort();
    let with = |extension: &str| {
        names.iter().filter(|path| path.extension().is_some_and(|e| e == extension)).count()
    };
    if with("safetensors") == 1 {
        names.retain(|path| path.extension().is_some_and(|e| e == "safetensors"));
        return Ok(names);
    }
    let hint = if with("safetensors") > 1 {
        "several .safetensors files need model.safetensors.index.json to say what is where"
    } else if with("gguf") > 0 {
        "GGUF files are not read: give the model's safetensors version"
    } else if with("bin") + with("pth") > 0 {
        "PyTorch files are not read: give the model's safetensors version"
    } else {
        "give a folder that holds config.json and model.safetensors"
    };
    Err(Error::invalid(format!("{}: there is no {SINGLE}", folder.display()), hint))
}

/// The files that an index names.
pub fn indexed_files(index: &Path) -> Result<Vec<String>> {
    let mut names: Vec<String> = read_index(index)?.into_iter().map(|(_, file)| file).collect();
    names.sort();
    names.dedup();
    Ok(names)
}

/// (tensor name, file name) pairs of an index. File names must be plain, so that no path leads out of the folder.
fn read_index(path: &Path) -> Result<Vec<(String, String)>> {
    let shown = path.display().to_string();
    let root = json::parse_object(&shown, &json::read_file(path)?)?;
    let object = json::Object::new(&shown, "", &root);
    let Some(Value::Object(map)) = object.get("weight_map") else {
        return Err(object.missing("weight_map", "an object of tensor names and file names"));
    };
    map.iter()
        .map(|(name, file)| match file.as_str() {
            Some(file) if is_plain_name(file) => Ok((name.clone(), file.to_string())),
            _ => Err(Error::invalid(
                format!(
                    "{shown}: `weight_map.{name}` is {file}, expected the name of a file in the same folder"
                ),
                "the index may be damaged: fetch it again",
            )),
        })
        .collect()
}

fn is_plain_name(name: &str) -> bool {
    name.ends_with(".safetensors") && Path::new(name).components().count() == 1 && !name.contains(['/', '\\'])
}

/// A name without the text model's prefix.
pub fn canonical(name: &str) -> &str {
    PREFIXES.iter().find_map(|prefix| name.strip_prefix(prefix)).unwrap_or(name)
}

pub fn some_of(names: &[&str]) -> String {
    let shown = names.iter().take(MOST_NAMED).map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(MOST_NAMED) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

/// All elements as f32, which must be finite.
pub fn widen(files: &TensorFiles, stored: &Stored) -> Result<Vec<f32>> {
    let bytes = files.bytes(stored);
    let values: Vec<f32> = match stored.entry.dtype {
        Dtype::F32 => bytes.as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b)).collect(),
        Dtype::F16 => {
            bytes.as_chunks::<2>().0.iter().map(|&b| half::f16::from_le_bytes(b).to_f32()).collect()
        }
        Dtype::Bf16 => {
            bytes.as_chunks::<2>().0.iter().map(|&b| half::bf16::from_le_bytes(b).to_f32()).collect()
        }
        _ => {
            return Err(files.wrong(
                stored,
                format!("type {}", stored.entry.dtype.name()),
                "BF16, F16 or F32",
            ));
        }
    };
    match values.iter().position(|value| !value.is_finite()) {
        Some(index) => Err(finite::not_finite(&stored.entry.name, index).context(files.place(stored))),
        None => Ok(values),
    }
}
