//! What a guest is started with.

use serde::{Deserialize, Serialize};

/// All that the first process of a guest has to know.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Start {
    /// The pack, and then its segments in the order of its table.
    pub devices: Vec<Device>,
    /// Where changes go.
    pub upper: Upper,
    /// What can be written to, if that is not all of the image.
    pub dirs: Option<Dirs>,
    /// Name of the guest.
    pub hostname: String,
    /// The terminal of its processes, below `/dev`.
    pub console: String,
    /// What it runs. The guest ends with it.
    pub process: Process,
}

/// How to tell a device: names depend on the order in which drivers find them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// Size in bytes.
    pub size: u64,
    /// Where `bytes` are.
    pub offset: u64,
    /// Some bytes that no other device has there.
    pub bytes: Vec<u8>,
}

/// Where changes to the image go.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Upper {
    /// A filesystem in the guest's memory.
    Memory,
    /// The filesystem on the guest's only disk.
    Disk {
        /// Its kind, as the kernel names it.
        filesystem: String,
        /// Digest of the image. Changes to another one mean nothing over this one.
        image: String,
    },
}

/// Directories that can be written to, by their absolute paths in the image.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dirs {
    /// The image must have these.
    pub asked: Vec<String>,
    /// Programs expect these to be writable, if the image has them.
    pub expected: Vec<String>,
}

/// A process of the guest.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// The program and its arguments.
    pub command: Vec<String>,
    /// Environment, as `NAME=value`.
    pub env: Vec<String>,
    /// Working directory.
    pub cwd: String,
    /// `user[:group]`, each a name or a number, as [`find_user`](crate::accounts::find_user) takes
    /// it.
    pub user: String,
    /// Rows and columns of its terminal; none if it has no input.
    pub terminal: Option<(u16, u16)>,
}

/// A process beside the image's program. Absent fields are the program's.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exec {
    /// The program and its arguments.
    pub command: Vec<String>,
    /// Added to the environment, as `NAME=value`.
    pub env: Vec<String>,
    /// Working directory.
    pub cwd: Option<String>,
    /// `user[:group]`, each a name or a number.
    pub user: Option<String>,
    /// Rows and columns of the terminal that it gets.
    pub terminal: Option<(u16, u16)>,
}

impl Exec {
    /// The process, beside `own`.
    pub fn beside(self, own: &Process) -> Process {
        Process {
            command: self.command,
            env: [own.env.clone(), self.env].concat(),
            cwd: self.cwd.unwrap_or_else(|| own.cwd.clone()),
            user: self.user.unwrap_or_else(|| own.user.clone()),
            terminal: self.terminal,
        }
    }
}
