use crate::env::{SMALL, TestEnv};

/// Two runs of the small experiment, on devices of different step times.
fn two_runs(env: &TestEnv, before_ms: u32, after_ms: u32) -> (String, String) {
    env.write("e.toml", SMALL);
    let run = |root: &str, ms: u32| {
        env.run(&format!("run small --experiments e.toml --device sim:fixed:{ms} --out {root}")).ok();
        env.results(root)[0].join("summary.csv").display().to_string()
    };
    (run("before", before_ms), run("after", after_ms))
}

#[test]
fn equal_runs_show_no_change() {
    let env = TestEnv::new();
    let (before, after) = two_runs(&env, 1, 1);
    let rows = env.run(&format!("diff {before} {after} --format json --fail-on regressed")).ok().json();
    let rows = rows.as_array().unwrap();
    assert!(!rows.is_empty() && rows.iter().all(|row| row["verdict"] == "no change"), "{rows:?}");
    let keys: Vec<&String> = rows[0].as_object().unwrap().keys().collect();
    assert_eq!(keys, ["arm", "metric", "before", "after", "change", "low", "high", "p", "verdict"]);
}

#[test]
fn a_slower_device_is_a_regression() {
    let env = TestEnv::new();
    let (before, after) = two_runs(&env, 1, 2);
    let diff = env.run(&format!("diff {before} {after} --fail-on regressed"));
    diff.fails(1, "regressed: max_num_seqs=1", "");
    let rows = env.run(&format!("diff {before} {after} --format json")).ok().json();
    let throughput =
        rows.as_array().unwrap().iter().find(|row| row["metric"] == "output_throughput").unwrap();
    assert_eq!(
        (&throughput["change"], &throughput["verdict"]),
        (&serde_json::json!(-0.5), &"regressed".into())
    );
}

#[test]
fn what_differs_is_a_warning() {
    let env = TestEnv::new();
    let (before, after) = two_runs(&env, 1, 2);
    assert!(env.run(&format!("diff {before} {after}")).ok().stderr.contains("device differs"));
}

#[test]
fn run_folders_and_csv_output() {
    let env = TestEnv::new();
    let (before, after) = two_runs(&env, 1, 1);
    let folder = |file: &str| file.trim_end_matches("/summary.csv").to_string();
    let csv = env.run(&format!("diff {} {} --format csv", folder(&before), folder(&after))).ok().stdout;
    assert!(csv.starts_with("arm,metric,before,after,change,low,high,p,verdict"));
}

#[test]
fn wrong_inputs() {
    let env = TestEnv::new();
    env.write("x.csv", "a,b\n1,2\n");
    env.run("diff none.csv x.csv").fails(2, "none.csv", "");
    env.run("diff x.csv x.csv").fails(2, "x.csv", "");
    env.run("diff x.csv x.csv --fail-on slower").fails(2, "slower", "regressed");
}
