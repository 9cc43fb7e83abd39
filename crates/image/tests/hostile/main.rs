//! Images, layouts and registries that want to do harm. `docs/HOSTILE.md` lists each of them with
//! what becomes of it.
//!
//! Each is either refused, with an error that names what is wrong and where and a store that is
//! exactly as it was, or taken in faithfully because it harms nobody. They are made here, by code
//! that can be read: there are no files of bytes.

#![allow(
    missing_docs,
    unreachable_pub,
    clippy::cast_possible_truncation,
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a test program: it panics where it fails, and prints what it skips"
)]
#![allow(dead_code, reason = "the support is shared with the tests of imports and registries")]

mod archives;
mod bombs;
#[path = "../registry/common.rs"]
mod common;
mod documents;
mod harmless;
mod layouts;
mod registry;
#[path = "../registry/server.rs"]
mod server;
#[path = "../oci/support.rs"]
mod support;

use cofolio_image::error::ImportError;
use cofolio_image::import::{ImportOptions, import};
use cofolio_image::limits::Limits;
use cofolio_store::task::Task;

use support::*;

/// Imports, expects an error with all of `words` in it, and an untouched store.
fn refused(bench: &Bench, layout: &Layout, limits: Limits, words: &[&str]) -> ImportError {
    let before = bench.listing();
    let options = ImportOptions { limits, ..ImportOptions::default() };
    let error = match import(&bench.domain, &layout.source(), &options, &Task::default()) {
        Ok(report) => panic!("accepted, expected {words:?}: {report:?}"),
        Err(error) => error,
    };
    let text = error.to_string();
    for word in words {
        assert!(text.contains(word), "{text:?} does not say {word:?}");
    }
    assert_eq!(bench.listing(), before, "{text}: the store changed");
    error
}

/// A good layer below, the bad one on top: there is something that must be taken back.
fn bad_blob(blob: &Blob, words: &[&str]) {
    let bench = Bench::fast();
    let content: Vec<u8> = (0..300_000u32).flat_map(u32::to_le_bytes).collect();
    let good = Blob::gzip(&Tar::new().file("good", &content).dir("dir").file("f", b"x").end());
    let layout = Layout::image(bench.path("bad"), &[good, blob.clone()]);
    let digest = sha256(&blob.bytes);
    let words: Vec<&str> = words.iter().copied().chain([digest.as_str()]).collect();
    let error = refused(&bench, &layout, Limits::default(), &words);
    assert!(error.is_corrupt(), "{error:?}");
}

fn bad_tar(tar: Tar, words: &[&str]) {
    // Something before it, so that offsets are not 0 and objects are under way.
    let mut all = Tar::new().file("before", &[b'b'; 2000]).0;
    all.extend_from_slice(&tar.0);
    bad_blob(&Blob::gzip(&Tar(all).end()), words);
}
