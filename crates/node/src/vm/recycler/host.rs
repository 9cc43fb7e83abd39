//! The host's side of a guest: the guest's resident memory, and the load of the host.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::controller::Pressure;
use crate::kernel_text;
use crate::ledger::stalled_percent;
use crate::processes::open_files;
use crate::vm::ram::Ram;

/// Pages of a guest's memory that have a content, in bytes. Others were never touched, or
/// discarded.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Filled {
    /// Those that the host holds for this guest alone.
    pub(super) private: u64,
    /// Those that were merged, and zeros: they cost the host no page, but the guest may use them.
    pub(super) shared: u64,
}

impl Filled {
    /// All of them.
    pub(super) fn bytes(self) -> u64 {
        self.private + self.shared
    }
}

/// The host's side of a guest.
pub(super) trait Host: Send {
    /// Counts the guest's pages with a content one by one.
    ///
    /// # Errors
    /// Those of looking at the VMM's process.
    fn count(&mut self) -> io::Result<Filled>;

    /// Estimates the same from a cheap counter of the kernel, after the first count.
    ///
    /// # Errors
    /// Those of looking at the VMM's process.
    fn estimate(&mut self) -> io::Result<Filled>;

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
    /// Figures of the last count: the kernel's counter, and the guest's pages.
    counted: u64,
    filled: Filled,
}

/// Where the kernel's counter falls by so much, pages may have been merged, and are counted anew.
const FALLEN_MIN: u64 = 4 << 20;

impl Vmm {
    /// The process `pid`, whose guest has `memory` bytes. `proc` is `/proc`.
    ///
    /// # Errors
    /// Those of [`Ram::find`].
    pub(super) fn new(proc: &Path, pid: u32, memory: u64) -> io::Result<Self> {
        let ram = Ram::find(proc, pid, memory)?;
        Ok(Self { proc: proc.to_owned(), pid, ram, counted: 0, filled: Filled::default() })
    }
}

impl Host for Vmm {
    fn count(&mut self) -> io::Result<Filled> {
        let content = self.ram.content()?;
        let (private, shared) = (content.resident.private(), content.shared_bytes());
        (self.counted, self.filled) = (self.ram.counted()?, Filled { private, shared });
        Ok(self.filled)
    }

    fn estimate(&mut self) -> io::Result<Filled> {
        let counted = self.ram.counted()?;
        if counted + FALLEN_MIN <= self.counted {
            return self.count();
        }
        // The rest is the emulator's.
        let emulator = self.counted.saturating_sub(self.filled.private);
        Ok(Filled { private: counted.saturating_sub(emulator), ..self.filled })
    }

    fn refusal(&mut self) -> io::Result<Option<String>> {
        let refusal = refusal(&self.proc.join(self.pid.to_string()))?;
        Ok(refusal.or_else(|| self.ram.refusal()))
    }
}

/// Reason why memory cannot be taken from the guest of this process, from its open files and locked
/// memory.
fn refusal(process: &Path) -> io::Result<Option<String>> {
    for (_, path) in open_files(process)? {
        let name = path.to_string_lossy();
        if name.starts_with("/dev/vfio") || name.starts_with("/dev/iommu") {
            return Ok(Some("it has a device of the host, which may write to any page".to_owned()));
        }
        if name.starts_with("/dev/vhost-vdpa") {
            return Ok(Some("it has a vDPA device, which may write to any page".to_owned()));
        }
    }
    let status = kernel_text::read(&process.join("status"))?;
    let locked = status.lines().find_map(|line| line.strip_prefix("VmLck:"));
    if locked.is_some_and(|line| !line.trim().starts_with("0 ")) {
        return Ok(Some("its memory is locked, so the VMM discards nothing".to_owned()));
    }
    Ok(None)
}

