//! EROFS and composefs on disk. All numbers are little-endian.
//!
//! ```text
//! byte 0     composefs header (composefs images only; otherwise free for a boot sector)
//! byte 1024  superblock: 128 bytes, and 16 more for each extension slot
//!            device table, xattr prefixes: wherever the superblock says
//! meta_blkaddr * block size  +  nid * 32 = an inode:
//!
//!            +-------------------+----------------+---------------------------+
//!            | inode, 32 or 64   | xattrs of      | tail of the data (inline) |
//!            | bytes             | this inode     | or table of chunks        |
//!            +-------------------+----------------+---------------------------+
//!
//! xattr_blkaddr * block size + id * 4 = a shared xattr
//! data blocks: directories, file content, long symbolic links
//!
//! directory block:  dirent 0 | dirent 1 | … | dirent n | name 0 | name 1 | … | name n | zeros
//!                   12 bytes each             ^ dirent 0 .name_offset, which also tells n
//! ```
//!
//! A composefs metadata image is laid out in one fixed way: header, superblock, inodes in
//! breadth-first order, shared xattrs, data blocks in the order of their inodes. It has no
//! superblock checksum, no UUID and no incompatible feature, although its stub files are
//! chunk-based.
//!
//! Sources: `fs/erofs/erofs_fs.h` of Linux and `include/erofs_fs.h` of erofs-utils 1.9 for EROFS;
//! composefs-dump(5) and libcomposefs 1.0.8 for what composefs makes of it.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Where the superblock begins, in bytes.
pub const SUPER_OFFSET: u64 = 1024;
/// `magic` of the superblock.
pub const SUPER_MAGIC: u32 = 0xE0F5_E1E2;
/// Block size of composefs images in bytes, and its logarithm.
pub const BLOCK_SIZE: u64 = 4096;
/// Logarithm of [`BLOCK_SIZE`].
pub const BLOCK_BITS: u8 = 12;
/// Inodes are addressed in units of this many bytes.
pub const SLOT_SIZE: u64 = 32;
/// A superblock extension slot in bytes.
pub const EXT_SLOT_SIZE: u64 = 16;
/// Longest name of a directory entry in bytes.
pub const NAME_LEN: usize = 255;

/// The superblock has a checksum.
pub const COMPAT_SB_CHKSUM: u32 = 0x01;
/// Inodes have modification times rather than change times.
pub const COMPAT_MTIME: u32 = 0x02;
/// Inodes with xattrs have a filter over the names.
pub const COMPAT_XATTR_FILTER: u32 = 0x04;
/// Long xattr prefixes lie in the image itself even where there is a packed or metabox inode.
pub const COMPAT_PLAIN_XATTR_PFX: u32 = 0x10;
/// An xattr names the content for the kernel's page cache sharing.
pub const COMPAT_ISHARE_XATTRS: u32 = 0x20;

/// LZ4 clusters are padded at their start.
pub const INCOMPAT_ZERO_PADDING: u32 = 0x001;
/// Compression configuration follows the superblock; or big physical clusters.
pub const INCOMPAT_COMPR_CFGS: u32 = 0x002;
/// There are chunk-based files.
pub const INCOMPAT_CHUNKED_FILE: u32 = 0x004;
/// There is a device table; or a second compression algorithm.
pub const INCOMPAT_DEVICE_TABLE: u32 = 0x008;
/// Tails of compressed files lie with their inodes.
pub const INCOMPAT_ZTAILPACKING: u32 = 0x010;
/// Tails lie in the packed inode; or deduplicated compressed data.
pub const INCOMPAT_FRAGMENTS: u32 = 0x020;
/// There are long xattr name prefixes.
pub const INCOMPAT_XATTR_PREFIXES: u32 = 0x040;
/// Block addresses have 48 bits.
pub const INCOMPAT_48BIT: u32 = 0x080;
/// Metadata lies in an inode of its own.
pub const INCOMPAT_METABOX: u32 = 0x100;

