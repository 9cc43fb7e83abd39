//! Incomplete files. They lie beside their destination, under a hidden name (`.NAME.cofolio-XXXXXXXXXXXX`,
//! the end is random), and are locked. The next export to that destination removes those whose lock is free.
//! On a filesystem without locks they stay.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, IsTerminal, Seek, Write};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, CWD, FlockOperation, Mode, OFlags, RenameFlags, flock, linkat, renameat_with, unlink,
};
use rustix::io::Errno;

use super::error::{ExportError, io_error};

/// Characters at the end of a hidden name.
const RANDOM: usize = 12;

/// Attempts to create and lock a hidden file.
const TRIES_MAX: usize = 16;

/// A file that appears at its destination complete or not at all. Dropped without
/// [`OutputFile::publish`] it is removed.
#[derive(Debug)]
pub struct OutputFile {
    file: File,
    aside: PathBuf,
    to: To,
}

#[derive(Debug)]
enum To {
    Path {
        path: PathBuf,
        replace: bool,
    },
    /// The file has no name; its content is copied when it is complete.
    Stdout,
    Published,
}

impl OutputFile {
    /// Begins a file for `path` (`-`: standard output). `replace` allows replacing a regular file.
    ///
    /// # Errors
    /// [`ExportError::Exists`] for a file that may not be replaced; [`ExportError::Destination`]
    /// for anything but a regular file, and for a terminal; [`ExportError::Io`].
    pub fn create(path: &Path, replace: bool) -> Result<Self, ExportError> {
        if path.as_os_str() == "-" {
            if io::stdout().is_terminal() {
                let what = "binary data does not go to a terminal".to_owned();
                return Err(ExportError::Destination { what });
            }
            let aside = std::env::temp_dir().join("stdout");
            return Ok(Self { file: unnamed_file(&aside)?, aside, to: To::Stdout });
        }
        check_free(path, replace)?;
        let (file, aside) = create_file(path)?;
        Ok(Self { file, aside, to: To::Path { path: path.to_owned(), replace } })
    }

    /// What to write to. The file is empty at first.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Its path until it is published, for messages and for files beside it.
    pub(super) fn aside(&self) -> &Path {
        &self.aside
    }

    /// Puts the complete file at its destination, which an error leaves as it was, unless it is
    /// [`ExportError::NotDurable`].
    pub fn publish(mut self) -> Result<(), ExportError> {
        match &self.to {
            To::Path { path, replace } => {
                self.file.sync_all().map_err(io_error(&self.aside))?;
                check_free(path, *replace)?;
                rename(&self.aside, path, *replace)?;
            }
            To::Stdout | To::Published => {
                let mut stdout = io::stdout().lock();
                let rewound = self.file.rewind();
                let copied = rewound.and_then(|()| io::copy(&mut self.file, &mut stdout));
                copied
                    .and_then(|_| stdout.flush())
                    .map_err(io_error(Path::new("standard output")))?;
            }
        }
        self.to = To::Published;
        Ok(())
    }
}

impl Drop for OutputFile {
    fn drop(&mut self) {
        if let To::Path { .. } = self.to {
            // A file that cannot be removed now is removed by the next export to this destination.
            let _ = fs::remove_file(&self.aside);
        }
    }
}

/// Refuses a device, a symbolic link, a directory, and without `replace` any file.
fn check_free(path: &Path, replace: bool) -> Result<(), ExportError> {
    match path.symlink_metadata() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(io_error(path)(error)),
        Ok(found) if !found.is_file() => {
            let what = format!("{}: not a regular file; it is not replaced", path.display());
            Err(ExportError::Destination { what })
        }
        Ok(_) if !replace => Err(ExportError::Exists { path: path.to_owned() }),
        Ok(_) => Ok(()),
    }
}

fn rename(from: &Path, to: &Path, replace: bool) -> Result<(), ExportError> {
    let flags = if replace { RenameFlags::empty() } else { RenameFlags::NOREPLACE };
    let renamed = match renameat_with(CWD, from, CWD, to, flags) {
        // NFS has no such flag.
        Err(Errno::INVAL) if !replace => move_by_link(from, to),
        other => other,
    };
    renamed.map_err(|error| match error {
        Errno::EXIST => ExportError::Exists { path: to.to_owned() },
        other => io_error(to)(other.into()),
    })?;
    let not_durable = |source| ExportError::NotDurable { path: to.to_owned(), source };
    sync_names(directory(to)).map_err(not_durable)
}

