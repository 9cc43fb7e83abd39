//! The sockets that the daemon listens at.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use nix::unistd::Group;
use rustix::fs::{FileType, FlockOperation, Mode, OFlags, flock};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};

use crate::auth::Auth;

/// What a program without the C library's modules for other sources has to say of a missing group.
const GROUPS_SEEN: &str = if cfg!(target_env = "musl") {
    " in /etc/group, and nscd knows none: this static build asks no other source; use the group's number"
} else {
    ""
};

/// Connections that may wait to be accepted; the kernel lowers it to `net.core.somaxconn`.
const BACKLOG: i32 = 4096;

/// Behind the name of a socket until its mode and owner are right.
const ASIDE: &str = ".new";

/// Bytes of the path of a socket: with [`ASIDE`] and a NUL it fits the 108 of `sun_path` (unix(7)).
const SOCKET_PATH_MAX: usize = 108 - 1 - ASIDE.len();

/// Why the daemon cannot listen.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ListenError {
    /// The socket could not be made.
    #[error("listening at {at}")]
    Io {
        /// Path or address.
        at: String,
        /// Why.
        source: io::Error,
    },
    /// The kernel takes no longer path.
    #[error(
        "{} has {} bytes: the path of the socket may have at most {SOCKET_PATH_MAX}",
        .0.display(),
        .0.as_os_str().len()
    )]
    TooLong(PathBuf),
    /// The directory of the socket does not exist.
    #[error("listening at {}: there is no such directory", .0.display())]
    NoDirectory(PathBuf),
    /// Another process answers at the path.
    #[error("another process listens at {}", .0.display())]
    Taken(PathBuf),
    /// Another process is about to listen at the path.
    #[error("another process holds {}, and may be about to listen", .0.display())]
    Locked(PathBuf),
    /// The lock beside the socket is not a file that only root can open.
    #[error("{} is not a lock of Cofolio's: a plain file of root's with mode 600. Remove it", .0.display())]
    NotOurLock(PathBuf),
    /// There is a file at the path that is no socket.
    #[error("{} exists and is no socket", .0.display())]
    NoSocket(PathBuf),
    /// The group that may use the socket does not exist.
    #[error("there is no group {0}{GROUPS_SEEN}")]
    NoGroup(String),
    /// The group that may use the socket could not be looked up.
    #[error("looking up group {name}")]
    Group {
        /// Its name.
        name: String,
        /// Why.
        source: io::Error,
    },
    /// Other machines can reach the address, and nothing keeps them out.
    #[error("{0} is not a loopback address: it needs TLS and either a client CA or a token")]
    Unguarded(SocketAddr),
    /// Settings for TLS that do not make sense without each other.
    #[error("TLS needs both a certificate and its key; a client CA needs TLS")]
    HalfOfTls,
    /// A certificate, a key or a token that cannot be used.
    #[error("{}", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

fn failed(at: impl ToString) -> impl FnOnce(io::Error) -> ListenError {
    let at = at.to_string();
    move |source| ListenError::Io { at, source }
}

/// A socket file that we made. It goes when this is dropped, unless another file has replaced it.
#[derive(Debug)]
pub(crate) struct SocketFile {
    path: PathBuf,
    /// Number of the group that may connect. It is looked up once: LDAP may let a program wait.
    gid: Option<u32>,
    /// Device and inode number.
    identity: (u64, u64),
}

impl SocketFile {
    /// Whether clients that connect to the path reach us. The caller still listens, so the inode
    /// number is not in use for another file.
    pub(crate) fn is_in_place(&self) -> bool {
        identity(&self.path).is_ok_and(|it| it == self.identity)
    }

    /// Whether another file has replaced it.
    pub(crate) fn is_replaced(&self) -> bool {
        identity(&self.path).is_ok_and(|it| it != self.identity)
    }

