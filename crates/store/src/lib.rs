//! The content-addressed store: objects, images, refs, garbage collection, fsck, crash safety.
//!
//! The layout on disk, and what must hold at every moment, is drawn in `docs/STORE-FORMAT.md`.
//!
//! ```no_run
//! use std::path::Path;
//! use cofolio_store::{ImportOptions, InitOptions, Publish, Ref, Store};
//! # fn main() -> Result<(), cofolio_store::Error> {
//! let store = Store::open_or_init(Path::new("/var/lib/cofolio"), &InitOptions::default())?;
//! let domain = store.domain("default")?;
//! let staging = domain.begin_import(ImportOptions::default())?;
//! let object = staging.put_object(b"content")?;
//! let mut image = staging.image_writer()?;
//! // … the EROFS writer writes into `image` …
//! let image = image.finish()?;
//! let objects = [(object.digest, object.size)];
//! staging.commit(&Publish::named("hello:1", Ref::new(image)), objects)?;
//! # Ok(()) }
//! ```

mod base;
mod buffer;
mod collector;
mod commit;
mod contents;
mod digest;
pub mod disk;
mod domain;
mod du;
mod error;
mod examine;
mod fsck;
mod gc;
mod hit;
mod kinds;
mod lease;
mod listing;
mod meta;
mod name;
pub mod parallel;
mod profile;
mod reach;
mod real;
mod record;
mod records;
mod repair;
mod scrub;
mod settings;
mod signatures;
mod sizes;
mod staged;
mod staging;
mod store;
pub mod task;
mod trim;
mod used;
mod uses;
mod verify;
pub mod verity;

pub use base::{Base, LAYERS_MAX};
pub use buffer::Buffer;
pub use commit::Publish;
pub use contents::Contents;
pub use digest::{Digest, ParseDigestError};
pub use disk::{Piece, Protection, Purpose, StoredFile, Stretch};
pub use domain::{Domain, DomainLock};
pub use du::{DuReport, ImageUsage};
pub use error::{
    At, BoxError, Error, ErrorKind, Result, StoreFile, by_hand, is_damage, with_causes,
};
pub use fsck::{Finding, FindingKind, FsckOptions, FsckReport};
pub use gc::{GcOptions, GcReport};
pub use kinds::{FileKind, FileName};
pub use lease::Lease;
pub use listing::Listing;
pub use meta::{Features, Meta};
pub use reach::{ITSELF, Unreadable};
pub use real::{replace_file, stretch_at};
pub use record::{Layer, PackedLayer, Ref, Root, RootKind, now};
pub use records::{Refs, UnreadableRef};
pub use repair::Damage;
pub use scrub::{CompleteScrub, ScrubOptions, ScrubReport};
pub use signatures::{SIGNATURE_SIZE_MAX, SIGNATURES_MAX};
pub use sizes::SizesReport;
pub use staged::{ImageWriter, ObjectWriter, StagedFile};
pub use staging::{ImportOptions, Staging, StagingStats, Stored};
pub use store::{DEFAULT_DOMAIN, InitOptions, Store, run_tag};
pub use trim::{KEEP_LABEL, Spared, TrimOptions, TrimPlan, Victim};
pub use verify::VerifyReport;
