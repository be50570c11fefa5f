//! What tables and sentences say is what happened: bounds, loads, counts, averages, and which of it was simulated.

use std::path::Path;

use crate::env::{SMALL, TestEnv, read};

const PART_1: &str = "run part1-hit-the-wall --device sim:series --arms request_rate=*";

#[test]
fn an_overloaded_arm_is_not_said_to_wait_for_requests() {
    let env = TestEnv::new();
    let rows = env.run(&format!("{PART_1} --values 1,10,16 --format json")).ok().json();
    assert_eq!(rows[0]["bound_by"], "arrivals", "{}", rows[0]);
    for row in &rows.as_array().unwrap()[1..] {
        assert_ne!(row["bound_by"], "arrivals", "{row}");
    }
    let explained =
        env.run(&format!("explain {} --no-counterfactuals", env.only_result().display())).ok().stdout;
    assert!(explained.starts_with("part1-hit-the-wall on sim:series — SIMULATED"), "{explained}");
    assert!(
        explained.contains("held back by cache blocks, share of the step time: request_rate=10 "),
        "{explained}"
    );
    assert!(
        explained
            .contains("- overloaded, with a queue that grew: request_rate=10 (10.0 requests/s offered, ")
    );
}

#[test]
fn a_claim_is_checked_by_one_figure() {
    let env = TestEnv::new();
    env.run(&format!("{PART_1} --values 8 --format json")).ok();
    let explained = env.run(&format!("explain {}", env.only_result().display())).ok().stdout;
    let line =
        explained.lines().find(|line| line.contains("on the simulated device: doubling it gains")).unwrap();
    assert_eq!(line.matches("tok/s").count(), 1, "{line}");
}

#[test]
fn a_replay_is_the_whole_trace_in_every_arm_or_says_what_it_is() {
    let env = TestEnv::new();
    let rows: String = (0..60).map(|row| format!("{row},20,3\n")).collect();
    env.write("t.csv", &format!("arrival_s,input_tokens,output_tokens\n{rows}61,9,0\n"));
    let replay = |rest: &str| {
        let sweep = format!("sweep --device sim:fixed --format json --load replay={{file=\"t.csv\"}} {rest}");
        env.run(&sweep)
    };
    let all = replay("--knob max_num_seqs --values 1,4,300").ok().json();
    for row in all.as_array().unwrap() {
        assert_eq!((&row["requests"], &row["completed"]), (&60.into(), &60.into()), "{row}");
        assert_eq!(row["load"], "replay of t.csv x60 (1 without input or answer left out)");
    }
    let part = replay("--knob max_num_seqs --values 4 --prompts 5").ok().json();
    assert_eq!(part[0]["requests"], 5);
    assert_eq!(part[0]["load"], "replay of t.csv x5 of 60 rows (1 without input or answer left out)");
    replay("--knob input_len --values 8,16").fails(2, "input_len has no effect in a replay", "leave it out");
}

#[test]
fn at_a_rate_all_arms_have_as_many_requests() {
    let env = TestEnv::new();
    let sweep =
        "sweep --knob max_num_seqs --values 16,64,256 --device sim:a10g --set request_rate=50 --format json";
    let rows = env.run(sweep).ok().json();
    for row in rows.as_array().unwrap() {
        assert_eq!(row["requests"], 200, "{row}");
    }
}

#[test]
fn a_number_of_requests_leaves_arms_with_their_own_alone() {
    let env = TestEnv::new();
    let run = "run part1-hit-the-wall --device sim:series --arms request_rate=16,decode-* --prompts 30 --format json";
    let rows = env.run(run).ok().json();
    let requests: Vec<u64> =
        rows.as_array().unwrap().iter().map(|row| row["requests"].as_u64().unwrap()).collect();
    assert_eq!(requests, [30, 1, 8, 64, 150]);
}

#[test]
fn loads_that_differ_are_told_apart() {
    let env = TestEnv::new();
    let sweep = "sweep --knob input_len --values 8,16 --device sim:fixed --prompts 4 --set output_len=4";
    let table = env.run(sweep).ok().stdout;
    assert!(table.contains(
        "loads differ between arms:\n- flood 8/4 x4: input_len=8\n- flood 16/4 x4: input_len=16\n"
    ));
}

