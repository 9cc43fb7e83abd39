//! Files that somebody names, keys or settings say, and files of foreign layouts and stores.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

const FLAGS: OFlags =
    OFlags::NONBLOCK.union(OFlags::NOCTTY).union(OFlags::CLOEXEC).union(OFlags::RDONLY);

/// Opens a file for reading. A FIFO is refused: an open or a read of it might never return.
pub fn open(path: &Path) -> io::Result<File> {
    no_fifo(rustix::fs::open(path, FLAGS, Mode::empty())?.into())
}

fn no_fifo(file: File) -> io::Result<File> {
    match file.metadata()?.file_type().is_fifo() {
        true => Err(io::Error::new(io::ErrorKind::InvalidInput, "it is a FIFO and not a file")),
        false => Ok(file),
    }
}

/// Opens a regular file of a foreign layout or store, or a link to one, without changing when it
/// was last read, if that is allowed. Anything else is `InvalidInput`, devices too.
pub(crate) fn open_regular(path: &Path) -> io::Result<File> {
    let refused = || io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file");
    if !std::fs::metadata(path)?.is_file() {
        return Err(refused());
    }
    let file = File::from(match rustix::fs::open(path, FLAGS | OFlags::NOATIME, Mode::empty()) {
        Err(Errno::PERM) => rustix::fs::open(path, FLAGS, Mode::empty())?,
        other => other?,
    });
    // It may have been exchanged since.
    if file.metadata()?.is_file() { Ok(file) } else { Err(refused()) }
}

/// Reads a whole file of at most `max` bytes.
pub fn read(path: &Path, max: u64) -> io::Result<Vec<u8>> {
    read_at_most(open(path)?, max)
}

/// Reads the whole of an open file of at most `max` bytes. A FIFO is refused.
pub(crate) fn read_at_most(file: File, max: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    no_fifo(file)?.take(max + 1).read_to_end(&mut bytes)?;
    match bytes.len() as u64 > max {
        true => {
            Err(io::Error::new(io::ErrorKind::InvalidData, format!("more than {} KiB", max >> 10)))
        }
        false => Ok(bytes),
    }
}
