//! Processes beside the program of a virtual machine.
//!
//! Each has a virtio port of its own, which is plugged in for it. Whoever asks for a process has
//! one end of a pair of sockets, and QEMU the other. When this end is closed, the guest kills the
//! process, whatever has become of this program. No process of the host stands between the two.
//!
//! ```text
//! vm exec ◀── socket pair ──▶ QEMU, virtserialport ◀──▶ /dev/vport… ◀──▶ guest's first process
//! ```

use std::fs::File;
use std::io::{self, Read as _, Write};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use cofolio_guest::frame::{Decoder, Frame, INPUT_BYTES_MAX};
use cofolio_guest::{EXEC_PORT, Exec};
use serde_json::{Value, json};

use super::error::{Result, VmError};
use super::qmp::Qmp;
use super::{Machines, State, Vmm, socket};
use crate::run_dir::running::random_number;

/// How long a guest may take to start a process. An emulated processor is slow.
const START_SECONDS_MAX: u64 = 60;
/// Bytes read at once.
const PIECE_BYTES: usize = 32 << 10;

/// A process of a guest, as long as it runs.
#[derive(Debug)]
pub struct Session {
    socket: UnixStream,
    decoder: Decoder,
    process: ExecProcess,
    port: Port,
}

/// Where signals and the size of its terminal are sent.
#[derive(Debug, Clone)]
pub struct ExecProcess(Arc<Mutex<UnixStream>>);

impl ExecProcess {
    /// Sends a frame.
    ///
    /// # Errors
    /// Those of the socket.
    pub fn tell(&self, frame: &Frame) -> io::Result<()> {
        let bytes = frame.encode().map_err(io::Error::other)?;
        self.0.lock().unwrap_or_else(PoisonError::into_inner).write_all(&bytes)
    }

    /// Ends the session, and with it the process.
    pub fn give_up(&self) {
        let socket = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = socket.shutdown(std::net::Shutdown::Both);
    }
}

impl Machines<'_> {
    /// Starts a process in a virtual machine. Returns when it runs.
    ///
    /// # Errors
    /// [`VmError::Name`], [`VmError::NotFound`], [`VmError::NotOurs`], [`VmError::NotRunning`],
    /// [`VmError::Unsupported`], [`VmError::Exec`].
    pub fn exec(&self, name: &str, exec: Exec) -> Result<Session> {
        let status = self.get(name)?;
        status.record.started()?;
        if status.record.vmm != Vmm::Qemu {
            let vmm = status.record.vmm;
            let what = format!("`vm exec` plugs a port into the guest, which {vmm} cannot");
            return Err(VmError::Unsupported(what));
        }
        if status.state == State::Ended {
            return Err(VmError::NotRunning(name.to_owned()));
        }
        let failed = |source| VmError::Exec { name: name.to_owned(), source };
        let (socket, theirs) = UnixStream::pair().map_err(failed)?;
        let port = Port::plug(&self.dir().join(name), theirs.into()).map_err(failed)?;
        let process = ExecProcess(Arc::new(Mutex::new(socket.try_clone().map_err(failed)?)));
        let mut session = Session { socket, decoder: Decoder::default(), process, port };
        session.start(exec).map_err(failed)?;
        Ok(session)
    }
}

