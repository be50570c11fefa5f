//! 4-bit versions of the golden checkpoints: what is written opens as what was asked for, within half a step.

mod checkpoint_rig;
mod cpu_rig;

use std::path::Path;

use checkpoint_rig::Folder;
use cpu_rig::Rig;
use inferwall::Error;
use inferwall::engine::device::cpu::CpuDevice;
use inferwall::engine::model::dequant::rows_to_f32;
use inferwall::engine::model::layout::WeightFormat;
use inferwall::engine::model::quantize::{self, FileFormat, Options, Written};
use inferwall::engine::model::spec::{Linear, Role};
use inferwall::engine::model::weights::Weights;
use inferwall::engine::model::{ModelRef, OpenOptions, OpenedModel, open};
use serde_json::{Value, json};

fn options(format: FileFormat, group: usize) -> Options {
    Options { format, group, skip: Vec::new() }
}

fn run(source: &Folder, options: &Options, out: &Path) -> Result<Written, Error> {
    quantize::run(source.path(), "source", options, None, out, &mut |_, _, _| {})
}

/// The quantised version of a golden checkpoint.
fn quantised(source: &Folder, options: &Options) -> (tempfile::TempDir, OpenedModel) {
    let out = tempfile::tempdir().unwrap();
    run(source, options, out.path()).unwrap();
    let opened = open(&ModelRef::Folder(out.path().to_path_buf()), &OpenOptions::default()).unwrap();
    (out, opened)
}

fn config(folder: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(folder.join("config.json")).unwrap()).unwrap()
}

fn matrix(weights: &dyn Weights, linear: &Linear) -> Vec<f32> {
    let mut all = vec![0f32; linear.rows * linear.cols];
    rows_to_f32(&weights.linear(linear).unwrap(), linear.rows, linear.cols, 0..linear.rows, &mut all);
    all
}

fn kept(linear: &Linear) -> bool {
    matches!(linear.role, Role::Head | Role::InA | Role::InB)
}

#[test]
fn every_golden_model_comes_back_within_half_a_step() {
    for (name, group) in [
        ("hybrid-tiny", 32),
        ("hybrid-geom", 128),
        ("dense-llama-tiny", 64),
        ("dense-qwen2-tiny", 32),
        ("dense-qwen3-tiny", 128),
    ] {
        let source = Folder::copy_of(name);
        let before = source.open().unwrap();
        for format in [FileFormat::Awq, FileFormat::CompressedTensors] {
            let (_out, after) = quantised(&source, &options(format, group));
            let zero_points = format == FileFormat::Awq;
            assert_eq!(after.skipped, before.skipped, "{name}");
            for ((linear, found), (_, original)) in after.layout.linears.iter().zip(&before.layout.linears) {
                let (old, new) = (matrix(&*before.weights, linear), matrix(&*after.weights, linear));
                let place = format!("{name} {format:?} {}", linear.name());
                if kept(linear) {
                    assert_eq!((found, &new), (original, &old), "{place}");
                    continue;
                }
                assert_eq!(*found, WeightFormat::Int4 { group, zero_points }, "{place}");
                for (old, new) in old.chunks(group).zip(new.chunks(group)) {
                    let (min, max) = old.iter().fold((0f32, 0f32), |(min, max), &w| (min.min(w), max.max(w)));
                    let step = if zero_points { (max - min) / 15.0 } else { max.max(-min) / 7.5 };
                    // The scale is rounded up: by 1/128 at most, for bf16.
                    let moved = old.iter().zip(new).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
                    assert!(moved <= 0.505 * step + 1e-4 * step, "{place}: {moved} of {step}");
                }
            }
        }
    }
}

