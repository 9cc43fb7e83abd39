//! Segments: what they hold, how long they stay, how damage to them is told, and what filesystems make of them.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::print_stdout, reason = "a test that is skipped says why")]

#[path = "../../../store/tests/common/mod.rs"]
mod common;
mod contents;
mod filesystems;
mod real;
mod runs;
