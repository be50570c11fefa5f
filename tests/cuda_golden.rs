//! The CUDA device against golden checkpoints and against the CPU device: every family, any way to cut a prompt, alone and
//! in company, slots reused, graphs on. Skipped loudly where there is no usable GPU.

mod cpu_rig;
mod skip;

use skip::skip;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use cpu_rig::{Golden, Options, Part, Rig, SLOTS, fixture};
use inferwall::engine::clock::Clock;
use inferwall::engine::config::{CacheDtype, CpuMath, CudaKernels, EngineConfig, KvLayout, LastLayer};
use inferwall::engine::device::cpu::CpuDevice;
use inferwall::engine::device::cuda::CudaDevice;
use inferwall::engine::device::{
    CachePlan, Device, Input, LoadOptions, Model, SequenceStep, Session, Step, Ticket, Want,
};
use inferwall::engine::model::layout::ModelLayout;
use inferwall::engine::model::synthetic::SyntheticWeights;
use inferwall::engine::model::weights::WeightSource;
use inferwall::engine::model::{ModelRef, OpenOptions, open, synthetic_layout};
use inferwall::engine::request::{RequestId, SamplingParams};

const FOLDERS: [&str; 5] =
    ["hybrid-tiny", "hybrid-tiny-predictable", "dense-qwen2-tiny", "dense-qwen3-tiny", "dense-llama-tiny"];

/// Most root-mean-square error relative to the logits: three times what 16-bit transformers show on the fixture.
fn limit(name: &str) -> f64 {
    if name.contains("hybrid-tiny") { 1.9e-2 } else { 4.5e-3 }
}

/// The GPU, alone: while one session captures a graph, another must not wait for the whole GPU.
fn device(test: &str) -> Option<(CudaDevice, MutexGuard<'static, ()>)> {
    static ALONE: Mutex<()> = Mutex::new(());
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    match CudaDevice::new(0) {
        Ok(device) => Some((device, alone)),
        Err(error) => {
            skip(test, format_args!("{error}; {}", error.hint()));
            None
        }
    }
}

fn options() -> Options {
    Options { kv_dtype: CacheDtype::F16, max_drafts: 0, last_layer: LastLayer::Outputs, ..Options::default() }
}

fn load(device: &mut CudaDevice, layout: &ModelLayout, source: &WeightSource) -> Box<dyn Model> {
    let load = LoadOptions { cpu_math: CpuMath::F32, threads: None };
    device.load(layout, source, &load, &mut |_| {}).unwrap()
}

fn rig(device: &mut CudaDevice, folder: &Path) -> Rig {
    let opened = open(&ModelRef::Folder(folder.to_path_buf()), &OpenOptions::default()).unwrap();
    Rig::of_model(load(device, &opened.layout, &opened.weights), options())
}

/// Root mean square of the difference over that of the reference.
fn error(found: &[Vec<f32>], expected: &[Vec<f32>]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let (mut difference, mut size) = (0.0, 0.0);
    for (f, e) in found.iter().flatten().zip(expected.iter().flatten()) {
        difference += f64::from(f - e).powi(2);
        size += f64::from(*e).powi(2);
    }
    (difference / size).sqrt()
}

fn assert_near(what: &str, found: &[Vec<f32>], expected: &[Vec<f32>], limit: f64) {
    let error = error(found, expected);
    println!("{what}: {error:.2e} of {limit:.1e}");
    assert!(error <= limit, "{what}: relative error {error:.3e}, allowed {limit:.1e}");
}

#[test]
fn whole_prompts_match() {
    let Some((mut device, _alone)) = device("whole_prompts_match") else { return };
    for name in FOLDERS {
        let (mut rig, golden) = (rig(&mut device, &fixture(name)), Golden::read(&fixture(name)));
        let found = rig.logits(0, &golden.ids, &[golden.ids.len()]);
        assert_near(name, &found[golden.first..], &golden.logits, limit(name));
    }
}

