//! Whether a superblock is still in use, in any mount namespace or by an open descriptor.
//!
//! mountinfo shows one mount namespace only. A container, `unshare -m`, a detached mount with an
//! open descriptor, or an overlay can keep a superblock unseen. So we ask the kernel about the
//! superblock itself (measured on Linux 6.18, see `docs/notes/2026-11-23-in-use.md`):
//!
//! - **EROFS:** `/sys/fs/erofs/<name>` exists as long as the superblock, and
//!   `FS_IOC_GETFSSYSFSPATH` gives the name. Overlays hold private mounts of their lower layers, so
//!   an entry that outlives our own mounts has other users.
//! - **A writable overlay** marks its upper directory's inode as in use (`I_OVL_INUSE`) until its
//!   superblock ends. With `index=on` the kernel refuses another overlay there with EBUSY.
//!
//! Both answers come too late for `inode-share`: Linux 7.2 must not end a superblock while another
//! one is read. There we look at all mount namespaces first ([`users_elsewhere`]), as for bind
//! mounts of volumes ([`is_bound`]). Neither sees a namespace that only a descriptor or a
//! bind mount keeps.
//!
//! In doubt a superblock counts as in use, which costs memory and disk space until a restart.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use rustix::fs::{AtFlags, CWD, StatxFlags};
use rustix::io::Errno;
use sha2::{Digest as _, Sha256};

use super::error::{At as _, MountError};
use super::kernel::{Context, KernelError, open_dir, path_of, reopen};
use super::mountinfo::{self, KernelMount, TaskRoot};
use super::numbers_at;
use super::records::Upper;
use super::sparse::below;
use super::upper::{find_below, make_below};
use crate::address_space::{is_unanswered, probe_and_access};
use crate::processes::{self, numbered};

/// Prefix of image users that stand for a superblock with users that we cannot see.
const PREFIX: &str = "superblock-";
const SYSFS: &str = "sys/fs/erofs";

/// An EROFS superblock: its name in sysfs and that entry's inode number, which is not reused. Where
/// `/sys` is missing the number is unknown, and any entry of that name counts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Superblock(String, Option<u64>);

impl Superblock {
    /// The superblock of a mount with this root; `root` is where `/sys` is looked up.
    pub(super) fn of(mount: impl AsFd, root: &Path) -> Result<Self, MountError> {
        let file = reopen(mount).at("open", "image root")?;
        let path = loop {
            match cofolio_sys::mount::sysfs_path(&file) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // Before Linux 6.10, where EROFS needs a block device: the entry has its name.
                Err(error) if error.raw_os_error() == Some(Errno::NOTTY.raw_os_error()) => {
                    let device = rustix::fs::fstat(&file).at("look at", "image root")?.st_dev;
                    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
                    let link = root.join(format!("sys/dev/block/{major}:{minor}"));
                    break fs::read_link(&link).at("read", link)?;
                }
                other => break other.at("ask for the superblock's name of", "image root")?,
            }
        };
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let entry = root.join(SYSFS).join(&name);
        match inode(&entry) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Self(name, None)),
            found => Ok(Self(name, Some(found.at("look at", entry)?))),
        }
    }

    /// The superblock that a user of an image stands for, if it is one.
    pub(super) fn from_user(user: &str) -> Option<Self> {
        let (name, inode) = user.strip_prefix(PREFIX)?.rsplit_once('-')?;
        Some(Self(name.to_owned(), inode.parse().ok()))
    }

    /// Name under which it is a user of an image.
    pub(super) fn user(&self) -> String {
        let inode = self.1.map(|inode| inode.to_string()).unwrap_or_default();
        format!("{PREFIX}{}-{inode}", self.0)
    }

    pub(super) fn is_alive(&self, root: &Path) -> bool {
        let sysfs = root.join(SYSFS);
        match inode(&sysfs.join(&self.0)) {
            Ok(found) => self.1.is_none_or(|inode| inode == found),
            Err(error) => error.kind() != io::ErrorKind::NotFound || !sysfs.is_dir(),
        }
    }
}