    /// Listens at the path once more.
    pub(crate) fn make_again(&self) -> Result<(UnixListener, Self), ListenError> {
        listen_at(&self.path, self.gid)
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if self.is_in_place() {
            // The next daemon would replace it anyway.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    path.symlink_metadata().map(|found| (found.dev(), found.ino()))
}

/// The path with this behind its last part.
fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Listens at a path. Only root, and members of the group if one is given, can connect. Replaces the
/// socket that a killed daemon left.
pub(crate) fn unix(
    path: &Path,
    group: Option<&str>,
) -> Result<(UnixListener, SocketFile), ListenError> {
    listen_at(path, group.map(group_id).transpose()?)
}

fn listen_at(path: &Path, gid: Option<u32>) -> Result<(UnixListener, SocketFile), ListenError> {
    let shown = || path.display();
    if path.as_os_str().len() > SOCKET_PATH_MAX {
        return Err(ListenError::TooLong(path.to_owned()));
    }
    if path.parent().is_some_and(|dir| !dir.as_os_str().is_empty() && !dir.is_dir()) {
        return Err(ListenError::NoDirectory(path.to_owned()));
    }
    let is_socket = |path: &Path| match path.symlink_metadata() {
        Ok(found) if !found.file_type().is_socket() => Err(ListenError::NoSocket(path.to_owned())),
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(failed(path.display())(error)),
    };
    // Nothing is made beside a file that is not ours.
    is_socket(path)?;
    let _lock = lock(&beside(path, ".lock"))?;
    if is_socket(path)? && is_answered(path).map_err(failed(shown()))? {
        return Err(ListenError::Taken(path.to_owned()));
    }
    // Under another name until its mode and owner are right. The name is always the same, so a daemon
    // that was killed here leaves one socket, which the next one replaces.
    let aside = beside(path, ASIDE);
    if is_socket(&aside)? {
        std::fs::remove_file(&aside).map_err(failed(aside.display()))?;
    }
    let listener = bind(&aside).map_err(failed(aside.display()))?;
    let publish = || {
        // Whoever can write to the directory could put a link there, to a file of root's: so this is
        // about one inode.
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::open(&aside, flags, Mode::empty())?;
        let found = rustix::fs::fstat(&file)?;
        if FileType::from_raw_mode(found.st_mode) != FileType::Socket {
            return Err(io::Error::other("another file took the socket's place"));
        }
        if let Some(gid) = gid {
            let here = format!("/proc/self/fd/{}", file.as_raw_fd());
            std::os::unix::fs::chown(&here, None, Some(gid))?;
            std::fs::set_permissions(&here, std::fs::Permissions::from_mode(0o660))?;
        }
        std::fs::rename(&aside, path)?;
        Ok(SocketFile { path: path.to_owned(), gid, identity: (found.st_dev, found.st_ino) })
    };
    let file = publish().map_err(|error| {
        let _ = std::fs::remove_file(&aside);
        failed(path.display())(error)
    })?;
    Ok((listener, file))
}

/// Listens at a path. Only root can connect, from the first moment: the kernel takes the mode of
/// the file from the socket. The umask would be changed for other threads, too, which make files.
fn bind(path: &Path) -> io::Result<UnixListener> {
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

/// Of two daemons that start at the same time, the second must see the socket of the first. Only root
/// can open the file, so no other user can hold up the daemon; one that another user has made, as in
/// /tmp, is refused. It stays: if it were removed, two daemons could each lock one. The kernel
/// releases the lock of a killed process.
fn lock(path: &Path) -> Result<OwnedFd, ListenError> {
    let at = || failed(path.display());
    // A pipe is not waited for.
    let flags =
        OFlags::WRONLY | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let not_ours = || ListenError::NotOurLock(path.to_owned());
    let file = match rustix::fs::open(path, flags, Mode::from_raw_mode(0o600)) {
        // Of a file of another user in /tmp (`fs.protected_regular`), or of a pipe.
        Err(Errno::ACCESS | Errno::NXIO) => return Err(not_ours()),
        opened => opened.map_err(|errno| at()(errno.into()))?,
    };
    let found = rustix::fs::fstat(&file).map_err(|errno| at()(errno.into()))?;
    let is_file = FileType::from_raw_mode(found.st_mode) == FileType::RegularFile;
    if !is_file || found.st_uid != 0 || found.st_mode & 0o077 != 0 {
        return Err(not_ours());
    }
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(Errno::AGAIN) => Err(ListenError::Locked(path.to_owned())),
        Err(errno) => Err(at()(errno.into())),
    }
}

/// Whether a process uses a socket. Never waits: a full queue, as of a stopped process, and a socket
/// of another type mean yes.
fn is_answered(path: &Path) -> io::Result<bool> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    let connected = rustix::net::connect(&socket, &SocketAddrUnix::new(path)?);
    Ok(matches!(connected, Ok(()) | Err(Errno::AGAIN | Errno::PROTOTYPE)))
}

/// Listens at an address, if clients are authenticated well enough for it.
pub(crate) fn tcp(address: SocketAddr, auth: &Auth) -> Result<TcpListener, ListenError> {
    auth.check_address(address)?;
    TcpListener::bind(address).map_err(failed(address))
}

/// A socket that somebody else has opened for us.
#[derive(Debug)]
pub(crate) enum Listener {
    Unix(UnixListener),
    Tcp(TcpListener),
}

/// What a passed descriptor is. Clients at a TCP socket have to be authenticated, too.
pub(crate) fn passed(socket: OwnedFd, auth: &Auth) -> Result<Listener, ListenError> {
    let at = || failed("the socket that was passed to it");
    let asked = |error: Errno| at()(error.into());
    let family = sockopt::socket_domain(&socket).map_err(asked)?;
    if sockopt::socket_type(&socket).map_err(asked)? != SocketType::STREAM
        || !sockopt::socket_acceptconn(&socket).map_err(asked)?
    {
        let problem = "it is no stream socket that listens (ListenStream= of a systemd unit)";
        return Err(at()(io::Error::new(io::ErrorKind::InvalidInput, problem)));
    }
    if family == AddressFamily::UNIX {
        if let Some(problem) = problem_of(&socket).map_err(asked)? {
            return Err(at()(io::Error::new(io::ErrorKind::InvalidInput, problem)));
        }
        return Ok(Listener::Unix(socket.into()));
    }
    let listener = TcpListener::from(socket);
    let address = listener.local_addr().map_err(at())?;
    auth.check_address(address)?;
    Ok(Listener::Tcp(listener))
}

/// Why a socket may be everybody's: it has an abstract name, which no mode guards, or all users may
/// write to its file, as systemd makes one unless it is told not to.
fn problem_of(socket: &OwnedFd) -> rustix::io::Result<Option<&'static str>> {
    let address = SocketAddrUnix::try_from(rustix::net::getsockname(socket)?)?;
    let path = address.path().filter(|path| path.to_bytes().starts_with(b"/"));
    let Some(path) = path else {
        return Ok(Some("every user of the machine may connect to it: it needs an absolute path"));
    };
    Ok(match rustix::fs::stat(path) {
        // It may have another name by now, or be in another mount namespace.
        Err(_) => Some(
            "who may connect to it is not known, since its path does not lead to it: restart its unit",
        ),
        Ok(found) if Mode::from_raw_mode(found.st_mode).contains(Mode::WOTH) => Some(
            "every user of the machine may connect to it: it needs SocketMode=0660 or stricter",
        ),
        Ok(_) => None,
    })
}

