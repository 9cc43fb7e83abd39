//! Processes: descriptors that a child inherits, going on in the background, and their memory.

use std::ffi::c_long;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd as _, FromRawFd as _, OwnedFd};
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

/// The program that `command` starts gets no further privileges by executing others
/// (`PR_SET_NO_NEW_PRIVS`, prctl(2)).
pub fn no_new_privileges(command: &mut Command) {
    // SAFETY: between fork and exec a child may only do what is async-signal-safe. The closure
    // makes one system call, and neither allocates nor takes a lock.
    unsafe { command.pre_exec(|| Ok(rustix::thread::set_no_new_privs(true)?)) };
}

/// First Linux with which KSM reaches a program through exec. `PR_SET_MEMORY_MERGE` came with 6.4; exec
/// took the permission away until 6.7, and until 6.9 ksmd did not learn of the new program's memory.
const KSM_EXEC: (u32, u32) = (6, 9);

/// Lets KSM merge pages of the program that `command` starts and of all that it starts
/// (`PR_SET_MEMORY_MERGE`, prctl(2)).
/// Errors: [`io::ErrorKind::Unsupported`] if this kernel cannot.
pub fn allow_ksm(command: &mut Command) -> io::Result<()> {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let mut numbers = release.split(['.', '-']).map(|number| number.parse().unwrap_or(0));
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    // A kernel without KSM does not know the question either.
    if version < KSM_EXEC || memory_merge(libc::PR_GET_MEMORY_MERGE, 0).is_err() {
        let (major, minor) = KSM_EXEC;
        let what = format!(
            "KSM of whole programs needs Linux {major}.{minor} with CONFIG_KSM, and this is {release}"
        );
        return Err(io::Error::new(io::ErrorKind::Unsupported, what));
    }
    // SAFETY: between fork and exec a child may only do what is async-signal-safe. The closure makes
    // one system call, and neither allocates nor takes a lock. The memory that the kernel marks is the
    // child's copy, which exec discards.
    unsafe { command.pre_exec(|| memory_merge(libc::PR_SET_MEMORY_MERGE, 1)) };
    Ok(())
}

