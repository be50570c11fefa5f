//! Checkpoints that are wrong in one way each: the message must name what is wrong.

mod checkpoint_rig;

use checkpoint_rig::{Folder, Tensor};
use inferwall::engine::model::layout::WeightFormat;
use inferwall::engine::model::spec::{Linear, Mixer, RopeScaling};
use inferwall::engine::model::{OpenedModel, dequant, finite};
use serde_json::{Value, json};

fn assert_names(message: &str, words: &[&str]) {
    for word in words {
        assert!(message.contains(word), "`{word}` is not in: {message}");
    }
}

/// Sets one key of the text config and returns the error.
fn with_config(name: &str, key: &str, value: Value) -> String {
    let folder = Folder::copy_of(name);
    folder.edit_text(|text| text[key] = value);
    folder.error()
}

#[test]
fn wrong_config_values() {
    for (key, value, words) in [
        ("hidden_size", json!("big"), &["text_config.hidden_size", "\"big\"", "integer"][..]),
        ("hidden_size", json!(0), &["text_config.hidden_size", "is 0"]),
        ("hidden_size", json!(1u64 << 40), &["text_config.hidden_size", "1099511627776"]),
        ("hidden_size", json!(128), &["in_proj_qkv", "[128, 64]", "[128, 128]"]),
        ("vocab_size", json!(-5), &["text_config.vocab_size", "-5"]),
        ("vocab_size", json!(null), &["text_config.vocab_size", "missing"]),
        ("num_hidden_layers", json!(5), &["layer_types", "4 entries", "5"]),
        ("num_hidden_layers", json!(1_000_000), &["num_hidden_layers", "1024"]),
        ("layer_types", json!(["linear_attention", "mamba", "x", "y"]), &["layer_types", "mamba", "layer 1"]),
        ("linear_num_value_heads", json!(3), &["linear_num_value_heads", "linear_num_key_heads"]),
        ("linear_key_head_dim", json!(1e9), &["linear_key_head_dim"]),
        ("hidden_act", json!("gelu"), &["hidden_act", "gelu", "silu"]),
        ("output_gate_type", json!("sigmoid"), &["output_gate_type", "sigmoid"]),
        ("num_experts", json!(64), &["num_experts", "dense"]),
        ("attention_bias", json!(true), &["attention_bias"]),
        ("rms_norm_eps", json!(-1.0), &["rms_norm_eps"]),
        ("eos_token_id", json!([1, 512]), &["eos_token_id", "512"]),
        ("eos_token_id", json!("end"), &["eos_token_id", "end"]),
        (
            "rope_parameters",
            json!({"rope_type": "yarn", "rope_theta": 1e7}),
            &["rope_type", "yarn", "llama3"],
        ),
        ("rope_parameters", json!({"rope_type": "default"}), &["rope_theta", "missing"]),
        ("rope_parameters", json!(7), &["rope_parameters", "7", "object"]),
    ] {
        assert_names(&with_config("hybrid-tiny", key, value), words);
    }
    let folder = Folder::copy_of("hybrid-tiny");
    folder.edit_text(|text| text["partial_rotary_factor"] = json!(0.03));
    folder.edit_text(|text| text["rope_parameters"] = json!({"rope_theta": 1e7}));
    assert_names(&folder.error(), &["partial_rotary_factor", "0 of 32"]);
    assert_names(&with_config("dense-qwen2-tiny", "num_attention_heads", json!(3)), &["num_attention_heads"]);
    assert_names(
        &with_config("dense-qwen2-tiny", "use_sliding_window", json!(true)),
        &["use_sliding_window"],
    );
    assert_names(&with_config("dense-llama-tiny", "mlp_bias", json!(true)), &["mlp_bias"]);
}

#[test]
fn unknown_architectures_get_the_nearest_name() {
    for (found, nearest) in [("qwen3_moe", "qwen3"), ("qwen3_next", "qwen3"), ("llama4", "llama")] {
        let message = with_config("dense-llama-tiny", "model_type", json!(found));
        assert_names(&message, &["model_type", found, &format!("`{nearest}")]);
    }
    let folder = Folder::copy_of("dense-llama-tiny");
    folder.edit_text(|root| {
        root.as_object_mut().unwrap().remove("model_type");
        root["architectures"] = json!(["MistralForCausalLM"]);
    });
    assert_names(&folder.error(), &["architectures", "MistralForCausalLM"]);
    folder.edit_text(|root| root["architectures"] = json!(["LlamaForCausalLM"]));
    assert!(folder.open().is_ok());
}

