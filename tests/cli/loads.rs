//! Every kind of load, as a user asks for it: what was offered is what the files say was reached.

use crate::env::{TestEnv, read};

/// A device that is never busy for long: one step of 1 ms answers a request.
const SWEEP: &str = "sweep --knob max_num_seqs --values 64 --device sim:fixed --set input_len=8 --set output_len=1 \
                     --prompts 40 --format json";
/// The same without lengths: a trace has its own.
const TRACE: &str = "sweep --knob max_num_seqs --values 64 --device sim:fixed --format json";

/// A sweep with a load given in TOML: its folder, and its only row.
fn with_load(env: &TestEnv, load: &[&str]) -> (std::path::PathBuf, serde_json::Value) {
    let replays = load.iter().any(|text| text.contains("replay"));
    let mut arguments: Vec<&str> = if replays { TRACE } else { SWEEP }.split_whitespace().collect();
    load.iter().for_each(|text| arguments.extend(["--load", text]));
    let rows = env.run_args(&arguments).ok().json();
    assert_eq!(rows[0]["completed"], rows[0]["requests"]);
    (env.only_result(), rows[0].clone())
}

/// Columns of requests.csv as numbers.
fn requests(folder: &std::path::Path, columns: [&str; 3]) -> Vec<[f64; 3]> {
    let text = read(folder, "requests.csv");
    let mut reader = csv::Reader::from_reader(text.as_bytes());
    let header = reader.headers().unwrap().clone();
    let place = columns.map(|name| header.iter().position(|column| column == name).unwrap());
    reader.records().map(|row| place.map(|index| row.as_ref().unwrap()[index].parse().unwrap())).collect()
}

fn arrivals(folder: &std::path::Path) -> Vec<f64> {
    requests(folder, ["intended_s", "input_tokens", "output_tokens"]).iter().map(|row| row[0]).collect()
}

#[test]
fn arrivals_at_a_rate_span_what_the_rate_says() {
    let kinds =
        ["arrivals = \"constant\"", "arrivals = \"gamma\"", "arrivals = \"numpy_gamma\"", "burstiness = 0.3"];
    let variations: Vec<f64> = kinds
        .iter()
        .map(|kind| {
            let env = TestEnv::new();
            let (folder, row) = with_load(&env, &["request_rate = 20", kind]);
            assert_eq!(row["offered_rate"], 20.0);
            let achieved = row["achieved_rate"].as_f64().unwrap();
            assert!((achieved / 20.0 - 1.0).abs() < 0.01, "{kind}: {achieved}");
            let times = arrivals(&folder);
            assert!((times[39] - 2.0).abs() < 1e-9, "{kind}: {times:?}");
            let gaps: Vec<f64> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
            let mean = gaps.iter().sum::<f64>() / 39.0;
            gaps.iter().map(|gap| (gap / mean - 1.0).powi(2)).sum::<f64>() / 39.0
        })
        .collect();
    assert!(variations[0] < 1e-9 && (0.3..3.0).contains(&variations[1]), "{variations:?}");
    assert!(variations[3] > variations[1] && variations[3] > 1.2, "{variations:?}");
}

#[test]
fn ramps_rise_from_one_rate_to_the_other() {
    for shape in ["linear", "exponential"] {
        let env = TestEnv::new();
        let ramp = format!("ramp = {{ shape = \"{shape}\", to = 100 }}");
        let (folder, row) = with_load(&env, &["request_rate = 10", "arrivals = \"constant\"", &ramp]);
        let times = arrivals(&folder);
        let (first, last) = (times[1] - times[0], times[39] - times[38]);
        assert!(first > 0.04 && (last - 0.01).abs() < 0.001, "{shape}: {first} {last}");
        let offered = row["offered_rate"].as_f64().unwrap();
        assert!((offered - 40.0 / times[39]).abs() < 1e-9, "{shape}: {offered}");
    }
}

