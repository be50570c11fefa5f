//! Opens damaged copies of the golden checkpoints for as long as asked: `cargo run --release --example
//! fuzz_checkpoint -- MINUTES [SEED]`. Ends with a panic that names seed and round if a reader fails.

#[path = "../tests/checkpoint_rig/mod.rs"]
mod checkpoint_rig;
#[path = "../tests/checkpoint_rig/mutate.rs"]
mod mutate;

use std::time::{Duration, Instant};

fn main() {
    let mut arguments = std::env::args().skip(1);
    let minutes: f64 = arguments.next().and_then(|text| text.parse().ok()).unwrap_or(1.0);
    let mut seed: u64 = arguments.next().and_then(|text| text.parse().ok()).unwrap_or(1_000);
    let until = Instant::now() + Duration::from_secs_f64(60.0 * minutes);
    let names = [
        "hybrid-tiny",
        "hybrid-tiny-sharded",
        "hybrid-geom-awq",
        "hybrid-geom-ct",
        "dense-qwen3-tiny",
        "bad/heads-not-divisible",
    ];
    let (mut opened, mut refused) = (0, 0);
    while Instant::now() < until {
        for name in names {
            let folder = checkpoint_rig::Folder::copy_of(name);
            let outcome = mutate::run(folder.path(), seed, 200);
            opened += outcome.opened;
            refused += outcome.refused;
            seed += 1;
        }
    }
    let peak = mutate::peak_bytes().unwrap_or(0) >> 20;
    println!("{opened} opened, {refused} refused, none failed; peak memory {peak} MiB; next seed {seed}");
}
