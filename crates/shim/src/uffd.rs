//! userfaultfd(2): `include/uapi/linux/userfaultfd.h`, with what Linux 6.8 added.

use std::io;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};

const API: u64 = 0xAA;
const FEATURE_PAGEFAULT_FLAG_WP: u64 = 1 << 0;
const FEATURE_WP_HUGETLBFS_SHMEM: u64 = 1 << 12;
const FEATURE_WP_UNPOPULATED: u64 = 1 << 13;
const FEATURE_WP_ASYNC: u64 = 1 << 15;
const FEATURE_MOVE: u64 = 1 << 16;

/// A thread that touches an absent page waits.
pub(crate) const MISSING: u64 = 1 << 0;
/// Pages can be write-protected.
pub(crate) const WRITE_PROTECT: u64 = 1 << 1;

#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct Range {
    start: u64,
    len: u64,
}

#[repr(C)]
struct Register {
    range: Range,
    mode: u64,
    ioctls: u64,
}

#[repr(C)]
struct Zeropage {
    range: Range,
    mode: u64,
    zeropage: i64,
}

#[repr(C)]
struct Writeprotect {
    range: Range,
    mode: u64,
}

#[repr(C)]
struct Move {
    dst: u64,
    src: u64,
    len: u64,
    mode: u64,
    moved: i64,
}

/// `_IOWR(0xAA, number, T)`; `_IOR` for some.
const fn request(read_only: bool, number: u64, size: usize) -> u64 {
    let direction = if read_only { 2 } else { 3 };
    direction << 30 | (size as u64) << 16 | API << 8 | number
}
const UFFDIO_API: u64 = request(false, 0x3F, size_of::<Api>());
const UFFDIO_REGISTER: u64 = request(false, 0x00, size_of::<Register>());
const UFFDIO_UNREGISTER: u64 = request(true, 0x01, size_of::<Range>());
const UFFDIO_WAKE: u64 = request(true, 0x02, size_of::<Range>());
const UFFDIO_ZEROPAGE: u64 = request(false, 0x04, size_of::<Zeropage>());
const UFFDIO_MOVE: u64 = request(false, 0x05, size_of::<Move>());
const UFFDIO_WRITEPROTECT: u64 = request(false, 0x06, size_of::<Writeprotect>());
/// Of `/dev/userfaultfd`: `_IO(0xAA, 0)`.
const USERFAULTFD_IOC_NEW: u64 = API << 8;
const MODE_DONTWAKE: u64 = 1;

/// A userfaultfd. Addresses and lengths are multiples of a page. The kernel refuses ranges of the
/// wrong kind, so only [`Uffd::move_pages`] can make memory unsafe.
#[derive(Debug)]
pub(crate) struct Uffd(OwnedFd);

impl Uffd {
    /// One that moves pages and write-protects without waiting (Linux 6.8). Fails with `EINVAL`
    /// before, and with `EPERM` if this process has neither root's privileges nor a descriptor of
    /// `/dev/userfaultfd`.
    pub(crate) fn moving() -> io::Result<Self> {
        Self::new(FEATURE_WP_ASYNC | FEATURE_WP_UNPOPULATED | FEATURE_MOVE)
    }

    /// One for which writers wait.
    pub(crate) fn blocking() -> io::Result<Self> {
        Self::new(0)
    }

    fn new(features: u64) -> io::Result<Self> {
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
        let device = std::env::var(crate::protocol::USERFAULTFD).ok();
        // SAFETY: the calls take integers, and return a descriptor that nobody else has.
        let fd = unsafe {
            let fd = match device.and_then(|device| device.parse::<i32>().ok()) {
                Some(device) => libc::ioctl(device, USERFAULTFD_IOC_NEW as _, flags).into(),
                None => libc::syscall(libc::SYS_userfaultfd, flags),
            };
            let fd = i32::try_from(fd).map_err(|_| io::Error::from_raw_os_error(libc::EBADF))?;
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            OwnedFd::from_raw_fd(fd)
        };
        let features = features | FEATURE_PAGEFAULT_FLAG_WP | FEATURE_WP_HUGETLBFS_SHMEM;
        let uffd = Self(fd);
        uffd.call(UFFDIO_API, &mut Api { api: API, features, ioctls: 0 })?;
        Ok(uffd)
    }

    fn call<T>(&self, request: u64, argument: &mut T) -> io::Result<()> {
        // SAFETY: the argument of each request is its struct, which lives through the call.
        let done =
            unsafe { libc::ioctl(self.0.as_raw_fd(), request as _, std::ptr::from_mut(argument)) };
        if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    pub(crate) fn register(&self, start: usize, len: usize, mode: u64) -> io::Result<()> {
        let range = Range { start: start as u64, len: len as u64 };
        self.call(UFFDIO_REGISTER, &mut Register { range, mode, ioctls: 0 })
    }

    /// Also wakes threads that wait there, and ends write protection.
    pub(crate) fn unregister(&self, start: usize, len: usize) -> io::Result<()> {
        self.call(UFFDIO_UNREGISTER, &mut Range { start: start as u64, len: len as u64 })
    }

    pub(crate) fn wake(&self, start: usize, len: usize) -> io::Result<()> {
        self.call(UFFDIO_WAKE, &mut Range { start: start as u64, len: len as u64 })
    }

    /// Maps the kernel's page of zeros at empty addresses. Returns the number of bytes, and the
    /// reason if these are not all.
    pub(crate) fn zero(&self, start: usize, len: usize) -> (usize, Option<i32>) {
        let range = Range { start: start as u64, len: len as u64 };
        let mut arg = Zeropage { range, mode: MODE_DONTWAKE, zeropage: 0 };
        match self.call(UFFDIO_ZEROPAGE, &mut arg) {
            Ok(()) => (len, None),
            Err(error) => {
                let done = usize::try_from(arg.zeropage).unwrap_or(0);
                (done, Some(error.raw_os_error().unwrap_or(libc::EIO)))
            }
        }
    }

    pub(crate) fn write_protect(&self, start: usize, len: usize) -> io::Result<()> {
        let range = Range { start: start as u64, len: len as u64 };
        self.call(UFFDIO_WRITEPROTECT, &mut Writeprotect { range, mode: 1 })
    }

    /// Moves pages to empty addresses. Returns the number of bytes, and the reason if these are not
    /// all. Wakes nobody.
    ///
    /// # Safety
    /// No reference to either range may exist.
    pub(crate) unsafe fn move_pages(
        &self,
        to: usize,
        from: usize,
        len: usize,
    ) -> (usize, Option<i32>) {
        let mut arg = Move {
            dst: to as u64,
            src: from as u64,
            len: len as u64,
            mode: MODE_DONTWAKE,
            moved: 0,
        };
        match self.call(UFFDIO_MOVE, &mut arg) {
            Ok(()) => (len, None),
            Err(error) => {
                let moved = usize::try_from(arg.moved).unwrap_or(0);
                (moved, Some(error.raw_os_error().unwrap_or(libc::EIO)))
            }
        }
    }
}
