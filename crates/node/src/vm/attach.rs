//! Virtual machines that somebody else started: their free memory is returned, and account is kept
//! of them. They have nothing in the store, and their pages are not merged, since no shim is in
//! their VMM.

use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};

use super::error::{Result, VmError};
use super::ram::Ram;
use super::recycler::balloon::{Balloon, Description, connect};
use super::{Machines, Origin, RECORD, VmRecord, Vmm, list, write_record};
use crate::kernel_text;
use crate::mount::At as _;
use crate::run_dir::running::{claim, is_name, lock, remove_files};

/// How long a balloon may take to be as it was.
const RESTORE_SECONDS_MAX: u64 = 10;
const LOOK: Duration = Duration::from_millis(50);

/// Request to attach a machine.
#[derive(Debug, Clone)]
pub struct AttachRequest {
    /// Its VMM.
    pub vmm: Vmm,
    /// The VMM's control socket.
    pub socket: PathBuf,
    /// Name of the virtual machine; a new one is made from its own where absent.
    pub name: Option<String>,
}

/// Record of a machine that another program started.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Attached {
    /// The VMM's control socket.
    pub socket: PathBuf,
    /// Process of the VMM.
    pub vmm_pid: u32,
    /// When that process was started, in ticks since the boot: its number can be another one's
    /// after its end.
    pub vmm_start_ticks: u64,
    /// Memory outside of the balloon when it was attached, in bytes. Restored after each pulse.
    pub usable_bytes: u64,
    /// How often the VMM asked the guest for statistics; it does so again afterwards.
    pub statistics_seconds: u64,
    /// Whether it is being detached: the recycler leaves it alone from then on.
    #[serde(default)]
    pub detaching: bool,
}

impl Attached {
    /// Whether the VMM lives.
    pub(super) fn lives(&self) -> bool {
        start_time(Path::new("/proc"), self.vmm_pid) == Some(self.vmm_start_ticks)
    }
}

/// When a process was started, in ticks since the boot (proc_pid_stat(5)); none if it has ended,
/// also where nobody has reaped it.
fn start_time(proc: &Path, pid: u32) -> Option<u64> {
    let stat = kernel_text::read(&proc.join(pid.to_string()).join("stat")).ok()?;
    // The program's name can have blanks and parentheses.
    let mut words = stat.rsplit_once(") ")?.1.split(' ');
    let state = words.next()?;
    // The 22nd field; the state is the third.
    let started = words.nth(18)?;
    (!["Z", "X"].contains(&state)).then(|| started.parse().ok())?
}

impl Machines<'_> {
    /// Attaches a virtual machine that somebody else has started.
    ///
    /// # Errors
    /// [`VmError::Name`], [`VmError::Exists`], [`VmError::Control`] if the socket does not answer
    /// or the machine cannot be attached, [`VmError::RunDir`].
    pub fn attach(&self, request: &AttachRequest) -> Result<VmRecord> {
        if let Some(name) = request.name.as_deref().filter(|name| !is_name(name)) {
            return Err(VmError::Name(name.to_owned()));
        }
        let socket = std::path::absolute(&request.socket).at("resolving", &request.socket)?;
        let failed = |source| VmError::Control { path: socket.clone(), source };
        let refused = |why: String| failed(std::io::Error::other(why));
        let ask = || {
            let mut balloon = connect(request.vmm, &socket)?;
            Ok((balloon.describe()?, balloon.actual()?))
        };
        let (described, usable_bytes) = ask().map_err(failed)?;
        let (vmm_pid, vmm_start_ticks) =
            vmm_process(Path::new("/proc"), &described).map_err(refused)?;
        self.run.prepare()?;
        let attached = list(&self.run, &mut Vec::new())?;
        if let Some(other) = attached.into_iter().find(|it| it.pid == Some(vmm_pid)) {
            let name = other.record.name;
            return Err(refused(format!("process {vmm_pid} is virtual machine `{name}` already")));
        }
        let wanted = request.name.as_deref();
        let label = described.name.as_deref().unwrap_or("vm");
        let make_room = |name: &str| self.remove_if_ended(name, true);
        let claimed = claim(&self.dir(), wanted, label, make_room)?;
        let exists = || VmError::Exists(wanted.unwrap_or_default().to_owned());
        // Locked until the record is there. Without one it would be taken for a leftover.
        let (name, dir, _lock) = claimed.ok_or_else(exists)?;
        let record = VmRecord {
            name,
            domain: self.domain.name().to_owned(),
            vmm: request.vmm,
            memory_bytes: described.memory_bytes,
            cpus: described.cpus,
            created: cofolio_store::now(),
            origin: Origin::Attached(Attached {
                socket,
                vmm_pid,
                vmm_start_ticks,
                usable_bytes,
                statistics_seconds: described.statistics_seconds,
                detaching: false,
            }),
        };
        write_record(&dir, &record)?;
        Ok(record)
    }

    /// Forgets a virtual machine that was attached. Its balloon is then as it was, whether the
    /// daemon runs or was killed.
    ///
    /// # Errors
    /// [`VmError::Name`], [`VmError::NotFound`], [`VmError::NotAttached`], [`VmError::RunDir`];
    /// [`VmError::Control`] if it is forgotten and its balloon could not be put right.
    pub fn detach(&self, name: &str) -> Result<()> {
        let mut record = self.get(name)?.record;
        let Origin::Attached(attached) = &mut record.origin else {
            return Err(VmError::NotAttached(name.to_owned()));
        };
        attached.detaching = true;
        let (vmm, attached) = (record.vmm, attached.clone());
        let dir = self.dir().join(name);
        // Nobody has the lock for long.
        let lock = lock(&dir, FlockOperation::LockExclusive)?;
        let restore = || {
            let mut balloon = connect(vmm, &attached.socket)?;
            balloon.ask_every(attached.statistics_seconds)?;
            restore(&mut *balloon, attached.usable_bytes)
        };
        let restored = if attached.lives() {
            // The recycler closes its connection then. If this process is killed, the record is
            // still there, and the machine can be detached again.
            write_record(&dir, &record)?;
            restore()
        } else {
            Ok(())
        };
        remove_files(&dir, RECORD)?;
        drop(lock);
        restored.map_err(|source| VmError::Control { path: attached.socket, source })
    }
}

