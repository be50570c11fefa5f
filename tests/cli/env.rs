//! A folder to run in, and what a command printed there.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

pub struct TestEnv {
    folder: tempfile::TempDir,
}

pub struct Ran {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Ran {
    pub fn new(output: Output) -> Self {
        Self {
            code: output.status.code().unwrap_or(-1),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }

    #[track_caller]
    pub fn ok(self) -> Self {
        assert_eq!(self.code, 0, "stdout:\n{}\nstderr:\n{}", self.stdout, self.stderr);
        self
    }

    /// Failed with this code, an error that holds `fact`, and a hint that holds `hint` (empty: none is asked for).
    #[track_caller]
    pub fn fails(self, code: i32, fact: &str, hint: &str) -> Self {
        let told = format!("code {}, stderr:\n{}", self.code, self.stderr);
        assert_eq!(self.code, code, "{told}");
        assert!(self.stderr.contains("error:") && self.stderr.contains(fact), "no `{fact}` in {told}");
        if !hint.is_empty() {
            assert!(self.stderr.contains("hint:") && self.stderr.contains(hint), "no `{hint}` in {told}");
        }
        self
    }

    pub fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {}", self.stdout))
    }
}

impl TestEnv {
    pub fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    pub fn command(&self) -> Command {
        let mut command = Command::new(assert_cmd::cargo::cargo_bin!("inferwall"));
        command.current_dir(self.path()).env("NO_COLOR", "1").env("HF_HOME", self.path().join("hub"));
        command
    }

    /// Runs with arguments separated by white space.
    pub fn run(&self, arguments: &str) -> Ran {
        self.run_args(&arguments.split_whitespace().collect::<Vec<_>>())
    }

    pub fn run_args(&self, arguments: &[&str]) -> Ran {
        Ran::new(self.command().args(arguments).output().unwrap())
    }

    pub fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    }

    /// The results folders under `root`, oldest first.
    pub fn results(&self, root: &str) -> Vec<PathBuf> {
        let mut found = Vec::new();
        for experiment in std::fs::read_dir(self.path().join(root)).unwrap().flatten() {
            found.extend(std::fs::read_dir(experiment.path()).unwrap().flatten().map(|entry| entry.path()));
        }
        found.sort_by_key(|path| std::fs::metadata(path.join("run.json")).unwrap().modified().unwrap());
        found
    }

    /// The only results folder of a run with defaults.
    pub fn only_result(&self) -> PathBuf {
        let results = self.results("results/local");
        assert_eq!(results.len(), 1, "{results:?}");
        results[0].clone()
    }
}

pub fn read(folder: &Path, name: &str) -> String {
    std::fs::read_to_string(folder.join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// Cuts the tables to the rows of the first cells of the journal.
pub fn keep_rows(folder: &Path, cells: usize) {
    for line in read(folder, "cells.jsonl").lines().take(cells) {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        for (name, length) in line["lengths"].as_object().unwrap() {
            let text = read(folder, name);
            // (Each line's lengths are of the rows until then; of the last one they stay.)
            std::fs::write(folder.join(format!("{name}.kept")), &text[..length.as_u64().unwrap() as usize])
                .unwrap();
        }
    }
    for name in std::fs::read_dir(folder).unwrap().flatten().map(|entry| entry.path()) {
        if name.extension().is_some_and(|end| end == "kept") {
            std::fs::rename(&name, name.with_extension("")).unwrap();
        }
    }
}

/// What a kill after `cells` finished cells leaves: the rows of the next one are there, its line of the journal is not.
pub fn kill_after(folder: &Path, cells: usize) {
    let journal = read(folder, "cells.jsonl");
    let kept: Vec<&str> = journal.lines().take(cells).collect();
    keep_rows(folder, cells + 1);
    std::fs::write(folder.join("cells.jsonl"), format!("{}\n{{\"cell\":{{\"arm\"", kept.join("\n"))).unwrap();
}

/// A small experiment: three caps, quick to simulate.
pub const SMALL: &str = r#"
[small]
question = "Does the cap matter?"
model = "synthetic:demo"
knob = "max_num_seqs"
values = [1, 2, 8]
repeats = 2
load = { prompts = 8, input_len = 16, output_len = 8, warmup = { prompts = 2, max_rounds = 1 } }
engine = { max_model_len = 64 }

[[small.claims]]
text = "eight seats give at least four times the tokens of one"
metric = "output_throughput"
arm = "max_num_seqs=8"
over = "max_num_seqs=1"
at_least = 4

[[small.claims]]
text = "published elsewhere"
metric = "output_throughput"
arm = "max_num_seqs=8"
expect = 100
tolerance = 0.1
rig = "sim:series"
"#;
