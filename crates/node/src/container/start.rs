//! Starting a container, and a process in one.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use cofolio_store::task::Cancel;
use rustix::fs::{Gid, MemfdFlags, Uid, memfd_create};
use rustix::io::retry_on_intr;
use rustix::process::{Pid, WaitOptions, getpid, set_child_subreaper, waitpid};

use super::end::hangs;
use super::{
    Container, ContainerRecord, Containers, Copies, RECORD, Request, Result, RunError, Running,
    Runtime, Streams, bundle, refusal,
};
use crate::mount::kernel::open_dir;
use crate::mount::{Access, At as _, IdMap, MountError, MountOptions, MountRequest};
use crate::run_dir::running::{OUTPUT_BYTES_MAX, claim, is_name, read_text, write_file};

/// Largest `config.json`, in bytes: an environment may have megabytes.
const CONFIG_BYTES_MAX: u64 = 64 << 20;

impl Containers<'_> {
    /// Mounts the image and starts a runtime that ends with the container. An error leaves nothing.
    pub fn start(&self, request: &Request, streams: &Streams) -> Result<Running> {
        self.launch(request, streams, false)
    }

    /// Starts a container for this process to wait for, without a runtime beside it. Its output
    /// goes to its directory or to `output`. This process becomes a subreaper
    /// (`PR_SET_CHILD_SUBREAPER`), so that the container's first process becomes its child.
    pub fn start_detached(&self, request: &Request, output: Option<PathBuf>) -> Result<Running> {
        set_child_subreaper(Some(getpid())).at("becoming the parent of", "the container")?;
        let streams = Streams::File {
            bytes_max: output.as_ref().map_or(OUTPUT_BYTES_MAX, |_| u64::MAX),
            path: output.unwrap_or_else(|| PathBuf::from("output")),
        };
        let mut running = self.launch(request, &streams, true)?;
        match running.container.adopt(&mut running.runtime) {
            Ok(first) => {
                running.first = Some(first);
                Ok(running)
            }
            Err(error) => {
                // The first error says more.
                let _ = self.remove(running.container);
                Err(error)
            }
        }
    }

    /// Starts a process in a running container, with the user, the directory, the environment and the
    /// privileges of the container's own.
    ///
    /// # Errors
    /// [`RunError::Name`], [`RunError::NotFound`], [`RunError::Lost`], [`RunError::NotRunning`],
    /// [`RunError::Record`], [`RunError::Runtime`], [`RunError::Mount`].
    pub fn exec(&self, name: &str, command: &[String], streams: &Streams) -> Result<Exec> {
        if !is_name(name) {
            return Err(RunError::Name(name.to_owned()));
        }
        let found = self.status(name)?.ok_or_else(|| RunError::NotFound(name.to_owned()))?;
        // One that is being started has no config yet.
        if found.pid.is_none() {
            return Err(RunError::NotRunning(name.to_owned()));
        }
        let runtime = found.record.runtime;
        let dir = self.dir().join(name);
        let log = dir.join(format!("exec-{}.log", std::process::id()));
        // By options alone crun starts it as root, in `/` and with other capabilities.
        let terminal = matches!(streams, Streams::Terminal);
        let path = dir.join("config.json");
        let process = process_file(&path, command, terminal).at("reading `process` from", &path)?;
        let at = format!("/proc/self/fd/{}", process.as_raw_fd());
        let mut exec = Command::new(&runtime.path);
        exec.arg("--root").arg(self.state_dir(&runtime)).arg("--log").arg(&log);
        exec.args(["--log-format", "json", "exec", "--process", &at, name]);
        cofolio_sys::process::inherit(&mut exec, process.into());
        let failed = |source| RunError::Runtime { path: runtime.path.clone(), source };
        if found.record.ksm {
            cofolio_sys::process::allow_ksm(&mut exec).map_err(failed)?;
        }
        let copies = streams.connect(&mut exec).map_err(failed)?;
        let child = runtime.spawn(&mut exec).map_err(failed)?;
        Ok(Exec { runtime, child, copies, log })
    }

    fn launch(&self, request: &Request, streams: &Streams, detached: bool) -> Result<Running> {
        // The usual mistake, before anything is made.
        let command = bundle::command(&request.config, &request.options)?;
        let (name, dir, lock) = self.claim(request)?;
        let record = ContainerRecord {
            image: request.image,
            image_name: request.image_name.clone(),
            domain: self.mounter.domain().name().to_owned(),
            command,
            runtime: request.runtime.clone(),
            stop_signal: request.config.stop_signal().to_owned(),
            keep: request.keep,
            writable: request.writable,
            writable_dirs: request.options.writable_dirs.clone(),
            ksm: request.ksm,
            cgroup: self.cgroup(&name),
            created: cofolio_store::now(),
            name,
        };
        let state = self.state_dir(&request.runtime);
        let mut container = Container { dir, state, record, lock, busy: None };
        match self.fill(&mut container, request, streams, detached) {
            Ok((runtime, copies)) => Ok(Running { container, runtime, first: None, copies }),
            Err(error) => {
                // The first error says more.
                let _ = self.remove(container);
                Err(error)
            }
        }
    }

    /// Everything after the claim.
    fn fill(
        &self,
        container: &mut Container,
        request: &Request,
        streams: &Streams,
        detached: bool,
    ) -> Result<(Child, Copies)> {
        let path = container.dir.join(RECORD);
        let text = serde_json::to_vec(&container.record).map_err(io::Error::other);
        write_file(&path, &text.at("writing", &path)?)?;
        if let Some(idmap) = &request.options.idmap {
            self.open_to(container, idmap)?;
        }
        let config = self.mount(container, request)?;
        let path = container.dir.join("config.json");
        fs::write(&path, config).at("writing", &path)?;
        if let Some(call) = self.before_start {
            call().map_err(MountError::from)?;
        }

        let mut command = container.command(detached);
        let streams = match streams {
            Streams::File { path, bytes_max } => {
                Streams::File { path: container.dir.join(path), bytes_max: *bytes_max }
            }
            other => other.clone(),
        };
        let failed = |source| container.failed(source);
        let copies = streams.connect(&mut command).map_err(failed)?;
        // Runtimes pass it on to the container's processes, by fork and exec.
        if container.record.ksm {
            cofolio_sys::process::allow_ksm(&mut command).map_err(failed)?;
        }
        // The runtime inherits the lock: if this process is killed while the runtime starts the
        // container, no other process takes the container for an ended one.
        let lock = container.lock.try_clone().map_err(failed)?;
        cofolio_sys::process::inherit(&mut command, lock);
        Ok((container.record.runtime.spawn(&mut command).map_err(failed)?, copies))
    }

    /// Takes a name and locks its directory. A container that has ended makes room.
    fn claim(&self, request: &Request) -> Result<(String, PathBuf, OwnedFd)> {
        let wanted = request.name.as_deref();
        if let Some(name) = wanted.filter(|name| !is_name(name)) {
            return Err(RunError::Name(name.to_owned()));
        }
        self.mounter.run_dir().prepare()?;
        let make_room = |name: &str| self.remove_if_ended(name, true);
        let claimed = claim(&self.dir(), wanted, &request.image_name, make_room)?;
        claimed.ok_or_else(|| RunError::Exists(wanted.unwrap_or_default().to_owned()))
    }

    /// Mounts the image and returns the text of `config.json`.
    fn mount(&self, container: &mut Container, request: &Request) -> Result<Vec<u8>> {
        let dir = &container.dir;
        let mut options = request.options.clone();
        options.readonly = !request.writable;
        options.cgroup = Some(container.record.cgroup.clone());
        let rootfs = dir.join("rootfs");
        let has_volumes =
            bundle::volumes_with_directory(&request.config, &options).next().is_some();
        let mounted = self.mounter.mount(&MountRequest {
            create_target: true,
            access: match (request.writable || !options.writable_dirs.is_empty(), request.keep) {
                (false, _) => Access::ReadOnly,
                (true, false) => Access::Writable,
                (true, true) => Access::WritableKept,
            },
            writable_dirs: options.writable_dirs.clone(),
            size_bytes: request.size_bytes,
            scratch: !request.writable && has_volumes,
            check: request.check,
            options: MountOptions {
                idmap: options.idmap.clone(),
                name: Some(request.image_name.clone()),
                ..bundle::mount_options(options.readonly || options.idmap.is_some())
            },
            ..MountRequest::new(request.image, &rootfs)
        })?;
        container.busy = Some(open_dir(&rootfs).at("opening", &rootfs)?);
        options.volumes = mounted.scratch.or(options.volumes);
        let config = bundle::generate(dir, &mounted.target, &request.config, &options, &self.root)?;
        let path = dir.join("config.json");
        Ok(serde_json::to_vec(&config).map_err(io::Error::other).at("writing", path)?)
    }

    /// Lets root of a user namespace, and no other user, reach its root filesystem.
    fn open_to(&self, container: &Container, idmap: &IdMap) -> Result<()> {
        let dir = &container.dir;
        let (_, group) = idmap.root().ok_or_else(|| RunError::NoRoot(idmap.to_string()))?;
        rustix::fs::chown(dir, None::<Uid>, Some(Gid::from_raw(group))).at("opening", dir)?;
        fs::set_permissions(dir, fs::Permissions::from_mode(0o710)).at("opening", dir)?;
        let mode =
            |dir: &Path| fs::metadata(dir).map(|it| it.mode() & 0o7777).at("looking at", dir);
        let run = self.mounter.run_dir().path();
        for above in run.ancestors().skip(1) {
            // Not ours to open.
            if mode(above)? & 0o011 != 0o011 {
                return Err(RunError::Unreachable(above.to_owned()));
            }
        }
        for dir in [run, &self.dir()] {
            let open = fs::Permissions::from_mode(mode(dir)? | 0o011);
            fs::set_permissions(dir, open).at("opening", dir)?;
        }
        Ok(())
    }
}

