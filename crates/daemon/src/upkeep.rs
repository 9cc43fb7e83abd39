//! Upkeep on a schedule: garbage collection with all that belongs to it, and scrubbing.

use std::collections::BTreeMap;
use std::panic::resume_unwind;
use std::sync::{Mutex, PoisonError, RwLock};
use std::thread::{Builder, ScopedJoinHandle};
use std::time::{Duration, Instant};

use cofolio_image::pack::ImageContents;
use cofolio_node::config::Limit;
use cofolio_node::run_dir::RunDir;
use cofolio_node::upkeep::{self, Upkeep, UpkeepError};
use cofolio_store::task::{Cancel, Task};
use cofolio_store::{CompleteScrub, Domain, Error, ScrubOptions, Store, with_causes};

use crate::serve::Settings;

/// When the daemon does upkeep.
#[derive(Clone, Debug)]
pub struct Schedule {
    /// From the start to the first garbage collection, and after something held upkeep up.
    pub delay: Duration,
    /// From one garbage collection to the next; `None` for never.
    pub gc: Option<Duration>,
    /// From the end of a scrub to the next; `None` for never.
    pub scrub: Option<Duration>,
    /// Bytes per second that a scrub reads at most.
    pub scrub_rate: Option<u64>,
    /// What a trust domain may take on disk.
    pub limit: Limit,
}

/// How often a thread looks whether it is to end, and whether something is due.
const TICK: Duration = Duration::from_millis(500);
/// How often the trust domains are listed, and the records of their scrubs read.
const LIST_INTERVAL: Duration = Duration::from_secs(10);

/// What became of upkeep so far.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Done {
    /// When the daemon started, in seconds since 1970.
    pub(crate) started: i64,
    /// Seconds from one garbage collection to the next; 0 for never.
    pub(crate) gc_interval: i64,
    /// Oldest completion of garbage collection over all trust domains, in seconds since 1970. A
    /// domain without one counts from when the daemon first saw it.
    pub(crate) gc: i64,
    /// Oldest completion of scrubs over all trust domains, in seconds since 1970; 0 until each has
    /// been scrubbed once.
    pub(crate) scrub: i64,
    /// Times that either failed.
    pub(crate) failures: u64,
    /// Consecutive failures of garbage collection, in the trust domain with most of them.
    pub(crate) gc_failing: u32,
    /// The same of scrubs.
    pub(crate) scrub_failing: u32,
    /// Damaged files that the last scrub of each trust domain found.
    pub(crate) damaged: u64,
}

/// Each has a thread of its own: a scrub may take days.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    Gc,
    Scrub,
}

/// What became of the upkeep of a trust domain, if it did not fail.
enum Ended {
    Complete {
        /// Damaged files that were found.
        damaged: u64,
    },
    /// Another process holds the lock.
    Busy,
}

/// When the upkeep of a trust domain comes next, and what came of the last one.
#[derive(Clone, Copy, Debug)]
struct Due {
    last: Instant,
    /// The earliest next one is at `last + delay`, whatever the schedule says.
    delay: Duration,
    /// Start of the current interval of the schedule, in seconds since 1970; `None` if it is over.
    since: Option<i64>,
    /// Failures in a row.
    failures: u32,
    complete: i64,
    damaged: u64,
    /// The record of the last complete scrub, as far as it is known here.
    record: Option<CompleteScrub>,
}

impl Due {
    /// Of a domain that the daemon sees for the first time.
    fn first(work: Work, schedule: &Schedule) -> Self {
        let (delay, complete) = match work {
            Work::Gc => (schedule.delay, cofolio_store::now()),
            Work::Scrub => (scrub_delay(schedule), 0),
        };
        let last = Instant::now();
        Self { last, delay, since: None, failures: 0, complete, damaged: 0, record: None }
    }

    /// Counts a scrub that is news: an earlier daemon's, or somebody's after a repair.
    fn note_record(&mut self, record: Option<CompleteScrub>, schedule: &Schedule) {
        let Some(new) = record.filter(|_| record != self.record) else { return };
        (self.last, self.delay) = (Instant::now(), scrub_delay(schedule));
        self.since = Some(new.time);
        (self.complete, self.damaged, self.failures) = (new.time, new.damaged, 0);
        self.record = record;
    }

