//! File data in an image that is mounted by itself.
//!
//! File data lies in blocks behind the metadata, or on extra devices: files of whole blocks, such
//! as segments. Each blob is stored once. An uncompressed file has a table of chunks, all of the
//! largest size with which no chunk spans two extents: a file with one extent has one entry. A
//! compressed file has an entry for each 4 KiB of its content.
//!
//! ```text
//! | metadata | blocks behind it |    | device 1 |    | device 2 |    number 0 is the image itself
//! ```
//!
//! The blocks of the image and then those of the devices, in order, also form one address space.
//! Compressed files use it, because their entries name no device (`z_erofs_map_blocks_iter`). The
//! kernel finds the device. fsck.erofs 1.9 does not: it reads from the image itself
//! (`erofs_map_dev` finds the device, and the result is not used). So uncompressed files name
//! device and block, even where one extent would need no table. Tests check an image with
//! compressed files on devices as one file: the devices appended to the image, and no device table.

use std::collections::HashMap;

use zerocopy::little_endian::{U16, U32};

use super::WriteError;
use super::lz4::Pcluster;
use crate::format::{
    BLOCK_BITS, BLOCK_SIZE, CHUNK_BLKBITS_MASK, CLUSTER_HEAD, CLUSTER_PLAIN, ChunkIndex,
    ClusterIndex, NULL_ADDR,
};
use crate::tree::{Content, InodeId, Tree};

/// A file or block device with file data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// Its name in the device table, such as a digest in hexadecimal digits, padded with zeros.
    pub tag: [u8; 64],
    /// Its size in blocks of 4 KiB.
    pub blocks: u32,
}

/// Contiguous blocks of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// The address of the first one; `None` for a hole.
    pub at: Option<BlockAddr>,
    /// Number of blocks, at least one.
    pub blocks: u32,
}

/// The address of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockAddr {
    /// The device, from 1; 0 for the blocks behind the image.
    pub device: u16,
    /// The block, from 0.
    pub block: u32,
}

/// The data of a blob.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BlobData {
    /// Uncompressed: its extents in order, the last block padded with zeros. Contiguous extents
    /// should be merged, since each boundary between two can make the table larger.
    Extents(Vec<Extent>),
    /// Compressed by [`lz4::compress`](super::lz4::compress).
    Lz4 {
        /// The address of the first pcluster.
        start: BlockAddr,
        /// All pclusters, one block each, in order.
        pclusters: Vec<Pcluster>,
    },
}

/// The content of a file, stored once for all files that have it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blob {
    /// Its SHA-256, by which the kernel shares page cache. Without one its fs-verity digest counts.
    pub sha256: Option<[u8; 32]>,
    /// How it is stored, and where.
    pub data: BlobData,
}

/// Blobs by fs-verity digest.
pub type Blobs = HashMap<[u8; 32], Blob>;

/// The devices of an image and the blobs on them.
#[derive(Clone, Copy)]
pub struct Data<'a> {
    /// The devices, in the order of a mount's `device=` options.
    pub devices: &'a [Device],
    /// Number of blocks that the caller appends to the image.
    pub own_blocks: u32,
    /// The blobs on all devices and behind the image.
    pub blobs: &'a Blobs,
    /// Each file has a fingerprint, for mounts with `inode_share`. Kernels before Linux 6.4 refuse
    /// such images, since the fingerprint's name is a long prefix.
    pub fingerprints: bool,
}

/// [`Data`] that was checked to hold all files of a tree.
pub(super) struct Checked<'a> {
    pub(super) data: Data<'a>,
    pub(super) lz4: bool,
}

impl<'a> Checked<'a> {
    /// Checks that each file has a blob of its size, and each blob valid addresses.
    pub(super) fn new(data: &Data<'a>, tree: &Tree) -> Result<Checked<'a>, WriteError> {
        let mut lz4 = false;
        for visit in tree.walk() {
            let content = tree.content(visit.inode);
            let Content::External { size, .. } = content else { continue };
            let found = content.digest().and_then(|digest| data.blobs.get(digest));
            let entries = match found.map(|found| &found.data) {
                Some(BlobData::Extents(extents)) if data.has_extents(extents, size) => {
                    Some(size.div_ceil(1 << table_bits(size, extents)))
                }
                Some(BlobData::Lz4 { start, pclusters })
                    if data.has_pclusters(*start, pclusters, size) =>
                {
                    lz4 = true;
                    Some(size.div_ceil(BLOCK_SIZE))
                }
                _ => None,
            };
            match entries {
                None => return Err(WriteError::NoContent { path: tree.path(visit.entry).into() }),
                Some(entries) if entries > u64::from(u32::MAX / 16) => {
                    return Err(WriteError::TooLarge);
                }
                Some(_) => {}
            }
        }
        Ok(Checked { data: *data, lz4 })
    }

    /// The blob of a file; `None` for a file with inline content.
    pub(super) fn of(&self, tree: &Tree, inode: InodeId) -> Option<&'a Blob> {
        let external = tree.external(inode)?;
        let digest = external.object.or(external.digest)?;
        self.data.blobs.get(tree.digest(digest))
    }
}

