//! One EROFS superblock per image, and the read-only overlays over it.

use std::collections::{BTreeSet, HashSet};
use std::fs;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use crate::run_dir::{ImageLock, find_name, list, read_json, remove_file, to_json};
use crate::settings::{Backend, DomainSettings as _};
use cofolio_store::{Digest, Purpose, Root, RootKind, StoredFile, replace_file};
use cofolio_sys::mount::MountId;
use rustix::fs::CWD;
use rustix::mount::MountAttrFlags;
use serde::Serialize;
use sha2::{Digest as _, Sha256};

use super::check::{check_digest, damaged};
use super::error::{At as _, MountError, refused};
use super::idmap::IdMap;
use super::in_use::{self, Elsewhere, Superblock};
use super::kernel::{self, Overlay, attach, clone_mount, mount_erofs, open_dir};
use super::mountinfo::source_of;
use super::reconcile::Kernel;
use super::records::{MountRecord, PinRecord};
use super::{Backing, Check, MountOptions, Mounter, Step, mark_user, numbers_at, unless_read_only};

/// An image that is mounted once, for all that build on it.
#[derive(Debug, Clone, Serialize)]
pub struct Pin {
    /// Trust domain.
    pub domain: String,
    /// Digest of the metadata image.
    pub image: Digest,
    /// Where its EROFS superblock is mounted.
    pub path: PathBuf,
    /// How many mounts use it.
    pub users: usize,
    /// How it was mounted and what was checked, if that is known.
    pub record: Option<PinRecord>,
}

/// An image that is mounted for others to build on.
pub(crate) struct Pinned {
    pub(super) dir: PathBuf,
    /// The roots of its EROFS mounts, the topmost first; several if it is over a base.
    pub(crate) layers: Vec<OwnedFd>,
    pub(crate) backend: Backend,
    /// Whether the store had fs-verity when it was mounted, which decides for the mounts over it.
    pub(crate) verity: bool,
}

/// What became of a pinned image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unpinned {
    /// A mount of ours needs it: nothing was done.
    Needed,
    /// None of ours does, but somebody else uses its superblock.
    Elsewhere,
    /// It is gone.
    Done,
}

/// Subdirectory for the image's own metadata image while it is also mounted over a base.
pub(super) const OWN: &str = "own";
/// User that stands for detached mounts of `inode-share` that were in use: until the machine
/// restarts, nobody knows whether their readers have ended.
pub(crate) const DETACHED: &str = "detached";

/// `EROFS_SUPER_MAGIC_V1` and `OVERLAYFS_SUPER_MAGIC` of `include/uapi/linux/magic.h`.
pub(super) const EROFS_MAGIC: u32 = 0xE0F5_E1E2;
pub(super) const OVERLAY_MAGIC: u32 = 0x794C_7630;

