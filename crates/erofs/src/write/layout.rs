//! The size and the offset of each inode.

use super::attrs::{Attrs, NodeAttrs};
use super::data::{BlobData, BlockAddr, Extent, chunk_bits, table_bits};
use super::lz4::Pcluster;
use super::plan::{DirNames, GHOST_MODE, Node, NodeAt, Plan};
use super::small;
use crate::format::{
    BLOCK_SIZE, ChunkIndex, ClusterHeader, ClusterIndex, LAYOUT_CHUNK_BASED,
    LAYOUT_COMPRESSED_FULL, LAYOUT_FLAT_INLINE, LAYOUT_FLAT_PLAIN, SLOT_SIZE,
};
use crate::tree::{Content, InodeId, Meta, S_IFMT, S_IFREG};

const BLOCK: u64 = BLOCK_SIZE;
const CHUNK_INDEX_SIZE: u64 = size_of::<ChunkIndex>() as u64;
/// A table of chunks or clusters begins at a multiple of an entry's size.
pub(super) const TABLE_ALIGN: u64 = 8;

/// What an image stores of one inode, before the inode has an offset.
pub(super) struct Stored<'a> {
    pub(super) meta: Meta,
    /// `st_mode`; a whiteout is stored as a regular file.
    pub(super) mode: u32,
    pub(super) nlink: u32,
    pub(super) body: Body<'a>,
    pub(super) attrs: NodeAttrs,
    pub(super) shared_xattrs: u32,
    /// Size of the xattrs with their header, in bytes.
    pub(super) xattr_size: u64,
    pub(super) compact: bool,
    /// Whole blocks of data outside the inode.
    pub(super) blocks: u32,
    /// Bytes of data right after the inode.
    pub(super) tail: u32,
    dir_size: u64,
}

