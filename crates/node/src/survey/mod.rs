//! Duplicates among files that engines unpacked on this machine: on disk and in the page cache.
//!
//! ```text
//! directories ─ walk ─▶ paths ─▶ workers: ask residency, read, hash ─▶ counted contents and pages
//! ```
//!
//! Nothing changes: neither access times (files that refuse `O_NOATIME` are skipped) nor the page
//! cache. A file's residency is asked first, then it is read past the cache (`O_DIRECT`), or the
//! pages that were not resident are dropped again.
//!
//! Memory is bounded: some 60 bytes for each different content, a bit for each page of partly
//! resident ones, and a table of pages that becomes a sample when full.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use cofolio_store::Buffer;
use cofolio_store::task::{Cancel, Cancelled, Event, Task};
use cofolio_sys::cache::page_size;
use rustix::fs::{FileType, Mode, OFlags};
use serde::Serialize;
use sha2::{Digest as _, Sha256};

use cofolio_image::source::engine::LiveMounts;
use cofolio_image::threads::{NoThread, spawn_up_to};
use cofolio_sys::resident::Resident;

use crate::mount::mountinfo;

/// Pages that are told apart, at most; beyond, a sample of them is. Some 24 bytes each.
const PAGES_MAX: usize = 1 << 22;
/// Read at once, in bytes: a multiple of every page size.
const READ: usize = 1 << 20;
/// What direct I/O wants buffers to be aligned to, in bytes.
const ALIGNMENT: usize = 4096;
/// Paths that wait for a worker.
const QUEUE: usize = 256;
/// Reasons that are kept why something could not be seen.
const REASONS_MAX: usize = 8;

/// What is mounted in this mount namespace.
///
/// # Errors
/// Those of reading `/proc/thread-self/mountinfo`.
pub fn live_mounts() -> io::Result<LiveMounts> {
    let mounts = mountinfo::read(Path::new("/"))?;
    let uppers: Vec<_> = mounts.iter().flat_map(|mount| mount.paths("upperdir")).collect();
    Ok(LiveMounts::new(mounts.into_iter().map(|mount| mount.target), uppers))
}

/// The three ways to count the same bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Shared {
    /// As they are now: once for each file.
    pub bytes: u64,
    /// If equal files were one.
    pub by_file_bytes: u64,
    /// If equal pages were one. Estimated from a sample if [`Findings::pages_sampled`] is not 1.
    pub by_page_bytes: u64,
}

/// What was found in the directories together.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct Findings {
    /// Regular files that are not empty; of several names of one file, one.
    pub files: u64,
    /// Different contents among them.
    pub contents: u64,
    /// Blocks on disk, in bytes.
    pub disk_bytes: u64,
    /// The same if equal files were one.
    pub disk_by_file_bytes: u64,
    /// What the page cache holds of the files now.
    pub resident: Shared,
    /// What it would hold if all of every file were read.
    pub all: Shared,
    /// One of so many pages was compared.
    pub pages_sampled: u64,
    /// Names in each directory, in the order in which these were given.
    pub names: Vec<u64>,
    /// Files and directories that could not be read.
    pub unseen: u64,
    /// Why, for the first few.
    pub reasons: Vec<String>,
}

