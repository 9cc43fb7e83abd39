//! What the daemon reclaims by itself: from containers under memory pressure, and what containers
//! leave behind. All of it is off by default.
//!
//! | sign of pressure | of | what goes |
//! |---|---|---|
//! | `memory.events.local`: `high`, `max` (v2), `memory.failcnt` (v1) | a cgroup | what it alone uses |
//! | `memory.pressure`: `some avg10` (v2) | a cgroup | the same |
//! | `/proc/pressure/memory`: `some avg10` | the machine | what at most one container uses |
//!
//! In each case the least recently used goes first, up to a number of bytes for each cgroup and
//! round, and never what a process maps: the kernel itself decides about the working set. Objects that
//! are mapped are tried all the same, because only the kernel knows them. After [`IN_VAIN_MAX`] of them
//! in a row the rest is taken for mapped as well: they are used anew with each look at processes, and so
//! come last.
//!
//! The kernel's PSI of a cgroup counts tasks of the cgroups below it, so a stall is that of the lowest
//! ones that show it. The other figures are of one cgroup alone: its own limit was met. What went from
//! cgroups below it in the same round counts towards its bytes.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::ops::ControlFlow;
use std::path::Path;

use super::reclaim::Scope;
use super::shares::from_the_top;
use super::usage::{ObjectId, SuperblockId, Usage};
use super::{Budget, Ledger};
use crate::cgroup::{Version, field, is_at_or_below};

/// When to reclaim without being asked.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ReclaimPolicy {
    /// Bytes to drop for each cgroup under pressure, and for the machine, in a round; 0 for never.
    pub bytes: u64,
    /// From how many percent of the time on, in which tasks wait for memory, there is pressure.
    pub percent: f64,
    /// Whether to drop what removed cgroups used, and what was used through removed mounts, once nobody
    /// uses it any more.
    pub left_behind: bool,
}

/// Objects that are tried one after the other without a page that goes.
const IN_VAIN_MAX: u32 = 256;

/// What is known from one round to the next.
#[derive(Debug, Default)]
pub(super) struct Pressure {
    policy: ReclaimPolicy,
    /// How often each cgroup was at a limit.
    events: HashMap<Box<str>, u64>,
    /// Where to search in the rest of this round, the next one last. A cgroup comes before those
    /// above it.
    round: Vec<Source>,
    /// Cgroups that were under pressure in this round.
    pressed: Vec<Pressed>,
    /// What the last search found.
    work: Work,
    /// Objects of users that have gone. Others may use them.
    left_behind: HashSet<ObjectId>,
    /// What was freed so far.
    freed_bytes: u64,
}

/// Where the policy searches for what it can drop.
#[derive(Debug)]
enum Source {
    LeftBehind,
    Machine,
    Cgroup(Box<str>),
}

/// A cgroup under pressure.
#[derive(Debug)]
struct Pressed {
    path: Box<str>,
    /// Its tasks wait for memory.
    is_stalled: bool,
    freed_bytes: u64,
}

impl Pressure {
    /// Drops objects that do not exist any more.
    pub(super) fn forget(&mut self, objects: &HashSet<ObjectId>) {
        self.left_behind.retain(|id| !objects.contains(id));
        self.work.objects.retain(|id| !objects.contains(id));
    }

    /// Bytes to drop for a cgroup, once those below it have been looked at in this round.
    fn bytes_for(&mut self, path: &str, is_at_limit: bool, is_stalled: bool) -> u64 {
        let below = || self.pressed.iter().filter(|it| is_at_or_below(&it.path, path));
        if !is_at_limit && (!is_stalled || below().any(|it| it.is_stalled)) {
            return 0;
        }
        let freed_bytes: u64 = below().map(|it| it.freed_bytes).sum();
        self.pressed.push(Pressed { path: path.into(), is_stalled, freed_bytes: 0 });
        self.policy.bytes.saturating_sub(freed_bytes)
    }

    /// Takes note of what the last object gave.
    fn freed(&mut self, bytes: u64) {
        self.freed_bytes += bytes;
        self.work.freed(bytes);
        if let Some(pressed) = self.pressed.last_mut() {
            pressed.freed_bytes += bytes;
        }
    }
}

/// Objects to drop until so many bytes are free.
#[derive(Debug, Default)]
struct Work {
    /// The next one last.
    objects: Vec<ObjectId>,
    bytes: u64,
    /// How many were tried in a row in vain, and how many may be.
    in_vain: u32,
    in_vain_max: u32,
}

