//! The root filesystem of a container before it starts: what it has, and where its links lead.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fd::{AsFd as _, OwnedFd};
use rustix::fs::{FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use super::{BundleError, Result};
use crate::mount::At as _;
use crate::mount::kernel::path_of;

/// Where filesystems of the kernel's are in a container.
pub(super) const KERNEL_PATHS: [&str; 3] = ["/proc", "/sys", "/dev"];

/// A `/etc/passwd` or `/etc/group` larger than this is refused: it is read into memory.
pub(super) const ACCOUNT_FILE_BYTES_MAX: u64 = 16 << 20;

/// How long to retry while another process holds a lease on an account file.
const LEASE_PATIENCE: Duration = Duration::from_secs(5);

pub(super) fn is_kernels(path: &Path) -> bool {
    KERNEL_PATHS.iter().any(|kernels| path.starts_with(kernels))
}

/// A root filesystem, looked into as if it were `/`: symbolic links cannot lead out of it.
pub(super) struct Rootfs {
    pub(super) fd: OwnedFd,
    pub(super) path: PathBuf,
}

impl Rootfs {
    pub(super) fn open(path: &Path) -> Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = rustix::fs::open(path, flags, Mode::empty());
        Ok(Self { fd: fd.at("opening the root filesystem", path)?, path: path.to_owned() })
    }

    pub(super) fn open_beneath(&self, path: &str, flags: OFlags) -> rustix::io::Result<OwnedFd> {
        let flags = flags | OFlags::CLOEXEC;
        let open =
            || rustix::fs::openat2(&self.fd, path, flags, Mode::empty(), ResolveFlags::IN_ROOT);
        // What is renamed or mounted anywhere meanwhile may have led `..` out of the root, so the
        // kernel asks to try again.
        let mut tries = (0..1000).map(|_| open());
        tries.find(|opened| !matches!(opened, Err(Errno::AGAIN))).unwrap_or(Err(Errno::AGAIN))
    }

    pub(super) fn exists(&self, path: &str) -> bool {
        self.open_beneath(path, OFlags::PATH).is_ok()
    }

    /// Whether it exists, and no symbolic link is on the way.
    pub(super) fn has_plain(&self, path: &str) -> bool {
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS;
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        rustix::fs::openat2(self.fd.as_fd(), path, flags, Mode::empty(), resolve).is_ok()
    }

    /// Whether links of the image lead a path into a filesystem of the kernel's, which is mounted before
    /// all else.
    pub(super) fn leads_to_kernel(&self, path: &str) -> bool {
        !is_kernels(Path::new(path)) && self.resolve(path).is_none_or(|led| is_kernels(&led))
    }

    /// Where the links of the image lead a path. What is missing leads nowhere else. `None` after more
    /// links than the kernel follows.
    fn resolve(&self, path: &str) -> Option<PathBuf> {
        const LINKS_MAX: u32 = 40;
        let names = |path: &Path| -> Vec<_> {
            path.iter().filter(|name| *name != "/").map(ToOwned::to_owned).rev().collect()
        };
        let (mut left, mut at, mut links) = (names(Path::new(path)), PathBuf::from("/"), 0);
        while let Some(name) = left.pop() {
            if name == ".." {
                at.pop();
                continue;
            }
            let next = at.join(name);
            let found = self.open_beneath(&next.to_string_lossy(), OFlags::PATH | OFlags::NOFOLLOW);
            let Ok(target) = found.and_then(|found| rustix::fs::readlinkat(found, "", Vec::new()))
            else {
                at = next;
                continue;
            };
            links += 1;
            if links > LINKS_MAX {
                return None;
            }
            let target = PathBuf::from(OsString::from_vec(target.into_bytes()));
            if target.is_absolute() {
                at = PathBuf::from("/");
            }
            left.extend(names(&target));
        }
        Some(at)
    }

    /// An account file's text, lossy since names in JSON are UTF-8; empty if the image has none.
    pub(super) fn account_file(&self, path: &'static str) -> Result<String> {
        let shown = || self.path.join(path.trim_start_matches('/'));
        // An image may well have a device node here, whose driver would hear of an open, or a FIFO.
        let found = match self.open_beneath(path, OFlags::PATH) {
            Err(Errno::NOENT | Errno::NOTDIR) => return Ok(String::new()),
            other => other.at("reading", shown())?,
        };
        let stat = rustix::fs::fstat(&found).at("reading", shown())?;
        if !FileType::from_raw_mode(stat.st_mode).is_file() {
            let error = io::Error::new(io::ErrorKind::InvalidInput, "not a regular file");
            return Ok(Err(error).at("reading", shown())?);
        }
        let open = || {
            let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
            rustix::fs::open(path_of(&found), flags, Mode::empty())
        };
        let (start, mut opened) = (Instant::now(), open());
        // Each attempt asks the holder of a lease to give it up.
        while opened.as_ref().is_err_and(|error| *error == Errno::AGAIN)
            && start.elapsed() < LEASE_PATIENCE
        {
            std::thread::sleep(Duration::from_millis(1));
            opened = open();
        }
        let fd = match opened {
            Ok(fd) => fd,
            Err(Errno::AGAIN) => {
                let error =
                    io::Error::new(io::ErrorKind::WouldBlock, "a process may have a lease on it");
                return Ok(Err(error).at("reading", shown())?);
            }
            other => other.at("reading", shown())?,
        };
        let file = File::from(fd);
        let mut bytes = Vec::new();
        file.take(ACCOUNT_FILE_BYTES_MAX + 1).read_to_end(&mut bytes).at("reading", shown())?;
        if bytes.len() as u64 > ACCOUNT_FILE_BYTES_MAX {
            return Err(BundleError::AccountFileTooLarge(path));
        }
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }
}
