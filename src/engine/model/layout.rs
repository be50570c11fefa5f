//! A model's shape together with the storage format of each of its matrices: all that is needed to count bytes.

use serde::{Deserialize, Serialize};

use super::spec::{Linear, ModelSpec};

/// How a matrix is stored in the device's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WeightFormat {
    F32,
    F16,
    Bf16,
    /// 4-bit with a 16-bit scale for each `group` columns of a row, and a 4-bit zero point if `zero_points`.
    Int4 {
        group: usize,
        zero_points: bool,
    },
}

impl WeightFormat {
    /// Bytes of a [rows, cols] matrix: int4 counts packed weights, scales and zero points.
    pub fn bytes(self, rows: usize, cols: usize) -> u64 {
        let elements = rows as u64 * cols as u64;
        match self {
            Self::F32 => 4 * elements,
            Self::F16 | Self::Bf16 => 2 * elements,
            Self::Int4 { group, zero_points } => {
                let groups = rows as u64 * cols.div_ceil(group) as u64;
                elements.div_ceil(2) + 2 * groups + if zero_points { groups.div_ceil(2) } else { 0 }
            }
        }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ModelLayout {
    pub spec: ModelSpec,
    /// Every linear module with its format, in the order of [`ModelSpec::linears`].
    pub linears: Vec<(Linear, WeightFormat)>,
    /// Format of the embedding table (and of a tied head).
    pub embedding: WeightFormat,
    /// Weights are seeded noise, not a trained model.
    pub synthetic: bool,
    /// Identifies the weights in run.json: a hash of the tensors' headers, or the preset and seed.
    pub hash: String,
}

impl ModelLayout {
    /// Bytes of all weights in the device's memory. A tied head is counted once.
    pub fn weight_bytes(&self) -> u64 {
        let spec = &self.spec;
        let embedding = self.embedding.bytes(spec.vocab_size, spec.hidden_size);
        let head = if spec.tied_head { 0 } else { self.head_bytes() };
        embedding + head + self.layer_bytes() + self.small_bytes()
    }

    /// Bytes of weights that one step streams, whatever its batch: everything but an untied embedding, of which
    /// a step reads single rows.
    pub fn streamed_bytes(&self) -> u64 {
        self.layer_bytes() + self.head_bytes() + self.small_bytes()
    }

    /// Weights of the text model. A tied head is counted once.
    pub fn parameters(&self) -> u64 {
        let spec = &self.spec;
        let matrices: u64 =
            self.linears.iter().map(|(linear, _)| linear.rows as u64 * linear.cols as u64).sum();
        let embedding = if spec.tied_head { 0 } else { spec.vocab_size as u64 * spec.hidden_size as u64 };
        matrices + embedding + self.small_elements()
    }

    pub fn head_bytes(&self) -> u64 {
        let spec = &self.spec;
        let format = if spec.tied_head { self.embedding } else { self.linears[self.linears.len() - 1].1 };
        format.bytes(spec.vocab_size, spec.hidden_size)
    }

    fn layer_bytes(&self) -> u64 {
        let in_layers = self.linears.iter().filter(|(linear, _)| linear.layer.is_some());
        in_layers.map(|(linear, format)| format.bytes(linear.rows, linear.cols)).sum()
    }

    /// Norms, convolutions, gates' biases: two bytes an element (the published files' 16-bit types), as the
    /// byte tables count them.
    fn small_bytes(&self) -> u64 {
        2 * self.small_elements()
    }

    /// Elements of all weights that are not matrices.
    pub fn small_elements(&self) -> u64 {
        let spec = &self.spec;
        let norms = spec.hidden_size * (2 * spec.layers.len() + 1);
        let attention = &spec.attention;
        let mut per_attention = 0;
        if attention.qk_norm {
            per_attention += 2 * attention.head_dim;
        }
        if attention.qkv_bias {
            per_attention += (attention.heads + 2 * attention.kv_heads) * attention.head_dim;
        }
        let per_delta = spec.delta_net.as_ref().map_or(0, |delta| {
            delta.conv_channels() * delta.conv_width + 2 * delta.value_heads + delta.value_dim
        });
        (norms + per_attention * spec.attention_layers() + per_delta * spec.delta_net_layers()) as u64
    }
}
