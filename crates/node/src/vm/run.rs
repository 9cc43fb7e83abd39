//! Starting a virtual machine, and waiting for its end.

use std::fs;
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use cofolio_guest::{Dirs, Message, MessageError, Process, Start, Upper};
use cofolio_store::Digest;
use cofolio_store::task::{Cancel, Task};

use super::error::{Result, VmError};
use super::initramfs::{guest_program, initramfs};
use super::socket;
use super::vmm::{Channel, Launch, Machine};
use super::{
    Accel, DiskRequest, Kernel, Machines, Origin, RECORD, Started, VmRecord, Vmm, console, disk,
    image, write_record,
};
use crate::container::bundle::{self, ImageConfig};
use crate::container::{Copies, Streams, pidfd};
use crate::mount::{At as _, Check};
use crate::run_dir::running::{
    OUTPUT_BYTES_MAX, claim, is_name, is_replaced, remove_files, write_file,
};

/// Words for the kernel. What a pulse of the balloon takes, `init_on_alloc` would touch again; pages are
/// reported to the host one by one. Devices of memory lie above 4 GiB, and for memory there the kernel
/// would reserve 64 MiB of bounce buffers, which virtio does not use. On a busy host an emulated timer can
/// be too late for the kernel's check of it, which ends in a panic.
const KERNEL_WORDS: &str = "quiet panic=-1 init_on_alloc=0 swiotlb=noforce no_timer_check \
    page_reporting.page_reporting_order=0";
/// How long a guest may take to run the image's program. An emulated processor is slow.
const START_SECONDS_MAX: u64 = 300;
/// How often a start looks whether it was cancelled.
const LOOK: Duration = Duration::from_millis(100);
/// Largest size of each of the two files that hold what a VMM complains of.
const LOG_BYTES_MAX: u64 = 64 << 10;
/// Bytes of the VMM's complaints that an error has.
const COMPLAINT_BYTES_MAX: u64 = 4096;
/// How long what connects to the control socket may take to say what it wants.
const CONTROL_SECONDS_MAX: u64 = 5;

/// What to start.
#[derive(Debug, Clone)]
pub struct Request {
    /// The image.
    pub image: Digest,
    /// Name of the image, for people.
    pub image_name: String,
    /// Its config.
    pub config: ImageConfig,
    /// Name of the virtual machine; a new one is made from the image's name where absent.
    pub name: Option<String>,
    /// Command, environment, user, working directory.
    pub options: bundle::Options,
    /// Memory in bytes.
    pub memory_bytes: u64,
    /// Number of processors.
    pub cpus: u32,
    /// The kernel of the guest.
    pub kernel: Kernel,
    /// What executes its instructions.
    pub accel: Accel,
    /// Its VMM.
    pub vmm: Vmm,
    /// Whether KSM may merge its memory.
    pub ksm: bool,
    /// Whether its program has input, and the rows and columns of its terminal then.
    pub terminal: Option<(u16, u16)>,
    /// Where changes go, if not to the guest's memory.
    pub disk: Option<DiskRequest>,
    /// The root is read-only, but for these directories of the image.
    pub writable_dirs: Option<Vec<PathBuf>>,
    /// What has to hold of the image before it boots.
    pub check: Check,
}

/// A virtual machine whose end this process can wait for.
#[derive(Debug)]
pub struct Running {
    dir: PathBuf,
    name: String,
    lock: OwnedFd,
    vmm: Child,
    copies: Copies,
    /// What the VMM complains of.
    log: Copies,
    messages: Receiver<Message>,
    guest: Guest,
}

/// The host's end of a guest's channel.
#[derive(Debug, Clone)]
pub struct Guest(Arc<Mutex<UnixStream>>);

