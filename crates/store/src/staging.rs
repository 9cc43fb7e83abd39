//! [`Staging`]: one import in flight. Any number of threads write into it; nothing of it is visible
//! until [`Staging::commit`].
//!
//! ```text
//! staging/<id>/           locked (flock) as long as the importer lives
//!   objects/ab/cdef…      new objects, named as they will be in the domain
//!   images/<digest>.erofs
//!   layers/<chain-id>.dump.zst, .split
//!   segments/<digest>.segment, <image>.<digest>.pack
//!   tmp/<n>               being written, digest not known yet
//! ```
//!
//! No list of objects is kept in memory: whether an object is known is asked from the filesystem, so an
//! import of a million files needs no more memory here than one of ten.

use std::collections::HashSet;
use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::buffer::Buffer;
use crate::copy::check_file;
use crate::disk::{Disk, DiskFile, Lock, Purpose, StoredFile};
use crate::domain::{Domain, DomainLock, is_absent};
use crate::error::{At, Error, Result, is_damage, is_full};
use crate::examine::hash_file;
use crate::kinds::{FileKind, FileName};
use crate::repair::Damage;
use crate::store::remove_entry;
use crate::task::Cancel;

use crate::Digest;
use crate::verity::{self, Hasher};

/// [`ImportOptions::buffer_bytes_max`] unless said otherwise.
const BUFFER_BYTES_MAX: usize = 1 << 20;
/// [`ImportOptions::early_sync_bytes`] unless said otherwise.
const EARLY_SYNC_BYTES: u64 = 32 << 20;
/// Shorter runs of zeros are written: they hold no whole block that could be left out, and an archive can
/// have a hole between any two bytes.
const HOLE_MIN: usize = 4096;

/// A write that takes more than this is rare: content comes in pieces of at most so many bytes, give or
/// take a block.
const WRITE_BYTES_MAX: u64 = 1 << 20;

/// How an import is begun.
#[derive(Clone, Copy, Debug)]
pub struct ImportOptions {
    /// Keep garbage collection off until the import has ended. For the second try after
    /// [`Error::Vanished`].
    pub hold_lock: bool,
    /// Content up to this many bytes is hashed before anything is written, and not written if it is
    /// known. It bounds the memory of one [`ObjectWriter`].
    pub buffer_bytes_max: usize,
    /// Each time that new objects of so many bytes have come from memory, what is written is synced, while other
    /// threads go on: the less is left to wait for at the commit. Not file by file, since few large requests cost
    /// less than many.
    pub early_sync_bytes: u64,
    /// Believe no object that is in place: hash it before it is taken for known, and replace it if it is
    /// not what its name says. Heals what fsck found. (Missing and truncated objects are always healed.)
    pub repair: bool,
}

impl Default for ImportOptions {
    fn default() -> Self {
        Self {
            hold_lock: false,
            buffer_bytes_max: BUFFER_BYTES_MAX,
            early_sync_bytes: EARLY_SYNC_BYTES,
            repair: false,
        }
    }
}

/// What became of one object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stored {
    /// Its name.
    pub digest: Digest,
    /// Its size in bytes.
    pub size: u64,
    /// Whether it had to be written: it was not in the domain, nor written by this import before.
    pub new: bool,
}

/// What an import has written so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StagingStats {
    /// Objects that were written.
    pub new_objects: u64,
    /// Their bytes.
    pub new_bytes: u64,
    /// Objects that were known already (counted every time they came).
    pub known_objects: u64,
    /// Their bytes.
    pub known_bytes: u64,
}

/// One import in flight. Dropping it without [`Staging::commit`] removes everything it wrote.
pub struct Staging {
    pub(crate) domain: Domain,
    /// `staging/<id>`.
    pub(crate) directory: String,
    pub(crate) held: Option<DomainLock>,
    buffer_max: usize,
    early_sync_bytes: u64,
    pub(crate) repair: bool,
    /// Only this is stored, in place of what has its name; everything else counts as known.
    pub(crate) wanted: Option<Damage>,
    next_temporary: AtomicU64,
    /// Looked at without the lock on every object.
    working: AtomicBool,
    /// Writes that certainly fit, until the room is looked at again.
    writes_left: AtomicU64,
    health: Mutex<Health>,
    buffers: Mutex<Vec<Buffer>>,
    /// Bytes of new objects that came from memory.
    from_memory: AtomicU64,
    new_objects: AtomicU64,
    new_bytes: AtomicU64,
    known_objects: AtomicU64,
    known_bytes: AtomicU64,
    /// Last, so that the directory is gone before its lock is.
    lock: Option<Box<dyn Lock>>,
}

