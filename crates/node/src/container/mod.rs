//! Containers: an image mounted, a bundle written and a runtime started, in one step.
//!
//! ```text
//! <run>/containers/<name>/     mode 0700; with a user namespace 0710 and the group of its root
//!   lock                       held by `cofolio run` and by the runtime that it started
//!   container.json             what it is (ContainerRecord), written before anything is mounted
//!   config.json                for the runtime; until the image is mounted, crun finds a pipe there
//!   rootfs                     the image, mounted
//!   pid                        of the container's first process, written by the runtime
//!   log                        what the runtime says when it fails
//! <run>/<runtime>/<name>/      the runtime's own state: `crun --root <run>/crun list` shows it
//! /cofolio/<name>-<tag>        its cgroup
//! ```
//!
//! A container is gone when its first process has ended, unless its changes are to be kept. Nothing
//! watches over it but the process that started it and the runtime, which both hold the lock. If they
//! are killed the container goes on, and is one that nobody attends to ([`State::Unattended`]), like
//! one that was started detached; when it has ended too, [`Containers::reconcile`] removes what is
//! left of it. Nobody needs to be asked whether it has: its first process is in its cgroup or is not.

pub mod bundle;
mod runtime;
#[cfg(test)]
mod tests;

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use cofolio_store::Digest;
use rustix::fs::{FlockOperation, Gid, Mode, OFlags, Uid};
use serde::{Deserialize, Serialize};

use self::bundle::{BundleError, ImageConfig};
use crate::mount::{Access, Check, IdMap, MountError, MountRequest, Mounter, UmountOptions};

pub use runtime::Runtime;

/// Why a container was not started, or not cleaned up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// No program to start containers with.
    #[error("{0} is not installed")]
    NoRuntime(String),
    /// The runtime could not be started.
    #[error("starting {}", path.display())]
    Runtime {
        /// The program.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The runtime started and failed.
    #[error("{runtime}: {said}")]
    Refused {
        /// Its name.
        runtime: String,
        /// Its words.
        said: String,
        /// Whether the program to run is missing or cannot be executed.
        reason: Reason,
    },
    /// A name that cannot be one.
    #[error("container name `{0}`: letters, digits, `_`, `.` and `-`, at most 63")]
    Name(String),
    /// The name is taken.
    #[error("there is a container `{0}` already")]
    Exists(String),
    /// No container has the name.
    #[error("no container `{0}`")]
    NotFound(String),
    /// A user namespace needs a map that has root in it.
    #[error("id map {0}: user 0 and group 0 are not in it")]
    NoRoot(String),
    /// It did not end, not even when it was killed.
    #[error("container `{0}` does not end")]
    StillRunning(String),
    /// The image could not be mounted, or unmounted.
    #[error(transparent)]
    Mount(#[from] MountError),
    /// The image cannot be run, or not like this.
    #[error(transparent)]
    Bundle(#[from] BundleError),
    /// The operating system refused.
    #[error("{doing} {}", path.display())]
    Io {
        /// What was being done.
        doing: &'static str,
        /// To what.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
}

impl RunError {
    /// What it was about has been removed meanwhile.
    fn is_missing(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }
}

type Result<T> = std::result::Result<T, RunError>;

/// What was wrong when a runtime refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// The program to run is not in the image.
    NoProgram,
    /// It is there, and cannot be executed.
    NotExecutable,
    /// Something else.
    Other,
}

/// What to start.
#[derive(Debug, Clone)]
pub struct Request {
    /// The image.
    pub image: Digest,
    /// What people call it.
    pub image_name: String,
    /// Its config.
    pub config: ImageConfig,
    /// Name of the container; one is made up where absent.
    pub name: Option<String>,
    /// How the image is to be run. Cgroup, read-only root and volumes are set here, not by the caller.
    pub options: bundle::Options,
    /// Whether its root can be written to.
    pub writable: bool,
    /// Its changes stay.
    pub keep: bool,
    /// Bytes that its changes may take.
    pub size_bytes: Option<u64>,
    /// What has to hold of the image first.
    pub check: Check,
    /// What starts it.
    pub runtime: Runtime,
}

/// What `container.json` holds.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ContainerRecord {
    /// Its name.
    pub name: String,
    /// Digest of the image.
    pub image: Digest,
    /// What people call the image.
    pub image_name: String,
    /// Trust domain.
    pub domain: String,
    /// The program and its arguments.
    pub command: Vec<String>,
    /// What started it.
    pub runtime: Runtime,
    /// Signal that asks it to end, as the image config has it.
    pub stop_signal: String,
    /// Its changes stay.
    pub keep: bool,
    /// Its root can be written to.
    pub writable: bool,
    /// Its cgroup.
    pub cgroup: String,
    /// When it was made, in seconds since 1970.
    pub created: i64,
}

/// How a container is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// Being started, running or being removed; somebody waits for its end.
    Running,
    /// Running. Nobody waits for its end: it was started detached, or its starter was killed.
    Unattended,
    /// It has ended and was not removed.
    Ended,
}

