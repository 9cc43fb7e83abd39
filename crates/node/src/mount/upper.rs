//! Where a writable mount keeps its changes.
//!
//! The store's own are `domains/<domain>/writable/<id>-<nonce>/{upper,work}`, on the objects'
//! filesystem, below a directory for root alone because of set-user-id programs. They go with their
//! mount unless a file `keep` lies beside `upper`. `writable/gone-*` goes once no overlay uses it.

use std::collections::HashSet;
use std::ffi::CString;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use cofolio_store::{Digest, Domain, Purpose, replace_file};
use rustix::fs::{
    AtFlags, CWD, Dir, FlockOperation, Gid, Mode, OFlags, ResolveFlags, StatxFlags, Timespec,
    Timestamps, Uid, XattrFlags, openat, openat2, unlinkat,
};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::Mounter;
use super::error::{At as _, MountError};
use super::in_use::{self, Patience};
use super::kernel::{open_cached, open_dir, open_directory_below, path_of, reopen};
use super::limit::{self, Limit};
use super::records::{MountRecord, Upper};
use crate::links;
use crate::owner::may_others_write;
use crate::run_dir::{RunDir, is_at, list, read_json, read_small, to_json, try_flock};

/// Beside `upper`: this directory is to stay.
const KEEP: &str = "keep";
const KEEP_NEW: &str = "keep.new";
/// In the work directory: the changes may be torn if the machine stops. overlayfs makes it for a
/// `volatile` overlay, and makes no other one while it is there.
const VOLATILE: &str = "work/incompat/volatile";
/// Prefix of what is being removed.
const GONE: &str = "gone-";

/// An upper directory, ready for overlayfs.
#[derive(Debug)]
pub(crate) struct OpenUpper {
    pub(crate) upper: OwnedFd,
    pub(crate) work: OwnedFd,
    /// Its changes need not survive a crash of the machine.
    pub(crate) volatile: bool,
    pub(crate) limit: Limit,
}

pub(crate) fn writable_dir(domain: &Domain) -> Result<PathBuf, MountError> {
    let objects = domain.objects_dir().ok_or(MountError::NoDirectory)?;
    Ok(objects.with_file_name("writable"))
}

/// The kind of directory that a mount has for its user, which shows no overlay.
pub(crate) const SCRATCH: &str = "s";

/// A new name under [`writable_dir`] for a mount with this id; `kind` tells its directories apart.
pub(crate) fn own_dir(domain: &Domain, id: &str, kind: &str) -> Result<PathBuf, MountError> {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let nonce = since.map(|since| since.as_nanos()).unwrap_or_default();
    Ok(writable_dir(domain)?.join(format!("{id}-{nonce:x}{kind}")))
}

/// Makes a directory named by [`own_dir`].
pub(crate) fn make_own(dir: &Path) -> Result<(), MountError> {
    for path in [dir.parent().unwrap_or(dir), dir] {
        match fs::DirBuilder::new().mode(0o700).create(path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) if error.kind() == io::ErrorKind::ReadOnlyFilesystem => {
                return Err(MountError::ReadOnlyStore(path.to_owned()));
            }
            other => other.at("create", path)?,
        }
    }
    Ok(())
}

/// Changes that were kept, as the file beside them says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptChanges {
    /// Directory that holds them, in `upper/`.
    #[serde(default)]
    pub dir: PathBuf,
    /// The image that they are changes of; `None` if the file that says so cannot be read.
    pub image: Option<Digest>,
    /// Where that was mounted.
    pub target: PathBuf,
    /// The directories of the image that could be written to; none for all of it.
    #[serde(default)]
    pub writable_dirs: Vec<PathBuf>,
    boot_id: String,
}

