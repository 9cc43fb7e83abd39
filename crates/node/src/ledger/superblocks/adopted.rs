//! Superblocks that no entry of the run directory shows, but a process that maps a file on them.
//!
//! Whoever has a user namespace may mount an overlay, or a FUSE filesystem, that calls itself ours
//! in mountinfo. So that text only says what to look for:
//!
//! - An overlay counts where a process maps pages of an object of ours through it: the kernel says
//!   which page frames the process has, and they are those that we get when we map the object
//!   ourselves ([`look`](super::look)).
//! - An EROFS with `inode_share` counts where the process's mount namespace shows it, at each look:
//!   only whoever is root of the machine can mount EROFS. Its device number may be another
//!   filesystem's later.
//! - Nothing is looked up by a path. A process's mapping leads to the file itself
//!   (`/proc/PID/map_files`), and statx(2) does not ask a FUSE server.
//! - Opened files are noted where the process's mount namespace belongs to our user namespace. In
//!   another one the overlay may have layers beside ours, and the kernel, which opens each event's
//!   file for us, would wait for a FUSE server below it.

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use cofolio_store::{Digest, Domain};
use rustix::fs::{Mode, OFlags};

use super::super::index::{Index, IndexedDomain};
use super::super::usage::{ObjectId, SuperblockId};
use super::look::{Look, STEPS_OF_A_TABLE, proven};
use super::namespaces::{Namespaces, Shown, backend_of};
use super::tables::Inodes;
use super::{Changes, Place, Superblock, Superblocks, Upper, id_of};
use crate::address_space::probe_and_access;
use crate::mount::{KernelMount, ShownSuperblock};
use crate::processes::{self, Device, Mapping};
use crate::settings::Backend;

/// Superblocks that are adopted at most. A container can make any number of overlays over one of
/// ours.
const ADOPTED_MAX: usize = 1 << 14;

/// The last mapping through which an adopted superblock was seen.
#[derive(Debug)]
pub(super) struct Sighting {
    pid: u32,
    file: PathBuf,
    /// The last round over all processes, from 0, in which it was seen or a mount namespace showed
    /// it.
    round: u32,
}

impl Sighting {
    pub(super) fn new(mapping: &Mapping<'_>, look: &Look, round: u32) -> Self {
        Self { pid: look.pid, file: look.file(mapping), round }
    }

    /// Opens the mapped file without asking its filesystem, if it is one of this superblock.
    ///
    /// # Errors
    /// `PermissionDenied` where others decide what is mounted; `NotFound` if the mapping is gone.
    pub(super) fn open(
        &self,
        root: &Path,
        device: Device,
        namespaces: &mut Namespaces,
    ) -> io::Result<OwnedFd> {
        let process = processes::directory(root, self.pid);
        let namespace = File::open(process.join("ns/mnt"))?;
        let owner = File::from(cofolio_sys::mount::namespace_owner(&namespace)?);
        let ours = fs::metadata(root.join("proc/thread-self/ns/user"))?;
        if owner.metadata()?.ino() != ours.ino() {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let path = self.file.clone();
        let open = move || Ok(rustix::fs::open(path, flags, Mode::empty())?);
        let file = probe_and_access(&process, open)?;
        // Another file may be mapped there by now.
        let mount = cofolio_sys::mount::mount_id(&file, "")?;
        match namespaces.of(root, self.pid, &mut None)?.has_mount(device, mount.id) {
            true => Ok(file),
            false => Err(io::ErrorKind::NotFound.into()),
        }
    }
}

impl Superblocks {
    /// Adds a superblock that only the mount namespace of a process shows.
    pub(super) fn adopt(
        &mut self,
        mapping: &Mapping<'_>,
        index: &Index,
    ) -> Option<(SuperblockId, ObjectId)> {
        let device = mapping.device;
        let mount = self.look.shown(&mut self.namespaces)?.superblock(device)?;
        self.look.spend(1)?;
        let (image, backend) = (mount.image()?, backend_of(mount)?);
        let domain = domain_of(mount, &image, index)?;
        if self.adopted_count >= ADOPTED_MAX {
            self.look.leave_out("too many images are mounted in other mount namespaces only");
            return None;
        }
        let key = (domain, image, backend);
        if !self.tables.is_read(&key) {
            self.look.spend(STEPS_OF_A_TABLE)?;
        }
        let layers = self.tables.claimed(index, key)?;
        let (layer, object) = proven(&layers, backend, mapping, index, &mut self.look)?;
        let mount = self.look.shown(&mut self.namespaces)?.superblock(device)?;
        let is_writable = mount.paths("upperdir").next().is_some();
        let upper = upper_of(mount, &index.domains().get(domain as usize)?.domain);
        let slot = self.insert(Superblock {
            domain,
            image,
            device,
            place: Place::Adopted(Sighting::new(mapping, &self.look, self.rounds)),
            backend,
            is_writable,
            upper,
            layers,
            layer_devices: Vec::new(),
            serial: 0,
            is_sampled: false,
            is_marked: false,
        });
        let id = id_of(slot)?;
        self.adopted_count += 1;
        self.note_proven(slot, layer, mapping);
        Some((id, object))
    }