/// Number of a group, by name or number. Names are looked up as the system is configured
/// (nsswitch.conf(5)), which may ask LDAP or systemd-userdb.
fn group_id(name: &str) -> Result<u32, ListenError> {
    if let Ok(number) = name.parse() {
        return Ok(number);
    }
    let found = Group::from_name(name)
        .map_err(|errno| ListenError::Group { name: name.to_owned(), source: errno.into() })?;
    found.map(|group| group.gid.as_raw()).ok_or_else(|| ListenError::NoGroup(name.to_owned()))
}

#[cfg(test)]
mod tests {
    use cofolio_store::with_causes;

    use super::*;

    /// A datagram socket counted as one that nobody uses, and was replaced.
    #[test]
    fn sockets_of_other_types_are_answered() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        for kind in [SocketType::DGRAM, SocketType::SEQPACKET] {
            let socket = rustix::net::socket(AddressFamily::UNIX, kind, None).unwrap();
            rustix::net::bind(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
            if kind == SocketType::SEQPACKET {
                rustix::net::listen(&socket, 1).unwrap();
            }
            assert!(is_answered(&path).unwrap(), "{kind:?}");
            drop(socket);
            assert!(!is_answered(&path).unwrap(), "{kind:?}");
            std::fs::remove_file(&path).unwrap();
        }
    }

