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
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use cofolio_shim::protocol;

use self::domain::Domain;
pub use self::guest::Merging;
use super::{VmRecord, VmStatus, socket};
use crate::run_dir::RunDir;

/// The merger waits this long for the passes of all trust domains, which run at the same time. A
/// longer pass continues on its thread, and the others do not wait for it again.
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
    // Without root's privileges a process makes a userfaultfd for the kernel's accesses only by
    // this. Where it is missing (before Linux 6.1) pages cannot be moved either.
    if let Ok(device) = File::options().read(true).write(true).open("/dev/userfaultfd") {
        command.env(protocol::USERFAULTFD, device.as_raw_fd().to_string());
        cofolio_sys::process::inherit(command, device.into());
    }
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

/// A trust domain, with the report of its last pass.
#[derive(Debug)]
struct Slot {
    state: State,
    last: MergeReport,
    /// No pass before, to stay within [`MergePolicy::share`].
    rests_until: Instant,
}

#[derive(Debug)]
enum State {
    Idle(Box<Domain>),
    /// A thread has it.
    Busy(Receiver<Passed>),
}

/// A pass has ended.
#[derive(Debug)]
struct Passed {
    domain: Box<Domain>,
    report: MergeReport,
    said: Vec<String>,
    took: Duration,
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
            self.domains.entry(name.clone()).or_insert_with(|| Slot::new(self.policy));
        }
        // A domain without a guest.
        self.domains.retain(|name, slot| by_domain.contains_key(name) || !slot.is_idle());
        // Each domain has a part of the time, so that none takes that of the others.
        let share = self.policy.share.max(0.001) / self.domains.len().max(1) as f64;
        let mut started = Vec::new();
        for (name, slot) in &mut self.domains {
            slot.collect(name, Duration::ZERO, self.policy, share, log);
            started.push(slot.start(name, by_domain.remove(name).unwrap_or_default(), log));
        }
        let mut report = MergeReport::default();
        let mut wait = None;
        for ((name, slot), started) in self.domains.iter_mut().zip(started) {
            if started {
                let within = PASS_MAX.saturating_sub(began.elapsed());
                slot.collect(name, within, self.policy, share, log);
                if !slot.is_idle() {
                    let seconds = PASS_MAX.as_secs();
                    log(&format!("merging in trust domain {name} still goes on after {seconds} s"));
                }
            }
            report.add(&mut slot.last);
            if slot.is_idle() {
                let rest = slot.rests_until.saturating_duration_since(Instant::now());
                wait = Some(wait.map_or(rest, |wait: Duration| wait.min(rest)));
            }
        }
        report.wait =
            wait.unwrap_or_default().max(self.policy.period.saturating_sub(began.elapsed()));
        report
    }
}

impl MergeReport {
    /// Adds a domain's report. Its pages are only counted once.
    fn add(&mut self, of_domain: &mut Self) {
        self.hashed_pages += std::mem::take(&mut of_domain.hashed_pages);
        self.new_pool_pages += std::mem::take(&mut of_domain.new_pool_pages);
        self.pool_bytes += of_domain.pool_bytes;
        self.guests.extend(of_domain.guests.clone());
    }
}

impl Slot {
    fn new(policy: MergePolicy) -> Self {
        let state = State::Idle(Box::new(Domain::new(policy)));
        Self { state, last: MergeReport::default(), rests_until: Instant::now() }
    }

    fn is_idle(&self) -> bool {
        matches!(self.state, State::Idle(_))
    }

    /// Starts a pass on a thread of its own, unless one goes on or it rests: a VMM can block a
    /// thread that reads its memory for as long as it lives, and must not block other domains.
    /// Returns whether it did.
    fn start(&mut self, name: &str, targets: Vec<Target>, log: &dyn Fn(&str)) -> bool {
        if Instant::now() < self.rests_until || !self.is_idle() {
            return false;
        }
        let (done, thread) = mpsc::channel();
        let State::Idle(mut domain) = std::mem::replace(&mut self.state, State::Busy(thread))
        else {
            return false;
        };
        let work = move || {
            let began = Instant::now();
            let (report, said) = domain.pass(targets);
            let _ = done.send(Passed { domain, report, said, took: began.elapsed() });
        };
        let spawned = std::thread::Builder::new().name("merger".to_owned()).spawn(work);
        if let Err(error) = spawned {
            log(&format!("no thread for merging in trust domain {name}: {error}"));
        }
        true
    }

    /// Waits for the end of its pass, if one goes on.
    fn collect(
        &mut self,
        name: &str,
        within: Duration,
        policy: MergePolicy,
        share: f64,
        log: &dyn Fn(&str),
    ) {
        let State::Busy(thread) = &self.state else { return };
        match thread.recv_timeout(within) {
            Ok(Passed { domain, report, said, took }) => {
                said.iter().for_each(|line| log(line));
                (self.state, self.last) = (State::Idle(domain), report);
                // Counts all threads as busy the whole time, which includes the time of the shims.
                let used = took.mul_f64(policy.threads as f64);
                self.rests_until = Instant::now() + used.div_f64(share).saturating_sub(took);
            }
            Err(RecvTimeoutError::Timeout) => {}
            // The new domain adopts the pools from the shims.
            Err(RecvTimeoutError::Disconnected) => {
                log(&format!("the thread that merges in trust domain {name} has failed"));
                *self = Self::new(policy);
            }
        }
    }
}

/// Takes work. In the head of a `while let` the lock would be held for the body as well, and all
/// threads but one would wait.
fn next<T>(work: &Mutex<Vec<T>>) -> Option<T> {
    lock(work).pop()
}

fn lock<T: ?Sized>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
