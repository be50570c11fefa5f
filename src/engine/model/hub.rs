//! Models of the Hugging Face hub: found in the local cache that its own tools use, or downloaded into it.
//!
//! The cache is HF_HUB_CACHE, else HF_HOME/hub, else ~/.cache/huggingface/hub. Downloads come from HF_ENDPOINT, carry
//! HF_TOKEN (or the token that `hf auth login` stored) and go on where an interrupted one stopped: a partial file
//! stays in the cache as `blobs/<etag>.part`.

use std::cell::Cell;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};

use hf_hub::api::Progress;
use hf_hub::api::sync::{ApiBuilder, ApiError, ApiRepo};
use hf_hub::{Cache, Repo, RepoType};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::json;
use crate::{Error, Result};

const CONFIG: &str = "config.json";
const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";
/// Fetched when the repository has them.
const OPTIONAL: [&str; 3] = ["generation_config.json", "tokenizer.json", "tokenizer_config.json"];
const RETRIES: usize = 3;

/// A cache folder and where to download from.
#[derive(Debug, Clone)]
pub struct Hub {
    cache: PathBuf,
    endpoint: String,
    token: Option<String>,
}

impl Hub {
    /// As the environment says.
    ///
    /// # Errors
    /// No home folder; as [`Self::new`].
    pub fn from_env() -> Result<Self> {
        let set = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let home = match set("HF_HOME") {
            Some(home) => Some(PathBuf::from(home)),
            None => std::env::home_dir().map(|home| home.join(".cache/huggingface")),
        };
        let cache = match (set("HF_HUB_CACHE"), &home) {
            (Some(cache), _) => PathBuf::from(cache),
            (None, Some(home)) => home.join("hub"),
            (None, None) => {
                return Err(Error::invalid(
                    "there is no home folder to look for the Hugging Face cache in",
                    "set HF_HOME to the folder that holds it",
                ));
            }
        };
        let stored = || std::fs::read_to_string(home.as_ref()?.join("token")).ok();
        let token = set("HF_TOKEN").or_else(stored).map(|token| token.trim().to_string());
        let endpoint = set("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".to_string());
        Self::new(&cache, &endpoint, token.filter(|token| !token.is_empty()))
    }

    /// A hub at `endpoint`, whose files are kept in `cache`.
    ///
    /// # Errors
    /// An endpoint that is no address.
    pub fn new(cache: &Path, endpoint: &str, token: Option<String>) -> Result<Self> {
        let plain = endpoint.chars().all(|c| c.is_ascii_graphic());
        if !plain || !(endpoint.starts_with("https://") || endpoint.starts_with("http://")) {
            return Err(Error::invalid(
                format!(
                    "HF_ENDPOINT is `{endpoint}`, expected an address that starts with https:// or http://"
                ),
                "unset HF_ENDPOINT to use the hub itself",
            ));
        }
        let cache = std::path::absolute(cache).map_err(|error| Error::read(cache, &error))?;
        Ok(Self { cache, endpoint: endpoint.trim_end_matches('/').to_string(), token })
    }

    /// The folder of a repository whose files are all in the cache.
    pub fn find(&self, repo: &str, revision: Option<&str>) -> Option<PathBuf> {
        let base = self.cache.join(hub_repo(repo, revision).folder_name());
        let revision = revision.unwrap_or("main");
        // A revision is a branch or tag, whose commit is in refs/, or a commit.
        let commit = std::fs::read_to_string(base.join("refs").join(revision));
        let commit = commit.map_or_else(|_| revision.to_string(), |commit| commit.trim().to_string());
        let folder = base.join("snapshots").join(commit);
        is_complete(&folder).then_some(folder)
    }

    /// Downloads what a model needs, files already there left out, and returns its folder.
    ///
    /// # Errors
    /// What the hub answered; a repository without a model; a folder that cannot be written to.
    pub fn fetch(&self, repo: &str, revision: Option<&str>, show_progress: bool) -> Result<PathBuf> {
        let api = ApiBuilder::from_cache(Cache::new(self.cache.clone()))
            .with_endpoint(self.endpoint.clone())
            .with_token(self.token.clone())
            .with_retries(RETRIES)
            .with_user_agent("inferwall", env!("CARGO_PKG_VERSION"))
            .build()
            .map_err(|error| self.failed(repo, None, &error))?
            .repo(hub_repo(repo, revision));
        let info = api.info().map_err(|error| self.failed(repo, None, &error))?;
        let there: Vec<String> = info.siblings.into_iter().map(|sibling| sibling.rfilename).collect();
        let folder_name = hub_repo(repo, revision).folder_name();
        let snapshot = self.cache.join(folder_name).join("snapshots").join(&info.sha);
        let download = Download { hub: self, api: &api, repo, snapshot, show_progress };

        let has = |name: &str| there.iter().any(|file| file == name);
        if !has(CONFIG) {
            return Err(Error::invalid(
                format!("{repo} has no {CONFIG}, expected a model in the Hugging Face layout"),
                "choose a repository that holds safetensors weights (not GGUF, and not an adapter)",
            ));
        }
        let config = download.file(CONFIG)?;
        for name in OPTIONAL.into_iter().filter(|name| has(name)) {
            download.file(name)?;
        }
        for name in weight_names(repo, &there, || download.file(INDEX))? {
            download.file(&name)?;
        }
        Ok(config.parent().map(Path::to_path_buf).unwrap_or_default())
    }

