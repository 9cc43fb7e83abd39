//! The balloon of a guest: what it says of the guest, and the two sizes of a pulse.
//!
//! | VMM | the guest's statistics | sizes |
//! |---|---|---|
//! | QEMU | every second | bytes |
//! | Firecracker | if it was started with them | MiB |
//! | Cloud Hypervisor | none | bytes |

mod cloud_hypervisor;
mod firecracker;
mod qemu;

use std::io;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;

use self::cloud_hypervisor::CloudHypervisorBalloon;
use self::firecracker::FirecrackerBalloon;
use self::qemu::QemuBalloon;
use crate::vm::http::Api;
use crate::vm::{VmRecord, Vmm, socket};

/// Memory statistics of a guest. A guest that lies harms only itself.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::vm) struct GuestMemory {
    /// How long ago it said so, at most.
    pub(in crate::vm) age: Duration,
    /// Free bytes.
    pub(in crate::vm) free: u64,
    /// Bytes of files in its caches.
    pub(in crate::vm) caches: u64,
    /// How often it wanted for memory: swapped in, waited for pages, or killed a process.
    pub(in crate::vm) stalls: u64,
}

/// What a VMM says of its machine.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(in crate::vm) struct Description {
    /// Its name, if it has one.
    pub(in crate::vm) name: Option<String>,
    /// Memory in bytes, whatever its balloon has of it.
    pub(in crate::vm) memory_bytes: u64,
    /// Number of processors.
    pub(in crate::vm) cpus: u32,
    /// The process, or one of its threads: by the kernel's word who listens, by its own who it is.
    pub(in crate::vm) tasks: Vec<u32>,
    /// From one question for statistics to the next; 0 if there are none.
    pub(in crate::vm) statistics_seconds: u64,
}

/// The balloon of one guest, whatever its VMM.
pub(in crate::vm) trait Balloon: Send + std::fmt::Debug {
    /// What the VMM says of the machine.
    ///
    /// # Errors
    /// Those of the VMM's control protocol.
    fn describe(&mut self) -> io::Result<Description>;

    /// Has the VMM ask the guest for statistics so often.
    ///
    /// # Errors
    /// Those of the VMM's control protocol.
    fn ask_every(&mut self, seconds: u64) -> io::Result<()>;

    /// What the guest said last; none if it has said nothing yet.
    ///
    /// # Errors
    /// Those of the VMM's control protocol.
    fn guest(&mut self) -> io::Result<Option<GuestMemory>>;

    /// Bytes that the guest has outside of its balloon.
    ///
    /// # Errors
    /// Those of the VMM's control protocol.
    fn actual(&mut self) -> io::Result<u64>;

    /// Sets the guest's target size: memory outside of its balloon, in bytes.
    ///
    /// # Errors
    /// Those of the VMM's control protocol.
    fn set(&mut self, bytes: u64) -> io::Result<()>;

    /// Why it would be unsafe, or of no use, to take memory from the guest.
    ///
    /// # Errors
    /// Those of the VMM's control protocol.
    fn refusal(&mut self) -> io::Result<Option<String>>;
}

/// From one question of the VMM's to the guest to the next, in seconds: the least that there is.
pub(in crate::vm) const STATISTICS_SECONDS: u64 = 1;
/// Without it a guest that needs memory during a pulse kills programs.
const NO_DEFLATE: &str = "its balloon does not deflate on OOM (deflate-on-oom), so a guest that \
    needs memory during a pulse could kill programs";

/// The balloon of a machine that has this directory, asked for statistics as often as can be.
///
/// # Errors
/// Those of [`connect`].
pub(super) fn open(record: &VmRecord, dir: &Path) -> io::Result<Box<dyn Balloon>> {
    let mut balloon = match (record.attached(), record.vmm) {
        (Some(attached), vmm) => connect(vmm, &attached.socket)?,
        (None, Vmm::Qemu) => connect(Vmm::Qemu, &dir.join("recycle"))?,
        (None, vmm) => connect(vmm, &dir.join(vmm.socket()))?,
    };
    balloon.ask_every(STATISTICS_SECONDS)?;
    Ok(balloon)
}

/// The balloon behind a control socket.
///
/// # Errors
/// Those of the socket; `Unsupported` if the machine has no balloon.
pub(in crate::vm) fn connect(vmm: Vmm, path: &Path) -> io::Result<Box<dyn Balloon>> {
    Ok(match vmm {
        Vmm::Qemu => Box::new(QemuBalloon::new(socket::connect_path(path)?)?),
        Vmm::CloudHypervisor => Box::new(CloudHypervisorBalloon::new(Api::at(path))?),
        Vmm::Firecracker => Box::new(FirecrackerBalloon::new(Api::at(path))?),
    })
}

fn no_balloon() -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, "it has no balloon")
}

fn number(answer: &Value, name: &str) -> io::Result<u64> {
    answer[name].as_u64().ok_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidData, format!("its answer has no {name}"))
    })
}
