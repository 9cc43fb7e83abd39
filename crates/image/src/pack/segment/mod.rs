//! Segments and packs, for images that carry their data themselves.
//!
//! A *segment* holds contents of objects one after the other, each from the beginning of a block
//! on: a device that EROFS images address. It is named by its fs-verity digest, never changes, and
//! lists its contents so that later packs find them. All numbers are little endian:
//!
//! ```text
//! blocks   4 KiB each; the last one of a content is filled up with zeros, holes are holes
//! padding  if it is for DAX, zeros that make the file a multiple of 2 MiB
//! pages    unless it is compressed, for each of the first 2^18 blocks 8 bytes of its SHA-256
//! index    for each content, in the order of the blocks, 80 bytes:
//!            0  digest of the object
//!           32  SHA-256 of the content; zeros if that is larger than 4 GiB
//!           64  u64 size in bytes
//!           72  u32 first block
//!           76  u32 blocks in this segment
//!          if it is compressed, then for each block u32: bytes of content in it, and bit 31 if
//!          they are compressed
//!          else digests of other segments, 32 bytes each; and, for each content that takes
//!          another number of blocks than it has, its runs, 12 bytes each:
//!            0  u32 segment: 0 this one, n the n-th other one, 2^32-1 none: zeros
//!            4  u32 block there
//!            8  u32 how many blocks
//! footer   64 bytes: "cofolseg", u32 version, u32 contents, u32 blocks, u32 others, SHA-256 of the
//!          index, u32 runs, u32 form: 0 plain, 1 compressed, 2 for DAX
//! ```
//!
//! The version is 1. The hash of a page is the first bytes of its SHA-256. In a compressed segment each block holds as much of one content as fits, as
//! EROFS keeps it (one LZ4 block with zeros in front), or up to 4 KiB uncompressed. Segments have
//! one form.
//!
//! A plain content refers to another segment instead of repeating pages from a multiple of 64 KiB
//! on, if they are 512 KiB or more ([`Pages`]). A content of more than 4 GiB does not look for such
//! pages: its holes begin and end at multiples of more than 64 KiB ([`granule`]).
//!
//! A segment for DAX is plain, and is a device of virtual machines (virtio-pmem), which have to be
//! multiples of 2 MiB. Its contents refer to single pages: guests map them, and never seek.
//!
//! A *pack* is the EROFS image over the segments that one image of the store needs. Both are
//! derived from objects; a pack goes with its image, a segment with the last pack that needs it.

mod index;
mod write;

use cofolio_erofs::write::lz4::Pcluster;
use cofolio_store::{Digest, Domain, FileKind, Result, StoredFile};
use serde::{Deserialize, Serialize};

use index::Footer;
pub use write::{Pages, SegmentWriter, Written};

pub(super) const BLOCK: u64 = 4096;
/// Largest content, in bytes, with a SHA-256: it hashes a terabyte of zeros as slowly as data.
pub const SHA256_SIZE_MAX: u64 = 4 << 30;

/// Most bytes that holes have in a content of a compressed segment: they are read, and cost blocks.
pub const HOLES_MAX: u64 = 64 << 30;

/// Files that guests have as a device are multiples of this many bytes.
pub const DEVICE_ALIGN: u64 = 2 << 20;

/// Contents have zeros only in holes that begin and end at multiples of this many bytes: a power of
/// two, at least 64 KiB, and large enough for at most 65,536 entries in an image's table.
pub fn granule(size: u64) -> u64 {
    (size >> 16).next_power_of_two().max(64 << 10)
}

/// One content of a segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IndexEntry {
    /// The object whose content it is.
    pub object: Digest,
    /// SHA-256 of the content; zeros if it is larger than [`SHA256_SIZE_MAX`].
    pub sha256: [u8; 32],
    /// Its size in bytes.
    pub size: u64,
    /// First block in this segment.
    pub block: u32,
    /// Number of blocks in this segment.
    pub blocks: u32,
    /// Its blocks in order, here and in other segments, unless they are just those blocks.
    pub runs: Vec<Run>,
}

