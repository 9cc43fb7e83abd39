//! Errors of reading the stores of other engines.

use std::io;
use std::path::PathBuf;

/// Why an engine's store cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// No such store, or no such image in it; or a name that could be several.
    #[error("{what}")]
    NotFound {
        /// What was asked for and what there is.
        what: String,
    },
    /// Reading failed.
    #[error("cannot read {path}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// A file that is not as its engine writes it.
    #[error("{path}: {what}")]
    Document {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// Something that engines do and Cofolio cannot read.
    #[error("{what}")]
    Unsupported {
        /// What, and where.
        what: String,
    },
}
