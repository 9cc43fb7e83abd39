//! Imports: from registries, other engines' stores, layouts, archives and plain directories.
//!
//! ```text
//!            ┌ layer 0: blob ─ inflate ─ tar ─▶ layer tree ┐
//! manifest ──┤ layer 1: …        │  └ diff-id   └▶ dump     ├─ merge in order ─▶ metadata image ─▶ ref
//!            └ layer n: known: its dump from the store     ┘
//!                                └─ files ─▶ workers: hash, write objects
//! ```
//!
//! Everything goes to the store's staging area, and becomes visible with the final commit or not at
//! all. Every digest and size from the index to the layers' content is checked.
//!
//! No file is inlined into the metadata image: it would be cached once for each image. So `cofolio
//! build`, which inlines as mkcomposefs does, gives a directory another digest than an import.
//!
//! Memory is bounded but for trees (about 120 bytes an entry): the merged one and those of layers
//! being unpacked. A layer that waits or is being merged is a dump on disk.

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
    /// Name of the ref. Default: the tag in the source, or a whole name that the source gives the
    /// image (an annotation, or the first tag of `docker save`), else the file name with the tag;
    /// in a registry the name as given, with the tag.
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
    /// Demands on an image before it gets a name, and its signature. A repair gives no name.
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
