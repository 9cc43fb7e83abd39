//! What is mounted according to us, according to the kernel, and putting the two together.

use std::collections::{BTreeSet, HashSet};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::run_dir::{ImageLock, list, remove_file};
use crate::settings::Backend;
use cofolio_store::{Digest, Domain, RootKind};
use cofolio_sys::mount::mount_id;
use rustix::fs::CWD;
use rustix::io::Errno;
use serde::Serialize;

use super::base::image_of_user;
use super::error::{At as _, MountError, refused};
use super::in_use::{self, Superblock, has_overlay};
use super::kernel::{self, path_of};
use super::mountinfo::{self, KernelMount, LazyMounts, source_of};
use super::pin::{DETACHED, Unpinned};
use super::records::{MountPhase, MountRecord, Namespace};
use super::sparse::below;
use super::upper;
use super::{KeptChanges, Mounter, Pin, Step, mark_user, numbers_at, unless_read_only};

/// A mount as the record and the kernel together tell it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum MountState {
    /// As recorded.
    Live,
    /// Being made, or left half-way by a process that died.
    InFlight,
    /// Another mount lies on top of it, or a filesystem on the way to it would have to be asked.
    Covered,
    /// Unmounted by others, never attached, or gone with a reboot: `reconcile` or `umount` cleans up.
    Gone,
    /// In a mount namespace that is not ours and still in use.
    OtherNamespace,
}

/// One line of [`Mounter::list`].
#[derive(Debug, Clone, Serialize)]
pub struct MountStatus {
    /// What was recorded.
    pub record: MountRecord,
    /// Where it is now, if somebody moved it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub moved_to: Option<PathBuf>,
    /// Whether the kernel agrees.
    pub state: MountState,
    /// Where writable directories of a live mount were, which somebody has unmounted alone: the
    /// read-only root shows there.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub missing_parts: Vec<PathBuf>,
}

impl MountStatus {
    /// Where it is now.
    pub fn place(&self) -> &Path {
        self.moved_to.as_ref().unwrap_or(&self.record.target)
    }

    /// Where its writable directories are, if only these can be written to.
    pub fn parts(&self) -> impl Iterator<Item = PathBuf> {
        let dirs = self.record.upper.iter().flat_map(|upper| &upper.dirs);
        dirs.map(|dir| self.place().join(below(dir)))
    }

    fn with_missing_parts(mut self, mounts: &[KernelMount]) -> Self {
        if let Some(root) = self.record.mount.filter(|_| self.state == MountState::Live) {
            let is_missing = |part: &PathBuf| {
                !mounts.iter().any(|it| it.parent == root.id && it.target == *part)
            };
            self.missing_parts = self.parts().filter(is_missing).collect();
        }
        self
    }
}

/// Everything that is mounted.
#[derive(Debug, Default, Serialize)]
pub struct Mounts {
    /// Recorded mounts, by target.
    pub mounts: Vec<MountStatus>,
    /// Pinned images.
    pub pins: Vec<Pin>,
    /// Mounts of images that this run directory pins, without a record: binds of a mount, or mounts
    /// whose record was lost. Nothing cleans them up. By target, the innermost first: an outer one
    /// cannot be unmounted before.
    pub orphans: Vec<KernelMount>,
    /// Changes of this domain that were kept, and that nothing is mounted over.
    pub kept: Vec<KeptChanges>,
    /// Records that cannot be read, in words.
    pub damaged: Vec<String>,
}

/// What [`Mounter::reconcile`] cleaned up.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize)]
pub struct Reconciled {
    /// Ids of mounts that were gone or half-way.
    pub mounts: Vec<String>,
    /// Ids of roots in the store that stood for nothing.
    pub roots: Vec<String>,
    /// Directories of changes that belonged to nothing.
    pub uppers: u32,
    /// Images that were pinned for nobody.
    pub pins: Vec<Digest>,
    /// Other leftovers: temporary files and marks of users.
    pub leftovers: u32,
    /// What could not be cleaned up, in words.
    pub failed: Vec<String>,
}

