//! Files of images, whose pages may take the place of a guest's.

use std::os::fd::AsFd;

use rustix::fs::{AtFlags, StatxAttributes, StatxFlags, fstatfs, statx};

/// Filesystems on which the kernel alone keeps the flags and enforces them: ext4, btrfs, XFS, F2FS
/// (`linux/magic.h`). On these the store protects its files.
///
/// A FUSE server says that a file is immutable, and changes it. So may the server of a network
/// filesystem, or another of its clients. An overlay passes on what the filesystem below it says.
const ENFORCING: [u32; 4] = [0xef53, 0x9123_683e, 0x5846_5342, 0xf2f5_2010];

/// Whether nobody can write to a file on a disk of this machine, or shorten it: it has fs-verity or
/// is immutable. Root can take the immutable flag away, or write to the disk below the filesystem;
/// then the guest's image would change as well.
pub fn is_immutable(file: impl AsFd) -> bool {
    // The field has the size of a word, the magic number 32 bits.
    let is_enforced = fstatfs(&file).is_ok_and(|it| ENFORCING.contains(&(it.f_type as u32)));
    let never_changes = StatxAttributes::IMMUTABLE | StatxAttributes::VERITY;
    let found = statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::empty());
    is_enforced && found.is_ok_and(|it| it.stx_attributes.intersects(never_changes))
}