#[test]
fn the_config_is_what_readers_of_each_format_expect() {
    let source = Folder::copy_of("hybrid-tiny");
    let skip = |options: Options| Options { skip: vec!["layers.0.mlp".to_string()], ..options };
    let (out, model) = quantised(&source, &skip(options(FileFormat::Awq, 32)));
    let names =
        ["gate_proj", "up_proj", "down_proj"].map(|m| format!("model.language_model.layers.0.mlp.{m}"));
    let awq = config(out.path())["quantization_config"].clone();
    let mut listed: Vec<&str> =
        awq["modules_to_not_convert"].as_array().unwrap().iter().map(|v| v.as_str().unwrap()).collect();
    let mut expected = vec!["lm_head", "visual", "mtp", "in_proj_a", "in_proj_b"];
    expected.extend(names.iter().map(String::as_str));
    listed.sort_unstable();
    expected.sort_unstable();
    assert_eq!(listed, expected);
    assert_eq!(
        (&awq["quant_method"], &awq["bits"], &awq["group_size"], &awq["zero_point"], &awq["version"]),
        (&json!("awq"), &json!(4), &json!(32), &json!(true), &json!("gemm"))
    );
    let plain = model
        .layout
        .linears
        .iter()
        .filter(|(linear, format)| !kept(linear) && !matches!(format, WeightFormat::Int4 { .. }));
    let plain: Vec<String> = plain.map(|(linear, _)| linear.name()).collect();
    assert_eq!(plain, ["gate_proj", "up_proj", "down_proj"].map(|module| format!("layers.0.mlp.{module}")));

    let (out, _) = quantised(&source, &skip(options(FileFormat::CompressedTensors, 32)));
    let new = config(out.path());
    let golden = Folder::copy_of("hybrid-geom-ct");
    let groups = |config: &Value| config["quantization_config"]["config_groups"].clone();
    assert_eq!(groups(&new), groups(&config(golden.path())));
    assert!(
        names
            .iter()
            .all(|name| { new["quantization_config"]["ignore"].as_array().unwrap().contains(&json!(name)) })
    );
    // The rest of the configuration and the tokenizer are the source's.
    let mut rest = new;
    rest.as_object_mut().unwrap().remove("quantization_config");
    assert_eq!(rest, config(source.path()));
    for file in ["tokenizer.json", "generation_config.json"] {
        assert_eq!(
            std::fs::read(out.path().join(file)).unwrap(),
            std::fs::read(source.path().join(file)).unwrap()
        );
    }
}

/// Logits of a folder's model after each of some tokens, in f32.
fn logits(folder: &Path, tokens: &[u32]) -> Vec<f32> {
    let mut rig = Rig::open(folder, cpu_rig::Options { threads: 1, ..cpu_rig::Options::default() });
    rig.logits(0, tokens, &[tokens.len()]).concat()
}

fn rms(a: &[f32], b: &[f32]) -> f64 {
    let squares: f64 = a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum();
    (squares / a.len() as f64).sqrt()
}

/// Gives a model what real ones have: one channel in sixteen carries ten times the others' share of each norm's output.
fn uneven(source: &Folder, plus_one: bool) {
    let one = if plus_one { 1.0 } else { 0.0 };
    source.edit_tensors(|tensors| {
        let norms = tensors
            .iter_mut()
            .filter(|(name, _)| name.ends_with("layernorm.weight") && name.contains("layers."));
        for (_, tensor) in norms {
            assert_eq!(tensor.dtype, "BF16");
            for (channel, bytes) in tensor.bytes.chunks_exact_mut(2).enumerate() {
                let factor = if channel % 16 == 5 { 3.0 } else { 0.3 };
                let old = half::bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32();
                bytes.copy_from_slice(&half::bf16::from_f32((old + one) * factor - one).to_le_bytes());
            }
        }
    });
}