#[test]
fn any_split_matches() {
    let Some((mut device, _alone)) = device("any_split_matches") else { return };
    for name in FOLDERS {
        let (mut rig, golden) = (rig(&mut device, &fixture(name)), Golden::read(&fixture(name)));
        for pieces in
            [&[1][..], &[2], &[3], &[70, 80], &[64, 86], &[63, 1, 65, 21], &[17], &[100, 1], &[5, 13]]
        {
            let found = rig.logits(1, &golden.ids, pieces);
            assert_near(&format!("{name} {pieces:?}"), &found[golden.first..], &golden.logits, limit(name));
        }
    }
}

#[test]
fn company_shows_no_more_than_rounding() {
    let Some((mut device, _alone)) = device("company_shows_no_more_than_rounding") else { return };
    for name in FOLDERS {
        let (mut rig, golden) = (rig(&mut device, &fixture(name)), Golden::read(&fixture(name)));
        let others: Vec<u32> = golden.ids.iter().chain(&golden.greedy).copied().collect();
        rig.logits(2, &others[..50], &[50]);
        let mut found = Vec::new();
        let first = rig.run(&[Part::logits(2, 50, &others[50..51]), Part::logits(1, 0, &golden.ids[..40])]);
        found.extend(first.sequences[1].logits.clone());
        for at in 40..golden.ids.len() {
            let step = rig.run(&[
                Part::logits(3, 0, &others[at..at + 20]),
                Part::logits(2, at + 11, &others[at + 11..at + 12]),
                Part::logits(1, at, &golden.ids[at..at + 1]),
            ]);
            found.extend(step.sequences[2].logits.clone());
        }
        assert_near(name, &found[golden.first..], &golden.logits, limit(name));
    }
}

/// Steps of which few rows are wanted, so that the last layer runs on those alone: at the end of a prompt, of two prompts,
/// beside a decode token, and behind a piece of which nothing is wanted.
#[test]
fn few_wanted_rows_match() {
    let Some((mut device, _alone)) = device("few_wanted_rows_match") else { return };
    for name in FOLDERS {
        let (mut rig, golden) = (rig(&mut device, &fixture(name)), Golden::read(&fixture(name)));
        let end = golden.ids.len();
        let last = |rows: usize| &golden.logits[end - golden.first - rows..];
        let logits = |rows| Want::Logits { rows };
        for rows in [1, 3, 8] {
            let step = rig.run(&[Part::new(0, 0, &golden.ids, logits(rows))]);
            let found = &step.sequences[0].logits;
            assert_near(&format!("{name}, last {rows}"), found, last(rows), limit(name));
        }
        let start = end - 30;
        let (front, back) = golden.ids.split_at(start);
        rig.run(&[Part::new(1, 0, front, Want::Nothing), Part::new(2, 0, front, Want::Nothing)]);
        rig.run(&[Part::new(2, start, &back[..back.len() - 1], Want::Nothing)]);
        let step = rig.run(&[
            Part::new(2, end - 1, &back[back.len() - 1..], logits(1)),
            Part::new(1, start, back, logits(2)),
            Part::new(0, 0, &golden.ids, Want::Nothing),
        ]);
        for (sequence, rows) in step.sequences.iter().zip([1, 2]) {
            assert_near(&format!("{name}, in pieces"), &sequence.logits, last(rows), limit(name));
        }
    }
}

/// Decodes `count` tokens greedily for the slots with `depth` steps in flight, from prompts already in the cache.
fn decode(
    session: &mut dyn Session,
    rig_blocks: &[Vec<u32>],
    hybrid: bool,
    context: usize,
    first: &[u32],
    count: usize,
    depth: usize,
) -> Vec<Vec<u32>> {
    let mut tokens: Vec<Vec<u32>> = first.iter().map(|&token| vec![token]).collect();
    let mut in_flight: Vec<Ticket> = Vec::new();
    let greedy = SamplingParams::default();
    for step in 0..count - 1 + depth {
        if step < count - 1 {
            let known: Vec<[u32; 1]> = tokens.iter().map(|tokens| [tokens[tokens.len() - 1]]).collect();
            let sequences = (0..first.len())
                .map(|i| {
                    let input = match in_flight.last() {
                        Some(&ticket) => Input::SampledBy { ticket, sequence: i },
                        None => Input::Known(&known[i]),
                    };
                    SequenceStep {
                        request: RequestId(i as u64),
                        state_slot: hybrid.then_some(i as u32),
                        blocks: &rig_blocks[i],
                        context_tokens: context + step,
                        input,
                        drafts: &[],
                        want: Want::Sample { seed: 0, position: (context + step + 1) as u64, params: greedy },
                    }
                })
                .collect();
            in_flight.push(session.submit(&Step { sequences, trace: false }).unwrap());
        }
        if in_flight.len() >= depth || step >= count - 1 {
            if in_flight.is_empty() {
                break;
            }
            let output = session.wait(in_flight.remove(0)).unwrap();
            for (tokens, sequence) in tokens.iter_mut().zip(&output.sequences) {
                tokens.extend(&sequence.tokens);
            }
        }
    }
    tokens
}

