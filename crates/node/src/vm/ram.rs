//! A guest's memory, as the host sees it: a mapping of the VMM's.

use std::fs::File;
use std::io::{self, Read as _};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cofolio_sys::pagemap::{Query, Region, category, scan};

use crate::address_space::{Maps, access, probe_and_access};
use crate::kernel_text;
use crate::processes::{Line, addresses};
use crate::vm::ranges::without;

/// QEMU maps a guest's memory at multiples of this, for huge pages.
const ALIGN: u64 = 2 << 20;
/// Cloud Hypervisor and Firecracker map memory below the hole for 32-bit devices separately.
const BELOW_HOLE: u64 = 3 << 30;
/// Filesystems, by `include/uapi/linux/magic.h`.
pub(super) const TMPFS_MAGIC: u64 = 0x0102_1994;
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;
/// Longest list of mappings, in bytes: that of a VMM with 65,530 mappings, the kernel's default
/// limit, takes a fifth.
const MAPS_BYTES_MAX: u64 = 32 << 20;

/// A guest's memory in a process.
#[derive(Debug)]
pub struct Ram {
    /// Of the process, in `/proc`.
    dir: PathBuf,
    pagemap: Arc<File>,
    /// Where it is, in the order of addresses: in one piece, or in two.
    parts: Vec<Range<u64>>,
    backing: Backing,
}

/// Kind of a guest's memory.
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
        let maps = maps(&dir)?;
        let (parts, file) = find_in(&maps, bytes).ok_or_else(|| {
            let what = format!("process {pid} has no mapping of {bytes} bytes");
            io::Error::new(io::ErrorKind::NotFound, what)
        })?;
        let backing = match file {
            None => Backing::Private,
            Some(Mapped { is_private, name }) => {
                let link = link(&dir, &parts[0]);
                let found = probe_and_access(&dir, move || Ok(rustix::fs::statfs(&link)?))?;
                match found.f_type.cast_unsigned() {
                    HUGETLBFS_MAGIC => Backing::Huge,
                    TMPFS_MAGIC if !is_private => Backing::Shared,
                    _ => Backing::File(name.to_owned()),
                }
            }
        };
        Ok(Self { pagemap: File::open(dir.join("pagemap"))?.into(), dir, parts, backing })
    }

    /// The private memory of a guest at these addresses of the process `pid`.
    ///
    /// # Errors
    /// Those of opening `/proc/PID/pagemap`.
    pub(super) fn at(proc: &Path, pid: u32, addresses: Range<u64>) -> io::Result<Self> {
        let dir = proc.join(pid.to_string());
        let pagemap = File::open(dir.join("pagemap"))?.into();
        Ok(Self { dir, pagemap, parts: vec![addresses], backing: Backing::Private })
    }

    /// Why a VMM cannot discard single pages of it, if so.
    pub(super) fn refusal(&self) -> Option<String> {
        match &self.backing {
            Backing::Private | Backing::Shared => None,
            Backing::Huge => Some(
                "its memory is huge pages of hugetlbfs, of which a balloon takes only parts"
                    .to_owned(),
            ),
            Backing::File(name) => Some(format!("its memory is the file {name}")),
        }
    }

    /// Memory of the process that is of the kind of the guest's, in bytes: a counter of the
    /// kernel's, which costs next to nothing.
    ///
    /// # Errors
    /// Those of reading `/proc/PID`; `InvalidData` if the kernel does not say it.
    pub(super) fn counted(&self) -> io::Result<u64> {
        match self.backing {
            Backing::Private => self.anonymous(),
            Backing::Shared => self.counter("RssShmem:"),
            Backing::Huge => self.counter("HugetlbPages:"),
            Backing::File(_) => self.counter("RssFile:"),
        }
    }

    /// Private memory of the VMM itself in bytes, if `held` bytes of the guest's memory are
    /// resident. Fails like [`Ram::counted`].
    pub(super) fn emulator(&self, held: u64) -> io::Result<u64> {
        let anonymous = self.anonymous()?;
        Ok(match self.backing {
            Backing::Private => anonymous.saturating_sub(held),
            _ => anonymous,
        })
    }

    /// Anonymous memory of the process. `statm` costs less than `status`.
    fn anonymous(&self) -> io::Result<u64> {
        // Size, resident pages, and those of files and shared memory among them
        // (proc_pid_statm(5)).
        let statm = kernel_text::read(&self.dir.join("statm"))?;
        let mut pages = statm.split(' ').skip(1).map_while(|word| word.parse::<u64>().ok());
        let (resident, shared) =
            pages.next().zip(pages.next()).ok_or(io::ErrorKind::InvalidData)?;
        Ok(resident.saturating_sub(shared) * cofolio_sys::cache::page_size())
    }

    fn counter(&self, name: &str) -> io::Result<u64> {
        let status = kernel_text::read(&self.dir.join("status"))?;
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        let kib = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
        kib.map(|kib| kib << 10).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// The resident pages.
    ///
    /// # Errors
    /// Those of [`scan`].
    pub fn resident(&self) -> io::Result<Resident> {
        self.count(false).map(|(resident, _)| resident)
    }

    /// The same, and the addresses of pages that are not merged, in their order, if these are
    /// wanted.
    fn count(&self, private: bool) -> io::Result<(Resident, Vec<Range<u64>>)> {
        let query = Query {
            mask: category::PRESENT,
            returned: category::FILE | category::ZERO,
            ..Query::default()
        };
        let can_be_merged = self.backing == Backing::Private;
        let (pagemap, parts) = (Arc::clone(&self.pagemap), self.parts.clone());
        access(&self.dir, move || {
            let (mut resident, mut of_guest) = (Resident::default(), Vec::new());
            for part in parts {
                scan(&pagemap, part, query, |Region { start, end, categories }| {
                    // The kernel's page of zeros takes nothing.
                    if categories & category::ZERO != 0 {
                        resident.zeros += end - start;
                        return;
                    }
                    resident.bytes += end - start;
                    if can_be_merged && categories & category::FILE != 0 {
                        resident.of_files += end - start;
                    } else if private {
                        of_guest.push(start..end);
                    }
                })?;
            }
            Ok((resident, of_guest))
        })
    }

    /// The resident and the merged pages.
    ///
    /// # Errors
    /// Those of reading `/proc/PID/maps` and of [`scan`].
    pub fn content(&self) -> io::Result<Content> {
        let merged = self.merged()?;
        let is_merged = !(merged.pools.is_empty() && merged.images.is_empty());
        let (resident, written) = self.count(is_merged)?;
        let pools = shown(&merged.pools, &written);
        let images = shown(&merged.images, &written);
        Ok(Content { resident, pool_pieces: merged.pools, written, pools, images })
    }

    /// Its mappings of pools and of image files, in the order of addresses. Pages that were written
    /// to since are private.
    fn merged(&self) -> io::Result<Merged> {
        let maps = maps(&self.dir)?;
        let merged = maps.lines().filter_map(mapping).filter(|it| is_merged(it.name));
        let is_guests = |at: &u64| self.parts.iter().any(|part| part.contains(at));
        let merged = merged.filter(|it| is_guests(&it.addresses.start));
        let (pools, images): (Vec<_>, Vec<_>) = merged.partition(|it| !is_of_image(it.name));
        let pieces = |all: Vec<Mapping<'_>>| all.iter().map(Mapping::piece).collect();
        Ok(Merged { pools: pieces(pools), images: pieces(images) })
    }
}