/// A second for all questions of a command whether something has ended. A process that was just
/// forked holds our descriptors until exec, and a runtime that starts a container has copies of all
/// mounts until it changes the root.
pub(crate) struct Patience(AtomicU64);

impl Default for Patience {
    fn default() -> Self {
        Self(AtomicU64::new(1000))
    }
}

impl Patience {
    pub(super) fn renew(&self) {
        self.0.store(1000, Relaxed);
    }

    /// Asks until the answer is yes, and at least once.
    pub(crate) fn wait<E>(&self, mut ask: impl FnMut() -> Result<bool, E>) -> Result<bool, E> {
        let mut pause = 1;
        loop {
            let left = self.0.load(Relaxed);
            if ask()? {
                return Ok(true);
            }
            if left == 0 {
                return Ok(false);
            }
            pause = left.min(pause);
            std::thread::sleep(Duration::from_millis(pause));
            let _ = self.0.fetch_update(Relaxed, Relaxed, |left| Some(left.saturating_sub(pause)));
            pause *= 4;
        }
    }
}

/// Work directory that [`has_overlay`] gives the kernel; made with `upper`, before the disk fills.
pub(super) const PROBE: &str = "probe";

/// Whether an overlay whose changes go to `dir/upper` exists: tries to make another one, which
/// fails while the first one exists, and removes its leftovers.
///
/// # Errors
/// [`MountError::Kernel`] where the kernel gives neither answer; [`MountError::Io`].
pub(super) fn has_overlay(dir: &Path, patience: &Patience) -> Result<bool, MountError> {
    let base = match open_dir(dir) {
        Err(Errno::NOENT) => return Ok(false),
        other => other.at("open", dir)?,
    };
    let Some(upper) = find_below(&base, dir, "upper")? else { return Ok(false) };
    // Any directory apart from the other two will do as the lower layer.
    let Some(lower) = find_below(&base, dir, "work")? else { return Ok(false) };
    let (probe, _) = make_below(&base, dir, PROBE)?;
    let made = || -> Result<(), KernelError> {
        let context = Context::open("overlay")?;
        context.layer("lowerdir", lower.as_fd())?;
        context.layer("upperdir", upper.as_fd())?;
        context.layer("workdir", probe.as_fd())?;
        context.string("index", "on")?;
        // Else the kernel syncs the filesystem of the upper directory when this overlay ends.
        context.flag("ro")?;
        context.create()
    };
    let is_free = patience.wait(|| match made() {
        Ok(()) => Ok(true),
        Err(error) if error.errno == Errno::BUSY => Ok(false),
        // It got past the upper directory, which the kernel takes first.
        Err(error) if matches!(error.errno, Errno::NOSPC | Errno::DQUOT | Errno::STALE) => Ok(true),
        Err(error) => Err(MountError::Kernel(error)),
    })?;
    if !is_free {
        return Ok(true);
    }
    let upper = reopen(upper).at("open", dir)?;
    for name in ["trusted.overlay.origin", "trusted.overlay.uuid"] {
        let _ = rustix::fs::fremovexattr(&upper, name);
    }
    // One that is left is used again.
    let _ = fs::remove_dir_all(Path::new(&path_of(&base)).join(PROBE));
    Ok(false)
}

/// Who uses superblocks outside of the run directory, as far as mounts tell.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Elsewhere {
    /// A mount of one of them exists, or may exist.
    Mounted,
    /// No such mount. These overlays may have one as a layer.
    Overlays(BTreeSet<String>),
}

