//! QEMU's control protocol (docs/interop/qmp-spec.rst): a JSON document a line.

use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use serde_json::{Value, json};

use super::socket::{Patient, peer, send_with};

/// Longest answer, in bytes.
const ANSWER_BYTES_MAX: u64 = 4 << 20;
/// How long QEMU may take to answer. Its main loop is busy while it starts.
const ANSWER_SECONDS_MAX: u64 = 10;
/// Most events before an answer. More would keep the caller busy.
const EVENTS_MAX: usize = 1000;

/// A connection to a QEMU. It serves one at a time.
#[derive(Debug)]
pub struct Qmp {
    reader: BufReader<Patient>,
}

impl Qmp {
    /// Greets.
    ///
    /// # Errors
    /// Those of the socket; `InvalidData` if no QEMU is there.
    pub fn new(socket: UnixStream) -> io::Result<Self> {
        let socket = Patient::new(socket, Duration::from_secs(ANSWER_SECONDS_MAX))?;
        let mut qmp = Self { reader: BufReader::new(socket) };
        let greeting = qmp.read().map_err(|error| match error.kind() {
            io::ErrorKind::TimedOut => io::Error::new(
                io::ErrorKind::TimedOut,
                format!(
                    "nobody answers in {ANSWER_SECONDS_MAX} s: QEMU serves one client at a time, \
                     and another one may have this socket"
                ),
            ),
            _ => error,
        })?;
        if greeting.get("QMP").is_none() {
            return Err(invalid(format!(
                "its greeting is not that of QEMU's control protocol: {greeting}"
            )));
        }
        qmp.call("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// What a command returns. Events that come before are dropped.
    ///
    /// # Errors
    /// Those of the socket; `InvalidData` with QEMU's words if it refuses.
    pub fn call(&mut self, command: &str, arguments: Value) -> io::Result<Value> {
        let call = json!({ "execute": command, "arguments": arguments });
        self.reader.get_ref().socket().write_all(format!("{call}\n").as_bytes())?;
        self.answer(command)
    }

    /// The process that listens there.
    pub(super) fn peer(&self) -> Option<u32> {
        peer(self.reader.get_ref().socket())
    }

    /// Passes a descriptor to QEMU, under this name. Fails like [`Qmp::call`].
    pub fn pass(&mut self, name: &str, fd: BorrowedFd<'_>) -> io::Result<()> {
        let call = json!({ "execute": "getfd", "arguments": { "fdname": name } });
        let call = format!("{call}\n");
        send_with(self.reader.get_ref().socket(), call.as_bytes(), fd)?;
        self.answer("getfd").map(drop)
    }

    fn answer(&mut self, command: &str) -> io::Result<Value> {
        self.reader.get_mut().begin();
        for _ in 0..=EVENTS_MAX {
            let mut answer = self.read()?;
            if let Some(value) = answer.get_mut("return") {
                return Ok(value.take());
            }
            if let Some(error) = answer.get("error") {
                let words = error.get("desc").and_then(Value::as_str).unwrap_or_default();
                return Err(invalid(format!("{command}: {words}")));
            }
        }
        Err(invalid(format!("{command}: no answer after {EVENTS_MAX} events")))
    }

    fn read(&mut self) -> io::Result<Value> {
        let mut line = Vec::new();
        let read = self.reader.by_ref().take(ANSWER_BYTES_MAX).read_until(b'\n', &mut line);
        read.map_err(|error| match error.kind() {
            io::ErrorKind::TimedOut => {
                let what = format!("QEMU has not answered for {ANSWER_SECONDS_MAX} s");
                io::Error::new(io::ErrorKind::TimedOut, what)
            }
            _ => error,
        })?;
        if line.is_empty() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        serde_json::from_slice(&line).map_err(|error| invalid(error.to_string()))
    }
}

fn invalid(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests may panic")]

    use super::*;

    /// Answers as QEMU 7.2 was seen to.
    fn answering(lines: &'static [&'static str]) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().unwrap();
        std::thread::spawn(move || {
            let mut reader = BufReader::new(theirs.try_clone().unwrap());
            let mut theirs = theirs;
            let greeting = r#"{"QMP": {"version": {"qemu": {"micro": 22, "minor": 2, "major": 7}, "package": ""}, "capabilities": ["oob"]}}"#;
            writeln!(theirs, "{greeting}").unwrap();
            let mut asked = String::new();
            reader.read_line(&mut asked).unwrap();
            writeln!(theirs, r#"{{"return": {{}}}}"#).unwrap();
            for line in lines {
                asked.clear();
                reader.read_line(&mut asked).unwrap();
                writeln!(theirs, "{line}").unwrap();
            }
        });
        ours
    }

    #[test]
    fn events_are_no_answers() {
        let mut qmp = Qmp::new(answering(&[
            "{\"event\": \"BALLOON_CHANGE\", \"data\": {\"actual\": 1}, \"timestamp\": {}}\n{\"return\": {\"actual\": 536870912}}",
            r#"{"error": {"class": "GenericError", "desc": "No balloon device has been activated"}}"#,
        ]))
        .unwrap();
        assert_eq!(qmp.call("query-balloon", json!({})).unwrap()["actual"], 536_870_912);
        let error = qmp.call("balloon", json!({"value": 1})).unwrap_err();
        assert_eq!(error.to_string(), "balloon: No balloon device has been activated");
        assert!(qmp.call("stop", json!({})).is_err());
    }
}
