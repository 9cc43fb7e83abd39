//! Where the content of files is, in an image that is mounted by itself.
//!
//! Content lies on devices besides the image: files of whole blocks, such as segments, each content once. In the image
//! a file is a table of places on devices, one for each chunk of the largest size that fits its pieces: one that lies in
//! one piece has one entry.
//!
//! Each device also has a number of blocks in one address space with the image and the others, by which a file in one
//! piece could do without a table. The kernel follows such addresses; fsck.erofs 1.9 reads the image itself there
//! (`erofs_map_dev` of erofs-utils finds the device and forgets it), so none are used.

use zerocopy::little_endian::{U16, U32};

use super::WriteError;
use crate::format::{BLOCK_BITS, BLOCK_SIZE, CHUNK_BLKBITS_MASK, ChunkIndex, NULL_ADDR};
use crate::tree::{Content, InodeId, Payload, Tree};

/// A file or block device with content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// What it is called in the image's table of devices, such as its digest in hexadecimal digits; zeros behind it.
    pub tag: [u8; 64],
    /// Its size in blocks of 4 KiB.
    pub blocks: u32,
}

/// Blocks of a file that lie together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Where they are; nowhere if they are zeros.
    pub place: Option<Place>,
    /// How many they are, at least one.
    pub blocks: u32,
}

/// A block of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The device, from 0.
    pub device: u16,
    /// The block, from 0.
    pub block: u32,
}

/// What is known of one content.
#[derive(Clone, Copy, Debug)]
pub struct Found<'a> {
    /// Names it for the kernel, which lets files with the same name share their page cache: its SHA-256.
    pub fingerprint: [u8; 32],
    /// All of its blocks from the first to the last, which is filled up with zeros. Neighbours that go on where the
    /// other ends should be one, or the table gets larger than it need be.
    pub runs: &'a [Run],
}

/// Knows where contents are.
pub trait Contents {
    /// Where the content of this fs-verity digest is, if it is on a device.
    fn find(&self, digest: &[u8; 32]) -> Option<Found<'_>>;
}

/// The devices, and what is on them.
#[derive(Clone, Copy)]
pub struct Data<'a> {
    /// In the order in which they are given to a mount.
    pub devices: &'a [Device],
    /// What is on them.
    pub contents: &'a dyn Contents,
}

impl<'a> Data<'a> {
    /// Everything that the tree's files need must be there, and as large as the files are.
    pub(super) fn check(&self, tree: &Tree) -> Result<(), WriteError> {
        for visit in tree.walk() {
            let Content::External { size, digest, payload } = tree.content(visit.inode) else {
                continue;
            };
            let digest = match payload {
                Payload::Object(digest) => Some(digest),
                _ => digest,
            };
            let missing = || WriteError::NoContent { path: tree.path(visit.entry).into() };
            let found = digest.and_then(|digest| self.contents.find(digest)).ok_or_else(missing)?;
            let mut blocks = 0;
            for run in found.runs {
                let fits = run.place.is_none_or(|place| {
                    let device = self.devices.get(usize::from(place.device));
                    let end = u64::from(place.block) + u64::from(run.blocks);
                    device.is_some_and(|device| end <= u64::from(device.blocks))
                });
                if !fits || run.blocks == 0 {
                    return Err(missing());
                }
                blocks += u64::from(run.blocks);
            }
            if blocks != size.div_ceil(BLOCK_SIZE) {
                return Err(missing());
            }
            let count = size.div_ceil(1 << table_bits(size, found.runs));
            if count > u64::from(u32::MAX / 16) {
                return Err(WriteError::TooLarge);
            }
        }
        Ok(())
    }

    /// Where the content of a file is; `None` for one that has none outside of the image.
    pub(super) fn of(&self, tree: &Tree, inode: InodeId) -> Option<Found<'a>> {
        let external = tree.external(inode)?;
        let digest = external.object.or(external.digest)?;
        self.contents.find(tree.digest(digest))
    }
}

/// Logarithm of the size of chunks, in bytes: the largest with which no chunk is in two pieces.
pub(super) fn table_bits(size: u64, runs: &[Run]) -> u8 {
    let mut bits = chunk_bits(size);
    let mut end = 0_u64;
    for run in runs {
        // Where one begins another ends; of the first and the last one that does not matter.
        if end > 0 {
            let zeros = u8::try_from(end.trailing_zeros()).unwrap_or(u8::MAX);
            bits = bits.min(BLOCK_BITS.saturating_add(zeros));
        }
        end += u64::from(run.blocks);
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

/// The entries of a file's table.
pub(super) fn chunks(size: u64, runs: &[Run]) -> impl Iterator<Item = ChunkIndex> {
    let chunk = 1_u64 << (table_bits(size, runs) - BLOCK_BITS);
    runs.iter().flat_map(move |run| {
        (0..u64::from(run.blocks).div_ceil(chunk)).map(move |i| match run.place {
            Some(place) => ChunkIndex {
                startblk_hi: U16::new(0),
                // 0 is the image itself. `Data::check` has looked at every place: it is on the device.
                device_id: U16::new(place.device + 1),
                startblk: U32::new(place.block + u32::try_from(i * chunk).unwrap_or(u32::MAX)),
            },
            None => ChunkIndex {
                startblk_hi: U16::new(0),
                device_id: U16::new(0),
                startblk: U32::new(NULL_ADDR),
            },
        })
    })
}

/// The first block of each device in the address space that spans all: they follow the image in their order.
pub(super) fn first_blocks(image_blocks: u32, devices: &[Device]) -> Result<Vec<u32>, WriteError> {
    let mut end = image_blocks;
    let mut firsts = Vec::with_capacity(devices.len());
    for device in devices {
        firsts.push(end);
        end = end.checked_add(device.blocks).ok_or(WriteError::TooLarge)?;
    }
    Ok(firsts)
}
