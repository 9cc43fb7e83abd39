//! What tests of sharing look at: a content of some pages, and which of them are in the cache. Those of `crates/cofolio` use
//! it, too.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, reason = "every test file uses a part")]

use std::fs::File;
use std::path::Path;

use cofolio_sys::cache::{FileMap, page_size};
use rustix::fs::Advice;

/// Bytes of the content that both images have.
pub const SIZE: usize = 300 << 12;

/// That content, and others of the same size.
pub fn content(salt: usize) -> Vec<u8> {
    (0..SIZE).map(|i| u8::try_from((i / 4096 * 7 + i + salt) % 251).unwrap()).collect()
}

/// Its pages.
pub fn all_pages() -> u64 {
    SIZE as u64 / page_size()
}

/// Pages of a file in the cache that a mapping sees.
pub fn resident(path: &Path) -> u64 {
    let file = File::open(path).unwrap();
    FileMap::new(&file, file.metadata().unwrap().len()).unwrap().resident_pages().unwrap()
}

/// The kernel forgets what it has read of a file, and nobody has mapped.
pub fn forget(path: &Path) {
    rustix::fs::fadvise(File::open(path).unwrap(), 0, None, Advice::DontNeed).unwrap();
}
