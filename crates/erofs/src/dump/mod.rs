//! composefs dump text: a tree with one line per name, as `mkcomposefs --from-file` reads it and
//! `composefs-info dump` prints it (composefs-dump(5)).
//!
//! ```text
//! PATH SIZE [@]MODE NLINK UID GID RDEV MTIME.NSEC PAYLOAD CONTENT DIGEST [XATTR=VALUE]…
//! ```
//!
//! Fields are apart by one space. `\\ \n \r \t \xHH` escape; `-` stands for an absent PAYLOAD,
//! CONTENT or DIGEST. A directory's line precedes what is in it. A MODE with `@` makes the line a
//! hard link: PAYLOAD is the path it leads to, which may come later, and all other fields are
//! ignored. For directories SIZE and NLINK are ignored too.

mod error;
mod parse;
mod records;
mod write;

pub use error::{DumpError, Problem};
pub use parse::{parse, parse_with};
pub use records::{Record, Records, What};
pub use write::write;
