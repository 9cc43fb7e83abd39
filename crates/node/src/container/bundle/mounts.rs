//! The mounts of a container: pseudo filesystems, scratch, volumes, directories of the host.

use std::fs;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::Path;

use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use serde_json::{Value, json};

use super::rootfs::{PSEUDO_PATHS, Rootfs, is_pseudo};
use super::{BundleError, ImageConfig, Options, Place, Result, plain_path};
use crate::mount::At as _;

/// Directories that programs expect to be writable: in memory if the root is read-only.
const SCRATCH_PATHS: [&str; 3] = ["/tmp", "/var/tmp", "/run"];

/// As engines have it; group 5 is `tty`.
const DEVPTS_OPTIONS: &str = "nosuid,noexec,newinstance,ptmxmode=0666,mode=0620,gid=5";

/// The mounts of a container, in their order. `unified` is whether cgroups are of version 2.
pub(super) fn mounts(
    place: &Place<'_>,
    root: &Rootfs,
    image: &ImageConfig,
    options: &Options,
    unified: bool,
) -> Result<Vec<Value>> {
    let mut mounts = Mounts { root, options, list: Vec::new() };
    mounts.add_pseudo(unified)?;
    if options.host_network {
        mounts.add_network_files()?;
    }
    if options.readonly {
        mounts.add_scratch(image)?;
        mounts.add_volumes(place, image)?;
    }
    mounts.add_binds()?;
    Ok(mounts.list)
}

struct Mounts<'a> {
    root: &'a Rootfs,
    options: &'a Options,
    list: Vec<Value>,
}

impl Mounts<'_> {
    fn add(&mut self, destination: &str, kind: &str, source: &str, options: &str) {
        let options: Vec<&str> = options.split(',').collect();
        self.list.push(json!({
            "destination": destination, "type": kind, "source": source, "options": options,
        }));
    }

    fn add_pseudo(&mut self, unified: bool) -> Result<()> {
        for path in PSEUDO_PATHS {
            if self.root.resolve(Path::new(path)).at("looking up", path)? != Path::new(path) {
                return Err(BundleError::LinkedMountPoint(path));
            }
            if self.options.readonly && !self.root.exists(path) {
                return Err(BundleError::MissingMountPoint(path.to_owned()));
            }
        }
        self.add("/proc", "proc", "proc", "nosuid,noexec,nodev");
        self.add("/dev", "tmpfs", "tmpfs", "nosuid,strictatime,mode=755,size=65536k");
        self.add("/dev/pts", "devpts", "devpts", DEVPTS_OPTIONS);
        self.add("/dev/shm", "tmpfs", "shm", "nosuid,noexec,nodev,mode=1777,size=65536k");
        self.add("/dev/mqueue", "mqueue", "mqueue", "nosuid,noexec,nodev");
        // The kernel refuses sysfs to a user namespace that does not own the network namespace. The
        // host's, read-only with all that is mounted in it, shows the same.
        let is_bound = self.options.host_network && self.options.idmap.is_some();
        if is_bound {
            self.add("/sys", "bind", "/sys", "rbind,nosuid,noexec,nodev,ro,rro");
        } else {
            self.add("/sys", "sysfs", "sysfs", "nosuid,noexec,nodev,ro");
        }
        if !is_bound || !unified {
            let options = "nosuid,noexec,nodev,relatime,ro";
            self.add("/sys/fs/cgroup", "cgroup", "cgroup", options);
        }
        Ok(())
    }

    /// The host's files that say how to use its network.
    fn add_network_files(&mut self) -> Result<()> {
        let files = ["/etc/resolv.conf", "/etc/hosts"];
        let files = files.map(|file| (file, self.root.exists(file)));
        // The runtime makes missing mount points; a read-only root needs its `/etc` in memory.
        let is_missing = files.iter().any(|(_, exists)| !exists);
        if self.options.readonly && is_missing {
            self.add_tmpfs("/etc", "mode=755")?;
        }
        for (file, exists) in files {
            let can_be = exists || !self.options.readonly || self.root.exists("/etc");
            if !Path::new(file).exists() || !can_be {
                continue;
            }
            if let Some(destination) = self.root.mount_point(file)? {
                self.add(&destination, "bind", file, "bind,ro");
            }
        }
        Ok(())
    }

    fn add_scratch(&mut self, image: &ImageConfig) -> Result<()> {
        for path in SCRATCH_PATHS {
            if !image.volumes().any(|volume| volume == path) {
                let mode = if path == "/run" { "mode=755" } else { "mode=1777" };
                self.add_tmpfs(path, mode)?;
            }
        }
        Ok(())
    }

    /// A directory in memory with what the image has there. It is left out where one is already, and
    /// where changes are kept. The runtime would copy a pseudo filesystem with its own privileges.
    fn add_tmpfs(&mut self, path: &str, mode: &str) -> Result<()> {
        let Some(destination) = self.root.mount_point(path)? else { return Ok(()) };
        let has_one = self.list.iter().any(|mount| mount["destination"] == destination);
        if !has_one && self.root.exists(&destination) && !is_writable(self.options, &destination) {
            let options = format!("nosuid,nodev,tmpcopyup,{mode}");
            self.add(&destination, "tmpfs", "tmpfs", &options);
        }
        Ok(())
    }

    fn add_volumes(&mut self, place: &Place<'_>, image: &ImageConfig) -> Result<()> {
        image.volumes().try_for_each(|path| plain_path("volume", path))?;
        for path in volumes_with_directory(image, self.options) {
            // In a pseudo filesystem the container has what it has without a volume.
            let Some(destination) = self.root.mount_point(path)? else { continue };
            self.refuse_link_above(&destination)?;
            let (held, shown) = match &self.options.volumes {
                Some(volumes) => (volumes.clone(), volumes.clone()),
                None => (place.held.join("volumes"), place.shown.join("volumes")),
            };
            let place = Place { held: &held, shown: &shown };
            let source = shown.join(volume(&place, self.root, path)?);
            self.add(&destination, "bind", &source.to_string_lossy(), "rbind,rw");
        }
        Ok(())
    }

    fn add_binds(&mut self) -> Result<()> {
        for bind in &self.options.binds {
            plain_path("volume", &bind.target)?;
            let destination = match self.root.mount_point(&bind.target)? {
                Some(destination) => destination,
                // What the caller names is the caller's choice.
                None if is_pseudo(Path::new(&bind.target)) => bind.target.clone(),
                None => return Err(BundleError::LinkedTarget(bind.target.clone())),
            };
            self.refuse_link_above(&destination)?;
            // The runtime makes missing ones where it can write.
            let is_missing = self.options.readonly && !self.root.exists(&bind.target);
            if is_missing
                && !self.is_below_tmpfs(&destination)
                && !is_writable(self.options, &destination)
            {
                return Err(BundleError::MissingMountPoint(bind.target.clone()));
            }
            let mode = if bind.readonly { "ro,rro" } else { "rw" };
            let source = bind.source.to_string_lossy();
            self.add(&destination, "bind", &source, &format!("rbind,rprivate,{mode}"));
        }
        Ok(())
    }

    /// Whether a path is below a directory in memory, outside of `/dev`.
    fn is_below_tmpfs(&self, path: &str) -> bool {
        let mut tmpfs = self.list.iter().filter(|mount| mount["type"] == "tmpfs");
        !is_pseudo(Path::new(path)) && tmpfs.any(|mount| is_below(path, mount).is_some())
    }

    /// Refuses a mount in a directory that is mounted itself, and in which a link, of another container
    /// perhaps, would lead the runtime elsewhere.
    fn refuse_link_above(&self, destination: &str) -> Result<()> {
        for mount in self.list.iter().filter(|mount| mount["type"] == "bind") {
            let (Some(rest), Some(source)) =
                (is_below(destination, mount), mount["source"].as_str())
            else {
                continue;
            };
            let (flags, mode) = (OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
            let resolve = ResolveFlags::NO_SYMLINKS | ResolveFlags::BENEATH;
            let dir = rustix::fs::open(source, flags, mode).at("opening", source)?;
            match rustix::fs::openat2(&dir, rest, flags, mode, resolve) {
                Ok(_) | Err(Errno::NOENT | Errno::NOTDIR) => {}
                Err(Errno::LOOP) => {
                    let (path, why) = (Path::new(source).join(rest), "a link is in this path");
                    return Err(BundleError::Unsafe { path, why });
                }
                Err(error) => Err(error).at("looking up", Path::new(source).join(rest))?,
            }
        }
        Ok(())
    }
}