#[test]
fn greedy_text_matches_with_graphs_and_steps_in_flight() {
    let Some((mut device, _alone)) = device("greedy_text_matches_with_graphs_and_steps_in_flight") else {
        return;
    };
    for name in FOLDERS {
        let golden = Golden::read(&fixture(name));
        for depth in [1, 2, 3] {
            let mut rig = rig(&mut device, &fixture(name));
            let hybrid = rig.model.layout().spec.is_hybrid();
            let want = Want::Sample {
                seed: 0,
                position: golden.ids.len() as u64,
                params: SamplingParams::default(),
            };
            let mut first = Vec::new();
            for slot in 0..5 {
                first.extend(rig.run(&[Part::new(slot, 0, &golden.ids, want)]).sequences.remove(0).tokens);
            }
            let blocks: Vec<Vec<u32>> = (0..5).map(|slot| rig.blocks(slot)).collect();
            let all = decode(
                &mut *rig.session,
                &blocks,
                hybrid,
                golden.ids.len(),
                &first,
                golden.greedy.len(),
                depth,
            );
            for tokens in all {
                assert_eq!(tokens, golden.greedy, "{name} with {depth} in flight");
            }
        }
    }
}

/// A small hybrid with the published head sizes: 2 key and 4 value heads of 128, 4 query and 1 kv heads of 256.
fn geometry() -> (ModelLayout, WeightSource) {
    let mut layout = synthetic_layout("demo").unwrap();
    let spec = &mut layout.spec;
    spec.hidden_size = 256;
    spec.intermediate_size = 384;
    spec.vocab_size = 1003;
    spec.real_vocab_size = 1000;
    spec.layers.truncate(4);
    (spec.attention.heads, spec.attention.kv_heads) = (4, 1);
    let delta = spec.delta_net.as_mut().unwrap();
    (delta.key_heads, delta.value_heads) = (2, 4);
    let format = layout.embedding;
    layout.linears = layout.spec.linears().into_iter().map(|linear| (linear, format)).collect();
    let source = SyntheticWeights::new(layout.clone(), 5);
    (layout, Box::new(source))
}

#[test]
fn real_head_sizes_match_the_cpu_at_every_length() {
    let test = "real_head_sizes_match_the_cpu_at_every_length";
    for cuda_kernels in [CudaKernels::Auto, CudaKernels::Portable] {
        let Some((mut device, _alone)) = device(test) else { return };
        let portable = cuda_kernels == CudaKernels::Portable;
        let (layout, source) = geometry();
        let cpu_load = LoadOptions { cpu_math: CpuMath::F32, threads: None };
        let mut cpu = CpuDevice::new(None).unwrap();
        let cpu_model = cpu.load(&layout, &source, &cpu_load, &mut |_| {}).unwrap();
        let mut reference = Rig::of_model(cpu_model, Options { max_drafts: 0, ..Options::default() });
        let tokens: Vec<u32> = (0..200u32).map(|i| (i * 7919 + 13) % 1000).collect();
        let expected = reference.logits(0, &tokens, &[200]);
        let mut rig =
            Rig::of_model(load(&mut device, &layout, &source), Options { cuda_kernels, ..options() });
        for pieces in [&[200][..], &[1], &[64, 65, 71], &[9], &[130, 1], &[16, 17]] {
            let found = rig.logits(2, &tokens, pieces);
            assert_near(&format!("portable {portable} {pieces:?}"), &found, &expected, 4e-3);
        }
        // 400 rows in a step: products then add to the residual stream themselves.
        let both = rig.run(&[Part::logits(0, 0, &tokens), Part::logits(1, 0, &tokens)]);
        for sequence in &both.sequences {
            assert_near(&format!("portable {portable}, 400 rows"), &sequence.logits, &expected, 4e-3);
        }
        for length in (1..=130).step_by(if portable { 13 } else { 1 }) {
            let found = rig.logits(3, &tokens[..length], &[length]);
            let error = error(&found, &expected[..length]);
            assert!(error <= 4e-3, "length {length}: {error:.2e}");
        }
    }
}

