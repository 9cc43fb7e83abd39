//! Containers: mounts an image, writes a bundle and starts a runtime, in one step.
//!
//! ```text
//! <run>/containers/<name>/     mode 0700; with a user namespace 0710 and the group of its root
//!   lock                       held by the process that waits for the container and by its runtime
//!   container.json             the record (ContainerRecord), written before anything is mounted
//!   config.json                for the runtime
//!   rootfs                     the image, mounted
//!   pid                        of the container's first process, written by the runtime
//!   log, exec-<pid>.log        the runtime's error messages
//!   output, output.1           of a detached container, at most OUTPUT_BYTES_MAX each
//!   exit                       of a detached container that has ended: its exit status
//! <run>/<runtime>/<name>/      the runtime's own state: `crun --root <run>/crun list` shows it
//! /cofolio/<name>-<tag>        its cgroup
//! ```
//!
//! `cofolio run`, or the process that `run --detach` leaves behind, waits for a container and
//! removes it at its end; there is no daemon. A detached container's record, exit status and output
//! stay until somebody removes them by name. If the waiting process is killed, the container goes
//! on ([`State::Unattended`]) and [`Containers::reconcile`] removes it after its end. A container
//! runs if its first process is in its cgroup. Where the record is lost, too, the cgroup tells.

pub mod bundle;
mod end;
mod error;
mod runtime;
mod start;
mod streams;
#[cfg(test)]
mod tests;

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Child;

use cofolio_store::Digest;
use cofolio_store::task::Cancelled;
use rustix::io::Errno;
use rustix::process::Pid;
use serde::{Deserialize, Serialize};

use self::bundle::ImageConfig;
use self::error::{Result, complaint, reason};
use crate::kernel_text;
use crate::mount::{At as _, Check, MountError, Mounter};
use crate::run_dir::running::{is_locked, is_name, kept_exit_status, read_text};
use crate::run_dir::{self, is_at, read_json};

pub(crate) use end::ends_within;
pub use end::pidfd;
pub use error::{Reason, RunError};
pub use runtime::Runtime;
pub use start::{Exec, Finished, exit_status, wait_for};
pub use streams::{Copies, Streams, append};

pub use crate::run_dir::running::State;

/// What to start.
#[derive(Debug, Clone)]
pub struct Request {
    /// The image.
    pub image: Digest,
    /// Name of the image, for people.
    pub image_name: String,
    /// Its config.
    pub config: ImageConfig,
    /// Name of the container; a new one is made from the image's name where absent.
    pub name: Option<String>,
    /// How to run the image. Cgroup, read-only root and volumes are set here, not by the caller.
    pub options: bundle::Options,
    /// Whether its root can be written to.
    pub writable: bool,
    /// Keep its changes.
    pub keep: bool,
    /// Bytes that its changes may take.
    pub size_bytes: Option<u64>,
    /// What must hold of the image first.
    pub check: Check,
    /// The program that starts it.
    pub runtime: Runtime,
    /// Let KSM merge its pages with those of every other program that allows it.
    pub ksm: bool,
}

/// Name of the record.
const RECORD: &str = "container.json";

/// What `container.json` holds.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ContainerRecord {
    /// Its name.
    pub name: String,
    /// Digest of the image.
    pub image: Digest,
    /// Name of the image, for people.
    pub image_name: String,
    /// Trust domain.
    pub domain: String,
    /// The program and its arguments.
    pub command: Vec<String>,
    /// The program that started it.
    pub runtime: Runtime,
    /// Signal that asks it to end, from the image config.
    pub stop_signal: String,
    /// Its changes are kept.
    pub keep: bool,
    /// Its root can be written to.
    pub writable: bool,
    /// The only directories of the image that can be written to, if its root cannot.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub writable_dirs: Vec<PathBuf>,
    /// KSM may merge pages of its processes.
    #[serde(default)]
    pub ksm: bool,
    /// Its cgroup.
    pub cgroup: String,
    /// When it was made, in seconds since 1970.
    pub created: i64,
}

/// One line of [`Containers::list`].
#[derive(Debug, Clone, Serialize)]
pub struct ContainerStatus {
    /// Its record.
    #[serde(flatten)]
    pub record: ContainerRecord,
    /// Whether it runs.
    pub state: State,
    /// Its first process, while it runs.
    pub pid: Option<u32>,
    /// Exit status of a detached container that has ended: its own, or 128 and a signal's number.
    pub exit_status: Option<u8>,
    /// The last output of a detached container.
    pub output: Option<PathBuf>,
    /// Its root filesystem on the host.
    pub rootfs: PathBuf,
    /// What the runtime takes as `--root`.
    pub runtime_root: PathBuf,
}

/// The containers of one trust domain.
pub struct Containers<'a> {
    mounter: Mounter<'a>,
    before_start: Option<&'a dyn Fn() -> Result<(), Cancelled>>,
    /// Where `/proc` and `/sys` are looked up.
    root: PathBuf,
}

