//! User namespaces that exist only to carry an id map.
//!
//! `mount_setattr(MOUNT_ATTR_IDMAP)` takes its map from a user namespace, so somebody has to live
//! in that namespace for the moment in which its maps are written and a descriptor to it is
//! opened. A thread cannot (`unshare(CLONE_NEWUSER)` refuses a process with more than one), so a
//! child is cloned that does nothing but wait.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd, RawFd};

/// One line of `/proc/PID/uid_map`: `count` ids from `inside` (what is on disk) appear as the
/// ids from `outside`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct IdRange {
    /// First id as it is in the image.
    pub inside: u32,
    /// First id as it appears in the mount.
    pub outside: u32,
    /// How many ids; at least one.
    pub count: u32,
}

/// The most lines that the kernel takes (`UID_GID_MAP_MAX_EXTENTS`, `include/linux/user_namespace.h`).
pub const ID_RANGES_MAX: usize = 340;

/// The child's memory is a copy, so this is all that it shares with us: its process descriptor
/// and our end of the pipe whose closing tells it to go.
struct Waiter {
    pid: libc::pid_t,
    pidfd: OwnedFd,
    release: Option<OwnedFd>,
}

impl Waiter {
    fn start() -> io::Result<Self> {
        let (read_end, write_end) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        let mut pidfd: RawFd = -1;
        // SAFETY: all zero is a valid `clone_args`: it is plain integers, and zero means "not used".
        let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
        // No exit signal: nobody's SIGCHLD handler sees this child, and a wait for any child by
        // another part of the program does not reap it.
        args.flags = (libc::CLONE_NEWUSER | libc::CLONE_PIDFD) as u64;
        args.pidfd = (&raw mut pidfd) as u64;
        let (read_fd, write_fd) = (read_end.as_raw_fd(), write_end.as_raw_fd());
        // SAFETY: `args` is a live, initialised `clone_args` of the size given, and `pidfd` lives
        // until after the call. Without CLONE_VM the child works on a copy of our memory in which
        // only this thread goes on: locks that other threads held stay locked there for ever, so
        // until `_exit` it may only do what is async-signal-safe. It makes system calls on two
        // descriptors and exits: it takes no lock, allocates nothing, unwinds nothing and drops
        // nothing.
        let pid = unsafe {
            libc::syscall(libc::SYS_clone3, &raw mut args, size_of::<libc::clone_args>())
        };
        match pid {
            -1 => Err(io::Error::last_os_error()),
            0 => {
                let mut byte = 0u8;
                let (read, last) = (read_fd.cast_unsigned(), libc::c_uint::MAX);
                // SAFETY: in the child, see above. These are plain system calls on numbers, the
                // buffer is one byte on our own stack, and `_exit` runs no destructor. Every
                // descriptor but one goes: our copy of the write end (the pipe would never report
                // its end otherwise), and copies of whatever other threads had open, which would
                // keep their mounts busy.
                unsafe {
                    libc::syscall(libc::SYS_close_range, read + 1, last, 0);
                    if let Some(below) = read.checked_sub(1) {
                        libc::syscall(libc::SYS_close_range, 0, below, 0);
                    }
                    // Before Linux 5.9 there is no close_range.
                    libc::close(write_fd);
                    // Returns at the end of the pipe, that is when the parent lets go or dies.
                    // EINTR only ends the wait early, which the parent then sees as ESRCH.
                    libc::read(read_fd, (&raw mut byte).cast(), 1);
                    libc::_exit(0)
                }
            }
            pid => {
                // SAFETY: the call succeeded with CLONE_PIDFD, so the kernel stored a new
                // descriptor there that nothing else owns.
                let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
                let pid = libc::pid_t::try_from(pid).map_err(io::Error::other)?;
                Ok(Self { pid, pidfd, release: Some(write_end) })
            }
        }
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        drop(self.release.take());
        // SAFETY: all zero is a valid `siginfo_t`, which is integers and pointers.
        let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
        loop {
            // SAFETY: `pidfd` is an open descriptor of our own child, and `info` is ours to write.
            let rc = unsafe {
                libc::waitid(
                    libc::P_PIDFD,
                    self.pidfd.as_raw_fd().cast_unsigned(),
                    &raw mut info,
                    libc::WEXITED | libc::__WALL,
                )
            };
            if rc == 0 || io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
                return;
            }
        }
    }
}

/// Makes a user namespace with these maps and returns a descriptor to it, good for
/// [`crate::mount::MountAttr::idmap`].
/// Errors: `InvalidInput` for an empty map, a range of no ids, or more than [`ID_RANGES_MAX`] ranges;
/// the kernel's own error otherwise: `EINVAL` for ranges that overlap, `EPERM` without
/// `CAP_SETUID` and `CAP_SETGID`, `ENOSPC` past `/proc/sys/user/max_user_namespaces`,
/// `ENOSYS` before Linux 5.3.
pub fn with_maps(uids: &[IdRange], gids: &[IdRange]) -> io::Result<OwnedFd> {
    let (uid_map, gid_map) = (map_text(uids)?, map_text(gids)?);
    let waiter = Waiter::start()?;
    let dir = format!("/proc/{}", waiter.pid);
    // The kernel takes a map in one write and only once.
    File::options().write(true).open(format!("{dir}/uid_map"))?.write_all(uid_map.as_bytes())?;
    File::options().write(true).open(format!("{dir}/gid_map"))?.write_all(gid_map.as_bytes())?;
    Ok(File::open(format!("{dir}/ns/user"))?.into())
}

fn map_text(ranges: &[IdRange]) -> io::Result<String> {
    if ranges.is_empty() || ranges.len() > ID_RANGES_MAX || ranges.iter().any(|r| r.count == 0) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("an id map has 1 to {ID_RANGES_MAX} ranges of at least one id"),
        ));
    }
    Ok(ranges.iter().map(|r| format!("{} {} {}\n", r.inside, r.outside, r.count)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_maps_that_the_kernel_cannot_take() {
        let one = IdRange { inside: 0, outside: 1000, count: 1 };
        for bad in [&[][..], &[IdRange { count: 0, ..one }], &vec![one; ID_RANGES_MAX + 1]] {
            let error = with_maps(bad, &[one]).expect_err("a bad uid map");
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
            let error = with_maps(&[one], bad).expect_err("a bad gid map");
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
        }
    }

    /// The descriptor names a namespace other than ours, and the child is gone when we have it.
    #[test]
    fn makes_a_namespace_and_leaves_no_child() {
        let map = [IdRange { inside: 0, outside: 100_000, count: 65_536 }];
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIP makes_a_namespace_and_leaves_no_child: needs root");
            return;
        }
        let namespace = match with_maps(&map, &map) {
            Ok(fd) => fd,
            Err(error) => {
                eprintln!("SKIP makes_a_namespace_and_leaves_no_child: user namespaces: {error}");
                return;
            }
        };
        let ours = rustix::fs::stat("/proc/self/ns/user").unwrap();
        let made = rustix::fs::fstat(&namespace).unwrap();
        assert_eq!(ours.st_dev, made.st_dev);
        assert_ne!(ours.st_ino, made.st_ino);
        let waiter = Waiter::start().unwrap();
        let path = format!("/proc/{}", waiter.pid);
        assert!(std::path::Path::new(&path).exists());
        drop(waiter);
        assert!(!std::path::Path::new(&path).exists(), "{path} was not reaped");
    }
}
