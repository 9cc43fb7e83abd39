//! The directory to mount at.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, openat2};
use rustix::io::Errno;

use super::Mounter;
use super::error::{At as _, MountError};

/// Absolute path of the directory to mount at, without symbolic links.
pub(super) fn resolve_target(target: &Path, create: bool) -> Result<PathBuf, MountError> {
    let problem = |problem: String| MountError::Target { target: target.to_owned(), problem };
    let resolved = match fs::canonicalize(target) {
        Ok(path) if !fs::metadata(&path).at("look at", &path)?.is_dir() => {
            return Err(problem("it is not a directory".to_owned()));
        }
        Ok(path) => path,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            if !create {
                return Err(MountError::TargetMissing(target.to_owned()));
            }
            let name = target.file_name().ok_or_else(|| problem("it has no name".to_owned()))?;
            let parent = match target.parent() {
                Some(parent) if parent != Path::new("") => parent,
                _ => Path::new("."),
            };
            let parent = match fs::canonicalize(parent) {
                Err(error) if is_about_path(&error) => {
                    return Err(problem(format!("its parent cannot be used: {error}")));
                }
                resolved => resolved.at("look at", parent)?,
            };
            parent.join(name)
        }
        Err(error) if is_about_path(&error) => return Err(problem(error.to_string())),
        Err(error) => return Err(error).at("look at", target),
    };
    // Records are text; and a name that no terminal can show helps nobody to unmount it.
    if resolved.to_str().is_none() {
        return Err(problem("its path is not UTF-8".to_owned()));
    }
    if resolved == Path::new("/") {
        return Err(problem("it is the root directory".to_owned()));
    }
    Ok(resolved)
}

/// Whether it says that the path is wrong, and not that a disk or a server failed.
fn is_about_path(error: &io::Error) -> bool {
    let errno = Errno::from_io_error(error);
    [Errno::NOENT, Errno::NOTDIR, Errno::LOOP, Errno::NAMETOOLONG, Errno::ACCESS]
        .into_iter()
        .any(|about_path| errno == Some(about_path))
}

fn resolved(path: &Path) -> PathBuf {
    fs::canonicalize(path).unwrap_or_else(|_| path.to_owned())
}

impl Mounter<'_> {
    /// Whether a resolved path is the store, or leads there.
    pub(super) fn is_in_store(&self, path: &Path) -> bool {
        self.domain.store().path().is_some_and(|store| path.starts_with(resolved(store)))
    }

    /// A mount there must not hide what the system, or a later command of ours, needs.
    pub(super) fn check_hides_nothing(&self, target: &Path) -> Result<(), MountError> {
        if self.is_in_store(target) {
            let problem = "it is in the store".to_owned();
            return Err(MountError::Target { target: target.to_owned(), problem });
        }
        let own = [Some(self.run.path()), self.domain.objects_dir().as_deref()]
            .map(|path| path.map(resolved));
        let mut needed =
            own.into_iter().flatten().chain(["/proc", "/sys", "/dev"].map(PathBuf::from));
        let kernel = ["/proc", "/sys"].map(PathBuf::from);
        let hidden = needed.find(|path| path.starts_with(target));
        let hidden = hidden.or_else(|| kernel.into_iter().find(|path| target.starts_with(path)));
        hidden.map_or(Ok(()), |path| {
            let problem = format!("it would hide {}", path.display());
            Err(MountError::Target { target: target.to_owned(), problem })
        })
    }
}

/// Opens a directory whose path was resolved; a symbolic link that was put there since fails.
pub(super) fn open_resolved(path: &Path) -> Result<OwnedFd, MountError> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    openat2(CWD, path, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS).at("open", path)
}

/// Makes the last directory of a resolved path; says whether it was missing and is ours to remove.
pub(super) fn make_target(target: &Path) -> Result<bool, MountError> {
    let name = target.file_name().unwrap_or_default();
    let parent = open_resolved(target.parent().unwrap_or(target))?;
    match rustix::fs::mkdirat(parent, name, Mode::from_raw_mode(0o777)) {
        Err(Errno::EXIST) => Ok(false),
        other => other.map(|()| true).at("create", target),
    }
}
