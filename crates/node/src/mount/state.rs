//! The run directory: what is mounted, by whom, and locks.
//!
//! ```text
//! <run>/                          /run/cofolio/<store-id>, mode 0711
//!   mounts/<id>.json              one record per mount, written before and after each step
//!   aside/<id>.<stripe>           a record that is being written, and then goes to mounts/
//!   attached/<id>.<stripe>        likewise, and says that its mount is in place: the ledger watches
//!                                 what leaves here, and is woken once for each mount
//!   images/<domain>/<digest>/     one pinned image
//!     pin.json                    how it was mounted, what was checked
//!     erofs/                      its one EROFS superblock is mounted here
//!     views/<key>/                read-only overlays, one per id map and label
//!     own/{pin.json,erofs,views}  the same without its base, for mounts that were measured
//!     users/<id>                  an empty file per record that uses it, and others (see `pin`)
//!   images/<domain>/overlays.json other engines' overlays that may have a layer of ours
//!   containers/<name>/            one container of `run` (see the module of that name)
//!   locks/<xx>                    256 stripes, by the first byte of the image's digest
//!   locks/domain-<domain>         shared to add a user to an image of `inode-share`, exclusive to
//!                                 take such images' superblocks down
//!   locks/recording-<domain>      of whoever records a profile
//! ```
//!
//! *Who may write what.* An image's files, and the records that name it, change only with the
//! stripe of its digest locked: the lock's holder who finds a half-way record knows that its writer
//! is dead. `mounts/<id>.json` is made with `link`, which decides between two mounts at one target.
//!
//! *Order.* A record exists before anything else of its mount and goes last; it has the kernel's
//! number of the mount before that is attached anywhere. So every other trace is found from a
//! record, or has none and can go.

use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use crate::owner::{is_own, may_others_write};
use crate::settings::Backend;
use cofolio_store::task::Cancel;
use cofolio_store::{Digest, Purpose, Store, replace_file};
use rustix::fs::{CWD, FlockOperation, Mode, OFlags};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::error::{At as _, MountError};
use super::kernel::Backing;
use super::mountinfo;
use super::request::MountOptions;

/// Where a store's runtime state lives.
#[derive(Debug, Clone)]
pub struct RunDir {
    path: PathBuf,
    /// What ends the waiting for locks.
    waiting: Cancel,
}

/// Where records are written that say that their mount is in place, and where all others.
pub(crate) const ATTACHED: &str = "attached";
const ASIDE: &str = "aside";

/// How far a mount has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MountPhase {
    /// Being made. If nobody holds the image's lock, its maker is dead.
    Intent,
    /// In place. Earlier programs said of a mount that they took away that it was leaving.
    #[serde(alias = "leaving")]
    Mounted,
}

/// Where the changes of a writable mount go.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Upper {
    /// Directory that holds `upper/` and `work/`.
    pub dir: PathBuf,
    /// Left in place at unmount.
    pub keep: bool,
    /// Given by the caller, and not a directory of the store's.
    pub given: bool,
    /// Bytes that changes may take.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_bytes: Option<u64>,
    /// The only directories of the image that show changes; without any, its root does.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub dirs: Vec<PathBuf>,
    /// Major and minor number of the overlay that these directories are of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<(u32, u32)>,
}

/// The kernel's numbers of a mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountNumbers {
    /// As in mountinfo; given to another mount later.
    pub id: u64,
    /// Never given twice while the machine is up (Linux 6.8).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unique: Option<u64>,
}

impl MountNumbers {
    /// Whether these numbers mean the same mount.
    pub(super) fn is(&self, id: u64, unique: Option<u64>) -> bool {
        match (self.unique, unique) {
            (Some(one), Some(other)) => one == other,
            _ => self.id == id,
        }
    }
}

/// A mount namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Namespace {
    /// Inode number of its file under `/proc`, which the kernel reuses once this one is gone.
    #[serde(rename = "namespace")]
    pub inode: u64,
    /// Never reused while the machine is up (Linux 6.11). Older records have none.
    #[serde(default, rename = "namespace_id", skip_serializing_if = "Option::is_none")]
    pub id: Option<u64>,
}

