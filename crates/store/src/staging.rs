//! [`Staging`]: one import by any number of threads, invisible until [`Staging::commit`].
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
//! No list of objects is kept in memory: the filesystem says whether an object is known, so memory
//! does not grow with the number of files.

use std::collections::HashSet;
use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::buffer::Buffer;
use crate::disk::{Disk, Lock, Purpose, StoredFile};
use crate::domain::{Domain, DomainLock};
use crate::error::{At, Error, Result, is_absent, is_full};
use crate::kinds::{FileKind, FileName};
use crate::repair::Damage;
use crate::staged::{ImageWriter, ObjectWriter, StagedFile};
use crate::store::{parent, remove_entry};
use crate::task::Cancel;

use crate::Digest;
use crate::verity;

/// [`ImportOptions::buffer_bytes_max`] unless said otherwise.
const BUFFER_BYTES_MAX: usize = 1 << 20;
/// [`ImportOptions::early_sync_bytes`] unless said otherwise.
const EARLY_SYNC_BYTES: u64 = 32 << 20;

/// A larger write is rare: content comes in pieces of at most this size, give or take a block.
const WRITE_BYTES_MAX: u64 = 1 << 20;

/// How an import is begun.
#[derive(Clone, Copy, Debug)]
pub struct ImportOptions {
    /// Keep garbage collection off throughout: for the second try after [`Error::Vanished`].
    pub hold_lock: bool,
    /// Content up to this many bytes is hashed before writing; bounds one [`ObjectWriter`]'s
    /// memory.
    pub buffer_bytes_max: usize,
    /// Sync each time that this many bytes of new objects came from memory, while other threads go
    /// on: it shortens the commit's wait, and few large requests cost less than one per file.
    pub early_sync_bytes: u64,
}

impl Default for ImportOptions {
    fn default() -> Self {
        Self {
            hold_lock: false,
            buffer_bytes_max: BUFFER_BYTES_MAX,
            early_sync_bytes: EARLY_SYNC_BYTES,
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
    pub(crate) cancel: Cancel,
    buffer_max: usize,
    early_sync_bytes: u64,
    /// Only this is stored, in place of what has its name; everything else counts as known.
    pub(crate) wanted: Option<Damage>,
    pub(crate) next_temporary: AtomicU64,
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
    /// The filesystem is full. Further bytes are only counted, for the error.
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
            cancel: Cancel::default(),
            buffer_max: options.buffer_bytes_max,
            early_sync_bytes: options.early_sync_bytes.max(1),
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
    /// Has this token end reading of what is in place, which may be gigabytes.
    #[must_use]
    pub fn cancelled_by(mut self, cancel: &Cancel) -> Self {
        self.cancel = cancel.clone();
        self
    }

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

    /// Whether the filesystem is full, so that the commit will fail with [`Error::NoSpace`].
    pub fn is_full(&self) -> bool {
        matches!(*self.health(), Health::Counting { .. })
    }

    /// Stores content that is in memory.
    ///
    /// # Errors
    /// [`Error::Poisoned`] after an earlier failure, [`Error::Io`]. A full filesystem is no error
    /// here: see [`Staging::is_full`].
    pub fn put_object(&self, data: &[u8]) -> Result<Stored> {
        self.put_hashed(verity::digest(data), data)
    }

    /// A writer for content that arrives in pieces; any number of them may be open, on any threads.
    pub fn object_writer(&self) -> ObjectWriter<'_> {
        let buffer =
            self.lock_buffers().pop().unwrap_or_else(|| Buffer::new(self.buffer_max.max(1)));
        ObjectWriter::new(self, buffer)
    }

    /// A file of any kind but objects, named when complete. Fails as [`Staging::put_object`] does.
    pub fn file_writer(&self) -> Result<StagedFile<'_>> {
        StagedFile::new(self)
    }

