//! The other half of the API: a blocking client at the daemon's unix socket.
//!
//! Each request has a connection of its own, a time limit and a limit on the size of its answer, so
//! a stuck daemon, or another program at the socket, cannot stop or fill the caller.

use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// How long a request may take. The daemon gives its own answer, that it is busy, after 64 seconds at the latest.
const PATIENCE: Duration = Duration::from_secs(65);
/// Bytes of a head.
const HEAD_MAX: usize = 16 << 10;
/// Bytes of a body: the files of an image with some 200,000 of them.
const BODY_MAX: usize = 64 << 20;

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

/// Asks the daemon at a unix socket.
#[derive(Debug, Clone)]
pub struct Client {
    socket: PathBuf,
    patience: Duration,
    body_max: usize,
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
        self.request("GET", path, "")
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
        let body = serde_json::to_string(body).map_err(|error| malformed(path, error))?;
        self.request("POST", path, &body)
    }

    fn request<T: DeserializeOwned>(
        &self,
        method: &str,
        path: &str,
        body: &str,
    ) -> Result<T, ClientError> {
        let request = format!(
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\
             Accept: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        let answer = self.exchange(&request).map_err(|source| match source.kind() {
            io::ErrorKind::InvalidData => malformed(path, source),
            _ => ClientError::Io { socket: self.socket.clone(), source },
        })?;
        if answer.status != 200 {
            let said: Option<Refusal> = serde_json::from_slice(&answer.body).ok();
            let why = said.map_or_else(|| "refused".to_owned(), |it| it.error);
            return Err(ClientError::Refused { path: path.to_owned(), status: answer.status, why });
        }
        serde_json::from_slice(&answer.body).map_err(|error| malformed(path, error))
    }

    fn exchange(&self, request: &str) -> io::Result<Answer> {
        let deadline = Instant::now() + self.patience;
        let mut stream = self.connect()?;
        stream.write_all(request.as_bytes())?;
        let mut bytes = Vec::new();
        let mut buffer = vec![0; 64 << 10];
        let mut head: Option<Head> = None;
        loop {
            if head.is_none() {
                head = Head::parse(&bytes)?;
            }
            if head.is_some_and(|head| head.body_bytes > self.body_max) {
                return Err(invalid("the answer is too large"));
            }
            let wanted = head.map_or(HEAD_MAX, |head| head.bytes + head.body_bytes);
            if let Some(head) = head.filter(|_| bytes.len() >= wanted) {
                bytes.truncate(wanted);
                return Ok(Answer { status: head.status, body: bytes.split_off(head.bytes) });
            }
            if bytes.len() >= wanted {
                return Err(invalid("the head of the answer is too large"));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            // A timeout of zero would mean none.
            stream.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
            match stream.read(&mut buffer) {
                Ok(0) => return Err(invalid("the answer ends early")),
                Ok(count) => bytes.extend_from_slice(&buffer[..count]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// A daemon with too many connections lets others wait in the kernel's queue. When that is
    /// full, connecting blocks for as long as the socket's timeout for sending.
    fn connect(&self) -> io::Result<UnixStream> {
        let address = SocketAddrUnix::new(&self.socket)?;
        let kind = (SocketType::STREAM, SocketFlags::CLOEXEC);
        let socket = rustix::net::socket_with(AddressFamily::UNIX, kind.0, kind.1, None)?;
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(self.patience))?;
        rustix::net::connect(&socket, &address)?;
        Ok(socket.into())
    }
}

fn malformed(path: &str, what: impl ToString) -> ClientError {
    ClientError::Malformed { path: path.to_owned(), what: what.to_string() }
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// The body of an error (docs/API.md).
#[derive(serde::Deserialize)]
struct Refusal {
    error: String,
}

struct Answer {
    status: u16,
    body: Vec<u8>,
}

/// What the head of an answer says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Head {
    /// Its own size, the empty line included.
    bytes: usize,
    status: u16,
    body_bytes: usize,
}

impl Head {
    /// `None` if more is to come. An answer without `Content-Length` is refused: the daemon always
    /// sends it, and without it a broken connection would look like the end of the body.
    fn parse(bytes: &[u8]) -> io::Result<Option<Self>> {
        let Some(end) = bytes.windows(4).position(|it| it == b"\r\n\r\n") else { return Ok(None) };
        let text =
            std::str::from_utf8(&bytes[..end]).map_err(|_| invalid("the head is not UTF-8"))?;
        let mut lines = text.split("\r\n");
        let status = lines.next().and_then(|line| line.strip_prefix("HTTP/1.1 ")?.get(..3));
        let status = status.and_then(|digits| digits.parse().ok());
        let fields = lines.filter_map(|line| line.split_once(':'));
        let length = fields
            .filter(|(name, _)| name.eq_ignore_ascii_case("content-length"))
            .find_map(|(_, value)| value.trim().parse().ok());
        match (status, length) {
            (Some(status), Some(body_bytes)) => {
                Ok(Some(Self { bytes: end + 4, status, body_bytes }))
            }
            (None, _) => Err(invalid("the answer is not HTTP/1.1")),
            (_, None) => Err(invalid("the answer has no Content-Length")),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    /// Answers one request with these bytes.
    fn answered_with(answer: &'static [u8]) -> Result<Vec<u32>, ClientError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = [0; 1024];
            let _ = stream.read(&mut request).unwrap();
            let _ = stream.write_all(answer);
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
        for (answer, what) in [
            (&b"SSH-2.0\r\n\r\n"[..], "not HTTP/1.1"),
            (b"HTTP/1.1 2\xff\r\n\r\n", "not UTF-8"),
            (b"HTTP/1.1 200 OK\r\n\r\n[]", "no Content-Length"),
            (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n[]", "no Content-Length"),
            (b"HTTP/1.1 200 OK\r\nContent-Length: 18446744073709551615\r\n\r\n", "too large"),
            (b"HTTP/1.1 200 OK\r\nContent-Length: 101\r\n\r\n", "too large"),
            (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n[1", "ends early"),
            (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", "invalid type"),
            (b"", "ends early"),
            (&[b'x'; HEAD_MAX + 1], "head of the answer is too large"),
        ] {
            let error = answered_with(answer).unwrap_err();
            assert!(matches!(error, ClientError::Malformed { .. }), "{error:?}");
            assert!(error.to_string().contains(what), "{error} instead of {what}");
        }
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
