//! Decode kernels on the GPU against plain CPU loops, on random inputs at odd sizes. Skipped loudly where there is no usable
//! GPU.

mod skip;

use half::f16;
use inferwall::engine::config::CacheDtype;
use inferwall::engine::device::cuda::batch::{Batch, Header};
use inferwall::engine::device::cuda::driver::Gpu;
use inferwall::engine::device::cuda::kernels::attention::{AttentionRow, LayerCache, RowAttention, StepRows};
use inferwall::engine::device::cuda::kernels::delta::{Delta, DeltaSequence, StatePools};
use inferwall::engine::device::cuda::kernels::norm::{Addend, Norms};
use inferwall::engine::device::cuda::kernels::sample::{Logits, SampleRow, Samplers, Sink};
use inferwall::engine::device::cuda::launch::Stream;
use inferwall::engine::device::cuda::matrix::{Matrix, MatrixFormat};
use inferwall::engine::device::cuda::weights::DeltaWeights;
use inferwall::engine::model::spec::{Attention, DeltaNet, Rope, RopeScaling};
use inferwall::engine::request::SamplingParams;
use inferwall::engine::sampling::{Sampler, log_probability};
use rand::{Rng, SeedableRng, seq::SliceRandom};
use rand_chacha::ChaCha8Rng;
use skip::skip;

fn gpu(test: &str) -> Option<Gpu> {
    match Gpu::open(0) {
        Ok(gpu) => Some(gpu),
        Err(error) => {
            skip(test, format_args!("{error}; {}", error.hint()));
            None
        }
    }
}

fn noise(rng: &mut ChaCha8Rng, count: usize, scale: f32) -> Vec<f32> {
    (0..count).map(|_| scale * (0..4).map(|_| rng.random_range(-0.87..0.87f32)).sum::<f32>()).collect()
}

fn halves(values: &[f32]) -> Vec<f16> {
    values.iter().map(|&value| f16::from_f32(value)).collect()
}

fn relative_error(found: &[f32], expected: &[f32]) -> f64 {
    let square = |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v).powi(2)).sum::<f64>();
    let difference = square(&mut found.iter().zip(expected).map(|(f, e)| f - e));
    (difference / square(&mut expected.iter().copied())).sqrt()
}

