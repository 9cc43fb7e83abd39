//! Sharing blocks between parts of files (`FICLONERANGE`).
//!
//! Source: `ioctl_ficlonerange(2)` and `include/uapi/linux/fs.h`.

use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd as _};

use rustix::io::Errno;
use rustix::ioctl::{self, Opcode, Setter, opcode};

/// `struct file_clone_range`.
#[repr(C)]
struct CloneRange {
    source: i64,
    source_offset: u64,
    source_length: u64,
    target_offset: u64,
}

const _: () = assert!(size_of::<CloneRange>() == 32);

/// `_IOW(0x94, 13, struct file_clone_range)`.
const FICLONERANGE: Opcode = opcode::write::<CloneRange>(0x94, 13);

/// Makes the bytes of `target` from `offset` on those of a part of `source`, whose blocks both files have from then on.
/// The offset and the ends of the part must be multiples of the filesystem's block size, but for the end of `source`; no byte
/// of `target` may be behind the offset.
/// Errors: `EOPNOTSUPP`, `EXDEV`, `EINVAL` and others where the filesystem cannot: nothing has changed then.
pub fn append(
    target: impl AsFd,
    offset: u64,
    source: impl AsFd,
    part: Range<u64>,
) -> Result<(), Errno> {
    // The kernel would take no bytes for all of them.
    if part.is_empty() {
        return Ok(());
    }
    let source = source.as_fd();
    let argument = CloneRange {
        source: source.as_raw_fd().into(),
        source_offset: part.start,
        source_length: part.end - part.start,
        target_offset: offset,
    };
    // SAFETY: the request number belongs to `struct file_clone_range`, which `CloneRange` mirrors field for field
    // (its size is asserted above); the kernel only reads it. The descriptor in it is borrowed until the call ends.
    unsafe { ioctl::ioctl(target, Setter::<FICLONERANGE, _>::new(argument)) }
}
