//! What `model inspect` tells: everything that can be said of a model without loading it.

use serde::Serialize;
use serde_json::json;

use crate::engine::model::layout::{ModelLayout, WeightFormat};
use crate::engine::model::spec::{Mixer, Role};
use crate::engine::model::{OpenedModel, Skipped};
use crate::{Error, Result};

pub struct Report<'a> {
    model: &'a OpenedModel,
    components: Vec<Component>,
}

/// A group of weights of the text model.
#[derive(Debug, Serialize)]
struct Component {
    name: &'static str,
    parameters: u64,
    bytes: u64,
    /// Formats with the modules that have them: `int4 g128 zero points: 24, f16: 8`.
    formats: String,
    /// Read in full by every decode step, whatever the batch.
    streamed: bool,
}

/// Matrices in the order a step meets them.
const GROUPS: [(&str, &[Role]); 8] = [
    ("linear attention qkv", &[Role::InQkv]),
    ("linear attention z", &[Role::InZ]),
    ("linear attention a, b", &[Role::InA, Role::InB]),
    ("linear attention out", &[Role::DeltaOut]),
    ("attention q", &[Role::Q]),
    ("attention k, v", &[Role::K, Role::V]),
    ("attention out", &[Role::O]),
    ("mlp", &[Role::Gate, Role::Up, Role::Down]),
];

impl<'a> Report<'a> {
    pub fn new(model: &'a OpenedModel) -> Self {
        Self { model, components: components(&model.layout) }
    }

    pub fn json(&self) -> Result<String> {
        let layout = &self.model.layout;
        let spec = &layout.spec;
        let value = json!({
            "name": spec.name,
            "architecture": spec.family,
            "weights": if layout.synthetic { "synthetic" } else { "real" },
            "hash": layout.hash,
            "layers": spec.layers.len(),
            "linear_attention_layers": spec.delta_net_layers(),
            "attention_layers": spec.attention_layers(),
            "hidden_size": spec.hidden_size,
            "vocab_size": spec.vocab_size,
            "real_vocab_size": spec.real_vocab_size,
            "tied_head": spec.tied_head,
            "max_position": spec.max_position,
            "eos_tokens": spec.eos_tokens,
            "parameters": layout.parameters(),
            "bytes": layout.weight_bytes(),
            "streamed_bytes_per_step": layout.streamed_bytes(),
            "quantized_modules": quantized(layout),
            "components": self.components,
            "state_bytes_per_sequence_f32": state_bytes(layout),
            "kv_elements_per_token": spec.kv_elements_per_token(),
            "skipped": self.model.skipped,
            "tokenizer": self.model.tokenizer,
            "generation": self.model.generation,
        });
        let text = serde_json::to_string_pretty(&value)
            .map_err(|error| Error::bug(format!("cannot write the report as JSON: {error}")))?;
        Ok(text + "\n")
    }

    pub fn text(&self) -> String {
        let layout = &self.model.layout;
        let spec = &layout.spec;
        let family = serde_json::to_value(spec.family).ok();
        let family = family.as_ref().and_then(|name| name.as_str()).unwrap_or_default().to_string();
        let mut lines = vec![
            format!(
                "{} ({family}, weights: {})",
                spec.name,
                if layout.synthetic { "synthetic" } else { "real" }
            ),
            format!(
                "{} layers ({} linear attention, {} attention), hidden {}, MLP {}, vocabulary {} ({} real), {} head",
                spec.layers.len(),
                spec.delta_net_layers(),
                spec.attention_layers(),
                spec.hidden_size,
                spec.intermediate_size,
                spec.vocab_size,
                spec.real_vocab_size,
                if spec.tied_head { "tied" } else { "separate" }
            ),
            format!(
                "attention: {} query and {} key-value heads of {}, {} dims rotated",
                spec.attention.heads,
                spec.attention.kv_heads,
                spec.attention.head_dim,
                spec.attention.rope.rotary_dim
            ),
        ];
        if let Some(delta) = &spec.delta_net {
            lines.push(format!(
                "linear attention: {} key heads of {}, {} value heads of {}, convolution {}",
                delta.key_heads, delta.key_dim, delta.value_heads, delta.value_dim, delta.conv_width
            ));
        }
        lines.push(String::new());
        let mut table = comfy_table::Table::new();
        table.load_preset(comfy_table::presets::NOTHING);
        table.set_header(["component", "parameters", "bytes", "format", "a decode step"]);
        for component in &self.components {
            table.add_row([
                component.name.to_string(),
                thousands(component.parameters),
                thousands(component.bytes),
                component.formats.clone(),
                if component.streamed { "streams it" } else { "reads rows" }.to_string(),
            ]);
        }
        table.add_row(["total".into(), thousands(layout.parameters()), thousands(layout.weight_bytes())]);
        for column in [1, 2] {
            if let Some(column) = table.column_mut(column) {
                column.set_cell_alignment(comfy_table::CellAlignment::Right);
            }
        }
        lines.extend(table.to_string().lines().map(|line| line.trim_end().to_string()));
        lines.push(String::new());
        let (packed, all) = quantized(layout);
        lines.push(match packed {
            0 => "quantised: nothing".to_string(),
            _ => format!("quantised: {packed} of {all} linear modules"),
        });
        lines.push(format!("skipped: {}", skipped(&self.model.skipped)));
        lines.push(format!("a decode step streams {} bytes of weights", thousands(layout.streamed_bytes())));
        lines.push(format!(
            "a sequence adds {} bytes of state (f32), and {} bytes of KV a token (16-bit)",
            thousands(state_bytes(layout)),
            thousands(2 * spec.kv_elements_per_token() as u64)
        ));
        lines.push(match &self.model.tokenizer {
            Some(path) => format!("tokenizer: {}", path.display()),
            None => "tokenizer: bytes".to_string(),
        });
        lines.join("\n") + "\n"
    }
}

