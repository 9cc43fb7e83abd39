//! The usage lists, with the room that they may take.

use std::ops::ControlFlow;
use std::path::Path;

use super::cgroup_ids::CgroupIds;
use super::shares::Shares;
use super::usage::{CgroupId, Count, SHARDS, SuperblockId, Usage, UsageLists};
use super::{Machine, UsageCost};
use crate::cgroup::{self, Hierarchy};

/// Bytes of the usage lists at most, and at most a sixteenth of the machine's memory and half of
/// what this process's own cgroup may hold: a report takes a third of the lists' size besides.
/// Whoever may make cgroups could otherwise fill it: a process that is moved through all of them
/// uses everything in each. 10,000 containers that use 100 objects through each of 20 mounts take
/// 0.58 GB.
const BYTES_MAX: u64 = 2 << 30;

fn bytes_max(root: &Path, hierarchy: Option<&Hierarchy>) -> u64 {
    let of_machine = Machine::read(root).map_or(u64::MAX, |it| it.memory_bytes / 16);
    let of_own_cgroup = hierarchy.and_then(|hierarchy| {
        let cgroup = cgroup::of_process(root, std::process::id(), hierarchy.version()).ok()??;
        Some(hierarchy.effective_limit_bytes(&cgroup)? / 2)
    });
    BYTES_MAX.min(of_machine).min(of_own_cgroup.unwrap_or(u64::MAX))
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Uses {
    lists: UsageLists,
    /// What the lists may take, with the objects that somebody unknown uses.
    pub(super) bytes_max: u64,
    /// Each cgroup's share of `bytes_max`; `None` below half of it, and after a refresh.
    shares: Option<Shares>,
}

impl Uses {
    pub(super) fn new(root: &Path, hierarchy: Option<&Hierarchy>) -> Self {
        let (lists, bytes_max) = (UsageLists::new(SHARDS), bytes_max(root, hierarchy));
        Self { lists, bytes_max, shares: None }
    }

    /// Notes a use, unless it is a new one and there is no room for it. Says whether it is noted.
    /// `unknown_bytes` are what the objects take that somebody unknown uses.
    pub(super) fn note(&mut self, it: Usage, cgroups: &CgroupIds, unknown_bytes: usize) -> bool {
        let Usage { mount, cgroup, object, time } = it;
        if self.lists.touch_listed(mount, cgroup, object, time).is_some() {
            return true;
        }
        let room = self.bytes_max.saturating_sub(unknown_bytes as u64);
        // What removals have left free is held until most of it is.
        let is_held = self.lists.memory_bytes() as u64 >= room;
        if is_held && !self.lists.has_free_place(mount, cgroup) {
            return false;
        }
        let before = self.lists.count().bytes_max();
        if !self.has_room(cgroup, before, room, cgroups) {
            return false;
        }
        self.lists.touch(mount, cgroup, object, time);
        if let Some(shares) = &mut self.shares {
            let bytes = self.lists.count().bytes_max() - before;
            cgroups.path(cgroup).into_iter().for_each(|path| shares.add(path, bytes));
        }
        true
    }

    /// Whether a cgroup may hold more of the lists, which take so many bytes of so much room.
    fn has_room(&mut self, cgroup: CgroupId, bytes: u64, room: u64, cgroups: &CgroupIds) -> bool {
        if bytes < room / 2 {
            return true;
        }
        let Self { lists, shares, .. } = self;
        let held = |(id, path)| (path, lists.count_of_cgroup(id).bytes_max());
        let shares = shares.get_or_insert_with(|| cgroups.numbered().map(held).collect());
        let path = cgroups.path(cgroup).unwrap_or_default();
        bytes < room && shares.have_room(path, room)
    }

    /// Drops the lists of a mount.
    pub(super) fn remove_mount(&mut self, mount: SuperblockId) {
        self.lists.remove_mount(mount);
    }

    /// Hands on the lists of removed cgroups.
    pub(super) fn reparent_ended(&mut self, cgroups: &mut CgroupIds, hierarchy: &Hierarchy) {
        cgroups.reparent_ended(hierarchy, &self.lists);
    }

    /// Has the shares counted again when the lists are half full.
    pub(super) fn forget_shares(&mut self) {
        self.shares = None;
    }

    pub(super) fn retain(&mut self, keep: impl FnMut(Usage) -> bool) {
        self.lists.retain(keep);
    }

    /// Visits all uses: list by list, and within a list the least recent first.
    pub(super) fn for_each(&self, each: impl FnMut(Usage)) {
        let _ = self.lists.for_each(visiting(each));
    }

    pub(super) fn for_each_of_cgroup(&self, cgroup: CgroupId, each: impl FnMut(Usage)) {
        let _ = self.lists.for_each_of_cgroup(cgroup, visiting(each));
    }

    pub(super) fn for_each_of_mount(&self, mount: SuperblockId, each: impl FnMut(Usage)) {
        let _ = self.lists.for_each_of_mount(mount, visiting(each));
    }

    pub(super) fn count(&self) -> Count {
        self.lists.count()
    }

    pub(super) fn cost(&self) -> UsageCost {
        let count = self.lists.count();
        UsageCost {
            bytes: self.lists.memory_bytes() as u64,
            lists: count.lists as u64,
            entries: count.entries as u64,
        }
    }

    #[cfg(test)]
    pub(super) fn lists(&self) -> &UsageLists {
        &self.lists
    }
}

fn visiting(mut each: impl FnMut(Usage)) -> impl FnMut(Usage) -> ControlFlow<()> {
    move |usage| {
        each(usage);
        ControlFlow::Continue(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::state::State;
    use super::super::usage::ObjectId;
    use super::super::{Ledger, of_an_empty_machine};
    use super::*;
    use crate::cgroup::Version;

    /// Only used entries counted. A part of the lists gives memory back when three quarters of it
    /// are free, so what was removed there made room for as much elsewhere, and all of it was held.
    #[test]
    fn the_limit_of_the_usage_lists_holds_while_uses_come_and_go() {
        let (_root, Ledger { mut state, .. }) = of_an_empty_machine();
        // A mebibyte.
        state.uses.bytes_max = 1 << 20;
        let cgroup = state.cgroups.number("/", None).unwrap();
        for mount in 0..16 {
            let fill = |state: &mut State| {
                let notes = |it: &u32| state.note_use(SuperblockId(mount), cgroup, ObjectId(*it));
                (0..1 << 20).take_while(notes).count()
            };
            fill(&mut state);
            // A table may have doubled.
            let bytes = state.uses.lists().memory_bytes();
            assert!(bytes < (1 << 20) * 5 / 4, "{mount}: {bytes}");
            state.uses.lists().retain(|it| it.object.0 % 10 < 3);
        }
        // What is free there is room, though it is held.
        assert!(state.uses.lists().memory_bytes() >= 1 << 20);
        assert!(state.note_use(SuperblockId(0), cgroup, ObjectId(u32::MAX)));
        state.uses.lists().retain(|_| false);
        assert_eq!(state.uses.lists().memory_bytes(), 0);
    }

    /// The service is throttled above 400 MiB, and the lists alone could take 2 GiB.
    #[test]
    fn the_usage_lists_take_half_of_what_the_own_cgroup_may_hold() {
        let root = tempfile::tempdir().unwrap();
        let plant = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let of = || {
            let hierarchy = Hierarchy::at(Version::V2, &root.path().join("cgroup"));
            bytes_max(root.path(), Some(&hierarchy))
        };
        let meminfo = "MemTotal: 67108864 kB\nMemAvailable: 1 kB\nCached: 1 kB\nShmem: 1 kB\n";
        plant("proc/meminfo", meminfo);
        assert_eq!(of(), 2 << 30);
        plant("proc/meminfo", &meminfo.replace("67108864", "16777216"));
        assert_eq!(of(), 1 << 30);
        plant(&format!("proc/{}/cgroup", std::process::id()), "0::/system/cofolio.service\n");
        plant("cgroup/system/memory.max", "1073741824\n");
        plant("cgroup/system/cofolio.service/memory.max", "max\n");
        assert_eq!(of(), 512 << 20);
        plant("cgroup/system/cofolio.service/memory.high", "419430400\n");
        assert_eq!(of(), 200 << 20);
    }
}
