//! Observation of a run of guests: host memory over time and the guests' events, and how fast freed
//! memory came back.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use cofolio_node::vm::account::mapped_pools;
use cofolio_node::vm::ram::{Ram, Resident};
use cofolio_node::vm::recycler::Policy;
use serde::Serialize;

use super::super::{Host, Machine, PATIENCE};
use super::beside::{Beside, Look};
use crate::daemon::Daemon;
use crate::ksm;

/// From one sample to the next.
const SAMPLE: Duration = Duration::from_millis(500);
/// From one look at memory beside the guests' own to the next.
const BESIDE: Duration = Duration::from_secs(5);
/// How long a guest's freed memory may take to come back to the host.
const RETURN_MAX: Duration = Duration::from_secs(60);

/// Host memory at a moment.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Held {
    pub(super) seconds: f64,
    /// Private bytes of each guest's memory.
    pub(super) guests: Vec<u64>,
    /// Bytes of pools that guests share.
    pub(super) pools: u64,
    /// Bytes that KSM saves of these.
    pub(super) saved: u64,
}

impl Held {
    pub(super) fn bytes(&self) -> f64 {
        (self.guests.iter().sum::<u64>() + self.pools) as f64 - self.saved as f64
    }
}

/// An event that a guest has reported.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Event {
    /// Number of the guest.
    pub(super) number: usize,
    /// When the host read it.
    pub(super) seconds: f64,
    /// begun, filled, removing, removed, after, checked.
    pub(super) event: String,
    /// Of files, or of single pages.
    pub(super) what: String,
    pub(super) bytes: u64,
    /// Free memory of the guest.
    pub(super) free: u64,
    /// Of this, in pages without a free neighbour.
    pub(super) single: u64,
    /// Host memory of the guest then, including merged pages.
    pub(super) all: u64,
}

/// Memory that a guest has freed at once.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Removal {
    /// Files, or single pages.
    pub(super) what: String,
    pub(super) bytes: u64,
    /// By how much the guest's free memory without free neighbours grew.
    pub(super) single: u64,
    /// Bytes that came back to the host within a minute.
    pub(super) returned: u64,
    /// Seconds until half and 99 % of the bytes beyond the reserve came back, from before the guest
    /// freed the first page. Not a number if they did not, or if the guest filled its memory again
    /// before this could be seen.
    pub(super) p50: f64,
    pub(super) p99: f64,
    /// Seconds until 99 % of all that came back had. The reserve may stay with the guest, but free
    /// page reporting returns it by and by.
    pub(super) p99_of_all: f64,
    /// Host memory 10 s later, divided by the guest's used memory and the reserve.
    pub(super) held_of_used: f64,
}

/// Everything that was seen of one engine's guests.
#[derive(Debug)]
pub(super) struct Watched {
    pub(super) held: Vec<Held>,
    pub(super) said: Vec<Event>,
    pub(super) beside: Vec<Beside>,
}

/// Looks at guests.
pub(super) struct Watch<'w> {
    host: &'w Host<'w>,
    daemon: Option<&'w Daemon>,
    machines: Vec<Machine>,
    rams: Vec<Ram>,
    look: Look,
    began: Instant,
    pub(super) watched: Watched,
}

impl<'w> Watch<'w> {
    /// Begins. `memory` is that of each guest, in bytes.
    pub(super) fn begin(
        host: &'w Host<'w>,
        daemon: Option<&'w Daemon>,
        machines: Vec<Machine>,
        memory: u64,
        look: Look,
    ) -> Result<Self> {
        let proc = Path::new("/proc");
        let rams = machines.iter().map(|machine| Ok(Ram::find(proc, machine.pid, memory)?));
        let rams = rams.collect::<Result<_>>()?;
        let watched = Watched { held: Vec::new(), said: Vec::new(), beside: Vec::new() };
        Ok(Self { host, daemon, machines, rams, look, began: Instant::now(), watched })
    }

    pub(super) fn machines(&self) -> &[Machine] {
        &self.machines
    }

    /// Looks until so long after the beginning.
    pub(super) fn look_until(&mut self, end: Duration) -> Result<()> {
        while self.began.elapsed() < end {
            self.look()?;
        }
        Ok(())
    }

    /// Looks for so long.
    pub(super) fn look_for(&mut self, wait: Duration) -> Result<()> {
        self.look_until(self.began.elapsed() + wait)
    }

    /// Looks until guests have said this together so often.
    pub(super) fn look_for_event(&mut self, event: &str, what: &str, times: usize) -> Result<()> {
        let began = Instant::now();
        let is_it = |it: &&Event| it.event == event && it.what == what;
        while self.watched.said.iter().filter(is_it).count() < times {
            ensure!(began.elapsed() < PATIENCE, "guests did not say {event:?} of {what} in time");
            self.look()?;
        }
        Ok(())
    }

