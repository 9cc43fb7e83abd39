//! Filesystems in files, for tests of what depends on the filesystem. Those of `crates/cofolio` use it, too.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    reason = "shared by several test binaries, none of which uses all of it; a failure may panic"
)]

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A filesystem in a file, mounted through a loop device; unmounted when dropped.
pub struct Volume {
    pub directory: PathBuf,
    pub image: PathBuf,
    kind: String,
}

impl Volume {
    /// Makes one of some megabytes, sparse, below `parent`, with these options of mkfs, and mounts it; says why not.
    pub fn new(parent: &Path, kind: &str, megabytes: u64, mkfs: &[&str]) -> Result<Self, String> {
        Self::with_options(parent, kind, megabytes, mkfs, "loop")
    }

    /// The same, mounted with these options, of which one is `loop`.
    pub fn with_options(
        parent: &Path,
        kind: &str,
        megabytes: u64,
        mkfs: &[&str],
        options: &str,
    ) -> Result<Self, String> {
        let (image, directory) = (parent.join("image"), parent.join("mnt"));
        std::fs::File::create(&image).unwrap().set_len(megabytes << 20).unwrap();
        std::fs::create_dir_all(&directory).unwrap();
        let volume = Self { directory, image, kind: kind.to_owned() };
        let force = if kind == "ext4" { "-F" } else { "-f" };
        let mut make = Command::new(format!("mkfs.{kind}"));
        run(make.args(["-q", force]).args(mkfs).arg(&volume.image))?;
        volume.mount(options).map(|()| volume)
    }

    pub fn mount(&self, options: &str) -> Result<(), String> {
        let mut mount = Command::new("mount");
        run(mount.args(["-t", &self.kind, "-o", options]).arg(&self.image).arg(&self.directory))
    }

    /// Fails while somebody uses it.
    pub fn unmount(&self) -> Result<(), String> {
        run(Command::new("umount").arg(&self.directory))
    }

    /// Its loop device.
    pub fn device(&self) -> PathBuf {
        let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let directory = std::fs::canonicalize(&self.directory).unwrap();
        let of_it = |line: &&str| line.split(' ').nth(4).map(Path::new) == Some(&*directory);
        let (_, source) = table.lines().rfind(of_it).unwrap().split_once(" - ").unwrap();
        let device = source.split(' ').nth(1).unwrap();
        assert!(device.starts_with("/dev/loop"), "{device}");
        device.into()
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        let _ = self.unmount();
    }
}

/// Runs a program that is expected to succeed; else says what it said.
pub fn run(command: &mut Command) -> Result<(), String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output().map_err(|e| format!("{name}: {e}"))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(format!("{name}: {}", said.trim().lines().next().unwrap_or_default()))
}
