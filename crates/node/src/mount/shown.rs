//! The superblocks that files of mounted images are opened on, for the ledger.

use std::path::{Path, PathBuf};

use cofolio_store::{Digest, LAYERS_MAX};
use cofolio_sys::mount::{MountId, mount_id};
use rustix::fs::{AtFlags, StatxFlags};
use rustix::io::Errno;

use super::error::{At as _, MountError};
use super::mountinfo::LazyMounts;
use super::pin::{EROFS_MAGIC, OVERLAY_MAGIC, OWN, mounted_at};
use super::reconcile::Way;
use super::records::{MountRecord, PinRecord};
use super::{MountPhase, MountState, open_cached, sparse};
use crate::run_dir::{RunDir, list, read_json};
use crate::settings::Backend;

/// A superblock of ours in this mount namespace.
#[derive(Debug, Clone)]
pub(crate) struct ShownSuperblock {
    pub(crate) domain: String,
    pub(crate) image: Digest,
    pub(crate) backend: Backend,
    /// The directory of its pin.
    pub(crate) pin: PathBuf,
    /// Where it is mounted.
    pub(crate) path: PathBuf,
    /// The directory of the image that is mounted there: empty for the root.
    pub(crate) inside: PathBuf,
    /// Where its changes go.
    pub(crate) upper: Option<PathBuf>,
    /// Major and minor number.
    pub(crate) device: (u32, u32),
    /// Number of the mount that shows it. Before Linux 6.8 a later mount may get it.
    pub(crate) mount: u64,
}

/// The superblocks that read-only mounts share, as far as they could be looked at.
#[derive(Debug, Default)]
pub(crate) struct SharedSuperblocks {
    pub(crate) found: Vec<ShownSuperblock>,
    /// Nobody knows what is at these paths and below them.
    pub(crate) failed: Vec<PathBuf>,
}

impl MountRecord {
    /// The superblock that this mount has for itself, which a writable one has, if it is at its
    /// target.
    ///
    /// # Errors
    /// [`MountError::Io`] if that cannot be said.
    pub(crate) fn own_superblock(
        &self,
        run: &RunDir,
        mounts: &LazyMounts<'_>,
    ) -> Result<Option<ShownSuperblock>, MountError> {
        if !self.may_have_own_superblock() {
            return Ok(None);
        }
        let (Some(upper), Some(mount)) = (&self.upper, self.mount) else { return Ok(None) };
        // The path to where nothing is mounted need not be in the cache.
        let is_elsewhere = || match self.look_up(mounts.get()?, Way::Cached) {
            (MountState::Gone, _) => Ok(true),
            (_, at) => Ok::<_, MountError>(at.is_some_and(|at| at != self.target)),
        };
        let open = |path: &Path| match open_cached(path) {
            Err(Errno::NOENT | Errno::NOTDIR) => Ok(None),
            Err(Errno::AGAIN) if is_elsewhere()? => Ok(None),
            opened => opened.at("look at", path).map(Some),
        };
        let Some(root) = open(&self.target)? else { return Ok(None) };
        let at_target = mount_id(root, "").at("look at", &self.target)?;
        if !at_target.is_root || !mount.is(at_target.id, at_target.unique) {
            return Ok(None);
        }
        let inside = upper.dirs.first().map(|dir| sparse::below(dir).to_owned());
        let inside = inside.unwrap_or_default();
        let path = self.target.join(&inside);
        let Some(part) = open(&path)? else { return Ok(None) };
        // A FUSE server may be mounted over it, and need not answer.
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let found = rustix::fs::statx(part, "", flags, StatxFlags::empty()).at("look at", &path)?;
        let device = (found.stx_dev_major, found.stx_dev_minor);
        if upper.device.is_some_and(|known| known != device) {
            return Ok(None);
        }
        let pin = run.image_dir(&self.domain, &self.image);
        Ok(Some(ShownSuperblock {
            domain: self.domain.clone(),
            image: self.image,
            backend: self.backend,
            pin: if self.own { pin.join(OWN) } else { pin },
            path,
            inside,
            upper: Some(upper.dir.join("upper")),
            device,
            mount: number(&at_target),
        }))
    }