impl Reconciled {
    /// Whether there was nothing to do.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// The traces of a mount are gone, except for a directory that is still to be removed.
#[derive(Debug)]
pub(crate) struct Forgotten {
    gone: Vec<PathBuf>,
    pub(crate) unpinned: Unpinned,
    /// Somebody else uses its superblock, or the image's: what they need stays.
    pub(crate) in_use: bool,
}

impl Forgotten {
    /// Removes the changes without the lock, since many files take long. Leftovers are out of sight
    /// and [`Mounter::reconcile`] retries them.
    pub(crate) fn finish(self) {
        for gone in self.gone {
            let _ = upper::remove_unless(|| Ok(false), &gone);
        }
    }

    /// [`Forgotten::finish`] for a mount that others unmounted: a container may still run in it.
    pub(crate) fn finish_unbound(mut self, root: &Path) {
        self.gone.retain(|gone| !in_use::is_bound(root, gone));
        self.finish();
    }
}

/// What the kernel says at one moment, looked up under a root path.
pub(crate) struct Kernel<'r> {
    pub(crate) boot_id: String,
    /// This thread's mount namespace.
    pub(crate) namespace: Namespace,
    mounts: LazyMounts<'r>,
}

impl<'r> Kernel<'r> {
    pub(crate) fn new(root: &'r Path) -> Result<Self, MountError> {
        let boot = root.join("proc/sys/kernel/random/boot_id");
        let namespace = root.join("proc/thread-self/ns/mnt");
        Ok(Self {
            boot_id: fs::read_to_string(&boot).at("read", boot)?.trim().to_owned(),
            namespace: Namespace::at(&namespace).at("look at", namespace)?,
            mounts: LazyMounts::new(root),
        })
    }
}

/// Whether filesystems on the way to a mount may be asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// Not: one that does not answer would hold up everybody who looks at all mounts.
    Cached,
    /// For a command that is about this mount, unless another mount covers it.
    Asked,
}

impl MountRecord {
    /// Where the kernel's list of mounts has it: live there, covered, or gone. A mount that cannot
    /// be looked at counts as covered, never as gone.
    pub(crate) fn look_up<'m>(
        &self,
        mounts: &'m [KernelMount],
        way: Way,
    ) -> (MountState, Option<&'m Path>) {
        let source = source_of(&self.image);
        let found = self.mount.and_then(|mount| {
            Some((mount, mounts.iter().find(|it| it.id == mount.id && it.source == source)?))
        });
        let Some((mount, listed)) = found else { return (MountState::Gone, None) };
        let numbers = match numbers_at(&listed.target) {
            Err(_) if way == Way::Asked && mountinfo::is_reachable(mounts, listed) => {
                mount_id(CWD, &listed.target)
            }
            numbers => numbers,
        };
        match numbers {
            Ok(numbers) if mount.is(numbers.id, numbers.unique) => {
                (MountState::Live, Some(&listed.target))
            }
            // The number went to another mount of the same image since.
            Ok(numbers) if numbers.id == mount.id => (MountState::Gone, None),
            _ => (MountState::Covered, None),
        }
    }
}

