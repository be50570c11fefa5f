use crate::env::{SMALL, TestEnv};

#[track_caller]
fn run_fails(arguments: &str, fact: &str, hint: &str) {
    TestEnv::new()
        .run(&format!("run part3-batching-cliff --device sim:fixed {arguments}"))
        .fails(2, fact, hint);
}

#[test]
fn unknown_experiments_offer_the_nearest() {
    TestEnv::new().run("run part3-batching-clif --device sim:fixed").fails(
        2,
        "unknown experiment `part3-batching-clif`",
        "did you mean `part3-batching-cliff`?",
    );
    // The beginning of one name is enough.
    for command in ["run part3 --device sim:fixed", "show part3"] {
        TestEnv::new().run(command).fails(2, "`part3`", "did you mean `part3-batching-cliff`?");
    }
    TestEnv::new().run("show part").fails(2, "`part`", "`inferwall list` shows all");
    TestEnv::new().run("show").fails(2, "<EXPERIMENT>", "`inferwall list` shows all");
    TestEnv::new().run("run --device sim:fixed").fails(2, "no experiment was named", "inferwall list");
}

#[test]
fn unknown_knobs_offer_the_nearest() {
    run_fails("--set max_num_seq=3", "unknown knob `max_num_seq`", "did you mean `max_num_seqs`?");
}

#[test]
fn values_out_of_bounds() {
    run_fails("--values 0", "max_num_seqs = 0 is out of bounds", "1 to 1048576");
    run_fails("--values four", "max_num_seqs = four", "whole number");
    run_fails("--set gpu_memory_utilization=2", "gpu_memory_utilization = 2 is out of bounds", "0.01 to 1");
    run_fails("--set top_p", "has no `=`", "knob=value");
    run_fails("--prompts 0", "no requests", "1 or more");
    run_fails("--repeats 0", "no runs", "1 or more");
    run_fails("--set max_num_seqs=3", "would override the swept knob", "--values");
    run_fails("--shard 4/3", "`4/3` is not a shard", "i/n");
}

#[test]
fn combinations_that_cannot_be() {
    run_fails(
        "--set chunked_prefill=false --set max_num_batched_tokens=64",
        "while chunked_prefill is off",
        "max_num_batched_tokens=2048",
    );
    run_fails("--set input_len=4000", "longest request has 4128 tokens", "max_model_len=4128");
}

#[test]
fn knobs_of_another_device_are_refused_before_anything_is_loaded() {
    run_fails("--set cuda_kernels=portable", "cuda_kernels = portable", "--device cuda");
    let env = TestEnv::new();
    run_fails("--set last_layer=outputs", "last_layer = outputs", "auto");
    let run = "run part3-batching-cliff --device cpu --set state_write_interval=8";
    env.run(run).fails(2, "state_write_interval = 8", "auto");
    assert!(!env.path().join("results").exists(), "nothing was begun");
}

#[test]
fn an_arm_that_memory_cannot_hold_is_said_before_anything_is_loaded() {
    let env = TestEnv::new();
    let run = "run part3-batching-cliff --device sim:a10g --set gpu_memory=8GB";
    env.run(run).fails(2, "arm `max_num_seqs=1`", "");
    assert!(!env.path().join("results").exists(), "nothing was begun");
}

#[test]
fn unknown_devices_and_models() {
    let env = TestEnv::new();
    env.run("run part3-batching-cliff --device gpu").fails(2, "unknown device `gpu`", "cuda");
    env.run("run part3-batching-cliff --device sim:nothing").fails(2, "nothing", "");
    run_fails("--model no/such/folder", "no/such/folder", "");
    run_fails("--model synthetic:qwen3.5-4c", "qwen3.5-4c", "qwen3.5-4b");
}