/// Looks for mounts of these superblocks in all mount namespaces, except below `run` and copies
/// that the kernel unmounts with those, and for overlays that may have one as a layer.
///
/// No layer's path in mountinfo is looked up: a mount that came since may cover it, an unmount may
/// uncover another directory, and a FUSE server there may never answer. So an overlay may have one,
/// unless our namespace shows its superblock as ours, or in a mount that is older than `oldest`, the
/// unique number of the first mount of these superblocks.
pub(super) fn users_elsewhere(
    root: &Path,
    run: &Path,
    devices: &HashSet<(u32, u32)>,
    oldest: Option<u64>,
) -> io::Result<Elsewhere> {
    let is_pin =
        |mount: &&KernelMount| devices.contains(&mount.device) && mount.target.starts_with(run);
    let is_user = |mount: &KernelMount| devices.contains(&mount.device) && !is_pin(&mount);
    let is_overlay = |mount: &&KernelMount| mount.filesystem == "overlay";
    let is_foreign = |mount: &&KernelMount| is_overlay(mount) && mount.image().is_none();
    let named = |mount: &KernelMount| (mount.device, overlay_name(mount));

    // Our namespace is read twice, because something may come from it or go to it meanwhile.
    let own = TaskRoot::of(&root.join("proc/thread-self")).ok().flatten();
    let before = mountinfo::read(root)?;
    if before.iter().any(is_user) {
        return Ok(Elsewhere::Mounted);
    }
    let known: HashSet<u64> = before.iter().map(|mount| mount.id).collect();
    let groups: HashSet<u64> =
        before.iter().filter(is_pin).flat_map(|mount| mount.groups.iter().copied()).collect();
    let mut overlays: HashMap<_, _> = before.iter().filter(is_foreign).map(named).collect();
    let is_mounted = is_shown(root, own.into_iter().collect(), |_, mounts| {
        overlays.extend(mounts.iter().filter(is_overlay).map(named));
        mounts.iter().any(|mount| {
            let follows = || mount.groups.iter().any(|group| groups.contains(group));
            !known.contains(&mount.id) && devices.contains(&mount.device) && !follows()
        })
    });
    let after = mountinfo::read(root)?;
    if is_mounted || after.iter().any(is_user) {
        return Ok(Elsewhere::Mounted);
    }
    overlays.extend(after.iter().filter(is_foreign).map(named));
    for mount in after.iter().filter(is_overlay) {
        // If another overlay had its device number before, that one has ended.
        if mount.image().is_some() || is_older(mount, oldest) {
            overlays.remove(&mount.device);
        }
    }
    Ok(Elsewhere::Overlays(overlays.into_values().collect()))
}

/// Tells an overlay from a later one with its device number, and stays the same when it is remounted.
fn overlay_name(mount: &KernelMount) -> String {
    let (major, minor) = mount.device;
    let upper: Vec<_> = mount.paths("upperdir").collect();
    let hash = Sha256::digest(format!("{upper:?}"));
    format!("{major}:{minor}-{}", const_hex::encode(&hash[..16]))
}

/// Whether a mount that our namespace shows was made before the one with this unique number.
fn is_older(mount: &KernelMount, oldest: Option<u64>) -> bool {
    let found = numbers_at(&mount.target).ok().filter(|found| found.id == mount.id);
    let unique = found.and_then(|found| found.unique);
    unique.zip(oldest).is_some_and(|(unique, oldest)| unique < oldest)
}

/// Whether a bind mount in any mount namespace shows something in a directory, whose name no other
/// directory has.
pub(super) fn is_bound(root: &Path, dir: &Path) -> bool {
    let shows = |mount: &KernelMount| mount.root.iter().any(|name| Some(name) == dir.file_name());
    is_shown(root, HashSet::new(), |_, mounts| mounts.iter().any(shows))
}

/// Whether something is mounted at this path in another mount namespace.
pub(super) fn is_target_elsewhere(root: &Path, target: &Path) -> bool {
    let own = TaskRoot::of(&root.join("proc/thread-self")).ok().flatten();
    is_shown(root, own.into_iter().collect(), |_, mounts| {
        mounts.iter().any(|mount| mount.target == target)
    })
}