impl Namespace {
    /// What a `/proc/PID/ns/mnt` stands for.
    pub(crate) fn at(path: &Path) -> io::Result<Self> {
        let file = fs::File::open(path)?;
        let id = cofolio_sys::mount::namespace_id(&file);
        Ok(Self { inode: file.metadata()?.ino(), id })
    }

    /// Whether the two are one, as far as can be known.
    pub(crate) fn is(&self, other: &Self) -> bool {
        let ids = self.id.zip(other.id);
        self.inode == other.inode && ids.is_none_or(|(one, other)| one == other)
    }
}

/// One mount.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountRecord {
    /// Its id: follows from the run directory and the target.
    pub id: String,
    /// Trust domain.
    pub domain: String,
    /// Digest of the metadata image.
    pub image: Digest,
    /// Where it is mounted; absolute, without symbolic links.
    pub target: PathBuf,
    /// The target was made for the mount, and goes with it.
    #[serde(default)]
    pub created_target: bool,
    /// Where changes go; `None` for a read-only mount.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upper: Option<Upper>,
    /// Directory of the store's for whoever uses the mount; goes with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scratch: Option<PathBuf>,
    /// How it appears.
    #[serde(flatten)]
    pub options: MountOptions,
    /// How it is mounted.
    #[serde(default)]
    pub backend: Backend,
    /// It is of the image's own metadata image, beside a mount over a base.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub own: bool,
    /// The kernel checks every read (fs-verity).
    #[serde(default)]
    pub verity: bool,
    /// Every object was hashed again before it was mounted.
    #[serde(default)]
    pub verified: bool,
    /// How far it has come.
    pub phase: MountPhase,
    /// The kernel's numbers, known before it is attached.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mount: Option<MountNumbers>,
    /// The mount namespace that it was made in.
    #[serde(flatten)]
    pub namespace: Namespace,
    /// The boot that it was made in.
    pub boot_id: String,
    /// Process that made it.
    pub pid: u32,
    /// When, in seconds since 1970.
    pub created: i64,
}

/// What `pin.json` holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PinRecord {
    /// How it is mounted.
    #[serde(default)]
    pub backend: Backend,
    /// The image that it is mounted over, if it is only what it has besides.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<Digest>,
    /// That part: the store may make the image another base and delta while this one is mounted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delta: Option<Digest>,
    /// How its bytes reach the kernel.
    pub backing: Backing,
    /// The kernel checks every read of an object.
    pub verity: bool,
    /// Files whose objects' sizes were compared with the image; 0 if they were protected.
    pub objects_checked: u64,
    /// Size of the metadata image in bytes.
    pub image_bytes: u64,
    /// Device and inode number of each file that is mounted: the metadata image, or the pack and
    /// its segments. While it is mounted, no other file gets these numbers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<(u64, u64)>,
    /// When it was pinned, in seconds since 1970.
    pub created: i64,
}

/// A lock file that is locked until this is dropped. The file is never removed: otherwise one
/// process could lock the old inode and another the new one.
#[derive(Debug)]
pub(crate) struct Lock(OwnedFd);

impl Lock {
    /// Nothing if another process has it.
    fn take(path: &Path, how: FlockOperation) -> Result<Option<Self>, MountError> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC;
        let file = rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR).at("open", path)?;
        Ok(try_flock(&file, how, path)?.then_some(Self(file)))
    }

    fn try_exclusive(path: &Path) -> Result<Option<Self>, MountError> {
        Self::take(path, FlockOperation::NonBlockingLockExclusive)
    }
}

/// Whether a lock could be had at once.
pub(crate) fn try_flock(
    file: &OwnedFd,
    how: FlockOperation,
    path: &Path,
) -> Result<bool, MountError> {
    match rustix::fs::flock(file, how) {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::WOULDBLOCK | rustix::io::Errno::INTR) => Ok(false),
        Err(errno) => Err(errno).at("lock", path),
    }
}

impl Drop for Lock {
    /// Closing is not enough: a process that is just being started has a copy of it.
    fn drop(&mut self) {
        let _ = rustix::fs::flock(&self.0, FlockOperation::Unlock);
    }
}

