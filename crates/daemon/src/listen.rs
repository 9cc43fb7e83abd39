//! The sockets that the daemon listens at.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use nix::unistd::Group;
use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};

use crate::auth::Auth;

/// What a program without the C library's modules for other sources has to say of a missing group.
const GROUPS_SEEN: &str = if cfg!(target_env = "musl") {
    " in /etc/group or known to nscd: this static build asks no other source; use the group's number"
} else {
    ""
};

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
    /// Another process answers at the path.
    #[error("another process listens at {}", .0.display())]
    Taken(PathBuf),
    /// Another process is about to listen at the path.
    #[error("another process holds {}, and may be about to listen", .0.display())]
    Locked(PathBuf),
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

/// A socket file that we made.
#[derive(Debug)]
pub(crate) struct SocketFile {
    path: PathBuf,
    /// Device and inode number.
    identity: (u64, u64),
}

impl SocketFile {
    /// Removes the file, unless another file has replaced it. The caller still listens, so the inode
    /// number is not in use for another file.
    pub(crate) fn remove(&self) {
        if identity(&self.path).is_ok_and(|it| it == self.identity) {
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
    let gid = group.map(group_id).transpose()?;
    let shown = || path.display();
    let parent = path.parent().filter(|it| !it.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if !parent.is_dir() {
        std::fs::create_dir_all(parent).map_err(failed(shown()))?;
        // Whatever the umask: members of the group have to get to the socket.
        let passable = std::fs::Permissions::from_mode(0o711);
        std::fs::set_permissions(parent, passable).map_err(failed(parent.display()))?;
    }
    let _lock = lock(&beside(path, ".lock"))?;
    let is_socket = |path: &Path| match path.symlink_metadata() {
        Ok(found) if !found.file_type().is_socket() => Err(ListenError::NoSocket(path.to_owned())),
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(failed(path.display())(error)),
    };
    if is_socket(path)? && is_answered(path).map_err(failed(shown()))? {
        return Err(ListenError::Taken(path.to_owned()));
    }
    // Under another name until its mode and owner are right. The name is always the same, so a daemon
    // that was killed here leaves one socket, which the next one replaces.
    let aside = beside(path, ".new");
    if is_socket(&aside)? {
        std::fs::remove_file(&aside).map_err(failed(aside.display()))?;
    }
    // Only root can connect from the first moment. The daemon has no other thread yet that makes files.
    let before = rustix::process::umask(Mode::from_raw_mode(0o177));
    let bound = UnixListener::bind(&aside);
    rustix::process::umask(before);
    let listener = bound.map_err(failed(aside.display()))?;
    let publish = || {
        std::os::unix::fs::chown(&aside, Some(0), Some(gid.unwrap_or(0)))?;
        let mode = if gid.is_some() { 0o660 } else { 0o600 };
        std::fs::set_permissions(&aside, std::fs::Permissions::from_mode(mode))?;
        let identity = identity(&aside)?;
        std::fs::rename(&aside, path)?;
        Ok(SocketFile { path: path.to_owned(), identity })
    };
    let file = publish().map_err(|error| {
        let _ = std::fs::remove_file(&aside);
        failed(path.display())(error)
    })?;
    Ok((listener, file))
}

/// Of two daemons that start at the same time, the second must see the socket of the first. Only root
/// can open the file, so no other user can hold up the daemon. It stays: if it were removed, two
/// daemons could each lock one. The kernel releases the lock of a killed process.
fn lock(path: &Path) -> Result<OwnedFd, ListenError> {
    let at = || failed(path.display());
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::from_raw_mode(0o600));
    let file = file.map_err(|errno| at()(errno.into()))?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(Errno::AGAIN) => Err(ListenError::Locked(path.to_owned())),
        Err(errno) => Err(at()(errno.into())),
    }
}

/// Whether a process listens at a socket. It does not wait: a stopped process with a full queue is
/// one.
fn is_answered(path: &Path) -> io::Result<bool> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    let connected = rustix::net::connect(&socket, &SocketAddrUnix::new(path)?);
    Ok(matches!(connected, Ok(()) | Err(Errno::AGAIN)))
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
    let family = sockopt::socket_domain(&socket).map_err(|error| at()(error.into()))?;
    if family == AddressFamily::UNIX {
        return Ok(Listener::Unix(socket.into()));
    }
    let listener = TcpListener::from(socket);
    let address = listener.local_addr().map_err(at())?;
    auth.check_address(address)?;
    Ok(Listener::Tcp(listener))
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
    use super::*;

    #[test]
    fn a_group_has_a_name_or_a_number() {
        assert_eq!(group_id("root").unwrap(), 0);
        assert_eq!(group_id("65533").unwrap(), 65533);
        let missing = group_id("no-such-group").unwrap_err();
        assert!(matches!(missing, ListenError::NoGroup(_)), "{missing}");
    }
}
