//! Any bytes as what a registry or a user says: a name, a `WWW-Authenticate`, a `Location`, a token.
//!
//! Invariants:
//! - nothing panics, loops or takes more memory than the bounds that `cargo fuzz` is given;
//! - a name that is accepted is accepted again as it is kept, means the same, and can be asked for;
//! - a URL reads back as it is written, with whatever was put into its query;
//! - a token is not empty;
//! - a `Location` that names no server stays at the server that sent it.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| cofolio_image::registry::fuzz::answers(data));
