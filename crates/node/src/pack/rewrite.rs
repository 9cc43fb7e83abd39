//! Segments of which little is used any more: the packs over them are made anew without them, and the next garbage
//! collection removes them.
//!
//! A segment goes when no pack needs it. One of which a pack needs a little would stay whole; to take away a part of it
//! would alter what kernels have open, and its digest. So what is used of it is written to a new one.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use cofolio_store::{Contents as _, Digest, Domain, Error, Form};
use serde::Serialize;

use super::{OnProgress, PackError, PackOptions, pack_without};
use crate::contents::ImageContents;

/// What was done about segments of which little is used.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct RewriteReport {
    /// Segments that no pack needs any more, or would need.
    pub segments: Vec<Digest>,
    /// Images that were packed anew, or would be.
    pub images: Vec<Digest>,
    /// Bytes of contents that were written to new segments, before they were compressed.
    pub new_bytes: u64,
    /// Images that could not be packed, and why. They keep the packs that they have, and these their segments.
    pub failed: Vec<(Digest, String)>,
}

/// A segment, and who needs it.
#[derive(Default)]
struct Use {
    blocks: u64,
    form: Form,
    /// Objects in it that no pack is known to need, with their blocks.
    unused: HashMap<Digest, u64>,
    images: BTreeSet<Digest>,
}

/// Packs images anew that are over segments of which less than half is used, without these. A segment that an image among
/// `live` needs stays: as long as it is mounted, its room would not come back. Where one is interrupted, the images that
/// are left have their packs as they were, and the next one goes on.
///
/// # Errors
/// [`PackError::Stopped`], and [`PackError::Store`] for what cannot be listed. An image that cannot be packed is in the
/// report.
pub fn rewrite(
    domain: &Domain,
    live: &[Digest],
    dry_run: bool,
    on_progress: OnProgress<'_>,
) -> Result<RewriteReport, PackError> {
    let sparse: BTreeMap<Digest, Use> = uses(domain)?
        .into_iter()
        .filter(|(_, used)| used.is_sparse() && !live.iter().any(|it| used.images.contains(it)))
        .collect();
    let mut report =
        RewriteReport { segments: sparse.keys().copied().collect(), ..Default::default() };
    let images: BTreeMap<Digest, Form> = sparse
        .values()
        .flat_map(|used| used.images.iter().map(|image| (*image, used.form)))
        .collect();
    for (image, form) in images {
        if dry_run {
            report.images.push(image);
            continue;
        }
        let options = PackOptions { form, ..PackOptions::default() };
        let without = report.segments.iter().copied().collect();
        match pack_without(domain, &image, &options, &without, on_progress) {
            Ok(packed) => {
                report.images.push(image);
                report.new_bytes += packed.new_bytes;
            }
            Err(PackError::Stopped) => return Err(PackError::Stopped),
            Err(error) => report.failed.push((image, error.to_string())),
        }
    }
    let failed: BTreeSet<Digest> = report.failed.iter().map(|(image, _)| *image).collect();
    let stays =
        |segment: &Digest| sparse.get(segment).is_some_and(|it| !it.images.is_disjoint(&failed));
    report.segments.retain(|segment| !stays(segment));
    Ok(report)
}

/// The objects of an image, if all can be told.
fn objects(domain: &Domain, image: &Digest) -> Option<BTreeSet<Digest>> {
    let mut objects = BTreeSet::new();
    let file = domain.open_image(image).ok()?;
    let read = ImageContents.image_objects(&file, &mut |object, _| {
        objects.insert(object);
    });
    read.ok().map(|()| objects)
}

impl Use {
    fn is_sparse(&self) -> bool {
        let unused: u64 = self.unused.values().sum();
        !self.images.is_empty() && (self.blocks - unused.min(self.blocks)) * 2 < self.blocks
    }
}

/// Segments that can be read, with what the packs over them need of them. Of a pack that cannot be read, or whose image
/// cannot, all is needed: it is for fsck to tell.
fn uses(domain: &Domain) -> Result<BTreeMap<Digest, Use>, PackError> {
    let mut uses = BTreeMap::new();
    for digest in domain.segments()? {
        let segment = match domain.read_segment(&digest) {
            Err(Error::Corrupt { .. } | Error::NoSuchSegment(_)) => continue,
            other => other?,
        };
        let unused = segment.extents.iter().map(|it| (it.object, u64::from(it.blocks))).collect();
        let (blocks, form) = (u64::from(segment.blocks), segment.form());
        uses.insert(digest, Use { blocks, form, unused, images: BTreeSet::new() });
    }
    for pack in domain.packs()? {
        let Ok(file) = domain.open_pack(&pack) else { continue };
        let Ok(segments) = ImageContents.pack_segments(&file) else { continue };
        let objects = objects(domain, &pack.image);
        for segment in segments {
            let Some(used) = uses.get_mut(&segment) else { continue };
            used.images.insert(pack.image);
            match &objects {
                Some(objects) => used.unused.retain(|object, _| !objects.contains(object)),
                None => used.unused.clear(),
            }
        }
    }
    Ok(uses)
}
