//! Processes as `/proc` shows them, and the files that they map.

#[cfg(fuzzing)]
#[path = "../../../fuzz/inside/maps.rs"]
pub mod fuzz;

use std::fs;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use cofolio_sys::mount::{UNIQUE_ID, unique_id};
use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use rustix::io::Errno;

use crate::address_space::Maps;
use crate::kernel_text::for_each_line_of;

/// Major and minor number of a filesystem.
pub(crate) type Device = (u32, u32);

/// A file that a process maps.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Mapping<'m> {
    /// Of the filesystem that the process opened the file on.
    pub(crate) device: Device,
    pub(crate) inode: u64,
    /// Its addresses, as the kernel shows them.
    pub(crate) range: &'m [u8],
    /// Where in the file it begins, in bytes.
    pub(crate) offset: u64,
    /// As this process would name the file, or from the root of a mount that it does not see.
    pub(crate) path: &'m [u8],
}

impl Mapping<'_> {
    /// Its addresses as far as a file of `size` bytes reaches: a mapping can be any length longer,
    /// and has no pages there.
    pub(crate) fn addresses(&self, size: u64) -> Option<Range<u64>> {
        let Range { start, end } = self.range()?;
        let of_file = start.saturating_add(size.saturating_sub(self.offset));
        Some(start..end.min(of_file))
    }

    /// The link to the file, below the process's directory in `/proc`. Its name has no leading zeros,
    /// which the range has below 2^28, where a program without `-pie` is.
    pub(crate) fn link(&self) -> Option<PathBuf> {
        let Range { start, end } = self.range()?;
        Some(format!("map_files/{start:x}-{end:x}").into())
    }

    fn range(&self) -> Option<Range<u64>> {
        addresses(self.range)
    }
}

/// Whether every process of the machine is among [`all`]: in a PID namespace others are hidden.
pub(crate) fn are_all_visible(root: &Path) -> bool {
    // PROC_PID_INIT_INO of `include/linux/proc_ns.h`: the first PID namespace sees every process.
    let namespace = fs::read_link(root.join("proc/thread-self/ns/pid"));
    namespace.is_ok_and(|link| link == Path::new("pid:[4026531836]"))
}

/// Whether an error from a file in `/proc/PID` says that the process or thread has ended. For want of
/// descriptors, for one, nobody knows.
pub(crate) fn has_ended(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw_os_error);
    // EINVAL is the answer of mountinfo then.
    error.kind() == io::ErrorKind::NotFound || matches!(errno, Some(Errno::SRCH | Errno::INVAL))
}

/// The numbers of all processes.
///
/// # Errors
/// Those of listing them: a list that is cut short would make processes look as if they had ended.
pub(crate) fn all(root: &Path) -> io::Result<Vec<u32>> {
    Ok(numbered(&root.join("proc"))?.iter().filter_map(|it| number(it)).collect())
}

fn number(directory: &Path) -> Option<u32> {
    directory.file_name()?.to_str()?.parse().ok()
}

/// The entries of a directory that are named by a number.
pub(crate) fn numbered(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let is_number = |path: &PathBuf| {
        path.file_name().is_some_and(|name| name.as_encoded_bytes().iter().all(u8::is_ascii_digit))
    };
    let entries: io::Result<Vec<_>> =
        fs::read_dir(dir)?.map(|entry| entry.map(|entry| entry.path())).collect();
    entries.map(|entries| entries.into_iter().filter(is_number).collect())
}

/// Open files of the process with this directory: the entries of `fd` and their targets. Leaves out
/// files that are closed meanwhile.
///
/// # Errors
/// Those of listing the directory.
pub(crate) fn open_files(process: &Path) -> io::Result<Vec<(PathBuf, PathBuf)>> {
    let mut open = Vec::new();
    for entry in fs::read_dir(process.join("fd"))? {
        let link = entry?.path();
        open.extend(fs::read_link(&link).ok().map(|target| (link, target)));
    }
    Ok(open)
}

