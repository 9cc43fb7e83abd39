//! Which objects images, layers and splits name: what garbage collection, fsck, `du` and `verify` ask the formats.

use std::io::{self, BufReader};
use std::sync::{Mutex, PoisonError};

use cofolio_erofs::dump::{Records, What};
use cofolio_erofs::read::{Image, Inode, ReadAt, ReadError};
use cofolio_erofs::tree::{Content, Payload};
use cofolio_store::{BoxError, Contents, Digest, Segment, StoredFile};

use crate::oci::split;

/// Where a metadata image says at which path below the objects directory a file's content lies.
const REDIRECT: &[u8] = b"trusted.overlay.redirect";

/// Reads metadata images (EROFS in composefs form), layer trees (dump text, zstd) and splits.
#[derive(Clone, Copy, Debug, Default)]
pub struct ImageContents;

impl Contents for ImageContents {
    fn image_objects(
        &self,
        image: &StoredFile,
        visit: &mut dyn FnMut(Digest, u64),
    ) -> Result<(), BoxError> {
        let image = open_image(image)?;
        let mut walk = image.walk()?;
        while let Some(found) = walk.advance()? {
            if let Some(digest) = object_of(&image, &found.inode)? {
                visit(digest, found.inode.size);
            }
        }
        Ok(())
    }

    fn layer_objects(
        &self,
        layer: &StoredFile,
        visit: &mut dyn FnMut(Digest, u64),
    ) -> Result<(), BoxError> {
        let decoder = zstd::stream::read::Decoder::new(layer.reader())?;
        // Line by line, without the limits that a tree of mkcomposefs has: what an import accepted must
        // be readable here, or garbage collection could not tell what the layer needs.
        let mut records = Records::new(BufReader::with_capacity(256 << 10, decoder));
        while let Some(record) = records.next()? {
            let What::Inode { content: Content::External { size, payload, .. }, .. } = record.what
            else {
                continue;
            };
            let digest = match payload {
                Payload::Object(digest) => Some(Digest(*digest)),
                Payload::Path(path) => object_at(path),
                Payload::None => None,
            };
            visit(digest.ok_or_else(|| NoObject(record.path.to_vec()))?, size);
        }
        Ok(())
    }

    fn split_objects(
        &self,
        split: &StoredFile,
        visit: &mut dyn FnMut(Digest, u64),
    ) -> Result<(), BoxError> {
        Ok(split::objects(&StoredImage::new(split)?, visit)?)
    }

    fn pack_segments(&self, pack: &StoredFile) -> Result<Vec<Digest>, BoxError> {
        let image = open_image(pack)?;
        image.superblock().devices.iter().map(|device| segment_of(&device.tag)).collect()
    }

    fn image_paths(
        &self,
        image: &StoredFile,
        wanted: &dyn Fn(&Digest) -> bool,
        found: &mut dyn FnMut(Digest, &[u8]),
    ) -> Result<(), BoxError> {
        let image = open_image(image)?;
        let mut walk = image.walk()?;
        while let Some(file) = walk.advance()? {
            if let Some(digest) = object_of(&image, &file.inode)?.filter(wanted) {
                found(digest, file.path);
            }
        }
        Ok(())
    }

    fn check_segment(&self, segment: &StoredFile) -> Result<(), BoxError> {
        Ok(Segment::check(segment)?)
    }
}

/// The segment that a device of a pack is: its tag is the digest.
fn segment_of(tag: &[u8]) -> Result<Digest, BoxError> {
    let named = Digest::from_lower_hex(tag);
    named.ok_or_else(|| format!("device `{}` is no segment", tag.escape_ascii()).into())
}

/// A file whose content is neither in the image nor an object: nothing of ours makes such images, and
/// whoever collects garbage must not guess.
#[derive(Debug, thiserror::Error)]
#[error("file `{}` names no object", String::from_utf8_lossy(.0))]
struct NoObject(Vec<u8>);

/// A metadata image of the store, opened for reading.
///
/// # Errors
/// [`ReadError`], also where its size cannot be read.
pub fn open_image(file: &StoredFile) -> Result<Image<StoredImage<'_>>, ReadError> {
    let image = StoredImage::new(file);
    Image::open(image.map_err(|source| ReadError::Source { offset: 0, source })?)
}

