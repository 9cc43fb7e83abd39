//! The shim in a VMM, from outside.

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use cofolio_shim::protocol::{Head, Hello, Outcome, Plain, Run, kind};

use crate::vm::socket::{receive_with, send_with};

/// How long a shim may take for an answer. A run takes some milliseconds at most.
const ANSWER: Duration = Duration::from_secs(30);

/// A connection to a shim.
#[derive(Debug)]
pub(super) struct Shim {
    socket: UnixStream,
    /// Pools and images that it has, by number.
    pools: HashSet<u32>,
}

impl Shim {
    /// Asks where the guest's memory is.
    pub(super) fn new(socket: UnixStream) -> io::Result<(Self, Hello)> {
        socket.set_read_timeout(Some(ANSWER))?;
        socket.set_write_timeout(Some(ANSWER))?;
        let mut shim = Self { socket, pools: HashSet::new() };
        shim.send(Head { kind: kind::HELLO, ..Head::default() }, None)?;
        let mut hello = [Hello::default()];
        shim.socket.read_exact(Plain::bytes_mut(&mut hello))?;
        match hello[0].errno {
            0 => Ok((shim, hello[0])),
            errno => Err(error_of(errno)),
        }
    }

    /// The files that it has of an earlier merger, with their numbers: at most so many.
    pub(super) fn kept(&mut self, most: usize) -> io::Result<Vec<(u32, File)>> {
        self.send(Head { kind: kind::POOLS, ..Head::default() }, None)?;
        let mut count = [0_u32];
        self.socket.read_exact(Plain::bytes_mut(&mut count))?;
        let count = usize::try_from(count[0]).unwrap_or(usize::MAX);
        if count > most {
            let what = format!("it has {count} pools, more than its guest's memory can need");
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        }
        let one = |_| {
            let mut head = [Head::default()];
            let file = receive_with(&self.socket, Plain::bytes_mut(&mut head))?;
            let file = file.ok_or(io::ErrorKind::InvalidData)?;
            Ok((head[0].argument, File::from(file)))
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
        self.socket.write_all(Plain::bytes(runs))?;
        let mut outcomes = vec![Outcome::default(); runs.len()];
        self.socket.read_exact(Plain::bytes_mut(&mut outcomes))?;
        Ok(outcomes)
    }

    fn send(&mut self, head: Head, file: Option<&File>) -> io::Result<()> {
        let heads = [head];
        match file {
            Some(file) => send_with(&self.socket, Plain::bytes(&heads), file.as_fd()),
            None => self.socket.write_all(Plain::bytes(&heads)),
        }
    }

    fn errno(&mut self) -> io::Result<()> {
        let mut errno = [0_u32];
        self.socket.read_exact(Plain::bytes_mut(&mut errno))?;
        if errno[0] == 0 { Ok(()) } else { Err(error_of(errno[0])) }
    }
}

fn error_of(errno: u32) -> io::Error {
    io::Error::from_raw_os_error(i32::try_from(errno).unwrap_or(0))
}
