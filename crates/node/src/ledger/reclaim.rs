//! Reclaim: drops pages of objects that one container, image or trust domain alone uses, the least
//! recently used objects first.
//!
//! ```text
//!   target ──▶ objects of it, by their last use ──▶ of each: process_madvise where it is mapped,
//!              (what others use only if asked)               fadvise, cachestat before and after
//! ```
//!
//! fadvise leaves mapped pages alone, so they are taken from the processes that map them first. The
//! kernel does that only for pages that a single process maps. Pages that a process wrote in a
//! private mapping are its own, and stay. What is freed is measured and not computed: whoever reads
//! an object meanwhile brings its pages back.

use std::collections::{HashMap, HashSet};
use std::io;
use std::iter;
use std::ops::Range;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use cofolio_store::Digest;
use cofolio_store::task::Cancel;
use cofolio_sys::cache::{self, FileMap};
use cofolio_sys::pagemap;
use rustix::fs::{Advice, fadvise};
use serde::{Deserialize, Serialize};

use super::events::{Events, SLICE};
use super::index::Object;
use super::owners::{Groups, Owners};
use super::pagemap::page_out;
use super::state::State;
use super::unused::{OtherUser, UsesSince};
use super::usage::{CgroupId, ObjectId, Usage};
use super::{Budget, LedgerError, Result, UsedImage};
use crate::address_space::is_unanswered;
use crate::processes;

/// Whose objects are dropped.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReclaimTarget {
    /// A container by its name (`cofolio run`), or any by the path of its memory cgroup, which
    /// begins with `/`. Cgroups below it count as the same container.
    Container(String),
    /// An image.
    Image(UsedImage),
    /// A trust domain.
    Domain(String),
}

/// What to drop.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReclaimRequest {
    /// Whose.
    pub target: ReclaimTarget,
    /// How much; all of it if nothing is named.
    #[serde(default)]
    pub bytes: Option<u64>,
    /// Also what other containers use, or other images name.
    #[serde(default)]
    pub shared: bool,
    /// Only say what would be dropped.
    #[serde(default)]
    pub dry_run: bool,
}

/// What was dropped. Sizes are bytes of the page cache.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reclaimed {
    /// Whether nothing was dropped, as asked.
    pub dry_run: bool,
    /// Objects that were tried, or would be.
    pub objects: u64,
    /// What was resident of them before.
    pub resident_bytes: u64,
    /// What went.
    pub freed_bytes: u64,
    /// What stayed resident of them: locked, mapped by several processes, or read again.
    pub kept_bytes: u64,
    /// Resident objects of the target that were left alone because others use them.
    pub shared_objects: u64,
    /// What is resident of those.
    pub shared_bytes: u64,
    /// Those of [`shared_objects`](Self::shared_objects) of which nobody knows whether others use
    /// them: in the last hour somebody unknown used them, or opened files were missed.
    #[serde(default)]
    pub unsure_objects: u64,
    /// Processes that may map more of these objects than was looked at. What they map counts as
    /// kept.
    #[serde(default)]
    pub unread_processes: u64,
}

/// A target whose names were looked up.
#[derive(Debug)]
pub(super) enum Scope {
    /// Path of the topmost cgroup, and the numbers of those below it.
    Cgroups(String, HashSet<CgroupId>),
    Image(u16, Digest),
    Domain(u16),
    /// Everything that one container uses at most.
    Machine,
}

/// Objects that may go, and those that others use; of each kind the least recently used first.
#[derive(Debug, Default)]
pub(super) struct Candidates {
    pub(super) objects: Vec<ObjectId>,
    pub(super) shared: Vec<ObjectId>,
    /// Of how many of `shared` nobody knows whether others use them.
    pub(super) unsure: u64,
}

impl Candidates {
    fn new(
        objects: Vec<ObjectId>,
        is_shared: impl Fn(ObjectId) -> bool,
        is_unsure: impl Fn(ObjectId) -> bool,
    ) -> Self {
        let mut unsure = 0;
        let (shared, objects) = objects.into_iter().partition(|id| {
            let (is_shared, is_unsure) = (is_shared(*id), is_unsure(*id));
            unsure += u64::from(is_unsure && !is_shared);
            is_unsure || is_shared
        });
        Self { objects, shared, unsure }
    }

    /// Others share an object if they use it.
    fn owned(objects: Vec<ObjectId>, owners: &Owners<'_>) -> Self {
        Self::new(objects, |id| owners.of(id).is_shared(), |id| owners.of(id).is_unsure)
    }
}

