//! Users of which not everything is known.
//!
//! | known of a file that is opened or mapped | it counts as |
//! |---|---|
//! | the object and the cgroup | a use in the usage lists |
//! | the object, or there is no room there | a use by somebody unknown, for an hour |
//! | nothing: an open was missed, or processes or cgroups are hidden | a use of any object by somebody unknown, for an hour |

use std::collections::{HashMap, HashSet};

use super::Unknown;
use super::state::TICKS_PER_SECOND;
use super::usage::{ObjectId, SuperblockId};

/// How long somebody unknown counts as a user.
const UNKNOWN_TICKS: u32 = 3600 * TICKS_PER_SECOND;

/// Objects that somebody unknown uses, by mount, that are kept. A container can open any number.
const UNKNOWN_MAX: usize = 100_000;

/// Bytes of one of them, with a byte of the table's own, and an eighth of its places free at least.
const UNKNOWN_BYTES: usize = (size_of::<(SuperblockId, ObjectId, u32)>() + 1) * 8 / 7 + 1;

/// See the [module](self).
#[derive(Debug, Default)]
pub(super) struct UnknownUsers {
    /// Whether opened files are watched now.
    is_watched: bool,
    /// Whether processes, or their cgroups, are hidden from this one.
    are_hidden: bool,
    /// When somebody unknown used an object last.
    unknown: HashMap<(SuperblockId, ObjectId), u32>,
    /// When it was last noticed that users were missed.
    missed: Option<u32>,
    /// Opens that were missed, and those by somebody unknown, since the ledger began.
    pub(super) count: Unknown,
}

impl UnknownUsers {
    /// Opens before now were missed.
    pub(super) fn begin_watch(&mut self, now: u32) {
        self.is_watched = true;
        self.note_missed(now);
    }

    pub(super) fn end_watch(&mut self, now: u32) {
        self.count.overflows += u64::from(std::mem::take(&mut self.is_watched));
        self.note_missed(now);
    }

    /// While processes or their cgroups are hidden from this one, any of these may use any object.
    pub(super) fn set_hidden(&mut self, are_hidden: bool, now: u32) {
        if are_hidden || self.are_hidden {
            self.note_missed(now);
        }
        self.are_hidden = are_hidden;
    }

    /// Somebody unknown uses an object. False if there are too many of these: then all are
    /// forgotten, and count as missed.
    pub(super) fn note(&mut self, mount: SuperblockId, object: ObjectId, now: u32) -> bool {
        self.unknown.insert((mount, object), now);
        let fits = self.unknown.len() <= UNKNOWN_MAX;
        if !fits {
            self.unknown = HashMap::new();
            self.note_missed(now);
        }
        fits
    }

    /// Files were opened, and nobody knows which.
    pub(super) fn note_missed(&mut self, now: u32) {
        self.missed = Some(now);
    }

    /// What the objects that somebody unknown uses take.
    pub(super) fn bytes(&self) -> usize {
        self.unknown.capacity() * UNKNOWN_BYTES
    }

    /// Objects that somebody unknown used within the last hour, and when.
    pub(super) fn uses(&self, now: u32) -> impl Iterator<Item = (ObjectId, u32)> {
        let uses = self.unknown.iter().map(|((_, object), time)| (*object, *time));
        uses.filter(move |(_, time)| is_new(*time, now))
    }

    /// When users were last missed, if that was within the last hour. From the end of one watch to
    /// the next one they are missed all the time.
    pub(super) fn missed(&self, now: u32) -> Option<u32> {
        let is_missing = !self.is_watched || self.are_hidden;
        let missed = if is_missing { self.missed.map(|_| now) } else { self.missed };
        missed.filter(|time| is_new(*time, now))
    }

    pub(super) fn remove_mounts(&mut self, mounts: &[SuperblockId]) {
        if !mounts.is_empty() {
            // Both may be many.
            let mounts: HashSet<_> = mounts.iter().collect();
            self.unknown.retain(|(mount, _), _| !mounts.contains(mount));
        }
    }

