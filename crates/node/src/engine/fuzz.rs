//! What the targets of `fuzz/` call: built with `--cfg fuzzing` only, and no part of the library otherwise.

/// A database of containerd's.
pub fn database(data: &[u8]) {
    super::bolt::fuzz(data);
}