enum Health {
    Working,
    /// The filesystem is full. Nothing is written any more; what would have been is counted, so that
    /// the error can say how much was missing.
    Counting {
        missing: u64,
        seen: HashSet<Digest>,
    },
    Failed(String),
}

impl fmt::Debug for Staging {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Staging").field("directory", &self.directory).finish_non_exhaustive()
    }
}

impl Domain {
    /// Begins an import.
    ///
    /// # Errors
    /// [`Error::ReadOnly`], [`Error::Io`].
    pub fn begin_import(&self, options: ImportOptions) -> Result<Staging> {
        self.store().check_writable()?;
        let held = options.hold_lock.then(|| self.lock_shared()).transpose()?;
        let (directory, lock) = self.store().new_staging()?;
        let staging = Staging {
            domain: self.clone(),
            directory,
            held,
            buffer_max: options.buffer_bytes_max,
            early_sync_bytes: options.early_sync_bytes.max(1),
            repair: options.repair,
            wanted: None,
            next_temporary: AtomicU64::new(0),
            working: AtomicBool::new(true),
            writes_left: AtomicU64::new(0),
            health: Mutex::new(Health::Working),
            buffers: Mutex::default(),
            from_memory: AtomicU64::new(0),
            new_objects: AtomicU64::new(0),
            new_bytes: AtomicU64::new(0),
            known_objects: AtomicU64::new(0),
            known_bytes: AtomicU64::new(0),
            lock: Some(lock),
        };
        for part in ["objects", "images", "layers", "segments", "tmp"] {
            let path = format!("{}/{part}", staging.directory);
            staging.disk().mkdir(&path).at("create", &path)?;
        }
        Ok(staging)
    }
}

impl Staging {
    /// The domain that the import goes to.
    pub fn domain(&self) -> &Domain {
        &self.domain
    }

    /// What was written so far.
    pub fn stats(&self) -> StagingStats {
        StagingStats {
            new_objects: self.new_objects.load(Relaxed),
            new_bytes: self.new_bytes.load(Relaxed),
            known_objects: self.known_objects.load(Relaxed),
            known_bytes: self.known_bytes.load(Relaxed),
        }
    }

    /// Whether the filesystem has filled up, so that the import only counts what is missing. Commit will
    /// fail with [`Error::NoSpace`].
    pub fn is_full(&self) -> bool {
        matches!(*self.health(), Health::Counting { .. })
    }

    /// Stores content that is in memory.
    ///
    /// # Errors
    /// [`Error::Poisoned`] after an earlier failure, [`Error::Io`]. A full filesystem is no error here:
    /// see [`Staging::is_full`].
    pub fn put_object(&self, data: &[u8]) -> Result<Stored> {
        self.put_hashed(verity::digest(data), data)
    }

