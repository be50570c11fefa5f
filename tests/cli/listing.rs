use crate::env::{SMALL, TestEnv};

#[test]
fn list_names_every_experiment() {
    let list = TestEnv::new().run("list").ok();
    for name in [
        "part1-hit-the-wall",
        "part2-prefill-freeze",
        "part3-batching-cliff",
        "part5-cache-starvation",
        "part6-quantization",
        "peers-h200",
    ] {
        assert!(list.stdout.lines().any(|line| line.starts_with(name)), "{name} is not in\n{}", list.stdout);
    }
}

#[test]
fn list_of_a_file() {
    let env = TestEnv::new();
    env.write("e.toml", SMALL);
    insta::assert_snapshot!(env.run("list --experiments e.toml").ok().stdout, @r"
    name   question              knob          values
    small  Does the cap matter?  max_num_seqs  1, 2, 8
    ");
    insta::assert_snapshot!(env.run("list --experiments e.toml --format md").ok().stdout, @r"
    | name | question | knob | values |
    |---|---|---|---|
    | small | Does the cap matter? | max_num_seqs | 1, 2, 8 |
    ");
    let json = env.run("list --experiments e.toml --format json").ok().json();
    assert_eq!(json[0]["knob"], "max_num_seqs");
}

#[test]
fn show_resolves_the_plan() {
    let env = TestEnv::new();
    env.write("e.toml", SMALL);
    let show = env.run("show small --experiments e.toml --device sim:fixed --set kv_block_tokens=32").ok();
    insta::assert_snapshot!(show.stdout, @r"
    small
    Does the cap matter?

    device: sim:fixed:1
    model: synthetic:demo (338 MB of weights, 338 MB streamed by a step)
    repeats: 2, 6 runs of an arm, seed 0
    simulated time: about 197 ms

    arm                        model           load           engine
    max_num_seqs=1 (baseline)  synthetic:demo  flood 16/8 x8  max_num_seqs=1 max_model_len=64 kv_block_tokens=32
    max_num_seqs=2             synthetic:demo  flood 16/8 x8  max_num_seqs=2 max_model_len=64 kv_block_tokens=32
    max_num_seqs=8             synthetic:demo  flood 16/8 x8  max_num_seqs=8 max_model_len=64 kv_block_tokens=32

    Claims, checked on every run:

    - eight seats give at least four times the tokens of one: expected 4.00 or more
    - published elsewhere: expected 100 ±10.0 % [sim:series]
    ");
}

/// A claim of an arm that is not chosen, or over one, is not what this plan answers.
#[test]
fn show_lists_the_claims_of_the_arms_that_are_chosen() {
    let env = TestEnv::new();
    env.write("e.toml", SMALL);
    let claims = |arms: &str| {
        let show = env.run(&format!("show small --experiments e.toml --device sim:fixed --arms {arms}")).ok();
        show.stdout.split_once("Claims, checked on every run:\n\n").unwrap().1.to_string()
    };
    let published = "- published elsewhere: expected 100 ±10.0 % [sim:series]\n";
    assert_eq!(claims("*8"), format!("{published}- 1 more left out, of arms that were not chosen\n"));
    assert_eq!(claims("max_num_seqs=2"), "- 2 left out, of arms that were not chosen\n");
    let both = claims("*=1,*=8");
    assert!(both.contains("eight seats") && both.ends_with(published), "{both}");
}

#[test]
fn show_writes_its_arms_as_rows_and_looks_at_a_folder() {
    let env = TestEnv::new();
    env.write("e.toml", SMALL);
    let rows = env.run("show small --experiments e.toml --device sim:fixed --format csv").ok();
    assert!(rows.stdout.starts_with("arm,model,load,engine\n"), "{}", rows.stdout);
    assert_eq!(rows.stdout.lines().count(), 4);
    std::fs::create_dir(env.path().join("empty")).unwrap();
    env.run("show small --experiments e.toml --device sim:fixed --model empty").fails(
        2,
        "empty",
        "config.json",
    );
}

#[test]
fn show_knows_the_series_loads() {
    let show = TestEnv::new().run("show part3-batching-cliff --device sim:series --format json").ok().json();
    let arms = show[0]["arms"].as_array().unwrap();
    let names: Vec<&str> = arms.iter().map(|arm| arm["name"].as_str().unwrap()).collect();
    assert_eq!(
        names,
        ["max_num_seqs=1", "max_num_seqs=4", "max_num_seqs=16", "max_num_seqs=64", "max_num_seqs=256"]
    );
    assert_eq!(arms[0]["load"]["input_len"], 256);
    assert_eq!(arms[0]["load"]["output_len"], 128);
}

#[test]
fn show_lays_the_rig_over_the_experiment() {
    let show = TestEnv::new().run("show part3-batching-cliff --device cpu --format json").ok().json();
    assert_eq!(show[0]["arms"][0]["model"], "synthetic:demo");
    assert_eq!(show[0]["arms"][0]["load"]["input_len"], 32);
}

#[test]
fn peers_has_the_agreed_arms() {
    let show = TestEnv::new().run("show peers-h200 --device sim:h200 --format json").ok().json();
    let arms = show[0]["arms"].as_array().unwrap();
    let value_of = |name: &str| arms.iter().find(|arm| arm["name"] == name).map(|arm| arm["value"].clone());
    for (name, value) in [
        ("4b-decode-1", "1"),
        ("4b-decode-256", "256"),
        ("4b-decode-32-ctx8192", "32"),
        ("4b-decode-64-ctx4096", "64"),
        ("4b-prefill-8192", "8192"),
        ("4b-flood-64", "64"),
        ("9b-awq-decode-1", "1"),
        ("9b-awq-mlp-decode-1", "1"),
    ] {
        assert_eq!(value_of(name), Some(value.into()), "{name}");
    }
}

#[test]
fn help_and_version_go_to_stdout() {
    let env = TestEnv::new();
    let help = env.run("--help").ok().stdout;
    for words in ["Commands:", "a 4-bit one", "inferwall run part3-batching-cliff --quick"] {
        assert!(help.contains(words), "no `{words}` in\n{help}");
    }
    assert!(env.run("--version").ok().stdout.starts_with("inferwall "));
}

#[test]
fn a_closed_pipe_is_no_error() {
    let env = TestEnv::new();
    let mut child = env.command().arg("list").stdout(std::process::Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

/// The plan is shown, and what `run` would say of it is said here too.
#[test]
fn show_refuses_what_run_refuses() {
    let env = TestEnv::new();
    for (flags, fact) in [
        ("--set max_model_len=10000000", "has positions up to"),
        ("--set kv_blocks=1000000000", "the caches need"),
        ("--set prefix_len=1000", "prefix_len = 1000 is longer"),
        ("--set input_len=4000", "longest request has 4128 tokens"),
        ("--set cuda_kernels=portable", "cuda_kernels = portable"),
    ] {
        let command = |name: &str| env.run(&format!("{name} part3-batching-cliff --device sim:h100 {flags}"));
        let (show, run) = (command("show"), command("run"));
        assert_eq!((show.code, run.code), (2, 2), "{flags}: {}", show.stderr);
        assert!(run.stderr.contains(fact) && show.stderr == run.stderr, "{flags}: {}", show.stderr);
        assert!(show.stdout.contains("max_num_seqs=256"), "{}", show.stdout);
    }
}

/// A plan for a GPU may be looked at where there is none.
#[test]
fn show_of_a_device_that_is_not_here() {
    let show = TestEnv::new().run("show part3-batching-cliff --device cuda:7").ok();
    assert!(show.stderr.contains("the device is not here"), "{}", show.stderr);
}
