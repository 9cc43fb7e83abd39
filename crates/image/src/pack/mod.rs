//! Packing: from an image of the store to one that carries its data, over segments of the domain.
//!
//! ```text
//! metadata image ─▶ tree ──────────────────────────────┐
//! objects ─▶ in a segment already? ─▶ where ───────────┼─▶ pack, with the segments as its devices
//!                    └ no ─▶ new segments, by layer ───┘
//! ```
//!
//! Contents that images share lie in segments of the image that was packed first: packs share
//! blocks on disk and, mounted with `inode_share`, pages in memory. Pages that an image's segments
//! already hold are not written again. Contents of different forms share nothing.
//!
//! An image has at most one pack for this machine's mounts, plain or compressed, and one for virtual
//! machines. Each of their segments is a device of a guest, which pays for every device and for its
//! size whether it reads it or not: so such a pack leaves out segments of which it needs little.

mod contents;
mod order;
mod rewrite;
pub mod segment;
mod usage;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use cofolio_erofs::tree::{Content, Tree};
use cofolio_erofs::write::{
    Blob, BlobData, Blobs, BlockAddr, Data, Device, Extent, WriteError, lz4, write_data,
};
use cofolio_store::task::{Cancelled, Task};
use cofolio_store::{Digest, Domain, Error, ImportOptions, Publish, Staging};
use serde::Serialize;

use crate::compose::named_objects::open_image;

pub use contents::{ImageContents, pack_segments};
pub use rewrite::{RewriteReport, rewrite};
use segment::{DEVICE_ALIGN, Form, Pages, SHA256_SIZE_MAX, Segment, SegmentWriter};
use usage::Usage;

/// Largest segment of several objects, in bytes. Larger ones would keep more alive than is needed;
/// an image would need many smaller ones.
const SEGMENT_BYTES_MAX: u64 = 1 << 30;

/// Most bytes of segments for DAX, for each byte of an image, that its pack needs: 3 for 2.
const DAX_SURPLUS: (u64, u64) = (3, 2);

/// Most segments for DAX that a pack takes from others: each is a PCI function of a guest.
const DAX_SEGMENTS_MAX: usize = 16;

/// How an image is packed.
#[derive(Debug, Clone, Copy)]
pub struct PackOptions {
    /// Also pack an image that has a pack, and use only segments of which it needs at least half,
    /// so that leftovers of removed images can be collected.
    pub again: bool,
    /// How contents are kept. A pack of the same kind but another form is replaced.
    pub form: Form,
    /// How large a segment may get, in bytes, if it is of more than one object.
    pub segment_bytes_max: u64,
}

impl Default for PackOptions {
    fn default() -> Self {
        Self { again: false, form: Form::Plain, segment_bytes_max: SEGMENT_BYTES_MAX }
    }
}

/// Outcome of packing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PackReport {
    /// fs-verity digest of the image.
    pub image: Digest,
    /// That of its pack.
    pub pack: Digest,
    /// How its contents are kept.
    pub form: Form,
    /// Whether the image had this pack already, and nothing was done.
    pub was_there: bool,
    /// Segments that it needs.
    pub segments: Vec<Digest>,
    /// How many of them are new.
    pub new_segments: usize,
    /// Bytes of contents that were in no segment as a whole, before they were compressed.
    pub new_bytes: u64,
}

