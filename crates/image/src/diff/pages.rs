//! What sharing equal pages would add to sharing equal files.
//!
//! Each distinct content is read once, and its pages are hashed to 62 bits with a random key: a
//! million pages collide with a chance of one in ten million, and only a figure depends on it.
//! Memory is bounded: hashes that do not fit take several passes.

use std::collections::hash_map::RandomState;
use std::fs::File;
use std::hash::BuildHasher;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use cofolio_store::parallel::for_each;
use cofolio_store::task::{Cancel, Task};
use cofolio_store::{Digest, Domain, Stretch, stretch_at};
use serde::Serialize;

use super::{Content, Diff, DiffError, PAGE_SIZE};

/// Default bytes of memory for hashes: enough for 100 GiB of content in one pass.
pub const MEMORY_DEFAULT: usize = 256 << 20;

const PAGE: usize = 4096;
const _: () = assert!(PAGE as u64 == PAGE_SIZE);

const BUFFER: usize = 128 * PAGE;

/// Pages of two images, by content.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PageReport {
    /// Distinct pages of both: what reading both would take if equal pages were shared.
    pub distinct_pages: u64,
    /// Distinct pages of contents that only the first image has, but the second has elsewhere.
    pub a_in_b_pages: u64,
    /// Distinct pages of contents that only the second image has, which the first has too.
    pub b_in_a_pages: u64,
    /// Bytes of content read: the cost.
    pub read_bytes: u64,
    /// Times that it was read.
    pub passes: u64,
    /// Bytes of memory that hashes took.
    pub memory_bytes: u64,
}

/// Hashes the pages of both images on all processors, with about `memory_max` bytes for hashes.
///
/// # Errors
/// [`DiffError::Store`] if an object is missing, [`DiffError::Object`] if it cannot be read or is
/// not as long as its image says.
pub fn compare(
    domain: &Domain,
    diff: &Diff,
    memory_max: usize,
    task: &Task,
) -> Result<PageReport, DiffError> {
    let _lock = domain.lock_shared()?;
    let most = memory_max / size_of::<u64>();
    let mut pages = diff.pages_by_file();
    if pages > most as u64 {
        pages = data_pages(domain, diff)?;
    }
    let pages = usize::try_from(pages).unwrap_or(usize::MAX);
    let room = most.min(pages).max(1024);
    // A quarter of the room is for chance, and for repetitions that are not yet thrown out.
    let passes = pages.div_ceil(if pages <= room { room } else { room / 4 * 3 }).max(1);
    let bytes: u64 = diff.contents.iter().map(|(_, content)| content.size).sum();
    let total = bytes.saturating_mul(passes as u64);
    let done = AtomicU64::new(0);
    let key = RandomState::new();
    let mut report = PageReport { passes: passes as u64, ..PageReport::default() };
    let read = AtomicU64::new(0);
    for pass in 0..passes {
        let wanted = Wanted { key: &key, pass: pass as u64, passes: passes as u64 };
        let hashes = Mutex::new(Hashes { list: Vec::with_capacity(room), sorted: 0 });
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        for_each(threads, &diff.contents, |(object, content)| -> Result<(), DiffError> {
            let file = open(domain, object, content)?;
            let of_object = |source| DiffError::Object { object: *object, source };
            let hashed = hash_pages(&file, content, &wanted, &hashes, &task.cancel);
            let bytes = hashed.map_err(|error| task.reason(of_object(error)))?;
            read.fetch_add(bytes, Relaxed);
            task.done(done.fetch_add(content.size, Relaxed) + content.size, total);
            Ok(())
        })?;
        let mut hashes = hashes.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
        hashes.sort();
        let memory = (hashes.list.capacity() * size_of::<u64>()) as u64;
        report.memory_bytes = report.memory_bytes.max(memory);
        hashes.count(&mut report);
    }
    report.read_bytes = read.into_inner();
    Ok(report)
}

/// An object, which must be as long as its image says.
fn open(domain: &Domain, object: &Digest, content: &Content) -> Result<File, DiffError> {
    let stored = domain.open_object(object)?;
    let open = || -> io::Result<File> {
        let file = stored.to_std()?;
        let found = file.metadata()?.len();
        if found != content.size {
            let what = format!("{found} bytes, its image says {}", content.size);
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        }
        Ok(file)
    };
    open().map_err(|source| DiffError::Object { object: *object, source })
}

