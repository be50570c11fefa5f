//! False alarms and misses of `diff`, on simulated runs with seeded noise (`sim_noise = 1`): a factor for each run (1 %),
//! one for each step (3 %), and one step in a thousand that takes five times as long.

mod load_rig;

use std::collections::BTreeMap;

use inferwall::engine::config::EngineConfig;
use inferwall::engine::device::sim::SimDevice;
use inferwall::measure::compare::{ArmSamples, Comparison, METRICS, ResultSet, compare};
use inferwall::measure::verdict::Verdict;
use inferwall::workload::seeds::repeat_seed;
use inferwall::workload::spec::{Count, CountRule, LoadSpec};
use load_rig::Rig;

const PAIRS: u64 = 200;
const REPEATS: u32 = 5;

/// A device `speed` times as fast as the base one in everything it charges for.
fn rig(speed: f64) -> Rig {
    let device = format!("sim:custom:gb_per_s={},tflops={},gb=40,launch_us=0", 500.0 * speed, 60.0 * speed);
    let config = EngineConfig { max_num_seqs: 8, sim_noise: 1.0, ..EngineConfig::default() };
    Rig::simulated(Box::new(SimDevice::parse(&device).unwrap()), "qwen3.5-0.8b", config)
}

fn load() -> LoadSpec {
    LoadSpec {
        prompts: Count::Rule(CountRule { per_seat: 3, min: 0, max: None, at_rate: None }),
        input_len: 64,
        output_len: 160,
        ..LoadSpec::default()
    }
}

/// Five repeats of one arm, as `diff` reads them from summary.csv.
fn side(rig: &Rig, seed: u64) -> ResultSet {
    let mut values: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    for repeat in 0..REPEATS {
        let summary = rig.summary(&load(), repeat_seed(seed, repeat));
        let summary = serde_json::to_value(summary).unwrap();
        for metric in METRICS {
            if let Some(value) = summary[metric.name].as_f64() {
                values.entry(metric.name.to_string()).or_default().push(value);
            }
        }
    }
    let arm = ArmSamples { arm: "arm".into(), values, ..ArmSamples::default() };
    ResultSet { source: "simulated".into(), arms: vec![arm] }
}

fn of_throughput(comparison: &Comparison) -> Verdict {
    comparison.rows.iter().find(|row| row.metric == "output_throughput").unwrap().verdict
}

/// A/A: the same arm against itself under other seeds. At most one pair in twenty may get any verdict at all.
#[test]
fn equal_arms_are_told_apart_in_at_most_one_pair_of_twenty() {
    let rig = rig(1.0);
    let alarms = (0..PAIRS)
        .filter(|pair| {
            let comparison = compare(&side(&rig, 2 * pair + 1), &side(&rig, 2 * pair + 2)).unwrap();
            assert!(comparison.rows.len() > 15, "{} metrics", comparison.rows.len());
            comparison.rows.iter().any(|row| {
                !matches!(row.verdict, Verdict::NoChange | Verdict::WithinNoise | Verdict::NotToldApart)
            })
        })
        .count();
    println!("{alarms} of {PAIRS} A/A pairs raised an alarm");
    assert!(alarms as u64 * 20 <= PAIRS, "{alarms} of {PAIRS} pairs");
}

/// A device that is 5 % faster in everything is seen as such in at least 95 % of pairs.
#[test]
fn a_change_of_five_per_cent_is_found_in_nineteen_pairs_of_twenty() {
    let (base, faster) = (rig(1.0), rig(1.05));
    let mut change = 0.0;
    let found = (0..PAIRS)
        .filter(|pair| {
            let comparison = compare(&side(&base, 2 * pair + 1), &side(&faster, 2 * pair + 2)).unwrap();
            let row = comparison.rows.iter().find(|row| row.metric == "output_throughput").unwrap();
            change += row.change.unwrap() / PAIRS as f64;
            of_throughput(&comparison) == Verdict::Improved
        })
        .count();
    println!("{found} of {PAIRS} pairs found the change, {:.2} % on average", change * 100.0);
    assert!((0.045..0.055).contains(&change), "the true change is 5 %, {change} was made");
    assert!(found as u64 * 20 >= PAIRS * 19, "{found} of {PAIRS} pairs");
}