/// Resolves a directory that the caller gave, making it if missing, and locks it against other
/// mounts until the record that names it is written.
pub(crate) fn claim_given(
    mounter: &Mounter<'_>,
    dir: &Path,
    image: &Digest,
    boot_id: &str,
) -> Result<(PathBuf, OwnedFd), MountError> {
    let (run, patience) = (&mounter.run, &mounter.patience);
    let dir = links::resolve(dir).at("resolve", dir)?;
    // Kept changes lie there.
    let kept = writable_dir(mounter.domain).ok().and_then(|own| fs::canonicalize(own).ok());
    if mounter.is_in_store(&dir) && dir.parent() != kept.as_deref() {
        return Err(MountError::Upper { dir, problem: "it is in the store".to_owned() });
    }
    fs::DirBuilder::new().recursive(true).mode(0o755).create(&dir).at("create", &dir)?;
    let problem =
        |problem: &str| MountError::Upper { dir: dir.clone(), problem: problem.to_owned() };
    if dir.to_str().is_none() {
        return Err(problem("its path is not UTF-8"));
    }
    let lock = open_own(&dir).at("open", &dir)?.map_err(problem)?;
    lock_given(&lock, &dir, patience)?;
    if !is_at(&lock, &dir) {
        return Err(problem("it was removed meanwhile"));
    }
    // No unmount could tell whether the mount is in use.
    find_below(&lock, &dir, in_use::PROBE)?;
    // The kernel only warns when two overlays change one directory.
    let (records, _) = run.records()?;
    if let Some(user) = records.iter().find(|r| r.upper.as_ref().is_some_and(|u| u.dir == dir)) {
        let by = format!("the mount at {}", user.target.display());
        return Err(MountError::UpperInUse { dir, by });
    }
    let kept = kept_in(&dir)?;
    if let Some(kept) = kept.as_ref().filter(|kept| kept.image != Some(*image)) {
        let other = kept.image.map_or_else(|| "nobody knows which".to_owned(), |it| it.to_string());
        return Err(problem(&format!("it holds changes of another image, {other}")));
    }
    if in_use::has_overlay(&dir, patience)? {
        let by = "a mount that has no record or is detached".to_owned();
        return Err(MountError::UpperInUse { dir, by });
    }
    if is_there(&dir.join("work").join(VOLATILE))? {
        if kept.is_none_or(|kept| kept.boot_id != boot_id) {
            return Err(problem(
                "the machine stopped before the changes were on the disk, so files in it may be \
                 damaged; if that is acceptable, remove its directory `work`",
            ));
        }
        clear_volatile(&lock, &dir)?;
    }
    Ok((dir, lock))
}

/// Locks a directory against other mounts over it. Any user who can open it can lock it for ever, so
/// this waits for a moment only.
pub(crate) fn lock_given(dir: &OwnedFd, at: &Path, wait: &Patience) -> Result<(), MountError> {
    let how = FlockOperation::NonBlockingLockExclusive;
    if wait.wait(|| try_flock(dir, how, at))? {
        return Ok(());
    }
    Err(MountError::UpperInUse { dir: at.to_owned(), by: "another process".to_owned() })
}

/// Opens a directory that only the caller can change, without following links. The inner error says who
/// else can.
pub(crate) fn open_own(dir: &Path) -> rustix::io::Result<Result<OwnedFd, &'static str>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir = openat2(CWD, dir, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS)?;
    let stat = rustix::fs::fstat(&dir)?;
    if stat.st_uid != rustix::process::geteuid().as_raw() {
        return Ok(Err("it belongs to another user, who could redirect writes and mounts in it"));
    }
    if may_others_write(stat.st_mode) {
        return Ok(Err("other users can write to it, and could redirect writes and mounts in it"));
    }
    Ok(Ok(dir))
}

/// Makes missing directories, below `claimed` for a directory that the caller gave. A new upper's
/// root gets owner, mode, time and extended attributes of `metadata`, the image's root as it is to
/// appear: overlayfs shows those of the upper one.
pub(crate) fn prepare(
    run: &RunDir,
    record: &MountRecord,
    upper: &Upper,
    metadata: &OwnedFd,
    claimed: Option<&OwnedFd>,
) -> Result<OpenUpper, MountError> {
    let dir = &upper.dir;
    if !upper.given {
        make_own(dir)?;
    }
    let limit = match upper.size_bytes {
        Some(bytes) => limit::set(run, dir, bytes)?,
        None => Limit::None,
    };
    let base = match claimed {
        Some(claimed) => claimed.try_clone().at("open", dir)?,
        None if limit == Limit::Filesystem => open_dir(&limit::root(dir)).at("open", dir)?,
        None => open_dir(dir).at("open", dir)?,
    };
    if upper.keep && !upper.given {
        mark_kept(&base, record)?;
    }
    let (upper_dir, is_new) = make_below(&base, dir, "upper")?;
    if is_new {
        copy_root(metadata, &upper_dir, dir)?;
    }
    let (work, _) = make_below(&base, dir, "work")?;
    let volatile = !upper.keep;
    if volatile && limit != Limit::Filesystem {
        make_below(&base, dir, in_use::PROBE)?;
    }
    Ok(OpenUpper { upper: upper_dir, work, volatile, limit })
}

