use super::*;
use crate::engine::device::DeviceKind;
use crate::experiment::spec;
use crate::workload::spec::{Count, WholeTrace};

const TOML: &str = r#"
[a]
question = "q"
model = "synthetic:qwen3.5-4b"
knob = "max_num_seqs"
values = [1, 4]
baseline = 4
repeats = 2
[a.load]
input_len = 256
output_len = 128
[a.engine]
kv_blocks = 586
[[a.arms]]
name = "tight {value}"
knob = "kv_blocks"
values = [40, 80]
[a.rig.cpu]
model = "synthetic:demo"
values = [1, 2]
load = { input_len = 32 }
quick = { values = [1], repeats = 1 }
[a.rig."sim:series"]
engine = { kv_layout = "unified" }
"#;

fn rig(kind: DeviceKind, id: &str) -> Rig {
    Rig { kind, id: id.to_string() }
}

fn plan(options: PlanOptions, kind: DeviceKind) -> Result<Plan> {
    let experiments = spec::parse(TOML, "t.toml").unwrap();
    build(&experiments["a"], &PlanOptions { experiment: "a".into(), ..options }, &rig(kind, "sim:series"))
}

fn names(plan: &Plan) -> Vec<&str> {
    plan.arms.iter().map(|arm| arm.name.as_str()).collect()
}

#[test]
fn arms_are_chosen_by_name() {
    let chosen = |names: &[&str]| {
        let arms = names.iter().map(ToString::to_string).collect();
        plan(PlanOptions { arms, ..PlanOptions::default() }, DeviceKind::Cuda)
    };
    let tight = chosen(&["tight *"]).unwrap();
    assert_eq!(names(&tight), ["tight 40", "tight 80"]);
    assert_eq!(tight.baseline().name, "tight 40");
    assert_eq!(names(&chosen(&["*num*=*"]).unwrap()), ["max_num_seqs=1", "max_num_seqs=4"]);
    assert_eq!(names(&chosen(&["max_num_seqs=4", "*80"]).unwrap()), ["max_num_seqs=4", "tight 80"]);
    let error = chosen(&["tigt *"]).unwrap_err();
    assert!(error.to_string().contains("`tigt *`") && error.hint().contains("tight 80"), "{error}");
}

#[test]
fn limits_given_for_a_run_reach_every_arm() {
    let slo = Some("ttft_p99=500".to_string());
    let limited = plan(PlanOptions { slo, ..Default::default() }, DeviceKind::Sim).unwrap();
    assert!(limited.arms.iter().all(|arm| arm.load.slo.limits().count() == 1));
    let slo = Some("ttft_p75=500".to_string());
    assert!(plan(PlanOptions { slo, ..Default::default() }, DeviceKind::Sim).is_err());
}

#[test]
fn arms_are_the_values_then_the_listed_ones() {
    let plan = plan(PlanOptions::default(), DeviceKind::Sim).unwrap();
    assert_eq!(names(&plan), ["max_num_seqs=1", "max_num_seqs=4", "tight 40", "tight 80"]);
    assert_eq!(plan.baseline().name, "max_num_seqs=4");
    assert_eq!(plan.arms[2].engine.kv_blocks, Some(40));
    assert_eq!((plan.arms[2].knob.as_str(), plan.arms[2].value.as_str()), ("kv_blocks", "40"));
    assert_eq!(plan.arms[0].engine.kv_blocks, Some(586));
    assert_eq!(plan.arms[0].engine.kv_layout, crate::engine::config::KvLayout::Unified);
}

#[test]
fn a_rig_and_quick_lay_over_it() {
    let cpu = plan(PlanOptions::default(), DeviceKind::Cpu).unwrap();
    assert_eq!(names(&cpu)[..2], ["max_num_seqs=1", "max_num_seqs=2"]);
    assert_eq!(cpu.arms[0].model, "synthetic:demo");
    let quick = plan(PlanOptions { quick: true, ..Default::default() }, DeviceKind::Cpu).unwrap();
    assert_eq!((quick.repeats, quick.arms.len()), (1, 3));
}

#[test]
fn values_replace_the_declared_ones_and_leave_other_arms() {
    let values = Some("8,16".to_string());
    let plan = plan(PlanOptions { values, ..Default::default() }, DeviceKind::Sim).unwrap();
    assert_eq!(names(&plan), ["max_num_seqs=8", "max_num_seqs=16", "tight 40", "tight 80"]);
}

#[test]
fn repeats_are_outside_and_arms_inside() {
    let plan = plan(PlanOptions::default(), DeviceKind::Sim).unwrap();
    let order: Vec<_> = plan.cells().iter().map(|cell| (cell.repeat, cell.arm)).collect();
    assert_eq!(order, [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3)]);
}

