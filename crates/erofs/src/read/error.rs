use std::io;

use crate::tree::TreeError;

/// Why an image could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReadError {
    /// There is no EROFS superblock at byte 1024.
    #[error("not an EROFS image")]
    NotErofs,
    /// An EROFS image, but not one of composefs: it has no tree that dump text could describe.
    #[error("not a composefs image")]
    NotComposefs,
    /// Something that this reader does not know.
    #[error("{feature} (at byte {offset}) is not supported")]
    Unsupported {
        /// Its name, in EROFS's words.
        feature: String,
        /// Its offset in bytes from the start of the image.
        offset: u64,
    },
    /// The image contradicts itself or its format.
    #[error("corrupt image at byte {offset}: {what}")]
    Corrupt {
        /// Where, in bytes from the start of the image.
        offset: u64,
        /// What is wrong.
        what: &'static str,
    },
    /// The names of a directory are not in ascending order, or one is there twice. The kernel finds
    /// names by binary search and would miss some.
    #[error(
        "corrupt image: the directory at byte {offset} has the name \"{}\" after \"{}\", names must \
         ascend", name.escape_ascii(), before.escape_ascii()
    )]
    Order {
        /// Where the directory's inode begins, in bytes from the start of the image.
        offset: u64,
        /// The name that is out of order.
        name: Box<[u8]>,
        /// The name before it.
        before: Box<[u8]>,
    },
    /// The image describes something that no tree can hold.
    #[error("corrupt image: the inode at byte {offset}")]
    Tree {
        /// Where the inode begins, in bytes from the start of the image.
        offset: u64,
        /// What is wrong.
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
        /// Where, in bytes from the start of the image or device.
        offset: u64,
        /// The error of the source.
        #[source]
        source: io::Error,
    },
    /// The inode is not of the type that the call needs.
    #[error("inode {nid} is not a {kind}")]
    Kind {
        /// Number of the inode.
        nid: u64,
        /// The type that it should have.
        kind: &'static str,
    },
}

impl ReadError {
    pub(super) fn corrupt(offset: u64, what: &'static str) -> ReadError {
        ReadError::Corrupt { offset, what }
    }

    pub(super) fn unsupported(feature: impl Into<String>, offset: u64) -> ReadError {
        ReadError::Unsupported { feature: feature.into(), offset }
    }
}
