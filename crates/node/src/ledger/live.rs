//! The core of the ledger: [`Ledger`] itself, and how looks and events keep it up to date.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::ops::ControlFlow;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cofolio_store::Store;
use cofolio_store::task::Cancel;
use cofolio_sys::fanotify::Event;
use cofolio_sys::mount::{UNIQUE_ID, unique_id};
use rustix::fs::{AtFlags, FileType, StatxFlags, statx};

use super::cgroup_ids::{self, CgroupIds};
use super::charges::Charges;
use super::index::Index;
use super::opens::OpenedFiles;
use super::pressure::Pressure;
use super::record::FirstOpens;
use super::shares::Shares;
use super::superblocks::{Changes, Found, MountEvents, Superblocks};
use super::unseen::Unseen;
use super::usage::{CgroupId, ObjectId, SuperblockId, UsageLists};
use super::{Budget, LedgerError, Machine, Result};
use crate::address_space;
use crate::cgroup::{self, CgroupError, Hierarchy, Version};
use crate::mount::RunDir;
use crate::processes;

/// Processor time between two looks at the queue of opened files.
pub(super) const SLICE: Duration = Duration::from_millis(20);

/// Processor time between two looks whether taking up images is cancelled. Each may list all of
/// them.
const REFRESH_SLICE: Duration = Duration::from_millis(500);

/// Opened files that one call takes: `fs.fanotify.max_queued_events` unless somebody changed it.
const OPENS_MAX: usize = 16_384;

/// The time of the usage lists, which last for eight years of it.
pub(super) const TICKS_PER_SECOND: u32 = 16;

/// Bytes of the usage lists at most, and at most a sixteenth of the machine's memory and half of
/// what this process's own cgroup may hold: a report takes a third of the lists' size besides.
/// Whoever may make cgroups could otherwise fill it: a process that is moved through all of them
/// uses everything in each. 10,000 containers that use 100 objects through each of 20 mounts take
/// 0.58 GB.
const USAGE_BYTES_MAX: u64 = 2 << 30;

/// The warning where the ledger cannot see who uses objects.
const HIDDEN: &str = "this process is in a PID namespace, where it sees only some of the machine's \
                      processes: containers may be missing, and no object is known to be unused";

/// Memory of the usage lists.
#[derive(Debug, Clone, Copy)]
pub struct UsageCost {
    /// Bytes.
    pub bytes: u64,
    /// Pairs of a mount and a cgroup that are used.
    pub lists: u64,
    /// Objects in the lists of all pairs.
    pub entries: u64,
}

fn usage_bytes_max(root: &Path, hierarchy: Option<&Hierarchy>) -> u64 {
    let of_machine = Machine::read(root).map_or(u64::MAX, |it| it.memory_bytes / 16);
    let of_own_cgroup = hierarchy.and_then(|hierarchy| {
        let cgroup = cgroup::of_process(root, std::process::id(), hierarchy.version()).ok()??;
        Some(hierarchy.limit_bytes(&cgroup)? / 2)
    });
    USAGE_BYTES_MAX.min(of_machine).min(of_own_cgroup.unwrap_or(u64::MAX))
}

/// When rounds of looks began.
#[derive(Debug, Default)]
pub(super) struct Rounds {
    this: u32,
    /// The last one that is complete. No look that counts is older.
    complete: u32,
}

impl Rounds {
    pub(super) fn age_seconds(&self, now: u32) -> u32 {
        now.saturating_sub(self.complete) / TICKS_PER_SECOND
    }
}

