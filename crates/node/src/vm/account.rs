//! What the host holds for each virtual machine, and why.
//!
//! ```text
//! private pages of the guest's memory   in use │ guest's cache │ free, not yet returned
//! pages that others have, too           merged (pools) │ image (pack and segments)
//! no page at all                        zeros
//! the VMM's own                         emulator
//! ```
//!
//! How private pages divide is what the guest says of itself; all else is counted by the host. What
//! machines share is counted once in the report, and divided among them in `proportional_bytes`.

use std::collections::HashSet;
use std::collections::hash_map::{Entry, HashMap};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cofolio_sys::pagemap::{Query, Region, category, scan};
use serde::{Deserialize, Serialize};

use super::merger::Merging;
use super::ram::{Content, FileId, Mapping, Part, Piece, Ram, bytes, mapping, maps};
use super::recycler::{Latencies, Recycling};
use super::{State, VmStatus};
use crate::address_space::{access, probe_and_access};

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
    /// Pages that were merged: pools have them once for all guests of the trust domain, or the
    /// files of the image.
    pub merged_bytes: u64,
    /// Pages of zeros, which the host does not hold.
    pub zero_bytes: u64,
    /// Pages of the image that the guest has touched: the host's page cache has them once.
    pub image_bytes: u64,
    /// What the VMM takes for itself, in private pages.
    pub emulator_bytes: u64,
    /// All private pages, and each page of pools and images divided by the number of places where
    /// machines have it.
    pub proportional_bytes: u64,
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
    /// Pages of images that machines have touched, each counted once.
    pub image_bytes: u64,
    /// Bytes of the pools of merged pages.
    pub pool_bytes: u64,
    /// Bytes that pulses have returned since the daemon was started.
    pub returned_bytes: u64,
    /// How long freed memory has waited for its return, since the daemon was started.
    pub latency: Latency,
}

impl VmReport {
    /// Memory that the host uses for all of them.
    pub fn host_bytes(&self) -> u64 {
        let private: u64 = self.machines.iter().map(VmAccount::private_bytes).sum();
        private + self.image_bytes + self.pool_bytes
    }
}

/// How long freed memory has waited for its return to the host.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Latency {
    /// Within how many milliseconds half of it was returned, at most; none if nothing was, or later
    /// than the classes say.
    pub p50_ms: Option<u64>,
    /// The same for 99 %.
    pub p99_ms: Option<u64>,
    /// Bytes by how long they waited: up to each of [`LATENCY_MS`](super::recycler::LATENCY_MS),
    /// and last longer.
    pub bytes: Vec<u64>,
    /// How many milliseconds all bytes together have waited.
    pub byte_ms: u64,
}

impl From<&Latencies> for Latency {
    fn from(it: &Latencies) -> Self {
        Self {
            p50_ms: it.quantile_ms(0.5),
            p99_ms: it.quantile_ms(0.99),
            bytes: it.bytes.to_vec(),
            byte_ms: it.byte_ms,
        }
    }
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
    /// Of the process, in `/proc`.
    dir: PathBuf,
    pagemap: Arc<File>,
    /// Where the files of the image are mapped.
    image: Vec<Piece>,
}

/// The account of a machine without its shared memory.
struct Counted {
    account: VmAccount,
    image: Vec<Part>,
    pools: Vec<Part>,
    /// Files of `pools`, and their sizes in memory.
    pool_files: Vec<(FileId, u64)>,
}

/// Accounts of all machines at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Totals {
    /// In the order in which they were asked for.
    pub machines: Vec<VmAccount>,
    /// Pages of images that machines have touched, each counted once.
    pub image_bytes: u64,
    /// Memory of all files with merged pages.
    pub pool_bytes: u64,
}

