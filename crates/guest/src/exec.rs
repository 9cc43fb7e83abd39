//! Processes that `vm exec` starts beside the image's program.
//!
//! The host plugs in a connected virtio port for each. When the client exits or is killed, the port hangs
//! up, and the guest kills the process.

use std::convert::Infallible;
use std::error::Error;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use cofolio_guest::frame::{Decoder, Frame, INPUT_BYTES_MAX};
use cofolio_guest::{EXEC_PORT, Process};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use rustix::fs::{CWD, Dir, Mode, OFlags, openat};
use rustix::io::{Errno, ioctl_fionbio, retry_on_intr};
use rustix::process::Signal;
use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer, openpt, unlockpt};

use crate::children::Child;
use crate::workload::{self, resize};

/// How often a new port is looked at until it has its name and is connected.
const LOOK: Duration = Duration::from_millis(10);
/// So often at most.
const LOOKS_MAX: u32 = 1000;
/// Bytes read at once.
const PIECE_BYTES: usize = 32 << 10;
/// With so many bytes for the host, no more output is read.
const UNSENT_BYTES_MAX: usize = 64 << 10;

type Result<T = (), E = Box<dyn Error>> = std::result::Result<T, E>;

/// Where ports appear. Programs of the image may mount something over these.
struct Places {
    devices: OwnedFd,
    ports: OwnedFd,
}

/// Starts processes beside `own` from now on.
pub(crate) fn begin(own: Process) -> io::Result<()> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let open = |path| openat(CWD, path, flags, Mode::empty());
    let places = Places { devices: open("/dev")?, ports: open("/sys/class/virtio-ports")? };
    let watch = inotify::init(CreateFlags::CLOEXEC)?;
    inotify::add_watch(&watch, "/dev", WatchFlags::CREATE)?;
    thread::Builder::new().spawn(move || listen(&watch, places, own)).map(drop)
}

fn listen(watch: &OwnedFd, places: Places, own: Process) -> io::Result<Infallible> {
    let shared = Arc::new((places, own));
    let found = |name: &[u8]| {
        // The first port is the console's, and has no name.
        if name.starts_with(b"vport") && !name.ends_with(b"p0") {
            let (name, shared) = (name.to_owned(), shared.clone());
            let serve = move || serve(OsStr::from_bytes(&name).as_ref(), &shared.0, &shared.1);
            // The host gives up after some time.
            let _ = thread::Builder::new().spawn(move || drop(serve()));
        }
    };
    for entry in Dir::read_from(&shared.0.devices)?.flatten() {
        found(entry.file_name().to_bytes());
    }
    let mut buffer = [MaybeUninit::uninit(); 2048];
    let mut events = inotify::Reader::new(watch, &mut buffer);
    loop {
        if let Some(name) = events.next()?.file_name() {
            found(name.to_bytes());
        }
    }
}

/// Serves a port until it hangs up, if it is one for a process.
fn serve(device: &Path, places: &Places, own: &Process) -> Result {
    // The kernel shows a port before it can be opened, and names it afterwards.
    let name = soon(|| {
        let mut name = String::new();
        let (path, flags) = (device.join("name"), OFlags::RDONLY | OFlags::CLOEXEC);
        let file = openat(&places.ports, path, flags, Mode::empty()).ok()?;
        File::from(file).read_to_string(&mut name).ok()?;
        Some(name.trim().to_owned()).filter(|name| !name.is_empty())
    })?;
    if !name.starts_with(EXEC_PORT) {
        return Ok(());
    }
    // Only one can open it, should it have been found twice.
    let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let port = openat(&places.devices, device, flags, Mode::empty())?;
    soon(|| {
        let mut fds = [PollFd::new(&port, PollFlags::OUT)];
        poll(&mut fds, Some(&Timespec::default())).ok()?;
        (!fds[0].revents().contains(PollFlags::HUP)).then_some(())
    })?;
    Session::new(port, &name, own).run()
}

/// Polls until the host and the kernel have set the port up.
fn soon<T>(mut find: impl FnMut() -> Option<T>) -> Result<T> {
    for _ in 0..LOOKS_MAX {
        if let Some(found) = find() {
            return Ok(found);
        }
        thread::sleep(LOOK);
    }
    Err("the port is not connected".into())
}

