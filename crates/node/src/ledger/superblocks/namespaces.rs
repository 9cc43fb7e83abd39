//! What mount namespaces of processes show under our name.
//!
//! mountinfo of a process is read once between two refreshes for all processes that see the same
//! mounts. A container decides how long it is and what most of it says, so it is read in bounded
//! memory, and is believed only where this says so.

use std::collections::{HashMap, HashSet};
use std::io;
use std::path::Path;

use cofolio_store::Digest;

use crate::mount::KernelMount;
use crate::mount::mountinfo::{self, TaskRoot};
use crate::processes::{self, Device};
use crate::settings::Backend;

/// Who sees the same mounts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Seeing {
    Tasks(TaskRoot),
    /// One that we may not trace.
    Process(u32),
}

/// The superblocks that mounts of a namespace show, if they name an image.
#[derive(Debug, Default)]
pub(super) struct Shown {
    /// The first mount of each.
    superblocks: HashMap<Device, KernelMount>,
    /// Numbers of all their mounts.
    mounts: HashSet<(Device, u64)>,
    /// Whether all was read.
    pub(super) is_whole: bool,
    /// The last round in which adopted superblocks were looked up here.
    pub(super) searched: Option<u32>,
    bytes: usize,
}

impl Shown {
    fn read(process: &Path) -> io::Result<Self> {
        let mut shown = Self { bytes: size_of::<(Seeing, Self)>(), ..Self::default() };
        let mut fits = true;
        let is_whole = mountinfo::for_each(process, |mount| {
            if mount.image().is_none() || backend_of(&mount).is_none() {
                return;
            }
            fits &= shown.bytes < HELD_MAX;
            if fits {
                shown.add(mount);
            }
        })?;
        shown.is_whole = is_whole && fits;
        Ok(shown)
    }

    fn add(&mut self, mount: KernelMount) {
        let text = mount.options.len() + mount.source.len() + mount.filesystem.len();
        let paths = mount.root.as_os_str().len() + mount.target.as_os_str().len();
        self.bytes += size_of::<(KernelMount, Device, u64)>() + text + paths;
        self.mounts.insert((mount.device, mount.id));
        self.superblocks.entry(mount.device).or_insert(mount);
    }

    pub(super) fn superblock(&self, device: Device) -> Option<&KernelMount> {
        self.superblocks.get(&device)
    }

    /// Whether a superblock of an image is mounted. Nobody but root can mount an EROFS, and no
    /// other filesystem is called so: of an `inode-share` one this is true.
    pub(super) fn has(&self, device: Device, image: Digest, backend: Backend) -> bool {
        let found = self.superblock(device);
        found.is_some_and(|it| it.image() == Some(image) && backend_of(it) == Some(backend))
    }

    /// Whether a mount is one of this superblock.
    pub(super) fn has_mount(&self, device: Device, mount: u64) -> bool {
        self.mounts.contains(&(device, mount))
    }
}

/// How a filesystem under our name shows an image.
pub(super) fn backend_of(mount: &KernelMount) -> Option<Backend> {
    match &*mount.filesystem {
        "erofs" if mount.has_option("inode_share") => Some(Backend::InodeShare),
        "overlay" => Some(Backend::Overlay),
        _ => None,
    }
}

/// What was read since the last refresh.
#[derive(Debug, Default)]
pub(super) struct Namespaces {
    read: HashMap<Seeing, Shown>,
    bytes: usize,
}

/// Bytes of all that is held, and of one namespace at most. 10,000 writable mounts take some 10 MB.
const HELD_MAX: usize = 32 << 20;

impl Namespaces {
    /// To be called with each refresh.
    pub(super) fn forget(&mut self) {
        *self = Self::default();
    }

    /// What a process sees. `seeing` remembers who sees the same from one call to the next.
    ///
    /// # Errors
    /// Those of reading `/proc`.
    pub(super) fn of(
        &mut self,
        root: &Path,
        pid: u32,
        seeing: &mut Option<Seeing>,
    ) -> io::Result<&mut Shown> {
        let process = processes::directory(root, pid);
        let seeing = match *seeing {
            Some(known) => known,
            None => *seeing.insert(match TaskRoot::of(&process)? {
                Some(found) => Seeing::Tasks(found),
                None => Seeing::Process(pid),
            }),
        };
        if !self.read.contains_key(&seeing) {
            let shown = Shown::read(&process)?;
            if self.bytes + shown.bytes > HELD_MAX {
                self.forget();
            }
            self.bytes += shown.bytes;
            self.read.insert(seeing, shown);
        }
        self.read.get_mut(&seeing).ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}
