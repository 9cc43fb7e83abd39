//! Errors of imports. The variant says whose fault it is.

mod engine;
mod registry;
mod trust;

use std::fmt::Display;
use std::io;
use std::path::PathBuf;

use cofolio_store::task::Cancelled;

use crate::threads::NoThread;

pub use engine::EngineError;
pub use registry::RegistryError;
pub(crate) use registry::quoted;
pub use trust::TrustError;

/// Why an import failed. The store is as it was before, whichever it is.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the message of a variant says what its fields are")]
pub enum ImportError {
    /// The caller's mistake: no such image, tag or platform, or an unknown form.
    #[error("{what}")]
    Source { what: String },
    #[error("{name:?} cannot be the name of an image: {what}")]
    Name { name: String, what: &'static str },
    #[error("{path}: {what}")]
    Archive { path: PathBuf, what: String },
    #[error("cannot read {path}")]
    Io {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("blob {digest}: its content has the digest {actual}")]
    Digest { digest: String, actual: String },
    #[error("blob {digest}: {actual} bytes, its descriptor says {expected}")]
    Size { digest: String, expected: u64, actual: u64 },
    #[error("blob {digest} is missing from {path}")]
    Missing { digest: String, path: PathBuf },
    #[error("layer {digest}: unpacks to {actual}, the image config says {expected}")]
    DiffId { digest: String, expected: String, actual: String },
    #[error("blob {digest}, offset {offset}: {what}")]
    Corrupt {
        digest: String,
        /// How far it was read, in (compressed) bytes.
        offset: u64,
        what: String,
    },
    /// A layer's archive or one of its entries is malformed, or makes no sense in a filesystem.
    #[error("layer {digest}, offset {offset} of its tar archive{}: {what}", of(entry))]
    Layer {
        digest: String,
        /// Offset in the uncompressed archive, in bytes.
        offset: u64,
        entry: Option<String>,
        what: String,
    },
    #[error("layer {digest}, entry {entry:?}: {what}")]
    Merge { digest: String, entry: String, what: String },
    #[error("{what_blob} {digest}: {what}")]
    Document {
        /// `index`, `manifest` or `config`.
        what_blob: &'static str,
        digest: String,
        what: String,
    },
    /// A media type that Cofolio does not know or cannot handle.
    #[error("blob {digest}: {what} ({media_type:?})")]
    MediaType { digest: String, media_type: String, what: &'static str },
    /// A limit of [`Limits`](crate::limits::Limits) was reached.
    #[error("{what}: more than the limit of {limit} ({option})")]
    Limit {
        what: String,
        limit: u64,
        /// The field of [`Limits`](crate::limits::Limits) that sets it.
        option: &'static str,
    },
    /// A file of a directory tree changed while it was read.
    #[error("{path} changed while it was read")]
    Changed { path: PathBuf },
    #[error(transparent)]
    Cancelled(#[from] Cancelled),
    #[error(transparent)]
    Registry(#[from] RegistryError),
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The image may not come in: its signatures are not what was asked for.
    #[error(transparent)]
    Trust(#[from] TrustError),
    #[error(transparent)]
    Store(#[from] cofolio_store::Error),
    #[error(transparent)]
    Thread(#[from] NoThread),
    #[error("the image cannot be written: {what}")]
    Image { what: String },
}

impl ImportError {
    pub(crate) fn document(what_blob: &'static str, digest: &str, what: impl Into<String>) -> Self {
        Self::Document { what_blob, digest: digest.to_owned(), what: what.into() }
    }

    pub(crate) fn digest(expected: &impl Display, actual: &impl Display) -> Self {
        Self::Digest { digest: expected.to_string(), actual: actual.to_string() }
    }

    pub(crate) fn limit(what: impl Into<String>, limit: u64, option: &'static str) -> Self {
        Self::Limit { what: what.into(), limit, option }
    }

    /// Whether the fault lies in the image, and not with the caller or the machine.
    pub fn is_corrupt(&self) -> bool {
        matches!(
            self,
            Self::Archive { .. }
                | Self::Digest { .. }
                | Self::Size { .. }
                | Self::Missing { .. }
                | Self::DiffId { .. }
                | Self::Corrupt { .. }
                | Self::Layer { .. }
                | Self::Merge { .. }
                | Self::Document { .. }
                | Self::Limit { .. }
        )
    }
}

fn of(entry: &Option<String>) -> String {
    entry.as_ref().map(|name| format!(", entry {name:?}")).unwrap_or_default()
}

/// A name for an error, at most 400 bytes of it.
pub(crate) fn shown(name: &[u8]) -> String {
    let mut text = String::from_utf8_lossy(&name[..name.len().min(400)]).into_owned();
    if name.len() > 400 {
        text.push('…');
    }
    text
}
