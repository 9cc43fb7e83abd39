//! Any bytes as tar archives, each a layer over those before it.
//!
//! Invariants:
//! - nothing panics, loops or takes more memory than the bounds that `cargo fuzz` is given;
//! - the segments of a sparse file are in order, inside of it, and add up to the data in the archive;
//! - the tree of a layer can be written as a dump and read again;
//! - no whiteout and no mark of ours is left in a merged tree;
//! - a merged tree can be written as an image, and reading and writing that gives the same bytes.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| cofolio_image::import::fuzz::layers(data));