/// Opens a directory below `base`, whose path is `dir`, and says whether it was made. Refuses a
/// symbolic link, which could lead anywhere.
pub(super) fn make_below(
    base: &OwnedFd,
    dir: &Path,
    name: &str,
) -> Result<(OwnedFd, bool), MountError> {
    let is_new = match rustix::fs::mkdirat(base, name, Mode::RWXU) {
        Ok(()) => true,
        Err(Errno::EXIST) => false,
        Err(errno) => return Err(errno).at("create", dir.join(name)),
    };
    Ok((find_below(base, dir, name)?.ok_or(Errno::NOENT).at("open", dir.join(name))?, is_new))
}

/// A directory below `base`, whose path is `dir`; `None` if it is missing. A symbolic link in its
/// place is refused: it could lead anywhere.
pub(super) fn find_below(
    base: &OwnedFd,
    dir: &Path,
    name: &str,
) -> Result<Option<OwnedFd>, MountError> {
    match open_directory_below(base, name) {
        Err(Errno::LOOP | Errno::NOTDIR) => {
            let problem = format!("`{name}` in it is no directory");
            Err(MountError::Upper { dir: dir.to_owned(), problem })
        }
        Err(Errno::NOENT) => Ok(None),
        other => other.at("open", dir.join(name)).map(Some),
    }
}

fn copy_root(metadata: &OwnedFd, upper: &OwnedFd, to: &Path) -> Result<(), MountError> {
    // The longest value and list of names that the kernel handles (XATTR_SIZE_MAX, XATTR_LIST_MAX).
    const XATTR_MAX: usize = 64 << 10;
    let from = fs::File::from(reopen(metadata).at("open", "image root")?);
    let target = reopen(upper).at("open", to)?;
    let stat = from.metadata().at("look at", "image root")?;
    let (uid, gid) = (Uid::from_raw(stat.uid()), Gid::from_raw(stat.gid()));
    rustix::fs::fchown(&target, Some(uid), Some(gid)).at("change the owner of", to)?;
    let mut names = vec![0u8; XATTR_MAX];
    let length = match rustix::fs::flistxattr(&from, &mut names[..]) {
        Err(Errno::OPNOTSUPP) => 0,
        other => other.at("list attributes of", "image root")?,
    };
    let mut value = vec![0u8; XATTR_MAX];
    for name in names[..length].split(|&byte| byte == 0).filter(|name| !name.is_empty()) {
        // overlayfs' own say how an image is put together, not what it shows.
        if name.starts_with(b"trusted.overlay.") {
            continue;
        }
        let length = rustix::fs::fgetxattr(&from, name, &mut value[..]).at("read", "image root")?;
        rustix::fs::fsetxattr(&target, name, &value[..length], XattrFlags::empty())
            .at("set attributes of", to)?;
    }
    // After the owner, which clears bits of the mode, and after an ACL, which is part of it.
    rustix::fs::fchmod(&target, Mode::from_raw_mode(stat.mode() & 0o7777))
        .at("change the mode of", to)?;
    let time = Timespec { tv_sec: stat.mtime(), tv_nsec: stat.mtime_nsec() as _ };
    let times = Timestamps { last_access: time, last_modification: time };
    rustix::fs::futimens(&target, &times).at("set the time of", to)
}

/// Makes again what [`forget_volatile`] removed, and on the disk: the changes are to stay, and are not
/// there yet.
fn mark_volatile(base: &OwnedFd, dir: &Path) -> Result<(), MountError> {
    let Some(mut parent) = find_below(base, dir, "work")? else { return Ok(()) };
    // Also the first one: [`clear_volatile`] may have been killed after it had removed that.
    for name in ["work", "incompat", "volatile"] {
        let (made, _) = make_below(&parent, dir, name)?;
        rustix::fs::fsync(reopen(parent).at("open", dir)?).at("sync", dir)?;
        parent = made;
    }
    Ok(())
}