/// A container that is being started or runs. Dropped, it stays, for [`Containers::reconcile`].
#[derive(Debug)]
pub struct Container {
    dir: PathBuf,
    state: PathBuf,
    record: ContainerRecord,
    lock: OwnedFd,
    /// An open directory of its root filesystem: other processes cannot unmount it.
    busy: Option<OwnedFd>,
}

/// A container whose end this process can wait for.
#[derive(Debug)]
pub struct Running {
    /// The container.
    pub container: Container,
    runtime: Child,
    /// Of a detached one the first process, which is a child of this process.
    first: Option<Pid>,
    copies: Copies,
}

impl<'a> Containers<'a> {
    /// Containers whose images `mounter` mounts, in its run directory.
    pub fn new(mounter: Mounter<'a>) -> Self {
        Self { mounter, before_start: None, root: PathBuf::from("/") }
    }

    /// Calls this when the image of a new container is mounted, before the runtime starts it. If it
    /// is cancelled then, so is the start.
    #[must_use]
    pub fn before_start(self, call: &'a dyn Fn() -> Result<(), Cancelled>) -> Self {
        Self { before_start: Some(call), ..self }
    }

    pub(crate) fn mounter(&self) -> &Mounter<'a> {
        &self.mounter
    }

    fn dir(&self) -> PathBuf {
        self.mounter.run_dir().path().join("containers")
    }

    fn state_dir(&self, runtime: &Runtime) -> PathBuf {
        self.mounter.run_dir().path().join(runtime.name())
    }

    /// All containers, by name. `failed` says of which others nothing can be read, and why.
    ///
    /// # Errors
    /// [`RunError::Mount`].
    pub fn list(&self, failed: &mut Vec<RunError>) -> Result<Vec<ContainerStatus>> {
        let mut all = Vec::new();
        for name in self.names()? {
            match self.status(&name) {
                Ok(status) => all.extend(status),
                Err(error) => failed.push(error),
            }
        }
        Ok(all)
    }

    /// The name of the running container whose root filesystem is mounted at a path.
    ///
    /// # Errors
    /// [`RunError::Mount`], [`RunError::Record`].
    pub fn living_at(&self, rootfs: &Path) -> Result<Option<String>> {
        let Ok(all) = fs::canonicalize(self.dir()) else { return Ok(None) };
        let Some(dir) = rootfs.parent().filter(|dir| dir.parent() == Some(&all)) else {
            return Ok(None);
        };
        let name = dir.file_name().unwrap_or_default().to_string_lossy();
        let found = self.status(&name)?.filter(|status| status.state != State::Ended);
        Ok(found.map(|status| status.record.name))
    }

    /// Names of containers that have a directory, or have lost it and left a cgroup.
    fn names(&self) -> Result<Vec<String>> {
        let mut names = run_dir::list(&self.dir())?;
        let tag = format!("-{}", self.mounter.run_dir().tag());
        for dir in self.cgroup_dirs("/cofolio")? {
            let cgroups = fs::read_dir(dir).into_iter().flatten().flatten();
            let cgroups = cgroups.filter_map(|cgroup| cgroup.file_name().into_string().ok());
            let found = cgroups.filter_map(|name| Some(name.strip_suffix(&tag)?.to_owned()));
            // Whoever may make cgroups there chooses what becomes a path.
            names.extend(found.filter(|name| is_name(name)));
        }
        names.sort();
        names.dedup();
        Ok(names)
    }

    fn cgroup(&self, name: &str) -> String {
        format!("/cofolio/{name}-{}", self.mounter.run_dir().tag())
    }

    /// Fails if a container that has no record runs.
    fn check_lost(&self, name: &str) -> Result<()> {
        let cgroup = self.cgroup(name);
        let pid = self.process_in(&cgroup)?;
        match pid.map_or_else(|| self.process_below(&cgroup), |pid| Ok(Some(pid)))? {
            Some(pid) => Err(RunError::Lost { name: name.to_owned(), pid, cgroup }),
            None => Ok(()),
        }
    }

    fn status(&self, name: &str) -> Result<Option<ContainerStatus>> {
        let dir = self.dir().join(name);
        let Some(record) = read_record(&dir)? else {
            return self.check_lost(name).map(|()| None);
        };
        let pid = self.first_process(&dir, &record)?;
        let state = match (is_locked(&dir)?, pid) {
            (true, _) => State::Running,
            (false, Some(_)) => State::Unattended,
            (false, None) => State::Ended,
        };
        Ok(Some(ContainerStatus {
            state,
            pid,
            exit_status: kept_exit_status(&dir).filter(|_| state == State::Ended),
            output: Some(dir.join("output")).filter(|output| output.exists()),
            rootfs: dir.join("rootfs"),
            runtime_root: self.state_dir(&record.runtime),
            record,
        }))
    }

    /// The first process, if it lives: the one in the pid file, if it is in the container's cgroup
    /// and the number was not reused. Without a number, since the runtime was killed before it
    /// wrote one, the first process of the cgroup.
    fn first_process(&self, dir: &Path, record: &ContainerRecord) -> Result<Option<u32>> {
        let written = read_text(&dir.join("pid"));
        let Some(pid) = written.and_then(|text| text.trim().parse::<u32>().ok()) else {
            return self.process_in(&record.cgroup);
        };
        let path = self.root.join(format!("proc/{pid}/cgroup"));
        let Some(cgroups) = read_unless_gone(&path)? else { return Ok(None) };
        let below = format!("{}/", record.cgroup);
        let inside =
            cgroups.lines().any(|line| line.ends_with(&record.cgroup) || line.contains(&below));
        // Version 1 says of a process whose main thread has ended, while others go on, that it is in `/`.
        let lives = inside || self.processes_in(&record.cgroup)?.contains(&pid);
        Ok(lives.then_some(pid))
    }

    /// Where a cgroup may be: below the root of version 2, or of each hierarchy of version 1. A directory
    /// where none is mounted may have files of the same names: crun writes there.
    fn cgroup_dirs(&self, cgroup: &str) -> Result<impl Iterator<Item = PathBuf>> {
        let top = self.root.join("sys/fs/cgroup");
        let hierarchies = run_dir::list(&top)?;
        let tops =
            std::iter::once(String::new()).chain(hierarchies).map(move |name| top.join(name));
        let tops = tops.filter(|top| top.join("cgroup.procs").exists());
        Ok(tops.map(move |top| top.join(cgroup.trim_start_matches('/'))))
    }

    /// The first process of a cgroup: the one that its pid namespace numbers 1. Numbers come again, so
    /// the lowest one of the host may be that of a child.
    fn process_in(&self, cgroup: &str) -> Result<Option<u32>> {
        let pids = self.processes_in(cgroup)?;
        Ok(pids.into_iter().min_by_key(|&pid| (!self.is_init(pid), pid)))
    }

    /// The processes of a cgroup, those of its children apart.
    fn processes_in(&self, cgroup: &str) -> Result<Vec<u32>> {
        let mut found = Vec::new();
        for dir in self.cgroup_dirs(cgroup)? {
            let text = read_unless_gone(&dir.join("cgroup.procs"))?.unwrap_or_default();
            found.extend(text.lines().filter_map(|line| line.parse::<u32>().ok()));
        }
        Ok(found)
    }

    /// A process of a cgroup or of those below it, which a container makes if it is allowed to.
    fn process_below(&self, cgroup: &str) -> Result<Option<u32>> {
        let mut left: Vec<PathBuf> = self.cgroup_dirs(cgroup)?.collect();
        while let Some(dir) = left.pop() {
            let text = read_unless_gone(&dir.join("cgroup.procs"))?.unwrap_or_default();
            if let Some(pid) = text.lines().find_map(|line| line.parse().ok()) {
                return Ok(Some(pid));
            }
            let entries = match fs::read_dir(&dir) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                other => other.at("listing", &dir)?,
            };
            for entry in entries {
                let entry = entry.at("listing", &dir)?;
                if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    left.push(entry.path());
                }
            }
        }
        Ok(None)
    }

    /// Whether a process is the first one of a pid namespace right below ours.
    fn is_init(&self, pid: u32) -> bool {
        let status = read_text(&self.root.join(format!("proc/{pid}/status"))).unwrap_or_default();
        let inner = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
        inner.is_some_and(|pids| pids.split_whitespace().skip(1).eq(["1"]))
    }
}

