//! Numbers for cgroups, and what becomes of the usage lists of those that are removed.
//!
//! A cgroup has up to two numbers: its user id for what its own processes use, and its heir id for
//! what removed cgroups below it have left behind. Only a user id is a user of anything: a
//! container that has ended must not make private pages of others look shared.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;

use super::shares::Shares;
use super::usage::{CgroupId, UsageLists};
use crate::cgroup::{Hierarchy, is_at_or_below};

/// The cgroups that have used something, by path from the root of the hierarchy.
#[derive(Debug, Default)]
pub(super) struct CgroupIds {
    /// User ids of those that exist, or did when they were last looked at.
    users: HashMap<Box<str>, CgroupId>,
    /// Heir ids, by the path of the cgroup that has what removed ones left behind.
    heirs: HashMap<Box<str>, CgroupId>,
    slots: Vec<Option<Slot>>,
    free: Vec<CgroupId>,
    /// Removed cgroups, and heirs whose cgroup was removed: their lists are still to be handed on.
    ended: Vec<CgroupId>,
    /// What all of this takes, as [`bytes_of`] has it.
    bytes: u64,
    /// Each cgroup's share of [`BYTES_MAX`]; `None` below half of it, and after
    /// [`CgroupIds::reparent_ended`].
    shares: Option<Shares>,
}

/// Bytes for cgroups: 100,000 with paths of 80 bytes. A container may be allowed to make any
/// number, with paths of up to 4 KiB.
const BYTES_MAX: u64 = 32 << 20;

/// Bytes of a cgroup: its path twice, a slot, and a place in a table of which half may be free.
fn bytes_of(path: &str) -> u64 {
    let table = 2 * size_of::<(Box<str>, CgroupId)>() + 32;
    (2 * path.len() + size_of::<Option<Slot>>() + table) as u64
}

#[derive(Debug)]
struct Slot {
    path: Box<str>,
    /// Of the cgroup's directory: another cgroup that is made at the same path has another number.
    /// `None` without a hierarchy.
    inode: Option<u64>,
    is_user: bool,
}

/// The inode number of a cgroup's directory; `None` for one that does not exist. After any other
/// error nobody knows whether it does: [`Hierarchy::directory`] has one for cgroups that cannot be
/// seen.
pub(super) fn inode(hierarchy: &Hierarchy, path: &str) -> io::Result<Option<u64>> {
    match fs::metadata(hierarchy.directory(path)?) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        found => Ok(Some(found?.ino())),
    }
}

impl CgroupIds {
    /// The number of a cgroup whose processes use something; none for a new one if there is no room
    /// for it. `inode` is [that](inode) of its directory now: with another one than before, the
    /// cgroup before it has ended.
    pub(super) fn number(&mut self, path: &str, inode: Option<u64>) -> Option<CgroupId> {
        // The kernel appends this to the path of a removed cgroup. One that exists may have it in
        // its name.
        let removed = path.strip_suffix(" (deleted)").filter(|_| inode.is_none());
        let path = removed.unwrap_or(path);
        if let Some(known) = self.users.get(path).copied() {
            if inode.is_none() || self.slot(known).is_none_or(|it| it.inode == inode) {
                return Some(known);
            }
            self.end(known);
        }
        if !self.has_room(path) {
            return None;
        }
        let id = self.add(Slot { path: path.into(), inode, is_user: true });
        self.users.insert(path.into(), id);
        Some(id)
    }

    fn has_room(&mut self, path: &str) -> bool {
        if self.bytes < BYTES_MAX / 2 {
            return true;
        }
        let paths = self.slots.iter().flatten().map(|it| &*it.path);
        let held = |path| (path, bytes_of(path));
        let shares = self.shares.get_or_insert_with(|| paths.map(held).collect());
        self.bytes + bytes_of(path) <= BYTES_MAX && shares.have_room(path, BYTES_MAX)
    }

    fn slot(&self, id: CgroupId) -> Option<&Slot> {
        self.slots.get(id.0 as usize)?.as_ref()
    }

