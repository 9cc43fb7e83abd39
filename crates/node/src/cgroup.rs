//! Memory cgroups, of version 1 and 2: charges, and fresh cgroups to measure in.
//!
//! Page cache stays charged to the cgroup that first touches it until it is dropped, so the charge
//! of a cgroup with a single reader is the memory that this reader brought in.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fs, io, thread};

use cofolio_sys::cache::FileMap;
use rustix::io::Errno;
use rustix::thread::{disable_transparent_huge_pages, transparent_huge_pages_are_disabled};
use serde::Serialize;

use crate::mount::{KernelMount, mountinfo};
use crate::size::Size;
use crate::{kernel_text, processes};

/// Name of the [commons](crate::commons), at the top of the hierarchy.
pub const COMMONS: &str = "cofolio-commons";

/// What can go wrong with memory cgroups.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CgroupError {
    /// A file of the kernel's could not be read or written.
    #[error("{path}: {source}", path = .path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Kernel text that does not have the documented form.
    #[error("{path}: {what}", path = .path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What was expected and not found.
        what: String,
    },
    /// The kernel cannot free what a cgroup of version 1 holds beyond a smaller limit.
    #[error(
        "the limit cannot be lowered to {}: the kernel finds no more pages in {} to drop, since \
         the rest are in use",
        Size(*.limit_bytes),
        .cgroup.display()
    )]
    InUse {
        /// Its directory.
        cgroup: PathBuf,
        /// The limit in bytes that was asked for.
        limit_bytes: u64,
    },
    /// Paths of cgroups in `/proc` do not begin at the root of the mount, so they do not lead to
    /// their directories.
    #[error(
        "no memory cgroup: the root of {} is the cgroup {} and not /, as in a container or a \
         cgroup namespace",
        .mount.display(),
        .root.display()
    )]
    OtherRoot {
        /// Where the hierarchy is mounted.
        mount: PathBuf,
        /// The cgroup at the root of the mount, as mountinfo shows it.
        root: PathBuf,
    },
    /// The machine has no memory controller that this process can use.
    #[error("no memory cgroup: {reason}")]
    NoMemoryController {
        /// Why, for the person in front of the machine.
        reason: String,
    },
}

impl CgroupError {
    fn io(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { path, source }
    }
}

type Result<T, E = CgroupError> = std::result::Result<T, E>;

/// Which of the kernel's two interfaces a hierarchy speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Version {
    /// `Documentation/admin-guide/cgroup-v1/memory.rst`.
    V1,
    /// `Documentation/admin-guide/cgroup-v2.rst`.
    V2,
}

/// What a memory cgroup is charged, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Charge {
    /// Page cache, of block devices too (v1 `cache`, v2 `file`).
    pub cache: u64,
    /// Process memory that no file backs (v1 `rss`, v2 `anon`).
    pub anon: u64,
    /// Kernel memory: inodes and dentries, page tables, stacks (v1 `memory.kmem.usage_in_bytes`, v2
    /// `kernel`). `None` if the kernel does not count it (`cgroup.memory=nokmem`).
    pub kernel: Option<u64>,
    /// All together (v1 `memory.usage_in_bytes`, v2 `memory.current`).
    pub total: u64,
    /// The highest `total` so far, where the kernel keeps it (v2 since 5.19).
    pub peak: Option<u64>,
}

/// The mounted hierarchy that has the memory controller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hierarchy {
    version: Version,
    /// Where it is mounted, the root path included.
    mount: PathBuf,
}

