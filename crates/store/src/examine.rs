//! The one examiner of files, for fsck, verify, scrub and repair: these differ in the files they
//! look at, the lock they hold and how they read, but not in what they find.

use std::collections::{BTreeMap, HashSet};
use std::os::fd::BorrowedFd;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use cofolio_sys::cache::cachestat;
use rustix::fs::{Advice, OFlags, fadvise, fcntl_getfl, fcntl_setfl};

use crate::buffer::{ALIGN, Buffer};
use crate::contents::Contents;
use crate::disk::{Piece, Stretch};
use crate::error::{At, Error, Result, by_hand, is_damage, with_causes};
use crate::fsck::{Finding, FindingKind};
use crate::kinds::{FileKind, FileName};
use crate::parallel::for_each;
use crate::real::stretch_at;
use crate::task::Cancel;
use crate::verity::{Hasher, UNIT};
use crate::{Digest, Domain, StoredFile};

/// How much is read at once, in bytes.
const READ_SIZE: usize = 1 << 20;

/// How the content of a file is read.
pub(crate) enum Reading {
    /// Not at all: only sizes are compared, and files parsed.
    No,
    /// Through the page cache, large files on so many threads.
    Cached(usize),
    /// That of these files through the page cache, and no other.
    Only(HashSet<FileName>),
    /// As the disk has it, past the page cache, at a rate.
    Direct(Mutex<Reader>),
}

pub(crate) struct Examiner<'a> {
    pub(crate) domain: &'a Domain,
    pub(crate) contents: &'a dyn Contents,
    pub(crate) reading: Reading,
    cancel: Cancel,
    /// Images that are there for others only ([`Domain::derived_images`]).
    pub(crate) derived: HashSet<Digest>,
}

pub(crate) enum Seen {
    Missing,
    Sound,
    Damaged(Finding),
}

impl Seen {
    pub(crate) fn finding(self) -> Option<Finding> {
        match self {
            Self::Missing | Self::Sound => None,
            Self::Damaged(finding) => Some(finding),
        }
    }
}

impl<'a> Examiner<'a> {
    pub(crate) fn new(
        domain: &'a Domain,
        contents: &'a dyn Contents,
        reading: Reading,
        cancel: &Cancel,
    ) -> Self {
        Self { domain, contents, reading, cancel: cancel.clone(), derived: HashSet::new() }
    }

    /// Compares the size, if known, and the content, if asked to; also returns how many bytes were
    /// hashed. Fails only if that says nothing about the file, as lack of memory does.
    pub(crate) fn look(&self, name: &FileName, size: Option<u64>) -> Result<(Seen, u64)> {
        let mut hashed = 0;
        let seen = self.look_at(name, size, &mut hashed);
        match seen {
            Err(error) if error.is_race() => Ok((Seen::Missing, 0)),
            Err(error) if is_damage(&error) => {
                let detail = format!("it cannot be read: {}", with_advice(&error));
                Ok((Seen::Damaged(self.finding(name, Wrong::Unreadable, detail)), hashed))
            }
            other => Ok((other?, hashed)),
        }
    }

    fn look_at(&self, name: &FileName, size: Option<u64>, hashed: &mut u64) -> Result<Seen> {
        self.cancel.check()?;
        let file = self.domain.open_named(name)?;
        let found = file.size().at("look at", file.path())?;
        if let Some(size) = size.filter(|size| *size != found) {
            let detail = format!("{found} bytes, its image says {size}");
            return Ok(Seen::Damaged(self.finding(name, Wrong::Truncated, detail)));
        }
        let Some(digest) = name.digest() else { return Ok(Seen::Sound) };
        let actual = match &self.reading {
            Reading::No => return Ok(Seen::Sound),
            Reading::Only(names) if !names.contains(name) => return Ok(Seen::Sound),
            Reading::Only(_) | Reading::Cached(1) => hash_file(&file, &self.cancel)?,
            Reading::Cached(threads) => hash_large_file(&file, *threads, &self.cancel)?,
            Reading::Direct(reader) => {
                let mut reader = reader.lock().unwrap_or_else(PoisonError::into_inner);
                reader.hash(&file, &self.cancel)?
            }
        };
        *hashed = found;
        if actual == digest {
            return Ok(Seen::Sound);
        }
        let detail = format!("its content has digest {actual}");
        Ok(Seen::Damaged(self.finding(name, Wrong::Altered, detail)))
    }

