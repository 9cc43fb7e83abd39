//! Dying cgroups: they were removed, and live on while page cache or kernel objects are charged to them.

use std::{
    collections::HashSet,
    fs::{self, File},
    io::Read as _,
    os::unix::fs::MetadataExt as _,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use cofolio_node::cgroup::{Cgroup, Hierarchy, Version, field};

/// Dying memory cgroups of the whole machine: `nr_dying_descendants` of version 2; of version 1, what
/// `/proc/cgroups` counts less the directories.
fn count(hierarchy: &Hierarchy) -> Result<u64> {
    let top = hierarchy.directory("")?;
    if hierarchy.version() == Version::V2 {
        return dying_descendants(&top);
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

/// How many of these cgroups have one below them that was removed and stays, whatever others on the
/// machine do. In version 2 the kernel says so. In version 1 these are the ones that a page is
/// charged to: they have no processes, and the kernel shows a page of a removed cgroup as its nearest
/// ancestor's that exists. A page of the kernel's own, which holds no cgroup, would count as well.
pub(crate) fn with_dying_below(hierarchy: &Hierarchy, cgroups: &[Cgroup]) -> Result<usize> {
    let directories = cgroups.iter().map(Cgroup::directory);
    match hierarchy.version() {
        Version::V1 => {
            let inodes = directories.map(|it| Ok(it.metadata()?.ino()));
            Ok(charged(&inodes.collect::<Result<_>>()?)?)
        }
        Version::V2 => {
            let dying = directories.map(dying_descendants).collect::<Result<Vec<_>>>()?;
            Ok(dying.into_iter().filter(|dying| *dying > 0).count())
        }
    }
}

fn dying_descendants(directory: &Path) -> Result<u64> {
    let stat = fs::read_to_string(directory.join("cgroup.stat"))?;
    field(&stat, "nr_dying_descendants").context("no nr_dying_descendants")
}

/// How many of these cgroups `/proc/kpagecgroup` names, by the inode numbers of their directories.
fn charged(cgroups: &HashSet<u64>) -> Result<usize> {
    let path = "/proc/kpagecgroup";
    let mut pages = File::open(path).with_context(|| format!("cannot open {path}"))?;
    let mut found = HashSet::new();
    let mut entries = vec![0; 1 << 20];
    loop {
        // It reads whole entries, as many as are asked for unless it ends.
        let read = pages.read(&mut entries)?;
        let inodes = entries[..read].chunks_exact(8).filter_map(|it| it.try_into().ok());
        found.extend(inodes.map(u64::from_ne_bytes).filter(|inode| cgroups.contains(inode)));
        if read == 0 {
            return Ok(found.len());
        }
    }
}

/// Cgroups come and go meanwhile: a directory that vanishes counts as one without children.
fn count_directories(dir: &Path) -> u64 {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let dirs = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    1 + dirs.map(|entry| count_directories(&entry.path())).sum::<u64>()
}
