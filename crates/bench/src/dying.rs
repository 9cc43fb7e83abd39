//! Dying cgroups: they were removed, and live on while page cache or kernel objects are charged to them.

use std::{
    fs::{self, File},
    os::unix::fs::{FileExt as _, MetadataExt as _},
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

/// At most so many cgroups that were removed below this one stay, whatever others on the machine
/// do. In version 2 the kernel counts them. In version 1 these are the folios that are charged to
/// them: a cgroup that stays is held by at least one, because the kernel hands the charge of its
/// own objects to the cgroup above.
pub(crate) fn at_most_below(hierarchy: &Hierarchy, cgroup: &str) -> Result<u64> {
    let directory = hierarchy.directory(cgroup);
    match hierarchy.version() {
        Version::V1 => charged_folios(directory.metadata()?.ino()),
        Version::V2 => dying_descendants(&directory),
    }
}

fn dying_descendants(directory: &Path) -> Result<u64> {
    let stat = fs::read_to_string(directory.join("cgroup.stat"))?;
    field(&stat, "nr_dying_descendants").context("no nr_dying_descendants")
}

/// Folios that `/proc/kpagecgroup` has for a cgroup, by the inode number of its directory. There a
/// page of a removed cgroup is its nearest ancestor's that exists.
fn charged_folios(cgroup: u64) -> Result<u64> {
    // Of `include/uapi/linux/kernel-page-flags.h`.
    const COMPOUND_TAIL: u64 = 1 << 16;
    let open = |path| File::open(path).with_context(|| format!("cannot open {path}"));
    let (cgroups, flags) = (open("/proc/kpagecgroup")?, open("/proc/kpageflags")?);
    let (mut frame, mut folios) = (0_u64, 0);
    let mut entries = vec![0; 1 << 20];
    loop {
        let read = cgroups.read_at(&mut entries, frame * 8)? / 8;
        for entry in entries[..read * 8].chunks_exact(8) {
            if entry == cgroup.to_ne_bytes() {
                let mut of_page = [0; 8];
                flags.read_exact_at(&mut of_page, frame * 8)?;
                folios += u64::from(u64::from_ne_bytes(of_page) & COMPOUND_TAIL == 0);
            }
            frame += 1;
        }
        if read == 0 {
            return Ok(folios);
        }
    }
}

/// Cgroups come and go meanwhile: a directory that vanishes counts as one without children.
fn count_directories(dir: &Path) -> u64 {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let dirs = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    1 + dirs.map(|entry| count_directories(&entry.path())).sum::<u64>()
}
