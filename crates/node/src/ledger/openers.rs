//! In which cgroup a process was that has ended since it opened a file: the mount may tell.

use std::collections::HashMap;

use super::live::Ledger;
use super::usage::{CgroupId, ObjectId};
use crate::processes;

/// Mounts that are kept; with more, all are forgotten: a container can make any number of them.
const MOUNTS_MAX: usize = 1 << 16;

/// Who opened files when no process can be asked any more.
#[derive(Debug, Default)]
pub(super) struct Openers {
    /// The cgroup of the processes that have this mount as their root; `None` if they are in
    /// several.
    of_mounts: HashMap<u64, Option<CgroupId>>,
    /// When an object was opened last by somebody of whom nothing is known.
    unknown: HashMap<ObjectId, u32>,
}

impl Openers {
    /// A process in this cgroup has the mount as its root.
    fn learn(&mut self, mount: u64, cgroup: CgroupId) {
        if self.of_mounts.len() >= MOUNTS_MAX {
            self.of_mounts.clear();
        }
        let known = self.of_mounts.entry(mount).or_insert(Some(cgroup));
        *known = known.filter(|it| *it == cgroup);
    }

    /// The cgroup in which all processes are that have this mount as their root.
    pub(super) fn of_mount(&self, mount: Option<u64>) -> Option<CgroupId> {
        *self.of_mounts.get(&mount?)?
    }

    /// Somebody opened the object at this time.
    pub(super) fn note_unknown(&mut self, object: ObjectId, time: u32) {
        self.unknown.insert(object, time);
    }

    /// Forgets objects for which this says no.
    pub(super) fn retain_objects(&mut self, keep: impl Fn(ObjectId, u32) -> bool) {
        self.unknown.retain(|object, time| keep(*object, *time));
    }

    /// Forgets cgroups for which this says no.
    pub(super) fn retain_cgroups(&mut self, keep: impl Fn(CgroupId) -> bool) {
        self.of_mounts.retain(|_, cgroup| cgroup.is_none_or(&keep));
    }
}

impl Ledger {
    /// Learns from a process which cgroup its root is of.
    pub(super) fn learn_root(&mut self, pid: u32, cgroup: CgroupId) {
        if let Some(mount) = processes::root_mount(&self.root, pid) {
            self.openers.learn(mount, cgroup);
        }
    }

    /// Objects of which pages are resident since somebody opened them of whom nothing is known, and
    /// when that was last.
    pub(super) fn unknown_uses(&self) -> impl Iterator<Item = (ObjectId, u32)> {
        let uses = self.openers.unknown.iter().map(|(object, time)| (*object, *time));
        uses.filter(|(object, time)| {
            self.index.object(*object).is_some_and(|it| it.counts_use(*time))
        })
    }

    /// Learns from all processes of which cgroups their roots are, before files are opened that are
    /// to be told apart.
    pub(super) fn learn_roots(&mut self) {
        for pid in processes::all(&self.root).unwrap_or_default() {
            if let Some(cgroup) = self.cgroup_of(pid) {
                self.learn_root(pid, cgroup);
            }
        }
    }
}