/// `i_format`: the inode has 64 bytes rather than 32.
pub const FORMAT_EXTENDED: u16 = 0x01;
/// `i_format`: position of the data layout, which has three bits.
pub const FORMAT_LAYOUT_SHIFT: u16 = 1;
/// `i_format`: for directories that the `.` entry is left out, for others that the link count is 1
/// and its field means something else (48-bit images).
pub const FORMAT_NLINK_1: u16 = 0x10;
/// `i_format`: all bits that are known.
pub const FORMAT_ALL: u16 = 0x1f;

/// Data layout: all data in consecutive blocks.
pub const LAYOUT_FLAT_PLAIN: u16 = 0;
/// Data layout: compressed, full indexes.
pub const LAYOUT_COMPRESSED_FULL: u16 = 1;
/// Data layout: whole blocks as in the plain one, the rest right after the inode.
pub const LAYOUT_FLAT_INLINE: u16 = 2;
/// Data layout: compressed, compact indexes.
pub const LAYOUT_COMPRESSED_COMPACT: u16 = 3;
/// Data layout: a table of chunks after the inode.
pub const LAYOUT_CHUNK_BASED: u16 = 4;

/// Chunk format: logarithm of the chunk size in blocks.
pub const CHUNK_BLKBITS_MASK: u16 = 0x1f;
/// Chunk format: 8-byte indexes with a device, instead of 4-byte block addresses.
pub const CHUNK_INDEXES: u16 = 0x20;
/// Chunk format: indexes have 48-bit addresses.
pub const CHUNK_48BIT: u16 = 0x40;
/// A chunk without data, which reads as zeros.
pub const NULL_ADDR: u32 = u32::MAX;

/// Bit of `e_name_index` that says that the rest is the number of a long prefix.
pub const XATTR_LONG_PREFIX: u8 = 0x80;
/// Seed of the hash behind the xattr name filter.
pub const XATTR_FILTER_SEED: u32 = 0x25BB_E08F;
/// Most shared xattrs of one inode that libcomposefs writes.
pub const XATTR_SHARED_MAX: usize = 0x80;

/// Short xattr prefixes by `e_name_index`. Index 0 stands for a complete name.
pub const XATTR_PREFIXES: [&[u8]; 7] = [
    b"",
    b"user.",
    b"system.posix_acl_access",
    b"system.posix_acl_default",
    b"trusted.",
    b"lustre.",
    b"security.",
];

/// `magic` of the composefs header.
pub const COMPOSEFS_MAGIC: u32 = 0xd078_629a;
/// `version` of the composefs header.
pub const COMPOSEFS_HEADER_VERSION: u32 = 1;
/// Composefs header flag: some file has an ACL.
pub const COMPOSEFS_HAS_ACL: u32 = 1;

/// `trusted.overlay.`: attributes that overlayfs takes for its own.
pub const OVERLAY_PREFIX: &[u8] = b"trusted.overlay.";
/// `trusted.overlay.overlay.`: the same, escaped for one overlayfs in between.
pub const OVERLAY_ESCAPED_PREFIX: &[u8] = b"trusted.overlay.overlay.";
/// The digest of a file's object, for overlayfs.
pub const OVERLAY_METACOPY: &[u8] = b"trusted.overlay.metacopy";
/// The path of a file's object, for overlayfs.
pub const OVERLAY_REDIRECT: &[u8] = b"trusted.overlay.redirect";
/// Marks the root: nothing of the data-only layers shows through.
pub const OVERLAY_OPAQUE: &[u8] = b"trusted.overlay.opaque";
/// Marks an empty file that stands for a whiteout of the image.
pub const ESCAPED_WHITEOUT: &[u8] = b"trusted.overlay.overlay.whiteout";
/// Marks the directory of such a file.
pub const ESCAPED_WHITEOUTS: &[u8] = b"trusted.overlay.overlay.whiteouts";
/// Marks the same directory in version 1.
pub const ESCAPED_OPAQUE: &[u8] = b"trusted.overlay.overlay.opaque";
/// As [`ESCAPED_WHITEOUT`], for overlayfs mounted by users.
pub const USER_WHITEOUT: &[u8] = b"user.overlay.whiteout";
/// As [`ESCAPED_WHITEOUTS`], for overlayfs mounted by users.
pub const USER_WHITEOUTS: &[u8] = b"user.overlay.whiteouts";
/// As [`ESCAPED_OPAQUE`], for overlayfs mounted by users.
pub const USER_OPAQUE: &[u8] = b"user.overlay.opaque";

