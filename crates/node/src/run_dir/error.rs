//! What can go wrong with the run directory.

use std::io;
use std::path::PathBuf;

use cofolio_store::task::Cancelled;

/// Why the run directory, or a file in it, cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunDirError {
    /// Somebody else could put anything into it, and its records say what to unmount.
    #[error("cannot trust the run directory: {} {problem}", path.display())]
    Untrusted {
        /// It, or a directory in it or above it.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// A record is not one of ours, or is damaged.
    #[error("{}: {reason}", path.display())]
    State {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A file or directory failed.
    #[error("{action} {}", path.display())]
    Io {
        /// What was done.
        action: &'static str,
        /// To what.
        path: PathBuf,
        /// How it failed.
        source: io::Error,
    },
    /// The caller cancelled the waiting for a lock.
    #[error(transparent)]
    Cancelled(#[from] Cancelled),
}

impl RunDirError {
    /// Whether a file or directory is not there.
    pub(crate) fn is_missing(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }
}

/// Names the path of an I/O error.
pub(super) trait At<T> {
    fn at(self, action: &'static str, path: impl Into<PathBuf>) -> Result<T, RunDirError>;
}

impl<T, E: Into<io::Error>> At<T> for Result<T, E> {
    fn at(self, action: &'static str, path: impl Into<PathBuf>) -> Result<T, RunDirError> {
        self.map_err(|error| RunDirError::Io { action, path: path.into(), source: error.into() })
    }
}
