//! A guest's memory, as the host sees it: a mapping of the VMM's.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use cofolio_sys::pagemap::{Query, Region, category, scan};

use crate::kernel_text;

/// QEMU maps a guest's memory at multiples of this, for huge pages.
const ALIGN: u64 = 2 << 20;
/// Cloud Hypervisor and Firecracker map what is below the hole for 32-bit devices apart from the rest.
const BELOW_HOLE: u64 = 3 << 30;
/// Filesystems, by `include/uapi/linux/magic.h`.
const TMPFS_MAGIC: u64 = 0x0102_1994;
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

/// A guest's memory in a process.
#[derive(Debug)]
pub struct Ram {
    /// Of the process, in `/proc`.
    dir: PathBuf,
    pagemap: File,
    /// Where it is: in one piece, or in two.
    parts: Vec<Range<u64>>,
    backing: Backing,
}

/// What a guest's memory is made of.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Backing {
    /// Private anonymous pages, and merged ones.
    Private,
    /// Pages of a file in memory (memfd, tmpfs). A VMM discards them by punching holes.
    Shared,
    /// Pages of hugetlbfs.
    Huge,
    /// Pages of a file on a disk.
    File(String),
}

impl Ram {
    /// The memory of a guest that has `bytes` of it, in the process `pid`. `proc` is `/proc`.
    ///
    /// # Errors
    /// Those of reading `/proc/PID`; `NotFound` if the process has no such mapping.
    pub fn find(proc: &Path, pid: u32, bytes: u64) -> io::Result<Self> {
        let dir = proc.join(pid.to_string());
        let maps = kernel_text::read(&dir.join("maps"))?;
        let (parts, file) = find_in(&maps, bytes).ok_or_else(|| {
            let what = format!("process {pid} has no mapping of {bytes} bytes");
            io::Error::new(io::ErrorKind::NotFound, what)
        })?;
        let backing = match file {
            None => Backing::Private,
            Some(Mapped { is_private, name }) => {
                let Range { start, end } = parts[0];
                let link = dir.join(format!("map_files/{start:x}-{end:x}"));
                match rustix::fs::statfs(&link)?.f_type.cast_unsigned() {
                    HUGETLBFS_MAGIC => Backing::Huge,
                    TMPFS_MAGIC if !is_private => Backing::Shared,
                    _ => Backing::File(name.to_owned()),
                }
            }
        };
        Ok(Self { pagemap: File::open(dir.join("pagemap"))?, dir, parts, backing })
    }

    /// Why a VMM cannot discard single pages of it, if so.
    pub(super) fn refusal(&self) -> Option<String> {
        match &self.backing {
            Backing::Private | Backing::Shared => None,
            Backing::Huge => Some(
                "its memory is made of huge pages (hugetlbfs), of which a pulse returns none"
                    .to_owned(),
            ),
            Backing::File(name) => Some(format!("its memory is the file {name}")),
        }
    }

    /// Memory of the process that is of the kind of the guest's, in bytes: a counter of the
    /// kernel's, which costs next to nothing.
    ///
    /// # Errors
    /// Those of reading `/proc/PID/status`; `InvalidData` if it has no such line.
    pub(super) fn counted(&self) -> io::Result<u64> {
        let counter = match self.backing {
            Backing::Private => "RssAnon:",
            Backing::Shared => "RssShmem:",
            Backing::Huge => "HugetlbPages:",
            Backing::File(_) => "RssFile:",
        };
        self.counter(counter)
    }

    /// What the VMM takes for itself, in private pages, where the host holds `held` bytes of the
    /// guest's memory. Fails like [`Ram::counted`].
    pub(super) fn emulator(&self, held: u64) -> io::Result<u64> {
        let anonymous = self.counter("RssAnon:")?;
        Ok(match self.backing {
            Backing::Private => anonymous.saturating_sub(held),
            _ => anonymous,
        })
    }

    fn counter(&self, name: &str) -> io::Result<u64> {
        let status = kernel_text::read(&self.dir.join("status"))?;
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        let kib = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
        kib.map(|kib| kib << 10).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    fn scan(&self, query: Query, mut count: impl FnMut(Region)) -> io::Result<()> {
        self.parts.iter().try_for_each(|part| scan(&self.pagemap, part.clone(), query, &mut count))
    }

    /// How many bytes of it the host holds, and how many of these were merged.
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
        let can_be_merged = self.backing == Backing::Private;
        self.scan(query, |Region { start, end, categories }| {
            resident.bytes += end - start;
            if can_be_merged && categories & category::FILE != 0 {
                resident.merged += end - start;
            }
        })?;
        Ok(resident)
    }