/// Resident pages of a guest's memory.
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
    /// Bytes that only this guest has.
    pub fn private(self) -> u64 {
        self.bytes - self.of_files
    }
}

/// Content of a guest's memory.
#[derive(Debug, Default)]
pub struct Content {
    /// Resident pages.
    pub resident: Resident,
    /// Where pools are mapped.
    pub(super) pool_pieces: Vec<Piece>,
    /// Addresses of its private pages, if anything is merged.
    pub(super) written: Vec<Range<u64>>,
    /// Parts of pools that it uses, whether it has touched them since or not.
    pub(super) pools: Vec<Part>,
    /// The same for files of the image.
    pub(super) images: Vec<Part>,
}

impl Content {
    /// Bytes that are merged with pools and files of the image, whether the guest has touched them
    /// since or not.
    pub fn merged_bytes(&self) -> u64 {
        bytes(&self.pools) + bytes(&self.images)
    }

    /// Addresses of a mapping that the guest has written to.
    pub(super) fn written_of(&self, piece: &Piece) -> impl Iterator<Item = Range<u64>> {
        let Range { start, end } = piece.addresses;
        let first = self.written.partition_point(|it| it.end <= start);
        let written = self.written[first..].iter().take_while(move |it| it.start < end);
        written.map(move |it| it.start.max(start)..it.end.min(end))
    }

    /// Bytes that have a content and are not private: those that are merged, and zeros.
    pub(super) fn shared_bytes(&self) -> u64 {
        self.merged_bytes() + self.resident.zeros
    }
}

/// A file, by its device and inode.
pub(super) type FileId = (u64, u64);

/// A part of a file, in bytes.
pub(super) type Part = (FileId, Range<u64>);

