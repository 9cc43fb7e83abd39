//! A root that is read-only but for some directories.
//!
//! ```text
//! root      the image's EROFS mount, so that its files have no inodes of an overlay beside their own
//! over it   directories of an overlay that is mounted elsewhere
//! ```

use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::Path;

use cofolio_guest::Dirs;
use cofolio_guest::kernel::{During as _, Result};
use rustix::fs::{Mode, OFlags, ResolveFlags, fstat, openat2};
use rustix::io::Errno;
use rustix::mount::mount_bind;

/// Lays directories of the overlay at `changes` over those of the image at `root`.
pub(crate) fn lay_over(root: &Path, changes: &Path, dirs: &Dirs) -> Result<()> {
    for dir in &dirs.asked {
        let links = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        let laid = open(root, dir, links).and_then(|at| Ok((at, open(changes, dir, links)?)));
        let (at, from) = laid.map_err(|errno| format!("--writable {dir}: {}", problem(errno)))?;
        bind(&from, &at).during(dir)?;
    }
    for dir in &dirs.expected {
        // Links lead to the same place in both. An image can be without it.
        let links = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        let Ok(at) = open(root, dir, links) else { continue };
        let from = open(changes, dir, links).during(dir)?;
        // It may be in one that is there already.
        if fstat(&at).during(dir)?.st_dev != fstat(&from).during(dir)?.st_dev {
            bind(&from, &at).during(dir)?;
        }
    }
    Ok(())
}

fn open(root: &Path, dir: &str, links: ResolveFlags) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::open(root, flags, Mode::empty())?;
    let dir = dir.trim_start_matches('/');
    openat2(root, dir, flags, Mode::empty(), links)
}

fn problem(errno: Errno) -> String {
    match errno {
        Errno::NOENT => "the image has no such directory".to_owned(),
        Errno::LOOP => {
            "a symbolic link of the image is in the path: name the directory itself".to_owned()
        }
        Errno::NOTDIR => "it is not a directory in the image".to_owned(),
        errno => io::Error::from(errno).to_string(),
    }
}

fn bind(from: &OwnedFd, at: &OwnedFd) -> rustix::io::Result<()> {
    let path = |fd: &OwnedFd| format!("/proc/self/fd/{}", fd.as_raw_fd());
    mount_bind(path(from), path(at))
}
