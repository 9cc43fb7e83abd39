//! The one seam under all durable state.
//!
//! The store keeps everything through [`Disk`]: [`RealDisk`] is a directory of this machine, the
//! tests' `SimDisk` a disk in memory that loses power at the worst moment. The store relies on this
//! alone:
//!
//! - `rename` is atomic for whoever looks, but not durable until `sync_dir` or `sync_all`;
//! - written data is not durable until `sync_all` or the file's own `sync`, and a crash may keep
//!   any part of it, in any order, names without content included;
//! - creating and removing names is not durable until the directory is synced, and a crash may keep
//!   any subset of such changes.
//!
//! Paths are relative to the store's directory, `/` between parts, never `.` or `..`, never
//! absolute. No operation follows a symbolic link.

use std::cell::Cell;
use std::fmt;
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::path::Path;

use rustix::fs::{AtFlags, StatxAttributes, StatxFlags};

use crate::error::At;
pub use crate::real::RealDisk;

/// How much of a file is read at once, in bytes.
const PIECE_SIZE: usize = 256 << 10;
/// Size up to which a file is read without asking for its holes, in bytes.
const HOLE_FROM: u64 = 64 << 10;

/// What an entry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// Anything else: never made by the store.
    Other,
}

/// What a file is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Content, which never changes: mode 0444.
    Content,
    /// A record: mode 0644.
    Record,
    /// A record that only its owner may read: mode 0600.
    Secret,
}

impl Purpose {
    /// Permission bits of such files.
    pub fn mode(self) -> u32 {
        match self {
            Self::Content => 0o444,
            Self::Record => 0o644,
            Self::Secret => 0o600,
        }
    }
}

/// What `stat` tells.
#[derive(Clone, Copy, Debug)]
pub struct Stat {
    /// What it is.
    pub kind: Kind,
    /// Size in bytes.
    pub size: u64,
    /// Bytes that the filesystem has allocated for it.
    pub allocated: u64,
    /// Permission bits (07777).
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Inode number.
    pub inode: u64,
    /// Number of names.
    pub nlink: u64,
    /// Whether the immutable flag is set.
    pub immutable: bool,
    /// When its content changed last: seconds since 1970, and nanoseconds.
    pub mtime: (i64, u32),
}

/// How a lock is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockMode {
    /// Together with others that share.
    Shared,
    /// Alone.
    Exclusive,
}

/// A lock on a directory, held until dropped (or until the process dies).
pub trait Lock: Send + Sync + fmt::Debug {
    /// [`Disk::sync_all`] that fails if any write failed since the lock was taken.
    fn sync(&self) -> io::Result<()>;
}

/// What protects content that is in place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Protection {
    /// The kernel checks every read (fs-verity).
    pub verity: bool,
    /// Files carry the immutable flag: nobody, root included, changes or removes them.
    pub immutable: bool,
}

