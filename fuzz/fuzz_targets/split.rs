//! Any bytes as `layers/<chain-id>.split` of a store.
//!
//! Invariants:
//! - nothing panics, loops or takes more memory than the bounds that `cargo fuzz` is given;
//! - a split whose script can be read to its end has a table that can be, too, with the same objects: garbage
//!   collection reads the table only;
//! - what was read, written again, reads the same.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| cofolio_image::import::fuzz::split(data));