/// Where processes map objects.
#[derive(Debug, Default)]
pub(super) struct Mappings {
    pub(super) by_object: HashMap<ObjectId, Vec<(u32, Range<u64>)>>,
    /// Processes that were not looked at in whole.
    pub(super) unread: u64,
}

/// Steps for all processes together; [`Superblocks`](super::superblocks::Superblocks) has a limit
/// for each. A step is a mapping, or [`pagemap::STEP`] pages of a larger one. So the mappings that
/// are kept take 24 MiB, and up to twice that in memory that is reserved.
const STEPS_OF_A_RECLAIM: u32 = 1 << 20;

/// Drops pages, and takes events meanwhile.
#[derive(Debug)]
pub(super) struct Reclaim<'l> {
    pub(super) state: &'l mut State,
    pub(super) events: &'l mut Events,
    pub(super) cancel: &'l Cancel,
}

impl Reclaim<'_> {
    /// See [`Ledger::reclaim`](super::Ledger::reclaim).
    pub(super) fn reclaim(&mut self, request: &ReclaimRequest) -> Result<Reclaimed> {
        let scope = scope(self.state, &request.target)?;
        let Candidates { mut objects, shared, unsure } = candidates(self.state, &scope);
        let mut reclaimed = Reclaimed { dry_run: request.dry_run, ..Reclaimed::default() };
        if request.shared {
            objects.extend(shared);
        } else {
            reclaimed.shared_objects = shared.len() as u64;
            reclaimed.unsure_objects = unsure;
            reclaimed.shared_bytes =
                shared.iter().map(|id| self.state.index.resident_bytes(*id)).sum();
        }
        let bytes = request.bytes.unwrap_or(u64::MAX);
        if request.dry_run {
            for id in objects {
                if reclaimed.resident_bytes >= bytes {
                    break;
                }
                reclaimed.objects += 1;
                reclaimed.resident_bytes += self.state.index.resident_bytes(id);
            }
            return Ok(reclaimed);
        }
        if let (Scope::Cgroups(_, cgroups), false) = (&scope, request.shared) {
            self.state.since = Some(UsesSince::new(cgroups.clone()));
        }
        let mappings = self.mappings(&scope, request.shared, &objects);
        reclaimed.unread_processes = mappings.unread;
        // An error comes again in the next round.
        let _ = self.events.drain(self.state, &Budget::of(SLICE));
        self.drop_objects(&objects, bytes, &mappings, &mut reclaimed);
        self.state.since = None;
        Ok(reclaimed)
    }

    /// Where processes map these objects: those of the scope, or if others may, all.
    pub(super) fn mappings(
        &mut self,
        scope: &Scope,
        with_others: bool,
        objects: &[ObjectId],
    ) -> Mappings {
        let wanted: HashSet<ObjectId> = objects.iter().copied().collect();
        let mut slice = Budget::of(SLICE);
        let pids = match (scope, self.state.hierarchy.as_ref().ok().cloned()) {
            (Scope::Cgroups(path, _), Some(hierarchy)) if !with_others => hierarchy
                .processes(path, || self.events.drain_between(self.state, &mut slice))
                .or_else(|_| processes::all(&self.state.root)),
            _ => processes::all(&self.state.root),
        };
        // If none can be listed, nobody knows how many there are: at least one.
        let (unread, pids) = (u64::from(pids.is_err()), pids.unwrap_or_default());
        let (mut found, mut steps_left) =
            (Mappings { unread, ..Mappings::default() }, STEPS_OF_A_RECLAIM);
        for pid in pids {
            if self.cancel.is_cancelled() {
                break;
            }
            self.events.drain_between(self.state, &mut slice);
            if !self.add_mappings(pid, &wanted, &mut found, &mut steps_left) {
                slice = Budget::of(Duration::ZERO);
            }
        }
        found
    }

    /// Adds where one process maps these objects. Says whether it has answered.
    fn add_mappings(
        &mut self,
        pid: u32,
        wanted: &HashSet<ObjectId>,
        found: &mut Mappings,
        steps_left: &mut u32,
    ) -> bool {
        let State { superblocks, index, root, .. } = &mut *self.state;
        let pid = processes::live_thread(root, pid);
        let mut fits = true;
        let read = processes::mappings(&processes::directory(root, pid), |mapping| {
            let object = superblocks.mapped(root, pid, &mapping, index).map(|(_, it)| it);
            let Some(object) = object.filter(|it| wanted.contains(it)) else { return };
            let size = index.object(object).map_or(0, |it| it.size);
            let Some(addresses) = mapping.addresses(size).filter(|it| !it.is_empty()) else {
                return;
            };
            let pages = (addresses.end - addresses.start).div_ceil(cache::page_size());
            let steps = u32::try_from(pages.div_ceil(pagemap::STEP)).unwrap_or(u32::MAX);
            let left = steps_left.checked_sub(steps).filter(|_| fits);
            let Some(left) = left.filter(|_| superblocks.spend(steps).is_some()) else {
                fits = false;
                return;
            };
            *steps_left = left;
            found.by_object.entry(object).or_default().push((pid, addresses));
        });
        let has_answered = !read.as_ref().is_err_and(is_unanswered);
        let is_whole = superblocks.end_look(root, pid).is_none() && read.unwrap_or(false) && fits;
        found.unread += u64::from(!is_whole && processes::directory(root, pid).exists());
        has_answered
    }

    /// Drops objects in this order until so many bytes are free.
    fn drop_objects(
        &mut self,
        objects: &[ObjectId],
        bytes: u64,
        mappings: &Mappings,
        reclaimed: &mut Reclaimed,
    ) {
        let (mut slice, mut unanswered) = (Budget::of(SLICE), HashSet::new());
        for id in objects {
            if reclaimed.freed_bytes >= bytes || self.cancel.is_cancelled() {
                break;
            }
            self.events.drain_between(self.state, &mut slice);
            if let Some(user) = self.state.since.as_ref().and_then(|since| since.other_user(*id)) {
                reclaimed.shared_objects += 1;
                reclaimed.shared_bytes += self.state.index.resident_bytes(*id);
                reclaimed.unsure_objects += u64::from(user == OtherUser::Unsure);
                continue;
            }
            let mapped = mappings.by_object.get(id).map_or(&[][..], Vec::as_slice);
            let (before, after) = match self.drop_object(*id, mapped, &mut unanswered) {
                Ok((before, after)) => {
                    let now = self.state.now();
                    self.state.index.set_resident(*id, after, now);
                    (before, after)
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                // For want of descriptors, for one.
                Err(_) => {
                    let known =
                        self.state.index.object(*id).map_or(0, |it| it.resident_pages.into());
                    (known, known)
                }
            };
            let page = cache::page_size();
            reclaimed.objects += 1;
            reclaimed.resident_bytes += before * page;
            reclaimed.freed_bytes += before.saturating_sub(after) * page;
            reclaimed.kept_bytes += after * page;
        }
        reclaimed.unread_processes += unanswered.len() as u64;
    }

    /// Drops one object but for what processes map.
    pub(super) fn drop_unmapped(&mut self, id: ObjectId) -> Reclaimed {
        let mut reclaimed = Reclaimed::default();
        self.drop_objects(&[id], u64::MAX, &Mappings::default(), &mut reclaimed);
        reclaimed
    }

    /// Drops one object. Gives its resident pages before and after, and adds the processes that do
    /// not answer.
    ///
    /// # Errors
    /// `NotFound` for one that was removed; those of opening it, and of asking for its pages.
    fn drop_object(
        &self,
        id: ObjectId,
        mapped: &[(u32, Range<u64>)],
        unanswered: &mut HashSet<u32>,
    ) -> io::Result<(u64, u64)> {
        let missing = || io::Error::from(io::ErrorKind::NotFound);
        let object = self.state.index.object(id).ok_or_else(missing)?;
        let domain = self.state.index.domains().get(object.domain as usize).ok_or_else(missing)?;
        let page_file = self.state.page_files.get(&id);
        let path = page_file.cloned().or_else(|| domain.domain.object_path(&object.digest));
        let file = cache::open(&path.ok_or_else(missing)?)?;
        let pages = || match page_file {
            Some(_) => FileMap::new(&file, object.size)?.resident_pages(),
            None => cache::resident_pages(&file, object.size),
        };
        let before = pages()?;
        let mut drop_pages = || {
            for of_process in mapped.chunk_by(|(a, _), (b, _)| a == b) {
                if self.cancel.is_cancelled() {
                    break;
                }
                for (pid, addresses) in of_process {
                    let process = processes::directory(&self.state.root, *pid);
                    let paged_out = page_out(&process, *pid, addresses.clone());
                    if paged_out.is_err_and(|error| is_unanswered(&error)) {
                        unanswered.insert(*pid);
                        break;
                    }
                }
            }
            let _ = fadvise(&file, 0, None, Advice::DontNeed);
            pages()
        };
        let mut after = drop_pages()?;
        // Pages that came in on another processor can be in a batch of that processor, where
        // process_madvise does not find them. fadvise has the batches emptied when pages stay.
        if after > 0 && !mapped.is_empty() {
            after = drop_pages()?;
        }
        Ok((before, after))
    }
}

