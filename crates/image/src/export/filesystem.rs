//! An image as one EROFS file, for mounts without a store and for virtual machines.
//!
//! ```text
//! metadata image ─▶ tree ────────────────────────────────┐
//! object, hashed ─▶ [LZ4] ─▶ blocks in an unnamed file ─▶ metadata | blocks ─▶ FILE
//! ```
//!
//! Each content is in it once. Its files have fingerprints, so that Linux 7.0 can share their page
//! cache with that of other such images (`inode_share`).

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use cofolio_erofs::tree::{Content, Tree};
use cofolio_erofs::write::{
    Blob, BlobData, Blobs, BlockAddr, Data, Extent, WriteError, lz4, write_data,
};
use cofolio_store::task::{Cancel, Cancelled, Event, Task};
use cofolio_store::verity::Hasher;
use cofolio_store::{Digest, Domain, Piece, Stretch, stretch_at};
use serde::Serialize;
use sha2::Digest as _;

use super::aside::{OutputFile, unnamed_file};
use super::assemble::Object;
use super::error::{ExportError, io_error};
use crate::compose::named_objects::open_image;
use crate::pack::segment::{SHA256_SIZE_MAX, granule};

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

/// Writes an image to a mountable file (`-`: standard output). An error leaves the path as it was.
pub fn export_filesystem(
    domain: &Domain,
    image: &Digest,
    path: &Path,
    options: FilesystemOptions,
    task: &Task,
) -> Result<FilesystemReport, ExportError> {
    let _lease = domain.lease(image, Vec::new(), "export")?;
    let bad = |what: String| ExportError::Image { image: *image, what };
    let file = domain.open_image(image)?;
    let stored = open_image(&file).map_err(|error| bad(error.to_string()))?;
    let tree = stored.to_tree().map_err(|error| bad(error.to_string()))?;
    let new = OutputFile::create(path, options.replace)?;
    let mut blocks = Blocks::new(new.aside(), options.compress)?;
    blocks.put_all(domain, image, &tree, &task.cancel, &mut |bytes| {
        task.tell(Event::Done { bytes, bytes_total: None, items: 1, items_total: None });
    })?;
    // Errors of the tree are the image's fault, all others the destination's.
    let (digest, size) =
        write_file(new.file(), &tree, &mut blocks, &task.cancel).map_err(|error| match error {
            _ if task.check().is_err() => Cancelled.into(),
            WriteError::Sink(source) => io_error(path)(source),
            other => bad(other.to_string()),
        })?;
    new.publish()?;
    Ok(FilesystemReport { image: *image, digest, size, content: blocks.content })
}

/// Writes metadata and blocks; gives the digest of it all and its size.
fn write_file(
    file: &File,
    tree: &Tree,
    blocks: &mut Blocks,
    cancel: &Cancel,
) -> Result<(Digest, u64), WriteError> {
    use WriteError::Sink;
    let mut sink = Hashed { file, hasher: Hasher::new(), cancel };
    let data =
        Data { devices: &[], own_blocks: blocks.count, blobs: &blocks.blobs, fingerprints: true };
    write_data(tree, &data, &mut sink)?;
    blocks.copy_to(&mut sink).map_err(Sink)?;
    let size = sink.hasher.size();
    file.set_len(size).map_err(Sink)?;
    Ok((sink.hasher.finish(), size))
}

/// Writes to a file, and hashes what it writes.
struct Hashed<'a> {
    file: &'a File,
    hasher: Hasher,
    cancel: &'a Cancel,
}

impl Hashed<'_> {
    /// Writes zeros as a hole.
    fn zeros(&mut self, len: u64) -> io::Result<()> {
        self.hasher.zeros(len);
        self.file.seek_relative(i64::try_from(len).unwrap_or(i64::MAX))
    }
}

