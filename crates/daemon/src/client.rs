//! The other half of the API: a blocking client at the daemon's unix socket.
//!
//! Each request has a connection of its own, a time limit and a limit on the size of its answer, so
//! a stuck daemon, or another program at the socket, cannot stop or fill the caller.

use std::error::Error as _;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cofolio_store::{BoxError, with_causes};
use http_body_util::{BodyExt as _, Full};
use hyper::body::{Body as _, Bytes};
use hyper::client::conn::http1;
use hyper::header::{ACCEPT, HOST};
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use nix::unistd::{Gid, Group};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::time::timeout_at;

use crate::runtime;

/// How long a request may take. The daemon gives its own answer, that it is busy, after 64 seconds at the latest.
const PATIENCE: Duration = Duration::from_secs(65);
/// Bytes of a head.
const HEAD_MAX: usize = 16 << 10;
/// Bytes of a body: the files of an image with some 200,000 of them.
const BODY_MAX: u64 = 64 << 20;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// Nothing listens at the socket, or the connection failed.
    #[error("{}", .socket.display())]
    Io {
        /// The socket.
        socket: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// This user may not connect.
    #[error("only root{} may connect to {}", or_members(group), .socket.display())]
    Denied {
        /// The socket.
        socket: PathBuf,
        /// The group whose members may.
        group: Option<String>,
    },
    /// The daemon closed the connection without an answer, as it does when there are so many
    /// connections that it cannot even refuse more.
    #[error(
        "{}: the daemon closed the connection without an answer: it may be busy", .socket.display()
    )]
    Closed {
        /// The socket.
        socket: PathBuf,
    },
    /// The daemon refused the request.
    #[error("{path}: {why} (HTTP status {status})")]
    Refused {
        /// What was asked for.
        path: String,
        /// Status of the answer.
        status: u16,
        /// The daemon's reason.
        why: String,
    },
    /// The answer is malformed, or too large.
    #[error("{path}: {what}")]
    Malformed {
        /// What was asked for.
        path: String,
        /// What is wrong with the answer.
        what: String,
    },
}

fn or_members(group: &Option<String>) -> String {
    group.iter().map(|group| format!(" and members of the group {group}")).collect()
}

/// The group whose members may connect to a socket besides root. `None` if there is none, or this user
/// cannot see it.
fn group_of(socket: &Path) -> Option<String> {
    let found = socket.metadata().ok()?;
    let gid = Some(found.gid()).filter(|gid| *gid != 0 && found.mode() & 0o020 != 0)?;
    let group = Group::from_gid(Gid::from_raw(gid)).ok().flatten();
    Some(group.map_or_else(|| gid.to_string(), |group| group.name))
}

/// Asks the daemon at a unix socket.
#[derive(Debug, Clone)]
pub struct Client {
    socket: PathBuf,
    patience: Duration,
    body_max: u64,
}

impl Client {
    /// A client of the daemon at this socket. It connects with each request.
    pub fn at(socket: impl Into<PathBuf>) -> Self {
        Self { socket: socket.into(), patience: PATIENCE, body_max: BODY_MAX }
    }