/// The ledger of one store.
#[derive(Debug)]
pub struct Ledger {
    pub(super) run: RunDir,
    /// Where `/proc` is looked up.
    pub(super) root: PathBuf,
    /// Without one, nobody sees cgroups end, and a process counts as in its cgroup of version 2.
    pub(super) hierarchy: Result<Hierarchy, CgroupError>,
    pub(super) index: Index,
    pub(super) superblocks: Superblocks,
    pub(super) cgroups: CgroupIds,
    pub(super) usage: UsageLists,
    /// What the lists may take, with the objects that somebody unknown opened.
    pub(super) usage_bytes_max: u64,
    /// Each cgroup's share of `usage_bytes_max`; `None` below half of it, and after a refresh.
    usage_shares: Option<Shares>,
    pub(super) pressure: Pressure,
    pub(super) opened: OpenedFiles,
    /// `None` while no opens are watched, or if mounts cannot be: then a new one is seen with the
    /// next refresh.
    mount_events: Option<MountEvents>,
    /// Whether the kernel has dropped events of mounts, and nobody has looked for these mounts yet.
    has_lost_mounts: bool,
    /// Why mounts cannot be watched.
    pub(super) unwatched_mounts: Option<io::Error>,
    pub(super) first_opens: Option<FirstOpens>,
    started: Instant,
    /// Processes of this round that are still to be looked at.
    round: Vec<u32>,
    /// Name of the commons cgroup.
    pub(super) commons: String,
    pub(super) charges: Charges,
    /// Files that hold the pages of objects in place of the store's, in this round.
    pub(super) page_files: HashMap<ObjectId, PathBuf>,
    /// Those that could not be read, of this round and of the last complete one.
    unread: Unseen,
    pub(super) unread_processes: Unseen,
    pub(super) of_processes: Rounds,
    pub(super) of_residency: Rounds,
    pub(super) cancel: Cancel,
}

/// Who has opened a file.
#[derive(Clone, Copy, Debug)]
enum Opener {
    /// A process of [`Ledger::ignoring_opens_of`].
    Ignored,
    In(CgroupId),
    Unknown,
}

impl Ledger {
    /// A ledger that has seen nothing yet. `run` is the run directory of the store.
    pub fn new(store: Store, run: RunDir) -> Self {
        let root = PathBuf::from("/");
        let hierarchy = Hierarchy::find(&root);
        Self {
            run,
            usage_bytes_max: usage_bytes_max(&root, hierarchy.as_ref().ok()),
            hierarchy,
            root,
            index: Index::new(store),
            superblocks: Superblocks::default(),
            cgroups: CgroupIds::default(),
            usage: UsageLists::new(16),
            usage_shares: None,
            pressure: Pressure::default(),
            opened: OpenedFiles::default(),
            mount_events: None,
            has_lost_mounts: false,
            unwatched_mounts: None,
            first_opens: None,
            started: Instant::now(),
            round: Vec::new(),
            commons: cgroup::COMMONS.to_owned(),
            charges: Charges::default(),
            page_files: HashMap::new(),
            unread: Unseen::default(),
            unread_processes: Unseen::default(),
            of_processes: Rounds::default(),
            of_residency: Rounds::default(),
            cancel: Cancel::default(),
        }
    }

    /// Takes the cgroup of that name for the commons: for tests, which make one of their own.
    #[must_use]
    pub fn with_commons(self, name: &str) -> Self {
        Self { commons: name.to_owned(), ..self }
    }

    /// Files that processes of this program open are in nobody's use: `cofolio run` looks up a user in
    /// the root of a container that it is to start.
    #[must_use]
    pub fn ignoring_opens_of(mut self, program: &Path) -> Self {
        self.opened.ignored = processes::file_id(program);
        self
    }

    /// Ends [`Ledger::sample_all`] and [`Ledger::reclaim`] early once this is cancelled.
    #[must_use]
    pub fn with_cancel(self, cancel: Cancel) -> Self {
        Self { cancel, ..self }
    }

    /// Why memory cgroups cannot be looked at: then all containers may count as one, and those that
    /// have ended stay in the figures.
    pub fn cgroup_error(&self) -> Option<&CgroupError> {
        self.hierarchy.as_ref().err()
    }

    /// From now on notes who opens files on mounted images.
    ///
    /// # Errors
    /// [`LedgerError::Io`] where the kernel or the lack of privileges does not allow it.
    pub fn watch_opens(&mut self) -> Result<()> {
        self.opened.watch(self.now()).map_err(LedgerError::io("fanotify"))?;
        // The first mount would make the directory that is watched, too late to be seen.
        let _ = self.run.prepare();
        self.watch_mounts();
        self.opened.mark_all(&mut self.superblocks, &self.root, true);
        Ok(())
    }