impl Container {
    fn runtime(&self) -> Command {
        let mut command = Command::new(&self.record.runtime.path);
        command.arg("--root").arg(&self.state).arg("--log").arg(self.dir.join("log"));
        command.args(["--log-format", "json"]);
        command
    }

    fn command(&self, detached: bool) -> Command {
        let mut command = self.runtime();
        command.arg(if detached { "create" } else { "run" });
        command.arg("--bundle").arg(&self.dir).arg("--pid-file").arg(self.dir.join("pid"));
        command.arg(&self.record.name);
        command
    }

    /// Waits until the runtime has created the container, whose first process is then our child,
    /// and starts it. crun's `run --detach` takes the exit status of a process that ends at once.
    fn adopt(&self, runtime: &mut Child) -> Result<Pid> {
        let refused = |status: ExitStatus| {
            let unknown = || self.failed(io::Error::other(status.to_string()));
            Err(self.refusal().unwrap_or_else(unknown))
        };
        let status = runtime.wait().map_err(|source| self.failed(source))?;
        if !status.success() {
            return refused(status);
        }
        let written = read_text(&self.dir.join("pid"));
        let first = written.and_then(|text| Pid::from_raw(text.trim().parse().ok()?));
        let first = first.ok_or_else(|| self.made_nothing())?;
        let mut start = self.runtime();
        start.arg("start").arg(&self.record.name).stdin(Stdio::null());
        start.stdout(Stdio::null()).stderr(Stdio::null());
        let mut start = self.record.runtime.spawn(&mut start).map_err(|it| self.failed(it))?;
        let hangs = hangs(first, &start).unwrap_or(false);
        if hangs {
            let _ = start.kill();
        }
        let status = start.wait().map_err(|source| self.failed(source))?;
        match status.success() {
            true => Ok(first),
            false if hangs => Err(self.failed(io::Error::other("its process was killed"))),
            false => refused(status),
        }
    }