    fn add(&mut self, slot: Slot) -> CgroupId {
        let bytes = bytes_of(&slot.path);
        self.bytes += bytes;
        self.shares.iter_mut().for_each(|it| it.add(&slot.path, bytes));
        let id = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            CgroupId(u32::try_from(self.slots.len() - 1).unwrap_or(u32::MAX))
        });
        self.slots[id.0 as usize] = Some(slot);
        id
    }

    /// Whether it stands for what processes of an existing cgroup use, and not for what removed
    /// ones left behind.
    pub(super) fn is_user(&self, id: CgroupId) -> bool {
        self.slot(id).is_some_and(|it| it.is_user)
    }

    pub(super) fn path(&self, id: CgroupId) -> Option<&str> {
        self.slot(id).map(|it| &*it.path)
    }

    /// Those that are a cgroup or lie below it, with what removed cgroups left behind there.
    pub(super) fn below<'s>(&'s self, top: &'s str) -> impl Iterator<Item = CgroupId> + 's {
        let all = self.users.iter().chain(&self.heirs);
        all.filter(|(path, _)| is_at_or_below(path, top)).map(|(_, id)| *id)
    }

    /// The paths of those that use something, or have something that was left behind.
    pub(super) fn paths(&self) -> impl Iterator<Item = &str> {
        self.users.keys().chain(self.heirs.keys()).map(|path| &**path)
    }

    /// All numbers with their paths.
    pub(super) fn numbered(&self) -> impl Iterator<Item = (CgroupId, &str)> {
        let slots = (0..).map(CgroupId).zip(&self.slots);
        slots.filter_map(|(id, slot)| Some((id, &*slot.as_ref()?.path)))
    }

    /// Looks which cgroups were removed. They have their lists until [`CgroupIds::reparent_ended`].
    pub(super) fn find_ended(&mut self, hierarchy: &Hierarchy) {
        let all = self.users.values().chain(self.heirs.values());
        // The top cannot be removed.
        let is_gone = |id: &CgroupId| {
            let slot = self.slot(*id).filter(|it| &*it.path != "/");
            slot.is_some_and(|it| {
                inode(hierarchy, &it.path).is_ok_and(|now| now.is_none() || now != it.inode)
            })
        };
        for id in all.copied().filter(is_gone).collect::<Vec<_>>() {
            self.end(id);
        }
    }

    /// Removed cgroups, and what was left behind in removed cgroups.
    pub(super) fn ended(&self) -> &[CgroupId] {
        &self.ended
    }

    fn end(&mut self, id: CgroupId) {
        let Some(Some(slot)) = self.slots.get_mut(id.0 as usize) else { return };
        let of_kind = if slot.is_user { &mut self.users } else { &mut self.heirs };
        of_kind.remove(&slot.path);
        slot.is_user = false;
        self.ended.push(id);
    }

    /// Hands the lists of removed cgroups to their nearest ancestors that exist, as what was left
    /// behind there.
    pub(super) fn reparent_ended(&mut self, hierarchy: &Hierarchy, usage: &UsageLists) {
        for id in std::mem::take(&mut self.ended) {
            let Some(Slot { path, .. }) = self.slot(id) else { continue };
            let bytes = bytes_of(path);
            let above = std::iter::successors(path.rsplit_once('/'), |(it, _)| it.rsplit_once('/'));
            let mut above = above.map(|(it, _)| it).filter(|it| !it.is_empty());
            let found = above.find_map(|it| Some((it, inode(hierarchy, it).transpose()?)));
            let (parent, inode): (Box<str>, _) = match found {
                Some((it, Ok(inode))) => (it.into(), Some(inode)),
                // The next call tries it again.
                Some((_, Err(_))) => {
                    self.ended.push(id);
                    continue;
                }
                None => ("/".into(), None),
            };
            let heir = match self.heirs.get(&parent) {
                Some(known) => *known,
                None => {
                    let heir = self.add(Slot { path: parent.clone(), inode, is_user: false });
                    self.heirs.insert(parent, heir);
                    heir
                }
            };
            usage.reparent(id, heir);
            self.slots[id.0 as usize] = None;
            self.bytes -= bytes;
            self.free.push(id);
        }
        self.shares = None;
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::usage::{ObjectId, SuperblockId};
    use super::*;
    use crate::cgroup::Version;

    fn entries(usage: &UsageLists, ids: &CgroupIds, heir: &str) -> usize {
        ids.heirs.get(heir).map_or(0, |id| usage.count_of_cgroup(*id).entries)
    }

    #[test]
    fn lists_of_removed_cgroups_go_to_the_nearest_parent_that_exists() {
        let root = tempfile::tempdir().unwrap();
        let directory = |path: &str| root.path().join(path);
        for path in ["a/b/c", "x"] {
            fs::create_dir_all(directory(path)).unwrap();
        }
        let hierarchy = Hierarchy::at(Version::V2, root.path());
        let (mut ids, usage) = (CgroupIds::default(), UsageLists::new(2));
        let number = |ids: &mut CgroupIds, path: &str| {
            ids.number(path, inode(&hierarchy, path).unwrap()).unwrap()
        };
        let (a, c, x) =
            (number(&mut ids, "/a"), number(&mut ids, "/a/b/c"), number(&mut ids, "/x"));
        for (id, object) in [(a, 1), (c, 1), (c, 2), (x, 3)] {
            usage.touch(SuperblockId(1), id, ObjectId(object), 1);
        }
        ids.find_ended(&hierarchy);
        assert_eq!(ids.ended(), []);
        fs::remove_dir_all(directory("a/b")).unwrap();
        fs::remove_dir(directory("x")).unwrap();
        // Of a process that is still in it.
        assert_eq!(number(&mut ids, "/a/b/c (deleted)"), c);
        ids.find_ended(&hierarchy);
        assert_eq!(ids.ended().len(), 2);
        assert!(ids.is_user(a) && !ids.is_user(c) && !ids.is_user(x));
        ids.reparent_ended(&hierarchy, &usage);
        assert_eq!((entries(&usage, &ids, "/a"), entries(&usage, &ids, "/")), (2, 1));
        assert_eq!(usage.count_of_cgroup(a).entries, 1);
        assert_eq!(ids.below("/a").count(), 2);
        let is_used = |id: &CgroupId| ids.is_user(*id);
        assert_eq!(ids.below("/").filter(is_used).collect::<Vec<_>>(), [a]);

        // What was left behind goes on when the cgroup that has it goes.
        fs::remove_dir(directory("a")).unwrap();
        ids.find_ended(&hierarchy);
        assert_eq!(ids.ended().len(), 2);
        ids.reparent_ended(&hierarchy, &usage);
        assert_eq!((entries(&usage, &ids, "/a"), entries(&usage, &ids, "/")), (0, 3));
        ids.find_ended(&hierarchy);
        assert_eq!(ids.ended(), []);
        assert_eq!(usage.count().entries, 3);
    }

    /// A cgroup that is made again at the same path begins without lists.
    #[test]
    fn a_cgroup_made_again_is_another_one() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("a/b")).unwrap();
        let hierarchy = Hierarchy::at(Version::V2, root.path());
        let (mut ids, usage) = (CgroupIds::default(), UsageLists::new(2));
        let before = ids.number("/a/b", Some(1)).unwrap();
        usage.touch(SuperblockId(1), before, ObjectId(1), 1);
        let after = ids.number("/a/b", inode(&hierarchy, "/a/b").unwrap()).unwrap();
        assert_ne!(before, after);
        assert!(!ids.is_user(before) && ids.is_user(after));
        ids.find_ended(&hierarchy);
        assert_eq!(ids.ended(), [before]);
        ids.reparent_ended(&hierarchy, &usage);
        assert_eq!(entries(&usage, &ids, "/a"), 1);
        assert_eq!(usage.count_of_cgroup(after).entries, 0);
        assert_eq!(ids.number("/a/b", None), Some(after));
    }

    /// A process in a cgroup named `a (deleted)` counted as one in `a`. The inode number was
    /// another one, so each look at that process ended `a`, and the policy dropped what `a` still
    /// used.
    #[test]
    fn cgroup_whose_name_ends_in_deleted_leaves_its_neighbour_alone() {
        let root = tempfile::tempdir().unwrap();
        let hierarchy = Hierarchy::at(Version::V2, root.path());
        let mut ids = CgroupIds::default();
        let mut number = |path: &str| {
            fs::create_dir(root.path().join(path)).unwrap();
            ids.number(path, inode(&hierarchy, path).unwrap()).unwrap()
        };
        let (a, other) = (number("a"), number("a (deleted)"));
        assert_ne!(a, other);
        assert_eq!(ids.ended(), []);
        assert!(ids.is_user(a) && ids.is_user(other));
        // Of a process that is still in it.
        fs::remove_dir(root.path().join("a (deleted)")).unwrap();
        assert_eq!(ids.number("a (deleted) (deleted)", None), Some(other));
        assert_eq!(ids.number("a (deleted)", None), Some(a));
        assert_eq!(ids.ended(), []);
    }

    /// Any error of a look at a cgroup ended it, and with it all of its uses.
    #[test]
    fn a_cgroup_that_cannot_be_looked_at_is_not_removed() {
        let root = tempfile::tempdir().unwrap();
        let directory = |path: &str| root.path().join(path);
        fs::create_dir_all(directory("a/b")).unwrap();
        let hierarchy = Hierarchy::at(Version::V2, root.path());
        let (mut ids, usage) = (CgroupIds::default(), UsageLists::new(2));
        let number = |it| ids.number(it, inode(&hierarchy, it).unwrap()).unwrap();
        let [a, b] = ["/a", "/a/b"].map(number);
        usage.touch(SuperblockId(1), b, ObjectId(1), 1);
        let away = |from: &str, to: &str| fs::rename(directory(from), directory(to)).unwrap();
        let make_blind = || {
            away("a", "away");
            // A link to itself: ELOOP.
            std::os::unix::fs::symlink(directory("a"), directory("a")).unwrap();
        };
        let make_seeing = || {
            fs::remove_file(directory("a")).unwrap();
            away("away", "a");
        };
        make_blind();
        ids.find_ended(&hierarchy);
        assert_eq!(ids.ended(), []);
        make_seeing();
        fs::remove_dir(directory("a/b")).unwrap();
        ids.find_ended(&hierarchy);
        assert_eq!(ids.ended(), [b]);
        make_blind();
        ids.reparent_ended(&hierarchy, &usage);
        assert_eq!((ids.ended(), entries(&usage, &ids, "/")), (&[b][..], 0));
        make_seeing();
        ids.reparent_ended(&hierarchy, &usage);
        assert_eq!((ids.ended(), entries(&usage, &ids, "/a")), (&[][..], 1));
        assert!(ids.is_user(a));
    }

    /// Whoever may make cgroups could make the ledger keep any number of them.
    #[test]
    fn cgroups_take_a_bounded_amount_of_memory() {
        let root = tempfile::tempdir().unwrap();
        let hierarchy = Hierarchy::at(Version::V2, root.path());
        let (mut ids, usage) = (CgroupIds::default(), UsageLists::new(2));
        let path = |number: u32| format!("/{number}/{}", "x".repeat(4000));
        let fill = |ids: &mut CgroupIds| {
            (0..10_000).take_while(|it| ids.number(&path(*it), Some(7)).is_some()).count()
        };
        let count = fill(&mut ids);
        assert!((4_000..4_300).contains(&count), "{count}");
        assert_eq!(ids.number(&path(10_000), Some(7)), None);
        assert!(ids.number(&path(0), Some(7)).is_some(), "it is known");
        ids.find_ended(&hierarchy);
        ids.reparent_ended(&hierarchy, &usage);
        assert_eq!(fill(&mut ids), count);
    }

    /// A container that made thousands of cgroups with long names took all the room, and what
    /// others used was not noted.
    #[test]
    fn a_tree_of_cgroups_leaves_room_for_others() {
        let hierarchy = Hierarchy::at(Version::V2, Path::new("/nowhere"));
        let (mut ids, usage) = (CgroupIds::default(), UsageLists::new(2));
        let path = |number: u32| format!("/pods/hostile/{number}/{}", "x".repeat(4000));
        let fill = |ids: &mut CgroupIds| {
            (0..10_000).take_while(|it| ids.number(&path(*it), Some(7)).is_some()).count()
        };
        // 9 of 16 parts.
        let count = fill(&mut ids);
        assert!((2_250..2_450).contains(&count), "{count}");
        for other in ["/pods/other", "/pods/other/below", "/elsewhere"] {
            assert!(ids.number(other, Some(7)).is_some(), "{other}");
        }
        assert_eq!(ids.number("/pods/hostile/z", Some(7)), None);
        ids.find_ended(&hierarchy);
        ids.reparent_ended(&hierarchy, &usage);
        assert_eq!(fill(&mut ids), count);
    }

    /// A machine without cgroups has one for everything.
    #[test]
    fn the_top_never_ends() {
        let mut ids = CgroupIds::default();
        let top = ids.number("/", None).unwrap();
        ids.find_ended(&Hierarchy::at(Version::V2, Path::new("/nowhere")));
        assert!(ids.is_user(top));
    }
}
