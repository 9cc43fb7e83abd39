//! The pages of a guest: finds unchanged ones, and keeps their hashes.
//!
//! ```text
//! state     cause                        next
//! young     was written to               due at the next look, unless it is written to again
//! due       not written to for a period  hashed, if it is private memory and not the page of zeros
//! volatile  changed during its merging   ignored for some looks, and for twice as many the next time
//! ```
//!
//! A look at unchanged memory is cheap: the kernel skips pages that are still write-protected, and
//! the other steps handle only pages that are due.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::ops::Range;
use std::path::Path;

use cofolio_shim::protocol::PAGE;
use cofolio_sys::pagemap::{Query, category, scan};
use cofolio_sys::process::ProcessMemory;
use twox_hash::XxHash3_64;

use super::plan::Hash;
use crate::vm::ranges::without;

/// Looks during which a volatile page is ignored, at first and at most.
const VOLATILE: u64 = 8;
const VOLATILE_MAX: u64 = 512;
/// Pages that are read at once.
const READ_PAGES: usize = 64;

/// The hash of a page.
pub(super) fn hash_of(page: &[u8]) -> NonZeroU64 {
    NonZeroU64::new(XxHash3_64::oneshot(page)).unwrap_or(NonZeroU64::MIN)
}

/// The pages of one guest.
#[derive(Debug)]
pub(super) struct Pages {
    pagemap: File,
    memory: ProcessMemory,
    start: u64,
    /// Hashes of unchanged pages that are not merged.
    hashes: Vec<Hash>,
    looks: u64,
    young: Vec<Range<usize>>,
    due: Vec<Range<usize>>,
    volatile: HashMap<usize, Volatile>,
}

#[derive(Debug)]
struct Volatile {
    /// Ignored up to this look.
    until: u64,
    /// Looks that it waits.
    wait: u64,
}

impl Pages {
    /// Of the process's memory at these addresses.
    pub(super) fn new(proc: &Path, pid: u32, start: u64, len: u64) -> io::Result<Self> {
        let count = usize::try_from(len / PAGE as u64).unwrap_or(0);
        Ok(Self {
            pagemap: File::open(proc.join(pid.to_string()).join("pagemap"))?,
            memory: ProcessMemory::open(pid)?,
            start,
            hashes: vec![None; count],
            looks: 0,
            young: Vec::new(),
            due: Vec::new(),
            volatile: HashMap::new(),
        })
    }

    /// Finds pages that were written to since the last look, and write-protects them.
    pub(super) fn look(&mut self) -> io::Result<()> {
        self.looks += 1;
        // The kernel has a fast path for exactly this query. The query skips mappings of pools and
        // page tables that do not exist, and finds a discarded page once.
        let query = Query {
            mask: category::WRITTEN,
            returned: category::WRITTEN,
            write_protect: true,
            inverted: 0,
        };
        let mut written = Vec::new();
        self.scan(0..self.hashes.len(), query, |pages| push(&mut written, pages))?;
        for pages in &written {
            self.hashes[pages.clone()].fill(None);
        }
        let before = std::mem::replace(&mut self.young, written);
        let stayed = parts_without(&before, &self.young);
        let mut due = self.leave_volatile(stayed);
        due.sort_unstable_by_key(|pages| pages.start);
        // Reading a page that is not present would allocate one.
        let query = Query {
            mask: category::PRESENT,
            inverted: category::ZERO | category::FILE,
            ..Query::default()
        };
        let mut present = Vec::new();
        for pages in due {
            self.scan(pages, query, |pages| push(&mut present, pages))?;
        }
        self.due = present;
        Ok(())
    }

    fn scan(
        &self,
        pages: Range<usize>,
        query: Query,
        mut each: impl FnMut(Range<usize>),
    ) -> io::Result<()> {
        let address = |page: usize| self.start + (page * PAGE) as u64;
        let page =
            |address: u64| usize::try_from((address - self.start) / PAGE as u64).unwrap_or(0);
        scan(&self.pagemap, address(pages.start)..address(pages.end), query, |region| {
            each(page(region.start)..page(region.end));
        })
    }

