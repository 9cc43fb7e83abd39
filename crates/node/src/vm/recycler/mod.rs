//! The recycler: returns memory that guests have freed to the host.
//!
//! ```text
//! free page reporting   the guest reports free pages by itself, a sixteenth of its list every 2 s
//! pulse                 the balloon takes free pages and lets them go: all are returned at once
//!
//! guest's statistics ─┐
//! host's counters ────┴▶ controller ─▶ pulse: inflate ─▶ as far as it goes ─▶ deflate
//! ```
//!
//! Reporting is on in every machine that Cofolio starts. It takes seconds to half a minute; the
//! pulse returns the rest within seconds. A pulse leaves each guest a reserve of free memory, ends
//! as soon as the guest needs more, and comes the less often the sooner a guest takes its memory
//! back. A balloon that is found inflated is let go first: whoever inflated it was killed.
//!
//! Each guest has a thread, so that a VMM that does not answer holds up no other guest. All of them
//! together keep to one share of a processor.

pub(super) mod balloon;
mod controller;
mod guest;
mod host;
mod share;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::convert::Infallible;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use self::controller::Pressure;
pub use self::controller::{LATENCY_MS, Latencies, Policy};
use self::guest::{Guest, STEP};
use self::host::{Vmm, pressure};
use self::share::Share;
use super::{VmRecord, VmStatus};
use crate::address_space::{access_time, own_time};
use crate::run_dir::RunDir;

/// How often the host's pressure is read anew, and the list of guests.
const TICK: Duration = Duration::from_secs(1);
const REFRESH: Duration = Duration::from_secs(2);
/// After an error a guest is left alone for so long; a VMM that has just been started may have no
/// memory yet, so the first time for less.
const RETRY: Duration = Duration::from_secs(10);
const FIRST_RETRY: Duration = Duration::from_secs(2);
/// How long the end waits for balloons to be let go.
const END_MAX: Duration = Duration::from_secs(2);
/// Stack of a guest's thread. There can be many.
const STACK_BYTES: usize = 256 << 10;

/// Recycles the memory of all virtual machines of a run directory.
#[derive(Debug)]
pub struct Recycler {
    run: RunDir,
    shared: Arc<Shared>,
    refreshed: Option<Duration>,
    workers: HashMap<String, Worker>,
    failed: HashMap<String, Failed>,
    /// Of those that have ended, too.
    latencies: Latencies,
    returned: u64,
}

/// What the recycler does with a guest.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recycling {
    /// Free bytes, as the guest said last.
    pub free_bytes: u64,
    /// Bytes of files in its caches, as the guest said last.
    pub cache_bytes: u64,
    /// Of the free ones, what the host still holds, at least.
    pub unreturned_bytes: u64,
    /// Pulses so far.
    pub pulses: u64,
    /// Of these, how many ended early because the guest needed memory, or the host became busy.
    pub aborted: u64,
    /// Bytes that pulses have returned.
    pub returned_bytes: u64,
    /// Why nothing is done, if so.
    pub refusal: Option<String>,
}

/// All guests together.
#[derive(Debug, Clone, Default)]
pub struct RecyclerReport {
    /// By name.
    pub guests: HashMap<String, Recycling>,
    /// Bytes that pulses have returned, also those of machines that have ended.
    pub returned_bytes: u64,
    /// How long freed memory waited for its return.
    pub latencies: Latencies,
}

/// Shared by all threads.
#[derive(Debug)]
struct Shared {
    policy: Policy,
    began: Instant,
    /// Where `/proc` is.
    proc: PathBuf,
    share: Share,
    pressure: Mutex<Pressure>,
}

/// The thread of a guest.
#[derive(Debug)]
struct Worker {
    pid: u32,
    thread: JoinHandle<io::Result<()>>,
    /// The thread ends when this is dropped.
    _ends: Sender<Infallible>,
    /// Nothing before the first step.
    done: Arc<Mutex<Option<Done>>>,
}

/// Results of a thread so far.
#[derive(Debug, Clone)]
struct Done {
    recycling: Recycling,
    latencies: Latencies,
}

