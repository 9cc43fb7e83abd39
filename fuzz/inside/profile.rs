//! The module `profile::fuzz` of crate node, which only `--cfg fuzzing` builds: it sees what is
//! private there.
//!
//! It takes any bytes and panics where an invariant of its target in `fuzz_targets/` does not hold.

#![allow(clippy::unwrap_used, reason = "a panic is how a fuzz target reports")]

use std::collections::BTreeMap;
use std::os::unix::ffi::OsStrExt as _;

use super::Profile;

/// A profile of an image that has two objects.
pub fn document(data: &[u8]) {
    let Ok(profile) = serde_json::from_slice::<Profile>(data) else { return };
    let objects = ['0', '1'].map(|digit| digit.to_string().repeat(64).parse().unwrap());
    let sizes = BTreeMap::from([(objects[0], 10_000), (objects[1], 1 << 62)]);
    if profile.check(&objects[0], &sizes).is_err() {
        return;
    }
    let mut bytes = 0;
    for file in &profile.files {
        let end = file.ranges.iter().fold(0, |end, (offset, length)| {
            assert!(*offset >= end && *length > 0);
            bytes += length;
            offset + length
        });
        assert!(end <= sizes[&file.object]);
    }
    let dirs = profile.written.as_deref().unwrap_or_default();
    assert!(dirs.iter().all(|dir| dir.is_absolute() && !dir.as_os_str().as_bytes().contains(&0)));
    assert!(dirs.is_sorted());
    assert!(profile.bytes() == bytes && bytes <= sizes.values().sum::<u64>());
    let again = serde_json::to_vec(&profile).unwrap();
    assert_eq!(serde_json::from_slice::<Profile>(&again).unwrap(), profile);
}
