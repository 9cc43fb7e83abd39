//! What can go wrong with an export or a push.

use std::io;
use std::path::{Path, PathBuf};

use cofolio_store::Digest;
use cofolio_store::task::Cancelled;

use crate::error::RegistryError;
use crate::threads::NoThread;

/// Why an image could not be given out. Nothing half-written is left at the destination.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the message of a variant says what its fields are")]
pub enum ExportError {
    /// The caller's mistake: an unknown form of destination, or something is in the way there.
    #[error("{what}")]
    Destination { what: String },
    /// A file exists at the destination, and may not be replaced.
    #[error("{path} exists already")]
    Exists { path: PathBuf },
    #[error("cannot write {path}")]
    Io {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{path} is complete, but a power failure could undo it")]
    NotDurable {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// Layers whose splits are missing.
    #[error("the store has no split of layer {}: its archive cannot be written again", layers.join(", "))]
    NoSplit {
        /// Their chain ids, lowest first.
        layers: Vec<String>,
    },
    #[error("split of layer {layer}: {what}")]
    Split { layer: String, what: String },
    /// An object is missing, or is not what its name says.
    #[error("object {digest}, which {user} needs: {what}")]
    Object {
        digest: Digest,
        /// `layer <chain-id>` or `image <digest>`.
        user: String,
        what: String,
    },
    /// A layer came out other than it went in, though all its objects are right.
    #[error("layer {layer}: comes out as {actual}, the image config says {expected}")]
    DiffId { layer: String, expected: String, actual: String },
    #[error("{path:?} cannot be put into a layer: {what}")]
    Entry { path: String, what: String },
    /// The store's record of the image, or the image itself, cannot be read.
    #[error("image {image}: {what}")]
    Image { image: Digest, what: String },
    #[error(transparent)]
    Registry(#[from] RegistryError),
    #[error(transparent)]
    Thread(#[from] NoThread),
    #[error(transparent)]
    Store(#[from] cofolio_store::Error),
    #[error(transparent)]
    Cancelled(#[from] Cancelled),
}

impl ExportError {
    /// Whether the fault lies in the store, and not with the caller or the machine.
    pub fn is_corrupt(&self) -> bool {
        matches!(
            self,
            Self::NoSplit { .. }
                | Self::Split { .. }
                | Self::Object { .. }
                | Self::DiffId { .. }
                | Self::Image { .. }
        )
    }
}

pub(crate) fn io_error(path: &Path) -> impl FnOnce(io::Error) -> ExportError {
    let path = path.to_owned();
    move |source| ExportError::Io { path, source }
}