    /// A writer for content that arrives in pieces; any number of them may be open, on any threads.
    pub fn object_writer(&self) -> ObjectWriter<'_> {
        let buffer =
            self.lock_buffers().pop().unwrap_or_else(|| Buffer::new(self.buffer_max.max(1)));
        ObjectWriter { staging: self, hasher: Hasher::new(), buffer, spilled: None }
    }

    /// A writer for the metadata image.
    ///
    /// # Errors
    /// As [`Staging::put_object`].
    pub fn image_writer(&self) -> Result<ImageWriter<'_>> {
        Ok(ImageWriter { file: Spilled::new(self)?, hasher: Hasher::new(), packed: None })
    }

    /// A writer for the pack of an image, over segments that are staged or in place: the commit wants to know which
    /// ([`crate::Publish::segments`]).
    ///
    /// # Errors
    /// As [`Staging::put_object`].
    pub fn pack_writer(&self, image: &Digest) -> Result<ImageWriter<'_>> {
        Ok(ImageWriter { packed: Some(*image), ..self.image_writer()? })
    }

    /// A writer for a layer's own tree (composefs dump text, zstd).
    ///
    /// # Errors
    /// [`Error::BadName`], and as [`Staging::put_object`].
    pub fn layer_writer(&self, chain_id: &str) -> Result<LayerWriter<'_>> {
        self.chain_writer(FileKind::Layer, chain_id)
    }

    /// A writer for a layer's split: its archive without the content of its files.
    ///
    /// # Errors
    /// As [`Staging::layer_writer`].
    pub fn split_writer(&self, chain_id: &str) -> Result<LayerWriter<'_>> {
        self.chain_writer(FileKind::Split, chain_id)
    }

    fn chain_writer(&self, kind: FileKind, chain_id: &str) -> Result<LayerWriter<'_>> {
        let target = self.named_file(&FileName::chain(kind, chain_id)?);
        Ok(LayerWriter { file: Spilled::new(self)?, target })
    }

    /// Opens a layer's tree that this import has written. `None` if it has not, or had no room for it
    /// ([`Staging::is_full`]).
    ///
    /// # Errors
    /// [`Error::BadName`], [`Error::Io`].
    pub fn open_layer(&self, chain_id: &str) -> Result<Option<StoredFile>> {
        let path = self.named_file(&FileName::chain(FileKind::Layer, chain_id)?);
        match self.disk().open(&path) {
            Ok(file) => Ok(Some(StoredFile::new(file, path))),
            Err(error) if is_absent(&error) => Ok(None),
            Err(error) => Err(error).at("open", &path),
        }
    }

    /// Stores content whose digest is known to be right.
    fn put_hashed(&self, digest: Digest, data: &[u8]) -> Result<Stored> {
        let size = data.len() as u64;
        if self.is_in_place(&digest, size)? {
            return Ok(self.count(digest, size, false));
        }
        if !self.check()? {
            return match self.is_known(&digest, size)? {
                true => Ok(self.count(digest, size, false)),
                false => Ok(self.count_missing(digest, size, size)),
            };
        }
        // Whether it is staged already is answered by the call that makes it.
        let path = self.object_file(&digest);
        let disk = self.disk();
        let created = self.in_shard(&digest, || disk.create(&path, Purpose::Content));
        let written = match created {
            // Another thread has just stored the same content.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                return Ok(self.count(digest, size, false));
            }
            Err(error) => Err(error),
            Ok(mut file) => file.write_all(data),
        };
        match written {
            Ok(()) => {}
            Err(error) => {
                self.fail(error, "write", &path)?;
                return Ok(self.count_missing(digest, size, size));
            }
        }
        if !self.enable_verity(&path, &digest)? {
            return Ok(self.count_missing(digest, size, size));
        }
        self.sync_early(size)?;
        Ok(self.count(digest, size, true))
    }

    /// Syncs if `size` bytes more are enough for it.
    fn sync_early(&self, size: u64) -> Result<()> {
        let before = self.from_memory.fetch_add(size, Relaxed);
        if before / self.early_sync_bytes == (before + size) / self.early_sync_bytes {
            return Ok(());
        }
        // What a sync fails to write no later one reports.
        self.disk().sync_all().or_else(|error| self.fail(error, "sync", &self.directory))
    }

    /// Stores a file of this store as a new file that shares its blocks. The copy is hashed, not the
    /// original: it is ours alone and cannot change any more. None if this file cannot be shared so.
    pub(crate) fn put_reflink(
        &self,
        from: &str,
        digest: &Digest,
        size: u64,
    ) -> Result<Option<Stored>> {
        if self.is_known(digest, size)? {
            return Ok(Some(self.count(*digest, size, false)));
        }
        if !self.check()? {
            return Ok(Some(self.count_missing(*digest, size, size)));
        }
        let number = self.next_temporary.fetch_add(1, Relaxed);
        let mut copy = Spilled {
            staging: self,
            path: format!("{}/tmp/{number}", self.directory),
            file: None,
            written: size,
        };
        // Nothing was written yet, so whatever the reason is, copying the bytes may still go.
        if self.disk().reflink(from, &copy.path).is_err() {
            return Ok(None);
        }
        let file = self.disk().open(&copy.path).at("open", &copy.path)?;
        check_file(&StoredFile::new(file, from.to_owned()), *digest)?;
        let target = self.object_file(digest);
        match self.in_shard(digest, || self.disk().rename(&copy.path, &target, true)) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                return Ok(Some(self.count(*digest, size, false)));
            }
            Err(error) => {
                self.fail(error, "rename", &copy.path)?;
                return Ok(Some(self.count_missing(*digest, size, size)));
            }
            Ok(()) => copy.path.clear(),
        }
        if !self.enable_verity(&target, digest)? {
            return Ok(Some(self.count_missing(*digest, size, size)));
        }
        Ok(Some(self.count(*digest, size, true)))
    }

    /// Whether an object is in place in the domain. One of another size is damaged: it is written again,
    /// and replaced at the commit.
    fn is_in_place(&self, digest: &Digest, size: u64) -> Result<bool> {
        if let Some(wanted) = &self.wanted {
            return Ok(!wanted.objects.contains(digest));
        }
        if self.domain.object_size(digest)? != Some(size) {
            return Ok(false);
        }
        if !self.repair {
            return Ok(true);
        }
        match hash_file(&self.domain.open_object(digest)?, &Cancel::default()) {
            Err(error) if is_damage(&error) => Ok(false),
            found => Ok(found? == *digest),
        }
    }

    /// Whether an object is in place or in this staging.
    fn is_known(&self, digest: &Digest, size: u64) -> Result<bool> {
        Ok(self.is_in_place(digest, size)?
            || self.domain.file_size(&self.object_file(digest))? == Some(size))
    }

    fn count(&self, digest: Digest, size: u64, new: bool) -> Stored {
        let (objects, bytes) = match new {
            true => (&self.new_objects, &self.new_bytes),
            false => (&self.known_objects, &self.known_bytes),
        };
        objects.fetch_add(1, Relaxed);
        bytes.fetch_add(size, Relaxed);
        Stored { digest, size, new }
    }

    /// An object for which there is no room: `bytes` of its content are not holes.
    fn count_missing(&self, digest: Digest, size: u64, bytes: u64) -> Stored {
        if let Health::Counting { missing, seen } = &mut *self.health()
            && seen.insert(digest)
        {
            *missing += bytes;
        }
        Stored { digest, size, new: true }
    }

    /// Adds bytes that have no digest (image, layer) to what is missing.
    pub(crate) fn count_missing_bytes(&self, bytes: u64) {
        if let Health::Counting { missing, .. } = &mut *self.health() {
            *missing += bytes;
        }
    }

    /// Runs a call that puts an entry into the digest's shard; makes the shard if that is why it fails.
    /// Most shards exist most of the time, so asking first would be a wasted call.
    fn in_shard<T>(&self, digest: &Digest, call: impl Fn() -> io::Result<T>) -> io::Result<T> {
        match call() {
            Err(error) if is_absent(&error) => {}
            other => return other,
        }
        let path = self.object_file(digest);
        let shard = path.rsplit_once('/').map_or("", |(shard, _)| shard);
        match self.disk().mkdir(shard) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        call()
    }

    /// Has the kernel check every read of a complete file from now on, where it can. False if the disk
    /// is full.
    pub(crate) fn enable_verity(&self, path: &str, digest: &Digest) -> Result<bool> {
        if !self.domain.protection().verity {
            return Ok(true);
        }
        match self.disk().enable_verity(path) {
            Ok(Some(measured)) if measured == digest.0 => Ok(true),
            Ok(_) => {
                let error = Error::corrupt(path, "the kernel computes another fs-verity digest");
                self.poison(&error);
                Err(error)
            }
            Err(error) => self.fail(error, "enable fs-verity on", path).map(|()| false),
        }
    }

    pub(crate) fn object_file(&self, digest: &Digest) -> String {
        format!("{}/objects/{}", self.directory, digest.object_path())
    }

    /// Path of a staged file below the store.
    pub(crate) fn named_file(&self, name: &FileName) -> String {
        format!("{}/{}", self.directory, name.path())
    }

    pub(crate) fn disk(&self) -> &dyn Disk {
        self.domain.disk()
    }

    // Health.

    /// True while writing makes sense, false when only counting does. Asked before every write.
    fn check(&self) -> Result<bool> {
        if self.working.load(Relaxed) && self.has_room()? {
            return Ok(true);
        }
        match &*self.health() {
            Health::Working => Ok(true),
            Health::Counting { .. } => Ok(false),
            Health::Failed(first) => Err(Error::Poisoned { first: first.clone() }),
        }
    }

    /// Whether the disk has room left for us. If not, the import only counts from now on: it does not go
    /// on until the last byte is taken from everything else on that filesystem.
    ///
    /// Half of the room is used up before it is looked at again, so that a look costs nothing while there
    /// is plenty, and whoever else writes meanwhile is noticed in time.
    fn has_room(&self) -> Result<bool> {
        let take = |left: u64| left.checked_sub(1);
        if self.writes_left.fetch_update(Relaxed, Relaxed, take).is_ok() {
            return Ok(true);
        }
        let room = self.disk().room_bytes().at("look at the room for", &self.directory)?;
        if room == 0 {
            self.fill();
            return Ok(false);
        }
        self.writes_left.store(room / 2 / WRITE_BYTES_MAX, Relaxed);
        Ok(true)
    }

    /// From writing to counting.
    fn fill(&self) {
        let mut health = self.health();
        if let Health::Working = &*health {
            *health = Health::Counting { missing: 0, seen: HashSet::new() };
            self.working.store(false, Relaxed);
        }
    }

    /// What `commit` has to say before it does anything.
    pub(crate) fn check_for_commit(&self) -> Result<()> {
        match &*self.health() {
            Health::Working => Ok(()),
            Health::Counting { missing, seen } => {
                let files = (seen.len() as u64).max(1);
                // Whether it is room or inodes that are missing, the kernel's answer does not say.
                match self.disk().free_files() {
                    Ok(0) => Err(Error::NoInodes { files }),
                    _ => Err(Error::NoSpace { missing: *missing }),
                }
            }
            Health::Failed(first) => Err(Error::Poisoned { first: first.clone() }),
        }
    }

    /// Records a failed write. After one nobody knows what is on the disk, so it is never tried again:
    /// a full disk turns the import into one that counts, anything else ends it.
    fn fail(&self, error: io::Error, action: &'static str, path: &str) -> Result<()> {
        if is_full(&error) {
            self.fill();
            return Ok(());
        }
        let error = Error::Io { action, path: path.to_owned(), source: error };
        self.poison(&error);
        Err(error)
    }

    pub(crate) fn poison(&self, error: &Error) {
        let mut health = self.health();
        if !matches!(*health, Health::Failed(_)) {
            let source = std::error::Error::source(error).map(|source| format!(": {source}"));
            *health = Health::Failed(format!("{error}{}", source.unwrap_or_default()));
        }
        self.working.store(false, Relaxed);
    }

    fn health(&self) -> MutexGuard<'_, Health> {
        // A thread that panicked while it held this has not left it half changed.
        self.health.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_buffers(&self) -> MutexGuard<'_, Vec<Buffer>> {
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        let remove = || remove_entry(self.disk(), &self.directory, crate::disk::Kind::Directory);
        // Looking into the directory takes a descriptor. If there is none to be had, that of the lock is.
        // What cannot be removed now is recognised as orphaned later.
        if remove().is_err() {
            drop(self.lock.take());
            let _ = remove_entry(self.disk(), &self.directory, crate::disk::Kind::Directory);
        }
    }
}