/// One line of [`Containers::list`].
#[derive(Debug, Clone, Serialize)]
pub struct ContainerStatus {
    /// What it is.
    #[serde(flatten)]
    pub record: ContainerRecord,
    /// How it is.
    pub state: State,
    /// Its first process, while it runs.
    pub pid: Option<u32>,
    /// Its root filesystem on the host.
    pub rootfs: PathBuf,
    /// What the runtime takes as `--root`.
    pub runtime_root: PathBuf,
}

/// How a container has ended, and what is left.
#[derive(Debug, Clone, Default)]
pub struct Ended {
    /// Directory with its changes, if it was to be kept.
    pub changes: Option<PathBuf>,
}

/// The containers of one trust domain.
pub struct Containers<'a> {
    mounter: Mounter<'a>,
    /// Where `/proc` and `/sys` are looked up.
    root: PathBuf,
}

/// A container that is being started or runs; dropped, it stays as it is, for [`Containers::reconcile`].
#[derive(Debug)]
pub struct Container {
    dir: PathBuf,
    state: PathBuf,
    record: ContainerRecord,
    lock: OwnedFd,
    /// Keeps others from unmounting it.
    busy: Option<OwnedFd>,
}

impl<'a> Containers<'a> {
    /// Containers whose images `mounter` mounts, in its run directory.
    pub fn new(mounter: Mounter<'a>) -> Self {
        Self { mounter, root: PathBuf::from("/") }
    }

    fn dir(&self) -> PathBuf {
        self.mounter.run_dir().path().join("containers")
    }

    /// Mounts the image and starts the runtime, which ends when the container does, with its exit status. On
    /// an error nothing of it is left.
    ///
    /// # Errors
    /// [`RunError`].
    pub fn start(&self, request: &Request, input: Stdio) -> Result<(Container, Child)> {
        self.launch(request, true, |command| {
            command.stdin(input);
        })
    }

    /// Starts a container and returns when it runs. Nobody waits for its end then.
    ///
    /// # Errors
    /// [`RunError`].
    pub fn start_detached(
        &self,
        request: &Request,
        output: Stdio,
        errors: Stdio,
    ) -> Result<Container> {
        let (container, mut child) = self.launch(request, false, |command| {
            command.arg("--detach").stdin(Stdio::null()).stdout(output).stderr(errors);
        })?;
        let error = match child.wait() {
            Ok(status) if status.success() => return Ok(container),
            Ok(status) => container
                .refusal()
                .unwrap_or_else(|| container.failed(io::Error::other(status.to_string()))),
            Err(source) => container.failed(source),
        };
        // The first error tells more.
        let _ = self.remove(container);
        Err(error)
    }