#[test]
fn a_closed_loop_has_its_clients_and_their_pauses() {
    let env = TestEnv::new();
    let (folder, row) = with_load(&env, &["concurrency = 2\nthink_time_s = 0.05"]);
    assert!(row["offered_rate"].is_null() && row["running_max"].as_u64().unwrap() <= 2, "{row}");
    let times = arrivals(&folder);
    let mean_gap = times[39] / 39.0;
    assert!((0.015..0.045).contains(&mean_gap), "two clients that pause 50 ms each: {mean_gap}");
}

#[test]
fn published_traces_are_replayed_as_they_are() {
    let traces = [
        (
            "mooncake.jsonl",
            "{\"timestamp\": 1000, \"input_length\": 20, \"output_length\": 3, \"hash_ids\": [0]}\n\
             {\"timestamp\": 4052, \"input_length\": 30, \"output_length\": 2, \"hash_ids\": [0, 14]}\n",
            3.052,
        ),
        (
            "BurstGPT_1.csv",
            "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n\
             5,ChatGPT,20,3,23,Conversation log\n45,ChatGPT,9,0,9,Conversation log\n118,GPT-4,30,2,32,API log\n",
            113.0,
        ),
        (
            "AzureLLMInferenceTrace_code.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,20,3\n\
             2023-11-16 18:17:04.0319600,30,2\n",
            0.052,
        ),
        ("own.csv", "arrival_s,input_tokens,output_tokens\n7,20,3\n7.5,30,2\n", 0.5),
    ];
    for (name, text, gap_s) in traces {
        let env = TestEnv::new();
        env.write(name, text);
        let (folder, row) = with_load(&env, &[&format!("replay = {{ file = \"{name}\" }}")]);
        let rows = requests(&folder, ["intended_s", "input_tokens", "output_tokens"]);
        assert_eq!((rows.len(), rows[0]), (2, [0.0, 20.0, 3.0]), "{name}");
        assert!((rows[1][0] - gap_s).abs() < 1e-6 && rows[1][1..] == [30.0, 2.0], "{name}: {rows:?}");
        assert!(row["load"].as_str().unwrap().contains(name), "{row}");
    }
    let env = TestEnv::new();
    env.write("odd.csv", "when,in,out\n1,2,3\n");
    let odd = [TRACE, "--load", "replay={file=\"odd.csv\"}"].join(" ");
    env.run(&odd).fails(2, "trace odd.csv", "Mooncake");
}

#[test]
fn lengths_and_prompts_of_every_kind_run() {
    for load in [
        "lengths = { kind = \"uniform\", ratio = 0.5 }",
        "lengths = { kind = \"log_normal\", sigma = 0.4 }",
        "lengths = { kind = \"file\", file = \"lengths.csv\" }",
        "prompt = { kind = \"repeat\", period = 4 }",
        "prompt = { kind = \"text\" }",
        "prefix_len = 4\nprefix_count = 2",
    ] {
        let env = TestEnv::new();
        env.write("lengths.csv", "input_tokens,output_tokens\n5,2\n9,3\n");
        let (folder, _) = with_load(&env, &[load]);
        let lengths = requests(&folder, ["request", "input_tokens", "output_tokens"]);
        if load.contains("file") {
            assert_eq!(
                (lengths[0][1..].to_vec(), lengths[1][1..].to_vec()),
                (vec![5.0, 2.0], vec![9.0, 3.0])
            );
        }
    }
}

#[test]
fn a_key_that_no_load_has_is_refused_with_the_nearest() {
    let env = TestEnv::new();
    let run = |load: &str| {
        env.run_args(&[SWEEP.split_whitespace().collect::<Vec<_>>(), vec!["--load", load]].concat())
    };
    run("arivals = \"constant\"").fails(2, "unknown field `arivals`", "did you mean `arrivals`?");
    run("ramp = linear").fails(2, "--load ramp = linear", "as in experiments.toml");
    run("ramp = { shape = \"linear\", to = 3 }").fails(2, "request_rate = inf", "ramp");
}

