//! A tree to the bytes of a composefs metadata image, byte for byte what mkcomposefs 1.0.8 makes
//! of the same tree; or to those of an image with file data, which is mounted by itself.
//!
//! The image is streamed. A first pass over the tree orders it (`plan`), a second counts
//! attributes (`attrs`), a third assigns an offset to every inode (`layout`); then inodes, shared
//! attributes and data blocks are written front to back, each pass computing the same offsets
//! again. So memory stays at some 12 bytes per name, whatever the size of the image.

mod attrs;
mod data;
mod head;
mod layout;
pub mod lz4;
mod plan;

use std::io::{self, BufWriter, Write};

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromZeros, IntoBytes};

use crate::format::{
    BLOCK_BITS, BLOCK_SIZE, CHUNK_INDEXES, ClusterHeader, Dirent, FORMAT_EXTENDED,
    FORMAT_LAYOUT_SHIFT, FileType, InodeCompact, InodeExtended, NULL_ADDR, SLOT_SIZE, XattrEntry,
    XattrHeader,
};
use crate::tree::{InodeId, Tree};
use attrs::{Attr, Attrs};
use data::Checked;
use head::inodes_start;
use layout::{Body, Stored, TABLE_ALIGN};
use plan::{DirNames, Node, Plan, Target};

pub use data::{Blob, BlobData, Blobs, BlockAddr, Data, Device, Extent};

pub(crate) use plan::dir_size;

/// Highest format version there is.
pub const VERSION_MAX: u32 = 1;

/// Which format version to write: the lowest that can express the content, within these bounds.
///
/// Version 1 is needed for whiteouts. Where `max` does not allow it, they are written as version
/// 0 has them. A `max` below `min` counts as `min`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteOptions {
    /// Lowest version, 0 or 1.
    pub min_version: u32,
    /// Highest version, 0 or 1.
    pub max_version: u32,
}

impl Default for WriteOptions {
    /// What mkcomposefs does without options: 0 to 1.
    fn default() -> WriteOptions {
        WriteOptions { min_version: 0, max_version: VERSION_MAX }
    }
}

/// What was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteReport {
    /// Format version of the image.
    pub version: u32,
    /// Size of the image in bytes.
    pub bytes: u64,
    /// Inodes in the image, the whiteouts that composefs adds included.
    pub inodes: u64,
}

