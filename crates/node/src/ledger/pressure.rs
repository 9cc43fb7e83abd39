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
//! round, and never what a process maps: the kernel itself decides about the working set. Objects
//! that are mapped are tried all the same, because only the kernel knows them. After
//! [`IN_VAIN_MAX`] in a row that stay the rest is taken for mapped as well: they are used anew with
//! each look at processes, and so come last. Objects that the kernel itself has dropped since the
//! last look at them do not count.
//!
//! Objects that somebody unknown may use stay: those that an unknown process has opened within the
//! last hour, and if opened files were missed in that time, all that were resident then.
//!
//! The kernel's PSI of a cgroup counts tasks of the cgroups below it, so a stall is that of the
//! lowest ones that show it. The other figures are of one cgroup alone: its own limit was met. What
//! went from cgroups below it in the same round counts towards its bytes.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::Path;

use super::Budget;
use super::owners::Groups;
use super::reclaim::{Reclaim, Reclaimed, Scope, candidates};
use super::shares::from_the_top;
use super::state::State;
use super::unused::Unused;
use super::usage::ObjectId;
use crate::cgroup::{Version, field, is_at_or_below};

/// When to reclaim without being asked.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ReclaimPolicy {
    /// Bytes to drop for each cgroup under pressure, and for the machine, in a round; 0 for never.
    pub bytes: u64,
    /// From how many percent of the time on, in which tasks wait for memory, there is pressure.
    pub percent: f64,
    /// Whether to drop what removed cgroups used, and what was used through removed mounts, once
    /// nobody uses it any more.
    pub left_behind: bool,
}

/// Objects that are tried one after the other and stay.
const IN_VAIN_MAX: u32 = 256;

/// What is known from one round to the next.
#[derive(Debug, Default)]
pub(super) struct Pressure {
    policy: ReclaimPolicy,
    /// How often each cgroup was at a limit.
    events: HashMap<Box<str>, u64>,
    /// What is left to do in this round, the next stage last.
    round: Vec<Stage>,
    /// Cgroups that are under pressure in this round, each before those above it.
    pressed: Vec<Pressed>,
    /// What the last stage has to drop.
    work: Work,
    /// What was freed so far.
    freed_bytes: u64,
}

/// A part of a round.
#[derive(Debug)]
enum Stage {
    LeftBehind,
    Machine,
    /// Looks whether a cgroup is under pressure.
    Look(Box<str>),
    /// Finds what the cgroups under pressure alone use, in one walk over the usage lists for all of
    /// them: there may be hundreds.
    Search,
    /// Drops what was found for a cgroup of [`Pressure::pressed`].
    Drop(usize),
}

/// A cgroup under pressure.
#[derive(Debug)]
struct Pressed {
    path: Box<str>,
    /// Its tasks wait for memory.
    is_stalled: bool,
    /// The lowest cgroup above it that is under pressure, too.
    above: Option<u32>,
    /// Objects that it alone uses with those below it, but for those that one of these alone uses
    /// that is under pressure itself. The next one to drop last.
    objects: Vec<ObjectId>,
    /// What was freed of it and of those below it.
    freed_bytes: u64,
}

impl Pressure {
    fn is_complete(&self) -> bool {
        self.round.is_empty() && self.work.objects.is_empty()
    }

    /// Adds a cgroup if it is under pressure. Those below it have been looked at in this round.
    fn add(&mut self, path: &str, is_at_limit: bool, is_stalled: bool) {
        let mut below = self.pressed.iter().filter(|it| is_at_or_below(&it.path, path));
        if is_at_limit || (is_stalled && !below.any(|it| it.is_stalled)) {
            self.pressed.push(Pressed {
                path: path.into(),
                is_stalled,
                above: None,
                objects: Vec::new(),
                freed_bytes: 0,
            });
        }
    }

    /// Begins to drop what the last search found for this cgroup.
    fn begin_drop(&mut self, number: usize) {
        let pressed = &mut self.pressed[number];
        let bytes = self.policy.bytes.saturating_sub(pressed.freed_bytes);
        let objects = if bytes > 0 { std::mem::take(&mut pressed.objects) } else { Vec::new() };
        let cgroup = Some(number);
        self.work = Work { objects, bytes, cgroup, in_vain: 0, in_vain_max: IN_VAIN_MAX };
    }

