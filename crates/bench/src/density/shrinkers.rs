//! The kernel's arrays of shrinkers: the cost of a superblock for each memory cgroup.
//!
//! Each superblock has a shrinker, and each memory cgroup has room for all shrinkers on each NUMA
//! node, whether or not it uses the superblock: 520 bytes for 64 of them (`shrinker_info_unit`,
//! `mm/shrinker.c` of Linux 6.18). The arrays never shrink, and the cgroups are not charged for them.
//! `none` runs after the variants and has these arrays, too. So the difference between a variant and
//! `none` does not show them, and they are computed here.

use std::path::Path;
use std::{fs, io, thread};

use anyhow::{Context as _, Result};
use cofolio_sys::mount::unshare_mount_namespace;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

use super::variants::Variant;

/// Shrinkers of one unit of an array.
const UNIT: i64 = 64;
/// What a unit takes: the next larger size of kmalloc.
const UNIT_BYTES: i64 = 1024;

/// Bytes of the arrays of one cgroup, on all nodes, that the superblocks of so many containers need.
pub(super) fn bytes(variant: Variant, containers: u32, nodes: u32) -> i64 {
    let superblocks = i64::from(variant.superblocks()) * i64::from(containers);
    superblocks * UNIT_BYTES * i64::from(nodes) / UNIT
}

/// NUMA nodes of the machine.
pub(super) fn nodes() -> u32 {
    let entries = fs::read_dir("/sys/devices/system/node").into_iter().flatten().flatten();
    let is_node =
        |name: &str| name.strip_prefix("node").is_some_and(|it| it.parse::<u32>().is_ok());
    let nodes = entries.filter(|it| it.file_name().to_str().is_some_and(is_node)).count();
    u32::try_from(nodes).unwrap_or(1).max(1)
}

/// Makes as many superblocks as any variant has at once, over `dir` in a mount namespace of their own,
/// and drops them: from now on the arrays of each cgroup are so large, whichever variant comes first.
pub(super) fn grow(containers: u32, dir: &Path) -> Result<()> {
    let most = Variant::ALL.iter().map(|it| it.superblocks()).max().unwrap_or(0);
    // And those that are the images'.
    let count = most * containers + u32::try_from(UNIT)?;
    let tmpfs = |at: &Path| mount("none", at, "tmpfs", MountFlags::empty(), None);
    let make = || -> io::Result<()> {
        unshare_mount_namespace()?;
        tmpfs(dir)?;
        for number in 0..count {
            let at = dir.join(number.to_string());
            fs::create_dir(&at)?;
            tmpfs(&at)?;
        }
        Ok(unmount(dir, UnmountFlags::DETACH)?)
    };
    // The namespace ends with the thread.
    let made = thread::scope(|scope| scope.spawn(make).join());
    let made = made.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    made.with_context(|| format!("cannot mount {count} empty tmpfs"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An overlay for each of 1,000 containers costs each cgroup 16 KiB, which were taken off with
    /// `none`. In the first round after a boot a sparse container took 0.119 of overlayfs, and a
    /// read-only one less than nothing.
    #[test]
    fn each_superblock_costs_each_cgroup() {
        assert_eq!(bytes(Variant::Overlayfs, 1000, 1), 16_000);
        assert_eq!(bytes(Variant::SuperblockRo, 1000, 4), 128_000);
        assert_eq!(bytes(Variant::CofolioRo, 1000, 4), 0);
    }
}