impl Mounter<'_> {
    /// The image's EROFS mount, made if missing, over its base if that is held. With `measured`, it
    /// is the image's own metadata image, beside a mount over a base: a writer of the store could
    /// give an image the delta of another one.
    pub(super) fn pinned(
        &self,
        image: &Digest,
        lock: &ImageLock,
        measured: bool,
    ) -> Result<Pinned, MountError> {
        let mut dir = self.run.image_dir(self.domain.name(), image);
        if measured && self.pin_record(self.domain.name(), image)?.is_some_and(|r| r.base.is_some())
        {
            dir.push(OWN);
        }
        let at = dir.join("erofs");
        let path = dir.join("pin.json");
        fs::create_dir_all(&at).at("create", &at)?;
        if let Some(root) = mounted_root(&at, EROFS_MAGIC)? {
            return self.pinned_before(image, root, dir, measured);
        }
        let scratch = open_dir(&dir).at("open", &dir)?;
        let backend = self.domain.backend()?;
        let mut below = Vec::new();
        let (mount, record) = match backend {
            Backend::Overlay => {
                let over_base =
                    if measured { None } else { self.mount_delta(image, scratch.as_fd())? };
                if let Some((mount, record, layers)) = over_base {
                    below = layers;
                    (mount, record)
                } else {
                    if !dir.ends_with(OWN) {
                        self.release_base(self.domain.name(), image, None, lock)?;
                    }
                    self.mount_image(image, image, scratch.as_fd())?
                }
            }
            Backend::InodeShare => {
                let packed = self.open_pack(image)?;
                let mount = self.mount_pack(&packed, &source_of(image), scratch.as_fd())?;
                let record = PinRecord {
                    backend,
                    base: None,
                    delta: None,
                    backing: Backing::File,
                    verity: packed.verity,
                    objects_checked: 0,
                    image_bytes: packed.file.size().at("look at", &dir)?,
                    files: packed.numbers()?,
                    created: cofolio_store::now(),
                };
                (mount, record)
            }
        };
        let verity = record.verity;
        // Whole or not at all: one that cannot be read would stop every unmount in the domain.
        let (aside, json) = (path.with_extension("tmp"), to_json(&path, &record)?);
        replace_file(CWD, &aside, &path, &json, Purpose::Record, false).at("write", &path)?;
        self.keep_for_superblock(image, &mount, record.created)?;
        self.step(Step::PinMade);
        attach_at(&mount, &at)?;
        self.step(Step::Pinned);
        if backend == Backend::InodeShare {
            self.check_shares(&at).inspect_err(|_| drop(take_down(&at)))?;
        }
        let root = mounted_root(&at, EROFS_MAGIC)?.ok_or_else(|| unmounted(at))?;
        let layers = std::iter::once(root).chain(below).collect();
        Ok(Pinned { dir, layers, backend, verity })
    }

    /// Whether an image is mounted for others, in whichever form.
    pub(super) fn is_pinned(&self, domain: &str, image: &Digest) -> Result<bool, MountError> {
        let at = self.run.image_dir(domain, image).join("erofs");
        Ok(mounted_root(&at, EROFS_MAGIC)?.is_some())
    }

    /// The image's EROFS mount that is there already, as it was made, whatever the domain's backend
    /// is by now.
    fn pinned_before(
        &self,
        image: &Digest,
        root: OwnedFd,
        dir: PathBuf,
        measured: bool,
    ) -> Result<Pinned, MountError> {
        let path = dir.join("pin.json");
        let record: Option<PinRecord> = read_json(&path)?;
        // Over a base it would show a part of the image.
        if record.is_none() && (measured || self.domain.base_of(image)?.is_some()) {
            let reason = "it is missing, so nobody knows what is mounted".to_owned();
            return Err(MountError::State { path, reason });
        }
        let (backend, verity, base) = record
            .map_or_else(Default::default, |record| (record.backend, record.verity, record.base));
        let mut layers = vec![root];
        if let Some(base) = base {
            layers.extend(self.mounted_layers(&base, Backend::Overlay)?);
        }
        Ok(Pinned { dir, layers, backend, verity })
    }

    /// Fails if the mounted files are no longer those of the store, which were checked: a repair, for
    /// one, has replaced them, and all mounts of the image serve the old ones.
    pub(super) fn check_not_replaced(
        &self,
        image: &Digest,
        pin: &Pinned,
        check: Check,
    ) -> Result<(), MountError> {
        let stored = match pin.backend {
            _ if check == Check::None => return Ok(()),
            Backend::Overlay => vec![file_numbers(&self.domain.open_image(image)?)?],
            Backend::InodeShare if check == Check::Verify => self.open_pack(image)?.numbers()?,
            // Nothing is said of the pack.
            Backend::InodeShare => return Ok(()),
        };
        let record: Option<PinRecord> = read_json(&pin.dir.join("pin.json"))?;
        if record.is_some_and(|record| record.files == stored) {
            return Ok(());
        }
        let users = list(&self.run.image_dir(self.domain.name(), image).join("users"))?;
        // The mount that is being made is one of them.
        Err(MountError::Replaced { image: *image, users: users.len().saturating_sub(1) })
    }

    /// Keeps the image in the store while the superblock of a mount exists.
    fn keep_for_superblock(
        &self,
        image: &Digest,
        mount: &OwnedFd,
        created: i64,
    ) -> Result<(), MountError> {
        let superblock = Superblock::of(mount, &self.root)?;
        let mut root = Root::new(RootKind::Mount, self.superblock_root(image, &superblock));
        root.images = vec![*image];
        root.note = "its superblock".to_owned();
        root.created = created;
        root.boot_id = Some(Kernel::new(&self.root)?.boot_id);
        Ok(unless_read_only(self.domain.put_root(&root))?)
    }

    /// Mounts a metadata image, detached, with its objects' sizes checked and `shown` as its
    /// source.
    pub(super) fn mount_image(
        &self,
        image: &Digest,
        shown: &Digest,
        scratch: BorrowedFd<'_>,
    ) -> Result<(OwnedFd, PinRecord), MountError> {
        let file = self.domain.open_image(image)?;
        let verity = self.domain.has_verity();
        check_digest(&file, image, verity)?.map_or(Ok(()), |reason| Err(damaged(image, reason)))?;
        let objects = self.domain.objects_dir().ok_or(MountError::NoDirectory)?;
        let objects_checked = if verity || file.is_immutable().at("look at", file.path())? {
            // The kernel checks every block with fs-verity, and nobody truncates immutable files.
            0
        } else {
            self.check_sizes(&file, image, &objects)?
        };
        let descriptor = file.descriptor().ok_or(MountError::NoDirectory)?;
        let (mount, backing) = mount_erofs(descriptor, &source_of(shown), scratch, self.force_loop)
            .map_err(refused)?;
        let record = PinRecord {
            backend: Backend::Overlay,
            base: None,
            delta: None,
            backing,
            verity,
            objects_checked,
            image_bytes: file.size().at("look at", file.path())?,
            files: vec![file_numbers(&file)?],
            created: cofolio_store::now(),
        };
        Ok((mount, record))
    }

    /// The read-only overlay that a mount is to show, mounted if missing.
    pub(super) fn view(&self, record: &MountRecord, pin: &Pinned) -> Result<OwnedFd, MountError> {
        let (image, options) = (&record.image, &record.options);
        let (idmap, label) = (options.idmap.as_ref(), options.label.as_deref());
        let at = pin.dir.join("views").join(view_key(record));
        if has_own_view(record) {
            // An earlier mount with the same target may have left its own.
            take_down(&at)?;
        }
        fs::create_dir_all(&at).at("create", &at)?;
        if let Some(root) = mounted_root(&at, OVERLAY_MAGIC)? {
            return Ok(root);
        }
        let mapped = idmap.map(|idmap| self.mapped(pin, idmap)).transpose()?;
        let layers = mapped.as_ref().unwrap_or(&pin.layers);
        let idmapped = idmap.is_some();
        let mount = self.overlay(image, (layers, pin.backend), label, None, idmapped)?;
        self.step(Step::ViewMade);
        attach_at(&mount, &at)?;
        self.step(Step::Viewed);
        mounted_root(&at, OVERLAY_MAGIC)?.ok_or_else(|| unmounted(at))
    }

    /// Unmounts the oldest read-only overlays without a recorded user, until few are left.
    /// Unrecorded mounts of one keep its superblock.
    pub(super) fn trim_views(&self, domain: &str, image: &Digest) -> Result<(), MountError> {
        /// An overlay without users is worth keeping for the next container with the same id map.
        const VIEWS_MAX: usize = 8;
        let dir = self.run.image_dir(domain, image);
        for views in [dir.join("views"), dir.join(OWN).join("views")] {
            let keys = list(&views)?;
            if keys.len() <= VIEWS_MAX {
                continue;
            }
            let (records, _) = self.run.records()?;
            let used: HashSet<String> = records
                .iter()
                .filter(|record| record.image == *image && record.domain == domain)
                .map(view_key)
                .collect();
            // Numbers of mounts grow.
            let age =
                |path: &Path| numbers_at(path).map_or(0, |found| found.unique.unwrap_or(found.id));
            let unused = keys.iter().filter(|key| !used.contains(*key)).map(|key| views.join(key));
            let mut unused: Vec<_> = unused.map(|path| (age(&path), path)).collect();
            unused.sort();
            for (_, path) in unused.iter().take(keys.len() - VIEWS_MAX) {
                take_down(path)?;
            }
        }
        Ok(())
    }

    /// An overlay of the image, detached.
    pub(crate) fn overlay(
        &self,
        image: &Digest,
        (layers, backend): (&[OwnedFd], Backend),
        label: Option<&str>,
        upper: Option<&super::upper::OpenUpper>,
        idmapped: bool,
    ) -> Result<OwnedFd, MountError> {
        let objects = self.domain.objects_dir().ok_or(MountError::NoDirectory)?;
        let objects = open_dir(&objects).at("open", &objects)?;
        let overlay = Overlay {
            source: &source_of(image),
            metadata: &layers.iter().map(AsFd::as_fd).collect::<Vec<_>>(),
            objects: objects.as_fd(),
            upper: upper.map(|upper| (upper.upper.as_fd(), upper.work.as_fd())),
            volatile: upper.is_some_and(|upper| upper.volatile),
            label,
            // A pack has its data itself: the layer below checks it.
            verity: self.domain.has_verity() && backend == Backend::Overlay,
        };
        let mount = overlay.mount(&self.styles);
        mount.map_err(|error| MountError::from_kernel(error, idmapped))
    }

    /// Id-mapped copies of the image's EROFS mounts. overlayfs refuses to be id-mapped itself, but
    /// over an id-mapped mount it shows the mapped owners.
    pub(crate) fn mapped(&self, pin: &Pinned, idmap: &IdMap) -> Result<Vec<OwnedFd>, MountError> {
        let namespace = idmap.namespace().map_err(|error| MountError::from_kernel(error, true))?;
        let rdonly = MountAttrFlags::MOUNT_ATTR_RDONLY;
        let mapped = pin.layers.iter().map(|layer| {
            clone_mount(layer, Path::new(""), rdonly, Some(namespace.as_fd()))
                .map_err(|error| MountError::from_kernel(error, true))
        });
        mapped.collect()
    }

    /// Unmounts what is pinned of an image, unless one of our mounts uses it.
    pub(crate) fn unpin_if_idle(
        &self,
        domain: &str,
        image: &Digest,
        lock: &ImageLock,
    ) -> Result<Unpinned, MountError> {
        if !self.is_idle(domain, image)? {
            return Ok(Unpinned::Needed);
        }
        let record = self.pin_record(domain, image)?;
        if record.as_ref().is_some_and(|record| record.backend == Backend::InodeShare) {
            return self.unpin_domain_if_idle(domain, image, lock);
        }
        let unpinned = self.take_down_pin(domain, image)?;
        self.release_base(domain, image, record.and_then(|record| record.base), lock)?;
        Ok(unpinned)
    }

    /// With `inode-share` a read of one image may go on through another with the same file. Linux
    /// 7.2 keeps that image's inode but not its superblock ("Busy inodes after unmount"). So all
    /// superblocks of a domain stay while any is used, and go together.
    fn unpin_domain_if_idle(
        &self,
        domain: &str,
        image: &Digest,
        lock: &ImageLock,
    ) -> Result<Unpinned, MountError> {
        // While it is held nobody becomes a user.
        let Some(_alone) = self.run.try_lock_domain(domain)? else { return Ok(Unpinned::Needed) };
        let pinned = self.pinned_images()?;
        let mut others = Vec::new();
        for (_, other) in pinned.iter().filter(|(name, other)| name == domain && other != image) {
            match self.pin_record(domain, other)?.map(|record| record.backend) {
                Some(Backend::Overlay) => {}
                // One that is not pinned yet may be about to be, for a user that has come.
                _ if !self.is_idle(domain, other)? => return Ok(Unpinned::Needed),
                Some(Backend::InodeShare) => others.push(other),
                None => {}
            }
        }
        if self.is_shared_elsewhere(domain, others.iter().copied().chain([image]))? {
            return Ok(Unpinned::Elsewhere);
        }
        let unpinned = self.take_down_pin(domain, image)?;
        for other in others {
            // Whoever has its lock mounts it now, or will look here next.
            let own = if lock.covers(other) { None } else { self.run.try_lock_image(other)? };
            if own.is_some() || lock.covers(other) {
                self.take_down_pin(domain, other)?;
            }
        }
        Ok(unpinned)
    }

    /// Whether a superblock of these images, which our own mounts do not use, has other users.
    ///
    /// An overlay can only get a layer of ours from a mount of ours. So only those count that existed
    /// when no such mount was left; until the next one is made, their names are kept in the domain's
    /// `overlays.json`. Containers of other engines that started between our first mount and our last
    /// unmount keep the superblocks until they end, and one that started before as well if this
    /// namespace does not show its overlay (rootless podman).
    fn is_shared_elsewhere<'d>(
        &self,
        domain: &str,
        images: impl Iterator<Item = &'d Digest>,
    ) -> Result<bool, MountError> {
        let (mut devices, mut numbers) = (HashSet::new(), Vec::new());
        for image in images {
            if !self.forget_dead(domain, image)? {
                return Ok(true);
            }
            let dir = self.run.image_dir(domain, image);
            let views = dir.join("views");
            let views = list(&views)?.into_iter().map(|key| (views.join(key), OVERLAY_MAGIC));
            for (path, magic) in views.chain([(dir.join("erofs"), EROFS_MAGIC)]) {
                if let Some(mount) = mounted_root(&path, magic)? {
                    let found = rustix::fs::fstat(&mount).at("look at", path)?.st_dev;
                    devices.insert((rustix::fs::major(found), rustix::fs::minor(found)));
                    let number = cofolio_sys::mount::mount_id(&mount, "");
                    numbers.push(number.at("look at", "image root")?.unique);
                }
            }
        }
        if devices.is_empty() {
            return Ok(false);
        }
        let oldest = numbers.into_iter().min().flatten();
        let found = in_use::users_elsewhere(&self.root, self.run.path(), &devices, oldest)
            .at("look at the mounts of all processes below", self.root.join("proc"))?;
        let path = self.run.overlays_path(domain);
        let Elsewhere::Overlays(mut overlays) = found else {
            remove_file(&path)?;
            return Ok(true);
        };
        if let Ok(Some(before)) = read_json::<BTreeSet<String>>(&path) {
            overlays.retain(|overlay| before.contains(overlay));
        }
        if overlays.is_empty() {
            remove_file(&path)?;
            return Ok(false);
        }
        let (aside, json) = (path.with_extension("tmp"), to_json(&path, &overlays)?);
        replace_file(CWD, &aside, &path, &json, Purpose::Record, false).at("write", &path)?;
        Ok(true)
    }

    /// Whether an image is pinned, and none of our mounts uses it.
    fn is_idle(&self, domain: &str, image: &Digest) -> Result<bool, MountError> {
        let dir = self.run.image_dir(domain, image);
        // A popular image has thousands of users, and the first one is enough.
        let is_real = |user: &str| Superblock::from_user(user).is_none();
        Ok(dir.exists() && find_name(&dir.join("users"), is_real)?.is_none())
    }

    /// Forgets superblocks of an image that have ended. Says whether all have that are not pinned.
    fn forget_dead(&self, domain: &str, image: &Digest) -> Result<bool, MountError> {
        let users = self.run.image_dir(domain, image).join("users");
        let mut all = true;
        for user in list(&users)? {
            match Superblock::from_user(&user) {
                Some(superblock) if superblock.is_alive(&self.root) => all = false,
                Some(superblock) => {
                    let id = self.superblock_root(image, &superblock);
                    unless_read_only(self.domain_of(domain)?.remove_root(RootKind::Mount, &id))?;
                    remove_file(&users.join(user))?;
                }
                None => {}
            }
        }
        Ok(all)
    }

    pub(super) fn pin_record(
        &self,
        domain: &str,
        image: &Digest,
    ) -> Result<Option<PinRecord>, MountError> {
        Ok(read_json(&self.run.image_dir(domain, image).join("pin.json"))?)
    }

    /// Unmounts a pinned image, with its lock held. If its superblock has other users, the image
    /// keeps its directory and the superblock's root until [`Mounter::reconcile`] finds it ended.
    fn take_down_pin(&self, domain: &str, image: &Digest) -> Result<Unpinned, MountError> {
        let dir = self.run.image_dir(domain, image);
        for dir in [dir.join(OWN), dir.clone()] {
            if let Some(mount) = mounted_root(&dir.join("erofs"), EROFS_MAGIC)? {
                // First, so that it is known whoever dies after this.
                let superblock = Superblock::of(mount, &self.root)?;
                mark_user(&self.run, domain, image, &superblock.user())?;
            }
            for key in list(&dir.join("views"))? {
                take_down(&dir.join("views").join(key))?;
            }
            take_down(&dir.join("erofs"))?;
            for name in ["pin.json", "pin.tmp", &source_of(image)] {
                // The last one is a link that a killed process left (see `mount_erofs`).
                remove_file(&dir.join(name))?;
            }
            let _ = fs::remove_dir(dir.join("views"));
            if dir.ends_with(OWN) {
                let _ = fs::remove_dir(&dir);
            }
        }
        self.step(Step::Unpinned);
        if !self.has_ended(domain, image)? {
            return Ok(Unpinned::Elsewhere);
        }
        let _ = fs::remove_dir(dir.join("users"));
        let _ = fs::remove_dir(&dir);
        Ok(Unpinned::Done)
    }

    /// Whether the superblocks of an unpinned image have ended.
    fn has_ended(&self, domain: &str, image: &Digest) -> Result<bool, MountError> {
        self.patience.wait(|| self.forget_dead(domain, image))
    }

    /// Id of the root that keeps an image while a superblock of it exists, even if the run
    /// directory is lost.
    fn superblock_root(&self, image: &Digest, superblock: &Superblock) -> String {
        format!("{}-{image}-{}", self.run.tag(), superblock.user())
    }

    /// Whether a root is that of a superblock that exists.
    pub(super) fn is_root_of_living(&self, root: &Root) -> bool {
        let prefix = root.images.first().map(|image| format!("{}-{image}-", self.run.tag()));
        prefix
            .and_then(|prefix| Superblock::from_user(root.id.strip_prefix(&prefix)?))
            .is_some_and(|superblock| superblock.is_alive(&self.root))
    }

    /// Images with a directory of their own, by domain.
    pub(crate) fn pinned_images(&self) -> Result<Vec<(String, Digest)>, MountError> {
        let images = self.run.path().join("images");
        let mut found = Vec::new();
        for domain in list(&images)? {
            let names = list(&images.join(&domain))?;
            let digests = names.iter().filter_map(|name| name.parse::<Digest>().ok());
            found.extend(digests.map(|image| (domain.clone(), image)));
        }
        found.sort();
        Ok(found)
    }

    /// The pinned images of all trust domains.
    pub fn pins(&self) -> Result<Vec<Pin>, MountError> {
        let mut pins = Vec::new();
        for (domain, image) in self.pinned_images()? {
            let dir = self.run.image_dir(&domain, &image);
            let path = dir.join("erofs");
            if mounted_root(&path, EROFS_MAGIC).ok().flatten().is_none() {
                continue;
            }
            let users = list(&dir.join("users"))?;
            let users = users.iter().filter(|user| Superblock::from_user(user).is_none()).count();
            let record = read_json(&dir.join("pin.json")).unwrap_or(None);
            pins.push(Pin { domain, image, path, users, record });
        }
        Ok(pins)
    }
}

