//! Which layer of a superblock a file is in: `st_dev` tells it once a file of the layer was found.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Dir, FileType, OFlags};
use rustix::io::Errno;

use super::super::index::Index;
use super::super::usage::ObjectId;
use super::{Found, Place, Superblock, Superblocks};
use crate::mount::{open_below, open_cached};
use crate::processes::Device;

impl Superblock {
    /// The layer and the object of a file that does not lie among the changes.
    pub(super) fn layer_of(&self, index: &Index, found: Found) -> Option<(usize, ObjectId)> {
        let known = self.layer_devices.iter().find(|(device, _)| *device == found.device);
        if let Some((_, layer)) = known {
            return Some((*layer, self.layers[*layer].get(index, found.inode)?));
        }
        if self.layer_devices.len() == self.layers.len() {
            return None;
        }
        let is_it = |id: &ObjectId| index.object(*id).is_some_and(|it| it.size == found.size);
        let candidates = self.layers.iter().enumerate();
        let candidates =
            candidates.filter_map(|(n, it)| Some((n, it.get(index, found.inode).filter(is_it)?)));
        let mut candidates = candidates.collect::<Vec<_>>();
        // Where two layers have such a file, another one will tell which device is whose.
        candidates.pop().filter(|_| candidates.is_empty())
    }

    /// A file of each layer that has one where it is looked for, with the layer.
    fn sample(&self, index: &Index) -> io::Result<Vec<(Device, usize)>> {
        let Place::Mounted(top, inside) = &self.place else { return Ok(Vec::new()) };
        let root = open_directory(top, self.device)?;
        let mut devices = Vec::<(Device, usize)>::new();
        for (number, layer) in self.layers.iter().enumerate() {
            let is_it = |path: &Path, found: &Found| {
                let object = layer.get(index, found.inode).and_then(|id| index.object(id));
                object.is_some_and(|object| object.size == found.size)
                    // A file of a layer above may lie there, and have the number and size.
                    && !devices.iter().any(|(known, _)| *known == found.device)
                    // Or one of the container's own.
                    && self.is_changed(|| Some(top.join(path))) != Some(true)
            };
            let found = match inside.as_os_str().is_empty() {
                true => sample_of(&root, &layer.samples, is_it)?,
                // Elsewhere the mount shows files of another superblock.
                false => sample_below(&root, is_it)?,
            };
            devices.extend(found.map(|found| (found.device, number)));
        }
        Ok(devices)
    }
}

impl Superblocks {
    /// Learns the devices of the layers of a superblock, unless they are known.
    pub(super) fn learn_devices(&mut self, slot: usize, index: &Index) {
        let Some(superblock) = self.slots.get_mut(slot).and_then(Option::as_mut) else { return };
        // One that was just dropped may have had this device number.
        for (device, _) in &superblock.layer_devices {
            self.by_file_device.entry(*device).or_insert(slot);
        }
        if superblock.is_sampled {
            return;
        }
        // Tried again with the next refresh.
        let Ok(devices) = superblock.sample(index) else { return };
        superblock.is_sampled = matches!(superblock.place, Place::Mounted(..));
        let is_new = |(_, layer): &(Device, usize)| {
            superblock.layer_devices.iter().all(|(_, known)| known != layer)
        };
        let new: Vec<_> = devices.into_iter().filter(is_new).collect();
        for (device, layer) in new {
            superblock.layer_devices.push((device, layer));
            // A number has one owner, and the mount has just shown that it is this one. A former owner has
            // gone, and no opened file of it waits to be noted: it would have kept the superblock.
            self.by_file_device.insert(device, slot);
        }
    }

    /// Learns the device of a layer from a file that a process maps or opened.
    pub(super) fn learn_device(&mut self, slot: usize, device: Device, layer: usize) {
        let Some(superblock) = self.slots.get_mut(slot).and_then(Option::as_mut) else { return };
        superblock.layer_devices.push((device, layer));
        // A process can swap what it maps: it shall not take another superblock's files over.
        self.by_file_device.entry(device).or_insert(slot);
    }
}

/// Opens a directory of a superblock, and fails if another one is there by now, or if a filesystem
/// on the way would have to be asked.
pub(super) fn open_directory(path: &Path, device: Device) -> io::Result<OwnedFd> {
    let directory = open_cached(path)?;
    let found = Found::at(&directory, Path::new(""), AtFlags::EMPTY_PATH)?;
    if found.device != device {
        return Err(io::ErrorKind::NotFound.into());
    }
    Ok(directory)
}

fn look_below(directory: &OwnedFd, path: &Path) -> rustix::io::Result<Option<Found>> {
    match open_below(directory, path, OFlags::PATH) {
        // Somebody has removed it, or made it a link.
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::XDEV) => Ok(None),
        file => Found::at(file?, Path::new(""), AtFlags::EMPTY_PATH).map(Some),
    }
}

/// The first of these files that is an object.
fn sample_of(
    root: &OwnedFd,
    paths: &[PathBuf],
    is_it: impl Fn(&Path, &Found) -> bool,
) -> io::Result<Option<Found>> {
    for path in paths {
        let found = look_below(root, path)?.filter(|found| is_it(path, found));
        if found.is_some() {
            return Ok(found);
        }
    }
    Ok(None)
}

/// A file of a directory, or of a directory in it, that is an object.
fn sample_below(
    root: &OwnedFd,
    is_it: impl Fn(&Path, &Found) -> bool,
) -> io::Result<Option<Found>> {
    const LOOKED_AT_MAX: usize = 1000;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY;
    let mut left = LOOKED_AT_MAX;
    let mut look_in = |directory: &OwnedFd, path: &Path, below: &mut Vec<OsString>| {
        for entry in Dir::read_from(directory)?.flatten().take(left) {
            left -= 1;
            let name = OsStr::from_bytes(entry.file_name().to_bytes());
            if entry.file_type() == FileType::RegularFile {
                let found = look_below(directory, Path::new(name))?;
                let found = found.filter(|found| is_it(&path.join(name), found));
                if found.is_some() {
                    return Ok(found);
                }
            } else if entry.file_type() == FileType::Directory && name != "." && name != ".." {
                below.push(name.to_owned());
            }
        }
        Ok(None)
    };
    let (top, mut below) = (open_below(root, ".", flags)?, Vec::new());
    let mut found: rustix::io::Result<_> = look_in(&top, Path::new(""), &mut below);
    for name in below {
        if let (Ok(None), Ok(directory)) = (&found, open_below(&top, &name, flags)) {
            found = look_in(&directory, Path::new(&name), &mut Vec::new());
        }
    }
    Ok(found?)
}
