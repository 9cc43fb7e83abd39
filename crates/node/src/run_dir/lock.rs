//! Locks in the run directory.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use cofolio_store::Digest;
use rustix::fs::{FlockOperation, Mode, OFlags};

use super::error::At as _;
use super::{RunDir, RunDirError};

/// A lock file that is locked until this is dropped. The file is never removed: otherwise one
/// process could lock the old inode and another the new one.
#[derive(Debug)]
pub(crate) struct Lock(OwnedFd);

impl Lock {
    /// Nothing if another process has it.
    fn take(path: &Path, how: FlockOperation) -> Result<Option<Self>, RunDirError> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC;
        let file = rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR).at("open", path)?;
        Ok(try_flock(&file, how, path)?.then_some(Self(file)))
    }

    fn try_exclusive(path: &Path) -> Result<Option<Self>, RunDirError> {
        Self::take(path, FlockOperation::NonBlockingLockExclusive)
    }
}

/// Whether a lock could be had at once.
pub(crate) fn try_flock(
    file: &OwnedFd,
    how: FlockOperation,
    path: &Path,
) -> Result<bool, RunDirError> {
    match rustix::fs::flock(file, how) {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::WOULDBLOCK | rustix::io::Errno::INTR) => Ok(false),
        Err(errno) => Err(errno).at("lock", path),
    }
}

impl Drop for Lock {
    /// Closing is not enough: a process that is just being started has a copy of it.
    fn drop(&mut self) {
        let _ = rustix::fs::flock(&self.0, FlockOperation::Unlock);
    }
}

/// An image's lock, held until dropped.
#[derive(Debug)]
pub(crate) struct ImageLock {
    stripe: u8,
    _lock: Lock,
}

impl ImageLock {
    /// The first byte of the digests of the images that it is the lock of.
    pub(crate) fn stripe(&self) -> u8 {
        self.stripe
    }

    /// Whether it is the lock of this image, too.
    pub(crate) fn covers(&self, image: &Digest) -> bool {
        self.stripe == image.0[0]
    }
}

impl RunDir {
    /// Locks a directory that others may lock, too; [`RunDir::waits_until`] ends the waiting.
    pub(crate) fn wait_for_flock(&self, dir: &OwnedFd, path: &Path) -> Result<(), RunDirError> {
        self.waiting.wait_for(|| {
            let is_locked = try_flock(dir, FlockOperation::NonBlockingLockExclusive, path)?;
            Ok(is_locked.then_some(()))
        })
    }

    /// Locks everything of an image. Waits.
    pub(crate) fn lock_image(&self, image: &Digest) -> Result<ImageLock, RunDirError> {
        self.lock_stripe(image.0[0])
    }

    /// The same of all images with this first byte of their digests.
    pub(crate) fn lock_stripe(&self, stripe: u8) -> Result<ImageLock, RunDirError> {
        let path = self.stripe_path(stripe);
        let lock = self.waiting.wait_for(|| Lock::try_exclusive(&path))?;
        Ok(ImageLock { stripe, _lock: lock })
    }

    pub(crate) fn try_lock_image(&self, image: &Digest) -> Result<Option<ImageLock>, RunDirError> {
        let stripe = image.0[0];
        let lock = Lock::try_exclusive(&self.stripe_path(stripe))?;
        Ok(lock.map(|lock| ImageLock { stripe, _lock: lock }))
    }

    fn stripe_path(&self, stripe: u8) -> PathBuf {
        self.path.join(format!("locks/{stripe:02x}"))
    }

    /// Keeps superblocks of a trust domain from being taken down.
    pub(crate) fn share_domain(&self, domain: &str) -> Result<Lock, RunDirError> {
        let path = self.path.join(format!("locks/domain-{domain}"));
        self.waiting.wait_for(|| Lock::take(&path, FlockOperation::NonBlockingLockShared))
    }

    /// The lock of a trust domain, alone, unless somebody else has it for more than a moment.
    pub(crate) fn try_lock_domain(&self, domain: &str) -> Result<Option<Lock>, RunDirError> {
        const TRIES: u32 = 20;
        let path = self.path.join(format!("locks/domain-{domain}"));
        for _ in 0..TRIES {
            if let Some(lock) = Lock::try_exclusive(&path)? {
                return Ok(Some(lock));
            }
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        Ok(None)
    }

    /// The lock of whoever records a profile in a trust domain, unless somebody else has it.
    pub(crate) fn try_lock_recording(&self, domain: &str) -> Result<Option<Lock>, RunDirError> {
        Lock::try_exclusive(&self.path.join(format!("locks/recording-{domain}")))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// A process that is being started has copies of every descriptor. A copied lock once made
    /// whoever only tried it skip an idle base: three of fifteen test runs found one left.
    #[test]
    fn a_lock_is_given_up_although_a_copy_of_it_is_open() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("locks")).unwrap();
        let (run, image) = (RunDir::open(dir.path()).unwrap(), Digest([1; 32]));
        let lock = run.lock_image(&image).unwrap();
        let _copy = lock._lock.0.try_clone().unwrap();
        assert!(run.try_lock_image(&image).unwrap().is_none());
        drop(lock);
        assert!(run.try_lock_image(&image).unwrap().is_some());
    }
}