    /// Reads a file as its kind and visits what it names; fails as [`Examiner::look`] does.
    pub(crate) fn read(&self, name: &FileName, visit: &mut dyn FnMut(Digest, u64)) -> Result<Seen> {
        let file = self.domain.open_named(name).map_err(Into::into);
        match file.and_then(|file| self.contents.check(name.kind(), &file, visit)) {
            Ok(()) => Ok(Seen::Sound),
            Err(error) => match error.downcast::<Error>().map(|error| *error) {
                Ok(error) if error.is_race() => Ok(Seen::Missing),
                Ok(error) => self.unreadable(name, error),
                Err(source) => {
                    self.unreadable(name, Error::Unreadable { what: name.to_string(), source })
                }
            },
        }
    }

    /// Both: reads a file only if its content is sound. Also returns how many bytes were hashed.
    pub(crate) fn whole(
        &self,
        name: &FileName,
        visit: &mut dyn FnMut(Digest, u64),
    ) -> Result<(Seen, u64)> {
        match self.look(name, None)? {
            (Seen::Sound, hashed) => Ok((self.read(name, visit)?, hashed)),
            other => Ok(other),
        }
    }

    fn unreadable(&self, name: &FileName, error: Error) -> Result<Seen> {
        if !is_damage(&error) {
            return Err(error);
        }
        Ok(Seen::Damaged(self.finding(name, Wrong::Unreadable, reason(&error))))
    }

    /// Examines a pack, which lacks segments outside of `sound`. Fails like [`Examiner::look`].
    pub(crate) fn pack(&self, name: &FileName, sound: &HashSet<Digest>) -> Result<Option<Finding>> {
        let mut lacks = None;
        let (seen, _) = self.whole(name, &mut |segment, _| {
            if !sound.contains(&segment) {
                lacks.get_or_insert(segment);
            }
        })?;
        Ok(match (seen, lacks) {
            (Seen::Sound, Some(segment)) => {
                let detail = format!("its segment {segment} is missing or damaged");
                Some(self.finding(name, Wrong::Incomplete, detail))
            }
            // One that has been replaced since it was listed is no finding.
            (seen, _) => seen.finding(),
        })
    }

    pub(crate) fn missing_object(&self, digest: &Digest) -> Finding {
        let name = FileName::content(FileKind::Object, digest);
        let path = self.domain.named_file(&name);
        Finding::new(FindingKind::ObjectMissing, path, "an image names it").about(digest)
    }

    pub(crate) fn finding(&self, name: &FileName, wrong: Wrong, detail: String) -> Finding {
        use FindingKind as Kind;
        let is_base = name.kind() == FileKind::Image
            && name.image().is_some_and(|it| self.derived.contains(&it));
        let kind = match (name.kind(), wrong) {
            (FileKind::Object, Wrong::Altered) => Kind::ObjectAltered,
            (FileKind::Object, Wrong::Unreadable) => Kind::ObjectUnreadable,
            (FileKind::Object, Wrong::Truncated | Wrong::Incomplete) => Kind::ObjectTruncated,
            (FileKind::Image, _) if is_base => Kind::BaseAltered,
            (FileKind::Image, Wrong::Altered) => Kind::ImageAltered,
            (FileKind::Image, _) => Kind::ImageUnreadable,
            (FileKind::Layer | FileKind::Split, _) => Kind::LayerUnreadable,
            (FileKind::Segment, Wrong::Altered) => Kind::SegmentAltered,
            (FileKind::Segment, _) => Kind::SegmentUnreadable,
            (FileKind::Pack | FileKind::DaxPack, Wrong::Altered) => Kind::PackAltered,
            (FileKind::Pack | FileKind::DaxPack, Wrong::Incomplete) => Kind::PackIncomplete,
            (FileKind::Pack | FileKind::DaxPack, _) => Kind::PackUnreadable,
        };
        let mut finding = Finding::new(kind, self.domain.named_file(name), detail);
        finding.digest = name.digest();
        if let Some(image) = name.image().filter(|_| name.kind().is_pack()) {
            finding.user = Some(FileName::content(FileKind::Image, &image).to_string());
        }
        finding
    }
}

