//! The kernel of the guest, as its first process finds it.

use std::fmt::Display;
use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use rustix::mount::{MountFlags, mount};
use rustix::system::finit_module;

use crate::MODULES_DIR;

/// A result whose error is text.
pub type Result<T, E = String> = std::result::Result<T, E>;

/// Adds the failed action to an error.
pub trait During<T> {
    /// Puts the action before the error's text.
    ///
    /// # Errors
    /// The error, as text.
    fn during(self, what: impl Display) -> Result<T>;
}

impl<T, E: Display> During<T> for Result<T, E> {
    fn during(self, what: impl Display) -> Result<T> {
        self.map_err(|error| format!("{what}: {error}"))
    }
}

/// Says something in the kernel's log.
pub fn say(text: &str) {
    let log = File::options().write(true).open("/dev/kmsg");
    // It may be missing; nothing depends on it.
    let _ = log.and_then(|mut log| log.write_all(format!("<6>cofolio-guest: {text}\n").as_bytes()));
}

/// Mounts `/dev`, `/proc` and `/sys` below a directory.
///
/// # Errors
/// The one that could not be mounted, and why.
pub fn kernel_filesystems(root: &Path) -> Result<()> {
    let none = MountFlags::empty();
    let private = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    for (kind, path, flags) in
        [("devtmpfs", "dev", none), ("proc", "proc", private), ("sysfs", "sys", private)]
    {
        let path = root.join(path);
        fs::create_dir_all(&path).during(path.display())?;
        mount(kind, &path, kind, flags, None).during(path.display())?;
    }
    Ok(())
}

/// Loads the modules of the initramfs, in the order of their names, and removes their files.
///
/// # Errors
/// The one that could not be loaded, and why.
pub fn load_modules() -> Result<()> {
    let Ok(entries) = fs::read_dir(MODULES_DIR) else { return Ok(()) };
    let mut paths: Vec<PathBuf> = entries.filter_map(|it| Some(it.ok()?.path())).collect();
    paths.sort();
    for path in paths {
        let file = File::open(&path).during(path.display())?;
        match finit_module(&file, c"", 0) {
            Err(rustix::io::Errno::EXIST) => {}
            other => other.during(format_args!("kernel module {}", path.display()))?,
        }
        fs::remove_file(&path).during(path.display())?;
    }
    Ok(())
}
