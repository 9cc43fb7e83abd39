//! What the host holds for each virtual machine, and why.
//!
//! ```text
//! private pages of the guest's memory   in use │ guest's cache │ free, not yet returned
//! pages that others have, too           merged (pools) │ image (pack and segments)
//! no page at all                        zeros
//! the VMM's own                         emulator
//! ```
//!
//! How private pages divide is what the guest says of itself; all else is counted by the host.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use cofolio_sys::pagemap::{Query, category, scan};
use serde::{Deserialize, Serialize};

use super::merger::Merging;
use super::ram::{Ram, mapping};
use super::recycler::Recycling;
use super::{State, VmStatus};
use crate::kernel_text;

/// The account of one virtual machine. Sizes are bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmAccount {
    /// Its name.
    pub name: String,
    /// Name of its image, for people; empty if somebody else started it.
    pub image_name: String,
    /// Trust domain.
    pub domain: String,
    /// Process of the VMM.
    pub pid: u32,
    /// Whether a process of Cofolio waits for its end.
    pub attended: bool,
    /// Memory that the guest has.
    pub memory_bytes: u64,
    /// Private pages that the guest's kernel and programs use, as the guest says. All private
    /// pages where it says nothing.
    pub used_bytes: u64,
    /// Private pages of files in the guest's cache, as the guest says.
    pub cache_bytes: u64,
    /// Private pages that the guest has free and the host still holds.
    pub unreturned_bytes: u64,
    /// Pages that were merged: pools have them once for all guests of the trust domain.
    pub merged_bytes: u64,
    /// Pages of zeros, which the host does not hold.
    pub zero_bytes: u64,
    /// Pages of the image that the guest has touched: the host's page cache has them once.
    pub image_bytes: u64,
    /// What the VMM takes for itself, in private pages.
    pub emulator_bytes: u64,
    /// What the recycler does with it.
    pub recycling: Recycling,
    /// What the merger has done with it.
    pub merging: Merging,
}

impl VmAccount {
    /// Pages that only this machine has.
    pub fn private_bytes(&self) -> u64 {
        self.used_bytes + self.cache_bytes + self.unreturned_bytes + self.emulator_bytes
    }
}

/// All virtual machines at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmReport {
    /// When, in seconds since 1970.
    pub time: i64,
    /// By name.
    pub machines: Vec<VmAccount>,
    /// Bytes of the pools of merged pages.
    pub pool_bytes: u64,
    /// Bytes that pulses have returned since the daemon was started.
    pub returned_bytes: u64,
    /// Freed bytes by how long they waited for their return: up to each of
    /// [`LATENCY_MS`](super::recycler::LATENCY_MS), and last longer.
    pub latency_bytes: Vec<u64>,
}

/// Takes accounts, and remembers where the memory of each machine is.
#[derive(Debug)]
pub struct Accounts {
    /// Where `/proc` is.
    proc: PathBuf,
    known: HashMap<u32, Known>,
}

#[derive(Debug)]
struct Known {
    ram: Ram,
    pagemap: File,
    /// Where the files of the image are mapped.
    image: Vec<Range<u64>>,
}

/// What is known of a machine besides.
#[derive(Debug, Clone, Default)]
pub struct Besides {
    /// What the recycler does with it.
    pub recycling: Option<Recycling>,
    /// What the merger has done with it.
    pub merging: Merging,
}

impl Default for Accounts {
    fn default() -> Self {
        Self { proc: PathBuf::from("/proc"), known: HashMap::new() }
    }
}

impl Accounts {
    /// Accounts of machines that run. One that ends meanwhile has none.
    pub fn take(&mut self, list: &[VmStatus], besides: impl Fn(&str) -> Besides) -> Vec<VmAccount> {
        let living: Vec<u32> = list.iter().filter_map(|status| status.pid).collect();
        self.known.retain(|pid, _| living.contains(pid));
        let account = |status| self.account(status, besides(&status.record.name)).ok();
        list.iter().filter(|status| status.pid.is_some()).filter_map(account).collect()
    }

    fn account(&mut self, status: &VmStatus, besides: Besides) -> io::Result<VmAccount> {
        let pid = status.pid.ok_or(io::ErrorKind::NotFound)?;
        let record = &status.record;
        if !self.known.contains_key(&pid) {
            self.known.insert(pid, Known::find(&self.proc, pid, record.memory_bytes)?);
        }
        let known = self.known.get(&pid).ok_or(io::ErrorKind::NotFound)?;
        let resident = known.ram.resident()?;
        let private = resident.private();
        let free = besides.recycling.as_ref().map(|it| it.free_bytes);
        let caches = besides.recycling.as_ref().map_or(0, |it| it.cache_bytes);
        // What the guest does not have free, it uses; of that it may never have touched some.
        let needed = free.map_or(u64::MAX, |free| record.usable_bytes().saturating_sub(free));
        let unreturned = resident.bytes.saturating_sub(needed).min(private);
        let cache = caches.min(private - unreturned);
        Ok(VmAccount {
            name: record.name.clone(),
            image_name: record.image_name().to_owned(),
            domain: record.domain.clone(),
            pid,
            attended: status.state == State::Running && record.attached().is_none(),
            memory_bytes: record.memory_bytes,
            used_bytes: private - unreturned - cache,
            cache_bytes: cache,
            unreturned_bytes: unreturned,
            merged_bytes: known.ram.merged()?,
            zero_bytes: known.ram.zeros()?,
            image_bytes: known.image_bytes()?,
            emulator_bytes: known.ram.emulator(private)?,
            recycling: besides.recycling.unwrap_or_default(),
            merging: besides.merging,
        })
    }
}

impl Known {
    fn find(proc: &Path, pid: u32, memory_bytes: u64) -> io::Result<Self> {
        let ram = Ram::find(proc, pid, memory_bytes)?;
        let dir = proc.join(pid.to_string());
        let maps = kernel_text::read(&dir.join("maps"))?;
        let mappings = maps.lines().filter_map(mapping).filter(|it| is_of_image(it.name));
        let image = mappings.map(|it| it.addresses).collect();
        Ok(Self { ram, pagemap: File::open(dir.join("pagemap"))?, image })
    }

    fn image_bytes(&self) -> io::Result<u64> {
        let query = Query { mask: category::PRESENT, ..Query::default() };
        let mut bytes = 0;
        for range in &self.image {
            let count = |region: cofolio_sys::pagemap::Region| bytes += region.end - region.start;
            scan(&self.pagemap, range.clone(), query, count)?;
        }
        Ok(bytes)
    }
}

/// Files of the image that a VMM has mapped.
///
/// # Errors
/// Those of reading `/proc/PID/maps`.
pub fn mapped_image_files(proc: &Path, pid: u32) -> io::Result<Vec<PathBuf>> {
    let maps = kernel_text::read(&proc.join(pid.to_string()).join("maps"))?;
    let names = maps.lines().filter_map(mapping).map(|it| it.name);
    Ok(names.filter(|name| is_of_image(name)).map(PathBuf::from).collect())
}

/// Whether a file is a pack or a segment.
fn is_of_image(path: &str) -> bool {
    path.ends_with(".segment") || path.ends_with(".dax")
}
