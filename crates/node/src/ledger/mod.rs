//! The ledger: which pages of a file are resident, and the memory of cgroups.
//!
//! Readers of kernel text take a root path, `/` on a live machine, so that tests can plant one.

pub mod cgroup;
pub mod residency;
pub mod sharing;

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
    /// The machine has no memory controller that this process can use.
    #[error("no memory cgroup: {reason}")]
    NoMemoryCgroup {
        /// Why, for the person in front of the machine.
        reason: String,
    },
}

impl LedgerError {
    fn io(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> LedgerError {
        let path = path.into();
        move |source| LedgerError::Io { path, source }
    }
}

/// Ledger results.
pub type Result<T, E = LedgerError> = std::result::Result<T, E>;

/// The number of one `name 123` line, as vmstat and memory.stat have them.
pub fn field(text: &str, name: &str) -> Option<u64> {
    text.lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))
        .and_then(|value| value.trim().parse().ok())
}

/// Reads a text file of the kernel, whole: mountinfo can be longer than a megabyte.
fn read_text(path: &std::path::Path) -> Result<String> {
    let bytes = std::fs::read(path).map_err(LedgerError::io(path))?;
    // Paths in these files may be any bytes; what we parse is ASCII.
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
