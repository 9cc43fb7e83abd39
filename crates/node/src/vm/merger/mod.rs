//! The merger: pages that guests of a trust domain have in common are in memory once.
//!
//! ```text
//! look    which pages were not written to since the last look (PAGEMAP_SCAN, write-protecting)
//! hash    those that stayed for a whole period, on several threads
//! plan    which are the same: longest runs first; their contents go to sealed pools
//! merge   the shim of each VMM compares again, and maps the pool (crate shim)
//! survey  now and then: what is mapped of pools still, and what of it was written to since
//! ```
//!
//! A period lies between two looks. The recycler goes first: what a guest has freed need not be
//! merged. Nothing crosses trust domains: each has its own pools and its own plan. A pass over guests
//! that stay as they are ends with the look.

mod guest;
mod image;
mod plan;
mod pool;
mod refusal;
mod scan;
mod shim;

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::num::NonZeroU64;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use cofolio_shim::protocol::{self, PAGE};

pub use self::guest::Merging;
use self::guest::{Guest, Used};
use self::image::Images;
use self::plan::{Bounds, Input, plan};
use self::pool::{POOL_PAGES, Pools};
use self::scan::hash_of;
use super::{Started, VmRecord, VmStatus, socket};
use crate::run_dir::RunDir;

/// Pages that a thread hashes before it takes the next ones.
const PART_PAGES: usize = 4096;
/// After an error a guest is left alone for so long, and after each further one for twice as long: a shim
/// that does not answer holds up the others.
const RETRY: Duration = Duration::from_secs(30);
const RETRY_MAX: Duration = Duration::from_secs(3600);
/// From so many pools on, small ones are put together.
const POOLS_MANY: usize = 128;
/// Passes from one survey to the next.
const SURVEY: u64 = 6;

/// Bounds of merging.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MergePolicy {
    /// From one look to the next.
    pub period: Duration,
    /// Least pages of a run that is worth a mapping.
    pub run_min: usize,
    /// Merge blocks of 2 MiB as a whole, or not at all: huge pages stay huge.
    pub blocks: bool,
    /// Threads that hash and that wait for shims.
    pub threads: usize,
    /// Processors that all of its threads take together at most, on average.
    pub share: f64,
}

