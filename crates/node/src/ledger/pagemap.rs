//! The pages of a mapping, of which some may be the process's own.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::Path;

use cofolio_sys::pagemap::{self, Entry};
use cofolio_sys::{cache, process};
use rustix::fs::OFlags;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::address_space::{access, probe_and_access};

/// Divides addresses into parts of at most [`pagemap::STEP`] pages.
pub(super) fn steps(addresses: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let bytes = pagemap::STEP * cache::page_size();
    let mut left = addresses;
    std::iter::from_fn(move || {
        let step = left.start..left.end.min(left.start.saturating_add(bytes));
        left.start = step.end;
        (!step.is_empty()).then_some(step)
    })
}

/// Address and entry of each page of a step, of a process that is given by its directory.
pub(super) fn entries(process: &Path, step: Range<u64>) -> io::Result<Vec<(u64, Entry)>> {
    let path = process.join("pagemap");
    access(process, move || {
        let mut found = Vec::new();
        pagemap::entries(&File::open(path)?, step, |at, entry| found.push((at, entry)))?;
        Ok(found)
    })
}

/// Takes a file's pages out of the memory of a process that maps it there, as far as they are the
/// file's. Before Linux 6.9 not if the process's main thread has ended. A process may end, or unmap the
/// file, meanwhile. If another one has its number or its addresses now, that one only has to read pages
/// again.
pub(super) fn page_out(process: &Path, pid: u32, addresses: Range<u64>) -> io::Result<()> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::NotFound)?;
    for step in steps(addresses) {
        let path = process.to_owned();
        probe_and_access(process, move || {
            // PIDFD_THREAD of Linux 6.9: it need not be a main thread.
            let thread = PidfdFlags::from_bits_retain(OFlags::EXCL.bits());
            let pidfd =
                pidfd_open(pid, thread).or_else(|_| pidfd_open(pid, PidfdFlags::empty()))?;
            // One by one, so that a locked part does not spare those behind it.
            for part in without_copies(&path, step)? {
                let _ = process::page_out(&pidfd, std::slice::from_ref(&part));
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// The parts of a mapping that show the file's pages. In a private mapping, a page that was written
/// is the process's own copy, even if the mapping has become read-only since: so it is with data
/// that the dynamic linker has relocated (RELRO). Fails for a process that has ended.
fn without_copies(process: &Path, addresses: Range<u64>) -> io::Result<Vec<Range<u64>>> {
    let file = File::open(process.join("pagemap"))?;
    let mut parts: Vec<Range<u64>> = Vec::new();
    pagemap::entries(&file, addresses, |at, entry| match parts.last_mut() {
        _ if entry.is_private() => {}
        Some(last) if last.end == at => last.end += cache::page_size(),
        _ => parts.push(at..at + cache::page_size()),
    })?;
    Ok(parts)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::ffi::OsStrExt as _;

    use super::*;
    use crate::processes;

    /// Relocated data of this program lies in a read-only mapping and was written before: to page
    /// it out would swap memory of the process. `smaps` says how much of each mapping was copied.
    #[test]
    fn pages_that_a_process_wrote_are_no_pages_of_the_file() {
        let own = Path::new("/proc/self");
        let program = std::env::current_exe().unwrap();
        let smaps = fs::read_to_string("/proc/self/smaps").unwrap();
        let mut ranges = Vec::new();
        processes::mappings(own, |mapping| {
            let range = std::str::from_utf8(mapping.range).unwrap();
            let of_range = smaps.split_once(&format!("{range} r--p ")).map(|(_, rest)| rest);
            if let Some(text) = of_range.filter(|_| mapping.path == program.as_os_str().as_bytes())
            {
                let field = |name: &str| {
                    let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
                    line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() << 10
                };
                let copied = field("Anonymous:") + field("Swap:");
                ranges.push((mapping.addresses(u64::MAX).unwrap(), copied));
            }
        })
        .unwrap();
        for (addresses, copied) in &ranges {
            let parts = without_copies(own, addresses.clone()).unwrap();
            let shown: u64 = parts.iter().map(|part| part.end - part.start).sum();
            assert_eq!(addresses.end - addresses.start - shown, *copied);
        }
        assert!(ranges.iter().any(|(_, copied)| *copied > 0), "{smaps}");
    }
}
