//! Files that are opened on mounts of ours: the kernel's queue of them, and what is not known of
//! who opened them.
//!
//! | what is known of an open | what it counts as |
//! |---|---|
//! | the object and the cgroup | a use in the usage lists |
//! | the object | a use by somebody unknown, for an hour |
//! | nothing: the open was missed | a use of any object by somebody unknown, for an hour |

use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::BorrowedFd;
use std::path::Path;

use cofolio_sys::fanotify::{Event, Opens};

use super::Unknown;
use super::live::TICKS_PER_SECOND;
use super::openers::Openers;
use super::superblocks::Superblocks;
use super::usage::{ObjectId, SuperblockId};
use crate::processes::Device;

/// How long somebody unknown counts as a user of what was opened.
const UNKNOWN_TICKS: u32 = 3600 * TICKS_PER_SECOND;

/// Objects that somebody unknown opened, by mount, that are kept. A container can open any number.
const UNKNOWN_MAX: usize = 100_000;

/// Bytes of one of them, with a byte of the table's own, and an eighth of its places free at least.
const UNKNOWN_BYTES: usize = (size_of::<(SuperblockId, ObjectId, u32)>() + 1) * 8 / 7 + 1;

/// See the [module](self).
#[derive(Debug, Default)]
pub(super) struct OpenedFiles {
    /// `None` while none are watched.
    queue: Option<Opens>,
    /// Why they cannot be watched.
    refused: Option<String>,
    /// Superblocks whose opened files are not noted.
    unmarked: usize,
    pub(super) openers: Openers,
    /// The program whose processes do not count, by its filesystem and inode.
    pub(super) ignored: Option<(Device, u64)>,
    /// When somebody unknown opened an object last.
    unknown: HashMap<(SuperblockId, ObjectId), u32>,
    /// When it was last noticed that opened files were missed.
    missed: Option<u32>,
    /// Opens that were missed, and those by somebody unknown, since the ledger began.
    pub(super) count: Unknown,
}

impl OpenedFiles {
    /// Makes a queue. Files that were opened since the end of the last one were missed.
    ///
    /// # Errors
    /// Those of [`Opens::new`].
    pub(super) fn watch(&mut self, now: u32) -> io::Result<()> {
        let queue = Opens::new();
        self.refused = queue.as_ref().err().map(ToString::to_string);
        self.queue = Some(queue?);
        self.missed = self.missed.map(|_| now);
        Ok(())
    }

    /// Drops the queue, if there is one.
    pub(super) fn drop_queue(&mut self, now: u32) {
        self.note_missed(now);
        if self.queue.take().is_some() {
            self.count.overflows += 1;
        }
    }

    /// Becomes readable when there are events. `None` while none are watched.
    pub(super) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.queue.as_ref().map(Opens::descriptor)
    }

    /// Why opened files cannot be watched.
    pub(super) fn refused(&self) -> Option<&str> {
        self.refused.as_deref()
    }

    /// Superblocks whose opened files are not noted.
    pub(super) fn unmarked(&self) -> usize {
        self.unmarked
    }

    /// Watches all superblocks; `is_new` for a queue that watches none.
    pub(super) fn mark_all(&mut self, superblocks: &mut Superblocks, root: &Path, is_new: bool) {
        if let Some(queue) = &self.queue {
            self.unmarked = superblocks.mark_all(root, queue, is_new);
        } else if self.refused.is_some() {
            self.unmarked = superblocks.iter().count();
        }
    }

    /// Watches superblocks that are new since the last call.
    pub(super) fn mark_new(&self, superblocks: &mut Superblocks, root: &Path) {
        if let Some(queue) = &self.queue {
            superblocks.mark_new(root, queue);
        }
    }

    /// Some events; none if the queue is empty.
    ///
    /// # Errors
    /// Those of [`Opens::read`].
    pub(super) fn read(&self) -> io::Result<Vec<Event>> {
        self.queue.as_ref().map_or_else(|| Ok(Vec::new()), Opens::read)
    }

    /// Somebody unknown opened an object. False if there are too many of these: then all are
    /// forgotten, and count as missed.
    pub(super) fn note_unknown(&mut self, mount: SuperblockId, object: ObjectId, now: u32) -> bool {
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

    /// What the objects that somebody unknown opened take.
    pub(super) fn unknown_bytes(&self) -> usize {
        self.unknown.capacity() * UNKNOWN_BYTES
    }

    /// Objects that somebody unknown opened within the last hour, and when.
    pub(super) fn unknown_uses(&self, now: u32) -> impl Iterator<Item = (ObjectId, u32)> {
        let uses = self.unknown.iter().map(|((_, object), time)| (*object, *time));
        uses.filter(move |(_, time)| is_new(*time, now))
    }

    /// When opened files were last missed, if that was within the last hour. From the end of one
    /// queue to the next one they are missed all the time.
    pub(super) fn missed(&self, now: u32) -> Option<u32> {
        let missed = if self.queue.is_none() { self.missed.map(|_| now) } else { self.missed };
        missed.filter(|time| is_new(*time, now))
    }

    pub(super) fn remove_mounts(&mut self, mounts: &[SuperblockId]) {
        if !mounts.is_empty() {
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
        let mut opened = OpenedFiles::default();
        let [one, two] = [1, 2].map(SuperblockId);
        for (mount, time) in [(one, 1), (two, 1), (two, 2)] {
            assert!(opened.note_unknown(mount, ObjectId(7), time));
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
        let mut opened = OpenedFiles::default();
        let count = u32::try_from(UNKNOWN_MAX).unwrap();
        let mut note = |mount| opened.note_unknown(SuperblockId(mount), ObjectId(7), 1);
        assert!((0..count).all(&mut note));
        assert!(note(0), "it is listed");
        assert!(!note(count));
        assert_eq!(opened.unknown_bytes(), 0);
        assert!((0..count).all(|it| opened.note_unknown(SuperblockId(it), ObjectId(7), 1)));
        assert!(opened.unknown_bytes() < 2_000_000, "{}", opened.unknown_bytes());
    }

    /// Nobody saw what was opened from the end of one queue to the next one.
    #[test]
    fn opened_files_are_missed_until_they_are_watched_again() {
        let mut opened = OpenedFiles::default();
        // Of a command that does not watch any.
        assert_eq!(opened.missed(1), None);
        opened.drop_queue(1);
        let later = 2 * UNKNOWN_TICKS;
        assert_eq!(opened.missed(later), Some(later));
        if let Err(reason) = opened.watch(later) {
            let test = "opened_files_are_missed_until_they_are_watched_again";
            return eprintln!("SKIP {test}: {reason}");
        }
        assert_eq!(opened.missed(later + UNKNOWN_TICKS - 1), Some(later));
        assert_eq!(opened.missed(later + UNKNOWN_TICKS), None);
    }
}