fn components(layout: &ModelLayout) -> Vec<Component> {
    let spec = &layout.spec;
    let table = (spec.vocab_size * spec.hidden_size) as u64;
    let mut all = vec![Component {
        name: if spec.tied_head { "embedding and head" } else { "embedding" },
        parameters: table,
        bytes: layout.embedding.bytes(spec.vocab_size, spec.hidden_size),
        formats: describe(layout.embedding),
        streamed: spec.tied_head,
    }];
    for (name, roles) in GROUPS {
        all.extend(group(layout, name, roles));
    }
    if !spec.tied_head {
        all.extend(group(layout, "head", &[Role::Head]));
    }
    let small = layout.small_elements();
    all.push(Component {
        name: if spec.layers.contains(&Mixer::DeltaNet) {
            "norms, convolutions, gates"
        } else {
            "norms, biases"
        },
        parameters: small,
        bytes: 2 * small,
        formats: "counted as 16-bit".to_string(),
        streamed: true,
    });
    all
}

fn group(layout: &ModelLayout, name: &'static str, roles: &[Role]) -> Option<Component> {
    let chosen: Vec<_> = layout.linears.iter().filter(|(linear, _)| roles.contains(&linear.role)).collect();
    let mut formats: Vec<(WeightFormat, usize)> = Vec::new();
    for (_, format) in &chosen {
        match formats.iter_mut().find(|(known, _)| known == format) {
            Some((_, count)) => *count += 1,
            None => formats.push((*format, 1)),
        }
    }
    let formats: Vec<String> = match formats[..] {
        [] => return None,
        [(format, _)] => vec![describe(format)],
        _ => formats
            .iter()
            .map(|(format, count)| format!("{} in {count} modules", describe(*format)))
            .collect(),
    };
    Some(Component {
        name,
        parameters: chosen.iter().map(|(linear, _)| linear.rows as u64 * linear.cols as u64).sum(),
        bytes: chosen.iter().map(|(linear, format)| format.bytes(linear.rows, linear.cols)).sum(),
        formats: formats.join(", "),
        streamed: true,
    })
}

fn describe(format: WeightFormat) -> String {
    match format {
        WeightFormat::F32 => "f32".to_string(),
        WeightFormat::F16 => "f16".to_string(),
        WeightFormat::Bf16 => "bf16".to_string(),
        WeightFormat::Int4 { group, zero_points } => {
            format!("int4 g{group}{}", if zero_points { " zero points" } else { " symmetric" })
        }
    }
}

/// (4-bit linear modules, all linear modules).
fn quantized(layout: &ModelLayout) -> (usize, usize) {
    let packed = layout.linears.iter().filter(|(_, format)| matches!(format, WeightFormat::Int4 { .. }));
    (packed.count(), layout.linears.len())
}

fn skipped(skipped: &Skipped) -> String {
    let parts: Vec<String> =
        [("vision tower", skipped.vision), ("MTP head", skipped.mtp), ("copies", skipped.other)]
            .into_iter()
            .filter(|(_, component)| component.tensors > 0)
            .map(|(name, component)| {
                format!(
                    "{name} ({} tensors, {} parameters, {} bytes)",
                    component.tensors,
                    thousands(component.parameters),
                    thousands(component.bytes)
                )
            })
            .collect();
    if parts.is_empty() { "nothing".to_string() } else { parts.join(", ") }
}

/// Recurrent state in f32 and convolution window in 16 bits of all layers.
fn state_bytes(layout: &ModelLayout) -> u64 {
    let layers = layout.spec.delta_net_layers();
    let delta = layout.spec.delta_net.as_ref();
    delta.map_or(0, |delta| (layers * (4 * delta.state_elements() + 2 * delta.window_elements())) as u64)
}

fn thousands(number: u64) -> String {
    let digits = number.to_string();
    let groups: Vec<&str> =
        digits.as_bytes().rchunks(3).rev().map(|g| std::str::from_utf8(g).unwrap_or("")).collect();
    groups.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::model::{ModelRef, OpenOptions, open};

    fn opened(preset: &str) -> OpenedModel {
        open(&ModelRef::Synthetic { preset: preset.to_string() }, &OpenOptions::default()).unwrap()
    }

    #[test]
    fn components_add_up_to_the_total() {
        for preset in ["demo", "qwen3.5-9b-awq-mlp", "qwen2.5-7b"] {
            let model = opened(preset);
            let report = Report::new(&model);
            let parameters: u64 = report.components.iter().map(|component| component.parameters).sum();
            let bytes: u64 = report.components.iter().map(|component| component.bytes).sum();
            assert_eq!(parameters, model.layout.parameters(), "{preset}");
            assert_eq!(bytes, model.layout.weight_bytes(), "{preset}");
            let streamed: u64 = report.components.iter().filter(|c| c.streamed).map(|c| c.bytes).sum();
            assert_eq!(streamed, model.layout.streamed_bytes(), "{preset}");
        }
    }

    #[test]
    fn the_text_names_what_matters() {
        let model = opened("qwen3.5-9b-awq-mlp");
        let text = Report::new(&model).text();
        for expected in [
            "8,953,803,264",
            "weights: synthetic",
            "int4 g128 zero points in 93 modules",
            "quantised: 93 of 249 linear modules",
            "51,511,296 bytes of state",
            "32,768 bytes of KV",
        ] {
            assert!(text.contains(expected), "{expected} is not in\n{text}");
        }
        let json: serde_json::Value = serde_json::from_str(&Report::new(&model).json().unwrap()).unwrap();
        assert_eq!(json["parameters"], 8_953_803_264u64);
        assert_eq!(json["architecture"], "qwen3_5");
    }
}
