//! Recording: a container is started, or found running, and its opens are noted until it ends.

use std::io::{self, Write as _};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use cofolio_store::Digest;
use cofolio_store::task::Task;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, kill_process};

use super::{Missed, Profile, ProfileError, Recorder, written_dirs};
use crate::container::{Containers, RunError, ends_within, pidfd};
use crate::mount::{MountPhase, Mounter, relocate};

/// How long a container may take to end before it is killed.
const STOP_PATIENCE: Duration = Duration::from_secs(10);
/// For how long a container is stopped again while its process goes on: that has to remove it.
const STOP_TIME: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 60 });
const STOP_INTERVAL: Duration = Duration::from_millis(100);

/// The container that is recorded.
#[derive(Debug)]
pub enum Subject {
    /// A new one, which is ended when it was recorded. Its changes are removed.
    New {
        /// Its name.
        name: String,
        /// Digest of its metadata image.
        image: Digest,
        /// Starts it, as `cofolio run --hold` does. Standard input is a socket: with the root
        /// mounted it waits there for a byte, and it ends with the socket. When the container has
        /// ended it writes there what [`written_by`] says, as JSON, shuts down its side, and waits
        /// for another byte before it unmounts the root.
        start: Box<Command>,
    },
    /// A running one, by its name. It goes on.
    Running(String),
}

/// What was recorded.
#[derive(Debug)]
pub struct Recorded {
    /// The profile.
    pub profile: Profile,
    /// What the profile may be without.
    pub missed: Missed,
    /// Whether a [`Subject::Running`] has ended meanwhile. Then its writes are not recorded.
    pub has_ended: bool,
}

/// Records what a container reads and where it writes, and keeps that as the profile of its image.
/// It ends with the container, after `time`, or when `task` is cancelled.
///
/// # Errors
/// All of [`ProfileError`], except [`ProfileError::Missing`]. The profile before stays then.
pub fn record(
    containers: &Containers<'_>,
    subject: Subject,
    time: Option<Duration>,
    task: &Task,
) -> Result<Recorded, ProfileError> {
    let recorded = match subject {
        Subject::New { name, image, start } => {
            record_new(containers, &name, image, *start, time, task)?
        }
        Subject::Running(name) => record_running(containers, &name, time, task)?,
    };
    if recorded.profile.files.is_empty() {
        return Err(ProfileError::Empty);
    }
    recorded.profile.write(containers.mounter().domain())?;
    Ok(recorded)
}

fn record_new(
    containers: &Containers<'_>,
    name: &str,
    image: Digest,
    mut start: Command,
    time: Option<Duration>,
    task: &Task,
) -> Result<Recorded, ProfileError> {
    let mounter = containers.mounter();
    // It stays open: when this process is killed, the container ends with it.
    let (held, theirs) = UnixStream::pair().map_err(ProfileError::Process)?;
    let answer = held.try_clone().map_err(ProfileError::Process)?;
    // The answer may be larger than what the socket holds.
    let answer = std::thread::Builder::new().spawn(move || io::read_to_string(answer));
    let answer = answer.map_err(ProfileError::Process)?;
    // It outlives our process group if that is killed, and ends the container.
    let child = start.process_group(0).stdin(OwnedFd::from(theirs)).spawn();
    let mut child = child.map_err(ProfileError::Process)?;
    // Its copy of the other end keeps that open.
    drop(start);
    let recorded = (|| {
        wait_for_mount(&mut child, mounter, name, task)?;
        // Its superblock is there, and it cannot open a file yet.
        let run = mounter.run_dir().clone();
        let mut recorder = Recorder::begin(mounter.domain(), run, image, name)?;
        // It may have ended: then there is something to say about that.
        let _ = (&held).write_all(b"\n");
        note(&mut recorder, || answer.is_finished(), time, task)?;
        // With `inode-share` its pages go with its root.
        recorder.end()
    })();
    match &recorded {
        Ok(_) => _ = (&held).write_all(b"\n"),
        // If it waits for its start, it cannot be stopped, and ends now.
        Err(_) => _ = held.shutdown(Shutdown::Write),
    }
    let is_cancelled = || task.check().is_err();
    if recorded.is_ok() && is_cancelled() && matches!(child.try_wait(), Ok(None)) {
        // Ctrl-C at a terminal reaches only our process group, and SIGTERM only us. Some programs
        // end only at SIGINT.
        let _ = kill_process(Pid::from_child(&child), Signal::INT);
    }
    // The socket's end has ended the container after an error, which says more then.
    let may_fail = || recorded.is_err() || is_cancelled();
    end(&mut child, containers, name, answer.is_finished(), may_fail)?;
    let (mut profile, missed) = recorded?;
    let answer = answer.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    let written = answer.and_then(|answer| Ok(serde_json::from_str(&answer)?));
    profile.written = written.map_err(ProfileError::Changes)?;
    Ok(Recorded { profile, missed, has_ended: false })
}

fn record_running(
    containers: &Containers<'_>,
    name: &str,
    time: Option<Duration>,
    task: &Task,
) -> Result<Recorded, ProfileError> {
    let mounter = containers.mounter();
    let mut all = containers.list(&mut Vec::new())?.into_iter();
    let found = all.find(|it| it.record.name == name);
    let found = found.and_then(|it| Some((it.record.image, pidfd(it.pid?).ok()?)));
    let (image, first) = found.ok_or_else(|| RunError::NotRunning(name.to_owned()))?;
    let has_ended = || ends_within(&first, Duration::ZERO);
    let mut recorder = Recorder::begin(mounter.domain(), mounter.run_dir().clone(), image, name)?;
    note(&mut recorder, has_ended, time, task)?;
    let (mut profile, missed) = recorder.end()?;
    let written = written_by(containers, name);
    // Its changes may have been half removed while they were read.
    let has_ended = has_ended();
    profile.written = if has_ended { None } else { written? };
    Ok(Recorded { profile, missed, has_ended })
}

