//! Sockets in the directory of a virtual machine, however long its path is.

use std::fs::File;
use std::io::{self, IoSlice, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

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