impl Mounter<'_> {
    /// What the kernel says of a recorded mount, and where it is on top, if it is anywhere. Looks at
    /// the target only, unless that is not it.
    pub(crate) fn locate(
        &self,
        record: &MountRecord,
        kernel: &Kernel<'_>,
        way: Way,
    ) -> Result<(MountState, Option<PathBuf>), MountError> {
        let gone = (MountState::Gone, None);
        if record.boot_id != kernel.boot_id {
            return Ok(gone);
        }
        if !record.namespace.is(&kernel.namespace) {
            let used = namespace_is_used(&self.root, &record.namespace);
            return Ok(if used { (MountState::OtherNamespace, None) } else { gone });
        }
        let Some(mount) = record.mount else { return Ok(gone) };
        if let Ok(found) = numbers_at(&record.target)
            && found.is_root
            && mount.is(found.id, found.unique)
        {
            return Ok((MountState::Live, Some(record.target.clone())));
        }
        let (state, at) = record.look_up(kernel.mounts.get()?, way);
        Ok((state, at.map(Path::to_owned)))
    }

    /// Removes every trace of a mount: takes it down if it is still up `at` a path, and releases the
    /// image. Parts may be missing; the record goes last, so that a failed unmount can be repeated.
    ///
    /// The caller gives the path: looking up a mount that was just taken down would read all of
    /// mountinfo, which takes milliseconds for a thousand mounts.
    pub(crate) fn forget(
        &self,
        record: &MountRecord,
        at: Option<&Path>,
        lock: &ImageLock,
    ) -> Result<Forgotten, MountError> {
        if let Some(path) = at {
            // Half-way: nobody was told of it yet.
            kernel::unmount(path, true).map_err(refused)?;
            self.step(Step::Detached);
        }
        let discard = |dir: Option<&PathBuf>| dir.map(|it| upper::discard_own(it)).transpose();
        let upper = record.upper.as_ref();
        let own_upper = upper.filter(|it| !it.given).map(|it| &it.dir);
        let is_kept = upper::kept_dir(record)?.is_some();
        let changes = discard(own_upper.filter(|_| !is_kept))?.flatten();
        let scratch = discard(record.scratch.as_ref())?.flatten();
        self.step(Step::UpperGone);
        // What is kept is not removed, but may still be written to.
        let dir = changes.as_ref().or(own_upper);
        // In doubt it is in use, as where a server on the way to it does not answer.
        let mounts = LazyMounts::new(&self.root);
        let open_given =
            |dir: &Path| kernel::open_local(dir, &mounts).and_then(|_| upper::open_own(dir));
        let in_use = match upper.filter(|upper| upper.given).map(|it| open_given(&it.dir)) {
            None => dir.map_or(Ok(false), |dir| has_overlay(dir, &self.patience))?,
            Some(Err(Errno::NOENT)) => false,
            // By descriptor: its path may lead elsewhere at any moment.
            Some(Ok(Ok(dir))) => {
                has_overlay(path_of(&dir).as_ref(), &self.patience).unwrap_or(true)
            }
            Some(_) => true,
        };
        if in_use && record.backend == Backend::InodeShare {
            mark_user(&self.run, &record.domain, &record.image, DETACHED)?;
        }
        let users = self.run.image_dir(&record.domain, &record.image).join("users");
        remove_file(&users.join(&record.id))?;
        self.step(Step::Unmarked);
        let unpinned = self.unpin_if_idle(&record.domain, &record.image, lock)?;
        if unpinned == Unpinned::Needed {
            self.trim_views(&record.domain, &record.image)?;
        }
        let is_elsewhere = in_use || unpinned == Unpinned::Elsewhere;
        // The kernel takes what is mounted on a directory that is removed from all namespaces.
        let run = fs::canonicalize(self.run.path());
        let is_own = || run.is_ok_and(|run| record.target.starts_with(run));
        // No server is asked, which need not answer: then the directory stays.
        let is_free = || {
            kernel::open_local(&record.target, &mounts).is_ok()
                && !in_use::is_target_elsewhere(&self.root, &record.target)
        };
        if record.created_target && !is_elsewhere && (is_own() || is_free()) {
            let _ = fs::remove_dir(&record.target);
        }
        let domain = self.domain_of(&record.domain)?;
        unless_read_only(domain.remove_root(RootKind::Mount, &record.id))?;
        self.step(Step::Unrooted);
        self.run.remove_record(&record.id)?;
        self.step(Step::Forgotten);
        let gone = changes.filter(|_| !in_use).into_iter().chain(scratch).collect();
        Ok(Forgotten { gone, unpinned, in_use: is_elsewhere })
    }

    /// All mounts, from the records and the kernel. Changes nothing and needs no privileges.
    pub fn list(&self) -> Result<Mounts, MountError> {
        let mut kernel = Kernel::new(&self.root)?;
        let (mut records, mut damaged) = self.run.records()?;
        let mut orphans = self.orphans(kernel.mounts.get()?, &records);
        if !orphans.is_empty() {
            // One that was being made when the records were read has a record now.
            kernel = Kernel::new(&self.root)?;
            (records, damaged) = self.run.records()?;
            let again = self.orphans(kernel.mounts.get()?, &records);
            orphans.retain(|orphan| again.contains(orphan));
        }
        let mut mounts = Vec::with_capacity(records.len());
        for record in records {
            let (state, at) = self.locate(&record, &kernel, Way::Cached)?;
            let moved_to = at.filter(|at| *at != record.target);
            let is_whole = record.phase == MountPhase::Mounted;
            let state = if is_whole { state } else { MountState::InFlight };
            let status = MountStatus { record, moved_to, state, missing_parts: Vec::new() };
            mounts.push(status.with_missing_parts(kernel.mounts.get()?));
        }
        orphans.sort_by(|one, other| other.target.cmp(&one.target));
        let damaged = damaged.iter().map(ToString::to_string).collect();
        let kept = self.unmounted_changes(kernel.mounts.get()?)?;
        Ok(Mounts { mounts, pins: self.pins()?, orphans, kept, damaged })
    }

    /// Kept changes of this domain that nothing is mounted over, with their bytes on disk.
    pub fn kept(&self) -> Result<Vec<(u64, KeptChanges)>, MountError> {
        let kept = self.unmounted_changes(LazyMounts::new(&self.root).get()?)?.into_iter();
        Ok(kept.map(|kept| (upper::disk_bytes(&kept.dir), kept)).collect())
    }

    /// Kept changes of this domain that none of these mounts shows, with a record or without.
    fn unmounted_changes(&self, mounts: &[KernelMount]) -> Result<Vec<KeptChanges>, MountError> {
        let mut kept = upper::kept(self.domain, &self.run)?;
        let uppers: HashSet<_> = mounts.iter().flat_map(|it| it.paths("upperdir")).collect();
        kept.retain(|kept| !uppers.contains(&kept.dir.join("upper")));
        Ok(kept)
    }

    /// Removes changes of this domain that were kept.
    ///
    /// # Errors
    /// [`MountError::NotKept`] if the directory holds none; [`MountError::UpperInUse`].
    pub fn discard_kept(&self, dir: &Path) -> Result<(), MountError> {
        let found = fs::canonicalize(dir).unwrap_or_else(|_| dir.to_owned());
        // As a mount over it does, and until it is removed.
        let Ok(Ok(lock)) = upper::open_own(&found) else { return Err(MountError::NotKept(found)) };
        upper::lock_given(&lock, &found, &self.patience)?;
        if !upper::kept(self.domain, &self.run)?.iter().any(|kept| kept.dir == found) {
            let (records, _) = self.run.records()?;
            let of =
                |record: &&MountRecord| record.upper.as_ref().is_some_and(|it| it.dir == found);
            let by = records.iter().find(of).map(|user| user.target.display().to_string());
            return Err(match by {
                Some(by) => MountError::UpperInUse { dir: found, by },
                None => MountError::NotKept(found),
            });
        }
        if has_overlay(&found, &self.patience)? {
            let by = "a mount that has no record or is detached".to_owned();
            return Err(MountError::UpperInUse { dir: found, by });
        }
        upper::discard_own(&found)?.map_or(Ok(()), |gone| upper::remove(&gone))
    }

    /// Mounts without a record that share a superblock or a layer with a pinned image, or whose changes
    /// are this run directory's. Others may be those of another store or run directory, even if their
    /// image is in this store.
    fn orphans(&self, mounts: &[KernelMount], records: &[MountRecord]) -> Vec<KernelMount> {
        let is_below = |mount: &&KernelMount| mount.target.starts_with(self.run.path());
        let pins: HashSet<_> = mounts.iter().filter(is_below).map(|pin| pin.device).collect();
        let is_ours = |mount: &KernelMount| {
            let mut layers = mount.paths("lowerdir+");
            // The layer of an id-mapped mount is a detached one, which has no path.
            let mut uppers = mount.paths("upperdir");
            pins.contains(&mount.device)
                || layers.any(|layer| layer.starts_with(self.run.path()))
                || uppers.any(|upper| upper::is_of(&upper, self.domain, &self.run))
        };
        let numbers = |record: &MountRecord| Some((record.mount?.id, record.image));
        let recorded: HashSet<_> = records.iter().filter_map(numbers).collect();
        let parts = records
            .iter()
            .filter_map(|record| Some((record.upper.as_ref()?.device?, record.image)));
        let parts: HashSet<_> = parts.collect();
        let containers = self.run.path().join("containers");
        let is_own =
            |mount: &&KernelMount| is_below(mount) && !mount.target.starts_with(&containers);
        let is_orphan = |mount: &&KernelMount| {
            let image = mount.image().filter(|_| !is_own(mount) && is_ours(mount));
            image.is_some_and(|image| {
                !recorded.contains(&(mount.id, image)) && !parts.contains(&(mount.device, image))
            })
        };
        mounts.iter().filter(is_orphan).cloned().collect()
    }

    /// Images of this domain that garbage collection must keep: mounted ones, by record, pin or kernel,
    /// and those that kept changes are of. A file of which only the mode was changed has its content in
    /// the image alone.
    ///
    /// # Errors
    /// [`MountError::Io`]; [`MountError::State`] for a damaged record, which might name any image.
    pub fn live_images(&self) -> Result<Vec<Digest>, MountError> {
        let kernel = Kernel::new(&self.root)?;
        let mut images = BTreeSet::new();
        let (records, damaged) = self.run.records()?;
        if let Some(error) = damaged.into_iter().next() {
            return Err(error);
        }
        let own = self.domain.name();
        for mut record in records.into_iter().filter(|record| record.domain == own) {
            upper::relocate(&mut record, self.domain)?;
            if record.boot_id == kernel.boot_id || upper::kept_dir(&record)?.is_some() {
                images.insert(record.image);
            }
        }
        images.extend(upper::kept(self.domain, &self.run)?.into_iter().filter_map(|it| it.image));
        let pinned = self.pinned_images()?.into_iter().filter(|(domain, _)| domain == own);
        images.extend(pinned.map(|(_, image)| image));
        images.extend(kernel.mounts.get()?.iter().filter_map(KernelMount::image));
        let mut live = Vec::with_capacity(images.len());
        for image in images {
            // The kernel does not say which trust domain a mount belongs to.
            if self.domain.has_image(&image)? {
                live.push(image);
            }
        }
        Ok(live)
    }

    /// Cleans up after killed processes, a reboot, or umount(8): removes records, roots, pins and
    /// directories of changes (unless kept) of mounts that are gone. Waits for live processes, and
    /// leaves their mounts and other mount namespaces alone. Reports failures and goes on.
    ///
    /// # Errors
    /// [`MountError::Io`] if the run directory cannot be read at all.
    pub fn reconcile(&self) -> Result<Reconciled, MountError> {
        self.patience.renew();
        let mut done = Reconciled::default();
        let mut failed = Vec::new();
        let mut or_failed = |error| failed.push(cofolio_store::with_causes(&error));
        if self.run.path().exists() {
            // Somebody may have emptied it under mounts, which keep their directories.
            self.run.prepare()?;
            done.leftovers = self.run.remove_temporaries().map_err(&mut or_failed).unwrap_or(0);
            for id in self.run.record_ids()? {
                if self.reconcile_record(&id).map_err(&mut or_failed).unwrap_or(false) {
                    done.mounts.push(id);
                }
            }
            for (domain, image) in self.pinned_images()? {
                let gone = self.reconcile_pin(&domain, &image, &mut done.leftovers);
                if gone.map_err(&mut or_failed).unwrap_or(false) {
                    done.pins.push(image);
                }
            }
        }
        for name in self.domain.store().domains()? {
            let Ok(domain) = self.domain_of(&name).map_err(&mut or_failed) else { continue };
            let stale =
                upper::remove_stale(&domain, &self.run, &self.root, &self.patience, &mut or_failed);
            done.uppers += stale.map_err(&mut or_failed).unwrap_or(0);
            let roots = self.reconcile_roots(&domain, &mut or_failed);
            done.roots.extend(roots.map_err(&mut or_failed).unwrap_or_default());
        }
        // A damaged record fails more than one step.
        failed.sort();
        failed.dedup();
        done.failed = failed;
        Ok(done)
    }

    /// Says whether the record stood for nothing.
    fn reconcile_record(&self, id: &str) -> Result<bool, MountError> {
        let Some((record, lock)) = self.lock_record(id)? else { return Ok(false) };
        let (state, at) = self.locate(&record, &Kernel::new(&self.root)?, Way::Cached)?;
        // With the lock ours, nobody is at work on a record that is half-way.
        let stale = match state {
            MountState::OtherNamespace => false,
            MountState::Gone => true,
            _ => record.phase != MountPhase::Mounted,
        };
        if !stale {
            return Ok(false);
        }
        if state == MountState::Covered {
            return Err(MountError::Covered(record.target));
        }
        let forgotten = self.forget(&record, at.as_deref(), &lock)?;
        drop(lock);
        forgotten.finish_unbound(&self.root);
        Ok(true)
    }

    /// Says whether the image was pinned for nobody.
    fn reconcile_pin(
        &self,
        domain: &str,
        image: &Digest,
        leftovers: &mut u32,
    ) -> Result<bool, MountError> {
        let lock = self.run.lock_image(image)?;
        let users = self.run.image_dir(domain, image).join("users");
        for user in list(&users)? {
            if let Some(over) = image_of_user(&user) {
                *leftovers += u32::from(self.remove_unused_mark(domain, &over, image, &lock)?);
                continue;
            }
            let stays = user == DETACHED
                || Superblock::from_user(&user).is_some()
                || self.run.record(&user)?.is_some_and(|r| r.image == *image);
            if !stays {
                remove_file(&users.join(user))?;
                *leftovers += 1;
            }
        }
        Ok(self.unpin_if_idle(domain, image, &lock)? == Unpinned::Done)
    }

    /// Removes this run directory's mount roots without a record or a superblock, and all roots of
    /// other boots.
    fn reconcile_roots(
        &self,
        domain: &Domain,
        or_failed: &mut dyn FnMut(MountError),
    ) -> Result<Vec<String>, MountError> {
        let boot = Kernel::new(&self.root)?.boot_id;
        let mut removed = Vec::new();
        for root in domain.roots(RootKind::Mount)? {
            let is_ours = root.id.starts_with(&self.run.tag());
            // A record is written before its root and removed after it, so look for the root first.
            let is_used = || -> Result<bool, MountError> {
                Ok(self.is_root_of_living(&root) || self.run.record(&root.id)?.is_some())
            };
            let remove = || -> Result<bool, MountError> {
                let stale = root.boot_id.as_ref() != Some(&boot) || (is_ours && !is_used()?);
                if stale {
                    domain.remove_root(RootKind::Mount, &root.id)?;
                }
                Ok(stale)
            };
            if remove().map_err(&mut *or_failed).unwrap_or(false) {
                removed.push(root.id);
            }
        }
        Ok(removed)
    }
}

/// Whether a process or thread lives in the mount namespace; true if we cannot see all. Processes that
/// we may not trace are left out: their mounts keep what they need.
fn namespace_is_used(root: &Path, namespace: &Namespace) -> bool {
    in_use::any_task(root, |task| {
        let path = task.join("ns/mnt");
        match in_use::inode(&path) {
            Err(error) if error.kind() == ErrorKind::PermissionDenied => Ok(false),
            // The inode number may be that of another namespace by now.
            found => Ok(found? == namespace.inode && Namespace::at(&path)?.is(namespace)),
        }
    })
}
