//! Re-hashing an image with all that it needs.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

use crate::base::with_bases;
use crate::contents::Contents;
use crate::error::{Error, Result};
use crate::examine::{Examiner, Reading, Seen};
use crate::fsck::Finding;
use crate::kinds::{FileKind, FileName};
use crate::parallel::for_each;
use crate::task::{Event, Task};
use crate::verity::UNIT;
use crate::{Digest, Domain};

/// Objects from this size on, in bytes, are hashed by all threads together.
const LARGE_MIN: u64 = 2 * UNIT;

/// What a verification found.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct VerifyReport {
    /// Objects that the image names.
    pub objects: u64,
    /// Bytes of theirs that were hashed.
    pub bytes: u64,
    /// What is wrong. Empty means that every byte is as it was imported.
    pub findings: Vec<Finding>,
}

impl Domain {
    /// Re-hashes an image with objects, packs, segments, base and delta. Holds off collections.
    ///
    /// # Errors
    /// [`Error::NoSuch`], [`Error::Io`]. Damage is no error: it is in the report.
    pub fn verify_image(
        &self,
        image: &Digest,
        contents: &dyn Contents,
        task: &Task,
    ) -> Result<VerifyReport> {
        let _lock = self.lock_shared()?;
        let threads = self.disk().parallelism();
        let one = Examiner::new(self, contents, Reading::Cached(1), &task.cancel);
        let all = Examiner::new(self, contents, Reading::Cached(threads), &task.cancel);
        let mut report = VerifyReport::default();
        let name = FileName::content(FileKind::Image, image);
        let mut named = HashMap::new();
        let (seen, _) = one.whole(&name, &mut |digest, size| {
            named.insert(digest, size);
        })?;
        match seen {
            Seen::Sound => {}
            Seen::Missing => return Err(Error::NoSuch(name)),
            // What an altered image names means nothing.
            Seen::Damaged(finding) => {
                report.findings.push(finding);
                return Ok(report);
            }
        }
        let mut objects: Vec<(Digest, u64)> = named.into_iter().collect();
        // The largest first, so that no thread is left with one at the end.
        objects.sort_unstable_by_key(|&(digest, size)| (Reverse(size), digest));
        let items_total = Some(objects.len() as u64);
        let bytes_total = Some(objects.iter().map(|(_, size)| size).sum());
        let (done, bytes) = (AtomicU64::new(0), AtomicU64::new(0));
        let findings = Mutex::new(Vec::new());
        let check = |(digest, size): &(Digest, u64), examiner: &Examiner<'_>| -> Result<()> {
            let name = FileName::content(FileKind::Object, digest);
            let finding = match examiner.look(&name, Some(*size))?.0 {
                Seen::Missing => Some(examiner.missing_object(digest)),
                seen => seen.finding(),
            };
            findings.lock().unwrap_or_else(PoisonError::into_inner).extend(finding);
            let items = done.fetch_add(1, Relaxed) + 1;
            let bytes = bytes.fetch_add(*size, Relaxed) + size;
            task.tell(Event::Done { bytes, bytes_total, items, items_total });
            Ok(())
        };
        // All threads on one file, then each on one of its own.
        let large = objects.partition_point(|(_, size)| *size >= LARGE_MIN);
        objects[..large].iter().try_for_each(|object| check(object, &all))?;
        for_each(threads, &objects[large..], |object| check(object, &one))?;
        report.objects = objects.len() as u64;
        report.bytes = bytes.into_inner();
        report.findings = findings.into_inner().unwrap_or_else(PoisonError::into_inner);
        report.findings.extend(self.verify_bases(image, contents, task)?);
        report.findings.extend(all.packs(image)?);
        report.findings.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(report)
    }

    /// Re-hashes an image's base and delta, but no objects that are invisible through it.
    fn verify_bases(
        &self,
        image: &Digest,
        contents: &dyn Contents,
        task: &Task,
    ) -> Result<Vec<Finding>> {
        let mut below = with_bases([*image], &self.bases()?);
        below.remove(image);
        let mut examiner = Examiner::new(self, contents, Reading::Cached(1), &task.cancel);
        examiner.derived = below.iter().copied().collect();
        let mut findings = Vec::new();
        for image in below {
            let name = FileName::content(FileKind::Image, &image);
            findings.extend(examiner.look(&name, None)?.0.finding());
        }
        Ok(findings)
    }
}

impl Examiner<'_> {
    /// The packs of an image, and the segments that they need.
    fn packs(&self, image: &Digest) -> Result<Vec<Finding>> {
        let mut findings = Vec::new();
        let packs = self.domain.packs()?;
        for pack in packs.into_iter().filter(|pack| pack.image() == Some(*image)) {
            let mut segments = HashSet::new();
            self.read(&pack, &mut |segment, _| {
                segments.insert(segment);
            })?;
            let mut sound = HashSet::new();
            for segment in segments {
                match self.segment(&FileName::content(FileKind::Segment, &segment))?.0 {
                    Seen::Sound => drop(sound.insert(segment)),
                    seen => findings.extend(seen.finding()),
                }
            }
            findings.extend(self.pack(&pack, &sound)?);
        }
        Ok(findings)
    }

    /// A segment: whether it can be read as one, and its content; and how many bytes were hashed.
    pub(crate) fn segment(&self, name: &FileName) -> Result<(Seen, u64)> {
        match self.read(name, &mut |_, _| ())? {
            Seen::Sound => self.look(name, None),
            seen => Ok((seen, 0)),
        }
    }
}
