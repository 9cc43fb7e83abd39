//! Dying cgroups: they were removed, and live on while page cache or kernel objects are charged to them.

use std::{
    fs,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use cofolio_node::cgroup::{Hierarchy, Version, field};

/// Dying memory cgroups of the whole machine: `nr_dying_descendants` of version 2; of version 1, what
/// `/proc/cgroups` counts less the directories.
pub(crate) fn count(hierarchy: &Hierarchy) -> Result<u64> {
    let top = hierarchy.directory("");
    if hierarchy.version() == Version::V2 {
        let stat = fs::read_to_string(top.join("cgroup.stat"))?;
        return field(&stat, "nr_dying_descendants").context("no nr_dying_descendants");
    }
    let text = fs::read_to_string("/proc/cgroups")?;
    let line = text.lines().find(|line| line.starts_with("memory\t"));
    let all = line.and_then(|line| line.split('\t').nth(2)?.parse::<u64>().ok());
    let all = all.context("/proc/cgroups does not count memory cgroups")?;
    Ok(all.saturating_sub(count_directories(&top)))
}

/// The same, once it has not gone down for this long: the kernel frees in the background, and others make
/// cgroups and remove them.
pub(crate) fn settled_count(hierarchy: &Hierarchy, quiet: Duration) -> Result<u64> {
    const SETTLE_MAX: Duration = Duration::from_secs(60);
    let started = Instant::now();
    let (mut lowest, mut since) = (count(hierarchy)?, Instant::now());
    while since.elapsed() < quiet && started.elapsed() < SETTLE_MAX {
        thread::sleep(Duration::from_millis(250));
        let now = count(hierarchy)?;
        if now < lowest {
            (lowest, since) = (now, Instant::now());
        }
    }
    Ok(lowest)
}

/// Cgroups come and go meanwhile: a directory that vanishes counts as one without children.
fn count_directories(dir: &Path) -> u64 {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let dirs = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    1 + dirs.map(|entry| count_directories(&entry.path())).sum::<u64>()
}
