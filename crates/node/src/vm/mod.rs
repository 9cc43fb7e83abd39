//! Virtual machines: boots an image with a distribution's kernel, and keeps it until its end.
//!
//! ```text
//! image ─▶ pack and segments (image) ─▶ virtio-pmem devices, read-only ──┐
//! vmlinuz ─▶ modules (kernel) ┐                                          ├─▶ VMM (vmm)
//! cofolio-guest ──────────────┴▶ initramfs ──────────────────────────────┘     │
//!                                                                       channel│ console
//! image config ─▶ Start ──────────────────────────────────────▶ first process ◀┘
//!
//! <run>/vms/<key>.initramfs   of one kernel, for all guests; likewise .vmlinux (see `shared`)
//! <run>/vms/<name>/           mode 0700
//!   lock                      held by the VMM, and by the process that waits for it
//!   vm.json                   the record (VmRecord), written before anything is started
//!   pid                       of the VMM, written by the process that starts it
//!   qmp, recycle, exec        sockets of its control protocol: for others, for the recycler, and for
//!                             whoever starts a process in it (see `exec`)
//!   api, vsock, vsock_1024    of other VMMs: of their control protocol, and of the channel to the guest
//!   merge                     socket of the shim in the VMM's process (see `merger`)
//!   control                   socket of the process that waits: takes messages for the guest
//!   vmm.log, vmm.log.1        what the VMM complains of, at most LOG_BYTES_MAX each
//!   output, output.1          console of a detached one, at most OUTPUT_BYTES_MAX each
//!   input                     FIFO, its console's input; locked by whoever writes to it
//!   exit                      of a detached one that has ended: its exit status
//! <store>/…/roots/vm/<tag>-<name>.json    keeps the image, and with it pack and segments
//! ```
//!
//! `cofolio vm run`, or the process that `vm run --detach` leaves behind, waits for the VMM and
//! removes what is left. If it is killed the VMM goes on; [`Machines::reconcile`] removes what is
//! left after its end. A VMM lives as long as somebody has the lock: it inherits it. Of an attached
//! one, which somebody else started, there is the record alone; it lives as long as its process.

pub mod account;
mod attach;
mod cloud_hypervisor;
pub mod console;
mod disk;
mod error;
pub mod exec;
mod firecracker;
mod http;
mod image;
mod initramfs;
mod kernel;
pub mod merger;
mod qemu;
pub mod qmp;
pub mod ram;
mod ranges;
pub mod recycler;
mod run;
mod shared;
mod socket;
mod vmlinux;
mod vmm;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cofolio_guest::Message;
use cofolio_store::{Digest, Domain, Root, RootKind};
use rustix::process::{Signal, pidfd_send_signal};
use serde::{Deserialize, Serialize};

pub use self::attach::{AttachRequest, Attached};
pub use self::disk::DiskRequest;
use self::error::Result;
pub use self::error::VmError;
pub use self::initramfs::initramfs;
pub use self::kernel::Kernel;
pub use self::qemu::Accel;
pub use self::run::{Finished, Guest, Request, Running};
pub use self::shared::SharedFile;
pub use self::vmm::Vmm;
use crate::container::pidfd;
use crate::mount::At as _;
use crate::mount::kernel::open_dir;
use crate::processes::{file_id, open_files};
pub use crate::run_dir::running::State;
use crate::run_dir::running::{
    is_locked, is_name, kept_exit_status, lock_ended, read_text, remove_files, write_file,
};
use crate::run_dir::{self, RunDir, RunDirError, is_at, read_json};
use crate::signals;

/// Name of the record.
const RECORD: &str = "vm.json";
/// How long a VMM may take to die of SIGKILL.
const KILLED_PATIENCE: Duration = Duration::from_secs(10);

/// What `vm.json` holds.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct VmRecord {
    /// Its name.
    pub name: String,
    /// Trust domain.
    pub domain: String,
    /// Its VMM.
    pub vmm: Vmm,
    /// Memory in bytes.
    pub memory_bytes: u64,
    /// Number of processors.
    pub cpus: u32,
    /// When it was made, in seconds since 1970.
    pub created: i64,
    /// Its origin.
    #[serde(flatten)]
    pub origin: Origin,
}

/// Origin of a virtual machine.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "origin", rename_all = "kebab-case")]
pub enum Origin {
    /// Cofolio.
    Started(Box<Started>),
    /// Somebody else.
    Attached(Attached),
}

/// What Cofolio has started a virtual machine with.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Started {
    /// Digest of the image.
    pub image: Digest,
    /// Name of the image, for people.
    pub image_name: String,
    /// Digest of the image's pack.
    pub pack: Digest,
    /// Digests of its segments.
    pub segments: Vec<Digest>,
    /// The program and its arguments.
    pub command: Vec<String>,
    /// Signal that asks it to end, from the image config.
    pub stop_signal: String,
    /// The program of the VMM.
    pub program: PathBuf,
    /// What executes its instructions.
    pub accel: Accel,
    /// Version of its kernel.
    pub kernel: String,
    /// The disk that has its changes; absent where they are in its memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<PathBuf>,
}

