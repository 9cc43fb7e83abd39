//! Sockets of virtual machines, however long their paths are.

use std::fs::File;
use std::io::{self, IoSlice, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use rustix::net::sockopt::socket_peercred;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

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
