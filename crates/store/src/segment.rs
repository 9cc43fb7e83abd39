//! Segments and packs: what an image is mounted from where it carries its data itself.
//!
//! A *segment* holds contents of objects, one after the other, each from the beginning of a block on: a device that
//! EROFS images address. It is named by its fs-verity digest, never changes, and says itself what it holds, so that
//! what is packed later finds it there. All numbers are little endian:
//!
//! ```text
//! blocks   4 KiB each; the last one of a content is filled up with zeros, holes are holes
//! index    for each content, in the order of the blocks, 80 bytes:
//!            0  digest of the object
//!           32  SHA-256 of the content
//!           64  u64 size in bytes
//!           72  u32 first block
//!           76  u32 0; if it is compressed how many blocks it takes
//!          if it is compressed, then for each block u32: how many bytes of content are in it, and bit 31 if they are
//!          compressed
//! footer   64 bytes: "cofolseg", u32 version, u32 contents, u32 blocks, u32 0, SHA-256 of the index, 8 zeros
//! ```
//!
//! Version 1 is plain. In version 2 each block holds as much of one content as fits into it, as EROFS keeps it (one LZ4
//! block with zeros in front), or up to 4 KiB of it as they are. All contents of a segment are kept in one way.
//!
//! A *pack* is the EROFS image over the segments that one image of the store needs. Both are made from objects and can
//! be made again; a pack goes with its image, a segment with the last pack that needs it.

use std::fmt;
use std::io::{self, Read, Write};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::buffer::Buffer;
use crate::contents::Contents;
use crate::disk::{Kind, Piece, StoredFile};
use crate::error::{At, Error, Result};
use crate::staging::{Placed, Spilled, Staging};
use crate::store::remove_entry;
use crate::verity::Hasher;
use crate::{Digest, Domain};

/// Suffix of segments.
pub(crate) const SEGMENT_SUFFIX: &str = ".segment";
/// Suffix of packs.
pub(crate) const PACK_SUFFIX: &str = ".pack";

/// Bytes of a block.
const BLOCK: u64 = 4096;
const EXTENT_SIZE: usize = 80;
const FOOTER_SIZE: usize = 64;
const MAGIC: &[u8; 8] = b"cofolseg";
/// Versions, by how contents are kept.
const PLAIN: u32 = 1;
const LZ4: u32 = 2;
/// Bytes of what is said of each block of a compressed segment.
const PART_SIZE: usize = 4;
/// Of a block: what is in it is compressed.
const COMPRESSED: u32 = 1 << 31;
/// Most content in one block, in bytes; more would be too much to decompress for a page.
const PART_MAX: u32 = 1 << 20;
/// How much is gathered before it is written, in bytes.
const WRITE_SIZE: usize = 1 << 20;
const ZEROS: [u8; 4096] = [0; 4096];

/// One content of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// The object whose content it is.
    pub object: Digest,
    /// SHA-256 of the content.
    pub sha256: [u8; 32],
    /// Its size in bytes.
    pub size: u64,
    /// The block at which it begins.
    pub block: u32,
    /// How many blocks it takes.
    pub blocks: u32,
}

/// What is in a block of a compressed segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// How much content, in bytes.
    pub len: u32,
    /// It is one LZ4 block that ends where the block ends; otherwise as it is, and then at most 4 KiB.
    pub compressed: bool,
}

/// How the contents of segments are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Form {
    /// As they are. Where the filesystem can, they share their blocks with the objects.
    #[default]
    Plain,
    /// Compressed, in blocks of 4 KiB.
    Lz4,
}

impl Form {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Plain, Self::Lz4];

    /// Its name.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Lz4 => "lz4",
        }
    }
}

/// What a segment holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Segment {
    /// Blocks of 4 KiB.
    pub blocks: u32,
    /// Its contents, in the order of their blocks.
    pub extents: Vec<Extent>,
    /// What is in each block, if it is compressed.
    pub parts: Vec<Part>,
}

impl Segment {
    /// How its contents are kept. One without any is plain.
    pub fn form(&self) -> Form {
        if self.parts.is_empty() { Form::Plain } else { Form::Lz4 }
    }

