//! Re-hashing what is in place.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::contents::Contents;
use crate::disk::Piece;
use crate::error::{At, BoxError, Error, Result};
use crate::fsck::{Finding, FindingKind};
use crate::parallel::for_each;
use crate::verity::Hasher;
use crate::{Digest, Domain, StoredFile};

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
    /// Re-hashes an image and every object that it names, on all processors. Nothing is collected
    /// meanwhile.
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
        objects.sort_unstable();
        let total = VerifyProgress {
            objects_total: objects.len() as u64,
            bytes_total: objects.iter().map(|(_, size)| size).sum(),
            ..VerifyProgress::default()
        };
        let (done, bytes) = (AtomicU64::new(0), AtomicU64::new(0));
        let findings = Mutex::new(Vec::new());
        for_each(self.disk().parallelism(), &objects, |(digest, size)| {
            if let Some(finding) = self.check_object(digest, Some(*size), true)?
                && let Ok(mut findings) = findings.lock()
            {
                findings.push(finding);
            }
            let objects = done.fetch_add(1, Relaxed) + 1;
            let bytes = bytes.fetch_add(*size, Relaxed) + size;
            progress(VerifyProgress { objects, bytes, ..total });
            Ok(())
        })?;
        report.objects = total.objects_total;
        report.bytes = bytes.into_inner();
        report.findings = findings.into_inner().unwrap_or_default();
        report.findings.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(report)
    }

    /// What is wrong with an object: missing, of another size than `size`, or (with `rehash`) altered.
    pub(crate) fn check_object(
        &self,
        digest: &Digest,
        size: Option<u64>,
        rehash: bool,
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
        if rehash {
            let actual = hash_file(&file)?;
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
    file.for_pieces(|piece| {
        match piece {
            Piece::Data(data) => hasher.update(data),
            Piece::Hole(len) => hasher.zeros(len),
        }
        Ok(())
    })?;
    Ok(hasher.finish())
}