/// An image's lock, held until dropped.
#[derive(Debug)]
pub(crate) struct ImageLock {
    stripe: u8,
    _lock: Lock,
}

impl ImageLock {
    /// Whether it is the lock of this image, too.
    pub(crate) fn covers(&self, image: &Digest) -> bool {
        self.stripe == image.0[0]
    }
}

/// Makes a directory, and those above it that are missing. What it makes has the mode, whatever the
/// umask is.
fn make_directories(path: &Path, mode: u32) -> io::Result<()> {
    let is_missing = |dir: &&Path| !dir.as_os_str().is_empty() && !dir.is_dir();
    let missing: Vec<_> = path.ancestors().take_while(is_missing).collect();
    for dir in missing.into_iter().rev() {
        match DirBuilder::new().mode(mode).create(dir) {
            // Another process was first.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && dir.is_dir() => {}
            made => made.and_then(|()| fs::set_permissions(dir, Permissions::from_mode(mode)))?,
        }
    }
    Ok(())
}

/// A record is a few hundred bytes; an id map makes it grow.
const RECORD_SIZE_MAX: u64 = 1 << 20;

impl RunDir {
    /// The run directory of a store: `/run/cofolio/<store-id>`, or below `COFOLIO_RUN`.
    ///
    /// # Errors
    /// Those of [`RunDir::open`].
    pub fn of(store: &Store) -> Result<Self, MountError> {
        Self::open(store.run_dir())
    }

    /// A run directory elsewhere. It may be missing: the first mount makes it. It is refused if
    /// another user could have written its records, which say what to unmount and to remove.
    ///
    /// # Errors
    /// [`MountError::RunDirectory`], [`MountError::Io`].
    pub fn open(path: impl Into<PathBuf>) -> Result<Self, MountError> {
        let run = Self { path: path.into(), waiting: Cancel::default() };
        run.check_owner()?;
        Ok(run)
    }

    /// The same directory; `cancel` ends the waiting for its locks.
    pub(crate) fn waits_until(mut self, cancel: &Cancel) -> Self {
        self.waiting = cancel.clone();
        self
    }

    /// Directories in it that are not a runtime's.
    pub(crate) const OWN: [&str; 6] = ["mounts", ASIDE, ATTACHED, "images", "locks", "containers"];

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Fails as [`RunDir::open`] does. Missing directories are nobody's.
    fn check_owner(&self) -> Result<(), MountError> {
        let above = self.path.parent().map(|above| (above, fs::metadata(above)));
        // A link of its name could be anybody's.
        let here = Some((self.path(), fs::symlink_metadata(&self.path)));
        for (path, found) in above.into_iter().chain(here) {
            let found = match found {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                found => found.at("look at", path)?,
            };
            let (owner, mode) = (found.uid(), found.mode());
            let problem = if !found.is_dir() {
                "is no directory".to_owned()
            } else if !is_own(owner) {
                format!("belongs to user {owner}")
            } else if may_others_write(mode) && (mode & 0o1000 == 0 || path == self.path) {
                format!("can be written by other users (mode {:o})", mode & 0o7777)
            } else {
                continue;
            };
            return Err(MountError::RunDirectory { path: path.to_owned(), problem });
        }
        Ok(())
    }

    /// Makes missing directories, with their modes whatever the umask is. If `/` is shared, as with
    /// systemd, services see mounts in here, as they see those of container engines.
    ///
    /// # Errors
    /// Those of [`RunDir::open`], since somebody else may have made the directory meanwhile.
    pub fn prepare(&self) -> Result<(), MountError> {
        self.check_owner()?;
        // No host user may run a pinned image's set-user-id programs. Root in a user namespace must
        // reach its container's root filesystem, by name only.
        let modes = [0o700, 0o700, 0o700, 0o700, 0o700, 0o711];
        for (name, mode) in [("", 0o711)].into_iter().chain(Self::OWN.into_iter().zip(modes)) {
            let path = self.path.join(name);
            make_directories(&path, mode).at("create", path)?;
        }
        Ok(())
    }

