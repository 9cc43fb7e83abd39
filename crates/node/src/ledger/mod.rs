//! The ledger: who uses which object, what is resident, what sharing saves.
//!
//! ```text
//!   cachestat ─────────▶ residency_looks ─┐         ┌▶ report, detail: accounts, answers
//!   /proc/PID/maps ────▶ process_looks ───┼▶ state ─┤
//!   inotify, fanotify ─▶ events ──────────┘         └▶ owners: who alone uses an object
//!                                                       ├▶ reclaim: drops pages when asked
//!                                                       └▶ pressure: drops pages by itself
//! ```
//!
//! `State` is all that is known: the index of objects and images, the superblocks, which lead
//! from files to objects, the cgroups, and the usage lists (mount × cgroup). Looks and events
//! change it. The others read it, but reclaim notes how much of an object is left, and the policy
//! notes which objects its search found.
//!
//! Looking at objects, at metadata, at processes and at new images, and taking events, end when a
//! [`Budget`] of processor time is spent and go on where they ended. On larger machines figures get
//! older; a [`Report`] gives their age. Not divided are:
//!
//! - a refresh, which lists all mounts, and images, refs and bases where they have changed, takes
//!   up an image at least, stats each known cgroup, and marks each watched superblock anew;
//! - the beginning of a round of the policy, which lists each known cgroup and up to eight above it;
//! - a look at one process and at one file, and the drop of one file from all processes that map
//!   it; a process that does not answer takes two seconds of time, though not of the processor;
//! - walks of the usage lists: for a report; for the choice of what to reclaim, one in a round for
//!   all cgroups under pressure; at the end of a round over all objects, to remove uses of pages
//!   that have gone; at its beginning, with `inode-share`, over the lists of packs;
//! - a reclaim that a client asks for: meanwhile only events are taken, and who asks something else
//!   waits;
//! - an answer: what uses an object, what images share, the files of an image, which reads all of
//!   its metadata;
//! - while the usage lists are more than half full, a count of each cgroup's share after a refresh
//!   (0.3 s for a million lists).
//!
//! Readers of kernel text take a root path, `/` on a live machine, so that tests can plant one.

mod account;
mod budget;
mod cgroup_ids;
mod charges;
mod detail;
mod error;
mod events;
mod index;
mod openers;
mod owners;
mod pagemap;
mod pressure;
mod process_looks;
mod reclaim;
mod record;
mod report;
mod residency_looks;
mod rounds;
mod shares;
mod state;
mod superblocks;
mod unknown_users;
mod unused;
pub mod usage;
mod uses;

use std::os::fd::BorrowedFd;
use std::path::Path;
use std::time::Duration;

use cofolio_store::task::Cancel;
use cofolio_store::{Digest, Store};

use self::events::{Events, SLICE};
use self::pressure::Pressure;
use self::process_looks::ProcessLooks;
use self::reclaim::Reclaim;
use self::report::Reported;
use self::residency_looks::ResidencyLooks;
use self::state::State;
use crate::cgroup::CgroupError;
use crate::run_dir::RunDir;

pub use account::{
    ContainerAccount, DomainAccount, ImageAccount, Machine, Report, Unknown, UsedImage,
};
pub use budget::{Budget, thread_time};
pub use charges::CommonsAccount;
pub use detail::{FileOrder, ImageFile, ImageFiles, ObjectUser, ResidentSharing, SharingImage};
pub use error::{LedgerError, Result};
pub use pressure::ReclaimPolicy;
pub(crate) use pressure::stalled_percent;
pub use reclaim::{ReclaimRequest, ReclaimTarget, Reclaimed};
pub(crate) use superblocks::paths_of_objects;

/// Processor time between two looks whether taking up images is cancelled. Each may list all of
/// them.
const REFRESH_SLICE: Duration = Duration::from_millis(500);

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

/// The ledger of one store.
#[derive(Debug)]
pub struct Ledger {
    state: State,
    events: Events,
    processes: ProcessLooks,
    residency: ResidencyLooks,
    pressure: Pressure,
    cancel: Cancel,
}

impl Ledger {
    /// A ledger that has seen nothing yet. `run` is the run directory of the store.
    pub fn new(store: Store, run: RunDir) -> Self {
        Self {
            state: State::new(store, run),
            events: Events::default(),
            processes: ProcessLooks::default(),
            residency: ResidencyLooks::new(),
            pressure: Pressure::default(),
            cancel: Cancel::default(),
        }
    }

    /// Takes the cgroup of that name for the commons: for tests, which make one of their own.
    #[must_use]
    pub fn with_commons(self, name: &str) -> Self {
        Self { residency: self.residency.with_commons(name), ..self }
    }

    /// Files that processes of this program open are in nobody's use: `cofolio run` looks up a user
    /// in the root of a container that it is to start.
    #[must_use]
    pub fn ignoring_opens_of(mut self, program: &Path) -> Self {
        self.events.ignore(program);
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
        self.state.hierarchy.as_ref().err()
    }

