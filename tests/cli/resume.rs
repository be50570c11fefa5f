use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::env::{Ran, SMALL, TestEnv, keep_rows, kill_after, read};

const RUN: &str = "run small --experiments e.toml --device sim:fixed";

fn small() -> TestEnv {
    let env = TestEnv::new();
    env.write("e.toml", SMALL);
    env
}

/// A run that was killed after `cells` finished ones, in the middle of writing the next.
fn killed_after(env: &TestEnv, cells: usize) -> PathBuf {
    env.run(RUN).ok();
    let folder = env.only_result();
    kill_after(&folder, cells);
    for name in ["report.md", "report.html"] {
        std::fs::remove_file(folder.join(name)).unwrap();
    }
    folder
}

const TABLES: [&str; 6] =
    ["summary.csv", "requests.csv", "tokens.csv", "steps.csv", "populations.csv", "checks.csv"];

fn tables(folder: &Path) -> Vec<String> {
    TABLES.map(|name| read(folder, name)).to_vec()
}

#[test]
fn a_killed_run_resumes_to_the_same_bytes() {
    let undisturbed = small();
    undisturbed.run(RUN).ok();
    let env = small();
    let folder = killed_after(&env, 2);
    env.run(&format!("run --resume {}", folder.display())).ok();
    assert_eq!(tables(&folder), tables(&undisturbed.only_result()));
    assert!(folder.join("report.html").exists());
    let run: serde_json::Value = serde_json::from_str(&read(&folder, "run.json")).unwrap();
    assert_eq!(run["status"], "complete");
    assert_eq!(run["resumed"].as_array().unwrap().len(), 1);
}

#[test]
fn a_finished_run_without_its_journal_is_kept() {
    let env = small();
    env.run(&format!("{RUN} --arms max_num_seqs=2 --repeats 1")).ok();
    let folder = env.only_result();
    let before = tables(&folder);
    std::fs::remove_file(folder.join("cells.jsonl")).unwrap();
    let resumed = env.run(&format!("run --resume {}", folder.display()));
    resumed.fails(2, "1 row(s) that cells.jsonl does not name", "nothing was changed now");
    assert_eq!(tables(&folder), before);
}

#[test]
fn the_same_flags_may_be_given_again() {
    let env = small();
    let folder = killed_after(&env, 1);
    env.run(&format!("{RUN} --resume {}", folder.display())).ok();
    assert_eq!(read(&folder, "summary.csv").lines().count(), 7);
}

#[test]
fn another_plan_is_refused_unless_forced() {
    let env = small();
    let folder = killed_after(&env, 2);
    let other = format!("{RUN} --seed 3 --resume {}", folder.display());
    env.run(&other).fails(2, "cannot be continued: plan", "--force");
    assert!(env.run(&format!("{other} --force")).ok().stderr.contains("results: "));
    let run: serde_json::Value = serde_json::from_str(&read(&folder, "run.json")).unwrap();
    assert!(run["forced"][0].as_str().unwrap().starts_with("plan: "));
    assert!(read(&folder, "report.md").contains("--force"));
}

#[test]
fn another_device_is_refused() {
    let env = small();
    let folder = killed_after(&env, 2);
    env.run(&format!("{RUN}:2 --resume {}", folder.display())).fails(
        2,
        "device: sim:fixed:1 against sim:fixed:2",
        "",
    );
}

#[test]
fn an_edited_experiment_is_another_plan() {
    let env = small();
    let folder = killed_after(&env, 2);
    env.write("e.toml", &SMALL.replace("output_len = 8", "output_len = 9"));
    env.run(&format!("run --resume {}", folder.display())).fails(2, "plan", "");
}

#[test]
fn no_results_folder() {
    let env = small();
    env.run("run --resume nowhere").fails(2, "nowhere", "run.json");
}

