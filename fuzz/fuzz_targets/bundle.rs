//! Any bytes as what an image says about running it: its config, `/etc/passwd`, `/etc/group`.
//!
//! Invariants:
//! - nothing panics, loops or takes more memory than the bounds that `cargo fuzz` is given;
//! - a bundle has a command, a working directory and mounts that are plain paths, the capabilities that all have,
//!   and sees nothing of the host but directories made for its volumes;
//! - the first group is the primary one, and no group is there twice;
//! - nobody becomes root by a name that is not root's.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| cofolio_node::container::bundle::fuzz::image(data));