    /// What is in the blocks of one of its contents; nothing if it is plain.
    pub fn parts_of(&self, extent: &Extent) -> &[Part] {
        let from = self.parts.get(extent.block as usize..).unwrap_or_default();
        from.get(..extent.blocks as usize).unwrap_or_default()
    }

    fn encode(&self) -> Vec<u8> {
        let size = self.extents.len() * EXTENT_SIZE + self.parts.len() * PART_SIZE + FOOTER_SIZE;
        let mut bytes = Vec::with_capacity(size);
        let form = self.form();
        for extent in &self.extents {
            bytes.extend_from_slice(&extent.object.0);
            bytes.extend_from_slice(&extent.sha256);
            bytes.extend_from_slice(&extent.size.to_le_bytes());
            bytes.extend_from_slice(&extent.block.to_le_bytes());
            let blocks = if form == Form::Plain { 0 } else { extent.blocks };
            bytes.extend_from_slice(&blocks.to_le_bytes());
        }
        for part in &self.parts {
            let flag = if part.compressed { COMPRESSED } else { 0 };
            bytes.extend_from_slice(&(part.len | flag).to_le_bytes());
        }
        let sha256: [u8; 32] = Sha256::digest(&bytes).into();
        bytes.extend_from_slice(MAGIC);
        // There are no more contents than blocks.
        let contents = u32::try_from(self.extents.len()).unwrap_or(u32::MAX);
        let version = if form == Form::Plain { PLAIN } else { LZ4 };
        for number in [version, contents, self.blocks, 0] {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
        bytes.extend_from_slice(&sha256);
        bytes.extend_from_slice(&[0; 8]);
        bytes
    }

    /// Reads what a file says of itself, and checks that this can be.
    fn read(file: &StoredFile) -> Result<Self> {
        let damaged = |reason: &str| Error::corrupt(file.path(), reason.to_owned());
        let Footer { form, contents, blocks, index_size, sha256 } = Footer::read(file)?;
        // No larger than the file is.
        let mut index = vec![0; usize::try_from(index_size).unwrap_or(usize::MAX)];
        match file.read_exact_at(&mut index, u64::from(blocks) * BLOCK) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                return Err(damaged("it is shorter than it says"));
            }
            other => other.at("read", file.path())?,
        }
        if Sha256::digest(&index)[..] != sha256 {
            return Err(damaged("what it says of its contents is altered"));
        }
        // The size of the index is made of the two.
        let (entries, parts) = index.split_at(contents as usize * EXTENT_SIZE);
        let mut extents = Vec::with_capacity(contents as usize);
        let mut end = 0;
        for entry in entries.as_chunks::<EXTENT_SIZE>().0 {
            let mut extent = Extent {
                object: Digest([0; 32]),
                sha256: [0; 32],
                size: u64::from(le_u32(&entry[64..])) | u64::from(le_u32(&entry[68..])) << 32,
                block: le_u32(&entry[72..]),
                blocks: le_u32(&entry[76..]),
            };
            if form == Form::Plain {
                let blocks = extent.size.div_ceil(BLOCK);
                extent.blocks = u32::try_from(blocks)
                    .map_err(|_| damaged("its contents go on behind its end"))?;
            }
            extent.object.0.copy_from_slice(&entry[..32]);
            extent.sha256.copy_from_slice(&entry[32..64]);
            if u64::from(extent.block) < end || extent.size == 0 {
                return Err(damaged("its contents lie over each other"));
            }
            end = u64::from(extent.block) + u64::from(extent.blocks);
            extents.push(extent);
        }
        if end > u64::from(blocks) {
            return Err(damaged("its contents go on behind its end"));
        }
        let parts = parts.as_chunks::<PART_SIZE>().0.iter().map(|part| u32::from_le_bytes(*part));
        let parts = parts
            .map(|part| Part { len: part & !COMPRESSED, compressed: part & COMPRESSED != 0 })
            .collect();
        let segment = Self { blocks, extents, parts };
        match form == Form::Plain || segment.extents.iter().all(|extent| segment.fits(extent)) {
            true => Ok(segment),
            false => Err(damaged("its blocks hold something else than its contents")),
        }
    }

    /// Whether the blocks of a compressed content hold as much as it is long.
    fn fits(&self, extent: &Extent) -> bool {
        let parts = self.parts_of(extent);
        let sound = |part: &Part| {
            (1..=PART_MAX).contains(&part.len) && (part.compressed || u64::from(part.len) <= BLOCK)
        };
        let len: u64 = parts.iter().map(|part| u64::from(part.len)).sum();
        parts.iter().all(sound) && len == extent.size
    }
}