    /// One that failed comes again after a while, which doubles each time.
    fn ended(&mut self, ended: Result<Ended, ()>, delay: Duration) {
        self.last = Instant::now();
        match ended {
            Ok(Ended::Complete { damaged }) => {
                (self.delay, self.failures) = (Duration::ZERO, 0);
                (self.complete, self.damaged) = (cofolio_store::now(), damaged);
                self.since = Some(self.complete);
            }
            Ok(Ended::Busy) => self.delay = delay,
            Err(()) => {
                self.delay = delay * (1 << self.failures.min(10));
                self.failures += 1;
            }
        }
    }

    fn is_now(&self, every: Duration) -> bool {
        self.last.elapsed() >= self.delay && self.is_over(every)
    }

    /// Whether this interval is over. A time to come, after the clock was set, is no reason to wait.
    fn is_over(&self, every: Duration) -> bool {
        let age = |since| u64::try_from(cofolio_store::now().saturating_sub(since));
        self.since.is_none_or(|since| age(since).map_or(true, |age| age >= every.as_secs()))
    }
}

/// Before the first scrub, the collection and whatever comes with the start of a machine have time.
fn scrub_delay(schedule: &Schedule) -> Duration {
    schedule.delay * 30
}

impl Work {
    fn interval(self, schedule: &Schedule) -> Option<Duration> {
        match self {
            Self::Gc => schedule.gc,
            Self::Scrub => schedule.scrub,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Gc => "garbage collection",
            Self::Scrub => "scrub",
        }
    }
}

