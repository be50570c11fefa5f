//! Writes synthetic weights as a checkpoint folder in the published layout, so that other engines and tools can load
//! the same model. One tensor at a time: memory stays small whatever the model's size.
//!
//! 16-bit matrices are written as they are; 4-bit ones as compressed-tensors pack-quantized with zero points, whose
//! words are those of [`mod@synthetic`].

use std::io::{BufWriter, Write};
use std::path::Path;

use serde_json::{Value, json};

use super::checkpoint::vectors;
use super::layout::{ModelLayout, WeightFormat};
use super::new_folder::NewFolder;
use super::safetensors_file::{Dtype, header_bytes};
use super::spec::{Family, Linear, Mixer, ModelSpec, Role, RopeScaling};
use super::synthetic::{self, SyntheticWeights};
use super::weights::{MatrixData, Weights};
use crate::{Error, Result};

/// The key of config.json that says where random weights came from: `{"weights": "synthetic", "seed": 0}`. Readers of the
/// published layout pass over keys they don't know; quantised copies keep it.
const MARK: &str = "inferwall";

/// Whether a config.json is one of random weights that this program wrote.
pub fn is_synthetic(config: &serde_json::Map<String, Value>) -> bool {
    config.get(MARK).and_then(|mark| mark.get("weights")).and_then(Value::as_str) == Some("synthetic")
}

/// Elements written at a time.
const CHUNK: usize = 1 << 20;

/// Writes `config.json` and `model.safetensors` into the new folder `out`; returns the bytes of the weights.
///
/// # Errors
/// The folder exists and is not empty, or cannot be written.
pub fn synthetic(layout: &ModelLayout, seed: u64, out: &Path) -> Result<u64> {
    let mut folder = NewFolder::create(out)?;
    let weights = SyntheticWeights::new(layout.clone(), seed);
    let tensors = tensors(layout, &weights)?;
    let mut config = config(layout);
    config[MARK] = json!({ "weights": "synthetic", "seed": seed });
    let config = serde_json::to_string_pretty(&config).map_err(|error| {
        Error::failed(
            format!("cannot write config.json: {error}"),
            "this is a fault of the program: please report it",
        )
    })?;
    let path = folder.file("model.safetensors");
    let bytes = write_file(&path, &tensors, &weights).map_err(|error| Error::write(&path, &error))?;
    // Last, so that a folder with a config.json is whole.
    let path = folder.file("config.json");
    std::fs::write(&path, config + "\n").map_err(|error| Error::write(&path, &error))?;
    folder.keep();
    Ok(bytes)
}

struct Tensor {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    content: Content,
}

enum Content {
    Noise { seed: u64, std: f32 },
    Int4Words { seed: u64 },
    Int4Scales { std: f32 },
    Int4ZeroPoints { seed: u64, groups: usize },
    Shape([i64; 2]),
    Vector(String),
}

