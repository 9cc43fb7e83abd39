//! Asking the page cache what it holds: cachestat(2), and mincore(2) on a mapping of a file.
//!
//! The two answer different questions. `cachestat` counts the pages of the open file's own mapping,
//! those past the end of the file included, and needs no address space; it is the cheap one.
//! `mincore` asks about what a *mapping* of the file would find. The answers differ where the file
//! that one opens is not the one that holds the pages: under EROFS `inode_share` cachestat looks at
//! the wrong mapping, mincore at the right one.

use std::{
    ffi::{c_long, c_void},
    fs::File,
    io,
    ops::Range,
    os::fd::{AsFd, AsRawFd},
    path::Path,
    ptr,
};

use rustix::fs::{MemfdFlags, Mode, OFlags, memfd_create};
use rustix::mm::{MapFlags, ProtFlags};

use crate::pagemap;

/// Pages that are looked at together.
const CHUNK: usize = 65_536;

/// The size of a page of the page cache as every figure here counts it, in bytes.
///
/// This is `sysconf(_SC_PAGESIZE)`: 4,096 on x86-64, up to 65,536 on arm64.
pub fn page_size() -> u64 {
    rustix::param::page_size() as u64
}

/// What cachestat(2) says of a range of a file, in pages of [`page_size`].
///
/// The fields are those of `struct cachestat` in `include/uapi/linux/mman.h`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Cachestat {
    /// Pages in the page cache.
    pub cached: u64,
    /// Of these, not yet written back.
    pub dirty: u64,
    /// Of these, being written back now.
    pub writeback: u64,
    /// Pages that were cached once and then evicted (a shadow entry remains).
    pub evicted: u64,
    /// Of these, evicted so recently that the workload would have kept them with a little more memory.
    pub recently_evicted: u64,
}

const _: () = assert!(size_of::<Cachestat>() == 40);

/// `struct cachestat_range` of `include/uapi/linux/mman.h`.
#[repr(C)]
struct CachestatRange {
    offset: u64,
    len: u64,
}

/// The same number on every architecture: system calls added since Linux 5.0 are numbered in common.
const SYS_CACHESTAT: c_long = 451;

/// Counts the pages of a file that are in the page cache (cachestat(2), Linux 6.5).
///
/// `len` is in bytes from `offset`; 0 means to the end of the mapping, which counts pages past the
/// end of the file too (a large folio may reach there).
/// Errors: `ENOSYS` before Linux 6.5; `EPERM` from 6.15 for a caller that neither owns nor may write the
/// file; `EOPNOTSUPP` for hugetlbfs.
pub fn cachestat(file: impl AsFd, offset: u64, len: u64) -> io::Result<Cachestat> {
    let range = CachestatRange { offset, len };
    let mut stat = Cachestat::default();
    // SAFETY: both pointers are to live, properly aligned structs of the kernel's layout (sizes
    // asserted above), which the kernel reads and writes only during the call.
    let ret = unsafe {
        libc::syscall(
            SYS_CACHESTAT,
            file.as_fd().as_raw_fd(),
            ptr::from_ref(&range),
            ptr::from_mut(&mut stat),
            0u32,
        )
    };
    if ret == 0 { Ok(stat) } else { Err(io::Error::last_os_error()) }
}

/// Counts the pages of the first `size` bytes of a file that are in the page cache: with cachestat(2),
/// or before Linux 6.5 with mincore(2).
/// Errors: those of [`cachestat`] but `ENOSYS`, and of [`FileMap::new`].
pub fn resident_pages(file: impl AsFd, size: u64) -> io::Result<u64> {
    if size == 0 {
        return Ok(0);
    }
    match cachestat(&file, 0, size) {
        Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => {
            FileMap::new(&file, size)?.resident_pages()
        }
        counted => Ok(counted?.cached),
    }
}