#[test]
fn synthetic_weights_on_the_device_are_those_of_the_host() {
    let Some((device, _alone)) = device("synthetic_weights_on_the_device_are_those_of_the_host") else {
        return;
    };
    use inferwall::engine::device::cuda::upload::{Place, Uploader};
    use inferwall::engine::model::layout::WeightFormat;
    use inferwall::engine::model::synthetic;
    use inferwall::engine::model::weights::MatrixData;
    let gpu = device.gpu();
    let mut uploader = Uploader::new(gpu).unwrap();
    for format in [WeightFormat::F16, WeightFormat::Bf16] {
        let (rows, cols) = (48, 264);
        let buffer = gpu.allocate_zeroed(2 * 2 * rows as u64 * cols as u64).unwrap();
        let data = MatrixData::Synthetic { format, seed: 9, std: 0.05 };
        uploader.half("test", &data, rows, cols, &buffer, Place::in_turn(8, 1)).unwrap();
        uploader.finish().unwrap();
        let found = buffer.read::<u16>(0, 2 * rows * cols).unwrap();
        for row in 0..rows {
            for col in 0..cols {
                let mut value = synthetic::value(9, (row * cols + col) as u64, 0.05);
                if format == WeightFormat::Bf16 {
                    value = half::bf16::from_f32(value).to_f32();
                }
                let at = (row / 8 * 16 + row % 8 + 8) * cols + col;
                assert_eq!(found[at], half::f16::from_f32(value).to_bits(), "row {row} column {col}");
            }
        }
    }
}

#[test]
fn files_arrive_whole_through_the_staging_buffers_and_a_fault_names_its_module() {
    let Some((device, _alone)) =
        device("files_arrive_whole_through_the_staging_buffers_and_a_fault_names_its_module")
    else {
        return;
    };
    use inferwall::engine::device::cuda::upload::{Place, Uploader};
    use inferwall::engine::model::layout::WeightFormat;
    use inferwall::engine::model::weights::MatrixData;
    let gpu = device.gpu();
    let mut uploader = Uploader::new(gpu).unwrap();
    // More than one staging buffer holds, twice, so that buffers come round again; bf16 values that fp16 holds.
    let (rows, cols) = (20_000, 1_000);
    let value = |at: usize| half::bf16::from_f32((at % 509) as f32 / 64.0 - 3.0);
    let mut bytes: Vec<u8> = (0..rows * cols).flat_map(|at| value(at).to_bits().to_le_bytes()).collect();
    let to = [0, 1].map(|_| gpu.allocate_zeroed(2 * (rows * cols) as u64).unwrap());
    for to in &to {
        let data = MatrixData::Dense { format: WeightFormat::Bf16, bytes: &bytes };
        uploader.half("whole", &data, rows, cols, to, Place::together(0)).unwrap();
    }
    uploader.finish().unwrap();
    for to in &to {
        let found = to.read::<u16>(0, rows * cols).unwrap();
        let wrong =
            (0..rows * cols).find(|&at| found[at] != half::f16::from_f32(value(at).to_f32()).to_bits());
        assert_eq!(wrong, None);
    }
    // One NaN, and one number that fp16 does not hold.
    let (nan, large) = (half::bf16::NAN.to_bits(), half::bf16::from_f32(1e6).to_bits());
    bytes[14..16].copy_from_slice(&nan.to_le_bytes());
    bytes[39_000_000..39_000_002].copy_from_slice(&large.to_le_bytes());
    let data = MatrixData::Dense { format: WeightFormat::Bf16, bytes: &bytes };
    uploader.half("broken", &data, rows, cols, &to[0], Place::together(0)).unwrap();
    let error = uploader.finish().unwrap_err();
    assert!(error.to_string().contains("broken: 2 of 20000000 elements"), "{error}");
    uploader.finish().unwrap();
}

