//! Ending containers, and removing what they leave.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions};

use super::{Container, ContainerStatus, Containers, RECORD, Result, RunError, is_at, read_record};
use crate::mount::kernel::open_dir;
use crate::mount::{At as _, MountError, UmountOptions, take_down};
use crate::run_dir::running::{
    is_name, is_replaced, kept_exit_status, lock_ended, remove_files, write_file,
};
use crate::run_dir::{self, RunDir};
use crate::signals;

/// How long a process may take to die of SIGKILL, and the process that waits for it to clean up.
const KILLED_PATIENCE: Duration = Duration::from_secs(10);

impl Container {
    fn is_replaced(&self) -> bool {
        is_replaced(&self.lock, &self.dir)
    }
}

impl Containers<'_> {
    /// Removes a container that ended or never started; returns the directory with kept changes.
    ///
    /// # Errors
    /// [`RunError`]; [`Containers::reconcile`] removes the rest then.
    pub fn remove(&self, mut container: Container) -> Result<Option<PathBuf>> {
        if container.is_replaced() {
            return Ok(None);
        }
        let changes = self.take_down(&mut container)?;
        if !container.is_replaced() {
            remove_files(&container.dir, RECORD)?;
        }
        Ok(changes)
    }

    /// Unmounts a container that has ended. Its record, exit status and output stay until
    /// [`Containers::stop`] or a new container of the same name.
    ///
    /// # Errors
    /// [`RunError`]; [`Containers::reconcile`] does the rest then.
    pub fn retire(&self, mut container: Container, exit_status: u8) -> Result<()> {
        if container.is_replaced() {
            return Ok(());
        }
        write_file(&container.dir.join("exit"), exit_status.to_string().as_bytes())?;
        self.take_down(&mut container)?;
        Ok(())
    }

    fn take_down(&self, container: &mut Container) -> Result<Option<PathBuf>> {
        // A signal that has cancelled a start must not cancel this.
        let _undoing = self.mounter.domain().store().waiting().undo();
        drop(container.busy.take());
        let record = &container.record;
        // A runtime that saw the end of its container has removed its state.
        let state = container.state.join(&record.name);
        if state.exists() {
            // Its program may be gone, and one that was killed at its work may have left what it
            // cannot delete.
            let _ = record.runtime.ask(&container.state, &["delete", "--force", &record.name]);
        }
        // That took its time.
        if container.is_replaced() {
            return Ok(None);
        }
        self.kill_left(&record.name, &record.cgroup)?;
        // A runtime that failed half-way may have left the cgroup; the kernel keeps one in use.
        if state.exists() || container.refusal().is_some() {
            self.cgroup_dirs(&record.cgroup)?.for_each(|dir| remove_cgroup(&dir));
        }
        let changes = self.unmount(&container.rootfs())?;
        remove_state(&state)?;
        Ok(changes)
    }

    /// Kills what is left in a container's cgroup: a runtime that was killed before it wrote its
    /// state does not know the process that it has made.
    fn kill_left(&self, name: &str, cgroup: &str) -> Result<()> {
        let until = Instant::now() + KILLED_PATIENCE;
        while let Some(pid) = self.process_in(cgroup)? {
            let handle = pidfd(pid).ok();
            // The number may be another one's by now.
            if let Some(handle) = &handle
                && self.process_in(cgroup)? == Some(pid)
            {
                let _ = rustix::process::pidfd_send_signal(handle, Signal::KILL);
                ends_within(handle, KILLED_PATIENCE);
            }
            if Instant::now() >= until {
                return Err(RunError::StillRunning(name.to_owned()));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    fn unmount(&self, rootfs: &Path) -> Result<Option<PathBuf>> {
        let options = UmountOptions { force: true, keep_upper: false };
        match self.mounter.umount(rootfs, &options) {
            Ok(unmounted) => Ok(unmounted.upper),
            Err(MountError::NotMounted(_)) => Ok(None),
            // The run directory was lost.
            Err(MountError::NoRecord(_)) => Ok(take_down(rootfs).map(|()| None)?),
            Err(error) => Err(error.into()),
        }
    }

    /// Removes what a container without a record has left. Its starter was killed before it wrote the
    /// record, so that only files are left, or the run directory was lost while it ran.
    fn remove_lost(&self, name: &str, dir: &Path) -> Result<()> {
        self.check_lost(name)?;
        self.unmount(&dir.join("rootfs"))?;
        self.cgroup_dirs(&self.cgroup(name))?.for_each(|dir| remove_cgroup(&dir));
        // Whichever its runtime was.
        let run = self.mounter.run_dir().path();
        for runtime in run_dir::list(run)? {
            if RunDir::OWN.iter().all(|(own, _)| runtime != *own) {
                remove_state(&run.join(runtime).join(name))?;
            }
        }
        Ok(remove_files(dir, RECORD)?)
    }

    /// Removes ended containers that no process waits for, except [retired](Containers::retire)
    /// ones; returns their names. Describes failures in `failed` and goes on.
    ///
    /// # Errors
    /// [`RunError::Mount`] if the run directory cannot be read.
    pub fn reconcile(&self, failed: &mut Vec<String>) -> Result<Vec<String>> {
        let mut removed = Vec::new();
        for name in self.names()? {
            // With its directory back, nobody takes the name of a container that runs.
            if !self.dir().join(&name).exists() && is_name(&name) {
                self.mounter.run_dir().prepare()?;
                let _ = fs::DirBuilder::new().mode(0o700).create(self.dir().join(&name));
            }
            match self.remove_if_ended(&name, false) {
                Ok(true) => removed.push(name),
                Ok(false) => {}
                // It has the name itself.
                Err(error @ RunError::Lost { .. }) => failed.push(error.to_string()),
                Err(error) => {
                    failed
                        .push(format!("container {name}: {}", cofolio_store::with_causes(&error)));
                }
            }
        }
        Ok(removed)
    }

    /// Removes a container if it has ended and no process waits for it; a retired one only if the
    /// caller says so. Returns whether it did.
    pub(super) fn remove_if_ended(&self, name: &str, retired_too: bool) -> Result<bool> {
        let dir = self.dir().join(name);
        let Some(lock) = lock_ended(&dir)? else { return Ok(false) };
        let Some(record) = read_record(&dir)? else {
            self.remove_lost(name, &dir)?;
            return Ok(true);
        };
        if self.first_process(&dir, &record)?.is_some() {
            return Ok(false);
        }
        // There `/proc` shows other processes than ours.
        self.mounter.check_namespace(&dir.join("rootfs"))?;
        let state = self.state_dir(&record.runtime);
        let keep = !retired_too && kept_exit_status(&dir).is_some();
        let mut container = Container { dir, state, record, lock, busy: None };
        if !keep {
            self.remove(container)?;
            return Ok(true);
        }
        // It may have been killed while it unmounted.
        if container.rootfs().exists() {
            self.take_down(&mut container)?;
        }
        Ok(false)
    }

    /// Asks a container to end, kills it after `patience`, and removes it.
    ///
    /// # Errors
    /// [`RunError::Name`], [`RunError::NotFound`], [`RunError::Lost`], [`RunError::StillRunning`],
    /// [`RunError::Runtime`], [`RunError::Record`], [`RunError::Mount`].
    pub fn stop(&self, name: &str, patience: Duration) -> Result<()> {
        if !is_name(name) {
            return Err(RunError::Name(name.to_owned()));
        }
        let dir = self.dir().join(name);
        let (mut asked, mut since) = (None, Instant::now());
        let not_found = || RunError::NotFound(name.to_owned());
        let this = open_dir(&dir);
        let mut found = self.status(name)?.ok_or_else(not_found)?;
        let this = match this {
            Err(Errno::NOENT) => return Err(not_found()),
            other => other.at("opening", &dir)?,
        };
        // A container that is being started has no process at first, and then one of its runtime. A
        // process that waits for it removes or retires it, and the next one may take its name.
        while is_at(&this, &dir) {
            // To verify its image may take minutes.
            if found.pid.is_none() && !dir.join("config.json").exists() {
                since = Instant::now();
            }
            if found.pid.is_some() && found.pid != asked {
                self.end(name, &found, patience)?;
                (asked, since) = (found.pid, Instant::now());
            } else if self.remove_if_ended(name, true)? {
                break;
            } else if since.elapsed() > KILLED_PATIENCE {
                return Err(RunError::StillRunning(name.to_owned()));
            }
            std::thread::sleep(Duration::from_millis(5));
            found = self.status(name)?.unwrap_or(found);
        }
        Ok(())
    }

    /// Asks a container's first process to end, and kills it after `patience`.
    fn end(&self, name: &str, found: &ContainerStatus, patience: Duration) -> Result<()> {
        let (runtime, signal) = (&found.record.runtime, &found.record.stop_signal);
        // By its number: runc knows no names of real-time signals.
        let number = signals::number(signal).map(|number| number.to_string());
        let signal = number.as_deref().unwrap_or(signal);
        // Before it is killed: only in its own mount namespace can it be unmounted.
        self.mounter.check_namespace(&found.rootfs)?;
        let handle = found.pid.and_then(|pid| pidfd(pid).ok());
        // The number may be reused before the pidfd is open, and the name as well.
        if self.first_process(&self.dir().join(name), &found.record)? != found.pid {
            return Ok(());
        }
        let rounds = [(signal, Signal::TERM, patience), ("KILL", Signal::KILL, KILLED_PATIENCE)];
        for (signal, without_runtime, patience) in rounds {
            // A frozen container hears of no signal. One that was frozen while it executed a program
            // never gets beyond FREEZING, and runc waits for ever until it does.
            self.cgroup_dirs(&found.record.cgroup)?.for_each(|dir| thaw(&dir));
            let asked = runtime.ask(&found.runtime_root, &["kill", name, signal]);
            // A runtime that was killed at its work may not know the container, nor any runtime
            // the signal that an image names, and its program may be gone.
            if let Some(handle) = &handle {
                if !asked.is_ok_and(|asked| asked.status.success()) {
                    let _ = rustix::process::pidfd_send_signal(handle, without_runtime);
                }
            } else {
                asked?;
            }
            if handle.as_ref().is_none_or(|handle| ends_within(handle, patience)) {
                break;
            }
        }
        Ok(())
    }
}

/// Removes what a runtime has left of its state. A runc that was killed may have mounted itself there.
fn remove_state(dir: &Path) -> Result<(), MountError> {
    if !dir.symlink_metadata().is_ok_and(|found| found.is_dir()) {
        return Ok(());
    }
    for name in run_dir::list(dir)? {
        take_down(&dir.join(name))?;
    }
    match fs::remove_dir_all(dir) {
        // The process that waits for the container removes it as well.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other.at("removing", dir),
    }
}

/// Thaws what is in a cgroup, of either version.
fn thaw(dir: &Path) {
    for (file, state) in [("freezer.state", "THAWED"), ("cgroup.freeze", "0")] {
        let _ = fs::write(dir.join(file), state);
    }
}

/// Removes a cgroup and those below it, as far as no process is in them.
fn remove_cgroup(dir: &Path) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_cgroup(&entry.path());
        }
    }
    let _ = fs::remove_dir(dir);
}