/// A file under `tmp/` whose final name is not known yet. Without `finish` it is removed.
pub(crate) struct Spilled<'a> {
    pub(crate) staging: &'a Staging,
    pub(crate) path: String,
    /// None once the disk is full.
    file: Option<Box<dyn DiskFile>>,
    /// Bytes, holes not counted.
    pub(crate) written: u64,
}

/// What became of a file that was to get its name.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Placed {
    New,
    /// Another thread has just staged the same content.
    Known,
    /// The disk is full: there is no file.
    Full,
}

impl<'a> Spilled<'a> {
    pub(crate) fn new(staging: &'a Staging) -> Result<Self> {
        let number = staging.next_temporary.fetch_add(1, Relaxed);
        let path = format!("{}/tmp/{number}", staging.directory);
        let mut spilled = Self { staging, path, file: None, written: 0 };
        if staging.check()? {
            match staging.disk().create(&spilled.path, Purpose::Content) {
                Ok(file) => spilled.file = Some(file),
                Err(error) => staging.fail(error, "create", &spilled.path)?,
            }
        }
        Ok(spilled)
    }

    pub(crate) fn write(&mut self, data: &[u8]) -> Result<()> {
        self.written += data.len() as u64;
        self.call(|file| file.write_all(data))
    }

    pub(crate) fn hole(&mut self, len: u64) -> Result<()> {
        self.call(|file| file.append_hole(len))
    }

