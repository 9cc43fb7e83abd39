//! Mounting images: backends `overlay` and `inode-share`.
//!
//! ```text
//!   <image>.erofs ── one EROFS superblock, pinned in the run directory
//!                        │                                  objects/
//!            ┌───────────┴───────────┐                          │ data-only
//!   one read-only overlay      one overlay per writable mount ──┘
//!   per id map and label       (upper, EROFS, objects)
//!            │                       │
//!   a clone per mount           its target
//! ```
//!
//! A mount of which only some directories can be written to has both (see `sparse.rs`).
//!
//! With `inode-share` the EROFS superblock is that of the image's pack, over segments: a read-only
//! mount is a clone of it, and a writable one an overlay of upper and EROFS.
//!
//! Superblocks cost memory: each has its own inodes and dentries. So an image has one of EROFS, one
//! of overlayfs for all its read-only mounts, and one per writable mount. The last mount of an
//! image (with `inode-share`, of the trust domain) takes the pinned ones away again.
//!
//! State is in the run directory (see [`RunDir`]) and, for garbage collection, in `roots/mount/` of
//! the store. [`Mounter::umount`], the next mount at the same place and [`Mounter::reconcile`]
//! repair what a killed process leaves. A test kills a process at each [`Step`].

mod base;
mod check;
mod error;
mod idmap;
mod in_use;
pub(crate) mod kernel;
mod limit;
pub(crate) mod mountinfo;
mod pin;
mod reconcile;
mod records;
mod request;
mod share;
mod shown;
mod sparse;
mod target;
#[cfg(test)]
pub(crate) mod tests;
mod upper;

use std::collections::HashSet;
use std::fs;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};

use crate::run_dir::{ImageLock, RunDir, remove_file};
use crate::settings::Backend;
use cofolio_store::task::Task;
use cofolio_store::{Contents, Digest, Domain, Error, Root, RootKind, now};
use cofolio_sys::mount::MountAttr;
use rustix::mount::MountAttrFlags;

pub(crate) use check::check_image;
pub use error::{Code, MountError};
pub use idmap::IdMap;
pub(crate) use in_use::Patience;
pub use kernel::{Backing, KernelError};
pub use mountinfo::KernelMount;
pub(crate) use mountinfo::LazyMounts;
#[cfg(fuzzing)]
pub use mountinfo::fuzz;
pub use pin::Pin;
pub(crate) use pin::take_down;
use pin::{Pinned, Unpinned};
pub use reconcile::{MountState, MountStatus, Mounts, Reconciled};
pub use records::{MountNumbers, MountPhase, MountRecord, PinRecord, Upper};
pub use request::{Access, Check, MountOptions, MountRequest, Step, UmountOptions, Unmounted};
pub(crate) use share::open_pack_files;
pub(crate) use shown::ShownSuperblock;
pub(crate) use sparse::{WRITABLE_DIRS_MAX, checked as checked_writable_dirs};
pub use upper::KeptChanges;
pub(crate) use upper::{open_own, relocate, writable_dir};

pub(crate) use error::At;
use error::refused;
use kernel::{LayerStyle, attach, clone_mount};
pub(crate) use kernel::{open_below, open_cached, open_dir, path_of};
use reconcile::{Kernel, Way};
use target::{make_target, open_resolved, resolve_target};

/// Mounts images of one trust domain. Any number of processes may do so at once.
pub struct Mounter<'a> {
    domain: &'a Domain,
    run: RunDir,
    contents: &'a dyn Contents,
    /// Where `/proc` is looked up.
    root: PathBuf,
    on_step: Option<&'a (dyn Fn(Step) + Sync)>,
    styles: Vec<LayerStyle>,
    force_loop: bool,
    /// Put mounts together at their targets, as before Linux 6.15.
    assembles_late: bool,
    task: Task,
    /// For all of its work, or since the last [`Mounter::reconcile`] began.
    patience: Patience,
}

impl<'a> Mounter<'a> {
    /// A mounter whose state is in `run`; `contents` reads images to check their objects.
    pub fn new(domain: &'a Domain, run: RunDir, contents: &'a dyn Contents) -> Self {
        Self {
            domain,
            run: run.waits_until(domain.store().waiting()),
            contents,
            root: PathBuf::from("/"),
            on_step: None,
            styles: LayerStyle::ALL.to_vec(),
            force_loop: false,
            assembles_late: false,
            task: Task::default(),
            patience: Patience::default(),
        }
    }

