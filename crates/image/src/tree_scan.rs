//! A directory on disk as a tree: what `cofolio import dir:…`, `build` and `mkcomposefs` read.
//!
//! One thread walks, one directory open at a time; others read, hash and store the files' content.
//! No symbolic link is followed, even one swapped in meanwhile: directories are opened from the
//! root with `openat2`, `RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS`. A file that changes while it is
//! read is an error: a mixture of two states would be wrong.
//!
//! Hard links are kept; mkcomposefs 1.0 loses them from directories, so its images differ. Mounted
//! filesystems below the path are included.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use cofolio_erofs::tree::{Content, InodeId, Meta, Tree};
use cofolio_store::{Buffer, Staging, Stretch, stretch_at, verity};
use crossbeam_channel as channel;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::{Errno, pread, retry_on_intr};

use crate::error::ImportError;
use crate::threads::spawn_up_to;
use cofolio_store::task::{Event, Task};

/// Files up to this size are read whole before they are stored.
const SMALL_MAX: usize = 1 << 20;
/// Larger files are read in pieces of this many bytes.
const PIECE_SIZE: usize = 256 << 10;
/// Files that wait, open, to be read.
const QUEUE: usize = 64;
/// Largest list of attribute names, and largest value (`XATTR_LIST_MAX`, `XATTR_SIZE_MAX`).
const XATTR_MAX: usize = 64 << 10;

/// Which parts of a directory to read, and how. By default all, with nothing inline.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ScanOptions {
    /// Files up to this many bytes become part of the metadata image.
    pub inline_max: u64,
    /// All times are 0 (`--use-epoch`).
    pub use_epoch: bool,
    /// Leave device nodes out (`--skip-devices`).
    pub skip_devices: bool,
    /// No extended attributes (`--skip-xattrs`).
    pub skip_xattrs: bool,
    /// Only extended attributes in `user.` (`--user-xattrs`).
    pub user_xattrs: bool,
    /// Threads that read files; 0: four for each processor, up to 8.
    pub threads: usize,
}

impl ScanOptions {
    /// As mkcomposefs reads a directory without options: files up to 64 bytes inline.
    pub fn like_mkcomposefs() -> Self {
        Self { inline_max: 64, ..Self::default() }
    }
}

/// What was found.
pub struct Scanned {
    /// The tree.
    pub tree: Tree,
    /// Objects (files that are not inline and not empty), each link counted once, and their bytes.
    pub objects: u64,
    /// Bytes of the objects.
    pub object_bytes: u64,
    /// Devices left out with `skip_devices`.
    pub skipped: u64,
}

/// Where the content of files goes.
pub trait ObjectSink: Sync {
    /// Stores content that is in memory, returns its fs-verity digest.
    fn put(&self, content: &[u8]) -> Result<[u8; 32], ImportError>;

    /// Stores content that `read` gives piece by piece.
    fn stream(&self, read: Next<'_>) -> Result<[u8; 32], ImportError>;
}

/// Gives the next piece of a file, its data in the buffer.
pub type Next<'a> = &'a mut dyn FnMut(&mut [u8]) -> Result<Filled, ImportError>;

/// What [`Next`] has given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Filled {
    /// This many bytes of data.
    Data(usize),
    /// A hole of this many bytes.
    Hole(u64),
    /// The file's end.
    End,
}

/// Only computes digests.
#[derive(Debug, Clone, Copy, Default)]
pub struct DigestOnly;

impl ObjectSink for DigestOnly {
    fn put(&self, content: &[u8]) -> Result<[u8; 32], ImportError> {
        Ok(verity::digest(content).0)
    }

    fn stream(&self, read: Next<'_>) -> Result<[u8; 32], ImportError> {
        let mut hasher = verity::Hasher::new();
        for_each(read, |piece, hole| {
            hasher.update(piece);
            hasher.zeros(hole);
            Ok(())
        })?;
        Ok(hasher.finish().0)
    }
}

impl ObjectSink for Staging {
    fn put(&self, content: &[u8]) -> Result<[u8; 32], ImportError> {
        Ok(self.put_object(content)?.digest.0)
    }

