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
            let what = format!("process {pid} {}", why_not(&maps, bytes));
            io::Error::new(io::ErrorKind::NotFound, what)
        })?;
        Ok(Self { pagemap: File::open(dir.join("pagemap"))?, dir, addresses })
    }

    /// What of it the host holds.
    ///
    /// # Errors
    /// Those of [`scan`].
    pub fn resident(&self) -> io::Result<Resident> {
        self.count(|_| {})
    }

    /// The same. Calls `each` with the addresses of private pages, in their order.
    ///
    /// # Errors
    /// Those of [`scan`].
    pub(super) fn count(&self, mut each: impl FnMut(Range<u64>)) -> io::Result<Resident> {
        let query = Query {
            mask: category::PRESENT,
            returned: category::FILE | category::ZERO,
            ..Query::default()
        };
        let mut resident = Resident::default();
        scan(&self.pagemap, self.addresses.clone(), query, |Region { start, end, categories }| {
            // The kernel's page of zeros takes nothing.
            if categories & category::ZERO != 0 {
                resident.zeros += end - start;
                return;
            }
            resident.bytes += end - start;
            if categories & category::FILE != 0 {
                resident.of_files += end - start;
            } else {
                each(start..end);
            }
        })?;
        Ok(resident)
    }

    /// What of it was merged, in the order of addresses: mappings of pools, and of the image. A page that was
    /// written to since is private.
    ///
    /// # Errors
    /// Those of reading `/proc/PID/maps`.
    pub(super) fn merged(&self) -> io::Result<Merged> {
        let maps = kernel_text::read(&self.dir.join("maps"))?;
        let merged = maps.lines().filter_map(mapping).filter(|it| is_merged(it.name));
        let merged = merged.filter(|it| self.addresses.contains(&it.addresses.start));
        let (pools, images): (Vec<_>, Vec<_>) = merged.partition(|it| !is_of_image(it.name));
        let pieces = |all: Vec<Mapping<'_>>| all.iter().map(Mapping::piece).collect();
        Ok(Merged { pools: pieces(pools), images: pieces(images) })
    }
}

/// What the host holds of a guest's memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Resident {
    /// In bytes.
    pub bytes: u64,
    /// Of these, in pages of files, which were merged.
    pub of_files: u64,
    /// Beside these, in the kernel's page of zeros, which takes nothing.
    pub zeros: u64,
}

impl Resident {
    /// Private bytes.
    pub fn private(self) -> u64 {
        self.bytes - self.of_files
    }
}

/// A file, by its device and inode.
pub(super) type FileId = (u64, u64);

/// A mapping of a part of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) addresses: Range<u64>,
    pub(super) file: FileId,
    /// Of the first byte, in the file.
    pub(super) offset: u64,
}

/// What of a guest's memory was merged.
#[derive(Debug, Default)]
pub(super) struct Merged {
    /// With pools of merged pages.
    pub(super) pools: Vec<Piece>,
    /// With files of the image.
    pub(super) images: Vec<Piece>,
}

/// A line of `/proc/PID/maps`.
pub(super) struct Mapping<'l> {
    pub(super) addresses: Range<u64>,
    pub(super) access: &'l str,
    offset: u64,
    file: FileId,
    /// Empty for anonymous memory.
    pub(super) name: &'l str,
}

impl Mapping<'_> {
    pub(super) fn piece(&self) -> Piece {
        Piece { addresses: self.addresses.clone(), file: self.file, offset: self.offset }
    }
}

pub(super) fn mapping(line: &str) -> Option<Mapping<'_>> {
    // A name may have spaces.
    let mut words = line.splitn(6, ' ');
    let (start, end) = words.next()?.split_once('-')?;
    let number = |text| u64::from_str_radix(text, 16).ok();
    let addresses = number(start)?..number(end)?;
    let access = words.next()?;
    let offset = number(words.next()?)?;
    let (major, minor) = words.next()?.split_once(':')?;
    let file = (number(major)? << 32 | number(minor)?, words.next()?.parse().ok()?);
    let name = words.next().unwrap_or_default().trim_start();
    let name = name.strip_suffix(" (deleted)").unwrap_or(name);
    Some(Mapping { addresses, access, offset, file, name })
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
    for Mapping { addresses, access, name, .. } in maps.lines().filter_map(mapping) {
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

/// Why nothing was found there.
fn why_not(maps: &str, bytes: u64) -> String {
    let mut large = maps.lines().filter_map(mapping).filter(|it| {
        let Range { start, end } = it.addresses;
        it.access.starts_with("rw") && !it.name.is_empty() && end - start >= bytes
    });
    match large.next() {
        Some(Mapping { access, name, .. }) => {
            let how = if access.ends_with('s') { "shared" } else { "of a file or of huge pages" };
            format!("has its guest's memory in a mapping that is {how}: {name}")
        }
        None => format!("has no private mapping of {bytes} bytes"),
    }
}

/// Anonymous memory of a process, in bytes: a counter of the kernel's, which costs next to nothing.
///
/// # Errors
/// Those of reading `/proc/PID/statm`; `InvalidData` if it has no such figures.
pub(super) fn anonymous(proc: &Path, pid: u32) -> io::Result<u64> {
    // Size, resident pages, and those of files and shared memory among them (proc_pid_statm(5)).
    let statm = kernel_text::read(&proc.join(pid.to_string()).join("statm"))?;
    let mut pages = statm.split(' ').skip(1).map_while(|word| word.parse::<u64>().ok());
    let (resident, shared) = pages.next().zip(pages.next()).ok_or(io::ErrorKind::InvalidData)?;
    Ok(resident.saturating_sub(shared) * cofolio_sys::cache::page_size())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests may panic")]

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

    #[test]
    fn memory_that_is_not_private_is_named() {
        let maps = "\
7f0000000000-7f0020000000 rw-s 00000000 00:01 1036                       /memfd:ram (deleted)
7f0030000000-7f0030001000 rw-p 00000000 00:00 0
";
        assert!(why_not(maps, 512 << 20).ends_with("that is shared: /memfd:ram"));
        let maps = "7f0000000000-7f0020000000 rw-p 00000000 00:11 7 /anon_hugepage (deleted)\n";
        assert!(why_not(maps, 512 << 20).ends_with("huge pages: /anon_hugepage"));
        assert_eq!(why_not(maps, 1 << 30), "has no private mapping of 1073741824 bytes");
    }

    #[test]
    fn anonymous_memory_is_what_is_no_files() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("7")).unwrap();
        std::fs::write(dir.path().join("7/statm"), "24680 1300 300 12 0 999 0\n").unwrap();
        assert_eq!(anonymous(dir.path(), 7).unwrap(), 1000 * cofolio_sys::cache::page_size());
        std::fs::write(dir.path().join("7/statm"), "24680\n").unwrap();
        assert!(anonymous(dir.path(), 7).is_err());
    }
}