/// Why a survey failed.
#[derive(Debug, thiserror::Error)]
pub enum SurveyError {
    /// It was cancelled.
    #[error(transparent)]
    Cancelled(#[from] Cancelled),
    /// No reader could be started.
    #[error(transparent)]
    Thread(#[from] NoThread),
}

/// Surveys directories with `threads` readers (0: one per processor, at most 4), or with fewer if
/// the machine gives no more.
///
/// # Errors
/// All of [`SurveyError`].
pub fn look(dirs: &[PathBuf], threads: usize, task: &Task) -> Result<Findings, SurveyError> {
    look_at(dirs, threads, PAGES_MAX, task)
}

fn look_at(
    dirs: &[PathBuf],
    threads: usize,
    pages_max: usize,
    task: &Task,
) -> Result<Findings, SurveyError> {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = if threads == 0 { processors.min(4) } else { threads };
    let tally = Mutex::new(Tally { pages: Pages::new(pages_max), ..Tally::default() });
    let bytes = AtomicU64::new(0);
    let (to_workers, paths) = crossbeam_channel::bounded::<PathBuf>(QUEUE);
    let names = std::thread::scope(|scope| {
        spawn_up_to(scope, threads, || {
            let (paths, tally, bytes) = (paths.clone(), &tally, &bytes);
            move || {
                let mut reader = Reader::new(&task.cancel);
                for path in paths {
                    // The queue is only emptied then.
                    if task.check().is_err() {
                        continue;
                    }
                    let result = reader.file(&path, tally, bytes);
                    let mut tally = lock(tally);
                    if let Err(error) = result {
                        tally.unseen(&path, &error);
                    }
                    let (bytes, items) = (bytes.load(Ordering::Relaxed), tally.findings.files);
                    task.tell(Event::Done { bytes, bytes_total: None, items, items_total: None });
                }
            }
        })?;
        drop(paths);
        let walk =
            |dir: &PathBuf| walk(dir, &tally, &task.cancel, &|path| drop(to_workers.send(path)));
        let names = dirs.iter().map(walk).collect();
        drop(to_workers);
        Ok::<_, NoThread>(names)
    })?;
    task.check()?;
    let tally = tally.into_inner().unwrap_or_else(PoisonError::into_inner);
    Ok(Findings { names, ..tally.findings() })
}

fn lock(tally: &Mutex<Tally>) -> std::sync::MutexGuard<'_, Tally> {
    tally.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Hands out the regular files below a directory, and returns how many names there are.
fn walk(root: &Path, tally: &Mutex<Tally>, cancel: &Cancel, found: &dyn Fn(PathBuf)) -> u64 {
    let mut names = 0;
    let mut todo = vec![root.to_owned()];
    while let Some(dir) = todo.pop().filter(|_| !cancel.is_cancelled()) {
        let result = (|| -> io::Result<()> {
            for entry in rustix::fs::Dir::new(open(&dir, OFlags::DIRECTORY)?)? {
                use std::os::unix::ffi::OsStrExt;
                let entry = entry?;
                let name = entry.file_name().to_bytes();
                if name == b"." || name == b".." {
                    continue;
                }
                names += 1;
                let path = dir.join(std::ffi::OsStr::from_bytes(name));
                let kind = match entry.file_type() {
                    FileType::Unknown => FileType::from_raw_mode(rustix::fs::lstat(&path)?.st_mode),
                    kind => kind,
                };
                match kind {
                    FileType::Directory => todo.push(path),
                    FileType::RegularFile => found(path),
                    _ => {}
                }
            }
            Ok(())
        })();
        if let Err(error) = result {
            lock(tally).unseen(&dir, &error);
        }
    }
    names
}

/// Opens without a trace: without `O_NOATIME` it would change when the file was last read.
fn open(path: &Path, more: OFlags) -> io::Result<std::os::fd::OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::NOATIME | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    Ok(rustix::fs::open(path, flags | OFlags::CLOEXEC | more, Mode::empty())?)
}

/// Different pages, or one in `1 << shift` of them.
#[derive(Debug, Default)]
struct Pages {
    /// By the beginning of their digest: whether it is resident somewhere.
    seen: HashMap<u64, bool>,
    shift: u32,
    max: usize,
}

impl Pages {
    fn new(max: usize) -> Self {
        Self { seen: HashMap::new(), shift: 0, max }
    }

    fn add(&mut self, digest: u64, resident: bool) {
        if digest.trailing_zeros() < self.shift {
            return;
        }
        *self.seen.entry(digest).or_default() |= resident;
        while self.seen.len() > self.max {
            self.shift += 1;
            let shift = self.shift;
            self.seen.retain(|digest, _| digest.trailing_zeros() >= shift);
        }
    }
}

/// One content, however many files have it.
#[derive(Debug)]
struct Content {
    /// Blocks on disk of the file that takes the fewest, in bytes.
    disk: u64,
    pages: u64,
    resident: Resident,
}

#[derive(Debug, Default)]
struct Tally {
    findings: Findings,
    contents: HashMap<[u8; 32], Content>,
    pages: Pages,
    /// Files with several names.
    links: HashSet<(u64, u64)>,
}

impl Tally {
    fn unseen(&mut self, path: &Path, error: &io::Error) {
        self.findings.unseen += 1;
        if self.findings.reasons.len() < REASONS_MAX {
            self.findings.reasons.push(format!("{}: {error}", path.display()));
        }
    }

