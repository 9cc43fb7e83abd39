//! How much of a file is in the page cache.

use std::{fs::File, ops::AddAssign, path::Path};

use cofolio_sys::cache::{self, FileMap};
use serde::Serialize;

use super::{LedgerError, Result};

pub use cofolio_sys::resident::Resident;

/// Pages of one file, or of many added up. A page is [`cache::page_size`] bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Residency {
    /// Pages that the contents fill: the size, rounded up.
    pub pages: u64,
    /// Of these, the ones in the page cache.
    pub resident: u64,
}

impl AddAssign for Residency {
    fn add_assign(&mut self, other: Residency) {
        self.pages += other.pages;
        self.resident += other.resident;
    }
}

/// How many pages a file of `size` bytes fills.
pub fn pages_of(size: u64) -> u64 {
    size.div_ceil(cache::page_size())
}

/// Asks mincore(2), through a mapping, which pages of a regular file are resident, wherever they
/// are: under overlayfs in the lower file, under EROFS `inode_share` in the shared inode. This
/// loads the file's inode but none of its pages.
///
/// # Errors
/// [`LedgerError::Io`] when the file cannot be opened or mapped.
pub fn mincore(path: &Path) -> Result<Residency> {
    let ask = || {
        let file = File::open(path)?;
        let size = file.metadata()?.len();
        let resident = FileMap::new(&file, size)?.resident_pages()?;
        Ok(Residency { pages: pages_of(size), resident })
    };
    ask().map_err(LedgerError::io(path))
}

/// Asks cachestat(2), which is cheaper but sees only the opened file's own mapping and counts pages
/// past the end of the file. The size of a block device counts as 0 pages.
///
/// # Errors
/// Those of fstat(2) and cachestat(2).
pub fn cachestat_file(file: &File) -> std::io::Result<Residency> {
    let pages = pages_of(file.metadata()?.len());
    let stat = cache::cachestat(file, 0, 0)?;
    Ok(Residency { pages, resident: stat.cached })
}

/// Pages past the end of the file in the page cache, by cachestat(2): the fs-verity Merkle trees of
/// ext4, btrfs and f2fs (`Documentation/filesystems/fsverity.rst`).
///
/// # Errors
/// [`LedgerError::Io`] if the file cannot be opened or the kernel does not answer (before 6.5, or
/// from 6.15 on a file that the caller neither owns nor may write).
pub fn past_end(path: &Path) -> Result<u64> {
    let file = File::open(path).map_err(LedgerError::io(path))?;
    let size = file.metadata().map_err(LedgerError::io(path))?.len();
    let end = pages_of(size).saturating_mul(cache::page_size());
    let stat = cache::cachestat(&file, end, 0).map_err(LedgerError::io(path))?;
    Ok(stat.cached)
}

/// Pages of the file that memory pressure, a cgroup's limit or DAMON reclaimed, by cachestat(2),
/// not those dropped on request (fadvise, drop_caches, truncation). Fails like [`past_end`].
pub fn evicted(path: &Path) -> Result<u64> {
    let file = File::open(path).map_err(LedgerError::io(path))?;
    let stat = cache::cachestat(&file, 0, 0).map_err(LedgerError::io(path))?;
    Ok(stat.evicted)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn sizes_are_rounded_up_to_pages() {
        let page = cache::page_size();
        for (size, pages) in [(0, 0), (1, 1), (page, 1), (page + 1, 2), (10 * page, 10)] {
            assert_eq!(pages_of(size), pages);
        }
    }

    /// A file of 64 pages, of which three are read without read-ahead.
    #[test]
    fn a_file_with_known_cached_ranges() {
        let dir = std::env::current_exe().unwrap().parent().unwrap().to_owned();
        let file = tempfile::NamedTempFile::new_in(dir).unwrap();
        let page = cache::page_size();
        file.as_file().write_all_at(&vec![7; usize::try_from(64 * page).unwrap()], 0).unwrap();
        assert_eq!(mincore(file.path()).unwrap(), Residency { pages: 64, resident: 64 });

        file.as_file().sync_all().unwrap();
        rustix::fs::fadvise(file.as_file(), 0, None, rustix::fs::Advice::DontNeed).unwrap();
        let cold = mincore(file.path()).unwrap();
        if cold.resident > 0 {
            println!("SKIP a_file_with_known_cached_ranges: this filesystem does not drop pages");
            return;
        }
        rustix::fs::fadvise(file.as_file(), 0, None, rustix::fs::Advice::Random).unwrap();
        for at in [0, 31, 63] {
            file.as_file().read_exact_at(&mut [0; 10], at * page).unwrap();
        }
        let three = Residency { pages: 64, resident: 3 };
        assert_eq!(mincore(file.path()).unwrap(), three);
        assert_eq!(cachestat_file(file.as_file()).unwrap(), three);
        assert_eq!(past_end(file.path()).unwrap(), 0, "nothing is there but of fs-verity");
    }

    #[test]
    fn errors_name_the_path() {
        let error = mincore(Path::new("/nowhere/at all")).unwrap_err().to_string();
        assert!(error.contains("/nowhere/at all"), "{error}");
    }
}