    /// What tells our ids from those of another run directory on the same store.
    pub(crate) fn tag(&self) -> String {
        cofolio_store::run_tag(&self.path)
    }

    pub(crate) fn id_of(&self, target: &Path) -> String {
        format!(
            "{}-{}",
            self.tag(),
            const_hex::encode(&Sha256::digest(target.as_os_str().as_bytes())[..8])
        )
    }

    pub(crate) fn image_dir(&self, domain: &str, image: &Digest) -> PathBuf {
        self.path.join("images").join(domain).join(image.to_string())
    }

    /// Locks a directory that others may lock, too; [`RunDir::waits_until`] ends the waiting.
    pub(crate) fn wait_for_flock(&self, dir: &OwnedFd, path: &Path) -> Result<(), MountError> {
        self.waiting.wait_for(|| {
            let is_locked = try_flock(dir, FlockOperation::NonBlockingLockExclusive, path)?;
            Ok(is_locked.then_some(()))
        })
    }

    fn record_path(&self, id: &str) -> PathBuf {
        self.path.join("mounts").join(format!("{id}.json"))
    }

    /// Overlays that may have a layer of a trust domain's (see `pin`).
    pub(super) fn overlays_path(&self, domain: &str) -> PathBuf {
        self.path.join("images").join(domain).join("overlays.json")
    }

    /// Locks everything of an image. Waits.
    pub(crate) fn lock_image(&self, image: &Digest) -> Result<ImageLock, MountError> {
        self.lock_stripe(image.0[0])
    }

    fn lock_stripe(&self, stripe: u8) -> Result<ImageLock, MountError> {
        let path = self.stripe_path(stripe);
        let lock = self.waiting.wait_for(|| Lock::try_exclusive(&path))?;
        Ok(ImageLock { stripe, _lock: lock })
    }

    /// A record and its image's lock, without which nobody may change it. While we wait for the lock
    /// the record may be replaced by another image's.
    pub(crate) fn lock_record(
        &self,
        id: &str,
    ) -> Result<Option<(MountRecord, ImageLock)>, MountError> {
        loop {
            let Some(found) = self.record(id)? else { return Ok(None) };
            let lock = self.lock_image(&found.image)?;
            match self.record(id)? {
                Some(record) if record.image != found.image => {}
                record => return Ok(record.map(|record| (record, lock))),
            }
        }
    }

    pub(crate) fn try_lock_image(&self, image: &Digest) -> Result<Option<ImageLock>, MountError> {
        let stripe = image.0[0];
        let lock = Lock::try_exclusive(&self.stripe_path(stripe))?;
        Ok(lock.map(|lock| ImageLock { stripe, _lock: lock }))
    }

    fn stripe_path(&self, stripe: u8) -> PathBuf {
        self.path.join(format!("locks/{stripe:02x}"))
    }

    /// Keeps superblocks of a trust domain from being taken down.
    pub(crate) fn share_domain(&self, domain: &str) -> Result<Lock, MountError> {
        let path = self.path.join(format!("locks/domain-{domain}"));
        self.waiting.wait_for(|| Lock::take(&path, FlockOperation::NonBlockingLockShared))
    }

