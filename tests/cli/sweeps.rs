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