#[test]
fn variants_of_the_config_are_read() {
    // Text fields at the top level, the rotation in the older place, no layer_types, no tie flag.
    let folder = Folder::copy_of("hybrid-tiny");
    folder.edit_json("config.json", |root| {
        *root = root["text_config"].take();
        let text = root.as_object_mut().unwrap();
        for key in ["rope_parameters", "layer_types", "tie_word_embeddings", "partial_rotary_factor"] {
            text.remove(key);
        }
        text.insert("rope_theta".into(), json!(10_000_000));
        text.insert("rope_scaling".into(), json!({"type": "default"}));
    });
    let variant = folder.open().unwrap().layout;
    let original = Folder::copy_of("hybrid-tiny").open().unwrap().layout;
    assert_eq!(variant.linears, original.linears);
    let mut renamed = variant.spec.clone();
    renamed.name.clone_from(&original.spec.name);
    assert_eq!(renamed, original.spec);

    // The root's tie flag wins; layer_types wins over the interval.
    let folder = Folder::copy_of("hybrid-tiny");
    folder.edit_json("config.json", |root| {
        root["text_config"]["tie_word_embeddings"] = json!(false);
        root["text_config"]["full_attention_interval"] = json!(2);
    });
    let spec = folder.open().unwrap().layout.spec;
    assert!(spec.tied_head);
    assert_eq!(spec.layers.iter().filter(|mixer| **mixer == Mixer::Attention).count(), 1);

    // A tied model that carries a copy of its head.
    folder.edit_tensors(|tensors| {
        let copy = tensors["model.language_model.embed_tokens.weight"].clone();
        tensors.insert("lm_head.weight".into(), copy);
    });
    let model = folder.open().unwrap();
    assert!(model.layout.spec.tied_head && model.skipped.other.tensors == 1);

    let folder = Folder::copy_of("dense-llama-tiny");
    folder.edit_text(|text| {
        text["rope_scaling"] = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192});
    });
    let rope = folder.open().unwrap().layout.spec.attention.rope;
    assert!(matches!(rope.scaling, RopeScaling::Llama3 { original_max_position: 8192, .. }));
    folder.edit_text(|text| text["rope_scaling"] = json!({"type": "linear", "factor": 2.0}));
    let rope = folder.open().unwrap().layout.spec.attention.rope;
    assert_eq!(rope.scaling, RopeScaling::Linear { factor: 2.0 });
    folder.edit_text(|text| text["rope_scaling"] = json!({"type": "linear"}));
    assert_names(&folder.error(), &["rope_scaling.factor", "missing"]);
}

#[test]
fn other_prefixes_are_read() {
    let original = Folder::copy_of("hybrid-tiny").open().unwrap();
    for prefix in ["language_model.model.", "model."] {
        let folder = Folder::copy_of("hybrid-tiny");
        folder.edit_tensors(|tensors| {
            *tensors = std::mem::take(tensors)
                .into_iter()
                .map(|(name, tensor)| match name.strip_prefix("model.language_model.") {
                    Some(rest) => (format!("{prefix}{rest}"), tensor),
                    None => (name, tensor),
                })
                .collect();
        });
        let model = folder.open().unwrap();
        assert_eq!(model.layout.linears, original.layout.linears, "{prefix}");
        assert_eq!(model.skipped, original.skipped, "{prefix}");
    }
}

type Change = fn(&mut Tensor);

#[test]
fn wrong_tensors() {
    let name = "model.language_model.layers.1.linear_attn.in_proj_z.weight";
    let cases: [(&str, Change, &[&str]); 3] = [
        (name, |tensor| tensor.shape = vec![32, 128], &["in_proj_z", "[32, 128]", "[64, 64]"]),
        (name, |tensor| tensor.dtype = "I16".into(), &["in_proj_z", "I16", "BF16"]),
        (
            "model.language_model.layers.0.linear_attn.conv1d.weight",
            |tensor| tensor.shape = vec![128, 4, 1],
            &["conv1d", "[128, 4, 1]", "[128, 1, 4]", "MLX"],
        ),
    ];
    for (name, change, words) in cases {
        let folder = Folder::copy_of("hybrid-tiny");
        folder.edit_tensors(|tensors| change(tensors.get_mut(name).unwrap()));
        assert_names(&folder.error(), words);
    }

    let folder = Folder::copy_of("hybrid-tiny");
    folder.edit_tensors(|tensors| tensors.retain(|name, _| !name.contains("layers.2.")));
    assert_names(&folder.error(), &["14 tensors are missing", "`layers.2.", "and 9 more"]);

    let folder = Folder::copy_of("dense-llama-tiny");
    folder.edit_tensors(|tensors| {
        let bias = Tensor { dtype: "BF16".into(), shape: vec![128], bytes: vec![0; 256] };
        tensors.insert("model.layers.0.self_attn.o_proj.bias".into(), bias);
    });
    assert_names(&folder.error(), &["1 tensors have no place", "`layers.0.self_attn.o_proj.bias`"]);
}