/// Copies of a mount with writable directories that the kernel detaches with it.
///
/// An unmount propagates to copies that are its peers or slaves (mount_namespaces(7)): mounts on these
/// directories go there as well. A copy itself goes only where it has come to the same
/// place by propagation, and nothing else is mounted on it. A bind mount elsewhere, and the root of a
/// container, stay.
pub(super) struct Copies {
    mount: KernelMount,
    place: Option<Place>,
    /// The superblock of its writable directories.
    device: (u32, u32),
    /// These directories, as paths of the filesystem.
    dirs: Vec<PathBuf>,
    /// Peer groups that its events reach.
    groups: HashSet<u64>,
}

impl Copies {
    /// `None` for a mount in no peer group.
    pub(super) fn of(mounts: &[KernelMount], mount: &KernelMount, upper: &Upper) -> Option<Self> {
        let device = upper.device.filter(|_| !mount.groups.is_empty())?;
        let dirs = upper.dirs.iter().map(|dir| mount.root.join(below(dir))).collect();
        let (place, groups) = (place_of(mounts, mount), mount.groups.iter().copied().collect());
        Some(Self { mount: mount.clone(), place, device, dirs, groups })
    }

    /// Adds all mounts of one namespace that MNT_DETACH would take, by their numbers. Or gives a copy
    /// that must not lose what is mounted on it. Learns of copies of copies as it goes.
    pub(super) fn add(
        &mut self,
        mounts: &[KernelMount],
        ids: &mut HashSet<u64>,
    ) -> Option<PathBuf> {
        let of_image = |it: &&KernelMount| it.device == self.mount.device;
        let copies: Vec<_> = mounts.iter().filter(of_image).collect();
        let reached = |groups: &HashSet<u64>| -> Vec<&KernelMount> {
            let is_reached = |it: &KernelMount| it.groups.iter().any(|it| groups.contains(it));
            copies.iter().copied().filter(|it| is_reached(it)).collect()
        };
        // A copy can follow another one, and so on.
        loop {
            let known = self.groups.len();
            let more = reached(&self.groups).into_iter().flat_map(|it| it.groups.iter().copied());
            self.groups.extend(more.collect::<Vec<_>>());
            if self.groups.len() == known {
                break;
            }
        }
        for copy in reached(&self.groups).into_iter().filter(|it| it.id != self.mount.id) {
            let inside = self.dirs.iter().filter_map(|dir| dir.strip_prefix(&copy.root).ok());
            let targets: Vec<_> = inside.map(|dir| copy.target.join(dir)).collect();
            let is_lost = |it: &&KernelMount| it.parent == copy.id && targets.contains(&it.target);
            for part in mounts.iter().filter(is_lost) {
                let found = place_of(mounts, copy);
                if found.is_none() || found != self.place {
                    return Some(copy.target.clone());
                }
                ids.insert(copy.id);
                ids.extend((part.device == self.device).then_some(part.id));
            }
        }
        let other = mounts.iter().find(|it| ids.contains(&it.parent) && !ids.contains(&it.id));
        other.map(|other| other.target.clone())
    }

    /// [`Copies::add`] for all other namespaces; says why the mount cannot go.
    pub(super) fn add_elsewhere(mut self, root: &Path, ids: &mut HashSet<u64>) -> Option<String> {
        let own = TaskRoot::of(&root.join("proc/thread-self")).ok().flatten();
        // Once more if a copy may follow one that was found after it.
        for _ in 0..3 {
            let (known, mut found) = (self.groups.len(), None);
            let is_shown = is_shown(root, own.into_iter().collect(), |task, mounts| {
                found = self.add(mounts, ids).map(|path| (task.to_owned(), path));
                found.is_some()
            });
            if let Some((task, path)) = found {
                return Some(format!("{} has a copy of it at {}", named(&task), path.display()));
            }
            if is_shown {
                break;
            }
            if self.groups.len() == known {
                return None;
            }
        }
        Some("not all mount namespaces can be looked at, and one may have a copy of it".into())
    }
}

/// The directory that a mount covers: a filesystem and a path there.
type Place = ((u32, u32), PathBuf);

