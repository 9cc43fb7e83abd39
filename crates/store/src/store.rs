//! [`Store`]: the directory as a whole, its domains and its staging area.

use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sha2::{Digest as _, Sha256};

use crate::disk::{Disk, Kind, Lock, LockMode, Protection, Purpose, RealDisk, StoredFile};
use crate::domain::{self, Domain};
use crate::error::{At, Error, Result, by_hand, is_absent};
use crate::fsck::{Finding, FindingKind};
use crate::meta::{META_COPY, META_PATH, META_SIZE_MAX, Meta};
use crate::name;
use crate::record::RootKind;
use crate::records::to_json;
use crate::task::Cancel;

pub(crate) const DOMAINS: &str = "domains";
pub(crate) const STAGING: &str = "staging";
/// The domain that every store has.
pub const DEFAULT_DOMAIN: &str = "default";
/// Beginning of names of files that are being written; under an exclusive lock they are garbage.
pub(crate) const TEMPORARY: &str = ".tmp.";
/// A file that only takes room: see [`Store::use_reserve`].
const RESERVE: &str = "reserve";
/// Its size in bytes: enough for the records of some tens of mounts.
const RESERVE_SIZE: u32 = 256 << 10;
/// Where runtime state lies unless `COFOLIO_RUN` says otherwise.
const RUN: &str = "/run/cofolio";

/// How a store is made.
#[derive(Clone, Debug)]
pub struct InitOptions {
    /// Set the immutable flag on objects, images and layers where the filesystem allows it; `rm -r`
    /// cannot remove such a store, `chattr -R -i` comes first.
    pub immutable: bool,
}

impl Default for InitOptions {
    fn default() -> Self {
        Self { immutable: true }
    }
}

/// A store that is open. Cloning gives another handle on the same.
#[derive(Clone, Debug)]
pub struct Store {
    inner: Arc<Inner>,
    waiting: Cancel,
}

#[derive(Debug)]
struct Inner {
    disk: Arc<dyn Disk>,
    meta: Meta,
}

impl Store {
    /// Makes a store with the trust domain `default` in a missing or empty directory, whose parent
    /// must exist. An interrupted `init` can be repeated.
    ///
    /// # Errors
    /// [`Error::InTheWay`] if anything else, a store included, is there; [`Error::NotOurs`], [`Error::Io`].
    pub fn init(path: &Path, options: &InitOptions) -> Result<Self> {
        let disk = RealDisk::create_dir(path).at("create the store", &path.to_string_lossy())?;
        check_owner(&disk)?;
        Self::init_on(Arc::new(disk), options)
    }

    /// Opens a store.
    ///
    /// # Errors
    /// [`Error::NotAStore`], [`Error::NotOurs`], [`Error::UnknownFeature`] if it was written by a newer
    /// program, [`Error::Corrupt`], [`Error::Io`].
    pub fn open(path: &Path) -> Result<Self> {
        Self::open_on(open_disk(path)?)
    }

    /// Opens a store, or makes it if missing or empty; fails like [`Store::open`], [`Store::init`].
    pub fn open_or_init(path: &Path, options: &InitOptions) -> Result<Self> {
        match Self::open(path) {
            Err(Error::NotAStore { .. }) => {}
            other => return other,
        }
        match Self::init(path, options) {
            // Somebody was faster.
            Err(Error::InTheWay { entry, .. }) if entry == META_PATH => Self::open(path),
            other => other,
        }
    }

