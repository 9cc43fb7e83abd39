//! Proof that a delta over a base shows what the image shows, for mounts that are measured.
//!
//! Records of bases are derived, and nobody signs them: whoever can write to the store can put another delta there, with the
//! digest that it is named by. Only the image is what its user asked for. So what goes over the base is computed again from
//! the two, down to the last base, and must be what is mounted.

use std::cell::RefCell;
use std::collections::HashSet;

use cofolio_store::{Digest, Domain, StoredFile};

use super::error::{ErrorKind, MountError};
use super::pin::check_digest;
use super::state::PinRecord;
use cofolio_image::compose::base::prove;

/// What a measured mount has proven. Whoever is given one builds on nothing else.
pub(super) struct Proofs {
    /// The image that is to be mounted.
    image: Digest,
    /// Image, base and delta. What holds of digests does not change, and is computed once for a mount.
    done: RefCell<HashSet<[Digest; 3]>>,
}

impl Proofs {
    /// For a mount of this image; nothing is proven yet.
    pub(super) fn of(image: Digest) -> Self {
        Self { image, done: RefCell::default() }
    }

    /// Proves that `delta` over `base` shows an image.
    ///
    /// # Errors
    /// [`MountError::BaseNotProven`]; those of reading.
    pub(super) fn prove(
        &self,
        domain: &Domain,
        image: &Digest,
        base: &Digest,
        delta: &Digest,
    ) -> Result<(), MountError> {
        let proof = [*image, *base, *delta];
        if self.done.borrow().contains(&proof) {
            return Ok(());
        }
        let open = |digest: &Digest| {
            open_checked(domain, digest).map_err(|error| match error.kind() {
                ErrorKind::Io => error,
                _ => self.not_proven(base, error.to_string()),
            })
        };
        // One that is mounted may have been collected: then there is no file to be altered.
        if domain.has_image(delta)? {
            open(delta)?;
        }
        prove(&open(image)?, (&open(base)?, base), delta)
            .map_err(|reason| self.not_proven(base, reason))?;
        self.done.borrow_mut().insert(proof);
        Ok(())
    }

    /// Proves that an image shows what it is mounted as, if that is over a base.
    ///
    /// # Errors
    /// As [`Proofs::prove`].
    pub(super) fn prove_pin(
        &self,
        domain: &Domain,
        image: &Digest,
        record: &PinRecord,
    ) -> Result<(), MountError> {
        let Some(base) = record.base else { return Ok(()) };
        let unknown = || self.not_proven(&base, format!("image {image} has no delta on record"));
        let delta = record.delta.ok_or_else(unknown)?;
        self.prove(domain, image, &base, &delta)
    }

    fn not_proven(&self, base: &Digest, reason: String) -> MountError {
        MountError::BaseNotProven { image: self.image, base: *base, reason }
    }
}

/// The file itself that was compared with its name: that could lead elsewhere a moment later.
fn open_checked(domain: &Domain, digest: &Digest) -> Result<StoredFile, MountError> {
    let file = domain.open_image(digest)?;
    check_digest(&file, digest, domain.protection().verity)?;
    Ok(file)
}
