use std::io;

use super::parse::XATTRS_MAX;
use super::records::LINE_MAX;
use crate::tree::TreeError;

/// Why dump text could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the message of a variant says what its fields are")]
pub enum DumpError {
    #[error("cannot read the dump")]
    Read(#[source] io::Error),
    #[error("line {line} (at byte {offset}) of the dump")]
    Line {
        /// The line, from 1.
        line: u64,
        offset: u64,
        #[source]
        problem: Problem,
    },
    #[error("no files in the dump")]
    Empty,
}

/// What is wrong with a line of a dump.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the message of a variant says what its fields are")]
pub enum Problem {
    #[error("the line is longer than {LINE_MAX} bytes")]
    LineTooLong,
    #[error("a NUL byte in {0}")]
    Nul(&'static str),
    #[error("an invalid escape in {0}")]
    Escape(&'static str),
    #[error("{0} is no number")]
    Number(&'static str),
    #[error("mode {0:o} has no file type")]
    Mode(u32),
    /// The path is empty or ends in a slash.
    #[error("the path has no name")]
    NoName,
    /// The first line is not the root, or the root is no directory.
    #[error("the first line must be the directory /")]
    NoRoot,
    #[error("a second root")]
    SecondRoot,
    #[error("the directory that should hold it is missing")]
    NoParent,
    /// A hard link without a target path, or whose target does not exist.
    #[error("the target of the hard link does not exist")]
    NoTarget,
    #[error("the hard link leads to itself")]
    LinkLoop,
    #[error("a directory cannot be hard-linked")]
    DirectoryLink,
    #[error("content of {len} bytes, but the size is {size}")]
    ContentSize { len: usize, size: u64 },
    #[error("the digest is not 64 hexadecimal digits")]
    Digest,
    #[error("an extended attribute without =")]
    XattrWithoutValue,
    /// More attributes than mkcomposefs takes: their size in bytes.
    #[error("extended attributes of {0} bytes, a dump may have {XATTRS_MAX}")]
    XattrsTooLong(usize),
    #[error("strict: {0}")]
    Strict(&'static str),
    /// A name, target, size or attribute that no tree can hold.
    #[error(transparent)]
    Tree(#[from] TreeError),
}
