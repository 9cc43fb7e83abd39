//! Mounts of which only some directories can be written to.
//!
//! The root is a clone of the image's shared read-only mount. The mount also has an overlay of its
//! own, with one directory of changes, attached nowhere as a whole: a clone of each writable
//! directory of it lies over that directory of the root. So the kernel makes inodes of the overlay
//! for these directories alone, and all else is as for every writable mount.
//!
//! The tree is put together before it is attached (Linux 6.15), or else at its target.

use std::collections::HashSet;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Component, Path, PathBuf};
use std::time::{Duration, Instant};

use cofolio_sys::mount::{MountId, mount_id};
use rustix::fs::{CWD, OFlags, readlinkat};
use rustix::io::Errno;
use rustix::mount::MountAttrFlags;

use super::error::{At as _, MountError, refused};
use super::in_use::{self, Copies};
use super::kernel::{self, KernelError, attach, clone_mount, open_below, open_directory_below};
use super::mountinfo;
use super::records::{MountNumbers, Upper};

/// How long an unmount waits for passing users.
const PATIENCE: Duration = Duration::from_millis(500);
/// How many directories of a mount can be writable. Each is a mount, and the kernel copies all of them for
/// every mount namespace.
pub(crate) const WRITABLE_DIRS_MAX: usize = 64;

/// Checks the directories that a caller gave, and writes each in one way: `/var/lib`.
pub(crate) fn checked(dirs: &[PathBuf]) -> Result<Vec<PathBuf>, MountError> {
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
        if checked.len() == WRITABLE_DIRS_MAX {
            return refuse(format!("at most {WRITABLE_DIRS_MAX} directories can be given"));
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
    let problem = |errno| match (errno, link_at(&root, name)) {
        (Errno::NOENT, _) => "the image has no such directory".to_owned(),
        (Errno::LOOP | Errno::NOTDIR, Some(to)) => {
            format!("it is a symbolic link in the image, to {to}: name the directory itself")
        }
        (Errno::LOOP, None) => "a symbolic link of the image is in the path".to_owned(),
        (_, _) => "it is not a directory in the image".to_owned(),
    };
    open_directory_below(&root, name).map_err(|errno| match errno {
        Errno::NOENT | Errno::LOOP | Errno::NOTDIR => problem_of(dir, problem(errno)),
        errno => refused(KernelError::new(format!("open {} of the image", dir.display()), errno)),
    })
}

/// Where a symbolic link of the image leads; `None` for anything else.
fn link_at(root: impl AsFd, name: &str) -> Option<String> {
    let link = open_below(root, name, OFlags::PATH).ok()?;
    let to = readlinkat(link, "", Vec::new()).ok()?;
    Some(to.to_string_lossy().into_owned())
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

/// Unmounts the mount at `at` and its writable directories in one step: nobody ever sees the one
/// without the others, and a process that is killed leaves all of them or none.
///
/// The kernel does that without asking who uses them. So this asks first, for half a second, as
/// there are passing users. A process that comes after that keeps the files that it has opened, and
/// an overlay that is in use keeps its changes.
///
/// # Errors
/// [`MountError::Busy`] says who uses it; [`MountError::Io`] if that cannot be found out. The
/// mount is still there then.
pub(super) fn unmount(
    root: &Path,
    at: &Path,
    mount: MountNumbers,
    upper: &Upper,
) -> Result<(), MountError> {
    let attempt = || detach_if_unchanged(root, at, mount, upper, &ask(root, at, mount, upper)?);
    let begun = Instant::now();
    for pause in [5, 20, 80, 400] {
        // All processes are looked at, which takes long where they have many files: not again and
        // again, since others wait for the image's lock.
        let tried = match used_dir(at, upper)? {
            Some(_) => None,
            None => Some(attempt()),
        };
        match tried {
            None => {}
            Some(Err(MountError::Busy { .. })) if begun.elapsed() < PATIENCE => {}
            Some(done) => return done,
        }
        std::thread::sleep(Duration::from_millis(pause));
    }
    attempt()
}

/// A writable directory of the mount that somebody uses: the kernel says that at once, but not who.
fn used_dir<'a>(at: &Path, upper: &'a Upper) -> Result<Option<&'a PathBuf>, MountError> {
    for dir in &upper.dirs {
        if kernel::is_held(&at.join(below(dir))).map_err(refused)? {
            return Ok(Some(dir));
        }
    }
    Ok(None)
}

fn busy(at: &Path, reason: String) -> MountError {
    MountError::Busy { path: at.to_owned(), reason }
}

