//! Messages of a peer that does not keep to the protocol.

#![allow(
    clippy::unwrap_used,
    clippy::undocumented_unsafe_blocks,
    reason = "a test of raw messages"
)]

use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream;

use cofolio_shim::message::receive;
use cofolio_shim::protocol::{Head, Plain};

/// Sends a head with the same descriptor many times.
fn send_many(socket: &UnixStream, head: Head, file: &File, count: usize) {
    let heads = [head];
    let bytes = Plain::bytes(&heads);
    let mut vector =
        libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let mut control = [0_u64; 256];
    let sent = unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = &raw mut vector;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = libc::CMSG_SPACE((count * 4) as u32) as _;
        let first = libc::CMSG_FIRSTHDR(&raw const message);
        (*first).cmsg_level = libc::SOL_SOCKET;
        (*first).cmsg_type = libc::SCM_RIGHTS;
        (*first).cmsg_len = libc::CMSG_LEN((count * 4) as u32) as _;
        for number in 0..count {
            let at = libc::CMSG_DATA(first).cast::<i32>().add(number);
            at.write_unaligned(file.as_raw_fd());
        }
        libc::sendmsg(socket.as_raw_fd(), &raw const message, 0)
    };
    assert_eq!(sent, bytes.len() as isize);
}

/// There was room for twelve descriptors, and only the first one was closed again. So a hostile VMM
/// took all descriptors of the daemon.
///
/// It is the only test of this process: others would open and close files meanwhile.
#[test]
fn of_several_descriptors_one_is_received() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let file = File::open("/dev/null").unwrap();
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let before = open();
    for count in [1, 2, 3, 12, 253] {
        let head = Head { kind: 6, count: 1, argument: 7, reserved: 0 };
        send_many(&theirs, head, &file, count);
        let (received, file) = receive(&ours).unwrap();
        assert_eq!((received.kind, received.argument), (6, 7), "{count}");
        assert!(file.is_some(), "{count}");
        assert_eq!(open(), before + 1, "{count}");
        drop(file);
        assert_eq!(open(), before, "{count}");
    }
}