    fn failed(&self, repo: &str, file: Option<&str>, error: &ApiError) -> Error {
        let what = file.map_or_else(|| repo.to_string(), |file| format!("{repo}/{file}"));
        // (A name of two parts that is no path is taken for a hub id.)
        let folder =
            if file.is_none() { format!("; there is no folder {repo} either") } else { String::new() };
        let text = error.to_string();
        let status = |code: &str| text.contains(&format!("status code {code}"));
        if status("404") || status("401") || status("403") {
            return Error::invalid(
                format!("{what} is not to be had from {}: {text}", self.endpoint),
                format!(
                    "check the name; for a private or gated model set HF_TOKEN to a token that may read it{folder}"
                ),
            );
        }
        Error::failed(
            format!("cannot fetch {what} from {}: {text}", self.endpoint),
            format!("check the network and run the same command again: it goes on where it stopped{folder}"),
        )
    }
}

fn hub_repo(repo: &str, revision: Option<&str>) -> Repo {
    Repo::with_revision(repo.to_string(), RepoType::Model, revision.unwrap_or("main").to_string())
}

/// The weight files among a repository's files.
fn weight_names(
    repo: &str,
    there: &[String],
    index: impl FnOnce() -> Result<PathBuf>,
) -> Result<Vec<String>> {
    if there.iter().any(|file| file == INDEX) {
        return super::tensor_files::indexed_files(&index()?);
    }
    if there.iter().any(|file| file == SINGLE) {
        return Ok(vec![SINGLE.to_string()]);
    }
    let found: Vec<&String> =
        there.iter().filter(|file| file.ends_with(".safetensors") && !file.contains('/')).collect();
    match found[..] {
        [only] => Ok(vec![only.clone()]),
        _ => Err(Error::invalid(
            format!("{repo} has {} .safetensors files and no {INDEX}", found.len()),
            "choose a repository that holds safetensors weights (not GGUF, and not an adapter)",
        )),
    }
}

fn is_complete(folder: &Path) -> bool {
    let index = folder.join(INDEX);
    let weights = if index.exists() {
        super::tensor_files::indexed_files(&index)
            .is_ok_and(|names| names.iter().all(|name| folder.join(name).exists()))
    } else {
        let files = std::fs::read_dir(folder).into_iter().flatten().flatten();
        files
            .map(|file| file.path())
            .any(|path| path.extension().is_some_and(|e| e == "safetensors") && path.exists())
    };
    weights && folder.join(CONFIG).exists() && json::read_file(&folder.join(CONFIG)).is_ok()
}

struct Download<'a> {
    hub: &'a Hub,
    api: &'a ApiRepo,
    repo: &'a str,
    /// Where the files of the commit lie that the revision stands for.
    snapshot: PathBuf,
    show_progress: bool,
}

impl Download<'_> {
    /// Downloads one file, unless it is there.
    fn file(&self, name: &str) -> Result<PathBuf> {
        let known = self.snapshot.join(name);
        if known.exists() {
            return Ok(known);
        }
        let size = Cell::new(0);
        let bar = Bar { size: &size, bar: self.bar() };
        let path = self
            .api
            .download_with_progress(name, bar)
            .map_err(|error| self.hub.failed(self.repo, Some(name), &error))?;
        let written = std::fs::metadata(&path).map_err(|error| Error::read(&path, &error))?.len();
        if written != size.get() {
            // Neither the blob nor the link to it may be taken for the file later.
            if let Ok(blob) = path.canonicalize() {
                let _ = std::fs::remove_file(blob);
            }
            let _ = std::fs::remove_file(&path);
            return Err(Error::failed(
                format!("{}/{name} came with {written} bytes, expected {}", self.repo, size.get()),
                "run the same command again",
            ));
        }
        Ok(path)
    }

    fn bar(&self) -> ProgressBar {
        let bar = ProgressBar::new(0);
        if !(self.show_progress && std::io::stderr().is_terminal()) {
            bar.set_draw_target(ProgressDrawTarget::hidden());
        }
        let template = "{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        bar
    }
}

/// Passes a download's progress on to a bar, and keeps the size that the server announced.
struct Bar<'a> {
    size: &'a Cell<u64>,
    bar: ProgressBar,
}

impl Progress for Bar<'_> {
    fn init(&mut self, size: usize, filename: &str) {
        self.size.set(size as u64);
        self.bar.set_length(size as u64);
        self.bar.set_position(0);
        self.bar.set_message(filename.to_string());
    }

    fn update(&mut self, size: usize) {
        self.bar.inc(size as u64);
    }

    fn finish(&mut self) {
        self.bar.finish();
    }
}
