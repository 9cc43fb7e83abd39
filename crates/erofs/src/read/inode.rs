use super::{Image, ReadAt, ReadError};
use crate::format::{
    CHUNK_48BIT, CHUNK_BLKBITS_MASK, CHUNK_INDEXES, FORMAT_ALL, FORMAT_EXTENDED,
    FORMAT_LAYOUT_SHIFT, FORMAT_NLINK_1, FileType, INCOMPAT_48BIT, InodeCompact, InodeExtended,
    LAYOUT_CHUNK_BASED, LAYOUT_COMPRESSED_COMPACT, LAYOUT_COMPRESSED_FULL, LAYOUT_FLAT_INLINE,
    LAYOUT_FLAT_PLAIN, SLOT_SIZE, XattrHeader,
};
use crate::tree::{S_IFBLK, S_IFCHR, S_IFDIR, S_IFLNK, S_IFMT, S_IFREG};

/// An inode of an image, decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inode {
    /// Its number: equal numbers are one inode.
    pub nid: u64,
    /// File type and permissions.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Link count, as the image claims.
    pub nlink: u32,
    /// Size in bytes, as the image claims; 0 for what has no data.
    pub size: u64,
    /// Modification time, seconds since 1970.
    pub mtime: i64,
    /// Modification time, nanoseconds.
    pub mtime_nsec: u32,
    /// Device number of a device, in the kernel's 32-bit encoding; else 0.
    pub rdev: u32,
    /// Inode number for 32-bit systems.
    pub ino: u32,
    /// Where it begins, in bytes from the start of the image.
    pub offset: u64,
    pub(super) layout: Layout,
    /// Where its xattrs begin, and their size.
    pub(super) xattrs: u64,
    pub(super) xattr_size: u64,
}

/// How the data of an inode is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Layout {
    /// Blocks from this one on; `None` is one hole.
    Plain {
        block: Option<u64>,
    },
    /// Whole blocks likewise, and the rest behind the xattrs.
    Inline {
        block: u64,
    },
    /// A table behind the xattrs.
    Chunks {
        bits: u8,
        indexes: bool,
        wide: bool,
    },
    Compressed,
    /// Devices, pipes, sockets.
    Nothing,
}

impl Inode {
    /// Whether it is a directory.
    pub fn is_dir(&self) -> bool {
        self.mode & S_IFMT == S_IFDIR
    }

    /// Whether it is a regular file.
    pub fn is_file(&self) -> bool {
        self.mode & S_IFMT == S_IFREG
    }

    /// Whether it is a symbolic link.
    pub fn is_symlink(&self) -> bool {
        self.mode & S_IFMT == S_IFLNK
    }

    /// Whether its data is found through a table of chunks, as that of composefs's stub files.
    pub fn is_chunk_based(&self) -> bool {
        matches!(self.layout, Layout::Chunks { .. })
    }

    pub(super) fn is_long(&self) -> bool {
        self.xattrs - self.offset == size_of::<InodeExtended>() as u64
    }

    pub(super) fn tail(&self) -> u64 {
        self.xattrs + self.xattr_size
    }
}

impl<S: ReadAt> Image<S> {
    /// Decodes the inode with the number `nid`.
    ///
    /// # Errors
    /// [`ReadError::Corrupt`] for a number beyond the image or an inode that cannot be;
    /// [`ReadError::Unsupported`] for a form or data layout that is not known;
    /// [`ReadError::Source`].
    pub fn inode(&self, nid: u64) -> Result<Inode, ReadError> {
        let start = self.superblock().inodes_start;
        let offset = nid
            .checked_mul(SLOT_SIZE)
            .and_then(|at| at.checked_add(start))
            .filter(|&at| at < self.size())
            .ok_or(ReadError::corrupt(start, "an inode number leads beyond the image"))?;
        let compact: InodeCompact = self.get(offset)?;
        let format = compact.format.get();
        if format & !FORMAT_ALL != 0 {
            let name = format!("the inode format {format:#x}");
            return Err(ReadError::unsupported(name, offset));
        }
        let raw = if format & FORMAT_EXTENDED != 0 {
            Raw::extended(&self.get(offset)?)
        } else {
            Raw::compact(&compact, self.superblock())
        };
        self.check(nid, offset, format, &raw)
    }