impl Session {
    fn start(&mut self, exec: Exec) -> io::Result<()> {
        // QEMU keeps it until the guest reads.
        self.process.tell(&Frame::Start(exec))?;
        self.socket.set_read_timeout(Some(Duration::from_secs(START_SECONDS_MAX)))?;
        let first = self.next().map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => {
                io::Error::other(format!("the guest did not answer in {START_SECONDS_MAX} s"))
            }
            _ => error,
        })?;
        self.socket.set_read_timeout(None)?;
        match first {
            // What a guest said to others who had this port before would not have its name.
            Some(Frame::Started(port)) if port == self.port.id => Ok(()),
            Some(Frame::Failed(why)) => Err(io::Error::other(format!("the guest: {why}"))),
            Some(other) => Err(io::Error::other(format!("the guest said `{}`", other.kind()))),
            None => Err(io::Error::other("it ended")),
        }
    }

    /// The next frame; `None` if the machine has ended.
    fn next(&mut self) -> io::Result<Option<Frame>> {
        let mut piece = vec![0; PIECE_BYTES];
        loop {
            if let Some(frame) = self.decoder.take().map_err(io::Error::other)? {
                return Ok(Some(frame));
            }
            match self.socket.read(&mut piece) {
                Ok(0) => return Ok(None),
                Ok(length) => self.decoder.push(&piece[..length]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Where signals and sizes go.
    pub fn process(&self) -> ExecProcess {
        self.process.clone()
    }

    /// Passes input and output on until the process has ended. Returns its status; none if the
    /// machine has ended, or the session was given up.
    ///
    /// # Errors
    /// Those of writing; what the guest says and is no frame.
    pub fn run(
        &mut self,
        input: Option<OwnedFd>,
        output: &mut dyn Write,
        errors: &mut dyn Write,
    ) -> io::Result<Option<u8>> {
        let (taken, credit) = mpsc::channel();
        let process = self.process();
        match input {
            // Not joined: it may read from a terminal for ever.
            Some(input) => {
                let give = move || drop(give(input.into(), &process, &credit));
                std::thread::Builder::new().name("input".to_owned()).spawn(give)?;
            }
            None => process.tell(&Frame::Input(Vec::new()))?,
        }
        while let Some(frame) = self.next()? {
            match frame {
                Frame::Output(bytes) => write(output, &bytes)?,
                Frame::Errors(bytes) => write(errors, &bytes)?,
                Frame::Taken(bytes) => _ = taken.send(bytes),
                Frame::Ended(status) => return Ok(Some(status)),
                other => {
                    return Err(io::Error::other(format!("the guest said `{}`", other.kind())));
                }
            }
        }
        Ok(None)
    }
}

fn write(to: &mut dyn Write, bytes: &[u8]) -> io::Result<()> {
    to.write_all(bytes)?;
    to.flush()
}

/// Passes input on, and its end, as far as the process takes it.
fn give(mut input: File, process: &ExecProcess, taken: &Receiver<u32>) -> io::Result<()> {
    let mut credit = INPUT_BYTES_MAX;
    let mut piece = vec![0; PIECE_BYTES];
    loop {
        while credit == 0 {
            credit += taken.recv().map_err(io::Error::other)? as usize;
        }
        credit += taken.try_iter().map(|bytes| bytes as usize).sum::<usize>();
        let most = credit.min(PIECE_BYTES);
        match input.read(&mut piece[..most]) {
            Ok(length) => {
                process.tell(&Frame::Input(piece[..length].to_vec()))?;
                credit -= length;
                if length == 0 {
                    return Ok(());
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => {
                process.tell(&Frame::Input(Vec::new()))?;
                return Err(error);
            }
        }
    }
}

/// A port that was plugged into a virtual machine.
#[derive(Debug)]
struct Port {
    dir: PathBuf,
    id: String,
}

impl Port {
    /// Plugs in a port, with `socket` as its other end.
    fn plug(dir: &Path, socket: OwnedFd) -> io::Result<Self> {
        let mut qmp = monitor(dir)?;
        unplug_closed(&mut qmp)?;
        let id = format!("{EXEC_PORT}{:016x}", random_number());
        qmp.pass(&id, socket.as_fd())?;
        let address = json!({"type": "fd", "data": {"str": id}});
        let backend = json!({"type": "socket", "data": {"addr": address, "server": false}});
        qmp.call("chardev-add", json!({"id": id, "backend": backend}))?;
        let device = json!({"driver": "virtserialport", "id": id, "chardev": id, "name": id});
        if let Err(error) = qmp.call("device_add", device) {
            let _ = qmp.call("chardev-remove", json!({"id": id}));
            return Err(error);
        }
        Ok(Self { dir: dir.to_owned(), id })
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        // The next one does what is left undone.
        let _ = monitor(&self.dir).map(|mut qmp| unplug(&mut qmp, &self.id));
    }
}

/// Waits until others have done: it serves one at a time.
fn monitor(dir: &Path) -> io::Result<Qmp> {
    Qmp::new(socket::connect(dir, "exec")?)
}

/// Unplugs the ports of those who were killed: QEMU says of their sockets that they are
/// disconnected.
fn unplug_closed(qmp: &mut Qmp) -> io::Result<()> {
    let sockets = qmp.call("query-chardev", json!({}))?;
    for socket in sockets.as_array().into_iter().flatten() {
        let text = |key: &str| socket.get(key).and_then(Value::as_str).unwrap_or_default();
        let id = text("label");
        if id.starts_with(EXEC_PORT) && text("filename").starts_with("disconnected") {
            unplug(qmp, id);
        }
    }
    Ok(())
}

fn unplug(qmp: &mut Qmp, id: &str) {
    for command in ["device_del", "chardev-remove"] {
        let _ = qmp.call(command, json!({"id": id}));
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests may panic")]

    use super::*;

    /// The error had all of the frame, 128 KiB of the guest's choice, as a list of numbers.
    #[test]
    fn a_frame_out_of_place_is_named_by_its_kind() {
        let (socket, mut guest) = UnixStream::pair().unwrap();
        let process = ExecProcess(Arc::new(Mutex::new(socket.try_clone().unwrap())));
        let port = Port { dir: PathBuf::from("/nowhere"), id: String::new() };
        let mut session = Session { socket, decoder: Decoder::default(), process, port };
        let frame = Frame::Input(vec![7; 60 << 10]).encode().unwrap();
        guest.write_all(&frame).unwrap();
        let error = session.run(None, &mut io::sink(), &mut io::sink()).unwrap_err();
        assert_eq!(error.to_string(), "the guest said `input`");
        guest.write_all(&frame).unwrap();
        let error = session.start(Exec::default()).unwrap_err();
        assert_eq!(error.to_string(), "the guest said `input`");
    }
}