impl Write for Hashed<'_> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        self.cancel.check().map_err(io::Error::other)?;
        self.hasher.update(data);
        write_sparse(self.file, data)?;
        Ok(data.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes data but steps over blocks of zeros. At the end the file may be too short.
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

struct Blocks {
    file: File,
    /// A path for messages: the file has no name.
    path: PathBuf,
    compress: bool,
    count: u32,
    content: u64,
    blobs: Blobs,
}

impl Blocks {
    /// In a file without a name, in the directory of `path`.
    fn new(path: &Path, compress: bool) -> Result<Self, ExportError> {
        let file = unnamed_file(path)?;
        let path = path.to_owned();
        Ok(Self { file, path, compress, count: 0, content: 0, blobs: Blobs::new() })
    }

    /// Writes all of them behind the metadata; holes are not read.
    fn copy_to(&mut self, sink: &mut Hashed<'_>) -> io::Result<()> {
        let end = u64::from(self.count) * BLOCK as u64;
        let mut buffer = vec![0; READ_SIZE];
        let mut at = 0;
        while at < end {
            match stretch_at(&self.file, at)? {
                Stretch::Hole(len) => {
                    sink.zeros(len)?;
                    at += len;
                }
                Stretch::Data(len) => {
                    let data_end = end.min(at.saturating_add(len));
                    while at < data_end {
                        let len = usize::try_from(data_end - at).unwrap_or(READ_SIZE);
                        let bytes = &mut buffer[..len.min(READ_SIZE)];
                        self.file.read_exact_at(bytes, at)?;
                        sink.write_all(bytes)?;
                        at += bytes.len() as u64;
                    }
                }
            }
        }
        Ok(())
    }

    /// Stores what the files of a tree have, each content once, in the order of their names.
    fn put_all(
        &mut self,
        domain: &Domain,
        image: &Digest,
        tree: &Tree,
        cancel: &Cancel,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), ExportError> {
        let user = format!("image {image}");
        for visit in tree.walk() {
            let content = tree.content(visit.inode);
            let Content::External { size, .. } = content else { continue };
            // The writer refuses a file that names no object, with its path.
            let new = content.digest().filter(|digest| !self.blobs.contains_key(*digest));
            let Some(digest) = new else { continue };
            let object = Object::open(domain, Digest(*digest), size, (&user, cancel))?;
            self.put(*digest, size, object, cancel)?;
            self.content += size;
            progress(self.content);
        }
        Ok(())
    }

    fn put(
        &mut self,
        digest: [u8; 32],
        size: u64,
        mut object: Object<'_>,
        cancel: &Cancel,
    ) -> Result<(), ExportError> {
        let too_large = || ExportError::Destination {
            what: "the image is larger than its format can address".to_owned(),
        };
        let bad = |source| ExportError::Io { path: self.path.clone(), source };
        let first = self.count;
        let mut sha = (size <= SHA256_SIZE_MAX).then(sha2::Sha256::new);
        // Contents too large for SHA-256 are too large for a table with an entry for each 4 KiB.
        let data = if self.compress && sha.is_some() {
            let mut reader = ObjectReader { object: &mut object, left: size, sha: &mut sha };
            let mut writer = io::BufWriter::with_capacity(READ_SIZE, &self.file);
            let pclusters = lz4::compress(&mut reader, &mut writer)
                .and_then(|pclusters| writer.flush().map(|()| pclusters))
                .map_err(|error| error.downcast::<ExportError>().unwrap_or_else(bad))?;
            let count = u32::try_from(pclusters.len()).map_err(|_| too_large())?;
            self.count = first.checked_add(count).ok_or_else(too_large)?;
            BlobData::Lz4 { start: BlockAddr { device: 0, block: first }, pclusters }
        } else {
            let blocks = u32::try_from(size.div_ceil(BLOCK as u64)).map_err(|_| too_large())?;
            // No place is larger than the end of all of them.
            first.checked_add(blocks).ok_or_else(too_large)?;
            let mut plain = Plain::new(&self.file, first, size);
            object.take_pieces(size, |piece| {
                match piece {
                    Piece::Data(bytes) => {
                        sha.iter_mut().for_each(|sha| sha.update(bytes));
                        plain.data(bytes).map_err(&bad)?;
                    }
                    Piece::Hole(len) => {
                        if let Some(sha) = &mut sha {
                            for bytes in zeros(len) {
                                cancel.check()?;
                                sha.update(bytes);
                            }
                        }
                        plain.at += len;
                    }
                }
                Ok(())
            })?;
            let (count, extents) = plain.finish().map_err(bad)?;
            self.count = first + count;
            BlobData::Extents(extents)
        };
        object.check()?;
        let sha256 = sha.map(|sha| sha.finalize().into());
        self.blobs.insert(digest, Blob { sha256, data });
        Ok(())
    }
}

/// `len` zeros, in pieces.
fn zeros(mut len: u64) -> impl Iterator<Item = &'static [u8]> {
    static ZEROS: [u8; READ_SIZE] = [0; READ_SIZE];
    std::iter::from_fn(move || {
        let count = usize::try_from(len).unwrap_or(READ_SIZE).min(READ_SIZE);
        len -= count as u64;
        (count > 0).then(|| &ZEROS[..count])
    })
}