/// The last bytes of a segment, which say how large it must be.
struct Footer {
    form: Form,
    contents: u32,
    blocks: u32,
    index_size: u64,
    sha256: [u8; 32],
}

impl Footer {
    fn read(file: &StoredFile) -> Result<Self> {
        let damaged = |reason: &str| Error::corrupt(file.path(), reason.to_owned());
        let size = file.size().at("look at", file.path())?;
        let footer_at = size
            .checked_sub(FOOTER_SIZE as u64)
            .ok_or_else(|| damaged("it is no segment: too short"))?;
        let mut footer = [0; FOOTER_SIZE];
        file.read_exact_at(&mut footer, footer_at).at("read", file.path())?;
        let number = |at: usize| le_u32(&footer[at..]);
        if footer[..8] != MAGIC[..] {
            return Err(damaged("it does not end as a segment does"));
        }
        let form = match number(8) {
            PLAIN => Form::Plain,
            LZ4 => Form::Lz4,
            _ => return Err(damaged("it is of a version that this program does not know")),
        };
        let (contents, blocks) = (number(12), number(16));
        let parts = if form == Form::Lz4 { u64::from(blocks) * PART_SIZE as u64 } else { 0 };
        let index_size = u64::from(contents) * EXTENT_SIZE as u64 + parts;
        if (u64::from(blocks) * BLOCK).checked_add(index_size) != Some(footer_at) {
            return Err(damaged("it has another size than it says"));
        }
        let mut sha256 = [0; 32];
        sha256.copy_from_slice(&footer[24..56]);
        Ok(Self { form, contents, blocks, index_size, sha256 })
    }
}

fn le_u32(bytes: &[u8]) -> u32 {
    bytes.first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes))
}

/// Writes one segment.
pub struct SegmentWriter<'a> {
    file: Spilled<'a>,
    hasher: Hasher,
    buffer: Buffer,
    /// What it has so far; the blocks are those of whole contents.
    segment: Segment,
    /// The file, for reading: what shares its blocks with an object is hashed from here.
    copy: Option<StoredFile>,
}

impl fmt::Debug for SegmentWriter<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SegmentWriter").field("segment", &self.segment).finish_non_exhaustive()
    }
}

impl Staging {
    /// A writer for a segment.
    ///
    /// # Errors
    /// As [`Staging::put_object`].
    pub fn segment_writer(&self) -> Result<SegmentWriter<'_>> {
        Ok(SegmentWriter {
            file: Spilled::new(self)?,
            hasher: Hasher::new(),
            buffer: Buffer::new(WRITE_SIZE),
            segment: Segment::default(),
            copy: None,
        })
    }
}

