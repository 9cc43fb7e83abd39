//! Importing images: from registries, podman's store, OCI layouts and archives, `docker save`, plain directories.
//!
//! ```text
//!            ┌ layer 0: blob ─ inflate ─ tar ─▶ layer tree ┐
//! manifest ──┤ layer 1: …        │  └ diff-id   └▶ dump     ├─ merge in order ─▶ metadata image ─▶ ref
//!            └ layer n: known: its dump from the store     ┘
//!                                └─ files ─▶ workers: hash, write objects
//! ```
//!
//! Everything goes to the store's staging area, and becomes visible with the commit at the end or not at
//! all. Every digest and size on the way from the index to the layers' content is checked.
//!
//! Files are never inlined into the metadata image, however small: an inlined file would be cached once
//! for each image instead of once. So `cofolio build` of a directory, which does what mkcomposefs does,
//! gives another digest than an import of it.
//!
//! Bounded memory: content is only ever in a few chunks between threads; what grows is the tree (about
//! 120 bytes an entry), of which there are at most the merged one and those of the layers that are being
//! unpacked. A layer that waits for its turn or is being merged is a dump on the disk.

mod acl;
mod blob;
pub(crate) mod digest;
mod error;
#[cfg(fuzzing)]
pub mod fuzz;
mod import;
pub(crate) mod layer;
pub(crate) mod manifest;
mod merge;
mod objects;
mod overlay;
mod pax;
mod place;
mod progress;
mod remote;
mod source;
pub(crate) mod split;
pub(crate) mod tar;
mod tar_split;
mod unpack;

use cofolio_store::Damage;

pub use error::ImportError;
pub(crate) use import::merged;
pub use import::{ImportReport, LayerReport, import};
pub use manifest::Platform;
pub use progress::{LayerStart, Phase, Progress, Silent};
pub use source::Source;
pub(crate) use unpack::objects;

use crate::registry::RegistryOptions;
use crate::trust::Arrival;

/// Bounds for what an image may demand. Reaching one is [`ImportError::Limit`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Uncompressed bytes of all layers together, holes of sparse files included. Default 1 TiB.
    pub uncompressed_bytes: u64,
    /// Uncompressed bytes for each compressed one, once a layer has unpacked to more than
    /// `ratio_from_bytes`. Default 200.
    pub ratio: u64,
    /// From how many uncompressed bytes on `ratio` counts. Default 8 GiB.
    pub ratio_from_bytes: u64,
    /// Entries of all layers together. Default 16 Mi.
    pub entries: u64,
    /// Extended headers (PAX, long names) of one entry, in bytes. Default 1 MiB.
    pub extended_header_bytes: u64,
    /// Size of one index, manifest or config, in bytes. Default 4 MiB.
    pub document_bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            uncompressed_bytes: 1 << 40,
            ratio: 200,
            ratio_from_bytes: 8 << 30,
            entries: 16 << 20,
            extended_header_bytes: 1 << 20,
            document_bytes: manifest::DOCUMENT_MAX,
        }
    }
}

/// How to import.
#[derive(Debug, Clone)]
pub struct ImportOptions {
    /// Name of the ref. Without one: the tag in the source, or what the source calls the image (the
    /// annotation `org.opencontainers.image.ref.name` or `io.containerd.image.name`, or a `docker save`
    /// archive's first tag) if that is a whole name; otherwise the source's file name, with the tag. Of an
    /// image in a registry: its name as it was given, with the tag.
    pub name: Option<String>,
    /// Which image of an index. Default: this machine's platform.
    pub platform: Platform,
    /// Bounds.
    pub limits: Limits,
    /// Threads that hash and write files, and layers that are unpacked at a time (from a registry that is
    /// [`RegistryOptions::jobs`]). 0: as many as the machine has processors, up to 8 and 4.
    pub threads: usize,
    /// How to talk to registries.
    pub registry: RegistryOptions,
    /// Labels of the ref.
    pub labels: std::collections::BTreeMap<String, String>,
    /// What is asked of the image before it gets a name, and the signature that comes with it. Not asked of
    /// a repair, which gives no name.
    pub trust: Arrival,
    /// Bring back only this of an image that is here: layers that are not damaged are not read, nothing
    /// else is written, and no ref is made or changed.
    pub repair: Option<Damage>,
}

impl Default for ImportOptions {
    fn default() -> Self {
        Self {
            name: None,
            platform: Platform::host(),
            limits: Limits::default(),
            threads: 0,
            registry: RegistryOptions::default(),
            labels: std::collections::BTreeMap::new(),
            trust: Arrival::default(),
            repair: None,
        }
    }
}
