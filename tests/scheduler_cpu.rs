//! The whole engine on the CPU device with golden checkpoints: however a request is scheduled (chunked, in company,
//! preempted and recomputed, steps in flight, drafts verified), its greedy tokens are the golden ones.

mod cpu_rig;

use cpu_rig::{Golden, assert_close, fixture};
use inferwall::engine::Engine;
use inferwall::engine::cache::plan::plan_cache;
use inferwall::engine::clock::Clock;
use inferwall::engine::config::{CacheDtype, CpuMath, EngineConfig, KvLayout, Speculation};
use inferwall::engine::device::cpu::CpuDevice;
use inferwall::engine::device::{Device, LoadOptions, Model};
use inferwall::engine::model::{ModelRef, OpenOptions, open};
use inferwall::engine::request::{Request, RequestId, SamplingParams};
use inferwall::engine::sampling::log_probability;
use inferwall::engine::step_report::Event;

const FOLDERS: [&str; 3] = ["hybrid-tiny", "hybrid-tiny-predictable", "dense-qwen3-tiny"];

fn load(folder: &str) -> Box<dyn Model> {
    let opened = open(&ModelRef::Folder(fixture(folder)), &OpenOptions::default()).unwrap();
    let options = LoadOptions { cpu_math: CpuMath::F32, threads: Some(1) };
    let mut device = CpuDevice::new(Some(1)).unwrap();
    device.load(&opened.layout, &opened.weights, &options, &mut |_| ()).unwrap()
}

fn engine(model: &dyn Model, config: EngineConfig) -> Engine {
    let memory = 8 << 30;
    let dtypes = (CacheDtype::F32, CacheDtype::F32);
    let plan = plan_cache(model.layout(), &config, memory, memory, dtypes, None).unwrap();
    Engine::new(model, plan, config, None, Clock::real()).unwrap()
}

fn config() -> EngineConfig {
    EngineConfig {
        max_num_seqs: 4,
        max_model_len: 256,
        max_num_batched_tokens: 256,
        async_scheduling: Some(1),
        threads: Some(1),
        ..EngineConfig::default()
    }
}

#[derive(Debug, Default)]
struct Counts {
    preemptions: usize,
    accepted: usize,
}

/// The golden prompt twice, with a shorter one between them; checks both.
fn check(what: &str, model: &dyn Model, golden: &Golden, config: EngineConfig) -> Counts {
    let mut engine = engine(model, config);
    let request = |prompt: &[u32]| Request {
        prompt: prompt.to_vec(),
        max_tokens: golden.greedy.len(),
        sampling: SamplingParams::default(),
        seed: 0,
        stop_tokens: Vec::new(),
        ignore_eos: true,
    };
    for prompt in [&golden.ids[..], &golden.ids[..33], &golden.ids[..]] {
        engine.submit(request(prompt)).unwrap();
    }
    let mut counts = Counts::default();
    let mut texts = [const { Vec::new() }; 3];
    while let Some(report) = engine.step().unwrap() {
        counts.accepted += report.accepted;
        // What the launches declare is at least what the step must move.
        let (moved, compulsory) = (report.moved_bytes.unwrap(), report.cost.bytes.total());
        assert!(moved >= compulsory, "{what}, step {}: {moved} of {compulsory} bytes", report.index);
        for event in report.events {
            match event {
                Event::Tokens { request: RequestId(id), tokens } => texts[id as usize].extend(tokens),
                Event::Preempted { .. } => counts.preemptions += 1,
                _ => (),
            }
        }
    }
    assert_eq!(texts[0], golden.greedy, "{what}, the first");
    assert_eq!(texts[2], golden.greedy, "{what}, the last");
    assert_eq!(texts[1].len(), golden.greedy.len());
    assert_eq!(engine.held(), (0, 0));
    counts
}

#[test]
fn greedy_tokens_do_not_depend_on_the_schedule() {
    for folder in FOLDERS {
        let model = load(folder);
        let golden = Golden::read(&fixture(folder));
        for depth in 0..=2 {
            for (name, config) in [
                ("whole prompts", EngineConfig { chunked_prefill: false, ..config() }),
                ("chunks of 29", EngineConfig { max_num_batched_tokens: 29, ..config() }),
                ("unified", EngineConfig { kv_layout: KvLayout::Unified, ..config() }),
                ("one seat", EngineConfig { max_num_seqs: 1, ..config() }),
            ] {
                let config = EngineConfig { async_scheduling: Some(depth), ..config };
                check(&format!("{folder}, {name}, depth {depth}"), model.as_ref(), &golden, config);
            }
            // Blocks for one long request and a bit: the newest are preempted and computed again.
            let blocks = (golden.ids.len() + golden.greedy.len()).div_ceil(16) + 8;
            let tight =
                EngineConfig { kv_blocks: Some(blocks.max(16)), async_scheduling: Some(depth), ..config() };
            let counts = check(&format!("{folder}, tight, depth {depth}"), model.as_ref(), &golden, tight);
            assert!(counts.preemptions > 0, "{folder}: {blocks} blocks were enough");
        }
    }
}

#[test]
fn drafts_change_the_steps_and_not_the_tokens() {
    for folder in FOLDERS {
        let model = load(folder);
        let golden = Golden::read(&fixture(folder));
        let drafting = EngineConfig { speculation: Speculation::Ngram, ngram_min: 1, ..config() };
        let counts = check(&format!("{folder}, drafting"), model.as_ref(), &golden, drafting);
        if folder == "hybrid-tiny-predictable" {
            assert!(counts.accepted > 20, "{counts:?}");
        }
    }
}

#[test]
fn logits_and_log_probabilities_equal_the_golden_ones() {
    for folder in FOLDERS {
        let model = load(folder);
        let golden = Golden::read(&fixture(folder));
        let tokens = golden.ids.len();
        let right = &golden.logits[golden.logits.len() - 8..];
        for budget in [256, 37] {
            let config = EngineConfig { max_num_batched_tokens: budget, ..config() };
            let mut engine = engine(model.as_ref(), config);
            assert_close(folder, &engine.logits(&golden.ids, 8).unwrap(), right);
            let found = engine.logprobs(&golden.ids).unwrap();
            assert_eq!(found.len(), tokens - 1);
            // Row r of the golden logits follows token `first` + r; the last row has no next token.
            for (row, logits) in golden.logits[..golden.logits.len() - 1].iter().enumerate() {
                let position = golden.first + row;
                let expected = log_probability(logits, golden.ids[position + 1]).unwrap();
                let error = (found[position] - expected).abs();
                assert!(error < 2e-3, "{folder}, position {position}: {error}");
            }
            assert_eq!(engine.held(), (0, 0));
        }
    }
}