    /// The same client with another time limit for each request than 65 seconds.
    #[must_use]
    pub fn with_patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// The socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Gets the answer to `GET path`; `docs/API.md` lists the paths. `path` is sent as it is.
    ///
    /// # Errors
    /// [`ClientError`]; [`ClientError::Io`] with `WouldBlock` when the time is up.
    pub fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        parsed(path, &self.request(Method::GET, path, Vec::new())?)
    }

    /// The same as text: `/metrics` is not JSON.
    ///
    /// # Errors
    /// Those of [`Client::get`].
    pub fn get_text(&self, path: &str) -> Result<String, ClientError> {
        let body = self.request(Method::GET, path, Vec::new())?;
        String::from_utf8(body.into()).map_err(|error| malformed(path, error))
    }

    /// Gets the answer to `POST path` with this body.
    ///
    /// # Errors
    /// Those of [`Client::get`].
    pub fn post<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
    ) -> Result<T, ClientError> {
        let body = serde_json::to_vec(body).map_err(|error| malformed(path, error))?;
        parsed(path, &self.request(Method::POST, path, body)?)
    }

    fn request(&self, method: Method, path: &str, body: Vec<u8>) -> Result<Bytes, ClientError> {
        let failed = |source| ClientError::Io { socket: self.socket.clone(), source };
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(HOST, "localhost")
            .header(ACCEPT, "application/json")
            .body(Full::<Bytes>::from(body))
            .map_err(|error| malformed(path, error))?;
        let deadline = Instant::now() + self.patience;
        let stream = self.connect().map_err(|error| match error.kind() {
            io::ErrorKind::PermissionDenied => {
                ClientError::Denied { socket: self.socket.clone(), group: group_of(&self.socket) }
            }
            _ => failed(error),
        })?;
        let exchange = async {
            let answered = timeout_at(deadline.into(), self.exchange(stream, request)).await;
            let late = || io::Error::new(io::ErrorKind::WouldBlock, "no answer in time");
            answered.unwrap_or_else(|_| Err(late().into()))
        };
        let runtime = runtime::new(1).map_err(failed)?;
        let (status, body) =
            runtime.block_on(exchange).map_err(|error| match error.downcast() {
                Ok(source) => failed(*source),
                Err(what) if what.downcast_ref().is_some_and(is_closed) => {
                    ClientError::Closed { socket: self.socket.clone() }
                }
                Err(what) => malformed(path, with_causes(&*what)),
            })?;
        if status != StatusCode::OK {
            let said: Option<Refusal> = serde_json::from_slice(&body).ok();
            let why = said.map_or_else(|| "refused".to_owned(), |it| it.error);
            return Err(ClientError::Refused { path: path.to_owned(), status: status.into(), why });
        }
        Ok(body)
    }

    /// The status and the body of the answer.
    async fn exchange(
        &self,
        stream: UnixStream,
        request: Request<Full<Bytes>>,
    ) -> Result<(StatusCode, Bytes), BoxError> {
        stream.set_nonblocking(true)?;
        let stream = TokioIo::new(tokio::net::UnixStream::from_std(stream)?);
        let builder = http1::Builder::new().max_buf_size(HEAD_MAX).to_owned();
        let (mut sender, connection) = builder.handshake(stream).await?;
        tokio::spawn(connection);
        let (head, body) = sender.send_request(request).await?.into_parts();
        match body.size_hint().exact() {
            // A broken connection would look like the end of the body.
            None => Err("the answer has no Content-Length".into()),
            Some(bytes) if bytes > self.body_max => Err("the answer is too large".into()),
            Some(_) => Ok((head.status, body.collect().await?.to_bytes())),
        }
    }

    /// A daemon that is stopped lets clients wait in the kernel's queue. When that is full,
    /// connecting blocks for as long as the socket's timeout for sending.
    fn connect(&self) -> io::Result<UnixStream> {
        let address = SocketAddrUnix::new(&self.socket)?;
        let kind = (SocketType::STREAM, SocketFlags::CLOEXEC);
        let socket = rustix::net::socket_with(AddressFamily::UNIX, kind.0, kind.1, None)?;
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(self.patience))?;
        rustix::net::connect(&socket, &address)?;
        Ok(socket.into())
    }
}

/// Whether the other side closed the connection before it answered.
fn is_closed(error: &hyper::Error) -> bool {
    let source = error.source().and_then(|it| it.downcast_ref::<io::Error>());
    let is_broken = source.is_some_and(|it| {
        matches!(it.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe)
    });
    is_broken || error.is_incomplete_message() || error.is_canceled()
}

fn parsed<T: DeserializeOwned>(path: &str, body: &[u8]) -> Result<T, ClientError> {
    serde_json::from_slice(body).map_err(|error| malformed(path, error))
}