/// What an inode holds in the image.
pub(super) enum Body<'a> {
    Dir(DirNames<'a>),
    Symlink(&'a [u8]),
    Inline(&'a [u8]),
    /// A stub: its size, and a table of holes of the size that `chunk_bits` says.
    Chunks {
        size: u64,
        chunk_bits: u8,
        count: u32,
    },
    /// Uncompressed file data, in extents.
    Extents {
        size: u64,
        chunk_bits: u8,
        extents: &'a [Extent],
    },
    /// Compressed file data, from this block on.
    Lz4 {
        size: u64,
        start: BlockAddr,
        pclusters: &'a [Pcluster],
    },
    Device(u32),
    Nothing,
}

impl<'a> Stored<'a> {
    pub(super) fn new(plan: &Plan<'a>, attrs: &Attrs<'_>, at: &NodeAt<'a>) -> Stored<'a> {
        let tree = plan.tree;
        let (meta, mode, nlink, body, odd_size) = match at.node {
            Node::Ghost(_) => (tree.meta(tree.root()), GHOST_MODE, 1, Body::Device(0), false),
            Node::Inode(inode) => {
                let meta = tree.meta(inode);
                let body = body(plan, inode, at.names);
                let nlink = match &body {
                    Body::Dir(names) => u32::try_from(names.subdirs() + 2).unwrap_or(u32::MAX),
                    _ => tree.file_nlink(inode),
                };
                let whiteout = plan.is_metadata && tree.content(inode).is_whiteout();
                let mode = if whiteout { S_IFREG | (meta.mode & !S_IFMT) } else { meta.mode };
                (meta, mode, nlink, body, tree.has_odd_size(inode) && !whiteout)
            }
        };
        let node_attrs = attrs.of(plan, at.node);
        let (mut shared_xattrs, mut own) = (0_u32, 0_u64);
        attrs.each(node_attrs, |attr, shared| match shared {
            Some(_) => shared_xattrs += 1,
            None => own += u64::from(attrs.entry_size(attr)),
        });
        let listed = u64::from(shared_xattrs) * 4 + own;
        let (blocks, tail) = body.extent();
        let mut stored = Stored {
            meta,
            mode,
            nlink,
            attrs: node_attrs,
            shared_xattrs,
            xattr_size: if listed == 0 { 0 } else { 12 + listed },
            compact: false,
            blocks,
            tail,
            dir_size: u64::from(blocks) * BLOCK + u64::from(tail),
            body,
        };
        let size = if odd_size { u64::MAX } else { stored.size() };
        stored.compact = (meta.mtime, meta.mtime_nsec) == plan.min_time
            && [nlink, meta.uid, meta.gid].iter().all(|&n| n <= u32::from(u16::MAX))
            && size <= u64::from(u32::MAX);
        if let Body::Extents { .. } | Body::Lz4 { .. } = stored.body {
            let before = stored.inode_size() + stored.xattr_size;
            stored.tail += small(before.next_multiple_of(TABLE_ALIGN) - before);
        }
        stored
    }

    /// `i_size`: for a directory the blocks and the tail that its names take.
    pub(super) fn size(&self) -> u64 {
        match &self.body {
            Body::Dir(_) => self.dir_size,
            Body::Symlink(bytes) | Body::Inline(bytes) => bytes.len() as u64,
            Body::Chunks { size, .. } | Body::Extents { size, .. } | Body::Lz4 { size, .. } => {
                *size
            }
            Body::Device(_) | Body::Nothing => 0,
        }
    }

    pub(super) fn len(&self) -> u64 {
        self.inode_size() + self.xattr_size + u64::from(self.tail)
    }

    /// Data layout of the inode, once it has its offset.
    pub(super) fn layout(&self) -> u16 {
        match self.body {
            Body::Chunks { .. } | Body::Extents { .. } => LAYOUT_CHUNK_BASED,
            Body::Lz4 { .. } => LAYOUT_COMPRESSED_FULL,
            _ if self.tail > 0 => LAYOUT_FLAT_INLINE,
            _ => LAYOUT_FLAT_PLAIN,
        }
    }

    fn inode_size(&self) -> u64 {
        if self.compact { 32 } else { 64 }
    }

    /// The offset of the inode: the first one from `end` on that the format allows. Inline data
    /// moves to a block of its own where it would cross a block's end.
    pub(super) fn position(&mut self, end: u64) -> u64 {
        let pos = end.next_multiple_of(SLOT_SIZE);
        match self.body {
            Body::Symlink(_) => self.place_symlink(pos),
            // A table may cross blocks.
            Body::Extents { .. } | Body::Lz4 { .. } => pos,
            _ => self.place_other(pos),
        }
    }

    /// A symbolic link lies in one block with its target, unless the two are larger than that. (The
    /// offset is chosen as if the target were inline even where it then moves out: libcomposefs
    /// does so, and the digest depends on it.)
    fn place_symlink(&mut self, pos: u64) -> u64 {
        let len = self.len();
        let crosses = pos / BLOCK != (pos + len - 1) / BLOCK;
        if len >= BLOCK {
            self.move_tail_out();
        }
        if crosses { pos.next_multiple_of(BLOCK) } else { pos }
    }

    /// Of anything else only the tail must lie in one block: the inode moves up until it does.
    fn place_other(&mut self, pos: u64) -> u64 {
        let tail = u64::from(self.tail);
        let before_tail = self.inode_size() + self.xattr_size;
        let room = BLOCK - (pos + before_tail) % BLOCK;
        if room >= tail {
            return pos;
        }
        let moved = pos + room.next_multiple_of(SLOT_SIZE);
        if tail <= BLOCK - (moved + before_tail) % BLOCK {
            return moved;
        }
        self.move_tail_out();
        pos.next_multiple_of(BLOCK)
    }

    fn move_tail_out(&mut self) {
        self.blocks += 1;
        self.tail = 0;
        self.dir_size = u64::from(self.blocks) * BLOCK;
    }
}

impl Body<'_> {
    /// Whole blocks, and bytes that follow the inode if they fit.
    fn extent(&self) -> (u32, u32) {
        match self {
            Body::Dir(names) => dir_extent(names),
            Body::Symlink(target) => (0, small(target.len())),
            Body::Inline(bytes) => {
                let (blocks, tail) = (bytes.len() as u64 / BLOCK, bytes.len() as u64 % BLOCK);
                fill_block(small(blocks), tail)
            }
            Body::Chunks { count, .. } => (0, count * 4),
            Body::Extents { size, chunk_bits, .. } => {
                (0, small(size.div_ceil(1 << chunk_bits) * CHUNK_INDEX_SIZE))
            }
            Body::Lz4 { size, .. } => {
                let table = size.div_ceil(BLOCK) * size_of::<ClusterIndex>() as u64;
                (0, small(size_of::<ClusterHeader>() as u64 + table))
            }
            Body::Device(_) | Body::Nothing => (0, 0),
        }
    }
}

fn body<'a>(plan: &Plan<'a>, inode: InodeId, names: &'a [u32]) -> Body<'a> {
    let tree = plan.tree;
    match tree.content(inode) {
        Content::Directory => Body::Dir(DirNames::new(tree, names)),
        Content::Symlink(target) => Body::Symlink(target),
        Content::Inline(bytes) => Body::Inline(bytes),
        Content::External { size, .. } => match plan.data {
            None => {
                let chunk_bits = chunk_bits(size);
                let count = size.div_ceil(1 << chunk_bits);
                // At most 1,024, as the tree bounds sizes by `EXTERNAL_MAX`.
                Body::Chunks { size, chunk_bits, count: small(count) }
            }
            // `Checked` has found all of them.
            Some(data) => match data.of(tree, inode).map(|blob| &blob.data) {
                Some(BlobData::Extents(extents)) => {
                    Body::Extents { size, chunk_bits: table_bits(size, extents), extents }
                }
                Some(BlobData::Lz4 { start, pclusters }) => {
                    Body::Lz4 { size, start: *start, pclusters }
                }
                None => Body::Nothing,
            },
        },
        Content::CharDevice(0) | Content::Fifo | Content::Socket => Body::Nothing,
        Content::CharDevice(rdev) | Content::BlockDevice(rdev) => Body::Device(rdev),
    }
}

/// Blocks and tail of a directory. Names fill block after block in their order; a last part of
/// more than half a block gets a block of its own.
pub(super) fn dir_extent(names: &DirNames<'_>) -> (u32, u32) {
    let (mut blocks, mut used) = (0, 0);
    for i in 0..names.len() {
        let len = 12 + names.get(i).0.len() as u64;
        if used + len > BLOCK {
            blocks += 1;
            used = 0;
        }
        used += len;
    }
    fill_block(blocks, used)
}

fn fill_block(blocks: u32, tail: u64) -> (u32, u32) {
    if tail > BLOCK / 2 { (blocks + 1, 0) } else { (blocks, small(tail)) }
}
