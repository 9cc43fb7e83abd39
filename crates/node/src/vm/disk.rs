//! A disk with a filesystem for a machine's changes: a file, or a block device.
//!
//! ```text
//! ext4   image    digest of the image that the changes belong to, written by the guest
//!        upper    the changes
//!        work     the overlay's
//! ```

use std::ffi::OsStr;
use std::fs::{File, Metadata};
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::{
    FileExt as _, FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _, fchown,
};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::str::FromStr;

use rustix::fs::{CWD, FlockOperation, OFlags, RenameFlags, SeekFrom, renameat_with};
use rustix::io::Errno;

use super::error::{Result, VmError};
use crate::mount::At as _;
use crate::programs;
use crate::run_dir::{is_at, try_flock};
use crate::size::Size;

/// Its filesystem, and what a guest's kernel needs for it.
pub(super) const FILESYSTEM: &str = "ext4";
pub(super) const MODULES: [&str; 2] = ["virtio_blk", "ext4"];
/// `fs/ext4/ext4.h`: `s_magic`, in the superblock at 1024.
const MAGIC_OFFSET: u64 = 1024 + 56;
const MAGIC: [u8; 2] = 0xEF53_u16.to_le_bytes();
/// The end of the name that a file has until it is a disk.
const ASIDE: &str = ".cofolio-new";

/// Which disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskRequest {
    /// Its file.
    pub path: PathBuf,
    /// Size of a new one.
    pub size: Option<Size>,
}

impl FromStr for DiskRequest {
    type Err = String;

    /// `FILE` or `FILE:SIZE`. What is no size belongs to the file's name.
    fn from_str(text: &str) -> Result<Self, String> {
        let sized = text.rsplit_once(':').and_then(|(path, size)| Some((path, size.parse().ok()?)));
        match sized {
            None if text.is_empty() => Err("the name of the file is empty".to_owned()),
            None => Ok(Self { path: text.into(), size: None }),
            Some(("", _)) => Err(format!("no file before the size; one of that name is ./{text}")),
            Some((path, size)) => Ok(Self { path: path.into(), size: Some(size) }),
        }
    }
}

/// A disk that no other machine has.
#[derive(Debug)]
pub(super) struct Disk {
    pub(super) path: PathBuf,
    /// Belongs to the VMM.
    pub(super) lock: OwnedFd,
}

/// Opens a disk and locks it. A new or empty file gets a filesystem; whatever else has none is
/// refused.
///
/// # Errors
/// [`VmError::Disk`], [`VmError::DiskInUse`], [`VmError::Unsupported`], [`VmError::Mount`].
pub(super) fn open(request: &DiskRequest) -> Result<Disk> {
    let path = std::path::absolute(&request.path).at("resolving", &request.path)?;
    let wrong = |why: &str| VmError::Disk { path: path.clone(), why: why.to_owned() };
    let mut options = File::options();
    // Of a block device this is a claim, which excludes mounts and other claims (open(2)).
    options.read(true).write(true).custom_flags(OFlags::EXCL.bits().cast_signed());
    let file = match (options.open(&path), request.size) {
        (Err(error), size) if error.kind() == io::ErrorKind::NotFound => {
            let size = size.ok_or_else(|| wrong("it does not exist; FILE:SIZE makes one"))?;
            return make(path, None, size.0);
        }
        (Err(error), _) if error.kind() == io::ErrorKind::ResourceBusy => {
            return Err(wrong("it is mounted on this machine, or another program has it"));
        }
        (opened, _) => opened.at("opening", &path)?,
    };
    // A link stays one.
    let path = std::fs::canonicalize(&path).at("resolving", &path)?;
    let lock = lock(&file, &path)?;
    let kind = file.metadata().at("looking at", &path)?;
    if !kind.is_file() && !kind.file_type().is_block_device() {
        return Err(wrong("it is neither a file nor a block device"));
    }
    let mut magic = [0; MAGIC.len()];
    let is_filesystem = match file.read_exact_at(&mut magic, MAGIC_OFFSET) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => false,
        read => read.at("reading", &path).map(|()| magic == MAGIC)?,
    };
    if is_filesystem {
        return Ok(Disk { path, lock });
    }
    if !kind.is_file() {
        return Err(wrong("it has no ext4 filesystem; `mkfs.ext4` makes one"));
    }
    if !is_empty(&file).at("reading", &path)? {
        return Err(wrong("it is neither empty nor an ext4 filesystem, and was not changed"));
    }
    match (kind.len(), request.size) {
        (0, None) => Err(wrong("it is empty; FILE:SIZE gives it a size")),
        (0, Some(Size(size))) | (size, _) => make(path, Some(&kind), size),
    }
}

