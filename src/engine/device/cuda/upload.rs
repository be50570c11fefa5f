//! Weights into the GPU's memory: noise is made there, files stream through page-locked buffers and are turned into fp16 on
//! the way. While one buffer crosses the bus the next is filled, by several threads, since one alone is slower than PCIe;
//! nothing waits for a tensor to arrive. Nothing but the destination and the staging buffers is allocated.
//!
//! Rows may be placed apart ([`Place`]): modules that read the same input share one matrix, and gate and up rows take
//! turns in theirs.

use super::driver::{DeviceBuffer, Event, Gpu, Kernel, PinnedBuffer};
use super::launch::{Arg, Launch, Stream, bytes_of};
use super::units;
use crate::engine::model::layout::WeightFormat;
use crate::engine::model::synthetic;
use crate::engine::model::weights::MatrixData;
use crate::{Error, Result};

/// Row r of a module becomes row `r / block * spread + r % block + first` of the matrix it is part of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    pub block: u32,
    pub spread: u32,
    pub first: u32,
}

impl Place {
    /// Rows stay together, from `first` on.
    pub fn together(first: usize) -> Self {
        Self { block: u32::MAX, spread: 0, first: first as u32 }
    }

    /// Blocks of `block` rows take turns with another module's; this one's come `turn`-th (0 or 1).
    pub fn in_turn(block: usize, turn: usize) -> Self {
        Self { block: block as u32, spread: 2 * block as u32, first: (block * turn) as u32 }
    }
}

/// Bytes of a staging buffer, and how many there are: one on its way, one waiting, one being filled.
const STAGE_BYTES: usize = 32 << 20;
const STAGES: usize = 3;
/// Threads that fill a buffer, and bytes from which another one pays.
const MAX_COPY_THREADS: usize = 8;
const COPY_BYTES: usize = 1 << 20;
/// Tensors whose faults are counted before they are looked at.
const FAULT_SLOTS: usize = 1024;

struct Stage {
    host: PinnedBuffer,
    device: DeviceBuffer,
    free: Event,
}

/// Copies and converts matrices; keep one while a model loads.
pub struct Uploader {
    gpu: Gpu,
    stream: Stream,
    fill: Kernel,
    convert: Kernel,
    /// A count for each of the tensors in `checked`, which are named with their elements.
    faults: DeviceBuffer,
    checked: Vec<(String, usize)>,
    stages: Vec<Stage>,
    turn: usize,
    copy_threads: usize,
}

impl Uploader {
    /// An uploader with its kernels loaded; staging buffers follow with the first matrix that needs them.
    ///
    /// # Errors
    /// A kernel that does not compile or load; no memory.
    pub fn new(gpu: &Gpu) -> Result<Self> {
        Ok(Self {
            gpu: gpu.clone(),
            stream: Stream::new(gpu)?,
            fill: gpu.kernel(&units::WEIGHTS, "weights_synthetic")?,
            convert: gpu.kernel(&units::WEIGHTS, "weights_convert")?,
            faults: gpu.allocate_zeroed(4 * FAULT_SLOTS as u64)?,
            checked: Vec::new(),
            stages: Vec::new(),
            turn: 0,
            copy_threads: std::thread::available_parallelism()
                .map_or(1, |cores| cores.get().min(MAX_COPY_THREADS)),
        })
    }

    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// The stream that uploads run on.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Writes a [rows, cols] matrix of 16- or 32-bit elements as fp16 into `to`, an fp16 matrix of the same width. The data
    /// has been read when it returns; `to` lives until [`Self::finish`], which also says what was wrong with the elements.
    ///
    /// # Errors
    /// Of this module or an earlier one: elements that are not finite or do not fit fp16, naming it. 4-bit data, which has its
    /// own loader.
    pub fn half(
        &mut self,
        name: &str,
        data: &MatrixData,
        rows: usize,
        cols: usize,
        to: &DeviceBuffer,
        place: Place,
    ) -> Result<()> {
        if !cols.is_multiple_of(8) {
            return Err(Error::invalid(
                format!("{name} has {cols} columns, and the CUDA kernels need a multiple of 8"),
                "use --device cpu for this model",
            ));
        }
        let last = (rows - 1) as u64;
        let last_row =
            last / u64::from(place.block) * u64::from(place.spread) + last % u64::from(place.block);
        if (last_row + u64::from(place.first) + 1) * cols as u64 * 2 > to.bytes() {
            return Err(Error::bug(format!("{name} does not fit the matrix it is part of")));
        }
        match *data {
            MatrixData::Synthetic { format, seed, std } => {
                self.synthetic(format, seed, std, rows as u64 * cols as u64, cols, to, place)
            }
            MatrixData::Dense { format, bytes } => self.dense(name, format, bytes, rows, cols, to, place),
            MatrixData::Awq { .. } | MatrixData::CompressedTensors { .. } => {
                Err(Error::bug(format!("{name} holds 4-bit weights where 16-bit ones were expected")))
            }
        }
    }

    #[expect(clippy::too_many_arguments, reason = "the fields of one matrix")]
    fn synthetic(
        &self,
        format: WeightFormat,
        seed: u64,
        std: f32,
        elements: u64,
        cols: usize,
        to: &DeviceBuffer,
        place: Place,
    ) -> Result<()> {
        let mut first = 0u64;
        while first < elements {
            // Not past the next multiple of 2^32: the keys change there.
            let count = (elements - first).min((1 << 32) - (first & 0xffff_ffff)).min(1 << 31);
            let keys = synthetic::keys(seed, (first >> 32) as u32);
            let place = [place.block, place.spread, place.first];
            let args = [
                to.into(),
                first.into(),
                count.into(),
                (cols as u32).into(),
                Arg::Struct(bytes_of(&place)),
                keys[0].into(),
                keys[1].into(),
                synthetic::unit(std).into(),
                i32::from(format == WeightFormat::Bf16).into(),
            ];
            let launch = Launch::new((count / 8).div_ceil(256) as u32, 256).cost(2 * count, 0);
            // SAFETY: the kernel's parameters in order; `half` checked that the rows fit the destination.
            unsafe { self.stream.launch(&self.fill, launch, &args)? };
            first += count;
        }
        Ok(())
    }