    fn look(&mut self) -> Result<()> {
        self.host.wait(SAMPLE)?;
        let at = self.began.elapsed();
        // Before and behind it: a page is in a pool before it is no longer private, and a pool goes
        // after its last page is private again.
        let pools = pool_bytes(self.daemon, &self.machines)?;
        let saved = ksm::sharing_bytes().unwrap_or(0);
        let resident = self.rams.iter().zip(&self.machines).map(|(ram, machine)| {
            ram.resident().with_context(|| format!("looking at {}", machine.name))
        });
        let resident = resident.collect::<Result<Vec<Resident>>>()?;
        let pools = pools.max(pool_bytes(self.daemon, &self.machines)?);
        let guests: Vec<u64> = resident.iter().map(|it| it.private()).collect();
        let seconds = at.as_secs_f64();
        for (number, machine) in self.machines.iter_mut().enumerate() {
            for said in machine.events()? {
                let word = |name: &str| said[name].as_str().unwrap_or_default().to_owned();
                let figure = |name: &str| said[name].as_u64().unwrap_or(0);
                self.watched.said.push(Event {
                    number,
                    seconds,
                    event: word("event"),
                    what: word("what"),
                    bytes: figure("bytes"),
                    free: figure("free"),
                    single: figure("single"),
                    all: resident[number].bytes,
                });
            }
        }
        let held = Held { seconds, guests, pools, saved };
        let last = self.watched.beside.last().map(|it| it.seconds);
        if last.is_none_or(|last| seconds >= last + BESIDE.as_secs_f64()) {
            self.watched.beside.push(self.look.beside(&held, &self.machines, self.daemon)?);
        }
        self.watched.held.push(held);
        Ok(())
    }
}

/// Bytes of all pools that the daemon has open, or guests have mapped, each counted once.
fn pool_bytes(daemon: Option<&Daemon>, machines: &[Machine]) -> Result<u64> {
    const NAME: &str = "/memfd:cofolio-pool";
    let Some(daemon) = daemon else { return Ok(0) };
    let mut pools = HashMap::new();
    for open in fs::read_dir(format!("/proc/{}/fd", daemon.pid()))? {
        let path = open?.path();
        if fs::read_link(&path).is_ok_and(|name| name.to_string_lossy().starts_with(NAME))
            // It may be closed meanwhile.
            && let Ok(file) = fs::metadata(&path)
        {
            pools.insert(file.ino(), file.blocks() * 512);
        }
    }
    // The daemon has closed retired pools.
    for machine in machines {
        pools.extend(mapped_pools(Path::new("/proc"), machine.pid)?);
    }
    Ok(pools.values().sum())
}

impl Watched {
    /// All removals of the guests.
    pub(super) fn removals(&self, memory: u64) -> Vec<Removal> {
        let removed = self.said.iter().filter(|event| event.event == "removed");
        removed.map(|event| self.removal(event, memory)).collect()
    }

    fn removal(&self, removed: &Event, memory: u64) -> Removal {
        let mut removal = Removal {
            what: removed.what.clone(),
            bytes: removed.bytes,
            single: 0,
            returned: 0,
            p50: f64::NAN,
            p99: f64::NAN,
            p99_of_all: f64::NAN,
            held_of_used: f64::NAN,
        };
        let of_guest = || self.said.iter().filter(|it| it.number == removed.number);
        let later = |event: &'static str| {
            of_guest().find(move |it| it.event == event && it.seconds > removed.seconds)
        };
        let began = of_guest()
            .rfind(|it| it.event == "removing" && it.seconds <= removed.seconds)
            .map_or(removed.seconds, |it| it.seconds);
        let last = self.held.last().map_or(0.0, |held| held.seconds);
        let until = later("begun").map_or(last, |begun| begun.seconds);
        let until = until.min(removed.seconds + RETURN_MAX.as_secs_f64());
        // The guest began to free memory after the sample before.
        let filled = self.held.iter().rfind(|it| it.seconds < began);
        let after = later("after").filter(|after| after.seconds <= until);
        let Some((filled, after)) = filled.zip(after) else { return removal };
        let before = filled.guests[removed.number];
        let series = self.held.iter().filter(|it| it.seconds >= began && it.seconds <= until);
        let series = series.map(|it| (it.seconds, it.guests[removed.number]));
        let least = series.clone().map(|(_, bytes)| bytes).min().unwrap_or(before);
        // Later merges free pages that were not freed by the guest.
        removal.returned = before.saturating_sub(least).min(removed.bytes);
        let when = |bytes: f64| {
            let mut reached = series.clone().filter(|it| it.1 as f64 <= before as f64 - bytes);
            reached.next().map_or(f64::NAN, |(seconds, _)| seconds - filled.seconds)
        };
        let reserve = Policy::default().reserve;
        // Memory that fits into the reserve proves nothing.
        let more = match removed.bytes.saturating_sub(reserve) {
            0 => f64::NAN,
            more => more as f64,
        };
        (removal.p50, removal.p99) = (when(more * 0.5), when(more * 0.99));
        removal.p99_of_all = when(removal.returned as f64 * 0.99);
        let single = of_guest().rfind(|it| it.event == "removing" && it.seconds <= removed.seconds);
        removal.single = single.map_or(0, |it| removed.single.saturating_sub(it.single));
        let used = memory.saturating_sub(after.free) + reserve;
        removal.held_of_used = after.all as f64 / used as f64;
        removal
    }

    /// Mean size of all guests' files between two moments, and the highest size of one guest's,
    /// from the events of the guests. While a guest fills or removes files, these grow and shrink
    /// evenly.
    pub(super) fn load(&self, from: f64, to: f64) -> (f64, f64) {
        let mut last: BTreeMap<usize, (f64, f64)> = BTreeMap::new();
        let (mut area, mut most) = (0.0, 0.0_f64);
        for event in self.said.iter().filter(|it| it.what == "files") {
            let bytes = match event.event.as_str() {
                "filled" | "removing" => event.bytes as f64,
                _ => 0.0,
            };
            most = most.max(bytes);
            let now = (event.seconds, bytes);
            if let Some(before) = last.insert(event.number, now) {
                area += area_between(before, now, from, to);
            }
        }
        (area / (to - from), most)
    }
}