    /// A writer for the metadata image; fails as [`Staging::put_object`] does.
    pub fn image_writer(&self) -> Result<ImageWriter<'_>> {
        ImageWriter::new(self, None)
    }

    /// A writer for a pack of an image, over staged or present segments, which the commit wants
    /// to know ([`crate::Publish::segments`]). Fails as [`Staging::put_object`] does.
    pub fn pack_writer(&self, kind: FileKind, image: &Digest) -> Result<ImageWriter<'_>> {
        ImageWriter::new(self, Some((kind, *image)))
    }

    /// Opens a file of this import. `None` if there is none, or no room ([`Staging::is_full`]).
    pub fn open_named(&self, name: &FileName) -> Result<Option<StoredFile>> {
        self.domain.open_file(self.named_file(name))
    }

    /// Stores content whose digest is known to be right.
    pub(crate) fn put_hashed(&self, digest: Digest, data: &[u8]) -> Result<Stored> {
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
        if let Err(error) = written {
            self.fail(error, "write", &path)?;
            return Ok(self.count_missing(digest, size, size));
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
        self.sync().or_else(|error| self.fail(error, "sync", &self.directory))
    }

    /// Syncs by a file of its own: the kernel tells each open file once that a write failed.
    pub(crate) fn sync(&self) -> io::Result<()> {
        self.lock.as_ref().map_or_else(|| self.disk().sync_all(), |lock| lock.sync())
    }

    /// Whether an object is in the domain; a damaged one of another size is replaced at the commit.
    fn is_in_place(&self, digest: &Digest, size: u64) -> Result<bool> {
        if let Some(wanted) = &self.wanted {
            return Ok(!wanted.objects.contains(digest));
        }
        Ok(self.domain.object_size(digest)? == Some(size))
    }

    /// Whether an object is in place or in this staging.
    pub(crate) fn is_known(&self, digest: &Digest, size: u64) -> Result<bool> {
        Ok(self.is_in_place(digest, size)?
            || self.domain.file_size(&self.object_file(digest))? == Some(size))
    }

    pub(crate) fn count(&self, digest: Digest, size: u64, new: bool) -> Stored {
        let (objects, bytes) = match new {
            true => (&self.new_objects, &self.new_bytes),
            false => (&self.known_objects, &self.known_bytes),
        };
        objects.fetch_add(1, Relaxed);
        bytes.fetch_add(size, Relaxed);
        Stored { digest, size, new }
    }

    /// An object for which there is no room: `bytes` of its content are not holes.
    pub(crate) fn count_missing(&self, digest: Digest, size: u64, bytes: u64) -> Stored {
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

    /// Runs a call that puts an entry into the digest's shard, and retries after making a missing
    /// shard: most exist, so asking first would be a wasted call.
    pub(crate) fn in_shard<T>(
        &self,
        digest: &Digest,
        call: impl Fn() -> io::Result<T>,
    ) -> io::Result<T> {
        match call() {
            Err(error) if is_absent(&error) => {}
            other => return other,
        }
        match self.disk().mkdir(parent(&self.object_file(digest))) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        call()
    }

    /// Enables fs-verity on a complete file, where the store has it. False if the disk is full.
    pub(crate) fn enable_verity(&self, path: &str, digest: &Digest) -> Result<bool> {
        if !self.domain.has_verity() {
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

    /// True while writing makes sense, false when only counting does. Asked before every write.
    pub(crate) fn check(&self) -> Result<bool> {
        if self.working.load(Relaxed) && self.has_room()? {
            return Ok(true);
        }
        match &*self.health() {
            Health::Working => Ok(true),
            Health::Counting { .. } => Ok(false),
            Health::Failed(first) => Err(Error::Poisoned { first: first.clone() }),
        }
    }

    /// Whether the disk has room left for us. If not, the import only counts from now on, and
    /// leaves the last bytes to others on that filesystem.
    ///
    /// Looks again when half of the room is used: rarely at first, in time to notice other writers.
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
                    Ok(free) if free < files => Err(Error::NoInodes { files }),
                    _ => Err(Error::NoSpace { missing: *missing }),
                }
            }
            Health::Failed(first) => Err(Error::Poisoned { first: first.clone() }),
        }
    }

    /// Records a failed write. The disk's state is unknown then, so there is no retry: a full disk
    /// makes the import count, anything else ends it.
    pub(crate) fn fail(&self, error: io::Error, action: &'static str, path: &str) -> Result<()> {
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

    pub(crate) fn lock_buffers(&self) -> MutexGuard<'_, Vec<Buffer>> {
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        let remove = || remove_entry(self.disk(), &self.directory, crate::disk::Kind::Directory);
        // Listing takes a descriptor: without one, give up the lock's. Leftovers become orphans.
        if remove().is_err() {
            drop(self.lock.take());
            let _ = remove_entry(self.disk(), &self.directory, crate::disk::Kind::Directory);
        }
    }
}
