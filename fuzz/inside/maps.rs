//! The module `processes::fuzz` of crate node, which only `--cfg fuzzing` builds: it sees what is
//! private there.
//!
//! It takes any bytes and panics where an invariant of its target in `fuzz_targets/` does not hold.

use super::parse;

/// Lines of `/proc/PID/maps`.
pub fn maps(data: &[u8]) {
    for line in data.split(|&byte| byte == b'\n') {
        let Some(found) = parse(line) else { continue };
        assert!(found.inode != 0 && line.ends_with(found.path));
        for size in [0, 1, 4096, u64::MAX] {
            let addresses = found.addresses(size).unwrap_or_default();
            let length = addresses.end.saturating_sub(addresses.start);
            assert!(length <= size.saturating_sub(found.offset));
        }
        let (major, minor) = found.device;
        let numbers = format!(" r--p {:x} {major:x}:{minor:x} {} ", found.offset, found.inode);
        let again = [found.range, numbers.as_bytes(), found.path].concat();
        assert_eq!(parse(&again), Some(found));
    }
}