    fn stream(&self, read: Next<'_>) -> Result<[u8; 32], ImportError> {
        let mut writer = self.object_writer();
        loop {
            let spare = writer.spare()?;
            // Not more than the processor's own cache keeps until it is hashed.
            let length = spare.len().min(PIECE_SIZE);
            match read(&mut spare[..length])? {
                Filled::Data(count) => writer.advance(count),
                Filled::Hole(len) => writer.push_hole(len)?,
                Filled::End => return Ok(writer.finish()?.digest.0),
            }
        }
    }
}

/// A plain composefs digest store (`mkcomposefs --digest-store=PATH`): `PATH/ab/cdef…`.
#[derive(Debug)]
pub struct DigestStore {
    path: PathBuf,
    next: AtomicU64,
}

impl DigestStore {
    /// A store in that directory, which is made if it is missing.
    pub fn open(path: &Path) -> Result<Self, ImportError> {
        std::fs::create_dir_all(path).map_err(|e| io_error(path, e))?;
        Ok(Self { path: path.to_owned(), next: AtomicU64::new(0) })
    }

    fn object(&self, digest: [u8; 32]) -> PathBuf {
        self.path.join(cofolio_store::Digest(digest).object_path())
    }

    fn temporary(&self) -> Result<(PathBuf, File), ImportError> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let path = self.path.join(format!(".tmp-{}-{number}", std::process::id()));
        let file = File::create_new(&path).map_err(|e| io_error(&path, e))?;
        Ok((path, file))
    }

    /// Gives a complete temporary file its name, unless there is such an object.
    fn publish(&self, temporary: &Path, file: File, digest: [u8; 32]) -> Result<(), ImportError> {
        use std::os::unix::fs::PermissionsExt;
        let object = self.object(digest);
        let published = (|| {
            file.set_permissions(std::fs::Permissions::from_mode(0o644))?;
            // Its name says what it holds, also after a crash.
            file.sync_all()?;
            drop(file);
            // As mkcomposefs does where the filesystem has it; elsewhere there is nothing to say.
            let _ = cofolio_sys::verity::enable(File::open(temporary)?);
            if let Some(shard) = object.parent() {
                std::fs::create_dir_all(shard)?;
            }
            match std::fs::hard_link(temporary, &object) {
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
                other => other,
            }
        })();
        let removed = std::fs::remove_file(temporary);
        published.and(removed).map_err(|e| io_error(&object, e))
    }
}

impl ObjectSink for DigestStore {
    fn put(&self, content: &[u8]) -> Result<[u8; 32], ImportError> {
        let digest = verity::digest(content).0;
        if !self.object(digest).exists() {
            let (path, mut file) = self.temporary()?;
            io::Write::write_all(&mut file, content).map_err(|e| {
                let _ = std::fs::remove_file(&path);
                io_error(&path, e)
            })?;
            self.publish(&path, file, digest)?;
        }
        Ok(digest)
    }

    fn stream(&self, read: Next<'_>) -> Result<[u8; 32], ImportError> {
        let (path, mut file) = self.temporary()?;
        let mut hasher = verity::Hasher::new();
        let written = for_each(read, |piece, hole| {
            hasher.update(piece);
            hasher.zeros(hole);
            io::Write::write_all(&mut file, piece).map_err(|e| io_error(&path, e))?;
            file.seek(SeekFrom::Start(hasher.size())).map(drop).map_err(|e| io_error(&path, e))
        });
        // A hole at the end.
        let sized = file.set_len(hasher.size()).map_err(|e| io_error(&path, e));
        if let Err(error) = written.and(sized) {
            let _ = std::fs::remove_file(&path);
            return Err(error);
        }
        let digest = hasher.finish().0;
        self.publish(&path, file, digest)?;
        Ok(digest)
    }
}