/// Writes a content uncompressed, and leaves out granules of zeros.
struct Plain<'f> {
    file: &'f File,
    /// The first block that it can have.
    first: u32,
    size: u64,
    granule: u64,
    /// Offset in the content, in bytes.
    at: u64,
    extents: Vec<Extent>,
    /// Blocks of the content that have an extent.
    placed: u32,
    /// Blocks written.
    written: u32,
}

impl<'f> Plain<'f> {
    fn new(file: &'f File, first: u32, size: u64) -> Self {
        let (granule, extents) = (granule(size), Vec::new());
        Self { file, first, size, granule, at: 0, extents, placed: 0, written: 0 }
    }

    fn data(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let left =
                usize::try_from(self.granule - self.at % self.granule).unwrap_or(bytes.len());
            let (part, rest) = bytes.split_at(bytes.len().min(left));
            if part.iter().any(|byte| *byte != 0) {
                let end = self.place_granule();
                let before_end = u64::from(self.placed) * BLOCK as u64 - self.at;
                self.file.seek(SeekFrom::Start(end - before_end))?;
                write_sparse(self.file, part)?;
            }
            self.at += part.len() as u64;
            bytes = rest;
        }
        Ok(())
    }

    /// Gives the granule at hand a place if it has none; returns its end in the file.
    fn place_granule(&mut self) -> u64 {
        let start = blocks_of(self.at - self.at % self.granule);
        if start >= self.placed {
            self.skip_to(start);
            let end = self.size.min(u64::from(start) * BLOCK as u64 + self.granule);
            let blocks = blocks_of(end) - start;
            match self.extents.last_mut() {
                Some(extent) if extent.at.is_some() => extent.blocks += blocks,
                _ => {
                    let at = Some(BlockAddr { device: 0, block: self.first + self.written });
                    self.extents.push(Extent { at, blocks });
                }
            }
            self.written += blocks;
            self.placed += blocks;
        }
        u64::from(self.first + self.written) * BLOCK as u64
    }

    /// Makes a hole up to a block.
    fn skip_to(&mut self, block: u32) {
        if block > self.placed {
            self.extents.push(Extent { at: None, blocks: block - self.placed });
            self.placed = block;
        }
    }

    fn finish(mut self) -> io::Result<(u32, Vec<Extent>)> {
        self.skip_to(blocks_of(self.size));
        let end = u64::from(self.first + self.written) * BLOCK as u64;
        self.file.set_len(end)?;
        self.file.seek(SeekFrom::Start(end))?;
        Ok((self.written, self.extents))
    }
}

/// The number of blocks of a content, which is not too large: `Blocks::put` has checked it.
fn blocks_of(bytes: u64) -> u32 {
    u32::try_from(bytes.div_ceil(BLOCK as u64)).unwrap_or(u32::MAX)
}

/// Reads an object and hashes it. Errors hold an [`ExportError`].
struct ObjectReader<'r, 'o> {
    object: &'r mut Object<'o>,
    left: u64,
    sha: &'r mut Option<sha2::Sha256>,
}

impl Read for ObjectReader<'_, '_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count =
            usize::try_from(self.left).unwrap_or(usize::MAX).min(buffer.len()).min(READ_SIZE);
        let sha = &mut *self.sha;
        let mut at = 0;
        let mut sink = |bytes: &[u8]| {
            sha.iter_mut().for_each(|sha| sha.update(bytes));
            buffer[at..at + bytes.len()].copy_from_slice(bytes);
            at += bytes.len();
            Ok(())
        };
        self.object.take(count as u64, Some(&mut sink)).map_err(io::Error::other)?;
        self.left -= count as u64;
        Ok(count)
    }
}
