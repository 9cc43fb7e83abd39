//! Any bytes as what trust rests on: keys in PEM, records of signatures, cosign's claims, policies in TOML.
//!
//! Invariants:
//! - nothing panics, loops or takes more memory than the bounds that `cargo fuzz` is given;
//! - a key and a record read back as they are written;
//! - a record vouches for what its key has signed, and for nothing else: not for another image, another config
//!   or another manifest, and no key of one kind does for the other kind;
//! - a claim that counts names the digest, and says that it is a signature of an image;
//! - of a policy's patterns the longest that fits a name counts, and what it asks for is what is asked.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| cofolio_image::trust::fuzz::trust(data));