    /// The next object to drop.
    fn next(&mut self, unused: &mut Unused) -> Option<ObjectId> {
        std::iter::from_fn(|| self.work.objects.pop()).find(|id| unused.take(*id))
    }

    /// Takes note of what became of the last object.
    fn note(&mut self, dropped: Reclaimed) {
        let bytes = dropped.freed_bytes;
        self.freed_bytes += bytes;
        self.work.note(dropped);
        let mut cgroup = self.work.cgroup;
        while let Some(pressed) = cgroup.and_then(|number| self.pressed.get_mut(number)) {
            pressed.freed_bytes += bytes;
            cgroup = pressed.above.map(|above| above as usize);
        }
    }
}

/// Objects to drop until so many bytes are free.
#[derive(Debug, Default)]
struct Work {
    /// The next one last.
    objects: Vec<ObjectId>,
    bytes: u64,
    /// The number of the cgroup under pressure that it is for.
    cgroup: Option<usize>,
    /// How many stayed in a row, and how many may.
    in_vain: u32,
    in_vain_max: u32,
}

impl Work {
    /// Takes note of what became of the last object.
    fn note(&mut self, Reclaimed { freed_bytes, kept_bytes, .. }: Reclaimed) {
        self.bytes = self.bytes.saturating_sub(freed_bytes);
        self.in_vain = match (freed_bytes, kept_bytes) {
            // The kernel has dropped it, or it was removed.
            (0, 0) => self.in_vain,
            (0, _) => self.in_vain + 1,
            _ => 0,
        };
        if self.bytes == 0 || self.in_vain >= self.in_vain_max {
            self.objects.clear();
        }
    }
}

impl Pressure {
    /// See [`Ledger::set_policy`](super::Ledger::set_policy).
    pub(super) fn set_policy(&mut self, policy: ReclaimPolicy, state: &mut State) {
        if self.policy != policy {
            *self = Self { policy, freed_bytes: self.freed_bytes, ..Self::default() };
            state.unused = Unused::new(policy.left_behind);
        }
    }

    /// Bytes that were freed so far.
    pub(super) fn freed_bytes(&self) -> u64 {
        self.freed_bytes
    }

    /// See [`Ledger::apply_policy`](super::Ledger::apply_policy).
    pub(super) fn apply_policy(&mut self, reclaim: &mut Reclaim<'_>, budget: &Budget) -> bool {
        if self.is_complete() {
            self.begin_round(reclaim.state);
        }
        while !self.is_complete() {
            if let Some(object) = self.next(&mut reclaim.state.unused) {
                let dropped = reclaim.drop_unmapped(object);
                self.note(dropped);
            } else if let Some(stage) = self.round.pop() {
                self.run_stage(stage, reclaim.state);
            }
            if budget.is_spent() {
                break;
            }
        }
        self.is_complete()
    }

    fn begin_round(&mut self, state: &mut State) {
        self.pressed.clear();
        state.unused.set(HashSet::new());
        if self.policy.bytes > 0 {
            // A limit may be that of a cgroup above the one with the processes. Of a deep chain
            // only its topmost cgroups and that one are looked at.
            let users = state.cgroups.paths().filter(|path| *path != "/");
            let paths = users.flat_map(|path| from_the_top(path).chain([path]));
            let paths: BTreeSet<Box<str>> = paths.map(Into::into).collect();
            self.events.retain(|path, _| paths.contains(path));
            self.round.push(Stage::Search);
            // In order, so each one comes before those below it.
            self.round.extend(paths.into_iter().map(Stage::Look));
            self.round.push(Stage::Machine);
        }
        if !state.unused.left_behind().is_empty() {
            self.round.push(Stage::LeftBehind);
        }
    }

    fn run_stage(&mut self, stage: Stage, state: &mut State) {
        let ReclaimPolicy { bytes, percent, .. } = self.policy;
        match stage {
            Stage::LeftBehind => self.search_left_behind(state),
            Stage::Machine => {
                if is_stalled(&state.root.join("proc/pressure/memory"), percent) {
                    let mut objects = candidates(state, &Scope::Machine).objects;
                    objects.reverse();
                    state.unused.set(objects.iter().copied().collect());
                    let (cgroup, in_vain_max) = (None, IN_VAIN_MAX);
                    self.work = Work { objects, bytes, cgroup, in_vain: 0, in_vain_max };
                }
            }
            Stage::Look(path) => self.look_at_cgroup(&path, percent, state),
            Stage::Search => self.search_pressed(state),
            Stage::Drop(cgroup) => self.begin_drop(cgroup),
        }
    }

