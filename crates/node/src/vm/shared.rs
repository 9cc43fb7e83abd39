//! Files that machines of one kernel share. Each is made once, for the first machine. Files that no
//! machine uses are removed when another file is made: the run directory may be in memory.
//!
//! ```text
//! <run>/vms                              locked while a file is looked for, made or removed
//! <run>/vms/<key>.{initramfs,vmlinux}    locked (shared) by each VMM that uses it
//! <run>/vms/<key>.new                    a file that is being written
//! ```

use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use cofolio_store::{Purpose, replace_file};
use rustix::fs::{CWD, FlockOperation, flock};
use sha2::{Digest as _, Sha256};

use super::error::Result;
use crate::mount::At as _;
use crate::run_dir;

/// What the names of these files end with.
pub(super) const INITRAMFS: &str = "initramfs";
pub(super) const VMLINUX: &str = "vmlinux";

/// A file that machines share.
#[derive(Debug)]
pub struct SharedFile {
    /// Its path.
    pub path: PathBuf,
    /// Keeps it as long as this is open in a process. Belongs to the VMM.
    pub lock: OwnedFd,
}

/// The file of a kind for `key` in a directory: the one that is there, or the one that `make`
/// makes.
///
/// # Errors
/// Those of `make`; [`VmError::Mount`](super::VmError::Mount).
pub(super) fn shared_file(
    dir: &Path,
    key: Sha256,
    kind: &str,
    make: impl FnOnce() -> Result<Vec<u8>>,
) -> Result<SharedFile> {
    let path = dir.join(format!("{}.{kind}", &const_hex::encode(key.finalize())[..16]));
    // Several machines may be the first of a kernel at the same time.
    let held = File::open(dir).at("opening", dir)?;
    flock(&held, FlockOperation::LockExclusive).at("locking", dir)?;
    if !path.is_file() {
        remove_unused(dir);
        let (aside, content) = (path.with_extension("new"), make()?);
        let written = replace_file(CWD, &aside, &path, &content, Purpose::Record, false);
        written.at("writing", &path)?;
    }
    let lock = OwnedFd::from(File::open(&path).at("opening", &path)?);
    flock(&lock, FlockOperation::LockShared).at("locking", &path)?;
    Ok(SharedFile { path, lock })
}

/// Removes the files that no VMM uses, and those that a killed process has left half written. The
/// directory is locked. What cannot be removed now is tried again with the next file.
fn remove_unused(dir: &Path) {
    let is_unlocked = |path: &Path| {
        let exclusive = FlockOperation::NonBlockingLockExclusive;
        File::open(path).is_ok_and(|file| flock(&file, exclusive).is_ok())
    };
    for name in run_dir::list(dir).unwrap_or_default() {
        let path = dir.join(&name);
        let is_unused = match name.rsplit_once('.') {
            Some((_, INITRAMFS | VMLINUX)) => is_unlocked(&path),
            Some((_, "new")) => true,
            _ => false,
        };
        // A machine is a directory, whatever its name.
        if is_unused && path.is_file() {
            let _ = fs::remove_file(path);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests may panic")]

    use std::sync::atomic::{AtomicU32, Ordering};
    use std::thread;

    use super::*;

    fn file(dir: &Path, key: &str, kind: &str, content: &[u8]) -> SharedFile {
        let key = Sha256::new_with_prefix(key);
        shared_file(dir, key, kind, || Ok(content.to_vec())).unwrap()
    }

    fn left(dir: &Path) -> Vec<String> {
        run_dir::list(dir).unwrap()
    }

    /// Each kernel, program and set of modules left a file in the run directory, which was never
    /// removed.
    #[test]
    fn a_file_that_no_machine_uses_goes_when_another_is_made() {
        let top = tempfile::tempdir().unwrap();
        let dir = top.path();
        let used = file(dir, "used", INITRAMFS, b"used");
        // What a VMM has inherited keeps a file.
        let inherited = used.lock.try_clone().unwrap();
        drop(used.lock);
        drop(file(dir, "old", INITRAMFS, b"old"));
        drop(file(dir, "old", VMLINUX, b"old"));
        // A machine can have such a name, and a killed process leaves such a file.
        fs::create_dir(dir.join("mine.vmlinux")).unwrap();
        fs::write(dir.join("0123456789abcdef.new"), "half").unwrap();
        assert_eq!(left(dir).len(), 4, "{:?}", left(dir));

        let new = file(dir, "new", VMLINUX, b"new");
        assert_eq!(fs::read(&new.path).unwrap(), b"new");
        assert_eq!(fs::read(&used.path).unwrap(), b"used");
        assert_eq!(left(dir).len(), 3, "{:?}", left(dir));
        // It is there again for the next machine of its kernel, and is not made anew.
        drop(inherited);
        assert_eq!(fs::read(file(dir, "used", INITRAMFS, b"other").path).unwrap(), b"used");
        drop(new);
        drop(file(dir, "last", INITRAMFS, b"last"));
        assert_eq!(left(dir).len(), 2, "{:?}", left(dir));
    }

    /// Nothing was locked while an ELF file was extracted from a kernel: of two machines that were
    /// its first with Firecracker, one could fail, or boot from half a file.
    #[test]
    fn several_first_machines_make_a_file_once() {
        let top = tempfile::tempdir().unwrap();
        let (dir, made) = (top.path(), AtomicU32::new(0));
        let start = || {
            let make = || {
                made.fetch_add(1, Ordering::Relaxed);
                Ok(vec![7; 1 << 20])
            };
            let file = shared_file(dir, Sha256::new(), VMLINUX, make).unwrap();
            assert_eq!(fs::read(&file.path).unwrap(), [7; 1 << 20]);
        };
        thread::scope(|scope| (0..8).for_each(|_| _ = scope.spawn(start)));
        assert_eq!(made.into_inner(), 1);
    }
}