    /// Drops objects that do not exist any more.
    pub(super) fn forget(&mut self, objects: &HashSet<ObjectId>) {
        self.unknown.retain(|(_, object), _| !objects.contains(object));
    }

    /// Drops uses by somebody unknown that are old, or for which `counts` says no.
    pub(super) fn retain(&mut self, now: u32, counts: impl Fn(ObjectId, u32) -> bool) {
        self.unknown.retain(|(_, object), time| is_new(*time, now) && counts(*object, *time));
    }
}

fn is_new(time: u32, now: u32) -> bool {
    now.saturating_sub(time) < UNKNOWN_TICKS
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Files that a process of the machine had searched through once stayed in use for good.
    #[test]
    fn somebody_unknown_is_a_user_for_an_hour_at_most() {
        let mut opened = UnknownUsers::default();
        let [one, two] = [1, 2].map(SuperblockId);
        for (mount, time) in [(one, 1), (two, 1), (two, 2)] {
            assert!(opened.note(mount, ObjectId(7), time));
        }
        opened.retain(UNKNOWN_TICKS, |_, _| true);
        assert_eq!(opened.unknown.len(), 2);
        opened.remove_mounts(&[one]);
        opened.retain(UNKNOWN_TICKS + 1, |_, _| true);
        assert_eq!(opened.unknown.len(), 1);
        opened.retain(UNKNOWN_TICKS + 2, |_, _| true);
        assert!(opened.unknown.is_empty());
    }

    /// Short programs of a container opened each file of thousands through each of many mounts, and
    /// all of that was kept for an hour.
    #[test]
    fn too_many_unknown_openers_are_openers_of_everything() {
        let mut opened = UnknownUsers::default();
        let count = u32::try_from(UNKNOWN_MAX).unwrap();
        let mut note = |mount| opened.note(SuperblockId(mount), ObjectId(7), 1);
        assert!((0..count).all(&mut note));
        assert!(note(0), "it is listed");
        assert!(!note(count));
        assert_eq!(opened.bytes(), 0);
        assert!((0..count).all(|it| opened.note(SuperblockId(it), ObjectId(7), 1)));
        assert!(opened.bytes() < 2_000_000, "{}", opened.bytes());
    }

    /// Nobody saw what was opened from the end of one queue to the next one, nor before the first one: after
    /// a start of the daemon a reclaim dropped files that others had open, and was sure that none had.
    #[test]
    fn opened_files_are_missed_until_they_are_watched_again() {
        let mut opened = UnknownUsers::default();
        // Of a command that does not watch any.
        assert_eq!(opened.missed(1), None);
        opened.begin_watch(1);
        assert_eq!(opened.missed(UNKNOWN_TICKS), Some(1));
        assert_eq!(opened.missed(UNKNOWN_TICKS + 1), None);
        opened.end_watch(UNKNOWN_TICKS + 1);
        assert_eq!(opened.count.overflows, 1);
        let later = 2 * UNKNOWN_TICKS;
        assert_eq!(opened.missed(later), Some(later));
        opened.begin_watch(later);
        assert_eq!(opened.missed(later + UNKNOWN_TICKS - 1), Some(later));
        assert_eq!(opened.missed(later + UNKNOWN_TICKS), None);
    }

    /// In a PID namespace an object that had left memory and come back was in no doubt until the
    /// next round.
    #[test]
    fn hidden_processes_are_missed_all_the_time() {
        let mut unknown = UnknownUsers::default();
        unknown.begin_watch(1);
        unknown.set_hidden(true, 1);
        let later = 2 * UNKNOWN_TICKS;
        assert_eq!(unknown.missed(later), Some(later));
        unknown.set_hidden(false, later);
        assert_eq!(unknown.missed(later + UNKNOWN_TICKS - 1), Some(later));
        assert_eq!(unknown.missed(later + UNKNOWN_TICKS), None);
    }
}
