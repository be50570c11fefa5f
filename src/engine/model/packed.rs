//! Packed 4-bit modules of a checkpoint: found by their tensors, every shape checked against the module's.

use super::layout::WeightFormat;
use super::quantization::Scheme;
use super::safetensors_file::Dtype;
use super::tensor_files::{Stored, TensorFiles};
use super::weights::MatrixData;
use crate::{Error, Result};

/// The tensors of one packed module.
#[derive(Debug, Clone)]
pub enum Packing {
    Awq { group: usize, qweight: Stored, qzeros: Stored, scales: Stored },
    CompressedTensors { group: usize, packed: Stored, scales: Stored, zero_points: Option<Stored> },
}

impl Packing {
    pub fn format(&self) -> WeightFormat {
        match self {
            Self::Awq { group, .. } => WeightFormat::Int4 { group: *group, zero_points: true },
            Self::CompressedTensors { group, zero_points, .. } => {
                WeightFormat::Int4 { group: *group, zero_points: zero_points.is_some() }
            }
        }
    }

    pub fn data<'a>(&self, files: &'a TensorFiles) -> MatrixData<'a> {
        match self {
            Self::Awq { group, qweight, qzeros, scales } => MatrixData::Awq {
                group: *group,
                qweight: files.bytes(qweight),
                qzeros: files.bytes(qzeros),
                scales: files.bytes(scales),
            },
            Self::CompressedTensors { group, packed, scales, zero_points } => MatrixData::CompressedTensors {
                group: *group,
                packed: files.bytes(packed),
                scales: files.bytes(scales),
                // Checked when the module was found.
                scale_format: scales.entry.dtype.weight_format().unwrap_or(WeightFormat::F16),
                zero_points: zero_points.as_ref().map(|stored| files.bytes(stored)),
            },
        }
    }
}

/// The packed tensors of module `name`, or `None` if there are none. Names found are added to `used`.
pub fn find(
    files: &TensorFiles,
    name: &str,
    rows: usize,
    cols: usize,
    scheme: &Scheme,
    used: &mut Vec<String>,
) -> Result<Option<Packing>> {
    for order in ["g_idx", "weight_g_idx"] {
        if let Some(stored) = files.get(&format!("{name}.{order}")) {
            return Err(refused(files, stored, "its columns are reordered by activation (act-order)"));
        }
    }
    let module = Module { files, name, rows, cols };
    if let Some(qweight) = files.get(&format!("{name}.qweight")) {
        let Scheme::Awq { group } = scheme else { return Err(not_announced(files, qweight, scheme, "awq")) };
        used.extend(["qweight", "qzeros", "scales"].map(|part| format!("{name}.{part}")));
        return module.awq(qweight, group.unwrap_or(cols)).map(Some);
    }
    if let Some(packed) = files.get(&format!("{name}.weight_packed")) {
        let Scheme::CompressedTensors { groups } = scheme else {
            return Err(not_announced(files, packed, scheme, "compressed-tensors"));
        };
        used.extend(
            ["weight_packed", "weight_scale", "weight_shape", "weight_zero_point"]
                .map(|part| format!("{name}.{part}")),
        );
        return module.compressed_tensors(packed, groups).map(Some);
    }
    if let Some(scale) = files.get(&format!("{name}.weight_scale")) {
        return Err(refused(files, scale, "its weights are not packed 4-bit integers (FP8 or int8 perhaps)"));
    }
    Ok(None)
}

struct Module<'a> {
    files: &'a TensorFiles,
    name: &'a str,
    rows: usize,
    cols: usize,
}

