use std::mem::offset_of;

use crc::{CRC_32_ISCSI, Crc};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::{ReadAt, ReadError, fill};
use crate::format::{
    COMPAT_PLAIN_XATTR_PFX, COMPAT_SB_CHKSUM, COMPOSEFS_HEADER_VERSION, COMPOSEFS_MAGIC,
    ComposefsHeader, DeviceSlot, EXT_SLOT_SIZE, INCOMPAT_48BIT, INCOMPAT_CHUNKED_FILE,
    INCOMPAT_COMPR_CFGS, INCOMPAT_DEVICE_TABLE, INCOMPAT_FRAGMENTS, INCOMPAT_METABOX,
    INCOMPAT_XATTR_PREFIXES, INCOMPAT_ZERO_PADDING, INCOMPAT_ZTAILPACKING, SUPER_MAGIC,
    SUPER_OFFSET, SuperBlock,
};

/// Features that we can read: those we know, and those of compressed files only.
const INCOMPAT_KNOWN: u32 = INCOMPAT_ZERO_PADDING
    | INCOMPAT_COMPR_CFGS
    | INCOMPAT_CHUNKED_FILE
    | INCOMPAT_DEVICE_TABLE
    | INCOMPAT_ZTAILPACKING
    | INCOMPAT_FRAGMENTS
    | INCOMPAT_XATTR_PREFIXES
    | INCOMPAT_48BIT;

static CRC_32C: Crc<u32> = Crc::<u32>::new(&CRC_32_ISCSI);

/// Largest block size that EROFS allows is 64 KiB.
const BLOCK_BITS: std::ops::RangeInclusive<u8> = 9..=16;

/// What the superblock says, checked and in plain numbers.
#[derive(Clone, Debug)]
pub struct Super {
    /// Block size in bytes, 512 to 65,536.
    pub block_size: u64,
    /// Logarithm of the block size.
    pub block_bits: u8,
    /// Number of inodes, as the image claims.
    pub inodes: u64,
    /// Number of blocks, as the image claims.
    pub blocks: u64,
    /// Features that a reader must know, as they stand.
    pub feature_incompat: u32,
    /// Time of compact inodes: seconds since 1970.
    pub epoch: i64,
    /// Time of compact inodes: nanoseconds.
    pub fixed_nsec: u32,
    /// Extra devices, in the order of their ids (from 1).
    pub devices: Vec<Device>,
    /// Composefs format version of the image, 0 or 1, if composefs made it.
    pub composefs_version: Option<u32>,
    pub(super) root_nid: u64,
    pub(super) inodes_start: u64,
    pub(super) xattrs_start: u64,
    pub(super) xattr_prefix_start: u64,
    pub(super) xattr_prefix_count: u8,
    /// The inode in which the long xattr prefixes lie, if not in the image itself.
    pub(super) xattr_prefix_nid: Option<u64>,
}

/// An extra device of an image.
#[derive(Clone, Debug)]
pub struct Device {
    /// Its name, such as a digest, with trailing zeros.
    pub tag: [u8; 64],
    /// Its size in blocks of the image.
    pub blocks: u64,
    /// Its first block in the address space of the whole image; 0 if it has no place there.
    pub first_block: u64,
}

impl Super {
    pub(super) fn has(&self, feature_incompat: u32) -> bool {
        self.feature_incompat & feature_incompat != 0
    }
}