/// The digest of a file's content, for the kernel's page cache sharing (by convention the argument
/// of `mkfs.erofs --xattr-inode-digest`).
pub const FINGERPRINT: &[u8] = b"trusted.erofs.fingerprint";
/// What [`FINGERPRINT`] holds before a SHA-256 digest (`erofs_set_inode_fingerprint`).
pub const FINGERPRINT_SHA256: &[u8; 7] = b"sha256:";
/// What [`FINGERPRINT`] holds in front of an fs-verity digest, where the content has no SHA-256.
pub const FINGERPRINT_VERITY: &[u8; 7] = b"verity:";

/// What [`OVERLAY_METACOPY`] holds in front of a SHA-256 digest: version 0, length 36, no flags,
/// algorithm 1 (`struct ovl_metacopy` of Linux).
pub const METACOPY_HEADER: [u8; 4] = [0, 36, 0, 1];

/// At byte 0 of a composefs image.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ComposefsHeader {
    /// [`COMPOSEFS_MAGIC`].
    pub magic: U32,
    /// [`COMPOSEFS_HEADER_VERSION`].
    pub version: U32,
    /// [`COMPOSEFS_HAS_ACL`].
    pub flags: U32,
    /// Format version of the image: 0 or 1.
    pub composefs_version: U32,
    /// Zero.
    pub unused: [U32; 4],
}

/// At byte 1024. What lies beyond 128 bytes is there only with extension slots.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct SuperBlock {
    /// [`SUPER_MAGIC`].
    pub magic: U32,
    /// CRC-32C of the superblock's block, where [`COMPAT_SB_CHKSUM`] is set.
    pub checksum: U32,
    /// Features that a reader may ignore.
    pub feature_compat: U32,
    /// Logarithm of the block size.
    pub blkszbits: u8,
    /// Number of extension slots.
    pub sb_extslots: u8,
    /// Inode of the root; with [`INCOMPAT_48BIT`] the high bits of `blocks`.
    pub root_nid: U16,
    /// Number of inodes.
    pub inos: U64,
    /// Modification time of compact inodes, seconds.
    pub epoch: U64,
    /// Modification time of compact inodes, nanoseconds.
    pub fixed_nsec: U32,
    /// Number of blocks, for statfs.
    pub blocks: U32,
    /// First block of the inodes.
    pub meta_blkaddr: U32,
    /// First block of the shared xattrs.
    pub xattr_blkaddr: U32,
    /// UUID of the volume.
    pub uuid: [u8; 16],
    /// Name of the volume.
    pub volume_name: [u8; 16],
    /// Features that a reader must know.
    pub feature_incompat: U32,
    /// Compression algorithms in use.
    pub available_compr_algs: U16,
    /// Number of devices besides this one.
    pub extra_devices: U16,
    /// Where the device table begins, in units of 128 bytes.
    pub devt_slotoff: U16,
    /// Logarithm of the directory block size over the block size.
    pub dirblkbits: u8,
    /// Number of long xattr prefixes.
    pub xattr_prefix_count: u8,
    /// Where the long xattr prefixes begin, in units of 4 bytes.
    pub xattr_prefix_start: U32,
    /// The inode that holds packed tails.
    pub packed_nid: U64,
    /// Reserved for the xattr filter.
    pub xattr_filter_reserved: u8,
    /// Number of the prefix that names the fingerprint xattr.
    pub ishare_xattr_prefix_id: u8,
    /// Zero.
    pub reserved: [u8; 2],
    /// Seconds after `epoch` at which the image was made.
    pub build_time: U32,
    /// Inode of the root with [`INCOMPAT_48BIT`].
    pub root_nid_8b: U64,
    /// Zero.
    pub reserved2: U64,
}

