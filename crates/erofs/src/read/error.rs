use std::io;

use crate::tree::TreeError;

/// Why an image could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the message of a variant says what its fields are")]
pub enum ReadError {
    /// There is no EROFS superblock at byte 1024.
    #[error("not an EROFS image")]
    NotErofs,
    /// An EROFS image, but not one of composefs: it has no tree that dump text could describe.
    #[error("not a composefs image")]
    NotComposefs,
    /// Something that this reader does not know.
    #[error("{feature} (at byte {offset}) is not supported")]
    Unsupported { feature: String, offset: u64 },
    /// The image contradicts itself or its format.
    #[error("corrupt image at byte {offset}: {what}")]
    Corrupt { offset: u64, what: &'static str },
    /// The names of a directory are not in ascending order, or one is there twice. The kernel finds
    /// names by binary search and would miss some.
    #[error(
        "corrupt image: the directory at byte {offset} has the name \"{}\" after \"{}\", names must \
         ascend", name.escape_ascii(), before.escape_ascii()
    )]
    Order { offset: u64, name: Box<[u8]>, before: Box<[u8]> },
    /// The image describes something that no tree can hold.
    #[error("corrupt image: the inode at byte {offset}")]
    Tree {
        offset: u64,
        #[source]
        source: TreeError,
    },
    /// The data lies on an extra device whose source was not added.
    #[error("extra device {index} of the image was not added")]
    NoDevice {
        /// The device, from 0.
        index: usize,
    },
    /// The source of the bytes failed.
    #[error("cannot read the image at byte {offset}")]
    Source {
        offset: u64,
        #[source]
        source: io::Error,
    },
    /// The inode is not of the type that the call needs.
    #[error("inode {nid} is not a {kind}")]
    Kind { nid: u64, kind: &'static str },
}

impl ReadError {
    pub(super) fn corrupt(offset: u64, what: &'static str) -> ReadError {
        ReadError::Corrupt { offset, what }
    }

    pub(super) fn unsupported(feature: impl Into<String>, offset: u64) -> ReadError {
        ReadError::Unsupported { feature: feature.into(), offset }
    }
}
