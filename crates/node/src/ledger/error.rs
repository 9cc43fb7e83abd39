//! What can go wrong in the ledger.

use std::io;
use std::path::PathBuf;

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
    /// The caller wants it no more: see [`Ledger::with_cancel`](super::Ledger::with_cancel).
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
