//! The merger: pages that guests of a trust domain have in common are in memory once.
//!
//! ```text
//! look    which pages were not written to since the last look (PAGEMAP_SCAN, write-protecting)
//! hash    those that stayed for a whole period, on several threads
//! plan    which are the same: longest runs first; their contents go to sealed pools
//! merge   the shim of each VMM compares again, and maps the pool (crate shim)
//! ```
//!
//! A period lies between two looks. The recycler goes first: what a guest has freed need not be
//! merged. Nothing crosses trust domains: each has its own pools and its own plan.

mod plan;
mod pool;
mod scan;
mod shim;

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::num::NonZeroU64;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use cofolio_shim::protocol::{self, Hello, PAGE, RUNS_MAX, Run, ZEROS};
use serde::{Deserialize, Serialize};

use self::plan::{Bounds, PlannedRun, Source, plan};
use self::pool::{POOL_PAGES, Pools};
use self::scan::{Pages, hash_of};
use self::shim::Shim;
use super::{VmRecord, VmStatus, socket};
use crate::kernel_text;
use crate::run_dir::RunDir;

/// Pages that a thread hashes before it takes the next ones.
const PART_PAGES: usize = 4096;
/// After an error a guest is left alone for so long, and after each further one for twice as long.
const RETRY: Duration = Duration::from_secs(30);
const RETRY_MAX: Duration = Duration::from_secs(3600);
/// A guest's merging takes so long in a pass at most, but for the last request: its shim may be slow on
/// purpose, and others wait for the end of the pass. What is left is planned again in the next.
const MERGE_MAX: Duration = Duration::from_secs(10);
/// Mappings are left for the VMM itself: a process at its limit can map nothing.
const MAPPINGS_SHARE: f64 = 0.7;

/// Bounds of merging.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MergePolicy {
    /// From one look to the next.
    pub period: Duration,
    /// Least pages of a run that is worth a mapping.
    pub run_min: usize,
    /// Threads that hash and that wait for shims.
    pub threads: usize,
}

impl Default for MergePolicy {
    fn default() -> Self {
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(8);
        Self { period: Duration::from_secs(10), run_min: 4, threads }
    }
}

/// A guest whose pages may be merged with those of others of its trust domain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// Its name.
    pub name: String,
    /// Trust domain.
    pub domain: String,
    /// Process of the VMM.
    pub pid: u32,
    /// Bytes of its memory.
    pub memory_bytes: u64,
    /// Directory of the socket `merge` of the shim in it.
    pub dir: PathBuf,
}

/// The virtual machines of a run directory that can be merged.
pub fn targets(run: &RunDir) -> Vec<Target> {
    let mut unreadable = Vec::new();
    let list = super::list(run, &mut unreadable).unwrap_or_default();
    let target = |status: VmStatus| {
        let VmRecord { name, domain, memory_bytes, .. } = status.record;
        let (dir, pid) = (run.path().join("vms").join(&name), status.pid?);
        let target = Target { name, domain, pid, memory_bytes, dir };
        target.dir.join("merge").exists().then_some(target)
    };
    list.into_iter().filter_map(target).collect()
}

/// Preloads the shim into a VMM that is about to be started, with a socket `merge` in a directory.
/// `memory_bytes` is the guest's memory, by which the shim finds it.
///
/// # Errors
/// Those of listening.
pub fn preload(
    command: &mut Command,
    library: &Path,
    dir: &Path,
    memory_bytes: u64,
) -> io::Result<()> {
    let socket = OwnedFd::from(socket::listen(dir, "merge")?);
    command.env("LD_PRELOAD", library);
    command.env(protocol::SOCKET, socket.as_raw_fd().to_string());
    command.env(protocol::MEMORY, memory_bytes.to_string());
    cofolio_sys::process::inherit(command, socket);
    Ok(())
}

/// Merges pages of guests.
#[derive(Debug)]
pub struct Merger {
    policy: MergePolicy,
    /// Where `/proc` is.
    root: PathBuf,
    domains: BTreeMap<String, Domain>,
    failed: HashMap<String, Failed>,
    zeros: NonZeroU64,
}

