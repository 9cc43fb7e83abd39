//! The mounts of a container: pseudo filesystems, scratch, volumes, directories of the host.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use serde_json::{Value, json};

use super::rootfs::{PSEUDO_PATHS, Rootfs, is_pseudo, link_in};
use super::{Bind, BundleError, ImageConfig, Options, Place, Result, VOLUMES_MAX, plain_path};
use crate::mount::At as _;

/// Directories that programs expect to be writable: in memory if the root is read-only.
const SCRATCH_PATHS: [&str; 3] = ["/tmp", "/var/tmp", "/run"];

/// No tmpfs gets a smaller size: one of 0 would have no limit.
const SCRATCH_BYTES_MIN: u64 = 64 << 10;

/// The host's files that say how to use its network.
const NETWORK_FILES: [&str; 2] = ["/etc/resolv.conf", "/etc/hosts"];

/// As engines have it; group 5 is `tty`.
const DEVPTS_OPTIONS: &str = "nosuid,noexec,newinstance,ptmxmode=0666,mode=0620,gid=5";

/// As many links as the kernel follows in a path.
const LINKS_MAX: u32 = 40;

/// How many names all lookups of a container pass, through links. Each takes the kernel as long as the
/// path is deep.
const NAMES_MAX: u32 = 32 << 10;

/// The mounts of a container, in their order. `unified` is whether cgroups are of version 2.
pub(super) fn mounts(
    place: &Place<'_>,
    root: &Rootfs,
    image: &ImageConfig,
    options: &Options,
    unified: bool,
) -> Result<Vec<Value>> {
    let mut mounts = Mounts { root, options, list: Vec::new(), names_left: NAMES_MAX };
    mounts.add_pseudo(unified)?;
    if options.readonly {
        mounts.add_scratch(image)?;
        mounts.add_volumes(place, image)?;
    }
    if options.host_network {
        mounts.add_network_files()?;
    }
    mounts.add_binds()?;
    Ok(mounts.list)
}