pub(crate) fn with_advice(error: &(dyn std::error::Error + 'static)) -> String {
    let advice = by_hand(error).map(|advice| format!("; {advice} first"));
    with_causes(error) + &advice.unwrap_or_default()
}

/// Why a file cannot be read, without its name, which the finding has.
pub(crate) fn reason(error: &Error) -> String {
    match error {
        Error::Unreadable { source, .. } => with_advice(&**source),
        Error::Corrupt { reason, .. } => reason.clone(),
        other => with_advice(other),
    }
}

#[derive(Clone, Copy)]
pub(crate) enum Wrong {
    Truncated,
    Altered,
    Unreadable,
    Incomplete,
}

/// The fs-verity digest of a file's current content. A hole of a terabyte takes no time.
pub(crate) fn hash_file(file: &StoredFile, cancel: &Cancel) -> Result<Digest> {
    let mut hasher = Hasher::new();
    file.for_pieces(|piece| hasher.piece(piece, cancel))?;
    Ok(hasher.finish())
}

/// [`hash_file`] on several threads.
fn hash_large_file(file: &StoredFile, threads: usize, cancel: &Cancel) -> Result<Digest> {
    let size = file.size().at("look at", file.path())?;
    let count = size / UNIT;
    let mut whole = Hasher::new();
    // A few at a time: their number is only bounded by what a file claims to hold.
    for first in (0..count).step_by(threads) {
        let units: Vec<u64> = (first..count.min(first + threads as u64)).collect();
        let done = Mutex::new(BTreeMap::new());
        for_each(threads, &units, |unit| -> Result<()> {
            let mut hasher = Hasher::new();
            file.for_pieces_in(unit * UNIT..(unit + 1) * UNIT, |piece| {
                hasher.piece(piece, cancel)
            })?;
            done.lock().unwrap_or_else(PoisonError::into_inner).insert(*unit, hasher);
            Ok(())
        })?;
        for unit in done.into_inner().unwrap_or_else(PoisonError::into_inner).into_values() {
            if unit.size() < UNIT {
                // It is being cut while we look.
                return hash_file(file, cancel);
            }
            whole.unit(unit);
        }
    }
    file.for_pieces_in(count * UNIT..size, |piece| whole.piece(piece, cancel))?;
    Ok(whole.finish())
}

impl Hasher {
    fn piece(&mut self, piece: Piece<'_>, cancel: &Cancel) -> Result<()> {
        cancel.check()?;
        match piece {
            Piece::Data(data) => self.update(data),
            Piece::Hole(len) => self.zeros(len),
        }
        Ok(())
    }
}

/// Reads files past the page cache, at a rate.
pub(crate) struct Reader {
    buffer: Buffer,
    rate: Option<u64>,
    /// What was read since `since`.
    bytes: u64,
    since: Instant,
}

impl Reader {
    pub(crate) fn new(rate: Option<u64>) -> Self {
        // Pieces of a quarter of a second, so that a low rate is one and not a row of bursts.
        let piece = rate.map_or(READ_SIZE, |rate| usize::try_from(rate / 4).unwrap_or(READ_SIZE));
        let len = piece.clamp(ALIGN, READ_SIZE).next_multiple_of(ALIGN);
        Self { buffer: Buffer::new(len), rate, bytes: 0, since: Instant::now() }
    }

    /// The fs-verity digest of a file's content on the disk, past the cache if possible.
    fn hash(&mut self, file: &StoredFile, cancel: &Cancel) -> Result<Digest> {
        let digest = self.hash_direct(file, cancel);
        // Whoever reads the file next reads what is not aligned.
        file.descriptor().into_iter().for_each(|descriptor| set_direct(descriptor, false));
        digest
    }

    fn hash_direct(&mut self, file: &StoredFile, cancel: &Cancel) -> Result<Digest> {
        if let Some(descriptor) = file.descriptor() {
            // Keeps the kernel from reading ahead where the cache is in the way.
            let _ = fadvise(descriptor, 0, None, Advice::Random);
            set_direct(descriptor, true);
        }
        let mut hasher = Hasher::new();
        loop {
            cancel.check()?;
            // What is left of a hole is read: direct reads begin at whole blocks.
            if let Some(descriptor) = file.descriptor()
                && let Ok(Stretch::Hole(len)) = stretch_at(descriptor, hasher.size())
                && len >= READ_SIZE as u64
            {
                hasher.zeros(len - len % READ_SIZE as u64);
                continue;
            }
            let buffer = self.buffer.spare();
            let quiet = Quiet::begin(file, hasher.size(), buffer.len() as u64);
            let read = match file.read_at(buffer, hasher.size()) {
                // The filesystem accepts the flag but refuses direct reads, or these.
                Err(error)
                    if error.raw_os_error() == Some(rustix::io::Errno::INVAL.raw_os_error()) =>
                {
                    if let Some(descriptor) = file.descriptor() {
                        set_direct(descriptor, false);
                    }
                    file.read_at(buffer, hasher.size())
                }
                other => other,
            };
            let n = read.at("read", file.path())?;
            drop(quiet);
            if n == 0 {
                return Ok(hasher.finish());
            }
            hasher.update(&buffer[..n]);
            self.wait(n as u64, cancel)?;
            // The file ended at an offset that is not aligned: there is nothing behind it.
            if !n.is_multiple_of(ALIGN)
                && hasher.size() >= file.size().at("look at", file.path())?
            {
                return Ok(hasher.finish());
            }
        }
    }

    /// Waits until so many bytes are due.
    fn wait(&mut self, bytes: u64, cancel: &Cancel) -> Result<()> {
        let Some(rate) = self.rate.filter(|rate| *rate > 0) else { return Ok(()) };
        self.bytes += bytes;
        #[expect(clippy::cast_precision_loss, reason = "a wait is not that precise")]
        let due = Duration::from_secs_f64(self.bytes as f64 / rate as f64);
        if self.since.elapsed().saturating_sub(due) > Duration::from_secs(1) {
            // The disk was slower than the rate; that is no credit for later.
            (self.bytes, self.since) = (0, Instant::now());
            return Ok(());
        }
        cancel.wait_for(|| Ok((self.since.elapsed() >= due).then_some(())))
    }
}

/// Where the filesystem cannot, the file is read through the cache.
fn set_direct(descriptor: BorrowedFd<'_>, on: bool) {
    if let Ok(mut flags) = fcntl_getfl(descriptor) {
        flags.set(OFlags::DIRECT, on);
        let _ = fcntl_setfl(descriptor, flags);
    }
}

/// A range of a file whose pages, if it had none in the cache before, has none there afterwards.
pub(crate) struct Quiet<'a> {
    file: &'a StoredFile,
    offset: u64,
    len: u64,
    was_empty: bool,
}