/// A guest that has failed.
#[derive(Debug)]
struct Failed {
    /// When it is tried again.
    until: Instant,
    waits: Duration,
}

#[derive(Debug, Default)]
struct Domain {
    pools: Pools,
    guests: BTreeMap<String, Guest>,
}

#[derive(Debug)]
struct Guest {
    pid: u32,
    shim: Shim,
    pages: Pages,
    merging: Merging,
}

/// What was merged of a guest.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Merging {
    /// Pages that were mapped from a pool.
    pub pool_pages: u64,
    /// Pages that were replaced with the kernel's page of zeros.
    pub zero_pages: u64,
    /// Pages that had changed meanwhile.
    pub changed_pages: u64,
    /// Pages that could not be moved.
    pub busy_pages: u64,
    /// Runs that the kernel refused.
    pub refused_runs: u64,
}

/// What a pass did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MergeReport {
    /// Pages that were hashed.
    pub hashed_pages: u64,
    /// Pages of new pools.
    pub new_pool_pages: u64,
    /// Bytes of all pools.
    pub pool_bytes: u64,
    /// By name of the guest, since the merger has begun.
    pub guests: HashMap<String, Merging>,
}

impl Merger {
    /// With nothing merged yet.
    pub fn new(policy: MergePolicy) -> Self {
        Self {
            policy,
            root: PathBuf::from("/"),
            domains: BTreeMap::new(),
            failed: HashMap::new(),
            zeros: hash_of(&[0; PAGE]),
        }
    }

    /// Its bounds.
    pub fn policy(&self) -> MergePolicy {
        self.policy
    }

    /// One look at the guests that live now, and what follows from it. To be called once a period.
    /// `log` gets what fails.
    pub fn pass(&mut self, targets: Vec<Target>, log: &(dyn Fn(&str) + Sync)) -> MergeReport {
        self.refresh(targets, log);
        let mut report = MergeReport::default();
        let mut failed = Vec::new();
        for domain in self.domains.values_mut() {
            match domain.pass(&self.policy, self.zeros, &mut failed) {
                Ok((hashed, new)) => {
                    report.hashed_pages += hashed;
                    report.new_pool_pages += new;
                }
                Err(error) => log(&format!("no pool could be made: {error}")),
            }
            report.pool_bytes += domain.pools.bytes();
            report.guests.extend(domain.guests.iter().map(|(name, it)| (name.clone(), it.merging)));
        }
        for (name, error) in failed {
            let guest = self.domains.values_mut().find_map(|domain| domain.guests.remove(&name));
            // One that has ended is no failure.
            let proc = self.root.join("proc");
            if guest.is_some_and(|guest| proc.join(guest.pid.to_string()).exists()) {
                self.fail(name, &error, log);
            }
        }
        report
    }

    /// Begins with new guests, and forgets those that have ended.
    fn refresh(&mut self, targets: Vec<Target>, log: &(dyn Fn(&str) + Sync)) {
        let proc = self.root.join("proc");
        let pids: HashMap<&str, u32> = targets.iter().map(|it| (&*it.name, it.pid)).collect();
        for domain in self.domains.values_mut() {
            domain.guests.retain(|name, guest| pids.get(&**name) == Some(&guest.pid));
            domain.pools.retain_living(|pid| proc.join(pid.to_string()).exists());
        }
        self.domains.retain(|_, domain| !domain.guests.is_empty());
        let now = Instant::now();
        // One that was well for as long as it had waited begins anew.
        self.failed.retain(|name, it| pids.contains_key(&**name) && now < it.until + it.waits);
        for target in targets {
            let knows = |domain: &Domain| domain.guests.contains_key(&target.name);
            let waits = self.failed.get(&target.name).is_some_and(|it| now < it.until);
            if waits || self.domains.values().any(knows) {
                continue;
            }
            match Guest::begin(&proc, &target) {
                Ok(guest) => {
                    let domain = self.domains.entry(target.domain).or_default();
                    domain.guests.insert(target.name, guest);
                }
                Err(error) => self.fail(target.name, &error, log),
            }
        }
    }