/// Overlays that differ in nothing visible are one.
fn view_key(record: &MountRecord) -> String {
    let MountOptions { idmap, label, .. } = &record.options;
    let key = if idmap.is_none() && label.is_none() {
        "plain".to_owned()
    } else {
        let idmap = idmap.as_ref().map(ToString::to_string).unwrap_or_default();
        let text = format!("{idmap}\0{}", label.as_deref().unwrap_or_default());
        const_hex::encode(&Sha256::digest(text.as_bytes())[..16])
    };
    if has_own_view(record) { format!("{key}-{}", record.id) } else { key }
}

/// Whether a mount shares its overlay with no other. An overlay keeps the inode of each object that
/// it has looked up. If a repair has replaced an altered object since, a shared overlay still serves
/// the altered bytes, but the new object was hashed. fs-verity refuses altered bytes.
fn has_own_view(record: &MountRecord) -> bool {
    record.verified && !record.verity && record.backend == Backend::Overlay
}

/// Device and inode number.
pub(super) fn file_numbers(file: &StoredFile) -> Result<(u64, u64), MountError> {
    let descriptor = file.descriptor().ok_or(MountError::NoDirectory)?;
    let stat = rustix::fs::fstat(descriptor).at("look at", file.path())?;
    Ok((stat.st_dev, stat.st_ino))
}

