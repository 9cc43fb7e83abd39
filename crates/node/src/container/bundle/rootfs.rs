//! The root filesystem of a container before it starts: what it has, and where its links lead.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fd::OwnedFd;
use rustix::fs::{FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use super::{BundleError, Result};
use crate::mount::At as _;
use crate::mount::kernel::path_of;

/// Where pseudo filesystems are mounted in a container, before all else.
pub(super) const PSEUDO_PATHS: [&str; 3] = ["/proc", "/sys", "/dev"];

/// A `/etc/passwd` or `/etc/group` larger than this is refused: it is read into memory.
pub(super) const ACCOUNT_FILE_BYTES_MAX: u64 = 16 << 20;

/// How long to retry while another process holds a lease on an account file.
const LEASE_PATIENCE: Duration = Duration::from_secs(5);

pub(super) fn is_pseudo(path: &Path) -> bool {
    PSEUDO_PATHS.iter().any(|pseudo| path.starts_with(pseudo))
}

/// Opens what is at a path below a directory, looked into as if that were `/`.
fn open_in(dir: &OwnedFd, path: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    let (flags, mode) = (flags | OFlags::CLOEXEC, Mode::empty());
    let open = || rustix::fs::openat2(dir, path, flags, mode, ResolveFlags::IN_ROOT);
    // A rename or a mount anywhere meanwhile may have led `..` out of the directory, so the kernel asks
    // to try again.
    let mut tries = (0..1000).map(|_| open());
    tries.find(|opened| !matches!(opened, Err(Errno::AGAIN))).unwrap_or(Err(Errno::AGAIN))
}

/// Where a link leads, if that is what a path below a directory is.
pub(super) fn link_in(dir: &OwnedFd, path: &Path) -> rustix::io::Result<Option<PathBuf>> {
    let found = open_in(dir, path, OFlags::PATH | OFlags::NOFOLLOW);
    match found.and_then(|found| rustix::fs::readlinkat(found, "", Vec::new())) {
        // It is missing, or it is no link.
        Err(Errno::NOENT | Errno::NOTDIR) => Ok(None),
        found => Ok(Some(OsString::from_vec(found?.into_bytes()).into())),
    }
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

    pub(super) fn open_beneath(
        &self,
        path: impl AsRef<Path>,
        flags: OFlags,
    ) -> rustix::io::Result<OwnedFd> {
        open_in(&self.fd, path.as_ref(), flags)
    }

    pub(super) fn exists(&self, path: &str) -> bool {
        self.open_beneath(path, OFlags::PATH).is_ok()
    }

    pub(super) fn is_directory(&self, path: &str) -> bool {
        self.open_beneath(path, OFlags::PATH | OFlags::DIRECTORY).is_ok()
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
