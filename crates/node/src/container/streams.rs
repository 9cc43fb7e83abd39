//! Standard input, output and error of a container: new pipes, never a file of the host.
//!
//! A runtime hands its descriptors to the first process. crun also changes the owner of the files
//! behind them, and root inside may change their mode: of `/dev/null`, a terminal or a file of the
//! host. A pipe can be reopened through `/proc/self/fd`, to read what others wrote to it. So the
//! container gets pipes of its own, and threads copy between them and the caller's files.

use std::fs::File;
use std::io::{self, PipeReader, PipeWriter, Read as _, Write as _};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::JoinHandle;

use cofolio_store::task::{Cancel, Cancelled};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{Mode, OFlags, fstat};
use rustix::io::{Errno, retry_on_intr};

/// A pipe holds as much.
const BUFFER_BYTES: usize = 64 << 10;

/// What a container is connected with.
#[derive(Debug, Clone)]
pub enum Streams {
    /// This process's own three descriptors: the runtime gives the container its own terminal.
    Terminal,
    /// This process's output and error, and its input where `input` says so, else an empty one.
    Ours {
        /// Whether the container can read this process's standard input.
        input: bool,
    },
    /// Output and error go to a file, input is empty.
    File {
        /// The file. It is appended to.
        path: PathBuf,
        /// When the file has this size it is renamed to `<path>.1` and a new one is begun.
        bytes_max: u64,
    },
}

/// Threads that copy what a container says.
#[derive(Debug, Default)]
pub struct Copies(Vec<JoinHandle<io::Result<()>>>);

impl Copies {
    /// Waits until everything is copied (no process has the pipes any more), or until it is given up. Fails if some
    /// of it could not be written.
    pub(crate) fn finish(mut self, given_up: &Cancel) -> io::Result<()> {
        let all = || Ok(self.0.iter().all(JoinHandle::is_finished).then_some(()));
        given_up
            .wait_for(all)
            .map_err(|Cancelled| io::Error::other("somebody does not read it"))?;
        let copied = |copy: JoinHandle<_>| copy.join().unwrap_or_else(|it| resume_unwind(it));
        self.0.drain(..).try_for_each(copied)
    }

    /// A pipe whose content goes to `to`.
    fn output(&mut self, to: BorrowedFd<'_>) -> io::Result<PipeWriter> {
        let (reader, writer) = io::pipe()?;
        self.0.push(copy(reader, to.try_clone_to_owned()?)?);
        Ok(writer)
    }

    /// A pipe whose content goes to a file, as with [`Streams::File`].
    pub(crate) fn file(&mut self, path: &Path, bytes_max: u64) -> io::Result<PipeWriter> {
        let (file, path) = (append(path)?, path.to_owned());
        let (reader, writer) = io::pipe()?;
        self.0.push(thread(move || keep(reader, file, &path, bytes_max))?);
        Ok(writer)
    }
}

impl Streams {
    /// Sets the streams of `command`. Copying ends when `command` is dropped and its processes end.
    pub(crate) fn connect(&self, command: &mut Command) -> io::Result<Copies> {
        let mut copies = Copies::default();
        let (empty, _) = io::pipe()?;
        match self {
            Self::Terminal => {}
            Self::Ours { input } => {
                let (stdin, stdout, stderr) = (io::stdin(), io::stdout(), io::stderr());
                command.stdin(match *input {
                    false => empty,
                    true => {
                        let (reader, writer) = io::pipe()?;
                        // Not joined: it may read from a terminal for ever.
                        copy(stdin.as_fd().try_clone_to_owned()?, writer)?;
                        reader
                    }
                });
                let output = copies.output(stdout.as_fd())?;
                // Lines keep their order where both go to one file.
                command.stderr(match same_file(stdout.as_fd(), stderr.as_fd()) {
                    true => output.try_clone()?,
                    false => copies.output(stderr.as_fd())?,
                });
                command.stdout(output);
            }
            Self::File { path, bytes_max } => {
                let writer = copies.file(path, *bytes_max)?;
                command.stdin(empty).stdout(writer.try_clone()?).stderr(writer);
            }
        }
        Ok(copies)
    }
}

