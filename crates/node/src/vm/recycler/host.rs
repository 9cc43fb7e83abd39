//! The host's side of a guest: what it holds of the guest's memory, and how busy the host is.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::controller::Pressure;
use crate::kernel_text;
use crate::ledger::stalled_percent;
use crate::vm::ram::{Ram, anonymous};

/// What the host holds of a guest's memory, in private pages.
pub(super) trait Host: Send {
    /// Bytes, counted page by page.
    ///
    /// # Errors
    /// Those of looking at the VMM's process.
    fn count(&mut self) -> io::Result<u64>;

    /// About as many, by a counter of the kernel's, which costs next to nothing; once they were counted.
    ///
    /// # Errors
    /// Those of looking at the VMM's process.
    fn estimate(&mut self) -> io::Result<u64>;

    /// Why it would be unsafe, or of no use, to take memory from the guest.
    ///
    /// # Errors
    /// Those of looking at the VMM's process.
    fn refusal(&mut self) -> io::Result<Option<String>>;
}

/// The process of a VMM.
#[derive(Debug)]
pub(super) struct Vmm {
    proc: PathBuf,
    pid: u32,
    ram: Ram,
    /// Anonymous memory that was not the guest's when it was counted last.
    emulator: u64,
}

impl Vmm {
    /// The process `pid`, whose guest has `memory` bytes. `proc` is `/proc`.
    ///
    /// # Errors
    /// Those of [`Ram::find`].
    pub(super) fn new(proc: &Path, pid: u32, memory: u64) -> io::Result<Self> {
        let ram = Ram::find(proc, pid, memory)?;
        Ok(Self { proc: proc.to_owned(), pid, ram, emulator: 0 })
    }
}

impl Host for Vmm {
    fn count(&mut self) -> io::Result<u64> {
        let private = self.ram.resident()?.private();
        self.emulator = anonymous(&self.proc, self.pid)?.saturating_sub(private);
        Ok(private)
    }

    fn estimate(&mut self) -> io::Result<u64> {
        Ok(anonymous(&self.proc, self.pid)?.saturating_sub(self.emulator))
    }

    fn refusal(&mut self) -> io::Result<Option<String>> {
        refusal(&self.proc.join(self.pid.to_string()))
    }
}

/// Why memory cannot be taken from the guest of a process, by what that has open and how its memory
/// is backed.
fn refusal(process: &Path) -> io::Result<Option<String>> {
    let fds = fs::read_dir(process.join("fd"))?;
    let open = fds.filter_map(|fd| fs::read_link(fd.ok()?.path()).ok());
    for path in open {
        let name = path.to_string_lossy();
        if name.starts_with("/dev/vfio") || name.starts_with("/dev/iommu") {
            return Ok(Some("it has a device of the host, which may write to any page".to_owned()));
        }
        if name.starts_with("/dev/vhost-vdpa") {
            return Ok(Some("it has a vDPA device, which may write to any page".to_owned()));
        }
    }
    let status = kernel_text::read(&process.join("status"))?;
    let is_some = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.is_some_and(|line| !line.trim().starts_with("0 "))
    };
    if is_some("VmLck:") {
        return Ok(Some("its memory is locked, so the VMM discards nothing".to_owned()));
    }
    if is_some("HugetlbPages:") {
        let why = "its memory is huge pages of hugetlbfs, of which a balloon takes only parts";
        return Ok(Some(why.to_owned()));
    }
    Ok(None)
}

/// What the tasks of the host wait for; nothing where the kernel does not say it. `proc` is `/proc`.
pub(super) fn pressure(proc: &Path) -> Pressure {
    let some = |what: &str| {
        let text = fs::read_to_string(proc.join("pressure").join(what)).ok()?;
        stalled_percent(&text)
    };
    Pressure { cpu: some("cpu").unwrap_or(0.0), memory: some("memory").unwrap_or(0.0) }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A process that has these files open, and these lines in its status.
    fn refused(open: &[&str], status: &str) -> Option<String> {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("fd")).unwrap();
        for (number, path) in open.iter().enumerate() {
            symlink(path, dir.path().join("fd").join(number.to_string())).unwrap();
        }
        fs::write(dir.path().join("status"), status).unwrap();
        refusal(dir.path()).unwrap()
    }

    #[test]
    fn memory_that_cannot_be_discarded_is_refused() {
        let free = "VmLck:\t       0 kB\nAnonHugePages:\t 2048 kB\nHugetlbPages:\t       0 kB\n";
        assert_eq!(refused(&["/dev/null", "/dev/kvm", "socket:[7]"], free), None);
        for (open, word) in [
            ("/dev/vfio/vfio", "device of the host"),
            ("/dev/vfio/devices/vfio0", "device of the host"),
            ("/dev/iommu", "device of the host"),
            ("/dev/vhost-vdpa-0", "vDPA"),
        ] {
            assert!(refused(&["/dev/kvm", open], free).unwrap().contains(word), "{open}");
        }
        let locked = "VmLck:\t  524288 kB\nHugetlbPages:\t       0 kB\n";
        assert!(refused(&[], locked).unwrap().contains("locked"));
        let huge = "VmLck:\t       0 kB\nHugetlbPages:\t  524288 kB\n";
        assert!(refused(&[], huge).unwrap().contains("hugetlbfs"));
    }

    #[test]
    fn pressure_is_read_where_the_kernel_has_it() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(pressure(dir.path()), Pressure::default());
        fs::create_dir(dir.path().join("pressure")).unwrap();
        let text = |avg10| format!("some avg10={avg10} avg60=1.00 avg300=1.00 total=7\n");
        fs::write(dir.path().join("pressure/cpu"), text("61.50")).unwrap();
        assert_eq!(pressure(dir.path()), Pressure { cpu: 61.5, memory: 0.0 });
    }
}