/// Area below the line between two points, from `from` to `to`.
fn area_between(before: (f64, f64), now: (f64, f64), from: f64, to: f64) -> f64 {
    let (start, end) = (before.0.max(from), now.0.min(to));
    if end <= start {
        return 0.0;
    }
    let at =
        |seconds: f64| before.1 + (now.1 - before.1) * (seconds - before.0) / (now.0 - before.0);
    (end - start) * at(start).midpoint(at(end))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(seconds: f64, event: &str, bytes: u64) -> Event {
        Event {
            number: 0,
            seconds,
            event: event.to_owned(),
            what: "files".to_owned(),
            bytes,
            free: (1 << 30) - 100,
            single: 0,
            all: 100,
        }
    }

    fn held(seconds: f64, bytes: u64) -> Held {
        Held { seconds, guests: vec![bytes], pools: 0, saved: 0 }
    }

    /// The time began when the guest had removed all files, and memory that came back before did
    /// not count.
    #[test]
    fn freed_memory_waits_from_before_the_first_file_is_removed() {
        const MIB: u64 = 1 << 20;
        let series =
            [(1.0, 500), (1.5, 500), (2.0, 400), (2.5, 200), (3.0, 150), (9.0, 132), (20.0, 100)];
        let mut watched = Watched {
            held: series.map(|(seconds, mib)| held(seconds, mib * MIB)).to_vec(),
            said: vec![
                event(1.5, "removing", 400 * MIB),
                event(2.5, "removed", 400 * MIB),
                event(12.5, "after", 0),
            ],
            beside: Vec::new(),
        };
        // 368 MiB are more than the reserve.
        let found = &watched.removals(1 << 30)[0];
        assert_eq!((found.p50, found.p99, found.p99_of_all), (1.5, 8.0, 19.0));
        assert_eq!(found.returned, 400 * MIB);
        // Less comes back: no goal is met then.
        watched.held.retain(|it| it.seconds < 9.0);
        watched.held.push(held(20.0, 150 * MIB));
        assert!(watched.removals(1 << 30)[0].p99.is_nan());
        // Neither if the guest filled its memory again before anything could be seen.
        watched.said.push(event(5.0, "begun", 0));
        let found = &watched.removals(1 << 30)[0];
        assert!(found.p99_of_all.is_nan() && found.held_of_used.is_nan(), "{found:?}");
    }

    #[test]
    fn the_load_includes_the_ramp_and_is_cut_at_the_ends() {
        let said = [
            (0.0, "begun", 0),
            (10.0, "filled", 100),
            (12.0, "removing", 100),
            (14.0, "removed", 100),
            (24.0, "after", 0),
            (100.0, "begun", 0),
        ];
        let said = said.map(|(seconds, what, bytes)| event(seconds, what, bytes)).to_vec();
        let watched = Watched { held: Vec::new(), said, beside: Vec::new() };
        // 10 s up to 100, 2 s of it, 2 s down.
        assert_eq!(watched.load(0.0, 100.0), ((500.0 + 200.0 + 100.0) / 100.0, 100.0));
        // From the middle of the ramp on.
        assert_eq!(watched.load(5.0, 105.0).0, (375.0 + 200.0 + 100.0) / 100.0);
        assert_eq!(watched.load(50.0, 60.0).0, 0.0);
    }
}
