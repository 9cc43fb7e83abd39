//! Errors of reading the stores of other engines.

use std::io;
use std::path::PathBuf;

/// Why an engine's store cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the message of a variant says what its fields are")]
pub enum EngineError {
    /// No such store, or no such image in it; or a name that could be several.
    #[error("{what}")]
    NotFound { what: String },
    #[error("cannot read {path}")]
    Io {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{path}: {what}")]
    Document { path: PathBuf, what: String },
    #[error("{what}")]
    Unsupported { what: String },
}