impl Data<'_> {
    fn blocks_of(&self, device: u16) -> u64 {
        match usize::from(device).checked_sub(1) {
            None => u64::from(self.own_blocks),
            Some(index) => self.devices.get(index).map_or(0, |device| u64::from(device.blocks)),
        }
    }

    fn has_extents(&self, extents: &[Extent], size: u64) -> bool {
        let there = |extent: &Extent| {
            let end = |addr: BlockAddr| u64::from(addr.block) + u64::from(extent.blocks);
            extent.blocks > 0
                && extent.at.is_none_or(|addr| end(addr) <= self.blocks_of(addr.device))
        };
        let blocks: u64 = extents.iter().map(|extent| u64::from(extent.blocks)).sum();
        extents.iter().all(there) && blocks == size.div_ceil(BLOCK_SIZE)
    }

    fn has_pclusters(&self, addr: BlockAddr, pclusters: &[Pcluster], size: u64) -> bool {
        let whole = |pcluster: &Pcluster| {
            u64::from(pcluster.len) >= BLOCK_SIZE + u64::from(pcluster.compressed)
        };
        // Only the last pcluster may have less than a block. A compressed one must have more, or
        // two pclusters could end in one page, which EROFS does not allow.
        let Some((last, others)) = pclusters.split_last() else { return false };
        let long = others.iter().all(whole) && last.len > 0 && (whole(last) || !last.compressed);
        let plain_fits = pclusters
            .iter()
            .all(|pcluster| pcluster.compressed || u64::from(pcluster.len) <= BLOCK_SIZE);
        let len: u64 = pclusters.iter().map(|pcluster| u64::from(pcluster.len)).sum();
        let end = u64::from(addr.block) + pclusters.len() as u64;
        long && plain_fits && len == size && end <= self.blocks_of(addr.device)
    }
}

/// Logarithm of the chunk size in bytes: the largest with which no chunk spans two extents.
pub(super) fn table_bits(size: u64, extents: &[Extent]) -> u8 {
    let mut bits = chunk_bits(size);
    let mut end = 0_u64;
    for extent in extents {
        // Chunks must end at each boundary between two extents.
        if end > 0 {
            let zeros = u8::try_from(end.trailing_zeros()).unwrap_or(u8::MAX);
            bits = bits.min(BLOCK_BITS.saturating_add(zeros));
        }
        end += u64::from(extent.blocks);
    }
    bits
}

/// Logarithm of the chunk size: as few chunks as can be, none larger than need be, at least a
/// block, at most what the format can say.
pub(super) fn chunk_bits(size: u64) -> u8 {
    let bits = 64 - (size - 1).leading_zeros();
    let most = u32::from(CHUNK_BLKBITS_MASK) + u32::from(BLOCK_BITS);
    u8::try_from(bits.clamp(u32::from(BLOCK_BITS), most)).unwrap_or(BLOCK_BITS)
}

/// The entries of a file's table. The blocks behind the image begin with number `own_start`.
pub(super) fn chunks(
    size: u64,
    extents: &[Extent],
    own_start: u32,
) -> impl Iterator<Item = ChunkIndex> {
    let chunk = 1_u64 << (table_bits(size, extents) - BLOCK_BITS);
    extents.iter().flat_map(move |extent| {
        (0..u64::from(extent.blocks).div_ceil(chunk)).map(move |i| {
            let (device, block) = match extent.at {
                // `Checked` has bounded every address.
                Some(BlockAddr { device, block }) => {
                    let start = if device == 0 { own_start } else { 0 };
                    (device, start + block + u32::try_from(i * chunk).unwrap_or(u32::MAX))
                }
                None => (0, NULL_ADDR),
            };
            ChunkIndex {
                startblk_hi: U16::new(0),
                device_id: U16::new(device),
                startblk: U32::new(block),
            }
        })
    })
}

/// The entries of a compressed file, one for each 4 KiB of its content: the pcluster that begins in
/// it, or the distances to the previous and the next pcluster. `first` is the block of the first
/// one.
pub(super) fn clusters(
    pclusters: &[Pcluster],
    first: u32,
    mut each: impl FnMut(ClusterIndex) -> Result<(), WriteError>,
) -> Result<(), WriteError> {
    // Where in the current 4 KiB the next pcluster begins.
    let mut offset = 0;
    for (pcluster, block) in pclusters.iter().zip(first..) {
        let kind = if pcluster.compressed { CLUSTER_HEAD } else { CLUSTER_PLAIN };
        let end = offset + pcluster.len;
        let whole = end >> BLOCK_BITS;
        each(ClusterIndex::head(kind, offset, block))?;
        for i in 1..whole {
            each(ClusterIndex::inner(i, whole - i))?;
        }
        // A last pcluster that ends in the 4 KiB in which it begins needs no further entry.
        offset = if whole == 0 { 0 } else { end & ((1 << BLOCK_BITS) - 1) };
    }
    if offset > 0 {
        // Where the last pcluster ends.
        each(ClusterIndex::head(CLUSTER_PLAIN, offset, 0))?;
    }
    Ok(())
}

/// The first block of each device in the address space that spans all: of the blocks behind the
/// image, which begin at `own_start`, and then of the devices in order.
pub(super) fn first_blocks(own_start: u32, data: &Data<'_>) -> Result<Vec<u32>, WriteError> {
    let mut end = own_start;
    let mut firsts = Vec::with_capacity(1 + data.devices.len());
    let devices = data.devices.iter().map(|device| device.blocks);
    for blocks in [data.own_blocks].into_iter().chain(devices) {
        firsts.push(end);
        end = end.checked_add(blocks).ok_or(WriteError::TooLarge)?;
    }
    Ok(firsts)
}