    /// The object of a file that a process maps on an adopted superblock.
    pub(super) fn seen_again(
        &mut self,
        slot: usize,
        mapping: &Mapping<'_>,
        index: &Index,
    ) -> Option<(SuperblockId, ObjectId)> {
        let superblock = self.slots.get_mut(slot)?.as_mut()?;
        let (device, image, backend) = (superblock.device, superblock.image, superblock.backend);
        let has_it = |shown: &mut Shown| shown.has(device, image, backend);
        if backend == Backend::InodeShare
            && !self.look.shown(&mut self.namespaces).is_some_and(has_it)
        {
            return None;
        }
        let (layer, object) = superblock.proven(mapping, index, &mut self.look)?;
        superblock.place = Place::Adopted(Sighting::new(mapping, &self.look, self.rounds));
        self.note_proven(slot, layer, mapping);
        Some((id_of(slot)?, object))
    }

    /// Learns the device of a layer's files from one of them.
    fn note_proven(&mut self, slot: usize, layer: usize, mapping: &Mapping<'_>) {
        let Some(Some(superblock)) = self.slots.get(slot) else { return };
        if superblock.layer_devices.iter().any(|(_, known)| *known == layer) {
            return;
        }
        if let Some(found) = self.look.found(mapping) {
            self.learn_device(slot, found.device, layer);
        }
    }

    /// Takes steps of the look at a process, or gives `None` if there are not so many left.
    pub(in super::super) fn spend(&mut self, steps: u32) -> Option<()> {
        self.look.spend(steps)
    }

    /// Ends the look at a process. Says why not all of it could be looked at, if so.
    pub(in super::super) fn end_look(&mut self, root: &Path, pid: u32) -> Option<&'static str> {
        self.begin_look(root, pid);
        let mut look = std::mem::take(&mut self.look);
        if !self.missing.is_empty() {
            self.search_missing(&mut look);
        }
        look.left_out
    }

    /// What the mount namespace of a process shows was not unmounted.
    fn search_missing(&mut self, look: &mut Look) {
        let round = self.rounds;
        let shown = look.shown(&mut self.namespaces);
        let is_searched = shown.as_ref().is_some_and(|shown| shown.searched == Some(round));
        let has_ended = shown.is_none() && look.left_out.is_none();
        if is_searched || has_ended {
            return;
        }
        self.missing.retain(|slot| {
            let Some(Some(superblock)) = self.slots.get_mut(*slot) else { return false };
            let Place::Adopted(sighting) = &mut superblock.place else { return false };
            let (device, image, backend) =
                (superblock.device, superblock.image, superblock.backend);
            let is_without = |it: &&mut Shown| it.is_whole && !it.has(device, image, backend);
            // Where nobody knows, it is not taken for unmounted.
            let is_missing = shown.as_ref().is_some_and(is_without);
            if !is_missing {
                sighting.round = round;
            }
            is_missing
        });
        shown.into_iter().for_each(|shown| shown.searched = Some(round));
    }

    /// A process could not be looked at: what it mapped before was not unmounted.
    pub(in super::super) fn keep_seen_by(&mut self, pid: u32) {
        for superblock in self.slots.iter_mut().flatten() {
            if let Place::Adopted(sighting) = &mut superblock.place
                && sighting.pid == pid
            {
                sighting.round = self.rounds;
            }
        }
    }