/// A generator that falls behind says so: here the load's own limit holds requests back, and the columns stand apart.
#[test]
fn queue_schedule_delay_and_achieved_rate_are_columns_of_their_own() {
    let env = TestEnv::new();
    let (folder, row) =
        with_load(&env, &["request_rate = 2000", "arrivals = \"constant\"", "concurrency = 1"]);
    let number = |column: &str| row[column].as_f64().unwrap();
    // Served one a millisecond, due two a millisecond: request i waits i x 0.5 ms or so before it is handed over.
    assert!((number("achieved_rate") / 1000.0 - 1.0).abs() < 0.05, "{row}");
    assert!(number("schedule_delay_p99_ms") > 15.0, "{row}");
    assert!(number("queue_p99_ms") >= number("schedule_delay_p99_ms"), "{row}");
    assert!(read(&folder, "summary.csv").lines().next().unwrap().contains("schedule_delay_mean_ms"));
    assert!(read(&folder, "checks.csv").contains("schedule_delay_p99_ms"));
}

#[test]
fn part_two_is_light_and_heavy_on_and_off_over_budgets_and_models() {
    let plan = TestEnv::new().run("show part2-prefill-freeze --device sim:series --format json").ok().json();
    let arms = plan[0]["arms"].as_array().unwrap();
    let names: Vec<&str> = arms.iter().map(|arm| arm["name"].as_str().unwrap()).collect();
    let budgets = ["512", "1024", "4096", "8192"].map(|budget| format!("heavy-budget-{budget}"));
    let mut expected = vec!["heavy-off", "heavy-on", "light-off", "light-on"];
    expected.extend(budgets.iter().map(String::as_str));
    expected.extend(["small-heavy-off", "small-heavy-on", "small-light-off", "small-light-on"]);
    assert_eq!(names, expected);
    assert!(plan[0]["repeats"].as_u64().unwrap() >= 2);
    for arm in arms {
        let (name, probe, engine) = (arm["name"].as_str().unwrap(), &arm["load"]["probe"], &arm["engine"]);
        let number = |key: &str| probe[key].as_u64().unwrap();
        assert_eq!((number("victims"), number("victim_input_len"), number("victim_output_len")), (6, 8, 64));
        assert_eq!((number("injector_input_len"), number("injector_output_len")), (5408, 32), "{name}");
        assert_eq!(number("injectors"), if name.contains("light") { 3 } else { 12 }, "{name}");
        assert_eq!(engine["chunked_prefill"], !name.ends_with("off"), "{name}");
        assert_eq!(engine["max_model_len"], 8192, "{name}");
        let budget = match name.rsplit_once("budget-") {
            Some((_, budget)) => budget.parse().unwrap(),
            None if name.ends_with("off") => 8192,
            None => 2048,
        };
        assert_eq!(engine["max_num_batched_tokens"], budget, "{name}");
        let model = if name.starts_with("small") { "synthetic:qwen3.5-0.8b" } else { "synthetic:qwen3.5-4b" };
        assert_eq!(arm["model"], model, "{name}");
    }
}

#[test]
fn quick_loads_of_parts_two_and_five_are_small_on_a_cpu() {
    for (part, arms) in [
        ("part2-prefill-freeze", ["heavy-off", "heavy-on"]),
        ("part5-cache-starvation", ["natural", "tight-24"]),
    ] {
        let plan = TestEnv::new().run(&format!("show {part} --device cpu --quick --format json")).ok().json();
        let of_plan = plan[0]["arms"].as_array().unwrap();
        let names: Vec<&str> = of_plan.iter().map(|arm| arm["name"].as_str().unwrap()).collect();
        assert_eq!((names.as_slice(), &plan[0]["repeats"]), (arms.as_slice(), &1.into()), "{part}");
        assert!(of_plan.iter().all(|arm| arm["model"] == "synthetic:demo"), "{part}");
    }
}