/// The object that holds the content of an inode; `None` if it has none, or the image itself holds it.
///
/// # Errors
/// [`ReadError`], or that a file's content is nowhere.
pub fn object_of<S: ReadAt>(image: &Image<S>, inode: &Inode) -> Result<Option<Digest>, BoxError> {
    if !inode.is_file() || !inode.is_chunk_based() || inode.size == 0 {
        return Ok(None);
    }
    let redirect = image.xattrs(inode)?.into_iter().find(|xattr| xattr.name == REDIRECT);
    let path = redirect.map(|xattr| xattr.value).unwrap_or_default();
    match object_at(&path) {
        Some(digest) => Ok(Some(digest)),
        None => Err(Box::new(NoObject(path))),
    }
}

/// Whether an inode is one of the whiteouts that composefs adds to the root of an image so that overlayfs
/// hides the shards of the objects directory. They are no part of what was imported.
pub fn is_added<S: ReadAt>(image: &Image<S>, inode: &Inode) -> bool {
    let whiteout = inode.mode & 0o170_000 == 0o020_000 && inode.rdev == 0;
    whiteout && image.superblock().composefs.is_some()
}

/// The object at a path below the objects directory.
fn object_at(path: &[u8]) -> Option<Digest> {
    let path = std::str::from_utf8(path.strip_prefix(b"/").unwrap_or(path)).ok()?;
    path.split_once('/').and_then(|(shard, name)| Digest::from_object_path(shard, name))
}

/// The bytes of an image or a split of the store. Readers of images ask for a few bytes at a time, tens of thousands
/// of times for a small image, so they are read in blocks of which the last few are kept.
#[derive(Debug)]
pub struct StoredImage<'a> {
    file: &'a StoredFile,
    size: u64,
    /// Block `n` is in slot `n % BLOCKS`, with its number; an empty one holds nothing.
    blocks: Mutex<Vec<(u64, Vec<u8>)>>,
}

/// Bytes of a block: what a small image's directories, inodes or attributes take, or a read-ahead.
const BLOCK: usize = 64 << 10;
/// How many blocks are kept; 4 MiB, which is all of an image of 40,000 files.
const BLOCKS: usize = 64;

impl<'a> StoredImage<'a> {
    /// The whole file.
    ///
    /// # Errors
    /// That its size cannot be read.
    pub fn new(file: &'a StoredFile) -> io::Result<Self> {
        Ok(Self { file, size: file.size()?, blocks: Mutex::default() })
    }

    /// Copies the bytes from `offset` to the end of its block, or as many as `buf` has room for; says how
    /// many.
    fn copy(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let number = offset / BLOCK as u64;
        let start = number * BLOCK as u64;
        let mut blocks = self.blocks.lock().unwrap_or_else(PoisonError::into_inner);
        blocks.resize_with(BLOCKS, Default::default);
        // Less than BLOCKS.
        let slot = &mut blocks[usize::try_from(number % BLOCKS as u64).unwrap_or(0)];
        if slot.0 != number || slot.1.is_empty() {
            slot.1.clear();
            let mut block =
                vec![0; usize::try_from(self.size - start).map_or(BLOCK, |n| n.min(BLOCK))];
            self.file.read_exact_at(&mut block, start)?;
            *slot = (number, block);
        }
        let from = usize::try_from(offset - start).unwrap_or(BLOCK);
        let bytes = slot.1.get(from..).unwrap_or_default();
        let length = bytes.len().min(buf.len());
        buf[..length].copy_from_slice(&bytes[..length]);
        Ok(length)
    }
}

impl ReadAt for StoredImage<'_> {
    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let end = offset.checked_add(buf.len() as u64);
        if end.is_none_or(|end| end > self.size) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if buf.len() >= BLOCK {
            return self.file.read_exact_at(buf, offset);
        }
        let mut done = 0;
        while done < buf.len() {
            done += self.copy(&mut buf[done..], offset + done as u64)?;
        }
        Ok(())
    }

    fn size(&self) -> u64 {
        self.size
    }
}