    fn findings(self) -> Findings {
        let page = page_size();
        let mut findings = self.findings;
        findings.contents = self.contents.len() as u64;
        for content in self.contents.values() {
            findings.disk_by_file_bytes += content.disk;
            findings.resident.by_file_bytes += content.resident.count() * page;
            findings.all.by_file_bytes += content.pages * page;
        }
        findings.pages_sampled = 1 << self.pages.shift;
        let resident = self.pages.seen.values().filter(|&&resident| resident).count() as u64;
        findings.all.by_page_bytes = (self.pages.seen.len() as u64 * page) << self.pages.shift;
        findings.resident.by_page_bytes = (resident * page) << self.pages.shift;
        findings
    }
}

struct Reader {
    buffer: Buffer,
    pages: Vec<(u64, bool)>,
    cancel: Cancel,
}

impl Reader {
    fn new(cancel: &Cancel) -> Self {
        Self { buffer: Buffer::new(READ), pages: Vec::new(), cancel: cancel.clone() }
    }

    fn file(&mut self, path: &Path, tally: &Mutex<Tally>, bytes: &AtomicU64) -> io::Result<()> {
        let file = File::from(open(path, OFlags::empty())?);
        let stat = rustix::fs::fstat(&file)?;
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        if size == 0 || FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Ok(());
        }
        if stat.st_nlink > 1 && !lock(tally).links.insert((stat.st_dev, stat.st_ino)) {
            return Ok(());
        }
        let resident = Resident::of(&file, size)?;
        let digest = self.read(&file, size, &resident, tally, bytes)?;
        let (page, disk) = (page_size(), u64::try_from(stat.st_blocks).unwrap_or(0) * 512);
        let pages = size.div_ceil(page);
        let mut tally = lock(tally);
        let findings = &mut tally.findings;
        findings.files += 1;
        findings.disk_bytes += disk;
        findings.all.bytes += pages * page;
        findings.resident.bytes += resident.count() * page;
        let content = tally.contents.entry(digest);
        let content = content.or_insert(Content { disk, pages, resident: Resident::default() });
        content.disk = content.disk.min(disk);
        content.resident.add(&resident);
        Ok(())
    }

