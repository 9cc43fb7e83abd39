use std::fmt;

/// Why a tree could not be changed. The input is at fault; the tree is as before.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the message of a variant says what its fields are")]
pub enum TreeError {
    #[error("not a directory")]
    NotDirectory,
    #[error("the name {} exists already", Shown(name))]
    Exists { name: Box<[u8]> },
    /// A name that is empty, `.`, `..`, or holds `/` or NUL.
    #[error("{} is no file name", Shown(name))]
    Name { name: Box<[u8]> },
    #[error("a file name of {len} bytes is longer than 255")]
    NameTooLong { len: usize },
    /// A path of more than [`super::PATH_MAX`] bytes.
    #[error("a path of {len} bytes is longer than 4095: {}…", Shown(start))]
    PathTooLong {
        /// Its length in bytes, without the slash in front.
        len: usize,
        /// What it begins with: at most 64 bytes.
        start: Box<[u8]>,
    },
    /// A hard link to a directory, or content that would make a file of a directory.
    #[error("{} would be a second name or another content of a directory", Shown(name))]
    LinkToDirectory { name: Box<[u8]> },
    #[error("mode {mode:o} does not fit the content")]
    TypeMismatch { mode: u32 },
    /// A symbolic link target or object path that is empty, too long, or holds a NUL.
    #[error("a target of {len} bytes: it must have 1 to 4095 and no NUL")]
    Target { len: usize },
    /// Inline content beyond [`super::INLINE_MAX`].
    #[error("inline content of {len} bytes is more than 5000")]
    InlineTooBig { len: usize },
    /// An external file beyond [`super::EXTERNAL_MAX`].
    #[error("a file of {size} bytes is more than an image can describe")]
    FileTooBig { size: u64 },
    /// An attribute name that is empty, too long, or holds a NUL.
    #[error("an extended attribute name of {len} bytes: it must have 1 to 255 and no NUL")]
    XattrName { len: usize },
    /// The attributes of one inode together are larger than [`super::XATTRS_MAX`].
    #[error("extended attributes of {space} bytes are more than 65535")]
    XattrSpace { space: usize },
    /// Ids or buffers of the arena are used up (2^31 inodes or names, 4 GiB of names).
    #[error("too many entries for one tree")]
    Full,
}

impl TreeError {
    /// The error for a path that is too long: an absolute one.
    pub(crate) fn path_too_long(path: &[u8]) -> TreeError {
        let start = path[..path.len().min(64)].into();
        TreeError::PathTooLong { len: path.len() - 1, start }
    }
}

/// Bytes shown so that a terminal survives them.
struct Shown<'a>(&'a [u8]);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\"", self.0.escape_ascii())
    }
}
