//! Memory that frees itself: on the GPU, and page-locked on the host.

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::plain::Plain;
use super::{Gpu, check, settle};
use crate::{Error, Result};

/// Memory on the GPU, freed when dropped. Whoever queues work on it keeps it until that work is done.
#[derive(Debug)]
pub struct DeviceBuffer {
    pub(super) gpu: Gpu,
    pub(super) pointer: sys::CUdeviceptr,
    pub(super) bytes: u64,
    /// What this is a part of, which frees the memory.
    pub(super) whole: Option<Arc<DeviceBuffer>>,
}

impl DeviceBuffer {
    /// `bytes` of `whole` from `offset` on. The memory lives as long as any of its parts.
    ///
    /// # Errors
    /// A range beyond the end.
    pub fn part(whole: &Arc<Self>, offset: u64, bytes: u64) -> Result<Self> {
        whole.within(offset, bytes)?;
        let pointer = whole.pointer + offset;
        Ok(Self { gpu: whole.gpu.clone(), pointer, bytes, whole: Some(whole.clone()) })
    }

    /// The address, for kernel arguments.
    pub fn pointer(&self) -> u64 {
        self.pointer
    }

    /// The address `bytes` into the buffer.
    pub fn at(&self, bytes: u64) -> u64 {
        debug_assert!(bytes <= self.bytes, "{bytes} is past the end of a buffer of {}", self.bytes);
        self.pointer + bytes
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Copies `values` to `offset` bytes into the buffer and waits.
    ///
    /// # Errors
    /// A range beyond the end; a failure of the driver.
    pub fn write<T: Plain>(&self, offset: u64, values: &[T]) -> Result<()> {
        self.within(offset, size_of_val(values) as u64)?;
        self.gpu.bind()?;
        // SAFETY: the range was checked; the driver has taken the bytes when the call returns.
        let code = unsafe { result::memcpy_htod_sync(self.pointer + offset, values) };
        check(code, || "copying to the GPU".to_string())?;
        settle()
    }

    /// Waits for queued work, then copies out `count` values from `offset` bytes.
    ///
    /// # Errors
    /// A range beyond the end; a failure of the driver, earlier work's too.
    pub fn read<T: Plain + Default>(&self, offset: u64, count: usize) -> Result<Vec<T>> {
        self.within(offset, (count * size_of::<T>()) as u64)?;
        self.gpu.synchronize()?;
        let mut values = vec![T::default(); count];
        // SAFETY: the range was checked, and the copy is done when the call returns.
        let code = unsafe { result::memcpy_dtoh_sync(&mut values, self.pointer + offset) };
        check(code, || "copying from the GPU".to_string())?;
        Ok(values)
    }

    /// These bytes of the buffer, one range after the other, in a buffer of their own; waits for queued work first.
    ///
    /// # Errors
    /// As [`Self::read`]; no memory.
    pub fn gather(&self, ranges: &[Range<u64>]) -> Result<Self> {
        let mut bytes: Vec<u8> = Vec::new();
        for range in ranges {
            bytes.extend(self.read::<u8>(range.start, (range.end - range.start) as usize)?);
        }
        self.gpu.upload(&bytes)
    }

    fn within(&self, offset: u64, bytes: u64) -> Result<()> {
        // An allocation of its own has 16 bytes at least, a part ends where it says.
        let room = if self.whole.is_some() { self.bytes } else { self.bytes.max(16) };
        if offset + bytes > room {
            return Err(Error::bug(format!("{bytes} bytes at {offset} of a GPU buffer of {}", self.bytes)));
        }
        Ok(())
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        if self.whole.is_none() && self.gpu.bind().is_ok() {
            // SAFETY: allocated in `Gpu::allocate` and freed only here; the driver waits for queued work on it.
            let _ = unsafe { result::free_sync(self.pointer) };
        }
    }
}

/// Page-locked host memory.
#[derive(Debug)]
pub struct PinnedBuffer {
    pub(super) gpu: Gpu,
    pub(super) pointer: *mut u8,
    pub(super) bytes: usize,
}

// SAFETY: plain memory, owned; the driver allows its use from any thread.
unsafe impl Send for PinnedBuffer {}

impl PinnedBuffer {
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The address, which is also valid on the GPU (unified addressing).
    pub fn pointer(&self) -> u64 {
        self.pointer as u64
    }

    /// # Safety
    /// No queued copy or kernel writes these bytes while the slice lives.
    pub unsafe fn slice(&self) -> &[u8] {
        // SAFETY: allocated with this length; the caller excludes writers.
        unsafe { std::slice::from_raw_parts(self.pointer, self.bytes) }
    }

    /// # Safety
    /// No queued copy or kernel reads or writes these bytes while the slice lives.
    pub unsafe fn slice_mut(&mut self) -> &mut [u8] {
        // SAFETY: allocated with this length; the caller excludes other users.
        unsafe { std::slice::from_raw_parts_mut(self.pointer, self.bytes) }
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        if self.gpu.bind().is_ok() {
            // SAFETY: allocated in `Gpu::allocate_pinned` and freed only here.
            let _ = unsafe { result::free_host(self.pointer.cast()) };
        }
    }
}