impl Guest {
    /// Sends a message.
    ///
    /// # Errors
    /// Those of the channel.
    pub fn tell(&self, message: &Message) -> io::Result<()> {
        message.write(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// What came of a virtual machine.
#[derive(Debug)]
pub struct Finished {
    /// Exit status of the image's program; none if the guest did not say it.
    pub status: Option<u8>,
    /// Whether all of its console's output was written.
    pub copied: io::Result<()>,
    /// What the VMM complained of.
    pub complaint: String,
}

impl Machines<'_> {
    /// Starts a virtual machine: returns when the image's program runs. Its console goes to
    /// `streams`; none is a file in its directory, and a FIFO if it has input. An error leaves nothing
    /// but the disk.
    pub fn start(
        &self,
        request: &Request,
        streams: Option<&Streams>,
        task: &Task,
    ) -> Result<Running> {
        // Usual mistakes, before anything is made.
        let program = bundle::program(&request.config, &request.options)?;
        let dirs = request.writable_dirs.as_deref();
        let dirs = dirs.map(|dirs| image::writable_dirs(&request.config, dirs)).transpose()?;
        let (vmm, guest) = (request.vmm.program(request.accel)?, guest_program()?);
        if let Some(name) = request.name.as_deref().filter(|name| !is_name(name)) {
            return Err(VmError::Name(name.to_owned()));
        }
        if request.ksm && request.vmm == Vmm::Qemu {
            // The merger does this, within the trust domain.
            let what = "--ksm: pages of machines with QEMU are merged by the daemon";
            return Err(VmError::Unsupported(what.to_owned()));
        }
        self.run.prepare()?;
        let make_room = |name: &str| self.remove_if_ended(name, true);
        let wanted = request.name.as_deref();
        let claimed = claim(&self.dir(), wanted, &request.image_name, make_room)?;
        let exists = || VmError::Exists(wanted.unwrap_or_default().to_owned());
        let (name, dir, lock) = claimed.ok_or_else(exists)?;
        let start = || {
            self.launch(request, &name, &dir, &lock, (&vmm, &guest), program, dirs, streams, task)
        };
        match start() {
            Ok((vmm, [copies, log], messages, guest)) => {
                Ok(Running { dir, name, lock, vmm, copies, log, messages, guest })
            }
            Err(error) => {
                // The first error says more.
                let _ = self.forget(&name, &dir, lock);
                Err(error)
            }
        }
    }

    fn forget(&self, name: &str, dir: &Path, lock: OwnedFd) -> Result<()> {
        if is_replaced(&lock, dir) {
            return Ok(());
        }
        self.domain.remove_root(cofolio_store::RootKind::Vm, &self.root_id(name))?;
        remove_files(dir, RECORD)?;
        drop(lock);
        Ok(())
    }

    #[expect(clippy::too_many_arguments, reason = "the second half of `start`")]
    fn launch(
        &self,
        request: &Request,
        name: &str,
        dir: &Path,
        lock: &OwnedFd,
        (vmm, guest): (&Path, &Path),
        program: bundle::Program,
        dirs: Option<Dirs>,
        streams: Option<&Streams>,
        task: &Task,
    ) -> Result<(Child, [Copies; 2], Receiver<Message>, Guest)> {
        let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok();
        self.keep(name, &request.image, boot_id.map(|id| id.trim().to_owned()))?;
        let disk = request.disk.as_ref().map(disk::open).transpose()?;
        let image = image::devices(self.domain, &request.image, request.check, task)?;
        let of_disk: &[&str] = if disk.is_some() { &disk::MODULES } else { &[] };
        let modules = [request.vmm.modules(), of_disk].concat();
        let initramfs = initramfs(&self.dir(), &request.kernel, guest, &modules)?;
        let started = Started {
            image: request.image,
            image_name: request.image_name.clone(),
            pack: image.report.pack,
            segments: image.report.segments.clone(),
            command: program.command.clone(),
            stop_signal: request.config.stop_signal().to_owned(),
            program: vmm.to_owned(),
            accel: request.accel,
            kernel: request.kernel.version.clone(),
            disk: disk.as_ref().map(|disk| disk.path.clone()),
        };
        let record = VmRecord {
            name: name.to_owned(),
            domain: self.domain.name().to_owned(),
            vmm: request.vmm,
            memory_bytes: request.memory_bytes,
            cpus: request.cpus,
            created: cofolio_store::now(),
            origin: Origin::Started(Box::new(started)),
        };
        write_record(dir, &record)?;

        let control = socket::listen(dir, "control").at("listening at", dir.join("control"))?;
        let machine = Machine {
            name,
            dir,
            accel: request.accel,
            memory_bytes: request.memory_bytes,
            cpus: request.cpus,
            kernel: &request.kernel,
            initramfs: &initramfs.path,
            append: format!("{} {KERNEL_WORDS}", request.vmm.words()),
            files: &image.files,
            disk: disk.as_ref().map(|disk| &*disk.path),
        };
        let Launch { mut command, channel } = request.vmm.launch(&machine, vmm)?;
        let failed = |source| VmError::Vmm { path: vmm.to_owned(), source };
        let file = Streams::File { path: dir.join("output"), bytes_max: OUTPUT_BYTES_MAX };
        let copies = streams.unwrap_or(&file).connect(&mut command).map_err(failed)?;
        if streams.is_none() && request.terminal.is_some() {
            command.stdin(console::make_input(dir)?);
        }
        let (mut log, path) = (Copies::default(), dir.join("vmm.log"));
        command.stderr(log.file(&path, LOG_BYTES_MAX).at("creating", &path)?);
        cofolio_sys::process::inherit(&mut command, lock.try_clone().map_err(failed)?);
        cofolio_sys::process::inherit(&mut command, initramfs.lock);
        let upper = match disk {
            Some(disk) => {
                cofolio_sys::process::inherit(&mut command, disk.lock);
                Upper::Disk {
                    filesystem: disk::FILESYSTEM.to_owned(),
                    image: request.image.to_string(),
                }
            }
            None => Upper::Memory,
        };
        if request.ksm {
            cofolio_sys::process::allow_ksm(&mut command).map_err(failed)?;
        }
        cofolio_sys::process::no_new_privileges(&mut command);
        // Signals of a terminal are for this process.
        command.process_group(0);
        let mut child = command.spawn().map_err(failed)?;
        // The channel closes at the end of the VMM only if this process has no copy of its end.
        drop(command);

        let start = Start {
            devices: image.devices,
            upper,
            dirs,
            hostname: name.to_owned(),
            console: request.vmm.console().to_owned(),
            process: Process {
                command: program.command,
                env: program.env,
                cwd: program.cwd,
                user: program.user,
                terminal: request.terminal,
            },
        };
        let pid = child.id().to_string();
        let begun = match write_file(&dir.join("pid"), pid.as_bytes()) {
            Ok(()) => begin(&channel, &mut child, control, start, task),
            Err(error) => Err(error.into()),
        };
        // By now the VMM has opened the image.
        drop(image.stays);
        match begun {
            Ok((messages, guest)) => Ok((child, [copies, log], messages, guest)),
            Err(error) => {
                let _ = child.kill();
                let _ = child.wait();
                let _ = log.finish(&task.cancel);
                Err(match (error, complaint(dir)) {
                    (VmError::Failed(why), said) if !said.is_empty() => {
                        VmError::Failed(format!("{why}; {} said: {said}", request.vmm))
                    }
                    (error, _) => error,
                })
            }
        }
    }
}

/// Tells the guest what to start, and waits until it has. Returns what the guest says from then on.
fn begin(
    channel: &Channel,
    vmm: &mut Child,
    control: UnixListener,
    start: Start,
    task: &Task,
) -> Result<(Receiver<Message>, Guest)> {
    let broken = |error: io::Error| VmError::Failed(format!("the channel to the guest: {error}"));
    let ended = || VmError::Failed("the guest ended while it started".to_owned());
    let late = || VmError::Failed(format!("the guest did not start in {START_SECONDS_MAX} s"));
    let until = Instant::now() + Duration::from_secs(START_SECONDS_MAX);
    let channel = loop {
        task.check()?;
        if let Some(channel) = channel.connect(LOOK).map_err(broken)? {
            break channel;
        }
        if vmm.try_wait().map_err(broken)?.is_some() {
            return Err(ended());
        }
        if Instant::now() >= until {
            return Err(late());
        }
    };
    let (said, messages) = mpsc::channel();
    let mut reader = channel.try_clone().map_err(broken)?;
    let guest = Guest(Arc::new(Mutex::new(channel)));
    // The VMM keeps it until the guest reads.
    guest.tell(&Message::Start(Box::new(start))).map_err(broken)?;
    let listen = move || {
        loop {
            match Message::read(&mut reader) {
                Ok(message) => {
                    let is_last = matches!(message, Message::Ended(_) | Message::Failed(_));
                    if said.send(message).is_err() || is_last {
                        // By vsock the guest waits for this before it ends.
                        let _ = reader.shutdown(std::net::Shutdown::Both);
                        return;
                    }
                }
                Err(MessageError::Closed) => return,
                Err(error) => {
                    let _ = said.send(Message::Failed(error.to_string()));
                    return;
                }
            }
        }
    };
    spawn("guest", listen).map_err(broken)?;
    loop {
        task.check()?;
        match messages.recv_timeout(LOOK) {
            Ok(Message::Started) => break,
            Ok(Message::Failed(why)) => return Err(VmError::Failed(format!("the guest: {why}"))),
            Ok(other) => {
                return Err(VmError::Failed(format!("the guest said `{}`", other.kind())));
            }
            Err(RecvTimeoutError::Disconnected) => return Err(ended()),
            Err(RecvTimeoutError::Timeout) if Instant::now() >= until => return Err(late()),
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
    let guests = guest.clone();
    spawn("control", move || {
        for client in control.incoming() {
            let Ok(client) = client else {
                // This process has no descriptor left.
                thread::sleep(LOOK);
                continue;
            };
            let guest = guests.clone();
            let _ = spawn("client", move || pass_on(client, &guest));
        }
    })
    .map_err(broken)?;
    Ok((messages, guest))
}

/// Passes messages of a process of this machine on to the guest.
fn pass_on(mut client: UnixStream, guest: &Guest) {
    let _ = client.set_read_timeout(Some(Duration::from_secs(CONTROL_SECONDS_MAX)));
    while let Ok(message @ (Message::Signal(_) | Message::Size(..))) = Message::read(&mut client) {
        let _ = guest.tell(&message);
    }
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    thread::Builder::new().name(name.to_owned()).spawn(work).map(drop)
}

/// The VMM's last words.
fn complaint(dir: &Path) -> String {
    let mut said = Vec::new();
    let log = fs::File::open(dir.join("vmm.log"));
    let _ = log.and_then(|mut log| {
        let skipped = log.metadata()?.len().saturating_sub(COMPLAINT_BYTES_MAX);
        log.seek(SeekFrom::Start(skipped))?;
        log.take(COMPLAINT_BYTES_MAX).read_to_end(&mut said)
    });
    String::from_utf8_lossy(&said).trim().to_owned()
}

impl Running {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The process id of the VMM.
    pub fn pid(&self) -> u32 {
        self.vmm.id()
    }

    /// A handle of the VMM's process.
    ///
    /// # Errors
    /// Those of `pidfd_open`.
    pub fn handle(&self) -> io::Result<OwnedFd> {
        pidfd(self.vmm.id())
    }

    /// Kills it, before anybody has seen it.
    pub fn kill(&mut self) {
        let _ = self.vmm.kill();
        let _ = self.vmm.wait();
    }

    /// Where messages for the guest go.
    pub fn guest(&self) -> Guest {
        self.guest.clone()
    }

    /// Its directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Waits for its end, and for its console's output until that is given up.
    ///
    /// # Errors
    /// Those of waiting for the VMM.
    pub fn wait(&mut self, given_up: &Cancel) -> io::Result<Finished> {
        let mut status = None;
        // The guest's last word.
        while let Ok(message) = self.messages.recv() {
            if let Message::Ended(ended) = message {
                status = Some(ended);
            }
        }
        self.vmm.wait()?;
        let copied = std::mem::take(&mut self.copies).finish(given_up);
        let _ = std::mem::take(&mut self.log).finish(given_up);
        Ok(Finished { status, copied, complaint: complaint(&self.dir) })
    }
}

impl Machines<'_> {
    /// Removes what is left of a virtual machine that has ended.
    ///
    /// # Errors
    /// [`VmError::RunDir`], [`VmError::Store`]; [`Machines::reconcile`] does the rest then.
    pub fn remove(&self, ended: Running) -> Result<()> {
        self.forget(&ended.name, &ended.dir, ended.lock)
    }

    /// The same, but keeps record, exit status and output until [`Machines::stop`] or a new one of
    /// that name. Fails like [`Machines::remove`].
    pub fn retire(&self, ended: Running, status: u8) -> Result<()> {
        if is_replaced(&ended.lock, &ended.dir) {
            return Ok(());
        }
        write_file(&ended.dir.join("exit"), status.to_string().as_bytes())?;
        self.domain.remove_root(cofolio_store::RootKind::Vm, &self.root_id(&ended.name))?;
        Ok(())
    }
}