/// The place of a mount, if the mount below it is in a peer group.
fn place_of(mounts: &[KernelMount], mount: &KernelMount) -> Option<Place> {
    let below = mounts.iter().find(|it| it.id == mount.parent && !it.groups.is_empty())?;
    Some((below.device, below.root.join(mount.target.strip_prefix(&below.target).ok()?)))
}

/// A process that uses one of these mounts: as a working directory, as a root, for its program, or
/// for an open or mapped file. `devices` are the mounts' superblocks.
///
/// A process that cannot be asked, or not about everything, is no user for that: anybody can make
/// one, and no mount could be unmounted any more. Who has to be sure asks the kernel as well. But
/// one that does not answer what it maps counts, unless another user is found: it may be the user,
/// and wait for what it does in this mount. So a user who has a FUSE server can make `umount`
/// refuse; `--force` goes on.
///
/// # Errors
/// Those of listing all processes, and of a process where this one has no room to ask: no
/// descriptor, or no memory.
pub(super) fn process_on(
    root: &Path,
    mounts: &HashSet<u64>,
    devices: &[(u32, u32)],
) -> io::Result<Option<String>> {
    let mut unanswered = None;
    for process in numbered(&root.join("proc"))? {
        let pid = process.file_name().and_then(|name| name.to_str()?.parse().ok());
        let thread = pid.map(|pid| processes::directory(root, processes::live_thread(root, pid)));
        let thread = thread.as_ref().unwrap_or(&process);
        let mut is_user = is_any_on(&files_of(thread)?, mounts)?;
        // One deadline is enough to wait for: whoever asks holds a lock.
        if !is_user && unanswered.is_none() {
            match maps_one_on(thread, mounts, devices) {
                Err(error) if is_unanswered(&error) => {
                    let process = named(&process);
                    unanswered =
                        Some(format!("it may be used by {process}, which does not answer"));
                }
                asked => is_user = asked?,
            }
        }
        if is_user {
            return Ok(Some(named(&process)));
        }
    }
    Ok(unanswered)
}

