//! The EROFS format, composefs metadata images and composefs dump text, without I/O of its own.
//!
//! ```text
//!   dump text  --dump::parse-->            --write::write-->  metadata image
//!   dump text  <--dump::write--  tree::Tree  <--to_tree--  read::Image  <--open--  any EROFS image
//! ```
//!
//! - [`tree`]: a filesystem tree in a compact arena; what importers build and images are made of.
//! - [`dump`]: the text form of composefs, both ways, streaming.
//! - [`write`](mod@write): a tree to its image, byte-identical with mkcomposefs 1.0.8, streaming;
//!   or to one that carries its data, behind it or on devices, plain or LZ4, for mounts without an
//!   overlay.
//! - [`read`]: images, checked at every step; also plain ones of `mkfs.erofs`, uncompressed.
//! - [`format`](mod@format): the structures on disk.
//!
//! Tests compare with other programs where they are: `COFOLIO_MKCOMPOSEFS`, `COFOLIO_FSCK_EROFS`
//! and `COFOLIO_MKFS_EROFS` may name them (a command prefix each), `COFOLIO_ORACLES` the folder
//! with composefs's own test dumps. `COFOLIO_TREES`, `COFOLIO_DATA_TREES`, `COFOLIO_MUTATIONS`,
//! `COFOLIO_MOUNTS` raise the number of rounds for a soak run, `COFOLIO_SEED` says with which
//! random tree to begin.

pub mod dump;
pub mod format;
pub mod read;
pub mod tree;
pub mod write;