    fn launch(
        &self,
        request: &Request,
        attended: bool,
        set: impl FnOnce(&mut Command),
    ) -> Result<(Container, Child)> {
        // The usual mistake, before anything is made.
        let command = bundle::command(&request.config, &request.options)?;
        let (name, dir, lock) = self.claim(request)?;
        let run = self.mounter.run_dir();
        let record = ContainerRecord {
            image: request.image,
            image_name: request.image_name.clone(),
            domain: self.mounter.domain().name().to_owned(),
            command,
            runtime: request.runtime.clone(),
            stop_signal: request.config.stop_signal().to_owned(),
            keep: request.keep,
            writable: request.writable,
            cgroup: format!("/cofolio/{name}-{}", run.tag()),
            created: crate::mount::now(),
            name,
        };
        let state = run.path().join(request.runtime.name());
        let mut container = Container { dir, state, record, lock, busy: None };
        match self.fill(&mut container, request, attended, set) {
            Ok(child) => Ok((container, child)),
            Err(error) => {
                // The first error tells more.
                let _ = self.remove(container);
                Err(error)
            }
        }
    }

    /// Everything after the claim.
    ///
    /// crun is started first. It takes milliseconds until it reads its config, which we use to check and mount
    /// the image; what it reads from is a pipe, into which the config is written when all of that has gone
    /// well. If it does not we kill crun; if we die the pipe ends empty, and crun with it. Of other runtimes
    /// we do not know when they read it, or how often.
    fn fill(
        &self,
        container: &mut Container,
        request: &Request,
        attended: bool,
        set: impl FnOnce(&mut Command),
    ) -> Result<Child> {
        let dir = container.dir.clone();
        let path = dir.join("container.json");
        let text = serde_json::to_vec(&container.record).map_err(io::Error::other);
        fs::write(&path, text.at("writing", &path)?).at("writing", &path)?;
        if let Some(idmap) = &request.options.idmap {
            self.open_to(&dir, idmap)?;
        }
        let mut command = container.command();
        set(&mut command);
        command.arg(&container.record.name);
        if !container.record.runtime.is_crun() {
            let config = self.mount(container, request)?;
            let path = dir.join("config.json");
            fs::write(&path, config).at("writing", &path)?;
            return container.spawn(&mut command, attended, None);
        }
        let (early, reader) = EarlyConfig::new(&dir)?;
        let mut child = container.spawn(&mut command, attended, Some(&reader))?;
        drop(reader);
        match self.mount(container, request).and_then(|config| early.give(&dir, &config)) {
            Ok(()) => Ok(child),
            Err(error) => {
                early.end(&mut child);
                Err(error)
            }
        }
    }

