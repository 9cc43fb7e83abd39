//! Objects that the policy may drop: known to be unused, until somebody uses them.

use std::collections::HashSet;

use super::usage::ObjectId;

/// See the [module](self).
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
