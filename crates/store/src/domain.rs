//! [`Domain`]: one trust domain. Nothing in it shares an inode with another domain.

use std::collections::BTreeSet;
use std::path::PathBuf;

use crate::Digest;
use crate::disk::{Disk, Kind, Lock, LockMode, Protection, StoredFile};
use crate::error::{At, Error, Result, is_absent, is_damage};
use crate::kinds::{FileKind, FileName};
use crate::record::{Ref, now};
use crate::records::{RECORD_SUFFIX, RECORDS, REFS, ROOTS, ref_json};
use crate::store::{DOMAINS, STAGING, Store, TEMPORARY, mkdir_if_missing, remove_entry};
use crate::task::Cancel;

/// The directories that every domain has, parents first.
pub(crate) fn directories() -> impl Iterator<Item = &'static str> {
    ["objects", "images", "layers", ROOTS, "segments"].into_iter().chain(RECORDS)
}

/// Makes those that are missing.
pub(crate) fn make_directories(disk: &dyn Disk, domain: &str) -> Result<()> {
    directories().try_for_each(|directory| mkdir_if_missing(disk, &format!("{domain}/{directory}")))
}

/// One trust domain of a store.
#[derive(Clone, Debug)]
pub struct Domain {
    store: Store,
    name: String,
    directory: String,
}

/// Locks of the domain, held until dropped. Shared: what they cover is not collected meanwhile.
#[derive(Debug)]
pub struct DomainLock {
    _held: Vec<Box<dyn Lock>>,
}

/// What a lock covers. Lock order: names, then contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Covered {
    /// What names something: records, images, layers, splits and packs.
    Names,
    /// What is only named: objects and segments.
    Contents,
}

impl Domain {
    pub(crate) fn new(store: Store, name: &str) -> Self {
        Self { store, name: name.to_owned(), directory: format!("{DOMAINS}/{name}") }
    }

    /// The domain's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The store it belongs to.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Makes missing directories of the domain and `staging` again, empty but for `refs`: there each image gets the name
    /// `recovered-<digest>`, or the next collection would remove it. Durable on return. A repair does it first:
    /// without them [`Domain::fsck`] looks at nothing else.
    ///
    /// # Errors
    /// [`Error::ReadOnly`], [`Error::Io`].
    pub fn make_directories(&self) -> Result<()> {
        self.store.check_writable()?;
        let (disk, refs) = (self.disk(), format!("{}/{REFS}", self.directory));
        let _lock = self.lock(LockMode::Exclusive, self.store.waiting())?;
        if disk.stat(&refs).is_err_and(|error| is_absent(&error)) {
            mkdir_if_missing(disk, &format!("{}/images", self.directory))?;
            // Whole or not at all: what has no name in `refs` is collected.
            let aside = format!("{refs}.new");
            if disk.stat(&aside).is_ok() {
                remove_entry(disk, &aside, Kind::Directory)?;
            }
            mkdir_if_missing(disk, &aside)?;
            let images = self.all_images()?;
            let delta = |image| Some(self.base_of(image).ok()??.delta);
            let deltas: BTreeSet<Digest> = images.iter().filter_map(delta).collect();
            for image in images.into_iter().filter(|image| !deltas.contains(image)) {
                let name = format!("recovered-{image}");
                let json = ref_json(&name, &Ref { created: now(), ..Ref::new(image) })?;
                self.store.replace_file(&format!("{aside}/{name}{RECORD_SUFFIX}"), &json, true)?;
            }
            disk.rename(&aside, &refs, true).at("publish", &refs)?;
        }
        make_directories(disk, &self.directory)?;
        mkdir_if_missing(disk, STAGING)?;
        disk.sync_all().at("sync", &self.directory)
    }

    /// What protects content that is in place here.
    pub fn protection(&self) -> Protection {
        self.store.protection()
    }

    /// Whether the kernel checks content that is in place (fs-verity).
    pub fn has_verity(&self) -> bool {
        self.disk().has_verity()
    }

    /// Whether files of the store can share blocks (`FICLONE`).
    pub fn can_reflink(&self) -> bool {
        self.disk().can_reflink()
    }

    /// Holds off garbage collection until the lock is dropped; waits for a running one.
    ///
    /// # Errors
    /// [`Error::Io`], and [`Error::Cancelled`] if the [store's waiting](Store::waits_until) is.
    pub fn lock_shared(&self) -> Result<DomainLock> {
        self.lock(LockMode::Shared, self.store.waiting())
    }

