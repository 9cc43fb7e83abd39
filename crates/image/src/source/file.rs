//! Blobs in files and in sections of files.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use cofolio_store::task::Cancel;

use crate::digest::BlobDigest;
use crate::layer::blob::{Blob, Content};

/// A part of a file, read from a position of its own.
#[derive(Clone)]
pub(crate) struct Section {
    pub(crate) file: Arc<File>,
    pub(crate) at: u64,
    pub(crate) end: u64,
}

/// A blob that is a file's bytes from `offset` on.
pub(crate) fn in_file(digest: BlobDigest, file: Arc<File>, offset: u64, size: u64) -> Blob {
    let section = Section { file, at: offset, end: offset.saturating_add(size) };
    Blob::new(digest, size, Arc::new(section))
}

impl Content for Section {
    fn open(&self, _: &BlobDigest, _: u64, _: Option<&Cancel>) -> Box<dyn Read + Send> {
        Box::new(self.clone())
    }
}

impl Read for Section {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let left = usize::try_from(self.end.saturating_sub(self.at)).unwrap_or(usize::MAX);
        let length = buf.len().min(left);
        let count = self.file.read_at(&mut buf[..length], self.at)?;
        self.at += count as u64;
        Ok(count)
    }
}

impl Seek for Section {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let at = match to {
            SeekFrom::Start(at) => Some(at),
            SeekFrom::Current(by) => self.at.checked_add_signed(by),
            SeekFrom::End(by) => self.end.checked_add_signed(by),
        };
        self.at = at.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(self.at)
    }
}
