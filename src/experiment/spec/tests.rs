use super::*;

const GOOD: &str =
    "[a]\nquestion = \"q\"\nmodel = \"synthetic:demo\"\nknob = \"max_num_seqs\"\nvalues = [1, 2]\n";

fn error_of(text: &str) -> String {
    parse(text, "e.toml").unwrap_err().to_string()
}

#[test]
fn built_in_experiments_are_valid() {
    let experiments = parse(BUILT_IN, "experiments.toml").unwrap();
    assert!(experiments.contains_key("part3-batching-cliff"));
}

#[test]
fn unknown_keys_have_line_and_column() {
    assert!(error_of(&format!("{GOOD}vlaues = [3]\n")).starts_with("e.toml:6:1: unknown field `vlaues`"));
    let in_engine = error_of(&format!("{GOOD}[a.engine]\nmax_seqs = 3\n"));
    assert!(in_engine.starts_with("e.toml:7:1: unknown field `max_seqs`"), "{in_engine}");
    let error = parse(&format!("{GOOD}[a.engine]\nmax_seqs = 3\n"), "e.toml").unwrap_err();
    assert_eq!(error.hint(), "did you mean `max_num_seqs`?");
    let rig = error_of(&format!("{GOOD}[a.rig.gpu]\nvalues = [3]\n"));
    assert!(rig.starts_with("e.toml:6:8: unknown rig `gpu`"), "{rig}");
    let in_load = error_of(&format!("{GOOD}[a.rig.cpu.load]\ninput = 3\n"));
    assert!(in_load.starts_with("e.toml:7:1: unknown field `input`"), "{in_load}");
}

#[test]
fn broken_syntax_has_line_and_column() {
    assert!(error_of("[a]\nquestion = \n").starts_with("e.toml:2:1"), "{}", error_of("[a]\nquestion = \n"));
}

#[test]
fn knobs_and_values_are_checked() {
    let error = parse(&GOOD.replace("max_num_seqs", "max_num_sqs"), "e.toml").unwrap_err();
    assert_eq!(error.to_string(), "e.toml:4:8: [a]: unknown knob `max_num_sqs`");
    assert_eq!(error.hint(), "did you mean `max_num_seqs`?");
    assert_eq!(
        error_of(&GOOD.replace("[1, 2]", "[1, 0]")),
        "e.toml:5:14: [a]: max_num_seqs = 0 is out of bounds"
    );
}

#[test]
fn what_is_wrong_deep_inside_has_its_own_place() {
    let arm = format!("{GOOD}[[a.arms]]\nname = \"x\"\nknob = \"input_ln\"\nvalues = [3]\n");
    let error = parse(&arm, "e.toml").unwrap_err();
    assert_eq!(error.to_string(), "e.toml:8:8: [a]: unknown knob `input_ln`");
    assert_eq!(error.hint(), "did you mean `input_len`?");
    let rig = format!("{GOOD}[a.rig.cpu]\nquick = {{ values = [4, \"many\"] }}\n");
    assert!(error_of(&rig).starts_with("e.toml:7:24: [a]: max_num_seqs = many"), "{}", error_of(&rig));
    let claim = format!("{GOOD}[[a.claims]]\ntext = \"t\"\nmetric = \"m\"\n");
    assert!(error_of(&claim).starts_with("e.toml:6:"), "{}", error_of(&claim));
    let none = "[b]\nquestion = \"q\"\nmodel = \"synthetic:demo\"\n";
    assert!(error_of(none).starts_with("e.toml:1:2: [b]: neither"), "{}", error_of(none));
}

#[test]
fn an_unknown_experiment_offers_the_nearest() {
    let experiments = parse(BUILT_IN, "experiments.toml").unwrap();
    let error = find(&experiments, "part3-batching").unwrap_err();
    assert!(error.hint().contains("part3-batching-cliff"));
}