/// Whether one of these links leads to a file of these mounts.
fn is_any_on(links: &[PathBuf], mounts: &HashSet<u64>) -> io::Result<bool> {
    for link in links {
        // A FUSE server is not asked: it need not answer.
        let flags = AtFlags::STATX_DONT_SYNC | AtFlags::NO_AUTOMOUNT;
        let found = rustix::fs::statx(CWD, link, flags, StatxFlags::MNT_ID);
        let is_on = found.map(|it| mounts.contains(&it.stx_mnt_id)).map_err(io::Error::from);
        if default_unless_exhausted(is_on)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether a process maps a file of these mounts, which are of these superblocks, as far as it can
/// be asked.
///
/// # Errors
/// [`is_unanswered`] ones; those of asking without room.
fn maps_one_on(process: &Path, mounts: &HashSet<u64>, devices: &[(u32, u32)]) -> io::Result<bool> {
    /// Links that are looked at in one access.
    const LINKS_MAX: usize = 1000;
    let mut links = Vec::new();
    default_unless_exhausted(processes::mappings(process, |mapping| {
        let link = mapping.link().filter(|_| devices.contains(&mapping.device));
        links.extend(link.map(|link| process.join(link)));
    }))?;
    for links in links.chunks(LINKS_MAX) {
        let (links, mounts) = (links.to_vec(), mounts.clone());
        if probe_and_access(process, move || is_any_on(&links, &mounts))? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Links to the files of a process but those that it maps, as far as it can be asked: by a thread that
/// has not ended.
fn files_of(process: &Path) -> io::Result<Vec<PathBuf>> {
    // All these threads have the same program and mappings and, as a rule, the same files.
    let mut files = default_unless_exhausted(numbered(&process.join("fd")))?;
    files.push(process.join("exe"));
    for task in default_unless_exhausted(numbered(&process.join("task")))? {
        files.extend(["cwd", "root"].map(|name| task.join(name)));
    }
    Ok(files)
}

/// A failed question about one process has the default answer, unless this process had no room to
/// ask, or the other one does not answer.
fn default_unless_exhausted<T: Default>(asked: io::Result<T>) -> io::Result<T> {
    let is_exhausted = |error: &io::Error| {
        let errno = error.raw_os_error().map(Errno::from_raw_os_error);
        // EAGAIN: there is no room for a thread.
        matches!(errno, Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::AGAIN))
    };
    match asked {
        Err(error) if is_exhausted(&error) || is_unanswered(&error) => Err(error),
        asked => Ok(asked.unwrap_or_default()),
    }
}

/// A loop device over a file below a directory of this mount namespace. Without `/sys` there is
/// none.
///
/// # Errors
/// Those of listing all devices, and of one where this process has no room to ask.
pub(super) fn loop_device_on(root: &Path, dir: &Path) -> io::Result<Option<String>> {
    let devices = match fs::read_dir(root.join("sys/block")) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        devices => devices?,
    };
    for device in devices {
        let device = device?;
        // Only a loop device that is in use has this file.
        let file = default_unless_exhausted(fs::read(device.path().join("loop/backing_file")))?;
        if Path::new(OsStr::from_bytes(&file)).starts_with(dir) {
            return Ok(Some(format!("loop device {}", device.file_name().display())));
        }
    }
    Ok(None)
}

/// `process 123 (bash)`, from its directory in `/proc`.
fn named(process: &Path) -> String {
    let id = process.file_name().unwrap_or_default().display();
    match fs::read_to_string(process.join("comm")) {
        Ok(name) => format!("process {id} ({})", name.trim_end().escape_default()),
        Err(_) => format!("process {id}"),
    }
}

/// Whether a task outside the `seen` roots sees such mounts; true in doubt, also where it sees more
/// mounts than are read. `is` gets its directory in `/proc` and all the mounts that it sees.
fn is_shown(
    root: &Path,
    mut seen: HashSet<TaskRoot>,
    mut is: impl FnMut(&Path, &[KernelMount]) -> bool,
) -> bool {
    any_task(root, |task| {
        let before = TaskRoot::of(task)?;
        if before.is_some_and(|before| seen.contains(&before)) {
            return Ok(false);
        }
        let mut mounts = Vec::new();
        if !mountinfo::for_each(task, |mount| mounts.push(mount))? {
            return Ok(true);
        }
        // It may have changed its root meanwhile: then another task has to show this root.
        seen.extend(
            before.filter(|before| TaskRoot::of(task).is_ok_and(|after| after == Some(*before))),
        );
        Ok(is(task, &mounts))
    })
}

/// Asks about the directory in `/proc` of each thread until the answer is yes. True in doubt: if we
/// cannot see all processes, or a question fails and the thread has not ended.
pub(super) fn any_task(root: &Path, mut ask: impl FnMut(&Path) -> io::Result<bool>) -> bool {
    /// A thread that ends, or unmounts, may leave a child that was not listed, so list again: once, and
    /// once more if some have ended. To hide for longer, each child would have to end within a pass.
    const PASSES: u32 = 3;
    if !processes::are_all_visible(root) {
        return true;
    }
    let mut ended = HashSet::new();
    for pass in 1..=PASSES {
        let Ok(processes) = numbered(&root.join("proc")) else { return true };
        let ended_before = ended.len();
        for task in processes
            .into_iter()
            .flat_map(|process| numbered(&process.join("task")).unwrap_or_else(|_| vec![process]))
        {
            match ask(&task) {
                Ok(true) => return true,
                Ok(false) => {}
                Err(error) if processes::has_ended(&error) => _ = ended.insert(task),
                Err(_) => return true,
            }
        }
        // Zombies stay.
        if pass > 1 && ended.len() == ended_before {
            break;
        }
    }
    false
}

pub(super) fn inode(path: &Path) -> io::Result<u64> {
    fs::metadata(path).map(|metadata| metadata.ino())
}
