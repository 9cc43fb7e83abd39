//! What the run directory shows: superblocks come and go with its entries.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use super::super::index::Index;
use super::super::usage::SuperblockId;
use super::layers::open_directory;
use super::tables::{Inodes, metadata_images};
use super::{Place, Superblock, Superblocks, Upper, id_of};
use crate::mount::{LazyMounts, MountError, MountRecord, ShownSuperblock};
use crate::processes::Device;
use crate::run_dir::RunDir;
use crate::settings::Backend;

/// What tells an entry of the run directory from an earlier one at its path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RunEntry {
    /// Its device number and the mount's. Another mount at its path may have got the same device number,
    /// and other ones for the files of its layers.
    Superblock(Device, u64),
    /// Inode number, and when that was changed: a record that replaces another may get the number
    /// of one before it.
    Record(u64, SystemTime),
}

impl RunEntry {
    fn of_record(metadata: &fs::Metadata) -> io::Result<Self> {
        Ok(Self::Record(metadata.ino(), metadata.modified()?))
    }
}

/// What a refresh found.
#[derive(Debug, Default)]
pub(in super::super) struct Changes {
    pub(in super::super) removed: Vec<SuperblockId>,
}

impl Superblocks {
    /// Adds what was mounted and drops what was unmounted since the last call. Looks at each
    /// shared superblock of the run directory; of the records of mounts, reads those that are new
    /// or changed.
    ///
    /// What cannot be looked at, for want of descriptors for one, is not taken for gone: all that
    /// is known of its users would be lost, and their pages with it.
    pub(in super::super) fn refresh(&mut self, run: &RunDir, index: &mut Index) -> Changes {
        // Without a queue of opened files nobody else empties it.
        self.to_mark.clear();
        self.gone.clear();
        let shared = run.shared_superblocks();
        let mut failed = shared.failed;
        let directory = run.path().join("mounts");
        let records = records(&directory).unwrap_or_else(|_| {
            failed.push(directory);
            Vec::new()
        });

        let mut changes = Changes::default();
        let mounts = LazyMounts::new(Path::new("/"));
        let shared_paths = shared.found.iter().map(|shown| shown.path.as_path());
        let present: HashSet<&Path> =
            shared_paths.chain(records.iter().map(|(_, path, _)| path.as_path())).collect();
        let is_gone = |path: &Path| {
            !present.contains(path) && !failed.iter().any(|failed| path.starts_with(failed))
        };
        let gone: Vec<_> = self.entries.keys().filter(|path| is_gone(path)).cloned().collect();
        for path in gone {
            self.drop_entry(&path, &mut changes);
        }
        self.drop_adopted(&mut changes);

        for shown in &shared.found {
            let entry = RunEntry::Superblock(shown.device, shown.mount);
            self.add_entry(&shown.path, entry, Some(shown), run, index, &mut changes);
        }
        for (id, path, entry) in records {
            if self.has_entry(&path, entry) {
                continue;
            }
            let taken = run.record(&id).and_then(|record| match record {
                Some(it) => self.add_record(&it, entry, run, &mounts, index, &mut changes),
                None => {
                    self.drop_entry(&path, &mut changes);
                    Ok(())
                }
            });
            if taken.is_err() {
                failed.push(path);
            }
        }
        for slot in 0..self.slots.len() {
            self.learn_devices(slot, index);
        }
        self.failed = failed.len();
        self.tables.forget_unused();
        self.adopted_count =
            self.slots.iter().flatten().filter(|it| it.last_round().is_some()).count();
        changes
    }

