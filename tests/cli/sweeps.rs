use crate::env::{TestEnv, kill_after, read};

const FAST: &str = "--device sim:fixed --prompts 4 --set input_len=8 --set output_len=4";

#[test]
fn one_knob() {
    let env = TestEnv::new();
    let ran = env.run(&format!("sweep --knob max_num_seqs --values 1..4*2 {FAST} --format json")).ok();
    let json = ran.json();
    let arms: Vec<&str> = json.as_array().unwrap().iter().map(|row| row["arm"].as_str().unwrap()).collect();
    assert_eq!(arms, ["max_num_seqs=1", "max_num_seqs=2", "max_num_seqs=4"]);
    assert_eq!(json[0]["requests"], 4);
    assert!(env.only_result().to_string_lossy().contains("results/local/sweep/"));
}

#[test]
fn knobs_are_crossed_or_paired() {
    let arms = |zip: &str| {
        let env = TestEnv::new();
        let sweep = "sweep --knob max_num_seqs --values 1,2 --knob prefix_len --values 0,4";
        env.run(&format!("{sweep} {zip} {FAST}")).ok();
        read(&env.only_result(), "summary.csv").lines().count() - 1
    };
    assert_eq!((arms(""), arms("--zip")), (4, 2));
}

#[test]
fn threads_may_be_auto() {
    let env = TestEnv::new();
    let arms = |sweep: &str, out: &str| {
        env.run(&format!("sweep {sweep} {FAST} --out {out}")).ok();
        let run: serde_json::Value = serde_json::from_str(&read(&env.results(out)[0], "run.json")).unwrap();
        let arms = run["arms"].as_array().unwrap().clone();
        arms.iter().map(|arm| (arm["name"].clone(), arm["engine"]["threads"].clone())).collect::<Vec<_>>()
    };
    let auto = serde_json::Value::Null;
    let expected = [("threads=auto".into(), auto.clone()), ("threads=1".into(), 1.into())];
    assert_eq!(arms("--knob threads --values auto,1", "swept"), expected);
    let set = arms("--knob max_num_seqs --values 2 --set threads=auto", "set");
    assert_eq!(set, [("max_num_seqs=2".into(), auto)]);
    env.run(&format!("sweep --knob threads --values auto,many {FAST}")).fails(2, "threads = many", "or auto");
}

#[test]
fn load_knobs_too() {
    let env = TestEnv::new();
    let ran = env.run("sweep --knob request_rate --values 50,inf --device sim:fixed --prompts 4 --set input_len=8 --set output_len=4 --format json");
    let json = ran.ok().json();
    assert_eq!((&json[0]["value"], &json[1]["value"]), (&50.into(), &"inf".into()));
    assert_eq!((&json[0]["offered_rate"], &json[1]["offered_rate"]), (&50.0.into(), &"inf".into()));
}

#[test]
fn a_sweep_resumes_without_its_flags() {
    let env = TestEnv::new();
    env.run(&format!("sweep --knob max_num_seqs --values 1,2 {FAST}")).ok();
    let folder = env.only_result();
    let before = read(&folder, "summary.csv");
    env.run(&format!("sweep --resume {}", folder.display())).ok();
    assert_eq!(read(&folder, "summary.csv"), before);
}

#[test]
fn wrong_sweeps() {
    let env = TestEnv::new();
    env.run("sweep --device sim:fixed").fails(2, "no knob was given", "max_num_seqs");
    // An unknown knob is what is wrong, whether or not values were given.
    env.run("sweep --knob foo --device sim:fixed").fails(2, "unknown knob `foo`", "max_num_seqs");
    env.run("sweep --knob max_num_seqs --device sim:fixed").fails(
        2,
        "1 --knob and 0 --values",
        "own --values",
    );
    env.run("sweep --knob max_num_seqz --values 1 --device sim:fixed").fails(
        2,
        "max_num_seqz",
        "max_num_seqs",
    );
    env.run("sweep --knob max_num_seqs --values 4..1 --device sim:fixed").fails(2, "4..1", "FROM..TO");
    env.run("sweep --knob input_len --values 1,2 --knob output_len --values 1,2,3 --zip --device sim:fixed")
        .fails(2, "--zip", "cross");
}

