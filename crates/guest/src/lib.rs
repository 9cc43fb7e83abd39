//! The first process of a virtual machine that Cofolio starts, and what host and guest tell each
//! other.
//!
//! ```text
//! initramfs   /init          this program, linked statically
//!             /modules/NN    kernel modules, in the order in which they are loaded
//! channel     a stream of [`Message`]s in both directions; the host's first one has a [`Start`]
//! exec ports  one for each process that `vm exec` starts: a stream of [`Frame`](frame::Frame)s
//! ```
//!
//! Guests of one kernel have the same initramfs, so that the host has it in memory once.
//!
//! The guest trusts the host. The host believes nothing that a guest says: a message has a limit,
//! and one that cannot be read ends the channel.

pub mod accounts;
pub mod frame;
pub mod kernel;
pub mod message;
pub mod start;

pub use message::{Message, MessageError};
pub use start::{Device, Dirs, Exec, Process, Start, Upper};

/// Directory of the initramfs with the kernel modules.
pub const MODULES_DIR: &str = "/modules";
/// Name of the virtio port that is the channel.
pub const CHANNEL_PORT: &str = "cofolio.channel";
/// Port of the host that is the channel where there are no virtio ports, with vsock.
pub const VSOCK_PORT: u32 = 1024;
/// Word for the kernel: the channel is by vsock. No module is called so, and the kernel leaves it
/// to others.
pub const VSOCK_WORD: &str = "cofolio.channel=vsock";
/// Word for the kernel: a machine that cannot be switched off ends by a restart.
pub const RESTART_WORD: &str = "cofolio.end=restart";
/// What the names of virtio ports for `vm exec` begin with. The rest is random.
pub const EXEC_PORT: &str = "cofolio.exec.";
