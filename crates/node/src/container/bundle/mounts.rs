//! The mounts of a container: kernel filesystems, scratch, volumes, directories of the host.

use std::fs;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::Path;

use rustix::fs::{AtFlags, OFlags};
use serde_json::{Value, json};

use super::rootfs::{KERNEL_PATHS, Rootfs, is_kernels};
use super::{BundleError, ImageConfig, Options, Result, plain_path};
use crate::mount::At as _;

/// Directories that programs expect to be writable: in memory if the root is read-only.
const SCRATCH_PATHS: [&str; 3] = ["/tmp", "/var/tmp", "/run"];

/// As engines have it; group 5 is `tty`.
const DEVPTS_OPTIONS: &str = "nosuid,noexec,newinstance,ptmxmode=0666,mode=0620,gid=5";

pub(super) fn mounts(
    (held, bundle): (&Path, &Path),
    root: &Rootfs,
    image: &ImageConfig,
    options: &Options,
    unified: bool,
) -> Result<Vec<Value>> {
    let mount = |destination: &str, kind: &str, source: &str, options: &str| {
        let options: Vec<&str> = options.split(',').collect();
        json!({"destination": destination, "type": kind, "source": source, "options": options})
    };
    let mut mounts = vec![
        mount("/proc", "proc", "proc", "nosuid,noexec,nodev"),
        mount("/dev", "tmpfs", "tmpfs", "nosuid,strictatime,mode=755,size=65536k"),
        mount("/dev/pts", "devpts", "devpts", DEVPTS_OPTIONS),
        mount("/dev/shm", "tmpfs", "shm", "nosuid,noexec,nodev,mode=1777,size=65536k"),
        mount("/dev/mqueue", "mqueue", "mqueue", "nosuid,noexec,nodev"),
    ];
    // The kernel refuses sysfs to a user namespace that does not own the network namespace. The
    // host's, read-only with all that is mounted in it, shows the same.
    let is_bound = options.host_network && options.idmap.is_some();
    mounts.push(if is_bound {
        mount("/sys", "bind", "/sys", "rbind,nosuid,noexec,nodev,ro,rro")
    } else {
        mount("/sys", "sysfs", "sysfs", "nosuid,noexec,nodev,ro")
    });
    if !is_bound || !unified {
        mounts.push(mount("/sys/fs/cgroup", "cgroup", "cgroup", "nosuid,noexec,nodev,relatime,ro"));
    }
    let is_writable = |path: &str| is_writable(options, path);
    if options.host_network {
        let files = ["/etc/resolv.conf", "/etc/hosts"];
        let files = files.map(|file| (file, root.exists(file)));
        // The runtime makes missing mount points; a read-only root needs its `/etc` in memory.
        let is_missing = files.iter().any(|(_, exists)| !exists);
        if options.readonly && is_missing && root.has_plain("/etc") && !is_writable("/etc") {
            mounts.push(mount("/etc", "tmpfs", "tmpfs", "nosuid,nodev,tmpcopyup,mode=755"));
        }
        for (file, exists) in files {
            let can_be = exists || !options.readonly || root.exists("/etc");
            if Path::new(file).exists() && can_be && !root.leads_to_kernel(file) {
                mounts.push(mount(file, "bind", file, "bind,ro"));
            }
        }
    }
    if options.readonly {
        for path in KERNEL_PATHS {
            if !root.has_plain(path) {
                return Err(BundleError::MissingMountPoint(path.to_owned()));
            }
        }
        let volumes: Vec<&str> = image.volumes().collect();
        for path in SCRATCH_PATHS {
            // A link would lead the mount elsewhere, as into /proc, of which the runtime would copy
            // what it may read into it. Where `/var/tmp` leads to `/tmp`, that is in memory.
            if root.has_plain(path) && !volumes.contains(&path) && !is_writable(path) {
                let mode = if path == "/run" { "mode=755" } else { "mode=1777" };
                let options = format!("nosuid,nodev,tmpcopyup,{mode}");
                mounts.push(mount(path, "tmpfs", "tmpfs", &options));
            }
        }
        volumes.iter().try_for_each(|path| plain_path("volume", path))?;
        for path in volumes_with_directory(image, options) {
            // The kernel's filesystem is there, as without a volume, or all else is below it.
            let is_root = Path::new(path) == Path::new("/");
            if is_root || is_kernels(Path::new(path)) || root.leads_to_kernel(path) {
                continue;
            }
            let (below, shown) = match &options.volumes {
                Some(volumes) => (volumes.clone(), volumes.clone()),
                None => (held.join("volumes"), bundle.join("volumes")),
            };
            let source = shown.join(volume((&below, &shown), root, path)?);
            mounts.push(mount(path, "bind", &source.to_string_lossy(), "rbind,rw"));
        }
    }
    for bind in &options.binds {
        plain_path("volume", &bind.target)?;
        // What the caller names is the caller's choice.
        if root.leads_to_kernel(&bind.target) {
            return Err(BundleError::KernelTarget(bind.target.clone()));
        }
        // The runtime makes missing ones where it can write.
        let can_be_made = || below_a_mount(&mounts, &bind.target) || is_writable(&bind.target);
        if options.readonly && !root.exists(&bind.target) && !can_be_made() {
            return Err(BundleError::MissingMountPoint(bind.target.clone()));
        }
        let mode = if bind.readonly { "ro,rro" } else { "rw" };
        let source = bind.source.to_string_lossy();
        mounts.push(mount(&bind.target, "bind", &source, &format!("rbind,rprivate,{mode}")));
    }
    Ok(mounts)
}

