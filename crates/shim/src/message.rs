//! The first part of a request or an answer: a [`Head`], with a descriptor if there is one.

use std::io::{self, Write as _};
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::os::unix::net::UnixStream;

use crate::protocol::{Head, Plain};

/// Room for one descriptor beside a message, aligned for its header.
type Control = [u64; 3];

// SAFETY: computes a length.
const _: () = assert!(size_of::<Control>() >= unsafe { libc::CMSG_SPACE(4) } as usize);

/// Sends a head.
///
/// # Errors
/// Those of the socket.
pub fn send(mut socket: &UnixStream, head: Head, file: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let heads = [head];
    let bytes = Plain::bytes(&heads);
    let Some(file) = file else { return socket.write_all(bytes) };
    let mut vector =
        libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let mut control = Control::default();
    // SAFETY: zeros are a value of this struct of integers and null pointers. `control` has room
    // for a header and a descriptor. The kernel only reads, and all that `message` points to lives
    // through the call.
    let sent = unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = &raw mut vector;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = libc::CMSG_SPACE(4) as _;
        let first = libc::CMSG_FIRSTHDR(&raw const message);
        (*first).cmsg_level = libc::SOL_SOCKET;
        (*first).cmsg_type = libc::SCM_RIGHTS;
        (*first).cmsg_len = libc::CMSG_LEN(4) as _;
        libc::CMSG_DATA(first).cast::<i32>().write_unaligned(file.as_raw_fd());
        libc::sendmsg(socket.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL)
    };
    match usize::try_from(sent) {
        Err(_) => Err(io::Error::last_os_error()),
        Ok(sent) => socket.write_all(&bytes[sent..]),
    }
}

/// Receives a head, and at most one descriptor.
///
/// # Errors
/// Those of the socket; `UnexpectedEof` if it ends before the head does.
pub fn receive(socket: &UnixStream) -> io::Result<(Head, Option<OwnedFd>)> {
    let mut head = [Head::default()];
    let bytes = Plain::bytes_mut(&mut head);
    let mut vector = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let mut control = Control::default();
    // SAFETY: zeros are a value of this struct of integers and null pointers.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut vector;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    // Without the padding behind it, into which a second descriptor would fit. The kernel closes
    // all for which there is no room: a hostile peer may send 253 of them.
    // SAFETY: computes a length.
    message.msg_controllen = unsafe { libc::CMSG_LEN(4) } as _;
    let flags = libc::MSG_CMSG_CLOEXEC | libc::MSG_WAITALL;
    // SAFETY: all that `message` points to lives through the call.
    let received = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, flags) };
    if received < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has filled `control` as `message` says.
    let file = unsafe {
        let first = libc::CMSG_FIRSTHDR(&raw const message);
        let is_file = !first.is_null()
            && (*first).cmsg_level == libc::SOL_SOCKET
            && (*first).cmsg_type == libc::SCM_RIGHTS;
        is_file.then(|| OwnedFd::from_raw_fd(libc::CMSG_DATA(first).cast::<i32>().read_unaligned()))
    };
    if usize::try_from(received) != Ok(size_of::<Head>()) {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let [head] = head;
    Ok((head, file))
}