impl Work {
    /// Takes note of what the last object gave.
    fn freed(&mut self, bytes: u64) {
        self.bytes = self.bytes.saturating_sub(bytes);
        self.in_vain = if bytes == 0 { self.in_vain + 1 } else { 0 };
        if self.bytes == 0 || self.in_vain >= self.in_vain_max {
            self.objects.clear();
        }
    }
}

impl Ledger {
    /// Sets what [`Ledger::relieve`] does.
    pub fn set_policy(&mut self, policy: ReclaimPolicy) {
        let pressure = &mut self.pressure;
        if pressure.policy != policy {
            *pressure =
                Pressure { policy, freed_bytes: pressure.freed_bytes, ..Pressure::default() };
        }
    }

    /// Bytes that the policy has freed so far.
    pub fn policy_freed_bytes(&self) -> u64 {
        self.pressure.freed_bytes
    }

    /// Does what the policy says, and goes on with the next call where the budget is spent: after an
    /// object that was dropped, or a look at a cgroup. Says whether a round over all cgroups is complete.
    pub fn relieve(&mut self, budget: &Budget) -> bool {
        let is_complete = |it: &Pressure| it.round.is_empty() && it.work.objects.is_empty();
        if is_complete(&self.pressure) {
            self.begin_round();
        }
        while !is_complete(&self.pressure) {
            if let Some(object) = self.pressure.work.objects.pop() {
                let freed = self.drop_unmapped(object);
                self.pressure.freed(freed);
            } else if let Some(source) = self.pressure.round.pop() {
                self.pressure.work = self.search(source);
            }
            if budget.is_spent() {
                break;
            }
        }
        is_complete(&self.pressure)
    }

    fn begin_round(&mut self) {
        self.pressure.pressed.clear();
        if self.pressure.policy.bytes > 0 {
            // A limit may be that of a cgroup above the one with the processes. Of a deep chain
            // only its topmost cgroups and that one are looked at.
            let users = self.cgroups.paths().filter(|path| *path != "/");
            let paths = users.flat_map(|path| from_the_top(path).chain([path]));
            let paths: BTreeSet<Box<str>> = paths.map(Into::into).collect();
            self.pressure.events.retain(|path, _| paths.contains(path));
            // In order, so each one comes before those below it.
            self.pressure.round.extend(paths.into_iter().map(Source::Cgroup));
            self.pressure.round.push(Source::Machine);
        }
        if !self.pressure.left_behind.is_empty() {
            self.pressure.round.push(Source::LeftBehind);
        }
    }

    fn search(&mut self, source: Source) -> Work {
        let ReclaimPolicy { bytes, percent, .. } = self.pressure.policy;
        let found = match source {
            Source::LeftBehind => return self.unused_left_behind(),
            Source::Machine => {
                let path = self.root.join("proc/pressure/memory");
                is_stalled(&path, percent).then_some((Scope::Machine, bytes))
            }
            Source::Cgroup(path) => {
                let bytes = self.bytes_to_drop(&path, percent);
                (bytes > 0).then(|| (self.scope_below(&path), bytes))
            }
        };
        let Some((scope, bytes)) = found else { return Work::default() };
        let mut objects = self.candidates(&scope).objects;
        objects.reverse();
        Work { objects, bytes, in_vain: 0, in_vain_max: IN_VAIN_MAX }
    }

    /// Bytes to drop for a cgroup, if it has been at a limit since the last look, or its tasks wait for
    /// memory.
    fn bytes_to_drop(&mut self, path: &str, percent: f64) -> u64 {
        let Ok(hierarchy) = &self.hierarchy else { return 0 };
        let directory = hierarchy.directory(path);
        let read = |name: &str| std::fs::read_to_string(directory.join(name)).ok();
        let events = match hierarchy.version() {
            Version::V1 => read("memory.failcnt").and_then(|text| text.trim().parse().ok()),
            Version::V2 => read("memory.events.local")
                .and_then(|text| Some(field(&text, "high")? + field(&text, "max")?)),
        };
        let Some(events) = events else { return 0 };
        let known = self.pressure.events.insert(path.into(), events);
        let is_at_limit = known.is_some_and(|known| known < events);
        let is_stalled = is_stalled(&directory.join("memory.pressure"), percent);
        self.pressure.bytes_for(path, is_at_limit, is_stalled)
    }