/// 32 bytes of an inode with small numbers and the image's common time.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct InodeCompact {
    /// Form and data layout.
    pub format: U16,
    /// 0, or 1 and the size of the xattrs beyond their header in units of 4 bytes.
    pub xattr_icount: U16,
    /// `st_mode`.
    pub mode: U16,
    /// Link count, or high bits of a block address ([`FORMAT_NLINK_1`]).
    pub nlink: U16,
    /// Size in bytes.
    pub size: U32,
    /// Seconds after `epoch` (48-bit images), else zero.
    pub mtime: U32,
    /// First block, device number, or chunk format.
    pub union: U32,
    /// Inode number for 32-bit systems.
    pub ino: U32,
    /// Owner.
    pub uid: U16,
    /// Group.
    pub gid: U16,
    /// Zero.
    pub reserved: U32,
}

/// 64 bytes of an inode that needs them.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct InodeExtended {
    /// Form and data layout.
    pub format: U16,
    /// As in [`InodeCompact`].
    pub xattr_icount: U16,
    /// `st_mode`.
    pub mode: U16,
    /// High bits of a block address in 48-bit images.
    pub startblk_hi: U16,
    /// Size in bytes.
    pub size: U64,
    /// First block, device number, or chunk format.
    pub union: U32,
    /// Inode number for 32-bit systems.
    pub ino: U32,
    /// Owner.
    pub uid: U32,
    /// Group.
    pub gid: U32,
    /// Modification time, seconds.
    pub mtime: U64,
    /// Modification time, nanoseconds.
    pub mtime_nsec: U32,
    /// Link count.
    pub nlink: U32,
    /// Zero.
    pub reserved: [u8; 16],
}

/// In front of an inode's xattrs; then `shared_count` ids of shared ones, then entries.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct XattrHeader {
    /// A cleared bit says that some name may be there which hashes to it.
    pub name_filter: U32,
    /// Number of shared xattrs.
    pub shared_count: u8,
    /// Zero.
    pub reserved: [u8; 7],
}

/// One xattr: followed by the rest of its name, its value, and zeros up to a multiple of 4.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct XattrEntry {
    /// Length of the name behind the prefix.
    pub name_len: u8,
    /// The prefix: index into [`XATTR_PREFIXES`], or a long one.
    pub name_index: u8,
    /// Length of the value.
    pub value_size: U16,
}

/// One name of a directory block.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Dirent {
    /// The inode.
    pub nid: U64,
    /// Where the name begins in this block.
    pub name_offset: U16,
    /// Its type ([`FileType`]).
    pub file_type: u8,
    /// Zero.
    pub reserved: u8,
}

/// One chunk of a file with [`CHUNK_INDEXES`].
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ChunkIndex {
    /// High bits of the block address in 48-bit images.
    pub startblk_hi: U16,
    /// 0 for the image itself, else a device of the table from 1.
    pub device_id: U16,
    /// First block, or [`NULL_ADDR`].
    pub startblk: U32,
}

/// In front of the entries of a compressed file, at a multiple of 8 bytes.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ClusterHeader {
    /// Zero without tails or fragments.
    pub fragment: U32,
    /// Zero without larger blocks.
    pub advise: U16,
    /// Algorithms: 0 is LZ4.
    pub algorithms: u8,
    /// Logarithm of the cluster size in blocks.
    pub cluster_bits: u8,
    /// Zero.
    pub reserved: [u8; 8],
}