/// From now on the directory stays, whatever happens. The file is replaced as a whole or stays as it is. Says whether
/// there was none.
pub(crate) fn mark_kept(dir: &OwnedFd, record: &MountRecord) -> Result<bool, MountError> {
    if let Some(upper) = record.upper.as_ref().filter(|upper| !upper.keep) {
        mark_volatile(dir, &upper.dir)?;
    }
    let path = record.upper.as_ref().map_or(Path::new(KEEP), |upper| &upper.dir).join(KEEP);
    let kept = KeptChanges {
        dir: PathBuf::new(),
        image: Some(record.image),
        target: record.target.clone(),
        writable_dirs: record.upper.as_ref().map(|upper| upper.dirs.clone()).unwrap_or_default(),
        boot_id: record.boot_id.clone(),
    };
    let text = to_json(&path, &kept)?;
    let before = read_small(&path);
    if before.as_ref().is_ok_and(|known| *known == text) {
        return Ok(false);
    }
    let (aside, own) = (Path::new(KEEP_NEW), Purpose::Secret);
    replace_file(dir, aside, Path::new(KEEP), &text, own, true).at("write", &path)?;
    Ok(before.is_err_and(|error| error.kind() == io::ErrorKind::NotFound))
}

/// The directory goes with its mount again.
pub(crate) fn unmark_kept(dir: &OwnedFd, upper: &Path) -> Result<(), MountError> {
    unlinkat(dir, KEEP, AtFlags::empty()).at("remove", upper.join(KEEP))
}

/// What the file beside kept changes says; none for a directory that has no such file.
fn kept_in(dir: &Path) -> Result<Option<KeptChanges>, MountError> {
    let kept: Option<KeptChanges> = read_json(&dir.join(KEEP))?;
    Ok(kept.map(|kept| KeptChanges { dir: dir.to_owned(), ..kept }))
}

/// Kept changes of this domain that no mount of this run directory uses.
pub(crate) fn kept(domain: &Domain, run: &RunDir) -> Result<Vec<KeptChanges>, MountError> {
    let base = writable_dir(domain)?;
    let base = fs::canonicalize(&base).unwrap_or(base);
    // A directory is in use if a mount has its inode, as a bind mount shows the store at another
    // path, or its name, as no filesystem is asked that need not answer. No two directories of
    // changes have one name.
    let inode = |opened: rustix::io::Result<OwnedFd>| {
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let found = rustix::fs::statx(opened.ok()?, "", flags, StatxFlags::INO).ok()?;
        Some((found.stx_dev_major, found.stx_dev_minor, found.stx_ino))
    };
    let used = run.records()?.0.into_iter().filter_map(|record| Some(record.upper?.dir));
    let used: Vec<_> = used.collect();
    let inodes: HashSet<_> = used.iter().filter_map(|dir| inode(open_cached(dir))).collect();
    let names: HashSet<_> = used.iter().filter_map(|dir| dir.file_name()?.to_str()).collect();
    let dirs = list(&base)?.into_iter().filter(|name| !name.starts_with(GONE));
    let dirs = dirs.filter(|name| !names.contains(&**name)).map(|name| base.join(name));
    let unused = dirs.filter(|dir| !inode(open_dir(dir)).is_some_and(|it| inodes.contains(&it)));
    let unreadable = |dir| KeptChanges {
        dir,
        image: None,
        target: PathBuf::new(),
        writable_dirs: Vec::new(),
        boot_id: String::new(),
    };
    let kept = |dir: PathBuf| kept_in(&dir).unwrap_or_else(|_| Some(unreadable(dir)));
    Ok(unused.filter_map(kept).collect())
}

/// Bytes on disk of a directory and of what is in it; what cannot be read is left out.
pub(crate) fn disk_bytes(dir: &Path) -> u64 {
    let mut todo = vec![dir.to_owned()];
    let mut blocks = fs::symlink_metadata(dir).map_or(0, |found| found.blocks());
    while let Some(dir) = todo.pop() {
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            let Ok(found) = entry.metadata() else { continue };
            blocks += found.blocks();
            if found.is_dir() {
                todo.push(entry.path());
            }
        }
    }
    blocks * 512
}

