//! Blobs in files and in sections of files.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use cofolio_store::task::Cancel;
use rustix::fs::{Mode, OFlags};

use crate::digest::BlobDigest;
use crate::layer::blob::{Blob, Content};

/// Opens a regular file, or a link to one. Anything else is `InvalidInput`: a foreign layout may
/// hold a FIFO, which would block, or a link to a device.
pub(crate) fn open_regular(path: &Path) -> io::Result<File> {
    let refused = || io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file");
    if !std::fs::metadata(path)?.is_file() {
        return Err(refused());
    }
    // It may have been exchanged since.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
    if file.metadata()?.is_file() { Ok(file) } else { Err(refused()) }
}

/// A file that holds a blob, or an archive of which a member is one.
struct InFile {
    file: Arc<File>,
    offset: u64,
}

/// A blob that is a file's bytes from `offset` on.
pub(crate) fn in_file(digest: BlobDigest, file: Arc<File>, offset: u64, size: u64) -> Blob {
    Blob::new(digest, size, Arc::new(InFile { file, offset }))
}

impl Content for InFile {
    fn open(&self, _: &BlobDigest, size: u64, _: Option<&Cancel>) -> Box<dyn Read + Send> {
        let file = self.file.clone();
        Box::new(Section { file, at: self.offset, end: self.offset.saturating_add(size) })
    }
}

/// Reads a part of a file, without moving the file's own position.
struct Section {
    file: Arc<File>,
    at: u64,
    end: u64,
}

impl Read for Section {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let left = usize::try_from(self.end - self.at).unwrap_or(usize::MAX);
        let length = buf.len().min(left);
        let count = self.file.read_at(&mut buf[..length], self.at)?;
        self.at += count as u64;
        Ok(count)
    }
}
