//! Backend `inode-share`: packs whose files share kernel inodes with those of all packs of the
//! trust domain that have the same fingerprint (Linux 7.0, `Documentation/filesystems/erofs.rst`).
//!
//! The kernel reads segments past the page cache, since its shared cache is above them. ext4 and
//! btrfs refuse that for files with fs-verity: their checked pages are cached below, too.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;

use crate::settings::{DomainSettings as _, Secret};
use cofolio_image::pack::segment::Segment;
use cofolio_store::{Contents, Digest, Domain, Error, FileKind, FileName, StoredFile};
use cofolio_sys::mount::mount_id;
use rustix::fs::CWD;

use super::check::{check_digest, measured};
use super::error::{At as _, MountError, refused};
use super::kernel::PackOptions;
use super::mountinfo;
use super::pin::file_numbers;
use super::{Mounter, kernel};

/// A pack with all that it needs, checked.
pub(super) struct Packed {
    pub(super) file: StoredFile,
    segments: Vec<StoredFile>,
    secret: Secret,
    /// The kernel checks every read.
    pub(super) verity: bool,
}

impl Packed {
    /// Device and inode number of the pack and of each segment.
    pub(super) fn numbers(&self) -> Result<Vec<(u64, u64)>, MountError> {
        std::iter::once(&self.file).chain(&self.segments).map(file_numbers).collect()
    }
}

impl Mounter<'_> {
    /// Opens the pack of an image and its segments, checked.
    pub(super) fn open_pack(&self, image: &Digest) -> Result<Packed, MountError> {
        let secret = self.domain.secret()?.ok_or(Error::NoPack(*image))?;
        // Until all are open: `gc` replaces packs and rewrites segments.
        let _stays = self.domain.lock_names()?;
        let packs = self.domain.packs_of(FileKind::Pack, image)?;
        let pack = packs.first().ok_or(Error::NoPack(*image))?;
        let (file, segments) = open_pack_files(self.domain, self.contents, image, pack)?;
        Ok(Packed { file, segments, secret, verity: self.domain.has_verity() })
    }

    /// Mounts it, detached.
    pub(super) fn mount_pack(
        &self,
        packed: &Packed,
        name: &str,
        scratch: BorrowedFd<'_>,
    ) -> Result<OwnedFd, MountError> {
        let segments: Option<Vec<_>> = packed.segments.iter().map(StoredFile::descriptor).collect();
        let files = packed.file.descriptor().zip(segments);
        let (pack, segments) = files.ok_or(MountError::NoDirectory)?;
        let options = PackOptions {
            segments: &segments,
            direct: !packed.verity,
            secret: packed.secret.reveal(),
        };
        kernel::mount_pack(pack, name, scratch, &options).map_err(refused)
    }

    /// The kernel silently drops the option if an image lacks what it needs.
    pub(super) fn check_shares(&self, at: &Path) -> Result<(), MountError> {
        let path = mountinfo::path(&self.root);
        let mounts = mountinfo::read(&self.root).at("read", path)?;
        // Not by its path, which may lead there by links.
        let id = mount_id(CWD, at).at("look at", at)?.id;
        match mounts.iter().find(|mount| mount.id == id) {
            Some(mount) if mount.has_option("inode_share") => Ok(()),
            _ => Err(MountError::NotShared(at.to_owned())),
        }
    }
}

/// Opens a pack of an image and its segments, in the order of its table. Without fs-verity, hashes
/// the pack and compares the sizes of segments, so that none is truncated.
pub(crate) fn open_pack_files(
    domain: &Domain,
    contents: &dyn Contents,
    image: &Digest,
    pack: &FileName,
) -> Result<(StoredFile, Vec<StoredFile>), MountError> {
    let verity = domain.has_verity();
    let invalid = |reason| MountError::PackInvalid { image: *image, reason };
    let digest = pack.digest().ok_or(Error::NoPack(*image))?;
    let file = domain.open_named(pack)?;
    check_digest(&file, &digest, verity)?.map_or(Ok(()), |it| Err(invalid(it)))?;
    let mut needed = Vec::new();
    let visit = &mut |segment, _| needed.push(segment);
    let read = contents.names(pack.kind(), &file, visit);
    read.map_err(|error| invalid(error.to_string()))?;
    let mut segments = Vec::new();
    for digest in needed {
        let segment = domain.open_segment(&digest)?;
        match verity {
            true if measured(&segment)? != Some(digest) => {
                let path = segment.path();
                return Err(invalid(format!("{path}: the kernel has another fs-verity digest")));
            }
            true => {}
            false => drop(Segment::blocks_of(domain, &digest)?),
        }
        segments.push(segment);
    }
    Ok((file, segments))
}