#[test]
fn a_gpu_that_is_full_is_an_error() {
    let Some((mut device, _alone)) = device("a_gpu_that_is_full_is_an_error") else { return };
    let (layout, source) = geometry();
    let model = load(&mut device, &layout, &source);
    let plan = CachePlan {
        layout: KvLayout::Split,
        block_tokens: 16,
        kv_blocks: 1 << 30,
        state_slots: 4,
        kv_dtype: CacheDtype::F16,
        state_dtype: CacheDtype::F32,
        state_write_interval: 1,
        last_layer: LastLayer::Outputs,
        max_model_len: 256,
        max_num_seqs: SLOTS,
        max_num_batched_tokens: 256,
        max_drafts: 0,
    };
    let error = match model.open(&plan, &EngineConfig::default(), &Clock::real()) {
        Ok(_) => panic!("a cache of many terabytes was allocated"),
        Err(error) => error,
    };
    assert!(error.to_string().contains("allocating") && !error.hint().is_empty(), "{error}");
}

/// Twelve sequences whose states are written every few tokens, through all that may come between: a prompt's chunk in the
/// same step, a step of few sequences, a chunk behind single tokens, a slot that starts anew.
#[test]
fn states_left_behind_follow_the_sequences() {
    let Some((mut device, _alone)) = device("states_left_behind_follow_the_sequences") else { return };
    let (layout, source) = geometry();
    let cpu_load = LoadOptions { cpu_math: CpuMath::F32, threads: None };
    let cpu_model = CpuDevice::new(None).unwrap().load(&layout, &source, &cpu_load, &mut |_| {}).unwrap();
    let mut reference = Rig::of_model(cpu_model, Options { max_drafts: 0, ..Options::default() });
    for interval in [1, 3, 8] {
        let deferring = Options { state_write_interval: interval, ..options() };
        let mut rig = Rig::of_model(load(&mut device, &layout, &source), deferring);
        let text = |slot: usize| -> Vec<u32> {
            (0..100).map(|i| (i * 7919 + 131 * slot as u32 + 13) % 1000).collect()
        };
        let texts: Vec<Vec<u32>> = (0..SLOTS).map(text).collect();
        let mut lengths = [0usize; SLOTS];
        let mut step = |what: &str, parts: &[(usize, usize)], lengths: &mut [usize; SLOTS]| {
            let parts: Vec<Part> = parts
                .iter()
                .map(|&(slot, tokens)| {
                    let context = lengths[slot];
                    lengths[slot] += tokens;
                    Part::logits(slot, context, &texts[slot][context..context + tokens])
                })
                .collect();
            let (found, expected) = (rig.run(&parts), reference.run(&parts));
            for (part, (found, expected)) in parts.iter().zip(found.sequences.iter().zip(&expected.sequences))
            {
                let error = error(&found.logits, &expected.logits);
                // Twice what 200 rows show together, as one row may.
                assert!(error < 8e-3, "interval {interval}, {what}, slot {}: {error:.2e}", part.slot);
            }
        };
        let all = |tokens: usize| (0..SLOTS).map(|slot| (slot, tokens)).collect::<Vec<_>>();
        let prompts: Vec<_> = (0..SLOTS).map(|slot| (slot, 1 + 3 * slot)).collect();
        step("prompts", &prompts, &mut lengths);
        for _ in 0..19 {
            step("tokens", &all(1), &mut lengths);
        }
        step("three tokens", &[(2, 1), (7, 1), (11, 1)], &mut lengths);
        for _ in 0..3 {
            step("tokens after three", &all(1), &mut lengths);
        }
        let mut mixed = all(1);
        mixed[5].1 = 20;
        step("a chunk beside tokens", &mixed, &mut lengths);
        step("tokens after a chunk", &all(1), &mut lengths);
        step("drafts' worth of tokens", &all(3), &mut lengths);
        lengths[4] = 0;
        for _ in 0..10 {
            step("a slot anew", &all(1), &mut lengths);
        }
    }
}

