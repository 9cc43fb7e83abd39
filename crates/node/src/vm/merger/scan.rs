//! What is known of a guest's pages between two looks: which stay as they are, and their hashes.

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

/// The age of a page that cannot be merged: it is not there, or is merged.
const NEVER: i8 = i8::MIN;
/// A page that was changed when it was to be merged is left alone for so many looks.
const VOLATILE: i8 = -8;
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
    /// Looks since a page was written to; below 0 it is left alone for as many; or [`NEVER`].
    ages: Vec<i8>,
    hashes: Vec<Hash>,
}

impl Pages {
    /// Of the process's memory at these addresses.
    pub(super) fn new(proc: &Path, pid: u32, start: u64, len: u64) -> io::Result<Self> {
        let dir = proc.join(pid.to_string());
        let count = usize::try_from(len / PAGE as u64).unwrap_or(0);
        Ok(Self {
            pagemap: File::open(dir.join("pagemap"))?,
            memory: ProcessMemory::open(pid)?,
            start,
            ages: vec![NEVER; count],
            hashes: vec![None; count],
        })
    }

    /// Looks which pages were written to since the last look.
    pub(super) fn look(&mut self) -> io::Result<()> {
        let query = Query {
            // Pages of a pool are not watched, nor is what the guest has written to since.
            mask: category::PRESENT | category::WP_ALLOWED,
            inverted: category::ZERO | category::FILE,
            returned: category::WRITTEN,
            write_protect: true,
        };
        let end = self.start + (self.ages.len() * PAGE) as u64;
        let (mut next, start) = (0, self.start);
        let (ages, hashes) = (&mut self.ages, &mut self.hashes);
        let forget = |pages: Range<usize>, ages: &mut [i8], hashes: &mut [Hash]| {
            ages[pages.clone()].fill(NEVER);
            hashes[pages].fill(None);
        };
        let page = |address: u64| usize::try_from((address - start) / PAGE as u64).unwrap_or(0);
        scan(&self.pagemap, start..end, query, |region| {
            let (first, last) = (page(region.start), page(region.end));
            forget(next..first, ages, hashes);
            let was_written = region.categories & category::WRITTEN != 0;
            for page in first..last {
                ages[page] = match ages[page] {
                    NEVER => 0,
                    age if age < 0 => age + 1,
                    age if !was_written => age.saturating_add(1),
                    _ => 0,
                };
                if was_written {
                    hashes[page] = None;
                }
            }
            next = last;
        })?;
        let count = ages.len();
        forget(next..count, ages, hashes);
        Ok(())
    }

    /// Parts of it that can be hashed apart from each other.
    pub(super) fn parts(&mut self, pages: usize) -> impl Iterator<Item = Part<'_>> {
        let (memory, start) = (&self.memory, self.start);
        let parts = self.ages.chunks(pages).zip(self.hashes.chunks_mut(pages));
        parts.enumerate().map(move |(number, (ages, hashes))| {
            let start = start + (number * pages * PAGE) as u64;
            Part { memory, start, ages, hashes }
        })
    }

    /// The hashes of pages that have stayed as they are.
    pub(super) fn hashes(&self) -> &[Hash] {
        &self.hashes
    }

    /// Fills `content` with what pages from this one on hold now.
    pub(super) fn read(&self, page: usize, content: &mut [u8]) -> io::Result<()> {
        self.memory.read_exact_at(content, self.start + (page * PAGE) as u64)
    }

    /// Notes that a page is merged.
    pub(super) fn set_merged(&mut self, page: usize) {
        (self.ages[page], self.hashes[page]) = (NEVER, None);
    }

    /// Notes that a page has changed since it was hashed.
    pub(super) fn set_volatile(&mut self, page: usize) {
        (self.ages[page], self.hashes[page]) = (VOLATILE, None);
    }
}

/// A part of a guest's pages.
#[derive(Debug)]
pub(super) struct Part<'p> {
    memory: &'p ProcessMemory,
    start: u64,
    ages: &'p [i8],
    hashes: &'p mut [Hash],
}

impl Part<'_> {
    /// Hashes the pages that were not written to for a whole period and have no hash yet; how many.
    pub(super) fn hash(self) -> io::Result<u64> {
        let mut buffer = vec![0; READ_PAGES * PAGE];
        let (mut page, mut hashed) = (0, 0);
        while page < self.ages.len() {
            let due = self.ages.iter().zip(&*self.hashes).skip(page).take(READ_PAGES);
            let count = due.take_while(|(age, hash)| **age >= 1 && hash.is_none()).count();
            if count == 0 {
                page += 1;
                continue;
            }
            let content = &mut buffer[..count * PAGE];
            self.memory.read_exact_at(content, self.start + (page * PAGE) as u64)?;
            for (number, content) in content.chunks(PAGE).enumerate() {
                self.hashes[page + number] = Some(hash_of(content));
            }
            page += count;
            hashed += count as u64;
        }
        Ok(hashed)
    }
}