/// A mapping of a part of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) addresses: Range<u64>,
    pub(super) file: FileId,
    /// Of the first byte, in the file.
    pub(super) offset: u64,
}

/// The link to the file that a process maps at these addresses.
fn link(process: &Path, addresses: &Range<u64>) -> PathBuf {
    process.join(format!("map_files/{:x}-{:x}", addresses.start, addresses.end))
}

impl Piece {
    /// The link to its file, of the process with this directory.
    pub(super) fn link(&self, process: &Path) -> PathBuf {
        link(process, &self.addresses)
    }

    /// The part of the file at these addresses.
    pub(super) fn part(&self, addresses: Range<u64>) -> Part {
        let at = |address: u64| address - self.addresses.start + self.offset;
        (self.file, at(addresses.start)..at(addresses.end))
    }
}

pub(super) fn bytes(parts: &[Part]) -> u64 {
    parts.iter().map(|(_, part)| part.end - part.start).sum()
}

/// Parts of files that mappings still show: without private addresses. Both are in order.
fn shown(pieces: &[Piece], private: &[Range<u64>]) -> Vec<Part> {
    let addresses: Vec<_> = pieces.iter().map(|piece| piece.addresses.clone()).collect();
    let parts = without(&addresses, private).into_iter();
    parts.map(|(number, addresses)| pieces[number].part(addresses)).collect()
}

/// Merged mappings of a guest's memory.
#[derive(Debug, Default)]
struct Merged {
    /// With pools of merged pages.
    pools: Vec<Piece>,
    /// With files of the image.
    images: Vec<Piece>,
}

/// A line of `/proc/PID/maps`.
pub(super) struct Mapping<'l> {
    pub(super) addresses: Range<u64>,
    pub(super) access: &'l str,
    offset: u64,
    pub(super) file: FileId,
    /// Empty for anonymous memory.
    pub(super) name: &'l str,
}

impl Mapping<'_> {
    /// Whether it is a device with a file of the image. Files of the image in the guest's memory
    /// are merged pages.
    pub(super) fn is_device(&self) -> bool {
        self.access.ends_with('s') && is_of_image(self.name)
    }

    /// Whether it is of a pool of merged pages.
    pub(super) fn is_pool(&self) -> bool {
        is_pool(self.name)
    }

    pub(super) fn piece(&self) -> Piece {
        Piece { addresses: self.addresses.clone(), file: self.file, offset: self.offset }
    }
}

/// The mappings of a process, by its directory in `/proc`: lines for [`mapping`].
///
/// # Errors
/// Those of reading them, also if the process does not answer in time; `InvalidData` if it has too
/// many.
pub(super) fn maps(process: &Path) -> io::Result<String> {
    let mut text = Vec::new();
    if Maps::of(process).take(MAPS_BYTES_MAX).read_to_end(&mut text)? as u64 == MAPS_BYTES_MAX {
        let what = format!("{} is too long", process.join("maps").display());
        return Err(io::Error::new(io::ErrorKind::InvalidData, what));
    }
    // Names of files can be any bytes. Those of other files than ours do not matter.
    Ok(String::from_utf8_lossy(&text).into_owned())
}

pub(super) fn mapping(line: &str) -> Option<Mapping<'_>> {
    let Line { range, access, offset, device: (major, minor), inode, path } =
        Line::parse(line.as_bytes())?;
    let name = str::from_utf8(path).ok()?;
    Some(Mapping {
        addresses: addresses(range)?,
        access: str::from_utf8(access).ok()?,
        offset,
        file: (u64::from(major) << 32 | u64::from(minor), inode),
        name: name.strip_suffix(" (deleted)").unwrap_or(name),
    })
}

/// Whether pages of a mapping in a guest's memory were merged.
fn is_merged(name: &str) -> bool {
    is_pool(name) || is_of_image(name)
}

fn is_pool(name: &str) -> bool {
    name.starts_with("/memfd:cofolio-pool")
}

/// Whether a file is a pack or a segment.
fn is_of_image(path: &str) -> bool {
    path.ends_with(".segment") || path.ends_with(".dax")
}

/// The file of a guest's memory.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Mapped<'l> {
    is_private: bool,
    name: &'l str,
}

