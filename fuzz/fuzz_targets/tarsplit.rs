//! Any bytes as the lines of a tar-split, which podman keeps of each layer, over the files of one.
//!
//! Invariants:
//! - nothing panics, loops or takes more memory than the bounds that `cargo fuzz` is given;
//! - an archive has no more bytes than its lines bring;
//! - nothing beside the layer is read, whatever names and links say.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| cofolio_image::import::fuzz::tar_split(data));
