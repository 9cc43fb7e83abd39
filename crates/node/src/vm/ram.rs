//! A guest's memory, as the host sees it: a mapping of the VMM's.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use cofolio_sys::pagemap::{Query, Region, category, scan};

use crate::kernel_text;

/// VMMs map a guest's memory at multiples of this, for huge pages.
const ALIGN: u64 = 2 << 20;

/// A guest's memory in a process.
#[derive(Debug)]
pub struct Ram {
    /// Of the process, in `/proc`.
    dir: PathBuf,
    pagemap: File,
    addresses: Range<u64>,
}

impl Ram {
    /// The memory of a guest that has `bytes` of it, in the process `pid`, if it is private and
    /// anonymous. `proc` is `/proc`.
    ///
    /// # Errors
    /// Those of reading `/proc/PID`; `NotFound` if the process has no such mapping.
    pub fn find(proc: &Path, pid: u32, bytes: u64) -> io::Result<Self> {
        let dir = proc.join(pid.to_string());
        let maps = kernel_text::read(&dir.join("maps"))?;
        let addresses = find_in(&maps, bytes).ok_or_else(|| {
            let what = format!("process {pid} has no private mapping of {bytes} bytes");
            io::Error::new(io::ErrorKind::NotFound, what)
        })?;
        Ok(Self { pagemap: File::open(dir.join("pagemap"))?, dir, addresses })
    }

    /// How many bytes of it the host holds, and how many of these a file has (which were merged).
    ///
    /// # Errors
    /// Those of [`scan`].
    pub fn resident(&self) -> io::Result<Resident> {
        // The kernel's page of zeros takes nothing.
        let query = Query {
            mask: category::PRESENT,
            inverted: category::ZERO,
            returned: category::FILE,
            write_protect: false,
        };
        let mut resident = Resident::default();
        scan(&self.pagemap, self.addresses.clone(), query, |Region { start, end, categories }| {
            resident.bytes += end - start;
            if categories & category::FILE != 0 {
                resident.of_files += end - start;
            }
        })?;
        Ok(resident)
    }
}

impl Ram {
    /// How many bytes of it are as in the pools of merged pages, or in the image: what is mapped of these
    /// and was not written to since. The guest need not have touched it.
    ///
    /// # Errors
    /// Those of reading `/proc/PID/maps` and of [`scan`].
    pub fn merged(&self) -> io::Result<u64> {
        let maps = kernel_text::read(&self.dir.join("maps"))?;
        let pools = maps.lines().filter_map(mapping).filter(|it| is_merged(it.name));
        // A page that was written to is the process's own.
        let query = Query { mask: category::PRESENT, inverted: category::FILE, ..Query::default() };
        let mut bytes = 0;
        for pool in pools.filter(|it| self.addresses.contains(&it.addresses.start)) {
            bytes += pool.addresses.end - pool.addresses.start;
            let count = |region: Region| bytes -= region.end - region.start;
            scan(&self.pagemap, pool.addresses, query, count)?;
        }
        Ok(bytes)
    }

    /// How many bytes of it are the kernel's page of zeros.
    ///
    /// # Errors
    /// Those of [`scan`].
    pub fn zeros(&self) -> io::Result<u64> {
        let query = Query { mask: category::PRESENT | category::ZERO, ..Query::default() };
        let mut bytes = 0;
        let count = |region: Region| bytes += region.end - region.start;
        scan(&self.pagemap, self.addresses.clone(), query, count)?;
        Ok(bytes)
    }
}

/// What the host holds of a guest's memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Resident {
    /// In bytes.
    pub bytes: u64,
    /// Of these, in pages of files.
    pub of_files: u64,
}

impl Resident {
    /// Private bytes.
    pub fn private(self) -> u64 {
        self.bytes - self.of_files
    }
}

/// A line of `/proc/PID/maps`.
pub(super) struct Mapping<'l> {
    pub(super) addresses: Range<u64>,
    pub(super) access: &'l str,
    /// Empty for anonymous memory.
    pub(super) name: &'l str,
}

pub(super) fn mapping(line: &str) -> Option<Mapping<'_>> {
    let mut words = line.split_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let address = |text| u64::from_str_radix(text, 16).ok();
    let addresses = address(start)?..address(end)?;
    Some(Mapping { addresses, access: words.next()?, name: words.nth(3).unwrap_or_default() })
}

/// Whether pages of a mapping in a guest's memory were merged.
fn is_merged(name: &str) -> bool {
    name.starts_with("/memfd:cofolio-pool") || is_of_image(name)
}

/// Whether a file is a pack or a segment.
pub(super) fn is_of_image(path: &str) -> bool {
    path.ends_with(".segment") || path.ends_with(".dax")
}

/// The addresses of a guest's memory: the largest part of the address space that is readable,
/// writable and private without a hole, and holds that much from a multiple of 2 MiB on. Other
/// mappings can follow at once, and merged pages are mappings of their own.
fn find_in(maps: &str, bytes: u64) -> Option<Range<u64>> {
    let mut runs: Vec<Range<u64>> = Vec::new();
    for Mapping { addresses, access, name } in maps.lines().filter_map(mapping) {
        if !access.starts_with("rw-p") || !(name.is_empty() || is_merged(name)) {
            continue;
        }
        match runs.last_mut().filter(|last| last.end == addresses.start) {
            Some(last) => last.end = addresses.end,
            None => runs.push(addresses),
        }
    }
    let ram = |run: &Range<u64>| {
        let start = run.start.next_multiple_of(ALIGN);
        (start + bytes <= run.end).then_some(start..start + bytes)
    };
    runs.sort_by_key(|run| run.end - run.start);
    runs.iter().rev().find_map(ram)
}

/// Anonymous memory of a process, in bytes: a counter of the kernel's, which costs next to nothing.
///
/// # Errors
/// Those of reading `/proc/PID/status`; `InvalidData` if it has no such line.
pub(super) fn anonymous(proc: &Path, pid: u32) -> io::Result<u64> {
    let status = kernel_text::read(&proc.join(pid.to_string()).join("status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    kib.map(|kib| kib << 10).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_of_a_guest_is_found() {
        let maps = "\
55d4c0000000-55d4c8000000 rw-p 00000000 00:00 0                          [heap]
7f0000000000-7f0007c00000 ---p 00000000 00:00 0
7f0007c00000-7f0007e00000 r--s 00000000 fe:00 12  /store/segments/a.dax
7f0007e00000-7f0027e00000 rw-p 00000000 00:00 0
7f0027e00000-7f0027e01000 ---p 00000000 00:00 0
7f0030000000-7f0038000000 rw-p 00000000 00:00 0
";
        let found = find_in(maps, 512 << 20);
        assert_eq!(found, Some(0x7f00_07e0_0000..0x7f00_27e0_0000));
        assert_eq!(find_in(maps, 1 << 30), None);
        // Merged pages lie between, and something else before it became one mapping with it.
        let maps = "\
7f0007dfd000-7f000a000000 rw-p 00000000 00:00 0
7f000a000000-7f000a002000 rw-p 00003000 00:05 99  /memfd:cofolio-pool (deleted)
7f000a002000-7f000a004000 rw-p 00003000 fe:00 12  /store/segments/a.segment
7f000a004000-7f0027e00000 rw-p 00000000 00:00 0
";
        assert_eq!(find_in(maps, 512 << 20), Some(0x7f00_07e0_0000..0x7f00_27e0_0000));
    }
}
