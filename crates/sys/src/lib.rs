//! Kernel interfaces that rustix lacks: the only crate of Cofolio with unsafe code.

pub mod cache;
pub mod fanotify;
pub mod loopback;
pub mod memory;
pub mod mount;
pub mod pagemap;
pub mod priority;
pub mod process;
pub mod quota;
pub mod reflink;
pub mod resident;
pub mod sha256;
pub mod userns;
pub mod verity;
pub mod vsock;
