//! The module `mount::mountinfo::fuzz` of crate node, which only `--cfg fuzzing` builds: it sees what is
//! private there.
//!
//! It takes any bytes and panics where an invariant of its target in `fuzz_targets/` does not hold.

use std::os::unix::ffi::OsStrExt as _;

use super::{KernelMount, parse, source_of};

/// The text of `/proc/PID/mountinfo`.
pub fn mountinfo(data: &[u8]) {
    for mount in parse(data) {
        for name in ["lowerdir", "upperdir"] {
            assert!(mount.paths(name).count() <= mount.options.len());
        }
        if let Some(image) = mount.image() {
            assert!(mount.source.eq_ignore_ascii_case(&source_of(&image)));
        }
        assert_eq!(parse(&line(&mount)), [mount]);
    }
}

/// As the kernel would write it.
fn line(mount: &KernelMount) -> Vec<u8> {
    let (major, minor) = mount.device;
    let mut line = format!("{} {} {major}:{minor} ", mount.id, mount.parent).into_bytes();
    escape(&mut line, mount.root.as_os_str().as_bytes());
    escape(&mut line, mount.target.as_os_str().as_bytes());
    line.extend(b"rw ");
    mount.groups.iter().for_each(|group| line.extend(format!("shared:{group} ").bytes()));
    line.extend(b"- ");
    escape(&mut line, mount.filesystem.as_bytes());
    escape(&mut line, mount.source.as_bytes());
    line.extend(&mount.options);
    line
}

/// A field and the space behind it.
fn escape(line: &mut Vec<u8>, field: &[u8]) {
    for byte in field {
        match byte {
            b' ' | b'\t' | b'\n' | b'\\' | b'#' => line.extend(format!("\\{byte:03o}").bytes()),
            _ => line.push(*byte),
        }
    }
    line.push(b' ');
}
