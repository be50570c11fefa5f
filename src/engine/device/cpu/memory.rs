//! Memory of the CPU device: page-aligned, zeroed, on huge pages where the system gives them.
//!
//! Weights on huge pages stream about 20 % faster than on 4 KiB pages, since one TLB entry covers 2 MiB.

use crate::{Error, Result};

const HUGE_PAGE: usize = 2 << 20;
/// Smaller blocks are not worth a huge page each.
const HUGE_FROM: usize = 1 << 20;
/// Every buffer can be read this far past its end (by prefetches and full-width loads of a last tile).
pub const SLACK_BYTES: usize = 256;

/// The kind of pages asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pages {
    Default,
    Huge,
    Small,
}

/// Zeroed memory of `len` bytes, aligned to a page, freed on drop.
#[derive(Debug)]
pub struct Buffer {
    base: *mut u8,
    len: usize,
    mapped: *mut u8,
    mapped_len: usize,
}

// SAFETY: a buffer owns its memory; shared access is governed by whoever holds the pointers, as with any slice.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// # Errors
    /// The system refuses the memory.
    pub fn zeroed(len: usize) -> Result<Self> {
        Self::new(len, if len >= HUGE_FROM { Pages::Huge } else { Pages::Default })
    }

    /// As [`Buffer::zeroed`], but on the system's ordinary pages, to compare.
    ///
    /// # Errors
    /// The system refuses the memory.
    pub fn zeroed_on_small_pages(len: usize) -> Result<Self> {
        Self::new(len, Pages::Small)
    }

    fn new(len: usize, pages: Pages) -> Result<Self> {
        let refused = || {
            Error::failed(
                format!("cannot allocate {:.2} GiB of memory", len as f64 / (1u64 << 30) as f64),
                "use a smaller model, fewer kv_blocks or a lower gpu_memory_utilization",
            )
        };
        let needed = len.checked_add(SLACK_BYTES + HUGE_PAGE).ok_or_else(refused)?;
        map(len, needed, pages).ok_or_else(refused)
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn as_ptr(&self) -> *const u8 {
        self.base
    }

    pub fn as_mut_ptr(&self) -> *mut u8 {
        self.base
    }
}

#[cfg(unix)]
fn map(len: usize, needed: usize, pages: Pages) -> Option<Buffer> {
    // SAFETY: a fresh private anonymous mapping; the result is checked.
    let mapped = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            needed,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    if mapped == libc::MAP_FAILED {
        return None;
    }
    let mapped = mapped.cast::<u8>();
    let offset = if pages == Pages::Huge { mapped.align_offset(HUGE_PAGE) } else { 0 };
    // SAFETY: `needed` leaves room for an alignment of up to one huge page.
    let base = unsafe { mapped.add(offset) };
    #[cfg(target_os = "linux")]
    if pages != Pages::Default {
        let advice = if pages == Pages::Huge { libc::MADV_HUGEPAGE } else { libc::MADV_NOHUGEPAGE };
        // SAFETY: the range lies inside the mapping. A refusal only means pages of the system's choice.
        unsafe { libc::madvise(base.cast(), needed - offset, advice) };
    }
    Some(Buffer { base, len, mapped, mapped_len: needed })
}

#[cfg(not(unix))]
fn map(len: usize, needed: usize, _pages: Pages) -> Option<Buffer> {
    let layout = std::alloc::Layout::from_size_align(needed, 4096).ok()?;
    // SAFETY: the layout has a size above 0.
    let mapped = unsafe { std::alloc::alloc_zeroed(layout) };
    (!mapped.is_null()).then_some(Buffer { base: mapped, len, mapped, mapped_len: needed })
}

impl Drop for Buffer {
    fn drop(&mut self) {
        #[cfg(unix)]
        // SAFETY: exactly the mapping made in `map`, freed once.
        unsafe {
            libc::munmap(self.mapped.cast(), self.mapped_len);
        }
        #[cfg(not(unix))]
        // SAFETY: exactly the block and layout allocated in `map`.
        unsafe {
            let layout = std::alloc::Layout::from_size_align_unchecked(self.mapped_len, 4096);
            std::alloc::dealloc(self.mapped, layout);
        }
    }
}

/// A growing array of plain values in a [`Buffer`]; contents are lost when it grows.
#[derive(Debug)]
pub struct Scratch<T: Plain> {
    buffer: Option<Buffer>,
    kind: std::marker::PhantomData<T>,
}

/// Types for which all bit patterns are values and zero bytes are zero.
pub trait Plain: Copy + Send + Sync + 'static {}
impl Plain for f32 {}
impl Plain for u32 {}
impl Plain for u16 {}
impl Plain for i32 {}

impl<T: Plain> Default for Scratch<T> {
    fn default() -> Self {
        Self { buffer: None, kind: std::marker::PhantomData }
    }
}

impl<T: Plain> Scratch<T> {
    /// At least `len` elements.
    pub fn reserve(&mut self, len: usize) -> Result<()> {
        let bytes = len * size_of::<T>();
        if self.buffer.as_ref().is_none_or(|buffer| buffer.len() < bytes) {
            // The old block goes first, so that growing never holds both.
            self.buffer = None;
            self.buffer = Some(Buffer::zeroed(bytes.next_power_of_two())?);
        }
        Ok(())
    }

