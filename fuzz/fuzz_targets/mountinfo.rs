//! Any bytes as `/proc/PID/mountinfo`, where a container chooses paths, sources and options.
//!
//! Invariants:
//! - nothing panics, loops or takes more memory than the bounds that `cargo fuzz` is given;
//! - a source that names an image is the one that a mount of this image has, in capitals or not;
//! - what was read, written again with the kernel's escapes, reads the same.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| cofolio_node::mount::fuzz::mountinfo(data));