    /// Takes a name and locks its directory.
    fn claim(&self, request: &Request) -> Result<(String, PathBuf, OwnedFd)> {
        const TRIES_MAX: u32 = 100;
        for _ in 0..TRIES_MAX {
            let name = match &request.name {
                Some(name) => name.clone(),
                None => made_up_name(&request.image_name),
            };
            if !is_name(&name) {
                return Err(RunError::Name(name));
            }
            self.mounter.run_dir().prepare()?;
            let dir = self.dir().join(&name);
            match fs::DirBuilder::new().mode(0o700).create(&dir) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                    // One that has ended makes room.
                    if self.reconcile_one(&name)? || request.name.is_none() {
                        continue;
                    }
                    return Err(RunError::Exists(name));
                }
                Err(error) => return Err(error).at("creating", &dir),
            }
            // Between the two somebody may have taken it for a leftover.
            match lock(&dir, FlockOperation::LockExclusive) {
                Ok(Some(lock)) if is_in(&lock, &dir) => {
                    return Ok((name, dir, lock));
                }
                Err(error) if !error.is_missing() => return Err(error),
                _ => {}
            }
        }
        Err(RunError::Exists(request.name.clone().unwrap_or_default()))
    }

    /// Mounts the image and gives the text of `config.json`.
    fn mount(&self, container: &mut Container, request: &Request) -> Result<Vec<u8>> {
        let dir = &container.dir;
        let mut options = request.options.clone();
        options.readonly = !request.writable;
        options.cgroup = Some(container.record.cgroup.clone());
        let rootfs = dir.join("rootfs");
        let mounted = self.mounter.mount(&MountRequest {
            create_target: true,
            access: match (request.writable, request.keep) {
                (false, _) => Access::ReadOnly,
                (true, false) => Access::Writable,
                (true, true) => Access::WritableKept,
            },
            size_bytes: request.size_bytes,
            scratch: !request.writable && request.config.volumes().next().is_some(),
            check: request.check,
            idmap: options.idmap.clone(),
            ..MountRequest::new(request.image, &rootfs)
        })?;
        container.busy = Some(crate::mount::open_root(&rootfs)?);
        options.volumes = mounted.scratch.or(options.volumes);
        let config = bundle::generate(dir, &mounted.target, &request.config, &options, &self.root)?;
        let path = dir.join("config.json");
        serde_json::to_vec(&config).map_err(io::Error::other).at("writing", path)
    }

    /// Lets root of a user namespace reach its root filesystem, and nobody else.
    fn open_to(&self, dir: &Path, idmap: &IdMap) -> Result<()> {
        let (_, group) = idmap.root().ok_or_else(|| RunError::NoRoot(idmap.to_string()))?;
        rustix::fs::chown(dir, None::<Uid>, Some(Gid::from_raw(group))).at("opening", dir)?;
        fs::set_permissions(dir, fs::Permissions::from_mode(0o710)).at("opening", dir)?;
        // The run directory's own parent may be ours, too, and of an earlier version.
        let run = self.mounter.run_dir().path();
        for dir in run.parent().into_iter().chain([run, &self.dir()]) {
            let mode = fs::metadata(dir).at("looking at", dir)?.permissions().mode() & 0o7777;
            if mode & 0o011 != 0o011 {
                let open = fs::Permissions::from_mode(mode | 0o011);
                fs::set_permissions(dir, open).at("opening", dir)?;
            }
        }
        Ok(())
    }

    /// Removes a container whose first process has ended, or was never started.
    ///
    /// # Errors
    /// [`RunError`]; what is left then is for [`Containers::reconcile`].
    pub fn remove(&self, mut container: Container) -> Result<Ended> {
        drop(container.busy.take());
        let (dir, record) = (&container.dir, &container.record);
        // A runtime that saw the end of its container has removed its state.
        if container.state.join(&record.name).exists() {
            record.runtime.ask(&container.state, &["delete", "--force", &record.name])?;
        }
        // One that failed half-way may have forgotten the cgroup, of which what is in use stays.
        if container.refusal().is_some() {
            self.cgroup_dirs(&record.cgroup).for_each(|dir| drop(fs::remove_dir(dir)));
        }
        let mut ended = Ended::default();
        let rootfs = dir.join("rootfs");
        match self.mounter.umount(&rootfs, &UmountOptions { force: true, keep_upper: false }) {
            Ok(unmounted) => ended.changes = unmounted.upper,
            Err(MountError::NotMounted(_)) => {}
            Err(error) => return Err(error.into()),
        }
        remove_files(dir)?;
        Ok(ended)
    }

    /// All containers, by name.
    ///
    /// # Errors
    /// [`RunError::Io`].
    pub fn list(&self) -> Result<Vec<ContainerStatus>> {
        let mut all = Vec::new();
        for name in self.names()? {
            all.extend(self.status(&name)?);
        }
        Ok(all)
    }

    /// The name of the container whose root filesystem is mounted at a path, if it lives.
    ///
    /// # Errors
    /// [`RunError::Io`].
    pub fn living_at(&self, rootfs: &Path) -> Result<Option<String>> {
        let Ok(all) = fs::canonicalize(self.dir()) else { return Ok(None) };
        let Some(dir) = rootfs.parent().filter(|dir| dir.parent() == Some(&all)) else {
            return Ok(None);
        };
        let name = dir.file_name().unwrap_or_default().to_string_lossy();
        let found = self.status(&name)?.filter(|status| status.state != State::Ended);
        Ok(found.map(|status| status.record.name))
    }

    fn names(&self) -> Result<Vec<String>> {
        let dir = self.dir();
        let mut names = crate::mount::list(&dir)?;
        names.sort();
        Ok(names)
    }

    fn status(&self, name: &str) -> Result<Option<ContainerStatus>> {
        let dir = self.dir().join(name);
        let Some(record) = read_record(&dir)? else { return Ok(None) };
        let pid = self.first_process(&dir, &record);
        let state = match (is_locked(&dir)?, pid) {
            (true, _) => State::Running,
            (false, Some(_)) => State::Unattended,
            (false, None) => State::Ended,
        };
        let runtime_root = self.mounter.run_dir().path().join(record.runtime.name());
        let rootfs = dir.join("rootfs");
        Ok(Some(ContainerStatus { record, state, pid, rootfs, runtime_root }))
    }

    /// The container's first process, if it lives: the process with the number that the runtime wrote
    /// down, in the container's cgroup. A number that went to another process is not in there. A runtime that
    /// was killed may not have written it down, though its container runs: then the cgroup itself says.
    fn first_process(&self, dir: &Path, record: &ContainerRecord) -> Option<u32> {
        let written = fs::read_to_string(dir.join("pid")).ok();
        let Some(pid) = written.and_then(|text| text.trim().parse::<u32>().ok()) else {
            return self.process_in(&record.cgroup);
        };
        let cgroups = fs::read_to_string(self.root.join(format!("proc/{pid}/cgroup"))).ok()?;
        let below = format!("{}/", record.cgroup);
        let inside =
            cgroups.lines().any(|line| line.ends_with(&record.cgroup) || line.contains(&below));
        inside.then_some(pid)
    }

    /// Where a cgroup may be: below the root of version 2, or of each hierarchy of version 1.
    fn cgroup_dirs(&self, cgroup: &str) -> impl Iterator<Item = PathBuf> {
        let top = self.root.join("sys/fs/cgroup");
        let hierarchies = fs::read_dir(&top).into_iter().flatten().flatten();
        let tops = std::iter::once(top).chain(hierarchies.map(|entry| entry.path()));
        tops.map(move |top| top.join(cgroup.trim_start_matches('/')))
    }

    /// The first process of a cgroup.
    fn process_in(&self, cgroup: &str) -> Option<u32> {
        self.cgroup_dirs(cgroup).find_map(|dir| {
            let text = fs::read_to_string(dir.join("cgroup.procs")).ok()?;
            text.lines().filter_map(|line| line.parse().ok()).min()
        })
    }

    /// Removes what is left of containers that have ended and that nobody waits for; returns their
    /// names. What cannot be removed is in `failed`, and does not keep the rest from being.
    ///
    /// # Errors
    /// [`RunError::Io`] if the run directory cannot be read.
    pub fn reconcile(&self, failed: &mut Vec<String>) -> Result<Vec<String>> {
        let mut removed = Vec::new();
        for name in self.names()? {
            match self.reconcile_one(&name) {
                Ok(true) => removed.push(name),
                Ok(false) => {}
                Err(error) => failed.push(format!("container {name}: {error}")),
            }
        }
        Ok(removed)
    }

    /// Says whether it removed the container.
    fn reconcile_one(&self, name: &str) -> Result<bool> {
        let dir = self.dir().join(name);
        let lock = match lock(&dir, FlockOperation::NonBlockingLockExclusive) {
            // Who removed the container meanwhile had another lock, and who has the name now has his own.
            Ok(Some(lock)) if is_in(&lock, &dir) => lock,
            Ok(_) => return Ok(false),
            Err(error) if error.is_missing() => return Ok(false),
            Err(error) => return Err(error),
        };
        let Some(record) = read_record(&dir)? else {
            // Killed before it was written, or while it was: nothing was mounted yet.
            remove_files(&dir)?;
            return Ok(true);
        };
        if self.first_process(&dir, &record).is_some() {
            return Ok(false);
        }
        let state = self.mounter.run_dir().path().join(record.runtime.name());
        self.remove(Container { dir, state, record, lock, busy: None })?;
        Ok(true)
    }

    /// Ends a container: asks it to, kills it after `patience`, and removes it.
    ///
    /// # Errors
    /// [`RunError::NotFound`], [`RunError::StillRunning`], [`RunError::Runtime`].
    pub fn stop(&self, name: &str, patience: std::time::Duration) -> Result<()> {
        if !is_name(name) {
            return Err(RunError::Name(name.to_owned()));
        }
        let found = self.status(name)?.ok_or_else(|| RunError::NotFound(name.to_owned()))?;
        let state = self.mounter.run_dir().path().join(found.record.runtime.name());
        let (runtime, signal) = (&found.record.runtime, found.record.stop_signal.as_str());
        if let Some(pid) = found.pid {
            // Before the signal: afterwards its number may be somebody else's.
            let handle = pidfd(pid);
            for (signal, patience) in [(signal, patience), ("KILL", KILLED_PATIENCE)] {
                let asked = runtime.ask(&state, &["kill", name, signal])?;
                // A runtime that was killed at its work may not know the container.
                if let (false, Some(handle)) = (asked.status.success(), &handle) {
                    let kill = rustix::process::Signal::KILL;
                    let _ = rustix::process::pidfd_send_signal(handle, kill);
                }
                if handle.as_ref().is_none_or(|handle| ends_within(handle, patience)) {
                    break;
                }
            }
        }
        // Whoever waits for it removes it; if nobody does, we do.
        let start = std::time::Instant::now();
        let dir = self.dir().join(name);
        while dir.exists() && !self.reconcile_one(name)? {
            if start.elapsed() > KILLED_PATIENCE {
                return Err(RunError::StillRunning(name.to_owned()));
            }
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        Ok(())
    }
}

