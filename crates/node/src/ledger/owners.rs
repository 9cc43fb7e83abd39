//! Who alone uses an object: one walk over the usage lists finds it for all objects.
//!
//! | question | groups | answer |
//! |---|---|---|
//! | what does a container alone use? | its cgroups | objects that are not shared |
//! | what does at most one container use? | each cgroup | objects that are not shared |
//! | what do cgroups under pressure alone use? | each with those below it | the lowest group |
//! | which objects have lost all users? | none | objects that are not used |
//!
//! A removed cgroup is no user. Its uses give an object's last use, and its group if no user is left.

use std::collections::HashMap;

use super::index::Index;
use super::state::State;
use super::usage::{CgroupId, ObjectId, Usage};

/// In place of a group, for cgroups that are in none.
const OUTSIDE: u32 = u32::MAX;

/// Groups of cgroups. One may be in another one, which has a higher number.
#[derive(Debug, Default)]
pub(super) struct Groups {
    /// The lowest group of each cgroup, by its number.
    of_cgroups: Vec<u32>,
    /// The next group around each one.
    around: Vec<u32>,
}

impl Groups {
    /// `cgroups`: each cgroup with the lowest group that contains it. `around`: the next group around
    /// each group; those beyond its end are in no other.
    pub(super) fn new(
        cgroups: impl Iterator<Item = (CgroupId, u32)>,
        around: impl Iterator<Item = Option<u32>>,
    ) -> Self {
        let mut of_cgroups = Vec::new();
        for (CgroupId(id), group) in cgroups {
            of_cgroups.resize(of_cgroups.len().max(id as usize + 1), OUTSIDE);
            of_cgroups[id as usize] = group;
        }
        Self { of_cgroups, around: around.map(|it| it.unwrap_or(OUTSIDE)).collect() }
    }

    fn of_cgroup(&self, cgroup: CgroupId) -> u32 {
        self.of_cgroups.get(cgroup.0 as usize).copied().unwrap_or(OUTSIDE)
    }

    fn lowest_around_both(&self, mut one: u32, mut other: u32) -> u32 {
        while one != other {
            let lower = if one < other { &mut one } else { &mut other };
            *lower = self.around.get(*lower as usize).copied().unwrap_or(OUTSIDE);
        }
        one
    }
}

/// Who uses an object.
#[derive(Debug, Clone, Copy)]
pub(super) struct Owner {
    /// When it was last used, also by removed cgroups and by somebody unknown.
    pub(super) last_use: u32,
    /// The lowest group that all its users are in; without users, one that left it behind.
    group: u32,
    /// Whether a cgroup that exists uses it.
    pub(super) is_used: bool,
    /// Whether somebody else may use it: somebody unknown does, or users were missed when it was
    /// resident.
    pub(super) is_unsure: bool,
}

impl Owner {
    const NONE: Owner = Owner { last_use: 0, group: OUTSIDE, is_used: false, is_unsure: false };

    fn add(&mut self, time: u32, group: u32, is_user: bool, groups: &Groups) {
        self.last_use = self.last_use.max(time);
        self.group = match (self.is_used, is_user) {
            (true, true) => groups.lowest_around_both(self.group, group),
            (true, false) => self.group,
            (false, true) => group,
            (false, false) => self.group.min(group),
        };
        self.is_used |= is_user;
    }

    pub(super) fn group(&self) -> Option<u32> {
        Some(self.group).filter(|group| *group != OUTSIDE)
    }

    /// Whether its users are not all in one group.
    pub(super) fn is_shared(&self) -> bool {
        self.is_used && self.group == OUTSIDE
    }
}

/// The owners of all objects. They take up to 40 bytes for each one that was used.
#[derive(Debug)]
pub(super) struct Owners<'l> {
    index: &'l Index,
    used: HashMap<ObjectId, Owner>,
    /// When opened files were missed.
    missed: Option<u32>,
}

impl Owners<'_> {
    pub(super) fn of(&self, object: ObjectId) -> Owner {
        let mut owner = self.used.get(&object).copied().unwrap_or(Owner::NONE);
        owner.is_unsure |= self.missed.is_some_and(|time| self.index.counts_use(object, time));
        owner
    }

    /// Of the objects that were used.
    pub(super) fn iter(&self) -> impl Iterator<Item = (ObjectId, Owner)> {
        self.used.keys().map(|object| (*object, self.of(*object)))
    }
}

impl State {
    /// Finds the owners of objects, from the uses that count.
    pub(super) fn owners(&self, groups: &Groups, counts: impl Fn(&Usage) -> bool) -> Owners<'_> {
        let mut used: HashMap<ObjectId, Owner> = HashMap::new();
        self.uses.for_each(|usage| {
            if counts(&usage) {
                let owner = used.entry(usage.object).or_insert(Owner::NONE);
                let is_user = self.cgroups.is_user(usage.cgroup);
                owner.add(usage.time, groups.of_cgroup(usage.cgroup), is_user, groups);
            }
        });
        for (object, time) in self.unknown.uses(self.now()) {
            if self.index.counts_use(object, time) {
                let owner = used.entry(object).or_insert(Owner::NONE);
                owner.last_use = owner.last_use.max(time);
                owner.is_unsure = true;
            }
        }
        Owners { index: &self.index, used, missed: self.unknown.missed(self.now()) }
    }
}