/// Deflates a balloon until `bytes` bytes are outside of it.
fn restore(balloon: &mut dyn Balloon, bytes: u64) -> std::io::Result<()> {
    let until = Instant::now() + Duration::from_secs(RESTORE_SECONDS_MAX);
    // Asked for in any case: a guest may not have followed an earlier request yet.
    balloon.set(bytes)?;
    loop {
        let actual = balloon.actual()?;
        if actual >= bytes {
            return Ok(());
        }
        if Instant::now() >= until {
            let what = format!(
                "its balloon was told to deflate, and after {RESTORE_SECONDS_MAX} s the guest has \
                 {actual} of {bytes} bytes"
            );
            return Err(std::io::Error::new(std::io::ErrorKind::TimedOut, what));
        }
        thread::sleep(LOOK);
    }
}

/// The process that has the guest's memory, and when it was started.
fn vmm_process(proc: &Path, described: &Description) -> Result<(u32, u64), String> {
    let mut why = "nobody listens there".to_owned();
    for task in &described.tasks {
        let found = thread_group(proc, *task)
            .ok_or_else(|| format!("process {task} does not exist"))
            .and_then(|pid| {
                let ram = Ram::find(proc, pid, described.memory_bytes);
                ram.map_err(|error| error.to_string()).map(|_| pid)
            })
            .and_then(|pid| {
                let ended = || format!("process {pid} has ended");
                start_time(proc, pid).ok_or_else(ended).map(|started| (pid, started))
            });
        match found {
            Ok(found) => return Ok(found),
            Err(error) => why = error,
        }
    }
    Err(why)
}

/// The process of a thread.
fn thread_group(proc: &Path, task: u32) -> Option<u32> {
    let status = kernel_text::read(&proc.join(task.to_string()).join("status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("Tgid:"))?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests may panic")]

    use std::fs;
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_process_that_nobody_reaped_has_ended() {
        let proc = Path::new("/proc");
        assert!(start_time(proc, std::process::id()).unwrap() > 0);
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let started = start_time(proc, child.id());
        assert!(started >= start_time(proc, std::process::id()), "{started:?}");
        child.kill().unwrap();
        let until = Instant::now() + Duration::from_secs(10);
        while start_time(proc, child.id()).is_some() {
            assert!(Instant::now() < until, "its end is not noticed");
            thread::sleep(Duration::from_millis(5));
        }
        child.wait().unwrap();
    }

    /// A user can choose any name for a program.
    #[test]
    fn a_name_cannot_pass_for_other_fields() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("7")).unwrap();
        let rest = "1 7 7 0 -1 4194304 1 0 0 0 0 0 0 0 20 0 1 0 4711 2 3";
        fs::write(dir.path().join("7/stat"), format!("7 (a) Z 1 2) S {rest}\n")).unwrap();
        assert_eq!(start_time(dir.path(), 7), Some(4711));
        fs::write(dir.path().join("7/stat"), format!("7 (a) S {rest}) Z {rest}\n")).unwrap();
        assert_eq!(start_time(dir.path(), 7), None);
    }
}