    fn made_nothing(&self) -> RunError {
        self.failed(io::Error::other("it made no container"))
    }

    fn failed(&self, source: io::Error) -> RunError {
        RunError::Runtime { path: self.record.runtime.path.clone(), source }
    }
}

/// A process that a runtime has started in a container.
#[derive(Debug)]
pub struct Exec {
    runtime: Runtime,
    child: Child,
    copies: Copies,
    log: PathBuf,
}

/// The process of a container's `config.json`, with another command, in memory: a full run directory
/// stops no `exec`, and a killed one leaves no environment behind.
fn process_file(config: &Path, command: &[String], terminal: bool) -> io::Result<File> {
    #[derive(serde::Deserialize)]
    struct Config {
        process: serde_json::Map<String, serde_json::Value>,
    }
    let text = cofolio_image::files::read(config, CONFIG_BYTES_MAX)?;
    let Config { mut process } = serde_json::from_slice(&text)?;
    process.insert("args".to_owned(), command.into());
    process.insert("terminal".to_owned(), terminal.into());
    // It was that of the caller of `run`. A runtime takes the size of its own terminal.
    process.remove("consoleSize");
    let mut file =
        File::from(memfd_create("process", MemfdFlags::CLOEXEC | MemfdFlags::NOEXEC_SEAL)?);
    serde_json::to_writer(&mut file, &process)?;
    Ok(file)
}

