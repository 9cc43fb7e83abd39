//! `/proc/PID/pagemap` (`Documentation/admin-guide/mm/pagemap.rst`).

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;

use rustix::ioctl::{self, opcode};

/// What the kernel says of one page of a process's address space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry(u64);

impl Entry {
    const PRESENT: u64 = 1 << 63;
    const SWAPPED: u64 = 1 << 62;
    const OF_A_FILE: u64 = 1 << 61;
    const FRAME: u64 = (1 << 55) - 1;

    /// The page frame of a page in memory. The kernel shows it only to processes with
    /// `CAP_SYS_ADMIN` in the first user namespace.
    pub fn frame(self) -> Option<u64> {
        Some(self.0 & Self::FRAME).filter(|frame| self.0 & Self::PRESENT != 0 && *frame != 0)
    }

    /// Whether the page is in memory and belongs to a file (or to shared memory).
    pub fn is_of_file(self) -> bool {
        self.0 & Self::PRESENT != 0 && self.0 & Self::OF_A_FILE != 0
    }

    /// Whether the page, in memory or swapped, is the process's own. A page of a file is never
    /// swapped.
    pub fn is_private(self) -> bool {
        self.0 & (Self::PRESENT | Self::SWAPPED) != 0 && self.0 & Self::OF_A_FILE == 0
    }
}

/// Entries that [`entries`] reads at once.
pub const STEP: u64 = 8192;

/// Calls `each` with the address and the entry of every page at `addresses`, whose start is a
/// multiple of the page size.
///
/// # Errors
/// Those of pread(2); `UnexpectedEof` for a process that has ended.
pub fn entries(
    pagemap: &File,
    addresses: Range<u64>,
    mut each: impl FnMut(u64, Entry),
) -> io::Result<()> {
    let page = crate::cache::page_size();
    let pages = addresses.end.saturating_sub(addresses.start).div_ceil(page);
    let mut buffer = vec![0; usize::try_from(pages.min(STEP) * 8).unwrap_or(0)];
    for first in (0..pages).step_by(usize::try_from(STEP).unwrap_or(usize::MAX)) {
        let count = usize::try_from((pages - first).min(STEP)).unwrap_or(0);
        let read = &mut buffer[..count * 8];
        pagemap.read_exact_at(read, (addresses.start / page + first) * 8)?;
        for (number, entry) in (first..).zip(read.chunks_exact(8)) {
            let entry = Entry(u64::from_ne_bytes(entry.try_into().unwrap_or_default()));
            each(addresses.start + number * page, entry);
        }
    }
    Ok(())
}

/// What a page is, for [`scan`] (`include/uapi/linux/fs.h`).
pub mod category {
    /// It can be write-protected asynchronously: it is registered with such a userfaultfd.
    pub const WP_ALLOWED: u64 = 1 << 0;
    /// It was written to since it was write-protected.
    pub const WRITTEN: u64 = 1 << 1;
    /// It belongs to a file.
    pub const FILE: u64 = 1 << 2;
    /// It is in memory.
    pub const PRESENT: u64 = 1 << 3;
    /// It is swapped out.
    pub const SWAPPED: u64 = 1 << 4;
    /// It is the kernel's page of zeros.
    pub const ZERO: u64 = 1 << 5;
    /// It is part of a huge page, or of its size.
    pub const HUGE: u64 = 1 << 6;
}

/// Pages of an address space that are the same in what was asked for.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Region {
    /// First address.
    pub start: u64,
    /// Address behind the last one.
    pub end: u64,
    /// Those of the categories that were asked for ([`Query::returned`]).
    pub categories: u64,
}

/// Which pages [`scan`] finds, as bits of [`category`].
#[derive(Debug, Clone, Copy, Default)]
pub struct Query {
    /// A page must have all of these, but for those in `inverted`, which it must not have.
    pub mask: u64,
    /// See `mask`.
    pub inverted: u64,
    /// What is said of each page.
    pub returned: u64,
    /// Write-protect what is found, so that a later scan says what was written to. Leaves out mappings
    /// where that cannot be done without waiting (`UFFD_FEATURE_WP_ASYNC`).
    pub write_protect: bool,
}

