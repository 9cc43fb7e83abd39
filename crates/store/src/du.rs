//! Disk usage: what each image costs alone, and what it shares.

use serde::Serialize;

use crate::contents::Contents;
use crate::error::Result;
use crate::kinds::{FileKind, FileName};
use crate::task::Task;
use crate::uses::Uses;
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

impl Domain {
    /// What the domain's images use.
    ///
    /// # Errors
    /// [`crate::Error::Unreadable`] naming the image that cannot be read,
    /// [`crate::Error::Corrupt`], [`crate::Error::Io`], [`crate::Error::Cancelled`].
    pub fn du(&self, contents: &dyn Contents, task: &Task) -> Result<DuReport> {
        let _lock = self.lock_shared()?;
        let mut report = DuReport::default();
        let mut uses = Uses::of_objects(self)?;
        let names: Vec<_> = self.images()?;
        let files = names.iter().map(|image| FileName::content(FileKind::Image, image));
        let files: Vec<_> = files.collect();
        for file in &files {
            task.check()?;
            uses.visit(self, contents, file, &[], |object| object.users += 1)?;
        }
        for object in uses.iter() {
            report.objects += 1;
            report.object_bytes += object.allocated;
            if object.users == 0 {
                report.unnamed_objects += 1;
                report.unnamed_bytes += object.allocated;
            }
        }
        let refs = self.readable_refs()?;
        for (image, file) in names.into_iter().zip(&files) {
            task.check()?;
            let of_image = refs.iter().filter(|(_, record)| record.image == image);
            let mut row = ImageUsage {
                image,
                refs: of_image.map(|(name, _)| name.clone()).collect(),
                metadata_bytes: self.allocated(&self.named_file(file))?,
                objects: 0,
                bytes: 0,
                exclusive_objects: 0,
                exclusive_bytes: 0,
            };
            uses.visit(self, contents, file, &[], |object| {
                row.objects += 1;
                row.bytes += object.allocated;
                if object.users == 1 {
                    row.exclusive_objects += 1;
                    row.exclusive_bytes += object.allocated;
                }
            })?;
            report.images.push(row);
        }
        report.metadata_bytes = self.allocated_for(FileKind::Image)?.1;
        (report.layers, report.layer_bytes) = self.allocated_for(FileKind::Layer)?;
        report.layer_bytes += self.allocated_for(FileKind::Split)?.1;
        for kind in FileKind::PACKS {
            let (packs, bytes) = self.allocated_for(kind)?;
            report.packs += packs;
            report.segment_bytes += bytes;
        }
        let (segments, bytes) = self.allocated_for(FileKind::Segment)?;
        report.segments = segments;
        report.segment_bytes += bytes;
        Ok(report)
    }
}