/// Does one kind of upkeep of all trust domains until it is cancelled, of one domain at a time.
/// `said` hears of failures and of damage.
///
/// The work has a thread of its own, since a scrub may take days: meanwhile this one publishes what
/// other domains' scrubs found, somebody else's included.
pub(crate) fn run(
    work: Work,
    store: &Store,
    run: &RunDir,
    settings: &RwLock<Settings>,
    done: &Mutex<Done>,
    cancel: &Cancel,
    said: &(dyn Fn(&str) + Sync),
) {
    // Both are requests to the kernel's schedulers, for this thread and those that it starts.
    let _ = cofolio_sys::priority::set_idle_io();
    let _ = rustix::process::nice(19);
    let task = &Task::new(cancel.clone(), |_| {});
    let mut all: BTreeMap<String, Due> = BTreeMap::new();
    let failed = |error: &str| {
        done.lock().unwrap_or_else(PoisonError::into_inner).failures += 1;
        said(&format!("{}: {error}", work.name()));
    };
    // Earliest time to list domains again.
    let (mut list_from, mut list_failures) = (Instant::now(), 0);
    std::thread::scope(|scope| {
        let mut running: Option<(String, ScopedJoinHandle<'_, Result<Ended, UpkeepError>>)> = None;
        while !cancel.is_cancelled() {
            let schedule = settings.read().unwrap_or_else(PoisonError::into_inner).upkeep.clone();
            if let Some((name, thread)) = running.take_if(|(_, thread)| thread.is_finished()) {
                let ended = thread.join().unwrap_or_else(|panic| resume_unwind(panic));
                if cancel.is_cancelled() {
                    return;
                }
                let ended = ended.map_err(|error| failed(&with_causes(&error)));
                if let Some(due) = all.get_mut(&name) {
                    due.ended(ended, schedule.delay);
                }
            }
            let every = work.interval(&schedule);
            let is_time = list_from <= Instant::now();
            match every.filter(|_| is_time).map(|_| store.domains()).transpose() {
                Ok(None) => {}
                Ok(Some(names)) => {
                    list_from = Instant::now() + LIST_INTERVAL.min(schedule.delay);
                    list_failures = 0;
                    refresh_due(&mut all, names, work, store, &schedule);
                }
                Err(error) => {
                    failed(&with_causes(&error));
                    (list_from, list_failures) =
                        (Instant::now() + schedule.delay, list_failures + 1);
                }
            }
            publish(work, &schedule, &all, list_failures, done);
            let every = every.filter(|_| list_failures == 0);
            if let (None, Some(name)) = (&running, every.and_then(|every| next(&all, every))) {
                let (its_name, delay) = (name.clone(), schedule.delay);
                let work = move || {
                    let domain = store.domain(&its_name)?;
                    match work {
                        Work::Gc => collect(&domain, run, &schedule, task, said),
                        Work::Scrub => scrub(&domain, &schedule, task, said),
                    }
                };
                match Builder::new().spawn_scoped(scope, work) {
                    Ok(thread) => running = Some((name, thread)),
                    Err(error) => {
                        failed(&format!("starting a thread: {error}"));
                        if let Some(due) = all.get_mut(&name) {
                            due.ended(Err(()), delay);
                        }
                    }
                }
            }
            std::thread::sleep(TICK);
        }
    });
}

/// Brings what is known of trust domains up to date: which there are, and complete scrubs.
fn refresh_due(
    all: &mut BTreeMap<String, Due>,
    names: Vec<String>,
    work: Work,
    store: &Store,
    schedule: &Schedule,
) {
    all.retain(|name, _| names.contains(name));
    for name in names {
        let record = match work {
            Work::Gc => None,
            Work::Scrub => store.domain(&name).ok().and_then(|domain| domain.complete_scrub()),
        };
        let due = all.entry(name).or_insert_with(|| Due::first(work, schedule));
        due.note_record(record, schedule);
    }
}

/// Of the trust domains whose upkeep is due, the one whose last upkeep ended first: so none keeps
/// another from its turn.
fn next(all: &BTreeMap<String, Due>, every: Duration) -> Option<String> {
    let due = all.iter().filter(|(_, due)| due.is_now(every));
    due.min_by_key(|(_, due)| due.last).map(|(name, _)| name.clone())
}

fn publish(
    work: Work,
    schedule: &Schedule,
    all: &BTreeMap<String, Due>,
    list_failures: u32,
    done: &Mutex<Done>,
) {
    let mut done = done.lock().unwrap_or_else(PoisonError::into_inner);
    let complete = all.values().map(|due| due.complete).min();
    let failing = all.values().map(|due| due.failures).max().unwrap_or_default();
    // Work that is turned off fails no more.
    let failing = work.interval(schedule).map_or(0, |_| failing.max(list_failures));
    match work {
        Work::Gc => {
            let seconds = |every: Duration| every.as_secs().try_into().unwrap_or(i64::MAX);
            (done.gc, done.gc_failing) = (complete.unwrap_or(done.gc), failing);
            done.gc_interval = schedule.gc.map_or(0, seconds);
        }
        Work::Scrub => {
            (done.scrub, done.scrub_failing) = (complete.unwrap_or_default(), failing);
            done.damaged = all.values().map(|due| due.damaged).sum();
        }
    }
}

fn collect(
    domain: &Domain,
    run: &RunDir,
    schedule: &Schedule,
    task: &Task,
    said: &(dyn Fn(&str) + Sync),
) -> Result<Ended, UpkeepError> {
    let options =
        upkeep::Options { size: schedule.limit.size.map(|size| size.0), ..Default::default() };
    let upkeep = Upkeep::new(domain, run.clone(), schedule.limit.clone());
    let mut report = upkeep::Report::default();
    let announce = |plan: &cofolio_store::TrimPlan| {
        for victim in &plan.victims {
            said(&format!(
                "over the limit, so image {} goes: {}",
                victim.image,
                victim.refs.join(", ")
            ));
        }
    };
    let ended = upkeep.run(&options, &announce, &mut report, task);
    for failed in &report.failed {
        said(&format!("left for the next garbage collection: {failed}"));
    }
    for it in &report.gc.unreadable {
        said(&it.to_string());
    }
    for finding in report.sizes.iter().flat_map(|sizes| &sizes.findings) {
        said(&format!("{} {}: {}", finding.path, finding.kind, finding.detail));
    }
    match ended {
        Err(UpkeepError::Store(Error::Busy { .. })) => Ok(Ended::Busy),
        ended => ended.map(|()| Ended::Complete { damaged: 0 }),
    }
}

fn scrub(
    domain: &Domain,
    schedule: &Schedule,
    task: &Task,
    said: &(dyn Fn(&str) + Sync),
) -> Result<Ended, UpkeepError> {
    let options = ScrubOptions { images: None, rate: schedule.scrub_rate };
    let report = match domain.scrub(&ImageContents, &options, task) {
        Err(Error::Busy { .. }) => return Ok(Ended::Busy),
        report => report?,
    };
    for finding in &report.findings {
        said(&format!("{} {}: {}", finding.path, finding.kind, finding.detail));
    }
    Ok(Ended::Complete { damaged: report.findings.len() as u64 + report.more })
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::path::Path;

    use cofolio_node::ledger::ReclaimPolicy;
    use cofolio_store::InitOptions;

    use super::*;

    /// A store with these trust domains besides the default one, below a directory.
    fn store_with(scratch: &Path, domains: &[&str]) -> Store {
        let store = Store::init(&scratch.join("store"), &InitOptions::default()).unwrap();
        domains.iter().for_each(|name| _ = store.domain_or_create(name).unwrap());
        store
    }

    /// Does upkeep until it `is_enough`, or for a minute. Gives the figures and what was said.
    fn run_until(
        work: Work,
        store: &Store,
        upkeep: Schedule,
        is_enough: impl Fn(&Done) -> bool,
    ) -> (Done, Vec<String>) {
        let (period, reclaim) = (Duration::from_secs(1), ReclaimPolicy::default());
        let settings = RwLock::new(Settings {
            period,
            share: 0.01,
            reclaim,
            upkeep,
            recycle: None,
            merge: None,
            ksm: None,
        });
        let (done, cancel) = (Mutex::new(Done::default()), Cancel::default());
        let heard = Mutex::new(Vec::new());
        let said = |text: &str| heard.lock().unwrap().push(text.to_owned());
        let scratch = tempfile::tempdir().unwrap();
        let runs = RunDir::open(scratch.path().join("run")).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| run(work, store, &runs, &settings, &done, &cancel, &said));
            let start = Instant::now();
            let is_enough = || is_enough(&done.lock().unwrap());
            while !is_enough() && start.elapsed().as_secs() < 60 {
                std::thread::sleep(Duration::from_millis(10));
            }
            cancel.cancel();
        });
        (done.into_inner().unwrap(), heard.into_inner().unwrap())
    }

    /// Upkeep of a trust domain that cannot be read fails, is said with its cause and counted, and the
    /// next domain has its turn all the same. A full disk and a bad sector looked alike.
    #[test]
    fn a_domain_that_fails_holds_up_no_other() {
        let scratch = tempfile::tempdir().unwrap();
        let store = store_with(scratch.path(), &["a", "b", "c"]);
        let path = |rest: &str| scratch.path().join("store/domains").join(rest);
        std::fs::remove_dir(path("b/images")).unwrap();
        std::fs::write(path("b/images"), "no directory").unwrap();
        let schedule = Schedule { delay: Duration::ZERO, ..schedule(1, 30) };
        // The last step of a collection writes it.
        let is_enough = |_: &Done| path("c/sizes.json").exists();
        let (done, heard) = run_until(Work::Gc, &store, schedule, is_enough);
        assert!(path("c/sizes.json").exists(), "{heard:?}");
        assert_eq!((heard.len(), done.failures), (1, 1), "{heard:?}");
        assert!(heard[0].contains("domains/b"), "{heard:?}");
        assert!(heard[0].contains("Not a directory"), "{heard:?}");
    }

    /// Retries come ever later, up to a day and a half, so the hours that the alert looked at had
    /// too few failures.
    #[test]
    fn consecutive_failures_are_counted_until_a_success() {
        let scratch = tempfile::tempdir().unwrap();
        let store = store_with(scratch.path(), &["a"]);
        let images = scratch.path().join("store/domains/a/images");
        std::fs::remove_dir(&images).unwrap();
        std::fs::write(&images, "no directory").unwrap();
        let schedule = Schedule { delay: Duration::ZERO, ..schedule(1, 30) };
        let most = Cell::new(0);
        let (done, heard) = run_until(Work::Gc, &store, schedule, |done| {
            most.set(done.gc_failing.max(most.get()));
            if most.get() == 3 && images.is_file() {
                std::fs::remove_file(&images).unwrap();
                std::fs::create_dir(&images).unwrap();
            }
            images.is_dir() && done.gc_failing == 0
        });
        assert!(most.get() >= 3 && done.gc_failing == 0, "{most:?} {done:?} {heard:?}");
    }

    /// While a trust domain was new the daemon said that collection was never complete: an alert, if
    /// the daemon had run for some days.
    #[test]
    fn a_new_domain_counts_from_when_it_is_seen() {
        let scratch = tempfile::tempdir().unwrap();
        let (store, start) = (store_with(scratch.path(), &[]), cofolio_store::now());
        let (done, heard) = run_until(Work::Gc, &store, schedule(24, 30), |done| done.gc > 0);
        assert!(done.gc >= start, "{done:?} {heard:?}");
    }

    /// After a repair `cofolio verify --scrub --all` found no damage, and the daemon went on to say
    /// what its own last scrub had found, for up to a month.
    #[test]
    fn a_scrub_by_somebody_else_counts() {
        let scratch = tempfile::tempdir().unwrap();
        let store = store_with(scratch.path(), &[]);
        let record = scratch.path().join("store/domains/default/scrub/complete.json");
        std::fs::create_dir_all(record.parent().unwrap()).unwrap();
        let write = |damaged: u64| {
            let complete = CompleteScrub { time: cofolio_store::now(), damaged };
            std::fs::write(&record, serde_json::to_vec(&complete).unwrap()).unwrap();
        };
        write(3);
        let most = Cell::new(0);
        let (done, heard) = run_until(Work::Scrub, &store, schedule(24, 30), |done| {
            if done.damaged > most.replace(done.damaged.max(most.get())) {
                write(0);
            }
            most.get() > 0 && done.damaged == 0
        });
        assert_eq!((most.get(), done.damaged), (3, 0), "{done:?} {heard:?}");
    }

    /// What somebody's scrub of a trust domain had found counted only after the daemon had scrubbed
    /// all others, which may take days.
    #[test]
    fn a_scrub_of_one_domain_hides_no_other() {
        let scratch = tempfile::tempdir().unwrap();
        let store = store_with(scratch.path(), &["a", "b"]);
        let path = |rest: &str| scratch.path().join("store/domains").join(rest);
        let record = |domain: &str| path(domain).join("scrub/complete.json");
        let content = [7; 1 << 16];
        let digits = cofolio_store::verity::digest(&content).to_string();
        let object = path("a/objects").join(&digits[..2]).join(&digits[2..]);
        std::fs::create_dir_all(object.parent().unwrap()).unwrap();
        std::fs::write(object, content).unwrap();
        std::fs::create_dir_all(record("b").parent().unwrap()).unwrap();
        let complete = CompleteScrub { time: cofolio_store::now(), damaged: 3 };
        std::fs::write(record("b"), serde_json::to_vec(&complete).unwrap()).unwrap();
        // It takes days.
        let slow = Schedule { delay: Duration::ZERO, scrub_rate: Some(1), ..schedule(24, 30) };
        let (done, heard) = run_until(Work::Scrub, &store, slow, |done| done.damaged > 0);
        assert_eq!((done.damaged, record("a").exists()), (3, false), "{done:?} {heard:?}");
    }

    fn schedule(gc_hours: u64, scrub_days: u64) -> Schedule {
        Schedule {
            delay: Duration::from_secs(120),
            gc: Some(Duration::from_secs(gc_hours * 3600)),
            scrub: Some(Duration::from_secs(scrub_days * 86_400)),
            scrub_rate: None,
            limit: Limit::default(),
        }
    }

    /// A daemon that is started again does not read everything again: a scrub counts from its end.
    #[test]
    fn a_scrub_counts_from_its_end_and_not_from_the_daemons_start() {
        let complete = |days: i64| {
            let time = cofolio_store::now() - days * 86_400;
            Some(CompleteScrub { time, damaged: 3 })
        };
        let due = |complete| {
            let mut due = Due::first(Work::Scrub, &schedule(24, 30));
            due.note_record(complete, &schedule(24, 30));
            due
        };
        let is_over =
            |complete, days: u64| due(complete).is_over(Duration::from_secs(days * 86_400));
        let all = [None, complete(40), complete(10)];
        assert_eq!(all.map(|it| is_over(it, 30)), [true, true, false]);
        assert!(all.iter().all(|it| due(*it).delay.as_secs() == 3600));
        assert_eq!(due(complete(10)).damaged, 3);
        // A schedule that was read again held only from the scrub after the next one.
        assert!(is_over(complete(10), 5) && !is_over(complete(40), 50));
        // A damaged record made the subtraction overflow.
        for time in [i64::MIN, i64::MAX] {
            assert!(is_over(Some(CompleteScrub { time, damaged: 0 }), 30));
        }
    }

    /// A domain that fails is tried again after a while, which grows; the others keep their interval.
    #[test]
    fn failures_are_repeated_ever_later() {
        let (delay, day) = (Duration::from_secs(120), Duration::from_secs(86_400));
        let mut due = Due::first(Work::Gc, &schedule(24, 30));
        let mut waits = Vec::new();
        for _ in 0..4 {
            due.ended(Err(()), delay);
            waits.push(due.delay.as_secs());
        }
        assert_eq!(waits, [120, 240, 480, 960]);
        due.ended(Ok(Ended::Complete { damaged: 0 }), delay);
        assert!(!due.is_now(day) && due.is_now(Duration::ZERO));
    }
}
