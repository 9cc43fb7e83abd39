//! What the tests of this crate share.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    reason = "shared by several test binaries, none of which uses all of it; a failure may panic"
)]

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use cofolio_store::{Digest, InitOptions, Staging, Store};

/// A directory that is removed with everything in it, immutable files included.
pub struct Scratch {
    pub path: PathBuf,
}

impl Scratch {
    pub fn new(name: &str) -> Self {
        Self::below(&std::env::temp_dir(), name)
    }

    pub fn below(parent: &Path, name: &str) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = parent.join(format!("cofolio-store-{name}-{}-{number}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        Self { path }
    }

    pub fn store(&self) -> Store {
        Store::open_or_init(&self.path, &InitOptions::default()).unwrap()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Ok(store) = Store::open(&self.path) {
            let _ = store.destroy();
        }
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

/// Bytes that differ from block to block and from seed to seed.
pub fn content(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// A stand-in for a metadata image: lines of digest and size. The store does not look into images.
pub fn image_of(staging: &Staging, objects: &[(Digest, u64)]) -> Digest {
    let mut image = staging.image_writer().unwrap();
    for (digest, size) in objects {
        writeln!(image, "{digest} {size}").unwrap();
    }
    image.finish().unwrap()
}
