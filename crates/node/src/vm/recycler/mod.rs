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
//! Reporting is on in every machine that Cofolio starts. It takes half a minute; the pulse returns
//! the rest within seconds. A pulse leaves each guest a reserve of free memory, ends as soon as the
//! guest needs more, and comes the less often the sooner a guest takes its memory back. A balloon
//! that is found inflated is let go first: whoever inflated it was killed.
//!
//! One thread serves all guests, and waits for none but for answers of their VMMs.

pub(super) mod balloon;
mod controller;

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use self::balloon::Balloon;
use self::controller::{Controller, Pressure, Sample};
pub use self::controller::{LATENCY_MS, Latencies, Policy};
use super::VmRecord;
use super::ram::Ram;
use crate::run_dir::RunDir;

/// From one look at a balloon that changes to the next.
const STEP: Duration = Duration::from_millis(50);
/// A balloon that has not grown for so long has all that it gets.
const STALLED: Duration = Duration::from_millis(500);
/// A pulse inflates for at most so long.
const INFLATE_MAX: Duration = Duration::from_secs(5);
/// A balloon that is not let go for so long is asked again.
const DEFLATE_MAX: Duration = Duration::from_secs(10);
/// After an error a guest is left alone for so long.
const RETRY: Duration = Duration::from_secs(10);
/// How often the list of guests is read anew.
const REFRESH: Duration = Duration::from_secs(2);

/// Recycles the memory of all virtual machines of a run directory.
#[derive(Debug)]
pub struct Recycler {
    run: RunDir,
    policy: Policy,
    began: Instant,
    /// Where `/proc` is.
    root: PathBuf,
    refreshed: Option<Duration>,
    guests: HashMap<String, Guest>,
    /// When guests that could not be reached are tried again.
    failed: HashMap<String, Duration>,
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
    /// Of these, how many ended early because the guest needed memory.
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
    /// Bytes by how long they waited for their return: the classes of [`LATENCY_MS`].
    pub latency_bytes: Vec<u64>,
}

#[derive(Debug)]
struct Guest {
    pid: u32,
    /// Bytes that it has outside of its balloon between pulses.
    memory: u64,
    balloon: Box<dyn Balloon>,
    ram: Ram,
    /// Memory of the VMM that is of the same kind as the guest's, and is not the guest's.
    emulator: u64,
    controller: Controller,
    phase: Phase,
    due: Duration,
    recycling: Recycling,
    /// What the host held when the pulse began.
    before: u64,
}

#[derive(Debug, Clone, Copy)]
enum Phase {
    Idle,
    /// Down to `target` bytes outside of the balloon.
    Inflating {
        target: u64,
        began: Duration,
        lowest: u64,
        lowered: Duration,
    },
    Deflating {
        began: Duration,
    },
}

impl Recycler {
    /// For the machines of a run directory.
    pub fn new(run: RunDir, policy: Policy) -> Self {
        Self {
            run,
            policy,
            began: Instant::now(),
            root: PathBuf::from("/"),
            refreshed: None,
            guests: HashMap::new(),
            failed: HashMap::new(),
            latencies: Latencies::default(),
            returned: 0,
        }
    }

    /// Its bounds.
    pub fn policy(&self) -> Policy {
        self.policy
    }

    /// Does what is due, and returns when it is to be called next. `log` gets what fails.
    pub fn tick(&mut self, log: &(dyn Fn(&str) + Sync)) -> Duration {
        let now = self.began.elapsed();
        let before = own_time();
        if self.refreshed.is_none_or(|at| now >= at + REFRESH) {
            self.refresh(now, log);
            self.refreshed = Some(now);
        }
        let pressure = pressure(&self.root);
        let proc = self.root.join("proc");
        let mut gone = Vec::new();
        for (name, guest) in self.guests.iter_mut().filter(|(_, guest)| guest.due <= now) {
            if let Err(error) = guest.step(self.began, pressure) {
                gone.push(name.clone());
                // One that has ended is missed at the next refresh.
                if proc.join(guest.pid.to_string()).exists() {
                    log(&format!("virtual machine {name} is not recycled: {error}"));
                    self.failed.insert(name.clone(), now + RETRY);
                }
            }
        }
        gone.iter().for_each(|name| self.forget(name));
        let now = self.began.elapsed();
        let due = self.guests.values().map(|guest| guest.due).min();
        let wait = due.map_or(REFRESH, |due| due.saturating_sub(now)).clamp(STEP / 5, REFRESH);
        // What was used is paid off first.
        let used = own_time().saturating_sub(before);
        wait.max(used.div_f64(self.policy.share.max(0.001)).min(REFRESH))
    }