    /// From now on notes who opens files on mounted images.
    ///
    /// # Errors
    /// [`LedgerError::Io`] where the kernel or the lack of privileges does not allow it.
    pub fn watch_opens(&mut self) -> Result<()> {
        self.events.watch(&mut self.state)
    }

    /// Drops the queue of opened files, and notes none until [`Ledger::watch_opens`]. For a caller
    /// that has no time for them: in the queue they would keep their mounts busy.
    pub fn unwatch_opens(&mut self) {
        self.events.unwatch_opens(&mut self.state);
    }

    /// Becomes readable when [`Ledger::drain_opens`] has something to do.
    pub fn opens(&self) -> Option<BorrowedFd<'_>> {
        self.events.opens()
    }

    /// Becomes readable when there are mounts for [`Ledger::drain_opens`] to add.
    pub fn mount_events(&self) -> Option<BorrowedFd<'_>> {
        self.events.mounts()
    }

    /// Adds mounts that came, as far as the budget goes. Then takes note of the files that were
    /// opened: at most as many as the kernel's queue holds by default, since others may be opened
    /// as fast as these are read. What is left when the budget is spent stays in the queue. Once
    /// that is empty, drops the mounts that went.
    ///
    /// # Errors
    /// [`LedgerError::Io`] if the queue cannot be read.
    pub fn drain_opens(&mut self, budget: &Budget) -> Result<()> {
        let is_empty = self.events.drain(&mut self.state, budget)?;
        if self.events.take_lost_mounts() {
            // Now that the queue has been read: this drops the mounts that went. A directory that
            // cannot be listed is reported by the next refresh.
            let _ = self.refresh_all(budget);
            self.state.note_missed_opens();
        } else if is_empty {
            let changes = self.state.superblocks.drop_gone(&self.state.run);
            self.state.forget_mounts(&changes);
        }
        Ok(())
    }

    /// Adds images and mounts that came, and drops those that went. Says whether all new images
    /// were added.
    ///
    /// # Errors
    /// [`LedgerError::Store`] where the store's directories cannot be listed, once all else is
    /// done.
    pub fn refresh(&mut self, budget: &Budget) -> Result<bool> {
        let (is_complete, listed) = self.refresh_all(budget);
        listed.map(|()| is_complete)
    }

    /// See [`Ledger::refresh`]. Also says whether all new images were added where others cannot
    /// be listed.
    fn refresh_all(&mut self, budget: &Budget) -> (bool, Result<()>) {
        let Self { state, events, .. } = self;
        let (is_complete, listed, forgotten) = state.refresh_images(budget);
        events.forget(&forgotten);
        if events.opens().is_some() {
            events.watch_mounts(state);
        }
        state.refresh_users();
        events.mark_all(state, false);
        state.reparent_ended();
        (is_complete, listed.map_err(LedgerError::from))
    }

    /// Looks what processes map. Says whether a round over all is complete.
    ///
    /// # Errors
    /// [`LedgerError::Io`] if `/proc` cannot be listed.
    pub fn sample_processes(&mut self, budget: &Budget) -> Result<bool> {
        self.processes.sample(&mut self.state, &self.events, budget)
    }

    /// Looks how much of the objects is resident. Says whether a round over all is complete.
    pub fn sample_residency(&mut self, budget: &Budget) -> bool {
        self.residency.sample(&mut self.state, budget)
    }

    /// Everything at once, whatever it takes: for whoever asks one time. What cannot be listed of
    /// the store is among [`Unknown::images`].
    ///
    /// # Errors
    /// Those of [`Ledger::sample_processes`]; [`LedgerError::Cancelled`].
    pub fn sample_all(&mut self) -> Result<()> {
        // A file that was opened keeps its mount busy until it is taken out of the queue.
        let slice = || Budget::of(SLICE);
        let mut known = None;
        // A refresh drops the mounts that went.
        self.drain_opens(&Budget::UNLIMITED)?;
        // Until no image is new: those that cannot be read are tried again and again.
        while !self.refresh_all(&Budget::of(REFRESH_SLICE)).0
            && known.replace(self.state.index.known_images())
                != Some(self.state.index.known_images())
        {
            self.check_cancelled()?;
        }
        self.drain_opens(&Budget::UNLIMITED)?;
        self.processes.start_over();
        self.residency.start_over();
        self.check_cancelled()?;
        while !self.sample_processes(&slice())? {
            self.check_cancelled()?;
            self.drain_opens(&slice())?;
        }
        // Last: a page that a process has just brought in has to be counted.
        while !self.sample_residency(&slice()) {
            self.check_cancelled()?;
            self.drain_opens(&slice())?;
        }
        Ok(())
    }

    fn check_cancelled(&self) -> Result<()> {
        if self.cancel.is_cancelled() { Err(LedgerError::Cancelled) } else { Ok(()) }
    }

    /// What the usage lists take.
    pub fn usage_cost(&self) -> UsageCost {
        self.state.uses.cost()
    }

    /// Adds up the accounts.
    ///
    /// # Errors
    /// [`LedgerError::Io`], [`LedgerError::Format`] for `/proc/meminfo`.
    pub fn report(&self) -> Result<Report> {
        let Self { state, events, processes, residency, .. } = self;
        Reported { state, events, processes, residency }.report()
    }

    /// The first files of an image that have an object, at most `max` of them. `None` if there is
    /// no such image.
    ///
    /// # Errors
    /// [`LedgerError::Store`] if the image cannot be read, or the trust domain cannot be listed.
    pub fn files(
        &self,
        domain: &str,
        image: &Digest,
        order: FileOrder,
        max: usize,
    ) -> Result<Option<ImageFiles>> {
        self.state.files(domain, image, order, max)
    }

    /// Size of an object, and what of it is resident. `None` if no image names it.
    pub fn sizes(&self, domain: &str, object: &Digest) -> Option<(u64, u64)> {
        self.state.sizes(domain, object)
    }

    /// Who uses an object, by cgroup and image. `None` if no image names it.
    pub fn users(&self, domain: &str, object: &Digest) -> Option<Vec<ObjectUser>> {
        self.state.users(domain, object)
    }

    /// What the images of a trust domain have in common, at most `max` of them. `None` if there is
    /// no such domain.
    pub fn sharing(&self, domain: &str, max: usize) -> Option<ResidentSharing> {
        self.state.sharing(domain, max)
    }

    /// Drops objects of a target, as the last sample shows who uses them. If it is cancelled, says
    /// what went until then.
    ///
    /// # Errors
    /// [`LedgerError::NotFound`] for a target that does not exist; [`LedgerError::Store`] for an
    /// image that cannot be read, and for a target in a trust domain that cannot be listed. An
    /// object that cannot be looked at counts as kept, unless it was removed.
    pub fn reclaim(&mut self, request: &ReclaimRequest) -> Result<Reclaimed> {
        self.reclaimer().reclaim(request)
    }

    /// The same until `cancel`, which is one of this request alone.
    ///
    /// # Errors
    /// Those of [`Ledger::reclaim`].
    pub fn reclaim_until(
        &mut self,
        cancel: &Cancel,
        request: &ReclaimRequest,
    ) -> Result<Reclaimed> {
        Reclaim { cancel, ..self.reclaimer() }.reclaim(request)
    }

    fn reclaimer(&mut self) -> Reclaim<'_> {
        let Self { state, events, cancel, .. } = self;
        Reclaim { state, events, cancel }
    }

    /// Sets what [`Ledger::apply_policy`] does.
    pub fn set_policy(&mut self, policy: ReclaimPolicy) {
        self.pressure.set_policy(policy, &mut self.state);
    }

    /// Bytes that the policy has freed so far.
    pub fn policy_freed_bytes(&self) -> u64 {
        self.pressure.freed_bytes()
    }

    /// Does what the policy says, and goes on with the next call where the budget is spent: after
    /// an object that was dropped, a look at a cgroup, or a search. Says whether a round over all
    /// cgroups is complete.
    pub fn apply_policy(&mut self, budget: &Budget) -> bool {
        let Self { state, events, pressure, cancel, .. } = self;
        pressure.apply_policy(&mut Reclaim { state, events, cancel }, budget)
    }

    /// From now on, [`Ledger::drain_opens`] keeps the order in which a container of `cofolio run`
    /// opens files of a trust domain. Opens of which nobody knows whose they were count as the
    /// container's.
    ///
    /// # Errors
    /// [`LedgerError::Store`] if the trust domain cannot be listed; [`LedgerError::NotFound`].
    pub fn record_opens(&mut self, domain: &str, container: &str) -> Result<()> {
        let missing = || LedgerError::NotFound { what: format!("trust domain {domain}") };
        let domain = self.state.index.find_domain(domain)?.ok_or_else(missing)?;
        self.events.record(&mut self.state, domain, container);
        Ok(())
    }

    /// The objects that were opened since [`Ledger::record_opens`], the first one first.
    pub fn recorded(&self) -> Vec<Digest> {
        self.events.recorded(&self.state)
    }

    /// How often opened files were not noted: the queue was full, or a file could not be looked at.
    pub fn lost_opens(&self) -> u64 {
        let count = &self.state.unknown.count;
        count.overflows + count.files
    }
}

/// A ledger of an empty store and a machine whose kernel text is to be planted.
#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "of tests only")]
fn of_an_empty_machine() -> (tempfile::TempDir, Ledger) {
    let root = tempfile::tempdir().unwrap();
    let options = cofolio_store::InitOptions::default();
    let store = Store::init(&root.path().join("store"), &options).unwrap();
    let mut ledger = Ledger::new(store, RunDir::open(root.path().join("run")).unwrap());
    ledger.state.root = root.path().to_owned();
    (root, ledger)
}
