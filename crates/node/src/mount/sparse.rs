//! Mounts of which only some directories can be written to.
//!
//! The root is a clone of the image's shared read-only mount. The mount also has an overlay of its
//! own, with one directory of changes, attached nowhere as a whole: a clone of each writable
//! directory of it lies over that directory of the root. So the kernel makes inodes of the overlay
//! for these directories alone, and all else is as for every writable mount.
//!
//! The tree is put together before it is attached (Linux 6.15), or else at its target.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use rustix::io::Errno;
use rustix::mount::MountAttrFlags;

use super::error::{At as _, MountError, refused};
use super::kernel::{self, KernelError, attach, clone_mount, open_dir, open_directory_below};
use super::numbers_at;
use super::shown::device_at;

/// Each is a mount, and the kernel copies all of them for every mount namespace.
const DIRS_MAX: usize = 64;

/// Checks the directories that a caller gave, and writes each in one way: `/var/lib`.
pub(super) fn checked(dirs: &[PathBuf]) -> Result<Vec<PathBuf>, MountError> {
    let mut checked: Vec<PathBuf> = Vec::new();
    for dir in dirs {
        let refuse = |problem: String| Err(problem_of(dir, problem));
        let mut path = PathBuf::new();
        for part in dir.components() {
            match part {
                Component::RootDir | Component::Normal(_) => path.push(part),
                _ if path.as_os_str().is_empty() => break,
                _ => return refuse("`..` is not allowed in it".to_owned()),
            }
        }
        if !path.is_absolute() {
            return refuse("the path is not absolute".to_owned());
        }
        if path.to_str().is_none() {
            return refuse("the path is not UTF-8".to_owned());
        }
        if path.parent().is_none() {
            return refuse(
                "a mount whose whole root is writable is asked for with --rw".to_owned(),
            );
        }
        if checked.contains(&path) {
            return refuse("it is given twice".to_owned());
        }
        let nested = |other: &&PathBuf| path.starts_with(other) || other.starts_with(&path);
        if let Some(other) = checked.iter().find(nested) {
            return refuse(format!("it and {} are nested", other.display()));
        }
        if checked.len() == DIRS_MAX {
            return refuse(format!("at most {DIRS_MAX} directories can be given"));
        }
        checked.push(path);
    }
    Ok(checked)
}

pub(super) fn problem_of(dir: &Path, problem: impl Into<String>) -> MountError {
    MountError::WritableDir { dir: dir.to_owned(), problem: problem.into() }
}

/// The path below the root.
pub(super) fn below(dir: &Path) -> &Path {
    dir.strip_prefix("/").unwrap_or(dir)
}

/// Opens a directory of the image, whose root is `root`.
pub(super) fn open_in(root: impl AsFd, dir: &Path) -> Result<OwnedFd, MountError> {
    let name = below(dir).to_str().unwrap_or_default();
    open_directory_below(root, name).map_err(|errno| match errno {
        Errno::NOENT => problem_of(dir, "the image has no such directory"),
        Errno::LOOP => problem_of(dir, "a symbolic link of the image is in the path"),
        Errno::NOTDIR => problem_of(dir, "it is not a directory in the image"),
        errno => refused(KernelError::new(format!("open {} of the image", dir.display()), errno)),
    })
}

/// Puts clones of directories of the overlay `whole` over those of `root`; both are detached. False
/// where the kernel cannot do that with detached mounts: then nothing is done.
pub(super) fn assemble(
    root: &OwnedFd,
    whole: &OwnedFd,
    dirs: &[PathBuf],
) -> Result<bool, MountError> {
    for (number, dir) in dirs.iter().enumerate() {
        let (from, at) = (open_in(whole, dir)?, open_in(root, dir)?);
        let none = MountAttrFlags::empty();
        let made = clone_mount(&from, Path::new(""), none, None).and_then(|it| attach(&it, &at));
        match made {
            Err(error) if error.errno == Errno::INVAL && number == 0 => return Ok(false),
            made => made.map_err(refused)?,
        }
    }
    Ok(true)
}

/// The same with `root` attached at `target`. For a moment the first directory shows the whole
/// overlay: before Linux 6.15 only attached mounts can be cloned. After an error the caller removes
/// the root, and with it everything below.
pub(super) fn assemble_at(
    target: &Path,
    root: &OwnedFd,
    whole: &OwnedFd,
    dirs: &[PathBuf],
) -> Result<(), MountError> {
    let Some(first) = dirs.first() else { return Ok(()) };
    attach(whole, open_in(root, first)?).map_err(refused)?;
    let clone = |dir: &PathBuf| {
        let from = open_in(whole, dir)?;
        clone_mount(&from, Path::new(""), MountAttrFlags::empty(), None).map_err(refused)
    };
    let clones = dirs.iter().map(clone).collect::<Result<Vec<_>, _>>()?;
    kernel::unmount(&target.join(below(first)), true).map_err(refused)?;
    for (dir, mount) in dirs.iter().zip(clones) {
        attach(&mount, open_in(root, dir)?).map_err(refused)?;
    }
    Ok(())
}

