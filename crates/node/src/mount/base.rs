//! Images over a base: one EROFS superblock for the base, and a small one per image for the rest.
//!
//! A base is pinned like any image, and each image over it is one of its users
//! (`users/image-<digest>`). A base is held before its image is locked: nobody waits for the locks
//! of two images. An image whose base is unusable is mounted from its own metadata image.

use std::os::fd::{BorrowedFd, OwnedFd};

use crate::run_dir::{ImageLock, remove_file};
use crate::settings::{Backend, DomainSettings as _};
use cofolio_store::{Base, Digest, LAYERS_MAX};

use super::error::MountError;
use super::pin::{EROFS_MAGIC, mounted_root};
use super::records::PinRecord;
use super::{Mounter, mark_user};

/// A mount of a delta, how it was made, and the layers below it.
type OverBase = (OwnedFd, PinRecord, Vec<OwnedFd>);

/// Name of the user by which an image holds its base.
fn user_name(image: &Digest) -> String {
    format!("image-{image}")
}

/// The image that holds its base by this user name, if any.
pub(super) fn image_of_user(user: &str) -> Option<Digest> {
    user.strip_prefix("image-")?.parse().ok()
}

impl Mounter<'_> {
    /// Pins the base of an image that is about to be pinned, and says there who needs it.
    /// `above` are the images that need this one, and that it cannot be based on.
    pub(super) fn hold_base(
        &self,
        image: &Digest,
        above: &mut Vec<Digest>,
    ) -> Result<(), MountError> {
        let at = self.run.image_dir(self.domain.name(), image).join("erofs");
        above.push(*image);
        if self.domain.backend()? != Backend::Overlay || mounted_root(&at, EROFS_MAGIC)?.is_some() {
            return Ok(());
        }
        let Some(Base { base, .. }) = self.domain.base_of(image)? else { return Ok(()) };
        if above.len() >= LAYERS_MAX || above.contains(&base) {
            return Ok(());
        }
        self.hold_base(&base, above)?;
        self.run.prepare()?;
        let lock = self.run.lock_image(&base)?;
        // Another process may hold it already, and may have mounted the image over it since.
        let held = self.holds(self.domain.name(), &base, image);
        mark_user(&self.run, self.domain.name(), &base, &user_name(image))?;
        if self.pinned(&base, &lock, false).is_err() && !held {
            self.unmark(self.domain.name(), &base, image)?;
            self.unpin_if_idle(self.domain.name(), &base, &lock)?;
        }
        Ok(())
    }

    fn holds(&self, domain: &str, base: &Digest, image: &Digest) -> bool {
        self.run.image_dir(domain, base).join("users").join(user_name(image)).exists()
    }

    /// Mounts what an image has besides its base, detached, if the base is held for it.
    pub(super) fn mount_delta(
        &self,
        image: &Digest,
        scratch: BorrowedFd<'_>,
    ) -> Result<Option<OverBase>, MountError> {
        let Some(base) = self.domain.base_of(image)? else { return Ok(None) };
        if !self.holds(self.domain.name(), &base.base, image) {
            return Ok(None);
        }
        let Ok(layers) = self.mounted_layers(&base.base, Backend::Overlay) else { return Ok(None) };
        let Ok((mount, record)) = self.mount_image(&base.delta, image, scratch) else {
            return Ok(None);
        };
        let below = self.pin_record(self.domain.name(), &base.base)?;
        let verity = record.verity && below.is_some_and(|below| below.verity);
        let (base, delta) = (Some(base.base), Some(base.delta));
        let record = PinRecord { base, delta, verity, ..record };
        Ok(Some((mount, record, layers)))
    }

    /// The roots of the EROFS mounts that show a pinned image together, the topmost first. Fails if one
    /// of them is missing, or has another backend.
    pub(crate) fn mounted_layers(
        &self,
        image: &Digest,
        backend: Backend,
    ) -> Result<Vec<OwnedFd>, MountError> {
        let mut layers = Vec::new();
        let mut next = Some(*image);
        while let Some(image) = next {
            let at = self.run.image_dir(self.domain.name(), &image).join("erofs");
            let record = self.pin_record(self.domain.name(), &image)?;
            let root = mounted_root(&at, EROFS_MAGIC)?;
            let usable = record.filter(|record| record.backend == backend).zip(root);
            let Some((record, root)) = usable.filter(|_| layers.len() < LAYERS_MAX) else {
                let reason = "the base of a mounted image is gone".to_owned();
                return Err(MountError::State { path: at, reason });
            };
            layers.push(root);
            next = record.base;
        }
        Ok(layers)
    }

    /// Releases the base of an unpinned image. [`Mounter::reconcile`] releases a busy base.
    pub(super) fn release_base(
        &self,
        domain: &str,
        image: &Digest,
        base: Option<Digest>,
        lock: &ImageLock,
    ) -> Result<(), MountError> {
        let base = match base {
            Some(base) => base,
            None => match self.domain_of(domain)?.base_of(image)? {
                Some(base) => base.base,
                None => return Ok(()),
            },
        };
        if !self.holds(domain, &base, image) {
            return Ok(());
        }
        let own = if lock.covers(&base) { None } else { self.run.try_lock_image(&base)? };
        let Some(base_lock) = own.as_ref().or_else(|| lock.covers(&base).then_some(lock)) else {
            return Ok(());
        };
        self.unmark(domain, &base, image)?;
        self.unpin_if_idle(domain, &base, base_lock).map(drop)
    }

    /// Removes the mark of an image that is not, and is not about to be, mounted over a base, whose
    /// lock is held. Says whether it did.
    pub(super) fn remove_unused_mark(
        &self,
        domain: &str,
        image: &Digest,
        base: &Digest,
        lock: &ImageLock,
    ) -> Result<bool, MountError> {
        // Held until the mark is gone: a mount looks for it under this lock.
        let own = if lock.covers(image) { None } else { self.run.try_lock_image(image)? };
        if own.is_none() && !lock.covers(image) {
            return Ok(false);
        }
        let is_unused =
            self.pin_record(domain, image)?.is_none_or(|record| record.base != Some(*base));
        if is_unused {
            self.unmark(domain, base, image)?;
        }
        Ok(is_unused)
    }

    fn unmark(&self, domain: &str, base: &Digest, image: &Digest) -> Result<(), MountError> {
        let users = self.run.image_dir(domain, base).join("users");
        Ok(remove_file(&users.join(user_name(image)))?)
    }
}