/// Why an image could not be written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the message of a variant says what its fields are")]
pub enum WriteError {
    #[error("composefs format version {version} does not exist (0 to {VERSION_MAX} do)")]
    Version { version: u32 },
    /// The tree needs more than the format can address.
    #[error("the image would be larger than its format can address")]
    TooLarge,
    /// A file whose blob is missing, has another size, or has invalid addresses.
    #[error("{}: its content is missing or invalid on the devices", path.escape_ascii())]
    NoContent { path: Box<[u8]> },
    #[error("cannot write the image")]
    Sink(#[source] io::Error),
}

/// Writes the metadata image of a tree to `sink`, front to back, in pieces of about 64 KiB.
///
/// The bytes depend on the tree alone: not on the order in which it was built (hard-linked inodes
/// are stored under the name that [`Tree::primary_names`] tells), nor on anything else.
///
/// # Errors
/// [`WriteError`]. When the sink failed, part of the image may have been written.
pub fn write(
    tree: &Tree,
    options: &WriteOptions,
    sink: impl Write,
) -> Result<WriteReport, WriteError> {
    for version in [options.min_version, options.max_version] {
        if version > VERSION_MAX {
            return Err(WriteError::Version { version });
        }
    }
    let plan = Plan::new(tree, None, true);
    let version = if plan.has_whiteouts {
        options.max_version.max(options.min_version)
    } else {
        options.min_version
    };
    write_planned(&plan, version, sink)
}

/// Writes an image with file data, which is mounted by itself with its devices. The kernel can
/// share the page cache of files with the same content between such images.
///
/// The caller appends [`Data::own_blocks`] to the image, right after its last byte.
///
/// The tree's attributes `trusted.overlay.*` are escaped as in a metadata image, since a writable
/// mount has an overlay over the image.
///
/// # Errors
/// [`WriteError`]. When the sink failed, part of the image may have been written.
pub fn write_data(
    tree: &Tree,
    data: &Data<'_>,
    sink: impl Write,
) -> Result<WriteReport, WriteError> {
    let checked = Checked::new(data, tree)?;
    write_planned(&Plan::new(tree, Some(&checked), false), 0, sink)
}

/// Writes a layer for a metadata image ([`crate::tree::delta`]), with unescaped whiteouts.
///
/// # Errors
/// [`WriteError`]. When the sink failed, part of the image may have been written.
pub fn write_layer(tree: &Tree, sink: impl Write) -> Result<WriteReport, WriteError> {
    write_planned(&Plan::new(tree, None, false), 0, sink)
}

fn write_planned(
    plan: &Plan<'_>,
    version: u32,
    sink: impl Write,
) -> Result<WriteReport, WriteError> {
    let attrs = Attrs::new(plan, version);
    let map = Map::new(plan, &attrs)?;
    let mut image = Image { plan, attrs: &attrs, map: &map, out: Out::new(sink) };
    image.write_head(version)?;
    image.write_inodes()?;
    image.write_shared_xattrs()?;
    image.write_data()?;
    let bytes = image.out.finish().map_err(WriteError::Sink)?;
    Ok(WriteReport { version, bytes, inodes: plan.inode_count })
}

/// A block, as a length in memory.
const BLOCK: usize = 1 << BLOCK_BITS;

struct Map {
    /// By inode of the tree, in slots of 32 bytes.
    nids: Vec<u32>,
    ghost_nids: [u32; 256],
    inodes_end: u64,
    data_start: u64,
    /// Blocks that are written.
    blocks: u32,
    /// Those and the ones that the caller appends.
    all_blocks: u32,
    /// The first block of each device in the common address space; blocks behind the image lead.
    first_blocks: Vec<u32>,
}

impl Map {
    fn new(plan: &Plan<'_>, attrs: &Attrs<'_>) -> Result<Map, WriteError> {
        let mut nids = vec![0; plan.tree.inode_capacity()];
        let mut ghost_nids = [0; 256];
        let mut end = inodes_start(plan);
        let mut data_blocks = 0;
        for at in plan.nodes() {
            let mut stored = Stored::new(plan, attrs, &at);
            let pos = stored.position(end);
            end = pos + stored.len();
            data_blocks += u64::from(stored.blocks);
            let nid = u32::try_from(pos / SLOT_SIZE).map_err(|_| WriteError::TooLarge)?;
            match at.node {
                Node::Inode(inode) => nids[inode.index()] = nid,
                Node::Ghost(k) => ghost_nids[usize::from(k)] = nid,
            }
        }
        let inodes_end = end.next_multiple_of(SLOT_SIZE);
        let shared_end = inodes_end + attrs.shared_size();
        if attrs.shared_size() / 4 >= u64::from(u32::MAX) - BLOCK_SIZE {
            return Err(WriteError::TooLarge);
        }
        let data_start = shared_end.next_multiple_of(BLOCK_SIZE);
        let blocks = data_start / BLOCK_SIZE + data_blocks;
        let blocks = u32::try_from(blocks).map_err(|_| WriteError::TooLarge)?;
        let own_blocks = plan.data.map_or(0, |data| data.data.own_blocks);
        let all_blocks = blocks.checked_add(own_blocks).ok_or(WriteError::TooLarge)?;
        let first_blocks = match plan.data {
            Some(data) => data::first_blocks(blocks, &data.data)?,
            None => Vec::new(),
        };
        Ok(Map { nids, ghost_nids, inodes_end, data_start, blocks, all_blocks, first_blocks })
    }

    fn nid(&self, node: Node) -> u64 {
        u64::from(match node {
            Node::Inode(inode) => self.nids[inode.index()],
            Node::Ghost(k) => self.ghost_nids[usize::from(k)],
        })
    }
}

struct Image<'a, W: Write> {
    plan: &'a Plan<'a>,
    attrs: &'a Attrs<'a>,
    map: &'a Map,
    out: Out<W>,
}

