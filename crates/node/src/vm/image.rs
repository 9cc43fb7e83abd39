//! What a guest has of its image: the pack and its segments, as devices.

use std::path::PathBuf;

use cofolio_guest::{Device, Dirs};
use cofolio_image::pack::segment::Form;
use cofolio_image::pack::{ImageContents, PackOptions, PackReport, pack};
use cofolio_store::task::Task;
use cofolio_store::{Digest, Domain, DomainLock, Error, FileKind, FileName, StoredFile};

use super::error::Result;
use crate::container::bundle::{ImageConfig, expected_dirs};
use crate::mount::{At as _, Check, check_image, checked_writable_dirs, open_pack_files};

/// The superblock of EROFS: it has the checksum of the image's metadata, and its devices' count.
const SUPERBLOCK: (u64, usize) = (1024, 128);
/// The footer of a segment, which has the checksum of its index.
const FOOTER_BYTES: usize = 64;

/// The devices of an image.
#[derive(Debug)]
pub(super) struct ImageDevices {
    /// `gc` replaces packs and rewrites segments only when this was dropped: after the VMM has
    /// opened all files.
    pub(super) stays: DomainLock,
    /// What was packed.
    pub(super) report: PackReport,
    /// Files and sizes: the pack, then its segments in the order of its table.
    pub(super) files: Vec<(PathBuf, u64)>,
    /// How a guest tells them apart.
    pub(super) devices: Vec<Device>,
}

/// Packs an image for guests if it has no such pack, and checks all of it: as the backend
/// `inode-share` checks the pack that it mounts, and beyond that as far as `check` says.
///
/// # Errors
/// [`VmError::Pack`](super::VmError::Pack), [`VmError::Store`](super::VmError::Store),
/// [`VmError::Mount`](super::VmError::Mount).
pub(super) fn devices(
    domain: &Domain,
    image: &Digest,
    check: Check,
    task: &Task,
) -> Result<ImageDevices> {
    // A pack is made of what is measured first.
    let first = if check == Check::Verify { Check::Measure } else { check };
    check_image(domain, image, first, &ImageContents, task)?;
    let options = PackOptions { form: Form::Dax, ..PackOptions::default() };
    let report = pack(domain, image, &options, task)?;
    if check == Check::Verify {
        // With all of its packs and segments.
        check_image(domain, image, check, &ImageContents, task)?;
    }
    let stays = domain.lock_names()?;
    let pack = FileName::of_image(FileKind::DaxPack, image, &report.pack);
    let (file, segments) = open_pack_files(domain, &ImageContents, image, &pack)?;
    let names = report.segments.iter().map(|it| FileName::content(FileKind::Segment, it));
    let (mut files, mut devices) = (Vec::new(), Vec::new());
    for (name, file) in [pack].into_iter().chain(names).zip([file].into_iter().chain(segments)) {
        let path = domain.named_path(&name).ok_or_else(|| Error::NoSuch(name.clone()))?;
        let size = file.size().at("looking at", &path)?;
        devices.push(device(&name, &file, size).at("reading", &path)?);
        files.push((path, size));
    }
    Ok(ImageDevices { stays, report, files, devices })
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

/// What a guest can write to if its root is read-only but for these directories of the image.
///
/// # Errors
/// [`VmError::Mount`](super::VmError::Mount) for a path that cannot be one of these.
pub(super) fn writable_dirs(config: &ImageConfig, asked: &[PathBuf]) -> Result<Dirs> {
    let asked = checked_writable_dirs(asked)?.into_iter();
    Ok(Dirs {
        // They are UTF-8.
        asked: asked.map(|dir| dir.to_string_lossy().into_owned()).collect(),
        expected: expected_dirs(config).map(str::to_owned).collect(),
    })
}