    /// [`Check::Verify`] tells `task` how far it is, and ends when that is cancelled.
    #[must_use]
    pub fn with_task(mut self, task: &Task) -> Self {
        self.task = task.clone();
        self
    }

    /// Calls `hook` at every step, for tests of what happens when a process dies there.
    #[must_use]
    pub fn with_steps(mut self, hook: &'a (dyn Fn(Step) + Sync)) -> Self {
        self.on_step = Some(hook);
        self
    }

    /// Mounts metadata images through loop devices, as on a kernel that cannot do without.
    #[must_use]
    pub fn with_loop_devices(mut self) -> Self {
        self.force_loop = true;
        self
    }

    /// Puts mounts of several parts together at their targets, as on a kernel that cannot do so before.
    #[cfg(test)]
    #[must_use]
    pub(crate) fn with_late_assembly(mut self) -> Self {
        self.assembles_late = true;
        self
    }

    /// The run directory.
    pub fn run_dir(&self) -> &RunDir {
        &self.run
    }

    /// The trust domain.
    pub fn domain(&self) -> &'a Domain {
        self.domain
    }

    fn step(&self, step: Step) {
        if let Some(hook) = self.on_step {
            hook(step);
        }
    }

    /// Mounts an image; an error leaves nothing behind.
    ///
    /// # Errors
    /// See [`MountError`]; [`MountError::code`] gives its kind.
    pub fn mount(&self, request: &MountRequest) -> Result<MountRecord, MountError> {
        let target = resolve_target(&request.target, request.create_target)?;
        self.check_hides_nothing(&target)?;
        self.run.prepare()?;
        // Its name, and then the image, may have been removed after somebody had looked it up.
        let is_gone = || -> cofolio_store::Result<bool> {
            let mut refs = self.domain.readable_refs()?.into_iter();
            Ok(refs.all(|(_, it)| it.image != request.image)
                && !self.domain.has_image(&request.image)?)
        };
        let mounted = self.mount_at(target, request).map_err(|error| match error {
            MountError::Store(Error::NoSuch(_)) if is_gone().unwrap_or(false) => {
                let name = request.options.name.clone();
                Error::NoSuchRef(name.unwrap_or_else(|| request.image.to_string())).into()
            }
            other => other,
        })?;
        // A hint for whoever looks for room later: no reason to fail.
        let _ = self.domain.note_use(&mounted.image, mounted.created);
        Ok(mounted)
    }

    fn mount_at(&self, target: PathBuf, request: &MountRequest) -> Result<MountRecord, MountError> {
        let dirs = sparse::checked(&request.writable_dirs)?;
        self.make_room(&target)?;
        let verity = self.domain.has_verity();
        let Self { domain, contents, task, .. } = self;
        check_image(domain, &request.image, request.check, *contents, task)?;
        let kernel = Kernel::new(&self.root)?;
        let id = self.run.id_of(&target);
        let (upper, claim) = self.choose_upper(request, dirs, &id, &kernel.boot_id)?;
        let scratch = request.scratch.then(|| upper::own_dir(self.domain, &id, upper::SCRATCH));
        let scratch = scratch.transpose()?;
        let mut record = MountRecord {
            id,
            domain: self.domain.name().to_owned(),
            image: request.image,
            created_target: request.create_target && !target.exists(),
            target,
            upper,
            scratch,
            options: request.options.clone(),
            backend: Backend::default(),
            own: false,
            verity,
            verified: request.check == Check::Verify,
            phase: MountPhase::Intent,
            mount: None,
            namespace: kernel.namespace,
            boot_id: kernel.boot_id,
            pid: std::process::id(),
            created: now(),
        };
        if request.check == Check::None {
            self.hold_base(&record.image, &mut Vec::new())?;
        }
        let lock = self.run.lock_image(&record.image)?;
        if !self.run.claim(&record, &lock)? {
            // Somebody was faster between `make_room` and here.
            let image = self.run.record(&record.id)?.map_or(record.image, |other| other.image);
            return Err(MountError::AlreadyMounted { target: record.target, image });
        }
        self.step(Step::Claimed);
        match self.make(&mut record, request.check, &lock, claim.as_ref()) {
            Ok(()) => Ok(record),
            Err(error) => {
                // What cannot be undone now is left to `reconcile`; the first error tells more.
                let found =
                    Kernel::new(&self.root).and_then(|k| self.locate(&record, &k, Way::Asked));
                // Nobody was told of it, so nobody has changed anything.
                record.mount = None;
                let forgotten =
                    found.and_then(|(_, at)| self.forget(&record, at.as_deref(), &lock));
                drop(lock);
                if let Ok(forgotten) = forgotten {
                    forgotten.finish();
                }
                Err(error)
            }
        }
    }

    fn choose_upper(
        &self,
        request: &MountRequest,
        dirs: Vec<PathBuf>,
        id: &str,
        boot_id: &str,
    ) -> Result<(Option<Upper>, Option<OwnedFd>), MountError> {
        let size_bytes = request.size_bytes;
        let upper = |dir, keep, given| Upper { dir, keep, given, size_bytes, dirs, device: None };

        if size_bytes.is_some() && request.access != Access::Writable {
            return Err(MountError::SizeLimit("only changes that go with the mount can have one"));
        }
        match &request.access {
            Access::ReadOnly => match request.writable_dirs.first() {
                Some(dir) => Err(sparse::problem_of(dir, "the mount is to be read-only")),
                None => Ok((None, None)),
            },
            Access::Writable | Access::WritableKept => {
                let dir = upper::own_dir(self.domain, id, "")?;
                let keep = request.access == Access::WritableKept;
                Ok((Some(upper(dir, keep, false)), None))
            }
            Access::WritableAt(dir) => {
                let (dir, lock) = upper::claim_given(self, dir, &request.image, boot_id)?;
                Ok((Some(upper(dir, true, true)), Some(lock)))
            }
        }
    }

    /// Everything after the claim.
    fn make(
        &self,
        record: &mut MountRecord,
        check: Check,
        lock: &ImageLock,
        claim: Option<&OwnedFd>,
    ) -> Result<(), MountError> {
        let image = record.image;
        // Once the image is mounted, its superblock has a root. Until then, the mount has one.
        let is_pinned = self.is_pinned(self.domain.name(), &image)?;
        if !is_pinned {
            let mut root = Root::new(RootKind::Mount, record.id.clone());
            root.images = vec![image];
            root.note = record.target.to_string_lossy().into_owned();
            root.created = record.created;
            root.boot_id = Some(record.boot_id.clone());
            // Fails if the image is not here; once written, the root keeps it. Nobody collects from
            // a read-only store, which needs none.
            unless_read_only(self.domain.put_root(&root))?;
        }
        self.step(Step::Rooted);
        {
            let _stays = self.run.share_domain(self.domain.name())?;
            // From now on an overlay may get a layer of ours.
            remove_file(&self.run.overlays_path(self.domain.name()))?;
            mark_user(&self.run, self.domain.name(), &image, &record.id)?;
        }
        self.step(Step::Marked);
        if record.created_target {
            record.created_target = make_target(&record.target)?;
            self.step(Step::TargetMade);
        }
        if let Some(scratch) = &record.scratch {
            upper::make_own(scratch)?;
        }
        let target = open_resolved(&record.target)?;

        let pin = self.pinned(&image, lock, check != Check::None)?;
        if !is_pinned {
            unless_read_only(self.domain.remove_root(RootKind::Mount, &record.id))?;
            self.step(Step::Unrooted);
        }
        if check == Check::RequireVerity && !pin.verity {
            return Err(MountError::PinnedWithoutVerity(image));
        }
        self.check_not_replaced(&image, &pin, check)?;
        (record.backend, record.verity) = (pin.backend, pin.verity);
        record.own = pin.dir.ends_with(pin::OWN);
        let (mount, changes) = self.detached(record, &pin, claim)?;
        let mut is_whole = true;
        if let (Some(changes), Some(upper)) = (&changes, &mut record.upper) {
            upper.device = Some(sparse::device_of(changes)?);
            is_whole = !self.assembles_late && sparse::assemble(&mount, changes, &upper.dirs)?;
        }
        let numbers = cofolio_sys::mount::mount_id(&mount, "").at("look at", &record.target)?;
        record.mount = Some(MountNumbers { id: numbers.id, unique: numbers.unique });
        self.run.write(record, lock)?;
        self.step(Step::Prepared);
        attach(&mount, &target).map_err(refused)?;
        if let (false, Some(changes), Some(upper)) = (is_whole, &changes, &record.upper) {
            self.step(Step::RootAttached);
            sparse::assemble_at(&record.target, &mount, changes, &upper.dirs)?;
        }
        self.step(Step::Attached);
        record.phase = MountPhase::Mounted;
        self.run.write(record, lock)?;
        self.step(Step::Recorded);
        Ok(())
    }

    /// The mount itself, attached nowhere. One of which only some directories can be written to comes as
    /// its root and the overlay that has these.
    fn detached(
        &self,
        record: &MountRecord,
        pin: &Pinned,
        claim: Option<&OwnedFd>,
    ) -> Result<(OwnedFd, Option<OwnedFd>), MountError> {
        let (image, options) = (&record.image, &record.options);
        let (idmap, label) = (options.idmap.as_ref(), options.label.as_deref());
        let mut flags = MountAttrFlags::empty();
        flags.set(MountAttrFlags::MOUNT_ATTR_NOSUID, options.nosuid);
        flags.set(MountAttrFlags::MOUNT_ATTR_NODEV, options.nodev);
        flags.set(MountAttrFlags::MOUNT_ATTR_NOEXEC, options.noexec);
        let idmapped = idmap.is_some();
        let failed = |error| MountError::from_kernel(error, idmapped);
        let Some(upper) = &record.upper else {
            return Ok((self.read_only(record, pin, flags)?, None));
        };
        let root = match &upper.dirs[..] {
            [] => None,
            dirs => {
                let root = self.read_only(record, pin, flags)?;
                dirs.iter().try_for_each(|dir| sparse::open_in(&root, dir).map(drop))?;
                Some(root)
            }
        };
        let mapped = idmap.map(|idmap| self.mapped(pin, idmap)).transpose()?;
        let layers = mapped.as_ref().unwrap_or(&pin.layers);
        let open = upper::prepare(&self.run, record, upper, &layers[0], claim)?;
        self.step(Step::UpperMade);
        let made = self
            .overlay(image, (layers, pin.backend), label, Some(&open), idmapped)
            .map_err(|error| match error {
                // The kernel names neither of the two; the layers below are our own.
                MountError::Kernel(error) => MountError::Upper {
                    dir: upper.dir.clone(),
                    problem: format!("overlayfs refused: {error}"),
                },
                other => other,
            });
        // The overlay holds a mount of the sized filesystem of its own, so ours can go.
        if open.limit == limit::Limit::Filesystem {
            limit::put_away(&upper.dir)?;
        }
        let mount = made?;
        if open.volatile && !upper.given {
            upper::forget_volatile(&open.work, &upper.dir)?;
        }
        let attr = MountAttr { set: flags, ..MountAttr::default() };
        cofolio_sys::mount::mount_setattr(&mount, &attr)
            .map_err(|error| failed(KernelError::from_io("mount_setattr", &error)))?;
        if let Some(claim) = claim {
            upper::mark_kept(claim, record)?;
        }
        Ok(match root {
            Some(root) => (root, Some(mount)),
            None => (mount, None),
        })
    }

    /// A clone of what all read-only mounts of the image with these options show; if it was verified
    /// without fs-verity, of an overlay of its own.
    fn read_only(
        &self,
        record: &MountRecord,
        pin: &Pinned,
        flags: MountAttrFlags,
    ) -> Result<OwnedFd, MountError> {
        let options = &record.options;
        let (idmap, label) = (options.idmap.as_ref(), options.label.as_deref());
        let failed = |error| MountError::from_kernel(error, idmap.is_some());
        let flags = flags | MountAttrFlags::MOUNT_ATTR_RDONLY;
        // All that it shows is in it. Only a label takes a superblock of another kind.
        if pin.backend == Backend::InodeShare && label.is_none() {
            let namespace = idmap.map(IdMap::namespace).transpose().map_err(failed)?;
            let namespace = namespace.as_ref().map(OwnedFd::as_fd);
            return clone_mount(&pin.layers[0], Path::new(""), flags, namespace).map_err(failed);
        }
        let view = self.view(record, pin)?;
        clone_mount(&view, Path::new(""), flags, None).map_err(failed)
    }

    /// The target must not be a mount of ours; what a dead process left of one is cleaned up.
    fn make_room(&self, target: &Path) -> Result<(), MountError> {
        let already = |image| MountError::AlreadyMounted { target: target.to_owned(), image };
        let id = self.run.id_of(target);
        let Some((record, lock)) = self.lock_record(&id)? else {
            // Somebody may have moved a mount there, or its record was lost.
            return match self.run.find(target) {
                Ok(found) => Err(already(found.image)),
                Err(MountError::NotMounted(_)) => Ok(()),
                Err(error) => Err(error),
            };
        };
        let (state, at) = self.locate(&record, &Kernel::new(&self.root)?, Way::Asked)?;
        match state {
            MountState::Live if record.phase == MountPhase::Mounted => Err(already(record.image)),
            MountState::Covered => Err(MountError::Covered(target.to_owned())),
            MountState::OtherNamespace => {
                Err(MountError::OtherNamespace { id, target: target.to_owned() })
            }
            // Half-way with nobody holding the lock, or unmounted behind our back.
            _ => {
                let forgotten = self.forget(&record, at.as_deref(), &lock)?;
                drop(lock);
                forgotten.finish_unbound(&self.root);
                Ok(())
            }
        }
    }

    /// Unmounts the mount at a target, or with an id, and removes everything it needed.
    ///
    /// # Errors
    /// [`MountError::NotMounted`], [`MountError::Busy`], [`MountError::Covered`],
    /// [`MountError::OtherNamespace`]; the mount is still there then.
    pub fn umount(
        &self,
        target_or_id: &Path,
        options: &UmountOptions,
    ) -> Result<Unmounted, MountError> {
        let found = self.run.find(target_or_id)?;
        if found.domain == self.domain.name() {
            // It was in use until now, and not only when it was mounted. A hint, as there.
            let _ = self.domain.note_use(&found.image, now());
        }
        // First without the lock, as a filesystem on the way to it need not answer.
        self.locate(&found, &Kernel::new(&self.root)?, Way::Asked)?;
        let gone = || MountError::NotMounted(target_or_id.display().to_string());
        // It may have gone, or even come again, while we waited.
        let (mut record, lock) = self.lock_record(&found.id)?.ok_or_else(gone)?;
        if record.image != found.image {
            return Err(gone());
        }
        let kernel = Kernel::new(&self.root)?;
        let (state, at) = self.locate(&record, &kernel, Way::Asked)?;
        match state {
            MountState::OtherNamespace => {
                return Err(MountError::OtherNamespace { id: record.id, target: record.target });
            }
            MountState::Covered => return Err(MountError::Covered(record.target)),
            _ => {}
        }
        // Also if others unmounted it: who asked for the changes has to hear that there are none.
        if options.keep_upper
            && let Some(upper) = record.upper.as_ref().filter(|upper| !upper.given)
            && upper::is_there(&limit::root(&upper.dir))?
        {
            return Err(MountError::CannotKeep(record.target));
        }
        if let Some(path) = &at {
            self.leave(&record, path, options)?;
        }
        if options.keep_upper
            && let Some(upper) = record.upper.clone().filter(|upper| !upper.keep)
            && upper::is_there(&upper.dir)?
        {
            let dir = open_dir(&upper.dir).at("open", &upper.dir)?;
            upper::mark_kept(&dir, &record)?;
            // Where it is in use still, or we die here, the next mount over it does this. What an
            // earlier boot left may be torn.
            let is_whole = record.boot_id == kernel.boot_id;
            if is_whole && !in_use::has_overlay(&upper.dir, &self.patience)? {
                upper::clear_volatile(&dir, &upper.dir)?;
            }
            record.upper = Some(Upper { keep: true, ..upper });
        }
        let kept = upper::kept_dir(&record)?.map(Path::to_owned);
        // What was there is not there any more.
        let forgotten = self.forget(&record, None, &lock)?;
        drop(lock);
        let (unpinned, in_use) = (forgotten.unpinned == Unpinned::Done, forgotten.in_use);
        let was_gone = at.is_none();
        if was_gone {
            forgotten.finish_unbound(&self.root);
        } else {
            forgotten.finish();
        }
        Ok(Unmounted { record, was_gone, upper: kept, unpinned, in_use })
    }

    /// Fails if what is mounted at a target, if anything, is in another mount namespace.
    ///
    /// # Errors
    /// [`MountError::OtherNamespace`].
    pub(crate) fn check_namespace(&self, target: &Path) -> Result<(), MountError> {
        let kernel = Kernel::new(&self.root)?;
        match self.run.find(target) {
            Ok(found)
                if self.locate(&found, &kernel, Way::Cached)?.0 == MountState::OtherNamespace =>
            {
                Err(MountError::OtherNamespace { id: found.id, target: found.target })
            }
            Ok(_) | Err(MountError::NotMounted(_)) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Takes the mount from its target. Its record need not say so: a full run directory has no room.
    fn leave(
        &self,
        record: &MountRecord,
        path: &Path,
        options: &UmountOptions,
    ) -> Result<(), MountError> {
        let mut marked = None;
        // A given one was marked when it was mounted.
        if options.keep_upper
            && let Some(upper) = record.upper.as_ref().filter(|upper| !upper.given)
        {
            // Before anything else: a process that dies after this leaves it to be kept.
            let dir = open_dir(&upper.dir).at("open", &upper.dir)?;
            if upper::mark_kept(&dir, record)? {
                marked = Some((dir, upper.dir.clone()));
            }
        }
        match self.detach(record, path, options.force) {
            Ok(()) => {
                self.step(Step::Detached);
                Ok(())
            }
            Err(error) => {
                // Whoever asked hears why it is still mounted. A mark that stays keeps the changes.
                if let Some((dir, upper)) = marked {
                    let _ = upper::unmark_kept(&dir, &upper);
                }
                Err(error)
            }
        }
    }

    fn detach(&self, record: &MountRecord, path: &Path, force: bool) -> Result<(), MountError> {
        let sparse = record.upper.as_ref().filter(|upper| !upper.dirs.is_empty());
        let shares = record.backend == Backend::InodeShare;
        let in_use_still = || mark_user(&self.run, &record.domain, &record.image, pin::DETACHED);
        let of_this = record.mount.map(|mount| HashSet::from([mount.id])).unwrap_or_default();
        let device = sparse::device_at(path).ok();
        let process = || in_use::process_on(&self.root, &of_this, device.as_slice());
        let unmounted = match (sparse, record.mount) {
            (Some(upper), Some(mount)) if !force || shares => {
                let unmounted = sparse::unmount(&self.root, path, mount, upper);
                // Somebody has come before it was detached and after the last question.
                if shares && unmounted.is_ok() && !matches!(process(), Ok(None)) {
                    in_use_still()?;
                }
                unmounted
            }
            _ => kernel::unmount_patiently(path, force && !shares).map_err(|error| {
                if error.errno != rustix::io::Errno::BUSY {
                    return refused(error);
                }
                let reason = process().ok().flatten().unwrap_or_else(|| {
                    "something is mounted below it, or the kernel has a file of it open, for a \
                     loop device or a stopped `cofolio serve`"
                        .to_owned()
                });
                MountError::Busy { path: path.to_owned(), reason }
            }),
        };
        match unmounted {
            // Nor does it stay because its users could not be asked for.
            Err(MountError::Busy { .. } | MountError::Io { .. }) if force && shares => {
                in_use_still()?;
                kernel::unmount(path, true).map_err(refused)
            }
            unmounted => unmounted,
        }
    }

    /// [`RunDir::lock_record`], with the mount's own directories where they are in this store.
    fn lock_record(&self, id: &str) -> Result<Option<(MountRecord, ImageLock)>, MountError> {
        let Some((mut record, lock)) = self.run.lock_record(id)? else { return Ok(None) };
        let domain = self.domain_of(&record.domain)?;
        relocate(&mut record, &domain)?;
        Ok(Some((record, lock)))
    }

    /// A trust domain of the same store.
    fn domain_of(&self, name: &str) -> Result<Domain, MountError> {
        Ok(self.domain.store().domain(name)?)
    }
}

/// Ignores that a root cannot be written where the store's filesystem is mounted read-only.
fn unless_read_only<T>(written: cofolio_store::Result<T>) -> cofolio_store::Result<()> {
    match written {
        Err(error) if !error.is_read_only() => Err(error),
        _ => Ok(()),
    }
}

fn mark_user(run: &RunDir, domain: &str, image: &Digest, user: &str) -> Result<(), MountError> {
    let users = run.image_dir(domain, image).join("users");
    fs::create_dir_all(&users).at("create", &users)?;
    let path = users.join(user);
    fs::File::create(&path).map(drop).at("create", path)
}

/// The numbers of the mount that `path` is on, without asking a filesystem on the way.
fn numbers_at(path: &Path) -> std::io::Result<cofolio_sys::mount::MountId> {
    cofolio_sys::mount::mount_id(open_cached(path)?, "")
}
