//! Rewrites packs over segments of which little is used; the next garbage collection removes those.
//!
//! A segment goes only when no pack needs it, and cannot shrink: kernels may have it open, and its
//! digest would change. So its used contents are written to a new one.

use std::collections::{BTreeMap, BTreeSet};

use cofolio_store::task::Task;
use cofolio_store::{Contents as _, Digest, Domain, ErrorKind, FileKind};
use serde::Serialize;

use super::segment::{Form, Segment};
use super::usage::{self, Usage};
use super::{ImageContents, PackError, PackOptions, pack_segments, pack_without};

/// Outcome of a rewrite.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct RewriteReport {
    /// Segments that no pack needs any more, or would need.
    pub segments: Vec<Digest>,
    /// Images that were packed anew, or would be.
    pub images: Vec<Digest>,
    /// Bytes of contents that were written to new segments, before they were compressed.
    pub new_bytes: u64,
    /// Images that could not be packed, and why. They keep their packs and segments.
    pub failed: Vec<(Digest, String)>,
}

/// A segment that packs need.
struct Needed {
    form: Form,
    /// Their images.
    images: BTreeSet<Digest>,
}

/// Packs images anew without segments of which less than half is used. Segments of `live` images
/// stay: while they are mounted, their room would not come back. After an interruption the other
/// images have their old packs, and the next run goes on.
///
/// # Errors
/// [`PackError::Cancelled`] and [`PackError::Store`]. The report has images that cannot be packed.
pub fn rewrite(
    domain: &Domain,
    live: &[Digest],
    dry_run: bool,
    task: &Task,
) -> Result<RewriteReport, PackError> {
    let mut sparse = sparse(domain)?;
    sparse.retain(|_, needed| !live.iter().any(|image| needed.images.contains(image)));
    let mut report =
        RewriteReport { segments: sparse.keys().copied().collect(), ..Default::default() };
    let mut images = sparse
        .values()
        .flat_map(|needed| needed.images.iter().map(|image| (*image, needed.form)))
        .collect::<BTreeSet<_>>()
        .into_iter();
    let mut packed = BTreeSet::new();
    while let Some((image, form)) = images.next() {
        if dry_run {
            packed.insert((image, form));
            continue;
        }
        let options = PackOptions { form, ..PackOptions::default() };
        let without = report.segments.iter().copied().collect();
        match pack_without(domain, &image, &options, &without, task) {
            Ok(done) => {
                packed.insert((image, form));
                report.new_bytes += done.new_bytes;
            }
            Err(error @ PackError::Cancelled(_)) => return Err(error),
            Err(error) => {
                let mut reason = error.to_string();
                if matches!(&error, PackError::Store(it) if it.kind() == ErrorKind::Space) {
                    // The others would fill the disk again.
                    reason += &format!(" (and {} more not tried)", images.by_ref().count());
                }
                report.failed.push((image, reason));
            }
        }
    }
    let goes = |segment: &Digest| {
        let needed = sparse.get(segment);
        needed.is_none_or(|it| it.images.iter().all(|image| packed.contains(&(*image, it.form))))
    };
    report.segments.retain(goes);
    report.images = packed.into_iter().map(|(image, _)| image).collect();
    report.images.dedup();
    Ok(report)
}

/// The objects of an image, if all are readable.
fn objects(domain: &Domain, image: &Digest) -> Option<BTreeSet<Digest>> {
    let mut objects = BTreeSet::new();
    let file = domain.open_image(image).ok()?;
    let read = ImageContents.names(FileKind::Image, &file, &mut |object, _| {
        objects.insert(object);
    });
    read.ok().map(|()| objects)
}

/// Segments of which packs use less than half. A pack of an unreadable image counts as using all.
fn sparse(domain: &Domain) -> Result<BTreeMap<Digest, Needed>, PackError> {
    let sizes = usage::sizes(domain, &BTreeSet::new())?;
    let mut segments = BTreeMap::new();
    for digest in sizes.keys() {
        segments.extend(usage::readable(Segment::of(domain, digest))?.map(|it| (*digest, it)));
    }
    let mut usage = Usage::new(&sizes);
    let mut needed: BTreeMap<Digest, Needed> = BTreeMap::new();
    for pack in domain.packs()? {
        let (Some(image), Ok(file)) = (pack.image(), domain.open_named(&pack)) else { continue };
        let Ok(needs) = pack_segments(&file) else { continue };
        let objects = objects(domain, &image);
        for digest in needs {
            let Some(segment) = segments.get_mut(&digest) else { continue };
            let entry = || Needed { form: segment.form, images: BTreeSet::new() };
            needed.entry(digest).or_insert_with(entry).images.insert(image);
            let Some(objects) = &objects else {
                usage.mark_blocks(digest, 0..usize::MAX);
                continue;
            };
            // Marked entries need no second look.
            let mut entries = std::mem::take(&mut segment.entries);
            entries.retain(|entry| {
                let used = objects.contains(&entry.object);
                if used {
                    usage.mark(&digest, segment, entry);
                }
                !used
            });
            segment.entries = entries;
        }
    }
    let sparse = usage.sparse();
    needed.retain(|digest, _| sparse.contains(digest));
    Ok(needed)
}
