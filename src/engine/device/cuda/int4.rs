//! 4-bit matrices on the GPU: both published formats, and noise, into the one packing the products read (cuda/int4.cuh), made
//! there from the file's own bytes, so that no 16-bit copy of a matrix ever exists.

use super::driver::plain::Plain;
use super::driver::{DeviceBuffer, Gpu, Kernel};
use super::launch::{Arg, Launch, Stream, bytes_of};
use super::matrix::{Matrix, MatrixFormat};
use super::units;
use super::upload::Place;
use crate::engine::model::layout::WeightFormat;
use crate::engine::model::synthetic;
use crate::engine::model::weights::MatrixData;
use crate::{Error, Result};

/// `Packed` of cuda/int4_pack.cu.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct Packed {
    words: u64,
    zeros: u64,
    scales: u64,
    n: u32,
    k: u32,
    group: u32,
    source: u32,
    bfloat: u32,
    block: u32,
    spread: u32,
    first: u32,
    total: u32,
    word_keys: [u32; 2],
    zero_keys: [u32; 2],
    scale: u32,
    drawn_zeros: u32,
    padding: u32,
}

// SAFETY: integers only, and the last field makes the size a multiple of the alignment: no padding.
unsafe impl Plain for Packed {}

const FROM_COLUMNS: u32 = 0;
const FROM_AWQ: u32 = 1;
const FROM_SYNTHETIC: u32 = 2;

/// An unfilled matrix of the packing.
///
/// # Errors
/// Sizes that the packing does not have, naming the module; a full GPU.
pub fn empty(
    gpu: &Gpu,
    name: &str,
    (rows, cols): (usize, usize),
    group: usize,
    zero_points: bool,
) -> Result<Matrix> {
    let blocks_share_scales = group >= 32 && group.is_power_of_two();
    if rows % 16 != 0 || cols % 64 != 0 || !blocks_share_scales || cols % group != 0 {
        return Err(Error::invalid(
            format!(
                "{name} is 4-bit, [{rows}, {cols}] in groups of {group}; the CUDA kernels take rows in 16s, columns in 64s and \
                 groups of 32, 64, 128 and so on"
            ),
            "use --device cpu for this checkpoint",
        ));
    }
    let groups = rows as u64 * (cols / group) as u64;
    let scales = 2 * groups + if zero_points { groups / 2 } else { 0 };
    Ok(Matrix {
        format: MatrixFormat::Int4 { group, zero_points },
        rows,
        cols,
        weights: gpu.allocate((rows * cols / 2) as u64)?,
        scales: Some(gpu.allocate(scales)?),
        bias: None,
    })
}

/// Packs modules; keep one while a model loads.
pub struct Packer {
    gpu: Gpu,
    words: Kernel,
    scales: Kernel,
    faults: DeviceBuffer,
}

impl Packer {
    /// A packer with its kernels loaded.
    ///
    /// # Errors
    /// A kernel that does not compile or load; no memory.
    pub fn new(gpu: &Gpu) -> Result<Self> {
        Ok(Self {
            gpu: gpu.clone(),
            words: gpu.kernel(&units::INT4_PACK, "int4_pack_words")?,
            scales: gpu.kernel(&units::INT4_PACK, "int4_pack_scales")?,
            faults: gpu.allocate_zeroed(16)?,
        })
    }

    /// Writes module `name`, [rows, cols], to its place among the rows of `to`, made by [`empty`]; waits for it.
    ///
    /// # Errors
    /// Data that is not 4-bit or not of `to`'s group, scales that fp16 does not hold, naming the module.
    pub fn pack(
        &self,
        stream: &Stream,
        name: &str,
        data: &MatrixData,
        (rows, cols): (usize, usize),
        place: Place,
        to: &Matrix,
    ) -> Result<()> {
        let (MatrixFormat::Int4 { group, zero_points }, Some(side)) = (to.format, &to.scales) else {
            return Err(Error::bug(format!("{name}: packing into a matrix that is not 4-bit")));
        };
        let mut packed = Packed {
            n: rows as u32,
            k: cols as u32,
            group: group as u32,
            block: place.block,
            spread: place.spread,
            first: place.first,
            total: to.rows as u32,
            ..Packed::default()
        };
        // What the kernels read stays alive until the wait below.
        let mut held: Vec<DeviceBuffer> = Vec::new();
        let mut upload = |bytes: &[u8]| -> Result<u64> {
            let buffer = self.gpu.upload(bytes)?;
            let pointer = buffer.pointer();
            held.push(buffer);
            Ok(pointer)
        };
        let found = match *data {
            MatrixData::Awq { group, qweight, qzeros, scales } => {
                packed.source = FROM_AWQ;
                (packed.words, packed.zeros, packed.scales) =
                    (upload(qweight)?, upload(qzeros)?, upload(scales)?);
                Some((group, true))
            }
            MatrixData::CompressedTensors { group, packed: words, scales, scale_format, zero_points } => {
                packed.source = FROM_COLUMNS;
                (packed.words, packed.scales) = (upload(words)?, upload(scales)?);
                packed.zeros = zero_points.map_or(Ok(0), &mut upload)?;
                packed.bfloat = u32::from(scale_format == WeightFormat::Bf16);
                Some((group, zero_points.is_some()))
            }
            MatrixData::Synthetic { format: WeightFormat::Int4 { group, zero_points }, seed, std } => {
                packed.source = FROM_SYNTHETIC;
                packed.word_keys = synthetic::keys(seed, 0);
                packed.zero_keys = synthetic::keys(!seed, 0);
                packed.scale = u32::from(synthetic::int4_scale(std).to_bits());
                packed.drawn_zeros = u32::from(zero_points);
                Some((group, zero_points))
            }
            _ => None,
        };
        if found != Some((group, zero_points)) {
            return Err(Error::bug(format!(
                "{name} holds {found:?} where 4-bit weights in {:?} were expected",
                to.format
            )));
        }
        let words = (to.rows * cols / 8) as u64;
        let scales = (to.rows / 2 * (cols / group)) as u64;
        let zeros = if zero_points { side.at(4 * scales) } else { 0 };
        let structure = [packed];
        let argument = Arg::Struct(bytes_of(&structure));
        let threads = |count: u64| Launch::new(count.div_ceil(256) as u32, 256);
        // SAFETY: the kernels' parameters in order; `to` was made by `empty` for its sizes, the file's parts were checked against
        // the module's when it was found, and everything outlives the wait.
        unsafe {
            let launch = threads(words).cost(8 * words, 0);
            stream.launch(&self.words, launch, &[argument, (&to.weights).into()])?;
            let launch = threads(scales).cost(9 * scales, 0);
            let faults = (&self.faults).into();
            stream.launch(&self.scales, launch, &[argument, side.into(), zeros.into(), faults])?;
        }
        stream.synchronize()?;
        let faults = self.faults.read::<u32>(0, 1)?[0];
        if faults > 0 {
            self.faults.write(0, &[0u32])?;
            return Err(Error::invalid(
                format!("{name}: {faults} scales are not finite or do not fit fp16"),
                "the checkpoint is damaged or needs bf16; try --device cpu",
            ));
        }
        Ok(())
    }
}