    /// Notes the objects of users that have gone: of cgroups that were removed, and of these mounts. To be
    /// called before their usage lists go.
    pub(super) fn note_left_behind(&mut self, mounts: &[SuperblockId]) {
        if !self.pressure.policy.left_behind {
            return;
        }
        let mut noted = Vec::new();
        // Nobody may have looked yet how much is resident of what a container used that soon ended.
        let mut note = |usage: Usage| {
            if self.index.object(usage.object).is_some_and(|it| it.counts_use(usage.time)) {
                noted.push(usage.object);
            }
            ControlFlow::<()>::Continue(())
        };
        for cgroup in self.cgroups.ended() {
            let _ = self.usage.for_each_of_cgroup(*cgroup, &mut note);
        }
        for mount in mounts {
            let _ = self.usage.for_each_of_mount(*mount, &mut note);
        }
        self.pressure.left_behind.extend(noted);
    }

    /// The noted objects that have no user left, each tried once. Those that somebody unknown has
    /// opened stay noted.
    fn unused_left_behind(&mut self) -> Work {
        let mut objects = std::mem::take(&mut self.pressure.left_behind);
        // As they were noted: nobody may have looked yet how much of them is resident.
        let _ = self.usage.for_each(|usage| {
            let object = self.index.object(usage.object);
            let counts = object.is_some_and(|it| it.counts_use(usage.time));
            if counts && self.cgroups.is_user(usage.cgroup) {
                objects.remove(&usage.object);
            }
            ControlFlow::<()>::Continue(())
        });
        // Nobody knows whether somebody has them: later.
        let unknown = self.unknown_uses().map(|(object, _)| object);
        let unknown: Vec<_> = unknown.filter(|object| objects.remove(object)).collect();
        self.pressure.left_behind.extend(unknown);
        let objects = objects.into_iter().collect();
        Work { objects, bytes: u64::MAX, in_vain: 0, in_vain_max: u32::MAX }
    }
}

/// Whether the kernel says that tasks waited for memory for so much of the time.
fn is_stalled(path: &Path, percent: f64) -> bool {
    let text = std::fs::read_to_string(path).ok();
    text.and_then(|text| stalled_percent(&text)).is_some_and(|found| found >= percent)
}

/// `avg10` of the line `some` (`Documentation/accounting/psi.rst`): the percentage of the last ten
/// seconds in which at least one task waited for memory.
fn stalled_percent(text: &str) -> Option<f64> {
    let some = text.lines().find_map(|line| line.strip_prefix("some "))?;
    some.split(' ').find_map(|field| field.strip_prefix("avg10="))?.parse().ok()
}

#[cfg(test)]
mod tests {
    use cofolio_store::{InitOptions, Store};

    use super::super::cgroup_ids;
    use super::*;
    use crate::cgroup::Hierarchy;
    use crate::mount::RunDir;

    #[test]
    fn pressure_is_read() {
        let text = "some avg10=12.65 avg60=0.12 avg300=0.02 total=2107587\n\
                    full avg10=0.14 avg60=0.03 avg300=0.00 total=1326451\n";
        assert_eq!(stalled_percent(text), Some(12.65));
        for wrong in ["", "some", "some avg10=", "full avg10=1.0", "some avg60=1"] {
            assert_eq!(stalled_percent(wrong), None, "{wrong}");
        }
    }

    /// A container that waited for memory made each cgroup above it look the same: what it shared with
    /// its neighbours went, and the bytes of a round went once for each of them.
    #[test]
    fn a_stall_is_that_of_the_lowest_cgroups() {
        let policy = ReclaimPolicy { bytes: 100, ..ReclaimPolicy::default() };
        let new = || Pressure { policy, ..Pressure::default() };
        let mut it = new();
        assert_eq!(it.bytes_for("/pods/b/main", false, true), 100);
        assert_eq!(it.bytes_for("/pods/b", false, true), 0);
        assert_eq!(it.bytes_for("/pods/a", false, true), 100);
        assert_eq!(it.bytes_for("/pods", false, true), 0);
        assert_eq!(it.bytes_for("/pod", false, true), 100, "nothing is below");
        assert_eq!(it.bytes_for("/", false, false), 0);
        // A child at its limit that does not wait: its parent's tasks wait for another reason.
        let mut it = new();
        assert_eq!(it.bytes_for("/a/b", true, false), 100);
        it.freed(30);
        assert_eq!(it.bytes_for("/a", false, true), 70);
    }

