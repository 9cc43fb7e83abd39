//! Files that somebody names: keys, signatures, certificates, credentials, settings.

use std::fs::File;
use std::io::{self, Read as _};
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

/// Reads a whole file of at most `max` bytes.
pub fn read(path: &Path, max: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(path)?.take(max + 1).read_to_end(&mut bytes)?;
    match bytes.len() as u64 > max {
        true => {
            Err(io::Error::new(io::ErrorKind::InvalidData, format!("more than {} KiB", max >> 10)))
        }
        false => Ok(bytes),
    }
}