/// Locks the file at a path, which must not have been replaced.
fn lock(file: &File, path: &Path) -> Result<OwnedFd> {
    let lock = OwnedFd::from(file.try_clone().at("opening", path)?);
    let is_ours = try_flock(&lock, FlockOperation::NonBlockingLockExclusive, path)?;
    if is_ours && is_at(&lock, path) { Ok(lock) } else { Err(VmError::DiskInUse(path.to_owned())) }
}

/// Whether a file has nothing but holes.
fn is_empty(file: &File) -> io::Result<bool> {
    match rustix::fs::seek(file, SeekFrom::Data(0)) {
        Err(Errno::NXIO) => Ok(true),
        // The filesystem knows no holes.
        Err(Errno::INVAL) => Ok(file.metadata()?.len() == 0),
        other => Ok(other.map(|_| false)?),
    }
}

/// Makes a disk, in the place of an empty file if there is one. It is made under another name: a
/// process that is killed leaves nothing at the path, and the next one goes on with what it left.
fn make(path: PathBuf, empty: Option<&Metadata>, size: u64) -> Result<Disk> {
    let wrong = |why: String| VmError::Disk { path: path.clone(), why };
    let program = programs::find("mkfs.ext4").ok_or_else(|| {
        VmError::Unsupported(
            "mkfs.ext4, which makes a new disk's filesystem, is not installed".into(),
        )
    })?;
    let name = path.file_name().ok_or_else(|| wrong("it has no name".to_owned()))?;
    let aside = path.with_file_name([OsStr::new("."), name, ASIDE.as_ref()].join(OsStr::new("")));
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    let file = options.custom_flags(OFlags::NOFOLLOW.bits().cast_signed()).open(&aside);
    let file = file.at("creating", &aside)?;
    // A killed process' `mkfs.ext4` has the lock, too, until it has ended.
    let lock = lock(&file, &aside).map_err(|error| match error {
        VmError::DiskInUse(_) => VmError::DiskInUse(path.clone()),
        other => other,
    })?;
    let fill = || -> Result<()> {
        file.set_len(0).and_then(|()| file.set_len(size)).at("resizing", &aside)?;
        if let Some(empty) = empty {
            fchown(&file, Some(empty.uid()), Some(empty.gid()))
                .at("setting the owner of", &aside)?;
            file.set_permissions(empty.permissions()).at("setting the mode of", &aside)?;
        }
        // By its descriptor: another file of that name may have come.
        let mut command = Command::new(&program);
        command
            .args(["-q", "-F", "/proc/self/fd/0"])
            .stdin(Stdio::from(file.as_fd().try_clone_to_owned().at("opening", &aside)?));
        let done = command.output().at("starting", &program)?;
        if !done.status.success() {
            let said = String::from_utf8_lossy(&done.stderr);
            return Err(wrong(format!("mkfs.ext4: {}", said.trim())));
        }
        file.sync_all().at("writing", &aside)?;
        // A file that has come meanwhile is not replaced.
        let how = if empty.is_some() { RenameFlags::empty() } else { RenameFlags::NOREPLACE };
        renameat_with(CWD, &aside, CWD, &path, how).at("creating", &path)?;
        Ok(())
    };
    match fill() {
        Ok(()) => Ok(Disk { path, lock }),
        Err(error) => {
            let _ = std::fs::remove_file(&aside);
            Err(error)
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests may panic")]

    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn request(path: &Path, size: Option<Size>) -> DiskRequest {
        DiskRequest { path: path.to_owned(), size }
    }

    #[test]
    fn what_is_no_size_belongs_to_the_name() {
        let parse = |text: &str| text.parse::<DiskRequest>();
        assert_eq!(parse("a:b:10G"), Ok(request(Path::new("a:b"), Some(Size(10 << 30)))));
        for name in ["/dev/vdb", "a:b", "a:", ":b"] {
            assert_eq!(parse(name), Ok(request(Path::new(name), None)));
        }
        // It was a file of that name, which did not exist.
        assert!(parse(":10G").unwrap_err().contains("./:10G"));
        assert!(parse("").is_err());
    }

    #[test]
    fn only_an_empty_file_gets_a_filesystem() {
        if programs::find("mkfs.ext4").is_none() {
            println!("SKIP only_an_empty_file_gets_a_filesystem: no mkfs.ext4");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        assert!(open(&request(&path, None)).unwrap_err().to_string().contains("FILE:SIZE"));
        let disk = open(&request(&path, Some(Size(64 << 20)))).unwrap();
        let found = path.metadata().unwrap();
        assert_eq!((found.len(), found.mode() & 0o777), (64 << 20, 0o600));
        assert!(found.blocks() * 512 < 16 << 20, "it is sparse");
        assert!(matches!(open(&request(&path, None)), Err(VmError::DiskInUse(_))));
        drop(disk);
        // It is kept, with whatever size it has.
        let before = fs::read(&path).unwrap();
        drop(open(&request(&path, Some(Size(1 << 30)))).unwrap());
        assert!(fs::read(&path).unwrap() == before);

        // What is not empty is left alone, and so is what cannot be made.
        let other = dir.path().join("other");
        for content in [&b"precious"[..], &[0; 100_000]] {
            fs::write(&other, content).unwrap();
            let error = open(&request(&other, Some(Size(64 << 20)))).unwrap_err();
            assert!(error.to_string().contains("ext4 filesystem"), "{error}");
            assert_eq!(fs::read(&other).unwrap(), content);
        }
        let left = || fs::read_dir(dir.path()).unwrap().count();
        assert_eq!(left(), 2);
        fs::write(&other, "").unwrap();
        assert!(open(&request(&other, None)).is_err());
        let error = open(&request(&other, Some(Size(1000)))).unwrap_err();
        assert!(error.to_string().contains("mkfs.ext4"), "{error}");
        assert_eq!(fs::read(&other).unwrap(), b"");
        assert_eq!(left(), 2);
        assert!(open(&request(dir.path(), None)).is_err());
    }

    /// A disk whose `mkfs.ext4` was killed had something that was no ext4, and was refused for
    /// ever.
    #[test]
    fn a_killed_mkfs_leaves_no_disk() {
        if programs::find("mkfs.ext4").is_none() {
            println!("SKIP a_killed_mkfs_leaves_no_disk: no mkfs.ext4");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let (path, aside) = (dir.path().join("disk"), dir.path().join(".disk.cofolio-new"));
        let half_made = || fs::write(&aside, vec![7; 3 << 20]).unwrap();
        half_made();
        // As long as it runs the disk is in use.
        let running = OwnedFd::from(File::open(&aside).unwrap());
        let exclusive = FlockOperation::NonBlockingLockExclusive;
        assert!(try_flock(&running, exclusive, &aside).unwrap());
        let in_use = open(&request(&path, Some(Size(64 << 20))));
        assert!(matches!(in_use, Err(VmError::DiskInUse(at)) if at == path));
        drop(running);
        drop(open(&request(&path, Some(Size(64 << 20)))).unwrap());
        assert_eq!((path.metadata().unwrap().len(), aside.exists()), (64 << 20, false));
        drop(open(&request(&path, None)).unwrap());

        // An empty file is replaced by one with its owner and mode; a link to it stays.
        let (empty, link) = (dir.path().join("empty"), dir.path().join("link"));
        File::create(&empty).unwrap().set_len(64 << 20).unwrap();
        fs::set_permissions(&empty, fs::Permissions::from_mode(0o640)).unwrap();
        std::os::unix::fs::symlink("empty", &link).unwrap();
        let disk = open(&request(&link, None)).unwrap();
        assert_eq!(disk.path, fs::canonicalize(&empty).unwrap());
        assert!(matches!(open(&request(&empty, None)), Err(VmError::DiskInUse(_))));
        let found = empty.metadata().unwrap();
        assert_eq!((found.len(), found.mode() & 0o777), (64 << 20, 0o640));
        assert!(found.blocks() > 0 && link.is_symlink());
    }
}
