//! On a real clock: the times that are recorded agree with a clock that the recorder knows nothing of.

mod load_rig;

use std::path::Path;

use inferwall::engine::config::EngineConfig;
use inferwall::engine::device::cpu::CpuDevice;
use inferwall::engine::model::{OpenOptions, open};
use inferwall::workload::rate::Rate;
use inferwall::workload::spec::{Count, LoadSpec};
use load_rig::Rig;

/// Every recorded time lies between the outside clock's readings just before and just after the call that brought it.
/// These are orders, not durations: a busy machine cannot break them, a wrong origin or unit does.
#[test]
fn recorded_times_lie_between_the_readings_of_an_outside_clock() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/dense-llama-tiny");
    let options = OpenOptions { seed: 0, download: false, show_progress: false };
    let opened = open(&folder.to_str().unwrap().parse().unwrap(), &options).unwrap();
    let config = EngineConfig { max_num_seqs: 4, max_model_len: 64, ..EngineConfig::default() };
    let rig = Rig::real(Box::new(CpuDevice::new(Some(1)).unwrap()), &opened, config);
    let load = LoadSpec {
        prompts: Count::Exact(24),
        request_rate: Rate::new(120.0).unwrap(),
        input_len: 8,
        output_len: 8,
        ..LoadSpec::default()
    };
    let (record, _, watch) = rig.run_watched(&load, 0);
    assert_eq!(record.requests.iter().filter(|request| request.completed()).count(), 24);
    assert_eq!(record.steps.len(), watch.steps_s.len());
    for (step, (before_s, after_s)) in record.steps.iter().zip(&watch.steps_s) {
        let report = &step.report;
        let from_s = before_s - watch.start_to_origin_s;
        assert!(
            from_s <= step.delivered_s && step.delivered_s <= *after_s,
            "{step:?} in {before_s}..{after_s}"
        );
        assert!(report.start_s <= report.end_s && report.end_s <= step.delivered_s);
        assert!(report.device_s <= report.end_s - report.start_s + 1e-9 && step.wall_s > 0.0);
    }
    // Tokens come with steps, and nothing is handed over before it is due.
    for request in &record.requests {
        assert!(request.schedule_delay_s().unwrap() >= 0.0 && request.queue_s().unwrap() >= 0.0);
        for time_s in &request.tokens_s {
            assert!(record.steps.iter().any(|step| step.delivered_s == *time_s));
        }
    }
    // The last arrival is due at 24 / 120 s: a run cannot end before, and ends when the outside clock says so.
    assert!(record.duration_s >= 0.2);
    let (before_s, after_s) = watch.steps_s[watch.steps_s.len() - 1];
    assert!(before_s - watch.start_to_origin_s <= record.duration_s && record.duration_s <= after_s);
}