fn scope(state: &State, target: &ReclaimTarget) -> Result<Scope> {
    let domain = |name: &str| {
        let missing = || LedgerError::NotFound { what: format!("trust domain {name}") };
        state.index.find_domain(name)?.ok_or_else(missing)
    };
    match target {
        ReclaimTarget::Domain(name) => domain(name).map(Scope::Domain),
        ReclaimTarget::Image(UsedImage { domain: name, image }) => {
            let number = domain(name)?;
            match state.index.has_image(number, image)? {
                true => Ok(Scope::Image(number, *image)),
                false => Err(LedgerError::NotFound {
                    what: format!("image {image} in trust domain {name}"),
                }),
            }
        }
        ReclaimTarget::Container(name) => {
            let path = match name.starts_with('/') {
                // One path of several for the same cgroup.
                true => Path::new(name).components().collect::<PathBuf>(),
                false => state.cgroup_of_container(name).into(),
            };
            let path = path.to_string_lossy().into_owned();
            let cgroups: HashSet<CgroupId> = state.cgroups.below(&path).collect();
            let exists = || {
                let hierarchy = state.hierarchy.as_ref().ok();
                let directory = hierarchy.and_then(|it| it.directory(&path).ok());
                directory.is_some_and(|it| it.join("cgroup.procs").exists())
            };
            // Who asks need not be root, and nothing outside of the hierarchy is to be opened.
            let leads_out = Path::new(&path).components().any(|it| it == Component::ParentDir);
            if leads_out || (cgroups.is_empty() && !exists()) {
                let what = format!("container {name} (memory cgroup {path})");
                return Err(LedgerError::NotFound { what });
            }
            Ok(Scope::Cgroups(path, cgroups))
        }
    }
}

