//! What is imported, as the kernel shows it once it is mounted.

#![allow(
    dead_code,
    unreachable_pub,
    clippy::cast_possible_truncation,
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a test program panics where it fails, and the support is shared with others"
)]

mod bases;
mod hostile;
#[path = "../../../image/tests/oci/support.rs"]
mod support;
