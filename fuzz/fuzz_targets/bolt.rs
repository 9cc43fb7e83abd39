//! Any bytes as a database of bolt, which containerd keeps its records in.
//!
//! Invariants:
//! - nothing panics, loops or takes more memory than the bounds that `cargo fuzz` is given;
//! - what was read is no more than the file has: no byte is taken twice.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| cofolio_node::engine::fuzz::database(data));
