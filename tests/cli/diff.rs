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
    assert_eq!(
        keys,
        ["arm", "metric", "before", "after", "change", "low", "high", "p", "verdict", "effect_size"]
    );
}

#[test]
fn a_slower_device_is_a_regression() {
    let env = TestEnv::new();
    let (before, after) = two_runs(&env, 1, 2);
    let diff = env.run(&format!("diff {before} {after} --fail-on regressed"));
    diff.fails(1, "regressed: max_num_seqs=1", "--fail-on");
    let rows = env.run(&format!("diff {before} {after} --format json")).ok().json();
    let throughput =
        rows.as_array().unwrap().iter().find(|row| row["metric"] == "output_throughput").unwrap();
    assert_eq!(
        (&throughput["change"], &throughput["verdict"]),
        (&serde_json::json!(-0.5), &"regressed".into())
    );
}

#[test]
fn fail_on_says_where_nothing_can_be_told() {
    let env = TestEnv::new();
    env.write("e.toml", SMALL);
    for (root, ms) in [("before", 1), ("after", 2)] {
        let run = "run small --experiments e.toml --repeats 1 --device sim:fixed";
        env.run(&format!("{run}:{ms} --out {root}")).ok();
    }
    let folder = |root: &str| env.results(root)[0].display().to_string();
    let diff = format!("diff {} {}", folder("before"), folder("after"));
    env.run(&diff).ok();
    env.run(&format!("{diff} --fail-on regressed")).fails(3, "all rows say `too few repeats`", "--repeats 5");
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
fn too_few_repeats_come_with_their_remedy() {
    let env = TestEnv::new();
    env.write("e.toml", &SMALL.replace("repeats = 2", "repeats = 1"));
    let run = |root: &str| {
        env.run(&format!("run small --experiments e.toml --device sim:fixed --out {root}")).ok();
        env.results(root)[0].display().to_string()
    };
    let diff = env.run(&format!("diff {} {}", run("before"), run("after"))).ok();
    assert!(diff.stdout.contains("too few repeats"), "{}", diff.stdout);
    assert!(diff.stderr.contains("hint:") && diff.stderr.contains("--repeats 5"), "{}", diff.stderr);
    let env = TestEnv::new();
    let (before, after) = two_runs(&env, 1, 1);
    assert!(!env.run(&format!("diff {before} {after}")).ok().stderr.contains("--repeats"));
}

/// On a terminal, where both streams meet, the hint comes before the rows it speaks of.
#[test]
fn the_hint_stands_before_the_rows() {
    let env = TestEnv::new();
    env.write("e.toml", &SMALL.replace("repeats = 2", "repeats = 1"));
    env.run("run small --experiments e.toml --device sim:fixed --out r").ok();
    let run = env.results("r")[0].display().to_string();
    let both = std::fs::File::create(env.path().join("both")).unwrap();
    let mut command = env.command();
    command.args(["diff", &run, &run]).stdout(both.try_clone().unwrap()).stderr(both);
    assert!(command.status().unwrap().success());
    let text = crate::env::read(env.path(), "both");
    let table = text.find("arm ").unwrap();
    let rows = text[table..].lines().take_while(|line| !line.is_empty()).count() - 1;
    let hint = format!("hint: {rows} of {rows} rows say `too few repeats`");
    assert!(text.find(&hint).is_some_and(|at| at < table), "no `{hint}` before the rows of\n{text}");
}

#[test]
fn a_file_beside_itself_is_said_to_be() {
    let env = TestEnv::new();
    let (one, other) = two_runs(&env, 1, 1);
    let dotted = one.replace("/summary.csv", "/./summary.csv");
    for file in [&one, &dotted] {
        let diff = env.run(&format!("diff {one} {file}")).ok();
        assert!(diff.stderr.contains("warning:") && diff.stderr.contains("with itself"), "{}", diff.stderr);
    }
    assert_eq!(env.run(&format!("diff {one} {other}")).ok().stderr, "");
}

#[test]
fn requests_tables_and_markdown() {
    let env = TestEnv::new();
    let (before, after) = two_runs(&env, 1, 2);
    let requests = |file: &str| file.replace("summary.csv", "requests.csv");
    let rows = env.run(&format!("diff {} {} --format json", requests(&before), requests(&after))).ok().json();
    let slower = rows.as_array().unwrap().iter().find(|row| row["metric"] == "e2el_mean_ms").unwrap();
    assert_eq!((&slower["change"], &slower["verdict"]), (&1.0.into(), &"regressed".into()));
    let markdown = env.run(&format!("diff {before} {after} --format md")).ok().stdout;
    let header = "| arm | metric | before | after | change | 95 % interval | p | effect | verdict |";
    assert!(markdown.starts_with(header), "{markdown}");
}

/// What another tool saved, against another of its results.
#[test]
fn results_of_vllm_bench_serve() {
    let env = TestEnv::new();
    let saved = |throughput: &str, ttft: &str| {
        format!(
            "{{\"date\": \"20260709-101112\", \"backend\": \"vllm\", \"model_id\": \"Qwen/Qwen3.5-4B\", \
             \"num_prompts\": 200, \"request_rate\": \"inf\", \"max_concurrency\": null, \"duration\": 23.4, \
             \"completed\": 200, \"request_throughput\": {throughput}, \"output_throughput\": 1092.0, \
             \"total_token_throughput\": 3276.0, \"mean_ttft_ms\": {ttft}, \"median_ttft_ms\": 5030.0, \
             \"p99_ttft_ms\": 18877.0, \"mean_itl_ms\": 95.0}}\n"
        )
    };
    // As --append-result writes them: an object a line, each a repeat.
    env.write(
        "before.json",
        &(saved("8.53", "7000.0") + &saved("8.51", "7010.0") + &saved("8.55", "6990.0")),
    );
    env.write("after.json", &(saved("9.53", "6000.0") + &saved("9.51", "6010.0") + &saved("9.55", "5990.0")));
    let rows = env.run("diff before.json after.json --format json").ok().json();
    let of =
        |metric: &str| rows.as_array().unwrap().iter().find(|row| row["metric"] == metric).unwrap().clone();
    let throughput = of("request_throughput");
    assert_eq!(throughput["verdict"], "improved");
    assert!(throughput["effect_size"].as_f64().unwrap() > 10.0, "{throughput}");
    assert_eq!(of("ttft_mean_ms")["verdict"], "improved");
    assert_eq!(of("itl_mean_ms")["verdict"], "no change");
    env.run("diff after.json before.json --fail-on regressed").fails(1, "regressed", "");
}

#[test]
fn wrong_inputs() {
    let env = TestEnv::new();
    env.write("x.csv", "a,b\n1,2\n");
    env.run("diff none.csv x.csv").fails(2, "none.csv", "");
    env.run("diff x.csv x.csv").fails(2, "x.csv", "");
    env.write("empty.csv", "\n");
    env.run("diff empty.csv x.csv").fails(2, "empty.csv: it is empty", "summary.csv");
    // (As of a run's run.json.)
    env.write("run.json", "{\"schema\": 1}");
    env.run("diff run.json x.csv").fails(2, "run.json: a JSON object with the keys schema", "a run folder");
    env.run("diff x.csv x.csv --fail-on slower").fails(2, "slower", "regressed");
}
