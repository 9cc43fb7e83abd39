//! Mounting images (backend `overlay`).

#[allow(dead_code, reason = "its other users land next")]
pub(crate) mod kernel;

pub use kernel::{Backing, KernelError};