/// The objects of a scope.
pub(super) fn candidates(state: &State, scope: &Scope) -> Candidates {
    let owners = |groups| state.owners(&groups, |usage| state.is_of_resident(usage));
    match scope {
        Scope::Cgroups(_, cgroups) => {
            let (objects, ours) = used_in(state, cgroups);
            let group = Groups::new(cgroups.iter().map(|it| (*it, 0)), iter::empty());
            let is_ours = |it: &Usage| ours.contains(&it.object) && state.is_of_resident(it);
            Candidates::owned(objects, &state.owners(&group, is_ours))
        }
        Scope::Image(domain, image) => {
            let image = state.index.domains()[*domain as usize].images.get(image);
            let objects = image.iter().flat_map(|image| &image.objects).copied();
            let objects = by_last_use(state, objects, &owners(Groups::default()));
            let is_shared = |id| state.index.object(id).is_some_and(Object::is_shared);
            Candidates::new(objects, is_shared, |_| false)
        }
        Scope::Domain(domain) => {
            let objects = state.index.numbered().filter(|(_, it)| it.domain == *domain);
            let objects = objects.map(|(id, _)| id);
            let objects = by_last_use(state, objects, &owners(Groups::default()));
            Candidates { objects, ..Candidates::default() }
        }
        Scope::Machine => {
            let each = state.cgroups.numbered().map(|(id, _)| (id, id.0));
            let owners = owners(Groups::new(each, iter::empty()));
            let objects = state.index.numbered().map(|(id, _)| id);
            Candidates::owned(by_last_use(state, objects, &owners), &owners)
        }
    }
}

/// The objects that the lists of these cgroups hold, by their last use there.
fn used_in(state: &State, cgroups: &HashSet<CgroupId>) -> (Vec<ObjectId>, HashSet<ObjectId>) {
    let mut uses = Vec::new();
    for cgroup in cgroups {
        state.uses.for_each_of_cgroup(*cgroup, |usage| {
            if state.is_of_resident(&usage) {
                uses.push((usage.time, usage.object));
            }
        });
    }
    // Each list is in order of time already, so this merges more than it sorts.
    uses.sort();
    // An object is in several lists if it was used through several mounts; its last use counts.
    let mut once = HashSet::new();
    let last = uses.into_iter().rev().map(|(_, object)| object).filter(|it| once.insert(*it));
    let mut objects: Vec<_> = last.collect();
    objects.reverse();
    (objects, once)
}

