//! The programs that run virtual machines.

use serde::{Deserialize, Serialize};

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
}