    pub(crate) fn call(
        &mut self,
        call: impl FnOnce(&mut dyn DiskFile) -> io::Result<()>,
    ) -> Result<()> {
        // Another thread's failure ends this file too: nothing of it can be published.
        if !self.staging.check()? {
            self.file = None;
        }
        if let Some(file) = &mut self.file
            && let Err(error) = call(&mut **file)
        {
            self.file = None;
            self.staging.fail(error, "write", &self.path)?;
        }
        Ok(())
    }

    /// Gives the file its name in the staging directory; what already has the name stays.
    pub(crate) fn finish(
        mut self,
        call: impl FnOnce(&Staging, &str) -> io::Result<()>,
    ) -> Result<Placed> {
        let Some(file) = self.file.take() else { return Ok(Placed::Full) };
        drop(file);
        match call(self.staging, &self.path) {
            // `drop` removes ours.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(Placed::Known),
            Err(error) => self.staging.fail(error, "rename", &self.path).map(|()| Placed::Full),
            Ok(()) => {
                self.path.clear();
                Ok(Placed::New)
            }
        }
    }
}

impl Drop for Spilled<'_> {
    fn drop(&mut self) {
        self.file = None;
        if !self.path.is_empty() {
            let _ = self.staging.disk().unlink(&self.path);
        }
    }
}