struct Mounts<'a> {
    root: &'a Rootfs,
    options: &'a Options,
    list: Vec<Value>,
    names_left: u32,
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
            if link_in(&self.root.fd, Path::new(path)).at("looking up", path)?.is_some() {
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

    /// Directories in memory, with what the image has there.
    fn add_scratch(&mut self, image: &ImageConfig) -> Result<()> {
        let mut scratch = Vec::new();
        for path in SCRATCH_PATHS {
            let mode = if path == "/run" { "mode=755" } else { "mode=1777" };
            scratch.extend(self.scratch_at(path, image).map(|destination| (destination, mode)));
        }
        // The runtime makes mount points where it can write.
        if self.options.host_network {
            for file in NETWORK_FILES {
                let destination = self.resolve(file)?;
                let is_inside = |dir: &str| Path::new(&destination).starts_with(dir);
                if self.is_missing(&destination) && !scratch.iter().any(|(dir, _)| is_inside(dir)) {
                    let etc = self.scratch_at("/etc", image);
                    scratch.extend(etc.map(|destination| (destination, "mode=755")));
                }
            }
        }
        scratch.sort_by_key(|(destination, _)| (depth(destination), destination.clone()));
        scratch.dedup_by(|one, other| one.0 == other.0);
        // The runtime copies what the image has there, runc before it sets the limit of memory. Without
        // a size each may take half of the machine's.
        let size = self.scratch_bytes().map(|bytes| format!(",size={bytes}")).unwrap_or_default();
        for (destination, mode) in scratch {
            let options = format!("nosuid,nodev,tmpcopyup,{mode}{size}");
            self.add(&destination, "tmpfs", "tmpfs", &options);
        }
        Ok(())
    }

    /// What each directory in memory may hold, if that is less than half of the machine's memory.
    fn scratch_bytes(&self) -> Option<u64> {
        let machine = rustix::system::sysinfo();
        let half = machine.totalram as u64 * u64::from(machine.mem_unit) / 2;
        let limit = self.options.memory_bytes.filter(|limit| *limit < half)?;
        Some(limit.max(SCRATCH_BYTES_MIN))
    }

    /// Where a directory in memory comes to lie in place of one of the image's. There is none at,
    /// below or above a writable directory. A link may lead it elsewhere, but not into /proc, /sys or /dev,
    /// which the runtime would copy as root.
    fn scratch_at(&mut self, path: &str, image: &ImageConfig) -> Option<String> {
        // The container can start without, if it cannot be looked up.
        let destination = self.resolve(path).ok()?;
        let here = Path::new(&destination);
        let keeps = |dir: &PathBuf| here.starts_with(dir) || dir.starts_with(here);
        (!is_reserved(&destination)
            && self.root.is_directory(&destination)
            && !image.volumes().any(|volume| volume == path)
            && !self.options.writable_dirs.iter().any(keeps))
        .then_some(destination)
    }

    fn add_volumes(&mut self, place: &Place<'_>, image: &ImageConfig) -> Result<()> {
        let mut volumes: Vec<_> = volumes_with_directory(image, self.options).collect();
        if volumes.len() > VOLUMES_MAX {
            return Err(BundleError::TooManyVolumes(volumes.len()));
        }
        volumes.sort_by_key(|path| depth(path));
        let (held, shown) = match &self.options.volumes {
            Some(volumes) => (volumes.clone(), volumes.clone()),
            None => (place.held.join("volumes"), place.shown.join("volumes")),
        };
        let place = Place { held: &held, shown: &shown };
        self.add_in_order(
            volumes,
            |mounts, path| mounts.destination_of_volume(path),
            |mounts, path, destination| {
                let source = shown.join(volume(&place, mounts.root, path)?);
                mounts.add(destination, "bind", &source.to_string_lossy(), "rbind,rw");
                Ok(())
            },
            // Two of the image's volumes are one there.
            |_, _| Ok(()),
        )
    }

    /// Where a volume of the image comes to lie, if the container gets a directory for it.
    fn destination_of_volume(&mut self, path: &str) -> Result<Option<String>> {
        plain_path("volume", path)?;
        let destination = self.resolve(path)?;
        // In a pseudo filesystem the container has what it has without a volume.
        if is_reserved(&destination) || is_writable(self.options, &destination) {
            return Ok(None);
        }
        self.refuse_to_hide_changes(path, &destination)?;
        let is_covered = self.mount_above(Path::new(&destination)).is_some();
        if !is_covered && !self.root.is_directory(&destination) {
            return Err(BundleError::MissingMountPoint(path.to_owned()));
        }
        Ok(Some(destination))
    }

    fn add_network_files(&mut self) -> Result<()> {
        for path in NETWORK_FILES {
            let destination = self.resolve(path)?;
            let can_be = Path::new(path).exists() && !self.root.is_directory(&destination);
            let lacks_etc = self.options.readonly && !self.root.is_directory("/etc");
            if !can_be || is_reserved(&destination) || lacks_etc {
                continue;
            }
            if self.is_missing(&destination) {
                return Err(BundleError::MissingMountPoint(path.to_owned()));
            }
            self.add(&destination, "bind", path, "bind,ro");
        }
        Ok(())
    }

    /// The caller's mounts lie over all else.
    fn add_binds(&mut self) -> Result<()> {
        let mut binds: Vec<_> = self.options.binds.iter().collect();
        binds.sort_by_key(|bind| depth(&bind.target));
        self.add_in_order(
            binds,
            |mounts, bind| mounts.destination_of(bind).map(Some),
            |mounts, bind, destination| {
                let mode = match bind.readonly {
                    false => "rw",
                    true if bind.source.is_dir() => "ro,rro",
                    // Nothing is mounted below it, and crun 1.8 opens it as a directory for `rro`.
                    true => "ro",
                };
                let source = bind.source.to_string_lossy();
                mounts.add(destination, "bind", &source, &format!("rbind,rprivate,{mode}"));
                Ok(())
            },
            |bind, hidden| {
                let (volume, hidden) = (bind.target.clone(), hidden.into());
                Err(BundleError::Hides { volume, hidden })
            },
        )
    }

    /// Adds mounts of one kind. Of those in each other the one above comes first, and which that is may
    /// depend on links in those before it. One without a destination is left out. So is the later one of two with
    /// the same destination, if `at_one_place` allows it.
    fn add_in_order<T: Copy>(
        &mut self,
        mut wanted: Vec<T>,
        destination_of: impl Fn(&mut Self, T) -> Result<Option<String>>,
        add: impl Fn(&mut Self, T, &str) -> Result<()>,
        at_one_place: impl Fn(T, &Path) -> Result<()>,
    ) -> Result<()> {
        let first = self.list.len();
        let mut tries_left = wanted.len();
        // `wanted[..at]` are in the list.
        let mut at = 0;
        while let Some(this) = wanted.get(at).copied() {
            let Some(destination) = destination_of(self, this)? else {
                wanted.remove(at);
                continue;
            };
            let hidden = self.list[first..].iter().enumerate().find_map(|(number, mount)| {
                let there = Path::new(mount["destination"].as_str()?);
                there.starts_with(&destination).then_some((number, there))
            });
            match hidden {
                None => {
                    add(self, this, &destination)?;
                    at += 1;
                }
                Some((_, there)) if there == Path::new(&destination) => {
                    at_one_place(this, there)?;
                    wanted.remove(at);
                }
                // The order goes in a circle.
                Some((_, there)) if tries_left == 0 => {
                    return Err(BundleError::Hides { hidden: there.into(), volume: destination });
                }
                Some((number, _)) => {
                    // Again from there, with this one before the other.
                    wanted[number..=at].rotate_right(1);
                    self.list.truncate(first + number);
                    (at, tries_left) = (number, tries_left - 1);
                }
            }
        }
        Ok(())
    }

    /// Where a directory or file of the host comes to lie.
    fn destination_of(&mut self, bind: &Bind) -> Result<String> {
        plain_path("volume", &bind.target)?;
        let destination = self.resolve(&bind.target)?;
        // A path that the caller spells out is the caller's choice.
        let is_led = Path::new(&destination) != Path::new(&bind.target);
        if destination == "/" || is_reserved(&destination) && is_led {
            return Err(BundleError::LinkedTarget(bind.target.clone()));
        }
        self.refuse_to_hide_changes(&bind.target, &destination)?;
        if self.is_missing(&destination) {
            return Err(BundleError::MissingMountPoint(bind.target.clone()));
        }
        Ok(destination)
    }

    /// Refuses a volume over a directory that the caller made writable.
    fn refuse_to_hide_changes(&self, volume: &str, destination: &str) -> Result<()> {
        let mut dirs = self.options.writable_dirs.iter();
        match dirs.find(|dir| dir.starts_with(destination)) {
            Some(hidden) if !self.options.writable_recorded => {
                Err(BundleError::Hides { volume: volume.to_owned(), hidden: hidden.clone() })
            }
            _ => Ok(()),
        }
    }

    /// Whether a mount point is missing, and read-only what it would be in, so that the runtime cannot
    /// make it.
    fn is_missing(&self, destination: &str) -> bool {
        let path = Path::new(destination);
        match self.mount_above(path) {
            None => {
                self.options.readonly
                    && !is_writable(self.options, destination)
                    && !self.root.exists(destination)
            }
            // Something is mounted there.
            Some((_, rest)) if rest == Path::new("") => false,
            Some((mount, rest)) if is_bind(mount) => {
                let mut options = mount["options"].as_array().into_iter().flatten();
                // There are no links in this path.
                options.any(|option| option == "ro") && !source(mount).join(rest).exists()
            }
            Some(_) => false,
        }
    }

    /// Where a mount at `path` comes to lie beside the mounts so far, which is what the runtime is told:
    /// there are no links on its way to it.
    ///
    /// # Errors
    /// A path that cannot be looked up, or that is not UTF-8 as JSON is.
    fn resolve(&mut self, path: &str) -> Result<String> {
        let found = self.walk(Path::new(path)).and_then(|found| {
            let text = found.into_os_string().into_string();
            text.map_err(|found| io::Error::other(format!("it leads to {found:?}, not UTF-8")))
        });
        Ok(found.at("looking up", self.root.path.join(path.trim_start_matches('/')))?)
    }

    fn walk(&mut self, path: &Path) -> io::Result<PathBuf> {
        let names = |path: &Path| -> Vec<OsString> {
            let names = path.iter().filter(|name| *name != "/" && *name != ".");
            names.map(ToOwned::to_owned).rev().collect()
        };
        let (mut left, mut at, mut links) = (names(path), PathBuf::from("/"), 0);
        while let Some(name) = left.pop() {
            let left_after = self.names_left.checked_sub(1);
            self.names_left = left_after.ok_or_else(|| {
                io::Error::other(format!(
                    "volumes and links lead through more than {NAMES_MAX} names"
                ))
            })?;
            if name == ".." {
                at.pop();
                continue;
            }
            at.push(name);
            let Some(target) = self.link_at(&at)? else { continue };
            links += 1;
            if links > LINKS_MAX {
                return Err(Errno::LOOP.into());
            }
            at = if target.is_absolute() { "/".into() } else { at.parent().unwrap_or(&at).into() };
            left.extend(names(&target));
        }
        Ok(at)
    }

    /// Where a link leads, if the container, with the mounts so far, sees one there. It has pseudo
    /// filesystems of its own in place of the image's directories.
    fn link_at(&self, path: &Path) -> io::Result<Option<PathBuf>> {
        match self.mount_above(path) {
            // Something is mounted there.
            Some((_, rest)) if rest == Path::new("") => Ok(None),
            Some((mount, rest)) if is_bind(mount) => {
                let flags = OFlags::PATH | OFlags::CLOEXEC;
                Ok(link_in(&rustix::fs::open(source(mount), flags, Mode::empty())?, rest)?)
            }
            _ if is_pseudo(path) => Ok(None),
            // A directory in memory begins as a copy of the image's.
            _ => Ok(link_in(&self.root.fd, path)?),
        }
    }

    /// The mount that a path is in, or that is there, and the path below it.
    fn mount_above<'p>(&self, path: &'p Path) -> Option<(&Value, &'p Path)> {
        // A later one covers those before it.
        self.list.iter().rev().find_map(|mount| {
            Some((mount, path.strip_prefix(mount["destination"].as_str()?).ok()?))
        })
    }
}

