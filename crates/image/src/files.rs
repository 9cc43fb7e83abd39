//! Files that somebody names: keys, signatures, certificates, credentials, settings.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;

use rustix::fs::{Mode, OFlags};

/// Opens a file for reading. A FIFO is refused: an open or a read of it might never return.
pub fn open(path: &Path) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
    match file.metadata()?.file_type().is_fifo() {
        true => Err(io::Error::new(io::ErrorKind::InvalidInput, "it is a FIFO and not a file")),
        false => Ok(file),
    }
}
