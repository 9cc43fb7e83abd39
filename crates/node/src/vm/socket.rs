//! Sockets of virtual machines, however long their paths are.

use std::fs::File;
use std::io::{self, IoSlice, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, sendmsg, socket_with,
};

/// Connects to what listens at a path.
pub(super) fn connect_path(path: &Path) -> io::Result<UnixStream> {
    match (path.parent(), path.file_name().and_then(|name| name.to_str())) {
        (Some(dir), Some(name)) if path.is_absolute() => connect(dir, name),
        _ => UnixStream::connect(path),
    }
}

/// Connects to what listens there.
pub(super) fn connect(dir: &Path, name: &str) -> io::Result<UnixStream> {
    let held = File::open(dir)?;
    UnixStream::connect(format!("/proc/self/fd/{}/{name}", held.as_raw_fd()))
}

/// Whether a process listens there. It may be stopped, with more clients than it has room for: then
/// connecting to it would wait.
pub(super) fn is_listening(dir: &Path, name: &str) -> bool {
    let connect = || -> io::Result<()> {
        let held = File::open(dir)?;
        let path = format!("/proc/self/fd/{}/{name}", held.as_raw_fd());
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        match rustix::net::connect(&socket, &SocketAddrUnix::new(path)?) {
            Err(Errno::AGAIN) => Ok(()),
            connected => Ok(connected?),
        }
    };
    connect().is_ok()
}

/// Listens there.
pub(super) fn listen(dir: &Path, name: &str) -> io::Result<UnixListener> {
    let held = File::open(dir)?;
    UnixListener::bind(format!("/proc/self/fd/{}/{name}", held.as_raw_fd()))
}

/// The process that made the socket on the other side, or listens with it.
pub(super) fn peer(socket: &UnixStream) -> Option<u32> {
    let pid = socket_peercred(socket).ok()?.pid.as_raw_nonzero().get();
    u32::try_from(pid).ok()
}

/// Sends bytes, with a descriptor beside the first of them.
pub(super) fn send_with(
    mut socket: &UnixStream,
    bytes: &[u8],
    fd: BorrowedFd<'_>,
) -> io::Result<()> {
    let fds = [fd];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&fds));
    let sent = sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?;
    socket.write_all(&bytes[sent..])
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests may panic")]

    use super::*;

    /// `vm run` was stopped, and after 128 looks whether it listens the next one waited for good.
    #[test]
    fn a_stopped_process_is_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        assert!(!is_listening(dir.path(), "control"));
        let listener = listen(dir.path(), "control").unwrap();
        let looks = (0..10_000).filter(|_| is_listening(dir.path(), "control"));
        assert_eq!(looks.count(), 10_000);
        drop(listener);
        assert!(!is_listening(dir.path(), "control"));
    }
}
