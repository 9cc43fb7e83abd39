//! Scrubbing: reading everything again, slowly and quietly, so that a disk that forgets is found out while
//! there is still a source to repair from.
//!
//! A scrub may take days, so it holds no lock (garbage collection goes on), remembers how far it has come,
//! and leaves the page cache as it was: it reads past the cache where the filesystem can (which is what
//! tells what the disk has, and not what memory has), and takes out again what came in where it cannot.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use cofolio_sys::cache::cachestat;
use rustix::fs::{Advice, OFlags, fadvise, fcntl_getfl, fcntl_setfl};
use serde::{Deserialize, Serialize};

use crate::contents::{Contents, Part};
use crate::error::{At, Error, Result};
use crate::fsck::{Finding, FindingKind};
use crate::store::mkdir_if_missing;
use crate::verity::{self, Hasher};
use crate::{Digest, Domain, StoredFile};

/// Directory of what scrubs remember, one file per selection of images.
const DIRECTORY: &str = "scrub";
/// How much is read at once, in bytes.
const READ_SIZE: usize = 1 << 20;
/// What memory and offsets are aligned to for reading past the cache: enough for every block size there is.
const ALIGN: usize = 4096;
/// How often is noted how far it has come. What was read since is read again after a kill.
const SAVE_INTERVAL: Duration = Duration::from_secs(2);
/// Largest record that is read, in bytes.
const RECORD_SIZE_MAX: u64 = 16 << 20;
/// Findings kept; beyond that the store needs fsck.
const FINDINGS_MAX: usize = 10_000;

/// What to scrub, and how fast.
#[derive(Clone, Debug, Default)]
pub struct ScrubOptions {
    /// These images and their objects; `None` for everything in the domain.
    pub images: Option<Vec<Digest>>,
    /// Bytes per second, at most.
    pub rate: Option<u64>,
}

/// How far a scrub has come, or what it found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScrubReport {
    /// Objects and segments read, by runs before this one too.
    pub objects: u64,
    /// Objects and segments in all.
    pub objects_total: u64,
    /// Bytes of them read, by runs before this one too.
    pub bytes: u64,
    /// Of these, read by earlier runs that did not get to the end.
    pub bytes_before: u64,
    /// Objects that were collected meanwhile.
    pub gone: u64,
    /// What is wrong, at most 10,000.
    pub findings: Vec<Finding>,
}

/// What is remembered of a scrub that has not ended.
#[derive(Serialize, Deserialize)]
struct Saved {
    /// The last object that was read; they are read in order.
    after: Digest,
    report: ScrubReport,
}

impl Domain {
    /// Reads and hashes objects, segments, images, packs and layers. One that was interrupted goes on where it was; its
    /// findings are among those of the report. `progress` is called with how far it has come.
    ///
    /// # Errors
    /// [`Error::NoSuchImage`], [`Error::Unreadable`], [`Error::Io`]. Damage is no error: it is in the
    /// report.
    pub fn scrub(
        &self,
        contents: &dyn Contents,
        options: &ScrubOptions,
        progress: &dyn Fn(&ScrubReport),
    ) -> Result<ScrubReport> {
        let scope = scope(options.images.as_deref());
        let saved = self.saved_scrub(&scope);
        let mut after = saved.as_ref().map(|saved| saved.after);
        let mut report = saved.map(|saved| saved.report).unwrap_or_default();
        report.bytes_before = report.bytes;

        let images = match &options.images {
            Some(images) => images.clone(),
            None => self.all_images()?,
        };
        let mut reader = Reader::new(options.rate);
        let mut objects = BTreeMap::new();
        // Metadata is little, and read every time: it says which objects there have to be.
        let mut findings =
            self.scrub_parts(contents, options, &images, &mut reader, &mut objects)?;
        let mut segments = self.scrub_packs(contents, &images, &mut findings)?;
        findings.append(&mut report.findings);
        report.findings = findings;
        if options.images.is_none() {
            self.each_object(&mut |digest, _| {
                objects.entry(digest).or_insert(None);
            })?;
            segments.extend(self.segments()?);
        }
        objects.extend(segments.iter().map(|segment| (*segment, None)));
        report.objects_total = objects.len() as u64;
        let mut last_saved = Instant::now();
        for (digest, size) in objects {
            if after.is_some_and(|after| digest <= after) {
                continue;
            }
            let (finding, bytes) = match segments.contains(&digest) {
                true => self.scrub_segment(&mut reader, &digest)?,
                false => self.scrub_object(&mut reader, &digest, size)?,
            };
            match finding {
                Some(finding) if finding.kind == FindingKind::ObjectMissing => {
                    // Without the lock: it may have been collected, with an image that we know of.
                    match images.iter().all(|image| self.has_image(image).unwrap_or(true)) {
                        true if size.is_some() => report.add(finding),
                        _ => report.gone += 1,
                    }
                }
                Some(finding) => report.add(finding),
                None => {}
            }
            report.objects += 1;
            report.bytes += bytes;
            after = Some(digest);
            progress(&report);
            if last_saved.elapsed() >= SAVE_INTERVAL {
                last_saved = Instant::now();
                // A hint: without it the next run reads more than it must.
                let _ = self.save_scrub(&scope, &Saved { after: digest, report: report.clone() });
            }
        }
        let _ = self.disk().unlink(&self.scrub_file(&scope));
        report.findings.sort_by(|a, b| (a.kind, &a.path).cmp(&(b.kind, &b.path)));
        report.findings.dedup();
        Ok(report)
    }