impl Module<'_> {
    fn awq(&self, qweight: &Stored, group: usize) -> Result<Packing> {
        let Self { rows, cols, .. } = *self;
        if rows % 8 != 0 {
            return Err(refused(
                self.files,
                qweight,
                &format!("its {rows} output features are no multiple of 8"),
            ));
        }
        self.check_group(qweight, group)?;
        let qzeros = self.part("qzeros", qweight)?;
        let scales = self.part("scales", qweight)?;
        self.expect(qweight, &[Dtype::I32], &[cols, rows / 8])?;
        self.expect(qzeros, &[Dtype::I32], &[cols / group, rows / 8])?;
        self.expect(scales, &[Dtype::F16], &[cols / group, rows])?;
        Ok(Packing::Awq { group, qweight: qweight.clone(), qzeros: qzeros.clone(), scales: scales.clone() })
    }

    fn compressed_tensors(&self, packed: &Stored, groups: &[(Option<usize>, bool)]) -> Result<Packing> {
        let Self { rows, cols, .. } = *self;
        if cols % 8 != 0 {
            return Err(refused(
                self.files,
                packed,
                &format!("its {cols} input features are no multiple of 8"),
            ));
        }
        self.expect(packed, &[Dtype::I32], &[rows, cols / 8])?;
        self.check_weight_shape(packed)?;
        let scales = self.part("weight_scale", packed)?;
        let zero_points = self.files.get(&format!("{}.weight_zero_point", self.name));
        // The group follows from the scales, and must be one that the configuration announces for such modules.
        let fitting = groups.iter().find(|(group, symmetric)| {
            let group = group.unwrap_or(cols);
            *symmetric == zero_points.is_none() && scales.entry.shape == [rows, cols.div_ceil(group)]
        });
        let Some((group, _)) = fitting else {
            let announced: Vec<String> =
                groups.iter().map(|(group, symmetric)| describe(*group, *symmetric)).collect();
            return Err(self.files.wrong(
                scales,
                format!(
                    "shape {:?} and {} zero points beside it",
                    scales.entry.shape,
                    if zero_points.is_some() { "packed" } else { "no" }
                ),
                format!("the scales of a [{rows}, {cols}] module with {}", announced.join(" or ")),
            ));
        };
        let group = group.unwrap_or(cols);
        self.check_group(packed, group)?;
        self.expect(scales, &[Dtype::Bf16, Dtype::F16], &[rows, cols / group])?;
        if let Some(zero_points) = zero_points {
            if rows % 8 != 0 {
                let why = format!("its {rows} output features are no multiple of 8");
                return Err(refused(self.files, zero_points, &why));
            }
            self.expect(zero_points, &[Dtype::I32], &[rows / 8, cols / group])?;
        }
        Ok(Packing::CompressedTensors {
            group,
            packed: packed.clone(),
            scales: scales.clone(),
            zero_points: zero_points.cloned(),
        })
    }

    fn check_group(&self, stored: &Stored, group: usize) -> Result<()> {
        if group == 0 || !self.cols.is_multiple_of(group) || !group.is_multiple_of(8) {
            let why = format!("groups of {group} do not divide its {} input features", self.cols);
            return Err(refused(self.files, stored, &why));
        }
        Ok(())
    }

    /// `weight_shape` holds the unpacked shape.
    fn check_weight_shape(&self, packed: &Stored) -> Result<()> {
        let stored = self.part("weight_shape", packed)?;
        self.expect(stored, &[Dtype::I64, Dtype::I32], &[2])?;
        let bytes = self.files.bytes(stored);
        let found: Vec<i64> = match stored.entry.dtype {
            Dtype::I64 => bytes.as_chunks::<8>().0.iter().map(|&b| i64::from_le_bytes(b)).collect(),
            _ => bytes.as_chunks::<4>().0.iter().map(|&b| i64::from(i32::from_le_bytes(b))).collect(),
        };
        if found != [self.rows as i64, self.cols as i64] {
            return Err(self.files.wrong(
                stored,
                format!("{found:?}"),
                format!("[{}, {}]", self.rows, self.cols),
            ));
        }
        Ok(())
    }

    fn part(&self, part: &str, beside: &Stored) -> Result<&Stored> {
        self.files.get(&format!("{}.{part}", self.name)).ok_or_else(|| {
            Error::invalid(
                format!("{}: there is no `{}.{part}` beside it", self.files.place(beside), self.name),
                "the checkpoint is incomplete: fetch it again",
            )
        })
    }

    fn expect(&self, stored: &Stored, dtypes: &[Dtype], shape: &[usize]) -> Result<()> {
        let entry = &stored.entry;
        if !dtypes.contains(&entry.dtype) {
            let expected = dtypes.iter().map(|dtype| dtype.name()).collect::<Vec<_>>().join(" or ");
            return Err(self.files.wrong(stored, format!("type {}", entry.dtype.name()), expected));
        }
        if entry.shape != shape {
            return Err(self.files.wrong(
                stored,
                format!("shape {:?}", entry.shape),
                format!("{shape:?} for a 4-bit module of [{}, {}]", self.rows, self.cols),
            ));
        }
        Ok(())
    }
}

fn describe(group: Option<usize>, symmetric: bool) -> String {
    let group = group.map_or_else(|| "one scale a row".to_string(), |group| format!("groups of {group}"));
    format!("{group}, {}", if symmetric { "symmetric" } else { "with zero points" })
}

fn refused(files: &TensorFiles, stored: &Stored, why: &str) -> Error {
    Error::invalid(
        format!("{} cannot be read: {why}", files.place(stored)),
        "use a checkpoint in AutoAWQ GEMM int4 or compressed-tensors pack-quantized int4, or a 16-bit one",
    )
}

fn not_announced(files: &TensorFiles, stored: &Stored, scheme: &Scheme, expected: &str) -> Error {
    let found = match scheme {
        Scheme::None => "config.json has no quantization_config".to_string(),
        Scheme::Awq { .. } => "config.json announces awq".to_string(),
        Scheme::CompressedTensors { .. } => "config.json announces compressed-tensors".to_string(),
    };
    Error::invalid(
        format!("{} is packed, but {found}, expected quant_method {expected}", files.place(stored)),
        "config.json and the weights may be of different versions, or this module must stay in 16 bits",
    )
}
