//! [`RealDisk`]: a directory of this machine.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use cofolio_sys::{reflink, verity};
use rustix::fs::{self, AtFlags, FileType, FlockOperation, IFlags, Mode, OFlags, RenameFlags};
use rustix::fs::{ResolveFlags, SeekFrom, StatxFlags};
use rustix::io::Errno;

use crate::buffer::ALIGN;
use crate::disk::{
    Disk, DiskFile, Kind, Lock, LockMode, Protection, Purpose, Stat, StoredFile, Stretch,
};

const DIRECTORY_MODE: Mode = Mode::from_raw_mode(0o755);
/// Only root looks into a store: images may hold secrets that are not world-readable inside.
const ROOT_MODE: Mode = Mode::from_raw_mode(0o700);
/// Tries of fs-verity on a file that somebody still holds for writing, and the time between them.
const VERITY_ATTEMPTS_MAX: u32 = 200;
const VERITY_PAUSE: Duration = Duration::from_millis(5);
/// `FS_VERITY_FL` of `linux/fs.h`, readable only: ext4 ignores it, btrfs answers EOPNOTSUPP (7.2).
const VERITY_FLAG: IFlags = IFlags::from_bits_retain(0x0010_0000);
/// Smaller writes go through the page cache, which gathers them for the disk.
const DIRECT_MIN: usize = 256 << 10;
/// Of each filesystem one part in so many stays free for others,
const KEPT_FREE_PART: u64 = 100;
/// but not more than this many bytes.
const KEPT_FREE_MAX: u64 = 1 << 30;

/// A directory of this machine. Every operation starts from its descriptor, so the store can be
/// bind-mounted elsewhere or its parents renamed while it is open.
#[derive(Debug)]
pub struct RealDisk {
    root: OwnedFd,
    path: PathBuf,
    /// The process's umask takes bits from the modes above, so that each new file needs a chmod.
    needs_chmod: bool,
    verity: OnceLock<bool>,
    immutable: OnceLock<bool>,
    reflink: OnceLock<bool>,
}

impl RealDisk {
    /// Opens a directory that exists.
    ///
    /// # Errors
    /// What `open(2)` gives.
    pub fn open(path: &Path) -> io::Result<Self> {
        let root =
            fs::open(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        Ok(Self {
            root,
            path: std::path::absolute(path)?,
            needs_chmod: umask_hides_bits(),
            verity: OnceLock::new(),
            immutable: OnceLock::new(),
            reflink: OnceLock::new(),
        })
    }

    /// Makes the directory (its parent must exist) if it is missing, and opens it.
    ///
    /// # Errors
    /// What `mkdir(2)` and `open(2)` give.
    pub fn create_dir(path: &Path) -> io::Result<Self> {
        match fs::mkdir(path, ROOT_MODE) {
            Ok(()) | Err(Errno::EXIST) => Self::open(path),
            Err(errno) => Err(errno.into()),
        }
    }

    /// `openat2` below the root without following symbolic links; where a sandbox forbids the call,
    /// `openat` without following one in the last part.
    fn open_at(&self, path: &str, flags: OFlags, mode: Mode) -> io::Result<OwnedFd> {
        let flags = flags | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        let path = if path.is_empty() { "." } else { path };
        match fs::openat2(&self.root, path, flags, mode, resolve) {
            Err(Errno::NOSYS | Errno::PERM) => Ok(fs::openat(&self.root, path, flags, mode)?),
            other => Ok(other?),
        }
    }

    fn open_dir(&self, path: &str) -> io::Result<OwnedFd> {
        self.open_at(path, OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty())
    }

    fn probe_verity(&self) -> bool {
        // For a directory, a kernel without fs-verity answers ENOTTY or EOPNOTSUPP before looking
        // at the file type; with it the answer is ENODATA or EISDIR.
        match verity::measure(&self.root) {
            Ok(_) => true,
            Err(errno) => !verity::is_unsupported(errno),
        }
    }

    /// Tries on a file without a name: nothing is left behind whatever happens.
    fn scratch(&self) -> io::Result<OwnedFd> {
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        Ok(fs::openat(&self.root, ".", flags, Mode::from_raw_mode(0o600))?)
    }

    fn probe_immutable(&self) -> bool {
        let Ok(file) = self.scratch() else { return false };
        let Ok(flags) = fs::ioctl_getflags(&file) else { return false };
        let set = fs::ioctl_setflags(&file, flags | IFlags::IMMUTABLE).is_ok();
        // An orphan inode with the flag would still go when closed, but leave nothing to chance.
        set && fs::ioctl_setflags(&file, flags).is_ok()
    }

    fn probe_reflink(&self) -> bool {
        let (Ok(from), Ok(to)) = (self.scratch(), self.scratch()) else { return false };
        rustix::io::write(&from, &[0; 4096]).is_ok() && fs::ioctl_ficlone(&to, &from).is_ok()
    }
}

/// Reading the umask without changing it (it belongs to the whole process) takes /proc.
fn umask_hides_bits() -> bool {
    let Ok(status) = std::fs::read_to_string("/proc/self/status") else { return true };
    let umask = status.lines().find_map(|line| line.strip_prefix("Umask:"));
    let umask = umask.and_then(|text| u32::from_str_radix(text.trim(), 8).ok()).unwrap_or(0o777);
    umask & (Purpose::Content.mode() | Purpose::Record.mode() | DIRECTORY_MODE.as_raw_mode()) != 0
}

impl Disk for RealDisk {
    fn open(&self, path: &str) -> io::Result<Box<dyn DiskFile>> {
        // O_NONBLOCK: a FIFO that somebody put here must not hang us. It does nothing to a file.
        let file = self.open_at(path, OFlags::RDONLY | OFlags::NONBLOCK, Mode::empty())?;
        Ok(Box::new(RealFile { file, end: 0, direct: false }))
    }