    /// Takes volatile pages out, and adds those whose time is over.
    fn leave_volatile(&mut self, pages: Vec<Range<usize>>) -> Vec<Range<usize>> {
        let now = self.looks;
        // Kept for a while: a page that changes again waits longer.
        self.volatile.retain(|_, it| now <= it.until + it.wait);
        let mut waiting: Vec<usize> = Vec::new();
        let mut due = Vec::new();
        for (page, it) in &self.volatile {
            if now <= it.until {
                waiting.push(*page);
            }
            // A page that was written to since the last look is not due yet.
            if now == it.until + 1 && self.hashes[*page].is_none() && !has(&self.young, *page) {
                due.push(*page..*page + 1);
            }
        }
        waiting.sort_unstable();
        let waiting: Vec<_> = waiting.into_iter().map(|page| page..page + 1).collect();
        let mut pages = parts_without(&pages, &waiting);
        due.retain(|it| !has(&pages, it.start));
        pages.extend(due);
        pages
    }

    /// Number of pages that are due.
    pub(super) fn due(&self) -> usize {
        self.due.iter().map(ExactSizeIterator::len).sum()
    }

    /// The pages that are due, in parts for several threads.
    pub(super) fn parts(&mut self, pages: usize) -> Vec<Part<'_>> {
        let (mut parts, mut rest, mut at) = (Vec::new(), &mut *self.hashes, 0);
        for due in std::mem::take(&mut self.due) {
            let mut first = due.start;
            while first < due.end {
                let count = (due.end - first).min(pages);
                let (_, behind) = rest.split_at_mut(first - at);
                let (hashes, behind) = behind.split_at_mut(count);
                let start = self.start + (first * PAGE) as u64;
                parts.push(Part { memory: &self.memory, start, hashes });
                (rest, at, first) = (behind, first + count, first + count);
            }
        }
        parts
    }

    /// Hashes of unchanged pages that are not merged.
    pub(super) fn hashes(&self) -> &[Hash] {
        &self.hashes
    }

    /// Reads the present content of pages, beginning with this one.
    pub(super) fn read(&self, page: usize, content: &mut [u8]) -> io::Result<()> {
        self.memory.read_exact_at(content, self.start + (page * PAGE) as u64)
    }

    /// Notes that a page is merged.
    pub(super) fn set_merged(&mut self, page: usize) {
        self.hashes[page] = None;
    }

    /// Notes that a page has changed since it was hashed, or since it was merged.
    pub(super) fn set_volatile(&mut self, page: usize) {
        self.hashes[page] = None;
        let wait = self.volatile.get(&page).map_or(VOLATILE, |it| (it.wait * 2).min(VOLATILE_MAX));
        self.volatile.insert(page, Volatile { until: self.looks + wait, wait });
    }
}

/// Adds pages behind all others.
fn push(all: &mut Vec<Range<usize>>, pages: Range<usize>) {
    match all.last_mut().filter(|last| last.end == pages.start) {
        Some(last) => last.end = pages.end,
        None => all.push(pages),
    }
}

fn parts_without(pages: &[Range<usize>], others: &[Range<usize>]) -> Vec<Range<usize>> {
    without(pages, others).into_iter().map(|(_, part)| part).collect()
}

/// Whether a page is in ranges that are in order.
fn has(ranges: &[Range<usize>], page: usize) -> bool {
    let behind = ranges.partition_point(|range| range.end <= page);
    ranges.get(behind).is_some_and(|range| range.contains(&page))
}

/// A part of a guest's pages.
#[derive(Debug)]
pub(super) struct Part<'p> {
    memory: &'p ProcessMemory,
    start: u64,
    hashes: &'p mut [Hash],
}

impl Part<'_> {
    /// Hashes its pages.
    pub(super) fn hash(self) -> io::Result<()> {
        let mut buffer = vec![0; READ_PAGES.min(self.hashes.len()) * PAGE];
        let mut at = self.start;
        for hashes in self.hashes.chunks_mut(READ_PAGES) {
            let content = &mut buffer[..hashes.len() * PAGE];
            self.memory.read_exact_at(content, at)?;
            for (hash, page) in hashes.iter_mut().zip(content.chunks(PAGE)) {
                *hash = Some(hash_of(page));
            }
            at += content.len() as u64;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_found_in_ranges() {
        let all = [1..3, 7..9];
        assert!(has(&all, 8) && !has(&all, 3));
    }
}