    /// [`Store::init`] on any disk, with its errors.
    pub fn init_on(disk: Arc<dyn Disk>, options: &InitOptions) -> Result<Self> {
        let shown = shown_path(&*disk);
        // Two that make the same store at once: the second waits, and then finds it.
        let _lock = disk.lock("", LockMode::Exclusive, true).at("lock", &shown)?;
        let mut entries = disk.list("").at("list", &shown)?;
        // A store is called one, whatever else it has.
        entries.sort_by_key(|(entry, _)| entry != META_PATH);
        for (entry, _) in entries {
            let ours = [DOMAINS, STAGING, RESERVE, "lost+found"].contains(&entry.as_str());
            if !ours && !entry.starts_with(TEMPORARY) {
                return Err(Error::InTheWay { path: shown, entry });
            }
        }
        // The directory, such as that of a mounted volume, may have let everybody in.
        disk.restrict().at("set mode 700 on", &shown)?;
        let domain = format!("{DOMAINS}/{DEFAULT_DOMAIN}");
        for directory in [DOMAINS, STAGING, &domain] {
            mkdir_if_missing(&*disk, directory)?;
        }
        domain::make_directories(&*disk, &domain)?;
        let meta =
            Meta::new(disk.random().at("get random bytes for", META_PATH)?, options.immutable);
        let store = Self::on(disk, meta);
        // The name of meta.json makes the directory a store, so everything else is durable first.
        let json = to_json(META_PATH, store.meta())?;
        let temporary = store.write_temporary(META_PATH, &json, Purpose::Record, false)?;
        let _ = store.keep_reserve();
        let disk = store.disk();
        disk.sync_all().at("sync", &shown)?;
        disk.rename(&temporary, META_PATH, false).at("replace", META_PATH)?;
        disk.sync_dir("").at("sync", &shown)?;
        // Durable after the other, so that it alone means damage and no interrupted init.
        let _ = store.keep_copy();
        Ok(store)
    }

    /// [`Store::open`] on any disk, with its errors.
    pub fn open_on(disk: Arc<dyn Disk>) -> Result<Self> {
        let meta = Meta::parse(&read_meta(&*disk)?)?;
        // A copy that cannot be read says nothing against it.
        match read_file(&*disk, META_COPY).and_then(|copy| Meta::parse(&copy)) {
            Ok(copy) if copy.id != meta.id => {
                let reason = format!("its id is {}, that in {META_COPY} is {}", meta.id, copy.id);
                Err(Error::corrupt(META_PATH, reason))
            }
            _ => Ok(Self::on(disk, meta)),
        }
    }

    /// The same store; `cancel` ends its waiting for locks that others hold, with [`Error::Cancelled`].
    #[must_use]
    pub fn waits_until(mut self, cancel: Cancel) -> Self {
        self.waiting = cancel;
        self
    }

    /// What ends the waiting for locks, and the removal of leftovers.
    pub fn waiting(&self) -> &Cancel {
        &self.waiting
    }

    fn on(disk: Arc<dyn Disk>, meta: Meta) -> Self {
        Self { inner: Arc::new(Inner { disk, meta }), waiting: Cancel::default() }
    }

    /// Opens a store for examination, with [`Store::open`]'s errors. A damaged `meta.json` is a
    /// finding, and counts as mended by [`Store::mend_meta`].
    pub fn open_damaged(path: &Path) -> Result<(Self, Option<Finding>)> {
        Self::open_damaged_on(open_disk(path)?)
    }

    fn open_damaged_on(disk: Arc<dyn Disk>) -> Result<(Self, Option<Finding>)> {
        match Self::open_on(disk.clone()) {
            Err(Error::Corrupt { path, reason }) => {
                let finding = Finding::new(FindingKind::MetaUnreadable, path, reason);
                let meta = Self::mended(&*disk)?;
                Ok((Self::on(disk, meta), Some(finding)))
            }
            other => other.map(|store| (store, None)),
        }
    }

    fn mended(disk: &dyn Disk) -> Result<Meta> {
        let copy = read_file(disk, META_COPY).unwrap_or_default();
        match (Meta::parse(&read_meta(disk).unwrap_or_default()), Meta::parse(&copy)) {
            // Two ids: only the true one can have runtime state.
            (Ok(meta), Ok(_)) if run_dir(&meta.id).exists() => return Ok(meta),
            (_, Err(Error::Corrupt { .. })) => {}
            (_, copy) => return copy,
        }
        let immutable = disk.protection().immutable;
        if let Some(id) = id_in_use(disk) {
            return Ok(Meta::new(id, immutable));
        }
        let damaged = [read_meta(disk).unwrap_or_default(), copy].join(&b'\n');
        let fresh = disk.random().at("get random bytes for", META_PATH)?;
        Ok(Meta::mended(&damaged, fresh, immutable))
    }

