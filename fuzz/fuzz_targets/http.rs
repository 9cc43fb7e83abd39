//! Any bytes as what a client sends to the daemon.
//!
//! Invariants:
//! - nothing panics, loops or takes more memory than the bounds that `cargo fuzz` is given;
//! - the server ends the connection after the client has;
//! - what it answers is HTTP, and without the token, or the name of this machine, never 200.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| cofolio_daemon::fuzz::connection(data));
