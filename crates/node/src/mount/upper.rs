//! Where a writable mount keeps its changes.
//!
//! The store's own lie in `domains/<domain>/writable/<id>-<nonce>/{upper,work}`, on the filesystem
//! of the objects, in a directory that only root can enter (a container's set-user-id programs are
//! not for the host's users). They go with their mount, unless a file `keep` lies beside `upper`.
//! `writable/gone-*` is to be removed as soon as no overlay uses it any more.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use cofolio_store::Domain;
use rustix::fs::{FlockOperation, Gid, Mode, OFlags, Timespec, Timestamps, Uid, XattrFlags};

use super::error::{At as _, MountError};
use super::in_use;
use super::kernel::open_dir;
use super::limit::{self, Limit};
use super::state::{MountRecord, RunDir, Upper, list};

/// Beside `upper`: this directory is to stay.
const KEEP: &str = "keep";
/// Prefix of what is being removed.
const GONE: &str = "gone-";

/// An upper directory, ready for overlayfs.
#[derive(Debug)]
pub(crate) struct OpenUpper {
    pub(crate) upper: OwnedFd,
    pub(crate) work: OwnedFd,
    /// Its changes need not survive a crash of the machine.
    pub(crate) volatile: bool,
    /// What keeps it from growing.
    pub(crate) limit: Limit,
}

/// Where a domain's own upper directories are.
pub(crate) fn writable_dir(domain: &Domain) -> Result<PathBuf, MountError> {
    let objects = domain.objects_dir().ok_or(MountError::NoDirectory)?;
    Ok(objects.with_file_name("writable"))
}

/// A new name under the domain's [`writable_dir`] for a mount with this id; `kind` tells its
/// directories apart.
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
            other => other.at("create", path)?,
        }
    }
    Ok(())
}

/// Resolves a directory that the caller gave, making it if it is missing, and locks it against
/// other mounts that want it, until the record that names it is written.
pub(crate) fn claim_given(run: &RunDir, dir: &Path) -> Result<(PathBuf, OwnedFd), MountError> {
    fs::create_dir_all(dir).at("create", dir)?;
    let dir = fs::canonicalize(dir).at("resolve", dir)?;
    let problem =
        |problem: &str| MountError::Upper { dir: dir.clone(), problem: problem.to_owned() };
    if dir.to_str().is_none() {
        return Err(problem("its path is not UTF-8"));
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let lock = rustix::fs::open(&dir, flags, Mode::empty()).at("open", &dir)?;
    rustix::fs::flock(&lock, FlockOperation::LockExclusive).at("lock", &dir)?;
    // The kernel only warns when two overlays change one directory.
    let (records, _) = run.records()?;
    if let Some(user) = records.iter().find(|r| r.upper.as_ref().is_some_and(|u| u.dir == dir)) {
        let by = format!("the mount at {}", user.target.display());
        return Err(MountError::UpperInUse { dir, by });
    }
    Ok((dir, lock))
}

/// Makes the directories that are missing. The root of a new upper gets owner, mode, time and
/// extended attributes of `metadata`, the image's root as it is to appear: of a directory that is
/// in both layers, overlayfs shows the upper one's.
pub(crate) fn prepare(upper: &Upper, metadata: &OwnedFd) -> Result<OpenUpper, MountError> {
    if !upper.given {
        make_own(&upper.dir)?;
    }
    let limit = match upper.size_bytes {
        Some(bytes) => limit::set(&upper.dir, bytes)?,
        None => Limit::None,
    };
    let base = if limit == Limit::Filesystem { limit::root(&upper.dir) } else { upper.dir.clone() };
    let (dir, work) = (base.join("upper"), base.join("work"));
    if upper.keep && !upper.given {
        mark_kept(&upper.dir)?;
    }
    match fs::create_dir(&dir) {
        Ok(()) => copy_root(metadata, &dir)?,
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(error).at("create", &dir),
    }
    match fs::create_dir(&work) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            return Err(error).at("create", &work);
        }
        _ => {}
    }
    Ok(OpenUpper {
        upper: open_dir(&dir).at("open", &dir)?,
        work: open_dir(&work).at("open", &work)?,
        volatile: !upper.keep && !upper.given,
        limit,
    })
}