    /// A cgroup is under pressure if it has been at a limit since the last look, or its tasks wait
    /// for memory.
    fn look_at_cgroup(&mut self, path: &str, percent: f64, state: &State) {
        let Ok(hierarchy) = &state.hierarchy else { return };
        let Ok(directory) = hierarchy.directory(path) else { return };
        let read = |name: &str| std::fs::read_to_string(directory.join(name)).ok();
        let events = match hierarchy.version() {
            Version::V1 => read("memory.failcnt").and_then(|text| text.trim().parse().ok()),
            Version::V2 => read("memory.events.local")
                .and_then(|text| Some(field(&text, "high")? + field(&text, "max")?)),
        };
        let Some(events) = events else { return };
        let known = self.events.insert(path.into(), events);
        let is_at_limit = known.is_some_and(|known| known < events);
        let is_stalled = is_stalled(&directory.join("memory.pressure"), percent);
        self.add(path, is_at_limit, is_stalled);
    }

    /// Finds what each cgroup under pressure alone uses, with those below it: the least recently
    /// used objects first.
    fn search_pressed(&mut self, state: &mut State) {
        if self.pressed.is_empty() {
            return;
        }
        let pressed = self.pressed.iter().map(|it| &*it.path).zip(0..);
        let numbers: HashMap<&str, u32> = pressed.collect();
        let lowest = |path: &str, is_it: &dyn Fn(&str) -> bool| {
            let above = from_the_top(path).chain([path]).filter(|it| is_it(it));
            above.filter_map(|it| numbers.get(it).copied()).last()
        };
        let above = |it: &Pressed| lowest(&it.path, &|path| path != &*it.path);
        let above: Vec<Option<u32>> = self.pressed.iter().map(above).collect();
        let cgroups = state.cgroups.numbered();
        let cgroups = cgroups.filter_map(|(id, path)| Some((id, lowest(path, &|_| true)?)));
        let groups = Groups::new(cgroups, above.iter().copied());

        let owners = state.owners(&groups, |usage| state.is_of_resident(usage));
        let found = owners.iter().filter(|(_, owner)| !owner.is_unsure);
        let found = found.filter_map(|(id, owner)| Some((owner.last_use, id, owner.group()?)));
        let mut objects: Vec<_> = found.collect();
        objects.sort_unstable();
        state.unused.set(objects.iter().map(|(_, object, _)| *object).collect());
        for (_, object, number) in objects.into_iter().rev() {
            self.pressed[number as usize].objects.push(object);
        }
        self.pressed.iter_mut().zip(above).for_each(|(it, above)| it.above = above);
        self.round.extend((0..self.pressed.len()).rev().map(Stage::Drop));
    }

    /// Finds the noted objects that have no user left. They are noted until they are tried, once.
    /// Those that somebody unknown may use stay noted.
    fn search_left_behind(&mut self, state: &mut State) {
        let noted = std::mem::take(state.unused.left_behind());
        // As they were noted: nobody may have looked yet how much of them is resident.
        let owners = state.owners(&Groups::default(), |usage| {
            noted.contains(&usage.object) && state.index.counts_use(usage.object, usage.time)
        });
        let is_left = |id: &ObjectId| !owners.of(*id).is_used;
        let objects: HashSet<ObjectId> = noted.iter().copied().filter(is_left).collect();
        let is_known = |id: &ObjectId| !owners.of(*id).is_unsure;
        let unused: HashSet<ObjectId> = objects.iter().copied().filter(is_known).collect();
        *state.unused.left_behind() = objects;
        let objects = unused.iter().copied().collect();
        state.unused.set(unused);
        let bytes = u64::MAX;
        self.work = Work { objects, bytes, cgroup: None, in_vain: 0, in_vain_max: u32::MAX };
    }
}

/// Whether the kernel says that tasks waited for memory for so much of the time.
fn is_stalled(path: &Path, percent: f64) -> bool {
    let text = std::fs::read_to_string(path).ok();
    text.and_then(|text| stalled_percent(&text)).is_some_and(|found| found >= percent)
}