/// Whether a mount shows what the host has somewhere.
fn is_bind(mount: &Value) -> bool {
    mount["type"] == "bind"
}

fn source(mount: &Value) -> &Path {
    Path::new(mount["source"].as_str().unwrap_or_default())
}

/// Whether the container has a filesystem of its own there: its root, or a pseudo filesystem.
fn is_reserved(path: &str) -> bool {
    path == "/" || is_pseudo(Path::new(path))
}

fn depth(path: &str) -> usize {
    Path::new(path).components().count()
}

/// Whether a path is in a writable directory of a read-only root.
fn is_writable(options: &Options, path: &str) -> bool {
    options.writable_dirs.iter().any(|dir| Path::new(path).starts_with(dir))
}

/// The volumes for which a container with a read-only root gets a directory, unless they are in a
/// writable one. A directory of the host replaces the others.
pub(in crate::container) fn volumes_with_directory<'a>(
    image: &'a ImageConfig,
    options: &'a Options,
) -> impl Iterator<Item = &'a str> {
    image.volumes().filter(|path| !options.binds.iter().any(|bind| bind.target == *path))
}

/// Whether a directory is in memory where the root is read-only, unless it is made writable: a
/// scratch directory, or one in it.
pub fn is_scratch(dir: &Path) -> bool {
    SCRATCH_PATHS.iter().any(|scratch| dir.starts_with(scratch))
}