impl SegmentWriter<'_> {
    /// Bytes of the contents so far, filled up to whole blocks.
    pub fn size(&self) -> u64 {
        u64::from(self.segment.blocks) * BLOCK
    }

    /// Adds the content of an object of the domain, which must not be empty, as it is. It shares its blocks with the
    /// object where the filesystem can.
    ///
    /// # Errors
    /// [`Error::NoSuchObject`], [`Error::SizeMismatch`], [`Error::Corrupt`] if the content is not what its name says,
    /// [`Error::SegmentFull`] if it is more than a segment can address, and those of [`Staging::put_object`].
    pub fn add(&mut self, object: &Digest, size: u64) -> Result<()> {
        debug_assert!(self.segment.parts.is_empty(), "all contents are kept in one way");
        let source = self.open(object, size)?;
        let block = self.segment.blocks;
        let full = || Error::SegmentFull { digest: *object, size };
        let blocks = u32::try_from(size.div_ceil(BLOCK)).map_err(|_| full())?;
        block.checked_add(blocks).ok_or_else(full)?;
        let mut hashers = (Hasher::new(), Sha256::new());
        if self.share(&source)? {
            let copy = self.copy()?;
            let start = u64::from(block) * BLOCK;
            let hasher = &mut self.hasher;
            copy.for_pieces_in(start..start + size, |piece| {
                hash(&mut hashers, hasher, &piece);
                Ok(())
            })?;
            self.copy = Some(copy);
        } else {
            source.for_pieces(|piece| {
                hash(&mut hashers, &mut self.hasher, &piece);
                match piece {
                    Piece::Data(data) => self.write(data),
                    Piece::Hole(len) => self.hole(len),
                }
            })?;
        }
        check_digest(&source, object, hashers.0)?;
        let padding = usize::try_from(size.next_multiple_of(BLOCK) - size).unwrap_or(0);
        self.hasher.update(&ZEROS[..padding]);
        self.write(&ZEROS[..padding])?;
        let sha256 = hashers.1.finalize().into();
        self.push(Extent { object: *object, sha256, size, block, blocks });
        Ok(())
    }

    /// Adds the content of an object of the domain, which must not be empty, compressed: `compress` reads it to its
    /// end, writes blocks of 4 KiB and says what is in each.
    ///
    /// # Errors
    /// As [`SegmentWriter::add`], those of `compress`, and `InvalidData` if what it says is not what it read and wrote.
    pub fn add_compressed(
        &mut self,
        object: &Digest,
        size: u64,
        compress: impl FnOnce(&mut dyn Read, &mut dyn Write) -> io::Result<Vec<Part>>,
    ) -> Result<()> {
        debug_assert_eq!(self.segment.parts.len(), self.segment.blocks as usize);
        let source = self.open(object, size)?;
        let mut hashers = (Hasher::new(), Sha256::new());
        let mut reader = Hashing { reader: source.reader(), hashers: &mut hashers };
        let mut writer = Blocks { segment: self, written: 0, failed: None };
        let parts = compress(&mut reader, &mut writer);
        let Blocks { written, failed, .. } = writer;
        if let Some(error) = failed {
            return Err(error);
        }
        let parts = parts.at("read", source.path())?;
        check_digest(&source, object, hashers.0)?;
        let block = self.segment.blocks;
        let full = || Error::SegmentFull { digest: *object, size };
        let blocks = u32::try_from(parts.len()).map_err(|_| full())?;
        block.checked_add(blocks).ok_or_else(full)?;
        self.segment.parts.extend(parts);
        let sha256 = hashers.1.finalize().into();
        let extent = Extent { object: *object, sha256, size, block, blocks };
        if !self.segment.fits(&extent) || written != u64::from(blocks) * BLOCK {
            return Err(io::Error::from(io::ErrorKind::InvalidData)).at("compress", source.path());
        }
        self.push(extent);
        Ok(())
    }

    fn open(&self, object: &Digest, size: u64) -> Result<StoredFile> {
        let source = self.file.staging.domain.open_object(object)?;
        let found = source.size().at("look at", source.path())?;
        match found == size {
            true => Ok(source),
            false => Err(Error::SizeMismatch { digest: *object, expected: size, found }),
        }
    }

    fn push(&mut self, extent: Extent) {
        self.segment.blocks = extent.block + extent.blocks;
        self.segment.extents.push(extent);
    }

    /// Ends the segment; gives its name and what it holds.
    ///
    /// # Errors
    /// As [`Staging::put_object`].
    pub fn finish(mut self) -> Result<(Digest, Segment)> {
        let index = self.segment.encode();
        self.hasher.update(&index);
        self.write(&index)?;
        self.flush()?;
        let Self { file, hasher, segment, .. } = self;
        let (staging, written, digest) = (file.staging, file.written, hasher.finish());
        let target = format!("{}/segments/{digest}{SEGMENT_SUFFIX}", staging.directory);
        let placed = file.finish(|staging, path| staging.disk().rename(path, &target, true))?;
        if placed == Placed::Full || !staging.enable_verity(&target, &digest)? {
            staging.count_missing_bytes(written);
        }
        Ok((digest, segment))
    }

    /// Appends a file by sharing its blocks; says whether that went.
    fn share(&mut self, source: &StoredFile) -> Result<bool> {
        if !self.file.staging.domain.protection().reflink {
            return Ok(false);
        }
        self.flush()?;
        let mut shared = false;
        self.file.call(|file| {
            shared = file.append_shared(source)?;
            Ok(())
        })?;
        Ok(shared)
    }

    fn copy(&mut self) -> Result<StoredFile> {
        if let Some(copy) = self.copy.take() {
            return Ok(copy);
        }
        let path = self.file.path.clone();
        let file = self.file.staging.disk().open(&path).at("open", &path)?;
        Ok(StoredFile::new(file, path))
    }

    fn write(&mut self, mut data: &[u8]) -> Result<()> {
        while !data.is_empty() {
            let spare = self.buffer.spare();
            let count = spare.len().min(data.len());
            spare[..count].copy_from_slice(&data[..count]);
            self.buffer.advance(count);
            data = &data[count..];
            if self.buffer.spare().is_empty() {
                self.flush()?;
            }
        }
        Ok(())
    }

    fn hole(&mut self, len: u64) -> Result<()> {
        self.flush()?;
        self.file.hole(len)
    }

    fn flush(&mut self) -> Result<()> {
        if !self.buffer.filled().is_empty() {
            self.file.write(self.buffer.filled())?;
            self.buffer.clear();
        }
        Ok(())
    }
}