pub(super) fn read(source: &impl ReadAt) -> Result<Super, ReadError> {
    let mut raw = SuperBlock::new_zeroed();
    if source.size() < SUPER_OFFSET + raw.as_bytes().len() as u64 {
        return Err(ReadError::NotErofs);
    }
    fill(source, SUPER_OFFSET, raw.as_mut_bytes())?;
    if raw.magic.get() != SUPER_MAGIC {
        return Err(ReadError::NotErofs);
    }
    let at = |field: usize| SUPER_OFFSET + field as u64;
    check_features(raw.feature_incompat.get(), at(offset_of!(SuperBlock, feature_incompat)))?;
    let block_bits = raw.blkszbits;
    if !BLOCK_BITS.contains(&block_bits) {
        let offset = at(offset_of!(SuperBlock, blkszbits));
        return Err(ReadError::corrupt(offset, "the block size is not 512 to 65536 bytes"));
    }
    let block_size = 1_u64 << block_bits;
    if raw.dirblkbits != 0 {
        let offset = at(offset_of!(SuperBlock, dirblkbits));
        return Err(ReadError::unsupported("a directory block size of its own", offset));
    }
    let sb_size = 128 + u64::from(raw.sb_extslots) * EXT_SLOT_SIZE;
    if SUPER_OFFSET + sb_size > source.size() {
        let offset = at(offset_of!(SuperBlock, sb_extslots));
        return Err(ReadError::corrupt(offset, "the superblock is larger than the image"));
    }
    let compat = raw.feature_compat.get();
    if compat & COMPAT_SB_CHKSUM != 0 {
        check_sum(source, block_size, raw.checksum.get())?;
    }

    let incompat = raw.feature_incompat.get();
    let wide = incompat & INCOMPAT_48BIT != 0;
    let (root_nid, blocks_hi) = match raw.root_nid_8b.get() {
        root if wide && root != 0 => (root, raw.root_nid.get()),
        _ => (u64::from(raw.root_nid.get()), 0),
    };
    let byte_of = |block: u32| u64::from(block) << block_bits;
    let packed = raw.packed_nid.get();
    let prefixes_packed = packed != 0 && compat & COMPAT_PLAIN_XATTR_PFX == 0;
    Ok(Super {
        block_size,
        block_bits,
        inodes: raw.inos.get(),
        blocks: u64::from(blocks_hi) << 32 | u64::from(raw.blocks.get()),
        feature_incompat: incompat,
        epoch: raw.epoch.get().cast_signed(),
        fixed_nsec: raw.fixed_nsec.get(),
        devices: read_devices(source, &raw, wide)?,
        composefs_version: read_composefs(source)?,
        root_nid,
        inodes_start: byte_of(raw.meta_blkaddr.get()),
        xattrs_start: byte_of(raw.xattr_blkaddr.get()),
        xattr_prefix_start: u64::from(raw.xattr_prefix_start.get()) * 4,
        xattr_prefix_count: raw.xattr_prefix_count,
        xattr_prefix_nid: prefixes_packed.then_some(packed),
    })
}

fn check_features(incompat: u32, offset: u64) -> Result<(), ReadError> {
    if incompat & INCOMPAT_METABOX != 0 {
        return Err(ReadError::unsupported("the feature metabox", offset));
    }
    match incompat & !INCOMPAT_KNOWN {
        0 => Ok(()),
        unknown => {
            let name = format!("the unknown incompatible feature {unknown:#x}");
            Err(ReadError::unsupported(name, offset))
        }
    }
}

/// The checksum covers the superblock's block from the superblock on, or, where blocks are not
/// larger than its offset, one block; the checksum itself counts as zero.
fn check_sum(source: &impl ReadAt, block_size: u64, expected: u32) -> Result<(), ReadError> {
    let len = if block_size > SUPER_OFFSET { block_size - SUPER_OFFSET } else { block_size };
    let mut bytes = vec![0; usize::try_from(len).unwrap_or(0)];
    fill(source, SUPER_OFFSET, &mut bytes)?;
    let at = offset_of!(SuperBlock, checksum);
    bytes[at..at + 4].fill(0);
    // EROFS leaves out the final inversion.
    if !CRC_32C.checksum(&bytes) == expected {
        Ok(())
    } else {
        Err(ReadError::corrupt(SUPER_OFFSET + at as u64, "the superblock's checksum is wrong"))
    }
}

fn read_devices(
    source: &impl ReadAt,
    raw: &SuperBlock,
    wide: bool,
) -> Result<Vec<Device>, ReadError> {
    if raw.feature_incompat.get() & INCOMPAT_DEVICE_TABLE == 0 {
        return Ok(Vec::new());
    }
    let count = u64::from(raw.extra_devices.get());
    let slot = size_of::<DeviceSlot>() as u64;
    let start = u64::from(raw.devt_slotoff.get()) * slot;
    if start + count * slot > source.size() {
        return Err(ReadError::corrupt(start, "the device table lies beyond the end of the image"));
    }
    let high = |bits: u16| if wide { u64::from(bits) << 32 } else { 0 };
    (0..count)
        .map(|i| {
            let mut device = DeviceSlot::new_zeroed();
            fill(source, start + i * slot, device.as_mut_bytes())?;
            Ok(Device {
                tag: device.tag,
                blocks: high(device.blocks_hi.get()) | u64::from(device.blocks.get()),
                first_block: high(device.uniaddr_hi.get()) | u64::from(device.uniaddr.get()),
            })
        })
        .collect()
}

fn read_composefs(source: &impl ReadAt) -> Result<Option<u32>, ReadError> {
    let mut bytes = [0; size_of::<ComposefsHeader>()];
    fill(source, 0, &mut bytes)?;
    let Ok(header) = ComposefsHeader::read_from_bytes(&bytes) else { return Ok(None) };
    if header.magic.get() != COMPOSEFS_MAGIC {
        return Ok(None);
    }
    if header.version.get() != COMPOSEFS_HEADER_VERSION {
        let name = format!("composefs header version {}", header.version);
        return Err(ReadError::unsupported(name, 4));
    }
    Ok(Some(header.composefs_version.get()))
}
