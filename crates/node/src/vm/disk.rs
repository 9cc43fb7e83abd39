//! A disk with a filesystem for a machine's changes: a file, or a block device.
//!
//! ```text
//! ext4   image    digest of the image that the changes belong to, written by the guest
//!        upper    the changes
//!        work     the overlay's
//! ```

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::{FileExt as _, FileTypeExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::fs::{FlockOperation, SeekFrom};
use rustix::io::Errno;

use super::error::{Result, VmError};
use crate::mount::At as _;
use crate::programs;
use crate::run_dir::try_flock;
use crate::size::Size;

/// Its filesystem, and what a guest's kernel needs for it.
pub(super) const FILESYSTEM: &str = "ext4";
pub(super) const MODULES: [&str; 2] = ["virtio_blk", "ext4"];
/// `fs/ext4/ext4.h`: `s_magic`, in the superblock at 1024.
const MAGIC_OFFSET: u64 = 1024 + 56;
const MAGIC: [u8; 2] = 0xEF53_u16.to_le_bytes();

/// Which disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskRequest {
    /// Its file.
    pub path: PathBuf,
    /// Size of a new one.
    pub size: Option<Size>,
}

impl DiskRequest {
    /// `FILE` or `FILE:SIZE`. What is no size belongs to the file's name.
    pub fn parse(text: &str) -> Self {
        let sized = text.rsplit_once(':').filter(|(path, _)| !path.is_empty());
        match sized.and_then(|(path, size)| Some((path, size.parse().ok()?))) {
            Some((path, size)) => Self { path: path.into(), size: Some(size) },
            None => Self { path: text.into(), size: None },
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
    options.read(true).write(true).create(request.size.is_some()).mode(0o600);
    let file = match options.open(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound && request.size.is_none() => {
            return Err(wrong("it does not exist; FILE:SIZE makes one"));
        }
        other => other.at("opening", &path)?,
    };
    let lock = OwnedFd::from(file.try_clone().at("opening", &path)?);
    if !try_flock(&lock, FlockOperation::NonBlockingLockExclusive, &path)? {
        return Err(VmError::DiskInUse(path));
    }
    let kind = file.metadata().at("looking at", &path)?;
    if !kind.is_file() && !kind.file_type().is_block_device() {
        return Err(wrong("it is neither a file nor a block device"));
    }
    let mut magic = [0; MAGIC.len()];
    let is_filesystem = match file.read_exact_at(&mut magic, MAGIC_OFFSET) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => false,
        read => read.at("reading", &path).map(|()| magic == MAGIC)?,
    };
    if !is_filesystem {
        if !kind.is_file() {
            return Err(wrong("it has no ext4; `mkfs.ext4` makes one"));
        }
        if !is_empty(&file).at("reading", &path)? {
            return Err(wrong("it has something that is no ext4, and is left as it is"));
        }
        make(&file, kind.len(), request.size, &path)?;
    }
    Ok(Disk { path, lock })
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

/// Makes the filesystem. If that fails the file is as empty as it was.
fn make(file: &File, len: u64, size: Option<Size>, path: &Path) -> Result<()> {
    let wrong = |why: String| VmError::Disk { path: path.to_owned(), why };
    let program = programs::find("mkfs.ext4").ok_or_else(|| {
        VmError::Unsupported(
            "mkfs.ext4, which makes a new disk's filesystem, is not installed".into(),
        )
    })?;
    let size = match (len, size) {
        (0, None) => return Err(wrong("it is empty; FILE:SIZE gives it a size".to_owned())),
        (0, Some(Size(size))) => size,
        (len, _) => len,
    };
    file.set_len(size).at("resizing", path)?;
    // By its descriptor: another file of that name may have come.
    let mut command = Command::new(&program);
    command
        .args(["-q", "-F", "/proc/self/fd/0"])
        .stdin(Stdio::from(file.as_fd().try_clone_to_owned().at("opening", path)?));
    let done = command.output().at("starting", &program)?;
    if done.status.success() {
        return Ok(());
    }
    file.set_len(0).and_then(|()| file.set_len(len)).at("emptying", path)?;
    let said = String::from_utf8_lossy(&done.stderr);
    Err(wrong(format!("mkfs.ext4: {}", said.trim())))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests may panic")]

    use std::fs;
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    fn request(path: &Path, size: Option<Size>) -> DiskRequest {
        DiskRequest { path: path.to_owned(), size }
    }

    #[test]
    fn what_is_no_size_belongs_to_the_name() {
        let sized = DiskRequest { path: "a:b".into(), size: Some(Size(10 << 30)) };
        assert_eq!(DiskRequest::parse("a:b:10G"), sized);
        for name in ["/dev/vdb", "a:b", ":10G"] {
            assert_eq!(DiskRequest::parse(name), request(Path::new(name), None));
        }
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
            assert!(error.to_string().contains("no ext4"), "{error}");
            assert_eq!(fs::read(&other).unwrap(), content);
        }
        fs::write(&other, "").unwrap();
        assert!(open(&request(&other, None)).is_err());
        let error = open(&request(&other, Some(Size(1000)))).unwrap_err();
        assert!(error.to_string().contains("mkfs.ext4"), "{error}");
        assert_eq!(fs::read(&other).unwrap(), b"");
        assert!(open(&request(dir.path(), None)).is_err());
    }
}
