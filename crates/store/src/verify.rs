//! Re-hashing what is in place.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

use crate::base::with_bases;
use crate::contents::{Contents, Part};
use crate::disk::Piece;
use crate::error::{At, BoxError, Error, Result};
use crate::fsck::{Finding, FindingKind};
use crate::parallel::for_each;
use crate::segment::Pack;
use crate::verity::{Hasher, UNIT};
use crate::{Digest, Domain, StoredFile};

/// Objects from this size on, in bytes, are hashed by all threads together.
const LARGE_MIN: u64 = 2 * UNIT;

/// How far a verification has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VerifyProgress {
    /// Objects looked at.
    pub objects: u64,
    /// Objects in all.
    pub objects_total: u64,
    /// Bytes hashed.
    pub bytes: u64,
    /// Bytes in all.
    pub bytes_total: u64,
}

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
    /// Re-hashes an image and every object that it names, on all processors; of an image that has a pack, that and its
    /// segments, too, and of one with a base, that and the delta. Nothing is collected meanwhile.
    ///
    /// # Errors
    /// [`Error::NoSuchImage`], [`Error::Unreadable`] if the image itself cannot be read as one,
    /// [`Error::Io`]. Damage is no error: it is in the report.
    pub fn verify_image(
        &self,
        image: &Digest,
        contents: &dyn Contents,
        progress: &(dyn Fn(VerifyProgress) + Sync),
    ) -> Result<VerifyReport> {
        let _lock = self.lock_shared()?;
        let file = self.open_image(image)?;
        let mut report = VerifyReport::default();
        if hash_file(&file)? != *image {
            let detail = "its content has another digest than its name says";
            report.findings.push(Finding::new(FindingKind::ImageAltered, file.path(), detail));
            // What an altered image names means nothing.
            return Ok(report);
        }
        let mut named = HashMap::new();
        contents
            .image_objects(&file, &mut |digest, size| {
                named.insert(digest, size);
            })
            .map_err(|source: BoxError| Error::Unreadable {
                what: format!("image {image}"),
                source,
            })?;
        let mut objects: Vec<(Digest, u64)> = named.into_iter().collect();
        // The largest first, so that no thread is left with one at the end.
        objects.sort_unstable_by_key(|&(digest, size)| (Reverse(size), digest));
        let total = VerifyProgress {
            objects_total: objects.len() as u64,
            bytes_total: objects.iter().map(|(_, size)| size).sum(),
            ..VerifyProgress::default()
        };
        let (done, bytes) = (AtomicU64::new(0), AtomicU64::new(0));
        let findings = Mutex::new(Vec::new());
        let check = |(digest, size): &(Digest, u64), threads| {
            if let Some(finding) = self.check_object(digest, Some(*size), Some(threads))?
                && let Ok(mut findings) = findings.lock()
            {
                findings.push(finding);
            }
            let objects = done.fetch_add(1, Relaxed) + 1;
            let bytes = bytes.fetch_add(*size, Relaxed) + size;
            progress(VerifyProgress { objects, bytes, ..total });
            Ok(())
        };
        // All threads on one file, then each on one of its own.
        let threads = self.disk().parallelism();
        let large = objects.partition_point(|(_, size)| *size >= LARGE_MIN);
        objects[..large].iter().try_for_each(|object| check(object, threads))?;
        for_each(threads, &objects[large..], |object| check(object, 1))?;
        report.objects = total.objects_total;
        report.bytes = bytes.into_inner();
        report.findings = findings.into_inner().unwrap_or_default();
        report.findings.extend(self.verify_base(image)?);
        report.findings.extend(self.verify_packs(image, contents)?);
        report.findings.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(report)
    }

    /// What is wrong with a segment: cut short or unreadable, or (with `rehash`, on so many threads) altered.
    pub(crate) fn check_segment(
        &self,
        digest: &Digest,
        rehash: Option<usize>,
    ) -> Result<Option<Finding>> {
        let path = self.segment_file(digest);
        let finding =
            |kind, detail: String| Ok(Some(Finding::new(kind, &path, detail).about(digest)));
        match self.read_segment(digest) {
            Err(Error::Corrupt { reason, .. }) => {
                return finding(FindingKind::SegmentUnreadable, reason);
            }
            Err(error) if error.is_unreadable() => {
                return finding(FindingKind::SegmentUnreadable, error.to_string());
            }
            other => other?,
        };
        let Some(threads) = rehash else { return Ok(None) };
        match hash_large_file(&self.open_segment(digest)?, threads) {
            Err(error) if error.is_unreadable() => {
                finding(FindingKind::SegmentUnreadable, error.to_string())
            }
            Ok(actual) if actual != *digest => {
                finding(FindingKind::SegmentAltered, format!("its content has digest {actual}"))
            }
            other => other.map(|_| None),
        }
    }

    /// What is wrong with a pack: a segment that is not among the `sound` ones, unreadable, or (with `rehash`)
    /// altered. Nothing is wrong with one that has been replaced since it was listed, which may be long ago.
    pub(crate) fn check_pack(
        &self,
        pack: &Pack,
        contents: &dyn Contents,
        sound: &HashSet<Digest>,
        rehash: bool,
    ) -> Result<Option<Finding>> {
        let file = match self.open_pack(pack) {
            Err(Error::NoSuchPack(_)) => return Ok(None),
            other => other?,
        };
        let finding = |kind, detail: String| {
            let mut finding = Finding::new(kind, file.path(), detail).about(&pack.digest);
            finding.user = Some(Part::Image(pack.image).to_string());
            Ok(Some(finding))
        };
        if rehash {
            match hash_file(&file) {
                Err(error) if error.is_unreadable() => {
                    return finding(FindingKind::PackUnreadable, error.to_string());
                }
                Ok(actual) if actual != pack.digest => {
                    let detail = format!("its content has digest {actual}");
                    return finding(FindingKind::PackAltered, detail);
                }
                other => drop(other?),
            }
        }
        match contents.pack_segments(&file) {
            Err(error) => finding(FindingKind::PackUnreadable, error.to_string()),
            Ok(segments) => match segments.iter().find(|segment| !sound.contains(segment)) {
                Some(segment) => {
                    let detail = format!("its segment {segment} is not there or is damaged");
                    finding(FindingKind::PackIncomplete, detail)
                }
                None => Ok(None),
            },
        }
    }

    /// Re-hashes what an image is mounted over, and what goes on top. Objects of those below that it does not name itself,
    /// nobody sees through it.
    fn verify_base(&self, image: &Digest) -> Result<Vec<Finding>> {
        let mut findings = Vec::new();
        for digest in with_bases([*image], &self.bases()?) {
            if digest == *image {
                continue;
            }
            let file = self.open_image(&digest)?;
            let actual = hash_file(&file)?;
            if actual != digest {
                let detail = format!("its content has digest {actual}");
                let finding = Finding::new(FindingKind::BaseAltered, file.path(), detail);
                findings.push(finding.about(&digest));
            }
        }
        Ok(findings)
    }

    /// Re-hashes the packs of an image and the segments that they need.
    fn verify_packs(&self, image: &Digest, contents: &dyn Contents) -> Result<Vec<Finding>> {
        let mut findings = Vec::new();
        for pack in self.packs_of(image)? {
            // What cannot be read is told below.
            let file = match self.open_pack(&pack) {
                Err(Error::NoSuchPack(_)) => continue,
                other => other?,
            };
            let segments = contents.pack_segments(&file).unwrap_or_default();
            let mut sound = HashSet::new();
            for segment in segments {
                match self.check_segment(&segment, Some(self.disk().parallelism())) {
                    Err(Error::NoSuchSegment(_)) => {}
                    other => match other? {
                        Some(finding) => findings.push(finding),
                        None => drop(sound.insert(segment)),
                    },
                }
            }
            findings.extend(self.check_pack(&pack, contents, &sound, true)?);
        }
        Ok(findings)
    }

    /// What is wrong with an object: missing, of another size than `size`, or (with `rehash`, on so many
    /// threads) altered.
    pub(crate) fn check_object(
        &self,
        digest: &Digest,
        size: Option<u64>,
        rehash: Option<usize>,
    ) -> Result<Option<Finding>> {
        let path = self.object_file(digest);
        let file = match self.open_object(digest) {
            Err(Error::NoSuchObject(_)) => {
                let finding = Finding::new(FindingKind::ObjectMissing, &path, "an image names it");
                return Ok(Some(finding.about(digest)));
            }
            other => other?,
        };
        let found = file.size().at("look at", &path)?;
        if let Some(size) = size.filter(|size| *size != found) {
            let detail = format!("{found} bytes, its image says {size}");
            return Ok(Some(
                Finding::new(FindingKind::ObjectTruncated, &path, detail).about(digest),
            ));
        }
        if let Some(threads) = rehash {
            let actual = match threads {
                0 | 1 => hash_file(&file)?,
                _ => hash_large_file(&file, threads)?,
            };
            if actual != *digest {
                let detail = format!("its content has digest {actual}");
                let finding = Finding::new(FindingKind::ObjectAltered, &path, detail);
                return Ok(Some(finding.about(digest)));
            }
        }
        Ok(None)
    }
}