/// `avg10` of the line `some` (`Documentation/accounting/psi.rst`): the percentage of the last ten
/// seconds in which at least one task waited.
pub(crate) fn stalled_percent(text: &str) -> Option<f64> {
    let some = text.lines().find_map(|line| line.strip_prefix("some "))?;
    some.split(' ').find_map(|field| field.strip_prefix("avg10="))?.parse().ok()
}

#[cfg(test)]
mod tests {
    use cofolio_image::import::{ImportOptions, import};
    use cofolio_image::source::Source;
    use cofolio_store::task::Task;
    use cofolio_store::{InitOptions, Store};

    use super::super::Ledger;
    use super::super::cgroup_ids;
    use super::super::unknown_users::UnknownUsers;
    use super::super::usage::{CgroupId, SuperblockId};
    use super::*;
    use crate::cgroup::Hierarchy;
    use crate::run_dir::RunDir;

    #[test]
    fn pressure_is_read() {
        let text = "some avg10=12.65 avg60=0.12 avg300=0.02 total=2107587\n\
                    full avg10=0.14 avg60=0.03 avg300=0.00 total=1326451\n";
        assert_eq!(stalled_percent(text), Some(12.65));
        for wrong in ["", "some", "some avg10=", "full avg10=1.0", "some avg60=1"] {
            assert_eq!(stalled_percent(wrong), None, "{wrong}");
        }
    }

    /// A container that waited for memory made each cgroup above it look the same: what it shared
    /// with its neighbours went, and the bytes of a round went once for each of them.
    #[test]
    fn a_stall_is_that_of_the_lowest_cgroups() {
        let mut it = Pressure::default();
        let mut is_pressed = |path: &str, is_at_limit, is_stalled| {
            it.add(path, is_at_limit, is_stalled);
            it.pressed.last().is_some_and(|it| &*it.path == path)
        };
        assert!(is_pressed("/pods/b/main", false, true));
        assert!(!is_pressed("/pods/b", false, true));
        assert!(is_pressed("/pods/a", false, true));
        assert!(!is_pressed("/pods", false, true));
        assert!(is_pressed("/pod", false, true), "nothing is below");
        assert!(!is_pressed("/", false, false));
        // A child at its limit that does not wait: its parent's tasks wait for another reason.
        assert!(is_pressed("/c/d", true, false));
        assert!(is_pressed("/c", false, true));
    }

    /// Mapped objects cost a look each and give nothing, just when memory is short.
    #[test]
    fn work_ends_with_its_bytes_or_after_many_objects_in_vain() {
        let objects: Vec<_> = (0..10).map(ObjectId).collect();
        let mut work = Work { objects, bytes: 100, in_vain_max: 3, ..Work::default() };
        let dropped =
            |freed_bytes, kept_bytes| Reclaimed { freed_bytes, kept_bytes, ..Reclaimed::default() };
        for (freed, kept) in [(0, 9), (0, 9), (60, 9), (0, 0), (0, 0), (0, 9), (0, 0), (0, 9)] {
            work.note(dropped(freed, kept));
            assert_eq!(work.objects.len(), 10);
        }
        let objects = work.objects.clone();
        work.note(dropped(0, 9));
        assert!(work.objects.is_empty());
        let mut work = Work { objects, bytes: 40, in_vain_max: 3, ..Work::default() };
        work.note(dropped(50, 0));
        assert!(work.objects.is_empty());
    }

    /// A ledger of a machine whose kernel text is planted, with two containers, and a policy that
    /// acts when tasks wait for memory 10 % of the time.
    struct Planted {
        root: tempfile::TempDir,
        store: Store,
        ledger: Ledger,
    }

