//! The first part of a request or an answer: a [`Head`], with a descriptor if there is one.

use std::io::{self, IoSlice, IoSliceMut, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use crate::protocol::{Head, Plain};

/// Sends a head.
///
/// # Errors
/// Those of the socket.
pub fn send(mut socket: &UnixStream, head: Head, file: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let heads = [head];
    let bytes = Plain::bytes(&heads);
    let Some(file) = file else { return socket.write_all(bytes) };
    let fds = [file];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&fds));
    let sent = sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?;
    socket.write_all(&bytes[sent..])
}

/// Receives a head. Closes all descriptors of a message but the first.
///
/// # Errors
/// Those of the socket; `UnexpectedEof` if it ends before the head does.
pub fn receive(socket: &UnixStream) -> io::Result<(Head, Option<OwnedFd>)> {
    let mut head = [Head::default()];
    // The kernel drops descriptors for which there is no room.
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut vector = [IoSliceMut::new(Plain::bytes_mut(&mut head))];
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::WAITALL;
    let received = recvmsg(socket, &mut vector, &mut control, flags)?;
    let files = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(files) => Some(files),
        _ => None,
    });
    let mut files = files.flatten();
    let file = files.next();
    files.for_each(drop);
    if received.bytes != size_of::<Head>() {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let [head] = head;
    Ok((head, file))
}
