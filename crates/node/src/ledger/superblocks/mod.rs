//! Mounted filesystems, and which object a file on one of them shows.
//!
//! A process maps, and a fanotify event opens, a file of an overlay: its inode number is that of the
//! metadata image's inode, and its `st_dev` tells the layer (`Documentation/filesystems/overlayfs.rst`,
//! "Inode properties"). `/proc/PID/maps` has the overlay's own device instead. So an object is found by
//!
//! ```text
//!   device ──▶ superblock ──▶ layer ──▶ inode number ──▶ object
//! ```
//!
//! A file of a writable mount may be a new one or a changed one. Both lie in the directory of changes,
//! and have an `st_dev` of their own, which overlayfs makes up. Neither is an object.
//!
//! Read-only mounts of an image are one superblock. So "mount" in the usage lists means a superblock,
//! as it does in the kernel's own lists.
//!
//! The run directory shows most superblocks. Others are adopted through a process (see
//! [`adopted`]): they exist in another mount namespace only, or could not be added yet.

mod adopted;
mod layers;
mod look;
mod marks;
mod mount_events;
mod namespaces;
mod refresh;
mod tables;
#[cfg(test)]
mod tests;
mod upper;

pub(super) use self::mount_events::MountEvents;
pub(super) use self::refresh::Changes;
pub(crate) use self::tables::paths_of_objects;

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::fs;
use std::hash::BuildHasher as _;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cofolio_store::Digest;
use rustix::fs::{AtFlags, Statx, StatxFlags};

use self::adopted::Sighting;
use self::look::Look;
use self::namespaces::Namespaces;
use self::refresh::RunEntry;
use self::tables::{Inodes, Tables};
use self::upper::Upper;
use super::index::Index;
use super::usage::{ObjectId, SuperblockId};
use crate::processes::{self, Device};
use crate::settings::Backend;

/// A file as statx(2) shows it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Found {
    pub(super) device: Device,
    pub(super) inode: u64,
    pub(super) size: u64,
}

impl Found {
    /// Looks at `path` below `dir`, at `dir` itself if it is empty. A FUSE server is not asked: it
    /// need not answer.
    fn at(dir: impl AsFd, path: &Path, flags: AtFlags) -> rustix::io::Result<Self> {
        let flags = flags | AtFlags::STATX_DONT_SYNC | AtFlags::NO_AUTOMOUNT;
        Ok(Self::by(&rustix::fs::statx(dir, path, flags, StatxFlags::BASIC_STATS)?))
    }

    pub(super) fn by(found: &Statx) -> Self {
        let device = (found.stx_dev_major, found.stx_dev_minor);
        Self { device, inode: found.stx_ino, size: found.stx_size }
    }
}

/// One mounted filesystem.
#[derive(Debug)]
pub(super) struct Superblock {
    pub(super) domain: u16,
    pub(super) image: Digest,
    device: Device,
    place: Place,
    backend: Backend,
    is_writable: bool,
    /// `None` if nothing can be changed, or the changes cannot be looked at: those of a layer with
    /// a size may be on a filesystem that is mounted nowhere.
    upper: Option<Upper>,
    layers: Vec<Arc<Inodes>>,
    /// `st_dev` of files, by layer, as far as that is known.
    layer_devices: Vec<(Device, usize)>,
    /// Unlike its slot, no other one gets it.
    serial: u64,
    /// Whether files of it were looked at to learn `layer_devices`. Files that processes map tell the
    /// rest; until then opened files of such a layer are not seen.
    is_sampled: bool,
    /// Whether the files that are opened on it are noted.
    is_marked: bool,
}

/// How a superblock is reached.
#[derive(Debug)]
enum Place {
    /// A directory on it, in our mount namespace. The second one says which directory of the image
    /// that is: empty for the root.
    Mounted(PathBuf, PathBuf),
    Adopted(Sighting),
}

/// What mapped files turned out to be, by the serial number of the superblock, inode number and
/// hash of the path: only where that takes a system call.
type Identified = HashMap<(u64, u64, u64), ObjectId>;

/// Entries after which [`Identified`] is emptied: 20 MB.
const IDENTIFIED_MAX: usize = 1 << 18;

impl Superblock {
    /// The file that holds the pages of an object in place of the store's, with `inode-share`.
    pub(super) fn page_file(&self, object: &Digest) -> Option<PathBuf> {
        let Place::Mounted(top, _) = &self.place else { return None };
        Some(top.join(self.layers.first()?.path(object)?))
    }

    /// Whether pages are in files of its own and not in the store's.
    pub(super) fn has_page_files(&self) -> bool {
        self.layers.first().is_some_and(|layer| layer.has_paths())
    }

    /// Whether a file lies among the changes; `None` where they cannot be looked at.
    fn is_changed(&self, path: impl FnOnce() -> Option<PathBuf>) -> Option<bool> {
        let Some(upper) = &self.upper else { return (!self.is_writable).then_some(false) };
        let has_data = upper.has_data(&path()?).ok()?;
        // The directory of a mount that was unmounted here is renamed.
        let is_there = has_data
            || matches!(self.place, Place::Mounted(..))
            || fs::symlink_metadata(&upper.directory).is_ok();
        is_there.then_some(has_data)
    }
}

