//! The commands on simulated GPUs: result files like a real device's, labelled, reproducible, explained, calibrated.

use std::path::{Path, PathBuf};
use std::process::Output;

use assert_cmd::Command;

fn inferwall(arguments: &[&str]) -> Output {
    Command::cargo_bin("inferwall").unwrap().args(arguments).output().unwrap()
}

#[track_caller]
fn stdout(arguments: &[&str]) -> String {
    let output = inferwall(arguments);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{arguments:?}: {error}");
    String::from_utf8(output.stdout).unwrap()
}

/// A small Part 3 on `device`, and the folder it left.
fn run(device: &str, out: &Path) -> PathBuf {
    let out_text = out.to_str().unwrap();
    stdout(&[
        "run",
        "part3-batching-cliff",
        "--device",
        device,
        "--values",
        "1,8",
        "--prompts",
        "16",
        "--out",
        out_text,
    ]);
    let experiment = out.join("part3-batching-cliff");
    std::fs::read_dir(experiment).unwrap().next().unwrap().unwrap().path()
}

#[test]
fn a_simulated_run_is_labelled_and_the_same_when_repeated() {
    let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let summary = |out: &Path| std::fs::read_to_string(run("sim:h100", out).join("summary.csv")).unwrap();
    let text = summary(first.path());
    assert_eq!(text, summary(second.path()));
    let mut reader = csv::Reader::from_reader(text.as_bytes());
    let simulated = reader.headers().unwrap().iter().position(|column| column == "simulated").unwrap();
    let rows: Vec<csv::StringRecord> = reader.records().map(Result::unwrap).collect();
    assert!(!rows.is_empty());
    assert!(rows.iter().all(|row| &row[simulated] == "true"), "{text}");
}

#[test]
fn a_run_is_explained_and_its_claim_checked_by_doubling() {
    let out = tempfile::tempdir().unwrap();
    let folder = run("sim:a10g", out.path());
    let text = stdout(&["explain", folder.to_str().unwrap(), "--arm", "max_num_seqs=1", "--format", "json"]);
    let explanations: serde_json::Value = serde_json::from_str(&text).unwrap();
    let explanation = &explanations[0];
    assert_eq!(explanation["bound_by"], "seats");
    assert_eq!(explanation["check"]["holds"], true, "{explanation}");
    let shares: f64 =
        explanation["time"].as_object().unwrap().values().map(|share| share.as_f64().unwrap()).sum();
    assert!((shares - 1.0).abs() < 1e-9, "{shares}");
    // Doubling seats of a one-seat arm nearly doubles its tokens a second.
    let seats = explanation["counterfactuals"]
        .as_array()
        .unwrap()
        .iter()
        .find(|counterfactual| counterfactual["resource"] == "seats")
        .unwrap();
    let (before, after) = (&seats["output_throughput"][0], &seats["output_throughput"][1]);
    assert!(after.as_f64().unwrap() > 1.7 * before.as_f64().unwrap(), "{seats}");
}

#[test]
fn a_simulated_run_compared_with_its_own_simulation_differs_by_nothing() {
    let out = tempfile::tempdir().unwrap();
    let folder = run("sim:series", out.path());
    let text = stdout(&["explain", folder.to_str().unwrap(), "--compare-sim", "--format", "json"]);
    let rows: Vec<serde_json::Value> = serde_json::from_str(&text).unwrap();
    assert_eq!(rows.len(), 2 * 6);
    for row in rows {
        assert!(row["error"].as_f64().unwrap().abs() < 0.02, "{row}");
    }
}

#[test]
fn calibration_of_a_run_gives_a_device_that_can_be_named() {
    let out = tempfile::tempdir().unwrap();
    let folder = run("sim:a10g", out.path());
    let text = stdout(&["calibrate", folder.to_str().unwrap(), "--format", "json"]);
    let result: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert!(result["calibration"]["held_out"]["median"].as_f64().unwrap() < 0.02, "{result}");
    let device = result["device"].as_str().unwrap();
    let predicted = stdout(&["predict", "--gpu", device.trim_start_matches("sim:"), "--format", "json"]);
    assert!(predicted.contains("\"simulated\": true"));
    let unknown = inferwall(&["calibrate", folder.to_str().unwrap(), "--arm", "none"]);
    assert_eq!(unknown.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&unknown.stderr).contains("has no finished arm `none`"));
}

#[test]
fn wrong_names_are_refused_with_the_choices() {
    for (arguments, part) in [
        (&["predict", "--gpu", "h300"][..], "no GPU `h300`"),
        (&["predict", "--gpu", "custom:gb=1"][..], "needs gb_per_s"),
        (&["reproduce", "4"][..], "part 4"),
        (&["explain", "no-such-folder"][..], "no-such-folder"),
    ] {
        let output = inferwall(arguments);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {error}");
        assert!(error.contains(part) && error.contains("hint:"), "{arguments:?}: {error}");
    }
}