impl<'a> Quiet<'a> {
    /// `len` 0 means to the end.
    pub(crate) fn begin(file: &'a StoredFile, offset: u64, len: u64) -> Self {
        let cached = file.descriptor().and_then(|fd| cachestat(fd, offset, len).ok());
        // If nobody knows, nothing is taken away.
        let was_empty = cached.is_some_and(|stat| stat.cached == 0);
        Self { file, offset, len, was_empty }
    }
}

impl Drop for Quiet<'_> {
    fn drop(&mut self) {
        if let Some(descriptor) = self.file.descriptor().filter(|_| self.was_empty) {
            let len = std::num::NonZeroU64::new(self.len);
            let _ = fadvise(descriptor, self.offset, len, Advice::DontNeed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::{Disk, Purpose, RealDisk};

    /// At a rate of 1 KiB/s a scrub slept 4 s for each piece, and a signal had to wait for that.
    #[test]
    fn a_cancel_ends_the_wait_for_the_rate() {
        let cancel = Cancel::default();
        cancel.cancel();
        assert!(matches!(Reader::new(Some(1)).wait(20, &cancel), Err(Error::Cancelled(_))));
    }

    /// Content at the seams of the units, holes between, and an end that is no unit.
    #[test]
    fn a_large_file_has_one_digest_on_any_number_of_threads() {
        let name = format!("cofolio-store-large-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        let disk = RealDisk::create_dir(&directory).unwrap();
        let mut file = disk.create("large", Purpose::Content).unwrap();
        let mut size = 0;
        for (hole, data) in [(UNIT - 2, "abcd"), (UNIT, "at a seam"), (2 * UNIT + 4097, "end")] {
            file.append_hole(hole).unwrap();
            file.write_all(data.as_bytes()).unwrap();
            size += hole + data.len() as u64;
        }
        drop(file);
        assert!(size > 4 * UNIT);
        let file = StoredFile::new(disk.open("large").unwrap(), "large".into());
        let expected = hash_file(&file, &Cancel::default()).unwrap();
        for threads in [2, 3, 8] {
            assert_eq!(
                hash_large_file(&file, threads, &Cancel::default()).unwrap(),
                expected,
                "{threads} threads"
            );
        }
        std::fs::remove_dir_all(directory).unwrap();
    }
}