#[test]
fn sampled_tokens_are_those_of_the_reference() {
    let Some(gpu) = gpu("sampled_tokens_are_those_of_the_reference") else { return };
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    let (rows, pitch, vocab) = (60, 5008, 5003);
    let mut logits = noise(&mut rng, rows * pitch, 4.0);
    // Equal logits, so that ties are met; and padding that would win.
    for at in (0..rows * pitch).step_by(3) {
        logits[at] = (logits[at] * 2.0).round() / 2.0;
    }
    for row in 0..rows {
        logits[row * pitch + vocab..(row + 1) * pitch].fill(1e9);
    }
    let choices = [
        (0.0, 0, 1.0),
        (1.0, 0, 1.0),
        (0.7, 20, 1.0),
        (1.3, 0, 0.9),
        (0.9, 40, 0.8),
        (0.05, 5, 0.5),
        (2.0, 1, 1.0),
    ];
    let params: Vec<SamplingParams> = (0..rows)
        .map(|row| {
            let (temperature, top_k, top_p) = choices[row % choices.len()];
            SamplingParams { temperature, top_k, top_p }
        })
        .collect();
    let samples: Vec<SampleRow> =
        params.iter().zip(0u64..).map(|(params, row)| SampleRow::new(params, 11 * row, 7 + row)).collect();
    let stream = Stream::new(&gpu).unwrap();
    let samplers = Samplers::new(&gpu, rows).unwrap();
    let on_device = gpu.upload(&logits).unwrap();
    let samples_on_device = gpu.upload(&samples).unwrap();
    let header = gpu.upload(&[Header { ring_offset: 3, ..Header::default() }]).unwrap();
    let ring = gpu.allocate_zeroed(4 * (rows as u64 + 3)).unwrap();
    let host = gpu.allocate_zeroed(4 * (rows as u64 + 3)).unwrap();
    let sink = Sink { header: header.pointer(), ring: ring.pointer(), host: host.pointer() };
    let view = Logits { at: on_device.pointer(), pitch, vocab };
    // SAFETY: all buffers hold `rows` rows.
    unsafe { samplers.sample(&stream, rows, view, samples_on_device.pointer(), sink).unwrap() };
    stream.synchronize().unwrap();
    let found = ring.read::<u32>(12, rows).unwrap();
    assert_eq!(found, host.read::<u32>(12, rows).unwrap());
    let mut sampler = Sampler::default();
    let mut different = 0;
    for row in 0..rows {
        let logits = &logits[row * pitch..(row + 1) * pitch];
        let expected = sampler.sample(logits, vocab, &params[row], 11 * row as u64, 7 + row as u64).unwrap();
        if params[row].temperature == 0.0 || params[row].top_k == 1 {
            assert_eq!(found[row], expected, "greedy row {row}");
        }
        different += usize::from(found[row] != expected);
    }
    // A draw that falls on the border of two tokens may go either way by rounding.
    assert!(different <= 1, "{different} of {rows} rows differ");

    // SAFETY: as above.
    unsafe { samplers.greedy(&stream, rows, view, sink).unwrap() };
    stream.synchronize().unwrap();
    let greedy = ring.read::<u32>(12, rows).unwrap();
    let mut bad = logits.clone();
    bad[5 * pitch + 77] = f32::NAN;
    bad[9 * pitch + 5002] = f32::INFINITY;
    let bad_on_device = gpu.upload(&bad).unwrap();
    let bad_view = Logits { at: bad_on_device.pointer(), ..view };
    // SAFETY: as above.
    unsafe { samplers.greedy(&stream, rows, bad_view, sink).unwrap() };
    stream.synchronize().unwrap();
    let flagged = host.read::<u32>(12, rows).unwrap();
    for row in 0..rows {
        let logits = &logits[row * pitch..row * pitch + vocab];
        assert_eq!(greedy[row], inferwall::engine::sampling::argmax(logits).unwrap(), "row {row}");
        let expected = if row == 5 || row == 9 { u32::MAX } else { greedy[row] };
        assert_eq!(flagged[row], expected, "row {row}");
    }

    let targets: Vec<u32> = (0..rows as u32).map(|row| row * 83 % vocab as u32).collect();
    let targets_on_device = gpu.upload(&targets).unwrap();
    let result = gpu.allocate_zeroed(4 * rows as u64).unwrap();
    // SAFETY: as above.
    unsafe {
        samplers.log_probability(&stream, rows, view, targets_on_device.pointer(), result.pointer()).unwrap();
    }
    stream.synchronize().unwrap();
    for (row, found) in result.read::<f32>(0, rows).unwrap().into_iter().enumerate() {
        let expected = log_probability(&logits[row * pitch..row * pitch + vocab], targets[row]).unwrap();
        assert!(
            (found - expected).abs() < 1e-4 * expected.abs().max(1.0),
            "row {row}: {found} and {expected}"
        );
    }
}

#[test]
fn norms_match() {
    let Some(gpu) = gpu("norms_match") else { return };
    let mut rng = ChaCha8Rng::seed_from_u64(4);
    let stream = Stream::new(&gpu).unwrap();
    for (hidden, rows, parts, selects) in [
        (2560, 1, 1, false),
        (2560, 33, 8, false),
        (2560, 32, 6, false),
        (2560, 9, 5, true),
        (2568, 2, 3, false),
        (4096, 8, 3, false),
        (4096, 1, 1, true),
        (4096, 32, 6, false),
        (264, 5, 3, false),
        (4104, 3, 6, false),
        (2560, 7, 2, true),
        (2560, 1029, 0, false),
        (4096, 1029, 0, false),
        (72, 1030, 0, false),
        (2560, 20, 0, true),
    ] {
        let norms = Norms::new(&gpu, hidden, 1e-6).unwrap();
        let before = noise(&mut rng, rows * hidden, 3.0);
        let sums = noise(&mut rng, (parts * rows * hidden).max(4), 1.0);
        let weight = noise(&mut rng, hidden, 1.0);
        let select: Vec<u32> = (0..rows as u32).rev().collect();
        let residual = gpu.upload(&before).unwrap();
        let [partials, weights] = [&sums, &weight].map(|values| gpu.upload(values).unwrap());
        let selected = gpu.upload(&select).unwrap();
        let normed = gpu.upload(&vec![f16::NAN; rows * hidden]).unwrap();
        let addend = Addend { partials: partials.pointer(), parts, stride: rows * hidden };
        let list = selects.then_some(selected.pointer());
        // SAFETY: all buffers hold `rows` rows.
        unsafe {
            let (residual, weight, normed) = (residual.pointer(), weights.pointer(), normed.pointer());
            norms.add(&stream, rows, residual, addend, weight, list, normed).unwrap();
        }
        stream.synchronize().unwrap();
        let mut after = before.clone();
        for part in sums.chunks(rows * hidden).take(parts) {
            after.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
        }
        let mut expected = Vec::new();
        for row in 0..rows {
            let x = &after[if selects { select[row] as usize } else { row } * hidden..][..hidden];
            let mean = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / hidden as f64;
            let scale = 1.0 / (mean + 1e-6).sqrt();
            expected.extend(x.iter().zip(&weight).map(|(&x, &w)| (f64::from(x) * scale) as f32 * w));
        }
        let found = normed.read::<f16>(0, rows * hidden).unwrap();
        let found: Vec<f32> = found.into_iter().map(f16::to_f32).collect();
        let error = relative_error(&found, &expected);
        assert!(error < 4e-4, "{rows} rows of {hidden}, {parts} parts: {error:.2e}");
        let kept = residual.read::<f32>(0, rows * hidden).unwrap();
        assert_eq!(kept, if selects { before } else { after }, "{rows} rows of {hidden}, {parts} parts");
    }
}

