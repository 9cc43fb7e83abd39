//! Sockets of virtual machines, however long their paths are.

use std::fs::File;
use std::io::{self, IoSlice, Read, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, sendmsg, socket_with,
};

/// How long a process may have no room for another client: it is busy, or was stopped.
const ROOM: Duration = Duration::from_secs(1);
const LOOK: Duration = Duration::from_millis(10);

/// Connects to the process that listens at a path.
///
/// # Errors
/// Those of connecting; `TimedOut` if the process does not take its clients.
pub(super) fn connect_path(path: &Path) -> io::Result<UnixStream> {
    match (path.parent(), path.file_name().and_then(|name| name.to_str())) {
        (Some(dir), Some(name)) if path.is_absolute() => connect(dir, name),
        _ => connect_within(|| try_connect(path)),
    }
}

/// Connects to the process that listens there. Fails like [`connect_path`].
pub(super) fn connect(dir: &Path, name: &str) -> io::Result<UnixStream> {
    connect_within(|| try_connect_in(dir, name))
}

/// Whether a process listens there.
pub(super) fn is_listening(dir: &Path, name: &str) -> bool {
    match try_connect_in(dir, name) {
        Err(error) => is_full(&error),
        Ok(_) => true,
    }
}

/// Connecting waits while a process has no room for another client, for ever if it was stopped.
fn connect_within(attempt: impl Fn() -> io::Result<OwnedFd>) -> io::Result<UnixStream> {
    let until = Instant::now() + ROOM;
    loop {
        match attempt() {
            Err(error) if is_full(&error) && Instant::now() < until => std::thread::sleep(LOOK),
            Err(error) if is_full(&error) => {
                let what = "the process at this socket does not take its clients";
                return Err(io::Error::new(io::ErrorKind::TimedOut, what));
            }
            connected => {
                let socket = UnixStream::from(connected?);
                socket.set_nonblocking(false)?;
                return Ok(socket);
            }
        }
    }
}

fn try_connect_in(dir: &Path, name: &str) -> io::Result<OwnedFd> {
    let held = File::open(dir)?;
    try_connect(format!("/proc/self/fd/{}/{name}", held.as_raw_fd()).as_ref())
}

fn try_connect(path: &Path) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

fn is_full(error: &io::Error) -> bool {
    error.raw_os_error() == Some(Errno::AGAIN.raw_os_error())
}

/// A socket whose answers have time limits. The timeout of a socket is that of each read, and a
/// process that sends a byte now and then would never reach it.
#[derive(Debug)]
pub(super) struct Patient {
    socket: UnixStream,
    limit: Duration,
    until: Instant,
}

impl Patient {
    /// Each answer may take so long.
    ///
    /// # Errors
    /// Those of the socket.
    pub(super) fn new(socket: UnixStream, limit: Duration) -> io::Result<Self> {
        socket.set_write_timeout(Some(limit))?;
        Ok(Self { socket, limit, until: Instant::now() + limit })
    }

    /// The time of an answer begins.
    pub(super) fn begin(&mut self) {
        self.until = Instant::now() + self.limit;
    }

    /// The socket. The next read from it ends in time.
    ///
    /// # Errors
    /// `TimedOut` if the time is over; those of the socket.
    pub(super) fn in_time(&self) -> io::Result<&UnixStream> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.socket.set_read_timeout(Some(left))?;
        Ok(&self.socket)
    }

    /// The socket, for writing.
    pub(super) fn socket(&self) -> &UnixStream {
        &self.socket
    }
}

impl Read for Patient {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.in_time()?.read(buffer);
        read.map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => io::ErrorKind::TimedOut.into(),
            _ => error,
        })
    }
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
        // The same with the API of a Cloud Hypervisor: all of the daemon waited for it.
        let error = connect(dir.path(), "control").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        drop(listener);
        assert!(!is_listening(dir.path(), "control"));
    }

    /// A process that sends a byte now and then kept its client for ever.
    #[test]
    fn an_answer_ends_in_time_however_it_comes() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let dribble = std::thread::spawn(move || {
            while theirs.write_all(b"x").is_ok() {
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        let mut patient = Patient::new(ours, Duration::from_millis(200)).unwrap();
        let began = Instant::now();
        let error = patient.read_to_end(&mut Vec::new()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(began.elapsed() < Duration::from_secs(10));
        patient.begin();
        assert_eq!(patient.read(&mut [0]).unwrap(), 1);
        drop(patient);
        dribble.join().unwrap();
    }
}