    fn check(&self, nid: u64, offset: u64, format: u16, raw: &Raw) -> Result<Inode, ReadError> {
        let kind = raw.mode & S_IFMT;
        if FileType::of_mode(raw.mode).is_none() {
            return Err(ReadError::corrupt(offset, "the inode has no file type"));
        }
        let has_data = [S_IFREG, S_IFDIR, S_IFLNK].contains(&kind);
        let layout = if has_data {
            layout(format >> FORMAT_LAYOUT_SHIFT & 7, raw, self.superblock().block_bits, offset)?
        } else {
            Layout::Nothing
        };
        let xattr_size = match raw.xattr_icount {
            0 => 0,
            n => size_of::<XattrHeader>() as u64 + 4 * u64::from(n - 1),
        };
        Ok(Inode {
            nid,
            mode: raw.mode,
            uid: raw.uid,
            gid: raw.gid,
            nlink: raw.nlink,
            size: if has_data { raw.size } else { 0 },
            mtime: raw.mtime,
            mtime_nsec: raw.mtime_nsec,
            rdev: if [S_IFCHR, S_IFBLK].contains(&kind) { raw.union } else { 0 },
            ino: raw.ino,
            offset,
            layout,
            xattrs: offset + raw.len,
            xattr_size,
        })
    }
}

/// The two forms of an inode, brought together.
struct Raw {
    len: u64,
    xattr_icount: u16,
    mode: u32,
    uid: u32,
    gid: u32,
    nlink: u32,
    size: u64,
    mtime: i64,
    mtime_nsec: u32,
    union: u32,
    ino: u32,
    startblk_hi: u16,
    /// Bits that a block address has, for telling the address that means a hole.
    address_bits: u32,
}

impl Raw {
    fn extended(raw: &InodeExtended) -> Raw {
        Raw {
            len: size_of::<InodeExtended>() as u64,
            xattr_icount: raw.xattr_icount.get(),
            mode: u32::from(raw.mode.get()),
            uid: raw.uid.get(),
            gid: raw.gid.get(),
            nlink: raw.nlink.get(),
            size: raw.size.get(),
            mtime: raw.mtime.get().cast_signed(),
            mtime_nsec: raw.mtime_nsec.get(),
            union: raw.union.get(),
            ino: raw.ino.get(),
            startblk_hi: raw.startblk_hi.get(),
            address_bits: 48,
        }
    }

    fn compact(raw: &InodeCompact, sb: &super::Super) -> Raw {
        let mode = u32::from(raw.mode.get());
        // In a 48-bit image the field of the link count may hold the upper part of an address.
        let single = raw.format.get() & FORMAT_NLINK_1 != 0
            && mode & S_IFMT != S_IFDIR
            && sb.has(INCOMPAT_48BIT);
        let field = raw.nlink.get();
        Raw {
            len: size_of::<InodeCompact>() as u64,
            xattr_icount: raw.xattr_icount.get(),
            mode,
            uid: u32::from(raw.uid.get()),
            gid: u32::from(raw.gid.get()),
            nlink: if single { 1 } else { u32::from(field) },
            size: u64::from(raw.size.get()),
            // The field is reserved, and zero, outside of 48-bit images.
            mtime: sb.epoch.wrapping_add(i64::from(raw.mtime.get())),
            mtime_nsec: sb.fixed_nsec,
            union: raw.union.get(),
            ino: raw.ino.get(),
            startblk_hi: if single { field } else { 0 },
            address_bits: if single { 48 } else { 32 },
        }
    }

    fn block(&self) -> u64 {
        u64::from(self.startblk_hi) << 32 | u64::from(self.union)
    }
}

fn layout(layout: u16, raw: &Raw, block_bits: u8, offset: u64) -> Result<Layout, ReadError> {
    let block = raw.block();
    Ok(match layout {
        LAYOUT_FLAT_PLAIN => {
            let hole = (1_u64 << raw.address_bits) - 1;
            Layout::Plain { block: Some(block).filter(|&b| b & hole != hole) }
        }
        LAYOUT_FLAT_INLINE => Layout::Inline { block },
        LAYOUT_COMPRESSED_FULL | LAYOUT_COMPRESSED_COMPACT => Layout::Compressed,
        LAYOUT_CHUNK_BASED => {
            let format = u16::try_from(raw.union & 0xffff).unwrap_or(0);
            if format & !(CHUNK_BLKBITS_MASK | CHUNK_INDEXES | CHUNK_48BIT) != 0 {
                let name = format!("the chunk format {format:#x}");
                return Err(ReadError::unsupported(name, offset));
            }
            // At most 31 + 16.
            let bits = u8::try_from(format & CHUNK_BLKBITS_MASK).unwrap_or(0) + block_bits;
            let indexes = format & CHUNK_INDEXES != 0;
            Layout::Chunks { bits, indexes, wide: format & CHUNK_48BIT != 0 }
        }
        other => return Err(ReadError::unsupported(format!("the data layout {other}"), offset)),
    })
}