/// Attention of `lengths.len()` rows with those many tokens each.
fn attention_error(
    gpu: &Gpu,
    heads: usize,
    kv_heads: usize,
    d: usize,
    block_tokens: usize,
    gated: bool,
    lengths: &[usize],
) -> f64 {
    let mut rng = ChaCha8Rng::seed_from_u64((d + heads) as u64);
    let rope = Rope { theta: 1e4, rotary_dim: d / 2, scaling: RopeScaling::None };
    let shape =
        Attention { heads, kv_heads, head_dim: d, output_gate: gated, qk_norm: false, qkv_bias: false, rope };
    let rows = lengths.len();
    let q_width = heads * d * if gated { 2 } else { 1 };
    let pitch = q_width + 2 * kv_heads * d;
    let table_pitch = lengths.iter().max().unwrap().div_ceil(block_tokens);
    let blocks = rows * table_pitch;
    let qkv = halves(&noise(&mut rng, rows * pitch, 1.0));
    let query = halves(&noise(&mut rng, rows * heads * d, 1.0));
    let mut keys = halves(&noise(&mut rng, blocks * block_tokens * kv_heads * d, 1.0));
    let mut values = halves(&noise(&mut rng, blocks * block_tokens * kv_heads * d, 1.0));
    let mut table: Vec<u32> = (0..blocks as u32).collect();
    table.shuffle(&mut rng);
    let at = |table: &[u32], row: usize, token: usize, head: usize| {
        let block = table[row * table_pitch + token / block_tokens] as usize;
        ((block * kv_heads + head) * block_tokens + token % block_tokens) * d
    };
    let mut expected = vec![0.0; rows * heads * d];
    for (row, &length) in lengths.iter().enumerate() {
        // What lies behind the last token may be anything.
        for token in length..table_pitch * block_tokens {
            for head in 0..kv_heads {
                let place = at(&table, row, token, head);
                keys[place..place + d].fill(f16::NAN);
                values[place..place + d].fill(f16::NAN);
            }
        }
        for head in 0..heads {
            let q = &query[(row * heads + head) * d..][..d];
            let kv = head / (heads / kv_heads);
            let scores: Vec<f64> = (0..length)
                .map(|token| {
                    let k = &keys[at(&table, row, token, kv)..][..d];
                    q.iter().zip(k).map(|(q, k)| q.to_f64() * k.to_f64()).sum::<f64>() / (d as f64).sqrt()
                })
                .collect();
            let top = scores.iter().copied().fold(f64::MIN, f64::max);
            let sum: f64 = scores.iter().map(|score| (score - top).exp()).sum();
            let out = &mut expected[(row * heads + head) * d..][..d];
            let mut exact = vec![0.0f64; d];
            for (token, score) in scores.iter().enumerate() {
                let v = &values[at(&table, row, token, kv)..][..d];
                let weight = (score - top).exp() / sum;
                exact.iter_mut().zip(v).for_each(|(out, v)| *out += weight * v.to_f64());
            }
            for (i, (out, exact)) in out.iter_mut().zip(exact).enumerate() {
                let gate =
                    if gated { qkv[row * pitch + head * 2 * d + d + i].to_f64() } else { f64::INFINITY };
                *out = (exact / (1.0 + (-gate).exp())) as f32;
            }
        }
    }
    let attention = RowAttention::new(gpu, &shape, 1e-6, block_tokens, pitch, 16).unwrap();
    let stream = Stream::new(gpu).unwrap();
    let rows_list: Vec<AttentionRow> = lengths
        .iter()
        .zip(0..)
        .map(|(&length, sequence)| AttentionRow { sequence, position: length as i32 - 1 })
        .collect();
    let [qkv, query, keys, values] = [&qkv, &query, &keys, &values].map(|halves| gpu.upload(halves).unwrap());
    let (table, list) = (gpu.upload(&table).unwrap(), gpu.upload(&rows_list).unwrap());
    let header = gpu.upload(&[Header { table_pitch: table_pitch as u32, ..Header::default() }]).unwrap();
    let out = gpu.upload(&vec![f16::NAN; rows * heads * d]).unwrap();
    let step = StepRows { rows: list.pointer(), table: table.pointer(), header: header.pointer() };
    let cache = LayerCache { keys: keys.pointer(), values: values.pointer() };
    // Twice: the second run finds the counters as the first left them, and reads all but the last token's tile early.
    for recent in [1 << 20, 1] {
        // SAFETY: all buffers hold `rows` rows and the blocks that the table names.
        unsafe {
            attention
                .attend(&stream, rows, 0, recent, query.pointer(), qkv.pointer(), cache, out.pointer(), step)
                .unwrap();
        }
    }
    stream.synchronize().unwrap();
    let found: Vec<f32> =
        out.read::<f16>(0, rows * heads * d).unwrap().into_iter().map(f16::to_f32).collect();
    relative_error(&found, &expected)
}

