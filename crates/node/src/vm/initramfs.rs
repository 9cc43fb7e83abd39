//! The initramfs of guests: their first process and the kernel modules that it loads.
//!
//! It depends on the kernel and the program alone, so guests share one file of it, and with it the
//! host's page cache: a VMM keeps it mapped as long as it runs.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};

use super::error::{Result, VmError};
use super::kernel::Kernel;
use super::shared::{INITRAMFS, SharedFile, shared_file};
use crate::mount::At as _;

/// Largest program, in bytes.
const GUEST_BYTES_MAX: u64 = 64 << 20;
/// What else is in it: another number for another layout.
const LAYOUT: u8 = 1;

/// The initramfs of a kernel in a directory (`<run>/vms`): the one that is there, or a new one.
///
/// # Errors
/// [`VmError::Kernel`], [`VmError::Guest`], [`VmError::Mount`].
pub fn initramfs(
    dir: &Path,
    kernel: &Kernel,
    guest: &Path,
    more_modules: &[&str],
) -> Result<SharedFile> {
    let wrong = |why: String| VmError::Guest { path: guest.to_owned(), why };
    let program = cofolio_image::files::read(guest, GUEST_BYTES_MAX);
    let program = program.map_err(|error| wrong(error.to_string()))?;
    if !is_static(&program) {
        return Err(wrong("it is not a program without libraries".to_owned()));
    }
    let mut key = Sha256::new();
    key.update([LAYOUT]);
    key.update(&program);
    for text in [kernel.version.as_str()].iter().chain(more_modules) {
        key.update(text);
        key.update([0]);
    }
    let found = fs::metadata(&kernel.image).at("looking at", &kernel.image)?;
    key.update(found.size().to_le_bytes());
    key.update(found.mtime().to_le_bytes());
    shared_file(dir, key, INITRAMFS, || {
        let mut archive = Archive::default();
        archive.directory("dev");
        // Where the console is a module there is none at first: Rust's runtime opens this in place
        // of missing standard streams, or aborts.
        archive.device("dev/null", 1, 3);
        archive.file("init", 0o755, &program);
        archive.directory("modules");
        for (number, (name, content)) in kernel.modules(more_modules)?.iter().enumerate() {
            archive.file(&format!("modules/{number:02}-{name}.ko"), 0o644, content);
        }
        Ok(archive.finish())
    })
}

/// Whether an ELF program asks for no dynamic linker.
fn is_static(program: &[u8]) -> bool {
    const PT_INTERP: u32 = 3;
    let u16_at = |at: usize| Some(u16::from_le_bytes(program.get(at..at + 2)?.try_into().ok()?));
    let u64_at = |at: usize| Some(u64::from_le_bytes(program.get(at..at + 8)?.try_into().ok()?));
    let segments = || {
        let start = usize::try_from(u64_at(32)?).ok()?;
        let (size, count) = (usize::from(u16_at(54)?), usize::from(u16_at(56)?));
        (0..count)
            .map(|index| {
                let at = start.checked_add(index.checked_mul(size)?)?;
                Some(u32::from_le_bytes(program.get(at..at.checked_add(4)?)?.try_into().ok()?))
            })
            .collect::<Option<Vec<_>>>()
    };
    program.starts_with(b"\x7fELF\x02\x01")
        && segments().is_some_and(|kinds| !kinds.contains(&PT_INTERP))
}

/// A cpio archive in the format "newc" (Documentation/driver-api/early-userspace/buffer-format.rst).
#[derive(Debug, Default)]
struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

impl Archive {
    fn directory(&mut self, name: &str) {
        self.entry(name, 0o040_755, &[]);
    }

    fn file(&mut self, name: &str, mode: u32, content: &[u8]) {
        self.entry(name, 0o100_000 | mode, content);
    }

    fn device(&mut self, name: &str, major: u32, minor: u32) {
        self.add(name, 0o020_666, (major, minor), &[]);
    }

    fn entry(&mut self, name: &str, mode: u32, content: &[u8]) {
        self.add(name, mode, (0, 0), content);
    }

    fn add(&mut self, name: &str, mode: u32, (major, minor): (u32, u32), content: &[u8]) {
        self.entries += 1;
        let (inode, size, name_size) = (self.entries, content.len(), name.len() + 1);
        let _ = write!(
            self.bytes,
            "070701{inode:08x}{mode:08x}{:08x}{:08x}{:08x}{:08x}{size:08x}{:08x}{:08x}{:08x}{:08x}{name_size:08x}{:08x}{name}\0",
            0, 0, 1, 0, 0, 0, major, minor, 0
        );
        self.align();
        let _ = self.bytes.write_all(content);
        self.align();
    }

    fn align(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, &[]);
        self.bytes
    }
}

/// A file that belongs to this program, beside it as it is installed and as it is built.
///
/// # Errors
/// [`VmError::Mount`].
pub(super) fn beside(name: &str) -> Result<Option<PathBuf>> {
    Ok(Some(place(name)?).filter(|path| path.is_file()))
}

fn place(name: &str) -> Result<PathBuf> {
    let own = std::env::current_exe().at("looking for", "this program")?;
    Ok(own.parent().unwrap_or(Path::new("/")).join("../lib/cofolio").join(name))
}

/// Where the guest's program is.
///
/// # Errors
/// [`VmError::Guest`].
pub(super) fn guest_program() -> Result<PathBuf> {
    let name = "cofolio-guest";
    let missing = "it is missing; `make build` and `make install` put it there";
    let failed = |path| VmError::Guest { path, why: missing.to_owned() };
    beside(name)?.map_or_else(|| Err(failed(place(name)?)), Ok)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests may panic")]

    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn cpio_reads_the_archive() {
        let mut archive = Archive::default();
        archive.directory("modules");
        archive.file("modules/00-a.ko", 0o644, b"content");
        archive.file("init", 0o755, &[7; 5000]);
        let dir = tempfile::tempdir().unwrap();
        let bytes = archive.finish();
        let mut cpio = Command::new("busybox");
        cpio.args(["cpio", "-i"]).current_dir(dir.path()).stdin(Stdio::piped());
        let Ok(mut child) = cpio.stderr(Stdio::null()).spawn() else {
            println!("SKIP cpio_reads_the_archive: no busybox");
            return;
        };
        child.stdin.take().unwrap().write_all(&bytes).unwrap();
        assert!(child.wait().unwrap().success());
        assert_eq!(fs::read(dir.path().join("modules/00-a.ko")).unwrap(), b"content");
        let init = dir.path().join("init");
        assert_eq!(fs::read(&init).unwrap(), [7; 5000]);
        assert_eq!(init.metadata().unwrap().mode() & 0o777, 0o755);
    }

    #[test]
    fn a_program_with_libraries_is_told_from_one_without() {
        // This test has libraries.
        let own = fs::read(std::env::current_exe().unwrap()).unwrap();
        assert!(own.len() > 1000 && !is_static(&own));
        assert!(!is_static(b"#!/bin/sh\n"));
        let mut without = own.clone();
        let count = usize::from(u16::from_le_bytes([own[56], own[57]]));
        let start = usize::try_from(u64::from_le_bytes(own[32..40].try_into().unwrap())).unwrap();
        for index in 0..count {
            let at = start + index * 56;
            if without[at] == 3 {
                without[at] = 0;
            }
        }
        assert!(is_static(&without));
        assert!(!is_static(&without[..100]));
    }
}