    /// How many bytes of it are as in the pools of merged pages: what is mapped of pools and was not
    /// written to since. The guest need not have touched it.
    ///
    /// # Errors
    /// Those of reading `/proc/PID/maps` and of [`scan`].
    pub fn merged(&self) -> io::Result<u64> {
        let maps = kernel_text::read(&self.dir.join("maps"))?;
        let pools = maps.lines().filter_map(mapping).filter(|it| is_pool(it.name));
        // A page that was written to is the process's own.
        let query = Query { mask: category::PRESENT, inverted: category::FILE, ..Query::default() };
        let mut bytes = 0;
        let is_guests = |at: &u64| self.parts.iter().any(|part| part.contains(at));
        for pool in pools.filter(|it| is_guests(&it.addresses.start)) {
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
        self.scan(query, |region| bytes += region.end - region.start)?;
        Ok(bytes)
    }
}

/// What the host holds of a guest's memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Resident {
    /// In bytes.
    pub bytes: u64,
    /// Of these, in pages of pools.
    pub merged: u64,
}

impl Resident {
    /// Bytes that only this guest has.
    pub fn private(self) -> u64 {
        self.bytes - self.merged
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

fn is_pool(name: &str) -> bool {
    name.starts_with("/memfd:cofolio-pool")
}

/// The file of a guest's memory.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Mapped<'l> {
    is_private: bool,
    name: &'l str,
}

/// Where a guest's memory of so many bytes is, and its file if it has one.
fn find_in(maps: &str, bytes: u64) -> Option<(Vec<Range<u64>>, Option<Mapped<'_>>)> {
    let mut runs: Vec<Range<u64>> = Vec::new();
    let mut of_files = Vec::new();
    for Mapping { addresses, access, name } in maps.lines().filter_map(mapping) {
        if !access.starts_with("rw-") {
            continue;
        }
        let is_private = access.ends_with('p');
        if !is_private || !(name.is_empty() || is_pool(name)) {
            of_files.push((addresses, Mapped { is_private, name }));
            continue;
        }
        // Merged pages are mappings of their own.
        match runs.last_mut().filter(|last| last.end == addresses.start) {
            Some(last) => last.end = addresses.end,
            None => runs.push(addresses),
        }
    }
    let of_size = |bytes| {
        let is_it = |it: &Range<u64>| it.end - it.start == bytes;
        let private = runs.iter().find(|it| is_it(it)).map(|it| (it.clone(), None));
        private.or_else(|| {
            let file = of_files.iter().find(|(addresses, _)| is_it(addresses));
            file.map(|(addresses, file)| (addresses.clone(), Some(file)))
        })
    };
    if let Some((part, file)) = of_size(bytes) {
        return Some((vec![part], file.cloned()));
    }
    if let Some((above, file)) = bytes.checked_sub(BELOW_HOLE).and_then(of_size)
        && let Some((below, _)) = of_size(BELOW_HOLE)
    {
        return Some((vec![below, above], file.cloned()));
    }
    // Something else before or behind it became one mapping with it.
    let ram = |run: &Range<u64>| {
        let start = run.start.next_multiple_of(ALIGN);
        (start + bytes <= run.end).then_some(start..start + bytes)
    };
    runs.sort_by_key(|run| run.end - run.start);
    runs.iter().rev().find_map(ram).map(|part| (vec![part], None))
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
        let at = |addresses| Some((vec![addresses], None));
        assert_eq!(find_in(maps, 512 << 20), at(0x7f00_07e0_0000..0x7f00_27e0_0000));
        assert_eq!(find_in(maps, 1 << 30), None);
        // Merged pages lie between, and something else before it became one mapping with it.
        let maps = "\
7f0007dfd000-7f000a000000 rw-p 00000000 00:00 0
7f000a000000-7f000a002000 rw-p 00003000 00:05 99  /memfd:cofolio-pool (deleted)
7f000a002000-7f0027e00000 rw-p 00000000 00:00 0
";
        assert_eq!(find_in(maps, 512 << 20), at(0x7f00_07e0_0000..0x7f00_27e0_0000));
    }

    #[test]
    fn memory_of_others_is_found_in_files_and_around_the_hole() {
        let maps = "\
7f0000000000-7f0040000000 rw-p 00000000 00:00 0
7f0040001000-7f0060001000 rw-s 00000000 00:01 7  /memfd:memory-backend-memfd (deleted)
7f0080000000-7f0140000000 rw-p 00000000 00:00 0
7f0140001000-7f0180001000 rw-p 00000000 00:00 0
";
        let name = "/memfd:memory-backend-memfd";
        let (parts, file) = find_in(maps, 512 << 20).expect("found");
        assert_eq!(parts.len(), 1);
        assert_eq!(parts[0], 0x7f00_4000_1000..0x7f00_6000_1000);
        assert_eq!(file, Some(Mapped { is_private: false, name }));
        let (parts, file) = find_in(maps, 4 << 30).expect("found");
        assert_eq!(parts[0], 0x7f00_8000_0000..0x7f01_4000_0000);
        assert_eq!(parts[1].end - parts[1].start, 1 << 30);
        assert_eq!((parts.len(), file), (2, None));
    }
}
