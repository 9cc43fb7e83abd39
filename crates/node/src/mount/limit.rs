//! A limit on what a writable mount's changes may take.
//!
//! Where the filesystem enforces project quotas (ext4 and XFS mounted with `prjquota`), the
//! directory gets a limited project of its own. Elsewhere the changes go into an ext4 of that size
//! in a sparse file on a loop device. The file is unlinked once attached and the loop device ends
//! with the overlay: after the unmount nothing is left, however the processes around it ended.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use cofolio_sys::quota;
use rustix::io::Errno;
use rustix::mount::MountAttrFlags;

use super::error::{At as _, MountError, refused};
use super::kernel::{self, Context, attach, open_dir, reopen};
use crate::run_dir::RunDir;

/// What keeps changes from growing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Limit {
    None,
    Project,
    /// A filesystem of its own, mounted at [`root`].
    Filesystem,
}

/// Less cannot hold an ext4 and a work directory.
const SIZE_BYTES_MIN: u64 = 4 << 20;
/// `mke2fs` makes one inode per this number of bytes.
const BYTES_PER_INODE: u64 = 16 << 10;
/// First project number of ours, which nobody else is likely to choose; we use as many after it.
const PROJECT_FIRST: u32 = 0x4C0F_0000;
const PROJECTS: u32 = 0x1_0000;

/// Where a filesystem for the changes in `dir` is mounted, if they have one of their own.
pub(crate) fn root(dir: &Path) -> PathBuf {
    dir.join("sized")
}

/// Limits what is made in `dir`, which is empty.
pub(crate) fn set(run: &RunDir, dir: &Path, bytes: u64) -> Result<Limit, MountError> {
    if bytes < SIZE_BYTES_MIN {
        return Err(MountError::SizeLimit("at least 4 MiB are needed"));
    }
    if set_project(run, dir, bytes)? {
        return Ok(Limit::Project);
    }
    make_filesystem(dir, bytes)?;
    Ok(Limit::Filesystem)
}

/// False where the filesystem has no project quotas.
fn set_project(run: &RunDir, dir: &Path, bytes: u64) -> Result<bool, MountError> {
    let file = open_dir(dir).and_then(reopen).at("open", dir)?;
    // An error: no quotas at all, or no such call.
    if !quota::is_enforced(&file).unwrap_or(false) {
        return Ok(false);
    }
    // Another mount may be looking for a number at this moment.
    let parent = dir.parent().unwrap_or(dir);
    let lock = open_dir(parent).and_then(reopen).at("open", parent)?;
    run.wait_for_flock(&lock, parent)?;
    // A directory that was made a moment ago has an inode number of its own on this filesystem.
    let inode = rustix::fs::fstat(&file).at("look at", dir)?.st_ino;
    let start = u32::try_from(inode % u64::from(PROJECTS)).unwrap_or(0);
    for step in 0..PROJECTS {
        let project = PROJECT_FIRST + (start + step) % PROJECTS;
        match quota::quota(&file, project) {
            // Another mount, or another program, uses this project.
            Ok(used) if used != quota::Quota::default() => {}
            // ENOENT: XFS has no quota of the project yet.
            Ok(_) | Err(Errno::NOENT) => {
                let inodes = bytes.div_ceil(BYTES_PER_INODE);
                return match quota::set_project(&file, project) {
                    Err(Errno::NOTTY | Errno::OPNOTSUPP | Errno::INVAL) => Ok(false),
                    set => set
                        .and_then(|()| quota::limit(&file, project, bytes, inodes))
                        .map(|()| true)
                        .at("limit", dir),
                };
            }
            Err(_) => return Ok(false),
        }
    }
    Ok(false)
}

fn make_filesystem(dir: &Path, bytes: u64) -> Result<(), MountError> {
    let problem = |problem: String| MountError::NoSizeLimit { dir: dir.to_owned(), problem };
    let path = dir.join("sized.ext4");
    let file =
        File::options().read(true).write(true).create_new(true).open(&path).at("create", &path)?;
    file.set_len(bytes).at("size", &path)?;
    // Blocks as the loop device has them. No journal: what is in it does not outlive the mount.
    let made = Command::new("mkfs.ext4")
        .args(["-q", "-F", "-b", "4096", "-m", "0", "-O", "^has_journal,^resize_inode"])
        .args(["-E", "nodiscard,lazy_itable_init=1"])
        .arg(&path)
        .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .output()
        .map_err(|error| {
            problem(format!("no project quotas here, and mkfs.ext4 cannot be started: {error}"))
        })?;
    if !made.status.success() {
        let said = String::from_utf8_lossy(&made.stderr).trim().to_owned();
        return Err(problem(format!("mkfs.ext4: {said}")));
    }
    let name = std::ffi::OsStr::new("cofolio");
    let device = cofolio_sys::mount::attach_loop(&file, name, true)
        .map_err(|error| problem(format!("loop device: {error}")))?;
    fs::remove_file(&path).at("remove", &path)?;
    let at = root(dir);
    fs::create_dir(&at).at("create", &at)?;
    let mounted = || {
        let context = Context::open("ext4")?;
        context.string("source", &device.path.to_string_lossy())?;
        context.create()?;
        let mount = context.mount(MountAttrFlags::empty())?;
        let target = open_dir(&at).map_err(|errno| kernel::KernelError::new("open", errno))?;
        // Attached, because before Linux 6.15 an overlay takes no layer of a detached mount.
        attach(&mount, &target)
    };
    mounted().map_err(|error| problem(error.to_string()))
}

/// Takes the filesystem out of sight; whoever mounted it in an overlay keeps it.
pub(crate) fn put_away(dir: &Path) -> Result<(), MountError> {
    kernel::unmount(&root(dir), true).map_err(refused)
}

/// Takes back what [`set`] did to a directory that is about to be removed, as far as it is there.
pub(crate) fn lift(dir: &Path) {
    let at = root(dir);
    if cofolio_sys::mount::mount_id(rustix::fs::CWD, &at).is_ok_and(|id| id.is_root) {
        let _ = kernel::unmount(&at, true);
    }
    let Ok(file) = open_dir(dir).and_then(reopen) else { return };
    if let Ok(project) = quota::project(&file)
        && (PROJECT_FIRST..PROJECT_FIRST + PROJECTS).contains(&project)
    {
        // Without a limit and without files, its number is free again.
        let _ = quota::limit(&file, project, 0, 0);
    }
}
