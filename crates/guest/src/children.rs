//! Ends of processes. The first process reaps all of them.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::process::Command;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, WaitOptions, WaitStatus, kill_process,
    kill_process_group, pidfd_open, wait, waitid,
};

/// Who waits for which process. No process ends for good while this is locked, so a number of it
/// is that process's, and [`Command::spawn`] finds the child that it waits for when it fails.
static AWAITED: Mutex<BTreeMap<i32, Sender<u8>>> = Mutex::new(BTreeMap::new());

fn awaited() -> MutexGuard<'static, BTreeMap<i32, Sender<u8>>> {
    AWAITED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A process that somebody waits for.
pub(crate) struct Child {
    pid: Pid,
    /// Readable when it has ended.
    pub(crate) handle: OwnedFd,
    status: Receiver<u8>,
}

impl Child {
    /// Starts it.
    pub(crate) fn spawn(command: &mut Command) -> io::Result<Self> {
        let mut awaited = awaited();
        let child = command.spawn()?;
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or(io::ErrorKind::Other)?;
        let (sender, status) = mpsc::channel();
        awaited.insert(pid.as_raw_nonzero().get(), sender);
        let handle = pidfd_open(pid, PidfdFlags::empty())?;
        Ok(Self { pid, handle, status })
    }

    /// Sends a signal to its group. It leads one from its `setsid` on; before, to itself alone.
    pub(crate) fn signal(&self, signal: Signal) {
        let awaited = awaited();
        if awaited.contains_key(&self.pid.as_raw_nonzero().get()) {
            let _ =
                kill_process_group(self.pid, signal).or_else(|_| kill_process(self.pid, signal));
        }
    }

    /// Its status, when it has ended.
    pub(crate) fn wait(&self) -> u8 {
        self.status.recv().unwrap_or(255)
    }
}

/// Reaps processes until this one has ended; its status.
pub(crate) fn reap_until(last: Pid) -> u8 {
    loop {
        let _ = waitid(WaitId::All, WaitIdOptions::EXITED | WaitIdOptions::NOWAIT);
        let mut awaited = awaited();
        match wait(WaitOptions::NOHANG) {
            Ok(Some((pid, status))) => {
                let status = status_of(status);
                if let Some(waiting) = awaited.remove(&pid.as_raw_nonzero().get()) {
                    let _ = waiting.send(status);
                }
                if pid == last {
                    return status;
                }
            }
            _ => {
                drop(awaited);
                thread::sleep(Duration::from_millis(100));
            }
        }
    }
}

fn status_of(status: WaitStatus) -> u8 {
    let signal = status.terminating_signal().map(|signal| 128 + signal);
    let status = signal.or(status.exit_status()).unwrap_or(255);
    u8::try_from(status).unwrap_or(255)
}
