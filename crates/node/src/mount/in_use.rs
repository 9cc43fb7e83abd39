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
//! one is read. There we look at all mount namespaces first ([`is_mounted_elsewhere`]).
//!
//! In doubt a superblock counts as in use, which costs memory and disk space until a restart.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use rustix::io::Errno;

use super::error::{At as _, MountError};
use super::kernel::{Context, KernelError, open_dir, path_of, reopen};
use super::mountinfo::{self, KernelMount};
use super::state::Namespace;
use super::upper::{make_below, open_below};

/// Prefix of image users that stand for a superblock with users that we cannot see.
const PREFIX: &str = "superblock-";
const SYSFS: &str = "sys/fs/erofs";

/// An EROFS superblock: its name in sysfs and that entry's inode number, which is not reused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Superblock(Option<(String, u64)>);

impl Superblock {
    /// The superblock of a mount with this root; `root` is where `/sys` is looked up.
    pub(super) fn of(mount: impl AsFd, root: &Path) -> Self {
        let find = || -> Option<(String, u64)> {
            let file = reopen(mount).ok()?;
            let name = match cofolio_sys::mount::sysfs_path(&file) {
                Ok(path) => path.file_name()?.to_str()?.to_owned(),
                // Before Linux 6.10, where EROFS needs a block device: the entry has its name.
                Err(_) => {
                    let device = rustix::fs::fstat(&file).ok()?.st_dev;
                    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
                    let link = root.join(format!("sys/dev/block/{major}:{minor}"));
                    fs::read_link(link).ok()?.file_name()?.to_str()?.to_owned()
                }
            };
            let inode = fs::metadata(root.join(SYSFS).join(&name)).ok()?.ino();
            Some((name, inode))
        };
        Self(find())
    }

    /// The superblock that a user of an image stands for, if it is one.
    pub(super) fn from_user(user: &str) -> Option<Self> {
        let (name, inode) = user.strip_prefix(PREFIX)?.rsplit_once('-')?;
        Some(Self(inode.parse().ok().map(|inode| (name.to_owned(), inode))))
    }

    /// Name under which it is a user of an image.
    pub(super) fn user(&self) -> String {
        match &self.0 {
            Some((name, inode)) => format!("{PREFIX}{name}-{inode}"),
            None => format!("{PREFIX}unknown-"),
        }
    }

