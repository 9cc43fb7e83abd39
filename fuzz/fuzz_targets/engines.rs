//! Any bytes as podman's records of images, layers and containers, and as settings of podman, Docker and containerd.
//!
//! Invariants:
//! - nothing panics, loops or takes more memory than the bounds that `cargo fuzz` is given;
//! - an image is found by each of its names, or the name is refused since several have it;
//! - the layers of an image lie one on the other, from one that has none below;
//! - no id leads out of the store.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| cofolio_image::source::engine::fuzz::documents(data));