/// Removes [`VOLATILE`] and its two neighbours. Changes that go with their mount need no such mark, and
/// its three inodes would stay in memory.
pub(crate) fn forget_volatile(work: &OwnedFd, dir: &Path) -> Result<(), MountError> {
    let parts = [
        ("work/incompat/volatile/dirty", AtFlags::empty()),
        (VOLATILE, AtFlags::REMOVEDIR),
        ("work/incompat", AtFlags::REMOVEDIR),
    ];
    for (name, flags) in parts {
        match unlinkat(work, name, flags) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(errno) => return Err(errno).at("remove", dir.join("work").join(name)),
        }
    }
    Ok(())
}

/// Prepares a directory that was mounted `volatile` for a mount of its own: syncs its content and
/// removes the work directory, in which overlayfs noted that it may be torn. Nothing may use it.
pub(crate) fn clear_volatile(base: &OwnedFd, dir: &Path) -> Result<(), MountError> {
    let upper = find_below(base, dir, "upper")?.ok_or(Errno::NOENT).and_then(reopen);
    rustix::fs::syncfs(upper.at("open", dir)?).at("sync", dir)?;
    remove_all(&Path::new(&path_of(&base)).join("work"))
}

/// The directory with the changes of an ended mount, if it stays: also where an unmount that should
/// keep it was killed. A mount that never came about leaves no changes to keep.
pub(crate) fn kept_dir(record: &MountRecord) -> Result<Option<&Path>, MountError> {
    let Some(upper) = &record.upper else { return Ok(None) };
    let is_own_kept = record.mount.is_some() && (upper.keep || is_there(&upper.dir.join(KEEP))?);
    Ok((upper.given || is_own_kept).then_some(&upper.dir))
}

/// What cannot be looked at is not taken for missing: the answer may be that changes are removed.
pub(super) fn is_there(path: &Path) -> Result<bool, MountError> {
    path.try_exists().at("look at", path)
}

/// Lets a record name its own directories, those of [`own_dir`], where they are now: the store may
/// have another path than when it was written. Only their names are believed. A record that
/// somebody else wrote could name any directory of this machine, and these are removed.
pub(crate) fn relocate(record: &mut MountRecord, domain: &Domain) -> Result<(), MountError> {
    let base = writable_dir(domain)?;
    let id = &record.id;
    let own = |dir: PathBuf| {
        let name = dir.file_name()?.to_str()?;
        name.strip_prefix(id)?.starts_with('-').then(|| base.join(name))
    };
    record.scratch = record.scratch.take().and_then(own);
    record.upper = record.upper.take().and_then(|upper| match upper.given {
        true => Some(upper),
        false => Some(Upper { dir: own(upper.dir)?, ..upper }),
    });
    Ok(())
}

/// Takes a directory of [`make_own`] out of sight.
pub(crate) fn discard_own(dir: &Path) -> Result<Option<PathBuf>, MountError> {
    let name = dir.file_name().unwrap_or_default().to_string_lossy();
    let gone = dir.with_file_name(format!("{GONE}{name}"));
    match fs::rename(dir, &gone) {
        Ok(()) => Ok(Some(gone)),
        // By an unmount that was killed then, perhaps. A read-only filesystem says so of what is
        // missing, too.
        Err(_) if !is_there(dir)? => Ok(Some(gone).filter(|gone| gone.exists())),
        Err(error) => Err(error).at("rename", dir),
    }
}

/// Removes a directory that [`discard`] gave, unless it is in use or another process is at it. Says whether it did.
pub(crate) fn remove_unless(
    is_used: impl FnOnce() -> Result<bool, MountError>,
    gone: &Path,
) -> Result<bool, MountError> {
    let lock = match open_dir(gone).and_then(reopen) {
        Err(Errno::NOENT) => return Ok(false),
        other => other.at("open", gone)?,
    };
    // A process that is just being started may have a copy of a lock that was given back.
    let take = || try_flock(&lock, FlockOperation::NonBlockingLockExclusive, gone);
    if !Patience::default().wait(take)? || is_used()? {
        return Ok(false);
    }
    remove(gone).map(|()| true)
}