    /// Drops the queue of opened files, and notes none until [`Ledger::watch_opens`]. For a caller
    /// that has no time for them: in the queue they would keep their mounts busy.
    pub fn drop_opens(&mut self) {
        self.mount_events = None;
        self.opened.drop_queue(self.now());
        self.pressure.note_missed_opens();
    }

    /// To be called again with each refresh.
    fn watch_mounts(&mut self) {
        let events = self.mount_events.take().map_or_else(MountEvents::new, Ok);
        let watched = events.and_then(|events| events.watch(&self.run).map(|()| events));
        (self.mount_events, self.unwatched_mounts) = match watched {
            Ok(events) => (Some(events), None),
            // There is no mount yet.
            Err(error) if error.kind() == io::ErrorKind::NotFound => (None, None),
            Err(error) => (None, Some(error)),
        };
    }

    /// Becomes readable when [`Ledger::take_opens`] has something to do.
    pub fn opens(&self) -> Option<BorrowedFd<'_>> {
        self.opened.descriptor()
    }

    /// Becomes readable when there are mounts for [`Ledger::take_opens`] to take up.
    pub fn mount_events(&self) -> Option<BorrowedFd<'_>> {
        self.mount_events.as_ref().map(MountEvents::descriptor)
    }

    /// [`TICKS_PER_SECOND`] since the ledger began, from 1.
    pub(super) fn now(&self) -> u32 {
        let ticks = self.started.elapsed().as_millis() * u128::from(TICKS_PER_SECOND) / 1000;
        u32::try_from(ticks).unwrap_or(u32::MAX).saturating_add(1)
    }

    /// Takes up images and mounts that came, and drops those that went. Says whether all new images
    /// were taken up.
    ///
    /// # Errors
    /// [`LedgerError::Store`] where the store's directories cannot be listed, once all else is done.
    pub fn refresh(&mut self, budget: &Budget) -> Result<bool> {
        let (is_complete, listed) = self.take_up(budget);
        listed.map(|()| is_complete)
    }

    fn take_up(&mut self, budget: &Budget) -> (bool, Result<()>) {
        let now = self.now();
        let (is_complete, listed) = self.index.refresh(now, budget);
        self.drop_forgotten();
        if self.opens().is_some() {
            self.watch_mounts();
        }
        let changes = self.superblocks.refresh(&self.run, &self.index);
        if let Ok(hierarchy) = &self.hierarchy {
            self.cgroups.find_ended(hierarchy);
        }
        self.forget_mounts(&changes);
        self.opened.mark_all(&mut self.superblocks, &self.root, false);
        if let Ok(hierarchy) = &self.hierarchy {
            self.cgroups.reparent_ended(hierarchy, &self.usage);
        }
        self.usage_shares = None;
        (is_complete, listed.map_err(LedgerError::from))
    }

    /// Drops the numbers of objects that went, before new ones have them. The usage lists need not:
    /// see [`Object::absent`](super::index::Object::absent).
    fn drop_forgotten(&mut self) {
        let forgotten = self.index.take_forgotten();
        if forgotten.is_empty() {
            return;
        }
        self.page_files.retain(|id, _| !forgotten.contains(id));
        self.pressure.forget(&forgotten);
        self.superblocks.forget(&forgotten);
        self.first_opens.iter_mut().for_each(|it| it.forget(&forgotten));
        self.opened.forget(&forgotten);
    }

    fn forget_mounts(&mut self, changes: &Changes) {
        self.note_left_behind(&changes.removed);
        for id in &changes.removed {
            self.usage.remove_mount(*id);
        }
        self.opened.remove_mounts(&changes.removed);
    }

    /// Looks how much of the objects is resident. Says whether a round over all is complete.
    pub fn sample_residency(&mut self, budget: &Budget) -> bool {
        let now = self.now();
        if self.index.is_at_start() {
            self.of_residency.this = now;
            self.charges.begin(self.hierarchy.as_ref().ok(), &self.commons);
            self.page_files = self.used_page_files();
        }
        let is_complete = self.index.sample(now, &self.charges, &self.page_files, budget);
        if is_complete {
            self.of_residency.complete = self.of_residency.this;
            // Uses of pages that have gone since.
            let Self { usage, opened, index, .. } = self;
            let counts = |object, time| index.counts_use(object, time);
            usage.retain(|it| counts(it.object, it.time));
            opened.retain(now, counts);
        }
        is_complete
    }

    /// With `inode-share`, files of mounted packs through which something was used. To look at all others
    /// would load their inodes.
    fn used_page_files(&self) -> HashMap<ObjectId, PathBuf> {
        let mut files = HashMap::new();
        for (mount, superblock) in self.superblocks.iter().filter(|(_, it)| it.has_page_files()) {
            let _ = self.usage.for_each_of_mount(mount, |usage| {
                let object = self.index.object(usage.object);
                if let Some(path) = object.and_then(|it| superblock.page_file(&it.digest)) {
                    files.insert(usage.object, path);
                }
                ControlFlow::<()>::Continue(())
            });
        }
        files
    }

    /// Looks what processes map. Says whether a round over all is complete.
    ///
    /// # Errors
    /// [`LedgerError::Io`] if `/proc` cannot be listed.
    pub fn sample_processes(&mut self, budget: &Budget) -> Result<bool> {
        if self.round.is_empty() {
            let path = self.root.join("proc");
            self.round = processes::all(&self.root).map_err(LedgerError::io(path))?;
            self.of_processes.this = self.now();
            self.unread = Unseen::default();
            if !processes::are_all_visible(&self.root) {
                self.unread.add(|| HIDDEN.to_owned());
                self.note_missed_opens();
            }
        }
        while let Some(pid) = self.round.pop() {
            self.look_at(pid);
            if budget.is_spent() {
                break;
            }
        }
        let is_complete = self.round.is_empty();
        if is_complete {
            self.of_processes.complete = self.of_processes.this;
            self.unread_processes = std::mem::take(&mut self.unread);
            self.superblocks.round_is_complete();
            self.opened.openers.round_is_complete();
        }
        Ok(is_complete)
    }

    fn look_at(&mut self, pid: u32) {
        let Self { superblocks, index, root, .. } = self;
        let mut used = Vec::new();
        let read = processes::mapped(root, pid, |mapping| {
            let found = superblocks.mapped(root, pid, &mapping, index);
            used.extend(found);
            found.is_some()
        });
        let left_out = superblocks.end_look(root, pid);
        self.opened.mark_new(&mut self.superblocks, &self.root);
        let noted = if used.is_empty() { Ok(()) } else { self.note_mapped(pid, used) };
        let process = processes::directory(&self.root, pid);
        let read = read.and_then(|is_read| address_space::check(&process).map(|()| is_read));
        if read.as_ref().is_err_and(address_space::is_unanswered) {
            self.superblocks.keep_seen_by(pid);
        }
        let why = match (read, left_out, noted) {
            (Ok(true), None, Ok(())) => return,
            (Err(error), ..) => error.to_string(),
            (Ok(false), ..) => "its list of mappings is too long".to_owned(),
            (Ok(true), Some(why), _) => why.to_owned(),
            (Ok(true), None, Err(why)) => why,
        };
        // It may have ended.
        if process.exists() {
            self.unread.add(|| format!("process {pid}: {why}"));
        }
    }

    /// Notes what a process maps, unless it has ended. Says why not all of it could be noted as a use
    /// by its cgroup: what could not is in use by somebody unknown.
    fn note_mapped(&mut self, pid: u32, used: Vec<(SuperblockId, ObjectId)>) -> Result<(), String> {
        let cgroup = match self.cgroup_of(pid) {
            Err(error) if processes::has_ended(&error) => return Ok(()),
            Err(error) => Err(format!("its cgroup: {error}")),
            Ok(None) => Err("there is no room for the path of its cgroup".to_owned()),
            Ok(Some(cgroup)) => Ok(cgroup),
        };
        if let Ok(cgroup) = cgroup {
            self.learn_root(pid, cgroup);
        }
        let mut fits = true;
        for (mount, object) in used {
            if !cgroup.as_ref().is_ok_and(|cgroup| self.note_use(mount, *cgroup, object)) {
                self.note_unknown_use(mount, object);
                fits = false;
            }
        }
        cgroup?;
        fits.then_some(()).ok_or_else(|| "there is no room for all that it uses".to_owned())
    }

    /// Notes a use, unless it is a new one and there is no room for it. Says whether it is noted.
    pub(super) fn note_use(
        &mut self,
        mount: SuperblockId,
        cgroup: CgroupId,
        object: ObjectId,
    ) -> bool {
        self.pressure.note_use(object);
        let now = self.now();
        if self.usage.touch_listed(mount, cgroup, object, now).is_some() {
            return true;
        }
        // What removals have left free is held until most of it is.
        let is_held = self.usage.memory_bytes() as u64 >= self.usage_room();
        if is_held && !self.usage.has_free_place(mount, cgroup) {
            return false;
        }
        let before = self.usage.count().bytes_max();
        if !self.has_room(cgroup, before) {
            return false;
        }
        self.usage.touch(mount, cgroup, object, now);
        if let Some(shares) = &mut self.usage_shares {
            let bytes = self.usage.count().bytes_max() - before;
            self.cgroups.path(cgroup).into_iter().for_each(|path| shares.add(path, bytes));
        }
        true
    }

    /// Bytes that the lists may take beside the objects that somebody unknown opened.
    fn usage_room(&self) -> u64 {
        self.usage_bytes_max.saturating_sub(self.opened.unknown_bytes() as u64)
    }

    /// Whether a cgroup may hold more of the lists, which take so many bytes.
    fn has_room(&mut self, cgroup: CgroupId, bytes: u64) -> bool {
        let bytes_max = self.usage_room();
        if bytes < bytes_max / 2 {
            return true;
        }
        let Self { cgroups, usage, usage_shares, .. } = self;
        let held = |(id, path)| (path, usage.count_of_cgroup(id).bytes_max());
        let shares = usage_shares.get_or_insert_with(|| cgroups.numbered().map(held).collect());
        let path = cgroups.path(cgroup).unwrap_or_default();
        bytes < bytes_max && shares.have_room(path, bytes_max)
    }

    /// The cgroup of a process. `None` if there is no room for it.
    ///
    /// # Errors
    /// `NotFound` if the process has ended; those of looking at it and at the cgroup.
    pub(super) fn cgroup_of(&mut self, pid: u32) -> io::Result<Option<CgroupId>> {
        let version = self.hierarchy.as_ref().map_or(Version::V2, Hierarchy::version);
        let path = cgroup::of_process(&self.root, pid, version)?;
        self.number_cgroup(path.as_deref().unwrap_or("/"))
    }

    /// The number of a cgroup. `None` if there is no room for it.
    ///
    /// # Errors
    /// Those of looking at the cgroup.
    pub(super) fn number_cgroup(&mut self, path: &str) -> io::Result<Option<CgroupId>> {
        let inode = self.hierarchy.as_ref().ok().map(|it| cgroup_ids::inode(it, path));
        let inode = inode.transpose()?.flatten();
        Ok(self.cgroups.number(path, inode))
    }

    /// Takes up mounts that came, as far as the budget goes. Then takes note of the files that were
    /// opened: at most as many as the kernel's queue holds by default, since others may be opened as
    /// fast as these are read. What is left when the budget is spent stays in the queue. Once that is
    /// empty, drops the mounts that went.
    ///
    /// # Errors
    /// [`LedgerError::Io`] if the queue cannot be read.
    pub fn take_opens(&mut self, budget: &Budget) -> Result<()> {
        let is_empty = self.take_events(budget)?;
        if std::mem::take(&mut self.has_lost_mounts) {
            // Now that the queue has been read: this drops the mounts that went. A directory that cannot
            // be listed is reported by the next refresh.
            let _ = self.take_up(budget);
            self.note_missed_opens();
        } else if is_empty {
            let changes = self.superblocks.drop_gone(&self.run);
            self.forget_mounts(&changes);
        }
        Ok(())
    }

    /// Once the slice of processor time is spent, takes events and begins another slice: for long
    /// work between its steps. Unlike [`Ledger::take_opens`] it forgets no image, so objects keep
    /// their numbers. An error comes again there.
    pub(super) fn take_events_between(&mut self, slice: &mut Budget) {
        if slice.is_spent() {
            let _ = self.take_events(&Budget::of(SLICE));
            *slice = Budget::of(SLICE);
        }
    }

    /// Takes up mounts that came, and notes opened files. Says whether none are left.
    fn take_events(&mut self, budget: &Budget) -> Result<bool> {
        if self.opens().is_none() {
            return Ok(true);
        }
        self.has_lost_mounts |= self.take_mounts(budget);
        self.take_opened(budget)
    }

    /// Says whether the kernel has dropped events of mounts.
    fn take_mounts(&mut self, budget: &Budget) -> bool {
        let mut has_overflowed = false;
        while let Some(news) = self.mount_events.as_ref().and_then(MountEvents::read) {
            let changes = self.superblocks.follow(news.ids, &self.run, &self.index);
            self.forget_mounts(&changes);
            has_overflowed |= news.has_overflowed;
            self.opened.mark_new(&mut self.superblocks, &self.root);
            if budget.is_spent() {
                break;
            }
        }
        has_overflowed
    }

    /// Says whether the queue is empty.
    fn take_opened(&mut self, budget: &Budget) -> Result<bool> {
        let own = std::process::id();
        // A process opens many files in a row.
        let mut openers: HashMap<u32, Opener> = HashMap::new();
        let mut taken = 0;
        loop {
            let events = self.opened.read().map_err(LedgerError::io("fanotify"))?;
            if events.is_empty() {
                return Ok(true);
            }
            taken += events.len();
            for event in events {
                let (file, pid) = match event {
                    Event::Opened { pid, .. } if pid == own => continue,
                    Event::Opened { file, pid } => (File::from(file), pid),
                    // The opener has a lease on it, and uses the file alone.
                    Event::Unreadable(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        self.opened.count.files += 1;
                        continue;
                    }
                    Event::Unreadable(_) => {
                        self.opened.count.files += 1;
                        self.note_missed_opens();
                        continue;
                    }
                    Event::Overflow => {
                        self.opened.count.overflows += 1;
                        self.note_missed_opens();
                        continue;
                    }
                };
                let mask = StatxFlags::BASIC_STATS | UNIQUE_ID;
                let Ok(found) =
                    statx(&file, "", AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC, mask)
                else {
                    self.opened.count.files += 1;
                    self.note_missed_opens();
                    continue;
                };
                if !FileType::from_raw_mode(found.stx_mode.into()).is_file() {
                    continue;
                }
                let link = || fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).ok();
                let opened = self.superblocks.opened(Found::by(&found), link, &self.index);
                let Some((mount, object)) = opened else { continue };
                let cgroup = match *openers.entry(pid).or_insert_with(|| self.opener(pid)) {
                    Opener::Ignored => continue,
                    Opener::In(cgroup) => Some(cgroup),
                    Opener::Unknown => unique_id(&found).and_then(|it| self.cgroup_of_mount(it)),
                };
                if let Some(first) = &mut self.first_opens {
                    first.note(object, cgroup.and_then(|id| self.cgroups.path(id)));
                }
                match cgroup {
                    Some(cgroup) if self.note_use(mount, cgroup, object) => {}
                    Some(_) => {
                        self.opened.count.files += 1;
                        self.note_unknown_use(mount, object);
                    }
                    None => {
                        self.opened.count.openers += 1;
                        self.note_unknown_use(mount, object);
                    }
                }
            }
            if budget.is_spent() || taken >= OPENS_MAX {
                return Ok(false);
            }
        }
    }

    /// Who a process that has opened a file is.
    fn opener(&mut self, pid: u32) -> Opener {
        let ignored = self.opened.ignored;
        if ignored.is_some() && processes::program(&self.root, pid) == ignored {
            return Opener::Ignored;
        }
        match self.cgroup_of(pid) {
            Ok(Some(cgroup)) => {
                self.learn_root(pid, cgroup);
                Opener::In(cgroup)
            }
            _ => Opener::Unknown,
        }
    }

    /// Learns from a process of which cgroup its root is.
    pub(super) fn learn_root(&mut self, pid: u32, cgroup: CgroupId) {
        if let (Some(mount), Some(path)) =
            (processes::root_mount(&self.root, pid), self.cgroups.path(cgroup))
        {
            self.opened.openers.learn(mount, path);
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
        let path = self.opened.openers.of_mount(mount)?.to_owned();
        self.number_cgroup(&path).ok()?
    }

    /// Files were opened, and nobody knows which. So nothing that a search has found is known to be
    /// unused any more.
    pub(super) fn note_missed_opens(&mut self) {
        self.opened.note_missed(self.now());
        self.pressure.note_missed_opens();
    }

    /// Somebody unknown opened or maps an object.
    pub(super) fn note_unknown_use(&mut self, mount: SuperblockId, object: ObjectId) {
        self.pressure.note_use(object);
        if !self.opened.note_unknown(mount, object, self.now()) {
            self.pressure.note_missed_opens();
        }
    }

    /// Everything at once, whatever it takes: for whoever asks one time. What cannot be listed of
    /// the store is among [`Unknown::images`](super::Unknown::images).
    ///
    /// # Errors
    /// Those of [`Ledger::sample_processes`]; [`LedgerError::Cancelled`].
    pub fn sample_all(&mut self) -> Result<()> {
        // A file that was opened keeps its mount busy until it is taken out of the queue.
        let slice = || Budget::of(SLICE);
        let mut known = None;
        // A refresh drops the mounts that went.
        self.take_opens(&Budget::UNLIMITED)?;
        // Until no image is new: those that cannot be read are tried again and again.
        while !self.take_up(&Budget::of(REFRESH_SLICE)).0
            && known.replace(self.index.known_images()) != Some(self.index.known_images())
        {
            self.check()?;
        }
        self.take_opens(&Budget::UNLIMITED)?;
        self.round.clear();
        self.index.start_over();
        self.check()?;
        while !self.sample_processes(&slice())? {
            self.check()?;
            self.take_opens(&slice())?;
        }
        // Last: a page that a process has just brought in has to be counted.
        while !self.sample_residency(&slice()) {
            self.check()?;
            self.take_opens(&slice())?;
        }
        Ok(())
    }

    fn check(&self) -> Result<()> {
        if self.cancel.is_cancelled() { Err(LedgerError::Cancelled) } else { Ok(()) }
    }

    /// What the usage lists take.
    pub fn usage_cost(&self) -> UsageCost {
        let count = self.usage.count();
        UsageCost {
            bytes: self.usage.memory_bytes() as u64,
            lists: count.lists as u64,
            entries: count.entries as u64,
        }
    }

    /// The cgroup of a container of `cofolio run`.
    pub(super) fn cgroup_of_container(&self, name: &str) -> String {
        format!("/cofolio/{name}-{}", self.run.tag())
    }

    /// The container of `cofolio run` whose cgroup this is, or is in.
    pub(super) fn name_of(&self, cgroup: &str) -> Option<String> {
        let name = cgroup.strip_prefix("/cofolio/")?.split('/').next()?;
        name.strip_suffix(&self.run.tag())?.strip_suffix('-').map(str::to_owned)
    }
}

