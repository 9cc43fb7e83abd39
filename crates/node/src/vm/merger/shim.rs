//! The shim in a VMM, from outside.

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use cofolio_shim::message::{receive, send};
use cofolio_shim::protocol::{Head, Hello, Outcome, Plain, RUN_PAGES_MAX, Run, kind};
use rustix::io::Errno;

use crate::vm::socket::Patient;

/// How long a shim may take for an answer. A run takes some milliseconds at most.
const ANSWER: Duration = Duration::from_secs(10);

/// A connection to a shim.
#[derive(Debug)]
pub(super) struct Shim {
    socket: Patient,
    /// Pools and images that it has, by number.
    pools: HashSet<u32>,
}

impl Shim {
    /// Asks where the guest's memory is.
    pub(super) fn new(socket: UnixStream) -> io::Result<(Self, Hello)> {
        let mut shim = Self { socket: Patient::new(socket, ANSWER)?, pools: HashSet::new() };
        shim.send(Head { kind: kind::HELLO, ..Head::default() }, None)?;
        let mut hello = [Hello::default()];
        shim.receive(Plain::bytes_mut(&mut hello))?;
        match hello[0].errno {
            0 => Ok((shim, hello[0])),
            errno => Err(match i32::try_from(errno).map(Errno::from_raw_os_error) {
                Ok(Errno::INVAL) => unsupported("this kernel has no UFFDIO_MOVE (Linux 6.8)"),
                Ok(Errno::NOENT) => unsupported("its shim has not found its guest's memory"),
                _ => error_of(errno),
            }),
        }
    }

    /// The files that it has of an earlier merger, with their numbers: at most so many.
    pub(super) fn kept(&mut self, most: usize) -> io::Result<Vec<(u32, File)>> {
        self.send(Head { kind: kind::POOLS, ..Head::default() }, None)?;
        let mut count = [0_u32];
        self.receive(Plain::bytes_mut(&mut count))?;
        let count = usize::try_from(count[0]).unwrap_or(usize::MAX);
        if count > most {
            let what = format!("it has {count} pools, more than its guest's memory can need");
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        }
        self.socket.begin();
        let one = |_| {
            let (head, file) = self.socket.in_time().and_then(receive).map_err(late)?;
            let file = file.ok_or(io::ErrorKind::InvalidData)?;
            Ok((head.argument, File::from(file)))
        };
        let kept: Vec<(u32, File)> = (0..count).map(one).collect::<io::Result<_>>()?;
        self.pools.extend(kept.iter().map(|(number, _)| *number));
        Ok(kept)
    }

    /// Gives it a pool, unless it has it.
    pub(super) fn give(&mut self, number: u32, pages: u32, file: &File) -> io::Result<()> {
        if self.pools.contains(&number) {
            return Ok(());
        }
        let head = Head { kind: kind::POOL, count: pages, argument: number, reserved: 0 };
        self.send(head, Some(file))?;
        self.errno()?;
        self.pools.insert(number);
        Ok(())
    }

    /// Has it give up a pool that it has. What is mapped of it stays.
    pub(super) fn forget(&mut self, number: u32) -> io::Result<()> {
        if !self.pools.remove(&number) {
            return Ok(());
        }
        self.send(Head { kind: kind::FORGET, argument: number, ..Head::default() }, None)?;
        self.errno()
    }

    /// Merges or converts runs, at most [`cofolio_shim::protocol::RUNS_MAX`]: what came of each.
    pub(super) fn ask(&mut self, kind: u32, runs: &[Run]) -> io::Result<Vec<Outcome>> {
        let count = u32::try_from(runs.len()).unwrap_or(u32::MAX);
        self.send(Head { kind, count, ..Head::default() }, None)?;
        self.socket.socket().write_all(Plain::bytes(runs))?;
        let mut outcomes = vec![Outcome::default(); runs.len()];
        self.receive(Plain::bytes_mut(&mut outcomes))?;
        if let Some((run, outcome)) = runs.iter().zip(&outcomes).find(|it| !is_possible(it)) {
            let what = format!("its shim answers {outcome:?} to {run:?}");
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        }
        Ok(outcomes)
    }

    /// Fills `bytes` with an answer.
    fn receive(&mut self, bytes: &mut [u8]) -> io::Result<()> {
        self.socket.begin();
        self.socket.read_exact(bytes).map_err(late)
    }

    fn send(&mut self, head: Head, file: Option<&File>) -> io::Result<()> {
        send(self.socket.socket(), head, file.map(File::as_fd))
    }

    fn errno(&mut self) -> io::Result<()> {
        let mut errno = [0_u32];
        self.receive(Plain::bytes_mut(&mut errno))?;
        if errno[0] == 0 { Ok(()) } else { Err(error_of(errno[0])) }
    }
}

/// Whether an outcome is one of a run: it has no more pages than that.
fn is_possible((run, outcome): &(&Run, &Outcome)) -> bool {
    let pages = run.pages as usize;
    let all = outcome.count() + u32::from(outcome.changed) + u32::from(outcome.busy);
    all <= run.pages && !(pages..RUN_PAGES_MAX).any(|page| outcome.is_merged(page))
}

fn late(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => {
            io::Error::new(io::ErrorKind::TimedOut, "its shim does not answer")
        }
        _ => error,
    }
}

fn unsupported(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, why)
}

fn error_of(errno: u32) -> io::Error {
    io::Error::from_raw_os_error(i32::try_from(errno).unwrap_or(Errno::IO.raw_os_error()))
}
