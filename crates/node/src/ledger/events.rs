//! Events of mounts and of opened files, which bring the [`State`] up to date as they come.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::path::Path;
use std::time::Duration;

use cofolio_store::Digest;
use cofolio_sys::fanotify::{Event, Opens};
use cofolio_sys::mount::{UNIQUE_ID, unique_id};
use rustix::fs::{AtFlags, FileType, StatxFlags, statx};

use super::record::FirstOpens;
use super::state::State;
use super::superblocks::{Found, MountEvents};
use super::usage::{CgroupId, ObjectId};
use super::{Budget, LedgerError, Result};
use crate::processes::{self, Device};

/// Processor time between two looks at the queue of opened files.
pub(super) const SLICE: Duration = Duration::from_millis(20);

/// Opened files that one call takes: `fs.fanotify.max_queued_events` unless somebody changed it.
const OPENS_MAX: usize = 16_384;

/// See the [module](self).
#[derive(Debug, Default)]
pub(super) struct Events {
    /// Opened files; `None` while none are watched.
    opens: Option<Opens>,
    /// Why they cannot be watched.
    refused: Option<String>,
    /// Superblocks whose opened files are not noted.
    unmarked: usize,
    /// The program whose processes do not count, by its filesystem and inode.
    ignored: Option<(Device, u64)>,
    /// `None` while no opens are watched, or if mounts cannot be: then a new one is seen with the
    /// next refresh.
    mounts: Option<MountEvents>,
    /// Why mounts cannot be watched.
    unwatched_mounts: Option<io::Error>,
    /// Whether the kernel has dropped events of mounts, and nobody has looked for these mounts yet.
    has_lost_mounts: bool,
    first_opens: Option<FirstOpens>,
}

/// Who has opened a file.
#[derive(Clone, Copy, Debug)]
enum Opener {
    /// A process of [`Ledger::ignoring_opens_of`](super::Ledger::ignoring_opens_of).
    Ignored,
    In(CgroupId),
    Unknown,
}

impl Events {
    pub(super) fn ignore(&mut self, program: &Path) {
        self.ignored = processes::file_id(program);
    }

    pub(super) fn watch(&mut self, state: &mut State) -> Result<()> {
        let opens = Opens::new();
        self.refused = opens.as_ref().err().map(ToString::to_string);
        self.opens = Some(opens.map_err(LedgerError::io("fanotify"))?);
        state.unknown.begin_watch(state.now());
        // The first mount would make the directory that is watched, too late to be seen. Where this
        // fails, that mount fails as well.
        let _ = state.run.prepare();
        self.watch_mounts(state);
        self.mark_all(state, true);
        Ok(())
    }

    pub(super) fn unwatch_opens(&mut self, state: &mut State) {
        (self.mounts, self.opens) = (None, None);
        state.unknown.end_watch(state.now());
        state.unused.note_missed_opens();
    }

    /// To be called again with each refresh, before mounts are listed: none may come between.
    pub(super) fn watch_mounts(&mut self, state: &State) {
        let events = self.mounts.take().map_or_else(MountEvents::new, Ok);
        let watched = events.and_then(|events| events.watch(&state.run).map(|()| events));
        (self.mounts, self.unwatched_mounts) = match watched {
            Ok(events) => (Some(events), None),
            // There is no mount yet.
            Err(error) if error.kind() == io::ErrorKind::NotFound => (None, None),
            Err(error) => (None, Some(error)),
        };
    }

