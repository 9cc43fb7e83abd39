//! A lease keeps an image during an export, which may take hours. The domain's lock would make
//! garbage collection and imports wait as long.
//!
//! It lives as long as its process holds the staging directory of the same name. The kernel gives
//! that lock back however the process ends, so no clock has a say.

use crate::disk::{Kind, Lock};
use crate::error::{ErrorKind, Result};
use crate::record::{Root, RootKind, now};
use crate::store::{STAGING, remove_entry};
use crate::{Digest, Domain, DomainLock};

/// Keeps an image and its layers until dropped, or until the process ends.
#[derive(Debug)]
pub struct Lease {
    domain: Domain,
    held: Held,
}

#[derive(Debug)]
#[expect(dead_code, reason = "locks are held, not used")]
enum Held {
    Root(String, Box<dyn Lock>),
    /// In a store that this process cannot change.
    Lock(DomainLock),
}

impl Domain {
    /// Takes a lease; `note` tells people what for.
    ///
    /// # Errors
    /// [`crate::Error::NoSuch`] if the image or a layer does not exist, [`crate::Error::Io`].
    pub fn lease(&self, image: &Digest, layers: Vec<String>, note: &str) -> Result<Lease> {
        let put = || self.put_lease(image, &layers, note);
        let held = match put() {
            Err(error) if error.is_read_only() => Held::Lock(self.lock_shared()?),
            // A full disk needs collections, which the lock would keep waiting.
            Err(error) if error.kind() == ErrorKind::Space && self.store().use_reserve() => put()?,
            other => other?,
        };
        Ok(Lease { domain: self.clone(), held })
    }

    fn put_lease(&self, image: &Digest, layers: &[String], note: &str) -> Result<Held> {
        self.store().check_writable()?;
        let (staging, lock) = self.store().new_staging()?;
        let id = staging.rsplit('/').next().unwrap_or_default().to_owned();
        let root = Root {
            images: vec![*image],
            layers: layers.to_vec(),
            note: note.to_owned(),
            created: now(),
            ..Root::new(RootKind::Lease, &id)
        };
        match self.put_root(&root) {
            Ok(()) => Ok(Held::Root(id, lock)),
            Err(error) => {
                let _ = remove_entry(self.disk(), &staging, Kind::Directory);
                Err(error)
            }
        }
    }

    /// Whether a lease has lost its process, which holds the staging directory of this name.
    pub(crate) fn is_orphaned_lease(&self, id: &str) -> Result<bool> {
        let is_staging = id.len() == 32 && id.bytes().all(|byte| byte.is_ascii_hexdigit());
        Ok(!is_staging || !self.store().is_held(&format!("{STAGING}/{id}"))?)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Held::Root(id, _) = &self.held {
            // gc takes what cannot be removed.
            let _ = self.domain.remove_root(RootKind::Lease, id);
            let _ = self.domain.disk().rmdir(&format!("{STAGING}/{id}"));
        }
    }
}