    /// Makes `meta.json` again if it is damaged or missing, and says whether it was. The store keeps
    /// its id if the file, its copy or mounts still tell it. A new id loses the runtime state of mounts.
    ///
    /// # Errors
    /// [`Error::NotAStore`] if there is neither, [`Error::UnknownFeature`] if it is sound but
    /// newer, [`Error::Io`].
    pub fn mend_meta(path: &Path) -> Result<bool> {
        let disk = open_disk(path)?;
        // Without it gc takes the temporary files.
        let _lock = disk.lock("", LockMode::Exclusive, true).at("lock", META_PATH)?;
        let (store, finding) = Self::open_damaged_on(disk.clone())?;
        if finding.is_some() {
            store.replace_file(META_PATH, &to_json(META_PATH, store.meta())?, true)?;
        }
        store.keep_copy().map(|()| finding.is_some())
    }

    /// Makes the copy of `meta.json` if it is missing or differs.
    fn keep_copy(&self) -> Result<()> {
        let json = read_meta(self.disk())?;
        if read_file(self.disk(), META_COPY).is_ok_and(|copy| copy == json) {
            return Ok(());
        }
        self.check_writable()?;
        self.replace_file(META_COPY, &json, true)
    }

    /// What is wrong with the mode of the store's directory: images hold secrets readable for all.
    pub fn open_to_others(&self) -> Result<Option<String>> {
        let mode = self.disk().stat("").at("look at", "the store")?.mode;
        Ok((mode & 0o077 != 0)
            .then(|| format!("mode {mode:o} and not 700: others can look into it")))
    }

    /// Restores the mode of the store's directory.
    pub fn restrict(&self) -> Result<()> {
        self.disk().restrict().at("set mode 700 on", "the store")
    }

    /// Makes the reserve if it is missing and there is room. It may fail: then there is none.
    pub(crate) fn keep_reserve(&self) -> Result<()> {
        if self.disk().stat(RESERVE).is_ok_and(|stat| stat.size > 0) {
            return Ok(());
        }
        let disk = self.disk();
        if disk.room_bytes().at("look at the room for", RESERVE)? < u64::from(RESERVE_SIZE) {
            return Ok(());
        }
        // Not zeros, which a filesystem may not keep.
        let content: Vec<u8> = (0..RESERVE_SIZE / 4)
            .flat_map(|number| number.wrapping_mul(0x9e37_79b9).to_le_bytes())
            .collect();
        self.replace(RESERVE, &content, Purpose::Secret, false)
    }

    /// Gives up the reserve for records of mounts on a full disk; a read-only mount needs no other
    /// room. Says whether there was one. [`Domain::gc`] makes it again.
    pub(crate) fn use_reserve(&self) -> bool {
        self.disk().unlink(RESERVE).is_ok()
    }

    /// The store's own id: 32 hex digits.
    pub fn id(&self) -> &str {
        &self.inner.meta.id
    }

    /// Format version and features.
    pub fn meta(&self) -> &Meta {
        &self.inner.meta
    }

    /// Where the store is; `None` on a simulated disk.
    pub fn path(&self) -> Option<&Path> {
        self.disk().path()
    }

    /// Directory of the runtime state of this store: `/run/cofolio/<id>`, or below `COFOLIO_RUN`.
    pub fn run_dir(&self) -> PathBuf {
        run_dir(self.id())
    }

    /// The feature because of which this program may only read the store, if there is one.
    pub fn read_only_because(&self) -> Option<String> {
        self.inner.meta.read_only_because()
    }

    /// What protects content that is in place.
    pub fn protection(&self) -> Protection {
        let mut protection = self.disk().protection();
        protection.immutable &= self.inner.meta.uses_immutable();
        protection
    }

    /// A trust domain that exists.
    ///
    /// # Errors
    /// [`Error::NoSuchDomain`], [`Error::BadName`], [`Error::Io`].
    pub fn domain(&self, name: &str) -> Result<Domain> {
        name::check_domain(name)?;
        let path = format!("{DOMAINS}/{name}");
        match self.disk().stat(&path).if_there("look at", &path)? {
            Some(stat) if stat.kind == Kind::Directory => Ok(Domain::new(self.clone(), name)),
            Some(_) => Err(Error::corrupt(path, "it is not a directory")),
            None => Err(Error::NoSuchDomain(name.to_owned())),
        }
    }