/// How long a process may take to die of SIGKILL, and its starter to clean up.
const KILLED_PATIENCE: std::time::Duration = std::time::Duration::from_secs(10);

impl Container {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.record.name
    }

    /// Its root filesystem on the host.
    pub fn rootfs(&self) -> PathBuf {
        self.dir.join("rootfs")
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.record.runtime.path);
        let log = self.dir.join("log");
        command.arg("--root").arg(&self.state).arg("--log").arg(log);
        command.args(["--log-format", "json", "run", "--bundle"]).arg(&self.dir);
        command.arg("--pid-file").arg(self.dir.join("pid"));
        command
    }

    fn spawn(
        &self,
        command: &mut Command,
        attended: bool,
        config: Option<&OwnedFd>,
    ) -> Result<Child> {
        let kept = attended.then_some(&self.lock).into_iter().chain(config);
        let spawned = self.record.runtime.spawn(command, &kept.collect::<Vec<_>>());
        spawned.map_err(|source| self.failed(source))
    }

    fn failed(&self, source: io::Error) -> RunError {
        RunError::Runtime { path: self.record.runtime.path.clone(), source }
    }

    /// What the runtime complained about, if it did: its exit status alone does not say whether it is
    /// the container's.
    pub fn refusal(&self) -> Option<RunError> {
        const LOG_BYTES_MAX: u64 = 64 << 10;
        let mut text = String::new();
        let file = File::open(self.dir.join("log")).ok()?;
        io::Read::read_to_string(&mut io::Read::take(file, LOG_BYTES_MAX), &mut text).ok()?;
        let said = text.lines().rev().find_map(complaint)?;
        let reason = reason(&said);
        Some(RunError::Refused { runtime: self.record.runtime.name(), said, reason })
    }
}

