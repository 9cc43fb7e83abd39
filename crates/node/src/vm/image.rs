//! What a guest has of its image: the pack and its segments, as devices.

use std::path::PathBuf;

use cofolio_guest::Device;
use cofolio_image::pack::segment::Form;
use cofolio_image::pack::{PackOptions, PackReport, pack};
use cofolio_store::task::Task;
use cofolio_store::{Digest, Domain, Error, FileKind, FileName, StoredFile};

use super::error::Result;
use crate::mount::At as _;

/// The superblock of EROFS: it has the checksum of the image's metadata, and its devices' count.
const SUPERBLOCK: (u64, usize) = (1024, 128);
/// The footer of a segment, which has the checksum of its index.
const FOOTER_BYTES: usize = 64;

/// The devices of an image.
#[derive(Debug)]
pub(super) struct Attached {
    /// What was packed.
    pub(super) report: PackReport,
    /// Files and sizes: the pack, then its segments in the order of its table.
    pub(super) files: Vec<(PathBuf, u64)>,
    /// How a guest tells them apart.
    pub(super) devices: Vec<Device>,
}

/// Packs an image for guests if it has no such pack.
///
/// # Errors
/// [`VmError::Pack`](super::VmError::Pack), [`VmError::Store`](super::VmError::Store),
/// [`VmError::Mount`](super::VmError::Mount).
pub(super) fn attach(domain: &Domain, image: &Digest, task: &Task) -> Result<Attached> {
    let options = PackOptions { form: Form::Dax, ..PackOptions::default() };
    let report = pack(domain, image, &options, task)?;
    let pack = FileName::of_image(FileKind::DaxPack, image, &report.pack);
    let segments = report.segments.iter().map(|it| FileName::content(FileKind::Segment, it));
    let (mut files, mut devices) = (Vec::new(), Vec::new());
    for name in [pack].into_iter().chain(segments) {
        let file = domain.open_named(&name)?;
        let path = domain.named_path(&name).ok_or_else(|| Error::NoSuch(name.clone()))?;
        let size = file.size().at("looking at", &path)?;
        devices.push(device(&name, &file, size).at("reading", &path)?);
        files.push((path, size));
    }
    Ok(Attached { report, files, devices })
}

fn device(name: &FileName, file: &StoredFile, size: u64) -> std::io::Result<Device> {
    let (offset, length) = match name.kind() {
        FileKind::Segment => (size - FOOTER_BYTES as u64, FOOTER_BYTES),
        _ => SUPERBLOCK,
    };
    let mut bytes = vec![0; length];
    file.read_exact_at(&mut bytes, offset)?;
    Ok(Device { size, offset, bytes })
}