#[test]
fn a_rate_sweep_ends_when_higher_rates_teach_nothing() {
    let env = TestEnv::new();
    // One seat of 4 + 1 steps of 1 ms completes at most 250 requests a second.
    let sweep = "sweep --knob request_rate --values 100,1000,2000,4000,8000,inf --set max_num_seqs=1";
    let ran = env
        .run(&format!("{sweep} --device sim:fixed --prompts 200 --set input_len=8 --set output_len=4"))
        .ok();
    let csv = read(&env.only_result(), "summary.csv");
    assert!(ran.stderr.contains("request_rate=8000: left out"), "{}", ran.stderr);
    assert!(!csv.contains("request_rate=8000") && csv.contains("request_rate=inf"), "{csv}");
}

#[test]
fn a_budget_leaves_arms_for_later() {
    let env = TestEnv::new();
    let sweep = format!("sweep --knob max_num_seqs --values 1,2 {FAST}");
    let ran = env.run(&format!("{sweep} --budget 0.000000001"));
    assert!(
        ran.stderr.contains("2 runs of an arm are left") && ran.stderr.contains("--resume"),
        "{}",
        ran.stderr
    );
    let folder = env.only_result();
    env.run(&format!("sweep --resume {}", folder.display())).ok();
    assert_eq!(read(&folder, "summary.csv").lines().count(), 3);
    // A wrong one is told before anything is opened or written.
    let before = read(&folder, "run.json");
    for command in [sweep.clone(), format!("sweep --resume {}", folder.display())] {
        env.run(&format!("{command} --budget -1")).fails(2, "--budget -1", "above 0");
    }
    assert_eq!((read(&env.only_result(), "run.json"), before.contains("\"complete\"")), (before, true));
    // Of the arms of another plan those count that have no rows yet.
    let more = "--values 8,1 --force --budget 0.000000001";
    let ran = env.run(&format!("sweep --resume {} --knob max_num_seqs {more}", folder.display()));
    assert!(ran.stderr.contains("1 runs of an arm are left"), "{}", ran.stderr);
}

#[test]
fn saturate_finds_the_rate_a_queue_can_take() {
    let env = TestEnv::new();
    // One seat, 10 steps of 1 ms a request: an M/D/1 queue that serves 100 a second.
    let saturate =
        "saturate --slo ttft_p99=1000 --start 10 --device sim:fixed --set max_num_seqs=1 --set input_len=8";
    let found = env.run(&format!("{saturate} --set output_len=10 --repeats 1 --format json")).ok().json();
    let keeps = found["keeps"]["rate"].as_f64().unwrap();
    assert!((60.0..=100.0).contains(&keeps), "{found}");
    assert!(found["keeps"]["goodput"].as_f64().unwrap() > 50.0);
    let run: serde_json::Value = serde_json::from_str(&read(&env.only_result(), "run.json")).unwrap();
    assert_eq!(run["seeds"].as_array().unwrap().len(), 1);
    env.run("saturate --slo ttft_p98=3 --device sim:fixed").fails(2, "ttft_p98", "ttft");
    env.run("saturate --slo ttft_p99=3 --device sim:fixed --prompts 10").fails(2, "10 requests", "--prompts");
    env.run("saturate --slo ttft_p99=3 --device sim:fixed --load prompts=10").fails(
        2,
        "10 requests",
        "--prompts",
    );
}

#[test]
fn a_killed_sweep_resumes_to_the_same_bytes() {
    let env = TestEnv::new();
    let sweep = "sweep --knob max_num_seqs --values 1,2 --knob input_len --values 8,16 --zip --repeats 2";
    env.run(&format!("{sweep} --device sim:fixed --prompts 4 --set output_len=4")).ok();
    let folder = env.only_result();
    let whole = ["summary.csv", "requests.csv", "steps.csv", "checks.csv"].map(|name| read(&folder, name));
    kill_after(&folder, 3);
    env.run(&format!("sweep --resume {}", folder.display())).ok();
    let again = ["summary.csv", "requests.csv", "steps.csv", "checks.csv"].map(|name| read(&folder, name));
    assert_eq!(whole, again);
    env.run(&format!("sweep --resume {} --knob max_num_seqs --values 1,4", folder.display())).fails(
        2,
        "cannot be continued: plan",
        "--force",
    );
}

#[test]
fn shards_of_a_sweep_merge_to_the_whole() {
    let env = TestEnv::new();
    let sweep = format!("sweep --knob max_num_seqs --values 1,2,4 --repeats 2 {FAST}");
    env.run(&format!("{sweep} --out whole")).ok();
    for shard in 1..=2 {
        env.run(&format!("{sweep} --shard {shard}/2 --out shard{shard}")).ok();
    }
    let folder = |root: &str| env.results(root)[0].clone();
    let shards = format!("{} {}", folder("shard1").display(), folder("shard2").display());
    env.run(&format!("merge {shards} --out merged")).ok();
    for name in ["summary.csv", "requests.csv", "tokens.csv", "steps.csv", "populations.csv", "checks.csv"] {
        assert_eq!(read(&folder("merged"), name), read(&folder("whole"), name), "{name}");
    }
    let one = folder("shard1").display().to_string();
    env.run(&format!("merge {one} {one} --out twice")).fails(2, "again", "once");
    let part = env.run(&format!("merge {one} --out part")).ok();
    assert!(part.stderr.contains("3 of 6 runs of an arm are missing"), "{}", part.stderr);
}

