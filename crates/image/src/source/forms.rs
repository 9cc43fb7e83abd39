//! The forms in which a source is given, and finding out what lies at a path.

use std::io;
use std::path::{Path, PathBuf};

use super::members::Members;
use super::{Source, io_error};
use crate::error::ImportError;
use crate::reference::Reference;
use crate::source::engine::{containerd, containers_storage};

impl Source {
    /// Understands a form with its prefix, or finds out what lies at `PATH[:TAG]`.
    ///
    /// Both paths and tags may hold colons: of all ways to split, the one with the longest path that
    /// exists is taken.
    ///
    /// # Errors
    /// [`ImportError::Source`] if nothing is there or it is none of the forms; [`ImportError::Registry`] for
    /// a name that cannot be, [`ImportError::Engine`] as well; [`ImportError::Io`].
    pub fn parse(text: &str) -> Result<Self, ImportError> {
        if let Some(path) = text.strip_prefix("dir:") {
            return Ok(Self::Directory { path: path.into() });
        }
        if let Some(name) = text.strip_prefix("docker://") {
            return Ok(Self::Registry(Reference::parse(name)?));
        }
        if let Some(name) = text.strip_prefix("containers-storage:") {
            return Ok(Self::ContainersStorage(containers_storage::Reference::parse(name)?));
        }
        if let Some(name) = text.strip_prefix("containerd:") {
            return Ok(Self::Containerd(containerd::Reference::parse(name)?));
        }
        if let Some(rest) = text.strip_prefix("oci:") {
            let (path, tag) = split_tag(rest);
            return Ok(Self::Layout { path, tag });
        }
        if let Some(rest) = text.strip_prefix("oci-archive:") {
            let (path, tag) = split_tag(rest);
            return Ok(Self::Archive { path, tag });
        }
        if let Some(rest) = text.strip_prefix("docker-archive:") {
            let (path, tag) = split_tag(rest);
            return Ok(Self::DockerSave { path, tag });
        }
        Self::detect(text)
    }

    fn detect(text: &str) -> Result<Self, ImportError> {
        let (path, tag) = split_tag(text);
        let meta = std::fs::metadata(&path).map_err(|e| {
            if e.kind() == io::ErrorKind::NotFound {
                ImportError::Source {
                    what: format!(
                        "{text:?}: no such file or directory (forms: PATH, dir:PATH, oci:PATH[:TAG], \
                         oci-archive:PATH[:TAG], docker-archive:PATH[:TAG], docker://NAME[:TAG], containers-storage:NAME, \
                         containerd:NAME)"
                    ),
                }
            } else {
                io_error(&path, e)
            }
        })?;
        if meta.is_dir() {
            if path.join("oci-layout").is_file() || path.join("index.json").is_file() {
                return Ok(Self::Layout { path, tag });
            }
            if tag.is_some() {
                return Err(ImportError::Source {
                    what: format!("{}: a plain directory has no tags", path.display()),
                });
            }
            return Ok(Self::Directory { path });
        }
        let archive = Members::open(&path)?;
        if archive.find("index.json").is_some() {
            Ok(Self::Archive { path, tag })
        } else if archive.find("manifest.json").is_some() {
            Ok(Self::DockerSave { path, tag })
        } else {
            Err(archive.lacks(
                "a tar archive, but neither an OCI layout (index.json) nor what `docker save` writes \
                 (manifest.json)",
            ))
        }
    }
}

/// Splits `PATH[:TAG]` at the colon that leaves the longest existing path.
fn split_tag(text: &str) -> (PathBuf, Option<String>) {
    let mut end = text.len();
    loop {
        if Path::new(&text[..end]).symlink_metadata().is_ok() {
            let tag = text.get(end + 1..).filter(|t| !t.is_empty()).map(str::to_owned);
            return (text[..end].into(), tag);
        }
        match text[..end].rfind(':') {
            Some(colon) if colon > 0 => end = colon,
            // Nothing exists: what the error message should name.
            _ => return (text.into(), None),
        }
    }
}