/// A `config.json` that crun waits for.
///
/// It opens the file twice, once to read it and once to keep a copy. The first time it may find the pipe, or
/// already the real file; the second time it has read all of the first, so it finds the real file.
struct EarlyConfig(OwnedFd);

impl EarlyConfig {
    /// Also gives what the runtime has to inherit.
    fn new(dir: &Path) -> Result<(Self, OwnedFd)> {
        let path = dir.join("config.json");
        let made = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC);
        let (reader, writer) = made.at("making a pipe for", &path)?;
        let number = std::os::fd::AsRawFd::as_raw_fd(&reader);
        std::os::unix::fs::symlink(format!("/proc/self/fd/{number}"), &path).at("making", &path)?;
        // Means nothing in JSON. When it is gone, crun has begun to read.
        rustix::io::write(&writer, b" ").at("writing", &path)?;
        Ok((Self(writer), reader))
    }

    fn give(&self, dir: &Path, config: &[u8]) -> Result<()> {
        let path = dir.join("config.json");
        let new = dir.join("config.json.new");
        fs::write(&new, config).at("writing", &new)?;
        fs::rename(&new, &path).at("writing", &path)?;
        // All of it must fit: one that has found the real file takes nothing out of the pipe.
        let size =
            rustix::pipe::fcntl_getpipe_size(&self.0).at("looking at the pipe for", &path)?;
        if config.len() >= size {
            rustix::pipe::fcntl_setpipe_size(&self.0, config.len() + 1)
                .at("making room in the pipe for", &path)?;
        }
        let mut rest = config;
        while !rest.is_empty() {
            match rustix::io::write(&self.0, rest) {
                Ok(length) => rest = &rest[length..],
                Err(rustix::io::Errno::INTR) => {}
                // It has ended already. Why, whoever waits for it will see.
                Err(rustix::io::Errno::PIPE) => break,
                Err(errno) => return Err(errno).at("writing", &path),
            }
        }
        Ok(())
    }

    /// Ends a crun that is to get no config. It is killed, because it would complain to the terminal, but not
    /// before it reads: until then it may have a copy of itself mounted in `/tmp`.
    fn end(self, child: &mut Child) {
        const LOOKS_MAX: u32 = 1000;
        const PAUSE: std::time::Duration = std::time::Duration::from_millis(1);
        for _ in 0..LOOKS_MAX {
            let reads = rustix::io::ioctl_fionread(&self.0).is_ok_and(|left| left == 0);
            if reads || child.try_wait().is_ok_and(|ended| ended.is_some()) {
                break;
            }
            std::thread::sleep(PAUSE);
        }
        // Fails if it has ended.
        let _ = child.kill();
        let _ = child.wait();
    }
}

