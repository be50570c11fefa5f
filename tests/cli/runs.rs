use std::io::Read;
use std::path::Path;

use crate::env::{Ran, SMALL, TestEnv, read};

fn small(arguments: &str) -> (TestEnv, Ran) {
    small_on("sim:fixed", arguments)
}

fn small_on(device: &str, arguments: &str) -> (TestEnv, Ran) {
    let env = TestEnv::new();
    env.write("e.toml", SMALL);
    let ran = env.run(&format!("run small --experiments e.toml --device {device} {arguments}"));
    (env, ran)
}

#[test]
fn the_table_goes_to_stdout_and_the_rest_to_stderr() {
    let (_env, ran) = small("");
    let ran = ran.ok();
    insta::assert_snapshot!(ran.stdout, @r"
    small on sim:fixed:1 — SIMULATED: synthetic:demo (weights: synthetic)

    arm             req/s  tok/s  vs base  TTFT p50  TTFT p99  ITL p50  ITL p99  E2E p50  running  step p50  of roof  bound by
    max_num_seqs=1    125  1,000     base      29.0         –     1.00        –     36.0     1.00      1.00        –  seats
    max_num_seqs=2    250  2,000    2.00x      13.0         –     1.00        –     20.0     2.00      1.00        –  seats
    max_num_seqs=8  1,000  8,000    8.00x      1.00         –     1.00        –     8.00     8.00      1.00        –  –

    load: flood 16/8 x8; times in ms, median of 2 repeats; `running`: mean sequences in a step; `of roof`: share of the nearer nominal roof, bandwidth or arithmetic

    A decode step of synthetic:demo takes 1.00 ms that all sequences share, plus 0 ms for each of them (least squares over 3 batch sizes from 1 to 8, R2 1.000).
    No private part shows: every further sequence rides free at these batch sizes.

    Where the bytes of a token go, and how near a step is to its floor:

    arm             weights    state      KV  activations    FLOPs  step p50  floor p50  of floor  bound by
    max_num_seqs=1   338 MB  18.3 MB  120 kB       110 kB  0.947 G      1.00          –         –  seats
    max_num_seqs=2   169 MB  18.3 MB  120 kB       110 kB  0.947 G      1.00          –         –  seats
    max_num_seqs=8  42.2 MB  18.3 MB  120 kB       110 kB  0.947 G      1.00          –         –  –

    - max_num_seqs=1, max_num_seqs=2: bound by seats: requests waited for a seat (max_num_seqs) while a further one would have been cheap
    - held back by seats (max_num_seqs), share of the step time: max_num_seqs=1 88 %, max_num_seqs=2 75 %

    How requests were served beside each other:

    arm             interference   Jain  longest wait ms  overtaken
    max_num_seqs=1             –  0.794             56.0        0 %
    max_num_seqs=2             –  0.833             24.0        0 %
    max_num_seqs=8             –   1.00                0        0 %

    `interference`: mean gap between tokens in steps with a prefill over without, minus 1; `Jain`: index of slowdown, 1 is even; `overtaken`: by a request due later

    Claims:

    - [holds] eight seats give at least four times the tokens of one: expected 4.00 or more, measured 8.00
    - 1 more not comparable on this rig; report.md lists them
    ");
    assert!(ran.stderr.contains("max_num_seqs=8 (repeat 2/2)") && ran.stderr.contains("results: "));
}

#[test]
fn a_run_leaves_every_file() {
    let (env, ran) = small("--trace");
    ran.ok();
    let folder = env.only_result();
    for name in [
        "run.json",
        "summary.csv",
        "populations.csv",
        "checks.csv",
        "requests.csv",
        "tokens.csv",
        "steps.csv",
        "report.md",
        "report.html",
        "trace.json.gz",
    ] {
        assert!(folder.join(name).metadata().unwrap().len() > 0, "{name}");
    }
    // Three arms, two repeats, eight requests each; the header beside them.
    assert_eq!(read(&folder, "summary.csv").lines().count(), 1 + 6);
    assert_eq!(read(&folder, "requests.csv").lines().count(), 1 + 48);
    assert_eq!(read(&folder, "tokens.csv").lines().count(), 1 + 48);
}

#[test]
fn arms_are_inside_and_repeats_outside() {
    let (env, ran) = small("--values 1,2");
    ran.ok();
    let mut reader = csv::Reader::from_path(env.only_result().join("summary.csv")).unwrap();
    let order: Vec<(String, String)> = reader
        .records()
        .map(|row| row.unwrap())
        .map(|row| (row[1].to_string(), row[4].to_string()))
        .collect();
    let expected =
        [("max_num_seqs=1", "0"), ("max_num_seqs=2", "0"), ("max_num_seqs=1", "1"), ("max_num_seqs=2", "1")];
    assert_eq!(order, expected.map(|(arm, repeat)| (arm.to_string(), repeat.to_string())));
}

#[test]
fn run_json_says_what_ran() {
    let (env, ran) = small("--set kv_block_tokens=32 --seed 7");
    ran.ok();
    let run: serde_json::Value = serde_json::from_str(&read(&env.only_result(), "run.json")).unwrap();
    assert_eq!(run["status"], "complete");
    assert_eq!(run["device"]["simulated"], true);
    assert_eq!(run["models"][0]["weights"], "synthetic");
    assert_eq!(run["arms"][0]["engine"]["kv_block_tokens"], 32);
    assert_eq!(run["seeds"][0], 7);
    assert_eq!(run["claims"][0]["outcome"], "holds");
    assert_eq!(run["claims"][1]["outcome"], "not_comparable");
    for key in ["schema", "command", "version", "commit", "started", "ended", "plan", "plan_hash"] {
        assert!(!run[key].is_null(), "{key}");
    }
    assert_eq!(run.get("ceilings"), Some(&serde_json::Value::Null), "a device of fixed cost has none");
}

#[test]
fn csv_and_json_hold_the_same_rows() {
    let (env, ran) = small("--format csv --repeats 1");
    let csv_text = ran.ok().stdout;
    assert_eq!(csv_text, read(&env.only_result(), "summary.csv"));
    let header = csv_text.lines().next().unwrap();
    assert!(header.starts_with(
        "experiment,arm,knob,value,repeat,device,simulated,requests,completed,failed,duration_s"
    ));
    assert!(header.ends_with("schema,model,weights,load,seed,quick,cpu_math,config_hash,build"));
    let (_env, ran) = small("--format json --repeats 1");
    let json = ran.ok().json();
    assert_eq!(json.as_array().unwrap().len(), 3);
    assert_eq!(json[0]["arm"], "max_num_seqs=1");
    assert_eq!(json[0]["offered_rate"], "inf");
    assert_eq!(json[0]["value"], 1);
    let keys: Vec<&String> = json[0].as_object().unwrap().keys().collect();
    assert_eq!(keys, header.split(',').collect::<Vec<_>>());
}

#[test]
fn markdown_goes_to_stdout_too() {
    let (_env, ran) = small("--format md --repeats 1");
    assert!(ran.ok().stdout.contains("| arm | req/s |"));
}

#[test]
fn the_same_seed_gives_the_same_rows_and_another_does_not() {
    let rows = |arguments: &str| {
        let (env, ran) = small_on("sim:a10g", &format!("--repeats 1 {arguments}"));
        ran.ok();
        let folder = env.only_result();
        (read(&folder, "summary.csv"), read(&folder, "steps.csv"))
    };
    assert_eq!(rows(""), rows(""));
    assert_ne!(rows("").0, rows("--seed 1").0);
}

#[test]
fn out_is_where_results_go_and_nothing_is_overwritten() {
    let env = TestEnv::new();
    env.write("e.toml", SMALL);
    for _ in 0..2 {
        env.run("run small --experiments e.toml --device sim:fixed --values 1 --repeats 1 --out there").ok();
    }
    assert_eq!(env.results("there").len(), 2);
    assert!(!env.path().join("results").exists());
}

/// A folder's name need not be Unicode.
#[cfg(unix)]
#[test]
fn out_may_be_any_name() {
    use std::os::unix::ffi::OsStrExt;

    let env = TestEnv::new();
    env.write("e.toml", SMALL);
    let name = std::ffi::OsStr::from_bytes(b"\xff");
    let mut command = env.command();
    command.args("run small --experiments e.toml --device sim:fixed --values 1 --repeats 1".split(' '));
    Ran::new(command.arg("--out").arg(name).output().unwrap()).ok();
    assert!(env.path().join(name).join("small").is_dir());
}

#[test]
fn check_fails_when_a_claim_does_not_hold() {
    let env = TestEnv::new();
    env.write("e.toml", &SMALL.replace("at_least = 4", "at_least = 40"));
    let run = |flags: &str| {
        env.run(&format!("run small --experiments e.toml --device sim:fixed --repeats 1 {flags}"))
    };
    assert!(run("").ok().stdout.contains("[does not hold]"));
    run("--check").fails(1, "1 claim(s) do not hold", "inferwall explain");
}

#[test]
fn check_tells_what_could_not_be_compared() {
    let env = TestEnv::new();
    env.write("e.toml", SMALL);
    let run = |flags: &str| {
        env.run(&format!("run small --experiments e.toml --device sim:fixed --repeats 1 {flags}"))
    };
    let ran = run("--check").ok();
    assert!(ran.stderr.contains("claims: 1 hold, 1 could not be compared"), "{}", ran.stderr);
    env.write("e.toml", &SMALL.replace("at_least = 4", "at_least = 4\nrig = \"cuda\""));
    let fact = "none of the 2 claim(s) could be compared: published for cuda; published for sim:series";
    run("--check").fails(3, fact, "nothing was found to hold or not to hold");
    // The table and the rows are there all the same; without --check that is all there is to it.
    assert!(run("").ok().stdout.contains("2 not comparable on this rig"));
    assert_eq!(env.results("results/local").len(), 3);
}

#[test]
fn check_of_a_run_out_of_time_is_undecided() {
    let env = TestEnv::new();
    env.write("e.toml", SMALL);
    let run = "run small --experiments e.toml --device sim:fixed --check --budget 0.000001";
    env.run(run).fails(3, "runs of an arm are left", "--resume");
}

#[test]
fn check_of_a_plan_without_claims_is_refused_before_it_runs() {
    let env = TestEnv::new();
    env.write("e.toml", SMALL);
    let sweep = "sweep --knob max_num_seqs --values 1,2 --device sim:fixed --check";
    env.run(sweep).fails(2, "--check has nothing to check: no claims are made of sweep", "leave --check out");
    let run = "run small --experiments e.toml --device sim:fixed --arms max_num_seqs=2 --check";
    env.run(run).fails(2, "--check has nothing to check: claims: 2 left out", "choose the arms");
    assert!(!env.path().join("results").exists());
}

#[test]
fn a_trace_opens_with_its_tracks() {
    let (env, ran) = small("--trace --repeats 1 --values 2");
    ran.ok();
    let file = std::fs::File::open(env.only_result().join("trace.json.gz")).unwrap();
    let mut text = String::new();
    flate2::read::GzDecoder::new(file).read_to_string(&mut text).unwrap();
    let trace: serde_json::Value = serde_json::from_str(&text).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let named = |name: &str| events.iter().filter(|event| event["args"]["name"] == name).count();
    assert_eq!((named("max_num_seqs=2"), named("scheduler steps"), named("request 7")), (1, 1, 1));
    let counters: std::collections::BTreeSet<&str> = events
        .iter()
        .filter(|event| event["ph"] == "C")
        .map(|event| event["name"].as_str().unwrap())
        .collect();
    assert_eq!(counters.into_iter().collect::<Vec<_>>(), ["KV usage", "running", "waiting"]);
    let spans = events.iter().filter(|event| event["ph"] == "X");
    assert!(spans.clone().count() > 8 && spans.clone().all(|span| span["dur"].as_f64().unwrap() >= 0.0));
}

#[test]
fn a_traced_pass_names_the_largest_consumers_and_their_floors() {
    let (env, ran) = small_on("sim:a10g", "--trace --repeats 1");
    let told = ran.ok().stdout;
    assert!(told.contains("largest consumers of a step"), "{told}");
    let folder = env.only_result();
    let mut reader = csv::Reader::from_path(folder.join("kernels.csv")).unwrap();
    let header = reader.headers().unwrap().iter().collect::<Vec<_>>().join(" ");
    assert_eq!(header, "arm repeat kind steps kernel launches time_ms share bytes flops floor_ms of_floor");
    let mut shares: std::collections::BTreeMap<(String, String), f64> = std::collections::BTreeMap::new();
    for row in reader.records().map(Result::unwrap) {
        *shares.entry((row[0].to_string(), row[2].to_string())).or_default() +=
            row[7].parse::<f64>().unwrap();
    }
    // Three arms, each with prefill and decode steps at least.
    assert!(shares.len() >= 6 && shares.values().all(|sum| (sum - 1.0).abs() < 1e-9), "{shares:?}");
    let explained = env.run(&format!("explain {} --no-counterfactuals --format json", folder.display()));
    let json = explained.ok().json();
    assert_eq!(json[0]["largest_kernels"][0]["kernel"], "weights and products (simulated)");
    // What was traced outlives a resumed run.
    env.run(&format!("run small --resume {}", folder.display())).ok();
    assert!(folder.join("kernels.csv").metadata().unwrap().len() > 0);
}

#[test]
fn shards_merge_into_the_whole() {
    let (whole, ran) = small("");
    ran.ok();
    let env = TestEnv::new();
    env.write("e.toml", SMALL);
    for shard in ["1/3", "2/3", "3/3"] {
        env.run(&format!("run small --experiments e.toml --device sim:fixed --out parts --shard {shard}"))
            .ok();
    }
    let parts: Vec<String> = env.results("parts").iter().map(|path| path.display().to_string()).collect();
    env.run(&format!("merge --out merged {}", parts.join(" "))).ok();
    let merged = &env.results("merged")[0];
    for name in ["summary.csv", "requests.csv", "tokens.csv", "steps.csv", "populations.csv"] {
        assert_eq!(read(merged, name), read(&whole.only_result(), name), "{name}");
    }
    env.run(&format!("merge --out twice {0} {0}", parts[0])).fails(2, "again", "once");
}

#[test]
fn a_report_can_be_made_again() {
    let (env, ran) = small("--repeats 1");
    let printed = ran.ok().stdout;
    let folder = env.only_result();
    let before = read(&folder, "report.md");
    std::fs::remove_file(folder.join("report.md")).unwrap();
    assert_eq!(env.run(&format!("report {}", folder.display())).ok().stdout, printed);
    assert_eq!(read(&folder, "report.md"), before);
    // A folder that was thinned out keeps the report that was made of all of it.
    std::fs::remove_file(folder.join("steps.csv")).unwrap();
    let again = env.run(&format!("report {}", folder.display())).ok();
    assert!(again.stderr.contains("steps.csv is missing"), "{}", again.stderr);
    assert_eq!(read(&folder, "report.md"), before);
    env.run(&format!("explain {} --format csv", folder.display())).fails(2, "no CSV form", "--format table");
}

#[test]
fn quick_runs_less() {
    let show = |flags: &str| {
        TestEnv::new().run(&format!("show part1-hit-the-wall --device sim:a10g --format json {flags}"))
    };
    let arms = |ran: Ran| ran.ok().json()[0]["arms"].as_array().unwrap().len();
    assert!(arms(show("--quick")) < arms(show("")));
}

#[test]
fn html_is_one_file_with_plots() {
    let (env, ran) = small("--repeats 1");
    ran.ok();
    let html = read(&env.only_result(), "report.html");
    assert!(html.contains("<svg") && html.contains("simulated") && !html.contains("src="));
}

#[test]
fn part_6_takes_its_models_apart_and_judges_both_readings() {
    let env = TestEnv::new();
    let out = env.run("run part6-quantization --device sim:series").ok().stdout;
    for words in [
        "What a decode step of each model moves",
        "The fitted decode step taken apart",
        "[does not hold] as published: decode follows those bytes",
        "[holds] corrected: it streams 1.06 times the bytes",
        "[holds] the fixed terms of a step hardly differ",
        "[holds] the 9B seats 103 requests",
    ] {
        assert!(out.contains(words), "no \"{words}\" in\n{out}");
    }
    let record: serde_json::Value = serde_json::from_str(&read(&env.only_result(), "run.json")).unwrap();
    let seats = |arm: &str| {
        let arms = record["arms"].as_array().unwrap();
        arms.iter().find(|found| found["name"] == arm).unwrap()["seats"]["unified"].clone()
    };
    assert_eq!((&seats("4b-rate-inf"), &seats("9b-awq-mlp-rate-inf")), (&146.into(), &103.into()));
    // The pool that a log printed is that model's alone: with fewer bytes of weights more requests fit.
    assert!(seats("9b-awq-rate-inf").as_u64() > Some(103), "{}", seats("9b-awq-rate-inf"));
}

/// What `auto` meant on one simulated rig is not what another is asked for.
#[test]
fn a_run_on_one_simulated_rig_is_explained_by_another() {
    let env = TestEnv::new();
    env.run("run part3-batching-cliff --device sim:h100 --arms max_num_seqs=4").ok();
    let folder = env.only_result();
    env.run(&format!("explain {} --sim sim:series", folder.display())).ok();
}

/// The decode step that the series published is of greedy streams of their own, in `run` as in `reproduce`.
#[test]
fn part_1_judges_the_step_by_the_load_it_was_published_for() {
    let env = TestEnv::new();
    env.run("run part1-hit-the-wall --device sim:series --check").ok();
    let record: serde_json::Value = serde_json::from_str(&read(&env.only_result(), "run.json")).unwrap();
    let fitted = |words: &str| {
        let claims = record["claims"].as_array().unwrap();
        let claim = claims.iter().find(|claim| claim["text"].as_str().unwrap().contains(words)).unwrap();
        assert_eq!(claim["outcome"], "holds", "{claim}");
        claim["measured"].as_f64().unwrap()
    };
    let reproduced = env.run("reproduce 1 --no-mechanisms --format json").ok().json();
    let figures = &reproduced["parts"][0]["figures"]["decode batch"];
    for (words, figure) in [("ms shared", "fit_fixed_ms"), ("for each sequence", "fit_per_sequence_ms")] {
        let ratio = fitted(words) / figures[figure].as_f64().unwrap();
        assert!((ratio - 1.0).abs() < 0.04, "{figure}: {ratio}");
    }
    // Without its arms there is nothing to judge: what is left of the claims is said in a line.
    let all = record["claims"].as_array().unwrap().len();
    let line = format!("Claims:\n\n- {all} left out, of arms that were not chosen\n");
    let ran = env.run("run part1-hit-the-wall --device sim:series --arms request_rate=1 --out o").ok();
    assert!(ran.stdout.contains(&line), "{}", ran.stdout);
    assert!(read(&env.results("o")[0], "report.md").contains(&line));
    let record: serde_json::Value = serde_json::from_str(&read(&env.results("o")[0], "run.json")).unwrap();
    assert_eq!(record["claims"].as_array().unwrap().len(), 0);
    assert_eq!(record["plan"]["claims_left_out"], all);
    // Values of one's own choose arms too.
    let ran = env.run("run part1-hit-the-wall --device sim:series --values 1 --out v").ok();
    assert!(ran.stdout.contains("left out, of arms that were not chosen"), "{}", ran.stdout);
    assert!(!ran.stdout.contains("not comparable"), "{}", ran.stdout);
}

#[test]
fn a_known_gpu_has_its_data_sheet_beside_the_measured_roofs() {
    let env = TestEnv::new();
    // The run that is kept, whatever its date.
    let kept = Path::new(env!("CARGO_MANIFEST_DIR")).join("results/h200/part6-quantization");
    let run = std::fs::read_dir(kept).unwrap().next().unwrap().unwrap().path();
    std::fs::create_dir(env.path().join("run")).unwrap();
    for file in ["run.json", "summary.csv"] {
        std::fs::copy(run.join(file), env.path().join("run").join(file)).unwrap();
    }
    let record: serde_json::Value = serde_json::from_str(&read(&run, "run.json")).unwrap();
    let measured = |name: &str| record["ceilings"][name].as_f64().unwrap() / 1e12;
    let (read, rate) = (measured("read_bytes_per_s"), measured("flops_per_s"));
    let report = env.run("report run").ok();
    let roofs = format!("{read:.2} TB/s and {rate:.0} TFLOP/s here, 4.80 and 989 on the data sheet");
    assert!(report.stdout.contains(&roofs), "{}", report.stdout);
}
