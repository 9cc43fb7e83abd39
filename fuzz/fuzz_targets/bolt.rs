//! Any bytes as a database of bolt, which containerd keeps its records in.
//!
//! Invariants:
//! - nothing panics, loops or takes more memory than the bounds that `cargo fuzz` is given;
//! - what was read is no more than the file has: no byte is taken twice;
//! - an image of it is found by each of its names, or the name is refused since several have it;
//! - the layers of a container are layers of the store, and below its root.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| cofolio_image::source::engine::fuzz::database(data));
