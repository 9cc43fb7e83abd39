//! Which pages of a file are in the page cache, and reading that leaves it so.

use std::fs::File;
use std::io::{self, Read as _};

use crate::cache::{FileMap, page_size};
use rustix::fs::Advice;

/// Which pages of a file are resident, or of several files with the same content.
#[derive(Debug, Default, Clone)]
pub struct Resident(Vec<u64>);

impl Resident {
    /// Asks mincore(2) of the first `size` bytes of a file.
    /// Errors: those of mmap(2) and mincore(2).
    pub fn of(file: &File, size: u64) -> io::Result<Self> {
        let mut words = Vec::new();
        let mut at = 0usize;
        FileMap::new(file, size)?.residency(|run| {
            for page in run {
                if page.is_resident() {
                    words.resize(words.len().max(at / 64 + 1), 0);
                    words[at / 64] |= 1 << (at % 64);
                }
                at += 1;
            }
        })?;
        Ok(Self(words))
    }

    /// Whether this page, counted from the file's first, is.
    pub fn has(&self, page: u64) -> bool {
        let word = usize::try_from(page / 64).ok().and_then(|word| self.0.get(word));
        word.is_some_and(|word| word >> (page % 64) & 1 == 1)
    }

    /// How many are.
    pub fn count(&self) -> u64 {
        self.0.iter().map(|word| u64::from(word.count_ones())).sum()
    }

    /// Adds the pages that another file of the same content has.
    pub fn add(&mut self, other: &Self) {
        self.0.resize(self.0.len().max(other.0.len()), 0);
        self.0.iter_mut().zip(&other.0).for_each(|(word, more)| *word |= more);
    }

    /// Drops the pages of a file that are not of these. That not all of them go harms nobody.
    pub fn drop_others(&self, file: &File, size: u64) {
        let page = page_size();
        let pages = size.div_ceil(page);
        let mut first = 0;
        while first < pages {
            let end = (first..pages).find(|&index| self.has(index)).unwrap_or(pages);
            if let Some(length) = std::num::NonZeroU64::new((end - first) * page) {
                let _ = rustix::fs::fadvise(file, first * page, Some(length), Advice::DontNeed);
            }
            first = (end..pages).find(|&index| !self.has(index)).unwrap_or(pages);
        }
    }
}

/// Reads a file of at most `max` bytes from its beginning; the page cache has as much of it afterwards as before.
pub fn read_aside(file: &File, max: u64) -> io::Result<Vec<u8>> {
    let too_large =
        || io::Error::new(io::ErrorKind::FileTooLarge, format!("more than {max} bytes"));
    let size = file.metadata()?.len();
    if size > max {
        return Err(too_large());
    }
    let resident = Resident::of(file, size)?;
    let mut bytes = Vec::new();
    io::Seek::rewind(&mut &*file)?;
    let read = file.take(max.saturating_add(1)).read_to_end(&mut bytes);
    resident.drop_others(file, size);
    read?;
    if bytes.len() as u64 > max { Err(too_large()) } else { Ok(bytes) }
}
