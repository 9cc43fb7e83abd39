//! Exports: OCI layouts and archives, archives for `docker load`, registries, EROFS files.
//!
//! ```text
//! layer: split + objects ─▶ archive ─┬▶ diff-id, compared with the config
//!        (each object hashed)        └▶ chunks ─▶ threads: compress ─▶ blob ─▶ target
//! config: byte for byte as it came ─▶ blob       manifest: new ─▶ blob ─▶ name
//! ```
//!
//! The config is the original and names the layers by their diff-ids, so the image keeps its id.
//! Blobs and manifest can differ from the registry's, because compression does. An image appears at
//! the destination complete and checked.

mod archive;
mod aside;
mod assemble;
mod compress;
mod error;
mod filesystem;
mod image;
mod layout;
mod push;
mod tar;
mod target;

use std::path::{Path, PathBuf};

use cofolio_store::task::{Event, Task};
use cofolio_store::{Digest, Domain, Ref};
use serde::Serialize;
use serde_json::json;

pub use aside::OutputFile;
pub use compress::Compression;
pub use error::ExportError;
pub use filesystem::{FilesystemOptions, FilesystemReport, export_filesystem};
pub use push::{How, PushOptions, PushReport, PushedLayer, push};

use crate::digest::{BlobDigest, DiffId};
use crate::source::manifest::{OCI_CONFIG, OCI_MANIFEST};
use crate::source::{split_at, split_tag};
use archive::{Archive, Style};
use compress::{BlobWriter, Compressors};
use image::Image;
use layout::Layout;
use target::{BlobKind, Descriptor, Finished, Target};

/// Threads that compress, at most.
const THREADS_MAX: usize = 16;

/// Where an image goes to.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(missing_docs, reason = "the form of a variant says what its fields are")]
pub enum Destination {
    /// An OCI image layout: `oci:DIR[:TAG]`. An existing one gets the image in addition.
    Layout { path: PathBuf, tag: Option<String> },
    /// An OCI image layout in a tar archive: `oci-archive:FILE[:TAG]`; `-` is standard output.
    Archive { path: PathBuf, tag: Option<String> },
    /// What `docker load` takes: `docker-archive:FILE[:NAME:TAG]`. Its layers are not compressed.
    DockerArchive { path: PathBuf, tag: Option<String> },
}

impl Destination {
    /// The directory or file; `-` for standard output.
    pub fn path(&self) -> &Path {
        let (Self::Layout { path, .. }
        | Self::Archive { path, .. }
        | Self::DockerArchive { path, .. }) = self;
        path
    }

    /// Understands `oci:DIR[:TAG]`, `oci-archive:FILE[:TAG]` and `docker-archive:FILE[:TAG]`.
    ///
    /// Paths and tags may hold colons: the longest existing path is taken, else the path ends at
    /// the first colon. Any other form is an [`ExportError::Destination`].
    pub fn parse(text: &str) -> Result<Self, ExportError> {
        let (form, rest) = text.split_once(':').unwrap_or(("", text));
        let colon = rest.find(':').unwrap_or(rest.len());
        let (path, tag) = split_tag(rest).unwrap_or_else(|| split_at(rest, colon));
        match form {
            _ if path.as_os_str().is_empty() => {}
            "oci" => return Ok(Self::Layout { path, tag }),
            "oci-archive" => return Ok(Self::Archive { path, tag }),
            "docker-archive" => return Ok(Self::DockerArchive { path, tag }),
            "docker" => {
                let what = format!("{text:?} is in a registry, and that is what a push is for");
                return Err(ExportError::Destination { what });
            }
            _ => {}
        }
        Err(ExportError::Destination {
            what: format!(
                "{text:?}: not a destination (oci:DIR[:TAG], oci-archive:FILE[:TAG], \
                 docker-archive:FILE[:TAG], erofs:FILE)"
            ),
        })
    }
}

/// How to export.
#[derive(Debug, Clone, Default)]
pub struct ExportOptions {
    /// How layers are compressed; for [`Destination::DockerArchive`] without effect.
    pub compression: Compression,
    /// Threads that compress; 0: one per processor. The result does not depend on it.
    pub threads: usize,
    /// Replace an archive that exists.
    pub replace: bool,
}

/// What an export wrote.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ExportReport {
    /// fs-verity digest of the image.
    pub image: Digest,
    /// What it is called at the destination.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Digest of the manifest that was written.
    pub manifest: BlobDigest,
    /// Digest of the config: the image id of other engines.
    pub config: BlobDigest,
    /// The layers, lowest first.
    pub layers: Vec<ExportedLayer>,
}