/// A thread of a process that shows its memory, files and cgroup: the main one, and another one if that
/// has ended. `/proc` has a directory of its number, too, but does not list it.
pub(crate) fn live_thread(root: &Path, pid: u32) -> u32 {
    // Kernel threads and zombies have no program either, and no other thread.
    match fs::read_link(directory(root, pid).join("exe")) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            other_thread(root, pid).ok().flatten().unwrap_or(pid)
        }
        _ => pid,
    }
}

/// A thread of a process besides its main one.
pub(crate) fn other_thread(root: &Path, pid: u32) -> io::Result<Option<u32>> {
    let threads = numbered(&directory(root, pid).join("task"))?;
    Ok(threads.iter().filter_map(|it| number(it)).find(|thread| *thread != pid))
}

/// Calls `each` for every file that a process maps until it says that it knows the file, once for
/// mappings that follow each other. Says whether those were all files.
pub(crate) fn mapped(
    root: &Path,
    pid: u32,
    mut each: impl FnMut(Mapping<'_>) -> bool,
) -> io::Result<bool> {
    let mut known = None;
    mappings(&directory(root, pid), |mapping| {
        let this = (mapping.device, mapping.inode);
        if known != Some(this) && each(mapping) {
            known = Some(this);
        }
    })
}

/// Calls `each` for every mapping of a file of a process, by its directory. Says whether those were all:
/// a process can have any number of them.
pub(crate) fn mappings(process: &Path, mut each: impl FnMut(Mapping<'_>)) -> io::Result<bool> {
    for_each_line_of(Maps::of(process), |line| parse(line).into_iter().for_each(&mut each))
}

pub(crate) fn directory(root: &Path, pid: u32) -> PathBuf {
    root.join(format!("proc/{pid}"))
}

/// The unique ID of the mount that is the root of a process. `None` if the process has ended or has
/// none, and where the kernel does not say it.
pub(crate) fn root_mount(root: &Path, pid: u32) -> Option<u64> {
    let flags = AtFlags::STATX_DONT_SYNC | AtFlags::NO_AUTOMOUNT;
    let found = statx(CWD, directory(root, pid).join("root"), flags, UNIQUE_ID).ok()?;
    unique_id(&found)
}

/// The file that a process executes: its filesystem and inode. `None` if the process has ended.
pub(crate) fn program(root: &Path, pid: u32) -> Option<(Device, u64)> {
    file_id(&directory(root, pid).join("exe"))
}

/// The filesystem and inode of a file, without a question to a server of its filesystem.
pub(crate) fn file_id(path: &Path) -> Option<(Device, u64)> {
    let flags = AtFlags::STATX_DONT_SYNC | AtFlags::NO_AUTOMOUNT;
    let found = statx(CWD, path, flags, StatxFlags::INO).ok()?;
    Some(((found.stx_dev_major, found.stx_dev_minor), found.stx_ino))
}

/// A line of `/proc/PID/maps` (proc_pid_maps(5)). Addresses, offset and device are in hexadecimal.
pub(crate) struct Line<'l> {
    pub(crate) range: &'l [u8],
    pub(crate) access: &'l [u8],
    pub(crate) offset: u64,
    pub(crate) device: Device,
    /// 0 for memory without a file.
    pub(crate) inode: u64,
    pub(crate) path: &'l [u8],
}

impl<'l> Line<'l> {
    pub(crate) fn parse(line: &'l [u8]) -> Option<Self> {
        let hex = |word| u64::from_str_radix(std::str::from_utf8(word).ok()?, 16).ok();
        // A path may have blanks.
        let mut words = line.splitn(6, |byte| *byte == b' ');
        let (range, access, offset) = (words.next()?, words.next()?, hex(words.next()?)?);
        let (major, minor) = std::str::from_utf8(words.next()?).ok()?.split_once(':')?;
        let device = (u32::from_str_radix(major, 16).ok()?, u32::from_str_radix(minor, 16).ok()?);
        let inode = std::str::from_utf8(words.next()?).ok()?.parse().ok()?;
        let path = words.next().unwrap_or_default().trim_ascii_start();
        Some(Self { range, access, offset, device, inode, path })
    }
}

/// The mapping of a line. `None` for memory without a file.
fn parse(line: &[u8]) -> Option<Mapping<'_>> {
    let Line { range, offset, device, inode, path, .. } = Line::parse(line)?;
    (inode != 0).then_some(Mapping { device, inode, range, offset, path })
}