#[test]
fn attention_of_single_rows_matches() {
    let Some(gpu) = gpu("attention_of_single_rows_matches") else { return };
    let long = [1, 15, 16, 17, 64, 129, 300, 2500];
    let many: Vec<usize> = (0..90).map(|i| 1 + i * 37 % 350).collect();
    for (heads, kv_heads, d, block_tokens, gated, lengths) in [
        (16, 4, 256, 16, true, &long[..]),
        (16, 4, 256, 528, true, &[700, 1, 530]),
        (16, 4, 256, 16, true, &many),
        (28, 4, 128, 32, false, &long),
        (9, 3, 64, 16, false, &many),
        (32, 2, 128, 16, false, &[77, 1000]),
        (4, 2, 32, 16, true, &many),
    ] {
        let error = attention_error(&gpu, heads, kv_heads, d, block_tokens, gated, lengths);
        println!("{heads}/{kv_heads} heads of {d}, blocks of {block_tokens}: {error:.2e}");
        assert!(error < 1.5e-3, "{heads}/{kv_heads} heads of {d}, {} rows: {error:.2e}", lengths.len());
    }
}

const DELTA_SHAPE: DeltaNet =
    DeltaNet { key_heads: 16, value_heads: 32, key_dim: 128, value_dim: 128, conv_width: 4 };

/// Of what the recurrence takes; the products beside it are empty.
fn delta_weights(gpu: &Gpu, rng: &mut ChaCha8Rng, channels: usize) -> DeltaWeights {
    let mut upload = |count: usize, scale: f32| gpu.upload(&noise(rng, count, scale)).unwrap();
    DeltaWeights {
        input: Vec::new(),
        taps: upload(4 * channels, 0.5),
        a_log: upload(32, 1.0),
        dt_bias: upload(32, 1.0),
        norm: upload(128, 1.0),
        output: Matrix {
            format: MatrixFormat::F16,
            rows: 0,
            cols: 0,
            weights: gpu.allocate(16).unwrap(),
            scales: None,
            bias: None,
        },
    }
}

/// The decode step that leaves states unwritten for a few tokens, against the one that writes them with every token: over
/// steps that sequences join at different times, for several intervals, and after all states are settled.
#[test]
fn states_left_behind_match_states_written_with_every_token() {
    let Some(gpu) = gpu("states_left_behind_match_states_written_with_every_token") else { return };
    for (slots, real, padded) in [(40, 37, 40), (6, 5, 5), (1, 1, 1)] {
        states_left_behind(&gpu, slots, real, padded);
    }
}