/// Calls `each` with every piece: its data, or else the length of the hole.
fn for_each(
    read: Next<'_>,
    mut each: impl FnMut(&[u8], u64) -> Result<(), ImportError>,
) -> Result<(), ImportError> {
    let mut buffer = vec![0; PIECE_SIZE];
    loop {
        match read(&mut buffer)? {
            Filled::Data(count) => each(&buffer[..count], 0)?,
            Filled::Hole(len) => each(&[], len)?,
            Filled::End => return Ok(()),
        }
    }
}

/// Reads the directory `path` and stores the content of its files.
///
/// # Errors
/// [`ImportError::Source`] if it is no directory, [`ImportError::Io`], [`ImportError::Changed`],
/// and those of the sink.
pub fn scan(
    path: &Path,
    options: &ScanOptions,
    sink: &dyn ObjectSink,
    task: &Task,
) -> Result<Scanned, ImportError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::open(path, flags, Mode::empty()).map_err(|e| match e {
        Errno::NOTDIR => {
            ImportError::Source { what: format!("{} is no directory", path.display()) }
        }
        e => io_error(path, e.into()),
    })?;
    let stat = rustix::fs::fstat(&root).map_err(|e| io_error(path, e.into()))?;
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    // Some of them wait for the disk.
    let threads =
        if options.threads == 0 { (processors * 4).min(8) } else { options.threads.min(64) };
    let stop = task.cancel.child();
    let (jobs, queue) = channel::bounded::<Job>(QUEUE);
    let (to_us, results) = channel::unbounded();
    std::thread::scope(|scope| {
        spawn_up_to(scope, threads, || {
            let (queue, to_us, stop) = (queue.clone(), to_us.clone(), &stop);
            move || {
                let mut buffer = Buffer::new(SMALL_MAX);
                for job in queue {
                    // After a failure the queue is only emptied.
                    if stop.is_cancelled() {
                        continue;
                    }
                    let inode = job.inode;
                    let result = job.read(options.inline_max, &mut buffer, sink, task);
                    let _ = to_us.send((inode, result));
                }
            }
        })?;
        drop((queue, to_us));
        let mut walk = Walk {
            root_path: path,
            root,
            options,
            found: Scanned {
                tree: Tree::new(meta_of(&stat, options)),
                objects: 0,
                object_bytes: 0,
                skipped: 0,
            },
            seen: HashMap::new(),
            jobs: Some(jobs),
            results,
            names: Vec::new(),
        };
        walk.run(&stat).inspect_err(|_| {
            stop.cancel();
        })?;
        Ok(walk.found)
    })
}

struct Job {
    inode: InodeId,
    file: File,
    stat: Stat,
    path: PathBuf,
}

enum Stored {
    Inline(Vec<u8>),
    Object(u64, [u8; 32]),
}

impl Job {
    fn read(
        self,
        inline_max: u64,
        buffer: &mut Buffer,
        sink: &dyn ObjectSink,
        task: &Task,
    ) -> Result<Stored, ImportError> {
        let size = u64::try_from(self.stat.st_size).unwrap_or(0);
        // Filesystems that compress or keep small files in their inodes have few blocks without
        // holes, too: asking for the holes tells.
        let allocated = u64::try_from(self.stat.st_blocks).unwrap_or(0).saturating_mul(512);
        let may_have_holes = allocated < size && size > inline_max;
        if size <= SMALL_MAX as u64 && !may_have_holes {
            buffer.clear();
            let mut total = 0;
            while total < size {
                let length = usize::try_from(size - total).unwrap_or(SMALL_MAX);
                let room = &mut buffer.spare()[..length];
                match read_retry(&self.file, room, total).map_err(|e| io_error(&self.path, e))? {
                    0 => break,
                    count => {
                        buffer.advance(count);
                        total += count as u64;
                    }
                }
            }
            task.tell(Event::Read(total));
            self.check(total)?;
            let content = buffer.filled();
            if size <= inline_max {
                return Ok(Stored::Inline(content.to_vec()));
            }
            return Ok(Stored::Object(size, sink.put(content)?));
        }
        let mut total: u64 = 0;
        let mut data_end = if may_have_holes { 0 } else { u64::MAX };
        let digest = sink.stream(&mut |buffer| {
            let error = |e| io_error(&self.path, e);
            let mut hole = 0;
            if total == data_end {
                match stretch_at(&self.file, total).map_err(error)? {
                    Stretch::Data(len) => data_end = total.saturating_add(len),
                    Stretch::Hole(len) => {
                        hole = len;
                        data_end = total.saturating_add(len);
                    }
                }
            }
            let piece = if hole > 0 {
                Filled::Hole(hole)
            } else {
                // Ask for one byte more than there should be, to notice growth.
                let left = (size + 1 - total).min(data_end - total);
                let length = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
                match read_retry(&self.file, &mut buffer[..length], total).map_err(error)? {
                    0 => Filled::End,
                    count => Filled::Data(count),
                }
            };
            let length = match piece {
                Filled::Data(count) => count as u64,
                Filled::Hole(len) => len,
                Filled::End => 0,
            };
            total = total.saturating_add(length);
            task.tell(Event::Read(length));
            task.check()?;
            if piece == Filled::End || total > size {
                self.check(total)?;
            }
            Ok(piece)
        })?;
        Ok(Stored::Object(size, digest))
    }