fn copy_root(metadata: &OwnedFd, to: &Path) -> Result<(), MountError> {
    // The longest value and list of names that the kernel handles (XATTR_SIZE_MAX, XATTR_LIST_MAX).
    const XATTR_MAX: usize = 64 << 10;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let from = rustix::fs::openat(metadata, ".", flags, Mode::empty()).at("open", "image root")?;
    let target = rustix::fs::open(to, flags, Mode::empty()).at("open", to)?;
    let from = fs::File::from(from);
    let stat = from.metadata().at("look at", "image root")?;
    let (uid, gid) = (Uid::from_raw(stat.uid()), Gid::from_raw(stat.gid()));
    rustix::fs::fchown(&target, Some(uid), Some(gid)).at("change the owner of", to)?;
    let mut names = vec![0u8; XATTR_MAX];
    let length = match rustix::fs::flistxattr(&from, &mut names[..]) {
        Err(rustix::io::Errno::OPNOTSUPP) => 0,
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
    fs::set_permissions(to, fs::Permissions::from_mode(stat.mode() & 0o7777))
        .at("change the mode of", to)?;
    let time = Timespec { tv_sec: stat.mtime(), tv_nsec: stat.mtime_nsec() as _ };
    let times = Timestamps { last_access: time, last_modification: time };
    rustix::fs::futimens(&target, &times).at("set the time of", to)
}

/// From now on the directory stays, whatever happens.
pub(crate) fn mark_kept(dir: &Path) -> Result<(), MountError> {
    let path = dir.join(KEEP);
    fs::File::create(&path).map(drop).at("create", &path)
}

/// Makes a directory that was mounted `volatile` good for a mount of its own: its content goes to
/// the disk, and the work directory, in which overlayfs has noted that it may be torn, goes away.
pub(crate) fn settle(dir: &Path) -> Result<(), MountError> {
    let file = fs::File::open(dir.join("upper")).at("open", dir)?;
    rustix::fs::syncfs(&file).at("sync", dir)?;
    let work = dir.join("work");
    match fs::remove_dir_all(&work) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error).at("remove", work),
        _ => Ok(()),
    }
}

/// Takes the directory of a mount that has ended out of sight. The rest can be removed at leisure:
/// see [`remove`].
pub(crate) fn discard(upper: &Upper) -> Result<Option<PathBuf>, MountError> {
    if upper.given || upper.keep || upper.dir.join(KEEP).exists() {
        return Ok(None);
    }
    discard_own(&upper.dir)
}

/// Takes a directory of [`make_own`] out of sight.
pub(crate) fn discard_own(dir: &Path) -> Result<Option<PathBuf>, MountError> {
    let name = dir.file_name().unwrap_or_default().to_string_lossy();
    let gone = dir.with_file_name(format!("{GONE}{name}"));
    match fs::rename(dir, &gone) {
        Ok(()) => Ok(Some(gone)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).at("rename", dir),
    }
}

/// Removes what [`discard`] gave, unless an overlay still uses it. Says whether it did.
pub(crate) fn remove(gone: &Path) -> Result<bool, MountError> {
    if in_use::has_overlay(gone)? {
        return Ok(false);
    }
    limit::lift(gone);
    match fs::remove_dir_all(gone) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error).at("remove", gone),
        _ => Ok(true),
    }
}

/// Removes directories of mounts of this run directory that have no record, and what is left of
/// removals. Returns how many.
///
/// A mount writes its record before it makes its directory, so a directory that is seen first and
/// whose record is then not there belongs to nobody.
pub(crate) fn remove_stale(domain: &Domain, run: &RunDir) -> Result<u32, MountError> {
    let base = writable_dir(domain)?;
    let mut removed = 0;
    for name in list(&base)? {
        let dir = base.join(&name);
        let id = name.rsplit_once('-').map_or("", |(id, _)| id);
        if name.starts_with(GONE) {
            removed += u32::from(remove(&dir)?);
        } else if id.starts_with(&run.tag()) && !dir.join(KEEP).exists() {
            // A damaged record is not "no record".
            let record: Option<MountRecord> = run.record(id)?;
            if record.is_some_and(|r| {
                r.scratch.as_ref() == Some(&dir) || r.upper.is_some_and(|upper| upper.dir == dir)
            }) {
                continue;
            }
            removed += u32::from(remove(&dir)?);
        }
    }
    Ok(removed)
}