    /// A limit is of one cgroup, but what went below it has helped already.
    #[test]
    fn the_bytes_of_a_round_are_of_a_cgroup_with_those_below() {
        let policy = ReclaimPolicy { bytes: 100, ..ReclaimPolicy::default() };
        let mut it = Pressure { policy, ..Pressure::default() };
        for (path, left) in [("/a/y", 100), ("/a/x", 100)] {
            assert_eq!(it.bytes_for(path, true, true), left);
            it.freed(40);
        }
        assert_eq!(it.bytes_for("/a", true, true), 20);
        it.freed(50);
        assert_eq!(it.bytes_for("/", true, true), 0);
        assert_eq!(it.freed_bytes, 130);
    }

    /// Mapped objects cost a look each and give nothing, just when memory is short.
    #[test]
    fn work_ends_with_its_bytes_or_after_many_objects_in_vain() {
        let objects: Vec<_> = (0..10).map(ObjectId).collect();
        let mut work = Work { objects, bytes: 100, in_vain: 0, in_vain_max: 3 };
        for freed in [0, 0, 60, 0, 0] {
            work.freed(freed);
            assert_eq!(work.objects.len(), 10);
        }
        let objects = work.objects.clone();
        work.freed(0);
        assert!(work.objects.is_empty());
        let mut work = Work { objects, bytes: 40, in_vain: 0, in_vain_max: 3 };
        work.freed(50);
        assert!(work.objects.is_empty());
    }

    /// A ledger of a machine whose kernel text is planted, with two containers, and a policy that
    /// acts when tasks wait for memory 10 % of the time.
    struct Planted {
        root: tempfile::TempDir,
        ledger: Ledger,
    }

    impl Planted {
        fn new(version: Version) -> Self {
            let root = tempfile::tempdir().unwrap();
            let store = Store::init(&root.path().join("store"), &InitOptions::default()).unwrap();
            let mut ledger = Ledger::new(store, RunDir::at(root.path().join("run")));
            ledger.root = root.path().to_owned();
            let hierarchy = Hierarchy::at(version, &root.path().join("cgroup"));
            for path in ["/pod/a", "/pod/b"] {
                std::fs::create_dir_all(hierarchy.directory(path)).unwrap();
                let inode = cgroup_ids::inode(&hierarchy, path).unwrap();
                ledger.cgroups.number(path, inode).unwrap();
            }
            ledger.hierarchy = Ok(hierarchy);
            ledger.set_policy(ReclaimPolicy { bytes: 1, percent: 10.0, left_behind: false });
            let planted = Self { root, ledger };
            planted.write("proc/pressure/memory", &psi("0.00", "0.00"));
            for path in ["cgroup/pod", "cgroup/pod/a", "cgroup/pod/b"] {
                planted.write(&format!("{path}/memory.pressure"), &psi("0.00", "0.00"));
                planted.write(&format!("{path}/memory.events.local"), &events(0, 0));
                planted.write(&format!("{path}/memory.failcnt"), "0\n");
            }
            planted
        }

        fn write(&self, path: &str, text: &str) {
            let path = self.root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }

        /// Whose memory a round takes: paths of cgroups, `/` for the machine.
        fn pressed(&mut self) -> Vec<String> {
            self.ledger.begin_round();
            let mut found = Vec::new();
            while let Some(next) = self.ledger.pressure.round.pop() {
                let path =
                    if let Source::Cgroup(path) = &next { path.as_ref() } else { "/" }.to_owned();
                if self.ledger.search(next).bytes > 0 {
                    found.push(path);
                }
            }
            found
        }
    }

    fn psi(some: &str, full: &str) -> String {
        let line = |kind, avg10| format!("{kind} avg10={avg10} avg60=99.00 avg300=99.00 total=7\n");
        line("some", some) + &line("full", full)
    }

    fn events(high: u32, max: u32) -> String {
        format!("low 9{high}\nhigh {high}\nmax {max}\noom 9{max}\noom_kill 9{max}\n")
    }

