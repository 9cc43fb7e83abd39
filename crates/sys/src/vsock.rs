//! Sockets between a virtual machine and its host (vsock(7)).

use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd as _, OwnedFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

/// Connects to a port of the host.
///
/// # Errors
/// Those of socket(2) and connect(2): `EAFNOSUPPORT` without the kernel's modules, `ENODEV` without
/// a device, `ECONNRESET` if nobody listens.
pub fn connect_host(port: u32) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::VSOCK, SocketType::STREAM, flags, None)?;
    let address = libc::sockaddr_vm {
        svm_family: AddressFamily::VSOCK.as_raw(),
        svm_reserved1: 0,
        svm_port: port,
        svm_cid: libc::VMADDR_CID_HOST,
        svm_zero: [0; 4],
    };
    let length = size_of::<libc::sockaddr_vm>() as libc::socklen_t;
    // SAFETY: the address is initialised, and as long as said. The kernel copies it before the call
    // returns. The descriptor is open as long as `socket` lives.
    let done = unsafe { libc::connect(socket.as_raw_fd(), (&raw const address).cast(), length) };
    if done == -1 { Err(io::Error::last_os_error()) } else { Ok(socket) }
}