impl Tensor {
    fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

fn tensors(layout: &ModelLayout, weights: &SyntheticWeights) -> Result<Vec<Tensor>> {
    let spec = &layout.spec;
    let prefix = prefix(spec);
    let mut all = Vec::new();
    push_matrix(
        &mut all,
        &format!("{prefix}embed_tokens"),
        spec.vocab_size,
        spec.hidden_size,
        weights.embedding()?,
    );
    for (linear, _) in &layout.linears {
        if linear.role == Role::Head && spec.tied_head {
            continue;
        }
        let prefix = if linear.role == Role::Head { "" } else { prefix };
        let name = format!("{prefix}{}", linear.name());
        push_matrix(&mut all, &name, linear.rows, linear.cols, weights.linear(linear)?);
    }
    for (name, shape) in vectors(spec) {
        all.push(Tensor {
            name: format!("{prefix}{name}"),
            dtype: Dtype::F32,
            shape,
            content: Content::Vector(name),
        });
    }
    Ok(all)
}

fn push_matrix(all: &mut Vec<Tensor>, name: &str, rows: usize, cols: usize, data: MatrixData<'_>) {
    let MatrixData::Synthetic { format, seed, std } = data else { return };
    let mut push = |part: &str, dtype, shape: &[usize], content| {
        all.push(Tensor { name: format!("{name}.{part}"), dtype, shape: shape.to_vec(), content });
    };
    let WeightFormat::Int4 { group, .. } = format else {
        return push("weight", Dtype::F16, &[rows, cols], Content::Noise { seed, std });
    };
    let groups = cols / group;
    push("weight_packed", Dtype::I32, &[rows, cols / 8], Content::Int4Words { seed });
    push("weight_scale", Dtype::F16, &[rows, groups], Content::Int4Scales { std });
    push("weight_zero_point", Dtype::I32, &[rows / 8, groups], Content::Int4ZeroPoints { seed, groups });
    push("weight_shape", Dtype::I64, &[2], Content::Shape([rows as i64, cols as i64]));
}

fn write_file(path: &Path, tensors: &[Tensor], weights: &SyntheticWeights) -> std::io::Result<u64> {
    let (header, bytes) = header_bytes(
        tensors.iter().map(|tensor| (tensor.name.as_str(), tensor.dtype, tensor.shape.as_slice())),
    );
    let mut file = BufWriter::with_capacity(1 << 20, std::fs::File::create(path)?);
    file.write_all(&header)?;
    for tensor in tensors {
        write_tensor(&mut file, tensor, weights)?;
    }
    file.into_inner()?.sync_all()?;
    Ok(bytes)
}

fn write_tensor(file: &mut impl Write, tensor: &Tensor, weights: &SyntheticWeights) -> std::io::Result<()> {
    let elements = tensor.elements();
    match &tensor.content {
        Content::Noise { seed, std } => {
            let mut values = vec![0u16; CHUNK.min(elements)];
            for start in (0..elements).step_by(CHUNK) {
                let values = &mut values[..CHUNK.min(elements - start)];
                synthetic::fill_f16(*seed, start as u64, *std, values);
                let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
                file.write_all(&bytes)?;
            }
            Ok(())
        }
        Content::Int4Words { seed } => (0..elements as u64)
            .try_for_each(|index| file.write_all(&synthetic::int4_word(*seed, index).to_le_bytes())),
        Content::Int4Scales { std } => {
            let scale = synthetic::int4_scale(*std).to_le_bytes();
            (0..elements).try_for_each(|_| file.write_all(&scale))
        }
        Content::Int4ZeroPoints { seed, groups } => (0..elements).try_for_each(|index| {
            let (block, group) = (index / groups, index % groups);
            let word = (0..8).fold(0u32, |word, row| {
                let at = ((8 * block + row) * groups + group) as u64;
                word | u32::from(synthetic::int4_zero_point(*seed, at)) << (4 * row)
            });
            file.write_all(&word.to_le_bytes())
        }),
        Content::Shape(shape) => shape.iter().try_for_each(|size| file.write_all(&size.to_le_bytes())),
        Content::Vector(name) => {
            let values = weights.vector(name, elements).map_err(std::io::Error::other)?;
            values.iter().try_for_each(|value| file.write_all(&value.to_le_bytes()))
        }
    }
}

/// The tensor prefix of a family's published files.
fn prefix(spec: &ModelSpec) -> &'static str {
    if spec.family == Family::Qwen35 { "model.language_model." } else { "model." }
}

/// The `config.json` of a synthetic layout.
pub fn config(layout: &ModelLayout) -> Value {
    let spec = &layout.spec;
    let attention = &spec.attention;
    let mut text = json!({
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.layers.len(),
        "vocab_size": spec.vocab_size,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": short_float(spec.norm_eps),
        "max_position_embeddings": spec.max_position,
        "tie_word_embeddings": spec.tied_head,
        "dtype": "float16",
    });
    if let (Some(delta), Value::Object(text)) = (&spec.delta_net, &mut text) {
        let kinds = spec.layers.iter().map(|mixer| match mixer {
            Mixer::DeltaNet => "linear_attention",
            Mixer::Attention => "full_attention",
        });
        let share = attention.rope.rotary_dim as f64 / attention.head_dim as f64;
        text.extend([
            ("model_type".to_string(), json!("qwen3_5_text")),
            ("attn_output_gate".to_string(), json!(attention.output_gate)),
            ("layer_types".to_string(), json!(kinds.collect::<Vec<_>>())),
            ("linear_num_key_heads".to_string(), json!(delta.key_heads)),
            ("linear_num_value_heads".to_string(), json!(delta.value_heads)),
            ("linear_key_head_dim".to_string(), json!(delta.key_dim)),
            ("linear_value_head_dim".to_string(), json!(delta.value_dim)),
            ("linear_conv_kernel_dim".to_string(), json!(delta.conv_width)),
            ("mamba_ssm_dtype".to_string(), json!("float32")),
            ("mtp_num_hidden_layers".to_string(), json!(0)),
            (
                "rope_parameters".to_string(),
                json!({ "rope_type": "default", "rope_theta": attention.rope.theta, "partial_rotary_factor": share }),
            ),
        ]);
    } else if let Value::Object(text) = &mut text {
        debug_assert_eq!(attention.rope.scaling, RopeScaling::None, "presets rotate plainly");
        text.insert("rope_theta".to_string(), json!(attention.rope.theta));
    }
    let mut root = match spec.family {
        Family::Qwen35 => json!({
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5",
            "text_config": text,
            "tie_word_embeddings": spec.tied_head,
        }),
        family => {
            let (architecture, model_type) = match family {
                Family::Qwen2 => ("Qwen2ForCausalLM", "qwen2"),
                Family::Qwen3 => ("Qwen3ForCausalLM", "qwen3"),
                _ => ("LlamaForCausalLM", "llama"),
            };
            text["architectures"] = json!([architecture]);
            text["model_type"] = json!(model_type);
            text
        }
    };
    if let Some(quantization) = quantization_config(layout) {
        root["quantization_config"] = quantization;
    }
    root
}