/// Those of some objects that are resident, by their last use in any cgroup.
fn by_last_use(
    state: &State,
    objects: impl Iterator<Item = ObjectId>,
    owners: &Owners<'_>,
) -> Vec<ObjectId> {
    let mut objects: Vec<_> = objects.filter(|id| state.index.resident_bytes(*id) > 0).collect();
    objects.sort_by_cached_key(|id| (owners.of(*id).last_use, *id));
    objects
}

#[cfg(test)]
mod tests {
    use std::fs;

    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::super::{Ledger, of_an_empty_machine};
    use super::*;
    use crate::cgroup::{Hierarchy, Version};

    /// If the processes of a cgroup could not be listed, it had none: a reclaim said that all were
    /// looked at, and that what they map was locked or read again.
    #[test]
    fn processes_that_cannot_be_listed_are_unread() {
        let (root, mut ledger) = of_an_empty_machine();
        ledger.state.hierarchy = Ok(Hierarchy::at(Version::V2, &root.path().join("cgroup")));
        // A directory cannot be read, like that file of a threaded cgroup.
        fs::create_dir_all(root.path().join("cgroup/threaded/cgroup.procs")).unwrap();
        let mut unread = |cgroup: &str| {
            let scope = Scope::Cgroups(cgroup.to_owned(), HashSet::new());
            ledger.reclaimer().mappings(&scope, false, &[ObjectId(0)]).unread
        };
        assert_eq!(unread("/removed"), 0);
        assert_eq!(unread("/threaded"), 1);
        // All processes are looked at instead. These cannot be.
        for pid in [1, 2] {
            fs::create_dir_all(processes::directory(root.path(), pid)).unwrap();
        }
        assert_eq!(unread("/threaded"), 2);
        assert_eq!(unread("/removed"), 0);
    }

    /// The daemon read no events while it reclaimed a trust domain, for as long as that took. Files
    /// that were opened kept their mounts busy meanwhile, and what did not fit into the queue was
    /// lost.
    #[test]
    fn events_are_taken_between_the_steps_of_a_reclaim() {
        let (root, mut ledger) = of_an_empty_machine();
        if let Err(reason) = ledger.watch_opens() {
            let test = "events_are_taken_between_the_steps_of_a_reclaim";
            return eprintln!("SKIP {test}: {reason}");
        }
        let record = root.path().join("run/mounts/any.json");
        let aside = root.path().join("run/attached/any.7f");
        let event = || {
            fs::write(&aside, "").unwrap();
            fs::rename(&aside, &record).unwrap();
        };
        let is_taken = |ledger: &Ledger| {
            let events = ledger.mount_events().unwrap();
            let mut events = [PollFd::from_borrowed_fd(events, PollFlags::IN)];
            poll(&mut events, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() == 0
        };
        // Each step takes several slices of processor time.
        for pid in 1..=4 {
            let process = processes::directory(root.path(), pid);
            fs::create_dir_all(&process).unwrap();
            fs::write(process.join("maps"), "\n".repeat(4 << 20)).unwrap();
        }
        let objects = vec![ObjectId(0); 1 << 20];
        event();
        assert!(!is_taken(&ledger));
        let mappings = ledger.reclaimer().mappings(&Scope::Machine, true, &objects);
        assert!(is_taken(&ledger));
        // A container makes cgroups that no process is in.
        ledger.state.hierarchy = Ok(Hierarchy::at(Version::V2, &root.path().join("cgroup")));
        for cgroup in 0..5000 {
            let cgroup = root.path().join(format!("cgroup/pod/{cgroup}"));
            fs::create_dir_all(&cgroup).unwrap();
            fs::write(cgroup.join("cgroup.procs"), "").unwrap();
        }
        fs::write(root.path().join("cgroup/pod/cgroup.procs"), "").unwrap();
        event();
        assert!(!is_taken(&ledger));
        let of_pod = Scope::Cgroups("/pod".to_owned(), HashSet::new());
        assert_eq!(ledger.reclaimer().mappings(&of_pod, false, &objects).unread, 0);
        assert!(is_taken(&ledger));
        event();
        assert!(!is_taken(&ledger));
        ledger.reclaimer().drop_objects(&objects, u64::MAX, &mappings, &mut Reclaimed::default());
        assert!(is_taken(&ledger));
    }
}
