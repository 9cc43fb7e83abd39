//! Uses that come between a search for objects to drop and the drop.
//!
//! | who drops | what stays |
//! |---|---|
//! | the policy ([`Unused`]) | what anybody has used since |
//! | a request for a container ([`UsesSince`]) | what others have used since |

use std::collections::{HashMap, HashSet};

use super::usage::{CgroupId, ObjectId};

/// Objects that the policy may drop: known to be unused, until somebody uses them.
#[derive(Debug, Default)]
pub(super) struct Unused {
    /// Objects that the last search found and nobody has used since. Only these may be dropped.
    found: HashSet<ObjectId>,
    /// Objects of users that have gone. Others may use them.
    left_behind: HashSet<ObjectId>,
    /// Whether objects of users that go are noted.
    notes_left_behind: bool,
}

impl Unused {
    pub(super) fn new(notes_left_behind: bool) -> Self {
        Self { notes_left_behind, ..Self::default() }
    }

    /// Drops objects that do not exist any more.
    pub(super) fn forget(&mut self, objects: &HashSet<ObjectId>) {
        self.left_behind.retain(|id| !objects.contains(id));
        self.found.retain(|id| !objects.contains(id));
    }

    /// Somebody uses an object. Even if that is the cgroup under pressure, and no other one uses
    /// it, it is not the least recently used one any more.
    pub(super) fn note_use(&mut self, object: ObjectId) {
        self.found.remove(&object);
    }

    /// Somebody may use any object.
    pub(super) fn note_missed_opens(&mut self) {
        self.found.clear();
    }

    /// A search has found these objects, and no others.
    pub(super) fn set(&mut self, found: HashSet<ObjectId>) {
        self.found = found;
    }

    /// Whether an object may be dropped now. It is not tried twice.
    pub(super) fn take(&mut self, object: ObjectId) -> bool {
        let is_unused = self.found.remove(&object);
        if is_unused {
            self.left_behind.remove(&object);
        }
        is_unused
    }

    pub(super) fn notes_left_behind(&self) -> bool {
        self.notes_left_behind
    }

    pub(super) fn left_behind(&mut self) -> &mut HashSet<ObjectId> {
        &mut self.left_behind
    }
}

/// Who else uses an object of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OtherUser {
    Known,
    /// Somebody unknown, or perhaps nobody: opened files were missed.
    Unsure,
}

/// Uses by others than one container since a request for it began.
#[derive(Debug)]
pub(super) struct UsesSince {
    ours: HashSet<CgroupId>,
    by_others: HashMap<ObjectId, OtherUser>,
    has_missed: bool,
}

impl UsesSince {
    pub(super) fn new(ours: HashSet<CgroupId>) -> Self {
        Self { ours, by_others: HashMap::new(), has_missed: false }
    }

    pub(super) fn note_use(&mut self, cgroup: CgroupId, object: ObjectId) {
        if !self.ours.contains(&cgroup) {
            self.by_others.insert(object, OtherUser::Known);
        }
    }

    pub(super) fn note_unknown_use(&mut self, object: ObjectId) {
        self.by_others.entry(object).or_insert(OtherUser::Unsure);
    }

    pub(super) fn note_missed_opens(&mut self) {
        self.has_missed = true;
    }

    /// Who else uses this object.
    pub(super) fn other_user(&self, object: ObjectId) -> Option<OtherUser> {
        let missed = self.has_missed.then_some(OtherUser::Unsure);
        self.by_others.get(&object).copied().or(missed)
    }
}
