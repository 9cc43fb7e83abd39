//! Any bytes as the profile of an image.
//!
//! Invariants:
//! - nothing panics, loops or takes more memory than the bounds that `cargo fuzz` is given;
//! - the ranges of a profile that is accepted lie in the objects of its image, in order, and no byte is in two of them;
//! - its directories are absolute paths in order, without a zero byte;
//! - what was read, written again, reads the same.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| cofolio_node::profile::fuzz::document(data));