/// `struct pm_scan_arg`.
#[repr(C)]
struct ScanArg {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

const _: () = assert!(size_of::<Region>() == 24 && size_of::<ScanArg>() == 96);

/// `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: ioctl::Opcode = opcode::read_write::<ScanArg>(b'f', 16);
const PM_SCAN_WP_MATCHING: u64 = 1 << 0;
/// Regions that are asked for at once.
const REGIONS: usize = 1024;

/// Calls `each` with the regions of pages at `addresses` that a query finds (PAGEMAP_SCAN, Linux
/// 6.7), for another process, too. Addresses are multiples of the page size.
///
/// # Errors
/// `ENOTTY` before Linux 6.7; `ESRCH` for a process that has ended. What was found before is done.
pub fn scan(
    pagemap: &File,
    addresses: Range<u64>,
    query: Query,
    mut each: impl FnMut(Region),
) -> io::Result<()> {
    let mut regions = [Region::default(); REGIONS];
    let mut start = addresses.start;
    while start < addresses.end {
        let mut arg = ScanArg {
            size: size_of::<ScanArg>() as u64,
            // Without PM_SCAN_CHECK_WPASYNC what cannot be protected is left out.
            flags: if query.write_protect { PM_SCAN_WP_MATCHING } else { 0 },
            start,
            end: addresses.end,
            walk_end: 0,
            vec: regions.as_mut_ptr() as u64,
            vec_len: REGIONS as u64,
            max_pages: 0,
            category_inverted: query.inverted,
            category_mask: query.mask | query.inverted,
            category_anyof_mask: 0,
            return_mask: query.returned,
        };
        // SAFETY: the kernel reads and writes `arg`, and writes at most `vec_len` regions to the
        // array behind `vec`; both live through the call, and any bytes make a region.
        let found = unsafe {
            libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN as _, std::ptr::from_mut(&mut arg))
        };
        let found = usize::try_from(found).map_err(|_| io::Error::last_os_error())?;
        regions.iter().take(found).copied().for_each(&mut each);
        // `walk_end` is not used: the kernel gathers regions in a smaller buffer of its own, and
        // says where that was full, although it has walked the rest as well.
        match regions[..found].last() {
            Some(last) if found == REGIONS && last.end > start => start = last.end,
            _ => return Ok(()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests may panic")]

    use super::*;

    /// Kernels before 6.7 do not know the request, and emulators of programs say so with ENOSYS.
    fn is_unknown(error: &io::Error) -> bool {
        [Some(libc::ENOTTY), Some(libc::ENOSYS)].contains(&error.raw_os_error())
    }

    #[test]
    fn a_scan_finds_the_pages_that_are_there() {
        let page = crate::cache::page_size();
        let mut pages = vec![0_u8; 64 * usize::try_from(page).unwrap()];
        let start = (pages.as_ptr() as u64).next_multiple_of(page);
        let pagemap = File::open("/proc/self/pagemap").unwrap();
        let present = Query { mask: category::PRESENT, ..Query::default() };
        let count = |range: Range<u64>| {
            let mut found = 0;
            let scanned = scan(&pagemap, range, present, |it| found += (it.end - it.start) / page);
            scanned.map(|()| found)
        };
        let range = start..start + 60 * page;
        match count(range.clone()) {
            Err(error) if is_unknown(&error) => {
                println!("SKIP a_scan_finds_the_pages_that_are_there: no PAGEMAP_SCAN here");
                return;
            }
            other => drop(other.unwrap()),
        }
        pages.fill(1);
        assert_eq!(count(range.clone()).unwrap(), 60);
        assert!(count(1 << 62..(1 << 62) + page).unwrap_or(0) == 0);
    }

    /// The kernel says where its buffer was full as if it had stopped there. Regions came again, and out
    /// of order; later still, where a second buffer had become full with ours.
    #[test]
    fn regions_come_once_and_in_order() {
        let page = usize::try_from(crate::cache::page_size()).unwrap();
        let mut pages = Vec::<u8>::with_capacity(20_002 * page);
        let start = (pages.as_ptr() as usize).next_multiple_of(page);
        let skip = start - pages.as_ptr() as usize;
        for number in (0..20_000).step_by(2) {
            pages.spare_capacity_mut()[skip + number * page].write(1);
        }
        let pagemap = File::open("/proc/self/pagemap").unwrap();
        let present = Query { mask: category::PRESENT, ..Query::default() };
        let (mut last, mut found) = (0, 0);
        let range = start as u64..(start + 20_000 * page) as u64;
        let scanned = scan(&pagemap, range, present, |region| {
            assert!(region.start >= last);
            last = region.end;
            found += (region.end - region.start) / page as u64;
        });
        match scanned {
            Err(error) if is_unknown(&error) => {
                println!("SKIP regions_come_once_and_in_order: no PAGEMAP_SCAN here");
            }
            other => {
                other.unwrap();
                // Huge pages bring neighbours in.
                assert!((10_000..=20_000).contains(&found), "{found}");
            }
        }
    }
}
