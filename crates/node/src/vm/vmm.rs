//! The programs that run virtual machines, and their differences.
//!
//! | | QEMU | Cloud Hypervisor | Firecracker |
//! |---|---|---|---|
//! | described by | options | options | a file |
//! | kernel | vmlinuz | vmlinuz | the ELF file in it |
//! | console | virtio | virtio | serial port |
//! | channel to the guest | virtio port | vsock | vsock |
//! | the guest ends by | switching off | switching off | restarting |
//! | without KVM | emulates | no | no |
//! | `vm exec`, merging | yes | no | no |

use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use cofolio_guest::{RESTART_WORD, VSOCK_PORT, VSOCK_WORD};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::retry_on_intr;
use serde::{Deserialize, Serialize};

use super::error::{Result, VmError};
use super::kernel::Kernel;
use super::{Accel, cloud_hypervisor, firecracker, qemu, socket};
use crate::mount::At as _;
use crate::programs;

/// The host's end of vsock, in the directory of a virtual machine.
pub(super) const VSOCK: &str = "vsock";
/// Most devices of an image, where the guest has 32 places for all of its devices.
const DEVICES_MAX: usize = 24;

/// The program that runs a virtual machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Vmm {
    /// QEMU.
    Qemu,
    /// Cloud Hypervisor.
    CloudHypervisor,
    /// Firecracker.
    Firecracker,
}

/// Properties of a new virtual machine.
pub(super) struct Machine<'m> {
    pub(super) name: &'m str,
    /// Its directory.
    pub(super) dir: &'m Path,
    pub(super) accel: Accel,
    pub(super) memory_bytes: u64,
    pub(super) cpus: u32,
    pub(super) kernel: &'m Kernel,
    pub(super) initramfs: &'m Path,
    /// Words for the kernel.
    pub(super) append: String,
    /// The image's files, with their sizes.
    pub(super) files: &'m [(PathBuf, u64)],
    /// A disk with a filesystem for changes.
    pub(super) disk: Option<&'m Path>,
}

/// A VMM that is about to be started. The guest's console is its standard input and output.
pub(super) struct Launch {
    pub(super) command: Command,
    pub(super) channel: Channel,
}

/// The host's end of the channel to a guest.
pub(super) enum Channel {
    /// The VMM has the other end.
    Connected(UnixStream),
    /// The guest connects when it has booted.
    Listening(UnixListener),
}

impl Channel {
    /// The channel, if it is there within some time.
    ///
    /// # Errors
    /// Those of the socket.
    pub(super) fn connect(&self, within: Duration) -> io::Result<Option<UnixStream>> {
        match self {
            Self::Connected(channel) => channel.try_clone().map(Some),
            Self::Listening(listener) => {
                let mut ready = [PollFd::new(listener, PollFlags::IN)];
                let within = Timespec::try_from(within).map_err(io::Error::other)?;
                retry_on_intr(|| poll(&mut ready, Some(&within)))?;
                let is_ready = ready[0].revents().contains(PollFlags::IN);
                is_ready.then(|| listener.accept().map(|(channel, _)| channel)).transpose()
            }
        }
    }
}

impl std::fmt::Display for Vmm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Qemu => "QEMU",
            Self::CloudHypervisor => "Cloud Hypervisor",
            Self::Firecracker => "Firecracker",
        })
    }
}

impl Vmm {
    /// Name of its control socket, in the directory of a virtual machine.
    pub(super) fn socket(self) -> &'static str {
        match self {
            Self::Qemu => "qmp",
            Self::CloudHypervisor | Self::Firecracker => "api",
        }
    }

    /// Its program on this machine.
    ///
    /// # Errors
    /// [`VmError::Unsupported`] if there is none, or it cannot execute guests in this way.
    pub(super) fn program(self, accel: Accel) -> Result<PathBuf> {
        let name = match self {
            Self::Qemu => return qemu::program(),
            Self::CloudHypervisor => "cloud-hypervisor",
            Self::Firecracker => "firecracker",
        };
        if std::env::consts::ARCH != "x86_64" {
            let what = format!("with {self}, machines run on x86-64 only");
            return Err(VmError::Unsupported(what));
        }
        if accel == Accel::Tcg {
            let what = format!(
                "{self} needs hardware virtualisation (KVM), which is not there or not wanted; \
                 QEMU emulates a processor"
            );
            return Err(VmError::Unsupported(what));
        }
        programs::find(name).ok_or_else(|| VmError::Unsupported(format!("{name} is not installed")))
    }

    /// Kernel modules that its guests need besides.
    pub(super) fn modules(self) -> &'static [&'static str] {
        match self {
            Self::Qemu => &[],
            Self::CloudHypervisor | Self::Firecracker => &["vmw_vsock_virtio_transport"],
        }
    }

    /// The guest's terminal, below `/dev`.
    pub(super) fn console(self) -> &'static str {
        match self {
            Self::Qemu | Self::CloudHypervisor => "hvc0",
            Self::Firecracker => "ttyS0",
        }
    }

    /// Words for the kernel, and for the guest's first process.
    pub(super) fn words(self) -> String {
        let console = self.console();
        match self {
            Self::Qemu => format!("console={console}"),
            Self::CloudHypervisor => format!("console={console} {VSOCK_WORD}"),
            // Its end is a reset by the keyboard's controller; it has no power to switch off.
            Self::Firecracker => format!("console={console} reboot=k {VSOCK_WORD} {RESTART_WORD}"),
        }
    }

    /// Prepares its command.
    ///
    /// # Errors
    /// [`VmError::Unsupported`] for what it cannot do; [`VmError::Kernel`], [`VmError::Mount`],
    /// [`VmError::RunDir`].
    pub(super) fn launch(self, machine: &Machine<'_>, program: &Path) -> Result<Launch> {
        let make = match self {
            Self::Qemu => return qemu::launch(machine, program),
            Self::CloudHypervisor => cloud_hypervisor::command,
            Self::Firecracker => firecracker::command,
        };
        if machine.files.len() > DEVICES_MAX {
            let count = machine.files.len();
            let what = format!("the image has {count} devices, {self} takes {DEVICES_MAX}");
            return Err(VmError::Unsupported(what));
        }
        let mut command = make(machine, program)?;
        // Sockets have short paths from there.
        command.current_dir(machine.dir);
        let name = format!("{VSOCK}_{VSOCK_PORT}");
        let listener = socket::listen(machine.dir, &name);
        let listener = listener.at("listening at", machine.dir.join(name))?;
        Ok(Launch { command, channel: Channel::Listening(listener) })
    }
}
