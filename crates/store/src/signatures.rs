//! What others say of an image: `signatures/<image>/<name>`, small files that go with the image.
//!
//! The store knows nothing of keys. It keeps what it is given as long as it keeps the image; whoever reads
//! it again judges it again. The name is the SHA-256 of the content, so that what is there already is not
//! there twice.

use sha2::{Digest as _, Sha256};

use crate::disk::Kind;
use crate::domain::is_absent;
use crate::error::{At, Error, Result};
use crate::store::{TEMPORARY, mkdir_if_missing, remove_entry};
use crate::{Digest, Domain};

/// Compatible: `signatures/` is kept. Who does not know it leaves those of images that are gone.
const FEATURE: &str = "signatures";
/// Directory of the signatures, with a directory for each image that has some.
pub(crate) const DIRECTORY: &str = "signatures";
/// Largest signature that is kept or read, in bytes.
pub const SIGNATURE_SIZE_MAX: usize = 128 << 10;
/// Most signatures of one image.
pub const SIGNATURES_MAX: usize = 256;

impl Domain {
    /// Keeps a signature of an image, which must be here. Durable on return.
    ///
    /// # Errors
    /// [`Error::NoSuchImage`], [`Error::TooMany`] beyond [`SIGNATURES_MAX`] or [`SIGNATURE_SIZE_MAX`],
    /// [`Error::ReadOnly`], [`Error::Io`].
    pub fn add_signature(&self, image: &Digest, signature: &[u8]) -> Result<()> {
        self.store().check_writable()?;
        if signature.len() > SIGNATURE_SIZE_MAX {
            let what = format!("signature of image {image}: more than {SIGNATURE_SIZE_MAX} bytes");
            return Err(Error::TooMany { what });
        }
        // Until it is written the image stays.
        let _lock = self.lock_shared()?;
        if !self.has_image(image)? {
            return Err(Error::NoSuchImage(*image));
        }
        let parent = format!("{}/{DIRECTORY}", self.base());
        let directory = format!("{parent}/{image}");
        let path = format!("{directory}/{}", Digest(Sha256::digest(signature).into()));
        if self.file_size(&path)?.is_some() {
            return Ok(());
        }
        if self.signature_files(image)?.len() >= SIGNATURES_MAX {
            let what = format!("image {image} has {SIGNATURES_MAX} signatures already");
            return Err(Error::TooMany { what });
        }
        self.store().enable_compatible(FEATURE)?;
        mkdir_if_missing(self.disk(), &parent)?;
        mkdir_if_missing(self.disk(), &directory)?;
        self.store().replace_file(&directory, &path, signature, true)?;
        self.disk().sync_dir(&parent).at("sync", &parent)?;
        self.disk().sync_dir(self.base()).at("sync", self.base())
    }

    /// All signatures of an image, in no particular order; none if there are none.
    ///
    /// # Errors
    /// [`Error::Corrupt`] for one that is not what its name says, [`Error::Io`].
    pub fn signatures(&self, image: &Digest) -> Result<Vec<Vec<u8>>> {
        let mut signatures = Vec::new();
        for name in self.signature_files(image)? {
            let path = format!("{}/{DIRECTORY}/{image}/{name}", self.base());
            // One that was removed since it was listed is simply not there.
            let Some(file) = self.open_file(path.clone())? else { continue };
            let content = file.read_all(SIGNATURE_SIZE_MAX as u64).at("read", &path)?;
            if Digest(Sha256::digest(&content).into()).to_string() != name {
                return Err(Error::corrupt(path, "its content has another digest than its name"));
            }
            signatures.push(content);
        }
        Ok(signatures)
    }

    fn signature_files(&self, image: &Digest) -> Result<Vec<String>> {
        let directory = format!("{}/{DIRECTORY}/{image}", self.base());
        let entries = match self.disk().list(&directory) {
            Err(error) if is_absent(&error) => return Ok(Vec::new()),
            other => other.at("list", &directory)?,
        };
        let ours = entries.into_iter().filter(|(name, kind)| {
            *kind == Kind::File && Digest::from_lower_hex(name.as_bytes()).is_some()
        });
        Ok(ours.map(|(name, _)| name).collect())
    }

    /// Removes the signatures of images that are gone, and what was left of writing some.
    pub(crate) fn sweep_signatures(&self) -> Result<()> {
        let parent = format!("{}/{DIRECTORY}", self.base());
        let entries = match self.disk().list(&parent) {
            Err(error) if is_absent(&error) => return Ok(()),
            other => other.at("list", &parent)?,
        };
        for (entry, kind) in entries {
            let Some(image) = Digest::from_lower_hex(entry.as_bytes()) else { continue };
            let directory = format!("{parent}/{entry}");
            if !self.has_image(&image)? {
                remove_entry(self.disk(), &directory, kind)?;
                continue;
            }
            for (name, kind) in self.disk().list(&directory).at("list", &directory)? {
                if name.starts_with(TEMPORARY) && kind == Kind::File {
                    remove_entry(self.disk(), &format!("{directory}/{name}"), kind)?;
                }
            }
        }
        Ok(())
    }
}
