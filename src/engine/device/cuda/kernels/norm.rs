//! Embedding and RMSNorm with the residual sum (cuda/norm.cu).

use crate::engine::device::cuda::driver::{Gpu, Kernel};
use crate::engine::device::cuda::launch::{Launch, Stream};
use crate::engine::device::cuda::units;
use crate::{Error, Result};

/// Widest row: 1,024 threads with two vectors of four.
const MAX_HIDDEN: usize = 8192;
/// Rows from which a kernel of its own is faster, where nothing is added.
const MANY_ROWS: usize = 1024;

/// Rows to which a kernel of fewer registers is faster: rows of the other one find no room beside a product's block, which then helps,
/// since the next product's weights come later.
const FEW_ROWS: usize = 32;

/// A kernel of fewer registers for few rows.
#[derive(Debug, Clone, Copy)]
struct Few {
    kernel: Kernel,
    /// The most that it adds.
    parts: usize,
}

#[derive(Debug, Clone, Copy)]
pub struct Norms {
    embed: Kernel,
    add: Kernel,
    /// None for wider rows than a block of it takes.
    few: Option<Few>,
    gather: Kernel,
    /// For many rows, and its threads; none for wider rows than a block of it holds.
    rows: Option<(Kernel, u32)>,
    hidden: usize,
    eps: f32,
    threads: u32,
}

/// What [`Norms::add`] adds to the residual stream: `parts` (at most 8) sums of [rows, hidden] fp32, `stride` elements apart.
#[derive(Debug, Clone, Copy)]
pub struct Addend {
    pub partials: u64,
    pub parts: usize,
    pub stride: usize,
}

impl Norms {
    /// # Errors
    /// A hidden size that is no multiple of 8 or above 8,192.
    pub fn new(gpu: &Gpu, hidden: usize, eps: f32) -> Result<Self> {
        if !hidden.is_multiple_of(8) || hidden > MAX_HIDDEN {
            return Err(Error::invalid(
                format!(
                    "hidden_size = {hidden}: the CUDA kernels need a multiple of 8, at most {MAX_HIDDEN}"
                ),
                "use --device cpu for this model",
            ));
        }
        // A vector a thread where a block can hold them, else two.
        let vectors = hidden.div_ceil(4);
        let threads = if vectors <= 1024 { vectors } else { vectors.div_ceil(2) };
        let few = match vectors {
            0..=640 => Some(("add_norm_6_parts", 6)),
            641..=1024 => Some(("add_norm_3_parts", 3)),
            _ => None,
        };
        let few = few
            .map(|(name, parts)| Ok(Few { kernel: gpu.kernel(&units::NORM, name)?, parts }))
            .transpose()?;
        Ok(Self {
            embed: gpu.kernel(&units::NORM, "embed_norm")?,
            add: gpu.kernel(&units::NORM, "add_norm")?,
            few,
            gather: gpu.kernel(&units::NORM, "gather_rows")?,
            rows: match hidden {
                0..=2560 => Some((gpu.kernel(&units::NORM, "norm_rows_2560")?, 128)),
                2561..=4096 => Some((gpu.kernel(&units::NORM, "norm_rows_4096")?, 256)),
                _ => None,
            },
            hidden,
            eps,
            threads: threads.next_multiple_of(32) as u32,
        })
    }

    /// residual = `table[tokens]`, normed = norm of it, for `rows` rows.
    ///
    /// # Errors
    /// A launch that the driver refuses, in its words.
    ///
    /// # Safety
    /// Pointers are valid for `rows` rows; tokens are inside the table or indices into `ring` with the highest bit set.
    #[expect(clippy::too_many_arguments, reason = "the operands of one kernel")]
    pub unsafe fn embed(
        &self,
        stream: &Stream,
        rows: usize,
        table: u64,
        tokens: u64,
        ring: u64,
        weight: u64,
        residual: u64,
        normed: u64,
    ) -> Result<()> {
        let bytes = (rows * self.hidden * (2 + 4 + 2)) as u64;
        let launch = Launch::new(rows as u32, self.threads).overlapping().cost(bytes, 0);
        let args = [
            table.into(),
            tokens.into(),
            ring.into(),
            weight.into(),
            residual.into(),
            normed.into(),
            (self.hidden as u32).into(),
            self.eps.into(),
        ];
        // SAFETY: the kernel's parameters in order; the rest is the caller's promise.
        unsafe { stream.launch(&self.embed, launch, &args) }
    }

    /// residual += addend, normed = norm of it, for `rows` rows; with `select` (device address of u32 `[rows]`) row r is made
    /// from residual row `select[r]`, and the sum is not kept.
    ///
    /// # Errors
    /// A launch that the driver refuses, in its words.
    ///
    /// # Safety
    /// Pointers are valid for the rows named.
    #[expect(clippy::too_many_arguments, reason = "the operands of one kernel")]
    pub unsafe fn add(
        &self,
        stream: &Stream,
        rows: usize,
        residual: u64,
        addend: Addend,
        weight: u64,
        select: Option<u64>,
        normed: u64,
    ) -> Result<()> {
        let many = addend.parts == 0 && select.is_none() && rows >= MANY_ROWS;
        if let Some((kernel, threads)) = self.rows.filter(|_| many) {
            let cost = (rows * self.hidden * 6) as u64;
            let launch = Launch::new(rows as u32, threads).overlapping().cost(cost, 0);
            let args =
                [residual.into(), weight.into(), normed.into(), (self.hidden as u32).into(), self.eps.into()];
            // SAFETY: the kernel's parameters in order; the rest is the caller's promise.
            return unsafe { stream.launch(&kernel, launch, &args) };
        }
        let keep = select.is_none();
        let few = self.few.as_ref().filter(|few| rows <= FEW_ROWS && addend.parts <= few.parts);
        let kernel = few.map_or(&self.add, |few| &few.kernel);
        let each = 4 + 2 + 4 * addend.parts + if keep { 4 } else { 0 };
        let launch =
            Launch::new(rows as u32, self.threads).overlapping().cost((rows * self.hidden * each) as u64, 0);
        let args = [
            residual.into(),
            addend.partials.into(),
            (addend.parts as u32).into(),
            (addend.stride as u64).into(),
            weight.into(),
            select.unwrap_or(0).into(),
            normed.into(),
            (self.hidden as u32).into(),
            self.eps.into(),
            i32::from(keep).into(),
        ];
        // SAFETY: the kernel's parameters in order; the rest is the caller's promise.
        unsafe { stream.launch(kernel, launch, &args) }
    }

    /// Rows `select` (device address of u32 `[rows]`) of a residual stream and its norms, `from`, one after the other in `to`.
    ///
    /// # Errors
    /// A launch that the driver refuses, in its words.
    ///
    /// # Safety
    /// Pointers are valid for the rows named; `from` and `to` do not overlap.
    pub unsafe fn gather(
        &self,
        stream: &Stream,
        rows: usize,
        from: (u64, u64),
        select: u64,
        to: (u64, u64),
    ) -> Result<()> {
        let bytes = (rows * self.hidden * 2 * (4 + 2)) as u64;
        let launch = Launch::new(rows as u32, self.threads).overlapping().cost(bytes, 0);
        let args = [
            from.0.into(),
            from.1.into(),
            select.into(),
            to.0.into(),
            to.1.into(),
            (self.hidden as i32 / 4).into(),
        ];
        // SAFETY: the kernel's parameters in order; the rest is the caller's promise.
        unsafe { stream.launch(&self.gather, launch, &args) }
    }
}