fn check_digest(source: &StoredFile, object: &Digest, hasher: Hasher) -> Result<()> {
    let digest = hasher.finish();
    match digest == *object {
        true => Ok(()),
        false => Err(Error::corrupt(source.path(), format!("its content has digest {digest}"))),
    }
}

/// Reads content, and hashes it for the object's name and for the kernel.
struct Hashing<'h, R> {
    reader: R,
    hashers: &'h mut (Hasher, Sha256),
}

impl<R: Read> Read for Hashing<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.reader.read(buffer)?;
        self.hashers.0.update(&buffer[..count]);
        self.hashers.1.update(&buffer[..count]);
        Ok(count)
    }
}

/// Writes blocks to a segment, and hashes them as a part of it.
struct Blocks<'s, 'a> {
    segment: &'s mut SegmentWriter<'a>,
    /// How many bytes.
    written: u64,
    failed: Option<Error>,
}

impl Write for Blocks<'_, '_> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        self.segment.hasher.update(data);
        match self.segment.write(data) {
            Ok(()) => {
                self.written += data.len() as u64;
                Ok(data.len())
            }
            Err(error) => {
                self.failed = Some(error);
                Err(io::ErrorKind::Other.into())
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Hashes a piece of content for the object's name, for the kernel, and as a part of the segment.
fn hash(hashers: &mut (Hasher, Sha256), segment: &mut Hasher, piece: &Piece<'_>) {
    match piece {
        Piece::Data(data) => {
            hashers.0.update(data);
            hashers.1.update(data);
            segment.update(data);
        }
        Piece::Hole(len) => {
            hashers.0.zeros(*len);
            segment.zeros(*len);
            let mut left = *len;
            while left > 0 {
                let count = left.min(BLOCK);
                hashers.1.update(&ZEROS[..usize::try_from(count).unwrap_or(0)]);
                left -= count;
            }
        }
    }
}

/// A pack of the domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Pack {
    /// The image that it is of.
    pub image: Digest,
    /// Its own fs-verity digest.
    pub digest: Digest,
}

impl Pack {
    pub(crate) fn file_name(&self) -> String {
        format!("{}.{}{PACK_SUFFIX}", self.image, self.digest)
    }

    pub(crate) fn of_file(name: &str) -> Option<Self> {
        let (image, digest) = name.strip_suffix(PACK_SUFFIX)?.split_once('.')?;
        let digest_of = |text: &str| Digest::from_lower_hex(text.as_bytes());
        Some(Self { image: digest_of(image)?, digest: digest_of(digest)? })
    }
}

impl Domain {
    /// Digests of all segments, sorted.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn segments(&self) -> Result<Vec<Digest>> {
        let files = self.files("segments", SEGMENT_SUFFIX)?;
        let mut segments: Vec<_> =
            files.iter().filter_map(|stem| Digest::from_lower_hex(stem.as_bytes())).collect();
        segments.sort_unstable();
        Ok(segments)
    }

    /// Opens a segment for reading.
    ///
    /// # Errors
    /// [`Error::NoSuchSegment`], [`Error::Io`].
    pub fn open_segment(&self, digest: &Digest) -> Result<StoredFile> {
        self.open_file(self.segment_file(digest))?.ok_or(Error::NoSuchSegment(*digest))
    }

    /// What a segment holds, as it says itself. Its blocks are not looked at.
    ///
    /// # Errors
    /// [`Error::NoSuchSegment`], [`Error::Corrupt`], [`Error::Io`].
    pub fn read_segment(&self, digest: &Digest) -> Result<Segment> {
        Segment::read(&self.open_segment(digest)?)
    }

    /// Looks whether a segment is as long as it says: nothing else of it is read.
    ///
    /// # Errors
    /// As [`Domain::read_segment`].
    pub fn check_segment_size(&self, digest: &Digest) -> Result<()> {
        Footer::read(&self.open_segment(digest)?).map(drop)
    }

    /// All packs, sorted by image.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn packs(&self) -> Result<Vec<Pack>> {
        let files = self.files("segments", "")?;
        let mut packs: Vec<_> = files.iter().filter_map(|file| Pack::of_file(file)).collect();
        packs.sort_unstable();
        Ok(packs)
    }

    /// The packs of an image. There is one, or none; two if an attempt to replace one was interrupted: either will do.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn packs_of(&self, image: &Digest) -> Result<Vec<Pack>> {
        Ok(self.packs()?.into_iter().filter(|pack| pack.image == *image).collect())
    }

    /// Opens a pack for reading.
    ///
    /// # Errors
    /// [`Error::NoSuchPack`], [`Error::Io`].
    pub fn open_pack(&self, pack: &Pack) -> Result<StoredFile> {
        self.open_file(self.pack_file(pack))?.ok_or(Error::NoSuchPack(pack.image))
    }

    /// All packs with the segments that they need; none where that cannot be read: such a pack can be made again, and
    /// keeps nothing.
    pub(crate) fn packs_with_segments(
        &self,
        contents: &dyn Contents,
    ) -> Result<Vec<(Pack, Option<Vec<Digest>>)>> {
        let segments = |pack: &Pack| contents.pack_segments(&self.open_pack(pack).ok()?).ok();
        Ok(self.packs()?.into_iter().map(|pack| (pack, segments(&pack))).collect())
    }

    /// Removes the packs of an image; says whether there was one. What only it needed goes with the next
    /// [`Domain::gc`]. What is mounted from it stays as it is: the kernel has the files open.
    ///
    /// # Errors
    /// [`Error::ReadOnly`], [`Error::Io`].
    pub fn remove_pack(&self, image: &Digest) -> Result<bool> {
        self.store().check_writable()?;
        let _lock = self.lock_shared()?;
        let packs = self.packs_of(image)?;
        for pack in &packs {
            remove_entry(self.disk(), &self.pack_file(pack), Kind::File)?;
        }
        let directory = format!("{}/segments", self.base());
        self.disk().sync_dir(&directory).at("sync", &directory)?;
        Ok(!packs.is_empty())
    }

    /// The file of a pack. `None` on a simulated disk.
    pub fn pack_path(&self, pack: &Pack) -> Option<PathBuf> {
        Some(self.store().path()?.join(self.pack_file(pack)))
    }

    /// The file of a segment. `None` on a simulated disk.
    pub fn segment_path(&self, digest: &Digest) -> Option<PathBuf> {
        Some(self.store().path()?.join(self.segment_file(digest)))
    }

    pub(crate) fn segment_file(&self, digest: &Digest) -> String {
        format!("{}/segments/{digest}{SEGMENT_SUFFIX}", self.base())
    }

    pub(crate) fn pack_file(&self, pack: &Pack) -> String {
        format!("{}/segments/{}", self.base(), pack.file_name())
    }
}