    /// A trust domain, made if it is missing.
    ///
    /// # Errors
    /// [`Error::BadName`], [`Error::ReadOnly`], [`Error::Io`].
    pub fn domain_or_create(&self, name: &str) -> Result<Domain> {
        match self.domain(name) {
            Err(Error::NoSuchDomain(_)) => {}
            other => return other,
        }
        self.check_writable()?;
        self.make_domain(name)?;
        self.domain(name)
    }

    /// Names of the trust domains, sorted.
    pub fn domains(&self) -> Result<Vec<String>> {
        let entries = self.disk().list(DOMAINS).at("list", DOMAINS)?;
        let mut names: Vec<_> = entries
            .into_iter()
            .filter(|(name, kind)| *kind == Kind::Directory && name::check_domain(name).is_ok())
            .map(|(name, _)| name)
            .collect();
        names.sort_unstable();
        Ok(names)
    }

    /// Staging directories that no living process holds.
    pub fn orphaned_staging(&self) -> Result<Vec<String>> {
        let mut orphans = Vec::new();
        for (id, kind) in self.disk().list(STAGING).if_there("list", STAGING)?.unwrap_or_default() {
            let path = format!("{STAGING}/{id}");
            if kind != Kind::Directory || self.lock_orphan(&path)?.is_some() {
                orphans.push(id);
            }
        }
        orphans.sort_unstable();
        Ok(orphans)
    }

    /// Removes leftovers of interrupted imports, or with `dry_run` only counts them; returns their
    /// number and allocated bytes.
    ///
    /// # Errors
    /// [`Error::ReadOnly`], [`Error::Io`], [`Error::Cancelled`] as [`Store::waits_until`] says.
    pub fn collect_staging(&self, dry_run: bool) -> Result<(u64, u64)> {
        if !dry_run {
            self.check_writable()?;
        }
        let (mut count, mut bytes) = (0, 0);
        let mut take = |path: &str, kind| {
            match sweep_entry(self.disk(), path, kind, dry_run, &self.waiting) {
                // A damaged inode; fsck reports what stays.
                Err(error) if by_hand(&error).is_some() => return Ok(()),
                swept => bytes += swept?,
            }
            count += 1;
            Ok::<_, Error>(())
        };
        for (id, kind) in self.disk().list(STAGING).at("list", STAGING)? {
            let path = format!("{STAGING}/{id}");
            let is_directory = kind == Kind::Directory;
            // Held until it is removed.
            let lock = is_directory.then(|| self.lock_orphan(&path)).transpose()?.flatten();
            if !is_directory || lock.is_some() {
                take(&path, kind)?;
            }
        }
        // An init or a repair that was interrupted. Whoever is at one holds the lock.
        if let Some(_lock) =
            self.disk().lock("", LockMode::Exclusive, false).at("lock", META_PATH)?
        {
            for (entry, kind) in self.disk().list("").at("list", "")? {
                if entry.starts_with(TEMPORARY) {
                    take(&entry, kind)?;
                }
            }
        }
        Ok((count, bytes))
    }

    /// Whether a living process holds a staging directory.
    pub(crate) fn is_held(&self, path: &str) -> Result<bool> {
        let lock = self.disk().lock(path, LockMode::Exclusive, false).if_there("lock", path)?;
        Ok(matches!(lock, Some(None)))
    }

    /// The lock of a staging directory whose process is gone; `None` while it lives, and if it was
    /// removed since it was listed.
    fn lock_orphan(&self, path: &str) -> Result<Option<Box<dyn Lock>>> {
        let lock = self.disk().lock(path, LockMode::Exclusive, false).if_there("lock", path)?;
        Ok(lock.flatten())
    }