    /// Lets all balloons go, at the end.
    pub fn end(&mut self) {
        self.guests.values_mut().for_each(Guest::let_go);
    }

    /// What it does and has done.
    pub fn report(&self) -> RecyclerReport {
        let mut latencies = self.latencies.clone();
        let mut returned = self.returned;
        for guest in self.guests.values() {
            latencies.join(guest.controller.latencies());
            returned += guest.recycling.returned_bytes;
        }
        let guests = self.guests.iter().map(|(name, it)| (name.clone(), it.recycling.clone()));
        let guests = guests.collect();
        let latency_bytes = latencies.bytes.to_vec();
        RecyclerReport { guests, returned_bytes: returned, latency_bytes }
    }

    fn forget(&mut self, name: &str) {
        if let Some(mut guest) = self.guests.remove(name) {
            // One that was detached goes on.
            guest.let_go();
            self.latencies.join(guest.controller.latencies());
            self.returned += guest.recycling.returned_bytes;
        }
    }

    /// Begins with new guests, and forgets those that have ended.
    fn refresh(&mut self, now: Duration, log: &(dyn Fn(&str) + Sync)) {
        let mut failed = Vec::new();
        let Ok(list) = super::list(&self.run, &mut failed) else { return };
        let living: HashMap<_, _> = list
            .into_iter()
            .filter_map(|status| Some((status.record.name.clone(), (status.pid?, status))))
            .collect();
        let gone = self
            .guests
            .iter()
            .filter(|(name, guest)| living.get(*name).is_none_or(|(pid, _)| *pid != guest.pid));
        let gone: Vec<_> = gone.map(|(name, _)| name.clone()).collect();
        gone.iter().for_each(|name| self.forget(name));
        self.failed.retain(|name, _| living.contains_key(name));
        for (name, (pid, status)) in living {
            let waits = self.failed.get(&name).is_some_and(|until| now < *until);
            if waits || self.guests.contains_key(&name) {
                continue;
            }
            let dir = self.run.path().join("vms").join(&name);
            let begin = || -> io::Result<Guest> {
                let balloon = balloon::open(&status.record, &dir)?;
                let proc = self.root.join("proc");
                Guest::new(pid, &status.record, balloon, &proc, self.policy, now)
            };
            match begin() {
                Ok(guest) => _ = self.guests.insert(name, guest),
                Err(error) => {
                    log(&format!("virtual machine {name} is not recycled: {error}"));
                    self.failed.insert(name, now + RETRY);
                }
            }
        }
    }
}

impl Guest {
    fn new(
        pid: u32,
        record: &VmRecord,
        mut balloon: Box<dyn Balloon>,
        proc: &Path,
        policy: Policy,
        now: Duration,
    ) -> io::Result<Self> {
        let (ram, memory) = (Ram::find(proc, pid, record.memory_bytes)?, record.usable_bytes());
        let resident = ram.resident()?;
        let private = resident.private();
        let emulator = ram.counted()?.saturating_sub(private);
        let refusal = match refusal(proc, pid)?.or_else(|| ram.refusal()) {
            None => balloon.refusal()?,
            refusal => refusal,
        };
        let mut phase = Phase::Idle;
        if balloon.actual()? < memory {
            // Left by a recycler that was killed.
            balloon.set(memory)?;
            phase = Phase::Deflating { began: now };
        }
        let controller = Controller::new(memory, policy);
        let recycling = Recycling { refusal, ..Recycling::default() };
        Ok(Self {
            pid,
            memory,
            balloon,
            ram,
            emulator,
            controller,
            phase,
            due: now,
            recycling,
            before: private,
        })
    }

    /// Lets its balloon go, in the middle of a pulse.
    fn let_go(&mut self) {
        if !matches!(self.phase, Phase::Idle) {
            let _ = self.balloon.set(self.memory);
        }
    }

    /// What the host holds of it in private pages.
    fn private(&mut self) -> io::Result<u64> {
        let resident = self.ram.resident()?;
        let private = resident.private();
        self.emulator = self.ram.counted()?.saturating_sub(private);
        Ok(private)
    }

