//! Any bytes as the JSON of an image: index, manifest, config, `manifest.json` of `docker save`.
//!
//! Invariants:
//! - nothing panics, loops or takes more memory than the bounds that `cargo fuzz` is given;
//! - the entry that is chosen for a platform is one of the index;
//! - a digest that is accepted is spelled as it is shown, and makes no path that leads elsewhere;
//! - a platform reads back as it is shown.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| cofolio_image::import::fuzz::documents(data));