    fn check(&self, read: u64) -> Result<(), ImportError> {
        let now = rustix::fs::fstat(&self.file).map_err(|e| io_error(&self.path, e.into()))?;
        let then = &self.stat;
        let same = u64::try_from(then.st_size) == Ok(read)
            && now.st_size == then.st_size
            && (now.st_mtime, now.st_mtime_nsec) == (then.st_mtime, then.st_mtime_nsec)
            && (now.st_ctime, now.st_ctime_nsec) == (then.st_ctime, then.st_ctime_nsec);
        if same { Ok(()) } else { Err(ImportError::Changed { path: self.path.clone() }) }
    }
}

fn read_retry(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    Ok(retry_on_intr(|| pread(file, &mut *buffer, offset))?)
}

struct Walk<'a> {
    root_path: &'a Path,
    root: OwnedFd,
    options: &'a ScanOptions,
    found: Scanned,
    /// Files with several links, by device and inode number.
    seen: HashMap<(u64, u64), InodeId>,
    jobs: Option<channel::Sender<Job>>,
    results: channel::Receiver<(InodeId, Result<Stored, ImportError>)>,
    /// Buffer for lists of attribute names.
    names: Vec<u8>,
}

impl Walk<'_> {
    fn run(&mut self, stat: &Stat) -> Result<(), ImportError> {
        let root = self.found.tree.root();
        let fd = self.root.try_clone().map_err(|e| io_error(self.root_path, e))?;
        self.xattrs(&fd, b".", root)?;
        let mut todo = self.directory(&fd, root, b"", stat)?;
        while let Some(dir) = todo.pop() {
            let path = self.path_of(dir);
            let fd = self.open_dir(&path)?;
            let stat = rustix::fs::fstat(&fd).map_err(|e| self.error(&path, e))?;
            todo.extend(self.directory(&fd, dir, &path, &stat)?);
        }
        // No more work: the threads end, and with them the results.
        self.jobs = None;
        while let Ok((inode, result)) = self.results.recv() {
            self.take(inode, result)?;
        }
        Ok(())
    }

    /// Path of an inode below the root.
    fn path_of(&self, inode: InodeId) -> Vec<u8> {
        let entry = self.found.tree.links(inode).next();
        entry.map(|entry| self.found.tree.path(entry)[1..].to_vec()).unwrap_or_default()
    }

    fn open_dir(&self, path: &[u8]) -> Result<OwnedFd, ImportError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        let open = |flags| rustix::fs::openat2(&self.root, path, flags, Mode::empty(), resolve);
        match open(flags | OFlags::NOATIME) {
            // Only the owner of a file, or root, may leave its atime alone.
            Err(Errno::PERM) => open(flags),
            other => other,
        }
        .map_err(|e| self.error(path, e))
    }

    /// Takes in the names of one directory; returns its subdirectories.
    fn directory(
        &mut self,
        fd: &OwnedFd,
        dir: InodeId,
        path: &[u8],
        stat: &Stat,
    ) -> Result<Vec<InodeId>, ImportError> {
        let mut below = Vec::new();
        let entries = rustix::fs::Dir::read_from(fd).map_err(|e| self.error(path, e))?;
        for entry in entries {
            let entry = entry.map_err(|e| self.error(path, e))?;
            let name = entry.file_name().to_bytes();
            if name == b"." || name == b".." {
                continue;
            }
            if let Some(sub) = self.entry(fd, dir, path, name)? {
                below.push(sub);
            }
            while let Ok((inode, result)) = self.results.try_recv() {
                self.take(inode, result)?;
            }
        }
        let now = rustix::fs::fstat(fd).map_err(|e| self.error(path, e))?;
        if (now.st_mtime, now.st_mtime_nsec) != (stat.st_mtime, stat.st_mtime_nsec) {
            return Err(ImportError::Changed { path: self.full(path) });
        }
        Ok(below)
    }

    /// Takes in one name; returns it if it is a directory to go into.
    fn entry(
        &mut self,
        fd: &OwnedFd,
        dir: InodeId,
        path: &[u8],
        name: &[u8],
    ) -> Result<Option<InodeId>, ImportError> {
        let here = || [path, b"/", name].concat();
        let mut stat = rustix::fs::statat(fd, name, AtFlags::SYMLINK_NOFOLLOW)
            .map_err(|e| self.error(&here(), e))?;
        let mut kind = FileType::from_raw_mode(stat.st_mode);
        if self.options.skip_devices
            && matches!(kind, FileType::CharacterDevice | FileType::BlockDevice)
        {
            self.found.skipped += 1;
            return Ok(None);
        }
        let mut file = None;
        if kind == FileType::RegularFile {
            let opened = self.open_file(fd, name).map_err(|e| self.error(&here(), e))?;
            // The open file counts, not the one that was there a moment ago.
            stat = rustix::fs::fstat(&opened).map_err(|e| self.error(&here(), e))?;
            kind = FileType::from_raw_mode(stat.st_mode);
            file = Some(opened);
        }
        let several = kind != FileType::Directory && stat.st_nlink > 1;
        let key = (stat.st_dev, stat.st_ino);
        if let Some(&known) = self.seen.get(&key).filter(|_| several) {
            self.found
                .tree
                .link(dir, name, known)
                .map_err(|e| self.refused(&here(), &e.to_string()))?;
            return Ok(None);
        }
        let target;
        let content = match kind {
            FileType::RegularFile => Content::Inline(b""),
            FileType::Directory => Content::Directory,
            FileType::Symlink => {
                target = rustix::fs::readlinkat(fd, name, Vec::new())
                    .map_err(|e| self.error(&here(), e))?;
                Content::Symlink(target.to_bytes())
            }
            FileType::CharacterDevice => Content::CharDevice(device(stat.st_rdev)),
            FileType::BlockDevice => Content::BlockDevice(device(stat.st_rdev)),
            FileType::Fifo => Content::Fifo,
            FileType::Socket => Content::Socket,
            FileType::Unknown => return Err(self.refused(&here(), "a file of an unknown type")),
        };
        let inode = self
            .found
            .tree
            .insert(dir, name, meta_of(&stat, self.options), content)
            .map_err(|e| self.refused(&here(), &e.to_string()))?;
        if several {
            self.seen.insert(key, inode);
        }
        self.xattrs(fd, name, inode)?;
        if kind == FileType::Directory {
            return Ok(Some(inode));
        }
        if let Some(file) = file.filter(|_| stat.st_size > 0) {
            let job = Job { inode, file: file.into(), stat, path: self.full(&here()) };
            if let Some(jobs) = &self.jobs {
                // The threads live as long as there can be work.
                let _ = jobs.send(job);
            }
        }
        Ok(None)
    }

    fn open_file(&self, fd: &OwnedFd, name: &[u8]) -> Result<OwnedFd, Errno> {
        // Should it have become a fifo meanwhile, opening it must not wait for a writer.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        match rustix::fs::openat(fd, name, flags | OFlags::NOATIME, Mode::empty()) {
            Err(Errno::PERM) => rustix::fs::openat(fd, name, flags, Mode::empty()),
            other => other,
        }
    }

    /// Reads the attributes of a name, symbolic links and devices included, which cannot be opened.
    fn xattrs(&mut self, fd: &OwnedFd, name: &[u8], inode: InodeId) -> Result<(), ImportError> {
        if self.options.skip_xattrs {
            return Ok(());
        }
        let mut path = format!("/proc/self/fd/{}/", fd.as_fd().as_raw_fd()).into_bytes();
        path.extend_from_slice(name);
        let fail = |this: &Self, errno: Errno| {
            // In a bare chroot nothing has changed.
            if errno == Errno::NOENT && !Path::new("/proc/self/fd").exists() {
                return io_error(Path::new("/proc/self/fd"), errno.into());
            }
            this.error(&this.path_of(inode), errno)
        };
        self.names.resize(XATTR_MAX, 0);
        let length = match rustix::fs::llistxattr(path.as_slice(), &mut self.names) {
            Ok(0) | Err(Errno::NOTSUP) => return Ok(()),
            Ok(length) => length,
            Err(e) => return Err(fail(self, e)),
        };
        let mut found: Vec<(Vec<u8>, Vec<u8>)> = Vec::new();
        for name in self.names[..length].split(|&b| b == 0).filter(|n| !n.is_empty()) {
            if self.options.user_xattrs && !name.starts_with(b"user.") {
                continue;
            }
            let mut value = vec![0; XATTR_MAX];
            let length = rustix::fs::lgetxattr(path.as_slice(), name, &mut value)
                .map_err(|e| fail(self, e))?;
            value.truncate(length);
            found.push((name.to_vec(), value));
        }
        let set = found.iter().map(|(n, v)| (n.as_slice(), v.as_slice()));
        let set = self.found.tree.set_xattrs(inode, set);
        set.map_err(|e| self.refused(&self.path_of(inode), &e.to_string()))
    }

    fn take(
        &mut self,
        inode: InodeId,
        result: Result<Stored, ImportError>,
    ) -> Result<(), ImportError> {
        let set = match &result? {
            Stored::Inline(content) => self.found.tree.set_content(inode, Content::Inline(content)),
            Stored::Object(size, digest) => {
                self.found.objects += 1;
                self.found.object_bytes += size;
                self.found.tree.set_content(inode, Content::object(*size, digest))
            }
        };
        set.map_err(|e| self.refused(&self.path_of(inode), &e.to_string()))
    }

    fn full(&self, path: &[u8]) -> PathBuf {
        let path = path.strip_prefix(b"/").unwrap_or(path);
        self.root_path.join(Path::new(std::ffi::OsStr::from_bytes(path)))
    }

    fn error(&self, path: &[u8], errno: Errno) -> ImportError {
        // It was there when the directory was listed.
        if errno == Errno::NOENT || errno == Errno::LOOP {
            return ImportError::Changed { path: self.full(path) };
        }
        io_error(&self.full(path), errno.into())
    }

    fn refused(&self, path: &[u8], what: &str) -> ImportError {
        ImportError::Image { what: format!("{}: {what}", self.full(path).display()) }
    }
}

fn meta_of(stat: &Stat, options: &ScanOptions) -> Meta {
    let (mtime, mtime_nsec) = if options.use_epoch {
        (0, 0)
    } else {
        (stat.st_mtime, u32::try_from(stat.st_mtime_nsec).unwrap_or(0))
    };
    Meta { mode: stat.st_mode, uid: stat.st_uid, gid: stat.st_gid, mtime, mtime_nsec }
}

/// A device number as the kernel's `new_encode_dev` puts it.
fn device(rdev: u64) -> u32 {
    let (major, minor) = (rustix::fs::major(rdev), rustix::fs::minor(rdev));
    (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12)
}

fn io_error(path: &Path, source: io::Error) -> ImportError {
    ImportError::Io { path: path.to_owned(), source }
}