/// Each shard knows its own arms: none of their rows is lost, nor what was measured of a model.
#[test]
fn shards_of_different_plans_are_merged_by_force() {
    let env = TestEnv::new();
    let run = |values: &str, out: &str| {
        env.run(&format!("sweep --knob max_num_seqs --values {values} {FAST} --out {out}")).ok();
        env.results(out)[0].clone()
    };
    let (one, two) = (run("1,2", "one"), run("4,8,16", "two"));
    let of_model = |folder: &std::path::Path, key: &str| {
        let run: serde_json::Value = serde_json::from_str(&read(folder, "run.json")).unwrap();
        run["models"][0][key].clone()
    };
    let edit = |folder: &std::path::Path, from: &str, to: &str| {
        let text = read(folder, "run.json");
        assert!(text.contains(from), "{text}");
        std::fs::write(folder.join("run.json"), text.replace(from, to)).unwrap();
    };
    edit(&two, "\"perplexity\": null", "\"perplexity\": 7.25");
    let shards = format!("{} {}", one.display(), two.display());
    env.run(&format!("merge {shards} --out merged")).fails(2, "no shard of the same run: plan", "--force");
    env.run(&format!("merge {shards} --force --out merged")).ok();
    let merged = env.results("merged")[0].clone();
    for name in ["summary.csv", "requests.csv", "steps.csv"] {
        let rows = |folder: &std::path::Path| read(folder, name).split_once('\n').unwrap().1.to_string();
        assert_eq!(rows(&merged), rows(&one) + &rows(&two), "{name}");
    }
    let run: serde_json::Value = serde_json::from_str(&read(&merged, "run.json")).unwrap();
    assert_eq!((&run["status"], run["arms"].as_array().unwrap().len()), (&"complete".into(), 5));
    assert!(run["forced"][0].as_str().unwrap().starts_with("plan: "), "{}", run["forced"]);
    assert_eq!(of_model(&merged, "perplexity"), 7.25);
    assert_eq!(of_model(&merged, "load_s"), of_model(&one, "load_s"));
    // Rows that no journal names are told, not dropped.
    let text = read(&two, "cells.jsonl");
    let lines: Vec<&str> = text.lines().collect();
    std::fs::write(two.join("cells.jsonl"), format!("{}\n{}\n", lines[0], lines[2])).unwrap();
    env.run(&format!("merge {} --out lost", two.display())).fails(2, "rows of arm max_num_seqs=8", "damaged");
    // What a kill left unfinished is.
    std::fs::write(two.join("cells.jsonl"), &text).unwrap();
    kill_after(&two, 1);
    let part = env.run(&format!("merge {} --out cut", two.display())).ok();
    assert!(part.stderr.contains("2 of 3 runs of an arm are missing"), "{}", part.stderr);
    assert_eq!(read(&env.results("cut")[0], "summary.csv").lines().count(), 2);
}

#[test]
fn limits_fill_goodput_in_sweeps_and_runs() {
    let env = TestEnv::new();
    let goodput = |limits: &str| {
        let sweep = format!("sweep --knob max_num_seqs --values 1 {FAST} {limits} --format json");
        env.run(&sweep).ok().json()[0]["goodput"].as_f64().map(f64::round)
    };
    // One seat, 4 requests of 4 steps of 1 ms: first tokens after 1, 5, 9 and 13 ms, all done after 16.
    assert_eq!(goodput(""), None);
    assert_eq!(goodput("--slo ttft_p99=6"), Some(125.0));
    assert_eq!(goodput("--slo ttft_p99=100"), Some(250.0));
}

const SATURATE: &str = "saturate --slo ttft_p99=60 --device sim:fixed --set max_num_seqs=1 --set input_len=8 \
                        --set output_len=10 --repeats 3";

