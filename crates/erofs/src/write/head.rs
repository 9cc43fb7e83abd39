//! The head of an image: headers, and the tables that they point to.

use std::io::Write;

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromZeros, IntoBytes};

use super::data::Checked;
use super::plan::{Node, Plan};
use super::{Image, WriteError, low16, low32};
use crate::format::{
    BLOCK_BITS, BLOCK_SIZE, COMPAT_ISHARE_XATTRS, COMPAT_MTIME, COMPAT_XATTR_FILTER,
    COMPOSEFS_HAS_ACL, COMPOSEFS_HEADER_VERSION, COMPOSEFS_MAGIC, ComposefsHeader, DeviceSlot,
    FINGERPRINT, INCOMPAT_CHUNKED_FILE, INCOMPAT_DEVICE_TABLE, INCOMPAT_XATTR_PREFIXES,
    INCOMPAT_ZERO_PADDING, SUPER_MAGIC, SUPER_OFFSET, SuperBlock, split_xattr_name,
};

/// Where the superblock ends: the first inode may begin there, or the table of devices.
const SUPER_END: u64 = SUPER_OFFSET + size_of::<SuperBlock>() as u64;

/// The only long prefix of xattr names, [`FINGERPRINT`], as it is stored: its length, the number of
/// the short prefix that it begins with (`trusted.`), and the rest. Nothing without fingerprints.
fn fingerprint_prefix(data: &Checked<'_>) -> Vec<u8> {
    if !data.data.fingerprints {
        return Vec::new();
    }
    let (index, rest) = split_xattr_name(FINGERPRINT);
    let len = u16::try_from(1 + rest.len()).unwrap_or(u16::MAX);
    let mut bytes = len.to_le_bytes().to_vec();
    bytes.push(index);
    bytes.extend_from_slice(rest);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

/// Where the long prefixes of an image with devices begin.
fn prefixes_start(data: &Checked<'_>) -> u64 {
    SUPER_END + (data.data.devices.len() * size_of::<DeviceSlot>()) as u64
}

pub(super) fn inodes_start(plan: &Plan<'_>) -> u64 {
    match plan.data {
        None => SUPER_END,
        Some(data) => prefixes_start(data) + fingerprint_prefix(data).len() as u64,
    }
}

impl<W: Write> Image<'_, W> {
    pub(super) fn write_head(&mut self, version: u32) -> Result<(), WriteError> {
        match self.plan.data {
            None => self.write_composefs_head(version),
            Some(data) => self.write_data_head(data),
        }
    }

    fn write_composefs_head(&mut self, version: u32) -> Result<(), WriteError> {
        let flags = if self.attrs.has_acl { COMPOSEFS_HAS_ACL } else { 0 };
        let header = ComposefsHeader {
            magic: U32::new(COMPOSEFS_MAGIC),
            version: U32::new(COMPOSEFS_HEADER_VERSION),
            flags: U32::new(flags),
            composefs_version: U32::new(version),
            unused: [U32::new(0); 4],
        };
        self.put(header.as_bytes())?;
        self.pad_to(SUPER_OFFSET)?;
        let superblock = self.superblock()?;
        self.put(superblock.as_bytes())
    }

    fn write_data_head(&mut self, data: &Checked<'_>) -> Result<(), WriteError> {
        self.pad_to(SUPER_OFFSET)?;
        let (mut incompat, mut compat) =
            (INCOMPAT_CHUNKED_FILE, COMPAT_MTIME | COMPAT_XATTR_FILTER);
        if data.data.fingerprints {
            incompat |= INCOMPAT_XATTR_PREFIXES;
            compat |= COMPAT_ISHARE_XATTRS;
        }
        if !data.data.devices.is_empty() {
            incompat |= INCOMPAT_DEVICE_TABLE;
        }
        if data.lz4 {
            incompat |= INCOMPAT_ZERO_PADDING;
        }
        let too_many = |_| WriteError::TooLarge;
        let superblock = SuperBlock {
            feature_compat: U32::new(compat),
            feature_incompat: U32::new(incompat),
            extra_devices: U16::new(u16::try_from(data.data.devices.len()).map_err(too_many)?),
            devt_slotoff: U16::new(low16(low32(SUPER_END / size_of::<DeviceSlot>() as u64))),
            xattr_prefix_count: u8::from(data.data.fingerprints),
            xattr_prefix_start: U32::new(if data.data.fingerprints {
                low32(prefixes_start(data) / 4)
            } else {
                0
            }),
            ..self.superblock()?
        };
        self.put(superblock.as_bytes())?;
        for (device, first_block) in data.data.devices.iter().zip(&self.map.first_blocks[1..]) {
            let slot = DeviceSlot {
                tag: device.tag,
                blocks: U32::new(device.blocks),
                uniaddr: U32::new(*first_block),
                ..DeviceSlot::new_zeroed()
            };
            self.put(slot.as_bytes())?;
        }
        self.put(&fingerprint_prefix(data))
    }

    /// What all images have.
    fn superblock(&self) -> Result<SuperBlock, WriteError> {
        let (seconds, nanos) = self.plan.min_time;
        let root = self.map.nid(Node::Inode(self.plan.tree.root()));
        let xattr_block = self.map.inodes_end / BLOCK_SIZE;
        Ok(SuperBlock {
            magic: U32::new(SUPER_MAGIC),
            feature_compat: U32::new(COMPAT_MTIME | COMPAT_XATTR_FILTER),
            blkszbits: BLOCK_BITS,
            root_nid: U16::new(u16::try_from(root).map_err(|_| WriteError::TooLarge)?),
            inos: U64::new(self.plan.inode_count),
            epoch: U64::new(seconds.cast_unsigned()),
            fixed_nsec: U32::new(nanos),
            blocks: U32::new(self.map.all_blocks),
            xattr_blkaddr: U32::new(u32::try_from(xattr_block).map_err(|_| WriteError::TooLarge)?),
            ..SuperBlock::new_zeroed()
        })
    }
}
