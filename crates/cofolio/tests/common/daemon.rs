//! A daemon and requests to it.

use std::fs::{self, DirEntry};
use std::io::{BufRead as _, BufReader, Lines};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{ChildStderr, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::machine::until;
use super::{Killed, Sandbox};

/// A running `cofolio serve`; killed when it is dropped.
pub(crate) struct Daemon {
    pub(crate) child: Killed,
    pub(crate) socket: PathBuf,
    /// Address and port.
    pub(crate) tcp: Option<String>,
    said: Lines<BufReader<ChildStderr>>,
}

impl Daemon {
    /// With a period of a second unless the arguments have one.
    pub(crate) fn start(sandbox: &Sandbox, args: &[&str]) -> Self {
        let mut args = args.to_vec();
        if !args.contains(&"--period") {
            args.extend(["--period", "1"]);
        }
        Self::with(sandbox, &args)
    }

    /// With these arguments and no others.
    pub(crate) fn with(sandbox: &Sandbox, args: &[&str]) -> Self {
        let args: Vec<&str> = ["serve"].iter().chain(args).copied().collect();
        let sockets = 1 + usize::from(args.contains(&"--listen"));
        Self::of(sandbox, &mut sandbox.command(&args), sockets)
    }

    /// By a command that becomes the daemon, which says of so many sockets that it listens there.
    pub(crate) fn of(sandbox: &Sandbox, command: &mut Command, sockets: usize) -> Self {
        let mut child = Killed::start(command.stderr(Stdio::piped()));
        let mut tcp = None;
        let mut said = BufReader::new(child.0.stderr.take().unwrap()).lines();
        let lines = said.by_ref().map_while(Result::ok);
        for line in lines.filter(|line| line.contains("listening at")).take(sockets) {
            let address = line.split_once("://").map(|(_, at)| at.trim_end_matches('/'));
            tcp = tcp.or(address.map(str::to_owned));
        }
        Self { child, socket: sandbox.path("run/cofolio.sock"), tcp, said }
    }

    /// Stops it with all threads, each of which the kernel stops on its own.
    pub(crate) fn pause(&self) {
        let id = Pid::from_child(&self.child.0);
        kill_process(id, Signal::STOP).unwrap();
        let is_stopped = |thread: std::io::Result<DirEntry>| {
            let status = fs::read_to_string(thread.unwrap().path().join("status")).unwrap();
            status.contains("\nState:\tT")
        };
        until("it goes on", || {
            let mut threads = fs::read_dir(format!("/proc/{}/task", id.as_raw_pid())).unwrap();
            threads.all(is_stopped).then_some(())
        });
    }

    pub(crate) fn go_on(&self) {
        kill_process(Pid::from_child(&self.child.0), Signal::CONT).unwrap();
    }

    /// Has it read its settings again. Gives what it says about that.
    pub(crate) fn reload(&mut self) -> String {
        kill_process(Pid::from_child(&self.child.0), Signal::HUP).unwrap();
        self.next_line()
    }

    /// What it says next.
    pub(crate) fn next_line(&mut self) -> String {
        self.said.next().unwrap().unwrap()
    }

    pub(crate) fn get(&self, path: &str) -> (u16, String) {
        let stream = UnixStream::connect(&self.socket).unwrap();
        request(stream, &format!("GET {path} HTTP/1.0\r\n\r\n"))
    }

    pub(crate) fn json(&self, path: &str) -> Value {
        let (status, body) = self.get(path);
        assert_eq!(status, 200, "{path}: {body}");
        serde_json::from_str(&body).unwrap()
    }

    pub(crate) fn sample(&self) -> Value {
        let (status, body) = self.post("/v1/sample", "");
        assert_eq!(status, 200, "{body}");
        serde_json::from_str(&body).unwrap()
    }

    pub(crate) fn post(&self, path: &str, body: &str) -> (u16, String) {
        let stream = UnixStream::connect(&self.socket).unwrap();
        let length = body.len();
        let head = format!("POST {path} HTTP/1.0\r\nContent-Length: {length}\r\n\r\n");
        request(stream, &(head + body))
    }
}

/// Sends a request; gives the status and the body.
pub(crate) fn request(
    mut stream: impl std::io::Read + std::io::Write,
    text: &str,
) -> (u16, String) {
    stream.write_all(text.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{answer}"));
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}