/// The message of a line of a runtime's log, if it is an error.
fn complaint(line: &str) -> Option<String> {
    #[derive(Deserialize)]
    struct Line {
        msg: String,
        level: String,
    }
    let line: Line = serde_json::from_str(line).ok()?;
    matches!(line.level.as_str(), "error" | "fatal").then_some(line.msg)
}

/// By its words, as Docker does it: there is nothing else to go by.
fn reason(said: &str) -> Reason {
    let about_program = said.contains("exec: \"")
        || said.contains("executable file")
        || said.contains("open executable")
        || said.contains("exec container process");
    let says = |words: &[&str]| words.iter().any(|words| said.contains(words));
    if !about_program {
        Reason::Other
    } else if says(&["not found", "no such file", "No such file"]) {
        Reason::NoProgram
    } else if says(&["ermission denied", "not permitted", "xec format", "s a directory"]) {
        Reason::NotExecutable
    } else {
        Reason::Other
    }
}

fn is_name(name: &str) -> bool {
    let first = name.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric());
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'-');
    first && name.len() <= 63 && name.bytes().all(plain)
}

/// `redis-3f9c21`: what it is, and something that no other has.
fn made_up_name(image: &str) -> String {
    let last = image.rsplit('/').next().unwrap_or_default();
    let last = last.split([':', '@']).next().unwrap_or_default();
    let plain = last.chars().filter(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-'));
    let plain: String = plain.take(40).collect();
    let plain = plain.trim_start_matches(['_', '-']);
    let mut bytes = [0u8; 4];
    let random = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    let number = match random {
        Ok(_) => u32::from_ne_bytes(bytes),
        Err(_) => std::process::id(),
    };
    format!("{}-{:06x}", if plain.is_empty() { "box" } else { plain }, number & 0xFF_FFFF)
}

/// Locks a container's directory; `None` if somebody else has.
fn lock(dir: &Path, how: FlockOperation) -> Result<Option<OwnedFd>> {
    let path = dir.join("lock");
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC;
    let file = rustix::fs::open(&path, flags, Mode::RUSR | Mode::WUSR).at("opening", &path)?;
    match rustix::fs::flock(&file, how) {
        Ok(()) => Ok(Some(file)),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
        Err(errno) => Err(errno).at("locking", &path),
    }
}

/// Whether it is still the lock of this directory, and not of one that was removed.
fn is_in(lock: &OwnedFd, dir: &Path) -> bool {
    let numbers = |stat: rustix::fs::Stat| (stat.st_dev, stat.st_ino);
    let held = rustix::fs::fstat(lock).map(numbers);
    let named = rustix::fs::stat(dir.join("lock")).map(numbers);
    held.is_ok() && held == named
}

/// Looks without taking it.
fn is_locked(dir: &Path) -> Result<bool> {
    let path = dir.join("lock");
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let file = match rustix::fs::open(&path, flags, Mode::empty()) {
        Err(rustix::io::Errno::NOENT) => return Ok(false),
        other => other.at("opening", &path)?,
    };
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared) {
        Ok(()) => Ok(false),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(true),
        Err(errno) => Err(errno).at("locking", &path),
    }
}