/// Pages that are not in holes, so that an empty file of a terabyte makes no thousand passes.
fn data_pages(domain: &Domain, diff: &Diff) -> Result<u64, DiffError> {
    let mut pages = 0_u64;
    for (object, content) in &diff.contents {
        let file = open(domain, object, content)?;
        let mut offset = 0;
        while offset < content.size {
            let stretch = stretch_at(&file, offset)
                .map_err(|source| DiffError::Object { object: *object, source })?;
            let (Stretch::Data(len) | Stretch::Hole(len)) = stretch;
            let len = len.min(content.size - offset);
            offset += len;
            pages = pages.saturating_add(match stretch {
                Stretch::Data(_) => len.div_ceil(PAGE_SIZE),
                Stretch::Hole(_) => 1,
            });
        }
    }
    Ok(pages)
}

struct Wanted<'a> {
    key: &'a RandomState,
    pass: u64,
    passes: u64,
}

impl Wanted<'_> {
    /// The hash of a page, its lowest bits free for the owner; `None` if it is another pass's.
    fn hash(&self, page: &[u8]) -> Option<u64> {
        let hash = self.key.hash_one(page) & !OWNER;
        ((hash >> OWNER_BITS) % self.passes == self.pass).then_some(hash)
    }
}

/// The bits of an entry that say which images have the page.
const OWNER: u64 = 3;
const OWNER_BITS: u32 = 2;
const SHARED: u64 = 0;
const ONLY_A: u64 = 1;
const ONLY_B: u64 = 2;

/// Pages that were met: hash and owner. Repetitions are thrown out when the list is full.
struct Hashes {
    list: Vec<u64>,
    /// How many at its beginning are sorted and unique.
    sorted: usize,
}

impl Hashes {
    fn add(&mut self, more: &[u64]) {
        // Only once there is something to gain, or sorting would be all that is done.
        if self.list.len() + more.len() > self.list.capacity()
            && self.list.len() >= self.sorted / 4 * 5
        {
            self.sort();
        }
        self.list.extend_from_slice(more);
    }

    fn sort(&mut self) {
        self.list.sort_unstable();
        self.list.dedup();
        self.sorted = self.list.len();
    }

    /// Adds what a sorted list says to the report.
    fn count(&self, report: &mut PageReport) {
        for same in self.list.chunk_by(|a, b| a >> OWNER_BITS == b >> OWNER_BITS) {
            let has = |owner| same.iter().any(|entry| entry & OWNER == owner);
            let (shared, only_a, only_b) = (has(SHARED), has(ONLY_A), has(ONLY_B));
            report.distinct_pages += 1;
            report.a_in_b_pages += u64::from(only_a && (only_b || shared));
            report.b_in_a_pages += u64::from(only_b && (only_a || shared));
        }
    }
}

/// Hashes the pages of one object; gives the bytes read. Holes are one page of zeros and not read.
fn hash_pages(
    file: &File,
    content: &Content,
    wanted: &Wanted<'_>,
    hashes: &Mutex<Hashes>,
    cancel: &Cancel,
) -> io::Result<u64> {
    let owner = match content.names {
        [_, 0] => ONLY_A,
        [0, _] => ONLY_B,
        _ => SHARED,
    };
    let mut buffer = vec![0; BUFFER.min(usize::try_from(content.size).unwrap_or(BUFFER))];
    let mut found = Vec::with_capacity(BUFFER / PAGE);
    let (mut offset, mut read) = (0, 0);
    // `offset` is always at the beginning of a page.
    while offset < content.size {
        cancel.check().map_err(io::Error::other)?;
        let left = content.size - offset;
        match stretch_at(file, offset)? {
            Stretch::Hole(len) if len >= PAGE_SIZE.min(left) => {
                found.extend(wanted.hash(&[0; PAGE]));
                let whole = if len >= left { left } else { len / PAGE_SIZE * PAGE_SIZE };
                offset += whole;
            }
            stretch => {
                // A hole smaller than a page is read with the rest of its page.
                let (Stretch::Data(len) | Stretch::Hole(len)) = stretch;
                let len = len.checked_next_multiple_of(PAGE_SIZE).unwrap_or(left).min(left);
                let len = usize::try_from(len).unwrap_or(BUFFER).min(buffer.len());
                file.read_exact_at(&mut buffer[..len], offset)?;
                for page in buffer[..len].chunks(PAGE) {
                    // The page cache fills the last page up with zeros, too.
                    found.extend(match page.len() {
                        PAGE => wanted.hash(page),
                        _ => {
                            let mut whole = [0; PAGE];
                            whole[..page.len()].copy_from_slice(page);
                            wanted.hash(&whole)
                        }
                    });
                }
                offset += len as u64;
                read += len as u64;
            }
        }
        found.iter_mut().for_each(|entry| *entry |= owner);
        if let Ok(mut hashes) = hashes.lock() {
            hashes.add(&found);
        }
        found.clear();
    }
    Ok(read)
}