fn malformed(path: &str, what: impl ToString) -> ClientError {
    ClientError::Malformed { path: path.to_owned(), what: what.to_string() }
}

/// The body of an error (docs/API.md).
#[derive(serde::Deserialize)]
struct Refusal {
    error: String,
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixListener;

    use super::*;

    /// Answers one request with these bytes.
    fn answered_with(answer: &[u8]) -> Result<Vec<u32>, ClientError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let answer = answer.to_vec();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = [0; 1024];
            let _ = stream.read(&mut request).unwrap();
            let _ = stream.write_all(&answer);
        });
        let client = Client { body_max: 100, ..Client::at(path) };
        let got = client.get("/v1/x");
        server.join().unwrap();
        got
    }

    #[test]
    fn answers_and_refusals() {
        let good = b"HTTP/1.1 200 OK\r\ncontent-LENGTH: 5\r\n\r\n[1,2]and more";
        assert_eq!(answered_with(good).unwrap(), [1, 2]);
        let refusal = b"HTTP/1.1 404 Not Found\r\nContent-Length: 18\r\n\r\n{\"error\": \"gone\" }";
        let refused = answered_with(refusal).unwrap_err();
        assert_eq!(refused.to_string(), "/v1/x: gone (HTTP status 404)");
    }

    /// Any bytes at the socket give an error, and nothing is allocated because the head claims it.
    #[test]
    fn malformed_answers() {
        let long = [&b"HTTP/1.1 200 OK\r\na: "[..], &[b'x'; HEAD_MAX]].concat();
        for (answer, what) in [
            (&b"SSH-2.0\r\n\r\n"[..], "invalid HTTP version"),
            (b"HTTP/1.1 2\xff\r\n\r\n", "invalid HTTP status-code"),
            (b"HTTP/1.1 200 OK\r\n\r\n[]", "no Content-Length"),
            (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n[]", "invalid content-length"),
            (b"HTTP/1.1 200 OK\r\nContent-Length: 18446744073709551615\r\n\r\n", "too large"),
            (b"HTTP/1.1 200 OK\r\nContent-Length: 101\r\n\r\n", "too large"),
            (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n[1", "end of file before"),
            (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", "invalid type"),
            (&long, "message head is too large"),
        ] {
            let error = answered_with(answer).unwrap_err();
            assert!(matches!(error, ClientError::Malformed { .. }), "{error:?}");
            assert!(error.to_string().contains(what), "{error} instead of {what}");
        }
    }

    /// A daemon that had no room even for a refusal was taken for one that is not there. It closes
    /// the connection at any moment until it would answer.
    #[test]
    fn a_closed_connection_is_no_answer() {
        let is_closed = |got: Result<Vec<u32>, ClientError>| {
            let error = got.unwrap_err();
            assert!(matches!(error, ClientError::Closed { .. }), "{error:?}");
            assert!(error.to_string().contains("without an answer"), "{error}");
        };
        is_closed(answered_with(b""));
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let server = std::thread::spawn(move || {
            (0..100).for_each(|_| drop(listener.accept().unwrap()));
        });
        (0..100).for_each(|_| is_closed(Client::at(&path).get("/v1/x")));
        server.join().unwrap();
    }

    /// A stopped daemon accepts connections, since the kernel does it, and never answers.
    #[test]
    fn silence_ends() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let _listener = UnixListener::bind(&path).unwrap();
        let client = Client::at(path).with_patience(Duration::from_millis(50));
        let error = client.get::<()>("/v1/x").unwrap_err();
        let ClientError::Io { source, .. } = error else { panic!("{error}") };
        assert_eq!(source.kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn no_daemon() {
        let error = Client::at("/nonexistent/socket").get::<()>("/v1/x").unwrap_err();
        let ClientError::Io { source, .. } = error else { panic!("{error}") };
        assert_eq!(source.kind(), io::ErrorKind::NotFound);
    }
}