/// Unmounts the writable directories and then the root at `target`. If one of them is in use, all
/// are put back, and it is tried again for half a second, for passing users.
///
/// The kernel says only by trying whether the root is in use, and only when nothing is mounted over
/// it. So for an instant of each try the directories show the image's own files, and a process that
/// is killed then leaves the users of the root without them. If one cannot be put back, the error
/// is not `BUSY` and names it.
pub(super) fn unmount(
    target: &Path,
    dirs: &[PathBuf],
    device: Option<(u32, u32)>,
) -> Result<(), KernelError> {
    for pause in [5, 20, 80, 400] {
        match try_unmount(target, dirs, device) {
            Err(error) if error.errno == Errno::BUSY => {
                std::thread::sleep(Duration::from_millis(pause));
            }
            other => return other,
        }
    }
    try_unmount(target, dirs, device)
}

fn try_unmount(
    target: &Path,
    dirs: &[PathBuf],
    device: Option<(u32, u32)>,
) -> Result<(), KernelError> {
    let mut taken = Vec::new();
    let mut take = |dir: &PathBuf| {
        let at = target.join(below(dir));
        // umount(8) may have taken it away.
        if !numbers_at(&at).is_ok_and(|found| found.is_root) {
            return Ok(());
        }
        if device_at(&at) != device {
            return Err(KernelError::new(format!("umount {}", at.display()), Errno::BUSY));
        }
        let clone = clone_at(&at)?;
        kernel::unmount(&at, false)?;
        taken.push((at, clone));
        Ok(())
    };
    let unmounted = dirs.iter().try_for_each(&mut take);
    let unmounted = unmounted.and_then(|()| kernel::unmount(target, false));
    if unmounted.is_err() {
        // The root is there: it is in use.
        put_back(taken, |at, clone| {
            let dir = open_dir(at).map_err(|errno| KernelError::new("open", errno))?;
            attach(clone, dir)
        })?;
    }
    unmounted
}

/// Attaches what was taken away, whatever becomes of the others. What fails is tried again.
fn put_back<C>(
    mut taken: Vec<(PathBuf, C)>,
    mut attach: impl FnMut(&Path, &C) -> Result<(), KernelError>,
) -> Result<(), KernelError> {
    let mut last = None;
    for pause in [0, 5, 20, 80, 400] {
        std::thread::sleep(Duration::from_millis(pause));
        taken.retain(|(at, clone)| {
            let failed = attach(at, clone).err();
            let stays = failed.is_some();
            last = failed.or(last.take());
            stays
        });
        if taken.is_empty() {
            return Ok(());
        }
    }
    let paths: Vec<_> = taken.iter().map(|(at, _)| at.display().to_string()).collect();
    let what = format!("in use, and no longer writable: put back {}", paths.join(", "));
    // Whoever hears that it is only busy tries again, and would find nothing to put back.
    let errno = last.map_or(Errno::IO, |error| error.errno);
    Err(KernelError::new(what, if errno == Errno::BUSY { Errno::IO } else { errno }))
}

fn clone_at(at: &Path) -> Result<OwnedFd, KernelError> {
    let dir = open_dir(at).map_err(|errno| KernelError::new("open", errno))?;
    clone_mount(&dir, Path::new(""), MountAttrFlags::empty(), None)
}

/// Device number of a mount's superblock.
pub(super) fn device_of(mount: &OwnedFd) -> Result<(u32, u32), MountError> {
    let device = rustix::fs::fstat(mount).at("look at", "overlay")?.st_dev;
    Ok((rustix::fs::major(device), rustix::fs::minor(device)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A directory that could not be put back after a busy umount was forgotten: the caller heard
    /// that the mount was in use, and writers got EROFS.
    #[test]
    fn a_directory_that_is_not_put_back_is_named() {
        let taken = || ["/m/a", "/m/b", "/m/c"].map(|at| (PathBuf::from(at), ())).to_vec();
        let mut tries = Vec::new();
        let once = |at: &Path, (): &()| {
            let is_first = tries.iter().all(|tried| tried != at);
            tries.push(at.to_owned());
            if is_first { Err(KernelError::new("open", Errno::MFILE)) } else { Ok(()) }
        };
        put_back(taken(), once).unwrap();
        assert_eq!(tries.len(), 6);

        let mut attached = Vec::new();
        let error = put_back(taken(), |at, ()| match at.ends_with("b") {
            true => Err(KernelError::new("attach", Errno::BUSY)),
            false => {
                attached.push(at.to_owned());
                Ok(())
            }
        });
        let error = error.unwrap_err();
        assert_eq!(attached, [Path::new("/m/a"), Path::new("/m/c")]);
        assert!(error.to_string().contains("no longer writable: put back /m/b"), "{error}");
        assert_ne!(error.errno, Errno::BUSY);
    }
}