    impl Planted {
        fn new(version: Version) -> Self {
            let root = tempfile::tempdir().unwrap();
            let store =
                Store::init(&root.path().join("store"), &InitOptions { immutable: false }).unwrap();
            let mut ledger =
                Ledger::new(store.clone(), RunDir::open(root.path().join("run")).unwrap());
            ledger.state.root = root.path().to_owned();
            let hierarchy = Hierarchy::at(version, &root.path().join("cgroup"));
            for path in ["/pod/a", "/pod/b"] {
                std::fs::create_dir_all(hierarchy.directory(path).unwrap()).unwrap();
                let inode = cgroup_ids::inode(&hierarchy, path).unwrap();
                ledger.state.cgroups.number(path, inode).unwrap();
            }
            ledger.state.hierarchy = Ok(hierarchy);
            ledger.set_policy(ReclaimPolicy { bytes: 1, percent: 10.0, left_behind: false });
            let planted = Self { root, store, ledger };
            planted.write("proc/pressure/memory", &psi("0.00", "0.00"));
            for path in ["cgroup/pod", "cgroup/pod/a", "cgroup/pod/b"] {
                planted.write(&format!("{path}/memory.pressure"), &psi("0.00", "0.00"));
                planted.write(&format!("{path}/memory.events.local"), &events(0, 0));
                planted.write(&format!("{path}/memory.failcnt"), "0\n");
            }
            planted
        }

        /// The same with version 2 and another policy.
        fn with(bytes: u64, left_behind: bool) -> Self {
            let mut planted = Self::new(Version::V2);
            planted.ledger.set_policy(ReclaimPolicy { bytes, percent: 10.0, left_behind });
            planted
        }

        fn write(&self, path: &str, text: &str) {
            let path = self.root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }

        /// Whose memory a round takes: paths of cgroups, `/` for the machine.
        fn pressed(&mut self) -> Vec<String> {
            self.ledger.pressure.begin_round(&mut self.ledger.state);
            let mut found = Vec::new();
            while let Some(stage) = self.ledger.pressure.round.pop() {
                self.ledger.pressure.work = Work::default();
                self.ledger.pressure.run_stage(stage, &mut self.ledger.state);
                let Work { bytes, cgroup, .. } = self.ledger.pressure.work;
                if bytes > 0 {
                    let path = cgroup.map(|number| &*self.ledger.pressure.pressed[number].path);
                    found.push(path.unwrap_or("/").to_owned());
                }
            }
            found
        }

        /// Brings cgroups to a limit.
        fn press(&self, paths: &[&str], times: u32) {
            for path in paths {
                self.write(&format!("cgroup{path}/memory.events.local"), &events(times, 0));
            }
        }

        /// Adds an image of so many files, and says that one page of each is resident.
        fn import(&mut self, count: u32) {
            let directory = self.root.path().join("image");
            std::fs::create_dir(&directory).unwrap();
            for number in 0..count {
                let content = format!("{number} ").repeat(4096);
                std::fs::write(directory.join(number.to_string()), content).unwrap();
            }
            let source = Source::parse(directory.to_str().unwrap()).unwrap();
            let domain = self.store.domain("default").unwrap();
            import(&domain, &source, &ImportOptions::default(), &Task::default()).unwrap();
            self.ledger.refresh(&Budget::UNLIMITED).unwrap();
            for id in (0..count).map(ObjectId) {
                self.ledger.state.index.set_resident(id, RESIDENT, 1);
            }
        }

        /// Makes a cgroup that has used these objects, each at a time.
        fn used(&mut self, path: &str, objects: &[(u32, u32)]) -> CgroupId {
            let hierarchy = self.ledger.state.hierarchy.as_ref().unwrap();
            std::fs::create_dir_all(hierarchy.directory(path).unwrap()).unwrap();
            let cgroup = self.ledger.state.number_cgroup(path).unwrap().unwrap();
            for (object, time) in objects {
                self.ledger.state.uses.lists().touch(
                    SuperblockId(0),
                    cgroup,
                    ObjectId(*object),
                    *time,
                );
            }
            cgroup
        }

        /// Goes on with a round until it has found what can be dropped.
        fn search(&mut self) {
            self.ledger.pressure.begin_round(&mut self.ledger.state);
            while let Some(stage) = self.ledger.pressure.round.pop() {
                let is_search = matches!(stage, Stage::Search);
                self.ledger.pressure.run_stage(stage, &mut self.ledger.state);
                if is_search {
                    break;
                }
            }
        }

        /// Objects that were tried.
        fn tried(&self) -> Vec<u32> {
            let objects = self.ledger.state.index.numbered();
            let tried = objects.filter(|(_, it)| u64::from(it.resident_pages) != RESIDENT);
            tried.map(|(id, _)| id.0).collect()
        }
    }