impl Exec {
    /// Waits for its end. Returns its exit status and the runtime's error, as [`Running::wait`].
    pub fn wait(mut self) -> (io::Result<u8>, Option<RunError>) {
        let status = self.child.wait().map(exit_status);
        let copied = self.copies.finish(&Cancel::default());
        let refusal = match status {
            Ok(0) => copied.at("writing", "the output").err().map(Into::into),
            _ => refusal(&self.log, &self.runtime),
        };
        let _ = fs::remove_file(&self.log);
        (status, refusal)
    }
}

/// What came of a container.
#[derive(Debug)]
pub struct Finished {
    /// It, to be removed or retired.
    pub container: Container,
    /// Its exit status: 128 plus the number of a fatal signal.
    pub status: io::Result<u8>,
    /// The runtime's error, if that ended it.
    pub refusal: Option<RunError>,
    /// Whether all of its output was written.
    pub copied: Result<()>,
}

impl Running {
    /// Process id of the runtime, to which signals for the container go.
    pub fn runtime_id(&self) -> u32 {
        self.runtime.id()
    }

    /// Waits for the container's end, and for its output until that is given up.
    pub fn wait(mut self, given_up: &Cancel) -> Finished {
        let status = match self.first {
            None => self.runtime.wait(),
            Some(first) => wait_for(first),
        };
        let copied = self.copies.finish(given_up);
        let copied = copied.at("writing", "the container's output").map_err(Into::into);
        let status = status.map(exit_status);
        // Runtimes end with 1 when they fail, as a container may.
        let failed = !matches!(status, Ok(0));
        let refusal = failed.then(|| self.container.refusal()).flatten();
        // Then the status is not a container's.
        let has = |name: &str| self.container.dir.join(name).exists();
        let is_made = has("pid") || !has(RECORD);
        let refusal = refusal.or_else(|| (!is_made).then(|| self.container.made_nothing()));
        Finished { container: self.container, status, refusal, copied }
    }
}

/// Waits for the end of a child process.
pub fn wait_for(child: Pid) -> io::Result<ExitStatus> {
    let ended = retry_on_intr(|| waitpid(Some(child), WaitOptions::empty()))?;
    let (_, status) = ended.ok_or(io::ErrorKind::NotFound)?;
    Ok(ExitStatus::from_raw(status.as_raw()))
}

/// What a shell makes of how a process ended.
pub fn exit_status(status: ExitStatus) -> u8 {
    let status = status.signal().map_or(status.code(), |signal| Some(128 + signal));
    status.and_then(|status| u8::try_from(status).ok()).unwrap_or(u8::MAX)
}