impl Default for MergePolicy {
    fn default() -> Self {
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(8);
        let period = Duration::from_secs(10);
        Self { period, run_min: 4, blocks: false, threads, share: 0.5 }
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
    /// Directory of the socket `merge` of the shim in it.
    pub dir: PathBuf,
    /// Memory of the guest in bytes.
    pub memory_bytes: u64,
    /// Digests, in hex, of the files of its image, which the VMM has mapped.
    pub image: Vec<String>,
}

/// The virtual machines of a run directory that can be merged.
pub fn targets(run: &RunDir) -> Vec<Target> {
    let mut unreadable = Vec::new();
    let list = super::list(run, &mut unreadable).unwrap_or_default();
    let target = |status: VmStatus| {
        // No shim is in the VMM of an attached one.
        let Started { pack, segments, .. } = status.record.started().ok()?;
        let image = [pack].into_iter().chain(segments).map(ToString::to_string).collect();
        let VmRecord { name, domain, memory_bytes, .. } = status.record;
        let dir = run.path().join("vms").join(&name);
        let is_merged = dir.join("merge").exists();
        let pid = status.pid.filter(|_| is_merged)?;
        Some(Target { name, domain, pid, dir, memory_bytes, image })
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
    passes: u64,
}

#[derive(Debug, Default)]
struct Domain {
    pools: Pools,
    images: Images,
    guests: BTreeMap<String, Guest>,
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
    /// No pass before so much time is over, so that the bounds are kept.
    pub wait: Duration,
}

/// A guest that has failed.
#[derive(Debug)]
struct Failed {
    /// When it is tried again.
    until: Instant,
    waits: Duration,
}

/// Guests, by name, and why they failed.
type Errors = Vec<(String, io::Error)>;

impl Merger {
    /// With nothing merged yet.
    pub fn new(policy: MergePolicy) -> Self {
        Self {
            policy,
            root: PathBuf::from("/"),
            domains: BTreeMap::new(),
            failed: HashMap::new(),
            zeros: hash_of(&[0; PAGE]),
            passes: 0,
        }
    }

    /// Its bounds.
    pub fn policy(&self) -> MergePolicy {
        self.policy
    }

    /// One look at the guests that live now, and what follows from it. `log` gets what fails.
    pub fn pass(&mut self, targets: Vec<Target>, log: &(dyn Fn(&str) + Sync)) -> MergeReport {
        let began = Instant::now();
        self.refresh(targets, log);
        self.passes += 1;
        let is_survey = self.passes.is_multiple_of(SURVEY);
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
            if is_survey {
                domain.survey(&self.policy, &mut failed);
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
        // As if all threads had been busy all the time, and the shims with them.
        let used = began.elapsed().mul_f64(self.policy.threads as f64);
        let rest = used.div_f64(self.policy.share.max(0.001)).saturating_sub(began.elapsed());
        report.wait = rest.max(self.policy.period.saturating_sub(began.elapsed()));
        report
    }

    fn fail(&mut self, name: String, error: &io::Error, log: &(dyn Fn(&str) + Sync)) {
        log(&format!("virtual machine {name} is not merged: {error}"));
        let waits = self.failed.get(&name).map_or(RETRY, |it| (it.waits * 2).min(RETRY_MAX));
        self.failed.insert(name, Failed { until: Instant::now() + waits, waits });
    }

    /// Begins with new guests, and forgets those that have ended.
    fn refresh(&mut self, targets: Vec<Target>, log: &(dyn Fn(&str) + Sync)) {
        let proc = self.root.join("proc");
        let pids: HashMap<&str, u32> = targets.iter().map(|it| (&*it.name, it.pid)).collect();
        let lives = |pid: u32| proc.join(pid.to_string()).exists();
        for domain in self.domains.values_mut() {
            domain.guests.retain(|name, guest| pids.get(&**name) == Some(&guest.pid));
            domain.pools.retain_living(lives);
            domain.images.retain_living(lives);
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
            let domain = self.domains.entry(target.domain.clone()).or_default();
            match Guest::begin(&proc, &target, &mut domain.pools, &mut domain.images) {
                Ok(guest) => _ = domain.guests.insert(target.name, guest),
                Err(error) => self.fail(target.name, &error, log),
            }
        }
    }
}

impl Domain {
    /// One pass: pages hashed, and pages of new pools.
    fn pass(
        &mut self,
        policy: &MergePolicy,
        zeros: NonZeroU64,
        failed: &mut Errors,
    ) -> io::Result<(u64, u64)> {
        let hashed = self.look_and_hash(policy, failed);
        // Nothing new is known of any guest.
        if hashed == 0 {
            return Ok((0, 0));
        }
        self.images.look(zeros)?;
        let guests = self.guests.values();
        let inputs =
            guests.map(|guest| Input { hashes: guest.pages.hashes(), runs_max: guest.runs_left() });
        let inputs: Vec<_> = inputs.collect();
        let bounds = Bounds {
            run_min: policy.run_min,
            blocks: policy.blocks,
            zeros,
            pool_pages: POOL_PAGES,
        };
        let (pools, images) = (&self.pools.slots, &self.images.slots);
        let known = |content: &_| pools.get(content).or_else(|| images.get(content)).copied();
        let plan = plan(&inputs, &known, self.pools.next(), &bounds);
        self.fill_pools(policy, &plan.new)?;
        let mut work = Vec::new();
        for ((name, guest), runs) in self.guests.iter_mut().zip(plan.runs) {
            match guest.give(&runs, &mut self.pools, &self.images) {
                Ok(()) => work.push((name, guest, runs)),
                Err(error) => failed.push((name.clone(), error)),
            }
        }
        on_threads(policy.threads, work, failed, |(name, guest, runs)| {
            guest.merge(&runs).map_err(|error| (name.clone(), error))
        });
        Ok((hashed, plan.new.len() as u64))
    }

    /// Copies new contents of pools from the guests that have them.
    fn fill_pools(&mut self, policy: &MergePolicy, new: &[(usize, usize)]) -> io::Result<()> {
        let guests: Vec<&Guest> = self.guests.values().collect();
        let read = |first: usize, content: &mut [u8]| {
            let mut number = 0;
            let new = &new[first..first + content.len() / PAGE];
            // Pages one behind the other are read at once.
            let is_next =
                |(guest, page): &_, (other, next): &_| guest == other && page + 1 == *next;
            for run in new.chunk_by(is_next) {
                let content = &mut content[number * PAGE..(number + run.len()) * PAGE];
                let (guest, page) = run[0];
                // A guest that has ended, or has discarded it: zeros are as good a content as any.
                if guests[guest].pages.read(page, content).is_err() {
                    content.fill(0);
                }
                number += run.len();
            }
        };
        self.pools.add(new.len(), policy.threads, read)
    }

    fn look_and_hash(&mut self, policy: &MergePolicy, failed: &mut Errors) -> u64 {
        let mut parts = Vec::new();
        let mut hashed = 0;
        for (name, guest) in &mut self.guests {
            match guest.pages.look() {
                Ok(()) => {
                    hashed += guest.pages.due() as u64;
                    parts.extend(guest.pages.parts(PART_PAGES).into_iter().map(|it| (name, it)));
                }
                Err(error) => failed.push((name.clone(), error)),
            }
        }
        on_threads(policy.threads, parts, failed, |(name, part)| {
            part.hash().map_err(|error| (name.clone(), error))
        });
        hashed
    }

    /// Gives pools up that nobody maps, and makes merged pages the guests' own again where that is better.
    fn survey(&mut self, policy: &MergePolicy, failed: &mut Errors) {
        let mut used = Used::new();
        let mut surveys = Vec::new();
        for (name, guest) in &mut self.guests {
            match guest.survey(&self.pools, &mut used) {
                Ok(survey) => surveys.push((name, guest, survey)),
                // It may map any pool.
                Err(error) => return failed.push((name.clone(), error)),
            }
        }
        let many = self.pools.pools.len() > POOLS_MANY;
        let is_wasted = |inode: u64| used.get(&inode).is_some_and(|it| it.is_wasted(many));
        for (name, guest, survey) in &mut surveys {
            if let Err(error) = guest.convert(survey, &is_wasted, policy.run_min) {
                failed.push(((*name).clone(), error));
            }
        }
        let is_used = |inode: u64| used.get(&inode).is_some_and(|it| it.count() > 0);
        let unused = self.pools.take(|pool| !is_used(pool.inode));
        for (name, guest) in &mut self.guests {
            if let Err(error) = guest.forget(&unused) {
                failed.push((name.clone(), error));
            }
        }
    }
}

/// Does work on so many threads.
fn on_threads<T: Send>(
    threads: usize,
    work: Vec<T>,
    failed: &mut Errors,
    each: impl Fn(T) -> Result<(), (String, io::Error)> + Sync,
) {
    let threads = threads.min(work.len());
    let (work, failed) = (Mutex::new(work), Mutex::new(failed));
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(one) = next(&work) {
                    if let Err(error) = each(one) {
                        lock(&failed).push(error);
                    }
                }
            });
        }
    });
}

/// Takes work. In the head of a `while let` the lock would be held for the body as well, and all threads
/// but one would wait.
fn next<T>(work: &Mutex<Vec<T>>) -> Option<T> {
    lock(work).pop()
}

fn lock<T: ?Sized>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
