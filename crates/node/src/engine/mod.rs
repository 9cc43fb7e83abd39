//! The stores of other engines on this machine, read in place and never written.

pub mod containers_storage;

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;

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

/// Largest file of an engine's own records, in bytes. A layer takes some 700 of them.
const RECORDS_MAX: u64 = 256 << 20;

/// Opens a file without changing when it was last read, as far as that is allowed.
fn open(path: &Path) -> io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt;
    let no_trace = i32::try_from(rustix::fs::OFlags::NOATIME.bits()).unwrap_or(0);
    match File::options().read(true).custom_flags(no_trace).open(path) {
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => File::open(path),
        other => other,
    }
}

/// Reads a JSON file; `None` if it is not there.
fn read_json<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, EngineError> {
    let failed = |source| EngineError::Io { path: path.to_owned(), source };
    let wrong = |what| EngineError::Document { path: path.to_owned(), what };
    let file = match open(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other.map_err(failed)?,
    };
    let mut bytes = Vec::new();
    file.take(RECORDS_MAX + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > RECORDS_MAX {
        return Err(wrong(format!("more than {RECORDS_MAX} bytes")));
    }
    serde_json::from_slice(&bytes).map(Some).map_err(|e| wrong(e.to_string()))
}