    fn create(&self, path: &str, purpose: Purpose) -> io::Result<Box<dyn DiskFile>> {
        let mode = Mode::from_raw_mode(purpose.mode());
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL;
        let file = self.open_at(path, flags, mode)?;
        if self.needs_chmod {
            fs::fchmod(&file, mode)?;
        }
        // fs-verity makes the kernel write and read the whole file for its tree of digests, which
        // would fetch it again. Records are too small to matter.
        let direct = purpose == Purpose::Content && !self.has_verity();
        Ok(Box::new(RealFile { file, end: 0, direct }))
    }

    fn stat(&self, path: &str) -> io::Result<Stat> {
        let mask = StatxFlags::BASIC_STATS;
        let path = if path.is_empty() { "." } else { path };
        let stat = fs::statx(&self.root, path, AtFlags::SYMLINK_NOFOLLOW, mask)?;
        let kind = match FileType::from_raw_mode(stat.stx_mode.into()) {
            FileType::RegularFile => Kind::File,
            FileType::Directory => Kind::Directory,
            _ => Kind::Other,
        };
        Ok(Stat {
            kind,
            size: stat.stx_size,
            allocated: stat.stx_blocks * 512,
            mode: u32::from(stat.stx_mode) & 0o7777,
            uid: stat.stx_uid,
            inode: stat.stx_ino,
            nlink: stat.stx_nlink.into(),
            immutable: stat.stx_attributes.contains(fs::StatxAttributes::IMMUTABLE),
            mtime: (stat.stx_mtime.tv_sec, stat.stx_mtime.tv_nsec),
        })
    }

    fn list(&self, path: &str) -> io::Result<Vec<(String, Kind)>> {
        let mut entries = Vec::new();
        for entry in fs::Dir::new(self.open_dir(path)?)? {
            let entry = entry?;
            let name = entry.file_name();
            if matches!(name.to_bytes(), b"." | b"..") {
                continue;
            }
            let name = name.to_string_lossy().into_owned();
            let kind = match entry.file_type() {
                FileType::RegularFile => Kind::File,
                FileType::Directory => Kind::Directory,
                FileType::Unknown => {
                    self.stat(format!("{path}/{name}").trim_start_matches('/'))?.kind
                }
                _ => Kind::Other,
            };
            entries.push((name, kind));
        }
        Ok(entries)
    }