#[test]
fn weights_that_are_not_numbers() {
    let folder = Folder::copy_of("hybrid-tiny");
    folder.edit_tensors(|tensors| {
        let norm = tensors.get_mut("model.language_model.layers.1.input_layernorm.weight").unwrap();
        norm.bytes[6..8].copy_from_slice(&0x7FC0u16.to_le_bytes());
    });
    assert_names(&folder.error(), &["layers.1.input_layernorm.weight", "element 3", "NaN"]);

    let folder = Folder::copy_of("dense-qwen3-tiny");
    folder.edit_tensors(|tensors| {
        let matrix = tensors.get_mut("model.layers.2.mlp.up_proj.weight").unwrap();
        matrix.bytes[2000..2002].copy_from_slice(&0xFF80u16.to_le_bytes());
    });
    let model = folder.open().unwrap();
    let bad: Vec<_> = model
        .layout
        .linears
        .iter()
        .filter_map(|(linear, _)| {
            finite::check_matrix(&linear.name(), &model.weights.linear(linear).unwrap()).err()
        })
        .collect();
    assert_eq!(bad.len(), 1);
    assert_names(&bad[0].to_string(), &["layers.2.mlp.up_proj", "element 1000"]);
}

#[test]
fn weights_of_another_convention() {
    let widen = |tensor: &Tensor| -> Vec<f32> {
        let pairs = tensor.bytes.chunks_exact(2);
        pairs.map(|b| f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16)).collect()
    };
    let folder = Folder::copy_of("hybrid-tiny");
    folder.edit_tensors(|tensors| {
        for (_, tensor) in tensors.iter_mut().filter(|(name, _)| name.ends_with("A_log")) {
            let values = tensor.bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()));
            tensor.bytes = values.flat_map(|value| (-value.exp()).to_le_bytes()).collect();
        }
    });
    assert_names(&folder.error(), &["A_log", "-exp", "GGUF"]);

    let folder = Folder::copy_of("hybrid-tiny");
    folder.edit_tensors(|tensors| {
        let norms = tensors.iter_mut().filter(|(name, _)| {
            name.ends_with("norm.weight")
                && !name.contains("linear_attn")
                && !name.contains("mtp")
                && !name.contains("visual")
        });
        for (_, tensor) in norms {
            tensor.bytes = widen(tensor).iter().flat_map(|w| (1.0 + w).to_le_bytes()).collect();
            tensor.dtype = "F32".into();
        }
    });
    assert_names(&folder.error(), &["norm weights", "centred on one", "GGUF"]);
}

#[test]
fn broken_shards() {
    let folder = Folder::copy_of("hybrid-tiny-sharded");
    std::fs::remove_file(folder.path().join("model-00002-of-00002.safetensors")).unwrap();
    assert_names(&folder.error(), &["model.safetensors.index.json", "model-00002-of-00002.safetensors"]);

    let folder = Folder::copy_of("hybrid-tiny-sharded");
    let name = "model.language_model.embed_tokens.weight";
    folder.edit_json("model.safetensors.index.json", |index| {
        index["weight_map"][name] = json!("model-00002-of-00002.safetensors");
    });
    assert_names(&folder.error(), &[name, "model-00002-of-00002", "model-00001-of-00002"]);
    for outside in ["../model.safetensors", "/etc/passwd", "sub/model.safetensors"] {
        folder.edit_json("model.safetensors.index.json", |index| index["weight_map"][name] = json!(outside));
        assert_names(&folder.error(), &["weight_map", outside]);
    }

    let folder = Folder::copy_of("hybrid-tiny-sharded");
    let path = folder.path().join("model-00002-of-00002.safetensors");
    let whole = std::fs::read(&path).unwrap();
    for length in [0, 7, 100, whole.len() / 2, whole.len() - 1] {
        std::fs::write(&path, &whole[..length]).unwrap();
        assert_names(&folder.error(), &["model-00002-of-00002.safetensors", "cut short"]);
    }
}

#[test]
fn folders_without_weights_say_what_they_hold() {
    let folder = Folder::copy_of("dense-llama-tiny");
    let weights = folder.path().join("model.safetensors");
    let bytes = std::fs::read(&weights).unwrap();
    std::fs::remove_file(&weights).unwrap();
    std::fs::write(folder.path().join("model.gguf"), b"GGUF").unwrap();
    assert_names(&folder.error(), &["model.safetensors", "GGUF files are not read"]);
    std::fs::write(folder.path().join("weights.safetensors"), bytes).unwrap();
    assert!(folder.open().is_ok(), "a single file under another name is taken");
    std::fs::remove_file(folder.path().join("config.json")).unwrap();
    assert_names(&folder.error(), &["config.json"]);
}