    /// The lock of a trust domain, alone, unless somebody else has it for more than a moment.
    pub(crate) fn try_lock_domain(&self, domain: &str) -> Result<Option<Lock>, MountError> {
        const TRIES: u32 = 20;
        let path = self.path.join(format!("locks/domain-{domain}"));
        for _ in 0..TRIES {
            if let Some(lock) = Lock::try_exclusive(&path)? {
                return Ok(Some(lock));
            }
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        Ok(None)
    }

    /// The lock of whoever records a profile in a trust domain, unless somebody else has it.
    pub(crate) fn try_lock_recording(&self, domain: &str) -> Result<Option<Lock>, MountError> {
        Lock::try_exclusive(&self.path.join(format!("locks/recording-{domain}")))
    }

    /// The record of a mount.
    ///
    /// # Errors
    /// [`MountError::State`] if it is damaged; [`MountError::Io`].
    pub fn record(&self, id: &str) -> Result<Option<MountRecord>, MountError> {
        // Ids come from callers, too.
        if !is_id(id) {
            return Ok(None);
        }
        let path = self.record_path(id);
        let record: Option<MountRecord> = read_json(&path)?;
        if let Some(record) = &record
            && record.id != id
        {
            return Err(MountError::State { path, reason: "it is another mount's".to_owned() });
        }
        Ok(record)
    }

    /// The record of the mount at a target, or with an id.
    ///
    /// # Errors
    /// As [`RunDir::record`]; [`MountError::NotMounted`], [`MountError::NoRecord`].
    pub fn find(&self, target_or_id: &Path) -> Result<MountRecord, MountError> {
        if let Some(id) = target_or_id.to_str()
            && let Some(record) = self.record(id)?
        {
            return Ok(record);
        }
        // The target may be gone, so that it cannot be resolved: try it as given then.
        let target = fs::canonicalize(target_or_id).unwrap_or_else(|_| target_or_id.to_owned());
        if let Some(record) = self.record(&self.id_of(&target))?
            && record.target == target
        {
            return Ok(record);
        }
        // Somebody may have moved it, or a directory above it.
        if let Ok(found) = cofolio_sys::mount::mount_id(CWD, &target)
            && found.is_root
        {
            let is = |record: &MountRecord| {
                record.mount.is_some_and(|mount| mount.is(found.id, found.unique))
            };
            if let Some(record) = self.records()?.0.into_iter().find(is) {
                return Ok(record);
            }
            let mounts =
                mountinfo::read(Path::new("/")).at("read", "/proc/thread-self/mountinfo")?;
            if mounts.iter().any(|mount| mount.id == found.id && mount.image().is_some()) {
                return Err(MountError::NoRecord(target));
            }
        }
        Err(MountError::NotMounted(target_or_id.display().to_string()))
    }

    /// All records, by target. Damaged ones are errors of their own, beside the others.
    ///
    /// # Errors
    /// [`MountError::Io`] if the directory cannot be listed.
    pub fn records(&self) -> Result<(Vec<MountRecord>, Vec<MountError>), MountError> {
        let (mut records, mut damaged) = (Vec::new(), Vec::new());
        for id in self.record_ids()? {
            match self.record(&id) {
                Ok(record) => records.extend(record),
                Err(error) => damaged.push(error),
            }
        }
        records.sort_by(|a, b| a.target.cmp(&b.target));
        Ok((records, damaged))
    }

    pub(crate) fn record_ids(&self) -> Result<Vec<String>, MountError> {
        let names = list(&self.path.join("mounts"))?;
        Ok(names.iter().filter_map(|name| name.strip_suffix(".json")).map(str::to_owned).collect())
    }

    /// Makes the record of a mount that is about to be made; false if its id is taken.
    pub(crate) fn claim(&self, record: &MountRecord, lock: &ImageLock) -> Result<bool, MountError> {
        let path = self.record_path(&record.id);
        let temporary = self.temporary(record, lock);
        fs::write(&temporary, to_json(&path, record)?).at("write", &temporary)?;
        let linked = fs::hard_link(&temporary, &path);
        let _ = fs::remove_file(&temporary);
        match linked {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
            Err(error) => Err(error).at("write", &path),
        }
    }

    pub(crate) fn write(&self, record: &MountRecord, lock: &ImageLock) -> Result<(), MountError> {
        let path = self.record_path(&record.id);
        let (aside, json) = (self.temporary(record, lock), to_json(&path, record)?);
        replace_file(CWD, &aside, &path, &json, Purpose::Record, false).at("write", &path)
    }

    pub(crate) fn remove_record(&self, id: &str) -> Result<(), MountError> {
        remove_file(&self.record_path(id))
    }

    /// The temporary file is named after the writer's stripe: two writers never hold the same, and
    /// a leftover is told from a file in progress.
    fn temporary(&self, record: &MountRecord, lock: &ImageLock) -> PathBuf {
        let directory = match record.phase {
            MountPhase::Mounted => ATTACHED,
            _ => ASIDE,
        };
        self.path.join(format!("{directory}/{}.{:02x}", record.id, lock.stripe))
    }

    /// Removes what writers that died left under [`RunDir::temporary`].
    pub(crate) fn remove_temporaries(&self) -> Result<u32, MountError> {
        let mut removed = 0;
        for path in [ASIDE, ATTACHED].map(|name| self.path.join(name)) {
            removed += self.remove_temporaries_of(&path)?;
        }
        Ok(removed)
    }

    fn remove_temporaries_of(&self, dir: &Path) -> Result<u32, MountError> {
        let mut removed = 0;
        for name in list(dir)? {
            let Some((_, stripe)) = name.rsplit_once('.') else { continue };
            let _lock = match u8::from_str_radix(stripe, 16) {
                Ok(stripe) => self.lock_stripe(stripe)?,
                Err(_) => continue,
            };
            let path = dir.join(&name);
            if path.exists() {
                remove_file(&path)?;
                removed += 1;
            }
        }
        Ok(removed)
    }
}

/// 8 hex digits, a dash, 16 hex digits: never a path.
fn is_id(text: &str) -> bool {
    let hex = |part: &str, length| {
        part.len() == length && part.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
    };
    text.split_once('-').is_some_and(|(tag, name)| hex(tag, 8) && hex(name, 16))
}

/// Names in a directory, without those that are not UTF-8 (never ours); none if it is missing.
pub(crate) fn list(dir: &Path) -> Result<Vec<String>, MountError> {
    let mut names = Vec::new();
    find_name(dir, |name| {
        names.push(name.to_owned());
        false
    })?;
    Ok(names)
}

/// The first name in a directory of which `is_it` says so, as [`list`] finds them.
pub(crate) fn find_name(
    dir: &Path,
    mut is_it: impl FnMut(&str) -> bool,
) -> Result<Option<String>, MountError> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other.at("list", dir)?,
    };
    for entry in entries {
        if let Ok(name) = entry.at("list", dir)?.file_name().into_string()
            && is_it(&name)
        {
            return Ok(Some(name));
        }
    }
    Ok(None)
}