/// Holds on to a process: unlike its number, this never comes to mean another one.
pub fn pidfd(pid: u32) -> io::Result<OwnedFd> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let pid = pid.ok_or(io::ErrorKind::InvalidInput)?;
    Ok(rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty())?)
}

/// Waits until a runtime's `start`, or the first process of its container, ends. Returns whether `start`
/// hangs: crun's waits for ever if the process is killed first.
pub(super) fn hangs(first: Pid, start: &Child) -> io::Result<bool> {
    use rustix::event::{PollFd, PollFlags, poll};
    let number = first.as_raw_nonzero().get().cast_unsigned();
    let handles = [pidfd(number)?, pidfd(start.id())?];
    let mut fds = handles.each_ref().map(|handle| PollFd::new(handle, PollFlags::IN));
    rustix::io::retry_on_intr(|| poll(&mut fds, None))?;
    let how = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
    let ended = rustix::process::waitid(WaitId::Pid(first), how)?;
    // One that has exited was started.
    let killed = ended.is_some_and(|status| status.killed() || status.dumped());
    Ok(killed && !ends_within(&handles[1], KILLED_PATIENCE))
}

/// Waits so long for a process to end, and says whether it has.
pub(crate) fn ends_within(handle: &OwnedFd, patience: Duration) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let Ok(timeout) = Timespec::try_from(patience) else { return false };
    let mut fds = [PollFd::new(handle, PollFlags::IN)];
    rustix::io::retry_on_intr(|| poll(&mut fds, Some(&timeout))).is_ok_and(|ready| ready > 0)
}