/// Some blocks of a content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// The first one; `None` for zeros, which have no blocks.
    pub at: Option<BlockRef>,
    /// How many.
    pub blocks: u32,
}

/// A block of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockRef {
    /// 0: the segment that refers to it; n: the n-th of its [`Segment::others`].
    pub segment: u32,
    /// The block there.
    pub block: u32,
}

impl IndexEntry {
    /// Where the content is, if it is plain.
    pub fn runs(&self) -> Vec<Run> {
        let at = Some(BlockRef { segment: 0, block: self.block });
        if self.runs.is_empty() { vec![Run { at, blocks: self.blocks }] } else { self.runs.clone() }
    }
}

/// How the contents of segments are kept.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum Form {
    /// As they are. Where the filesystem can, they share their blocks with the objects.
    #[default]
    Plain,
    /// Compressed, in blocks of 4 KiB.
    Lz4,
    /// For virtual machines: plain, each page once, in files that can be devices.
    Dax,
}

impl Form {
    /// Its name.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Lz4 => "lz4",
            Self::Dax => "dax",
        }
    }

    /// The kind of packs over segments of this form.
    pub fn pack_kind(self) -> FileKind {
        match self {
            Self::Plain | Self::Lz4 => FileKind::Pack,
            Self::Dax => FileKind::DaxPack,
        }
    }
}

/// What a segment holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Segment {
    /// How its contents are kept.
    pub form: Form,
    /// Blocks of 4 KiB.
    pub blocks: u32,
    /// Its contents, in the order of their blocks.
    pub entries: Vec<IndexEntry>,
    /// Of a compressed segment: what is in each block.
    pub pclusters: Vec<Pcluster>,
    /// Other segments in which some of its contents are, in part or all.
    pub others: Vec<Digest>,
}

impl Segment {
    /// What is in the blocks of one of its contents; nothing if it is plain.
    pub fn pclusters_of(&self, entry: &IndexEntry) -> &[Pcluster] {
        let from = self.pclusters.get(entry.block as usize..).unwrap_or_default();
        from.get(..entry.blocks as usize).unwrap_or_default()
    }

    /// The segment that a block is in; `own` is the digest of this one.
    pub fn holder(&self, own: &Digest, at: BlockRef) -> Digest {
        let other = at.segment.checked_sub(1).and_then(|other| self.others.get(other as usize));
        *other.unwrap_or(own)
    }

    /// Whether the other segments that one of its contents is in, if any, are all as asked for.
    pub fn is_within(&self, entry: &IndexEntry, is_so: impl Fn(&Digest) -> bool) -> bool {
        let mut others = entry.runs.iter().filter_map(|run| run.at?.segment.checked_sub(1));
        others.all(|other| self.others.get(other as usize).is_some_and(&is_so))
    }

    /// The index of a segment of the domain; its blocks are not read.
    ///
    /// # Errors
    /// [`Error::NoSuch`](cofolio_store::Error::NoSuch), and those of [`Segment::check`].
    pub fn of(domain: &Domain, digest: &Digest) -> Result<Self> {
        Self::read(&domain.open_segment(digest)?)
    }

    /// How many blocks a segment of the right length has. Fails like [`Segment::of`].
    pub fn blocks_of(domain: &Domain, digest: &Digest) -> Result<u32> {
        Ok(Footer::read(&domain.open_segment(digest)?)?.blocks.get())
    }

    /// Whether a file can be read as a segment. Its blocks are not looked at.
    ///
    /// # Errors
    /// [`Error::Corrupt`](cofolio_store::Error::Corrupt), [`Error::Io`](cofolio_store::Error::Io).
    pub fn check(file: &StoredFile) -> Result<()> {
        Self::read(file).map(drop)
    }
}
