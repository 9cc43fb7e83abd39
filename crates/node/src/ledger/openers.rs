//! Who opened a file, when the process has ended before anybody could ask for its cgroup.
//!
//! The file is open through a mount. Where processes that still run have that mount as their root,
//! it is a container's, and the one that has ended was most likely in it, too.

use std::collections::{HashMap, HashSet};

use super::live::{Ledger, TICKS_PER_SECOND};
use super::usage::{CgroupId, ObjectId, SuperblockId};
use crate::cgroup::is_at_or_below;
use crate::processes;

/// Mounts that are kept of a round: a container can make any number of them. With more, all are
/// forgotten.
const MOUNTS_MAX: usize = 1 << 14;

/// Bytes of a path that are kept. Of a longer one the cgroup above it is.
const PATH_MAX: usize = 512;

/// How long somebody unknown counts as a user of what was opened.
const UNKNOWN_TICKS: u32 = 3600 * TICKS_PER_SECOND;

/// Objects that somebody unknown opened, by mount, that are kept. A container can open any number.
const UNKNOWN_MAX: usize = 100_000;

/// Bytes of one of them, with a byte of the table's own, and an eighth of its places free at least.
const UNKNOWN_BYTES: usize = (size_of::<(SuperblockId, ObjectId, u32)>() + 1) * 8 / 7 + 1;

#[derive(Debug, Default)]
pub(super) struct Openers {
    /// Of mounts that are the root of a process, the lowest cgroup at or above all these processes,
    /// as far as they were met since the last round over all processes ended.
    this_round: HashMap<u64, Box<str>>,
    /// The same of the round before.
    last_round: HashMap<u64, Box<str>>,
    /// When somebody unknown opened an object last.
    unknown: HashMap<(SuperblockId, ObjectId), u32>,
    /// When it was last noticed that opened files were missed. They may have been any.
    missed: Option<u32>,
}

impl Openers {
    /// A process in this cgroup has the mount as its root.
    fn learn(&mut self, mount: u64, cgroup: &str) {
        if self.this_round.len() >= MOUNTS_MAX {
            self.this_round.clear();
        }
        let mut cgroup = cgroup;
        while cgroup.len() > PATH_MAX {
            cgroup = above(cgroup);
        }
        let known = self.this_round.entry(mount).or_insert_with(|| cgroup.into());
        if !is_at_or_below(cgroup, known) {
            *known = lowest_above_both(known, cgroup).into();
        }
    }

    /// The cgroup in or below which all known processes are that have this mount as their root.
    fn of_mount(&self, mount: u64) -> Option<&str> {
        let known = self.this_round.get(&mount).or_else(|| self.last_round.get(&mount))?;
        // Processes everywhere have it: it is the root of the machine, for one.
        Some(&**known).filter(|path| !path.is_empty() && *path != "/")
    }

    pub(super) fn round_is_complete(&mut self) {
        self.last_round = std::mem::take(&mut self.this_round);
    }

    /// Somebody unknown opened an object. False if there are too many of these: then all are
    /// forgotten, and any object may have been opened.
    #[must_use]
    pub(super) fn note_unknown(
        &mut self,
        mount: SuperblockId,
        object: ObjectId,
        time: u32,
    ) -> bool {
        self.unknown.insert((mount, object), time);
        let fits = self.unknown.len() <= UNKNOWN_MAX;
        if !fits {
            self.unknown = HashMap::new();
        }
        fits
    }

    /// Files were opened, and nobody knows which.
    pub(super) fn note_missed(&mut self, time: u32) {
        self.missed = Some(time);
    }

    /// When opened files were last missed, if that was ever noticed.
    pub(super) fn missed(&self) -> Option<u32> {
        self.missed
    }

    /// What the objects that somebody unknown opened take.
    pub(super) fn unknown_bytes(&self) -> usize {
        self.unknown.capacity() * UNKNOWN_BYTES
    }

    pub(super) fn remove_mounts(&mut self, mounts: &[SuperblockId]) {
        if !mounts.is_empty() {
            self.unknown.retain(|(mount, _), _| !mounts.contains(mount));
        }
    }

    pub(super) fn forget(&mut self, objects: &HashSet<ObjectId>) {
        self.unknown.retain(|(_, object), _| !objects.contains(object));
    }

    /// Drops uses that are old, or for which `counts` says no.
    pub(super) fn retain(&mut self, now: u32, counts: impl Fn(ObjectId, u32) -> bool) {
        self.unknown.retain(|(_, object), time| is_new(*time, now) && counts(*object, *time));
    }
}

fn is_new(time: u32, now: u32) -> bool {
    now.saturating_sub(time) < UNKNOWN_TICKS
}

/// The path of the cgroup above this one; empty at the top.
fn above(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(above, _)| above)
}

fn lowest_above_both(one: &str, other: &str) -> String {
    let mut path = one;
    while !is_at_or_below(other, path) {
        path = above(path);
    }
    path.to_owned()
}

impl Ledger {
    /// Learns from a process of which cgroup its root is.
    pub(super) fn learn_root(&mut self, pid: u32, cgroup: CgroupId) {
        if let (Some(mount), Some(path)) =
            (processes::root_mount(&self.root, pid), self.cgroups.path(cgroup))
        {
            self.openers.learn(mount, path);
        }
    }

    /// Learns it from all processes, before files are opened that are to be told apart.
    pub(super) fn learn_roots(&mut self) {
        for pid in processes::all(&self.root).unwrap_or_default() {
            if let Ok(Some(cgroup)) = self.cgroup_of(pid) {
                self.learn_root(pid, cgroup);
            }
        }
    }

