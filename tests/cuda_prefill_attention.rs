//! Prompt attention on the GPU against a plain CPU loop, at odd lengths, groups and block sizes, both kernels.
//! Skipped loudly where there is no usable GPU.

mod skip;

use half::f16;
use inferwall::engine::device::cuda::driver::Gpu;
use inferwall::engine::device::cuda::launch::Stream;
use inferwall::engine::device::cuda::prefill_attention::{Chunk, Gate, PagedKv, PrefillAttention, Rows};
use rand::{Rng, SeedableRng, seq::SliceRandom};
use rand_chacha::ChaCha8Rng;
use skip::skip;

fn gpu(test: &str) -> Option<Gpu> {
    match Gpu::open(0) {
        Ok(gpu) => Some(gpu),
        Err(error) => {
            skip(test, &error);
            None
        }
    }
}

/// Standard normal by the sum of uniforms; good enough to spread scores.
fn noise(rng: &mut ChaCha8Rng, count: usize, scale: f32) -> Vec<f16> {
    (0..count)
        .map(|_| f16::from_f32(scale * (0..6).map(|_| rng.random_range(-0.7..0.7f32)).sum::<f32>()))
        .collect()
}

struct Case {
    head_dim: usize,
    heads: usize,
    kv_heads: usize,
    block_tokens: usize,
    gated: bool,
    /// (new tokens, context tokens)
    chunks: &'static [(usize, usize)],
}

fn relative_error(gpu: &Gpu, case: &Case, portable: bool) -> f64 {
    let &Case { head_dim: d, heads, kv_heads, block_tokens, gated, chunks } = case;
    let mut rng = ChaCha8Rng::seed_from_u64(d as u64 * 31 + chunks.len() as u64);
    let rows: usize = chunks.iter().map(|chunk| chunk.0).sum();
    let table_stride = chunks.iter().map(|&(n, c)| (n + c).div_ceil(block_tokens)).max().unwrap_or(1) + 1;
    // q and gate interleaved per head, as the projection leaves them.
    let row_width = heads * d * 2;
    let q = noise(&mut rng, rows * row_width, 1.0);
    let blocks = chunks.len() * table_stride;
    let block_stride = block_tokens * kv_heads * d;
    let keys = noise(&mut rng, blocks * block_stride, 1.0);
    let values = noise(&mut rng, blocks * block_stride, 1.0);
    let mut ids: Vec<i32> = (0..blocks as i32).collect();
    ids.shuffle(&mut rng);

    let mut list = Vec::new();
    let mut first_row = 0;
    for (table, &(new, context)) in chunks.iter().enumerate() {
        list.push(Chunk {
            first_row,
            new_tokens: new as i32,
            context_tokens: context as i32,
            table: table as i32,
        });
        first_row += new as i32;
    }
    let attention = PrefillAttention::new(gpu, d, portable).expect("the kernel loads");
    let tiles = attention.tiles(&list);
    let flat_chunks: Vec<i32> =
        list.iter().flat_map(|c| [c.first_row, c.new_tokens, c.context_tokens, c.table]).collect();
    let flat_tiles: Vec<i32> = tiles.list.iter().flatten().copied().collect();

    let stream = Stream::new(gpu).expect("a stream");
    let on_gpu = |values: &[f16]| gpu.upload(values).expect("upload");
    let (q_buffer, k_buffer, v_buffer) = (on_gpu(&q), on_gpu(&keys), on_gpu(&values));
    let out = on_gpu(&vec![f16::NAN; rows * heads * d]);
    let tables = gpu.upload(&ids).expect("upload");
    let chunk_buffer = gpu.upload(&flat_chunks).expect("upload");
    let tile_buffer = gpu.upload(&flat_tiles).expect("upload");
    let cache = PagedKv {
        keys: k_buffer.pointer(),
        values: v_buffer.pointer(),
        block_stride: block_stride as u64,
        token_stride: (kv_heads * d) as u32,
        head_stride: d as u32,
        block_tokens: block_tokens as u32,
        blocks: blocks as u64,
        tables: tables.pointer(),
        table_stride: table_stride as i32,
    };
    // Heads of q are contiguous in the kernel's layout: copy them out of the interleaved rows for q, keep the gate there.
    let q_only: Vec<f16> = (0..rows * heads)
        .flat_map(|i| q[i / heads * row_width + i % heads * 2 * d..][..d].to_vec())
        .collect();
    let q_only_buffer = on_gpu(&q_only);
    let gate = gated.then_some(Gate {
        rows: Rows { pointer: q_buffer.at(2 * d as u64), stride: row_width as i32 },
        head_stride: 2 * d as i32,
    });
    let width = (heads * d) as i32;
    // SAFETY: every buffer above outlives the read below and has the sizes the chunks name.
    unsafe {
        attention.launch(
            &stream,
            Rows { pointer: q_only_buffer.pointer(), stride: width },
            gate,
            Rows { pointer: out.pointer(), stride: width },
            &cache,
            heads,
            kv_heads,
            chunk_buffer.pointer(),
            &tiles,
            tile_buffer.pointer(),
        )
    }
    .expect("launch");
    let got: Vec<f16> = out.read(0, rows * heads * d).expect("read");

    let (mut error, mut size) = (0f64, 0f64);
    for chunk in &list {
        for i in 0..chunk.new_tokens as usize {
            let row = chunk.first_row as usize + i;
            // Every row of short chunks, every 37th of long ones.
            if chunk.new_tokens > 300 && i % 37 != 0 && i + 1 != chunk.new_tokens as usize {
                continue;
            }
            for head in 0..heads {
                let query = &q_only[(row * heads + head) * d..][..d];
                let at = |t: usize| {
                    let block = ids[chunk.table as usize * table_stride + t / block_tokens] as usize;
                    block * block_stride + (t % block_tokens) * kv_heads * d + head / (heads / kv_heads) * d
                };
                let visible = chunk.context_tokens as usize + i + 1;
                let scores: Vec<f64> = (0..visible)
                    .map(|t| {
                        let key = &keys[at(t)..][..d];
                        query.iter().zip(key).map(|(a, b)| a.to_f64() * b.to_f64()).sum::<f64>()
                            / (d as f64).sqrt()
                    })
                    .collect();
                let largest = scores.iter().copied().fold(f64::MIN, f64::max);
                let total: f64 = scores.iter().map(|s| (s - largest).exp()).sum();
                for e in 0..d {
                    let mut want: f64 = (0..visible)
                        .map(|t| (scores[t] - largest).exp() / total * values[at(t) + e].to_f64())
                        .sum();
                    if gated {
                        let g = q[row * row_width + head * 2 * d + d + e].to_f64();
                        want /= 1.0 + (-g).exp();
                    }
                    let have = got[(row * heads + head) * d + e].to_f64();
                    error += (have - want).powi(2);
                    size += want * want;
                }
            }
        }
    }
    (error / size).sqrt()
}