    /// Reads a file and leaves the page cache as it was. Returns the digest of its size and of its
    /// pages' digests, the last page padded with zeros as in the page cache.
    fn read(
        &mut self,
        file: &File,
        size: u64,
        resident: &Resident,
        tally: &Mutex<Tally>,
        bytes: &AtomicU64,
    ) -> io::Result<[u8; 32]> {
        let flags = rustix::fs::fcntl_getfl(file)?;
        let mut direct = rustix::fs::fcntl_setfl(file, flags | OFlags::DIRECT).is_ok();
        let page = usize::try_from(page_size()).unwrap_or(ALIGNMENT);
        let buffer = self.buffer.spare();
        let mut whole = Sha256::new();
        whole.update(size.to_le_bytes());
        let mut at = 0;
        let mut index = 0;
        let result = loop {
            self.cancel.check().map_err(io::Error::other)?;
            let mut length = 0;
            // Direct reads are whole pages, but for the end of the file.
            let failed = loop {
                match file.read_at(&mut buffer[length..], at + length as u64) {
                    Ok(0) => break None,
                    Ok(count) => length += count,
                    Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                    // Files with fs-verity and some filesystems refuse it when they are read.
                    Err(e) if direct && e.kind() == io::ErrorKind::InvalidInput => {
                        rustix::fs::fcntl_setfl(file, flags)?;
                        direct = false;
                    }
                    Err(e) => break Some(e),
                }
                if length == READ || !length.is_multiple_of(ALIGNMENT) {
                    break None;
                }
            };
            if let Some(error) = failed {
                break Err(error);
            }
            if length == 0 {
                break Ok(());
            }
            let filled = length.next_multiple_of(page);
            buffer[length..filled].fill(0);
            for content in buffer[..filled].chunks(page) {
                let digest = Sha256::digest(content);
                whole.update(digest);
                let head = digest.first_chunk().map_or(0, |head| u64::from_le_bytes(*head));
                self.pages.push((head, resident.has(index)));
                index += 1;
            }
            let mut tally = lock(tally);
            self.pages.drain(..).for_each(|(digest, resident)| tally.pages.add(digest, resident));
            drop(tally);
            bytes.fetch_add(length as u64, Ordering::Relaxed);
            at += length as u64;
            if length < READ {
                break Ok(());
            }
        };
        if !direct {
            resident.drop_others(file, size);
        }
        result.and_then(|()| match at {
            at if at == size => Ok(whole.finalize().into()),
            at => Err(io::Error::other(format!("it had {size} bytes, and then {at}"))),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use rustix::fs::Advice;

    use super::*;

    fn page(byte: u8) -> Vec<u8> {
        vec![byte; usize::try_from(page_size()).unwrap()]
    }

    /// Two directories: a file in both, one that shares a page, a second name, and an unshared one.
    #[test]
    fn equal_files_and_pages_are_counted_once() {
        let temporary = tempfile::tempdir().unwrap();
        let dirs = [temporary.path().join("a"), temporary.path().join("b/deep")];
        dirs.iter().for_each(|dir| std::fs::create_dir_all(dir).unwrap());
        let both = [page(1), page(2), vec![3]].concat();
        for dir in &dirs {
            std::fs::write(dir.join("both"), &both).unwrap();
        }
        std::fs::write(dirs[0].join("part"), [page(2), page(4)].concat()).unwrap();
        std::fs::hard_link(dirs[0].join("part"), dirs[0].join("name")).unwrap();
        std::fs::write(dirs[1].join("own"), page(5)).unwrap();
        std::fs::write(dirs[1].join("empty"), b"").unwrap();
        // Dirty pages are not dropped, nor would they be read past.
        rustix::fs::sync();
        let dirs = [dirs[0].clone(), temporary.path().join("b")];
        let before = std::fs::metadata(dirs[0].join("both")).unwrap();
        let found = look(&dirs, 2, &Task::default()).unwrap();
        let size = page_size();
        assert_eq!(found.reasons, Vec::<String>::new());
        assert_eq!((found.files, found.contents, found.unseen), (4, 3, 0));
        assert_eq!(found.names, [3, 4]);
        assert_eq!(found.all.bytes, 9 * size);
        assert_eq!(found.all.by_file_bytes, 6 * size);
        assert_eq!(found.all.by_page_bytes, 5 * size);
        assert_eq!(found.pages_sampled, 1);
        assert_eq!(found.disk_bytes - found.disk_by_file_bytes, before.blocks() * 512);
        let after = std::fs::metadata(dirs[0].join("both")).unwrap();
        assert_eq!((before.atime(), before.atime_nsec()), (after.atime(), after.atime_nsec()));
    }

    /// What is resident afterwards is what was resident before.
    #[test]
    fn the_page_cache_stays_as_it_was() {
        let temporary = tempfile::tempdir().unwrap();
        let dir = temporary.path().to_owned();
        let content: Vec<u8> = (0..64).flat_map(page).collect();
        let file = |name: &str| File::open(dir.join(name)).unwrap();
        for name in ["warm", "cold"] {
            std::fs::write(dir.join(name), &content).unwrap();
            file(name).sync_all().unwrap();
            rustix::fs::fadvise(file(name), 0, None, Advice::DontNeed).unwrap();
        }
        let size = content.len() as u64;
        let count = |name: &str| Resident::of(&file(name), size).unwrap().count();
        if count("cold") > 0 {
            println!("SKIP the_page_cache_stays_as_it_was: this filesystem is in memory");
            return;
        }
        rustix::fs::fadvise(file("warm"), 0, None, Advice::Random).unwrap();
        let warm = file("warm");
        rustix::fs::fadvise(&warm, 0, None, Advice::Random).unwrap();
        for index in [3, 4, 40] {
            warm.read_exact_at(&mut [0], index * page_size()).unwrap();
        }
        let before = count("warm");
        assert!(before >= 3, "{before}");
        let found = look(std::slice::from_ref(&dir), 1, &Task::default()).unwrap();
        assert_eq!((count("warm"), count("cold")), (before, 0));
        let resident = before * page_size();
        assert_eq!((found.resident.bytes, found.resident.by_file_bytes), (resident, resident));
        assert_eq!(found.resident.by_page_bytes, resident);
        assert_eq!(found.all.by_file_bytes, size);
    }

    /// With more pages than there is room for, a sample stands for all.
    #[test]
    fn a_sample_of_pages() {
        let temporary = tempfile::tempdir().unwrap();
        let mut content = Vec::new();
        for index in 0..4096u64 {
            let mut one = page(0);
            one[..8].copy_from_slice(&(index / 2).to_le_bytes());
            content.extend(one);
        }
        std::fs::write(temporary.path().join("f"), content).unwrap();
        let found = look_at(&[temporary.path().to_owned()], 1, 512, &Task::default()).unwrap();
        assert!(found.pages_sampled >= 4, "{}", found.pages_sampled);
        let estimate = found.all.by_page_bytes / page_size();
        assert!((1500..2600).contains(&estimate), "{estimate} of 2048");
    }
}
