//! [`State`]: what the ledger knows. Events and looks bring it up to date, and reports, answers,
//! reclaim and the policy read it.

use std::collections::{HashMap, HashSet};
use std::io;
use std::path::PathBuf;
use std::time::Instant;

use cofolio_store::Store;

use super::Budget;
use super::cgroup_ids::{self, CgroupIds};
use super::index::Index;
use super::openers::Openers;
use super::superblocks::{Changes, Superblocks};
use super::unknown_users::UnknownUsers;
use super::unused::{Unused, UsesSince};
use super::usage::{CgroupId, ObjectId, SuperblockId, Usage};
use super::uses::Uses;
use crate::cgroup::{self, CgroupError, Hierarchy, Version};
use crate::processes;
use crate::run_dir::RunDir;

/// The time of the usage lists, which last for eight years of it.
pub(super) const TICKS_PER_SECOND: u32 = 16;

/// See the [module](self).
#[derive(Debug)]
pub(super) struct State {
    pub(super) run: RunDir,
    /// Where `/proc` is looked up.
    pub(super) root: PathBuf,
    /// Without one, nobody sees cgroups end, and a process counts as in its cgroup of version 2.
    pub(super) hierarchy: Result<Hierarchy, CgroupError>,
    /// Images and objects, and what of them is resident.
    pub(super) index: Index,
    pub(super) superblocks: Superblocks,
    pub(super) cgroups: CgroupIds,
    /// Who uses which object.
    pub(super) uses: Uses,
    pub(super) unknown: UnknownUsers,
    pub(super) openers: Openers,
    pub(super) unused: Unused,
    /// While a container's objects are dropped on request.
    pub(super) since: Option<UsesSince>,
    /// Files that hold the pages of objects in place of the store's, in this round.
    pub(super) page_files: HashMap<ObjectId, PathBuf>,
    started: Instant,
}

impl State {
    pub(super) fn new(store: Store, run: RunDir) -> Self {
        let root = PathBuf::from("/");
        let hierarchy = Hierarchy::find(&root);
        Self {
            run,
            uses: Uses::new(&root, hierarchy.as_ref().ok()),
            hierarchy,
            root,
            index: Index::new(store),
            superblocks: Superblocks::default(),
            cgroups: CgroupIds::default(),
            unknown: UnknownUsers::default(),
            openers: Openers::default(),
            unused: Unused::default(),
            since: None,
            page_files: HashMap::new(),
            started: Instant::now(),
        }
    }

    /// [`TICKS_PER_SECOND`] since the ledger began, from 1.
    pub(super) fn now(&self) -> u32 {
        let ticks = self.started.elapsed().as_millis() * u128::from(TICKS_PER_SECOND) / 1000;
        u32::try_from(ticks).unwrap_or(u32::MAX).saturating_add(1)
    }

    /// Adds images that came, and drops those that went, as [`Index::refresh`] does. Also gives
    /// the objects that went, whose numbers new ones may have. The usage lists need not drop these:
    /// see [`Object::absent`](super::index::Object::absent).
    pub(super) fn refresh_images(
        &mut self,
        budget: &Budget,
    ) -> (bool, Result<(), cofolio_store::Error>, HashSet<ObjectId>) {
        let (is_complete, listed) = self.index.refresh(self.now(), budget);
        let forgotten = self.index.take_forgotten();
        if !forgotten.is_empty() {
            self.page_files.retain(|id, _| !forgotten.contains(id));
            self.unused.forget(&forgotten);
            self.superblocks.forget(&forgotten);
            self.unknown.forget(&forgotten);
        }
        (is_complete, listed, forgotten)
    }

    /// Adds mounts that came, drops those that went, and looks which cgroups went.
    pub(super) fn refresh_users(&mut self) {
        let changes = self.superblocks.refresh(&self.run, &mut self.index);
        if let Ok(hierarchy) = &self.hierarchy {
            self.cgroups.find_ended(hierarchy);
        }
        self.forget_mounts(&changes);
    }

    /// Hands on the lists of cgroups that went.
    pub(super) fn reparent_ended(&mut self) {
        if let Ok(hierarchy) = &self.hierarchy {
            self.uses.reparent_ended(&mut self.cgroups, hierarchy);
        }
        self.uses.forget_shares();
    }