/// Finds a guest's memory of `bytes` bytes: its addresses, and its file if it has one.
fn find_in(maps: &str, bytes: u64) -> Option<(Vec<Range<u64>>, Option<Mapped<'_>>)> {
    let mut runs: Vec<Range<u64>> = Vec::new();
    let mut of_files = Vec::new();
    for Mapping { addresses, access, name, .. } in maps.lines().filter_map(mapping) {
        if !access.starts_with("rw-") {
            continue;
        }
        let is_private = access.ends_with('p');
        if !is_private || !(name.is_empty() || is_merged(name)) {
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
        let mut parts = vec![below, above];
        parts.sort_by_key(|part| part.start);
        return Some((parts, file.cloned()));
    }
    // Something else before or behind it became one mapping with it.
    let ram = |run: &Range<u64>| {
        let start = run.start.next_multiple_of(ALIGN);
        // A control socket can name any number of bytes.
        let end = start.checked_add(bytes)?;
        (end <= run.end).then_some(start..end)
    };
    runs.sort_by_key(|run| run.end - run.start);
    runs.iter().rev().find_map(ram).map(|part| (vec![part], None))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests may panic")]

    use std::fs;

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
7f000a002000-7f000a004000 rw-p 00003000 fe:00 12  /store/segments/a.segment
7f000a004000-7f0027e00000 rw-p 00000000 00:00 0
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
        let (parts, file) = find_in(maps, 512 << 20).unwrap();
        assert_eq!(parts.len(), 1);
        assert_eq!(parts[0], 0x7f00_4000_1000..0x7f00_6000_1000);
        assert_eq!(file, Some(Mapped { is_private: false, name }));
        let (parts, file) = find_in(maps, 4 << 30).unwrap();
        assert!(parts.contains(&(0x7f00_8000_0000..0x7f01_4000_0000)), "{parts:?}");
        assert_eq!(parts.iter().map(|part| part.end - part.start).sum::<u64>(), 4 << 30);
        assert!(parts.is_sorted_by_key(|part| part.start), "{parts:?}");
        assert_eq!((parts.len(), file), (2, None));
    }

    #[test]
    fn each_backing_has_a_counter() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("pagemap"), "").unwrap();
        fs::write(dir.path().join("statm"), "24680 1300 300 12 0 999 0\n").unwrap();
        let status = "RssFile:\t    8 kB\nRssShmem:\t    16 kB\nHugetlbPages:\t    2048 kB\n";
        fs::write(dir.path().join("status"), status).unwrap();
        let ram = |backing| {
            let pagemap = File::open(dir.path().join("pagemap")).unwrap().into();
            Ram { dir: dir.path().to_owned(), pagemap, parts: Vec::new(), backing }
        };
        let anonymous = 1000 * cofolio_sys::cache::page_size();
        let private = ram(Backing::Private);
        assert_eq!(private.counted().unwrap(), anonymous);
        assert_eq!(private.emulator(4096).unwrap(), anonymous - 4096);
        let shared = ram(Backing::Shared);
        assert_eq!(shared.counted().unwrap(), 16 << 10);
        // All that is anonymous is the VMM's then.
        assert_eq!(shared.emulator(4096).unwrap(), anonymous);
        assert_eq!(ram(Backing::Huge).counted().unwrap(), 2 << 20);
        assert_eq!(ram(Backing::File(String::new())).counted().unwrap(), 8 << 10);
        fs::write(dir.path().join("statm"), "24680\n").unwrap();
        assert!(private.counted().is_err());
    }

    #[test]
    fn huge_pages_and_files_are_refused() {
        let ram = |backing| Ram {
            dir: PathBuf::new(),
            pagemap: File::open("/dev/null").unwrap().into(),
            parts: Vec::new(),
            backing,
        };
        assert_eq!(ram(Backing::Private).refusal(), None);
        assert_eq!(ram(Backing::Shared).refusal(), None);
        assert!(ram(Backing::Huge).refusal().unwrap().contains("hugetlbfs"));
        let of_file = ram(Backing::File("/vm/memory".to_owned())).refusal().unwrap();
        assert!(of_file.ends_with("the file /vm/memory"), "{of_file}");
    }

    #[test]
    fn written_pages_of_pools_are_no_longer_theirs() {
        const FILE: FileId = (1, 7);
        let piece = |addresses: Range<u64>, offset| Piece { addresses, file: FILE, offset };
        let pieces = [piece(100..200, 1000), piece(200..300, 5000), piece(400..500, 0)];
        let private = [0..100, 120..130, 190..210, 250..260, 300..410, 490..500, 600..700];
        let expected = [
            (FILE, 1000..1020),
            (FILE, 1030..1090),
            (FILE, 5010..5050),
            (FILE, 5060..5100),
            (FILE, 10..90),
        ];
        assert_eq!(shown(&pieces, &private), expected);
        assert_eq!(shown(&pieces, &[]).len(), 3);
        assert_eq!(shown(&pieces, std::slice::from_ref(&(0..1000))), []);
    }
}