#[cfg(test)]
mod tests {
    use cofolio_store::InitOptions;

    use super::*;

    /// A ledger whose lists may take a mebibyte.
    fn small() -> (tempfile::TempDir, Ledger) {
        let root = tempfile::tempdir().unwrap();
        let store = Store::init(&root.path().join("store"), &InitOptions::default()).unwrap();
        let mut ledger = Ledger::new(store, RunDir::at(root.path().join("run")));
        ledger.usage_bytes_max = 1 << 20;
        (root, ledger)
    }

    /// Only used entries counted. A part of the lists gives memory back when three quarters of it
    /// are free, so what was removed there made room for as much elsewhere, and all of it was held.
    #[test]
    fn the_limit_of_the_usage_lists_holds_while_uses_come_and_go() {
        let (_root, mut ledger) = small();
        let cgroup = ledger.cgroups.number("/", None).unwrap();
        for mount in 0..16 {
            let fill = |ledger: &mut Ledger| {
                let notes = |it: &u32| ledger.note_use(SuperblockId(mount), cgroup, ObjectId(*it));
                (0..1 << 20).take_while(notes).count()
            };
            fill(&mut ledger);
            // A table may have doubled.
            let bytes = ledger.usage.memory_bytes();
            assert!(bytes < (1 << 20) * 5 / 4, "{mount}: {bytes}");
            ledger.usage.retain(|it| it.object.0 % 10 < 3);
        }
        // What is free there is room, though it is held.
        assert!(ledger.usage.memory_bytes() >= 1 << 20);
        assert!(ledger.note_use(SuperblockId(0), cgroup, ObjectId(u32::MAX)));
        ledger.usage.retain(|_| false);
        assert_eq!(ledger.usage.memory_bytes(), 0);
    }