impl Hierarchy {
    /// Finds the memory controller of the machine under `root` (`/` on a live machine).
    ///
    /// # Errors
    /// [`CgroupError::NoMemoryController`] with the reason when no mounted hierarchy has it,
    /// [`CgroupError::OtherRoot`] when no mount shows all of it.
    pub fn find(root: &Path) -> Result<Hierarchy> {
        let path = root.join("proc/self/mountinfo");
        let mounts = mountinfo::parse(&fs::read(&path).map_err(CgroupError::io(path))?);
        let is_v1 =
            |mount: &&KernelMount| mount.filesystem == "cgroup" && mount.has_option("memory");
        let is_v2 = |mount: &&KernelMount| mount.filesystem == "cgroup2";
        // A bind mount may show a part of the hierarchy only.
        let is_whole = |mount: &&KernelMount| mount.root == Path::new("/");
        let at = |mount: &KernelMount| {
            let path = root.join(mount.target.strip_prefix("/").unwrap_or(&mount.target));
            match is_whole(&mount) {
                true => Ok(path),
                false => Err(CgroupError::OtherRoot { mount: path, root: mount.root.clone() }),
            }
        };
        let v1 = || mounts.iter().filter(is_v1);
        if let Some(mount) = v1().find(is_whole).or_else(|| v1().next()) {
            return Ok(Hierarchy { version: Version::V1, mount: at(mount)? });
        }
        let v2 = || mounts.iter().filter(is_v2);
        let Some(mount) = v2().find(is_whole).or_else(|| v2().next()) else {
            let reason = "neither a version 1 memory hierarchy nor cgroup2 is mounted".to_owned();
            return Err(CgroupError::NoMemoryController { reason });
        };
        let mount = at(mount)?;
        let controllers = read_text(&mount.join("cgroup.controllers"))?;
        if !controllers.split_whitespace().any(|controller| controller == "memory") {
            let reason = format!("{} does not offer the memory controller", mount.display());
            return Err(CgroupError::NoMemoryController { reason });
        }
        Ok(Hierarchy { version: Version::V2, mount })
    }

    /// A hierarchy that is mounted at a path.
    #[cfg(test)]
    pub(crate) fn at(version: Version, mount: &Path) -> Self {
        Hierarchy { version, mount: mount.to_owned() }
    }

    /// The directory of a cgroup, by its path from the root of the hierarchy.
    ///
    /// # Errors
    /// `InvalidInput` for a path with `..`: the kernel gives such a path to a cgroup outside of
    /// this process's cgroup namespace (cgroup_namespaces(7)), and the mount does not show it.
    pub fn directory(&self, cgroup: &str) -> io::Result<PathBuf> {
        if cgroup.split('/').any(|name| name == "..") {
            let what = "outside of this process's cgroup namespace";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        Ok(self.mount.join(cgroup.trim_start_matches('/')))
    }

    fn path(&self, cgroup: &str) -> Result<PathBuf> {
        self.directory(cgroup).map_err(CgroupError::io(cgroup))
    }

    /// What a cgroup may hold before the kernel reclaims from it, in bytes: the lowest limit of it
    /// and those above it, if any has one.
    pub(crate) fn effective_limit_bytes(&self, cgroup: &str) -> Option<u64> {
        let files: &[&str] = match self.version {
            Version::V1 => &["memory.limit_in_bytes"],
            Version::V2 => &["memory.high", "memory.max"],
        };
        let directory = self.directory(cgroup).ok()?;
        let all = directory.ancestors().take_while(|it| it.starts_with(&self.mount));
        all.flat_map(|it| files.iter().filter_map(move |file| limit_in(&it.join(file)).ok()?)).min()
    }

    /// The interface it speaks.
    pub fn version(&self) -> Version {
        self.version
    }

    /// Makes an empty cgroup, by its path from the top of the hierarchy; removed on drop. The one
    /// above it must exist.
    ///
    /// # Errors
    /// [`CgroupError::NoMemoryController`] with the kernel's reason where version 2 does not offer
    /// memory cgroups there: for one, a container whose top cgroup has processes of its own.
    /// [`CgroupError::Io`] when the kernel makes no directory: no privilege, or too many cgroups.
    pub fn create(&self, name: &str) -> Result<Cgroup> {
        self.make(name, false)
    }

    /// A cgroup, by its path from the top of the hierarchy, that stays; made if it is missing.
    ///
    /// # Errors
    /// As [`Hierarchy::create`].
    pub fn standing(&self, name: &str) -> Result<Cgroup> {
        self.make(name, true)
    }

    /// A cgroup at the top of the hierarchy that stays, if it exists.
    pub(crate) fn existing(&self, name: &str) -> Option<Cgroup> {
        let path = self.directory(name).ok()?;
        path.is_dir().then(|| Cgroup { hierarchy: self.clone(), path, stays: true })
    }

    fn make(&self, name: &str, stays: bool) -> Result<Cgroup> {
        let path = self.path(name)?;
        let above = path.parent().unwrap_or(&self.mount);
        if self.version == Version::V2 {
            let control = above.join("cgroup.subtree_control");
            let enabled = read_text(&control)?.split_whitespace().any(|c| c == "memory");
            if !enabled {
                fs::write(&control, "+memory").map_err(|error| {
                    let reason = format!("{}: {error}", control.display());
                    CgroupError::NoMemoryController { reason }
                })?;
            }
        }
        match fs::create_dir(&path) {
            Err(error) if stays && error.kind() == io::ErrorKind::AlreadyExists => {}
            other => other.map_err(CgroupError::io(&path))?,
        }
        Ok(Cgroup { hierarchy: self.clone(), path, stays })
    }

    /// The processes in a cgroup and in those below it. A cgroup that vanishes meanwhile has
    /// none. A container can have any number of cgroups: `between` is called before each of them.
    ///
    /// # Errors
    /// Those of reading its files: `EOPNOTSUPP` for a threaded cgroup of version 2, which has no
    /// list of processes.
    pub(crate) fn processes(
        &self,
        cgroup: &str,
        mut between: impl FnMut(),
    ) -> io::Result<Vec<u32>> {
        let mut found = Vec::new();
        let mut open = vec![self.directory(cgroup)?];
        while let Some(directory) = open.pop() {
            between();
            let listed = fs::read_to_string(directory.join("cgroup.procs")).and_then(|text| {
                found.extend(text.lines().filter_map(|line| line.parse::<u32>().ok()));
                for entry in fs::read_dir(&directory)? {
                    let entry = entry?;
                    if entry.file_type()?.is_dir() {
                        open.push(entry.path());
                    }
                }
                Ok(())
            });
            // `ENODEV`: it was removed after its file was opened.
            let has_gone = |error| matches!(error, Some(Errno::NOENT | Errno::NODEV));
            if let Err(error) = listed
                && !has_gone(Errno::from_io_error(&error))
            {
                return Err(error);
            }
        }
        Ok(found)
    }

    /// Removes a cgroup that a killed process [made](Self::create), if it exists.
    ///
    /// # Errors
    /// [`CgroupError::Io`] when the kernel refuses, for instance because a process is in it.
    pub fn remove(&self, name: &str) -> Result<()> {
        let path = self.path(name)?;
        match fs::remove_dir(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(CgroupError::io(path)(error))
            }
            _ => Ok(()),
        }
    }

