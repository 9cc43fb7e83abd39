//! How the C library's allocator gives memory back, and memory that others have as well.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, memfd_create};

/// From how many bytes on a block is a mapping of its own.
#[cfg(target_env = "gnu")]
const OWN_MAPPING_BYTES: libc::c_int = 1 << 20;

/// Has every block of 1 MiB or more be a mapping of its own, so that it goes back to the kernel when it is
/// freed, and grows by mremap(2) instead of being copied.
///
/// By default glibc raises that bound up to 32 MiB, to the largest block that was freed so far
/// (mallopt(3), `M_MMAP_THRESHOLD`); blocks below it stay with the thread's heap. An import of a million
/// entries in three layers had 202 MB at its peak so, and has 153 to 157 MB with the bound fixed.
///
/// Of the whole process, and to be called at its start: mallopt(3) does not go along with other threads.
/// Other C libraries (musl) do so anyway; nothing happens there.
pub fn return_large_blocks() {
    #[cfg(target_env = "gnu")]
    // SAFETY: takes two integers and changes a setting of the allocator; it fails only for values out of
    // range (the bound is below HEAP_MAX_SIZE/2, 32 MiB), and then nothing is changed.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, OWN_MAPPING_BYTES);
    }
}

/// A file in memory with these bytes, open for reading. Nobody can change it, not even
/// root by opening it anew through `/proc/self/fd`: the seals are of the file, not of the
/// descriptor (memfd_create(2), fcntl(2)). Errors: those of memfd_create(2), write(2) and open(2).
pub fn sealed(name: &str, bytes: &[u8]) -> io::Result<File> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::NOEXEC_SEAL;
    let file = File::from(memfd_create(name, flags)?);
    file.write_all_at(bytes, 0)?;
    fcntl_add_seals(&file, SEALS | SealFlags::SEAL)?;
    File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::WRITE);

/// Whether a file is in memory, and nobody can change it.
pub fn is_sealed(file: &File) -> bool {
    fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SEALS))
}

/// Private memory as a VMM maps a guest's: at a multiple of 2 MiB, and with advice that says which it
/// is. Threads of this process and of others may read and write it at any time, so it is words that are
/// accessed atomically.
#[derive(Debug)]
pub struct GuestMemory {
    start: std::ptr::NonNull<std::sync::atomic::AtomicU64>,
    bytes: usize,
}

// SAFETY: it is plain memory of the process, and all access is atomic.
unsafe impl Send for GuestMemory {}
// SAFETY: as above.
unsafe impl Sync for GuestMemory {}

impl GuestMemory {
    const ALIGN: usize = 2 << 20;

    /// So many bytes of zeros, a multiple of the page size.
    /// Errors: those of mmap(2).
    pub fn new(bytes: usize) -> std::io::Result<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: the kernel chooses the address.
        let room = unsafe {
            libc::mmap(std::ptr::null_mut(), bytes + Self::ALIGN, libc::PROT_NONE, flags, -1, 0)
        };
        if room == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error());
        }
        let at = room.map_addr(|address| address.next_multiple_of(Self::ALIGN));
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the address is within the room, which nobody else knows.
        let at = unsafe { libc::mmap(at, bytes, access, flags | libc::MAP_FIXED, -1, 0) };
        let start = std::ptr::NonNull::new(at.cast()).filter(|_| at != libc::MAP_FAILED);
        let start = start.ok_or_else(std::io::Error::last_os_error)?;
        let memory = Self { start, bytes };
        memory.advise(0..bytes, libc::MADV_DONTFORK)?;
        Ok(memory)
    }

    /// Lets the kernel merge the pages (KSM) of a range of its bytes, a multiple of the page size.
    /// Errors: those of madvise(2), among them `ENOMEM` if the process has too many mappings;
    /// `InvalidInput` for a range that is not in it.
    pub fn let_merge(&self, range: std::ops::Range<usize>) -> std::io::Result<()> {
        if range.start > range.end || range.end > self.bytes {
            return Err(std::io::ErrorKind::InvalidInput.into());
        }
        self.advise(range, libc::MADV_MERGEABLE)
    }

    /// Keeps huge pages out of it.
    /// Errors: those of madvise(2).
    pub fn without_huge_pages(&self) -> std::io::Result<()> {
        self.advise(0..self.bytes, libc::MADV_NOHUGEPAGE)
    }

    fn advise(&self, range: std::ops::Range<usize>, advice: libc::c_int) -> std::io::Result<()> {
        let start = self.start.as_ptr().cast::<u8>().wrapping_add(range.start);
        // SAFETY: the callers' ranges are in it, and none of the advice above changes content.
        let done = unsafe { libc::madvise(start.cast(), range.len(), advice) };
        if done == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
    }

    /// Its words.
    pub fn words(&self) -> &[std::sync::atomic::AtomicU64] {
        // SAFETY: the memory is mapped as long as this lives, and zeros are words.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.bytes / 8) }
    }
}

impl Drop for GuestMemory {
    fn drop(&mut self) {
        // SAFETY: nobody has a reference to it any more. What is around it stays mapped, without access.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}