    pub(super) fn is_alive(&self, root: &Path) -> bool {
        let sysfs = root.join(SYSFS);
        let Some((name, inode)) = &self.0 else { return true };
        match fs::metadata(sysfs.join(name)) {
            Ok(entry) => entry.ino() == *inode,
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
            self.0.fetch_sub(pause.min(self.0.load(Relaxed)), Relaxed);
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
    let Some(upper) = open_below(&base, dir, "upper")? else { return Ok(false) };
    // Any directory apart from the other two will do as the lower layer.
    let Some(lower) = open_below(&base, dir, "work")? else { return Ok(false) };
    let (probe, _) = make_below(&base, dir, PROBE)?;
    let made = || -> Result<(), KernelError> {
        let context = Context::open("overlay")?;
        context.layer("lowerdir", lower.as_fd())?;
        context.layer("upperdir", upper.as_fd())?;
        context.layer("workdir", probe.as_fd())?;
        context.string("index", "on")?;
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
    let _ = fs::remove_dir_all(Path::new(&path_of(base)).join(PROBE));
    Ok(false)
}

/// Whether a mount of these superblocks exists in any mount namespace, except below `run` and
/// copies that the kernel unmounts with those.
///
/// A foreign overlay may hide its layers: it counts unless all are known to be elsewhere.
pub(super) fn is_mounted_elsewhere(
    root: &Path,
    run: &Path,
    devices: &HashSet<(u32, u32)>,
) -> io::Result<bool> {
    let Some(namespaces) = namespaces(root) else { return Ok(true) };
    let own = Namespace::at(&root.join("proc/thread-self/ns/mnt"))?;
    let ours = mountinfo::read(root)?;
    let is_pin =
        |mount: &&KernelMount| devices.contains(&mount.device) && mount.target.starts_with(run);
    let groups: HashSet<u64> =
        ours.iter().filter(is_pin).flat_map(|mount| mount.groups.iter().copied()).collect();
    let uses = |mount: &KernelMount, task: &Path| {
        let is_foreign = || mount.filesystem == "overlay" && mount.image().is_none();
        devices.contains(&mount.device)
            || (is_foreign() && may_have_layer(mount, &task.join("root"), devices))
    };
    let thread = root.join("proc/thread-self");
    if ours.iter().any(|mount| !is_pin(&mount) && uses(mount, &thread)) {
        return Ok(true);
    }
    for (namespace, task) in namespaces {
        if namespace == own.inode {
            continue;
        }
        // It may have ended since.
        let Ok(text) = fs::read(task.join("mountinfo")) else { continue };
        let mounts = mountinfo::parse(&text);
        let follows = |mount: &KernelMount| mount.groups.iter().any(|group| groups.contains(group));
        if mounts.iter().any(|mount| !follows(mount) && uses(mount, &task)) {
            return Ok(true);
        }
    }
    Ok(false)
}

fn may_have_layer(mount: &KernelMount, root: &Path, devices: &HashSet<(u32, u32)>) -> bool {
    let lists = mount.paths("lowerdir").flat_map(|list| {
        let list = list.into_os_string().into_encoded_bytes();
        let layers = list.split(|&byte| byte == b':').filter(|layer| !layer.is_empty());
        let path = |layer: &[u8]| PathBuf::from(String::from_utf8_lossy(layer).into_owned());
        layers.map(path).collect::<Vec<_>>()
    });
    let layers = mount.paths("lowerdir+").chain(mount.paths("datadir+"));
    lists.chain(layers).any(|layer| {
        // The kernel shows the root of a detached mount as `/`.
        let Some(below) = layer.to_str().and_then(|path| path.strip_prefix('/')) else {
            return true;
        };
        let Ok(found) = fs::metadata(root.join(below)) else { return true };
        let device = (rustix::fs::major(found.dev()), rustix::fs::minor(found.dev()));
        below.is_empty() || devices.contains(&device)
    })
}

/// Whether a bind mount in any mount namespace shows something in a directory, whose name no other
/// directory has; `None` if we cannot see all namespaces and no mount of those that we see does.
pub(super) fn is_bound(root: &Path, dir: &Path) -> Option<bool> {
    let shows = |(_, task): &(u64, PathBuf)| {
        // It may have ended since.
        let mounts = mountinfo::parse(&fs::read(task.join("mountinfo")).unwrap_or_default());
        mounts.iter().any(|mount| mount.root.iter().any(|name| Some(name) == dir.file_name()))
    };
    let found = visible_namespaces(root).iter().any(shows);
    (found || sees_all_processes(root)).then_some(found)
}

/// A mount namespace of each process and thread, once each; `None` if we cannot see all.
pub(super) fn namespaces(root: &Path) -> Option<Vec<(u64, PathBuf)>> {
    sees_all_processes(root).then(|| visible_namespaces(root))
}

fn sees_all_processes(root: &Path) -> bool {
    // PROC_PID_INIT_INO of `include/linux/proc_ns.h`: the first pid namespace sees every process.
    const FIRST_PID_NAMESPACE: u64 = 0xEFFF_FFFC;
    inode(&root.join("proc/thread-self/ns/pid")) == Some(FIRST_PID_NAMESPACE)
}

fn inode(path: &Path) -> Option<u64> {
    fs::metadata(path).ok().map(|metadata| metadata.ino())
}

fn visible_namespaces(root: &Path) -> Vec<(u64, PathBuf)> {
    let numbers = |dir: &Path| -> Vec<PathBuf> {
        let entries = fs::read_dir(dir).into_iter().flatten().flatten();
        let is_number = |entry: &fs::DirEntry| {
            entry.file_name().as_encoded_bytes().iter().all(u8::is_ascii_digit)
        };
        entries.filter(is_number).map(|entry| entry.path()).collect()
    };
    let mut seen = HashSet::new();
    let tasks =
        numbers(&root.join("proc")).into_iter().flat_map(|process| numbers(&process.join("task")));
    let found = tasks.filter_map(|task| Some((inode(&task.join("ns/mnt"))?, task)));
    found.filter(|(namespace, _)| seen.insert(*namespace)).collect()
}