fn same_file(a: BorrowedFd<'_>, b: BorrowedFd<'_>) -> bool {
    let inode = |fd| fstat(fd).map(|stat| (stat.st_dev, stat.st_ino));
    inode(a).is_ok_and(|a| inode(b) == Ok(a))
}

fn thread(
    work: impl FnOnce() -> io::Result<()> + Send + 'static,
) -> io::Result<JoinHandle<io::Result<()>>> {
    std::thread::Builder::new().name("copy".to_owned()).spawn(work)
}

pub(super) fn copy(
    from: impl Into<OwnedFd>,
    to: impl Into<OwnedFd>,
) -> io::Result<JoinHandle<io::Result<()>>> {
    let (from, to) = (from.into(), to.into());
    // When one side is gone the other learns it: both are closed here. Not `io::copy`, which splices: the kernel
    // then moves a file's position at the end only, and whoever writes to that file meanwhile is overwritten.
    thread(move || {
        let mut buffer = vec![0; BUFFER_BYTES];
        loop {
            let mut ends =
                [PollFd::new(&from, PollFlags::IN), PollFd::new(&to, PollFlags::empty())];
            retry_on_intr(|| poll(&mut ends, None))?;
            // Nobody reads any more. The writer's next write fails, as it would on the reader's own pipe.
            if !ends[1].revents().is_empty() {
                return Ok(());
            }
            let read = || rustix::io::read(&from, &mut buffer[..]);
            let length = when_ready(&from, PollFlags::IN, read)?;
            if length == 0 {
                return Ok(());
            }
            let mut left = &buffer[..length];
            while !left.is_empty() {
                let write = || rustix::io::write(&to, left);
                left = match when_ready(&to, PollFlags::OUT, write) {
                    Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(()),
                    written => &left[written?..],
                };
            }
        }
    })
}

/// Calls until there is an answer: whoever shares a terminal or a pipe may make it non-blocking.
fn when_ready<T>(
    fd: &OwnedFd,
    ready: PollFlags,
    mut call: impl FnMut() -> rustix::io::Result<T>,
) -> io::Result<T> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => {
                retry_on_intr(|| poll(&mut [PollFd::new(fd, ready)], None))?;
            }
            other => return Ok(other?),
        }
    }
}

/// Opens a file to append to, or makes it. A FIFO that nobody reads from is refused, not waited for.
pub fn append(path: &Path) -> io::Result<File> {
    use OFlags as O;
    let flags = O::WRONLY | O::CREATE | O::APPEND | O::NONBLOCK | O::NOCTTY | O::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::from_raw_mode(0o666))?;
    rustix::fs::fcntl_setfl(&file, O::APPEND)?;
    Ok(file.into())
}

/// Copies to a file that restarts at its maximum size. Lost output does not stop a container: the
/// file gets a mark where some is missing, and if that is its end, the error is returned.
fn keep(mut from: PipeReader, mut file: File, path: &Path, bytes_max: u64) -> io::Result<()> {
    let mut size = file.metadata().map_or(0, |metadata| metadata.len());
    let mut buffer = vec![0; BUFFER_BYTES];
    let mut written = Ok(());
    loop {
        let length = from.read(&mut buffer)?;
        if length == 0 {
            return written;
        }
        if size + length as u64 > bytes_max && size > 0 {
            let mut old = path.as_os_str().to_owned();
            old.push(".1");
            let renamed = match std::fs::rename(path, old) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
                other => other,
            };
            match renamed.and_then(|()| append(path)) {
                Ok(new) => (file, size) = (new, 0),
                Err(error) => {
                    written = Err(error);
                    continue;
                }
            }
        }
        size += length as u64;
        if let Err(error) = written {
            written = writeln!(file, "\n[cofolio: output is missing here: {error}]");
        }
        written = written.and_then(|()| file.write_all(&buffer[..length]));
    }
}

#[cfg(test)]
mod tests;