/// Pressure on the host; zero if the kernel does not report it. `proc` is `/proc`.
pub(super) fn pressure(proc: &Path) -> Pressure {
    let some = |what: &str| {
        let text = fs::read_to_string(proc.join("pressure").join(what)).ok()?;
        stalled_percent(&text)
    };
    Pressure { cpu: some("cpu").unwrap_or(0.0), memory: some("memory").unwrap_or(0.0) }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests may panic")]

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
        let free = "VmLck:\t       0 kB\nVmPin:\t 2048 kB\n";
        assert_eq!(refused(&["/dev/null", "/dev/kvm", "socket:[7]"], free), None);
        for (open, word) in [
            ("/dev/vfio/vfio", "device of the host"),
            ("/dev/vfio/devices/vfio0", "device of the host"),
            ("/dev/iommu", "device of the host"),
            ("/dev/vhost-vdpa-0", "vDPA"),
        ] {
            assert!(refused(&["/dev/kvm", open], free).unwrap().contains(word), "{open}");
        }
        let locked = "VmLck:\t  524288 kB\nVmPin:\t       0 kB\n";
        assert!(refused(&[], locked).unwrap().contains("locked"));
    }

    /// Merged pages and zeros that a guest used were not counted, so as much freed memory of it
    /// seemed to be in use.
    #[test]
    fn merged_pages_and_zeros_of_a_guest_are_counted() {
        const MIB: usize = 1 << 20;
        const RAM: usize = 64 * MIB;
        // The guest's memory is this process's. Nothing of it has been touched yet.
        let mut ram = vec![0_u8; RAM + 4 * MIB];
        let skip = (ram.as_ptr() as usize).next_multiple_of(2 * MIB) - ram.as_ptr() as usize;
        let ram = &mut ram[skip..skip + RAM];
        let (start, pid) = (ram.as_ptr() as usize, std::process::id());
        let dir = tempfile::tempdir().unwrap();
        let process = dir.path().join(pid.to_string());
        fs::create_dir(&process).unwrap();
        // The second half is of a pool and a segment, and the host has none of these pages.
        let maps = format!(
            "{start:x}-{a:x} rw-p 00000000 00:00 0\n\
             {a:x}-{b:x} rw-p 00000000 00:05 99 /memfd:cofolio-pool (deleted)\n\
             {b:x}-{end:x} rw-p 00000000 fe:00 12 /store/segments/a.segment\n",
            a = start + 32 * MIB,
            b = start + 48 * MIB,
            end = start + RAM,
        );
        fs::write(process.join("maps"), maps).unwrap();
        symlink("/proc/self/pagemap", process.join("pagemap")).unwrap();
        let page = cofolio_sys::cache::page_size();
        let say = |bytes: usize| {
            let statm = format!("99999 {} 0 0 0 0 0\n", bytes as u64 / page);
            fs::write(process.join("statm"), statm).unwrap();
        };
        let filled = |private: usize, shared: usize| Filled {
            private: (private * MIB) as u64,
            shared: (shared * MIB) as u64,
        };
        ram[..8 * MIB].fill(1);
        // Read, but never written to.
        assert!(ram[8 * MIB..12 * MIB].iter().all(|byte| *byte == 0));
        // No longer as in the pool, nor as in the segment.
        ram[32 * MIB..38 * MIB].fill(1);
        ram[62 * MIB..].fill(1);
        // Beside these, the emulator has 100 MiB.
        say(116 * MIB);
        let mut vmm = Vmm::new(dir.path(), pid, RAM as u64).unwrap();
        assert_eq!(vmm.count().unwrap(), filled(16, 4 + 10 + 14));
        // Now the counter alone changes.
        say(126 * MIB);
        assert_eq!(vmm.estimate().unwrap(), filled(26, 28));
        say(113 * MIB);
        assert_eq!(vmm.estimate().unwrap(), filled(13, 28));
        // It has fallen so far that pages may have been merged.
        ram[12 * MIB..14 * MIB].fill(1);
        say(112 * MIB);
        assert_eq!(vmm.estimate().unwrap(), filled(18, 28));
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