#[test]
fn shards_cover_the_plan_once_and_share_its_hash() {
    let whole = plan(PlanOptions::default(), DeviceKind::Sim).unwrap();
    let mut cells = Vec::new();
    for index in 1..=3 {
        let shard = Some(Shard { index, of: 3 });
        let part = plan(PlanOptions { shard, ..Default::default() }, DeviceKind::Sim).unwrap();
        assert_eq!(part.hash(), whole.hash());
        cells.extend(part.cells());
    }
    cells.sort_by_key(|cell| (cell.repeat, cell.arm));
    assert_eq!(cells, whole.cells());
    assert!("0/3".parse::<Shard>().is_err() && "4/3".parse::<Shard>().is_err());
}

#[test]
fn set_changes_the_arm_but_never_its_name() {
    let set = vec!["kv_block_tokens=32".to_string()];
    let plan = plan(PlanOptions { set, ..Default::default() }, DeviceKind::Sim).unwrap();
    assert_eq!(names(&plan)[0], "max_num_seqs=1");
    assert_eq!(plan.arms[0].engine.kv_block_tokens, 32);
    assert!(plan.altered);
}

#[test]
fn set_of_the_swept_knob_is_refused() {
    let set = vec!["max_num_seqs=3".to_string()];
    let error = plan(PlanOptions { set, ..Default::default() }, DeviceKind::Sim).unwrap_err();
    assert!(error.hint().contains("--values"));
}

#[test]
fn sweeps_cross_or_pair() {
    let experiments = spec::parse(TOML, "t.toml").unwrap();
    let sweep = vec![("max_num_seqs".into(), "1,2".into()), ("input_len".into(), "8,16".into())];
    let mut options = PlanOptions { experiment: "sweep".into(), sweep, ..Default::default() };
    let rig = rig(DeviceKind::Sim, "sim:fixed");
    let plan = build_sweep(&experiments["a"], &options, &rig).unwrap();
    assert_eq!(plan.arms.len(), 4);
    assert_eq!(plan.arms[1].name, "max_num_seqs=1 input_len=16");
    options.zip = true;
    let plan = build_sweep(&experiments["a"], &options, &rig).unwrap();
    assert_eq!(names(&plan), ["max_num_seqs=1 input_len=8", "max_num_seqs=2 input_len=16"]);
}

#[test]
fn a_key_of_a_table_leaves_the_others_as_they_are() {
    let table = |text: &str| toml::from_str::<toml::Table>(text).unwrap();
    let mut load = table("prompts = 3\nprobe = { victims = 6, injectors = 3 }");
    lay_deep(&mut load, &table("probe.victims = 2\nrate = 1.5"));
    assert_eq!(load, table("prompts = 3\nrate = 1.5\nprobe = { victims = 2, injectors = 3 }"));
}

#[test]
fn a_replay_has_all_rows_unless_someone_says_otherwise() {
    let prompts = |options: PlanOptions| {
        let load = vec!["replay = { file = \"t.csv\" }".to_string()];
        plan(PlanOptions { load, ..options }, DeviceKind::Cuda).map(|plan| plan.arms[0].load.prompts)
    };
    let all = Count::Trace(WholeTrace::All);
    assert_eq!(prompts(PlanOptions::default()).unwrap(), all);
    assert_eq!(prompts(PlanOptions { prompts: Some(3), ..Default::default() }).unwrap(), Count::Exact(3));
    let set = PlanOptions { set: vec!["prompts=4".into()], ..Default::default() };
    assert_eq!(prompts(set).unwrap(), Count::Exact(4));
    let error = prompts(PlanOptions { set: vec!["output_len=4".into()], ..Default::default() }).unwrap_err();
    assert!(error.to_string().contains("output_len has no effect in a replay"), "{error}");
}

#[test]
fn prompts_are_for_arms_without_a_number_of_their_own() {
    let text = TOML.replace("name = \"tight {value}\"", "name = \"tight {value}\"\nprompts = 7");
    let experiments = spec::parse(&text, "t.toml").unwrap();
    let options = PlanOptions { experiment: "a".into(), prompts: Some(3), ..Default::default() };
    let plan = build(&experiments["a"], &options, &rig(DeviceKind::Cuda, "cuda:0")).unwrap();
    let prompts: Vec<Count> = plan.arms.iter().map(|arm| arm.load.prompts).collect();
    assert_eq!(prompts, [3, 3, 7, 7].map(Count::Exact));
}
