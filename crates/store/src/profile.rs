//! What a start of an image reads: `profiles/<digest>`, text whose meaning is not the store's.
//!
//! It goes with its image. A power cut leaves the one before or the new one: what a container may
//! write can depend on it.

use std::io;

use crate::error::{At, Error, Result};
use crate::store::{mkdir_if_missing, parent};
use crate::{Digest, Domain};

/// Directory of the profiles.
pub(crate) const DIRECTORY: &str = "profiles";
/// Longest profile, in bytes.
const SIZE_MAX: u64 = 64 << 20;

impl Domain {
    /// Keeps a profile of an image, in place of the one before.
    ///
    /// # Errors
    /// [`crate::Error::ReadOnly`], [`crate::Error::Io`], [`crate::Error::NoSuch`] without such an
    /// image, [`crate::Error::TooMany`] of more than 64 MiB.
    pub fn put_profile(&self, image: &Digest, profile: &[u8]) -> Result<()> {
        self.store().check_writable()?;
        if profile.len() as u64 > SIZE_MAX {
            return Err(Error::TooMany { what: format!("a profile of {image} above 64 MiB") });
        }
        let _lock = self.lock_names()?;
        // While the names are locked no image goes.
        self.open_image(image)?;
        let path = self.profile_file(image);
        mkdir_if_missing(self.disk(), parent(&path))?;
        self.store().replace_file(&path, profile, true)
    }

    /// The profile of an image, if there is one.
    ///
    /// # Errors
    /// [`crate::Error::Io`], [`crate::Error::Corrupt`] for one that is too large.
    pub fn profile(&self, image: &Digest) -> Result<Option<Vec<u8>>> {
        let Some(file) = self.open_file(self.profile_file(image))? else { return Ok(None) };
        let path = file.path().to_owned();
        match file.read_all(SIZE_MAX) {
            Err(error) if error.kind() == io::ErrorKind::FileTooLarge => {
                Err(Error::corrupt(&path, "it is larger than 64 MiB"))
            }
            other => other.at("read", &path).map(Some),
        }
    }

    /// Removes the profile of an image; says whether there was one.
    ///
    /// # Errors
    /// [`crate::Error::ReadOnly`], [`crate::Error::Io`].
    pub fn remove_profile(&self, image: &Digest) -> Result<bool> {
        self.store().check_writable()?;
        let _lock = self.lock_names()?;
        self.unlink_if_there(&self.profile_file(image))
    }

    /// Images that have a profile, and the file of each, relative to the store.
    ///
    /// # Errors
    /// [`crate::Error::Io`].
    pub fn profiles(&self) -> Result<Vec<(Digest, String)>> {
        let entries = self.entries(DIRECTORY)?.into_iter();
        let images = entries.filter_map(|(entry, _)| Digest::from_lower_hex(entry.as_bytes()));
        Ok(images.map(|image| (image, self.profile_file(&image))).collect())
    }

    fn profile_file(&self, image: &Digest) -> String {
        format!("{}/{DIRECTORY}/{image}", self.directory())
    }
}