    /// The page cache charged to every cgroup but `except`, in bytes. Cgroups that vanish meanwhile
    /// count as nothing; removed ones whose pages live on ("dying") count with their parent.
    ///
    /// # Errors
    /// [`CgroupError::Io`] when the top of the hierarchy cannot be read.
    pub fn cache_elsewhere(&self, except: &Cgroup) -> Result<u64> {
        // Version 2 counts children in; version 1 does so in total_*, also at the top.
        let stat = read_text(&self.mount.join("memory.stat"))?;
        let name = match self.version {
            Version::V1 => "total_cache",
            Version::V2 => "file",
        };
        Ok(field(&stat, name).unwrap_or(0).saturating_sub(except.charge()?.cache))
    }
}

/// A memory cgroup that this value removes when it is dropped, unless it
/// [stays](Hierarchy::standing).
#[derive(Debug)]
pub struct Cgroup {
    hierarchy: Hierarchy,
    path: PathBuf,
    stays: bool,
}

impl Cgroup {
    /// Its directory.
    pub fn directory(&self) -> &Path {
        &self.path
    }

    /// The file that a process writes its id (or 0) to, to enter.
    pub fn procs(&self) -> PathBuf {
        self.path.join("cgroup.procs")
    }

    /// Moves this process with all threads in until the value is dropped; earlier charges stay.
    /// Meanwhile it is given no huge pages, which would take 2 MiB of the cgroup for a few bytes of
    /// its own.
    ///
    /// # Errors
    /// [`CgroupError::Io`] when the kernel refuses, or when this process is in a cgroup outside of
    /// its cgroup namespace and could not go back; [`CgroupError::Format`] when `/proc/self/cgroup`
    /// does not tell where to go back to.
    pub fn enter(&self) -> Result<Inside> {
        let path = PathBuf::from("/proc/self/cgroup");
        let text = read_text(&path)?;
        let home = path_in(&text, self.hierarchy.version)
            .ok_or_else(|| CgroupError::Format { path, what: "has no memory cgroup".to_owned() })?;
        let back = self.hierarchy.path(home)?.join("cgroup.procs");
        fs::write(self.procs(), "0").map_err(CgroupError::io(self.procs()))?;
        let takes_huge_pages = transparent_huge_pages_are_disabled() == Ok(false)
            && disable_transparent_huge_pages(true).is_ok();
        Ok(Inside { back, takes_huge_pages })
    }

