//! Files of images, whose pages may take the place of a guest's.

use std::os::fd::{AsFd, AsRawFd as _};

/// Filesystems on which the kernel alone keeps the flags and enforces them: ext4, btrfs, XFS, F2FS
/// (`linux/magic.h`). On these the store protects its files.
///
/// A FUSE server says that a file is immutable, and changes it. So may the server of a network
/// filesystem, or another of its clients. An overlay passes on what the filesystem below it says.
const ENFORCING: [u32; 4] = [0xef53, 0x9123_683e, 0x5846_5342, 0xf2f5_2010];

/// `linux/fs.h`.
const FS_IMMUTABLE_FL: libc::c_long = 0x10;
const FS_VERITY_FL: libc::c_long = 0x0010_0000;

/// Whether nobody can write to a file on a disk of this machine, or shorten it: it has fs-verity or
/// is immutable. Root can take the immutable flag away, or write to the disk below the filesystem;
/// then the guest's image would change as well.
pub fn is_immutable(file: impl AsFd) -> bool {
    let fd = file.as_fd().as_raw_fd();
    // SAFETY: zeros are a value of this struct of integers, which the call fills.
    let mut kind: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: as above.
    let looked = unsafe { libc::fstatfs(fd, &raw mut kind) };
    // The field has the size of a word, the magic number 32 bits.
    if looked != 0 || !ENFORCING.contains(&(kind.f_type as u32)) {
        return false;
    }
    let mut flags: libc::c_long = 0;
    // SAFETY: the request fills an integer, which is long enough for filesystems that fill a long
    // as well.
    let found = unsafe { libc::ioctl(fd, libc::FS_IOC_GETFLAGS as _, &raw mut flags) };
    found == 0 && flags & (FS_IMMUTABLE_FL | FS_VERITY_FL) != 0
}