    /// A chain of 2,000 cgroups, each in the one before, took 4 MB in each round for every one of
    /// them that used something.
    #[test]
    fn only_some_cgroups_above_a_deep_one_are_looked_at() {
        let mut planted = Planted::new(Version::V2);
        let deep = "/x".repeat(2000);
        planted.ledger.cgroups.number(&deep, Some(7)).unwrap();
        planted.ledger.begin_round();
        let round = &planted.ledger.pressure.round;
        let in_chain = round.iter().filter_map(|source| match source {
            Source::Cgroup(path) if path.starts_with("/x") => Some(path.len()),
            _ => None,
        });
        // Each comes before the one below it, which is searched first.
        assert_eq!(in_chain.collect::<Vec<_>>(), [2, 4, 6, 8, 10, 12, 14, 16, 4000]);
    }

    /// The kernel's own figures decide, to the hundredth of a percent that it prints.
    #[test]
    fn stalls_count_from_the_percentage_on() {
        let mut planted = Planted::new(Version::V2);
        assert_eq!(planted.pressed(), [""; 0]);
        for (file, path) in
            [("proc/pressure/memory", "/"), ("cgroup/pod/a/memory.pressure", "/pod/a")]
        {
            for below in [psi("9.99", "9.99"), psi("0.00", "99.00"), String::new()] {
                planted.write(file, &below);
                assert_eq!(planted.pressed(), [""; 0], "{path}: {below}");
            }
            for above in ["10.00", "10.01", "100.00"] {
                planted.write(file, &psi(above, "0.00"));
                assert_eq!(planted.pressed(), [path], "{above}");
            }
            planted.write(file, &psi("0.00", "0.00"));
        }
        // More than 100 % is never reached, as tests of limits want it.
        planted.ledger.set_policy(ReclaimPolicy { bytes: 1, percent: 100.01, left_behind: false });
        planted.write("cgroup/pod/a/memory.pressure", &psi("100.00", "100.00"));
        assert_eq!(planted.pressed(), [""; 0]);
    }

    /// Tasks of one container wait, or those of all together: the others keep what they use in the
    /// first case, and containers what they share in the second.
    #[test]
    fn a_stall_is_that_of_a_cgroup_or_of_the_machine() {
        let mut planted = Planted::new(Version::V2);
        // So the kernel counts it for the cgroups above, too.
        planted.write("cgroup/pod/b/memory.pressure", &psi("20.00", "0.00"));
        planted.write("cgroup/pod/memory.pressure", &psi("20.00", "0.00"));
        planted.write("proc/pressure/memory", &psi("2.00", "0.00"));
        assert_eq!(planted.pressed(), ["/pod/b"]);
        for path in ["cgroup/pod/memory.pressure", "cgroup/pod/b/memory.pressure"] {
            planted.write(path, &psi("2.00", "0.00"));
        }
        planted.write("proc/pressure/memory", &psi("20.00", "0.00"));
        assert_eq!(planted.pressed(), ["/"]);
        // A kernel without PSI has no such files.
        std::fs::remove_file(planted.root.path().join("proc/pressure/memory")).unwrap();
        std::fs::remove_file(planted.root.path().join("cgroup/pod/b/memory.pressure")).unwrap();
        assert_eq!(planted.pressed(), [""; 0]);
    }

    /// A cgroup is at a limit if the kernel has counted it since the last round, and not once more
    /// in each round for what it counted long ago.
    #[test]
    fn each_event_of_a_limit_counts_once() {
        let mut planted = Planted::new(Version::V2);
        let local = "cgroup/pod/a/memory.events.local";
        planted.write(local, &events(5, 3));
        assert_eq!(planted.pressed(), [""; 0], "nobody knows when");
        for (high, max) in [(6, 3), (6, 4), (9, 9)] {
            planted.write(local, &events(high, max));
            // Here the kernel counts those of the cgroups below.
            planted.write("cgroup/pod/memory.events", &events(high, max));
            assert_eq!(planted.pressed(), ["/pod/a"], "{high} {max}");
            assert_eq!(planted.pressed(), [""; 0], "{high} {max}");
        }
        planted.write("cgroup/pod/memory.events.local", &events(1, 0));
        assert_eq!(planted.pressed(), ["/pod"]);
        // Version 1 has one number, and no other is looked at.
        let mut planted = Planted::new(Version::V1);
        assert_eq!(planted.pressed(), [""; 0]);
        planted.write(local, &events(9, 9));
        planted.write("cgroup/pod/b/memory.failcnt", "1\n");
        assert_eq!(planted.pressed(), ["/pod/b"]);
        assert_eq!(planted.pressed(), [""; 0]);
    }
}
