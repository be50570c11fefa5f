//! Opening the golden checkpoints and the broken ones, as files on disk.

use std::path::{Path, PathBuf};

use inferwall::engine::model::layout::WeightFormat;
use inferwall::engine::model::spec::{Family, Mixer};
use inferwall::engine::model::{ModelRef, OpenOptions, OpenedModel, open};
use serde_json::Value;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn open_folder(path: &Path) -> inferwall::Result<OpenedModel> {
    open(&ModelRef::Folder(path.to_path_buf()), &OpenOptions::default())
}

#[test]
fn hybrid_folder() {
    let model = open_folder(&fixture("hybrid-tiny")).unwrap();
    let spec = &model.layout.spec;
    assert_eq!((spec.family, spec.name.as_str()), (Family::Qwen35, "hybrid-tiny"));
    assert_eq!(spec.layers, [Mixer::DeltaNet, Mixer::DeltaNet, Mixer::DeltaNet, Mixer::Attention]);
    assert!(spec.tied_head && spec.norm_plus_one && spec.attention.output_gate && spec.attention.qk_norm);
    assert_eq!((spec.attention.rope.rotary_dim, spec.attention.rope.theta), (8, 1e7));
    assert_eq!(spec.eos_tokens, [511, 509]);
    assert_eq!(model.generation.eos_tokens, [511, 509]);
    assert_eq!(spec.real_vocab_size, 512);
    assert_eq!((model.skipped.mtp.tensors, model.skipped.vision.tensors), (15, 21));
    assert!(model.tokenizer.unwrap().ends_with("tokenizer.json"));
    assert!(model.layout.linears.iter().all(|(_, format)| *format == WeightFormat::Bf16));
    assert!(!model.layout.synthetic && model.layout.hash.len() == 16);
}

#[test]
fn sharded_folder_holds_the_same_weights() {
    let whole = open_folder(&fixture("hybrid-tiny")).unwrap();
    let sharded = open_folder(&fixture("hybrid-tiny-sharded")).unwrap();
    for (linear, _) in &whole.layout.linears {
        let bytes = |model: &OpenedModel| format!("{:?}", model.weights.linear(linear).unwrap());
        assert_eq!(bytes(&whole), bytes(&sharded), "{}", linear.name());
    }
    let name = "layers.2.linear_attn.conv1d.weight";
    assert_eq!(whole.weights.vector(name, 512).unwrap(), sharded.weights.vector(name, 512).unwrap());
    assert_ne!(whole.layout.hash, sharded.layout.hash);
}

#[test]
fn dense_folders() {
    for (name, family, bias, qk_norm, tied, theta) in [
        ("dense-qwen2-tiny", Family::Qwen2, true, false, true, 1e6),
        ("dense-qwen3-tiny", Family::Qwen3, false, true, false, 1e6),
        ("dense-llama-tiny", Family::Llama, false, false, false, 5e5),
    ] {
        let model = open_folder(&fixture(name)).unwrap();
        let spec = &model.layout.spec;
        assert_eq!(spec.family, family);
        let attention = &spec.attention;
        assert_eq!((attention.qkv_bias, attention.qk_norm, spec.tied_head), (bias, qk_norm, tied), "{name}");
        assert_eq!(
            (attention.head_dim, attention.rope.rotary_dim, attention.rope.theta),
            (64, 64, theta),
            "{name}"
        );
        assert!(!spec.norm_plus_one && !attention.output_gate && spec.delta_net.is_none());
    }
}

#[test]
fn broken_checkpoints_are_refused_with_the_reason() {
    let mut cases = 0;
    for entry in std::fs::read_dir(fixture("bad")).unwrap() {
        let folder = entry.unwrap().path();
        let case: Value = serde_json::from_slice(&std::fs::read(folder.join("case.json")).unwrap()).unwrap();
        let Err(error) = open_folder(&folder) else { panic!("{} was opened", folder.display()) };
        let message = format!("{error} {}", error.hint()).to_lowercase();
        let words = |key: &str| -> Vec<String> {
            let list = case[key].as_array().unwrap().iter();
            list.map(|word| word.as_str().unwrap().to_lowercase()).collect()
        };
        assert!(words("names").iter().all(|word| message.contains(word)), "{}: {message}", folder.display());
        let any_of = words("any_of");
        assert!(any_of.is_empty() || any_of.iter().any(|word| message.contains(word)), "{message}");
        assert_eq!(error.exit_code(), 2);
        assert!(!error.hint().is_empty());
        cases += 1;
    }
    assert_eq!(cases, 4);
}