/// A compressed pcluster begins here.
pub const CLUSTER_HEAD: u16 = 1;
/// An uncompressed pcluster begins here; or the last pcluster ends here.
pub const CLUSTER_PLAIN: u16 = 0;
/// No pcluster begins here.
const CLUSTER_INNER: u16 = 2;
/// A longer distance is stored as one less than this; the entry there has the rest.
const CLUSTER_DISTANCE_MAX: u32 = 1 << 11;

/// A logical cluster: 4 KiB of the content of a compressed file.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ClusterIndex {
    /// One of [`CLUSTER_HEAD`], [`CLUSTER_PLAIN`] and the inner kind.
    pub kind: U16,
    /// Offset in the cluster at which the pcluster begins, in bytes.
    pub offset: U16,
    /// The block of the pcluster; or the distances to the beginning of this and of the next one.
    pub address: U32,
}

impl ClusterIndex {
    /// A pcluster in `block` begins at `offset`.
    pub fn head(kind: u16, offset: u32, block: u32) -> ClusterIndex {
        let offset = U16::new(u16::try_from(offset).unwrap_or(u16::MAX));
        ClusterIndex { kind: U16::new(kind), offset, address: U32::new(block) }
    }

    /// The pcluster began `before` entries before, and the next begins `after` entries later.
    pub fn inner(before: u32, after: u32) -> ClusterIndex {
        let before = before.min(CLUSTER_DISTANCE_MAX - 1);
        let address = U32::new(before | after.min(u32::from(u16::MAX)) << 16);
        ClusterIndex { kind: U16::new(CLUSTER_INNER), offset: U16::new(0), address }
    }
}

/// One extra device.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct DeviceSlot {
    /// A name, such as a digest.
    pub tag: [u8; 64],
    /// Number of blocks.
    pub blocks: U32,
    /// First block in the address space that spans all devices.
    pub uniaddr: U32,
    /// High bits of `blocks`.
    pub blocks_hi: U16,
    /// High bits of `uniaddr`.
    pub uniaddr_hi: U16,
    /// Zero.
    pub reserved: [u8; 52],
}

const _: () = {
    assert!(size_of::<ComposefsHeader>() == 32);
    assert!(size_of::<SuperBlock>() == 128);
    assert!(size_of::<InodeCompact>() == 32);
    assert!(size_of::<InodeExtended>() == 64);
    assert!(size_of::<XattrHeader>() == 12);
    assert!(size_of::<XattrEntry>() == 4);
    assert!(size_of::<Dirent>() == 12);
    assert!(size_of::<ChunkIndex>() == 8);
    assert!(size_of::<ClusterHeader>() == 16);
    assert!(size_of::<ClusterIndex>() == 8);
    assert!(size_of::<DeviceSlot>() == 128);
};

/// `file_type` of a directory entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[expect(missing_docs, reason = "the names say it")]
pub enum FileType {
    Regular = 1,
    Directory = 2,
    CharDevice = 3,
    BlockDevice = 4,
    Fifo = 5,
    Socket = 6,
    Symlink = 7,
}

impl FileType {
    /// The type that a mode has, if it has one.
    pub fn of_mode(mode: u32) -> Option<FileType> {
        use crate::tree;
        Some(match mode & tree::S_IFMT {
            tree::S_IFREG => FileType::Regular,
            tree::S_IFDIR => FileType::Directory,
            tree::S_IFCHR => FileType::CharDevice,
            tree::S_IFBLK => FileType::BlockDevice,
            tree::S_IFIFO => FileType::Fifo,
            tree::S_IFSOCK => FileType::Socket,
            tree::S_IFLNK => FileType::Symlink,
            _ => return None,
        })
    }
}

/// Splits an xattr name into its `e_name_index` and the rest that is stored.
///
/// As libcomposefs does it: in this order, and the ACL names count as prefixes too.
pub(crate) fn split_xattr_name(name: &[u8]) -> (u8, &[u8]) {
    for index in [1_u8, 2, 3, 4, 6] {
        if let Some(rest) = name.strip_prefix(XATTR_PREFIXES[usize::from(index)]) {
            return (index, rest);
        }
    }
    (0, name)
}