/// A run that is complete stays what it is: nothing is measured again, and nothing that was is lost.
#[test]
fn a_complete_run_may_be_resumed() {
    let env = small();
    env.run("run small --experiments e.toml --device sim:h100").ok();
    let folder = env.only_result();
    let figures = || {
        let record: serde_json::Value = serde_json::from_str(&read(&folder, "run.json")).unwrap();
        [record["ceilings"].clone(), record["models"].clone(), record["claims"].clone()]
    };
    let (before, rows) = (figures(), read(&folder, "summary.csv"));
    assert!(before[0]["read_bytes_per_s"].as_f64().unwrap() > 0.0);
    env.run(&format!("run --resume {}", folder.display())).ok();
    assert_eq!((figures(), read(&folder, "summary.csv")), (before, rows));
    let record = read(&folder, "run.json").replace("\"arms\": [", "\"arms\": [], \"were\": [");
    std::fs::write(folder.join("run.json"), record).unwrap();
    for command in ["report", "explain", "run --resume"] {
        env.run(&format!("{command} {}", folder.display())).fails(2, "no arms", "damaged");
    }
}

/// A key that an earlier version knew is ignored, with a word; one that none did names the version that wrote it.
#[test]
fn records_of_other_versions() {
    let env = small();
    let run = "run small --experiments e.toml --device sim:fixed --set max_model_len=8192";
    env.run_args(&[run.split(' ').collect(), vec!["--load", "probe={injectors=1}"]].concat()).ok();
    let folder = env.only_result();
    let record = read(&folder, "run.json");
    let with = |key: &str| {
        let text = record.replace("\"inject_after_s\"", &format!("\"{key}\": 0.25,\n\"inject_after_s\""));
        let text = text.replace("\"build\": \"", "\"build\": \"0.0.9-of-");
        assert_ne!(text, record);
        std::fs::write(folder.join("run.json"), text).unwrap();
    };
    let (shown, table) = (folder.display().to_string(), folder.join("summary.csv").display().to_string());
    with("victim_stagger_s");
    for command in [format!("explain {shown}"), format!("report {shown}"), format!("diff {shown} {table}")] {
        env.run(&command).ok();
    }
    let explained = env.run(&format!("explain {shown}")).ok().stderr;
    assert!(explained.contains("victim_stagger_s = 0.25 is no more, and ignored"), "{explained}");
    // It may be read, and yet not continued.
    env.run(&format!("run --resume {shown}")).fails(2, "build: 0.0.9-of-", "--force");
    with("victim_hum");
    env.run(&format!("explain {shown}")).fails(2, "victim_hum", "version 0.0.9-of-");
    // Zeros stood where a device has no ceilings.
    let figures = ["read_bytes_per_s", "copy_bytes_per_s", "flops_per_s", "launch_s"]
        .map(|name| format!("\"{name}\": 0.0"));
    let zeros = format!("\"ceilings\": {{{}, \"measured\": false}}", figures.join(", "));
    let text = record.replace("\"ceilings\": null", &zeros);
    assert_ne!(text, record);
    std::fs::write(folder.join("run.json"), text).unwrap();
    let explained = env.run(&format!("explain {shown}")).ok().stderr;
    assert!(explained.contains("this device has no roofs"), "{explained}");
    env.run(&format!("calibrate {shown}")).fails(2, "no ceilings to begin from", "sim:GPU");
}

