//! A context of 32,768 tokens on the GPU: nothing overflows fp16 on the way, and the logits are the CPU device's. Skipped loudly
//! where there is no usable GPU.

mod skip;

use inferwall::engine::clock::Clock;
use inferwall::engine::config::{CacheDtype, CpuMath, CudaKernels, EngineConfig, KvLayout, LastLayer};
use inferwall::engine::device::cpu::CpuDevice;
use inferwall::engine::device::cuda::CudaDevice;
use inferwall::engine::device::{CachePlan, Device, Input, LoadOptions, SequenceStep, Session, Step, Want};
use inferwall::engine::model::layout::ModelLayout;
use inferwall::engine::model::synthetic::SyntheticWeights;
use inferwall::engine::model::synthetic_layout;
use inferwall::engine::model::weights::WeightSource;
use inferwall::engine::request::RequestId;
use skip::skip;

const CONTEXT: usize = 32_768;
const CHUNK: usize = 8_192;
/// Prompt chunks of odd lengths first, so that neither tiles nor blocks of the cache line up with them.
const FIRST: [usize; 2] = [1_003, 4_093];
const DECODED: usize = 6;
const BLOCK_TOKENS: usize = 16;
const VOCAB: usize = 1_003;

/// The published head sizes, few of them: 2 query and 1 kv heads of 256, 2 key and 4 value heads of 128; three delta nets and one
/// attention layer.
fn model() -> (ModelLayout, WeightSource) {
    let mut layout = synthetic_layout("demo").unwrap();
    let spec = &mut layout.spec;
    spec.hidden_size = 256;
    spec.intermediate_size = 384;
    spec.vocab_size = VOCAB;
    spec.real_vocab_size = VOCAB;
    spec.layers.truncate(4);
    (spec.attention.heads, spec.attention.kv_heads, spec.attention.head_dim) = (2, 1, 256);
    let delta = spec.delta_net.as_mut().unwrap();
    (delta.key_heads, delta.value_heads) = (2, 4);
    let format = layout.embedding;
    layout.linears = layout.spec.linears().into_iter().map(|linear| (linear, format)).collect();
    let source = SyntheticWeights::new(layout.clone(), 11);
    (layout, Box::new(source))
}

fn open(device: &mut dyn Device, kv_dtype: CacheDtype, cuda_kernels: CudaKernels) -> Box<dyn Session> {
    let (layout, source) = model();
    let load = LoadOptions { cpu_math: CpuMath::F32, threads: None };
    let model = device.load(&layout, &source, &load, &mut |_| {}).unwrap();
    let plan = CachePlan {
        layout: KvLayout::Split,
        block_tokens: BLOCK_TOKENS,
        kv_blocks: blocks().len(),
        state_slots: 1,
        kv_dtype,
        state_dtype: CacheDtype::F32,
        state_write_interval: 1,
        last_layer: LastLayer::Outputs,
        max_model_len: CONTEXT + DECODED,
        max_num_seqs: 1,
        max_num_batched_tokens: CHUNK,
        max_drafts: 0,
    };
    let config = EngineConfig { cuda_kernels, ..EngineConfig::default() };
    model.open(&plan, &config, &Clock::real()).unwrap()
}

/// The sequence's blocks, scattered over the pool.
fn blocks() -> Vec<u32> {
    let count = (CONTEXT + DECODED).div_ceil(BLOCK_TOKENS);
    assert!(!count.is_multiple_of(7), "the order below would not reach every block");
    (0..count).map(|i| ((i * 7 + 3) % count) as u32).collect()
}

/// The prompt in chunks, then token by token: logits of each step's last row.
fn logits(session: &mut dyn Session) -> Vec<Vec<f32>> {
    let tokens: Vec<u32> = (0..(CONTEXT + DECODED) as u32)
        .map(|i| i.wrapping_mul(2_654_435_761) >> 8)
        .map(|i| i % 1_000)
        .collect();
    let blocks = blocks();
    let mut rows = Vec::new();
    let mut done = 0;
    while done < tokens.len() {
        let most = if done >= CONTEXT { 1 } else { CHUNK.min(CONTEXT - done) };
        let count = FIRST.get(rows.len()).copied().unwrap_or(CHUNK).min(most);
        let sequence = SequenceStep {
            request: RequestId(0),
            state_slot: Some(0),
            blocks: &blocks[..(done + count).div_ceil(BLOCK_TOKENS)],
            context_tokens: done,
            input: Input::Known(&tokens[done..done + count]),
            drafts: &[],
            want: Want::Logits { rows: 1 },
        };
        let ticket = session.submit(&Step { sequences: vec![sequence], trace: false }).unwrap();
        rows.extend(session.wait(ticket).unwrap().sequences.remove(0).logits);
        done += count;
    }
    rows
}

#[test]
fn thirty_two_thousand_tokens_stay_finite_and_match_the_cpu() {
    let test = "thirty_two_thousand_tokens_stay_finite_and_match_the_cpu";
    let mut gpu = match CudaDevice::new(0) {
        Ok(device) => device,
        Err(error) => return skip(test, format_args!("{error}; {}", error.hint())),
    };
    let mut cpu = CpuDevice::new(None).unwrap();
    let expected = logits(&mut *open(&mut cpu, CacheDtype::F32, CudaKernels::Auto));
    for (name, kernels) in [("best", CudaKernels::Auto), ("portable", CudaKernels::Portable)] {
        let found = logits(&mut *open(&mut gpu, CacheDtype::F16, kernels));
        assert_eq!(found.len(), expected.len());
        for (step, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert!(found.iter().all(|x| x.is_finite()), "{name} kernels, step {step}: not finite");
            let square =
                |values: &mut dyn Iterator<Item = f32>| values.map(|x| f64::from(x).powi(2)).sum::<f64>();
            let difference = square(&mut found.iter().zip(expected).map(|(f, e)| f - e));
            let error = (difference / square(&mut expected.iter().copied())).sqrt();
            println!("{name} kernels, step {step}: relative error {error:.1e}");
            // As at every length up to 200 (tests/cuda_golden.rs): the context must not add to it.
            assert!(error <= 4e-3, "{name} kernels, step {step}: relative error {error:.2e}");
        }
    }
}