fn states_left_behind(gpu: &Gpu, slots: i32, real: i32, padded: i32) {
    let mut rng = ChaCha8Rng::seed_from_u64(8);
    let shape = DELTA_SHAPE;
    let (channels, pitch) = (shape.conv_channels(), shape.conv_channels() + shape.value_size() + 64);
    let steps = 21;
    let mut order: Vec<i32> = (0..slots).collect();
    order.shuffle(&mut rng);
    let upload = |values: &[f32]| gpu.upload(values).unwrap();
    let weights = delta_weights(gpu, &mut rng, channels);
    let mixed: Vec<_> = (0..steps)
        .map(|_| gpu.upload(&halves(&noise(&mut rng, padded as usize * pitch, 1.0))).unwrap())
        .collect();
    let state = noise(&mut rng, slots as usize * shape.state_elements(), 0.1);
    let window = halves(&noise(&mut rng, slots as usize * 4 * channels, 1.0));
    let stream = Stream::new(gpu).unwrap();
    let floats = |halves: Vec<f16>| halves.into_iter().map(f16::to_f32).collect::<Vec<_>>();
    let size = padded as usize * shape.value_size();

    let mut expected: Vec<Vec<f32>> = Vec::new();
    for (interval, portable, rings) in
        [(1, true, false), (1, false, false), (3, false, false), (8, false, false), (8, false, true)]
    {
        let delta = Delta::new(gpu, &shape, CacheDtype::F32, 1e-6, pitch, 4, interval, portable).unwrap();
        let delta = if rings { delta.beside_rings() } else { delta };
        let pairs = gpu.allocate_zeroed(delta.slot_bytes().2.max(16) * slots as u64).unwrap();
        let (state, window) = (upload(&state), gpu.upload(&window).unwrap());
        let pools = StatePools { state: state.pointer(), window: window.pointer(), pairs: pairs.pointer() };
        let out = gpu.allocate_zeroed(2 * size as u64).unwrap();
        // The slots' states stand at contexts 0 to 6.
        let start = |i: i32| i * 5 % 7;
        let mut stored = vec![0; slots as usize];
        (0..real).for_each(|i| stored[order[i as usize] as usize] = start(i) as usize);
        let mut found = Vec::new();
        let mut run = |step: usize, settle: bool, stored: &mut [usize]| {
            let sequence = |i: i32| DeltaSequence {
                slot: if i < real { order[i as usize] } else { -1 },
                context: start(i) + step as i32,
                start: padded - 1 - i,
                count: 1,
                ..DeltaSequence::default()
            };
            let mut batch = Batch {
                sequences: (0..padded).map(sequence).collect(),
                short_sequences: padded as usize,
                ..Batch::default()
            };
            let most = delta.most_pending(1);
            assert_eq!(most, if portable { 0 } else { interval });
            batch.place_states(stored, if settle { 0 } else { most }, delta.capacity()).unwrap();
            let list = gpu.upload(&batch.sequences).unwrap();
            let group = (list.pointer(), padded as usize);
            // SAFETY: buffers hold all slots and rows that the sequences name.
            unsafe {
                if settle {
                    assert_eq!(batch.settle_from.is_some(), !portable);
                    delta.settle(&stream, pools, group).unwrap();
                } else {
                    let tokens = (padded as usize, 1);
                    let mixed = mixed[step].pointer();
                    delta.step(&stream, &weights, mixed, pools, out.pointer(), group, tokens).unwrap();
                }
            }
            stream.synchronize().unwrap();
            if !settle {
                found.push(floats(out.read::<f16>(0, size).unwrap()));
            }
        };
        (0..steps).for_each(|step| run(step, false, &mut stored));
        run(steps, true, &mut stored);
        found.push(state.read::<f32>(0, slots as usize * shape.state_elements()).unwrap());
        found.push(floats(window.read::<f16>(0, slots as usize * 4 * channels).unwrap()));
        if portable {
            expected = found;
            continue;
        }
        for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert!(
                found.iter().all(|value| value.is_finite()),
                "interval {interval}: {index} is not finite"
            );
            let error = relative_error(found, expected);
            // Outputs are halves, and their rounding differs now and then; states differ by the order of fp32 sums.
            let limit = if index < steps { 1e-3 } else { 3e-6 };
            println!("{real} sequences, interval {interval}, item {index}: {error:.2e}");
            assert!(
                error < limit,
                "interval {interval}: item {index} of {steps} outputs, state, window: {error:.2e}"
            );
        }
    }
}

