//! Deterministic damage to the files of a checkpoint: bytes flipped, cut or doubled, and JSON values replaced by ones
//! that readers trip over.

use std::path::Path;

use inferwall::engine::model::{ModelRef, OpenOptions, open};
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

/// What came of a number of damaged checkpoints.
#[derive(Debug, Default)]
pub struct Outcome {
    pub opened: usize,
    pub refused: usize,
}

/// Damages the files of `folder` `rounds` times, each time from their first state, and opens them. A panic or an
/// error that is not the user's to mend ends the run.
pub fn run(folder: &Path, seed: u64, rounds: usize) -> Outcome {
    let names = [
        "config.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "generation_config.json",
        "tokenizer.json",
    ];
    let files: Vec<(&str, Vec<u8>)> = names
        .into_iter()
        .filter_map(|name| Some((name, std::fs::read(folder.join(name)).ok()?)))
        .chain(shard(folder))
        .collect();
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut outcome = Outcome::default();
    for round in 0..rounds {
        let (name, original) = files.choose(&mut random).expect("a checkpoint has files");
        let path = folder.join(name);
        std::fs::write(&path, damaged(name, original, &mut random)).expect("the copy can be written");
        match open(&ModelRef::Folder(folder.to_path_buf()), &OpenOptions::default()) {
            Ok(_) => outcome.opened += 1,
            Err(error) => {
                assert_eq!(error.exit_code(), 2, "seed {seed} round {round} in {name}: {error}");
                outcome.refused += 1;
            }
        }
        std::fs::write(&path, original).expect("the copy can be written");
    }
    outcome
}

fn shard(folder: &Path) -> Option<(&'static str, Vec<u8>)> {
    let name = "model-00001-of-00002.safetensors";
    Some((name, std::fs::read(folder.join(name)).ok()?))
}

fn damaged(name: &str, original: &[u8], random: &mut ChaCha8Rng) -> Vec<u8> {
    if !name.ends_with(".safetensors") {
        return if random.random_bool(0.7) {
            damaged_json(original, random)
        } else {
            damaged_bytes(original, random)
        };
    }
    let header_end = 8 + u64::from_le_bytes(*original.first_chunk().expect("a header")) as usize;
    match random.random_range(0..4) {
        // The header's JSON, with a length that fits it.
        0 | 1 => {
            let header = damaged_json(&original[8..header_end], random);
            let length = (header.len() as u64).to_le_bytes();
            [&length[..], &header, &original[header_end..]].concat()
        }
        2 => [&damaged_bytes(&original[..header_end], random), &original[header_end..]].concat(),
        _ => damaged_bytes(original, random),
    }
}

fn damaged_bytes(original: &[u8], random: &mut ChaCha8Rng) -> Vec<u8> {
    let mut bytes = original.to_vec();
    for _ in 0..random.random_range(1..4) {
        let at = random.random_range(0..bytes.len().max(1));
        match random.random_range(0..5) {
            0 if !bytes.is_empty() => bytes[at] ^= 1 << random.random_range(0..8),
            1 if !bytes.is_empty() => bytes[at] = *b"\0\xff{}[]\",:0-".choose(random).expect("not empty"),
            2 => bytes.truncate(at),
            3 => {
                let end = (at + random.random_range(0..64)).min(bytes.len());
                let copy = bytes[at.min(end)..end].to_vec();
                bytes.splice(at.min(end)..at.min(end), copy);
            }
            _ => {
                let end = (at + random.random_range(0..16)).min(bytes.len());
                bytes.drain(at.min(end)..end);
            }
        }
    }
    bytes
}

fn damaged_json(original: &[u8], random: &mut ChaCha8Rng) -> Vec<u8> {
    let Ok(mut root) = serde_json::from_slice::<Value>(original) else { return original.to_vec() };
    for _ in 0..random.random_range(1..3) {
        damage_value(&mut root, random);
    }
    root.to_string().into_bytes()
}

/// Walks down at random and replaces, removes or doubles what it meets.
fn damage_value(value: &mut Value, random: &mut ChaCha8Rng) {
    let deeper = random.random_bool(0.85);
    match value {
        Value::Object(map) if deeper && !map.is_empty() => {
            let index = random.random_range(0..map.len());
            let key = map.keys().nth(index).expect("in range").clone();
            match random.random_range(0..12) {
                0 => drop(map.remove(&key)),
                1 => {
                    let moved = map.remove(&key).unwrap_or_default();
                    map.insert(format!("{key}x"), moved);
                }
                _ => damage_value(&mut map[&key], random),
            }
        }
        Value::Array(list) if deeper && !list.is_empty() => {
            let index = random.random_range(0..list.len());
            match random.random_range(0..8) {
                0 => drop(list.remove(index)),
                1 => list.push(list[index].clone()),
                _ => damage_value(&mut list[index], random),
            }
        }
        _ => {
            let number = value.as_i64().unwrap_or(1);
            let choices = [
                json!(number.wrapping_add(1)),
                json!(number.wrapping_sub(1)),
                json!(number.wrapping_mul(2)),
                json!(number / 2),
                json!(0),
                json!(-1),
                json!(u64::MAX),
                json!(1u64 << 63),
                json!(1u64 << 32),
                json!(i64::MIN),
                json!(1e308),
                json!(0.5),
                json!("x"),
                json!(""),
                json!("F32"),
                json!(null),
                json!(true),
                json!([]),
                json!([1, 2]),
                json!({}),
                json!({"weights": {"num_bits": 4}}),
            ];
            *value = choices.choose(random).expect("not empty").clone();
        }
    }
}

/// Peak resident memory of this process in bytes, where the system tells it.
pub fn peak_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    Some(line.split_whitespace().nth(1)?.parse::<u64>().ok()? * 1024)
}