/// The root of a mount of this kind at `path`, if there is one on top.
pub(super) fn mounted_root(path: &Path, magic: u32) -> Result<Option<OwnedFd>, MountError> {
    Ok(mounted_at(path, magic)?.map(|(root, _)| root))
}

/// [`mounted_root`], and which mount that is.
pub(super) fn mounted_at(
    path: &Path,
    magic: u32,
) -> Result<Option<(OwnedFd, MountId)>, MountError> {
    let root = match open_dir(path) {
        Err(rustix::io::Errno::NOENT) => return Ok(None),
        other => other.at("open", path)?,
    };
    let id = cofolio_sys::mount::mount_id(&root, "").at("look at", path)?;
    let kind = rustix::fs::fstatfs(&root).at("look at", path)?.f_type;
    // The magic number is 32 bits in a field of the machine's word size.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "see above")]
    let kind = kind as u32;
    Ok((id.is_root && kind == magic).then_some((root, id)))
}

fn unmounted(path: PathBuf) -> MountError {
    MountError::State { path, reason: "it does not stay mounted".to_owned() }
}

fn attach_at(mount: &OwnedFd, at: &Path) -> Result<(), MountError> {
    let dir = open_dir(at).at("open", at)?;
    attach(mount, &dir).map_err(refused)
}

/// Unmounts everything at a mount point of the run directory, and removes it.
pub(crate) fn take_down(at: &Path) -> Result<(), MountError> {
    // As many as could ever be stacked there by a race that the locks exclude.
    const STACK_MAX: u32 = 16;
    for _ in 0..STACK_MAX {
        match cofolio_sys::mount::mount_id(CWD, at) {
            Ok(id) if id.is_root => {}
            _ => break,
        }
        // Lazily: somebody may be looking around in it, and containers use mounts of their own.
        kernel::unmount(at, true).map_err(refused)?;
    }
    let _ = fs::remove_dir(at);
    Ok(())
}