fn quantization_config(layout: &ModelLayout) -> Option<Value> {
    let int4 = |format: &WeightFormat| match format {
        WeightFormat::Int4 { group, .. } => Some(*group),
        _ => None,
    };
    let group = layout.linears.iter().find_map(|(_, format)| int4(format))?;
    let prefix = prefix(&layout.spec);
    let plain = |(linear, format): &(Linear, WeightFormat)| match (int4(format), linear.role) {
        (Some(_), _) => None,
        (None, Role::Head) => Some("lm_head".to_string()),
        (None, _) => Some(format!("{prefix}{}", linear.name())),
    };
    let ignore: Vec<String> = layout.linears.iter().filter_map(plain).collect();
    Some(json!({
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": { "group_0": {
            "targets": ["Linear"],
            "input_activations": null,
            "output_activations": null,
            "weights": { "num_bits": 4, "type": "int", "strategy": "group", "group_size": group, "symmetric": false,
                         "dynamic": false, "actorder": null },
        } },
        "ignore": ignore,
    }))
}

/// 1e-6 for the f32 nearest to it: what a person would write.
fn short_float(value: f32) -> f64 {
    value.to_string().parse().unwrap_or(f64::from(value))
}

#[cfg(test)]
mod tests {
    use super::super::dequant::rows_to_f32;
    use super::super::{ModelRef, OpenOptions, open, synthetic_layout};
    use super::*;

    /// A preset's layout with small sizes, int4 MLPs from layer 1 on.
    fn small(preset: &str) -> ModelLayout {
        let mut layout = synthetic_layout(preset).unwrap();
        let spec = &mut layout.spec;
        (spec.hidden_size, spec.intermediate_size) = (256, 384);
        (spec.vocab_size, spec.real_vocab_size) = (320, 320);
        spec.layers = spec.layers[2..4].to_vec();
        let mlp = |linear: &Linear| {
            linear.layer == Some(1) && matches!(linear.role, Role::Gate | Role::Up | Role::Down)
        };
        let int4 = WeightFormat::Int4 { group: 128, zero_points: true };
        let format = |linear: &Linear| if mlp(linear) { int4 } else { WeightFormat::F16 };
        layout.linears = layout.spec.linears().into_iter().map(|linear| (linear, format(&linear))).collect();
        layout
    }

    #[test]
    fn a_written_folder_opens_as_the_same_weights() {
        for preset in ["qwen3.5-9b-awq-mlp", "qwen2.5-7b", "demo"] {
            let layout = small(preset);
            let folder = tempfile::tempdir().unwrap();
            let bytes = synthetic(&layout, 7, folder.path()).unwrap();
            let opened =
                open(&ModelRef::Folder(folder.path().to_path_buf()), &OpenOptions::default()).unwrap();
            assert_eq!(opened.layout.linears, layout.linears, "{preset}");
            assert!(bytes > 0 && opened.layout.synthetic, "marked as what it is");
            let mut spec = opened.layout.spec.clone();
            spec.name.clone_from(&layout.spec.name);
            assert_eq!(spec, layout.spec, "{preset}");

            let weights = SyntheticWeights::new(layout.clone(), 7);
            for (linear, _) in &layout.linears {
                let rows = |source: &dyn Weights| {
                    let mut all = vec![0f32; linear.rows * linear.cols];
                    let data = source.linear(linear).unwrap();
                    rows_to_f32(&data, linear.rows, linear.cols, 0..linear.rows, &mut all);
                    all
                };
                assert!(rows(&weights) == rows(opened.weights.as_ref()), "{preset} {}", linear.name());
            }
            for (name, shape) in vectors(&layout.spec) {
                let elements = shape.iter().product();
                let written = opened.weights.vector(&name, elements).unwrap();
                assert_eq!(written, weights.vector(&name, elements).unwrap(), "{preset} {name}");
            }
            let again = synthetic(&layout, 7, folder.path()).unwrap_err();
            assert!(again.to_string().contains("not empty"), "{again}");
        }
    }
}