/// The directories of its image that a container has written to, if it can write. `None` also if it
/// has ended and its changes are gone, or if they are in a filesystem of limited size.
///
/// # Errors
/// [`ProfileError::Changes`].
pub fn written_by(
    containers: &Containers<'_>,
    name: &str,
) -> Result<Option<Vec<PathBuf>>, ProfileError> {
    let (mounter, run) = (containers.mounter(), containers.mounter().run_dir());
    let Ok(mut found) = run.find(&run.path().join(rootfs(name))) else { return Ok(None) };
    relocate(&mut found, mounter.domain()).map_err(RunError::from)?;
    let upper = found.upper.map(|upper| upper.dir.join("upper"));
    let upper = upper.filter(|upper| !matches!(upper.try_exists(), Ok(false)));
    upper.map(|upper| written_dirs(&upper)).transpose().map_err(ProfileError::Changes)
}

/// Where the root filesystem of a container is mounted, below the run directory.
fn rootfs(name: &str) -> PathBuf {
    Path::new("containers").join(name).join("rootfs")
}

/// Waits until the root filesystem of a new container is mounted.
///
/// # Errors
/// [`ProfileError::Failed`] if it could not be.
fn wait_for_mount(
    child: &mut Child,
    mounter: &Mounter<'_>,
    name: &str,
    task: &Task,
) -> Result<(), ProfileError> {
    let rootfs = mounter.run_dir().path().join(rootfs(name));
    while child.try_wait().map_err(ProfileError::Process)?.is_none() {
        task.check()?;
        if let Ok(found) = mounter.run_dir().find(&rootfs)
            && found.phase == MountPhase::Mounted
        {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    Err(ProfileError::Failed(child.wait().map_err(ProfileError::Process)?))
}

/// Takes note of opens until the container has ended, the time is up, or the task is cancelled.
fn note(
    recorder: &mut Recorder<'_>,
    has_ended: impl Fn() -> bool,
    time: Option<Duration>,
    task: &Task,
) -> Result<(), ProfileError> {
    let started = Instant::now();
    let patience = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
    loop {
        if let Some(opens) = recorder.opens() {
            let _ = poll(&mut [PollFd::from_borrowed_fd(opens, PollFlags::IN)], Some(&patience));
        }
        recorder.take()?;
        let is_late = time.is_some_and(|time| started.elapsed() >= time);
        if has_ended() || is_late || task.check().is_err() {
            return Ok(());
        }
    }
}

/// Ends a new container if it has not ended by itself, and waits for the process that runs it. One
/// that failed leaves the profile before in place. A container that ends because the recording
/// failed or was cancelled has not failed.
fn end(
    child: &mut Child,
    containers: &Containers<'_>,
    name: &str,
    has_ended: bool,
    may_fail: impl Fn() -> bool,
) -> Result<(), ProfileError> {
    let status = if has_ended { child.wait().map(Some) } else { child.try_wait() };
    if let Some(status) = status.map_err(ProfileError::Process)? {
        if status.code().is_none() {
            // It was killed, and its container goes on, if there is one.
            let _ = containers.stop(name, STOP_PATIENCE);
        }
        return match status.success() || may_fail() {
            true => Ok(()),
            false => Err(ProfileError::Failed(status)),
        };
    }
    let start = Instant::now();
    loop {
        let stopped = containers.stop(name, STOP_PATIENCE);
        if child.try_wait().map_err(ProfileError::Process)?.is_some() {
            return Ok(());
        }
        if start.elapsed() >= STOP_TIME {
            stopped?;
            return Err(RunError::StillRunning(name.to_owned()).into());
        }
        std::thread::sleep(STOP_INTERVAL);
    }
}

#[cfg(test)]
mod tests {
    use cofolio_image::pack::ImageContents;
    use cofolio_store::task::Cancel;
    use cofolio_store::{InitOptions, Store};

    use super::*;
    use crate::run_dir::RunDir;

    /// Records a container that never mounts anything, cancelled. Its process is a shell.
    fn cancelled(script: &str) -> ProfileError {
        let scratch = tempfile::tempdir().unwrap();
        let store = Store::init(&scratch.path().join("store"), &InitOptions::default()).unwrap();
        let domain = store.domain_or_create("default").unwrap();
        let run = RunDir::open(scratch.path().join("run")).unwrap();
        let containers = Containers::new(Mounter::new(&domain, run, &ImageContents));
        let mut start = Command::new("sh");
        start.args(["-c", script]);
        let image = cofolio_store::verity::digest(b"image");
        let subject = Subject::New { name: "it".to_owned(), image, start: Box::new(start) };
        let cancel = Cancel::default();
        cancel.cancel();
        record(&containers, subject, None, &Task::new(cancel, |_| {})).unwrap_err()
    }

    /// A container that waited for its start was stopped again and again when its recording was
    /// cancelled, without an end: it cannot be stopped yet, and nobody sent what it waited for.
    #[test]
    fn a_container_that_waits_for_its_start_ends_when_recording_is_cancelled() {
        let error = cancelled("read x");
        assert!(matches!(error, ProfileError::Cancelled(_)), "{error:?}");
    }

    #[test]
    fn a_container_that_cannot_be_stopped_is_given_up() {
        let error = cancelled("sleep 5");
        assert!(matches!(error, ProfileError::Container(RunError::NotFound(_))), "{error:?}");
    }
}