#[test]
fn prompt_attention_equals_the_cpu_at_odd_sizes() {
    let Some(gpu) = gpu("prompt_attention_equals_the_cpu_at_odd_sizes") else { return };
    let cases = [
        Case { head_dim: 256, heads: 4, kv_heads: 1, block_tokens: 16, gated: true, chunks: &[(150, 0)] },
        Case {
            head_dim: 256,
            heads: 8,
            kv_heads: 2,
            block_tokens: 16,
            gated: true,
            chunks: &[(1, 0), (63, 7), (64, 64), (129, 130), (5, 1000), (128, 0)],
        },
        Case { head_dim: 256, heads: 4, kv_heads: 1, block_tokens: 528, gated: false, chunks: &[(600, 500)] },
        Case {
            head_dim: 128,
            heads: 7,
            kv_heads: 1,
            block_tokens: 16,
            gated: false,
            chunks: &[(130, 3), (65, 0)],
        },
        Case {
            head_dim: 64,
            heads: 9,
            kv_heads: 3,
            block_tokens: 16,
            gated: false,
            chunks: &[(77, 0), (200, 41)],
        },
    ];
    for (index, case) in cases.iter().enumerate() {
        for portable in [false, true] {
            let error = relative_error(&gpu, case, portable);
            // Weights are rounded to fp16 before the second product, outputs after it: a few 2^-11.
            println!("case {index}, portable {portable}: relative error {error:.1e}");
            assert!(error < 2e-3, "case {index}, portable {portable}: relative error {error}");
        }
    }
}