/// New sequences among old ones, so that what prepares tokens runs ahead of the states that are still to come: the kernel for many
/// sequences against the one for few, again and again. A step here writes nothing that it reads.
#[test]
fn new_sequences_among_old_ones_disturb_nothing() {
    let Some(gpu) = gpu("new_sequences_among_old_ones_disturb_nothing") else { return };
    let (mut rng, shape) = (ChaCha8Rng::seed_from_u64(9), DELTA_SHAPE);
    if !Delta::defers(&gpu, &shape, CacheDtype::F32, false) {
        return skip("new_sequences_among_old_ones_disturb_nothing", "states are written with every token");
    }
    // Blocks that stay, one a multiprocessor, take the heads of all sequences nearly in turn: eight rounds.
    const ROUNDS: usize = 8;
    let multiprocessors = gpu.facts().multiprocessors as usize;
    let count = ROUNDS * multiprocessors / shape.value_heads;
    let (channels, pitch) = (shape.conv_channels(), shape.conv_channels() + shape.value_size() + 64);
    let delta = Delta::new(&gpu, &shape, CacheDtype::F32, 1e-6, pitch, 4, 8, false).unwrap();
    let weights = delta_weights(&gpu, &mut rng, channels);
    let mixed = gpu.upload(&halves(&noise(&mut rng, count * pitch, 1.0))).unwrap();
    let state = noise(&mut rng, count * shape.state_elements(), 0.1);
    let window = halves(&noise(&mut rng, count * 4 * channels, 1.0));
    // Key, correction, logarithm of the decay since the stored state.
    let mut pairs = Vec::new();
    for i in 0..count * shape.value_heads * delta.capacity() {
        pairs.extend(noise(&mut rng, 128, 0.1));
        pairs.extend(noise(&mut rng, 128, 1.0));
        pairs.extend([-0.1 * (i % delta.capacity() + 1) as f32, 0.0, 0.0, 0.0]);
    }
    let (state, window) = (gpu.upload(&state).unwrap(), gpu.upload(&window).unwrap());
    let pairs = gpu.upload(&pairs).unwrap();
    let pools = StatePools { state: state.pointer(), window: window.pointer(), pairs: pairs.pointer() };
    let size = count * shape.value_size();
    let out = gpu.allocate_zeroed(2 * size as u64).unwrap();
    let stream = Stream::new(&gpu).unwrap();
    let step = |sequences: &[DeltaSequence]| {
        let (list, count) = (gpu.upload(sequences).unwrap(), sequences.len());
        let (mixed, group) = (mixed.pointer(), (list.pointer(), count));
        // SAFETY: buffers hold all slots and rows that the sequences name.
        unsafe { delta.step(&stream, &weights, mixed, pools, out.pointer(), group, (count, 1)).unwrap() };
        stream.synchronize().unwrap();
        out.read::<f16>(0, size).unwrap().into_iter().map(f16::to_f32).collect::<Vec<_>>()
    };
    // The last round but two is of new ones, with contexts and tokens that their states are behind: no state and no pairs to wait
    // for, only pairs, only a state. In the last round nothing is left to ask for, which puts it furthest ahead.
    for (context, pending) in [(0, 0), (1, 1), (9, 0)] {
        let sequence = |slot: i32| {
            let new = slot as usize * shape.value_heads / multiprocessors == ROUNDS - 3;
            let (context, pending) = if new { (context, pending) } else { (100, 7) };
            DeltaSequence { slot, context, start: slot, count: 1, pending, ..DeltaSequence::default() }
        };
        let sequences: Vec<_> = (0..count as i32).map(sequence).collect();
        let expected = sequences.chunks(5).map(step).last().unwrap();
        for round in 0..300 {
            let found = step(&sequences);
            for (head, (found, expected)) in found.chunks(128).zip(expected.chunks(128)).enumerate() {
                let error = relative_error(found, expected);
                let (sequence, head) = (head / shape.value_heads, head % shape.value_heads);
                assert!(
                    error < 1e-3,
                    "context {context}, round {round}, sequence {sequence}, head {head}: {error:.2e}"
                );
            }
        }
    }
}
