//! Forms of sources, and finding out what a path holds.

use std::io;
use std::path::{Path, PathBuf};

use super::members::Members;
use super::{Source, io_error};
use crate::error::ImportError;
use crate::reference::Reference;
use crate::source::engine::{containerd, containers_storage};

impl Source {
    /// Parses a form with its prefix, or finds out what `PATH[:TAG]` holds.
    ///
    /// Both paths and tags may hold colons: the longest path that exists counts.
    ///
    /// # Errors
    /// [`ImportError::Source`] for a missing path or unknown form; [`ImportError::Registry`] and
    /// [`ImportError::Engine`] for invalid names; [`ImportError::Io`].
    pub fn parse(text: &str) -> Result<Self, ImportError> {
        let Some((form, rest)) = text.split_once(':') else { return Self::detect(text) };
        Ok(match form {
            "dir" => Self::Directory { path: rest.into() },
            "docker" if rest.starts_with("//") => Self::Registry(Reference::parse(&rest[2..])?),
            "containers-storage" => {
                Self::ContainersStorage(containers_storage::Reference::parse(rest)?)
            }
            "containerd" => Self::Containerd(containerd::Reference::parse(rest)?),
            "oci" | "oci-archive" | "docker-archive" => {
                let (path, tag) = split_tag(rest).unwrap_or_else(|| split_at(rest, rest.len()));
                match form {
                    "oci" => Self::Layout { path, tag },
                    "oci-archive" => Self::Archive { path, tag },
                    _ => Self::DockerSave { path, tag },
                }
            }
            _ => Self::detect(text)?,
        })
    }

    fn detect(text: &str) -> Result<Self, ImportError> {
        // If nothing exists, the error names all of it.
        let (path, tag) = split_tag(text).unwrap_or_else(|| split_at(text, text.len()));
        let meta = std::fs::metadata(&path).map_err(|e| match e.kind() {
            io::ErrorKind::NotFound => ImportError::Source {
                what: format!(
                    "{text:?}: no such file or directory (forms: PATH, dir:PATH, oci:PATH[:TAG], \
                     oci-archive:PATH[:TAG], docker-archive:PATH[:TAG], docker://NAME[:TAG], \
                     containers-storage:NAME, containerd:NAME)"
                ),
            },
            _ => io_error(&path, e),
        })?;
        if meta.is_dir() {
            if path.join("oci-layout").is_file() || path.join("index.json").is_file() {
                return Ok(Self::Layout { path, tag });
            }
            if tag.is_some() {
                let what = format!("{}: a plain directory has no tags", path.display());
                return Err(ImportError::Source { what });
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
                "neither an OCI layout (index.json) in a tar archive nor what `docker save` writes \
                 (manifest.json)",
            ))
        }
    }
}

/// Splits `PATH[:TAG]` so that the path is the longest one that exists; `None` if none does.
pub(crate) fn split_tag(text: &str) -> Option<(PathBuf, Option<String>)> {
    let colons = text.rmatch_indices(':').map(|(at, _)| at).filter(|&at| at > 0);
    let mut ends = [text.len()].into_iter().chain(colons);
    let end = ends.find(|&end| Path::new(&text[..end]).symlink_metadata().is_ok())?;
    Some(split_at(text, end))
}

/// The path before a colon, and the tag behind it.
pub(crate) fn split_at(text: &str, colon: usize) -> (PathBuf, Option<String>) {
    let tag = text.get(colon + 1..).filter(|tag| !tag.is_empty());
    (text[..colon].into(), tag.map(str::to_owned))
}