/// Opens a file whose pages are to be looked at. A FIFO that somebody put there does not hang the
/// caller, and has no pages.
///
/// # Errors
/// Those of open(2).
pub fn open(path: &Path) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    Ok(rustix::fs::open(path, flags, Mode::empty())?.into())
}

/// A whole file mapped shared and read-only.
///
/// No slice of the contents is ever handed out: another process may write or truncate the file at
/// any time, so bytes are only copied. Touching a page that truncation took away raises SIGBUS,
/// which ends the process; it cannot corrupt memory.
#[derive(Debug)]
pub struct FileMap {
    /// Page-aligned start, or dangling when `len` is 0.
    start: *mut c_void,
    /// Bytes of the file when it was mapped.
    len: usize,
}

// SAFETY: the mapping belongs to this value alone, is written by nobody but a [`PrivateMap`] that is borrowed alone, and all
// access goes through system calls or copies, which any thread may do.
unsafe impl Send for FileMap {}
// SAFETY: as above; no method changes the value.
unsafe impl Sync for FileMap {}

impl FileMap {
    /// Maps the first `len` bytes of `file` (normally its size). A `len` of 0 maps nothing.
    /// Errors: those of mmap(2); `EOVERFLOW` when `len` exceeds the address space.
    pub fn new(file: impl AsFd, len: u64) -> io::Result<FileMap> {
        FileMap::map(file, len, ProtFlags::READ, MapFlags::SHARED)
    }

    fn map(
        file: impl AsFd,
        len: u64,
        protection: ProtFlags,
        flags: MapFlags,
    ) -> io::Result<FileMap> {
        let len = usize::try_from(len)
            .ok()
            .filter(|&len| isize::try_from(len).is_ok())
            .ok_or_else(|| io::Error::from_raw_os_error(libc::EOVERFLOW))?;
        if len == 0 {
            return Ok(FileMap { start: ptr::null_mut(), len });
        }
        // SAFETY: a fresh mapping at an address of the kernel's choice touches no memory that Rust
        // knows of.
        let start = unsafe { rustix::mm::mmap(ptr::null_mut(), len, protection, flags, file, 0) }?;
        Ok(FileMap { start, len })
    }

    /// Bytes mapped.
    pub fn len(&self) -> u64 {
        self.len as u64
    }

    /// Whether nothing is mapped.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where it is mapped in this process, which `/proc/self/pagemap` goes by.
    pub fn address(&self) -> u64 {
        self.start.addr() as u64
    }

    /// Tells for each page of the mapping whether it is resident in the page cache (mincore(2)),
    /// calling `each` with runs of at most 65,536 pages, in order.
    ///
    /// Asking faults nothing in. Linux tells the truth only to a caller that owns the file or may
    /// write it, and answers "resident" to everybody else (since 5.2, against side channels).
    /// Errors: those of mincore(2); `ENOMEM` cannot happen while the mapping lives.
    pub fn residency(&self, each: impl FnMut(&[Page])) -> io::Result<()> {
        self.residency_of(0..self.len.div_ceil(rustix::param::page_size()), each)
    }

    /// The same of some pages, which have to be in the mapping.
    fn residency_of(&self, pages: Range<usize>, mut each: impl FnMut(&[Page])) -> io::Result<()> {
        let page = rustix::param::page_size();
        assert!(pages.end <= self.len.div_ceil(page), "pages past the end of the mapping");
        let mut buf = vec![Page(0); pages.len().min(CHUNK)];
        for first in pages.clone().step_by(CHUNK) {
            let count = CHUNK.min(pages.end - first);
            // SAFETY: the range lies in the mapping (its last page is mapped whole, even if the
            // file ends inside it); `Page` is a transparent u8 and `buf` holds at least `count`.
            let ret = unsafe {
                libc::mincore(
                    self.start.byte_add(first * page),
                    (count * page).min(self.len - first * page),
                    buf.as_mut_ptr().cast(),
                )
            };
            if ret != 0 {
                return Err(io::Error::last_os_error());
            }
            each(&buf[..count]);
        }
        Ok(())
    }