    /// Whether the mount has a superblock for itself wherever it is at its target.
    pub(crate) fn may_have_own_superblock(&self) -> bool {
        self.upper.is_some() && self.phase == MountPhase::Mounted
    }
}

impl ShownSuperblock {
    /// The metadata images that it is made of, the topmost first. `None` where that was not
    /// recorded, as earlier programs did not.
    pub(crate) fn metadata_images(&self, run: &RunDir) -> Option<Vec<Digest>> {
        let (mut images, mut image, mut pin) = (Vec::new(), self.image, self.pin.clone());
        while images.len() < LAYERS_MAX {
            let record = read_json::<PinRecord>(&pin.join("pin.json")).ok()??;
            let Some(base) = record.base else {
                images.push(image);
                return Some(images);
            };
            images.push(record.delta?);
            (image, pin) = (base, run.image_dir(&self.domain, &base));
        }
        None
    }
}

impl RunDir {
    /// The superblocks that read-only mounts share.
    pub(crate) fn shared_superblocks(&self) -> SharedSuperblocks {
        let mut shared = SharedSuperblocks::default();
        let images = self.path().join("images");
        for domain in shared.names(&images) {
            for name in shared.names(&images.join(&domain)) {
                let Ok(image) = name.parse::<Digest>() else { continue };
                shared.look_at_image(self, &domain, image);
            }
        }
        shared
    }

    /// Those of one image.
    pub(crate) fn shared_superblocks_of(&self, domain: &str, image: Digest) -> SharedSuperblocks {
        let mut shared = SharedSuperblocks::default();
        shared.look_at_image(self, domain, image);
        shared
    }
}

impl SharedSuperblocks {
    /// The entries of a directory; none if there is no such directory.
    fn names(&mut self, path: &Path) -> Vec<String> {
        list(path).unwrap_or_else(|_| {
            self.failed.push(path.to_owned());
            Vec::new()
        })
    }

    fn look_at_image(&mut self, run: &RunDir, domain: &str, image: Digest) {
        let directory = run.image_dir(domain, &image);
        for pin in [&directory, &directory.join(OWN)] {
            let views = pin.join("views");
            for view in self.names(&views) {
                let path = views.join(view);
                self.look_at(domain, image, pin, path, Backend::Overlay);
            }
        }
        match read_json::<PinRecord>(&directory.join("pin.json")) {
            Ok(Some(pin)) if pin.backend == Backend::InodeShare => {
                let path = directory.join("erofs");
                self.look_at(domain, image, &directory, path, Backend::InodeShare);
            }
            Ok(_) => {}
            Err(_) => self.failed.push(directory.join("erofs")),
        }
    }

    fn look_at(
        &mut self,
        domain: &str,
        image: Digest,
        pin: &Path,
        path: PathBuf,
        backend: Backend,
    ) {
        let magic = match backend {
            Backend::Overlay => OVERLAY_MAGIC,
            Backend::InodeShare => EROFS_MAGIC,
        };
        let look = || {
            let Some((root, mount)) = mounted_at(&path, magic)? else {
                return Ok::<_, MountError>(None);
            };
            let device = numbers(rustix::fs::fstat(root).at("look at", &path)?.st_dev);
            Ok(Some((device, number(&mount))))
        };
        match look() {
            Ok(Some((device, mount))) => self.found.push(ShownSuperblock {
                domain: domain.to_owned(),
                image,
                backend,
                pin: pin.to_owned(),
                path,
                inside: PathBuf::new(),
                upper: None,
                device,
                mount,
            }),
            Ok(None) => {}
            Err(_) => self.failed.push(path),
        }
    }
}

fn number(mount: &MountId) -> u64 {
    mount.unique.unwrap_or(mount.id)
}

fn numbers(device: u64) -> (u32, u32) {
    (rustix::fs::major(device), rustix::fs::minor(device))
}
