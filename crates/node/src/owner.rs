//! Who else can change a file or directory.

use rustix::process::geteuid;

/// Whether it belongs to root or to this process's user.
pub(crate) fn is_own(uid: u32) -> bool {
    uid == 0 || uid == geteuid().as_raw()
}

/// Whether its mode lets users besides its owner write to it. An ACL that does shows there as well,
/// in the bits of the group (acl(5)).
pub(crate) fn may_others_write(mode: u32) -> bool {
    mode & 0o022 != 0
}