    /// Limits its memory to a number of bytes, which the kernel rounds down to whole pages.
    ///
    /// # Errors
    /// [`CgroupError::InUse`], [`CgroupError::Io`] when the kernel refuses.
    pub fn limit(&self, bytes: u64) -> Result<()> {
        let path = self.limit_file();
        match fs::write(&path, bytes.to_string()) {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                Err(CgroupError::InUse { cgroup: self.path.clone(), limit_bytes: bytes })
            }
            written => written.map_err(CgroupError::io(&path)),
        }
    }

    /// The limit of its memory in bytes, if it has one.
    ///
    /// # Errors
    /// [`CgroupError::Io`].
    pub fn limit_bytes(&self) -> Result<Option<u64>> {
        limit_in(&self.limit_file())
    }

    fn limit_file(&self) -> PathBuf {
        self.path.join(match self.hierarchy.version {
            Version::V1 => "memory.limit_in_bytes",
            Version::V2 => "memory.max",
        })
    }

    /// How many processes in it the kernel has killed because of its limit.
    ///
    /// # Errors
    /// [`CgroupError::Io`]; [`CgroupError::Format`].
    pub fn oom_kills(&self) -> Result<u64> {
        let path = self.path.join(match self.hierarchy.version {
            Version::V1 => "memory.oom_control",
            Version::V2 => "memory.events",
        });
        let text = read_text(&path)?;
        let what = || "has no line oom_kill".to_owned();
        field(&text, "oom_kill").ok_or_else(|| CgroupError::Format { path, what: what() })
    }

    /// What processes map of the page cache that it is charged for, in bytes; processes of other
    /// cgroups, too.
    ///
    /// # Errors
    /// [`CgroupError::Io`]; [`CgroupError::Format`].
    pub(crate) fn mapped_bytes(&self) -> Result<u64> {
        let name = match self.hierarchy.version {
            Version::V1 => "mapped_file",
            Version::V2 => "file_mapped",
        };
        let path = self.path.join("memory.stat");
        let what = || format!("has no line {name}");
        let bytes = field(&read_text(&path)?, name);
        bytes.ok_or_else(|| CgroupError::Format { path, what: what() })
    }

    /// Whether its limit ever held a charge up.
    ///
    /// # Errors
    /// [`CgroupError::Io`]; [`CgroupError::Format`].
    pub fn was_at_its_limit(&self) -> Result<bool> {
        let file = match self.hierarchy.version {
            Version::V1 => "memory.failcnt",
            Version::V2 => "memory.events",
        };
        let path = self.path.join(file);
        let text = read_text(&path)?;
        let times = match self.hierarchy.version {
            Version::V1 => text.trim().parse().ok(),
            Version::V2 => field(&text, "max"),
        };
        let what = || "does not say how often".to_owned();
        times.map(|times| times > 0).ok_or_else(|| CgroupError::Format { path, what: what() })
    }

    /// Inode number of its directory.
    pub(crate) fn inode(&self) -> io::Result<u64> {
        fs::metadata(&self.path).map(|found| found.ino())
    }

    /// Asks which pages are charged to it. Fails where the kernel does not tell, or not this process.
    pub(crate) fn charged_pages(&self) -> io::Result<ChargedPages> {
        let (pagemap, cgroups) =
            (File::open("/proc/self/pagemap")?, File::open("/proc/kpagecgroup")?);
        Ok(ChargedPages { inode: self.inode()?, pagemap, cgroups })
    }

    /// Its charge now.
    ///
    /// # Errors
    /// [`CgroupError::Io`]; [`CgroupError::Format`] if a figure is missing that every kernel has.
    pub fn charge(&self) -> Result<Charge> {
        read_charge(self.hierarchy.version, &self.path)
    }
}

/// The limit in a file of a cgroup, if it has one.
fn limit_in(file: &Path) -> Result<Option<u64>> {
    let limit = read_text(file)?.trim().parse::<u64>().ok();
    // Version 2 says `max`, version 1 the largest number of whole pages below 2^63.
    Ok(limit.filter(|bytes| *bytes < 1 << 62))
}