/// Waits until `done`, at most 20 s.
#[cfg(unix)]
fn wait_for(mut done: impl FnMut() -> bool) {
    let began = Instant::now();
    while !done() {
        assert!(began.elapsed() < Duration::from_secs(20), "it never happened");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// What is measured stays complete and reported, whatever becomes of the trace.
#[test]
fn a_failed_trace_is_a_warning() {
    let env = small();
    let folder = killed_after(&env, 2);
    std::fs::create_dir(folder.join("trace.json.gz")).unwrap();
    let ran = env.run(&format!("run --resume {} --trace", folder.display())).ok();
    assert!(ran.stdout.contains("max_num_seqs=8") && ran.stdout.contains("Claims:"), "{}", ran.stdout);
    assert!(ran.stderr.contains("warning: the traced pass failed"), "{}", ran.stderr);
    let run: serde_json::Value = serde_json::from_str(&read(&folder, "run.json")).unwrap();
    assert_eq!(run["status"], "complete");
    assert!(run["claims"].as_array().unwrap().len() == 2, "{run}");
    assert!(read(&folder, "report.md").contains("warning: the traced pass failed"));
}

#[cfg(unix)]
#[test]
fn ctrl_c_in_the_traced_pass_leaves_a_complete_run() {
    let env = TestEnv::new();
    let long = SMALL.replace("prompts = 8", "prompts = 1000").replace("output_len = 8", "output_len = 200");
    env.write("e.toml", &long.replace("max_model_len = 64", "max_model_len = 512"));
    let child = env
        .command()
        .args(format!("{RUN} --values 8 --repeats 1 --trace").split(' '))
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    wait_for(|| {
        let root = env.path().join("results/local");
        let results = if root.exists() { env.results("results/local") } else { Vec::new() };
        results.first().is_some_and(|folder| folder.join("report.html").exists())
    });
    std::process::Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    let output = child.wait_with_output().unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(130), "{stderr}");
    assert!(stderr.contains("the run is complete") && stderr.contains("--trace"), "{stderr}");
    assert!(stdout.contains("max_num_seqs=8"), "{stdout}");
    let run: serde_json::Value = serde_json::from_str(&read(&env.only_result(), "run.json")).unwrap();
    assert_eq!(run["status"], "complete");
}

#[cfg(unix)]
#[test]
fn ctrl_c_keeps_what_is_finished_and_says_how_to_go_on() {
    let env = TestEnv::new();
    // Each arm is far too long to end by itself before the signal.
    let long = SMALL.replace("prompts = 8", "prompts = 4000").replace("output_len = 8", "output_len = 400");
    let long = long
        .replace("values = [1, 2, 8]", "values = [256, 1]")
        .replace("max_model_len = 64", "max_model_len = 512");
    env.write("e.toml", &long);
    let child = env.command().args(RUN.split(' ')).stderr(std::process::Stdio::piped()).spawn().unwrap();
    wait_for(|| {
        let root = env.path().join("results/local");
        root.exists()
            && env.results("results/local").first().is_some_and(|folder| folder.join("cells.jsonl").exists())
    });
    let interrupted =
        std::process::Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(interrupted.success());
    let output = child.wait_with_output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(130), "{stderr}");
    assert!(stderr.contains("interrupted") && stderr.contains("--resume"), "{stderr}");
    let folder = env.only_result();
    assert!(read(&folder, "summary.csv").lines().count() >= 2);
    let run: serde_json::Value = serde_json::from_str(&read(&folder, "run.json")).unwrap();
    assert_eq!(run["status"], "interrupted");
}

/// What is missing or was changed is told, and nothing is cut off.
#[test]
fn tables_that_were_saved_by_another_program_are_refused() {
    let env = small();
    let folder = killed_after(&env, 2);
    let shown = folder.display().to_string();
    let (resume, merge) = (format!("run --resume {shown}"), format!("merge {shown} --out merged"));
    for name in ["requests.csv", "steps.csv"] {
        let text = read(&folder, name);
        let saved = text.replace('\n', "\r\n");
        std::fs::write(folder.join(name), &saved).unwrap();
        let before = tables(&folder);
        for command in [&resume, &merge] {
            env.run(command).fails(2, &format!("{name}: the rows of finished arms"), "put the file back");
        }
        assert_eq!((tables(&folder), read(&folder, name)), (before, saved));
        std::fs::write(folder.join(name), text).unwrap();
    }
    let journal = std::fs::read(folder.join("cells.jsonl")).unwrap();
    std::fs::remove_file(folder.join("cells.jsonl")).unwrap();
    env.run(&resume).fails(
        2,
        "summary.csv has 3 row(s) that cells.jsonl does not name",
        "with all its files",
    );
    std::fs::write(folder.join("cells.jsonl"), journal).unwrap();
    env.run(&resume).ok();
}

