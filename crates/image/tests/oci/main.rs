//! Imports from the outside: what goes in as archives comes out of the metadata image and the
//! objects.
//!
//! Archives are made here, byte by byte, so that every oddity can be made; GNU tar, bsdtar, Python
//! and skopeo make more where they are there, and are skipped with a line where not.

#![allow(
    unreachable_pub,
    clippy::cast_possible_truncation,
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a test program: it panics where it fails, and prints what it skips"
)]
#![allow(dead_code, reason = "the support is shared with other test programs")]

mod again;
mod containerd;
mod corpus;
mod engines;
mod entries;
mod export;
mod layers;
mod model;
mod podman;
mod scan;
mod sources;
mod streams;
mod support;