    #[expect(clippy::too_many_arguments, reason = "the fields of one matrix")]
    fn dense(
        &mut self,
        name: &str,
        format: WeightFormat,
        bytes: &[u8],
        rows: usize,
        cols: usize,
        to: &DeviceBuffer,
        place: Place,
    ) -> Result<()> {
        let (kind, size) = match format {
            WeightFormat::F16 => (0, 2),
            WeightFormat::Bf16 => (1, 2),
            WeightFormat::F32 => (2, 4),
            WeightFormat::Int4 { .. } => {
                return Err(Error::bug(format!("{name}: 4-bit data given as dense")));
            }
        };
        if bytes.len() != rows * cols * size {
            return Err(Error::invalid(
                format!(
                    "{name} has {} bytes, expected {} for [{rows}, {cols}]",
                    bytes.len(),
                    rows * cols * size
                ),
                "the checkpoint is damaged; fetch it again",
            ));
        }
        self.prepare_stages()?;
        if self.checked.len() == FAULT_SLOTS {
            self.check_faults()?;
        }
        let faults = self.faults.at(4 * self.checked.len() as u64);
        self.checked.push((name.to_string(), rows * cols));
        let mut first = 0u64;
        for piece in bytes.chunks(STAGE_BYTES) {
            let count = (piece.len() / size) as u64;
            let stage = &mut self.stages[self.turn];
            self.turn = (self.turn + 1) % STAGES;
            stage.free.synchronize()?;
            // SAFETY: the copy that read this buffer is done: its event was waited for.
            let host = unsafe { stage.host.slice_mut() };
            copy(&mut host[..piece.len()], piece, self.copy_threads);
            let place = [place.block, place.spread, place.first];
            let args = [
                (&stage.device).into(),
                kind.into(),
                to.into(),
                first.into(),
                count.into(),
                (cols as u32).into(),
                Arg::Struct(bytes_of(&place)),
                faults.into(),
            ];
            let launch = Launch::new(count.div_ceil(256) as u32, 256).cost(count * (size as u64 + 2), 0);
            // SAFETY: the staging buffers hold STAGE_BYTES and are not touched before `free` has passed; the kernel's
            // parameters in order, the destination checked by `half`.
            unsafe {
                self.stream.copy_in(stage.device.pointer(), &stage.host, 0, piece.len())?;
                self.stream.launch(&self.convert, launch, &args)?;
            }
            self.stream.record(&stage.free)?;
            first += count;
        }
        Ok(())
    }

    /// Waits for the tensors so far and looks at their counts.
    fn check_faults(&mut self) -> Result<()> {
        self.stream.synchronize()?;
        if self.checked.is_empty() {
            return Ok(());
        }
        let counts = self.faults.read::<u32>(0, self.checked.len())?;
        self.faults.write(0, &vec![0u32; counts.len()])?;
        for ((name, elements), faults) in self.checked.drain(..).zip(counts) {
            if faults > 0 {
                return Err(Error::invalid(
                    format!("{name}: {faults} of {elements} elements are not finite or do not fit fp16"),
                    "the checkpoint is damaged or needs bf16; try --device cpu",
                ));
            }
        }
        Ok(())
    }

    fn prepare_stages(&mut self) -> Result<()> {
        while self.stages.len() < STAGES {
            let free = Event::new(&self.gpu)?;
            self.stream.record(&free)?;
            let host = self.gpu.allocate_pinned(STAGE_BYTES)?;
            let device = self.gpu.allocate(STAGE_BYTES as u64)?;
            self.stages.push(Stage { host, device, free });
        }
        Ok(())
    }

    /// Waits until all uploads are done.
    ///
    /// # Errors
    /// Elements that are not finite or do not fit fp16, naming their module.
    pub fn finish(&mut self) -> Result<()> {
        self.check_faults()
    }
}

impl Drop for Uploader {
    fn drop(&mut self) {
        // After an error, copies may still be under way from buffers that are about to go.
        if self.gpu.bind().is_ok() {
            let _ = self.stream.synchronize();
        }
    }
}

/// Copies by several threads where there is enough to copy.
fn copy(to: &mut [u8], from: &[u8], threads: usize) {
    let threads = threads.min(from.len() / COPY_BYTES).max(1);
    let each = from.len().div_ceil(threads).max(1);
    std::thread::scope(|scope| {
        let mut pairs = to.chunks_mut(each).zip(from.chunks(each));
        let own = pairs.next();
        for (to, from) in pairs {
            scope.spawn(|| to.copy_from_slice(from));
        }
        if let Some((to, from)) = own {
            to.copy_from_slice(from);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_by_any_number_of_threads_are_whole() {
        for (bytes, threads) in [(0, 4), (5, 8), (COPY_BYTES * 3 + 17, 2), (COPY_BYTES * 9 + 1, 8)] {
            let from: Vec<u8> = (0..bytes).map(|at| (at * 31 % 251) as u8).collect();
            let mut to = vec![0; bytes];
            copy(&mut to, &from, threads);
            assert!(to == from, "{bytes} bytes by {threads} threads");
        }
    }
}
