//! The control protocol of Cloud Hypervisor and Firecracker: HTTP/1.1 with JSON, at a unix socket.

use std::io::{self, BufRead, BufReader, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;

use super::socket::{self, Patient};

/// Longest line of an answer's head, and most of its lines.
const LINE_BYTES_MAX: u64 = 8 << 10;
const LINES_MAX: usize = 64;
/// Longest content of an answer.
const BODY_BYTES_MAX: u64 = 4 << 20;
/// How long an answer may take.
const ANSWER_SECONDS_MAX: u64 = 10;

/// The control socket of a VMM. Each request has a connection of its own, so that it keeps nobody
/// else out.
#[derive(Debug, Clone)]
pub(super) struct Api {
    socket: PathBuf,
}

impl Api {
    /// That of a socket, without asking anything.
    pub(super) fn at(socket: &Path) -> Self {
        Self { socket: socket.to_owned() }
    }

    /// The process that listens there, if one does.
    pub(super) fn peer(&self) -> Option<u32> {
        socket::peer(&socket::connect_path(&self.socket).ok()?)
    }

    /// The VMM's answer; null if the body is empty.
    ///
    /// # Errors
    /// Those of the socket; `InvalidData` with the VMM's words if it refuses.
    pub(super) fn get(&self, target: &str) -> io::Result<Value> {
        self.ask("GET", target, None)
    }

    /// Fails like [`Api::get`].
    pub(super) fn send(&self, method: &str, target: &str, body: &Value) -> io::Result<()> {
        self.ask(method, target, Some(body)).map(drop)
    }

    fn ask(&self, method: &str, target: &str, body: Option<&Value>) -> io::Result<Value> {
        let socket = socket::connect_path(&self.socket)?;
        let socket = Patient::new(socket, Duration::from_secs(ANSWER_SECONDS_MAX))?;
        exchange(socket, method, target, body)
    }
}

fn exchange(
    socket: Patient,
    method: &str,
    target: &str,
    body: Option<&Value>,
) -> io::Result<Value> {
    let mut request = format!("{method} {target} HTTP/1.1\r\nHost: localhost\r\n");
    if let Some(body) = body.map(Value::to_string) {
        let length = body.len();
        request +=
            &format!("Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}");
    } else {
        request += "\r\n";
    }
    socket.socket().write_all(request.as_bytes())?;
    let mut reader = BufReader::new(socket);
    let first = line(&mut reader)?;
    let mut words = first.split(' ');
    let code: Option<u16> = match (words.next(), words.next()) {
        (Some(version), Some(code)) if version.starts_with("HTTP/1.") => code.parse().ok(),
        _ => None,
    };
    let code = code.ok_or_else(|| invalid(format!("its answer is not one of HTTP: {first:?}")))?;
    let mut length = 0;
    for number in 0.. {
        let header = line(&mut reader)?;
        if header.is_empty() {
            break;
        }
        if number >= LINES_MAX {
            return Err(invalid("its answer has too many headers".to_owned()));
        }
        if let Some((name, value)) = header.split_once(':')
            && name.eq_ignore_ascii_case("content-length")
        {
            length = value.trim().parse().map_err(|_| invalid(format!("bad header {header:?}")))?;
        }
    }
    if length > BODY_BYTES_MAX {
        return Err(invalid(format!("its answer has {length} bytes")));
    }
    let mut text = Vec::new();
    reader.take(length).read_to_end(&mut text)?;
    if text.len() as u64 != length {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    if !(200..300).contains(&code) {
        let words = words_of(&text);
        return Err(invalid(format!("{method} {target}: {words}")));
    }
    if text.is_empty() {
        return Ok(Value::Null);
    }
    serde_json::from_slice(&text).map_err(|error| invalid(format!("{method} {target}: {error}")))
}

/// The text of a VMM's error: Firecracker sends an object, Cloud Hypervisor a list of causes.
fn words_of(text: &[u8]) -> String {
    let said: Value = serde_json::from_slice(text).unwrap_or_default();
    match (&said["fault_message"], said.as_array()) {
        (Value::String(words), _) => words.clone(),
        (_, Some(causes)) => causes.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(": "),
        _ => String::from_utf8_lossy(text).trim().to_owned(),
    }
}

fn line(reader: &mut impl BufRead) -> io::Result<String> {
    let mut line = Vec::new();
    reader.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut line)?;
    if !line.ends_with(b"\n") {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(String::from_utf8_lossy(&line).trim_end().to_owned())
}

fn invalid(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

#[cfg(test)]
pub(super) mod tests {
    #![allow(clippy::unwrap_used, reason = "tests may panic")]

    use std::os::unix::net::{UnixListener, UnixStream};
    use std::thread::JoinHandle;

    use super::*;

    /// A request that is expected, and the answer to it: status and content.
    pub(in crate::vm) type Exchange = (&'static str, Value, &'static str, &'static str);

    /// Answers one request after the other as a VMM was seen to, and fails at another one.
    pub(in crate::vm) fn replay(socket: &Path, exchanges: Vec<Exchange>) -> JoinHandle<()> {
        let listener = UnixListener::bind(socket).unwrap();
        std::thread::spawn(move || {
            for (wanted, body, status, content) in exchanges {
                // Some connect only to see who listens.
                let (client, first) = loop {
                    let (client, _) = listener.accept().unwrap();
                    let first = line(&mut BufReader::with_capacity(1, &client));
                    if let Ok(first) = first {
                        break (client, first);
                    }
                };
                assert_eq!(first, format!("{wanted} HTTP/1.1"));
                let mut reader = BufReader::new(&client);
                let mut length = 0;
                loop {
                    let header = line(&mut reader).unwrap();
                    if header.is_empty() {
                        break;
                    }
                    if let Some(value) = header.strip_prefix("Content-Length: ") {
                        length = value.parse().unwrap();
                    }
                }
                let mut text = vec![0; length];
                reader.read_exact(&mut text).unwrap();
                let found = serde_json::from_slice(&text).unwrap_or(Value::Null);
                assert_eq!(found, body, "{wanted}");
                let mut answer = format!(
                    "HTTP/1.1 {status} \r\nServer: Firecracker API\r\nConnection: keep-alive\r\n"
                );
                if !content.is_empty() {
                    let length = content.len();
                    answer +=
                        &format!("Content-Type: application/json\r\nContent-Length: {length}\r\n");
                }
                (&client).write_all(format!("{answer}\r\n{content}").as_bytes()).unwrap();
            }
        })
    }

    #[test]
    fn what_is_refused_is_said_in_the_words_of_the_vmm() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("api");
        let fault = r#"{"fault_message":"No balloon device found."}"#;
        let server = replay(
            &socket,
            vec![
                ("GET /", Value::Null, "200", r#"{"state":"Running"}"#),
                ("PUT /x", serde_json::json!({"a": 1}), "204", ""),
                ("GET /balloon", Value::Null, "400", fault),
                ("GET /nothing", Value::Null, "404", r#"["Not Found"]"#),
                ("GET /text", Value::Null, "500", "out of order"),
            ],
        );
        let api = Api::at(&socket);
        assert_eq!(api.get("/").unwrap()["state"], "Running");
        api.send("PUT", "/x", &serde_json::json!({"a": 1})).unwrap();
        let error = api.get("/balloon").unwrap_err().to_string();
        assert_eq!(error, "GET /balloon: No balloon device found.");
        assert_eq!(api.get("/nothing").unwrap_err().to_string(), "GET /nothing: Not Found");
        assert_eq!(api.get("/text").unwrap_err().to_string(), "GET /text: out of order");
        server.join().unwrap();
        assert!(api.get("/").is_err());
    }

    /// The process behind a socket is not trusted with this program's memory or time.
    #[test]
    fn an_answer_has_limits() {
        let answers = [
            "HTTP/1.1 200 \r\nContent-Length: 99999999999\r\n\r\n".to_owned(),
            "HTTP/1.1 200 \r\nContent-Length: -1\r\n\r\n".to_owned(),
            "HTTP/1.1 200 \r\nContent-Length: 5\r\n\r\n{}".to_owned(),
            format!("HTTP/1.1 200 \r\n{}\r\n", "a: b\r\n".repeat(100)),
            format!("HTTP/1.1 200 \r\nX: {}\r\n\r\n", "x".repeat(10_000)),
            "{\"QMP\": {}}\r\n".to_owned(),
            String::new(),
        ];
        for answer in answers {
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            theirs.write_all(answer.as_bytes()).unwrap();
            theirs.shutdown(std::net::Shutdown::Write).unwrap();
            let ours = Patient::new(ours, Duration::from_secs(60)).unwrap();
            assert!(exchange(ours, "GET", "/", None).is_err(), "{answer:.60}");
        }
    }
}