/// Removes a container's directory, in which nothing is mounted: everything but directories that hold
/// something, for those are not ours. The record and the lock go last: as long as it is there, nobody takes
/// the name.
fn remove_files(dir: &Path) -> Result<()> {
    // Who looks meanwhile whether the container has ended may leave a new lock.
    const TRIES: u32 = 3;
    for _ in 1..TRIES {
        if remove_files_once(dir).is_ok() {
            return Ok(());
        }
    }
    remove_files_once(dir)
}

/// What is gone already is removed.
fn remove_files_once(dir: &Path) -> Result<()> {
    // What runtimes write besides what they are told to (runc a `.pid` that becomes the pid) as well.
    let names = crate::mount::list(dir)?;
    let others = names.iter().map(String::as_str).filter(|name| !LAST.contains(name));
    let gone = |result: io::Result<()>, path: &Path| match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other.at("removing", path),
    };
    for name in others.chain(LAST) {
        let path = dir.join(name);
        let removed = match fs::remove_file(&path) {
            Err(error) if error.kind() == io::ErrorKind::IsADirectory => fs::remove_dir(&path),
            other => other,
        };
        gone(removed, &path)?;
    }
    gone(fs::remove_dir(dir), dir)
}

/// What of a container is removed last, in this order.
const LAST: [&str; 2] = ["container.json", "lock"];

fn read_record(dir: &Path) -> Result<Option<ContainerRecord>> {
    let path = dir.join("container.json");
    match fs::read(&path) {
        // A record cut short is one that was being written: nothing was mounted then.
        Ok(text) => Ok(serde_json::from_slice(&text).ok()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).at("reading", &path),
    }
}

fn pidfd(pid: u32) -> Option<OwnedFd> {
    let pid = rustix::process::Pid::from_raw(i32::try_from(pid).ok()?)?;
    rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).ok()
}

/// Waits for the end of a process.
fn ends_within(handle: &OwnedFd, patience: std::time::Duration) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let Ok(timeout) = Timespec::try_from(patience) else { return false };
    let mut fds = [PollFd::new(handle, PollFlags::IN)];
    poll(&mut fds, Some(&timeout)).is_ok_and(|ready| ready > 0)
}

/// Names the path of an I/O error.
trait At<T> {
    fn at(self, doing: &'static str, path: impl Into<PathBuf>) -> Result<T>;
}

impl<T, E: Into<io::Error>> At<T> for std::result::Result<T, E> {
    fn at(self, doing: &'static str, path: impl Into<PathBuf>) -> Result<T> {
        self.map_err(|error| RunError::Io { doing, path: path.into(), source: error.into() })
    }
}