/// Which pages are charged to a cgroup. The kernel says that for each page of memory
/// (`/proc/kpagecgroup`, by the inode number of the cgroup's directory). To come from a file to its
/// pages, the file is mapped. That takes 0.2 µs a page and some 15 µs a file.
#[derive(Debug)]
pub(crate) struct ChargedPages {
    inode: u64,
    pagemap: File,
    cgroups: File,
}

impl ChargedPages {
    /// Pages of the first `size` bytes of a file that are charged to the cgroup, and that are
    /// charged elsewhere; neither has those that are still being read.
    ///
    /// # Errors
    /// Those of [`FileMap::resident_frames`], and of reading `/proc/kpagecgroup`.
    pub(crate) fn count(&self, file: impl AsFd, size: u64) -> io::Result<(u64, u64)> {
        let (mut own, mut all) = (0, 0);
        let mut failed = None;
        let mut entries = Vec::new();
        FileMap::new(file, size)?.resident_frames(&self.pagemap, |first, count| {
            entries.resize(usize::try_from(count).unwrap_or(0) * 8, 0);
            match self.cgroups.read_exact_at(&mut entries, first * 8) {
                Ok(()) => {
                    let inode = self.inode.to_ne_bytes();
                    own += entries.chunks_exact(8).filter(|it| **it == inode).count() as u64;
                    all += count;
                }
                Err(error) => failed = Some(error),
            }
        })?;
        failed.map_or(Ok((own, all - own)), Err)
    }
}

/// Whether every cgroup of the machine has a path: in a cgroup namespace those of others begin with
/// `/..`.
pub(crate) fn are_all_visible(root: &Path) -> bool {
    // PROC_CGROUP_INIT_INO of `include/linux/proc_ns.h`.
    let namespace = fs::read_link(root.join("proc/thread-self/ns/cgroup"));
    namespace.is_ok_and(|link| link == Path::new("cgroup:[4026531835]"))
}

/// Whether a path of a cgroup is that of `top`, or lies below it.
pub(crate) fn is_at_or_below(path: &str, top: &str) -> bool {
    let rest = path.strip_prefix(top.trim_end_matches('/'));
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// The path of a process's cgroup below the root of a hierarchy. A cgroup whose name is not UTF-8
/// counts as the one above it. Fails for a process that has ended: in version 1, the kernel says of
/// a zombie that it is in `/`, and of a main thread that has ended before the others.
pub(crate) fn of_process(root: &Path, pid: u32, version: Version) -> io::Result<Option<String>> {
    let path_of = |pid| -> io::Result<Option<String>> {
        let text = kernel_text::read(&processes::directory(root, pid).join("cgroup"))?;
        Ok(path_in(&text, version).map(|path| up_to_odd_name(path).to_owned()))
    };
    let path = path_of(pid)?;
    let stat = processes::directory(root, pid).join("stat");
    if version == Version::V1
        && path.as_deref() == Some("/")
        && is_ending(&kernel_text::read(&stat)?)
    {
        return path_of(processes::other_thread(root, pid)?.ok_or(io::ErrorKind::NotFound)?);
    }
    Ok(path)
}

/// The path above the first name that was not UTF-8.
fn up_to_odd_name(path: &str) -> &str {
    match path.find(char::REPLACEMENT_CHARACTER) {
        Some(odd) => path[..odd].rfind('/').map_or("/", |end| &path[..end.max(1)]),
        None => path,
    }
}

/// Whether the kernel is ending the process: `PF_EXITING` of `include/linux/sched.h` in the flags
/// of `/proc/PID/stat`, the seventh field behind the name, which may contain anything.
fn is_ending(stat: &str) -> bool {
    const EXITING: u32 = 4;
    let flags = stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').nth(6)?.parse().ok());
    flags.is_some_and(|flags: u32| flags & EXITING != 0)
}

/// The path of a memory cgroup in what `/proc/PID/cgroup` says: `11:memory:/user.slice` of version 1,
/// `0::/user.slice` of version 2.
pub(crate) fn path_in(text: &str, version: Version) -> Option<&str> {
    // A name may end in CR, which `lines` would take off.
    text.split('\n').find_map(|line| {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        let is_ours = match version {
            Version::V1 => controllers.split(',').any(|controller| controller == "memory"),
            Version::V2 => controllers.is_empty(),
        };
        is_ours.then_some(path)
    })
}

/// This process is in a cgroup of ours, and goes back where it was when the value is dropped.
#[derive(Debug)]
#[must_use = "dropping it leaves the cgroup"]
pub struct Inside {
    back: PathBuf,
    /// Whether it may be given huge pages again when it is back.
    takes_huge_pages: bool,
}

impl Drop for Inside {
    fn drop(&mut self) {
        // Nobody can be told. The cgroup then stays behind, with this process in it.
        let _ = fs::write(&self.back, "0");
        if self.takes_huge_pages {
            let _ = disable_transparent_huge_pages(false);
        }
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // A process that has just exited may still be counted for a moment.
        let tries = if self.stays { 0 } else { 50 };
        for _ in 0..tries {
            match fs::remove_dir(&self.path) {
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                    thread::sleep(Duration::from_millis(10));
                }
                _ => return,
            }
        }
    }
}

