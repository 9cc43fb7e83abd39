//! `/proc/PID/pagemap` (`Documentation/admin-guide/mm/pagemap.rst`).

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;

/// What the kernel says of one page of a process's address space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry(u64);

impl Entry {
    const PRESENT: u64 = 1 << 63;
    const SWAPPED: u64 = 1 << 62;
    const OF_A_FILE: u64 = 1 << 61;
    const FRAME: u64 = (1 << 55) - 1;

    /// The page frame of a page in memory. The kernel tells it to whoever has `CAP_SYS_ADMIN` in
    /// the first user namespace.
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
