//! An image as one file that carries all of it: EROFS, for mounts without a store, and for virtual machines.
//!
//! ```text
//! metadata image ─▶ tree ────────────────────────────────┐
//! object, hashed ─▶ [LZ4] ─▶ blocks in an unnamed file ─▶ metadata | blocks ─▶ FILE
//! ```
//!
//! Each content is in it once. Its files have fingerprints, so that Linux 7.0 can share their page cache with that of
//! other such images (`inode_share`).

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use cofolio_erofs::tree::{Content, Tree};
use cofolio_erofs::write::lz4::{self, Part};
use cofolio_erofs::write::{Contents, Data, Form, Found, Place, Run, WriteError, write_data};
use cofolio_store::verity::Hasher;
use cofolio_store::{Digest, Domain};
use serde::Serialize;
use sha2::Digest as _;

use super::aside::{OutputFile, unnamed_file};
use super::assemble::Object;
use super::error::{ExportError, io_error};
use super::{ExportProgress, OnProgress};
use crate::compose::contents::open_image;
use crate::lease::Lease;

/// Bytes of a block.
const BLOCK: usize = 4096;
/// How much is read at once, in bytes: whole blocks.
const READ_SIZE: usize = 256 << 10;

/// What was written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FilesystemReport {
    /// fs-verity digest of the image in the store.
    pub image: Digest,
    /// fs-verity digest of the file. The same image gives the same file every time.
    pub digest: Digest,
    /// Size of the file in bytes.
    pub size: u64,
    /// Bytes of all contents, each counted once.
    pub content: u64,
}

/// How to write the file.
#[derive(Debug, Clone, Copy, Default)]
pub struct FilesystemOptions {
    /// Compress the contents with LZ4.
    pub compress: bool,
    /// Replace a file that exists.
    pub replace: bool,
}

/// Writes an image to a file that can be mounted as it is; the path `-` is standard output.
///
/// # Errors
/// [`ExportError`]; the path is as before then.
pub fn export_filesystem(
    domain: &Domain,
    image: &Digest,
    path: &Path,
    options: FilesystemOptions,
    on_progress: OnProgress<'_>,
) -> Result<FilesystemReport, ExportError> {
    let lease = Lease::take(domain, image, Vec::new(), "export")?;
    let bad = |what: String| ExportError::Image { image: *image, what };
    let file = domain.open_image(image)?;
    let stored = open_image(&file).map_err(|error| bad(error.to_string()))?;
    let tree = stored.to_tree().map_err(|error| bad(error.to_string()))?;
    let new = OutputFile::create(path, options.replace)?;
    let mut blocks = Blocks::new(new.aside(), options.compress)?;
    blocks.put_all(domain, image, &tree, &mut |bytes| {
        lease.renew();
        match on_progress(ExportProgress { layer: 0, layers: 1, bytes }) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(ExportError::Stopped),
        }
    })?;
    // What is wrong with the tree is the image's fault, the rest the destination's.
    let (digest, size) =
        write_file(new.file(), &tree, &mut blocks).map_err(|error| match error {
            WriteError::Sink(source) => io_error(path)(source),
            other => bad(other.to_string()),
        })?;
    new.publish()?;
    Ok(FilesystemReport { image: *image, digest, size, content: blocks.content })
}

/// Writes metadata and blocks; gives the digest of it all and its size.
fn write_file(file: &File, tree: &Tree, blocks: &mut Blocks) -> Result<(Digest, u64), WriteError> {
    use WriteError::Sink;
    let mut sink = Hashed { file, hasher: Hasher::new() };
    let data = Data { devices: &[], own_blocks: blocks.count, contents: &*blocks };
    write_data(tree, &data, &mut sink)?;
    blocks.file.seek(SeekFrom::Start(0)).map_err(Sink)?;
    let mut buffer = vec![0; READ_SIZE];
    loop {
        match blocks.file.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => sink.write_all(&buffer[..count]).map_err(Sink)?,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(Sink(error)),
        }
    }
    let size = sink.hasher.size();
    file.set_len(size).map_err(Sink)?;
    Ok((sink.hasher.finish(), size))
}

/// Writes to a file, and hashes what it writes.
struct Hashed<'a> {
    file: &'a File,
    hasher: Hasher,
}

