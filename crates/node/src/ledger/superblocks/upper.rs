//! The changes of a writable mount.

use std::fs;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use crate::mount::ShownSuperblock;

/// Where the changes of a writable mount are.
#[derive(Debug)]
pub(super) struct Upper {
    /// Free of symbolic links.
    pub(super) directory: PathBuf,
    /// Where it is mounted: paths of processes may begin so.
    target: PathBuf,
    /// The directory of the overlay that is mounted there: empty for the root.
    root: PathBuf,
}

impl Upper {
    pub(super) fn of(shown: &ShownSuperblock) -> Option<Self> {
        let directory = shown.upper.as_ref()?;
        let names = shown.inside.components().count();
        let target = shown.path.ancestors().nth(names).unwrap_or(&shown.path);
        Self::at(directory, target, Path::new(""))
    }

    /// `directory` is trusted, unlike what is in it.
    pub(super) fn at(directory: &Path, target: &Path, root: &Path) -> Option<Self> {
        let directory = fs::canonicalize(directory).ok()?;
        Some(Self { directory, target: target.to_owned(), root: root.to_owned() })
    }

    /// Whether the content of the file at a path was copied up. What has only new attributes still
    /// shows the object. Whoever may write to the mount may put links into the directory: none is
    /// followed.
    pub(super) fn has_data(&self, path: &Path) -> rustix::io::Result<bool> {
        let below = path.strip_prefix(&self.target).or_else(|_| path.strip_prefix("/"));
        let path = self.directory.join(&self.root).join(below.unwrap_or(path));
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let resolve = ResolveFlags::NO_SYMLINKS;
        let file = match rustix::fs::openat2(CWD, &path, flags, Mode::empty(), resolve) {
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => return Ok(false),
            file => file?,
        };
        let stat = rustix::fs::fstat(&file)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Ok(false);
        }
        match rustix::fs::getxattr(crate::mount::path_of(&file), METACOPY, &mut [0; 1][..]) {
            Err(Errno::NODATA) => Ok(true),
            Err(Errno::RANGE) | Ok(_) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// A file in a directory of changes that has attributes only.
const METACOPY: &str = "trusted.overlay.metacopy";

#[cfg(test)]
mod tests {
    use super::*;

    /// A container can make any link among its changes. One to a directory of the host was
    /// followed, and what lay there decided.
    #[test]
    fn no_link_among_the_changes_is_followed() {
        let dir = tempfile::tempdir().unwrap();
        let (upper, host) = (dir.path().join("upper"), dir.path().join("host"));
        fs::create_dir_all(upper.join("bin")).unwrap();
        fs::create_dir(&host).unwrap();
        fs::write(host.join("file"), "x").unwrap();
        fs::write(upper.join("bin/file"), "x").unwrap();
        std::os::unix::fs::symlink(&host, upper.join("lib")).unwrap();
        std::os::unix::fs::symlink(host.join("file"), upper.join("bin/link")).unwrap();
        let upper = Upper::at(&upper, Path::new("/mnt"), Path::new("")).unwrap();
        let has_data = |path| upper.has_data(Path::new(path)).unwrap();
        assert!(has_data("/mnt/bin/file") && has_data("/bin/file"));
        for path in ["/lib/file", "/bin/link", "/bin", "/bin/none", "/bin/file/below"] {
            assert!(!has_data(path), "{path}");
        }
        let directory = dir.path().join("upper");
        let upper = Upper::at(&directory, Path::new("/elsewhere"), Path::new("bin")).unwrap();
        assert_eq!(upper.has_data(Path::new("/elsewhere/file")), Ok(true));
    }
}