#[test]
fn a_broken_file_has_line_and_column() {
    let env = TestEnv::new();
    env.write("e.toml", &SMALL.replace("repeats = 2", "repeat = 2"));
    env.run("list --experiments e.toml").fails(2, "e.toml:7:1: unknown field `repeat`", "");
    env.write("e.toml", &SMALL.replace("knob = \"max_num_seqs\"", "knob = \"max_num_sqs\""));
    env.run("list --experiments e.toml").fails(
        2,
        "e.toml:5:8: [small]: unknown knob `max_num_sqs`",
        "did you mean `max_num_seqs`?",
    );
    env.write("e.toml", &SMALL.replace("output_len = 8", "outptu_len = 8"));
    let wrong = "e.toml:8:39: unknown field `outptu_len`";
    env.run("run small --experiments e.toml --device sim:fixed").fails(
        2,
        wrong,
        "did you mean `output_len`?",
    );
    env.write("e.toml", &SMALL.replace("[1, 2, 8]", "[1, 2, 0]"));
    env.run("list --experiments e.toml").fails(2, "e.toml:6:17: [small]: max_num_seqs = 0", "1 to 1048576");
    env.write("e.toml", "[a\n");
    env.run("list --experiments e.toml").fails(2, "e.toml:1:", "this is no TOML");
    env.write("e.toml", &SMALL.replace("[small]", "[[small]]"));
    env.run("list --experiments e.toml").fails(2, "e.toml:", "one table, [name]");
    env.write("e.toml", "");
    env.run("list --experiments e.toml").fails(2, "e.toml holds no experiment", "[name]");
    env.write("e.toml", &SMALL.replace("input_len = 16", "input_len = \"x\""));
    env.run("run small --experiments e.toml --device sim:fixed").fails(2, "e.toml:8:", "");
    env.run("list --experiments none.toml").fails(2, "none.toml", "exists");
    env.write("e.toml", &SMALL.replace("prompts = 8", "prompts = -8"));
    env.run("list --experiments e.toml").fails(
        2,
        "e.toml:8:20: expected a number of requests, or a rule",
        "",
    );
    env.write("e.toml", &SMALL.replace("metric = \"output_throughput\"", "metric = \"output_thruput\""));
    env.run("list --experiments e.toml").fails(2, "no metric `output_thruput`", "`output_throughput`?");
    env.write("e.toml", &SMALL.replace("repeats = 2", "repeats = 2\narms = [{ name = \"\" }]"));
    env.run("list --experiments e.toml").fails(2, "an arm with neither `name` nor `values`", "name");
}

#[test]
fn an_unwritable_place_is_the_users_to_mend() {
    let env = TestEnv::new();
    env.write("e.toml", SMALL);
    env.write("file", "");
    env.run("run small --experiments e.toml --device sim:fixed --out file/under").fails(
        2,
        "cannot write",
        "--out",
    );
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/dense-qwen3-tiny");
    for command in ["model synth demo", &format!("model quantize {model} --format awq --group 64")] {
        env.run(&format!("{command} --out file/under")).fails(2, "cannot write file/under", "--out");
        env.run(&format!("{command} --out file")).fails(2, "file is not a folder", "--out");
    }
}

#[test]
fn unknown_flags_and_commands() {
    let env = TestEnv::new();
    env.run("run part3-batching-cliff --fast").fails(2, "'--fast'", "-- --fast");
    env.run("run part3-batching-cliff --devic cpu").fails(2, "'--devic'", "did you mean `--device`?");
    env.run("fly").fails(2, "unrecognized subcommand 'fly'", "inferwall --help");
    env.run("swep --knob x").fails(2, "unrecognized subcommand 'swep'", "did you mean `sweep`?");
    env.run("diff one.csv").fails(2, "<AFTER>", "inferwall diff --help");
    assert_eq!(env.run("--help").ok().stderr, "");
    assert!(env.run("--version").ok().stdout.starts_with("inferwall "));
}

#[test]
fn force_belongs_to_resume() {
    run_fails("--force", "--force without --resume", "");
}

/// Numbers that no memory holds, or that no run lives to see the end of.
#[test]
fn numbers_beyond_all_bounds() {
    const HUGE: usize = 1 << 40;
    run_fails(&format!("--repeats {HUGE}"), "1099511627776 repeats of", "--repeats is 10000 at most");
    run_fails(&format!("--prompts {HUGE}"), "prompts = 1099511627776 is out of bounds", "1 to 1048576");
    run_fails("--prompts 1000000 --set input_len=1000", "do not fit in memory", "fewer prompts");
    run_fails("--set request_rate=1e-12", "would be due after", "raise request_rate");
    let load = |text: &str, fact: &str| run_fails(&format!("--load {text}"), fact, "must be");
    load(&format!("concurrency={HUGE}"), "concurrency = 1099511627776");
    load(&format!("input_len={HUGE}"), "input_len = 1099511627776");
    load("concurrency=2 --load think_time_s=1e18", "think_time_s = 1000000000000000000");
    load("probe={inject_after_s=1e18}", "probe.inject_after_s");
    load(&format!("probe={{victims={HUGE}}}"), "probe.victims = 1099511627776");
    let env = TestEnv::new();
    for flag in ["--input-len", "--output-len", "--prompts"] {
        env.run(&format!("predict {flag} {HUGE}")).fails(2, "1099511627776 is out of bounds", "16777216");
    }
    let many = "1..9999,10000";
    let sweep = format!("sweep --knob input_len --values {many} --knob output_len --values {many}");
    env.run(&format!("{sweep} --device sim:fixed")).fails(2, "100000000 arms", "--zip");
    let saturate = "saturate --slo ttft_p99=9 --device sim:fixed";
    env.run(&format!("{saturate} --precision 1e-300")).fails(2, "--precision", "0.0001");
    env.run(&format!("{saturate} --load probe={{}}")).fails(2, "a probe has no request rate", "sweep");
}
