use std::io;

use crate::tree::TreeError;

/// Why an image could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the message of a variant says what its fields are")]
pub enum ReadError {
    #[error("not an EROFS image")]
    NotErofs,
    /// An EROFS image, but not one of composefs: it has no tree that dump text could describe.
    #[error("not a composefs image")]
    NotComposefs,
    #[error("{feature} (at byte {offset}) is not supported")]
    Unsupported { feature: String, offset: u64 },
    #[error("corrupt image at byte {offset}: {what}")]
    Corrupt { offset: u64, what: &'static str },
    /// The names of a directory are not in ascending order, or one is there twice. The kernel finds
    /// names by binary search and would miss some.
    #[error(
        "corrupt image: the directory at byte {offset} has the name \"{}\" after \"{}\", names must \
         ascend", name.escape_ascii(), before.escape_ascii()
    )]
    Order { offset: u64, name: Box<[u8]>, before: Box<[u8]> },
    #[error("corrupt image: the inode at byte {offset}")]
    Tree {
        offset: u64,
        #[source]
        source: TreeError,
    },
    #[error("extra device {index} of the image was not added")]
    NoDevice {
        /// The device, from 0.
        index: usize,
    },
    #[error("cannot read the image at byte {offset}")]
    Source {
        offset: u64,
        #[source]
        source: io::Error,
    },
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