/// Reports of the recycler and the merger on a machine.
#[derive(Debug, Clone, Default)]
pub struct Reports {
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
    pub fn take(&mut self, list: &[VmStatus], reports: impl Fn(&str) -> Reports) -> Totals {
        let living: HashSet<u32> = list.iter().filter_map(|status| status.pid).collect();
        self.known.retain(|pid, _| living.contains(pid));
        let mut counted = Vec::new();
        for status in list {
            let reports = reports(&status.record.name);
            counted.extend(status.pid.and_then(|pid| self.account(pid, status, reports).ok()));
        }
        let of = |parts: fn(&Counted) -> &[Part]| divide(counted.iter().map(parts));
        let ((image_bytes, images), (_, pools)) = (of(|it| &it.image), of(|it| &it.pools));
        let mut files = HashSet::new();
        let pool_files = counted.iter().flat_map(|it| &it.pool_files);
        let pool_bytes = pool_files.filter(|(file, _)| files.insert(*file)).map(|it| it.1).sum();
        let shares = images.into_iter().zip(pools);
        let machines = counted.into_iter().zip(shares).map(|(counted, (image, pools))| VmAccount {
            proportional_bytes: counted.account.private_bytes() + whole(image + pools),
            ..counted.account
        });
        Totals { machines: machines.collect(), image_bytes, pool_bytes }
    }

    fn account(&mut self, pid: u32, status: &VmStatus, reports: Reports) -> io::Result<Counted> {
        let record = &status.record;
        let known = match self.known.entry(pid) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => new.insert(Known::find(&self.proc, pid, record.memory_bytes)?),
        };
        let content = known.ram.content()?;
        let mut image = known.image_parts()?;
        let image_bytes = bytes(&image);
        let (merged_bytes, shared) = (content.merged_bytes(), content.shared_bytes());
        let Content { resident, pool_pieces, pools, images, .. } = content;
        let private = resident.private();
        let free = reports.recycling.as_ref().map(|it| it.free_bytes);
        let caches = reports.recycling.as_ref().map_or(0, |it| it.cache_bytes);
        // What the guest does not have free, it uses; of that it may never have touched some.
        let needed = free.map_or(u64::MAX, |free| record.usable_bytes().saturating_sub(free));
        let unreturned = (private + shared).saturating_sub(needed).min(private);
        let cache = caches.min(private - unreturned);
        let account = VmAccount {
            name: record.name.clone(),
            image_name: record.image_name().to_owned(),
            domain: record.domain.clone(),
            pid,
            attended: status.state == State::Running && record.attached().is_none(),
            memory_bytes: record.memory_bytes,
            used_bytes: private - unreturned - cache,
            cache_bytes: cache,
            unreturned_bytes: unreturned,
            merged_bytes,
            zero_bytes: resident.zeros,
            image_bytes,
            emulator_bytes: known.ram.emulator(private)?,
            proportional_bytes: 0,
            recycling: reports.recycling.unwrap_or_default(),
            merging: reports.merging,
        };
        image.extend(images);
        let pool_files = pool_files(&known.dir, &pool_pieces)?;
        Ok(Counted { account, image, pools, pool_files })
    }
}

impl Known {
    fn find(proc: &Path, pid: u32, memory_bytes: u64) -> io::Result<Self> {
        let ram = Ram::find(proc, pid, memory_bytes)?;
        let dir = proc.join(pid.to_string());
        let maps = maps(&dir)?;
        let devices = maps.lines().filter_map(mapping).filter(Mapping::is_device);
        let image = devices.map(|it| it.piece()).collect();
        Ok(Self { ram, pagemap: File::open(dir.join("pagemap"))?.into(), dir, image })
    }

    /// Parts of its image that the machine has touched.
    fn image_parts(&self) -> io::Result<Vec<Part>> {
        let query = Query { mask: category::PRESENT, ..Query::default() };
        let (pagemap, image) = (Arc::clone(&self.pagemap), self.image.clone());
        access(&self.dir, move || {
            let mut parts = Vec::new();
            for piece in image {
                scan(&pagemap, piece.addresses.clone(), query, |Region { start, end, .. }| {
                    parts.push(piece.part(start..end));
                })?;
            }
            Ok(parts)
        })
    }
}