/// Moves a file without replacing any. Without hard links this can replace a file that was made after the
/// caller's check.
fn move_by_link(from: &Path, to: &Path) -> rustix::io::Result<()> {
    match linkat(CWD, from, CWD, to, AtFlags::empty()) {
        Ok(()) => unlink(from),
        Err(Errno::PERM | Errno::OPNOTSUPP | Errno::NOSYS) => {
            renameat_with(CWD, from, CWD, to, RenameFlags::empty())
        }
        other => other,
    }
}

/// Makes the names in a directory durable, if it can be read and its filesystem does that.
pub(super) fn sync(directory: &Path) -> Result<(), ExportError> {
    sync_names(directory).map_err(io_error(directory))
}

fn sync_names(directory: &Path) -> io::Result<()> {
    match File::open(directory).and_then(|it| it.sync_all()) {
        Err(error) => match Errno::from_io_error(&error) {
            Some(Errno::ACCESS | Errno::INVAL | Errno::OPNOTSUPP) => Ok(()),
            _ => Err(error),
        },
        Ok(()) => Ok(()),
    }
}

/// An unnamed file in the directory of `path`, which no other user can open. The kernel removes it
/// when it is closed.
pub(super) fn unnamed_file(path: &Path) -> Result<File, ExportError> {
    tempfile::tempfile_in(directory(path)).map_err(io_error(path))
}

pub(super) fn directory(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// A new file for what goes to `path`, and its name.
pub(super) fn create_file(path: &Path) -> Result<(File, PathBuf), ExportError> {
    let Some(name) = path.file_name() else {
        return Err(ExportError::Destination { what: format!("{}: no name", path.display()) });
    };
    let prefix: OsString = [OsStr::new("."), name, OsStr::new(".cofolio-")].into_iter().collect();
    remove_leftovers(directory(path), &prefix);
    let mut builder = tempfile::Builder::new();
    builder.prefix(&prefix).rand_bytes(RANDOM);
    for _ in 0..TRIES_MAX {
        let made = builder
            .make_in(directory(path), |aside| File::create_new(aside))
            .map_err(io_error(path))?;
        let (file, aside) = made.into_parts();
        let aside = aside.keep().map_err(|error| io_error(path)(error.error))?;
        // Another export may have taken it for a leftover before it was locked.
        if lock(&file) != Err(Errno::WOULDBLOCK) && aside.exists() {
            return Ok((file, aside));
        }
        let _ = fs::remove_file(&aside);
    }
    Err(io_error(path)(io::ErrorKind::WouldBlock.into()))
}

/// Removes leftovers of processes that have ended; one that cannot be removed stays.
fn remove_leftovers(directory: &Path, prefix: &OsStr) {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let random = name.as_bytes().strip_prefix(prefix.as_bytes());
        if !random.is_some_and(|it| it.len() == RANDOM && it.iter().all(u8::is_ascii_alphanumeric))
        {
            continue;
        }
        let path = entry.path();
        let opened = rustix::fs::open(&path, flags, Mode::empty());
        let Ok(_lock) = opened.and_then(|file| lock(&file).map(|()| file)) else { continue };
        let _ = fs::remove_file(&path);
    }
}

fn lock(file: impl AsFd) -> rustix::io::Result<()> {
    flock(file, FlockOperation::NonBlockingLockExclusive)
}

#[cfg(test)]
mod tests {
    /// Where a filesystem cannot rename without replacing, an error that no link could be made was taken for a
    /// filesystem without links, and what had appeared meanwhile was replaced.
    #[test]
    fn without_a_flag_of_the_filesystem_nothing_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        for name in ["from", "there"] {
            std::fs::write(path(name), name).unwrap();
        }
        let refused = super::move_by_link(&path("from"), &path("there"));
        assert_eq!(refused, Err(rustix::io::Errno::EXIST));
        assert_eq!(std::fs::read(path("there")).unwrap(), b"there");
        super::move_by_link(&path("from"), &path("to")).unwrap();
        assert_eq!(std::fs::read(path("to")).unwrap(), b"from");
        assert!(!path("from").exists());
        // All errors but one counted as a filesystem that syncs no directories.
        super::sync(dir.path()).unwrap();
        super::sync(&path("none")).unwrap_err();
    }
}