    /// Images and, if everything is scrubbed, layers; gives what is wrong with them, and adds the objects
    /// that the images name.
    fn scrub_parts(
        &self,
        contents: &dyn Contents,
        options: &ScrubOptions,
        images: &[Digest],
        reader: &mut Reader,
        objects: &mut BTreeMap<Digest, Option<u64>>,
    ) -> Result<Vec<Finding>> {
        let mut findings = Vec::new();
        for image in images {
            let file = match self.open_image(image) {
                // Collected since it was listed.
                Err(Error::NoSuchImage(_)) if options.images.is_none() => continue,
                other => other?,
            };
            if let Some(detail) = reader.check(&file, image)? {
                let finding = Finding::new(FindingKind::ImageAltered, file.path(), detail);
                findings.push(finding.about(image));
                // What an altered image names means nothing.
                continue;
            }
            let quiet = Quiet::begin(&file, 0, 0);
            let read = contents.image_objects(&file, &mut |digest, size| {
                objects.insert(digest, Some(size));
            });
            drop(quiet);
            if let Err(error) = read {
                let finding =
                    Finding::new(FindingKind::ImageUnreadable, file.path(), error.to_string());
                findings.push(finding.about(image));
            }
        }
        if options.images.is_some() {
            return Ok(findings);
        }
        for chain_id in self.layers()? {
            let file = match self.open_layer(&chain_id) {
                Err(Error::NoSuchLayer(_)) => continue,
                other => other?,
            };
            let _quiet = Quiet::begin(&file, 0, 0);
            let read = Part::Layer(chain_id).visit(self, contents, &mut |_, _| ());
            if let Err(error) = read {
                let path = file.path();
                findings.push(Finding::new(FindingKind::LayerUnreadable, path, error.to_string()));
            }
        }
        Ok(findings)
    }

    /// What is wrong with an object, and how many bytes were read to know.
    fn scrub_object(
        &self,
        reader: &mut Reader,
        digest: &Digest,
        size: Option<u64>,
    ) -> Result<(Option<Finding>, u64)> {
        if let Some(finding) = self.check_object(digest, size, None)? {
            return Ok((Some(finding), 0));
        }
        let file = match self.open_object(digest) {
            Err(Error::NoSuchObject(_)) => {
                let path = self.object_file(digest);
                let finding = Finding::new(FindingKind::ObjectMissing, path, "").about(digest);
                return Ok((Some(finding), 0));
            }
            other => other?,
        };
        let bytes = file.size().at("look at", file.path())?;
        let altered = reader.check(&file, digest)?.map(|detail| {
            Finding::new(FindingKind::ObjectAltered, file.path(), detail).about(digest)
        });
        Ok((altered, bytes))
    }

    /// Packs of the images; gives the segments that they need, and adds what is wrong with the packs.
    fn scrub_packs(
        &self,
        contents: &dyn Contents,
        images: &[Digest],
        findings: &mut Vec<Finding>,
    ) -> Result<BTreeSet<Digest>> {
        let there = self.segments()?.into_iter().collect();
        let images: HashSet<_> = images.iter().collect();
        let mut needed = BTreeSet::new();
        for pack in self.packs()?.iter().filter(|pack| images.contains(&pack.image)) {
            findings.extend(self.check_pack(pack, contents, &there, true)?);
            let segments = self.open_pack(pack).map(|file| contents.pack_segments(&file));
            needed.extend(segments.into_iter().flatten().flatten());
        }
        Ok(needed)
    }

    /// What is wrong with a segment, and how many bytes were read to know. One that is not there is no finding: its
    /// pack is one.
    fn scrub_segment(
        &self,
        reader: &mut Reader,
        digest: &Digest,
    ) -> Result<(Option<Finding>, u64)> {
        let file = match self.open_segment(digest) {
            Err(Error::NoSuchSegment(_)) => return Ok((None, 0)),
            other => other?,
        };
        let bytes = file.size().at("look at", file.path())?;
        let altered = reader.check(&file, digest)?.map(|detail| {
            Finding::new(FindingKind::SegmentAltered, file.path(), detail).about(digest)
        });
        Ok((altered, bytes))
    }

    fn scrub_file(&self, scope: &str) -> String {
        format!("{}/{DIRECTORY}/{scope}.json", self.base())
    }