    /// The same for images, layers and packs in place, with what they name; it does not wait for objects
    /// that are being removed, which nothing in place names.
    ///
    /// # Errors
    /// Those of [`Domain::lock_shared`].
    pub fn lock_names(&self) -> Result<DomainLock> {
        let lock = || self.try_lock(Covered::Names, LockMode::Shared);
        self.store.waiting().wait_for(lock)
    }

    /// Both locks of the domain. `cancel` ends the waiting for them.
    pub(crate) fn lock(&self, mode: LockMode, cancel: &Cancel) -> Result<DomainLock> {
        let mut lock = cancel.wait_for(|| self.try_lock(Covered::Names, mode))?;
        lock._held.extend(cancel.wait_for(|| self.try_lock(Covered::Contents, mode))?._held);
        Ok(lock)
    }

    /// One of them, unless somebody else has it.
    pub(crate) fn try_lock(&self, what: Covered, mode: LockMode) -> Result<Option<DomainLock>> {
        let path = match what {
            Covered::Names => self.directory.clone(),
            Covered::Contents => format!("{}/{}", self.directory, FileKind::Object.directory()),
        };
        let lock = match self.disk().lock(&path, mode, false) {
            // Until a repair makes it again.
            Err(error) if what == Covered::Contents && is_absent(&error) => {
                return Ok(Some(DomainLock { _held: Vec::new() }));
            }
            other => other.at("lock", &path)?,
        };
        Ok(lock.map(|lock| DomainLock { _held: vec![lock] }))
    }

    /// The lock of a directory, unless somebody else has it.
    pub(crate) fn try_lock_at(&self, path: &str, mode: LockMode) -> Result<Option<Box<dyn Lock>>> {
        self.disk().lock(path, mode, false).at("lock", path)
    }

    /// The objects directory: a composefs digest store. `None` on a simulated disk.
    pub fn objects_dir(&self) -> Option<PathBuf> {
        self.real("objects")
    }

    /// The file of an object, whether it exists or not. `None` on a simulated disk.
    pub fn object_path(&self, digest: &Digest) -> Option<PathBuf> {
        self.real(&format!("objects/{}", digest.object_path()))
    }

    /// The file of an image, whether it exists or not. `None` on a simulated disk.
    pub fn image_path(&self, digest: &Digest) -> Option<PathBuf> {
        self.real(&FileName::content(FileKind::Image, digest).path())
    }

    fn real(&self, below: &str) -> Option<PathBuf> {
        Some(self.store.path()?.join(&self.directory).join(below))
    }

    pub(crate) fn directory(&self) -> &str {
        &self.directory
    }

    pub(crate) fn object_file(&self, digest: &Digest) -> String {
        format!("{}/objects/{}", self.directory, digest.object_path())
    }

    pub(crate) fn named_file(&self, name: &FileName) -> String {
        format!("{}/{}", self.directory, name.path())
    }

    /// Size of an object in bytes; `None` if it is not here.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if something other than a file is in its place; [`Error::Io`].
    pub fn object_size(&self, digest: &Digest) -> Result<Option<u64>> {
        self.file_size(&self.object_file(digest))
    }

    pub(crate) fn file_size(&self, path: &str) -> Result<Option<u64>> {
        match self.disk().stat(path).if_there("look at", path)? {
            Some(stat) if stat.kind == Kind::File => Ok(Some(stat.size)),
            Some(_) => Err(Error::corrupt(path, "it is not a regular file; remove it first")),
            None => Ok(None),
        }
    }

    /// Opens an object for reading.
    ///
    /// # Errors
    /// [`Error::NoSuch`], [`Error::Io`].
    pub fn open_object(&self, digest: &Digest) -> Result<StoredFile> {
        self.open_named(&FileName::content(FileKind::Object, digest))
    }

    /// Whether an image is here.
    pub fn has_image(&self, digest: &Digest) -> Result<bool> {
        self.has_named(&FileName::content(FileKind::Image, digest))
    }

    /// Opens a metadata image for reading.
    ///
    /// # Errors
    /// [`Error::NoSuch`], [`Error::Io`].
    pub fn open_image(&self, digest: &Digest) -> Result<StoredFile> {
        self.open_named(&FileName::content(FileKind::Image, digest))
    }

    /// Digests of all images, sorted, without [derived ones](Domain::derived_images).
    pub fn images(&self) -> Result<Vec<Digest>> {
        let derived = self.derived_images()?;
        Ok(self.all_images()?.into_iter().filter(|image| !derived.contains(image)).collect())
    }

    /// [`Domain::images`] with derived ones.
    pub(crate) fn all_images(&self) -> Result<Vec<Digest>> {
        Ok(self.named(FileKind::Image)?.iter().filter_map(FileName::image).collect())
    }