/// On tokens that were not calibrated with, the logits are nearer to the original's than with rounding to nearest,
/// where some channels count more than others. (Where none does, as in the fixtures' random weights, it may be either.)
#[test]
fn awq_loses_less_than_rounding_to_nearest() {
    for (name, group) in [("hybrid-tiny", 32), ("dense-llama-tiny", 64), ("dense-qwen2-tiny", 32)] {
        let source = Folder::copy_of(name);
        uneven(&source, name == "hybrid-tiny");
        let original = source.open().unwrap();
        let calibration: Vec<Vec<u32>> =
            (0..4).map(|w| (0..64).map(|i| (i * 13 + w * 5 + i * i) % 60).collect()).collect();
        let tokens: Vec<u32> = (0..100).map(|i| (i * 11 + 3 + i * i * i) % 60).collect();
        let right = logits(source.path(), &tokens);
        for format in [FileFormat::Awq, FileFormat::CompressedTensors] {
            let mut calls = 0;
            let mut calibrate = |progress: quantize::Progress<'_>| {
                calls += 1;
                let windows: Vec<&[u32]> = calibration.iter().map(Vec::as_slice).collect();
                let mut device = CpuDevice::new(Some(1)).unwrap();
                device.capture_inputs(&original.layout, &original.weights, &windows, 2, &mut |done, total| {
                    progress("tokens", done, total);
                })
            };
            let out = tempfile::tempdir().unwrap();
            let options = options(format, group);
            let written = quantize::run(
                source.path(),
                "source",
                &options,
                Some(&mut calibrate),
                out.path(),
                &mut |_, _, _| {},
            );
            let gain = written.unwrap().gain.unwrap();
            assert_eq!((calls, gain.groups), (1, 4 * original.layout.spec.layers.len()), "{name}");
            assert!(gain.error_ratio <= 1.0, "{name} {gain:?}");
            let (nearest_folder, _) = quantised(&source, &options);
            let (awq, nearest) = (logits(out.path(), &tokens), logits(nearest_folder.path(), &tokens));
            let (awq, nearest) = (rms(&awq, &right), rms(&nearest, &right));
            assert!(awq < nearest, "{name} {format:?}: awq {awq}, nearest {nearest}");
        }
    }
}

#[test]
fn sharded_folders_become_one_file() {
    let (whole, sharded) = (Folder::copy_of("hybrid-tiny"), Folder::copy_of("hybrid-tiny-sharded"));
    let options = options(FileFormat::CompressedTensors, 32);
    let ((_a, whole), (out, sharded)) = (quantised(&whole, &options), quantised(&sharded, &options));
    assert!(!out.path().join("model.safetensors.index.json").exists());
    for (linear, _) in &whole.layout.linears {
        assert_eq!(matrix(&*whole.weights, linear), matrix(&*sharded.weights, linear), "{}", linear.name());
    }
}

#[test]
fn what_cannot_be_done_is_refused_before_anything_is_written() {
    let source = Folder::copy_of("dense-llama-tiny");
    let refused = |source: &Folder, options: &Options, words: &[&str]| {
        let out = tempfile::tempdir().unwrap();
        let error = run(source, options, out.path()).unwrap_err();
        let message = format!("{error} | {}", error.hint());
        assert!(words.iter().all(|word| message.contains(word)), "{message}");
        assert_eq!((error.exit_code(), std::fs::read_dir(out.path()).unwrap().count()), (2, 0), "{message}");
    };
    let awq = |group| options(FileFormat::Awq, group);
    refused(
        &source,
        &awq(96),
        &["model.layers.0.self_attn.q_proj.weight", "96", "128 columns", "--group 128"],
    );
    refused(&source, &awq(12), &["--group 12", "multiple of 8"]);
    refused(&source, &awq(0), &["--group 0"]);
    let skip = |pattern: &str| Options { skip: vec![pattern.to_string()], ..awq(32) };
    refused(&source, &skip("layers.9."), &["--skip layers.9.", "no module"]);
    refused(&source, &skip("layers."), &["every module is skipped"]);
    refused(&Folder::copy_of("hybrid-geom-awq"), &awq(32), &["already 4-bit", "16-bit version"]);

    let full = tempfile::tempdir().unwrap();
    std::fs::write(full.path().join("x"), "").unwrap();
    assert!(run(&source, &awq(32), full.path()).unwrap_err().to_string().contains("not empty"));

    source.edit_tensors(|tensors| {
        let bytes = &mut tensors.get_mut("model.layers.1.mlp.up_proj.weight").unwrap().bytes;
        bytes[..2].copy_from_slice(&half::bf16::NAN.to_le_bytes());
    });
    let out = tempfile::tempdir().unwrap();
    let error = run(&source, &awq(32), out.path()).unwrap_err().to_string();
    assert!(error.contains("layers.1.mlp.up_proj") && error.contains("row 0"), "{error}");
    assert!(std::fs::read_dir(out.path()).unwrap().next().is_none(), "nothing is left half written");
    let new = out.path().join("new");
    run(&source, &awq(32), &new).unwrap_err();
    assert!(!new.exists(), "nor the folder, where it was made");
}
