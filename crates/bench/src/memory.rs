//! What the machine holds in memory: `/proc/meminfo` and `/proc/vmstat` at one moment.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context as _, Result, anyhow};
use cofolio_node::cgroup::field;
use serde::Serialize;

/// One moment's memory of the machine, in bytes unless a name says otherwise, from `/proc/meminfo`
/// (`Documentation/filesystems/proc.rst`) and, for the counters at the end, `/proc/vmstat`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub(crate) struct Memory {
    /// Memory nobody uses.
    pub(crate) free: u64,
    /// What a new program could get without swapping, by the kernel's estimate.
    pub(crate) available: u64,
    /// Page cache of block devices: where ext4 keeps its inode tables, bitmaps and directories.
    pub(crate) buffers: u64,
    /// Page cache of files (less swap cache and `buffers`), tmpfs included.
    pub(crate) cached: u64,
    /// Of `cached`, tmpfs and shared memory.
    pub(crate) shmem: u64,
    /// Memory of processes that no file backs.
    pub(crate) anon: u64,
    /// Page cache that processes map.
    pub(crate) mapped: u64,
    /// Page cache not yet written back.
    pub(crate) dirty: u64,
    /// Kernel objects that can be reclaimed: inodes and dentries, mostly.
    pub(crate) slab_reclaimable: u64,
    /// Kernel objects that cannot.
    pub(crate) slab_unreclaimable: u64,
    /// Page tables.
    pub(crate) page_tables: u64,
    /// Kernel stacks.
    pub(crate) kernel_stack: u64,
    /// Memory of the kernel's per-CPU allocator; 0 before Linux 4.20, which does not show it.
    pub(crate) percpu: u64,
    /// How often page cache or kernel objects were dropped by hand since boot (`drop_pagecache` +
    /// `drop_slab`; a dropped inode takes its pages along).
    pub(crate) cache_drops: u64,
    /// Pages reclaimed from the LRU lists since boot (`pgsteal_anon` + `pgsteal_file`), not by
    /// DAMON.
    pub(crate) pages_reclaimed: u64,
}

impl Memory {
    /// Reads the machine under `root` (`/` on a live machine). Missing vmstat counters are 0.
    pub(crate) fn read(root: &Path) -> Result<Memory> {
        let read = |name: &str| {
            let path = root.join("proc").join(name);
            std::fs::read_to_string(&path).with_context(|| path.display().to_string())
        };
        let (meminfo, vmstat) = (read("meminfo")?, read("vmstat")?);
        let kib = |name: &str| {
            parse_meminfo(&meminfo, name).map_err(|what| anyhow!("/proc/meminfo: {what}"))
        };
        let count = |name: &str| field(&vmstat, name).unwrap_or(0);
        Ok(Memory {
            free: kib("MemFree")?,
            available: kib("MemAvailable")?,
            buffers: kib("Buffers")?,
            cached: kib("Cached")?,
            shmem: kib("Shmem")?,
            anon: kib("AnonPages")?,
            mapped: kib("Mapped")?,
            dirty: kib("Dirty")?,
            slab_reclaimable: kib("SReclaimable")?,
            slab_unreclaimable: kib("SUnreclaim")?,
            page_tables: kib("PageTables")?,
            kernel_stack: kib("KernelStack")?,
            percpu: kib("Percpu").unwrap_or(0),
            cache_drops: count("drop_pagecache").saturating_add(count("drop_slab")),
            pages_reclaimed: count("pgsteal_anon").saturating_add(count("pgsteal_file")),
        })
    }

    /// Every page of page cache: of files, of tmpfs and of block devices.
    pub(crate) fn page_cache(&self) -> u64 {
        self.cached.saturating_add(self.buffers)
    }

    /// Kernel objects of both kinds.
    pub(crate) fn slab(&self) -> u64 {
        self.slab_reclaimable.saturating_add(self.slab_unreclaimable)
    }
}

/// Bytes of each slab cache of the machine under `root`, partly used slabs included
/// (`/proc/slabinfo`, for root only). Caches with objects of like size are one for the kernel.
pub(crate) fn slab_caches(root: &Path) -> Result<BTreeMap<String, i64>> {
    let path = root.join("proc/slabinfo");
    let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let page = rustix::param::page_size() as i64;
    let cache = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let pages_per_slab: i64 = fields.get(5)?.parse().ok()?;
        let slabs: i64 = fields.get(14)?.parse().ok()?;
        Some(((*fields.first()?).to_owned(), pages_per_slab * slabs * page))
    };
    Ok(text.lines().filter_map(cache).collect())
}

/// The bytes of one `Name:  123 kB` line of meminfo, or what is wrong with it.
fn parse_meminfo(text: &str, name: &str) -> Result<u64, String> {
    let rest = text
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
        .ok_or_else(|| format!("has no line {name}"))?;
    rest.trim()
        .strip_suffix(" kB")
        .and_then(|kib| kib.trim().parse::<u64>().ok()?.checked_mul(1024))
        .ok_or_else(|| format!("{name} is not a number of kB: {:?}", rest.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMINFO: &str = "\
MemTotal:       24684084 kB
MemFree:        23000000 kB
MemAvailable:   23900000 kB
Buffers:           12000 kB
Cached:           345678 kB
SwapCached:            0 kB
Active:           100000 kB
Dirty:                16 kB
AnonPages:         50000 kB
Mapped:            40000 kB
Shmem:               900 kB
KReclaimable:      80000 kB
Slab:             130000 kB
SReclaimable:      80000 kB
SUnreclaim:        50000 kB
KernelStack:        2048 kB
PageTables:         1234 kB
HugePages_Total:       0
";

    fn plant(meminfo: &str, vmstat: &str) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join("proc")).unwrap();
        std::fs::write(root.path().join("proc/meminfo"), meminfo).unwrap();
        std::fs::write(root.path().join("proc/vmstat"), vmstat).unwrap();
        root
    }

    #[test]
    fn reads_a_planted_machine() {
        let vmstat =
            "nr_free_pages 7\ndrop_pagecache 3\ndrop_slab 4\npgsteal_anon 10\npgsteal_file 5\n";
        let root = plant(MEMINFO, vmstat);
        let memory = Memory::read(root.path()).unwrap();
        assert_eq!(memory.free, 23_000_000 * 1024);
        assert_eq!(memory.cached, 345_678 * 1024, "Cached, not SwapCached");
        assert_eq!(memory.page_cache(), (345_678 + 12_000) * 1024);
        assert_eq!(memory.slab(), 130_000 * 1024);
        assert_eq!(memory.cache_drops, 7);
        assert_eq!(memory.pages_reclaimed, 15);
    }

    #[test]
    fn a_missing_line_is_named() {
        let text = MEMINFO.replace("SReclaimable:      80000 kB\n", "");
        let error = Memory::read(plant(&text, "").path()).unwrap_err().to_string();
        assert!(error.contains("proc/meminfo") && error.contains("SReclaimable"), "{error}");
    }

    #[test]
    fn nonsense_is_refused_without_a_panic() {
        for value in ["", "kB", "-1 kB", "12", "18446744073709551615 kB", "x kB"] {
            let text = MEMINFO.replace("Cached:           345678 kB", &format!("Cached: {value}"));
            let error = Memory::read(plant(&text, "").path()).unwrap_err();
            assert!(error.to_string().contains("Cached"), "{value:?}: {error}");
        }
    }

    #[test]
    fn the_live_machine_can_be_read() {
        let memory = Memory::read(Path::new("/")).unwrap();
        assert!(memory.free > 0 && memory.cached > 0);
    }
}