    /// More pages than any of the files has.
    const RESIDENT: u64 = 777;

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
        planted.ledger.state.cgroups.number(&deep, Some(7)).unwrap();
        planted.ledger.pressure.begin_round(&mut planted.ledger.state);
        let round = &planted.ledger.pressure.round;
        let in_chain = round.iter().filter_map(|stage| match stage {
            Stage::Look(path) if path.starts_with("/x") => Some(path.len()),
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

    /// A round walked all usage lists once for each cgroup under pressure. With some hundred of
    /// them and full lists that took hours.
    #[test]
    fn one_walk_finds_what_all_cgroups_under_pressure_alone_use() {
        let mut planted = Planted::new(Version::V2);
        planted.import(9);
        planted.used("/pod/a", &[(2, 1), (5, 7), (1, 8), (0, 9)]);
        planted.used("/pod/a/below", &[(2, 2), (3, 5)]);
        planted.used("/pod/a/removed", &[(7, 6), (8, 6)]);
        planted.used("/pod/b", &[(1, 3), (4, 4), (8, 5)]);
        planted.used("/other", &[(5, 1), (6, 1)]);
        planted.pressed();
        std::fs::remove_dir(planted.root.path().join("cgroup/pod/a/removed")).unwrap();
        planted.ledger.refresh(&Budget::UNLIMITED).unwrap();
        planted.press(&["/pod", "/pod/a"], 1);
        let before = planted.ledger.state.uses.lists().walks();
        planted.search();
        assert_eq!(planted.ledger.state.uses.lists().walks(), before + 1);
        let found = planted.ledger.pressure.pressed.iter().map(|it| {
            let objects = it.objects.iter().rev().map(|object| object.0);
            (&*it.path, objects.collect::<Vec<_>>())
        });
        // An object that a container lost is not tried again for its pod.
        assert_eq!(
            found.collect::<Vec<_>>(),
            [("/pod/a", vec![2, 3, 7, 0]), ("/pod", vec![4, 8, 1])]
        );
        // Without pressure there is nothing to walk for.
        planted.ledger.pressure = Pressure::default();
        planted.ledger.set_policy(ReclaimPolicy { bytes: 1, percent: 10.0, left_behind: false });
        planted.search();
        assert_eq!(planted.ledger.state.uses.lists().walks(), before + 1);
    }

    /// The bytes of a round went for a container, and then once more for its pod.
    #[test]
    fn the_bytes_of_a_round_are_of_a_cgroup_with_those_below() {
        let mut planted = Planted::with(100, false);
        planted.import(3);
        planted.used("/pod/a", &[(0, 1)]);
        planted.used("/pod/b", &[(1, 1)]);
        planted.used("/pod", &[(2, 1)]);
        planted.pressed();
        planted.press(&["/pod", "/pod/a", "/pod/b"], 1);
        planted.search();
        let pressure = &mut planted.ledger.pressure;
        let mut left = Vec::new();
        for freed in [40, 30, 10] {
            let Some(Stage::Drop(number)) = pressure.round.pop() else { panic!("a drop for each") };
            pressure.begin_drop(number);
            left.push((pressure.pressed[number].path.to_string(), pressure.work.bytes));
            pressure.note(Reclaimed { freed_bytes: freed, ..Reclaimed::default() });
        }
        let expected = [("/pod/b", 100), ("/pod/a", 100), ("/pod", 30)];
        assert_eq!(left, expected.map(|(path, bytes)| (path.to_owned(), bytes)));
        assert_eq!(pressure.freed_bytes, 80);
    }

    /// Objects that were found for a container were dropped many stages later, although another
    /// one, or the container itself, had used them by then.
    #[test]
    fn what_is_used_after_the_search_stays() {
        let mut planted = Planted::with(1 << 30, false);
        planted.import(4);
        let a = planted.used("/pod/a", &[(0, 1), (1, 2), (2, 3), (3, 4)]);
        let b = planted.used("/pod/b", &[]);
        planted.pressed();
        planted.press(&["/pod/a"], 1);
        planted.search();
        assert!(planted.ledger.state.note_use(SuperblockId(0), b, ObjectId(1)));
        assert!(planted.ledger.state.note_use(SuperblockId(0), a, ObjectId(3)));
        assert!(planted.ledger.apply_policy(&Budget::UNLIMITED));
        assert_eq!(planted.tried(), [0, 2]);
    }

    /// The kernel's queue of opened files had been full, so nobody knew who used what: the policy
    /// dropped what containers had open. One unknown opener of one file protected that for an hour.
    #[test]
    fn nothing_goes_while_opened_files_may_have_been_missed() {
        let mut planted = Planted::with(1 << 30, true);
        planted.import(6);
        let a = planted.used("/pod/a", &[(0, 1), (1, 2), (2, 3)]);
        planted.pressed();
        *planted.ledger.state.unused.left_behind() = [3, 4].map(ObjectId).into();
        planted.press(&["/pod/a"], 1);
        planted.write("proc/pressure/memory", &psi("20.00", "0.00"));
        let now = planted.ledger.state.now();
        planted.ledger.state.unknown.begin_watch(now);
        planted.ledger.state.note_missed_opens();
        let of_a = Scope::Cgroups("/pod/a".to_owned(), [a].into());
        let left_alone = |ledger: &Ledger| {
            let found = candidates(&ledger.state, &of_a);
            (found.objects.len(), found.shared.len(), found.unsure)
        };
        assert_eq!(left_alone(&planted.ledger), (0, 3, 3));
        assert!(planted.ledger.apply_policy(&Budget::UNLIMITED));
        assert_eq!(planted.tried(), [0; 0]);
        // Objects that have come into memory since were opened by somebody known.
        let now = planted.ledger.state.now();
        for object in [1, 3].map(ObjectId) {
            planted.ledger.state.index.set_resident(object, 0, now);
            planted.ledger.state.index.set_resident(object, RESIDENT, now);
        }
        planted.ledger.state.uses.lists().touch(SuperblockId(0), a, ObjectId(1), now + 1);
        assert_eq!(left_alone(&planted.ledger), (1, 2, 2));
        planted.press(&["/pod/a"], 2);
        assert!(planted.ledger.apply_policy(&Budget::UNLIMITED));
        assert_eq!(planted.tried(), [1, 3]);
    }

    /// The kernel had dropped 256 objects since the last look at them. The policy took them for mapped
    /// ones, and gave up before the object that was still there.
    #[test]
    fn what_went_by_itself_is_not_taken_for_mapped() {
        let mut planted = Planted::with(1 << 30, false);
        planted.import(IN_VAIN_MAX + 1);
        let uses: Vec<_> = (0..=IN_VAIN_MAX).map(|object| (object, object + 1)).collect();
        planted.used("/pod/a", &uses);
        planted.pressed();
        for object in (0..IN_VAIN_MAX).map(ObjectId) {
            let index = &planted.ledger.state.index;
            let digest = index.object(object).unwrap().digest;
            let path = index.domains()[0].domain.object_path(&digest).unwrap();
            std::fs::remove_file(path).unwrap();
        }
        planted.press(&["/pod/a"], 1);
        assert!(planted.ledger.apply_policy(&Budget::UNLIMITED));
        assert_eq!(planted.tried(), [IN_VAIN_MAX]);
    }

    /// Files were missed after the search, and what it had found was dropped all the same.
    #[test]
    fn nothing_goes_that_was_found_before_opened_files_were_missed() {
        let mut planted = Planted::with(1 << 30, true);
        planted.import(3);
        planted.used("/pod/a", &[(0, 1), (1, 2)]);
        planted.pressed();
        planted.press(&["/pod/a"], 1);
        planted.search();
        planted.ledger.state.note_missed_opens();
        assert!(planted.ledger.apply_policy(&Budget::UNLIMITED));
        planted.ledger.state.unknown = UnknownUsers::default();
        *planted.ledger.state.unused.left_behind() = [2].map(ObjectId).into();
        planted.ledger.pressure.begin_round(&mut planted.ledger.state);
        planted.ledger.pressure.search_left_behind(&mut planted.ledger.state);
        planted.ledger.state.note_missed_opens();
        assert!(planted.ledger.apply_policy(&Budget::UNLIMITED));
        assert_eq!(planted.tried(), [0; 0]);
        assert_eq!(
            *planted.ledger.state.unused.left_behind(),
            [2].map(ObjectId).into(),
            "for later"
        );
    }
}