    /// To be called after each round over all processes.
    pub(in super::super) fn round_is_complete(&mut self) {
        self.rounds += 1;
        let is_missing = |it: &Superblock| it.last_round().is_some_and(|it| it + 1 < self.rounds);
        let slots = self.slots.iter().enumerate();
        let missing = slots.filter(|(_, it)| it.as_ref().is_some_and(is_missing));
        self.missing = missing.map(|(slot, _)| slot).collect();
    }

    /// Drops adopted superblocks that no process was seen to map for two rounds, and that no mount
    /// namespace shows.
    pub(super) fn drop_adopted(&mut self, changes: &mut Changes) {
        self.namespaces.forget();
        for slot in 0..self.slots.len() {
            let last = self.slots[slot].as_ref().and_then(Superblock::last_round);
            if last.is_some_and(|last| last + 2 < self.rounds) {
                changes.removed.extend(self.remove(slot));
            }
        }
    }

    /// An adopted superblock that the run directory shows by now: what is known of its users stays.
    pub(super) fn promote_adopted(
        &mut self,
        domain: u16,
        shown: &ShownSuperblock,
        layers: &[Arc<Inodes>],
        changes: &mut Changes,
    ) -> Option<usize> {
        let slot = *self.by_device.get(&shown.device)?;
        let superblock = self.slots.get_mut(slot)?.as_mut()?;
        let Place::Adopted(_) = superblock.place else { return None };
        let is_it = (superblock.domain, superblock.image, superblock.is_writable)
            == (domain, shown.image, shown.upper.is_some());
        if !is_it {
            changes.removed.extend(self.remove(slot));
            return None;
        }
        superblock.place = Place::Mounted(shown.path.clone(), shown.inside.clone());
        superblock.upper = Upper::of(shown);
        superblock.backend = shown.backend;
        superblock.layers = layers.to_vec();
        // It may be one that has ended, whose number the new one got: what was learnt of its layers is not the
        // new one's, nor is its mark.
        let learnt = std::mem::take(&mut superblock.layer_devices);
        superblock.is_marked = false;
        for (device, _) in learnt {
            if device != shown.device {
                self.release(slot, device);
            }
        }
        self.to_mark.extend(id_of(slot));
        Some(slot)
    }
}

impl Superblock {
    /// The last round in which it was seen, if it was adopted.
    pub(super) fn last_round(&self) -> Option<u32> {
        match &self.place {
            Place::Adopted(sighting) => Some(sighting.round),
            Place::Mounted(..) => None,
        }
    }
}

/// The trust domain whose image a mount says that it shows.
fn domain_of(mount: &KernelMount, image: &Digest, index: &Index) -> Option<u16> {
    let has_it = |domain: &&IndexedDomain| domain.images.contains_key(image);
    let named = |domain: &&IndexedDomain| {
        let objects = domain.domain.objects_dir();
        mount.paths("datadir+").any(|path| Some(path) == objects)
    };
    let domains = || index.domains().iter().filter(has_it);
    let domain = &domains().find(named).or_else(|| domains().next())?.domain;
    index.domain_number(domain.name())
}

/// Where an overlay keeps its changes, if that is in the domain's own directory, in which only root
/// can make one. Elsewhere mountinfo could name anything.
fn upper_of(mount: &KernelMount, domain: &Domain) -> Option<Upper> {
    let upper = mount.paths("upperdir").next()?;
    let writable = fs::canonicalize(crate::mount::writable_dir(domain).ok()?).ok()?;
    let below = upper.strip_prefix(writable).ok()?;
    if !below.components().all(|name| matches!(name, Component::Normal(_))) {
        return None;
    }
    // A container may have given the mount names that are longer than a path can be.
    if mount.target.as_os_str().len() + mount.root.as_os_str().len() > PATHS_MAX {
        return None;
    }
    Upper::at(&upper, &mount.target, mount.root.strip_prefix("/").unwrap_or(&mount.root))
}

/// Bytes of names that are kept of an adopted superblock.
const PATHS_MAX: usize = 4096;