#[test]
fn limits_show_goodput_and_who_broke_them() {
    let env = TestEnv::new();
    let sweep = "sweep --knob max_num_seqs --values 1,8 --device sim:fixed --prompts 8 --set input_len=8 \
                 --set output_len=4 --slo ttft_p50=5";
    let table = env.run(sweep).ok().stdout;
    assert!(table.contains("req/s  goodput  tok/s"), "{table}");
    assert!(
        table.contains("limits in ms: ttft_p50=5;") && table.contains("\n- max_num_seqs=1 breaks ttft_p50 (")
    );
    assert!(!table.contains("max_num_seqs=8 breaks"), "{table}");
}

#[test]
fn predictions_say_what_was_set_or_that_it_has_no_meaning() {
    let env = TestEnv::new();
    let predict = |rest: &str| env.run(&format!("predict --gpu RTX4090 --model synthetic:qwen3.5-9b {rest}"));
    let bytes =
        |rest: &str| predict(&format!("{rest} --format json")).ok().json()["memory"]["weight_bytes"].as_u64();
    assert!(bytes("--set quantization=awq") < bytes("").map(|bytes| bytes / 2));
    let lengths = predict("--set input_len=512 --set output_len=64 --format json").ok().json();
    assert_eq!((&lengths["input_len"], &lengths["output_len"]), (&512.into(), &64.into()));
    predict("--set request_rate=2").fails(2, "`request_rate` has no meaning in a prediction", "sweep");
    predict("--set threads=2").fails(2, "`threads` has no meaning", "");
    env.run("predict --gpu l4 --model synthetic:qwen3.5-4b-awq").fails(
        2,
        "qwen3.5-4b-awq",
        "qwen3.5-9b-awq and",
    );
}

#[test]
fn a_simulated_device_writes_no_text() {
    let env = TestEnv::new();
    env.run("generate --device sim:a10g --prompt x").fails(2, "sim:a10g has no weights", "cpu or cuda");
    let fixed = env
        .run("generate --device sim:fixed --model synthetic:demo --prompt x --max-tokens 2 --format json")
        .ok();
    assert!(fixed.stderr.contains("SIMULATED") && fixed.json()["simulated"] == true, "{}", fixed.stderr);
    env.run("generate --device sim:fixed --prompt xyz --max-tokens 9 --set max_model_len=4").fails(
        2,
        "12 tokens, prompt and answer together, but max_model_len = 4",
        "max_model_len=12",
    );
    env.run("generate --device sim:fixed --prompt x --temperature 1e38").fails(2, "temperature", "100");
}

#[test]
fn a_summary_that_was_edited_is_refused_alike() {
    let env = TestEnv::new();
    env.write("e.toml", SMALL);
    env.run("run small --experiments e.toml --device sim:fixed --out r").ok();
    let folder = env.results("r")[0].clone();
    let shown = folder.display().to_string();
    let whole = read(&folder, "summary.csv");
    let header: Vec<&str> = whole.lines().next().unwrap().split(',').collect();
    let place = header.iter().position(|name| *name == "ttft_p50_ms").unwrap();
    let edited = |cell: &str| {
        let mut lines: Vec<String> = whole.lines().map(str::to_string).collect();
        let mut cells: Vec<&str> = lines[2].split(',').collect();
        cells[place] = cell;
        lines[2] = cells.join(",");
        lines.join("\n") + "\n"
    };
    let commands = [format!("report {shown}"), format!("explain {shown}"), format!("diff {shown} {shown}")];
    for cell in ["nan", "inf", "-3"] {
        std::fs::write(folder.join("summary.csv"), edited(cell)).unwrap();
        for command in &commands {
            env.run(command).fails(2, &format!("line 3: column ttft_p50_ms holds `{cell}`"), "0 or more");
        }
    }
    std::fs::write(folder.join("summary.csv"), whole.replace("ttft_p50_ms", "ttft_ms")).unwrap();
    for command in &commands {
        env.run(command).fails(2, "line 1: column ttft_p50_ms is missing", "ttft_ms");
    }
}