    fn step(&mut self, began: Instant, pressure: Pressure) -> io::Result<()> {
        let now = began.elapsed();
        match self.phase {
            Phase::Idle => self.sample(now, pressure),
            Phase::Inflating { target, began, lowest, lowered } => {
                self.due = now + STEP;
                let actual = self.balloon.actual()?;
                let (lowest, lowered) =
                    if actual < lowest { (actual, now) } else { (lowest, lowered) };
                self.phase = Phase::Inflating { target, began, lowest, lowered };
                let needs = self.balloon.guest()?;
                let abort = needs.is_some_and(|it| self.controller.must_abort(it.free, it.stalls));
                let is_over = actual <= target
                    || now >= lowered + STALLED
                    || now >= began + INFLATE_MAX
                    || abort;
                if is_over {
                    self.recycling.aborted += u64::from(abort);
                    self.balloon.set(self.memory)?;
                    self.phase = Phase::Deflating { began: now };
                }
                Ok(())
            }
            Phase::Deflating { began } => {
                self.due = now + STEP;
                if self.balloon.actual()? >= self.memory {
                    let private = self.private()?;
                    self.recycling.returned_bytes += self.before.saturating_sub(private);
                    self.controller.pulsed(now, private);
                    self.phase = Phase::Idle;
                    self.due = now + self.controller.period() / 4;
                } else if now >= began + DEFLATE_MAX {
                    self.balloon.set(self.memory)?;
                    self.phase = Phase::Deflating { began: now };
                }
                Ok(())
            }
        }
    }

    fn sample(&mut self, now: Duration, pressure: Pressure) -> io::Result<()> {
        self.due = now + self.controller.period();
        let Some(guest) = self.balloon.guest()? else { return Ok(()) };
        let estimated = self.ram.counted()?.saturating_sub(self.emulator);
        let sample =
            |resident| Sample { at: now, free: guest.free, resident, stalls: guest.stalls };
        // Counted only where it may matter: the emulator's own memory changes as well.
        let unreturned = self.controller.unreturned(&sample(estimated));
        let resident = if unreturned > 0 { self.private()? } else { estimated };
        let bytes = self.controller.sample(sample(resident), pressure);
        self.recycling.free_bytes = guest.free;
        self.recycling.cache_bytes = guest.caches;
        self.recycling.unreturned_bytes = self.controller.unreturned(&sample(resident));
        let Some(bytes) = bytes.filter(|_| self.recycling.refusal.is_none()) else {
            return Ok(());
        };
        // Whole MiB, since Firecracker has no other sizes.
        let target = self.memory.saturating_sub(bytes).next_multiple_of(1 << 20).min(self.memory);
        self.before = resident;
        self.balloon.set(target)?;
        self.recycling.pulses += 1;
        self.phase = Phase::Inflating { target, began: now, lowest: self.memory, lowered: now };
        self.due = now + STEP;
        Ok(())
    }
}

/// Why memory cannot be taken from a guest, by what its VMM has open and mapped.
fn refusal(proc: &Path, pid: u32) -> io::Result<Option<String>> {
    let fds = fs::read_dir(proc.join(pid.to_string()).join("fd"))?;
    let open = fds.filter_map(|fd| fs::read_link(fd.ok()?.path()).ok());
    for path in open {
        let name = path.to_string_lossy();
        if name.starts_with("/dev/vfio") || name.starts_with("/dev/iommu") {
            return Ok(Some("it has a device of the host, which may write to any page".to_owned()));
        }
        if name.starts_with("/dev/vhost-vdpa") {
            return Ok(Some("it has a vDPA device, which may write to any page".to_owned()));
        }
    }
    let status = crate::kernel_text::read(&proc.join(pid.to_string()).join("status"))?;
    let locked = status.lines().find_map(|line| line.strip_prefix("VmLck:"));
    if locked.is_some_and(|line| !line.trim().starts_with("0 ")) {
        return Ok(Some("its memory is locked, so the VMM discards nothing".to_owned()));
    }
    Ok(None)
}

/// What the host's tasks wait for; nothing where the kernel does not say it.
fn pressure(root: &Path) -> Pressure {
    let some = |what: &str| {
        let text = fs::read_to_string(root.join("proc/pressure").join(what)).ok()?;
        let line = text.lines().find_map(|line| line.strip_prefix("some "))?;
        line.split(' ').find_map(|word| word.strip_prefix("avg10="))?.parse().ok()
    };
    Pressure { cpu: some("cpu").unwrap_or(0.0), memory: some("memory").unwrap_or(0.0) }
}

/// Processor time of this thread.
fn own_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::try_from(time).unwrap_or_default()
}
