//! Signatures of images: `signatures/<image>/<name>`, small files that go with the image.
//!
//! The store knows nothing of keys: readers judge each time. Names are SHA-256 of the content.

use std::io;

use sha2::{Digest as _, Sha256};

use crate::disk::Kind;
use crate::error::{At, Error, Result, is_damage};
use crate::examine::reason;
use crate::fsck::{Finding, FindingKind, FsckReport};
use crate::store::{TEMPORARY, mkdir_if_missing};
use crate::{Digest, Domain, FileKind, FileName};

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
    /// [`Error::NoSuch`], [`Error::TooMany`] beyond [`SIGNATURES_MAX`] or [`SIGNATURE_SIZE_MAX`],
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
            return Err(Error::NoSuch(FileName::content(FileKind::Image, image)));
        }
        let parent = format!("{}/{DIRECTORY}", self.directory());
        let directory = format!("{parent}/{image}");
        let path = format!("{directory}/{}", Digest(Sha256::digest(signature).into()));
        let is_new = match self.read_signature(&path) {
            Ok(Some(_)) => return Ok(()),
            Ok(None) => true,
            // One that is damaged is written again.
            Err(Error::Corrupt { .. }) => false,
            Err(error) => return Err(error),
        };
        if is_new && self.signature_files(image)?.len() >= SIGNATURES_MAX {
            let what = format!("image {image} has {SIGNATURES_MAX} signatures already");
            return Err(Error::TooMany { what });
        }
        mkdir_if_missing(self.disk(), &parent)?;
        mkdir_if_missing(self.disk(), &directory)?;
        self.store().replace_file(&path, signature, true)?;
        self.disk().sync_dir(&parent).at("sync", &parent)?;
        self.disk().sync_dir(self.directory()).at("sync", self.directory())
    }

    /// All signatures of an image, in no particular order.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if one does not match its name, [`Error::Io`].
    pub fn signatures(&self, image: &Digest) -> Result<Vec<Vec<u8>>> {
        let mut signatures = Vec::new();
        for name in self.signature_files(image)? {
            let path = format!("{}/{DIRECTORY}/{image}/{name}", self.directory());
            // One that was removed since it was listed is simply not there.
            signatures.extend(self.read_signature(&path)?);
        }
        Ok(signatures)
    }

    /// A signature that is what its name says; `None` if there is none.
    fn read_signature(&self, path: &str) -> Result<Option<Vec<u8>>> {
        let Some(file) = self.open_file(path.to_owned())? else { return Ok(None) };
        let content = match file.read_all(SIGNATURE_SIZE_MAX as u64) {
            Err(error) if error.kind() == io::ErrorKind::FileTooLarge => {
                return Err(Error::corrupt(path, "it is larger than 128 KiB"));
            }
            other => other.at("read", path)?,
        };
        let digest = Digest(Sha256::digest(&content).into()).to_string();
        match path.ends_with(&digest) {
            true => Ok(Some(content)),
            false => Err(Error::corrupt(path, "its content has another digest than its name")),
        }
    }

    /// Finds signatures that do not match their names, whose image is missing, or that are none.
    pub(crate) fn fsck_signatures(&self, report: &mut FsckReport) -> Result<()> {
        let parent = format!("{}/{DIRECTORY}", self.directory());
        for (entry, kind) in self.entries(DIRECTORY)? {
            let directory = format!("{parent}/{entry}");
            let image = Digest::from_lower_hex(entry.as_bytes());
            let Some(image) = image.filter(|_| kind == Kind::Directory) else {
                report.add(Finding::new(FindingKind::UnexpectedEntry, directory, ""));
                continue;
            };
            if !self.has_image(&image)? {
                let what = "its image is not there";
                report.add(Finding::new(FindingKind::SignatureOrphaned, directory, what));
                continue;
            }
            for (name, kind) in self.disk().list(&directory).at("list", &directory)? {
                let path = format!("{directory}/{name}");
                let is_ours =
                    kind == Kind::File && Digest::from_lower_hex(name.as_bytes()).is_some();
                // One that is being written, or that gc takes.
                if name.starts_with(TEMPORARY) {
                    continue;
                }
                if !is_ours {
                    report.add(Finding::new(FindingKind::UnexpectedEntry, path, ""));
                    continue;
                }
                report.signatures += 1;
                match self.read_signature(&path) {
                    Ok(_) => {}
                    Err(error) if is_damage(&error) => {
                        let why = reason(&error);
                        let finding = Finding::new(FindingKind::SignatureAltered, path, why);
                        report.add(finding.about(&image));
                    }
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(())
    }

    fn signature_files(&self, image: &Digest) -> Result<Vec<String>> {
        let directory = format!("{DIRECTORY}/{image}");
        let ours = self.entries(&directory)?.into_iter().filter(|(name, kind)| {
            *kind == Kind::File && Digest::from_lower_hex(name.as_bytes()).is_some()
        });
        Ok(ours.map(|(name, _)| name).collect())
    }
}