/// Writes one object. Content up to [`ImportOptions::buffer_bytes_max`] is kept in memory until [`ObjectWriter::finish`].
pub struct ObjectWriter<'a> {
    staging: &'a Staging,
    hasher: Hasher,
    buffer: Buffer,
    spilled: Option<Spilled<'a>>,
}

impl fmt::Debug for ObjectWriter<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ObjectWriter").field("size", &self.hasher.size()).finish_non_exhaustive()
    }
}

impl ObjectWriter<'_> {
    /// Takes the next bytes of the content.
    ///
    /// # Errors
    /// As [`Staging::put_object`].
    pub fn push(&mut self, mut data: &[u8]) -> Result<()> {
        while !data.is_empty() {
            let spare = self.spare()?;
            let count = spare.len().min(data.len());
            spare[..count].copy_from_slice(&data[..count]);
            self.advance(count);
            data = &data[count..];
        }
        Ok(())
    }

    /// Room for the next bytes of the content, at least one, in memory of the writer's own: for who would otherwise
    /// read them to another place first. [`ObjectWriter::advance`] takes them.
    ///
    /// # Errors
    /// As [`Staging::put_object`].
    pub fn spare(&mut self) -> Result<&mut [u8]> {
        if self.buffer.spare().is_empty() {
            match self.spilled {
                None => self.spill()?,
                Some(_) => self.flush_buffer()?,
            }
        }
        Ok(self.buffer.spare())
    }

    /// Takes the first `count` bytes of [`ObjectWriter::spare`] as the next of the content.
    pub fn advance(&mut self, count: usize) {
        let before = self.buffer.filled().len();
        self.buffer.advance(count);
        self.hasher.update(&self.buffer.filled()[before..]);
    }

    /// Takes zeros as the next `len` bytes and leaves a hole for them in the file, so that an object is no
    /// larger on disk than its source was. Time and memory do not depend on `len`.
    ///
    /// Only for what the source says is a hole. Zeros that it has written down are not looked for: whoever
    /// preallocated a file wants its blocks, a hole takes as much page cache as data once it is read, and
    /// there is little disk to gain (of the images of `corpus/`, runs of 64 KiB and more are 2 % in mysql,
    /// 0.3 % in postgres, none in the others).
    ///
    /// # Errors
    /// As [`Staging::put_object`].
    pub fn push_hole(&mut self, len: u64) -> Result<()> {
        if let Some(zeros) = usize::try_from(len).ok().and_then(|len| [0; HOLE_MIN - 1].get(..len))
        {
            return self.push(zeros);
        }
        self.hasher.zeros(len);
        match self.spilled {
            None => self.spill()?,
            Some(_) => self.flush_buffer()?,
        }
        self.spilled.as_mut().map_or(Ok(()), |spilled| spilled.hole(len))
    }

    /// From memory to a file of its own.
    fn spill(&mut self) -> Result<()> {
        self.spilled = Some(Spilled::new(self.staging)?);
        self.flush_buffer()
    }

    fn flush_buffer(&mut self) -> Result<()> {
        if let Some(spilled) = &mut self.spilled {
            spilled.write(self.buffer.filled())?;
            self.buffer.clear();
        }
        Ok(())
    }

    /// Ends the object and gives its name.
    ///
    /// # Errors
    /// As [`Staging::put_object`].
    pub fn finish(mut self) -> Result<Stored> {
        self.flush_buffer()?;
        let staging = self.staging;
        let hasher = std::mem::take(&mut self.hasher);
        let size = hasher.size();
        let digest = hasher.finish();
        let Some(spilled) = self.spilled.take() else {
            return staging.put_hashed(digest, self.buffer.filled());
        };
        if staging.is_known(&digest, size)? {
            return Ok(staging.count(digest, size, false));
        }
        let target = staging.object_file(&digest);
        let written = spilled.written;
        let placed = spilled.finish(|staging, path| {
            staging.in_shard(&digest, || staging.disk().rename(path, &target, true))
        })?;
        match placed {
            Placed::Known => Ok(staging.count(digest, size, false)),
            Placed::New if staging.enable_verity(&target, &digest)? => {
                Ok(staging.count(digest, size, true))
            }
            Placed::New | Placed::Full => Ok(staging.count_missing(digest, size, written)),
        }
    }
}