pub(crate) fn remove_file(path: &Path) -> Result<(), MountError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error).at("remove", path),
        _ => Ok(()),
    }
}

/// Whether an open file or directory is still the one at a path, and not a removed one of that name.
pub(crate) fn is_at(open: &OwnedFd, path: &Path) -> bool {
    let numbers = |stat: rustix::fs::Stat| (stat.st_dev, stat.st_ino);
    let held = rustix::fs::fstat(open).map(numbers);
    held.is_ok() && held == rustix::fs::stat(path).map(numbers)
}

/// Reads a file that others may have put there, if it is a regular one of at most [`RECORD_SIZE_MAX`] bytes; no
/// other is waited for.
pub(crate) fn read_small(path: &Path) -> io::Result<Vec<u8>> {
    use std::io::Read as _;
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = fs::File::from(rustix::fs::open(path, flags, Mode::empty())?);
    let bad = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
    if !file.metadata()?.is_file() {
        return Err(bad("it is not a regular file".to_owned()));
    }
    let mut text = Vec::new();
    if file.take(RECORD_SIZE_MAX + 1).read_to_end(&mut text)? as u64 > RECORD_SIZE_MAX {
        return Err(bad(format!("it is longer than {RECORD_SIZE_MAX} bytes")));
    }
    Ok(text)
}

pub(crate) fn read_json<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, MountError> {
    let damaged = |reason: String| MountError::State { path: path.to_owned(), reason };
    match read_small(path) {
        Ok(text) => serde_json::from_slice(&text).map(Some).map_err(|e| damaged(e.to_string())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) if error.kind() == io::ErrorKind::InvalidData => Err(damaged(error.to_string())),
        Err(error) => Err(error).at("read", path),
    }
}

