//! Processes: descriptors that a child inherits, and going on in the background.

use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use rustix::io::FdFlags;
use rustix::process::Pid;

/// Lets the program that `command` starts inherit `fd`, under the number that it has here.
///
/// The descriptor stays close-on-exec in this process, so that a child which another thread starts
/// at the same moment does not get it. The child clears the flag after the fork.
pub fn inherit(command: &mut Command, fd: OwnedFd) {
    let clear = move || Ok(rustix::io::fcntl_setfd(&fd, FdFlags::empty())?);
    // SAFETY: between fork and exec a child may only do what is async-signal-safe. The closure makes
    // one system call, on a descriptor that it owns, and neither allocates nor takes a lock.
    unsafe { command.pre_exec(clear) };
}

/// Which of the two processes [`fork`] returned in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fork {
    /// The one that called.
    Parent(Pid),
    /// Its copy.
    Child,
}

/// Goes on in two processes.
/// Errors: `EBUSY` while this process has other threads: the child would lack them, and the locks that they
/// hold would stay locked there. Else those of `fork`.
pub fn fork() -> io::Result<Fork> {
    if std::fs::read_dir("/proc/self/task")?.count() != 1 {
        return Err(io::Error::from_raw_os_error(libc::EBUSY));
    }
    // SAFETY: there is one thread, so the child is a whole copy of this process.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(Fork::Child),
        pid => Pid::from_raw(pid).map(Fork::Parent).ok_or_else(|| io::Error::other("fork: no pid")),
    }
}

/// Makes standard input, output and error of this process `/dev/null`, so that nobody waits for the
/// other ends of theirs.
/// Errors: those of opening `/dev/null` and of `dup2`.
pub fn silence() -> io::Result<()> {
    let null = std::fs::File::options().read(true).write(true).open("/dev/null")?;
    for standard in 0..3 {
        // SAFETY: descriptors 0 to 2 belong to the whole process: nothing owns them that would be
        // surprised by another file behind them.
        if unsafe { libc::dup2(null.as_raw_fd(), standard) } < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}