    /// Digests of all segments, sorted.
    pub fn segments(&self) -> Result<Vec<Digest>> {
        Ok(self.named(FileKind::Segment)?.iter().filter_map(FileName::digest).collect())
    }

    /// Opens a segment for reading; fails like [`Domain::open_named`].
    pub fn open_segment(&self, digest: &Digest) -> Result<StoredFile> {
        self.open_named(&FileName::content(FileKind::Segment, digest))
    }

    /// The packs of an image of one kind: at most one, or two good ones after an interrupted
    /// replacement.
    pub fn packs_of(&self, kind: FileKind, image: &Digest) -> Result<Vec<FileName>> {
        let packs = self.named(kind)?.into_iter();
        Ok(packs.filter(|pack| pack.image() == Some(*image)).collect())
    }

    /// All packs of all kinds.
    pub fn packs(&self) -> Result<Vec<FileName>> {
        let packs = FileKind::PACKS.map(|kind| self.named(kind));
        packs.into_iter().try_fold(Vec::new(), |all, packs| Ok([all, packs?].concat()))
    }

    /// All files of a kind other than objects, sorted; for those see `each_object`.
    pub fn named(&self, kind: FileKind) -> Result<Vec<FileName>> {
        if kind == FileKind::Object {
            return Ok(Vec::new());
        }
        let stems = self.files(kind.directory(), kind.suffix())?;
        let mut names: Vec<_> =
            stems.iter().filter_map(|stem| FileName::of_stem(kind, stem)).collect();
        names.sort_unstable();
        Ok(names)
    }

    /// Opens a file for reading.
    ///
    /// # Errors
    /// [`Error::NoSuch`], [`Error::Io`].
    pub fn open_named(&self, name: &FileName) -> Result<StoredFile> {
        self.open_file(self.named_file(name))?.ok_or_else(|| Error::NoSuch(name.clone()))
    }

    /// Removes derived files; whoever has one open keeps it. Durable on return.
    ///
    /// # Errors
    /// [`Error::ReadOnly`], [`Error::Io`].
    pub fn remove_named(&self, names: &[FileName]) -> Result<()> {
        self.store.check_writable()?;
        let _lock = self.lock_shared()?;
        let mut directories = BTreeSet::new();
        for name in names.iter().filter(|name| name.kind().is_derived()) {
            remove_entry(self.disk(), &self.named_file(name), Kind::File)?;
            directories.insert(format!("{}/{}", self.directory, name.kind().directory()));
        }
        directories.iter().try_for_each(|path| self.disk().sync_dir(path).at("sync", path))
    }

    /// The file of this machine. `None` on a simulated disk.
    pub fn named_path(&self, name: &FileName) -> Option<PathBuf> {
        self.real(&name.path())
    }

    /// Whether it is here, damaged or not. A layer that was unpacked from no archive has no split.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn has_named(&self, name: &FileName) -> Result<bool> {
        match self.is_usable(name) {
            Err(error) if is_damage(&error) => Ok(true),
            usable => usable,
        }
    }

    /// Whether it is here and looks sound from outside. Damage is an error.
    pub(crate) fn is_usable(&self, name: &FileName) -> Result<bool> {
        Ok(self.file_size(&self.named_file(name))?.is_some())
    }

    pub(crate) fn open_file(&self, path: String) -> Result<Option<StoredFile>> {
        let file = self.disk().open(&path).if_there("open", &path)?;
        Ok(file.map(|file| StoredFile::new(file, path)))
    }

    /// Entries of a directory of the domain; none if it does not exist.
    pub(crate) fn entries(&self, directory: &str) -> Result<Vec<(String, Kind)>> {
        let path = match directory {
            "" => self.directory.clone(),
            directory => format!("{}/{directory}", self.directory),
        };
        Ok(self.disk().list(&path).if_there("list", &path)?.unwrap_or_default())
    }

    /// File names of a directory without the suffix; others and temporary files are left out.
    pub(crate) fn files(&self, directory: &str, suffix: &str) -> Result<Vec<String>> {
        let path = format!("{}/{directory}", self.directory);
        let entries = self.disk().list(&path).at("list", &path)?;
        Ok(entries
            .into_iter()
            .filter(|(entry, _)| !entry.starts_with(TEMPORARY))
            .filter_map(|(entry, _)| entry.strip_suffix(suffix).map(str::to_owned))
            .collect())
    }

    pub(crate) fn disk(&self) -> &dyn Disk {
        self.store.disk()
    }
}