    pub(super) fn forget_mounts(&mut self, changes: &Changes) {
        self.note_left_behind(&changes.removed);
        for id in &changes.removed {
            self.uses.remove_mount(*id);
        }
        self.unknown.remove_mounts(&changes.removed);
    }

    /// Notes the objects of users that have gone: of cgroups that were removed, and of these
    /// mounts. To be called before their usage lists go.
    fn note_left_behind(&mut self, mounts: &[SuperblockId]) {
        let Self { unused, index, uses, cgroups, .. } = self;
        if !unused.notes_left_behind() {
            return;
        }
        // Nobody may have looked yet how much is resident of what a container used that soon ended.
        let mut note = |usage: Usage| {
            if index.counts_use(usage.object, usage.time) {
                unused.left_behind().insert(usage.object);
            }
        };
        cgroups.ended().iter().for_each(|it| uses.for_each_of_cgroup(*it, &mut note));
        mounts.iter().for_each(|it| uses.for_each_of_mount(*it, &mut note));
    }

    /// Drops uses of pages that have gone since.
    pub(super) fn forget_past_uses(&mut self) {
        let now = self.now();
        let Self { uses, unknown, index, .. } = self;
        uses.retain(|it| index.counts_use(it.object, it.time));
        unknown.retain(now, |object, time| index.counts_use(object, time));
    }

    /// Notes a use, unless it is a new one and there is no room for it. Says whether it is noted.
    pub(super) fn note_use(
        &mut self,
        mount: SuperblockId,
        cgroup: CgroupId,
        object: ObjectId,
    ) -> bool {
        self.unused.note_use(object);
        if let Some(since) = &mut self.since {
            since.note_use(cgroup, object);
        }
        let usage = Usage { mount, cgroup, object, time: self.now() };
        self.uses.note(usage, &self.cgroups, self.unknown.bytes())
    }

    /// Somebody unknown opened or maps an object.
    pub(super) fn note_unknown_use(&mut self, mount: SuperblockId, object: ObjectId) {
        self.unused.note_use(object);
        if let Some(since) = &mut self.since {
            since.note_unknown_use(object);
        }
        if !self.unknown.note(mount, object, self.now()) {
            self.unused.note_missed_opens();
        }
    }

    /// Files were opened, and nobody knows which.
    pub(super) fn note_missed_opens(&mut self) {
        self.unknown.note_missed(self.now());
        self.note_unseen_open();
    }

    /// A file was opened, and nobody knows which. So nothing that a search has found is known to be
    /// unused any more.
    pub(super) fn note_unseen_open(&mut self) {
        if let Some(since) = &mut self.since {
            since.note_missed_opens();
        }
        self.unused.note_missed_opens();
    }

    /// Whether there are cgroups that this process cannot look at.
    pub(super) fn has_hidden_cgroups(&self) -> bool {
        match &self.hierarchy {
            Ok(_) => !cgroup::are_all_visible(&self.root),
            Err(error) => matches!(error, CgroupError::OtherRoot { .. }),
        }
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

    /// Learns from a process of which cgroup its root is.
    pub(super) fn learn_root(&mut self, pid: u32, cgroup: CgroupId) {
        if let (Some(mount), Some(path)) =
            (processes::root_mount(&self.root, pid), self.cgroups.path(cgroup))
        {
            self.openers.learn(mount, path);
        }
    }

    /// The cgroup that opens through a mount are credited to.
    pub(super) fn cgroup_of_mount(&mut self, mount: u64) -> Option<CgroupId> {
        let path = self.openers.of_mount(mount)?.to_owned();
        self.number_cgroup(&path).ok()?
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

    /// Uses of pages that are resident now, by cgroups that exist.
    pub(super) fn for_each_use(&self, mut each: impl FnMut(Usage)) {
        self.uses.for_each(|usage| {
            if self.is_of_resident(&usage) && self.cgroups.is_user(usage.cgroup) {
                each(usage);
            }
        });
    }

    /// Whether a use is one of the pages that are resident now.
    pub(super) fn is_of_resident(&self, usage: &Usage) -> bool {
        let object = self.index.object(usage.object);
        object.is_some_and(|it| it.resident_pages > 0 && it.counts_use(usage.time))
    }
}