impl Drop for ObjectWriter<'_> {
    fn drop(&mut self) {
        let mut buffer = std::mem::take(&mut self.buffer);
        buffer.clear();
        self.staging.lock_buffers().push(buffer);
    }
}

impl io::Write for ObjectWriter<'_> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        self.push(data).map(|()| data.len()).map_err(io::Error::other)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes a metadata image or a pack; give it pieces of at least some KiB.
pub struct ImageWriter<'a> {
    file: Spilled<'a>,
    hasher: Hasher,
    /// The image, if it is a pack.
    packed: Option<Digest>,
}

impl fmt::Debug for ImageWriter<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ImageWriter").field("size", &self.file.written).finish_non_exhaustive()
    }
}

impl ImageWriter<'_> {
    /// Ends the image and gives its name.
    ///
    /// # Errors
    /// As [`Staging::put_object`].
    pub fn finish(self) -> Result<Digest> {
        let Self { file, hasher, packed } = self;
        let (staging, written) = (file.staging, file.written);
        let digest = hasher.finish();
        if staging.wanted.as_ref().is_some_and(|wanted| !wanted.images.contains(&digest)) {
            return Ok(digest);
        }
        let target = staging.named_file(&match packed {
            None => FileName::content(FileKind::Image, &digest),
            Some(image) => FileName::of_image(FileKind::Pack, &image, &digest),
        });
        let placed = file.finish(|staging, path| staging.disk().rename(path, &target, true))?;
        if placed == Placed::Full || !staging.enable_verity(&target, &digest)? {
            staging.count_missing_bytes(written);
        }
        Ok(digest)
    }
}

impl io::Write for ImageWriter<'_> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        self.hasher.update(data);
        self.file.write(data).map(|()| data.len()).map_err(io::Error::other)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes a layer's tree or split; give it pieces of at least some KiB.
pub struct LayerWriter<'a> {
    file: Spilled<'a>,
    target: String,
}

impl fmt::Debug for LayerWriter<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LayerWriter").field("target", &self.target).finish_non_exhaustive()
    }
}

impl LayerWriter<'_> {
    /// Ends the tree.
    ///
    /// # Errors
    /// As [`Staging::put_object`].
    pub fn finish(self) -> Result<()> {
        let Self { file, target } = self;
        let (staging, written) = (file.staging, file.written);
        let placed = file.finish(|staging, path| staging.disk().rename(path, &target, true))?;
        if placed == Placed::Full {
            staging.count_missing_bytes(written);
        }
        Ok(())
    }
}

impl io::Write for LayerWriter<'_> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        self.file.write(data).map(|()| data.len()).map_err(io::Error::other)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
