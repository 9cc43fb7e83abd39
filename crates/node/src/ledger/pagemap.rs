//! Which pages of a mapping are the process's own.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::Path;

use cofolio_sys::{cache, pagemap};

use crate::processes;

/// The parts of a mapping that show the file's pages. In a private mapping, a page that was written is
/// the process's own copy, even if the mapping has become read-only since: so it is with data that the
/// dynamic linker has relocated (RELRO). Fails for a process that has ended.
pub(super) fn without_copies(
    root: &Path,
    pid: u32,
    addresses: &Range<u64>,
) -> io::Result<Vec<Range<u64>>> {
    let file = File::open(processes::directory(root, pid).join("pagemap"))?;
    let mut parts: Vec<Range<u64>> = Vec::new();
    pagemap::entries(&file, addresses.clone(), |at, entry| match parts.last_mut() {
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

    /// Relocated data of this program lies in a read-only mapping and was written before: to page it out
    /// would swap memory of the process. `smaps` says how much of each mapping was copied.
    #[test]
    fn pages_that_a_process_wrote_are_no_pages_of_the_file() {
        let (root, own) = (Path::new("/"), std::process::id());
        let program = std::env::current_exe().unwrap();
        let smaps = fs::read_to_string("/proc/self/smaps").unwrap();
        let mut ranges = Vec::new();
        processes::mappings(&processes::directory(root, own), |mapping| {
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
            let parts = without_copies(root, own, addresses).unwrap();
            let shown: u64 = parts.iter().map(|part| part.end - part.start).sum();
            assert_eq!(addresses.end - addresses.start - shown, *copied);
        }
        assert!(ranges.iter().any(|(_, copied)| *copied > 0), "{smaps}");
    }
}
