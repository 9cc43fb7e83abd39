//! What inodes are made of, and the bounds on it.

use super::TreeError;

/// Longest file name in bytes (`NAME_MAX`; also what a directory entry of EROFS can hold).
pub const NAME_MAX: usize = 255;
/// Longest path of a name in a tree or image, in bytes, without the slash in front (`PATH_MAX` less
/// the terminating NUL: a longer one can be opened only piece by piece). It also bounds the depth
/// of directories, to 2,048, and the text of a dump.
pub const PATH_MAX: usize = 4095;
/// Longest symbolic link target or object path in bytes (`PATH_MAX` less the terminating NUL).
pub const TARGET_MAX: usize = 4095;
/// Most file content in bytes that a metadata image holds inline (as libcomposefs 1.0).
pub const INLINE_MAX: usize = 5000;
/// Largest external file in bytes: 1,024 chunks of 8 TiB, since the chunk table of a stub inode
/// must fit one block (as libcomposefs 1.0).
pub const EXTERNAL_MAX: u64 = 1024 << 43;

/// Mask of the file type in a mode.
pub const S_IFMT: u32 = 0o170_000;
/// File type of a regular file.
pub const S_IFREG: u32 = 0o100_000;
/// File type of a directory.
pub const S_IFDIR: u32 = 0o040_000;
/// File type of a symbolic link.
pub const S_IFLNK: u32 = 0o120_000;
/// File type of a character device.
pub const S_IFCHR: u32 = 0o020_000;
/// File type of a block device.
pub const S_IFBLK: u32 = 0o060_000;
/// File type of a named pipe.
pub const S_IFIFO: u32 = 0o010_000;
/// File type of a socket.
pub const S_IFSOCK: u32 = 0o140_000;

/// What an inode has besides content and extended attributes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Meta {
    /// Permission bits and file type (`st_mode`). The type may be left zero when an inode is
    /// inserted: its content says what it is.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Modification time, whole seconds since 1970.
    pub mtime: i64,
    /// Modification time, nanoseconds within the second.
    pub mtime_nsec: u32,
}

/// Where the bytes of an external file are found at run time (overlayfs's redirect).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Payload<'a> {
    /// Nowhere: the file has a size only.
    None,
    /// The object of this digest, at `ab/cdef…` under the object directory.
    Object(&'a [u8; 32]),
    /// An explicit path under the object directory; 1 to [`TARGET_MAX`] bytes without NUL.
    Path(&'a [u8]),
}

/// What an inode is, and what it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content<'a> {
    /// A directory; its names are entries of the tree.
    Directory,
    /// A symbolic link with its target: 1 to [`TARGET_MAX`] bytes without NUL.
    Symlink(&'a [u8]),
    /// A regular file with its content (at most [`INLINE_MAX`] bytes) in the image. Empty files
    /// are.
    Inline(&'a [u8]),
    /// A regular file whose content is an object outside the image.
    External {
        /// Size in bytes, 1 to [`EXTERNAL_MAX`]. Zero is taken as `Inline(&[])`.
        size: u64,
        /// fs-verity SHA-256 digest that the kernel is to check, if known.
        digest: Option<&'a [u8; 32]>,
        /// Where the object is.
        payload: Payload<'a>,
    },
    /// A character device with its number as the kernel's `new_encode_dev` gives it (for numbers
    /// in use the same as `st_rdev`). Number 0 is an overlayfs whiteout.
    CharDevice(u32),
    /// A block device with its number, encoded as for a character device.
    BlockDevice(u32),
    /// A named pipe.
    Fifo,
    /// A socket.
    Socket,
}

impl<'a> Content<'a> {
    /// A regular file kept as the object of that digest, which the kernel is to check.
    pub fn object(size: u64, digest: &'a [u8; 32]) -> Content<'a> {
        Content::External { size, digest: Some(digest), payload: Payload::Object(digest) }
    }

    /// The file type bits of a mode that fit this content.
    pub fn type_bits(&self) -> u32 {
        match self {
            Content::Directory => S_IFDIR,
            Content::Symlink(_) => S_IFLNK,
            Content::Inline(_) | Content::External { .. } => S_IFREG,
            Content::CharDevice(_) => S_IFCHR,
            Content::BlockDevice(_) => S_IFBLK,
            Content::Fifo => S_IFIFO,
            Content::Socket => S_IFSOCK,
        }
    }

    /// The digest of an external file's content: that of its object, or else the one to check.
    pub fn digest(&self) -> Option<&'a [u8; 32]> {
        match *self {
            Content::External { payload: Payload::Object(digest), .. } => Some(digest),
            Content::External { digest, .. } => digest,
            _ => None,
        }
    }

    /// Whether this is an overlayfs whiteout: a character device with number 0.
    pub fn is_whiteout(&self) -> bool {
        matches!(self, Content::CharDevice(0))
    }
}

/// `ab/cdef…`: the path of an object under the object directory of a composefs digest store.
pub fn object_path(digest: &[u8; 32]) -> [u8; 65] {
    let mut path = [b'/'; 65];
    // Neither fails: each byte has two digits.
    let _ = const_hex::encode_to_slice(&digest[..1], &mut path[..2]);
    let _ = const_hex::encode_to_slice(&digest[1..], &mut path[3..]);
    path
}

/// The digest whose [`object_path`] this is, if it is one.
pub(super) fn object_of_path(path: &[u8]) -> Option<[u8; 32]> {
    let mut digest = [0; 32];
    let path: &[u8; 65] = path.try_into().ok()?;
    const_hex::decode_to_slice(&path[..2], &mut digest[..1]).ok()?;
    const_hex::decode_to_slice(&path[3..], &mut digest[1..]).ok()?;
    (object_path(&digest) == *path).then_some(digest)
}

pub(super) fn mode_bits(mode: u32, type_bits: u32) -> u16 {
    // Both parts lie within 16 bits.
    u16::try_from((mode & 0o7777) | (type_bits & S_IFMT)).unwrap_or(0)
}

pub(super) fn check_type(mode: u32, content: &Content<'_>) -> Result<(), TreeError> {
    if mode & S_IFMT == 0 || mode & S_IFMT == content.type_bits() {
        Ok(())
    } else {
        Err(TreeError::TypeMismatch { mode })
    }
}

pub(super) fn check_name(name: &[u8]) -> Result<(), TreeError> {
    if name.len() > NAME_MAX {
        return Err(TreeError::NameTooLong { len: name.len() });
    }
    let bad = name.is_empty() || name == b"." || name == b"..";
    if bad || name.iter().any(|&b| b == b'/' || b == 0) {
        return Err(TreeError::Name { name: name.into() });
    }
    Ok(())
}

pub(super) fn check_content(content: &Content<'_>) -> Result<(), TreeError> {
    let target = match *content {
        Content::Symlink([]) => return Err(TreeError::Target { len: 0 }),
        Content::Symlink(target) => target,
        Content::External { size, .. } if size > EXTERNAL_MAX => {
            return Err(TreeError::FileTooBig { size });
        }
        Content::External { payload: Payload::Path(path), .. } => path,
        Content::Inline(bytes) if bytes.len() > INLINE_MAX => {
            return Err(TreeError::InlineTooBig { len: bytes.len() });
        }
        _ => return Ok(()),
    };
    if target.len() > TARGET_MAX || target.contains(&0) {
        return Err(TreeError::Target { len: target.len() });
    }
    Ok(())
}