/// More tokens in a step than the convolution's window has room for beside the three that are read, where few drafts make it
/// short: the last of them are kept, and nobody else's are written over.
#[test]
fn short_tails_match_where_the_window_is_short() {
    let Some((mut device, _alone)) = device("short_tails_match_where_the_window_is_short") else { return };
    let (layout, source) = geometry();
    let vocab = layout.spec.real_vocab_size as u32;
    let text: Vec<u32> = (0..90).map(|i| (i * 7919 + 13) % vocab).collect();
    let expected = Rig::of_model(load(&mut device, &layout, &source), options()).logits(0, &text, &[90]);
    for max_drafts in [1, 2, 5] {
        let drafting = Options { state_write_interval: 8, max_drafts, ..options() };
        let mut rig = Rig::of_model(load(&mut device, &layout, &source), drafting);
        for pieces in [&[20, 8][..], &[1, 5, 8, 3, 1, 7], &[3, 4, 1, 1, 6, 8, 2]] {
            let error = error(&rig.logits(1, &text, pieces), &expected);
            // As in `states_left_behind_follow_the_sequences`.
            assert!(error < 8e-3, "{max_drafts} drafts, {pieces:?}: {error:.2e}");
        }
    }
}

/// Drafts right and wrong, in turns, for sequences of different lengths: what stays of them, and nothing else, is what the
/// next logits are made from.
#[test]
fn rejected_drafts_leave_no_mark() {
    let Some((mut device, _alone)) = device("rejected_drafts_leave_no_mark") else { return };
    let (layout, source) = geometry();
    let dense = open(&ModelRef::Folder(fixture("dense-qwen3-tiny")), &OpenOptions::default()).unwrap();
    for (what, layout, source) in [("hybrid", &layout, &source), ("dense", &dense.layout, &dense.weights)] {
        let vocab = layout.spec.real_vocab_size as u32;
        let mut plain = Rig::of_model(load(&mut device, layout, source), options());
        for (interval, most, count) in [(1, 1, 2), (3, 5, 9), (8, 16, 12)] {
            let deferring = if layout.spec.is_hybrid() { interval } else { 1 };
            let drafting = Options { state_write_interval: deferring, max_drafts: most, ..options() };
            let mut rig = Rig::of_model(load(&mut device, layout, source), drafting);
            let text =
                |slot: u32| -> Vec<u32> { (0..130).map(|i| (i * 7919 + 131 * slot + 13) % vocab).collect() };
            let texts: Vec<Vec<u32>> = (0..count as u32).map(text).collect();
            let expected: Vec<Vec<Vec<f32>>> =
                texts.iter().enumerate().map(|(slot, text)| plain.logits(slot, text, &[130])).collect();
            // Prompts of one token and more: short ones and chunks.
            let mut lengths: Vec<usize> = (0..count).map(|slot| 1 + 3 * slot).collect();
            for slot in 0..count {
                rig.run(&[Part::new(slot, 0, &texts[slot][..lengths[slot]], Want::Nothing)]);
            }
            let (mut turn, mut kept, mut refused) = (0, 0, 0);
            while lengths.iter().all(|&length| length + most + 2 < 110) {
                turn += 1;
                // The first `right` drafts are the text's own, the next one is not.
                let rights: Vec<usize> = (0..count).map(|slot| (turn * 3 + slot) % (most + 2)).collect();
                let drafts: Vec<Vec<u32>> = (0..count)
                    .map(|slot| {
                        let next = &texts[slot][lengths[slot] + 1..];
                        let wrong = |i: usize| u32::from(i >= rights[slot]);
                        (0..(turn + slot) % (most + 1)).map(|i| (next[i] + wrong(i)) % vocab).collect()
                    })
                    .collect();
                let parts: Vec<Part> = (0..count)
                    .map(|slot| {
                        let tokens = &texts[slot][lengths[slot]..=lengths[slot]];
                        let want = Want::Logits { rows: 1 + drafts[slot].len() };
                        Part { drafts: &drafts[slot], ..Part::new(slot, lengths[slot], tokens, want) }
                    })
                    .collect();
                let output = rig.run(&parts);
                for (slot, found) in output.sequences.iter().enumerate() {
                    let accepted = drafts[slot].len().min(rights[slot]);
                    let rows = lengths[slot]..lengths[slot] + 1 + accepted;
                    let error = error(&found.logits[..=accepted], &expected[slot][rows]);
                    // As in `states_left_behind_follow_the_sequences`; the tiny fixture's own limit is wider.
                    let limit = if what == "hybrid" { 8e-3 } else { 1.2e-2 };
                    assert!(
                        error < limit,
                        "{what}, interval {interval}, turn {turn}, slot {slot}: {error:.2e}"
                    );
                    lengths[slot] += 1 + accepted;
                    kept += accepted;
                    refused += drafts[slot].len() - accepted;
                }
            }
            assert!(turn > 3 && kept > 0 && refused > 0, "{turn} steps, {kept} kept, {refused} refused");
            // A chunk finds the states brought up to date.
            let (from, to) = (lengths[0], lengths[0] + 20);
            let found = rig.run(&[Part::logits(0, from, &texts[0][from..to])]);
            let limit = if what == "hybrid" { 8e-3 } else { 1.2e-2 };
            assert_near(what, &found.sequences[0].logits, &expected[0][from..to], limit);
        }
    }
}