/// The charge of the cgroup at `path`; fails as [`Cgroup::charge`] does.
pub fn read_charge(version: Version, path: &Path) -> Result<Charge> {
    let stat_path = path.join("memory.stat");
    let stat = read_text(&stat_path)?;
    let stat_field = |name: &str| {
        field(&stat, name).ok_or_else(|| CgroupError::Format {
            path: stat_path.clone(),
            what: format!("has no line {name}"),
        })
    };
    let optional = |file: &str| -> Option<u64> {
        read_text(&path.join(file)).ok().and_then(|text| text.trim().parse().ok())
    };
    let total = |file: &str| {
        let path = path.join(file);
        let text = read_text(&path)?;
        text.trim().parse().map_err(|_| CgroupError::Format {
            path,
            what: format!("is not a number of bytes: {:?}", text.trim()),
        })
    };
    Ok(match version {
        Version::V1 => Charge {
            cache: stat_field("cache")?,
            anon: stat_field("rss")?,
            kernel: optional("memory.kmem.usage_in_bytes"),
            total: total("memory.usage_in_bytes")?,
            peak: optional("memory.max_usage_in_bytes"),
        },
        Version::V2 => Charge {
            cache: stat_field("file")?,
            anon: stat_field("anon")?,
            // `kernel` came in 5.18; before that its parts were told apart only.
            kernel: field(&stat, "kernel").or_else(|| {
                let parts = ["slab", "kernel_stack", "pagetables", "percpu"];
                parts.iter().map(|part| field(&stat, part)).sum()
            }),
            total: total("memory.current")?,
            peak: optional("memory.peak"),
        },
    })
}

/// The number of one `name 123` line, as vmstat and memory.stat have them.
pub fn field(text: &str, name: &str) -> Option<u64> {
    text.lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))
        .and_then(|value| value.trim().parse().ok())
}