/// Memory of the files of pools that a process maps, by its directory in `/proc`.
fn pool_files(process: &Path, pieces: &[Piece]) -> io::Result<Vec<(FileId, u64)>> {
    let mut files = HashMap::new();
    for piece in pieces {
        files.entry(piece.file).or_insert_with(|| piece.link(process));
    }
    // Unmapped meanwhile, a file takes nothing.
    let bytes = |link: PathBuf| fs::metadata(link).map_or(0, |file| file.blocks() * 512);
    probe_and_access(process, move || {
        Ok(files.into_iter().map(|(file, link)| (file, bytes(link))).collect())
    })
}

/// Divides parts of files among machines: how many bytes they have together, each counted once, and
/// for each machine, how many it has if each byte is divided by the number of places where it is.
fn divide<'p>(machines: impl Iterator<Item = &'p [Part]>) -> (u64, Vec<f64>) {
    let (mut shares, mut ends) = (Vec::new(), Vec::new());
    for (machine, parts) in machines.enumerate() {
        shares.push(0.0);
        for (file, part) in parts {
            ends.push((*file, part.start, 1, machine));
            ends.push((*file, part.end, -1, machine));
        }
    }
    ends.sort_unstable();
    // Up to `last` of a file: bytes that somebody has, the sum of what one place gets of each of
    // them, and the number of places that begin and do not end before. At the end of a file that is
    // 0.
    let (mut all, mut each, mut places, mut last) = (0, 0.0, 0_i64, 0);
    for (_, at, change, machine) in ends {
        if places > 0 {
            all += at - last;
            each += (at - last) as f64 / places as f64;
        }
        shares[machine] -= f64::from(change) * each;
        places += i64::from(change);
        last = at;
    }
    (all, shares)
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a sum of sizes")]
fn whole(bytes: f64) -> u64 {
    bytes.round() as u64
}

/// Pools of merged pages that a VMM has mapped, by the inodes of their files, and the memory of
/// each in bytes.
///
/// # Errors
/// Those of reading `/proc/PID/maps`.
pub fn mapped_pools(proc: &Path, pid: u32) -> io::Result<HashMap<u64, u64>> {
    let process = proc.join(pid.to_string());
    let maps = maps(&process)?;
    let pools = maps.lines().filter_map(mapping).filter(Mapping::is_pool);
    let pieces: Vec<Piece> = pools.map(|it| it.piece()).collect();
    let files = pool_files(&process, &pieces)?.into_iter();
    Ok(files.map(|((_, inode), bytes)| (inode, bytes)).collect())
}

/// Files of the image that a VMM has mapped.
///
/// # Errors
/// Those of reading `/proc/PID/maps`.
pub fn mapped_image_files(proc: &Path, pid: u32) -> io::Result<Vec<PathBuf>> {
    let maps = maps(&proc.join(pid.to_string()))?;
    let devices = maps.lines().filter_map(mapping).filter(Mapping::is_device);
    Ok(devices.map(|it| PathBuf::from(it.name)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: FileId = (1, 7);
    const OTHER: FileId = (1, 8);

    #[test]
    fn shared_bytes_are_counted_once_and_divided() {
        let one = [(FILE, 0..100), (OTHER, 0..10)];
        let two = [(FILE, 50..150)];
        // The same bytes at two places.
        let three = [(OTHER, 0..10), (FILE, 90..100), (OTHER, 5..10)];
        let (all, shares) = divide([&one[..], &two, &three].into_iter());
        assert_eq!(all, 160);
        let expected = [
            50.0 + 40.0 / 2.0 + 10.0 / 3.0 + 5.0 / 2.0 + 5.0 / 3.0,
            40.0 / 2.0 + 10.0 / 3.0 + 50.0,
            5.0 / 2.0 + 5.0 / 3.0 * 2.0 + 10.0 / 3.0,
        ];
        for (share, expected) in shares.iter().zip(expected) {
            assert!((share - expected).abs() < 1e-9, "{shares:?}");
        }
        assert!((shares.iter().sum::<f64>() - 160.0).abs() < 1e-9);
    }
}
