//! Memory that virtual machines cost beside the guests' own: the goals do not count it, as their
//! words say, but the table shows it.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use cofolio_node::vm::account::mapped_image_files;
use serde::Serialize;

use super::super::{Host, Machine};
use super::watch::Held;
use crate::daemon::Daemon;
use crate::residency;
use crate::usage_lists::status_bytes;

const PAGE: u64 = 4096;
/// `struct ksm_rmap_item` (mm/ksm.c): one for each page that KSM knows.
const RMAP_ITEM: u64 = 64;

/// Bytes of all machines together at a moment.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub(super) struct Beside {
    pub(super) seconds: f64,
    /// Guest memory then, which is not part of the rest.
    pub(super) guests: f64,
    /// Private memory of the VMMs themselves.
    pub(super) emulators: u64,
    /// Page tables of the VMMs (VmPTE).
    pub(super) page_tables: u64,
    /// Private memory and page tables of the processes of `cofolio vm run`, which wait for the
    /// VMMs.
    pub(super) attendants: u64,
    /// Resident memory of the daemon without the pools, and its page tables.
    pub(super) daemon: u64,
    /// Pages of the image's files in the host's page cache.
    pub(super) image: u64,
    /// KSM's records of the VMMs' pages.
    pub(super) rmap: u64,
    /// By how much the host's free memory has fallen since before the first of these was started.
    /// Guest memory and everything else but the image is in it.
    pub(super) fallen: f64,
}

impl Beside {
    /// Guest memory and everything that is known beside it.
    pub(super) fn items(&self) -> f64 {
        let own = self.emulators + self.page_tables + self.attendants + self.daemon;
        self.guests + (own + self.image + self.rmap) as f64
    }

    /// The same as the host sees it. Cache is available memory, so the image is not in it.
    pub(super) fn of_host(&self) -> f64 {
        self.fallen + self.image as f64
    }

    /// Means of figures of several moments.
    pub(super) fn mean(all: &[Self], figure: impl Fn(&Self) -> f64) -> f64 {
        all.iter().map(figure).sum::<f64>() / all.len() as f64
    }
}

/// Looks at memory beside guest memory.
pub(super) struct Look {
    /// The host's free memory before.
    free: u64,
    /// The program of the daemon and of those who wait for VMMs.
    program: PathBuf,
}

impl Look {
    /// To be called before the daemon and the guests are started.
    pub(super) fn before(host: &Host<'_>) -> Result<Self> {
        Ok(Self { free: free_bytes()?, program: fs::canonicalize(&host.program)? })
    }

    pub(super) fn beside(
        &self,
        held: &Held,
        machines: &[Machine],
        daemon: Option<&Daemon>,
    ) -> Result<Beside> {
        let free = free_bytes()?;
        let mut beside =
            Beside { seconds: held.seconds, guests: held.bytes(), ..Beside::default() };
        beside.fallen = self.free as f64 - free as f64;
        let mut files = BTreeSet::new();
        for (machine, private) in machines.iter().zip(&held.guests) {
            let pid = machine.pid.to_string();
            beside.emulators += status_bytes(&pid, "RssAnon")?.saturating_sub(*private);
            beside.page_tables += status_bytes(&pid, "VmPTE")?;
            beside.rmap += rmap_items(&pid) * RMAP_ITEM;
            files.extend(mapped_image_files(Path::new("/proc"), machine.pid)?);
        }
        for file in files {
            beside.image += residency::mincore(&file)?.resident * PAGE;
        }
        if let Some(daemon) = daemon {
            let lines = ["RssAnon", "RssFile", "VmPTE"].map(|line| daemon.status(line));
            beside.daemon = lines.into_iter().sum::<Result<u64>>()?;
        }
        for pid in self.attendants(daemon)? {
            // It may end meanwhile.
            let lines = ["RssAnon", "VmPTE"].map(|line| status_bytes(&pid, line).unwrap_or(0));
            beside.attendants += lines.into_iter().sum::<u64>();
        }
        Ok(beside)
    }

    /// Processes of the program that are not the daemon.
    fn attendants(&self, daemon: Option<&Daemon>) -> Result<Vec<String>> {
        let daemon = daemon.map(|it| it.pid().to_string());
        let mut found = Vec::new();
        for process in fs::read_dir("/proc")? {
            let process = process?;
            let pid = process.file_name().to_string_lossy().into_owned();
            let is_it =
                || fs::read_link(process.path().join("exe")).is_ok_and(|exe| exe == self.program);
            if pid.parse::<u32>().is_ok() && daemon.as_ref() != Some(&pid) && is_it() {
                found.push(pid);
            }
        }
        Ok(found)
    }
}

/// Pages of a process that KSM knows; none where the kernel does not say.
fn rmap_items(pid: &str) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/ksm_stat")).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("ksm_rmap_items "));
    line.and_then(|line| line.trim().parse().ok()).unwrap_or(0)
}

/// Memory of the host that is available, and free pages in lists of processors.
fn free_bytes() -> Result<u64> {
    let text = fs::read_to_string("/proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    let available = kib.context("/proc/meminfo has no MemAvailable")? << 10;
    Ok(available + listed_pages(&fs::read_to_string("/proc/zoneinfo")?) * PAGE)
}

/// Free pages in the lists of processors, which the kernel does not count as free.
fn listed_pages(zones: &str) -> u64 {
    let count = |line: &str| line.trim().strip_prefix("count:")?.trim().parse::<u64>().ok();
    zones.lines().filter_map(count).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_pages_of_all_processors_are_counted() {
        let zones = "Node 0, zone   Normal\n  pagesets\n    cpu: 0\n              count:    484\n\
                     \x20             high:     600\n    cpu: 1\n              count:    1137\n";
        assert_eq!(listed_pages(zones), 484 + 1137);
    }

    #[test]
    fn nothing_that_is_known_is_left_out() {
        let beside = Beside {
            seconds: 1.0,
            guests: 1e6,
            emulators: 2,
            page_tables: 4,
            attendants: 8,
            daemon: 16,
            image: 32,
            rmap: 64,
            fallen: 2e6,
        };
        assert_eq!(beside.items(), 1_000_126.0);
        assert_eq!(beside.of_host(), 2_000_032.0);
        assert_eq!(Beside::mean(&[beside, Beside::default()], |it| it.fallen), 1e6);
    }
}