/// Removes changes. The caller holds their lock and has checked that they are unused.
pub(crate) fn remove(gone: &Path) -> Result<(), MountError> {
    limit::lift(gone);
    remove_all(gone)
}

fn remove_all(dir: &Path) -> Result<(), MountError> {
    match remove_tree(dir) {
        Err(Errno::NOENT) if !dir.exists() => Ok(()),
        removed => removed.at("remove", dir),
    }
}

/// Removes a tree that nobody else changes, and nothing of what is mounted in it. Containers make them of any
/// depth: it takes neither a descriptor nor room on the stack for each level.
fn remove_tree(dir: &Path) -> rustix::io::Result<()> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut here = openat(CWD, dir, flags, Mode::empty())?;
    // The names that led here, and at each level the directories that are still to be removed.
    let (mut way, mut left) = (Vec::new(), vec![remove_files(&here)?]);
    while let Some(directories) = left.last_mut() {
        if let Some(name) = directories.pop() {
            let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_XDEV;
            here = openat2(&here, &name, flags, Mode::empty(), resolve)?;
            left.push(remove_files(&here)?);
            way.push(name);
        } else {
            left.pop();
            let Some(name) = way.pop() else { break };
            here = openat(&here, "..", flags, Mode::empty())?;
            unlinkat(&here, name, AtFlags::REMOVEDIR)?;
        }
    }
    unlinkat(CWD, dir, AtFlags::REMOVEDIR)
}

/// Removes all of a directory but its directories, and gives their names.
fn remove_files(dir: &OwnedFd) -> rustix::io::Result<Vec<CString>> {
    let mut directories = Vec::new();
    for entry in Dir::read_from(dir)? {
        let entry = entry?;
        let name = entry.file_name();
        if name == c"." || name == c".." {
            continue;
        }
        match unlinkat(dir, name, AtFlags::empty()) {
            Err(Errno::ISDIR) => directories.push(name.to_owned()),
            removed => removed?,
        }
    }
    Ok(directories)
}

/// Whether an upper directory is one of the domain's that a mount of this run directory has.
pub(crate) fn is_of(upper: &Path, domain: &Domain, run: &RunDir) -> bool {
    let Ok(base) = writable_dir(domain) else { return false };
    let below = upper.strip_prefix(base);
    below.is_ok_and(|below| below.as_os_str().as_bytes().starts_with(run.tag().as_bytes()))
}

/// Removes directories of this run directory's mounts without a record, and leftovers of removals.
/// Returns how many. A mount writes its record before its directory, so a directory that is seen
/// first and then has no record belongs to nobody, unless the record was lost.
pub(crate) fn remove_stale(
    domain: &Domain,
    run: &RunDir,
    root: &Path,
    patience: &Patience,
    or_failed: &mut dyn FnMut(MountError),
) -> Result<u32, MountError> {
    let base = writable_dir(domain)?;
    let remove_one = |name: &str| -> Result<u32, MountError> {
        let dir = base.join(name);
        // What is being unmounted has its record until somebody has asked whether it is in use.
        let plain = name.strip_prefix(GONE).unwrap_or(name);
        let id = plain.rsplit_once('-').map_or("", |(id, _)| id);
        // By name, which is given once: a bind mount shows the store at another path.
        let is_it = |known: &Path| known.file_name() == Some(plain.as_ref());
        let is_ours = id.starts_with(&run.tag()) && !is_there(&dir.join(KEEP))?;
        let is_stale = (plain != name || is_ours)
            // A damaged record is not "no record".
            && !run.record(id)?.is_some_and(|record| {
                record.scratch.is_some_and(|scratch| is_it(&scratch))
                    || record.upper.is_some_and(|upper| is_it(&upper.dir))
            });
        // Without a record it may be that of a container that runs.
        let is_bound = || name.ends_with(SCRATCH) && in_use::is_bound(root, &dir);
        let is_used = || Ok(in_use::has_overlay(&dir, patience)? || is_bound());
        Ok(u32::from(is_stale && remove_unless(is_used, &dir)?))
    };
    let removed = list(&base)?.into_iter().map(|name| remove_one(&name));
    Ok(removed.map(|removed| removed.map_err(&mut *or_failed).unwrap_or(0)).sum())
}