    /// Counts the resident pages of the mapping. See [`FileMap::residency`].
    /// Errors: those of [`FileMap::residency`].
    pub fn resident_pages(&self) -> io::Result<u64> {
        self.resident_pages_of(0, self.len())
    }

    /// Counts the resident pages of `len` bytes from `offset` on, as far as they are mapped. It asks
    /// about no other pages.
    /// Errors: those of [`FileMap::residency`].
    pub fn resident_pages_of(&self, offset: u64, len: u64) -> io::Result<u64> {
        let to = |at: u64| usize::try_from(at).unwrap_or(usize::MAX).min(self.len);
        let (start, end) = (to(offset), to(offset.saturating_add(len)));
        if start == end {
            return Ok(0);
        }
        let page = rustix::param::page_size();
        let mut resident = 0;
        self.residency_of(start / page..end.div_ceil(page), |run| {
            resident += run.iter().filter(|p| p.is_resident()).count() as u64;
        })?;
        Ok(resident)
    }

    /// Brings the page at an offset into the page table, which does not count as its use; a page that is
    /// not resident is read.
    /// Errors: those of madvise(2) and memfd_create(2); `EINVAL` past the end. That a page cannot be
    /// read is no error.
    pub fn touch(&self, offset: u64) -> io::Result<()> {
        let at = usize::try_from(offset).ok().filter(|at| *at < self.len);
        self.touch_all(&[at.ok_or_else(|| io::Error::from_raw_os_error(libc::EINVAL))?])
    }

    /// The same of many, which lie in the mapping.
    fn touch_all(&self, offsets: &[usize]) -> io::Result<()> {
        /// Addresses in one pwritev(2): `UIO_MAXIOV`.
        const BATCH: usize = 1024;
        // Without it, unmapping pages that were touched marks them as used, and a page that was dropped
        // meanwhile brings its neighbours along.
        // SAFETY: the mapping has this start and length; the advice changes no contents.
        unsafe { rustix::mm::madvise(self.start, self.len, rustix::mm::Advice::Random) }?;
        // A process that touches a page which cannot be read is killed; a system call fails.
        let sink = memfd_create("cofolio-touch", MemfdFlags::CLOEXEC)?;
        for batch in offsets.chunks(BATCH) {
            let byte = |at: &usize| libc::iovec {
                // SAFETY: the offset is inside the mapping.
                iov_base: unsafe { self.start.byte_add(*at) },
                iov_len: 1,
            };
            let bytes: Vec<libc::iovec> = batch.iter().map(byte).collect();
            let count = libc::c_int::try_from(bytes.len()).unwrap_or(libc::c_int::MAX);
            // SAFETY: each address is in the mapping, which lives; only the kernel reads there.
            unsafe { libc::pwritev(sink.as_raw_fd(), bytes.as_ptr(), count, 0) };
        }
        Ok(())
    }

    /// Calls `each` with runs of page frame numbers (`/proc/PID/pagemap`, pagemap.rst) of the resident
    /// pages: the first one and how many follow each other. `pagemap` is this process's
    /// `/proc/self/pagemap`, opened by root; for others the numbers are 0, and there are no runs.
    ///
    /// A page has to be in the page table for that. So this touches the resident pages, which does not
    /// count as their use. A page that is dropped meanwhile is read again.
    /// Errors: those of madvise(2), mincore(2), memfd_create(2) and of reading `pagemap`. A page that
    /// cannot be read ends the runs and is no error.
    pub fn resident_frames(
        &self,
        pagemap: &File,
        mut each: impl FnMut(u64, u64),
    ) -> io::Result<()> {
        if self.len == 0 {
            return Ok(());
        }
        let page = rustix::param::page_size();
        let (mut touch, mut at) = (Vec::new(), 0);
        self.residency(|pages| {
            for is_resident in pages.iter().map(|page| page.is_resident()) {
                touch.extend(is_resident.then_some(at));
                at += page;
            }
        })?;
        self.touch_all(&touch)?;
        let mut run: Option<(u64, u64)> = None;
        let addresses = self.address()..self.address() + self.len();
        pagemap::entries(pagemap, addresses, |_, entry| match (run.as_mut(), entry.frame()) {
            (Some((start, count)), Some(frame)) if *start + *count == frame => *count += 1,
            (_, frame) => {
                run.into_iter().for_each(|(start, count)| each(start, count));
                run = frame.map(|frame| (frame, 1));
            }
        })?;
        run.into_iter().for_each(|(start, count)| each(start, count));
        Ok(())
    }

