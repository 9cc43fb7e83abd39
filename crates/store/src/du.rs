//! Disk usage: what each image costs alone, and what it shares.

use std::collections::HashMap;

use serde::Serialize;

use crate::contents::{Contents, Part};
use crate::disk::Kind;
use crate::domain::{LAYER_SUFFIX, SPLIT_SUFFIX};
use crate::error::{At, Result};
use crate::{Digest, Domain};

/// What one image uses. Bytes are allocated bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ImageUsage {
    /// The image.
    pub image: Digest,
    /// Its refs, sorted.
    pub refs: Vec<String>,
    /// Bytes of the metadata image.
    pub metadata_bytes: u64,
    /// Objects that it names.
    pub objects: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Objects that no other image of the domain names.
    pub exclusive_objects: u64,
    /// Their bytes: what removing the image would free, metadata apart.
    pub exclusive_bytes: u64,
}

impl ImageUsage {
    /// Bytes of objects that other images name too.
    pub fn shared_bytes(&self) -> u64 {
        self.bytes - self.exclusive_bytes
    }
}

/// What a domain uses. Bytes are allocated bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DuReport {
    /// Per image, sorted by digest.
    pub images: Vec<ImageUsage>,
    /// Objects in the domain.
    pub objects: u64,
    /// Their bytes.
    pub object_bytes: u64,
    /// Objects that no image names (a layer may).
    pub unnamed_objects: u64,
    /// Their bytes.
    pub unnamed_bytes: u64,
    /// Bytes of all metadata images.
    pub metadata_bytes: u64,
    /// Layer trees.
    pub layers: u64,
    /// Their bytes, and those of their splits.
    pub layer_bytes: u64,
    /// Images that have packs.
    pub packs: u64,
    /// Segments.
    pub segments: u64,
    /// Bytes of both. Blocks that segments share with objects are counted with both.
    pub segment_bytes: u64,
}

impl DuReport {
    /// Everything together.
    pub fn bytes(&self) -> u64 {
        self.object_bytes + self.metadata_bytes + self.layer_bytes + self.segment_bytes
    }

    /// What the images would take if each had its own copy of its objects.
    pub fn unshared_bytes(&self) -> u64 {
        self.images.iter().map(|image| image.bytes + image.metadata_bytes).sum()
    }
}

struct Usage {
    images: u32,
    /// The image that counted it last: an image that names an object twice uses it once.
    last: usize,
    allocated: u64,
}

impl Domain {
    /// What the domain's images use.
    ///
    /// # Errors
    /// [`crate::Error::Unreadable`] naming the image that cannot be read, [`crate::Error::Corrupt`],
    /// [`crate::Error::Io`].
    pub fn du(&self, contents: &dyn Contents) -> Result<DuReport> {
        let _lock = self.lock_shared()?;
        let mut report = DuReport::default();
        let mut usage = self.allocated(&mut report)?;
        let images = self.images()?;
        for image in self.derived_images()? {
            let path = self.image_file(&image);
            report.metadata_bytes += self.disk().stat(&path).at("look at", &path)?.allocated;
        }
        let refs = self.readable_refs()?;
        for (number, image) in images.iter().enumerate() {
            self.visit_image(image, contents, &mut |digest, _| {
                if let Some(usage) = usage.get_mut(&digest).filter(|usage| usage.last != number) {
                    usage.images += 1;
                    usage.last = number;
                }
            })?;
        }
        for unnamed in usage.values().filter(|usage| usage.images == 0) {
            report.unnamed_objects += 1;
            report.unnamed_bytes += unnamed.allocated;
        }
        for (number, image) in images.iter().enumerate() {
            let path = self.image_file(image);
            let metadata_bytes = self.disk().stat(&path).at("look at", &path)?.allocated;
            let of_image = refs.iter().filter(|(_, record)| record.image == *image);
            let mut row = ImageUsage {
                image: *image,
                refs: of_image.map(|(name, _)| name.clone()).collect(),
                metadata_bytes,
                objects: 0,
                bytes: 0,
                exclusive_objects: 0,
                exclusive_bytes: 0,
            };
            let turn = images.len() + number;
            self.visit_image(image, contents, &mut |digest, _| {
                let Some(usage) = usage.get_mut(&digest).filter(|usage| usage.last != turn) else {
                    return;
                };
                usage.last = turn;
                row.objects += 1;
                row.bytes += usage.allocated;
                if usage.images == 1 {
                    row.exclusive_objects += 1;
                    row.exclusive_bytes += usage.allocated;
                }
            })?;
            report.metadata_bytes += metadata_bytes;
            report.images.push(row);
        }
        for stem in self.files("layers", LAYER_SUFFIX)? {
            let path = format!("{}/layers/{stem}{LAYER_SUFFIX}", self.base());
            report.layers += 1;
            report.layer_bytes += self.disk().stat(&path).at("look at", &path)?.allocated;
        }
        for stem in self.files("layers", SPLIT_SUFFIX)? {
            let path = format!("{}/layers/{stem}{SPLIT_SUFFIX}", self.base());
            report.layer_bytes += self.disk().stat(&path).at("look at", &path)?.allocated;
        }
        let packs = self.packs()?;
        let segments = self.segments()?;
        (report.packs, report.segments) = (packs.len() as u64, segments.len() as u64);
        let packs = packs.iter().map(|pack| self.pack_file(pack));
        for path in packs.chain(segments.iter().map(|segment| self.segment_file(segment))) {
            report.segment_bytes += self.disk().stat(&path).at("look at", &path)?.allocated;
        }
        Ok(report)
    }

    fn visit_image(
        &self,
        image: &Digest,
        contents: &dyn Contents,
        visit: &mut dyn FnMut(Digest, u64),
    ) -> Result<()> {
        let part = Part::Image(*image);
        part.visit(self, contents, visit).map_err(|source| part.unreadable("the domain", source))
    }

    /// All objects with the bytes allocated for them.
    fn allocated(&self, report: &mut DuReport) -> Result<HashMap<Digest, Usage>> {
        let mut usage = HashMap::new();
        self.each_object(&mut |digest, allocated| {
            report.objects += 1;
            report.object_bytes += allocated;
            usage.insert(digest, Usage { images: 0, last: usize::MAX, allocated });
        })?;
        Ok(usage)
    }

    /// Visits every object that is here with the bytes allocated for it.
    pub(crate) fn each_object(&self, visit: &mut dyn FnMut(Digest, u64)) -> Result<()> {
        let objects = format!("{}/objects", self.base());
        for (shard, kind) in self.disk().list(&objects).at("list", &objects)? {
            if kind != Kind::Directory {
                continue;
            }
            let directory = format!("{objects}/{shard}");
            for (entry, _) in self.disk().list(&directory).at("list", &directory)? {
                let Some(digest) = Digest::from_object_path(&shard, &entry) else { continue };
                let path = format!("{directory}/{entry}");
                visit(digest, self.disk().stat(&path).at("look at", &path)?.allocated);
            }
        }
        Ok(())
    }
}