    /// Makes a staging directory and locks it: the lock says that its process lives.
    pub(crate) fn new_staging(&self) -> Result<(String, Box<dyn Lock>)> {
        let disk = self.disk();
        mkdir_if_missing(disk, STAGING)?;
        loop {
            let path =
                format!("{STAGING}/{}", const_hex::encode(disk.random().at("name", STAGING)?));
            disk.mkdir(&path).at("create", &path)?;
            // A collector may have locked or removed it as an orphan in between: try again.
            match disk.lock(&path, LockMode::Exclusive, false) {
                Ok(Some(lock)) if disk.stat(&path).is_ok() => return Ok((path, lock)),
                Ok(_) => {}
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => {
                    // No descriptor to be had, for instance.
                    let _ = disk.rmdir(&path);
                    return Err(error).at("lock", &path);
                }
            }
        }
    }

    /// A domain comes into being complete: built under staging, then renamed.
    fn make_domain(&self, name: &str) -> Result<()> {
        let disk = self.disk();
        let target = format!("{DOMAINS}/{name}");
        let (staging, _lock) = self.new_staging()?;
        let built = format!("{staging}/domain");
        disk.mkdir(&built).at("create", &built)?;
        domain::make_directories(disk, &built)?;
        disk.sync_all().at("sync", &built)?;
        match disk.rename(&built, &target, true) {
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            other => other.at("create", &target)?,
        }
        disk.sync_dir(DOMAINS).at("sync", DOMAINS)?;
        remove_entry(disk, &staging, Kind::Directory).map(drop)
    }

    /// Writes a small file next to its place and renames it. `durable` waits for the disk.
    pub(crate) fn replace_file(&self, path: &str, content: &[u8], durable: bool) -> Result<()> {
        self.replace(path, content, Purpose::Record, durable)
    }

    pub(crate) fn replace(
        &self,
        path: &str,
        content: &[u8],
        purpose: Purpose,
        durable: bool,
    ) -> Result<()> {
        let temporary = self.write_temporary(path, content, purpose, durable)?;
        let disk = self.disk();
        if let Err(error) = disk.rename(&temporary, path, false) {
            let _ = disk.unlink(&temporary);
            return Err(error).at("replace", path);
        }
        if durable {
            disk.sync_dir(parent(path)).at("sync", parent(path))?;
        }
        Ok(())
    }

    /// The first half of [`Store::replace_file`]: gives the temporary file's path.
    pub(crate) fn write_temporary(
        &self,
        path: &str,
        content: &[u8],
        purpose: Purpose,
        durable: bool,
    ) -> Result<String> {
        let disk = self.disk();
        let directory = path.rfind('/').map_or("", |slash| &path[..=slash]);
        let number = const_hex::encode(disk.random().at("name a file for", path)?);
        let path = format!("{directory}{TEMPORARY}{number}");
        let written = (|| {
            let mut file = disk.create(&path, purpose)?;
            file.write_all(content)?;
            if durable { file.sync() } else { Ok(()) }
        })();
        if let Err(error) = written {
            // A failed write is not tried again: the file is dropped as a whole.
            let _ = disk.unlink(&path);
            return Err(error).at("write", &path);
        }
        Ok(path)
    }

    pub(crate) fn check_writable(&self) -> Result<()> {
        match self.read_only_because() {
            None => Ok(()),
            Some(feature) => Err(Error::ReadOnly { feature }),
        }
    }

    pub(crate) fn disk(&self) -> &dyn Disk {
        &*self.inner.disk
    }
}

/// The directory that a path is in; empty for that of the store.
pub(crate) fn parent(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(directory, _)| directory)
}

fn run_dir(id: &str) -> PathBuf {
    let base = std::env::var_os("COFOLIO_RUN").map_or_else(|| RUN.into(), PathBuf::from);
    base.join(id)
}

/// With this the roots begin that mounts of a run directory have in the store, and a dash.
pub fn run_tag(run_dir: &Path) -> String {
    const_hex::encode(&Sha256::digest(run_dir.as_os_str().as_bytes())[..4])
}