fn is_writable(options: &Options, path: &str) -> bool {
    options.writable_dirs.iter().any(|dir| Path::new(path).starts_with(dir))
}

/// The volumes for which a container with a read-only root gets a directory. The others are in a
/// writable directory, or a directory of the host replaces them.
pub(in crate::container) fn volumes_with_directory<'a>(
    image: &'a ImageConfig,
    options: &'a Options,
) -> impl Iterator<Item = &'a str> {
    image.volumes().filter(|path| {
        !is_writable(options, path) && !options.binds.iter().any(|bind| bind.target == *path)
    })
}

/// Whether a directory is in memory where the root is read-only, unless it is made writable: a
/// scratch directory, or one in it.
pub fn is_scratch(dir: &Path) -> bool {
    SCRATCH_PATHS.iter().any(|scratch| dir.starts_with(scratch))
}

/// Whether a container with a read-only root would not see changes of this directory of the image,
/// were it writable, because the container has a mount of its own over it.
pub fn is_hidden(image: &ImageConfig, options: &Options, dir: &Path) -> bool {
    let mut binds = options.binds.iter().map(|bind| bind.target.as_str());
    // These give way to a writable directory, but not to one in them.
    let mut above = SCRATCH_PATHS.into_iter().chain(image.volumes());
    is_kernels(dir)
        || binds.any(|own| dir.starts_with(own))
        || above.any(|own| dir != Path::new(own) && dir.starts_with(own))
}

/// Whether a path is below a mount that can be written to.
fn below_a_mount(mounts: &[Value], path: &str) -> bool {
    mounts.iter().filter_map(|mount| mount["destination"].as_str()).any(|above| {
        SCRATCH_PATHS.contains(&above)
            && path.strip_prefix(above).is_some_and(|rest| rest.starts_with('/'))
    })
}

/// Name of the host directory behind a volume, empty at first and owned like the image's directory.
///
/// Volumes are siblings: inside another one, a container could put a symbolic link into the path.
fn volume((below, shown): (&Path, &Path), root: &Rootfs, path: &str) -> Result<String> {
    let inside = root
        .open_beneath(path, OFlags::PATH | OFlags::DIRECTORY)
        .map_err(|_| BundleError::MissingMountPoint(path.to_owned()))?;
    let stat = rustix::fs::statat(&inside, "", AtFlags::EMPTY_PATH).at("reading", path)?;
    let components = path.split('/').filter(|component| !component.is_empty());
    let name = components.collect::<Vec<_>>().join("/").replace('%', "%25").replace('/', "%2F");
    let directory = below.join(&name);
    for (path, shown) in [(below, shown.to_owned()), (&directory, shown.join(&name))] {
        if path.symlink_metadata().is_ok_and(|found| !found.is_dir()) {
            return Err(BundleError::Unsafe { path: shown, why: "it is no directory" });
        }
    }
    if !directory.exists() {
        // For root alone, because of set-user-ID programs that a container puts there.
        let created = fs::DirBuilder::new().recursive(true).mode(0o700).create(below);
        created.and_then(|()| fs::create_dir(&directory)).at("creating", &directory)?;
        fs::set_permissions(&directory, fs::Permissions::from_mode(stat.st_mode & 0o7777))
            .at("setting the mode of", &directory)?;
        let have = fs::metadata(&directory).at("reading", &directory)?;
        if (have.uid(), have.gid()) != (stat.st_uid, stat.st_gid) {
            std::os::unix::fs::chown(&directory, Some(stat.st_uid), Some(stat.st_gid))
                .at("setting the owner of", &directory)?;
        }
    }
    Ok(name)
}