pub(crate) fn to_json(path: &Path, value: &impl Serialize) -> Result<Vec<u8>, MountError> {
    serde_json::to_vec_pretty(value)
        .map_err(|error| MountError::State { path: path.to_owned(), reason: error.to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A process that is being started has copies of every descriptor. A copied lock once made
    /// whoever only tried it skip an idle base: three of fifteen test runs found one left.
    #[test]
    fn a_lock_is_given_up_although_a_copy_of_it_is_open() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("locks")).unwrap();
        let (run, image) = (RunDir::open(dir.path()).unwrap(), Digest([1; 32]));
        let lock = run.lock_image(&image).unwrap();
        let _copy = lock._lock.0.try_clone().unwrap();
        assert!(run.try_lock_image(&image).unwrap().is_none());
        drop(lock);
        assert!(run.try_lock_image(&image).unwrap().is_some());
    }

    /// Under a umask of 077 the group could not reach the daemon's socket, nor root in a user
    /// namespace its container.
    #[test]
    fn directories_have_their_modes_whatever_the_umask_is() {
        let test = "directories_have_their_modes_whatever_the_umask_is";
        // The umask is of the whole process.
        if std::env::var_os("COFOLIO_TEST_ALONE").is_none() {
            let mut alone = std::process::Command::new("sh");
            alone.args(["-c", "umask 077 && exec \"$0\" --exact \"$1\""]);
            alone.arg(std::env::current_exe().unwrap()).arg(format!("mount::state::tests::{test}"));
            let done = alone.env("COFOLIO_TEST_ALONE", "1").output().unwrap();
            let said = String::from_utf8_lossy(&done.stdout);
            assert!(done.status.success() && said.contains("1 passed"), "{said}");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        RunDir::open(dir.path().join("one/run")).unwrap().prepare().unwrap();
        let made = ["one", "one/run", "one/run/mounts", "one/run/containers"];
        for (made, mode) in made.into_iter().zip([0o711, 0o711, 0o700, 0o711]) {
            let found = dir.path().join(made).metadata().unwrap().permissions().mode() & 0o777;
            assert_eq!(found, mode, "{made}");
        }
    }

    /// Root's `gc` removed a directory that a record in another user's run directory named.
    #[test]
    fn a_run_directory_of_others_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let open = || RunDir::open(dir.path().join("base/run"));
        open().unwrap().prepare().unwrap();
        let opened = open().unwrap();
        let mode = |name: &str, mode| {
            fs::set_permissions(dir.path().join(name), Permissions::from_mode(mode)).unwrap();
        };
        let problem = || match open() {
            Err(MountError::RunDirectory { path, problem }) => {
                (path.strip_prefix(dir.path()).unwrap().to_owned(), problem)
            }
            other => panic!("{other:?}"),
        };
        // The group passed, although all of its members can write.
        for bits in [0o777, 0o731] {
            let others = format!("can be written by other users (mode {bits:o})");
            mode("base", bits);
            assert_eq!(problem(), ("base".into(), others.clone()));
            mode("base", bits | 0o1000);
            open().unwrap();
            mode("base/run", bits);
            assert_eq!(problem(), ("base/run".into(), others));
            mode("base/run", 0o711);
        }
        if rustix::process::geteuid().is_root() {
            for name in ["base", "base/run"] {
                std::os::unix::fs::chown(dir.path().join(name), Some(65534), None).unwrap();
                assert_eq!(problem(), (name.into(), "belongs to user 65534".to_owned()));
                std::os::unix::fs::chown(dir.path().join(name), Some(0), None).unwrap();
            }
        }
        fs::rename(dir.path().join("base/run"), dir.path().join("elsewhere")).unwrap();
        std::os::unix::fs::symlink("../elsewhere", dir.path().join("base/run")).unwrap();
        assert_eq!(problem(), ("base/run".into(), "is no directory".to_owned()));
        assert!(matches!(opened.prepare(), Err(MountError::RunDirectory { .. })));
    }

    #[test]
    fn ids_are_never_paths() {
        let run = RunDir::open("/run/cofolio/x").unwrap();
        assert!(is_id(&run.id_of(Path::new("/mnt"))));
        assert_ne!(run.id_of(Path::new("/mnt")), run.id_of(Path::new("/mnt2")));
        assert_ne!(
            run.id_of(Path::new("/mnt")),
            RunDir::open("/r").unwrap().id_of(Path::new("/mnt"))
        );
        for text in ["", "..", "../../etc/passwd", "01234567-0123456789abcde/", "a-b"] {
            assert!(!is_id(text), "{text}");
        }
    }
}