    /// A record that cannot be read means that there was none.
    fn saved_scrub(&self, scope: &str) -> Option<Saved> {
        let file = self.open_file(self.scrub_file(scope)).ok()??;
        serde_json::from_slice(&file.read_all(RECORD_SIZE_MAX).ok()?).ok()
    }

    fn save_scrub(&self, scope: &str, saved: &Saved) -> Result<()> {
        self.store().check_writable()?;
        let directory = format!("{}/{DIRECTORY}", self.base());
        mkdir_if_missing(self.disk(), &directory)?;
        let path = self.scrub_file(scope);
        let json = serde_json::to_vec(saved).map_err(|error| Error::corrupt(&path, error))?;
        self.store().replace_file(&directory, &path, &json, false)
    }
}

impl ScrubReport {
    fn add(&mut self, finding: Finding) {
        if self.findings.len() < FINDINGS_MAX {
            self.findings.push(finding);
        }
    }
}

/// The name of a selection: the same images in another order are the same.
fn scope(images: Option<&[Digest]>) -> String {
    let Some(images) = images else { return "all".to_owned() };
    let mut names: Vec<_> = images.iter().map(Digest::to_string).collect();
    names.sort_unstable();
    names.dedup();
    verity::digest(names.join("\n").as_bytes()).to_string()
}

/// Reads files past the page cache, at a rate.
struct Reader {
    buffer: Vec<u8>,
    /// Where the aligned part of the buffer begins.
    start: usize,
    rate: Option<u64>,
    /// What was read since `since`.
    bytes: u64,
    since: Instant,
}

impl Reader {
    fn new(rate: Option<u64>) -> Self {
        // Pieces of a quarter of a second, so that a low rate is one and not a row of bursts.
        let piece = rate.map_or(READ_SIZE, |rate| usize::try_from(rate / 4).unwrap_or(READ_SIZE));
        let len = piece.clamp(ALIGN, READ_SIZE).next_multiple_of(ALIGN);
        let buffer = vec![0; len + ALIGN];
        let start = buffer.as_ptr().align_offset(ALIGN).min(ALIGN);
        Self { buffer, start, rate, bytes: 0, since: Instant::now() }
    }

    /// What is wrong with the content of a file, if anything is.
    fn check(&mut self, file: &StoredFile, expected: &Digest) -> Result<Option<String>> {
        let hashed = self.hash(file);
        // Whoever reads the file next reads what is not aligned.
        file.descriptor().into_iter().for_each(|descriptor| set_direct(descriptor, false));
        match hashed {
            Ok(actual) if actual == *expected => Ok(None),
            Ok(actual) => Ok(Some(format!("its content has digest {actual}"))),
            // The disk, or fs-verity, gives it no more: that is what a scrub is there to find.
            Err(Error::Io { source, .. }) => Ok(Some(format!("it cannot be read: {source}"))),
            Err(error) => Err(error),
        }
    }

    /// The fs-verity digest of a file's content, as the disk has it where the filesystem lets us past the
    /// cache.
    fn hash(&mut self, file: &StoredFile) -> Result<Digest> {
        if let Some(descriptor) = file.descriptor() {
            // Otherwise what was asked for is all that is read where the cache is in the way.
            let _ = fadvise(descriptor, 0, None, Advice::Random);
            set_direct(descriptor, true);
        }
        let mut hasher = Hasher::new();
        loop {
            let len = self.buffer.len() - ALIGN;
            let quiet = Quiet::begin(file, hasher.size(), len as u64);
            let buffer = &mut self.buffer[self.start..self.start + len];
            let read = match file.read_at(buffer, hasher.size()) {
                // A filesystem that accepts the flag and then does not do it, or not so.
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
            hasher.update(&self.buffer[self.start..self.start + n]);
            self.wait(n as u64);
            // The file ended at an offset that is not aligned: there is nothing behind it.
            if !n.is_multiple_of(ALIGN)
                && hasher.size() >= file.size().at("look at", file.path())?
            {
                return Ok(hasher.finish());
            }
        }
    }

    /// Sleeps until so many bytes are due.
    fn wait(&mut self, bytes: u64) {
        let Some(rate) = self.rate.filter(|rate| *rate > 0) else { return };
        self.bytes += bytes;
        #[expect(clippy::cast_precision_loss, reason = "a sleep is not that precise")]
        let due = Duration::from_secs_f64(self.bytes as f64 / rate as f64);
        let passed = self.since.elapsed();
        if let Some(early) = due.checked_sub(passed) {
            std::thread::sleep(early);
        } else if passed - due > Duration::from_secs(1) {
            // The disk was slower than the rate; that is no credit for later.
            (self.bytes, self.since) = (0, Instant::now());
        }
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
struct Quiet<'a> {
    file: &'a StoredFile,
    offset: u64,
    len: u64,
    was_empty: bool,
}

impl<'a> Quiet<'a> {
    /// `len` 0 means to the end.
    fn begin(file: &'a StoredFile, offset: u64, len: u64) -> Self {
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
