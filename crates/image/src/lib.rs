//! Images, wherever they run: sources, layers, composing, packs, registries, signatures, exports.
//!
//! The rooms form floors. A room uses only rooms on the floors below its own:
//!
//! ```text
//! export                     images out: layouts, archives, registries, EROFS files
//! import                     images in
//! source, pack,              where images come from; images that carry their data;
//! diff, sharing              comparing two; what many share
//! compose, registry          layers made one tree, bases and deltas; the client for registries
//! reference, trust, layer    names in registries; signatures and policy; one layer
//! digest, tree_scan, error,  digests of blobs; reading a directory tree; errors;
//! limits, stored, threads,   limits; files of the store; threads that may be refused;
//! files                      files of keys and settings
//! ```

pub mod compose;
pub mod diff;
pub mod digest;
pub mod error;
pub mod export;
pub mod files;
pub mod import;
mod layer;
pub mod limits;
pub mod pack;
pub mod reference;
pub mod registry;
pub mod sharing;
pub mod source;
mod stored;
pub mod threads;
pub mod tree_scan;
pub mod trust;