    fn mkdir(&self, path: &str) -> io::Result<()> {
        fs::mkdirat(&self.root, path, DIRECTORY_MODE)?;
        if self.needs_chmod {
            fs::chmodat(&self.root, path, DIRECTORY_MODE, AtFlags::empty())?;
        }
        Ok(())
    }

    fn rename(&self, from: &str, to: &str, keep: bool) -> io::Result<()> {
        let flags = if keep { RenameFlags::NOREPLACE } else { RenameFlags::empty() };
        Ok(fs::renameat_with(&self.root, from, &self.root, to, flags)?)
    }

    fn unlink(&self, path: &str) -> io::Result<()> {
        Ok(fs::unlinkat(&self.root, path, AtFlags::empty())?)
    }

    fn rmdir(&self, path: &str) -> io::Result<()> {
        Ok(fs::unlinkat(&self.root, path, AtFlags::REMOVEDIR)?)
    }

    fn sync_dir(&self, path: &str) -> io::Result<()> {
        Ok(fs::fsync(self.open_dir(path)?)?)
    }

    fn sync_all(&self) -> io::Result<()> {
        // Since 5.8 syncfs reports write-back errors since the descriptor was opened.
        Ok(fs::syncfs(&self.root)?)
    }

    fn lock(&self, path: &str, mode: LockMode, wait: bool) -> io::Result<Option<Box<dyn Lock>>> {
        // flock belongs to the open file description: one per lock excludes threads, too.
        let directory = self.open_dir(path)?;
        let operation = match (mode, wait) {
            (LockMode::Shared, true) => FlockOperation::LockShared,
            (LockMode::Shared, false) => FlockOperation::NonBlockingLockShared,
            (LockMode::Exclusive, true) => FlockOperation::LockExclusive,
            (LockMode::Exclusive, false) => FlockOperation::NonBlockingLockExclusive,
        };
        match rustix::io::retry_on_intr(|| fs::flock(&directory, operation)) {
            Ok(()) => Ok(Some(Box::new(RealLock { directory }))),
            Err(Errno::WOULDBLOCK) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }

    fn set_immutable(&self, path: &str, on: bool) -> io::Result<()> {
        let file = self.open_at(path, OFlags::RDONLY | OFlags::NONBLOCK, Mode::empty())?;
        let flags = fs::ioctl_getflags(&file)?;
        let wanted = if on { flags | IFlags::IMMUTABLE } else { flags - IFlags::IMMUTABLE };
        if wanted == flags {
            return Ok(());
        }
        match fs::ioctl_setflags(&file, wanted - VERITY_FLAG) {
            // Somebody else was quicker: ext4 refuses other changes of an immutable file, and
            // misses the fs-verity flag, which cannot be set.
            Err(Errno::PERM) if fs::ioctl_getflags(&file)?.contains(IFlags::IMMUTABLE) == on => {
                Ok(())
            }
            other => Ok(other?),
        }
    }

    fn enable_verity(&self, path: &str) -> io::Result<Option<[u8; 32]>> {
        let file = self.open_at(path, OFlags::RDONLY, Mode::empty())?;
        let mut attempt = 0;
        loop {
            match verity::enable(&file) {
                Ok(()) | Err(Errno::EXIST) => return Ok(verity::measure(&file)?),
                // Our own descriptor for writing is closed, but a child that another thread just
                // forked holds a copy until it execs.
                Err(Errno::TXTBSY) if attempt < VERITY_ATTEMPTS_MAX => {
                    attempt += 1;
                    std::thread::sleep(VERITY_PAUSE);
                }
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    fn measure_verity(&self, path: &str) -> io::Result<Option<[u8; 32]>> {
        let file = self.open_at(path, OFlags::RDONLY | OFlags::NONBLOCK, Mode::empty())?;
        match verity::measure(&file) {
            Err(errno) if verity::is_unsupported(errno) => Ok(None),
            other => Ok(other?),
        }
    }

    fn has_verity(&self) -> bool {
        *self.verity.get_or_init(|| self.probe_verity())
    }

    fn protection(&self) -> Protection {
        let immutable = *self.immutable.get_or_init(|| self.probe_immutable());
        Protection { verity: self.has_verity(), immutable }
    }

    fn can_reflink(&self) -> bool {
        *self.reflink.get_or_init(|| self.probe_reflink())
    }

    fn restrict(&self) -> io::Result<()> {
        Ok(fs::fchmod(&self.root, ROOT_MODE)?)
    }

    fn free_files(&self) -> io::Result<u64> {
        let stat = fs::fstatvfs(&self.root)?;
        // Filesystems that make inodes as they need them say 0 of 0.
        Ok(if stat.f_files == 0 { u64::MAX } else { stat.f_favail })
    }

    fn room_bytes(&self) -> io::Result<u64> {
        let stat = fs::fstatvfs(&self.root)?;
        if stat.f_blocks == 0 {
            // A filesystem that does not say, as some do that are not on a disk.
            return Ok(u64::MAX);
        }
        // What the filesystem reserves for root stays reserved, though we are root as a rule.
        let free = stat.f_bavail.saturating_mul(stat.f_frsize);
        let kept =
            (stat.f_blocks.saturating_mul(stat.f_frsize) / KEPT_FREE_PART).min(KEPT_FREE_MAX);
        Ok(free.saturating_sub(kept))
    }

    fn random(&self) -> io::Result<[u8; 16]> {
        let mut bytes = [0; 16];
        let filled = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
        // Up to 256 bytes are never cut short (getrandom(2)).
        if filled != bytes.len() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(bytes)
    }

    fn parallelism(&self) -> usize {
        std::thread::available_parallelism().map_or(1, usize::from)
    }

    fn path(&self) -> Option<&Path> {
        Some(&self.path)
    }
}

/// The [`Stretch`] at an offset of an open file, by `lseek(2)`, which moves the descriptor's
/// position.
///
/// # Errors
/// Those of `lseek(2)` and `fstat(2)`.
pub fn stretch_at(file: impl AsFd, offset: u64) -> io::Result<Stretch> {
    let end = match fs::seek(&file, SeekFrom::Data(offset)) {
        Ok(data) if data > offset => return Ok(Stretch::Hole(data - offset)),
        Ok(_) => match fs::seek(&file, SeekFrom::Hole(offset)) {
            Ok(hole) if hole > offset => hole,
            // It has just been cut, or a hole been made: reading says.
            Ok(_) | Err(Errno::NXIO) => u64::MAX,
            Err(errno) => return Err(errno.into()),
        },
        // No data from here on.
        Err(Errno::NXIO) => match u64::try_from(fs::fstat(&file)?.st_size).unwrap_or(0) {
            size if size > offset => return Ok(Stretch::Hole(size - offset)),
            _ => u64::MAX,
        },
        Err(Errno::INVAL | Errno::OPNOTSUPP | Errno::SPIPE) => u64::MAX,
        Err(errno) => return Err(errno.into()),
    };
    Ok(Stretch::Data(end - offset))
}

/// Replaces a file of a directory that is no store's, by way of a file `aside` in it: no reader,
/// and with `sync` no crash, finds half of the content. Symbolic links are replaced, not followed.
///
/// # Errors
/// Those of the system calls; nothing is left aside then.
pub fn replace_file(
    directory: impl AsFd,
    aside: &Path,
    path: &Path,
    content: &[u8],
    purpose: Purpose,
    sync: bool,
) -> io::Result<()> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let open = || fs::openat(&directory, aside, flags, Mode::from_raw_mode(purpose.mode()));
    let replace = || -> io::Result<()> {
        let file = match open() {
            // Of a process that was killed, or a link that somebody planted.
            Err(Errno::EXIST) => {
                fs::unlinkat(&directory, aside, AtFlags::empty())?;
                open()?
            }
            other => other?,
        };
        let mut file = RealFile { file, end: 0, direct: false };
        file.write_all(content)?;
        if sync {
            file.sync()?;
        }
        fs::renameat(&directory, aside, &directory, path)?;
        if sync {
            // Paths are relative to it then.
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            fs::fsync(fs::openat(&directory, ".", flags, Mode::empty())?)?;
        }
        Ok(())
    };
    replace().inspect_err(|_| {
        let _ = fs::unlinkat(&directory, aside, AtFlags::empty());
    })
}

#[derive(Debug)]
struct RealLock {
    directory: OwnedFd,
}

impl Lock for RealLock {
    fn sync(&self) -> io::Result<()> {
        Ok(fs::syncfs(&self.directory)?)
    }
}

impl Drop for RealLock {
    /// Closing is not enough: a child that another thread just forked holds a copy of the
    /// descriptor, and the lock, until it execs.
    fn drop(&mut self) {
        let _ = fs::flock(&self.directory, FlockOperation::Unlock);
    }
}

#[derive(Debug)]
struct RealFile {
    file: OwnedFd,
    /// Where the next write goes, if the file is being written.
    end: u64,
    /// Large writes may go past the page cache; not once the filesystem has refused one.
    direct: bool,
}

impl RealFile {
    /// How many of these bytes can bypass the page cache, which as a rule nobody needs soon.
    fn direct_len(&self, data: &[u8]) -> usize {
        let aligned = data.as_ptr().align_offset(ALIGN) == 0
            && self.end.is_multiple_of(ALIGN as u64)
            && data.len() >= DIRECT_MIN;
        if self.direct && aligned { data.len() - data.len() % ALIGN } else { 0 }
    }

    /// Writes past the page cache; 0 bytes if the filesystem does not do so.
    fn write_direct(&mut self, data: &[u8]) -> io::Result<usize> {
        let flags = fs::fcntl_getfl(&self.file)?;
        self.direct = fs::fcntl_setfl(&self.file, flags | OFlags::DIRECT).is_ok();
        if !self.direct {
            return Ok(0);
        }
        let written = rustix::io::pwrite(&self.file, data, self.end);
        // What follows may be shorter.
        fs::fcntl_setfl(&self.file, flags)?;
        match written {
            Ok(0) | Err(Errno::INVAL | Errno::OPNOTSUPP) => {
                self.direct = false;
                Ok(0)
            }
            Err(Errno::INTR) => Ok(0),
            Err(errno) => Err(errno.into()),
            Ok(count) => Ok(count),
        }
    }
}

impl DiskFile for RealFile {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        Ok(rustix::io::pread(&self.file, buffer, offset)?)
    }

    fn write_all(&mut self, mut data: &[u8]) -> io::Result<()> {
        while !data.is_empty() {
            let direct = self.direct_len(data);
            if direct > 0 {
                let written = self.write_direct(&data[..direct])?;
                data = &data[written..];
                self.end += written as u64;
                continue;
            }
            match rustix::io::pwrite(&self.file, data, self.end) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => {
                    data = &data[written..];
                    self.end += written as u64;
                }
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    fn append_hole(&mut self, len: u64) -> io::Result<()> {
        let end = self.end.checked_add(len).ok_or(io::ErrorKind::FileTooLarge)?;
        fs::ftruncate(&self.file, end)?;
        self.end = end;
        Ok(())
    }

    fn append_shared(&mut self, from: &StoredFile, part: Range<u64>) -> io::Result<bool> {
        let Some(source) = from.descriptor() else { return Ok(false) };
        // Whatever the reason is, copying the bytes may still go.
        if reflink::append(&self.file, self.end, source, part.clone()).is_err() {
            return Ok(false);
        }
        self.end += part.end - part.start;
        Ok(true)
    }

    fn stretch_at(&self, offset: u64) -> io::Result<Stretch> {
        stretch_at(&self.file, offset)
    }

    fn size(&self) -> io::Result<u64> {
        let found = fs::fstat(&self.file)?;
        if FileType::from_raw_mode(found.st_mode) == FileType::Directory {
            return Err(Errno::ISDIR.into());
        }
        u64::try_from(found.st_size).map_err(|_| io::ErrorKind::InvalidData.into())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(fs::fsync(&self.file)?)
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.file.as_fd())
    }
}