/// A draft is accepted if and only if it is the token that is sampled in its place.
#[test]
fn drafts_are_kept_up_to_the_first_that_is_not_sampled() {
    let Some((mut device, _alone)) = device("drafts_are_kept_up_to_the_first_that_is_not_sampled") else {
        return;
    };
    let (layout, source) = geometry();
    let params = |temperature| SamplingParams { temperature, ..SamplingParams::default() };
    for temperature in [0.0, 0.8] {
        let options = Options { state_write_interval: 8, max_drafts: 5, ..options() };
        let mut rig = Rig::of_model(load(&mut device, &layout, &source), options);
        let prompt: Vec<u32> = (0..20).map(|i| (i * 7919 + 13) % 1000).collect();
        let want = |position: usize| Want::Sample {
            seed: 7,
            position: position as u64,
            params: params(temperature),
        };
        // What comes after the prompt, token by token; slot 1 then goes the same way with drafts.
        let mut text = prompt.clone();
        text.push(rig.run(&[Part::new(0, 0, &prompt, want(20))]).sequences[0].tokens[0]);
        while text.len() < 40 {
            let at = text.len();
            text.push(rig.run(&[Part::new(0, at - 1, &text[at - 1..], want(at))]).sequences[0].tokens[0]);
        }
        let first = rig.run(&[Part::new(1, 0, &prompt, want(20))]).sequences[0].tokens[0];
        assert_eq!(first, text[20]);
        let (mut length, mut accepted) = (20, 0);
        while length + 6 < 40 {
            let mut drafts = text[length + 1..length + 6].to_vec();
            drafts[length % 5] = (drafts[length % 5] + 1) % 1000;
            let part =
                Part { drafts: &drafts, ..Part::new(1, length, &text[length..=length], want(length + 1)) };
            let found = &rig.run(&[part]).sequences[0];
            let same = drafts.iter().zip(&found.tokens).take_while(|(draft, token)| draft == token).count();
            assert_eq!(
                (found.accepted, found.tokens.len()),
                (same, same + 1),
                "{drafts:?}: {:?}",
                found.tokens
            );
            assert!(same < 5, "the draft that was changed was kept");
            accepted += same;
            // (A near-tie may end otherwise beside drafts: go on with the text that slot 0 wrote.)
            length += 1 + same
                .min(found.tokens.iter().zip(&text[length + 1..]).take_while(|(a, b)| a == b).count());
        }
        assert!(accepted > 0, "no draft of the text's own was kept");
    }
}
