//! The merger: pages that guests of a trust domain have in common are in memory once.
//!
//! ```text
//! look    finds pages that were written to since the last look, and write-protects them (PAGEMAP_SCAN)
//! hash    hashes pages that were not written to for a whole period, on several threads
//! plan    finds equal pages, the longest runs first; copies one of each into a sealed pool
//! merge   the shim of each VMM compares again, and maps the pool (crate shim)
//! survey  now and then: finds unused pools, and merged pages that guests have written to
//! ```
//!
//! A period lies between two looks. The recycler goes first: freed pages need not be merged.
//! Nothing crosses trust domains: each has its own pools, plan and thread. A pass in which no page
//! was hashed ends after the second step.

mod domain;
mod guest;
mod image;
mod plan;
mod pool;
mod refusal;
mod scan;
mod shim;

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::mpsc::{self, Receiver, TryRecvError};
use std::time::{Duration, Instant};

use cofolio_shim::protocol;

use self::domain::Domain;
pub use self::guest::Merging;
use super::{VmRecord, VmStatus, socket};
use crate::run_dir::RunDir;

/// The merger waits this long for the pass of a trust domain. A longer pass continues on its
/// thread.
const PASS_MAX: Duration = Duration::from_secs(20);

/// Bounds of merging.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MergePolicy {
    /// From one look to the next.
    pub period: Duration,
    /// Shortest run of pages that is worth a mapping.
    pub run_min: usize,
    /// Merge blocks of 2 MiB as a whole, or not at all: huge pages stay huge.
    pub blocks: bool,
    /// Threads that hash and that wait for shims.
    pub threads: usize,
    /// Most processors that all threads together use on average.
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
}

/// The virtual machines of a run directory that can be merged.
pub fn targets(run: &RunDir) -> Vec<Target> {
    let mut unreadable = Vec::new();
    let list = super::list(run, &mut unreadable).unwrap_or_default();
    let target = |status: VmStatus| {
        let VmRecord { name, domain, memory_bytes, .. } = status.record;
        let dir = run.path().join("vms").join(&name);
        // Only a VMM with the shim has it.
        let is_merged = dir.join("merge").exists();
        let pid = status.pid.filter(|_| is_merged)?;
        Some(Target { name, domain, pid, dir, memory_bytes })
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
    domains: BTreeMap<String, Slot>,
}

/// A trust domain between two passes, or in one.
#[derive(Debug)]
enum Slot {
    Idle(Box<Domain>),
    /// A thread has it. With the report of its last pass.
    Busy(Receiver<Passed>, MergeReport),
}

/// A pass has ended.
#[derive(Debug)]
struct Passed {
    domain: Box<Domain>,
    report: MergeReport,
    said: Vec<String>,
}

/// Result of a pass.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MergeReport {
    /// Pages that were hashed.
    pub hashed_pages: u64,
    /// Pages of new pools.
    pub new_pool_pages: u64,
    /// Bytes of all pools.
    pub pool_bytes: u64,
    /// By name of the guest, since the merger has begun. Also guests that are not merged, and why.
    pub guests: HashMap<String, Merging>,
    /// Time until the next pass: the period, or longer to stay within [`MergePolicy::share`].
    pub wait: Duration,
}

impl Merger {
    /// With nothing merged yet.
    pub fn new(policy: MergePolicy) -> Self {
        Self { policy, domains: BTreeMap::new() }
    }

    /// Its bounds.
    pub fn policy(&self) -> MergePolicy {
        self.policy
    }

    /// Merges pages of these guests. `log` receives failures.
    pub fn pass(&mut self, targets: Vec<Target>, log: &dyn Fn(&str)) -> MergeReport {
        let began = Instant::now();
        let mut by_domain: BTreeMap<String, Vec<Target>> = BTreeMap::new();
        for target in targets {
            by_domain.entry(target.domain.clone()).or_default().push(target);
        }
        for name in by_domain.keys() {
            let new = || Slot::Idle(Box::new(Domain::new(self.policy)));
            self.domains.entry(name.clone()).or_insert_with(new);
        }
        let mut report = MergeReport::default();
        for (name, slot) in std::mem::take(&mut self.domains) {
            let targets = by_domain.remove(&name).unwrap_or_default();
            let is_over = targets.is_empty();
            let (slot, of_domain) = slot.pass(&name, targets, self.policy, log);
            report.hashed_pages += of_domain.hashed_pages;
            report.new_pool_pages += of_domain.new_pool_pages;
            report.pool_bytes += of_domain.pool_bytes;
            report.guests.extend(of_domain.guests);
            if !(is_over && matches!(slot, Slot::Idle(_))) {
                self.domains.insert(name, slot);
            }
        }
        // Counts all threads as busy the whole time, which includes the time of the shims.
        let used = began.elapsed().mul_f64(self.policy.threads as f64);
        let rest = used.div_f64(self.policy.share.max(0.001)).saturating_sub(began.elapsed());
        report.wait = rest.max(self.policy.period.saturating_sub(began.elapsed()));
        report
    }
}

impl Slot {
    /// One pass of a trust domain, on a thread of its own: a VMM can block a thread that reads its
    /// memory for as long as it lives, and must not block other domains.
    fn pass(
        self,
        name: &str,
        targets: Vec<Target>,
        policy: MergePolicy,
        log: &dyn Fn(&str),
    ) -> (Self, MergeReport) {
        let mut domain = match self {
            Self::Idle(domain) => domain,
            Self::Busy(thread, last) => match thread.try_recv() {
                Ok(passed) => {
                    passed.said.iter().for_each(|line| log(line));
                    passed.domain
                }
                Err(TryRecvError::Empty) => return (Self::Busy(thread, last.clone()), last),
                // It has panicked. The new domain adopts the pools from the shims.
                Err(TryRecvError::Disconnected) => Box::new(Domain::new(policy)),
            },
        };
        let last = domain.report();
        let (done, thread) = mpsc::channel();
        let work = move || {
            let (report, said) = domain.pass(targets);
            let _ = done.send(Passed { domain, report, said });
        };
        let spawned = std::thread::Builder::new().name("merger".to_owned()).spawn(work);
        if let Err(error) = spawned {
            log(&format!("no thread for the merging of trust domain {name}: {error}"));
        }
        match thread.recv_timeout(PASS_MAX) {
            Ok(Passed { domain, report, said }) => {
                said.iter().for_each(|line| log(line));
                (Self::Idle(domain), report)
            }
            Err(_) => {
                log(&format!("the merging of trust domain {name} does not go on"));
                (Self::Busy(thread, last.clone()), last)
            }
        }
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