/// All mounted filesystems of a store.
#[derive(Debug, Default)]
pub(super) struct Superblocks {
    slots: Vec<Option<Superblock>>,
    /// Slots without one.
    free: Vec<usize>,
    by_device: HashMap<Device, usize>,
    /// `st_dev` of files on them.
    by_file_device: HashMap<Device, usize>,
    /// What the run directory shows and was added, by path.
    entries: HashMap<PathBuf, (RunEntry, Option<usize>)>,
    tables: Tables,
    /// What mount namespaces of processes show, since the last refresh.
    namespaces: Namespaces,
    /// The look at a process that goes on.
    look: Look,
    /// Added or adopted, and not marked yet.
    to_mark: Vec<SuperblockId>,
    /// Records of mounts that went, while their superblocks are still known.
    gone: Vec<String>,
    /// All that are adopted now.
    adopted_count: usize,
    /// Adopted ones through which nobody mapped anything in the last round.
    missing: Vec<usize>,
    identified: Identified,
    /// The next superblock's number.
    serial: u64,
    /// Complete rounds over all processes.
    rounds: u32,
    /// Directories, records and mounts that could not be looked at in the last refresh.
    failed: usize,
}

impl Superblocks {
    pub(super) fn get(&self, id: SuperblockId) -> Option<&Superblock> {
        self.slots.get(id.0 as usize)?.as_ref()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (SuperblockId, &Superblock)> {
        let all = (0..).zip(&self.slots);
        all.filter_map(|(id, slot)| Some((SuperblockId(id), slot.as_ref()?)))
    }

    /// Drops objects that do not exist any more.
    pub(super) fn forget(&mut self, objects: &HashSet<ObjectId>) {
        self.identified.retain(|_, id| !objects.contains(id));
    }

    /// What could not be looked at in the last refresh: then what was there before counts.
    pub(super) fn failed(&self) -> usize {
        self.failed
    }

    /// Begins the look at a process, unless it goes on.
    fn begin_look(&mut self, root: &Path, pid: u32) {
        if self.look.pid != pid {
            self.look = Look::new(root, pid);
        }
    }

    /// The superblock and object of a file that a process maps.
    pub(super) fn mapped(
        &mut self,
        root: &Path,
        pid: u32,
        mapping: &processes::Mapping<'_>,
        index: &Index,
    ) -> Option<(SuperblockId, ObjectId)> {
        self.begin_look(root, pid);
        let slot = match self.by_device.get(&mapping.device) {
            Some(slot) => *slot,
            // Filesystems without a block device of their own have the major number 0.
            None if mapping.device.0 != 0 => return None,
            None => return self.adopt(mapping, index),
        };
        let superblock = self.slots.get(slot)?.as_ref()?;
        if let Place::Adopted(_) = superblock.place {
            return self.seen_again(slot, mapping, index);
        }
        if let ([layer], false) = (&superblock.layers[..], superblock.is_writable) {
            return Some((id_of(slot)?, layer.get(index, mapping.inode)?));
        }
        self.look.spend(1)?;
        let path = Path::new(OsStr::from_bytes(mapping.path));
        // A file that is written to has the same path and inode number as before.
        match superblock.is_changed(|| Some(path.to_owned())) {
            Some(true) => return None,
            Some(false) => {}
            None => {
                let proven = superblock.proven(mapping, index, &mut self.look);
                return Some((id_of(slot)?, proven?.1));
            }
        }
        let key = (superblock.serial, mapping.inode, self.identified.hasher().hash_one(path));
        if let Some(object) = self.identified.get(&key) {
            return Some((id_of(slot)?, *object));
        }
        let found = self.look.found(mapping)?;
        let object = self.identify(slot, found, index)?;
        if self.identified.len() >= IDENTIFIED_MAX {
            self.identified.clear();
        }
        self.identified.insert(key, object);
        Some((id_of(slot)?, object))
    }

    /// The superblock and object of an open file.
    pub(super) fn opened(
        &mut self,
        found: Found,
        path: impl FnOnce() -> Option<PathBuf>,
        index: &Index,
    ) -> Option<(SuperblockId, ObjectId)> {
        let slot = *self.by_file_device.get(&found.device)?;
        let superblock = self.slots.get(slot)?.as_ref()?;
        if let ([layer], false) = (&superblock.layers[..], superblock.is_writable) {
            return Some((id_of(slot)?, layer.get(index, found.inode)?));
        }
        let is_changed = superblock.is_changed(path);
        // If the upper layer cannot be read, another size shows most changed files.
        if is_changed == Some(true) {
            return None;
        }
        Some((id_of(slot)?, self.identify(slot, found, index)?))
    }

    /// The object behind a file that was not copied up.
    fn identify(&mut self, slot: usize, found: Found, index: &Index) -> Option<ObjectId> {
        let superblock = self.slots.get(slot)?.as_ref()?;
        let (layer, object) = superblock.layer_of(index, found)?;
        index.object(object).filter(|object| object.size == found.size)?;
        if !superblock.layer_devices.iter().any(|(device, _)| *device == found.device) {
            self.learn_device(slot, found.device, layer);
        }
        Some(object)
    }
}

fn id_of(slot: usize) -> Option<SuperblockId> {
    u32::try_from(slot).ok().map(SuperblockId)
}