    /// Adds at once what these records of mounts say, and notes those that went for
    /// [`Superblocks::drop_gone`]. What cannot be added yet is left to the next
    /// [`Superblocks::refresh`].
    pub(in super::super) fn follow(
        &mut self,
        ids: Vec<String>,
        run: &RunDir,
        index: &mut Index,
    ) -> Changes {
        let mut changes = Changes::default();
        let mounts = LazyMounts::new(Path::new("/"));
        for id in ids {
            let path = path_of_record(run, &id);
            match fs::symlink_metadata(&path).and_then(|it| RunEntry::of_record(&it)) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => self.gone.push(id),
                Ok(entry) if !self.has_entry(&path, entry) => {
                    let Ok(record) = run.record(&id) else { continue };
                    let Some(record) = record else {
                        self.drop_entry(&path, &mut changes);
                        continue;
                    };
                    let _ = self.add_record(&record, entry, run, &mounts, index, &mut changes);
                    self.follow_shared(&record, run, index, &mut changes);
                }
                _ => {}
            }
        }
        for id in self.to_mark.clone() {
            self.learn_devices(id.0 as usize, index);
        }
        changes
    }

    /// Drops mounts that [`Superblocks::follow`] found gone. To be called once the files that were
    /// opened on them are noted.
    pub(in super::super) fn drop_gone(&mut self, run: &RunDir) -> Changes {
        let mut changes = Changes::default();
        for id in std::mem::take(&mut self.gone) {
            let path = path_of_record(run, &id);
            if fs::symlink_metadata(&path).is_err_and(|it| it.kind() == io::ErrorKind::NotFound) {
                self.drop_entry(&path, &mut changes);
            }
        }
        changes
    }

    /// Adds the superblocks that a read-only mount shares with others.
    fn follow_shared(
        &mut self,
        record: &MountRecord,
        run: &RunDir,
        index: &mut Index,
        changes: &mut Changes,
    ) {
        if record.upper.as_ref().is_some_and(|upper| upper.dirs.is_empty()) {
            return;
        }
        for shown in run.shared_superblocks_of(&record.domain, record.image).found {
            let entry = RunEntry::Superblock(shown.device, shown.mount);
            self.add_entry(&shown.path, entry, Some(&shown), run, index, changes);
            // Also a known one: its device number may have been reused.
            let slot = self.entries.get(&shown.path).and_then(|(_, slot)| *slot);
            self.to_mark.extend(slot.and_then(id_of));
        }
    }

    fn add_record(
        &mut self,
        record: &MountRecord,
        entry: RunEntry,
        run: &RunDir,
        mounts: &LazyMounts<'_>,
        index: &mut Index,
        changes: &mut Changes,
    ) -> Result<(), MountError> {
        let path = path_of_record(run, &record.id);
        let own = record.own_superblock(run, mounts)?;
        if own.is_some() || !record.may_have_own_superblock() {
            self.add_entry(&path, entry, own.as_ref(), run, index, changes);
        } else {
            // It may come to its target later.
            self.drop_entry(&path, changes);
        }
        Ok(())
    }

    fn has_entry(&self, path: &Path, entry: RunEntry) -> bool {
        self.entries.get(path).is_some_and(|(known, _)| *known == entry)
    }

    fn drop_entry(&mut self, path: &Path, changes: &mut Changes) {
        if let Some((_, Some(slot))) = self.entries.remove(path) {
            changes.removed.extend(self.remove(slot));
        }
    }

    /// Adds what an entry of the run directory shows. If that cannot be done yet, the next refresh
    /// tries it again.
    fn add_entry(
        &mut self,
        path: &Path,
        entry: RunEntry,
        shown: Option<&ShownSuperblock>,
        run: &RunDir,
        index: &mut Index,
        changes: &mut Changes,
    ) {
        if self.has_entry(path, entry) {
            return;
        }
        self.drop_entry(path, changes);
        let slot = match shown {
            Some(shown) => {
                // Uses of an image that the index does not have cannot be noted.
                let Some(domain) = index.add_mounted(&shown.domain, &shown.image) else { return };
                let images = match shown.backend {
                    Backend::Overlay => shown.metadata_images(run),
                    Backend::InodeShare => None,
                };
                let images = images
                    .unwrap_or_else(|| metadata_images(index, domain, &shown.image, shown.backend));
                let layers = self.tables.layers(index, domain, &images, shown.backend);
                let Some(layers) = layers else { return };
                self.drop_ended(shown.device, changes);
                let slot = self.promote_adopted(domain, shown, &layers, changes);
                let Some(slot) = slot.or_else(|| self.add(domain, shown, layers)) else { return };
                Some(slot)
            }
            None => None,
        };
        self.entries.insert(path.to_owned(), (entry, slot));
    }

    /// Drops the superblock with this device number, if it is not where it was mounted.
    fn drop_ended(&mut self, device: Device, changes: &mut Changes) {
        let Some(slot) = self.by_device.get(&device).copied() else { return };
        let known = self.slots.get(slot).and_then(Option::as_ref);
        let Some(Place::Mounted(path, _)) = known.map(|it| &it.place) else { return };
        let has_ended = match open_directory(path, device) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => true,
            // The name of what was a mount may have left the kernel's cache.
            Err(_) => LazyMounts::new(Path::new("/")).get().is_ok_and(|mounts| {
                !mounts.iter().any(|it| it.device == device && path.starts_with(&it.target))
            }),
            Ok(_) => false,
        };
        if has_ended {
            self.entries.retain(|_, (_, taken)| *taken != Some(slot));
            changes.removed.extend(self.remove(slot));
        }
    }

    /// `None` if the device's number is still that of a superblock that has gone.
    fn add(
        &mut self,
        domain: u16,
        shown: &ShownSuperblock,
        layers: Vec<Arc<Inodes>>,
    ) -> Option<usize> {
        if self.by_device.contains_key(&shown.device) {
            return None;
        }
        Some(self.insert(Superblock {
            domain,
            image: shown.image,
            device: shown.device,
            place: Place::Mounted(shown.path.clone(), shown.inside.clone()),
            backend: shown.backend,
            is_writable: shown.upper.is_some(),
            upper: Upper::of(shown),
            layers,
            layer_devices: Vec::new(),
            serial: 0,
            is_sampled: false,
            is_marked: false,
        }))
    }

    pub(super) fn insert(&mut self, superblock: Superblock) -> usize {
        let slot = self.free.pop().unwrap_or(self.slots.len());
        if slot == self.slots.len() {
            self.slots.push(None);
        }
        self.by_file_device.insert(superblock.device, slot);
        self.by_device.insert(superblock.device, slot);
        self.slots[slot] = Some(Superblock { serial: self.serial, ..superblock });
        self.serial += 1;
        self.to_mark.extend(id_of(slot));
        slot
    }

    pub(super) fn remove(&mut self, slot: usize) -> Option<SuperblockId> {
        let superblock = self.slots.get_mut(slot)?.take()?;
        self.free.push(slot);
        let devices = superblock.layer_devices.iter().map(|(device, _)| *device);
        devices.chain([superblock.device]).for_each(|device| self.release(slot, device));
        id_of(slot)
    }

    /// A superblock has this device number no more.
    pub(super) fn release(&mut self, slot: usize, device: Device) {
        for by_device in [&mut self.by_device, &mut self.by_file_device] {
            if by_device.get(&device) == Some(&slot) {
                by_device.remove(&device);
            }
        }
    }
}

fn path_of_record(run: &RunDir, id: &str) -> PathBuf {
    run.path().join("mounts").join(format!("{id}.json"))
}

/// The records of mounts: name and path. A record is replaced when anything of it changes.
fn records(directory: &Path) -> io::Result<Vec<(String, PathBuf, RunEntry)>> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut records = Vec::new();
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name();
        if let Some(id) = name.to_str().and_then(|name| name.strip_suffix(".json")) {
            let metadata = match entry.metadata() {
                // It went meanwhile.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                metadata => metadata?,
            };
            let found = RunEntry::of_record(&metadata)?;
            records.push((id.to_owned(), entry.path(), found));
        }
    }
    Ok(records)
}