/// A directory that keeps the store. See the module's text for what it promises.
pub trait Disk: Send + Sync + fmt::Debug {
    /// Opens a file for reading.
    fn open(&self, path: &str) -> io::Result<Box<dyn DiskFile>>;
    /// Creates a file that must not exist yet, for writing.
    fn create(&self, path: &str, purpose: Purpose) -> io::Result<Box<dyn DiskFile>>;
    /// Looks at an entry.
    fn stat(&self, path: &str) -> io::Result<Stat>;
    /// Names in a directory (without `.` and `..`), unordered. Names that are not UTF-8, which are
    /// never ours, get replacement characters.
    fn list(&self, path: &str) -> io::Result<Vec<(String, Kind)>>;
    /// Makes a directory.
    fn mkdir(&self, path: &str) -> io::Result<()>;
    /// Renames; an existing target is replaced, or with `keep` refused with `AlreadyExists`.
    fn rename(&self, from: &str, to: &str, keep: bool) -> io::Result<()>;
    /// Removes a file.
    fn unlink(&self, path: &str) -> io::Result<()>;
    /// Removes an empty directory.
    fn rmdir(&self, path: &str) -> io::Result<()>;
    /// Makes the names in a directory durable.
    fn sync_dir(&self, path: &str) -> io::Result<()>;
    /// Makes everything durable that was done on this disk so far.
    fn sync_all(&self) -> io::Result<()>;
    /// Locks a directory. `None` when somebody else holds it and `wait` is false.
    fn lock(&self, path: &str, mode: LockMode, wait: bool) -> io::Result<Option<Box<dyn Lock>>>;
    /// Sets or clears the immutable flag, where [`Disk::protection`] says that there is one.
    fn set_immutable(&self, path: &str, on: bool) -> io::Result<()>;
    /// Enables fs-verity on a complete file, if available; gives the digest that the kernel
    /// enforces.
    fn enable_verity(&self, path: &str) -> io::Result<Option<[u8; 32]>>;
    /// The digest that the kernel enforces for a file; `None` without fs-verity.
    fn measure_verity(&self, path: &str) -> io::Result<Option<[u8; 32]>>;
    /// Whether the filesystem has fs-verity.
    fn has_verity(&self) -> bool;
    /// What the filesystem offers. Trying the immutable flag takes a file; mounts ask for fs-verity alone.
    fn protection(&self) -> Protection;
    /// Whether files can share blocks (`FICLONE`).
    fn can_reflink(&self) -> bool;
    /// Lets only the owner into the directory of the store.
    fn restrict(&self) -> io::Result<()>;
    /// Files that may still be made; `u64::MAX` where the filesystem does not say.
    fn free_files(&self) -> io::Result<u64>;
    /// Bytes that an import may still write. The filesystem is not filled up to the last byte.
    fn room_bytes(&self) -> io::Result<u64>;
    /// 16 bytes that nobody can guess and no other import has.
    fn random(&self) -> io::Result<[u8; 16]>;
    /// How many threads can usefully work on this disk at once.
    fn parallelism(&self) -> usize;
    /// Where it is on this machine, if it is.
    fn path(&self) -> Option<&Path>;
}

/// An open file.
pub trait DiskFile: Send + Sync + fmt::Debug {
    /// Reads at an offset; 0 at the end.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize>;
    /// Appends all bytes.
    fn write_all(&mut self, data: &[u8]) -> io::Result<()>;
    /// Appends zeros that take no room, where the filesystem can.
    fn append_hole(&mut self, len: u64) -> io::Result<()>;
    /// Appends a part of a file by sharing its blocks; false if the filesystem cannot.
    fn append_shared(&mut self, from: &StoredFile, part: Range<u64>) -> io::Result<bool>;
    /// What begins at an offset.
    fn stretch_at(&self, offset: u64) -> io::Result<Stretch>;
    /// Size in bytes.
    fn size(&self) -> io::Result<u64>;
    /// Makes the content durable (not the name).
    fn sync(&self) -> io::Result<()>;
    /// The descriptor, if it is a file of this machine.
    fn descriptor(&self) -> Option<BorrowedFd<'_>>;
}

/// What begins at some offset of a file, and its least length in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stretch {
    /// Content, with no known end at the end of the file and where the filesystem cannot tell.
    Data(u64),
    /// Zeros for which the filesystem keeps nothing.
    Hole(u64),
}

/// A piece of a file's content.
#[derive(Clone, Copy, Debug)]
pub enum Piece<'a> {
    /// Bytes.
    Data(&'a [u8]),
    /// A hole of this many bytes: zeros that the filesystem does not store.
    Hole(u64),
}

/// A file of the store, open for reading.
#[derive(Debug)]
pub struct StoredFile {
    file: Box<dyn DiskFile>,
    path: String,
}

impl StoredFile {
    pub(crate) fn new(file: Box<dyn DiskFile>, path: String) -> Self {
        Self { file, path }
    }

    /// Path relative to the store.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Size in bytes.
    pub fn size(&self) -> io::Result<u64> {
        self.file.size()
    }

