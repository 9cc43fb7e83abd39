//! Users and groups as the image's own `/etc/passwd` and `/etc/group` have them.

use cofolio_guest::accounts::{User, find_user};

use super::Result;
use super::rootfs::Rootfs;

/// Resolves `user[:group]` in the account files of a root filesystem ([`find_user`]).
pub(super) fn resolve_user(root: &Rootfs, spec: &str) -> Result<User> {
    let passwd = root.account_file("/etc/passwd")?;
    Ok(find_user(&passwd, &root.account_file("/etc/group")?, spec)?)
}