/// What a path is below the destination of a mount, if it is.
fn is_below<'a>(path: &'a str, mount: &Value) -> Option<&'a Path> {
    let rest = Path::new(path).strip_prefix(mount["destination"].as_str()?).ok()?;
    (rest != Path::new("")).then_some(rest)
}

/// Whether a path is in a writable directory of a read-only root.
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
    is_pseudo(dir)
        || binds.any(|own| dir.starts_with(own))
        || above.any(|own| dir != Path::new(own) && dir.starts_with(own))
}

/// Name of the host directory behind a volume, empty at first and owned like the image's directory.
///
/// Volumes are siblings: inside another one, a container could put a symbolic link into the path.
fn volume(volumes: &Place<'_>, root: &Rootfs, path: &str) -> Result<String> {
    let inside = root
        .open_beneath(path, OFlags::PATH | OFlags::DIRECTORY)
        .map_err(|_| BundleError::MissingMountPoint(path.to_owned()))?;
    let stat = rustix::fs::statat(&inside, "", AtFlags::EMPTY_PATH).at("reading", path)?;
    let components = path.split('/').filter(|component| !component.is_empty());
    let name = components.collect::<Vec<_>>().join("/").replace('%', "%25").replace('/', "%2F");
    let directory = volumes.held.join(&name);
    let shown = volumes.shown.join(&name);
    for (path, shown) in [(volumes.held, volumes.shown), (&directory, &shown)] {
        if path.symlink_metadata().is_ok_and(|found| !found.is_dir()) {
            let path = shown.to_owned();
            return Err(BundleError::Unsafe { path, why: "it is no directory" });
        }
    }
    if !directory.exists() {
        // For root alone, because of set-user-ID programs that a container puts there.
        let created = fs::DirBuilder::new().recursive(true).mode(0o700).create(volumes.held);
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
