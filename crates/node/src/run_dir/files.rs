//! Files of the run directory: listed, read and removed.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::RunDirError;
use super::error::At as _;

/// A record is a few hundred bytes; an id map makes it grow.
const RECORD_SIZE_MAX: u64 = 1 << 20;

/// Names in a directory, without those that are not UTF-8 (never ours); none if it is missing.
pub(crate) fn list(dir: &Path) -> Result<Vec<String>, RunDirError> {
    let mut names = Vec::new();
    find_name(dir, |name| {
        names.push(name.to_owned());
        false
    })?;
    Ok(names)
}

/// The first name in a directory of which `is_it` says so, as [`list`] finds them.
pub(crate) fn find_name(
    dir: &Path,
    mut is_it: impl FnMut(&str) -> bool,
) -> Result<Option<String>, RunDirError> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other.at("list", dir)?,
    };
    for entry in entries {
        if let Ok(name) = entry.at("list", dir)?.file_name().into_string()
            && is_it(&name)
        {
            return Ok(Some(name));
        }
    }
    Ok(None)
}

pub(crate) fn remove_file(path: &Path) -> Result<(), RunDirError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error).at("remove", path),
        _ => Ok(()),
    }
}

/// Whether an open file or directory is still the one at a path, and not a removed one of that name.
pub(crate) fn is_at(open: &OwnedFd, path: &Path) -> bool {
    let numbers = |stat: rustix::fs::Stat| (stat.st_dev, stat.st_ino);
    let held = rustix::fs::fstat(open).map(numbers);
    held.is_ok() && held == rustix::fs::stat(path).map(numbers)
}

/// Reads a file that others may have put there, if it is a regular one of at most [`RECORD_SIZE_MAX`] bytes; no
/// other is waited for.
pub(crate) fn read_small(path: &Path) -> io::Result<Vec<u8>> {
    use std::io::Read as _;
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = fs::File::from(rustix::fs::open(path, flags, Mode::empty())?);
    let bad = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
    if !file.metadata()?.is_file() {
        return Err(bad("it is not a regular file".to_owned()));
    }
    let mut text = Vec::new();
    if file.take(RECORD_SIZE_MAX + 1).read_to_end(&mut text)? as u64 > RECORD_SIZE_MAX {
        return Err(bad(format!("it is longer than {RECORD_SIZE_MAX} bytes")));
    }
    Ok(text)
}

pub(crate) fn read_json<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, RunDirError> {
    let damaged = |reason: String| RunDirError::State { path: path.to_owned(), reason };
    match read_small(path) {
        Ok(text) => serde_json::from_slice(&text).map(Some).map_err(|e| damaged(e.to_string())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) if error.kind() == io::ErrorKind::InvalidData => Err(damaged(error.to_string())),
        Err(error) => Err(error).at("read", path),
    }
}

pub(crate) fn to_json(path: &Path, value: &impl Serialize) -> Result<Vec<u8>, RunDirError> {
    serde_json::to_vec_pretty(value)
        .map_err(|error| RunDirError::State { path: path.to_owned(), reason: error.to_string() })
}