/// A guest that could not be recycled.
#[derive(Debug)]
struct Failed {
    /// When it is tried again.
    until: Duration,
    /// In a row.
    times: u32,
    why: String,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Recycler {
    /// For the machines of a run directory.
    pub fn new(run: RunDir, policy: Policy) -> Self {
        Self::with_proc(run, policy, PathBuf::from("/proc"))
    }

    fn with_proc(run: RunDir, policy: Policy, proc: PathBuf) -> Self {
        let share = Share::new(policy.share);
        let pressure = Mutex::default();
        Self {
            run,
            shared: Arc::new(Shared { policy, began: Instant::now(), proc, share, pressure }),
            refreshed: None,
            workers: HashMap::new(),
            failed: HashMap::new(),
            latencies: Latencies::default(),
            returned: 0,
        }
    }

    /// Goes on counting where another one has ended.
    pub fn after(self, ended: &RecyclerReport) -> Self {
        let (latencies, returned) = (ended.latencies.clone(), ended.returned_bytes);
        Self { latencies, returned, ..self }
    }

    /// Its bounds.
    pub fn policy(&self) -> Policy {
        self.shared.policy
    }

    /// Begins with new guests, forgets those that have ended, and looks how busy the host is.
    /// Returns when it is to be called next. `log` gets what fails.
    pub fn tick(&mut self, log: &(dyn Fn(&str) + Sync)) -> Duration {
        let before = own_time();
        let now = self.shared.began.elapsed();
        *lock(&self.shared.pressure) = pressure(&self.shared.proc);
        self.reap(now, log);
        if self.refreshed.is_none_or(|at| now >= at + REFRESH) {
            self.refresh(now, log);
            self.refreshed = Some(now);
        }
        self.shared.share.charge(now, own_time().saturating_sub(before));
        TICK
    }

    /// Lets all balloons go, at the end. One whose VMM does not answer in time stays as it is,
    /// until another recycler comes.
    pub fn end(&mut self) {
        let workers: Vec<_> = self.workers.drain().map(|(_, worker)| worker).collect();
        for worker in &workers {
            self.add(&worker.done);
        }
        let threads: Vec<_> = workers.into_iter().map(|worker| worker.thread).collect();
        let until = Instant::now() + END_MAX;
        while !threads.iter().all(JoinHandle::is_finished) && Instant::now() < until {
            thread::sleep(STEP / 5);
        }
    }

    /// What it does and has done.
    pub fn report(&self) -> RecyclerReport {
        let mut latencies = self.latencies.clone();
        let mut returned_bytes = self.returned;
        let failed = self.failed.iter().map(|(name, failed)| {
            let refusal = Some(failed.why.clone());
            (name.clone(), Recycling { refusal, ..Recycling::default() })
        });
        let mut guests: HashMap<_, _> = failed.collect();
        for (name, worker) in &self.workers {
            let done = lock(&worker.done);
            let Some(done) = &*done else { continue };
            latencies.join(&done.latencies);
            returned_bytes += done.recycling.returned_bytes;
            guests.insert(name.clone(), done.recycling.clone());
        }
        RecyclerReport { guests, returned_bytes, latencies }
    }

    /// Joins threads that have ended.
    fn reap(&mut self, now: Duration, log: &(dyn Fn(&str) + Sync)) {
        let ended: Vec<_> =
            self.workers.extract_if(|_, worker| worker.thread.is_finished()).collect();
        for (name, worker) in ended {
            self.add(&worker.done);
            let result =
                worker.thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            let Err(error) = result else { continue };
            // One that has ended is missed at the next refresh.
            if self.shared.proc.join(worker.pid.to_string()).exists() {
                self.fail(name, now, &error, log);
            }
        }
    }

    fn add(&mut self, done: &Mutex<Option<Done>>) {
        if let Some(done) = &*lock(done) {
            self.latencies.join(&done.latencies);
            self.returned += done.recycling.returned_bytes;
        }
    }

    /// Leaves a guest alone for a while. That is logged once until it succeeds.
    fn fail(
        &mut self,
        name: String,
        now: Duration,
        error: &io::Error,
        log: &(dyn Fn(&str) + Sync),
    ) {
        let why = error.to_string();
        let times = self.failed.get(&name).map_or(0, |failed| failed.times) + 1;
        if times == 2 {
            log(&format!("virtual machine {name} is not recycled: {why}"));
        }
        let until = now + if times == 1 { FIRST_RETRY } else { RETRY };
        self.failed.insert(name, Failed { until, times, why });
    }

    fn refresh(&mut self, now: Duration, log: &(dyn Fn(&str) + Sync)) {
        let mut failed = Vec::new();
        let Ok(list) = super::list(&self.run, &mut failed) else { return };
        let living: HashMap<_, _> = list
            .into_iter()
            .filter(|status| !status.record.attached().is_some_and(|it| it.detaching))
            .filter_map(|status| Some((status.record.name.clone(), (status.pid?, status))))
            .collect();
        let gone = self
            .workers
            .extract_if(|name, it| living.get(name).is_none_or(|(pid, _)| *pid != it.pid));
        for (_, worker) in gone.collect::<Vec<_>>() {
            self.add(&worker.done);
        }
        let workers = &self.workers;
        let works = |name: &str| workers.get(name).is_some_and(|it| lock(&it.done).is_some());
        self.failed.retain(|name, _| living.contains_key(name) && !works(name));
        for (name, (pid, status)) in living {
            let waits = self.failed.get(&name).is_some_and(|failed| now < failed.until);
            if waits || self.workers.contains_key(&name) {
                continue;
            }
            match self.begin(pid, &status) {
                Ok(worker) => _ = self.workers.insert(name, worker),
                Err(error) => self.fail(name, now, &error, log),
            }
        }
    }

    fn begin(&self, pid: u32, status: &VmStatus) -> io::Result<Worker> {
        let (ends, end) = mpsc::channel();
        let done = Arc::<Mutex<_>>::default();
        let (shared, theirs) = (Arc::clone(&self.shared), Arc::clone(&done));
        let record = status.record.clone();
        let dir = self.run.path().join("vms").join(&record.name);
        let work = move || shared.recycle(pid, &record, &dir, &theirs, &end);
        let thread = thread::Builder::new().name("recycler".to_owned()).stack_size(STACK_BYTES);
        Ok(Worker { pid, thread: thread.spawn(work)?, _ends: ends, done })
    }
}

/// Processor time of this thread, with that of its accesses to VMMs on another thread.
fn spent() -> Duration {
    own_time() + access_time()
}

impl Shared {
    /// Recycles the guest with this directory until its VMM fails, or the other end of `end` is
    /// dropped.
    fn recycle(
        &self,
        pid: u32,
        record: &VmRecord,
        dir: &Path,
        done: &Mutex<Option<Done>>,
        end: &Receiver<Infallible>,
    ) -> io::Result<()> {
        let before = spent();
        let host = Box::new(Vmm::new(&self.proc, pid, record.memory_bytes)?);
        let (memory, now) = (record.usable_bytes(), self.began.elapsed());
        let balloon = balloon::open(record, dir)?;
        let mut guest = Guest::new(memory, balloon, host, self.policy, now)?;
        self.share.charge(self.began.elapsed(), spent().saturating_sub(before));
        loop {
            let now = self.began.elapsed();
            let wait = guest.due().saturating_sub(now).max(self.share.wait(now));
            match end.recv_timeout(wait) {
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return guest.end(),
                Ok(never) => match never {},
            }
            let now = self.began.elapsed();
            // Another one may have used it up meanwhile.
            if !self.share.wait(now).is_zero() {
                continue;
            }
            let before = spent();
            let pressure = *lock(&self.pressure);
            let stepped = guest.step(now, pressure);
            stepped?;
            *lock(done) = Some(Done {
                recycling: guest.recycling().clone(),
                latencies: guest.latencies().clone(),
            });
            self.share.charge(self.began.elapsed(), spent().saturating_sub(before));
        }
    }
}
