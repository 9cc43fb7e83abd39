//! The members of an archive that holds an image, read where they lie.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::file::Section;
use super::io_error;
use crate::digest::{BlobDigest, BlobHasher, DiffId};
use crate::error::ImportError;
use crate::files::open_regular;
use crate::layer::tar::{BLOCK, Entry, Input, Kind, MetaLimits, Reader, TarError};

/// Members of an archive that are looked at. A layout has a handful per layer.
const MEMBERS_MAX: usize = 100_000;

pub(super) struct Members {
    pub(super) path: PathBuf,
    pub(super) file: Arc<File>,
    members: HashMap<String, Member>,
}

enum Member {
    File {
        offset: u64,
        size: u64,
    },
    /// Old `docker save` links a layer that two images share.
    Link(String),
}

impl Members {
    /// Reads the headers of an archive, not its data.
    pub(super) fn open(path: &Path) -> Result<Self, ImportError> {
        let file = open_regular(path).map_err(|e| io_error(path, e))?;
        let meta = file.metadata().map_err(|e| io_error(path, e))?;
        let mut head = [0u8; 6];
        let got = file.read_at(&mut head, 0).map_err(|e| io_error(path, e))?;
        let packed = match &head[..got] {
            [0x1f, 0x8b, ..] => Some("gzip"),
            [0x28, 0xb5, 0x2f, 0xfd, ..] => Some("zstd"),
            [0xfd, b'7', b'z', b'X', b'Z', ..] => Some("xz"),
            [b'B', b'Z', b'h', ..] => Some("bzip2"),
            _ => None,
        };
        if let Some(packed) = packed {
            let what = format!("the archive is compressed as a whole ({packed}), unpack it first");
            return Err(ImportError::Source { what: format!("{}: {what}", path.display()) });
        }
        let file = Arc::new(file);
        let section = Section { file: file.clone(), at: 0, end: meta.len() };
        let mut reader = Reader::new(BufReader::new(section), MetaLimits::default());
        let mut members = HashMap::new();
        let archive = |what: String| ImportError::Archive { path: path.to_owned(), what };
        loop {
            let entry = match reader.next_entry() {
                Ok(Some(entry)) => entry,
                Ok(None) => break,
                Err(TarError::Io(error)) => return Err(io_error(path, error)),
                // Not even its first header: some other file.
                Err(error @ TarError::Bad { offset: 0, .. }) => {
                    let what = format!("{}: not a tar archive: {error}", path.display());
                    return Err(ImportError::Source { what });
                }
                Err(error) => return Err(archive(error.to_string())),
            };
            if members.len() == MEMBERS_MAX {
                let what = format!("{}: more than {MEMBERS_MAX} members", path.display());
                return Err(ImportError::Source { what });
            }
            let end = reader.offset().saturating_add(reader.data_left());
            if end > meta.len() {
                let cut = TarError::Truncated { offset: meta.len(), what: "a member's data" };
                return Err(archive(cut.to_string()));
            }
            if let Some((name, member)) = member_of(&entry, reader.offset()) {
                members.insert(name, member);
            }
        }
        Ok(Self { path: path.to_owned(), file, members })
    }

    /// The error for an archive without an expected member: it was cut off if it lacks the zeros at
    /// the end as well, and is of another kind otherwise.
    pub(super) fn lacks(&self, what: &str) -> ImportError {
        let path = self.path.clone();
        let mut last = [1; BLOCK];
        let size = self.file.metadata().map_or(0, |meta| meta.len());
        let read = self.file.read_exact_at(&mut last, size.saturating_sub(BLOCK as u64));
        match read.is_ok() && last == [0; BLOCK] {
            true => ImportError::Source { what: format!("{}: {what}", path.display()) },
            false => ImportError::Archive {
                path,
                what: format!("{what}; it has no end-of-archive mark, so it was probably cut off"),
            },
        }
    }

    /// Offset and size of a file, links followed.
    pub(super) fn find(&self, name: &str) -> Option<(u64, u64)> {
        let mut name = normal(name);
        for _ in 0..8 {
            match self.members.get(&name)? {
                Member::File { offset, size } => return Some((*offset, *size)),
                Member::Link(target) => name = target.clone(),
            }
        }
        None
    }

    /// The digest of a layer that has no digest in its name: the diff-id if it is not compressed.
    /// Otherwise it is computed, so that errors can name the blob.
    pub(super) fn digest(
        &self,
        offset: u64,
        size: u64,
        diff_id: &DiffId,
    ) -> Result<BlobDigest, ImportError> {
        let mut magic = [0u8; 265];
        let got = self.file.read_at(&mut magic, offset).map_err(|e| io_error(&self.path, e))?;
        if got as u64 >= BLOCK as u64 / 2 && &magic[257..262] == b"ustar" {
            return Ok(diff_id.as_blob().clone());
        }
        let end = offset.saturating_add(size);
        let mut section = Section { file: self.file.clone(), at: offset, end };
        let mut hasher = BlobHasher::new();
        let mut buffer = vec![0; 1 << 17];
        loop {
            match section.read(&mut buffer).map_err(|e| io_error(&self.path, e))? {
                0 => return Ok(hasher.finish()),
                count => hasher.update(&buffer[..count]),
            }
        }
    }
}

fn member_of(entry: &Entry, offset: u64) -> Option<(String, Member)> {
    let name = normal(std::str::from_utf8(&entry.path).ok()?);
    let member = match entry.kind {
        Kind::File if entry.sparse.is_none() => Member::File { offset, size: entry.data_size },
        Kind::HardLink => Member::Link(normal(std::str::from_utf8(&entry.link).ok()?)),
        Kind::Symlink => {
            let target = std::str::from_utf8(&entry.link).ok()?;
            let dir = name.rsplit_once('/').map_or("", |(dir, _)| dir);
            Member::Link(normal(&format!("{dir}/{target}")))
        }
        _ => return None,
    };
    Some((name, member))
}

/// A member's name without `.`, `..` and empty parts; names never leave the archive.
fn normal(name: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    for part in name.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts.join("/")
}

/// Leaves data out by seeking.
impl Input for BufReader<Section> {
    fn skip(&mut self, count: u64) -> io::Result<()> {
        let Section { at, end, .. } = *self.get_ref();
        let at = at - self.buffer().len() as u64;
        match i64::try_from(count) {
            // The end may lack its padding, but not its data (checked with the header).
            Ok(by) if at.saturating_add(count) <= end.saturating_add(BLOCK as u64) => {
                self.seek_relative(by)
            }
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}