/// Directories that programs expect to be writable though the root is read-only: scratch, and the
/// image's volumes.
pub fn expected_dirs(image: &ImageConfig) -> impl Iterator<Item = &str> {
    SCRATCH_PATHS.into_iter().chain(image.volumes())
}

/// Whether a container with a read-only root would not see changes of this directory of the image,
/// were it writable, because the container has a mount of its own over it.
pub fn is_hidden(image: &ImageConfig, options: &Options, dir: &Path) -> bool {
    let mut binds = options.binds.iter().map(|bind| bind.target.as_str());
    // These give way to a writable directory, but not to one in them.
    let mut above = expected_dirs(image);
    is_pseudo(dir)
        || binds.any(|own| dir.starts_with(own))
        || above.any(|own| dir != Path::new(own) && dir.starts_with(own))
}

/// Name of the host directory behind a volume, empty at first and owned like the image's directory.
///
/// Volumes are siblings: inside another one, a container could put a symbolic link into the path.
fn volume(volumes: &Place<'_>, root: &Rootfs, path: &str) -> Result<String> {
    let inside = root.open_beneath(path, OFlags::PATH | OFlags::DIRECTORY).ok();
    // Where the image has none the runtime makes it, in a mount above it.
    let like = rustix::fs::fstat(inside.as_ref().unwrap_or(&root.fd)).at("reading", path)?;
    let mode = if inside.is_some() { like.st_mode & 0o7777 } else { 0o755 };
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
        // Whole, or under a name that no volume has.
        let aside = volumes.held.join(format!("%new-{}", std::process::id()));
        // For root alone, because of set-user-ID programs that a container puts there.
        let mut private = fs::DirBuilder::new();
        private.mode(0o700).recursive(true).create(volumes.held).at("creating", volumes.held)?;
        // A process that was killed may have left an empty one. No link is followed.
        let _ = fs::remove_dir(&aside);
        private.recursive(false).create(&aside).at("creating", &aside)?;
        let have = fs::metadata(&aside).at("reading", &aside)?;
        if (have.uid(), have.gid()) != (like.st_uid, like.st_gid) {
            std::os::unix::fs::chown(&aside, Some(like.st_uid), Some(like.st_gid))
                .at("setting the owner of", &aside)?;
        }
        fs::set_permissions(&aside, fs::Permissions::from_mode(mode))
            .at("setting the mode of", &aside)?;
        fs::rename(&aside, &directory).at("creating", &directory)?;
    }
    Ok(name)
}