    fn fail(&mut self, name: String, error: &io::Error, log: &(dyn Fn(&str) + Sync)) {
        log(&format!("virtual machine {name} is not merged: {error}"));
        let waits = self.failed.get(&name).map_or(RETRY, |it| (it.waits * 2).min(RETRY_MAX));
        self.failed.insert(name, Failed { until: Instant::now() + waits, waits });
    }
}

impl Domain {
    /// One pass: pages hashed, and pages of new pools.
    fn pass(
        &mut self,
        policy: &MergePolicy,
        zeros: NonZeroU64,
        failed: &mut Vec<(String, io::Error)>,
    ) -> io::Result<(u64, u64)> {
        let hashed = self.look_and_hash(policy, failed);
        let names: Vec<String> = self.guests.keys().cloned().collect();
        let hashes: Vec<_> = self.guests.values().map(|guest| guest.pages.hashes()).collect();
        let bounds = Bounds { run_min: policy.run_min, zeros, pool_pages: POOL_PAGES };
        let plan = plan(&hashes, &self.pools.slots, self.pools.next_slot(), &bounds);
        let guests: Vec<&Guest> = self.guests.values().collect();
        let copies: Vec<u8> = plan.new.iter().map(|(_, _, content)| content.copy).collect();
        let read = |first: usize, content: &mut [u8]| {
            let mut number = 0;
            let new = &plan.new[first..first + content.len() / PAGE];
            // Pages one behind the other are read at once.
            let is_next =
                |(guest, page, _): &_, (other, next, _): &_| guest == other && page + 1 == *next;
            for run in new.chunk_by(is_next) {
                let content = &mut content[number * PAGE..(number + run.len()) * PAGE];
                let (guest, page, _) = run[0];
                // A guest that has ended, or has discarded it: zeros are as good a content as any.
                if guests[guest].pages.read(page, content).is_err() {
                    content.fill(0);
                }
                number += run.len();
            }
        };
        self.pools.add(&copies, policy.threads, read)?;
        let new = copies.len() as u64;
        let pools = Mutex::new(&mut self.pools);
        let work =
            Mutex::new(self.guests.values_mut().zip(plan.runs).zip(names).collect::<Vec<_>>());
        let errors = Mutex::new(failed);
        std::thread::scope(|scope| {
            for _ in 0..policy.threads {
                scope.spawn(|| {
                    while let Some(((guest, runs), name)) = next(&work) {
                        if let Err(error) = guest.merge(&runs, &pools) {
                            lock(&errors).push((name, error));
                        }
                    }
                });
            }
        });
        Ok((hashed, new))
    }

    fn look_and_hash(
        &mut self,
        policy: &MergePolicy,
        failed: &mut Vec<(String, io::Error)>,
    ) -> u64 {
        let hashed = AtomicU64::new(0);
        let errors = Mutex::new(Vec::new());
        let mut parts = Vec::new();
        for (name, guest) in &mut self.guests {
            match guest.pages.look() {
                Ok(()) => parts.extend(guest.pages.parts(PART_PAGES).map(|part| (name, part))),
                Err(error) => lock(&errors).push((name.clone(), error)),
            }
        }
        let parts = Mutex::new(parts);
        std::thread::scope(|scope| {
            for _ in 0..policy.threads {
                scope.spawn(|| {
                    while let Some((name, part)) = next(&parts) {
                        match part.hash() {
                            Ok(count) => _ = hashed.fetch_add(count, Relaxed),
                            Err(error) => lock(&errors).push((name.clone(), error)),
                        }
                    }
                });
            }
        });
        failed.extend(errors.into_inner().unwrap_or_default());
        hashed.into_inner()
    }
}