    /// The daemon ran on without a word where a unit had `ListenDatagram`, and nobody could connect.
    #[test]
    fn a_passed_socket_has_to_listen() {
        let refused = |kind| {
            let socket = rustix::net::socket(AddressFamily::UNIX, kind, None).unwrap();
            let error = passed(socket, &Auth::for_test(None)).unwrap_err();
            assert!(with_causes(&error).contains("no stream socket that listens"), "{error:?}");
        };
        refused(SocketType::DGRAM);
        refused(SocketType::STREAM);
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("socket")).unwrap();
        let passed = passed(listener.into(), &Auth::for_test(None)).unwrap();
        assert!(matches!(passed, Listener::Unix(_)));
    }

    /// A socket unit without `SocketMode=`, or with an abstract name, let every user of the machine reclaim.
    #[test]
    fn a_passed_socket_is_not_for_everybody() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let with_mode = |mode| {
            let _ = std::fs::remove_file(&path);
            let listener = UnixListener::bind(&path).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            passed(listener.into(), &Auth::for_test(None))
        };
        assert!(with_mode(0o660).is_ok());
        // In another mount namespace, or renamed.
        let moved = UnixListener::bind(dir.path().join("moved")).unwrap();
        std::fs::remove_file(dir.path().join("moved")).unwrap();
        let moved = passed(moved.into(), &Auth::for_test(None)).unwrap_err();
        assert!(with_causes(&moved).contains("its path does not lead to it"), "{moved:?}");
        let everybody = with_mode(0o666).unwrap_err();
        assert!(with_causes(&everybody).contains("SocketMode=0660"), "{everybody:?}");
        let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        let name = format!("cofolio-{}", std::process::id());
        let name = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
        rustix::net::bind(&socket, &name).unwrap();
        rustix::net::listen(&socket, 1).unwrap();
        let abstracted = passed(socket, &Auth::for_test(None)).unwrap_err();
        assert!(with_causes(&abstracted).contains("needs an absolute path"), "{abstracted:?}");
    }

    /// Another user had made the lock in /tmp and locked it: the daemon did not start, and said that
    /// another process may be about to listen.
    #[test]
    fn a_lock_of_another_user_is_refused() {
        if !rustix::process::geteuid().is_root() {
            return eprintln!("SKIP a_lock_of_another_user_is_refused: needs root");
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket.lock");
        let refused = |story: &str| {
            let error = lock(&path).unwrap_err();
            assert!(matches!(error, ListenError::NotOurLock(_)), "{story}: {error}");
            std::fs::remove_file(&path).unwrap();
        };
        let held = lock(&path).unwrap();
        assert!(matches!(lock(&path).unwrap_err(), ListenError::Locked(_)));
        drop(held);
        drop(lock(&path).unwrap());
        std::os::unix::fs::chown(&path, Some(1), None).unwrap();
        refused("owner");
        drop(lock(&path).unwrap());
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666)).unwrap();
        refused("mode");
        let mode = Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(rustix::fs::CWD, &path, FileType::Fifo, mode, 0).unwrap();
        refused("pipe");
    }

    /// A path that was too long only with the suffix of its first name was refused with that name
    /// and `File name too long`, and one that was too long by itself left a lock behind.
    #[test]
    fn the_longest_path_of_a_socket() {
        if !rustix::process::geteuid().is_root() {
            return eprintln!("SKIP the_longest_path_of_a_socket: needs root");
        }
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().join("x");
        let path = beside(&base, &"x".repeat(SOCKET_PATH_MAX - base.as_os_str().len()));
        drop(unix(&path, None).unwrap());
        let path = beside(&path, "x");
        let error = unix(&path, None).unwrap_err().to_string();
        assert!(error.contains("has 104 bytes") && error.ends_with("at most 103"), "{error}");
        assert!(!beside(&path, ".lock").exists());
    }

    /// A daemon that failed after it had made its socket left the file.
    #[test]
    fn the_socket_file_goes_with_its_daemon() {
        if !rustix::process::geteuid().is_root() {
            return eprintln!("SKIP the_socket_file_goes_with_its_daemon: needs root");
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let (_listener, file) = unix(&path, Some("0")).unwrap();
        assert!(file.is_in_place() && !file.is_replaced());
        std::fs::remove_file(&path).unwrap();
        assert!(!file.is_in_place() && !file.is_replaced());
        let (_again, again) = file.make_again().unwrap();
        assert!(!file.is_in_place() && file.is_replaced());
        drop(file);
        assert!(again.is_in_place());
        drop(again);
        assert!(!path.exists());
    }

    #[test]
    fn a_group_has_a_name_or_a_number() {
        assert_eq!(group_id("root").unwrap(), 0);
        assert_eq!(group_id("65533").unwrap(), 65533);
        let missing = group_id("no-such-group").unwrap_err();
        assert!(matches!(missing, ListenError::NoGroup(_)), "{missing}");
    }

    /// The umask was changed for a moment, for all threads. With one of 0 anybody could connect.
    #[test]
    fn only_its_owner_can_connect_to_a_new_socket() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let before = rustix::process::umask(Mode::empty());
        let bound = bind(&path);
        rustix::process::umask(before);
        bound.unwrap();
        assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o600);
    }
}