/// Why an image could not be packed. The store is as it was.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the message of a variant says what its fields are")]
pub enum PackError {
    /// The image cannot be read, or has files that cannot be packed.
    #[error("image {image}: {what}")]
    Image { image: Digest, what: String },
    /// More content than a segment of the form takes.
    #[error(
        "object {object} with {size} bytes is more than a segment takes (compressed: 64 GiB of holes)"
    )]
    TooLarge { object: Digest, size: u64 },
    /// The caller cancelled it.
    #[error(transparent)]
    Cancelled(#[from] Cancelled),
    /// The store refused.
    #[error(transparent)]
    Store(#[from] Error),
}

/// Packs an image.
pub fn pack(
    domain: &Domain,
    image: &Digest,
    options: &PackOptions,
    task: &Task,
) -> Result<PackReport, PackError> {
    if !options.again
        && let Some(report) = existing(domain, image, options.form)?
    {
        return Ok(report);
    }
    pack_without(domain, image, options, &BTreeSet::new(), task)
}

/// Packs an image, whether it has a pack or not, with nothing in these segments.
fn pack_without(
    domain: &Domain,
    image: &Digest,
    options: &PackOptions,
    without: &BTreeSet<Digest>,
    task: &Task,
) -> Result<PackReport, PackError> {
    let _lease = domain.lease(image, Vec::new(), "pack")?;
    let bad = |what: String| PackError::Image { image: *image, what };
    let file = domain.open_image(image)?;
    let stored = open_image(&file).map_err(|error| bad(error.to_string()))?;
    let tree = stored.to_tree().map_err(|error| bad(error.to_string()))?;
    let attempt = |hold_lock| {
        // Begun before the search: with the lock, what it finds stays.
        let import = ImportOptions { hold_lock, ..ImportOptions::default() };
        let staging = domain.begin_import(import)?.cancelled_by(&task.cancel);
        let mut plan = Plan::new(&tree, options.form);
        plan.find_known(domain, options.again, without)?;
        plan.sort(domain, image)?;
        plan.write_segments(domain, &staging, options, task)?;
        plan.write_pack(staging, image, &tree)
    };
    let packed = match attempt(false) {
        // Segments that were to be used were collected meanwhile.
        Err(PackError::Store(error)) if error.is_race() => attempt(true),
        other => other,
    };
    // What fails after it was cancelled fails because of that.
    packed.map_err(|error| task.reason(error))
}

/// The image's usable pack of that form, if there is one.
fn existing(domain: &Domain, image: &Digest, form: Form) -> Result<Option<PackReport>, PackError> {
    for name in domain.packs_of(form.pack_kind(), image)? {
        let Some(pack) = name.digest() else { continue };
        let Ok(segments) = pack_segments(&domain.open_named(&name)?) else { continue };
        let usable = |digest| Segment::of(domain, digest).is_ok_and(|it| it.form == form);
        if segments.iter().all(usable) {
            return Ok(Some(PackReport {
                image: *image,
                pack,
                form,
                was_there: true,
                segments,
                new_segments: 0,
                new_bytes: 0,
            }));
        }
    }
    Ok(None)
}

/// Forgets segments, and what of others has blocks in them; says whether anything went.
fn forget(known: &mut [(Digest, Segment)], gone: &BTreeSet<Digest>) -> bool {
    let mut dropped = false;
    for (digest, segment) in known {
        let mut entries = std::mem::take(&mut segment.entries);
        let before = entries.len();
        entries.retain(|entry| {
            !gone.contains(digest) && segment.is_within(entry, |other| !gone.contains(other))
        });
        dropped |= entries.len() < before;
        segment.entries = entries;
    }
    dropped
}

/// Which segments hold the contents of an image.
struct Plan {
    form: Form,
    /// Objects that are in no segment yet, in the order of their layers (once known) and paths.
    wanted: Vec<(Digest, u64)>,
    /// By object: the layer that brought it.
    layers: HashMap<Digest, usize>,
    total: u64,
    segments: Vec<(Digest, Device)>,
    /// Of segments that may be used: how many blocks they have.
    sizes: BTreeMap<Digest, u32>,
    /// The number of each of the pack's as a device.
    devices: HashMap<Digest, u16>,
    known: usize,
    new_bytes: u64,
    /// The contents that are in a segment.
    blobs: Blobs,
}

impl Plan {
    fn new(tree: &Tree, form: Form) -> Self {
        let (mut wanted, mut seen) = (Vec::new(), HashSet::new());
        for visit in tree.walk() {
            let content = tree.content(visit.inode);
            let Content::External { size, .. } = content else { continue };
            // The writer refuses a file that names no object, with its path.
            if let Some(digest) =
                content.digest().filter(|digest| size > 0 && seen.insert(**digest))
            {
                wanted.push((Digest(*digest), size));
            }
        }
        let total = wanted.iter().map(|(_, size)| size).sum();
        Self {
            form,
            wanted,
            layers: HashMap::new(),
            total,
            segments: Vec::new(),
            sizes: BTreeMap::new(),
            devices: HashMap::new(),
            known: 0,
            new_bytes: 0,
            blobs: Blobs::new(),
        }
    }

    /// Looks for wanted objects in the domain's segments. fsck reports unreadable ones.
    fn find_known(
        &mut self,
        domain: &Domain,
        half: bool,
        without: &BTreeSet<Digest>,
    ) -> Result<(), PackError> {
        self.sizes = usage::sizes(domain, without)?;
        let mut wanted: HashMap<Digest, u64> = self.wanted.iter().copied().collect();
        let mut known = Vec::new();
        for digest in self.sizes.keys() {
            if wanted.is_empty() {
                break;
            }
            let read = usage::readable(Segment::of(domain, digest))?;
            let Some(mut segment) = read else { continue };
            if segment.form != self.form {
                continue;
            }
            let mut entries = std::mem::take(&mut segment.entries);
            entries.retain(|entry| {
                wanted.get(&entry.object) == Some(&entry.size)
                    && segment.is_within(entry, |other| self.sizes.contains_key(other))
            });
            for entry in &entries {
                wanted.remove(&entry.object);
            }
            if !entries.is_empty() {
                known.push((*digest, Segment { entries, ..segment }));
            }
        }
        if half {
            self.drop_sparse(&mut known);
        }
        if self.form == Form::Dax {
            self.drop_surplus(&mut known);
        }
        for (digest, segment) in &known {
            self.add(digest, segment);
        }
        self.known = self.segments.len();
        self.wanted.retain(|(digest, _)| !self.blobs.contains_key(&digest.0));
        Ok(())
    }

    /// Forgets segments of which less than half is used, until nothing more goes: a forgotten
    /// content can have blocks in another segment.
    fn drop_sparse(&self, known: &mut [(Digest, Segment)]) {
        loop {
            let mut usage = Usage::new(&self.sizes);
            for (digest, segment) in known.iter() {
                segment.entries.iter().for_each(|entry| usage.mark(digest, segment, entry));
            }
            if !forget(known, &usage.sparse()) {
                return;
            }
        }
    }

    /// Forgets segments until a guest can have the others: least used ones first.
    fn drop_surplus(&self, known: &mut [(Digest, Segment)]) {
        loop {
            let mut usage = Usage::new(&self.sizes);
            let mut new = self.total;
            for (digest, segment) in known.iter() {
                segment.entries.iter().for_each(|entry| usage.mark(digest, segment, entry));
                new -= segment.entries.iter().map(|entry| entry.size).sum::<u64>();
            }
            let used = usage.counts();
            let attached: u64 = used.iter().map(|(_, _, size)| *size as u64 * segment::BLOCK).sum();
            let (most, each) = DAX_SURPLUS;
            let worst = if (attached + new) * each > self.total * most {
                // The smallest part of it: a.used / a.size < b.used / b.size.
                used.iter().min_by(|a, b| (a.1 * b.2).cmp(&(b.1 * a.2)))
            } else if used.len() > DAX_SEGMENTS_MAX {
                used.iter().min_by_key(|it| it.1)
            } else {
                None
            };
            let Some((worst, ..)) = worst else { return };
            forget(known, &BTreeSet::from([*worst]));
        }
    }

    /// Sorts the contents that are in no segment yet by the layers that brought them.
    fn sort(&mut self, domain: &Domain, image: &Digest) -> Result<(), PackError> {
        if !self.wanted.is_empty() {
            self.layers = order::layers(domain, image)?;
            let mut wanted = std::mem::take(&mut self.wanted);
            wanted.sort_by_key(|(object, _)| self.layer_of(object));
            self.wanted = wanted;
        }
        Ok(())
    }

    /// Contents that no known layer brought come last.
    fn layer_of(&self, object: &Digest) -> usize {
        self.layers.get(object).copied().unwrap_or(usize::MAX)
    }

    /// Adds the contents of a segment, with their addresses there and in other segments.
    fn add(&mut self, digest: &Digest, segment: &Segment) {
        for entry in &segment.entries {
            // Even if no block lies in it: packs keep the segment that describes a content.
            self.device(*digest);
            let mut address = |at: segment::BlockRef| BlockAddr {
                device: self.device(segment.holder(digest, at)),
                block: at.block,
            };
            let runs = entry.runs().into_iter();
            let extents: Vec<_> = runs
                .map(|run| Extent { at: run.at.map(&mut address), blocks: run.blocks })
                .collect();
            let data = match (self.form, &extents[..]) {
                (Form::Lz4, &[Extent { at: Some(start), .. }, ..]) => {
                    BlobData::Lz4 { start, pclusters: segment.pclusters_of(entry).to_vec() }
                }
                _ => BlobData::Extents(extents),
            };
            let sha256 = (entry.size <= SHA256_SIZE_MAX).then_some(entry.sha256);
            self.blobs.insert(entry.object.0, Blob { sha256, data });
        }
    }

    /// The number that a segment has as a device.
    fn device(&mut self, digest: Digest) -> u16 {
        if let Some(device) = self.devices.get(&digest) {
            return *device;
        }
        let mut tag = [0; 64];
        tag.copy_from_slice(digest.to_string().as_bytes());
        let blocks = self.sizes.get(&digest).copied().unwrap_or(0);
        self.segments.push((digest, Device { tag, blocks }));
        // More than the format has are refused when the pack is written.
        let device = u16::try_from(self.segments.len()).unwrap_or(u16::MAX);
        self.devices.insert(digest, device);
        device
    }

    /// Writes the contents that are in no segment yet to new segments.
    fn write_segments(
        &mut self,
        domain: &Domain,
        staging: &Staging,
        options: &PackOptions,
        task: &Task,
    ) -> Result<(), PackError> {
        let wanted = std::mem::take(&mut self.wanted);
        self.new_bytes = wanted.iter().map(|(_, size)| size).sum();
        let mut done = self.total - self.new_bytes;
        let mut pages = Pages::default();
        if !wanted.is_empty() && self.form != Form::Lz4 {
            for (digest, _) in &self.segments {
                // If it is gone the commit will tell.
                usage::readable(pages.add(domain, digest))?;
            }
        }
        for contents in self.batches(&wanted, options) {
            let mut writer = SegmentWriter::new(staging, self.form, &pages, &task.cancel)?;
            for (object, size) in contents {
                match self.form {
                    Form::Plain | Form::Dax => writer.add(object, *size)?,
                    Form::Lz4 => writer.add_compressed(object, *size, |content, blocks| {
                        lz4::compress(content, blocks)
                    })?,
                }
                done += size;
                task.done(done, self.total);
                task.check()?;
            }
            let (digest, segment) = pages.add_written(writer.finish()?);
            self.sizes.insert(digest, segment.blocks);
            self.add(&digest, &segment);
        }
        Ok(())
    }

    /// The contents of each new segment.
    fn batches<'w>(
        &self,
        wanted: &'w [(Digest, u64)],
        options: &PackOptions,
    ) -> Vec<&'w [(Digest, u64)]> {
        let (mut batches, mut rest, mut bytes) = (Vec::new(), wanted, 0);
        let (mut end, mut layer) = (0, usize::MAX);
        let layer_bytes_min = order::layer_bytes_min(self.form);
        while let Some((object, size)) = rest.get(end) {
            let brought_by = self.layer_of(object);
            let ended = layer != brought_by;
            layer = brought_by;
            let is_full =
                bytes + size > options.segment_bytes_max || ended && bytes >= layer_bytes_min;
            if end > 0 && is_full {
                batches.push(&rest[..end]);
                (rest, end, bytes) = (&rest[end..], 0, 0);
            }
            bytes += size;
            end += 1;
        }
        if end > 0 {
            batches.push(rest);
        }
        batches
    }

    /// Writes the pack, and publishes it with its new segments.
    fn write_pack(
        &self,
        staging: Staging,
        image: &Digest,
        tree: &Tree,
    ) -> Result<PackReport, PackError> {
        let (segments, devices): (Vec<_>, Vec<_>) = self.segments.iter().cloned().unzip();
        // Guests share no inodes.
        let fingerprints = self.form != Form::Dax;
        let data = Data { devices: &devices, own_blocks: 0, blobs: &self.blobs, fingerprints };
        let mut writer = staging.pack_writer(self.form.pack_kind(), image)?;
        write_data(tree, &data, &mut writer).map_err(|error| match error {
            WriteError::Sink(source) => match source.downcast::<Error>() {
                Ok(error) => PackError::Store(error),
                Err(source) => PackError::Image { image: *image, what: source.to_string() },
            },
            other => PackError::Image { image: *image, what: other.to_string() },
        })?;
        if self.form == Form::Dax {
            writer.pad(DEVICE_ALIGN)?;
        }
        let pack = writer.finish()?;
        staging.commit(&Publish { segments: segments.clone(), ..Publish::default() }, [])?;
        Ok(PackReport {
            image: *image,
            pack,
            form: self.form,
            was_there: false,
            new_segments: segments.len() - self.known,
            segments,
            new_bytes: self.new_bytes,
        })
    }
}
