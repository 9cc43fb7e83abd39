//! The network of this machine alone.

use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

/// Switches the loopback device on (netdevice(7)); the kernel gives it its addresses then.
///
/// # Errors
/// Those of socket(2) and of the device: `EPERM` without `CAP_NET_ADMIN`.
pub fn switch_on() -> io::Result<()> {
    let (family, kind) = (AddressFamily::INET, SocketType::DGRAM);
    let socket = socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
    // SAFETY: zeros are a value of this struct of integers, and a union of such.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(b"lo\0") {
        *to = libc::c_char::from_ne_bytes([*from]);
    }
    set(&socket, libc::SIOCGIFFLAGS as _, &mut request)?;
    // SAFETY: the request has filled it.
    unsafe { request.ifr_ifru.ifru_flags |= libc::IFF_UP as libc::c_short };
    set(&socket, libc::SIOCSIFFLAGS as _, &mut request)
}

/// Gets or sets the flags of a device.
fn set(socket: &OwnedFd, what: libc::Ioctl, request: &mut libc::ifreq) -> io::Result<()> {
    // SAFETY: both requests read and write the flags of a struct of this type, which lives through
    // the call.
    match unsafe { libc::ioctl(socket.as_raw_fd(), what, request) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}