#[test]
fn a_killed_search_resumes_to_the_same_answer() {
    let env = TestEnv::new();
    let found = env.run(&format!("{SATURATE} --format json")).ok().json();
    let folder = env.only_result();
    let whole = read(&folder, "summary.csv");
    assert!(whole.lines().count() > 6, "{whole}");
    // Rates a person would write, in every arm's name.
    let names = whole.lines().skip(1).map(|line| line.split(',').nth(1).unwrap());
    assert!(names.clone().all(|name| name.len() <= "request_rate=".len() + 5), "{whole}");
    kill_after(&folder, 4);
    let run = read(&folder, "run.json").replace("\"status\": \"complete\"", "\"status\": \"running\"");
    std::fs::write(folder.join("run.json"), run).unwrap();
    let again = env.run(&format!("saturate --resume {} --format json", folder.display())).ok().json();
    assert_eq!(found, again);
    assert_eq!(read(&folder, "summary.csv"), whole);
    let run: serde_json::Value = serde_json::from_str(&read(&folder, "run.json")).unwrap();
    assert_eq!((&run["status"], run["resumed"].as_array().unwrap().len()), (&"complete".into(), 1));
    assert_eq!(run["seeds"].as_array().unwrap().len(), 3);
}

#[test]
fn searches_that_cannot_be_continued() {
    let env = TestEnv::new();
    env.run(SATURATE).ok();
    let folder = env.only_result().display().to_string();
    env.run(&format!("saturate --resume {folder} --precision 0.2")).fails(2, "precision", "started with");
    env.run(&format!("saturate --resume {folder} --seed 4")).fails(2, "cannot be continued: plan", "");
    env.run(&format!("sweep --resume {folder}")).fails(2, "search for the highest rate", "saturate --resume");
    env.run(&format!("{SATURATE} --shard 1/2")).fails(2, "'--shard'", "");
    env.run("saturate --device sim:fixed").fails(2, "no limits", "--slo");
}

/// Every repeat that a search may run has its seed in run.json, though the plan names no number of repeats.
#[test]
fn a_search_keeps_the_seeds_of_its_repeats() {
    let env = TestEnv::new();
    env.run(SATURATE.trim_end_matches("--repeats 3")).ok();
    let run: serde_json::Value = serde_json::from_str(&read(&env.only_result(), "run.json")).unwrap();
    let seeds = run["seeds"].as_array().unwrap();
    assert_eq!(seeds.len(), 5);
    let csv = read(&env.only_result(), "summary.csv");
    let mut reader = csv::Reader::from_reader(csv.as_bytes());
    let header = reader.headers().unwrap().clone();
    let column = |name: &str| header.iter().position(|column| column == name).unwrap();
    let (repeat, seed) = (column("repeat"), column("seed"));
    for row in reader.records().map(Result::unwrap) {
        assert_eq!(row[seed], seeds[row[repeat].parse::<usize>().unwrap()].to_string());
    }
}

#[test]
fn a_search_states_its_confidence() {
    let env = TestEnv::new();
    let text = env.run(SATURATE).ok().stdout;
    assert!(text.contains("keep the limits (") && text.contains("one-sided"), "{text}");
    let found = env.run(&format!("{SATURATE} --format json")).ok().json();
    for judged in found["tried"].as_array().unwrap() {
        // Confidence belongs to intervals alone.
        assert_eq!(judged["confidence"].as_f64(), (judged["basis"] == "95 %").then_some(0.95), "{judged}");
    }
    let csv = env.run(&format!("{SATURATE} --format csv")).ok().stdout;
    assert!(
        csv.starts_with(
            "rate,limits,basis,confidence,repeats,ttft_p99_ms,itl_p99_ms,goodput,simulated\n1.0,keeps,twofold,,1,"
        ),
        "{csv}"
    );
}

/// 200 requests all at once fit into 256 seats, and show no queue: no rate can be told from them.
#[test]
fn a_burst_that_the_seats_hold_is_no_rate() {
    let env = TestEnv::new();
    let search = "--device sim:h100 --repeats 1 --precision 0.2 --format json";
    for (slo, goodput) in [("ttft_p99=500", 0.85), ("itl_p99=100", 0.8)] {
        let found = env.run(&format!("saturate --slo {slo} {search}")).ok().json();
        let flood = found["flood_throughput"].as_f64().unwrap();
        let keeps = found["keeps"]["rate"].as_f64().unwrap();
        assert!((0.5 * flood..=1.01 * flood).contains(&keeps), "{slo}: {found}");
        assert!(found["keeps"]["goodput"].as_f64().unwrap() > goodput * keeps, "{slo}: {found}");
    }
    // Rows of other numbers of requests have arms of their own.
    let arms = read(&env.results("results/local")[0], "summary.csv");
    assert!(arms.contains("request_rate=inf prompts=1024") && arms.contains(" prompts="), "{arms}");
}