impl Write for Hashed<'_> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        self.hasher.update(data);
        write_sparse(self.file, data)?;
        Ok(data.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes to a file whose zeros are to take no room: they are stepped over. At the end the file may be too short.
fn write_sparse(mut file: &File, mut data: &[u8]) -> io::Result<()> {
    let zeros = |block: &[u8]| block.iter().all(|&byte| byte == 0);
    while let Some(first) = data.chunks(BLOCK).next() {
        let skip = zeros(first);
        let alike = data.chunks(BLOCK).take_while(|block| zeros(block) == skip);
        let len = alike.map(<[u8]>::len).sum();
        if skip {
            file.seek_relative(i64::try_from(len).unwrap_or(i64::MAX))?;
        } else {
            file.write_all(&data[..len])?;
        }
        data = &data[len..];
    }
    Ok(())
}

/// The contents of all files, in blocks.
struct Blocks {
    file: File,
    /// What its name was, for messages.
    path: PathBuf,
    compress: bool,
    count: u32,
    content: u64,
    /// By fs-verity digest: SHA-256, and how it is kept.
    kept: HashMap<[u8; 32], ([u8; 32], Kept)>,
}

enum Kept {
    Run([Run; 1]),
    Lz4(u32, Vec<Part>),
}

impl Contents for Blocks {
    fn find(&self, digest: &[u8; 32]) -> Option<Found<'_>> {
        let (fingerprint, kept) = self.kept.get(digest)?;
        let form = match kept {
            Kept::Run(run) => Form::Runs(run),
            Kept::Lz4(block, parts) => {
                Form::Lz4 { place: Place { device: 0, block: *block }, parts }
            }
        };
        Some(Found { fingerprint: *fingerprint, form })
    }
}

impl Blocks {
    /// In a file without a name, in the directory of `path`.
    fn new(path: &Path, compress: bool) -> Result<Self, ExportError> {
        let file = unnamed_file(path)?;
        let path = path.to_owned();
        Ok(Self { file, path, compress, count: 0, content: 0, kept: HashMap::new() })
    }

    /// Stores what the files of a tree have, each content once, in the order of their names.
    fn put_all(
        &mut self,
        domain: &Domain,
        image: &Digest,
        tree: &Tree,
        step: &mut dyn FnMut(u64) -> Result<(), ExportError>,
    ) -> Result<(), ExportError> {
        let user = format!("image {image}");
        let mut buffer = vec![0; READ_SIZE];
        for visit in tree.walk() {
            let content = tree.content(visit.inode);
            let Content::External { size, .. } = content else { continue };
            // One that names no object the writer refuses, with its path.
            let new = content.digest().filter(|digest| !self.kept.contains_key(*digest));
            let Some(digest) = new else { continue };
            let object = Object::open(domain, Digest(*digest), size, &user, &mut buffer)?;
            self.put(*digest, size, object)?;
            self.content += size;
            step(self.content)?;
        }
        Ok(())
    }

    fn put(
        &mut self,
        digest: [u8; 32],
        size: u64,
        mut object: Object<'_>,
    ) -> Result<(), ExportError> {
        let too_large = || ExportError::Destination {
            what: "the image is larger than its format can address".to_owned(),
        };
        let bad = |source| ExportError::Io { path: self.path.clone(), source };
        let first = self.count;
        let mut sha = sha2::Sha256::new();
        let kept = if self.compress {
            let mut reader =
                ObjectReader { object: &mut object, left: size, sha: &mut sha, failed: None };
            let mut writer = io::BufWriter::with_capacity(READ_SIZE, &self.file);
            let parts = lz4::compress(&mut reader, &mut writer);
            if let Some(error) = reader.failed {
                return Err(error);
            }
            let parts = parts.and_then(|parts| writer.flush().map(|()| parts));
            let parts = parts.map_err(bad)?;
            let count = u32::try_from(parts.len()).map_err(|_| too_large())?;
            self.count = first.checked_add(count).ok_or_else(too_large)?;
            Kept::Lz4(first, parts)
        } else {
            let mut sink = |bytes: &[u8]| {
                sha.update(bytes);
                write_sparse(&self.file, bytes).map_err(&bad)
            };
            object.take(size, Some(&mut sink))?;
            let blocks = u32::try_from(size.div_ceil(BLOCK as u64)).map_err(|_| too_large())?;
            self.count = first.checked_add(blocks).ok_or_else(too_large)?;
            let end = u64::from(self.count) * BLOCK as u64;
            let placed = self.file.set_len(end).and_then(|()| self.file.seek(SeekFrom::Start(end)));
            placed.map_err(bad)?;
            Kept::Run([Run { place: Some(Place { device: 0, block: first }), blocks }])
        };
        object.check()?;
        self.kept.insert(digest, (sha.finalize().into(), kept));
        Ok(())
    }
}

/// An object as something to read from, hashed on the way.
struct ObjectReader<'r, 'o> {
    object: &'r mut Object<'o>,
    left: u64,
    sha: &'r mut sha2::Sha256,
    failed: Option<ExportError>,
}

impl Read for ObjectReader<'_, '_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count =
            usize::try_from(self.left).unwrap_or(usize::MAX).min(buffer.len()).min(READ_SIZE);
        let sha = &mut *self.sha;
        let mut at = 0;
        let taken = self.object.take(
            count as u64,
            Some(&mut |bytes: &[u8]| {
                sha.update(bytes);
                buffer[at..at + bytes.len()].copy_from_slice(bytes);
                at += bytes.len();
                Ok(())
            }),
        );
        if let Err(error) = taken {
            self.failed = Some(error);
            return Err(io::ErrorKind::Other.into());
        }
        self.left -= count as u64;
        Ok(count)
    }
}