/// A process, and its port.
struct Session<'s> {
    port: OwnedFd,
    name: &'s str,
    own: &'s Process,
    decoder: Decoder,
    /// Encoded frames for the host.
    unsent: Vec<u8>,
    running: Option<Running>,
}

/// Event sources of a session.
#[derive(Clone, Copy)]
enum Source {
    Port,
    End,
    Input,
    Output(usize),
}

impl<'s> Session<'s> {
    fn new(port: OwnedFd, name: &'s str, own: &'s Process) -> Self {
        Self { port, name, own, decoder: Decoder::default(), unsent: Vec::new(), running: None }
    }

    /// Until the host has gone, or talks nonsense.
    fn run(mut self) -> Result {
        loop {
            for (source, events) in self.wait()? {
                match source {
                    Source::Port if events.contains(PollFlags::HUP) => return Ok(()),
                    Source::Port => self.exchange(events)?,
                    Source::End => self.end()?,
                    Source::Input => self.give()?,
                    Source::Output(number) => self.take(number)?,
                }
            }
            self.finish()?;
        }
    }

    fn wait(&self) -> Result<Vec<(Source, PollFlags)>> {
        let mut port = PollFlags::IN;
        port.set(PollFlags::OUT, !self.unsent.is_empty());
        let mut sources = vec![(Source::Port, self.port.as_fd(), port)];
        if let Some(running) = &self.running {
            if running.status.is_none() {
                sources.push((Source::End, running.child.handle.as_fd(), PollFlags::IN));
            }
            if let Some(input) = running.input.as_ref().filter(|_| !running.pending.is_empty()) {
                sources.push((Source::Input, input.as_fd(), PollFlags::OUT));
            }
            for (number, output) in running.outputs.iter().enumerate() {
                if let Some(output) = output.as_ref().filter(|_| self.has_room()) {
                    sources.push((Source::Output(number), output.as_fd(), PollFlags::IN));
                }
            }
        }
        let mut fds: Vec<_> =
            sources.iter().map(|(_, fd, events)| PollFd::from_borrowed_fd(*fd, *events)).collect();
        retry_on_intr(|| poll(&mut fds, None))?;
        let ready = sources.iter().zip(&fds).filter(|(_, fd)| !fd.revents().is_empty());
        Ok(ready.map(|((source, ..), fd)| (*source, fd.revents())).collect())
    }

    fn has_room(&self) -> bool {
        self.unsent.len() < UNSENT_BYTES_MAX
    }

    fn say(&mut self, frame: &Frame) -> Result {
        self.unsent.extend(frame.encode()?);
        Ok(())
    }

    /// Reads from the port, and writes to it.
    fn exchange(&mut self, events: PollFlags) -> Result {
        if events.contains(PollFlags::OUT) {
            let piece = &self.unsent[..self.unsent.len().min(PIECE_BYTES)];
            let written = now(rustix::io::write(&self.port, piece))?.unwrap_or(0);
            self.unsent.drain(..written);
        }
        let mut piece = vec![0; PIECE_BYTES];
        match now(rustix::io::read(&self.port, &mut piece[..]))? {
            Some(0) => return Err("the host has gone".into()),
            Some(length) => self.decoder.push(&piece[..length]),
            None => return Ok(()),
        }
        while let Some(frame) = self.decoder.take()? {
            self.obey(frame)?;
        }
        Ok(())
    }

    fn obey(&mut self, frame: Frame) -> Result {
        let Some(running) = &mut self.running else {
            let Frame::Start(exec) = frame else { return Err("no process yet".into()) };
            match Running::start(&exec.beside(self.own)) {
                Ok(running) => {
                    self.running = Some(running);
                    return self.say(&Frame::Started(self.name.to_owned()));
                }
                Err(error) => return self.say(&Frame::Failed(error.to_string())),
            }
        };
        match frame {
            Frame::Input(bytes) if running.pending.len() + bytes.len() > INPUT_BYTES_MAX => {
                return Err("too much input".into());
            }
            Frame::Input(bytes) if bytes.is_empty() => running.is_input_whole = true,
            Frame::Input(bytes) if running.input.is_some() => running.pending.extend(bytes),
            Frame::Signal(number) => {
                if let Some(signal) = Signal::from_named_raw(number.into()) {
                    running.child.signal(signal);
                }
            }
            Frame::Size(rows, columns) => running.resize(rows, columns),
            _ => {}
        }
        running.close_input();
        Ok(())
    }