    /// Copies bytes from `offset` on into `buf`, faulting pages in like any reader of the mapping.
    /// Returns how many were copied: fewer than `buf` holds only at the end of the mapping.
    pub fn read_at(&self, offset: u64, buf: &mut [u8]) -> usize {
        let offset = usize::try_from(offset).unwrap_or(usize::MAX).min(self.len);
        let count = buf.len().min(self.len - offset);
        if count > 0 {
            // SAFETY: the source range lies in the mapping, the target is `buf`; they cannot
            // overlap, as nobody else holds the mapping's address. Another process may change the
            // bytes while they are copied: the copy is then a mix of old and new, as with read(2).
            unsafe {
                ptr::copy_nonoverlapping(
                    self.start.byte_add(offset).cast::<u8>(),
                    buf.as_mut_ptr(),
                    count,
                );
            }
            // The page is to be touched, even if nobody looks at the bytes.
            std::hint::black_box(&*buf);
        }
        count
    }
}

impl Drop for FileMap {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: the mapping was made by `new`, has this length, and no borrow of it exists.
            // munmap of a valid range fails only for want of memory to split a mapping: not here.
            let _ = unsafe { rustix::mm::munmap(self.start, self.len) };
        }
    }
}

/// A whole file mapped privately: what is written to it is seen here and nowhere else. Until then its pages are those of
/// everybody who reads the file.
#[derive(Debug)]
pub struct PrivateMap(FileMap);

impl PrivateMap {
    /// Maps the first `len` bytes of `file` (normally its size). A `len` of 0 maps nothing.
    /// Errors: those of [`FileMap::new`].
    pub fn new(file: impl AsFd, len: u64) -> io::Result<PrivateMap> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        FileMap::map(file, len, protection, MapFlags::PRIVATE).map(PrivateMap)
    }

    /// Copies bytes from `offset` on into `buf`. See [`FileMap::read_at`].
    pub fn read_at(&self, offset: u64, buf: &mut [u8]) -> usize {
        self.0.read_at(offset, buf)
    }

    /// Writes bytes from `offset` on; the kernel copies the pages that they are on. Returns how many were written: fewer
    /// than `bytes` holds only at the end of the mapping.
    pub fn write_at(&mut self, offset: u64, bytes: &[u8]) -> usize {
        let map = &self.0;
        let offset = usize::try_from(offset).unwrap_or(usize::MAX).min(map.len);
        let count = bytes.len().min(map.len - offset);
        if count > 0 {
            // SAFETY: the target range lies in the mapping, which is writable, and which nobody else reads or writes
            // meanwhile, as this is borrowed alone; the source is elsewhere, as nobody has the mapping's address.
            unsafe {
                ptr::copy_nonoverlapping(
                    bytes.as_ptr(),
                    map.start.byte_add(offset).cast::<u8>(),
                    count,
                );
            }
        }
        count
    }
}

/// One page's answer from mincore(2).
#[repr(transparent)]
#[derive(Debug, Clone, Copy)]
pub struct Page(u8);

impl Page {
    /// Whether the page is in the page cache. Only the lowest bit is defined (mincore(2)).
    pub fn is_resident(self) -> bool {
        self.0 & 1 == 1
    }
}
