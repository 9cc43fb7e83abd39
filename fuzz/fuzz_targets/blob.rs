//! Any bytes as a layer's blob: gzip, zstd, or neither.
//!
//! Invariants:
//! - nothing panics, loops or takes more memory than the bounds that `cargo fuzz` is given;
//! - nothing beyond the limits is unpacked;
//! - an end is reported only behind all bytes of a blob that has its digest and its size, and nothing after it;
//! - what is not compressed comes through as it is.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| cofolio_image::import::fuzz::blob(data));