    /// Whether it has the immutable flag. An import sets that of the metadata image last, so there it
    /// stands for all objects. A copied store or a killed import lacks it until `gc` sets it.
    pub fn is_immutable(&self) -> io::Result<bool> {
        let Some(file) = self.descriptor() else { return Ok(false) };
        let found = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::empty())?;
        Ok(found.stx_attributes.contains(StatxAttributes::IMMUTABLE))
    }

    /// Reads at an offset; 0 at the end.
    pub fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        self.file.read_at(buffer, offset)
    }

    /// Fills the buffer from an offset; fails with `UnexpectedEof` if the file ends before.
    pub fn read_exact_at(&self, mut buffer: &mut [u8], mut offset: u64) -> io::Result<()> {
        while !buffer.is_empty() {
            match self.file.read_at(buffer, offset) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => {
                    buffer = &mut buffer[n..];
                    offset += n as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Goes through the whole content in order; holes are not read.
    ///
    /// # Errors
    /// [`crate::Error::Io`], and those of `each`.
    pub fn for_pieces(
        &self,
        each: impl FnMut(Piece<'_>) -> crate::Result<()>,
    ) -> crate::Result<()> {
        let size = self.size().at("look at", &self.path)?;
        self.for_pieces_in(0..size, each)
    }

    /// Goes through a range in order, up to the file's end. Holes are not read.
    ///
    /// # Errors
    /// [`crate::Error::Io`], and those of `each`.
    pub fn for_pieces_in<E: From<crate::Error>>(
        &self,
        range: Range<u64>,
        mut each: impl FnMut(Piece<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        // Most files are small: one buffer for all that a thread reads.
        thread_local!(static BUFFER: Cell<Vec<u8>> = const { Cell::new(Vec::new()) });
        let mut buffer = BUFFER.take();
        buffer.resize(PIECE_SIZE, 0);
        let mut offset = range.start;
        // Where little can be a hole it is not looked for.
        let mut data_end = if range.end - offset <= HOLE_FROM { range.end } else { offset };
        while offset < range.end {
            if offset == data_end {
                let stretch = self.file.stretch_at(offset).at("look for holes in", &self.path)?;
                let left = range.end - offset;
                data_end = match stretch {
                    Stretch::Data(len) => offset + len.min(left),
                    Stretch::Hole(len) => {
                        each(Piece::Hole(len.min(left)))?;
                        offset += len.min(left);
                        offset
                    }
                };
                continue;
            }
            let len = usize::try_from(data_end - offset).unwrap_or(PIECE_SIZE).min(PIECE_SIZE);
            match self.file.read_at(&mut buffer[..len], offset) {
                Ok(0) => break,
                Ok(n) => {
                    each(Piece::Data(&buffer[..n]))?;
                    offset += n as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => Err(error).at("read", &self.path)?,
            }
        }
        BUFFER.set(buffer);
        Ok(())
    }

    /// Reads it from the start to the end.
    pub fn reader(&self) -> impl io::Read + '_ {
        Reader { file: self, offset: 0 }
    }

    /// The whole content, if it is not longer than `limit` bytes.
    ///
    /// # Errors
    /// `FileTooLarge` above the limit, before anything is allocated.
    pub fn read_all(&self, limit: u64) -> io::Result<Vec<u8>> {
        let size = self.size()?;
        if size > limit {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        let len = usize::try_from(size).map_err(|_| io::ErrorKind::FileTooLarge)?;
        let mut content = vec![0; len];
        self.read_exact_at(&mut content, 0)?;
        Ok(content)
    }

    /// The descriptor, if the store is a directory of this machine (and not a simulated disk).
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.file.descriptor()
    }

    /// A file of its own on the same open file description.
    ///
    /// # Errors
    /// `Unsupported` on a simulated disk, and what duplicating a descriptor may give.
    pub fn to_std(&self) -> io::Result<std::fs::File> {
        let descriptor = self.descriptor().ok_or(io::ErrorKind::Unsupported)?;
        Ok(descriptor.try_clone_to_owned()?.into())
    }
}

struct Reader<'a> {
    file: &'a StoredFile,
    offset: u64,
}

impl io::Read for Reader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.file.read_at(buffer, self.offset)?;
        self.offset += n as u64;
        Ok(n)
    }
}