fn memory_merge(option: libc::c_int, on: libc::c_ulong) -> io::Result<()> {
    let none: libc::c_ulong = 0;
    // SAFETY: both options take integers, and change no memory's content. Merged pages are copied when
    // somebody writes to them.
    match unsafe { libc::prctl(option, on, none, none, none) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Sends a process a signal by its number (kill(2)), real-time signals included.
///
/// Errors: `EINVAL` for a number that is no signal's, `ESRCH` if there is no such process, `EPERM`.
pub fn kill(pid: Pid, signal: i32) -> io::Result<()> {
    // SAFETY: the call takes integers, and touches no memory of this process.
    match unsafe { libc::kill(pid.as_raw_nonzero().get(), signal) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Which of the two processes [`fork`] returned in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fork {
    /// The one that called.
    Parent(Pid),
    /// Its copy.
    Child,
}

/// The memory of another process, to be read.
#[derive(Debug)]
pub struct ProcessMemory {
    pid: Pid,
    handle: OwnedFd,
}

impl ProcessMemory {
    /// Of the process `pid`.
    ///
    /// # Errors
    /// `ESRCH` if there is none.
    pub fn open(pid: u32) -> io::Result<Self> {
        let pid =
            i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidInput)?;
        let handle = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty())?;
        Ok(Self { pid, handle })
    }

    /// Fills `buffer` from an address on (process_vm_readv(2)): the pages are copied once, and
    /// `/proc/PID/mem` copies them twice, one by one.
    ///
    /// # Errors
    /// `EFAULT` if something of it is not mapped; `EPERM`; `ESRCH` if the process has ended.
    pub fn read_exact_at(&self, buffer: &mut [u8], address: u64) -> io::Result<()> {
        let mut done = 0;
        while done < buffer.len() {
            let rest = &mut buffer[done..];
            let to = libc::iovec { iov_base: rest.as_mut_ptr().cast(), iov_len: rest.len() };
            let at = usize::try_from(address).map_err(io::Error::other)? + done;
            let from = libc::iovec { iov_base: at as *mut libc::c_void, iov_len: rest.len() };
            // SAFETY: the kernel writes at most `rest.len()` bytes to `rest`, which lives through the
            // call, and only reads from the other process.
            let read = unsafe {
                libc::process_vm_readv(
                    self.pid.as_raw_pid(),
                    &raw const to,
                    1,
                    &raw const from,
                    1,
                    0,
                )
            };
            match usize::try_from(read) {
                Err(_) => return Err(io::Error::last_os_error()),
                Ok(0) => return Err(io::Error::from_raw_os_error(libc::EFAULT)),
                Ok(read) => done += read,
            }
        }
        // The number is another process's only after this one's end: one that lives now lived all the
        // time, and what was read is its own.
        let mut fds = [rustix::event::PollFd::new(&self.handle, rustix::event::PollFlags::IN)];
        match rustix::event::poll(&mut fds, Some(&rustix::time::Timespec::default()))? {
            0 => Ok(()),
            _ => Err(io::Error::from_raw_os_error(libc::ESRCH)),
        }
    }
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

/// The sockets that whoever started this process has opened for it (systemd's `LISTEN_FDS`,
/// sd_listen_fds(3)): descriptors 3 and up, of which nobody else in this process may know.
///
/// To be called once, at the start. None if they were meant for another process.
/// Errors: a descriptor that is not open.
pub fn passed_sockets() -> io::Result<Vec<OwnedFd>> {
    let number = |name: &str| std::env::var(name).ok()?.parse::<u32>().ok();
    if number("LISTEN_PID") != Some(std::process::id()) {
        return Ok(Vec::new());
    }
    let count = number("LISTEN_FDS").unwrap_or(0) as usize;
    let mut sockets = Vec::new();
    for fd in (3..=i32::MAX).take(count) {
        // SAFETY: fcntl takes a number; one that is no descriptor is an error.
        if unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: it is open, and by the protocol it is this caller's.
        sockets.push(unsafe { OwnedFd::from_raw_fd(fd) });
    }
    Ok(sockets)
}

/// The same number on every architecture: system calls added since Linux 5.0 are numbered in common.
const SYS_PROCESS_MADVISE: c_long = 440;
/// Ranges that the kernel takes in one call (`UIO_MAXIOV`).
const RANGES_MAX: usize = 1024;

/// Takes pages out of the memory of a process, and out of the page cache where the process was the
/// last to map them (process_madvise(2), Linux 5.10, with `MADV_PAGEOUT`). The process gets them back
/// when it touches them. `ranges` are addresses in the process, at page boundaries.
///
/// Left alone are locked ranges, pages that another process maps too, and pages of files that the
/// caller neither owns nor may write. Private pages go to swap space where there is some.
/// Errors: `ESRCH` for a process that has ended; `EPERM` without `CAP_SYS_NICE` and the right to
/// trace the process; `EINVAL` for a locked range; `ENOMEM` where nothing is mapped. Ranges before
/// the one that failed are done.
pub fn page_out(pidfd: impl AsFd, ranges: &[Range<u64>]) -> io::Result<()> {
    let wrong = |_| io::Error::from_raw_os_error(libc::EINVAL);
    for ranges in ranges.chunks(RANGES_MAX) {
        let mut vectors = Vec::with_capacity(ranges.len());
        for range in ranges {
            let start = usize::try_from(range.start).map_err(wrong)?;
            let len = usize::try_from(range.end.saturating_sub(range.start)).map_err(wrong)?;
            let base = std::ptr::without_provenance_mut(start);
            vectors.push(libc::iovec { iov_base: base, iov_len: len });
        }
        let flags: libc::c_uint = 0;
        // SAFETY: the vector lives through the call, which only reads it. The addresses in it are the
        // other process's; paging out changes the contents of no memory, of whatever process.
        let advised = unsafe {
            libc::syscall(
                SYS_PROCESS_MADVISE,
                pidfd.as_fd().as_raw_fd(),
                vectors.as_ptr(),
                vectors.len(),
                libc::MADV_PAGEOUT,
                flags,
            )
        };
        if advised < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}
