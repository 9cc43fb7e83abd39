//! Imports: from registries, other engines' stores, layouts, archives and plain directories.
//!
//! ```text
//!            ┌ layer 0: blob ─ inflate ─ tar ─▶ layer tree ┐
//! manifest ──┤ layer 1: …        │  └ diff-id   └▶ dump     ├─ merge in order ─▶ metadata image ─▶ ref
//!            └ layer n: known: its dump from the store     ┘
//!                                └─ files ─▶ workers: hash, write objects
//! ```
//!
//! Everything goes to the store's staging area, and becomes visible with the commit at the end or
//! not at all. Every digest and size on the way from the index to the layers' content is checked.
//!
//! Files are never inlined into the metadata image, however small: an inlined file would be cached
//! once for each image instead of once. So `cofolio build` of a directory, which does what
//! mkcomposefs does, gives another digest than an import of it.
//!
//! Memory is bounded: content is in a few chunks between threads. What grows are trees (about 120
//! bytes an entry): the merged one and those of layers that are being unpacked. A layer that waits
//! or is being merged is a dump on the disk.

#[cfg(fuzzing)]
#[path = "../../../../fuzz/inside/import.rs"]
pub mod fuzz;
#[expect(clippy::module_inception, reason = "the import itself; the folder holds its options too")]
mod import;

use cofolio_store::Damage;

pub use import::{ImportReport, LayerReport, check_name, import};

use crate::limits::Limits;
use crate::registry::RegistryOptions;
use crate::source::Platform;
use crate::trust::Arrival;

/// How to import.
#[derive(Debug, Clone)]
pub struct ImportOptions {
    /// Name of the ref. Without one: the tag in the source, or what the source calls the image (the
    /// annotation `org.opencontainers.image.ref.name` or `io.containerd.image.name`, or a `docker
    /// save` archive's first tag) if that is a whole name; otherwise the source's file name, with
    /// the tag. Of an image in a registry: its name as it was given, with the tag.
    pub name: Option<String>,
    /// Which image of an index. Default: this machine's platform.
    pub platform: Platform,
    /// Bounds.
    pub limits: Limits,
    /// Threads that hash and write files, and layers that are unpacked at a time (from a registry
    /// that is [`RegistryOptions::jobs`]). 0: as many as the machine has processors, up to 8 and 4.
    pub threads: usize,
    /// How to talk to registries.
    pub registry: RegistryOptions,
    /// Labels of the ref.
    pub labels: std::collections::BTreeMap<String, String>,
    /// What is asked of the image before it gets a name, and the signature that comes with it. Not
    /// asked of a repair, which gives no name.
    pub trust: Arrival,
    /// Bring back only this of an image that is here: layers that are not damaged are not read,
    /// nothing else is written, and no ref is made or changed.
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