    /// What a process mapped was in nobody's use if its cgroup could not be read or there was no room
    /// for the use, and was dropped as another container's own.
    #[test]
    fn mapped_objects_that_cannot_be_noted_are_in_use_by_somebody_unknown() {
        let (root, mut ledger) = small();
        ledger.root = root.path().to_owned();
        let unknown = |ledger: &mut Ledger, object, pid| {
            let noted = ledger.note_mapped(pid, vec![(SuperblockId(0), ObjectId(object))]);
            let mut uses = ledger.opened.unknown_uses(ledger.now());
            (noted.is_ok(), uses.any(|(used, _)| used == ObjectId(object)))
        };
        let plant = |pid: u32| {
            let process = processes::directory(root.path(), pid);
            fs::create_dir_all(&process).unwrap();
            fs::write(process.join("stat"), "1 (a) S 0 0 0 0 0 0\n").unwrap();
            process.join("cgroup")
        };
        fs::write(plant(1), "1:memory:/\n0::/\n").unwrap();
        assert_eq!(unknown(&mut ledger, 1, 1), (true, false));
        // A directory cannot be read.
        fs::create_dir(plant(2)).unwrap();
        assert_eq!(unknown(&mut ledger, 2, 2), (false, true));
        assert_eq!(unknown(&mut ledger, 3, 3), (true, false), "it has ended");
        ledger.usage_bytes_max = 0;
        assert_eq!(unknown(&mut ledger, 4, 1), (false, true));
    }