    pub(super) fn opens(&self) -> Option<BorrowedFd<'_>> {
        self.opens.as_ref().map(Opens::descriptor)
    }

    pub(super) fn mounts(&self) -> Option<BorrowedFd<'_>> {
        self.mounts.as_ref().map(MountEvents::descriptor)
    }

    /// Superblocks whose opened files are not noted.
    pub(super) fn unmarked(&self) -> usize {
        self.unmarked
    }

    /// Why mounts or opened files cannot be watched.
    pub(super) fn warnings(&self) -> impl Iterator<Item = String> {
        let of_mounts = self.unwatched_mounts.as_ref().map(|error| {
            format!("files opened right after a mount may be missed: inotify: {error}")
        });
        let of_opens = self
            .refused
            .as_ref()
            .map(|error| format!("opened files are not seen, only mapped ones: fanotify: {error}"));
        of_mounts.into_iter().chain(of_opens)
    }

    /// Watches all superblocks; `is_new`: the queue has no marks yet.
    pub(super) fn mark_all(&mut self, state: &mut State, is_new: bool) {
        if let Some(opens) = &self.opens {
            self.unmarked = state.superblocks.mark_all(&state.root, opens, is_new);
        } else if self.refused.is_some() {
            self.unmarked = state.superblocks.iter().count();
        }
    }

    /// Watches superblocks that are new since the last call.
    pub(super) fn mark_new(&self, state: &mut State) {
        if let Some(opens) = &self.opens {
            state.superblocks.mark_new(&state.root, opens);
        }
    }

    /// Forgets objects that went, whose numbers new ones may have.
    pub(super) fn forget(&mut self, objects: &HashSet<ObjectId>) {
        self.first_opens.iter_mut().for_each(|it| it.forget(objects));
    }

    /// Whether the kernel has dropped events of mounts since this was asked last.
    pub(super) fn take_lost_mounts(&mut self) -> bool {
        std::mem::take(&mut self.has_lost_mounts)
    }

    /// Once the slice of processor time is spent, takes events and begins another slice: for long
    /// work between its steps. Unlike [`Ledger::drain_opens`](super::Ledger::drain_opens) it forgets no
    /// image, so objects keep their numbers. An error comes again there.
    pub(super) fn drain_between(&mut self, state: &mut State, slice: &mut Budget) {
        if slice.is_spent() {
            let _ = self.drain(state, &Budget::of(SLICE));
            *slice = Budget::of(SLICE);
        }
    }

    /// Adds mounts that came, and notes opened files. Says whether none are left.
    pub(super) fn drain(&mut self, state: &mut State, budget: &Budget) -> Result<bool> {
        if self.opens.is_none() {
            return Ok(true);
        }
        self.drain_mounts(state, budget);
        self.drain_opened(state, budget)
    }

    fn drain_mounts(&mut self, state: &mut State, budget: &Budget) {
        while let Some(news) = self.mounts.as_ref().and_then(MountEvents::read) {
            let changes = state.superblocks.follow(news.ids, &state.run, &mut state.index);
            state.forget_mounts(&changes);
            self.has_lost_mounts |= news.has_overflowed;
            self.mark_new(state);
            if budget.is_spent() {
                break;
            }
        }
    }

    /// Says whether the queue is empty.
    fn drain_opened(&mut self, state: &mut State, budget: &Budget) -> Result<bool> {
        let own = std::process::id();
        // A process opens many files in a row.
        let mut openers: HashMap<u32, Opener> = HashMap::new();
        let mut taken = 0;
        loop {
            let events = self.opens.as_ref().map_or_else(|| Ok(Vec::new()), Opens::read);
            let events = events.map_err(LedgerError::io("fanotify"))?;
            if events.is_empty() {
                return Ok(true);
            }
            taken += events.len();
            for event in events {
                let (file, pid) = match event {
                    Event::Opened { pid, .. } if pid == own => continue,
                    Event::Opened { file, pid } => (File::from(file), pid),
                    // Somebody has a lease on the file. It is one file: whoever opens few of them
                    // must not keep all others from being reclaimed for an hour.
                    Event::Unreadable(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        state.unknown.count.files += 1;
                        state.note_unseen_open();
                        continue;
                    }
                    Event::Unreadable(_) => {
                        state.unknown.count.files += 1;
                        state.note_missed_opens();
                        continue;
                    }
                    Event::Overflow => {
                        state.unknown.count.overflows += 1;
                        state.note_missed_opens();
                        continue;
                    }
                };
                let mask = StatxFlags::BASIC_STATS | UNIQUE_ID;
                let Ok(found) =
                    statx(&file, "", AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC, mask)
                else {
                    state.unknown.count.files += 1;
                    state.note_missed_opens();
                    continue;
                };
                if !FileType::from_raw_mode(found.stx_mode.into()).is_file() {
                    continue;
                }
                let link = || fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).ok();
                let opened = state.superblocks.opened(Found::by(&found), link, &state.index);
                let Some((mount, object)) = opened else { continue };
                let cgroup = match *openers.entry(pid).or_insert_with(|| self.opener(state, pid)) {
                    Opener::Ignored => continue,
                    Opener::In(cgroup) => Some(cgroup),
                    Opener::Unknown => unique_id(&found).and_then(|it| state.cgroup_of_mount(it)),
                };
                if let Some(first) = &mut self.first_opens {
                    first.note(object, cgroup.and_then(|id| state.cgroups.path(id)));
                }
                match cgroup {
                    Some(cgroup) if state.note_use(mount, cgroup, object) => {}
                    Some(_) => {
                        state.unknown.count.files += 1;
                        state.note_unknown_use(mount, object);
                    }
                    None => {
                        state.unknown.count.openers += 1;
                        state.note_unknown_use(mount, object);
                    }
                }
            }
            if budget.is_spent() || taken >= OPENS_MAX {
                return Ok(false);
            }
        }
    }

    /// Who a process that has opened a file is.
    fn opener(&self, state: &mut State, pid: u32) -> Opener {
        if self.ignored.is_some() && processes::program(&state.root, pid) == self.ignored {
            return Opener::Ignored;
        }
        match state.cgroup_of(pid) {
            Ok(Some(cgroup)) => {
                state.learn_root(pid, cgroup);
                Opener::In(cgroup)
            }
            _ => Opener::Unknown,
        }
    }

    /// From now on keeps the order in which a container opens files of a trust domain.
    pub(super) fn record(&mut self, state: &mut State, domain: u16, container: &str) {
        // Before files are opened that are to be told apart.
        for pid in processes::all(&state.root).unwrap_or_default() {
            if let Ok(Some(cgroup)) = state.cgroup_of(pid) {
                state.learn_root(pid, cgroup);
            }
        }
        let cgroup = state.cgroup_of_container(container);
        self.first_opens = Some(FirstOpens::new(domain, cgroup));
    }

    /// The objects that were opened since [`Events::record`], the first one first.
    pub(super) fn recorded(&self, state: &State) -> Vec<Digest> {
        self.first_opens.as_ref().map_or_else(Vec::new, |it| it.objects(&state.index))
    }
}

#[cfg(test)]
mod tests {
    use super::super::of_an_empty_machine;
    use super::*;

    /// A machine without room for another inotify instance missed opens on new mounts, and nothing
    /// said so.
    #[test]
    fn unwatchable_mounts_are_a_warning() {
        let (root, mut ledger) = of_an_empty_machine();
        ledger.state.root = Path::new("/").to_owned();
        ledger.events.watch_mounts(&ledger.state);
        assert_eq!(ledger.report().unwrap().warnings, [""; 0], "there is no mount yet");
        fs::create_dir_all(root.path().join("run/attached")).unwrap();
        let records = root.path().join("run/mounts");
        fs::write(&records, "").unwrap();
        ledger.events.watch_mounts(&ledger.state);
        let warnings = ledger.report().unwrap().warnings;
        assert!(warnings.len() == 1 && warnings[0].contains("Not a directory"), "{warnings:?}");
        fs::remove_file(&records).unwrap();
        fs::create_dir(&records).unwrap();
        ledger.events.watch_mounts(&ledger.state);
        assert_eq!(ledger.report().unwrap().warnings, [""; 0]);
        assert!(ledger.mount_events().is_some());
    }
}