fn read_text(path: &Path) -> Result<String> {
    kernel_text::read(path).map_err(CgroupError::io(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A short program of a container had ended when its event was read. It was taken for a process
    /// of the cgroup `/`, as which version 1 shows zombies, and not for one that had ended.
    #[test]
    fn a_zombie_is_in_no_cgroup() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = child.id();
        let state = || fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        while !state().contains(") Z ") {
            thread::yield_now();
        }
        assert!(is_ending(&state()));
        let own = fs::read_to_string("/proc/self/stat").unwrap();
        assert!(!is_ending(&own) && !is_ending("") && !is_ending("1 (a) b) R 1"));
        let root = tempfile::tempdir().unwrap();
        let of = root.path().join(format!("proc/{pid}"));
        fs::create_dir_all(&of).unwrap();
        fs::write(of.join("cgroup"), "11:memory:/\n").unwrap();
        fs::write(of.join("stat"), state()).unwrap();
        assert!(of_process(root.path(), pid, Version::V1).is_err());
        fs::write(of.join("stat"), own).unwrap();
        assert_eq!(of_process(root.path(), pid, Version::V1).unwrap().as_deref(), Some("/"));
        child.wait().unwrap();
    }

    #[test]
    fn the_cgroup_is_that_of_the_memory_controller() {
        let v1 = "12:cpu,cpuacct:/a\n11:memory:/cofolio/x-1\n0::/b\n";
        assert_eq!(path_in(v1, Version::V1), Some("/cofolio/x-1"));
        assert_eq!(path_in(v1, Version::V2), Some("/b"));
        assert_eq!(path_in("0::/c\n", Version::V1), None);
        // Such a container was taken for the one without CR: a reclaim of one dropped what both use.
        assert_eq!(path_in("0::/c\r\n", Version::V2), Some("/c\r"));
    }

    fn plant(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    const V1_MOUNTS: &str = "\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
";
    const V2_MOUNTS: &str =
        "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";

    /// Of a mountinfo of more than a mebibyte the rest was not read.
    #[test]
    fn version_1_wins_where_it_has_the_controller() {
        let many = "1 0 8:1 / /many rw - ext4 /dev/vda rw\n".repeat(40_000);
        let root = plant(&[("proc/self/mountinfo", &(many + V1_MOUNTS))]);
        let hierarchy = Hierarchy::find(root.path()).unwrap();
        assert_eq!(hierarchy.version(), Version::V1);
        assert_eq!(hierarchy.mount, root.path().join("sys/fs/cgroup/memory"));
    }

    #[test]
    fn version_2_needs_the_controller() {
        let with = plant(&[
            ("proc/self/mountinfo", V2_MOUNTS),
            ("sys/fs/cgroup/cgroup.controllers", "cpuset cpu io memory pids\n"),
        ]);
        assert_eq!(Hierarchy::find(with.path()).unwrap().version(), Version::V2);

        let without = plant(&[
            ("proc/self/mountinfo", V2_MOUNTS),
            ("sys/fs/cgroup/cgroup.controllers", "cpu pids\n"),
        ]);
        let error = Hierarchy::find(without.path()).unwrap_err();
        assert!(matches!(error, CgroupError::NoMemoryController { .. }), "{error}");
    }

    /// A bind mount of one cgroup's directory, mounted later, was taken for the hierarchy.
    #[test]
    fn the_whole_hierarchy_wins_over_a_part_of_it() {
        let part = "40 23 0:26 /system.slice /srv/part rw - cgroup2 cgroup2 rw\n";
        let text = format!("{part}{V2_MOUNTS}{part}");
        let root = plant(&[
            ("proc/self/mountinfo", &text),
            ("sys/fs/cgroup/cgroup.controllers", "memory\n"),
        ]);
        let hierarchy = Hierarchy::find(root.path()).unwrap();
        assert_eq!(hierarchy.mount, root.path().join("sys/fs/cgroup"));
    }

    /// Such a mount was taken for the whole: no path led to a directory, so all cgroups had ended.
    #[test]
    fn a_mount_with_another_root_is_refused() {
        let of_others = "35 31 0:32 /docker/x /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n";
        let in_namespace = "30 23 0:26 /../.. /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
        for (text, root) in [(of_others, "cgroup /docker/x and"), (in_namespace, "cgroup /../.. ")]
        {
            let planted = plant(&[
                ("proc/self/mountinfo", text),
                ("sys/fs/cgroup/cgroup.controllers", "memory\n"),
            ]);
            let error = Hierarchy::find(planted.path()).unwrap_err();
            assert!(matches!(error, CgroupError::OtherRoot { .. }), "{error}");
            assert!(error.to_string().contains(root), "{error}");
        }
    }

    #[test]
    fn a_path_with_two_dots_has_no_directory() {
        let hierarchy = Hierarchy::at(Version::V2, Path::new("/top"));
        for (path, directory) in [("/", "/top/"), ("/a..b/..c", "/top/a..b/..c")] {
            assert_eq!(hierarchy.directory(path).unwrap(), Path::new(directory));
        }
        for path in ["/..", "/../b", "../b", "/a/../b", "/a/.."] {
            let error = hierarchy.directory(path).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{path}");
        }
        let error = hierarchy.create("/../b").unwrap_err().to_string();
        assert_eq!(error, "/../b: outside of this process's cgroup namespace");
    }

    /// Whatever kept the kernel from making a directory, the error said that there was no memory
    /// cgroup.
    #[test]
    fn a_cgroup_that_cannot_be_made_is_named() {
        let top = tempfile::tempdir().unwrap();
        fs::create_dir(top.path().join("a")).unwrap();
        let hierarchy = Hierarchy::at(Version::V1, top.path());
        let failure = |name| match hierarchy.create(name) {
            Err(CgroupError::Io { path, source }) => (path, source.kind()),
            other => panic!("{other:?}"),
        };
        assert_eq!(failure("a"), (top.path().join("a"), io::ErrorKind::AlreadyExists));
        assert_eq!(failure("b/c"), (top.path().join("b/c"), io::ErrorKind::NotFound));
    }

    #[test]
    fn a_machine_without_cgroups_says_so() {
        let root = plant(&[("proc/self/mountinfo", "1 0 8:1 / / rw - ext4 /dev/vda rw\nshort\n")]);
        let error = Hierarchy::find(root.path()).unwrap_err().to_string();
        assert!(error.contains("neither"), "{error}");
    }

    #[test]
    fn mount_points_with_spaces_are_found() {
        let line = r"35 31 0:32 / /mnt/my\040groups rw - cgroup cgroup rw,memory";
        let root = plant(&[("proc/self/mountinfo", line)]);
        assert_eq!(Hierarchy::find(root.path()).unwrap().mount, root.path().join("mnt/my groups"));
    }

    #[test]
    fn reads_a_planted_version_1_charge() {
        let root = plant(&[
            ("g/memory.stat", "cache 4096\nrss 8192\nrss_huge 0\ntotal_cache 99\ntotal_rss 98\n"),
            ("g/memory.kmem.usage_in_bytes", "12288\n"),
            ("g/memory.usage_in_bytes", "24576\n"),
            ("g/memory.max_usage_in_bytes", "30000\n"),
        ]);
        let charge = read_charge(Version::V1, &root.path().join("g")).unwrap();
        let expected = Charge {
            cache: 4096,
            anon: 8192,
            kernel: Some(12_288),
            total: 24_576,
            peak: Some(30_000),
        };
        assert_eq!(charge, expected);
    }

    #[test]
    fn reads_a_planted_version_2_charge_of_old_and_new_kernels() {
        let new = plant(&[
            ("memory.stat", "anon 1\nfile 2\nkernel 30\nkernel_stack 10\npagetables 5\nslab 15\n"),
            ("memory.current", "33\n"),
            ("memory.peak", "40\n"),
        ]);
        let charge = read_charge(Version::V2, new.path()).unwrap();
        assert_eq!((charge.cache, charge.anon, charge.kernel), (2, 1, Some(30)));
        assert_eq!((charge.total, charge.peak), (33, Some(40)));

        let old = plant(&[
            ("memory.stat", "anon 1\nfile 2\nkernel_stack 10\npagetables 5\npercpu 1\nslab 15\n"),
            ("memory.current", "33\n"),
        ]);
        let charge = read_charge(Version::V2, old.path()).unwrap();
        assert_eq!((charge.kernel, charge.peak), (Some(31), None));
    }

    #[test]
    fn a_stat_without_its_figures_is_refused() {
        let root = plant(&[("memory.stat", "rss 1\n"), ("memory.usage_in_bytes", "1\n")]);
        let error = read_charge(Version::V1, root.path()).unwrap_err().to_string();
        assert!(error.contains("memory.stat") && error.contains("cache"), "{error}");
        let root = plant(&[("memory.stat", "anon 1\nfile 2\n"), ("memory.current", "many\n")]);
        let error = read_charge(Version::V2, root.path()).unwrap_err().to_string();
        assert!(error.contains("memory.current"), "{error}");
    }

    /// Our cgroup is charged for the page cache of a process in it, and vanishes on drop.
    #[test]
    fn a_live_cgroup_is_charged_and_removed() {
        let made = Hierarchy::find(Path::new("/"))
            .and_then(|h| h.create(&format!("cofolio-test-{}", std::process::id())));
        let group = match made {
            Ok(group) => group,
            Err(reason) => {
                println!("SKIP a_live_cgroup_is_charged_and_removed: {reason}");
                return;
            }
        };
        let dir = std::env::current_exe().unwrap().parent().unwrap().to_owned();
        let file = tempfile::NamedTempFile::new_in(dir).unwrap();
        // Writing allocates page cache: 8 MiB of it, in a process that has entered the cgroup.
        let script = format!(
            "echo 0 > '{}' && head -c 8388608 /dev/zero > '{}'",
            group.procs().display(),
            file.path().display()
        );
        let status = std::process::Command::new("sh").arg("-c").arg(script).status().unwrap();
        assert!(status.success());
        let charge = group.charge().unwrap();
        assert!(charge.cache >= 8 << 20 && charge.cache < 12 << 20, "{charge:?}");
        let path = group.path.clone();
        drop(group);
        assert!(!path.exists());
    }
}