/// The addresses that a line begins with.
pub(crate) fn addresses(range: &[u8]) -> Option<Range<u64>> {
    let (start, end) = std::str::from_utf8(range).ok()?.split_once('-')?;
    Some(u64::from_str_radix(start, 16).ok()?..u64::from_str_radix(end, 16).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_maps_are_read() {
        let line = b"7f6ac63a8000-7f6ac63ce000 r--p 00028000 00:29 4809                       /usr/lib/a b.so";
        let expected = Mapping {
            device: (0, 0x29),
            inode: 4809,
            range: b"7f6ac63a8000-7f6ac63ce000",
            offset: 0x28000,
            path: b"/usr/lib/a b.so",
        };
        let start = 0x7f6a_c63a_8000;
        assert_eq!(expected.addresses(u64::MAX), Some(start..0x7f6a_c63c_e000));
        assert_eq!(expected.addresses(0x28000 + 0x1000), Some(start..start + 0x1000));
        assert_eq!(expected.addresses(0x1000), Some(start..start));
        let link = Path::new("map_files/7f6ac63a8000-7f6ac63ce000");
        assert_eq!(expected.link().as_deref(), Some(link));
        // The kernel has no link `00400000-00401000`: files of such programs had no users.
        let low = Mapping { range: b"00400000-00401000", ..expected };
        assert_eq!(low.link().as_deref(), Some(Path::new("map_files/400000-401000")));
        let expected = Mapping { range: b"7f6ac63a8000-7f6ac63ce000", ..low };
        assert_eq!(parse(line), Some(expected));
        for cut in 0..line.len() {
            let _ = parse(&line[..cut]);
        }
        for line in [
            &b"5562e4c0d000-5562e4c2e000 rw-p 00000000 00:00 0                          [heap]"[..],
            b"7f6ac63a5000-7f6ac63a8000 rw-p 00000000 00:00 0 ",
            b"",
        ] {
            assert_eq!(parse(line), None);
        }
    }

    /// This process maps its own program, and once more where another test's thread prints a
    /// backtrace: the test that counted the mappings failed then.
    #[test]
    fn a_live_process_is_read() {
        use std::os::unix::ffi::OsStrExt as _;
        let root = Path::new("/");
        let own = std::process::id();
        assert!(all(root).unwrap().contains(&own));
        let program = std::env::current_exe().unwrap();
        let mut found = false;
        mapped(root, own, |mapping| {
            found |= mapping.path == program.as_os_str().as_bytes();
            true
        })
        .unwrap();
        assert!(found);
    }

    /// Only the first mapping of a file was looked at. Where the process had no page of that one,
    /// it did not use the file.
    #[test]
    fn later_mappings_are_looked_at_until_the_file_is_known() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("proc/1")).unwrap();
        let line = |start: u32, inode: u32| {
            format!("{start:x}-{:x} r--p 00000000 00:29 {inode} /f\n", start + 0x1000)
        };
        let maps =
            [(1, 7), (2, 7), (3, 7), (4, 8), (5, 7)].map(|(at, inode)| line(at << 12, inode));
        fs::write(root.path().join("proc/1/maps"), maps.concat()).unwrap();
        let mut looked_at = Vec::new();
        let is_whole = mapped(root.path(), 1, |mapping| {
            looked_at.push(mapping.addresses(u64::MAX).unwrap().start >> 12);
            looked_at.len() == 2
        });
        assert!(is_whole.unwrap());
        assert_eq!(looked_at, [1, 2, 4]);
    }
}
