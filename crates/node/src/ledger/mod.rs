//! The ledger: who uses which object, what is resident, what sharing saves.
//!
//! ```text
//!   cachestat ───────▶ index: objects with their resident pages, images that name them
//!   /proc/PID/maps ──┐                              │
//!                    ├▶ superblocks: which object ──┴▶ usage lists ──▶ accounts
//!   fanotify ────────┘                                (mount × cgroup)
//! ```
//!
//! Looking at objects, at metadata, at processes and at new images, and taking events, end when a
//! [`Budget`] of processor time is spent and go on where they ended. On larger machines figures get
//! older; a [`Report`] gives their age. Not divided are:
//!
//! - a refresh, which lists all mounts, and images, refs and bases where they have changed, and takes
//!   up an image at least;
//! - a look at one process and at one file, and the drop of one file from all processes that map
//!   it; a process that does not answer takes two seconds of time, though not of the processor;
//! - walks of the usage lists: for a report; for the choice of what to reclaim, one in a round for
//!   all cgroups under pressure; at the end of a round over all objects, to remove uses of pages that have gone; at its beginning, with `inode-share`,
//!   over the lists of packs;
//! - an answer: what uses an object, what images share, the files of an image, which reads all of
//!   its metadata;
//! - while the usage lists are more than half full, a count of each cgroup's share after a refresh
//!   (0.3 s for a million lists).
//!
//! Readers of kernel text take a root path, `/` on a live machine, so that tests can plant one.

mod account;
mod budget;
mod cgroup_ids;
mod charges;
mod detail;
mod index;
mod live;
mod openers;
mod opens;
mod owners;
mod pagemap;
mod pressure;
mod reclaim;
mod record;
mod report;
mod shares;
mod superblocks;
mod unseen;
pub mod usage;

pub use account::{
    ContainerAccount, DomainAccount, ImageAccount, Machine, Report, Unknown, UsedImage,
};
pub use budget::{Budget, thread_time};
pub use charges::CommonsAccount;
pub use detail::{FileOrder, ImageFile, ImageFiles, ObjectUser, ResidentSharing, SharingImage};
pub use live::{Ledger, UsageCost};
pub use pressure::ReclaimPolicy;
pub use reclaim::{ReclaimRequest, ReclaimTarget, Reclaimed};
pub(crate) use superblocks::paths_of_objects;

use std::{io, path::PathBuf};

/// What can go wrong when the ledger asks the kernel.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LedgerError {
    /// A file of the kernel's, or one whose pages are counted, could not be used.
    #[error("{path}: {source}", path = .path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Kernel text that does not have the documented form.
    #[error("{path}: {what}", path = .path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What was expected and not found.
        what: String,
    },
    /// The store's directories cannot be listed.
    #[error(transparent)]
    Store(#[from] cofolio_store::Error),
    /// The caller wants it no more: see [`Ledger::with_cancel`].
    #[error("cancelled")]
    Cancelled,
    /// What a request is about does not exist.
    #[error("no {what}")]
    NotFound {
        /// Its kind and name.
        what: String,
    },
    /// The pages of this image's files can be reached through a mount only.
    #[error(
        "image {image} is not mounted: with the backend inode-share its pages are in memory only \
         while it is"
    )]
    NotMounted {
        /// Digest of the metadata image.
        image: cofolio_store::Digest,
    },
}

impl LedgerError {
    pub(crate) fn io(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> LedgerError {
        let path = path.into();
        move |source| LedgerError::Io { path, source }
    }
}

/// Ledger results.
pub type Result<T, E = LedgerError> = std::result::Result<T, E>;