/// The numbers of all mounts that MNT_DETACH would take, in any mount namespace, if none is in use.
///
/// # Errors
/// [`MountError::Busy`]; [`MountError::Io`] if it cannot be found out who uses it.
pub(super) fn ask(
    root: &Path,
    at: &Path,
    mount: MountNumbers,
    upper: &Upper,
) -> Result<HashSet<u64>, MountError> {
    let (mut ids, copies) = own_mounts(root, at, mount, upper)?;
    let devices: Vec<_> = [device_at(at)?].into_iter().chain(upper.device).collect();
    let mut user = copies.and_then(|copies| copies.add_elsewhere(root, &mut ids));
    if user.is_none() {
        user = in_use::process_on(root, &ids, &devices)
            .at("look at processes in", root.join("proc"))?;
    }
    if user.is_none() {
        let devices = root.join("sys/block");
        user = in_use::loop_device_on(root, at).at("look at loop devices in", devices)?;
    }
    if let Some(user) = user {
        return Err(busy(at, user));
    }
    match used_dir(at, upper)? {
        Some(dir) => {
            let dir = dir.display();
            let who = "a socket, the kernel or a stopped `cofolio serve`";
            Err(busy(at, format!("{who} holds a file of {dir}")))
        }
        None => Ok(ids),
    }
}

/// Detaches the mounts of which [`ask`] said that they are not in use.
///
/// That took milliseconds, in which anybody may have mounted something. MNT_DETACH takes what is
/// mounted on the mount as well, or, if that covers the mount's root, takes only that. So the mounts
/// are read once more, immediately before. The descriptor keeps to our mount if another one took its
/// place.
///
/// # Errors
/// [`MountError::Busy`]; the mount is still there then.
pub(super) fn detach_if_unchanged(
    root: &Path,
    at: &Path,
    mount: MountNumbers,
    upper: &Upper,
    asked: &HashSet<u64>,
) -> Result<(), MountError> {
    let is_it = |found: MountId| found.is_root && mount.is(found.id, found.unique);
    let changed = || busy(at, "somebody has changed what is mounted there meanwhile".to_owned());
    let root_fd = kernel::open_dir(at).at("open", at)?;
    if !is_it(mount_id(&root_fd, "").at("look at", at)?)
        || !own_mounts(root, at, mount, upper)?.0.is_subset(asked)
    {
        return Err(changed());
    }
    kernel::detach(&root_fd).map_err(refused)?;
    // Something may have covered it even now, and have been detached in its place.
    match mount_id(CWD, at) {
        Ok(found) if is_it(found) => Err(changed()),
        _ => Ok(()),
    }
}

/// The numbers of the mount and of those of this namespace that are detached with it, and where else
/// to look for such mounts.
///
/// # Errors
/// [`MountError::Busy`] for a mount that must not go with it.
fn own_mounts(
    root: &Path,
    at: &Path,
    mount: MountNumbers,
    upper: &Upper,
) -> Result<(HashSet<u64>, Option<Copies>), MountError> {
    let mounts = mountinfo::read(root).at("read", mountinfo::path(root))?;
    let targets: Vec<_> = upper.dirs.iter().map(|dir| at.join(below(dir))).collect();
    let parts = mounts.iter().filter(|it| {
        it.parent == mount.id && Some(it.device) == upper.device && targets.contains(&it.target)
    });
    let mut ids: HashSet<u64> = parts.map(|it| it.id).chain([mount.id]).collect();
    let other = mounts.iter().find(|it| ids.contains(&it.parent) && !ids.contains(&it.id));
    if let Some(other) = other {
        return Err(busy(at, format!("something is mounted at {}", other.target.display())));
    }
    let own = mounts.iter().find(|it| it.id == mount.id);
    let mut copies = own.and_then(|own| Copies::of(&mounts, own, upper));
    if let Some(path) = copies.as_mut().and_then(|copies| copies.add(&mounts, &mut ids)) {
        return Err(busy(at, format!("there is a copy of it at {}", path.display())));
    }
    Ok((ids, copies))
}

/// Device number of the superblock at a path that is a mount's root.
pub(super) fn device_at(path: &Path) -> Result<(u32, u32), MountError> {
    device_of(&kernel::open_dir(path).at("open", path)?)
}

/// Device number of a mount's superblock.
pub(super) fn device_of(mount: &OwnedFd) -> Result<(u32, u32), MountError> {
    let device = rustix::fs::fstat(mount).at("look at", "overlay")?.st_dev;
    Ok((rustix::fs::major(device), rustix::fs::minor(device)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A link was called "not a directory", and nobody was told which directory to name.
    #[test]
    fn a_link_of_the_image_is_called_one() {
        let image = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(image.path().join("usr/bin")).unwrap();
        std::fs::write(image.path().join("file"), "").unwrap();
        std::os::unix::fs::symlink("usr/bin", image.path().join("bin")).unwrap();
        std::os::unix::fs::symlink("usr", image.path().join("all")).unwrap();
        let root = std::fs::File::open(image.path()).unwrap();
        let opened = |dir: &str| open_in(&root, Path::new(dir)).map_err(|error| error.to_string());
        opened("/usr/bin").unwrap();
        for (dir, problem) in [
            ("/bin", "it is a symbolic link in the image, to usr/bin: "),
            ("/all/bin", "a symbolic link of the image is in the path"),
            ("/file", "it is not a directory in the image"),
            ("/none", "the image has no such directory"),
        ] {
            let error = opened(dir).unwrap_err();
            assert!(error.contains(problem), "{dir}: {error}");
        }
    }
}