#[test]
fn an_explanation_needs_rows_and_steps() {
    let env = TestEnv::new();
    env.run(&format!("{PART_1} --values 1")).ok();
    let folder = env.only_result();
    let explain = || env.run(&format!("explain {} --no-counterfactuals", folder.display()));
    let header = |name: &str| read(&folder, name).lines().next().unwrap().to_string() + "\n";
    std::fs::write(folder.join("steps.csv"), header("steps.csv")).unwrap();
    explain().fails(2, "has no steps of arm `request_rate=1`", "steps.csv");
    std::fs::remove_file(folder.join("summary.csv")).unwrap();
    explain().fails(2, "has no rows", "--resume");
}

#[test]
fn what_is_simulated_says_so() {
    let env = TestEnv::new();
    let search = "saturate --slo ttft_p50=5 --device sim:fixed --prompts 20 --set input_len=8 --set output_len=4 --out s";
    let table = env.run(search).ok().stdout;
    assert!(table.starts_with("on sim:fixed:1 — SIMULATED\n"), "{table}");
    assert!(table.contains("TTFT p99 ms") && table.contains("medians over the repeats"), "{table}");
    let run = env.results("s")[0].display().to_string();
    let diff = env.run(&format!("diff {run} {run}")).ok().stdout;
    assert!(diff.contains("before is SIMULATED: sim:fixed:1\nafter is SIMULATED: sim:fixed:1"), "{diff}");
}

#[test]
fn names_of_vllm_and_of_gpus_are_understood() {
    let env = TestEnv::new();
    let sweep = |rest: &str| env.run(&format!("sweep --knob max_num_seqs {rest}"));
    sweep("--values 1 --device sim:fixed --set block_size=16").fails(
        2,
        "unknown knob `block_size`",
        "`kv_block_tokens`",
    );
    sweep("--values -1 --device sim:fixed").fails(2, "max_num_seqs = -1 is out of bounds", "1 to 1048576");
    sweep("--values 1 --device sim:fixed --repeats -1").fails(2, "-1", "");
    sweep("--values 1 --device sim:fixed --seed -1").fails(2, "-1", "");
    sweep("--values 1 --device sim:custom:gb_per_s=9,gb_per_s=8").fails(2, "gb_per_s is given twice", "once");
    sweep("--values 1 --device sim:fixed --slo ttft_p99=1,ttft_p99=2").fails(
        2,
        "ttft_p99 is given twice",
        "once",
    );
    let empty = env.run_args(&["sweep", "--knob", "max_num_seqs", "--values", "1", "--device", ""]);
    assert_eq!(empty.code, 2, "{}", empty.stderr);
    env.write("e.toml", "a = 3\n");
    env.run("list --experiments e.toml").fails(2, "expected a table", "");
    let row = &sweep("--values 4 --device sim:NVIDIA_H100 --prompts 4 --format json").ok().json()[0];
    assert_eq!(row["device"], "sim:h100");
    assert!(Path::new(&env.only_result()).to_string_lossy().contains("sim-h100"));
}

#[test]
fn cold_times_stand_beside_warm_ones_of_as_many_requests() {
    let env = TestEnv::new();
    env.write("e.toml", SMALL);
    env.run("run small --experiments e.toml --device sim:fixed --out r").ok();
    let folder = env.results("r")[0].clone();
    let report = |requests: usize| {
        let cold = format!(
            "arm,repeat,model,after_load,requests,duration_s,steps,first_step_ms,step_ms_p50,step_ms_p99,step_ms_max,\
             ttft_p50_ms,ttft_p90_ms,ttft_p99_ms,ttft_max_ms,itl_p50_ms,itl_p99_ms\n\
             max_num_seqs=1,0,synthetic:demo,true,{requests},1,9,50,5,6,50,60,61,62,63,5,6\n"
        );
        std::fs::write(folder.join("cold.csv"), cold).unwrap();
        let text = env.run(&format!("report {}", folder.display())).ok().stdout;
        text.lines().find(|line| line.starts_with("Cold, and in no row")).unwrap().to_string()
    };
    let few = report(2);
    assert!(few.contains("first step 50.0 ms") && !few.contains("TTFT"), "{few}");
    let alike = report(8);
    assert!(
        alike.contains("TTFT p50 60.0 and at most 63.0 ms; warm: step p50 1.00 ms, TTFT p50 29.0 ms."),
        "{alike}"
    );
}