/// The id of a store that does not say it, if its roots are those of mounts in the run directory of one id.
fn id_in_use(disk: &dyn Disk) -> Option<[u8; 16]> {
    let roots = in_domains(disk, RootKind::Mount.directory());
    let mut ids = std::fs::read_dir(run_dir("")).ok()?.flatten().filter_map(|entry| {
        let id = const_hex::decode_to_array(entry.file_name().as_bytes()).ok()?;
        // A run directory's path has no links.
        let tag = run_tag(&std::fs::canonicalize(entry.path()).ok()?);
        roots.iter().any(|root| root.starts_with(&tag)).then_some(id)
    });
    ids.next().filter(|_| ids.next().is_none())
}

/// Names in this directory of all domains, as far as they can be read.
fn in_domains(disk: &dyn Disk, directory: &str) -> Vec<String> {
    let domains = disk.list(DOMAINS).unwrap_or_default().into_iter();
    let list = |(name, _)| disk.list(&format!("{DOMAINS}/{name}/{directory}")).unwrap_or_default();
    domains.flat_map(list).map(|(name, _)| name).collect()
}

fn open_disk(path: &Path) -> Result<Arc<dyn Disk>> {
    let shown = path.to_string_lossy();
    match RealDisk::open(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            Err(Error::NotAStore { path: shown.into_owned() })
        }
        disk => {
            let disk = disk.at("open the store", &shown)?;
            check_owner(&disk)?;
            Ok(Arc::new(disk))
        }
    }
}

/// Another user could put anything in the place of what was just checked.
fn check_owner(disk: &RealDisk) -> Result<()> {
    let shown = shown_path(disk);
    let owner = disk.stat("").at("look at", &shown)?.uid;
    match owner == 0 || owner == rustix::process::geteuid().as_raw() {
        true => Ok(()),
        false => Err(Error::NotOurs { path: shown, owner }),
    }
}

fn read_meta(disk: &dyn Disk) -> Result<Vec<u8>> {
    match read_file(disk, META_PATH) {
        Err(Error::Io { source, .. }) if is_absent(&source) => {
            // An `init` that was interrupted has made neither.
            let is_store = disk.stat(META_COPY).is_ok() || !in_domains(disk, "images").is_empty();
            Err(match is_store {
                true => Error::corrupt(META_PATH, "it is missing"),
                false => Error::NotAStore { path: shown_path(disk) },
            })
        }
        other => other,
    }
}

fn read_file(disk: &dyn Disk, path: &str) -> Result<Vec<u8>> {
    let file = StoredFile::new(disk.open(path).at("open", path)?, path.to_owned());
    file.read_all(META_SIZE_MAX).at("read", path)
}

fn shown_path(disk: &dyn Disk) -> String {
    disk.path().map_or_else(|| "simulated disk".into(), |path| path.to_string_lossy().into_owned())
}

pub(crate) fn mkdir_if_missing(disk: &dyn Disk, path: &str) -> Result<()> {
    match disk.mkdir(path) {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
        other => other.at("create", path),
    }
}

/// Removes a file or a directory tree, immutable flags or not, and returns the freed bytes. Missing
/// files are no error: somebody else may be cleaning too.
pub(crate) fn remove_entry(disk: &dyn Disk, path: &str, kind: Kind) -> Result<u64> {
    sweep_entry(disk, path, kind, false, &Cancel::default())
}

/// [`remove_entry`] of what may be a large tree. A dry run only counts; a cancelled removal leaves the rest.
pub(crate) fn sweep_entry(
    disk: &dyn Disk,
    path: &str,
    kind: Kind,
    dry_run: bool,
    cancel: &Cancel,
) -> Result<u64> {
    cancel.check()?;
    if kind == Kind::Directory {
        let mut freed = 0;
        for (name, kind) in disk.list(path).if_there("list", path)?.unwrap_or_default() {
            freed += sweep_entry(disk, &format!("{path}/{name}"), kind, dry_run, cancel)?;
        }
        if !dry_run {
            disk.rmdir(path).if_there("remove", path)?;
        }
        return Ok(freed);
    }
    let Some(stat) = disk.stat(path).if_there("look at", path)? else { return Ok(0) };
    if dry_run {
        return Ok(stat.allocated);
    }
    if stat.immutable {
        disk.set_immutable(path, false).at("clear the immutable flag of", path)?;
    }
    let removed = disk.unlink(path).if_there("remove", path)?;
    Ok(removed.map_or(0, |()| stat.allocated))
}
