use crate::env::{TestEnv, read};

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
    env.run(&format!("{sweep} --budget -1")).fails(2, "--budget -1", "above 0");
}

#[test]
fn saturate_finds_the_rate_a_queue_can_take() {
    let env = TestEnv::new();
    // One seat, 10 steps of 1 ms a request: an M/D/1 queue that serves 100 a second.
    let saturate =
        "saturate --slo ttft_p99=1000 --start 10 --device sim:fixed --set max_num_seqs=1 --set input_len=8";
    let found = env.run(&format!("{saturate} --set output_len=10 --repeats 1 --format json")).ok().json();
    let keeps = found["keeps"]["rate"].as_f64().unwrap();
    assert!((60.0..220.0).contains(&keeps), "{found}");
    assert!(found["keeps"]["goodput"].as_f64().unwrap() > 50.0);
    env.run("saturate --slo ttft_p98=3 --device sim:fixed").fails(2, "ttft_p98", "ttft");
    env.run("saturate --slo ttft_p99=3 --device sim:fixed --prompts 10").fails(2, "10 requests", "--prompts");
}