impl VmRecord {
    /// What Cofolio has started it with.
    ///
    /// # Errors
    /// [`VmError::NotOurs`].
    pub fn started(&self) -> Result<&Started> {
        match &self.origin {
            Origin::Started(started) => Ok(started),
            Origin::Attached(_) => Err(VmError::NotOurs(self.name.clone())),
        }
    }

    /// Its record if another program started it.
    pub fn attached(&self) -> Option<&Attached> {
        match &self.origin {
            Origin::Started(_) => None,
            Origin::Attached(attached) => Some(attached),
        }
    }

    /// Name of the image, for people; empty for an attached machine.
    pub fn image_name(&self) -> &str {
        self.started().map_or("", |started| &started.image_name)
    }

    /// Bytes that the guest has outside of its balloon while it is not recycled.
    pub fn usable_bytes(&self) -> u64 {
        self.attached().map_or(self.memory_bytes, |attached| attached.usable_bytes)
    }
}

/// One line of [`Machines::list`].
#[derive(Debug, Clone, Serialize)]
pub struct VmStatus {
    /// Its record.
    #[serde(flatten)]
    pub record: VmRecord,
    /// Whether it runs.
    pub state: State,
    /// Process of the VMM, while it runs.
    pub pid: Option<u32>,
    /// Exit status of a detached one that has ended: that of the image's program.
    pub exit_status: Option<u8>,
    /// What its console said last, if it is detached.
    pub output: Option<PathBuf>,
    /// Socket of QEMU's control protocol.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub qmp: Option<PathBuf>,
    /// Socket of another VMM's control protocol.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub api: Option<PathBuf>,
}

/// The virtual machines of one trust domain.
#[derive(Debug)]
pub struct Machines<'a> {
    domain: &'a Domain,
    run: RunDir,
}

impl<'a> Machines<'a> {
    /// Those of a domain, in the run directory of its store.
    pub fn new(domain: &'a Domain, run: RunDir) -> Self {
        Self { domain, run }
    }

    fn dir(&self) -> PathBuf {
        self.run.path().join("vms")
    }

    fn root_id(&self, name: &str) -> String {
        format!("{}-{name}", self.run.tag())
    }

    /// Keeps the image of a virtual machine.
    fn keep(&self, name: &str, image: &Digest, boot_id: Option<String>) -> Result<()> {
        let mut root = Root::new(RootKind::Vm, self.root_id(name));
        root.images.push(*image);
        root.note = format!("virtual machine {name}");
        (root.created, root.boot_id) = (cofolio_store::now(), boot_id);
        Ok(self.domain.put_root(&root)?)
    }

    /// All of the run directory, by name. `failed` says of which others nothing can be read.
    ///
    /// # Errors
    /// [`VmError::RunDir`].
    pub fn list(&self, failed: &mut Vec<VmError>) -> Result<Vec<VmStatus>> {
        list(&self.run, failed)
    }

    fn names(&self) -> Result<Vec<String>> {
        names(&self.dir())
    }

    /// One by its name.
    ///
    /// # Errors
    /// [`VmError::Name`], [`VmError::NotFound`], [`VmError::RunDir`].
    pub fn get(&self, name: &str) -> Result<VmStatus> {
        if !is_name(name) {
            return Err(VmError::Name(name.to_owned()));
        }
        status(&self.dir().join(name))?.ok_or_else(|| VmError::NotFound(name.to_owned()))
    }