    /// The cgroup that opens through a mount are credited to.
    pub(super) fn cgroup_of_mount(&mut self, mount: u64) -> Option<CgroupId> {
        let path = self.openers.of_mount(mount)?.to_owned();
        self.number_cgroup(&path).ok()?
    }

    /// Objects that somebody unknown opened, and when that was last, as far as their pages have
    /// been resident since.
    pub(super) fn unknown_uses(&self) -> impl Iterator<Item = (ObjectId, u32)> {
        let now = self.now();
        let uses = self.openers.unknown.iter().map(|((_, object), time)| (*object, *time));
        uses.filter(move |(object, time)| is_new(*time, now) && self.counts_use(*object, *time))
    }

    /// Tells the objects of which nobody knows whether somebody else uses them: somebody unknown
    /// opened them, or opened files were missed when they were resident.
    pub(super) fn doubt(&self) -> impl Fn(ObjectId) -> bool {
        let now = self.now();
        let unknown: HashSet<ObjectId> = self.unknown_uses().map(|(object, _)| object).collect();
        let missed = self.openers.missed.filter(|time| is_new(*time, now));
        move |object| {
            unknown.contains(&object) || missed.is_some_and(|time| self.counts_use(object, time))
        }
    }

    fn counts_use(&self, object: ObjectId, time: u32) -> bool {
        self.index.object(object).is_some_and(|it| it.counts_use(time))
    }

    /// Files were opened, and nobody knows which. So nothing that a search has found is known to be
    /// unused any more.
    pub(super) fn note_missed_opens(&mut self) {
        self.openers.note_missed(self.now());
        self.pressure.note_missed_opens();
    }

    /// Somebody unknown opened an object.
    pub(super) fn note_unknown_open(&mut self, mount: SuperblockId, object: ObjectId) {
        self.pressure.note_use(object);
        if !self.openers.note_unknown(mount, object, self.now()) {
            self.note_missed_opens();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One process in another cgroup, as in each container with systemd, and nobody was credited
    /// any more with what was opened there.
    #[test]
    fn a_mount_is_of_the_lowest_cgroup_above_its_processes() {
        let mut openers = Openers::default();
        openers.learn(1, "/pods/one/init.scope");
        assert_eq!(openers.of_mount(1), Some("/pods/one/init.scope"));
        openers.learn(1, "/pods/one/system.slice/web");
        openers.learn(1, "/pods/one/system.slice");
        assert_eq!(openers.of_mount(1), Some("/pods/one"));
        openers.learn(2, "/pods/one-more");
        openers.learn(2, "/pods/one");
        assert_eq!(openers.of_mount(2), Some("/pods"));
        openers.learn(2, "/session");
        openers.learn(3, "/");
        openers.learn(3, "/session");
        assert_eq!((openers.of_mount(2), openers.of_mount(3)), (None, None));
        // Long ago somebody was there for a moment.
        openers.round_is_complete();
        openers.learn(1, "/pods/one/init.scope");
        assert_eq!(openers.of_mount(1), Some("/pods/one/init.scope"));
        assert_eq!(openers.of_mount(2), None);
        openers.round_is_complete();
        openers.learn(2, "/pods/one");
        assert_eq!(openers.of_mount(1), Some("/pods/one/init.scope"));
        assert_eq!(openers.of_mount(2), Some("/pods/one"));
        openers.round_is_complete();
        assert_eq!(openers.of_mount(1), None);
        let long = ["/pods".to_owned(), format!("/{}", "x".repeat(300)).repeat(10)].concat();
        openers.learn(4, &long);
        assert!(openers.of_mount(4).is_some_and(|path| long.starts_with(path)));
        assert!(openers.of_mount(4).is_some_and(|path| path.len() <= PATH_MAX));
    }

    /// What was searched through once by a process of the machine stayed in use for good.
    #[test]
    fn somebody_unknown_is_a_user_for_an_hour_at_most() {
        let mut openers = Openers::default();
        let [one, two] = [1, 2].map(SuperblockId);
        for (mount, time) in [(one, 1), (two, 1), (two, 2)] {
            assert!(openers.note_unknown(mount, ObjectId(7), time));
        }
        openers.retain(UNKNOWN_TICKS, |_, _| true);
        assert_eq!(openers.unknown.len(), 2);
        openers.remove_mounts(&[one]);
        openers.retain(UNKNOWN_TICKS + 1, |_, _| true);
        assert_eq!(openers.unknown.len(), 1);
        openers.retain(UNKNOWN_TICKS + 2, |_, _| true);
        assert!(openers.unknown.is_empty());
    }

    /// Short programs of a container opened each file of thousands through each of many mounts, and
    /// all of that was kept for an hour.
    #[test]
    fn too_many_unknown_openers_are_openers_of_everything() {
        let mut openers = Openers::default();
        let count = u32::try_from(UNKNOWN_MAX).unwrap();
        let mut note = |mount| openers.note_unknown(SuperblockId(mount), ObjectId(7), 1);
        assert!((0..count).all(&mut note));
        assert!(note(0), "it is listed");
        assert!(!note(count));
        assert_eq!(openers.unknown_bytes(), 0);
        assert!((0..count).all(|it| openers.note_unknown(SuperblockId(it), ObjectId(7), 1)));
        assert!(openers.unknown_bytes() < 2_000_000, "{}", openers.unknown_bytes());
    }
}
