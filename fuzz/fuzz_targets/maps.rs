//! Any bytes as `/proc/PID/maps`, where a container chooses the paths.
//!
//! Invariants:
//! - nothing panics, loops or takes more memory than the bounds that `cargo fuzz` is given;
//! - a mapping is of a file, and its path is the end of its line;
//! - it reaches no further than its file;
//! - what was read, written again, reads the same.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| cofolio_node::fuzz::maps(data));