    /// For writes to disjoint parts from several threads.
    pub fn ptr(&self) -> Shared<T> {
        Shared(self.buffer.as_ref().map_or(std::ptr::NonNull::dangling().as_ptr(), |b| b.as_mut_ptr().cast()))
    }
}

/// A pointer handed to the threads of one phase, which write disjoint parts.
#[derive(Debug)]
pub struct Shared<T>(pub *mut T);

impl<T> Clone for Shared<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Shared<T> {}
// SAFETY: each use says why its parts are disjoint.
unsafe impl<T> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Shared<T> {}

impl<T> Shared<T> {
    pub fn get(self) -> *mut T {
        self.0
    }

    /// # Safety
    /// `start..start + len` lies in the allocation and no other thread touches it meanwhile.
    #[inline(always)]
    pub unsafe fn part<'a>(self, start: usize, len: usize) -> &'a mut [T] {
        // SAFETY: promised by the caller.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(start), len) }
    }
}

/// Memory of the machine, or of the container where that can be read, bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    pub total: u64,
    pub free: u64,
    /// What was not there to read, and what the figures are instead.
    pub lack: Option<&'static str>,
}

pub fn memory() -> Memory {
    memory_by(&|path| std::fs::read_to_string(path).ok(), kernel_memory())
}

fn memory_by(read: &dyn Fn(&str) -> Option<String>, kernel: Option<(u64, u64)>) -> Memory {
    let info = read("/proc/meminfo").unwrap_or_default();
    let field = |name: &str| -> Option<u64> {
        let line = info.lines().find(|line| line.starts_with(name))?;
        line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib * 1024)
    };
    let mut memory = match (field("MemTotal:"), field("MemAvailable:"), kernel) {
        (Some(total), Some(free), _) => Memory { total, free, lack: None },
        (_, _, Some((total, free))) => Memory {
            total,
            free,
            lack: Some("by sysinfo(), cached files as used: /proc/meminfo cannot be read"),
        },
        (total, ..) => {
            let total = total.unwrap_or(8 << 30);
            let lack = "as 8 GiB, half of it free: neither /proc/meminfo nor sysinfo() can be read";
            Memory { total, free: total / 2, lack: Some(lack) }
        }
    };
    let number = |path: &str| read(path)?.trim().parse::<u64>().ok();
    if let Some(limit) = number("/sys/fs/cgroup/memory.max") {
        let used = number("/sys/fs/cgroup/memory.current").unwrap_or(0);
        memory.total = memory.total.min(limit);
        memory.free = memory.free.min(limit.saturating_sub(used));
    }
    memory
}

/// (total, free) bytes as the kernel says without any file system.
#[cfg(target_os = "linux")]
fn kernel_memory() -> Option<(u64, u64)> {
    // SAFETY: all zeroes are a value of this struct of integers.
    let mut info: libc::sysinfo = unsafe { std::mem::zeroed() };
    // SAFETY: the pointer is to a whole struct, which the call fills.
    let done = unsafe { libc::sysinfo(&raw mut info) } == 0;
    let unit = u64::from(info.mem_unit);
    done.then(|| (info.totalram * unit, (info.freeram + info.bufferram) * unit))
}

#[cfg(not(target_os = "linux"))]
fn kernel_memory() -> Option<(u64, u64)> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_zeroed_aligned_and_writable_to_the_end() {
        for len in [1, 4096, HUGE_FROM, 3 * HUGE_PAGE + 5] {
            let buffer = Buffer::zeroed(len).unwrap();
            assert_eq!(buffer.as_ptr().align_offset(64), 0);
            // SAFETY: inside the buffer.
            let all = unsafe { std::slice::from_raw_parts_mut(buffer.as_mut_ptr(), len) };
            assert!(all.iter().all(|&byte| byte == 0));
            all[len - 1] = 1;
        }
    }

    #[test]
    fn an_impossible_size_is_an_error() {
        assert!(Buffer::zeroed(usize::MAX - 10).is_err());
        assert!(Buffer::zeroed(1 << 60).is_err());
    }

    #[test]
    fn free_memory_is_at_most_the_total() {
        let Memory { total, free, .. } = memory();
        assert!(0 < free && free <= total);
    }

    #[test]
    fn without_proc_or_sys_memory_is_what_the_kernel_says_and_the_lack_is_told() {
        const GIB: u64 = 1 << 30;
        let proc = |path: &str| {
            (path == "/proc/meminfo").then(|| "MemTotal: 4194304 kB\nMemAvailable: 2097152 kB\n".to_string())
        };
        let found = memory_by(&proc, Some((GIB, GIB)));
        assert_eq!(found, Memory { total: 4 * GIB, free: 2 * GIB, lack: None });
        let found = memory_by(&|_| None, Some((3 * GIB, GIB)));
        assert_eq!((found.total, found.free), (3 * GIB, GIB));
        assert!(found.lack.unwrap().contains("/proc/meminfo"));
        let found = memory_by(&|_| None, None);
        assert!(found.free == 4 * GIB && found.lack.unwrap().contains("8 GiB"));
        let limited = |path: &str| path.ends_with("memory.max").then(|| GIB.to_string());
        assert_eq!(memory_by(&limited, Some((3 * GIB, 2 * GIB))).free, GIB);
    }
}
