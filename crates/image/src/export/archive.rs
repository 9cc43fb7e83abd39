//! An image in one tar archive: an OCI layout, or what `docker save` writes.
//!
//! A member's header precedes its content, but its name and size are known after it: a gap is left
//! and filled later. So the archive is written to a file first, even for a pipe.

use std::io::{self, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

use serde_json::json;

use super::aside::OutputFile;
use super::error::{ExportError, io_error};
use super::layout::{OCI_LAYOUT, index};
use super::tar::header;
use super::target::{BlobKind, Finished, Target};
use crate::digest::BlobDigest;
use crate::layer::tar::{BLOCK, pad};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Style {
    Oci,
    Docker,
}

pub(crate) struct Archive {
    style: Style,
    output: OutputFile,
    /// Where the member at hand begins, and what it is.
    member: u64,
    kind: BlobKind,
    at: u64,
    members: Vec<String>,
}

impl Archive {
    pub(crate) fn create(path: &Path, style: Style, replace: bool) -> Result<Self, ExportError> {
        let output = OutputFile::create(path, replace)?;
        Ok(Self { style, output, member: 0, kind: BlobKind::Layer, at: 0, members: Vec::new() })
    }

    fn failed(&self, error: io::Error) -> ExportError {
        io_error(self.output.aside())(error)
    }

    fn name(&self, kind: BlobKind, digest: &BlobDigest) -> String {
        match (self.style, kind) {
            (Style::Oci, _) => digest.layout_path(),
            (Style::Docker, BlobKind::Layer) => format!("{}.tar", digest.hex()),
            (Style::Docker, _) => format!("{}.json", digest.hex()),
        }
    }

    /// Whether archives of this style have no such blob.
    fn leaves_out(&self, kind: BlobKind) -> bool {
        self.style == Style::Docker && kind == BlobKind::Manifest
    }

    fn member(&mut self, name: &str, content: &[u8]) -> Result<(), ExportError> {
        self.begin(BlobKind::Config)?;
        self.write(content)?;
        self.close(name.to_owned(), content.len() as u64)
    }

    fn close(&mut self, name: String, size: u64) -> Result<(), ExportError> {
        if self.members.contains(&name) {
            // An image can have a layer twice.
            self.at = self.member;
        } else {
            let head = header(&name, size);
            let written = self.output.file().write_all_at(&head, self.member);
            written.map_err(|error| self.failed(error))?;
            self.write(&[0; BLOCK][..pad(size)])?;
            self.members.push(name);
        }
        let mut file = self.output.file();
        let cut = file.set_len(self.at).and_then(|()| file.seek(SeekFrom::Start(self.at)));
        cut.map_err(|error| self.failed(error)).map(drop)
    }
}

impl Target for Archive {
    fn begin(&mut self, kind: BlobKind) -> Result<(), ExportError> {
        (self.member, self.kind) = (self.at, kind);
        if self.leaves_out(kind) {
            return Ok(());
        }
        self.write(&[0; BLOCK])
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), ExportError> {
        if self.leaves_out(self.kind) {
            return Ok(());
        }
        self.at += bytes.len() as u64;
        self.output.file().write_all(bytes).map_err(|error| self.failed(error))
    }

    fn end(&mut self, digest: &BlobDigest, size: u64) -> Result<(), ExportError> {
        if self.leaves_out(self.kind) {
            return Ok(());
        }
        self.close(self.name(self.kind, digest), size)
    }

    fn publish(mut self: Box<Self>, image: &Finished) -> Result<(), ExportError> {
        match self.style {
            Style::Oci => {
                self.member("oci-layout", OCI_LAYOUT)?;
                self.member("index.json", &index(None, image))?;
            }
            Style::Docker => {
                let layers: Vec<_> =
                    image.layers.iter().map(|layer| self.name(BlobKind::Layer, layer)).collect();
                let tags = image.name.as_ref().map(|name| [tagged(name)]);
                let config = self.name(BlobKind::Config, &image.config);
                let list = json!([{"Config": config, "RepoTags": tags, "Layers": layers}]);
                self.member("manifest.json", list.to_string().as_bytes())?;
            }
        }
        self.write(&[0; 2 * BLOCK])?;
        self.output.publish()
    }
}

/// `docker load` takes no name without a tag.
fn tagged(name: &str) -> String {
    let last = name.rsplit('/').next().unwrap_or(name);
    if last.contains(':') { name.to_owned() } else { format!("{name}:latest") }
}