/// One layer of what was written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ExportedLayer {
    /// Digest of the blob.
    pub digest: BlobDigest,
    /// Size of the blob in bytes.
    pub size: u64,
    /// Digest of the archive.
    pub diff_id: DiffId,
    /// Size of the archive in bytes.
    pub uncompressed: u64,
}

/// An image of the store to export.
#[derive(Debug, Clone, Copy)]
pub struct Exported<'a> {
    /// The metadata image.
    pub image: &'a Digest,
    /// Its ref, which holds config and layers. Without layers the image becomes one layer.
    pub record: Option<&'a Ref>,
    /// What to call it if the destination does not say.
    pub name: Option<&'a str>,
}

/// Exports an image, which gc keeps meanwhile. After an error the destination is as before, but after
/// [`ExportError::NotDurable`] complete.
pub fn export(
    domain: &Domain,
    exported: Exported<'_>,
    destination: &Destination,
    options: &ExportOptions,
    task: &Task,
) -> Result<ExportReport, ExportError> {
    let image = Image::of(domain, exported);
    let _lease = domain.lease(image.digest, image.chain_ids(), "export")?;
    image.check_splits(&image.layers)?;
    let mut compression = options.compression;
    let (target, tag): (Box<dyn Target>, _) = match destination {
        Destination::Layout { path, tag } => (Box::new(Layout::create(path)?), tag),
        Destination::Archive { path, tag } => {
            (Box::new(Archive::create(path, Style::Oci, options.replace)?), tag)
        }
        Destination::DockerArchive { path, tag } => {
            compression = Compression::None;
            (Box::new(Archive::create(path, Style::Docker, options.replace)?), tag)
        }
    };
    let name = tag.as_deref().or(exported.name);
    let how = (compression, threads(options.threads));
    write(&image, target, name, how, task)
}

fn threads(asked: usize) -> usize {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    if asked == 0 { processors } else { asked }.clamp(1, THREADS_MAX)
}

fn write(
    image: &Image<'_>,
    mut target: Box<dyn Target>,
    name: Option<&str>,
    (compression, threads): (Compression, usize),
    task: &Task,
) -> Result<ExportReport, ExportError> {
    let layers = image.layers.len();
    let blobs = std::thread::scope(|scope| {
        let compressors = Compressors::start(scope, compression, threads, 1)?;
        let mut blobs: Vec<ExportedLayer> = Vec::new();
        for (number, layer) in image.layers.iter().enumerate() {
            let before: u64 = blobs.iter().map(|layer| layer.uncompressed).sum();
            target.begin(BlobKind::Layer)?;
            let mut sink = |bytes: &[u8]| target.write(bytes);
            let mut progress = |bytes| {
                let (items, items_total) = (number as u64 + 1, Some(layers as u64));
                let bytes = before + bytes;
                task.tell(Event::Done { bytes, bytes_total: None, items, items_total });
            };
            let done = image.write_layer(
                *layer,
                BlobWriter::new(&compressors, &mut sink),
                &task.cancel,
                &mut progress,
            )?;
            target.end(&done.digest, done.size)?;
            blobs.push(done);
        }
        Ok::<_, ExportError>(blobs)
    })?;
    let config = image.config(blobs.iter().map(|layer| &layer.diff_id));
    let config_digest = target.put(BlobKind::Config, config.as_bytes())?;
    let descriptors = blobs.iter().map(|layer| Descriptor {
        media_type: compression.media_type().to_owned(),
        digest: layer.digest.clone(),
        size: layer.size,
    });
    let manifest = manifest(&config_digest, config.len(), &descriptors.collect::<Vec<_>>());
    let manifest_digest = target.put(BlobKind::Manifest, &manifest)?;
    let finished = Finished {
        manifest: Descriptor {
            media_type: OCI_MANIFEST.to_owned(),
            digest: manifest_digest.clone(),
            size: manifest.len() as u64,
        },
        config: config_digest,
        layers: blobs.iter().map(|layer| layer.digest.clone()).collect(),
        name: name.map(str::to_owned),
    };
    target.publish(&finished)?;
    Ok(ExportReport {
        image: *image.digest,
        name: finished.name,
        manifest: manifest_digest,
        config: finished.config,
        layers: blobs,
    })
}

/// A minimal manifest.
fn manifest(config: &BlobDigest, config_size: usize, layers: &[Descriptor]) -> Vec<u8> {
    let config = Descriptor {
        media_type: OCI_CONFIG.to_owned(),
        digest: config.clone(),
        size: config_size as u64,
    };
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST,
        "config": config,
        "layers": layers,
    });
    manifest.to_string().into_bytes()
}