/// The fs-verity digest of a file's content as it is now. What the filesystem calls a hole reads as
/// zeros, so a hole of a terabyte is not read to know that.
pub(crate) fn hash_file(file: &StoredFile) -> Result<Digest> {
    let mut hasher = Hasher::new();
    file.for_pieces(|piece| hasher.piece(piece))?;
    Ok(hasher.finish())
}

/// [`hash_file`] on several threads.
fn hash_large_file(file: &StoredFile, threads: usize) -> Result<Digest> {
    let size = file.size().at("look at", file.path())?;
    let count = size / UNIT;
    let mut whole = Hasher::new();
    // A few at a time: their number is only bounded by what a file claims to hold.
    for first in (0..count).step_by(threads) {
        let units: Vec<u64> = (first..count.min(first + threads as u64)).collect();
        let done = Mutex::new(BTreeMap::new());
        for_each(threads, &units, |unit| {
            let mut hasher = Hasher::new();
            file.for_pieces_in(unit * UNIT..(unit + 1) * UNIT, |piece| hasher.piece(piece))?;
            done.lock().unwrap_or_else(PoisonError::into_inner).insert(*unit, hasher);
            Ok(())
        })?;
        for unit in done.into_inner().unwrap_or_else(PoisonError::into_inner).into_values() {
            if unit.size() < UNIT {
                // It is being cut while we look.
                return hash_file(file);
            }
            whole.unit(unit);
        }
    }
    file.for_pieces_in(count * UNIT..size, |piece| whole.piece(piece))?;
    Ok(whole.finish())
}

impl Hasher {
    fn piece(&mut self, piece: Piece<'_>) -> Result<()> {
        match piece {
            Piece::Data(data) => self.update(data),
            Piece::Hole(len) => self.zeros(len),
        }
        Ok(())
    }
}

#[cfg(all(test, feature = "sim"))]
mod tests {
    use super::*;
    use crate::disk::{Disk, Purpose};
    use crate::sim::SimDisk;

    /// Content at the seams of the units, holes between, and an end that is no unit.
    #[test]
    fn a_large_file_has_one_digest_on_any_number_of_threads() {
        let disk = SimDisk::new(1);
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
        let expected = hash_file(&file).unwrap();
        for threads in [2, 3, 8] {
            assert_eq!(hash_large_file(&file, threads).unwrap(), expected, "{threads} threads");
        }
    }
}