    /// Ends a virtual machine and removes what is left: sends the image's program its signal, and
    /// after `patience` kills the VMM. It is killed at once if nobody can send that signal.
    ///
    /// # Errors
    /// [`VmError::Name`], [`VmError::NotFound`], [`VmError::NotOurs`], [`VmError::StillRunning`],
    /// [`VmError::RunDir`].
    pub fn stop(&self, name: &str, patience: Duration) -> Result<()> {
        let dir = self.dir().join(name);
        let this = open_dir(&dir);
        let status = self.get(name)?;
        let signal = &status.record.started()?.stop_signal;
        let signal = signals::number(signal).unwrap_or(Signal::TERM.as_raw());
        let this = this.map_err(std::io::Error::from).at("opening", &dir)?;
        // Another machine may take its name.
        let is_gone = || !is_at(&this, &dir);
        let until = Instant::now() + patience;
        // Opened before it is tested for the lock: from here on it is the same process.
        let vmm = status.pid.and_then(|pid| Some((pid, pidfd(pid).ok()?)));
        let asked = socket::connect(&dir, "control")
            .and_then(|mut control| Message::Signal(signal).write(&mut control));
        while asked.is_ok() && Instant::now() < until {
            if is_gone() || self.remove_if_ended(name, true)? {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        if let Some((_, vmm)) = vmm.filter(|(pid, _)| has_lock(*pid, &dir)) {
            let _ = pidfd_send_signal(vmm, Signal::KILL);
        }
        let until = Instant::now() + KILLED_PATIENCE;
        while !is_gone() && !self.remove_if_ended(name, true)? {
            if Instant::now() >= until {
                return Err(VmError::StillRunning(name.to_owned()));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Removes those that have ended and for which no process waits, except detached ones whose
    /// exit status is kept. Describes failures in `failed` and goes on.
    ///
    /// # Errors
    /// [`VmError::RunDir`] if the run directory cannot be read.
    pub fn reconcile(&self, failed: &mut Vec<String>) -> Result<()> {
        for name in self.names()? {
            if let Err(error) = self.remove_if_ended(&name, false) {
                failed.push(format!(
                    "virtual machine {name}: {}",
                    cofolio_store::with_causes(&error)
                ));
            }
        }
        Ok(())
    }

    /// Images that virtual machines of the domain have.
    ///
    /// # Errors
    /// [`VmError::Store`].
    pub fn live_images(&self) -> Result<Vec<Digest>> {
        let roots = self.domain.roots(RootKind::Vm)?.into_iter();
        Ok(roots.flat_map(|root| root.images).collect())
    }

    /// Removes what is left of one that has ended; says whether it did.
    fn remove_if_ended(&self, name: &str, retired_too: bool) -> Result<bool> {
        let dir = self.dir().join(name);
        let Some(lock) = lock_ended(&dir)? else { return Ok(false) };
        // Nobody keeps the lock of an attached one. Its record was written with the lock held.
        if let Some(record) = read_record(&dir)?
            && record.attached().is_some_and(Attached::lives)
        {
            return Ok(false);
        }
        self.domain.remove_root(RootKind::Vm, &self.root_id(name))?;
        if !retired_too && kept_exit_status(&dir).is_some() {
            return Ok(false);
        }
        remove_files(&dir, RECORD)?;
        drop(lock);
        Ok(true)
    }
}

/// All virtual machines of a run directory, by name. `failed` says of which others nothing can be
/// read.
///
/// # Errors
/// [`VmError::RunDir`].
pub fn list(run: &RunDir, failed: &mut Vec<VmError>) -> Result<Vec<VmStatus>> {
    let (all, mut found) = (run.path().join("vms"), Vec::new());
    for name in names(&all)? {
        match status(&all.join(name)) {
            Ok(status) => found.extend(status),
            Err(error) => failed.push(error),
        }
    }
    Ok(found)
}

fn names(all: &Path) -> Result<Vec<String>> {
    let mut names = run_dir::list(all)?;
    names.retain(|name| is_name(name) && all.join(name).is_dir());
    names.sort();
    Ok(names)
}

fn status(dir: &Path) -> Result<Option<VmStatus>> {
    let Some(record) = read_record(dir)? else { return Ok(None) };
    let (state, pid) = match record.attached() {
        Some(attached) if attached.lives() => (State::Running, Some(attached.vmm_pid)),
        Some(_) => (State::Ended, None),
        None => {
            let lives = is_locked(dir)?;
            let is_attended = || socket::is_listening(dir, "control");
            let state = match lives {
                false => State::Ended,
                true if is_attended() => State::Running,
                true => State::Unattended,
            };
            (state, vmm_pid(dir).filter(|_| lives))
        }
    };
    let socket = match record.attached() {
        Some(attached) => attached.socket.clone(),
        None => dir.join(record.vmm.socket()),
    };
    let (qmp, api) = match record.vmm {
        Vmm::Qemu => (Some(socket), None),
        Vmm::CloudHypervisor | Vmm::Firecracker => (None, Some(socket)),
    };
    Ok(Some(VmStatus {
        state,
        pid,
        exit_status: kept_exit_status(dir).filter(|_| state == State::Ended),
        output: Some(dir.join("output")).filter(|output| output.exists()),
        qmp,
        api,
        record,
    }))
}

/// The record; `None` where none was written, so that nothing was started either.
fn read_record(dir: &Path) -> Result<Option<VmRecord>, RunDirError> {
    read_json(&dir.join(RECORD))
}

fn write_record(dir: &Path, record: &VmRecord) -> Result<()> {
    let path = dir.join(RECORD);
    let text = serde_json::to_vec(record).map_err(std::io::Error::other);
    Ok(write_file(&path, &text.at("writing", &path)?)?)
}

fn vmm_pid(dir: &Path) -> Option<u32> {
    read_text(&dir.join("pid"))?.trim().parse().ok()
}

/// Whether a process has the lock of a virtual machine, as its VMM does. The process id in its
/// directory may be that of another process since the VMM has ended.
fn has_lock(pid: u32, dir: &Path) -> bool {
    let process = Path::new("/proc").join(pid.to_string());
    let lock = file_id(&dir.join("lock"));
    let open = open_files(&process).unwrap_or_default();
    lock.is_some() && open.iter().any(|(link, _)| file_id(link) == lock)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests may panic")]

    use std::fs::File;

    use super::*;

    /// The number in a directory was that of another process, and `vm stop` killed it.
    #[test]
    fn a_process_without_the_lock_is_no_vmm() {
        let dir = tempfile::tempdir().unwrap();
        let own = std::process::id();
        assert!(!has_lock(own, dir.path()), "there is no lock");
        let lock = File::create(dir.path().join("lock")).unwrap();
        assert!(has_lock(own, dir.path()) && !has_lock(1, dir.path()));
        drop(lock);
        assert!(!has_lock(own, dir.path()));
    }
}