impl Container {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.record.name
    }

    /// Its root filesystem on the host.
    pub fn rootfs(&self) -> PathBuf {
        self.dir.join("rootfs")
    }

    fn refusal(&self) -> Option<RunError> {
        refusal(&self.dir.join("log"), &self.record.runtime)
    }
}

/// The runtime's error, if it logged one. Its exit status alone may be the container's.
fn refusal(log: &Path, runtime: &Runtime) -> Option<RunError> {
    let said = read_text(log)?.lines().rev().find_map(complaint)?;
    let reason = reason(&said);
    Some(RunError::Refused { runtime: runtime.name(), said, reason })
}

/// The record of a container; `None` where none was written, so that nothing was mounted either.
fn read_record(dir: &Path) -> Result<Option<ContainerRecord>> {
    read_json(&dir.join(RECORD)).map_err(|error| RunError::Record(error.into()))
}

/// Reads a file of the kernel's; `None` if it, its process or its cgroup is gone, or if it is a threaded cgroup's, whose
/// processes a cgroup above it lists. Any other error says nothing about the container.
fn read_unless_gone(path: &Path) -> Result<Option<String>, MountError> {
    match kernel_text::read(path) {
        Err(error)
            if matches!(
                Errno::from_io_error(&error),
                Some(Errno::NOENT | Errno::NOTDIR | Errno::SRCH | Errno::NODEV | Errno::OPNOTSUPP)
            ) =>
        {
            Ok(None)
        }
        other => other.at("reading", path).map(Some),
    }
}