    /// Gives its input to the process.
    fn give(&mut self) -> Result {
        let Some(running) = &mut self.running else { return Ok(()) };
        let Some(input) = &running.input else { return Ok(()) };
        let Ok(written) = now(rustix::io::write(input, &running.pending)) else {
            // It reads no more. The host sends no more, since nothing more is taken.
            (running.input, running.pending) = (None, Vec::new());
            return Ok(());
        };
        let written = written.unwrap_or(0);
        running.pending.drain(..written);
        running.close_input();
        self.say(&Frame::Taken(u32::try_from(written)?))
    }

    /// Reads output of the process.
    fn take(&mut self, number: usize) -> Result {
        let Some(running) = &mut self.running else { return Ok(()) };
        let Some(output) = &running.outputs[number] else { return Ok(()) };
        let mut piece = vec![0; PIECE_BYTES];
        match now(rustix::io::read(output, &mut piece[..])) {
            Ok(Some(length)) if length > 0 => {
                piece.truncate(length);
                self.say(&if number == 0 { Frame::Output(piece) } else { Frame::Errors(piece) })
            }
            Ok(None) if running.status.is_none() => Ok(()),
            // Processes that it left in the background may have it still. A terminal fails when
            // no process has it any more.
            _ => {
                running.outputs[number] = None;
                Ok(())
            }
        }
    }

    fn end(&mut self) -> Result {
        if let Some(running) = &mut self.running {
            running.status = Some(running.child.wait());
        }
        Ok(())
    }

    /// After its end: sends the rest of its output, and then its status.
    fn finish(&mut self) -> Result {
        while self.has_room()
            && let Some(running) = &mut self.running
            && let Some(status) = running.status
            && !running.is_told
        {
            match running.outputs.iter().position(Option::is_some) {
                Some(number) => self.take(number)?,
                None => {
                    running.is_told = true;
                    self.say(&Frame::Ended(status))?;
                }
            }
        }
        Ok(())
    }
}

/// A started process with its pipes or terminal.
struct Running {
    child: Child,
    terminal: Option<OwnedFd>,
    input: Option<OwnedFd>,
    /// Input that it has not read.
    pending: Vec<u8>,
    is_input_whole: bool,
    outputs: [Option<OwnedFd>; 2],
    status: Option<u8>,
    is_told: bool,
}

impl Running {
    fn start(process: &Process) -> io::Result<Self> {
        let mut command = workload::command(process)?;
        let (terminal, input, outputs);
        match process.terminal {
            Some((rows, columns)) => {
                let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
                let master = openpt(flags)?;
                unlockpt(&master)?;
                resize(&master, rows, columns)?;
                let other = ioctl_tiocgptpeer(&master, flags)?;
                command.stdin(other.try_clone()?).stdout(other.try_clone()?).stderr(other);
                (input, outputs) = (master.try_clone()?, [Some(master.try_clone()?), None]);
                terminal = Some(master);
            }
            None => {
                let (theirs, ours) = io::pipe()?;
                command.stdin(theirs);
                let (out, theirs) = io::pipe()?;
                command.stdout(theirs);
                let (errors, theirs) = io::pipe()?;
                command.stderr(theirs);
                (terminal, input) = (None, OwnedFd::from(ours));
                outputs = [Some(out.into()), Some(errors.into())];
            }
        }
        for fd in outputs.iter().flatten().chain([&input]) {
            ioctl_fionbio(fd, true)?;
        }
        let child = Child::spawn(&mut command)?;
        Ok(Self {
            child,
            terminal,
            input: Some(input),
            pending: Vec::new(),
            is_input_whole: false,
            outputs,
            status: None,
            is_told: false,
        })
    }

    /// Closes its input after the last byte. A terminal's input has no end.
    fn close_input(&mut self) {
        if self.is_input_whole && self.pending.is_empty() && self.terminal.is_none() {
            self.input = None;
        }
    }

    fn resize(&self, rows: u16, columns: u16) {
        if let Some(terminal) = &self.terminal {
            let _ = resize(terminal, rows, columns);
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.child.signal(Signal::KILL);
    }
}

/// `None` if it would have to wait.
fn now<T>(done: rustix::io::Result<T>) -> rustix::io::Result<Option<T>> {
    match done {
        Err(Errno::AGAIN | Errno::INTR) => Ok(None),
        other => other.map(Some),
    }
}
