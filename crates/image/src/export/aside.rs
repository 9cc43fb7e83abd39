//! What is not complete yet: beside the place where it goes, on the same filesystem, under a hidden name that says
//! which process makes it (`.NAME.cofolio-PID`).
//!
//! It is locked as long as it is made. One that is not, and whose process is gone, was left by a process that was
//! killed: whoever exports to that place next removes it. (Both are asked: a process of another container has a
//! number that means nothing here, but its lock is seen; the lock is taken a moment after the name is there.)

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, Mode, OFlags, flock};

use super::error::{ExportError, io_error};

/// A new file for what goes to `path`, and its name.
pub(super) fn create_file(path: &Path) -> Result<(File, PathBuf), ExportError> {
    let aside = name(path)?;
    let file = File::create_new(&aside).map_err(io_error(&aside))?;
    // Where there are no locks the process alone is asked.
    let _ = flock(&file, FlockOperation::NonBlockingLockExclusive);
    Ok((file, aside))
}

/// A new directory for what goes to `path`, and its name. It is locked as long as the file is open.
pub(super) fn create_dir(path: &Path) -> Result<(File, PathBuf), ExportError> {
    let aside = name(path)?;
    fs::create_dir(&aside).map_err(io_error(&aside))?;
    let directory = File::open(&aside).map_err(io_error(&aside))?;
    let _ = flock(&directory, FlockOperation::NonBlockingLockExclusive);
    Ok((directory, aside))
}

/// The name; what others have left under such a name is removed.
fn name(path: &Path) -> Result<PathBuf, ExportError> {
    let Some(name) = path.file_name() else {
        return Err(ExportError::Destination { what: format!("{}: no name", path.display()) });
    };
    let mut prefix = OsString::from(".");
    prefix.push(name);
    prefix.push(".cofolio-");
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    remove_leftovers(directory.unwrap_or(Path::new(".")), &prefix);
    prefix.push(std::process::id().to_string());
    Ok(path.with_file_name(prefix))
}

/// As far as it goes: what cannot be removed is in nobody's way.
fn remove_leftovers(directory: &Path, prefix: &OsStr) {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    for entry in entries {
        let name = entry.file_name();
        let process = name.as_bytes().strip_prefix(prefix.as_bytes());
        let process = process.and_then(|digits| std::str::from_utf8(digits).ok()?.parse().ok());
        let path = entry.path();
        if process.is_none_or(is_alive) || !is_free(&path) {
            continue;
        }
        let _ = match entry.file_type() {
            Ok(kind) if kind.is_dir() => fs::remove_dir_all(&path),
            _ => fs::remove_file(&path),
        };
    }
}

fn is_alive(process: u32) -> bool {
    process == std::process::id() || Path::new("/proc").join(process.to_string()).exists()
}

/// Whether nobody holds the lock of a file or directory.
fn is_free(path: &Path) -> bool {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let opened = rustix::fs::open(path, flags, Mode::empty());
    opened.is_ok_and(|file| flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok())
}