/// Takes work. In the head of a `while let` the lock would be held for the body as well, and all threads
/// but one would wait.
fn next<T>(work: &Mutex<Vec<T>>) -> Option<T> {
    lock(work).pop()
}

fn lock<T: ?Sized>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

impl Guest {
    fn begin(proc: &Path, target: &Target) -> io::Result<Self> {
        let socket = socket::connect(&target.dir, "merge")?;
        // Its pages are read, and it gets pools with what it has in common with others: so both must be
        // of one process. The VMM itself has written which it is, and could name one of another domain.
        let peer = rustix::net::sockopt::socket_peercred(&socket)?.pid.as_raw_nonzero().get();
        if u32::try_from(peer) != Ok(target.pid) {
            let what = format!("process {peer} answers for its VMM, process {}", target.pid);
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, what));
        }
        let (shim, hello) = Shim::new(socket)?;
        let Hello { start, len, .. } = hello;
        let is_aligned = start.is_multiple_of(PAGE as u64);
        if len != target.memory_bytes || !is_aligned || start.checked_add(len).is_none() {
            let what = format!("its shim names {len} bytes at {start:#x} as its memory");
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        }
        let pages = Pages::new(proc, target.pid, start, len)?;
        Ok(Self { pid: target.pid, shim, pages, merging: Merging::default() })
    }

    /// Merges runs, as many as it may have mappings for.
    fn merge(&mut self, planned: &[PlannedRun], pools: &Mutex<&mut Pools>) -> io::Result<()> {
        let began = Instant::now();
        let mut mappings = self.mappings_left();
        let mut runs = Vec::new();
        for PlannedRun { pages, source } in planned {
            let (pool, pool_page) = match source {
                Source::Zeros => (ZEROS, 0),
                Source::Slot(slot) => {
                    // One for it, and one for what is behind it.
                    if mappings < 2 {
                        break;
                    }
                    mappings -= 2;
                    let number = u32::try_from(slot / POOL_PAGES).unwrap_or(u32::MAX);
                    let mut pools = lock(pools);
                    let Some(pool) = pools.pools.get_mut(&number) else { continue };
                    self.shim.give(number, pool.pages, &pool.file)?;
                    pool.users.insert(self.pid);
                    (number, u32::try_from(slot % POOL_PAGES).unwrap_or(0))
                }
            };
            let count = u32::try_from(pages.len()).unwrap_or(u32::MAX);
            runs.push(Run { page: pages.start as u64, pool, pool_page, pages: count, reserved: 0 });
        }
        for runs in runs.chunks(RUNS_MAX.min(256)) {
            if began.elapsed() >= MERGE_MAX {
                break;
            }
            let outcomes = self.shim.merge(runs)?;
            for (run, outcome) in runs.iter().zip(outcomes) {
                let merged = u64::from(outcome.count());
                match run.pool {
                    ZEROS => self.merging.zero_pages += merged,
                    _ => self.merging.pool_pages += merged,
                }
                self.merging.changed_pages += u64::from(outcome.changed);
                self.merging.busy_pages += u64::from(outcome.busy);
                self.merging.refused_runs += u64::from(outcome.errno != 0);
                for number in 0..run.pages as usize {
                    let page = usize::try_from(run.page).unwrap_or(0) + number;
                    match outcome.is_merged(number) {
                        true => self.pages.set_merged(page),
                        false => self.pages.set_volatile(page),
                    }
                }
            }
        }
        Ok(())
    }

    /// How many mappings more the process may get.
    fn mappings_left(&self) -> u64 {
        let limit = kernel_text::read("/proc/sys/vm/max_map_count".as_ref()).ok();
        let limit = limit.and_then(|text| text.trim().parse::<u64>().ok()).unwrap_or(65_530);
        let maps = format!("/proc/{}/maps", self.pid);
        let used =
            kernel_text::read(maps.as_ref()).map_or(limit, |maps| maps.lines().count() as u64);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a share of it"
        )]
        let most = (limit as f64 * MAPPINGS_SHARE) as u64;
        most.saturating_sub(used)
    }
}