#[test]
fn damaged_quantization() {
    let awq = |edit: fn(&mut std::collections::BTreeMap<String, Tensor>)| {
        let folder = Folder::copy_of("hybrid-geom-awq");
        folder.edit_tensors(edit);
        folder.error()
    };
    const UP: &str = "model.language_model.layers.1.mlp.up_proj";
    assert_names(&awq(|t| t.retain(|name, _| name != &format!("{UP}.scales"))), &["mlp.up_proj", "scales"]);
    assert_names(
        &awq(|t| {
            let zeros = t[&format!("{UP}.qzeros")].clone();
            t.insert(format!("{UP}.g_idx"), zeros);
        }),
        &["mlp.up_proj.g_idx", "act-order"],
    );
    assert_names(
        &awq(|t| t.get_mut(&format!("{UP}.scales")).unwrap().dtype = "BF16".into()),
        &["mlp.up_proj.scales", "BF16", "F16"],
    );
    // GPTQ packs along the other axis.
    assert_names(
        &awq(|t| t.get_mut(&format!("{UP}.qweight")).unwrap().shape = vec![16, 256]),
        &["mlp.up_proj.qweight", "[16, 256]", "[128, 32]"],
    );
    for (key, value, words) in [
        ("group_size", json!(96), &["groups of 96", "128"][..]),
        ("group_size", json!(32), &["[1, "]),
        ("version", json!("gemv"), &["version", "gemv"]),
        ("bits", json!(8), &["bits", "8"]),
        ("quant_method", json!("gptq"), &["quant_method", "gptq"]),
        ("zero_point", json!(false), &["zero_point"]),
        ("quant_method", json!("compressed-tensors"), &["format"]),
    ] {
        let folder = Folder::copy_of("hybrid-geom-awq");
        folder.edit_json("config.json", |root| root["quantization_config"][key] = value);
        assert_names(&folder.error(), words);
    }
    let folder = Folder::copy_of("hybrid-geom-awq");
    folder.edit_json("config.json", |root| {
        root.as_object_mut().unwrap().remove("quantization_config");
    });
    assert_names(&folder.error(), &["qweight", "no quantization_config", "awq"]);

    for (pointer, value, words) in [
        ("weights/num_bits", json!(8), &["num_bits", "8"][..]),
        ("weights/actorder", json!("group"), &["actorder", "act-order"]),
        ("weights/group_size", json!(128), &["weight_scale", "groups of 128"]),
        ("weights/symmetric", json!(false), &["weight_scale", "with zero points"]),
        ("weights/type", json!("float"), &["type", "float"]),
        ("input_activations", json!({"num_bits": 8}), &["input_activations"]),
    ] {
        let folder = Folder::copy_of("hybrid-geom-ct");
        folder.edit_json("config.json", |root| {
            let pointer = format!("/quantization_config/config_groups/group_0/{pointer}");
            if let Some(slot) = root.pointer_mut(&pointer) {
                *slot = value;
            }
        });
        assert_names(&folder.error(), words);
    }
    let folder = Folder::copy_of("hybrid-geom-ct");
    folder.edit_tensors(|t| t.get_mut(&format!("{UP}.weight_shape")).unwrap().bytes[0] = 7);
    assert_names(&folder.error(), &["mlp.up_proj.weight_shape", "[263, 128]", "[256, 128]"]);
}

#[test]
fn packed_weights_are_the_rounded_ones() {
    let plain = Folder::copy_of("hybrid-geom").open().unwrap();
    // Largest error of rounding to nearest, in scales; symmetric int4 clips the largest value of one sign.
    for (name, group, zero_points, most) in
        [("hybrid-geom-awq", 128, true, 0.51), ("hybrid-geom-ct", 32, false, 0.55)]
    {
        let packed = Folder::copy_of(name).open().unwrap();
        let mut modules = 0;
        for (linear, format) in &packed.layout.linears {
            if *format == WeightFormat::Bf16 {
                continue;
            }
            assert_eq!(*format, WeightFormat::Int4 { group, zero_points });
            modules += 1;
            let (exact, found) = (rows(&plain, linear), rows(&packed, linear));
            for (block, (exact, found)) in exact.chunks(group).zip(found.chunks(group)).enumerate() {
                let range = exact.iter().fold([0f32, 0.0], |[low, high], &w| [low.min(w), high.max(w)]);
                let scale =
                    if zero_points { (range[1] - range[0]) / 15.0 } else { range[1].max(-range[0]) / 7.5 };
                let error = exact.iter().zip(found).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(error <= most * scale, "{} block {block}: {error} of scale {scale}", linear.name());
            }
        }
        assert_eq!(modules, 25, "{name}");
    }
}

fn rows(model: &OpenedModel, linear: &Linear) -> Vec<f32> {
    let mut all = vec![0f32; linear.rows * linear.cols];
    let data = model.weights.linear(linear).unwrap();
    dequant::rows_to_f32(&data, linear.rows, linear.cols, 0..linear.rows, &mut all);
    all
}