/// A checkpoint, a file of experiments and a trace, all given by relative paths.
fn with_files(env: &TestEnv) {
    copy_model(env, "hybrid-tiny");
    env.write("t.csv", "arrival_s,input_tokens,output_tokens\n0,5,2\n1,6,3\n4,7,4\n");
    let load = "load = { replay = { file = \"t.csv\" } }\n";
    let (head, rest) = SMALL.split_once("load = ").unwrap();
    let (_, rest) = rest.split_once('\n').unwrap();
    env.write("e.toml", &(head.replace("synthetic:demo", "m") + load + rest));
}

fn copy_model(env: &TestEnv, fixture: &str) {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(fixture);
    let to = env.path().join("m");
    std::fs::create_dir_all(&to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().flatten() {
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

#[test]
fn results_do_not_depend_on_the_working_folder() {
    let env = TestEnv::new();
    with_files(&env);
    let outside = tempfile::tempdir().unwrap();
    let elsewhere = env.path().join("elsewhere");
    std::fs::create_dir(&elsewhere).unwrap();
    let run = "run small --experiments e.toml --device sim:h100 --repeats 1 --values";
    env.run(&format!("{run} 1,2")).ok();
    env.run(&format!("{run} 1,2 --out {}", outside.path().display())).ok();
    let inside = env.only_result();
    let beyond = std::fs::read_dir(outside.path().join("small")).unwrap().next().unwrap().unwrap().path();
    let from_elsewhere = |command: &str, folder: &Path| {
        let mut program = env.command();
        program.current_dir(&elsewhere).args(command.split(' ')).arg(folder);
        Ran::new(program.output().unwrap())
    };
    // What is published names no folder of the machine.
    let root = env.path().canonicalize().unwrap().display().to_string();
    for folder in [&inside, &beyond] {
        let mut record: serde_json::Value = serde_json::from_str(&read(folder, "run.json")).unwrap();
        // (What was typed is there as it was typed.)
        record.as_object_mut().unwrap().remove("command").unwrap();
        assert!(!record.to_string().contains(&root), "{record}");
        for name in ["report.md", "report.html", "summary.csv", "checks.csv", "populations.csv"] {
            assert!(!read(folder, name).contains(&root), "{name}");
        }
    }
    for folder in [&inside, &beyond] {
        let explained = env.run(&format!("explain {}", folder.display())).ok().stdout;
        assert_eq!(from_elsewhere("explain", folder).ok().stdout, explained);
        from_elsewhere("report", folder).ok();
        let rows = read(folder, "summary.csv");
        kill_after(folder, 1);
        from_elsewhere("run --resume", folder).ok();
        assert_eq!(read(folder, "summary.csv"), rows);
    }
    from_elsewhere("merge --out merged", &beyond).ok();
    let merged = std::fs::read_dir(elsewhere.join("merged/small")).unwrap().next().unwrap().unwrap().path();
    from_elsewhere("explain", &merged).ok();
    assert_eq!(read(&inside, "working-folder.txt"), "../../../..\n");
    assert_eq!(read(&beyond, "working-folder.txt"), format!("{root}\n"));
    // Without it there is nothing to go by, and with another model in its place nothing to explain.
    let shown = inside.display().to_string();
    copy_model(&env, "dense-qwen3-tiny");
    env.run(&format!("explain {shown}")).fails(2, "the model of the run had", "another model is there");
    std::fs::remove_file(inside.join("working-folder.txt")).unwrap();
    from_elsewhere("explain", &inside).fails(2, "no model folder at `m`", "");
}

/// Names of arms in the rows of a folder, a row each.
fn arms(folder: &Path) -> Vec<String> {
    let csv = read(folder, "summary.csv");
    csv.lines().skip(1).map(|line| line.split(',').nth(1).unwrap().to_string()).collect()
}

/// An arm is finished when an arm of its name is, wherever it stands in the plan.
#[test]
fn other_arms_are_run_where_a_folder_is_continued_by_force() {
    let env = small();
    // (With roofs, so that arms are explained by simulations.)
    const RUN: &str = "run small --experiments e.toml --device sim:h100";
    env.run(&format!("{RUN} --values 1,2 --repeats 1")).ok();
    let folder = env.only_result();
    let shown = folder.display().to_string();
    let ran = env.run(&format!("{RUN} --values 2,8 --repeats 1 --resume {shown} --force")).ok();
    assert!(ran.stderr.contains("arm max_num_seqs=1: the plan has none"), "{}", ran.stderr);
    assert_eq!(arms(&folder), ["max_num_seqs=1", "max_num_seqs=2", "max_num_seqs=8"]);
    let run: serde_json::Value = serde_json::from_str(&read(&folder, "run.json")).unwrap();
    let resolved: Vec<&str> =
        run["arms"].as_array().unwrap().iter().map(|arm| arm["name"].as_str().unwrap()).collect();
    assert_eq!(resolved, ["max_num_seqs=2", "max_num_seqs=8", "max_num_seqs=1"]);
    assert!(run["forced"].to_string().contains("max_num_seqs=1"), "{}", run["forced"]);
    // It goes on from here as any other run.
    for command in [format!("run --resume {shown}"), format!("report {shown}"), format!("explain {shown}")] {
        env.run(&command).ok();
    }
    assert_eq!(arms(&folder).len(), 3);
}

#[test]
fn rows_of_another_load_are_marked_where_a_folder_is_continued_by_force() {
    let env = small();
    let folder = killed_after(&env, 2);
    env.write("e.toml", &SMALL.replace("output_len = 8", "output_len = 9"));
    let ran = env.run(&format!("run --resume {} --force", folder.display())).ok();
    assert!(ran.stderr.contains("arm max_num_seqs=1: its finished rows are of another"), "{}", ran.stderr);
    assert!(!ran.stderr.contains("arm max_num_seqs=8: its"), "{}", ran.stderr);
}

/// The journal as versions up to 0.1.0 wrote it, which named arms by their place in the plan.
fn journal_of_places(folder: &Path) -> String {
    let journal = read(folder, "cells.jsonl");
    let run: serde_json::Value = serde_json::from_str(&read(folder, "run.json")).unwrap();
    let arms = run["plan"]["arms"].as_array().unwrap();
    let line = |line: &str| {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        let arm = arms.iter().position(|arm| arm["name"] == line["arm"]).unwrap();
        let cell = serde_json::json!({ "arm": arm, "repeat": line["repeat"] });
        format!("{}\n", serde_json::json!({ "cell": cell, "lengths": line["lengths"] }))
    };
    journal.lines().map(line).collect()
}

#[test]
fn journals_of_earlier_versions() {
    let undisturbed = small();
    undisturbed.run(RUN).ok();
    let env = small();
    env.run(RUN).ok();
    let folder = env.only_result();
    let shown = folder.display().to_string();
    let old = journal_of_places(&folder);
    let cut: String = old.split_inclusive('\n').take(2).collect();
    keep_rows(&folder, 3);
    std::fs::write(folder.join("cells.jsonl"), &cut).unwrap();
    env.run(&format!("merge {shown} --out part")).ok();
    env.run(&format!("run --resume {shown}")).ok();
    assert_eq!(tables(&folder), tables(&undisturbed.only_result()));
    let journal = read(&folder, "cells.jsonl");
    assert!(journal.lines().count() == 6 && !journal.contains("\"cell\""), "{journal}");
    // Where the plan was changed by force nobody knows which arm stood where.
    std::fs::write(folder.join("cells.jsonl"), old).unwrap();
    let run = read(&folder, "run.json").replace("\"forced\": []", "\"forced\": [\"plan: a against b\"]");
    std::fs::write(folder.join("run.json"), run).unwrap();
    for command in [format!("run --resume {shown}"), format!("merge {shown} --out other")] {
        env.run(&command).fails(2, "named by its place in the plan", "earlier version");
    }
}
