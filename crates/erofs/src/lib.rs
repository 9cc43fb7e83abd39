//! The EROFS format, composefs metadata images and composefs dump text: bytes in, bytes out, no I/O.

pub mod dump;
pub mod format;
pub mod read;
pub mod tree;
pub mod write;
