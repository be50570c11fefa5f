//! What goes into a model's linear modules on calibration text: rows of activations at the four points of a layer where
//! modules share an input.

/// Where in a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Point {
    /// After the input norm: q, k, v, or the delta net's projections.
    MixerIn,
    /// The output product of attention or the delta net.
    MixerOut,
    /// After the post-attention norm: gate and up.
    MlpIn,
    /// The down product.
    MlpOut,
}

/// Rows of one point, `[rows][cols]`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Rows {
    pub cols: usize,
    pub values: Vec<f32>,
}

/// The rows of every point of every layer.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Inputs {
    layers: Vec<[Rows; 4]>,
}

impl Inputs {
    pub fn new(layers: usize) -> Self {
        Self { layers: vec![<[Rows; 4]>::default(); layers] }
    }

    pub fn rows(&self, layer: usize, point: Point) -> &Rows {
        &self.layers[layer][point as usize]
    }

    pub fn rows_mut(&mut self, layer: usize, point: Point) -> &mut Rows {
        &mut self.layers[layer][point as usize]
    }
}