    /// In a PID namespace there were no containers, nothing was unknown, and the pages that hidden
    /// processes used were anybody's to drop.
    #[test]
    fn hidden_processes_may_use_everything() {
        let (root, mut ledger) = small();
        ledger.root = root.path().to_owned();
        fs::create_dir(root.path().join("proc")).unwrap();
        assert!(ledger.sample_processes(&Budget::UNLIMITED).unwrap());
        assert_eq!(ledger.unread_processes.why, [HIDDEN]);
        assert!(ledger.opened.missed(ledger.now()).is_some());
    }

    /// A machine without room for another inotify instance missed opens on new mounts, and nothing
    /// said so.
    #[test]
    fn mounts_that_cannot_be_watched_are_said() {
        let (root, mut ledger) = small();
        ledger.watch_mounts();
        assert_eq!(ledger.report().unwrap().warnings, [""; 0], "there is no mount yet");
        fs::create_dir(root.path().join("run")).unwrap();
        let records = root.path().join("run/mounts");
        fs::write(&records, "").unwrap();
        ledger.watch_mounts();
        let warnings = ledger.report().unwrap().warnings;
        assert!(warnings.len() == 1 && warnings[0].contains("Not a directory"), "{warnings:?}");
        fs::remove_file(&records).unwrap();
        fs::create_dir(&records).unwrap();
        ledger.watch_mounts();
        assert_eq!(ledger.report().unwrap().warnings, [""; 0]);
        assert!(ledger.mount_events().is_some());
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
            usage_bytes_max(root.path(), Some(&hierarchy))
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