impl<W: Write> Image<'_, W> {
    fn write_inodes(&mut self) -> Result<(), WriteError> {
        let mut data_block = self.map.data_start / BLOCK_SIZE;
        for (number, at) in (0_u32..).zip(self.plan.nodes()) {
            let mut stored = Stored::new(self.plan, self.attrs, &at);
            let pos = stored.position(self.out.pos);
            self.pad_to(pos)?;
            self.write_inode(&stored, number, data_block)?;
            data_block += u64::from(stored.blocks);
            self.write_xattrs(&stored)?;
            self.write_tail(&stored, at.node)?;
        }
        self.pad_to(self.map.inodes_end)
    }

    fn write_inode(
        &mut self,
        stored: &Stored<'_>,
        number: u32,
        data_block: u64,
    ) -> Result<(), WriteError> {
        let form = if stored.compact { 0 } else { FORMAT_EXTENDED };
        let format = U16::new(stored.layout() << FORMAT_LAYOUT_SHIFT | form);
        let xattr_icount =
            if stored.xattr_size == 0 { 0 } else { (stored.xattr_size - 12) / 4 + 1 };
        let xattr_icount = U16::new(u16::try_from(xattr_icount).map_err(|_| WriteError::TooLarge)?);
        let mode = U16::new(low16(stored.mode));
        let union = U32::new(union_of(stored, data_block)?);
        if stored.compact {
            let inode = InodeCompact {
                format,
                xattr_icount,
                mode,
                nlink: U16::new(low16(stored.nlink)),
                size: U32::new(u32::try_from(stored.size()).map_err(|_| WriteError::TooLarge)?),
                mtime: U32::new(0),
                union,
                ino: U32::new(number),
                uid: U16::new(low16(stored.meta.uid)),
                gid: U16::new(low16(stored.meta.gid)),
                reserved: U32::new(0),
            };
            self.put(inode.as_bytes())
        } else {
            let inode = InodeExtended {
                format,
                xattr_icount,
                mode,
                startblk_hi: U16::new(0),
                size: U64::new(stored.size()),
                union,
                ino: U32::new(number),
                uid: U32::new(stored.meta.uid),
                gid: U32::new(stored.meta.gid),
                mtime: U64::new(stored.meta.mtime.cast_unsigned()),
                mtime_nsec: U32::new(stored.meta.mtime_nsec),
                nlink: U32::new(stored.nlink),
                reserved: [0; 16],
            };
            self.put(inode.as_bytes())
        }
    }

    fn write_xattrs(&mut self, stored: &Stored<'_>) -> Result<(), WriteError> {
        if stored.xattr_size == 0 {
            return Ok(());
        }
        let Image { attrs, map, out, .. } = self;
        let (mut filter, mut ids, mut own) = (u32::MAX, Vec::new(), Vec::new());
        attrs.each(stored.attrs, |attr, shared| {
            filter &= !(1 << attrs.filter_bit(attr));
            match shared {
                // An id counts words from the start of the block in which the table begins.
                Some(offset) => ids.push(low32(map.inodes_end % BLOCK_SIZE / 4) + offset),
                None => own.push(attr),
            }
        });
        let header = XattrHeader {
            name_filter: U32::new(filter),
            // At most 128 (`XATTR_SHARED_MAX`).
            shared_count: u8::try_from(stored.shared_xattrs).unwrap_or(u8::MAX),
            reserved: [0; 7],
        };
        out.put(header.as_bytes()).map_err(WriteError::Sink)?;
        for id in ids {
            out.put(&id.to_le_bytes()).map_err(WriteError::Sink)?;
        }
        for attr in own {
            self.write_xattr(attr)?;
        }
        Ok(())
    }

    fn write_xattr(&mut self, attr: Attr) -> Result<(), WriteError> {
        let out = &mut self.out;
        let attrs = self.attrs;
        attrs
            .with(attr, |name, value| {
                let (name_index, rest) = attrs.split_name(attr, name);
                // Both lengths are bounded by the tree: see `XattrTable`.
                let entry = XattrEntry {
                    name_len: u8::try_from(rest.len()).unwrap_or(u8::MAX),
                    name_index,
                    value_size: U16::new(u16::try_from(value.len()).unwrap_or(u16::MAX)),
                };
                out.put(entry.as_bytes())?;
                out.put(rest)?;
                out.put(value)?;
                out.pad_to(out.pos.next_multiple_of(4))
            })
            .map_err(WriteError::Sink)
    }

    fn write_tail(&mut self, stored: &Stored<'_>, node: Node) -> Result<(), WriteError> {
        match (&stored.body, node) {
            (Body::Dir(names), Node::Inode(dir)) => {
                let whole = stored.blocks as usize;
                self.write_dir(dir, names, whole, DirPart::Tail)
            }
            _ if stored.tail == 0 => Ok(()),
            (Body::Symlink(bytes) | Body::Inline(bytes), _) => {
                self.put(&bytes[bytes.len() - stored.tail as usize..])
            }
            (Body::Chunks { count, .. }, _) => {
                self.put(&NULL_ADDR.to_le_bytes().repeat(*count as usize))
            }
            (Body::Extents { size, extents, .. }, _) => {
                self.pad_to(self.out.pos.next_multiple_of(TABLE_ALIGN))?;
                let mut chunks = data::chunks(*size, extents, self.map.blocks);
                chunks.try_for_each(|chunk| self.put(chunk.as_bytes()))
            }
            (Body::Lz4 { start, pclusters, .. }, _) => {
                self.pad_to(self.out.pos.next_multiple_of(TABLE_ALIGN))?;
                self.put(ClusterHeader::new_zeroed().as_bytes())?;
                // `Checked` has bounded the address, and `first_blocks` the last address of all.
                let first = self.map.first_blocks[usize::from(start.device)] + start.block;
                data::clusters(pclusters, first, |cluster| self.put(cluster.as_bytes()))
            }
            _ => Ok(()),
        }
    }

    fn write_shared_xattrs(&mut self) -> Result<(), WriteError> {
        let attrs = self.attrs;
        for &attr in attrs.shared() {
            self.write_xattr(attr)?;
        }
        self.pad_to(self.map.data_start)
    }

    fn write_data(&mut self) -> Result<(), WriteError> {
        let mut end = inodes_start(self.plan);
        for at in self.plan.nodes() {
            let mut stored = Stored::new(self.plan, self.attrs, &at);
            let pos = stored.position(end);
            end = pos + stored.len();
            if stored.blocks == 0 {
                continue;
            }
            let data_end = self.out.pos + u64::from(stored.blocks) * BLOCK_SIZE;
            match (&stored.body, at.node) {
                (Body::Dir(names), Node::Inode(dir)) => {
                    self.write_dir(dir, names, stored.blocks as usize, DirPart::Blocks)?;
                }
                (Body::Symlink(bytes) | Body::Inline(bytes), _) => {
                    self.put(&bytes[..bytes.len() - stored.tail as usize])?;
                }
                (Body::Chunks { .. }, _) => self.put(&[0xff; BLOCK])?,
                _ => {}
            }
            self.pad_to(data_end)?;
        }
        Ok(())
    }

    /// Writes the whole blocks of a directory, or what remains of its names.
    fn write_dir(
        &mut self,
        dir: InodeId,
        names: &DirNames<'_>,
        whole_blocks: usize,
        part: DirPart,
    ) -> Result<(), WriteError> {
        let (mut first, mut block) = (0, 0);
        while first < names.len() {
            let (mut end, mut used) = (first, 0);
            while end < names.len() {
                let len = 12 + names.get(end).0.len() as u64;
                if used + len > BLOCK_SIZE {
                    break;
                }
                used += len;
                end += 1;
            }
            let is_block = block < whole_blocks;
            if is_block == (part == DirPart::Blocks) {
                self.write_names(dir, names, first..end)?;
                if is_block {
                    self.pad_to(self.out.pos.next_multiple_of(BLOCK_SIZE))?;
                }
            }
            block += 1;
            first = end;
        }
        Ok(())
    }

    fn write_names(
        &mut self,
        dir: InodeId,
        names: &DirNames<'_>,
        range: std::ops::Range<usize>,
    ) -> Result<(), WriteError> {
        let tree = self.plan.tree;
        let mut name_offset = 12 * range.len();
        for i in range.clone() {
            let (name, target) = names.get(i);
            let node = match target {
                Target::Itself => Node::Inode(dir),
                Target::Parent => Node::Inode(tree.parent(dir).unwrap_or(dir)),
                Target::Node(node) => node,
            };
            let dirent = Dirent {
                nid: U64::new(self.map.nid(node)),
                // Within a block of 4 KiB.
                name_offset: U16::new(u16::try_from(name_offset).unwrap_or(u16::MAX)),
                file_type: file_type(self.plan, node) as u8,
                reserved: 0,
            };
            self.put(dirent.as_bytes())?;
            name_offset += name.len();
        }
        for i in range {
            self.put(names.get(i).0)?;
        }
        Ok(())
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), WriteError> {
        self.out.put(bytes).map_err(WriteError::Sink)
    }

    fn pad_to(&mut self, pos: u64) -> Result<(), WriteError> {
        self.out.pad_to(pos).map_err(WriteError::Sink)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum DirPart {
    Blocks,
    Tail,
}

/// The `i_u` field, whose meaning depends on the file type.
fn union_of(stored: &Stored<'_>, data_block: u64) -> Result<u32, WriteError> {
    let block = match stored.blocks {
        0 => 0,
        _ => u32::try_from(data_block).map_err(|_| WriteError::TooLarge)?,
    };
    Ok(match stored.body {
        Body::Device(rdev) => rdev,
        // The number of blocks.
        Body::Lz4 { pclusters, .. } => {
            u32::try_from(pclusters.len()).map_err(|_| WriteError::TooLarge)?
        }
        Body::Extents { chunk_bits, .. } => {
            u32::from(CHUNK_INDEXES) | u32::from(chunk_bits - BLOCK_BITS)
        }
        Body::Chunks { chunk_bits, .. } => {
            // A table of chunks too large for the rest of the inode's block goes to a data block,
            // which the format cannot say: libcomposefs writes the chunk format over the lower
            // half of the address, and so do we, for the digest's sake. It takes a file of more
            // than 8 PB less a few GB to get here.
            (block & 0xffff_0000) | u32::from(chunk_bits - BLOCK_BITS)
        }
        _ => block,
    })
}

fn file_type(plan: &Plan<'_>, node: Node) -> FileType {
    let tree = plan.tree;
    match node {
        Node::Ghost(_) => FileType::CharDevice,
        // A whiteout is stored as a regular file.
        Node::Inode(inode) if plan.is_metadata && tree.content(inode).is_whiteout() => {
            FileType::Regular
        }
        Node::Inode(inode) => FileType::of_mode(tree.meta(inode).mode).unwrap_or(FileType::Regular),
    }
}

/// Of a length or number that the tree's own bounds keep below 2^32.
fn small(value: impl TryInto<u32>) -> u32 {
    value.try_into().unwrap_or(u32::MAX)
}

fn low16(value: u32) -> u16 {
    u16::try_from(value & 0xffff).unwrap_or(u16::MAX)
}

/// The low 32 bits, which is what mkcomposefs keeps.
pub(crate) fn low32(value: u64) -> u32 {
    u32::try_from(value & 0xffff_ffff).unwrap_or(u32::MAX)
}

/// Collects small pieces for the sink and knows the position in the image.
struct Out<W: Write> {
    sink: BufWriter<W>,
    pos: u64,
}

impl<W: Write> Out<W> {
    fn new(sink: W) -> Out<W> {
        Out { sink: BufWriter::with_capacity(64 * 1024, sink), pos: 0 }
    }

    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.sink.write_all(bytes)?;
        self.pos += bytes.len() as u64;
        Ok(())
    }

    fn pad_to(&mut self, pos: u64) -> io::Result<()> {
        const ZEROS: [u8; BLOCK] = [0; BLOCK];
        while self.pos < pos {
            let len = usize::try_from(pos - self.pos).unwrap_or(ZEROS.len()).min(ZEROS.len());
            self.put(&ZEROS[..len])?;
        }
        Ok(())
    }

    fn finish(mut self) -> io::Result<u64> {
        self.sink.flush()?;
        Ok(self.pos)
    }
}
