//! How much of a file is in the page cache.

use std::{fs::File, io, path::Path};

use anyhow::{Context as _, Result};
use cofolio_sys::cache::{self, FileMap};
use serde::Serialize;

/// Pages of one file, or of many added up. A page is [`cache::page_size`] bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub(crate) struct Residency {
    /// Pages that the contents fill: the size, rounded up.
    pub(crate) pages: u64,
    /// Of these, the ones in the page cache.
    pub(crate) resident: u64,
}

/// How many pages a file of `size` bytes fills.
pub(crate) fn pages_of(size: u64) -> u64 {
    size.div_ceil(cache::page_size())
}

/// Asks mincore(2), through a mapping, which pages of a regular file are resident, wherever they
/// are: under overlayfs in the lower file, under EROFS `inode_share` in the shared inode. This
/// loads the file's inode but none of its pages.
pub(crate) fn mincore(path: &Path) -> Result<Residency> {
    let ask = || -> io::Result<Residency> {
        let file = File::open(path)?;
        let size = file.metadata()?.len();
        let resident = FileMap::new(&file, size)?.resident_pages()?;
        Ok(Residency { pages: pages_of(size), resident })
    };
    ask().with_context(|| format!("cannot look at the pages of {}", path.display()))
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
    }

    #[test]
    fn errors_name_the_path() {
        let error = mincore(Path::new("/nowhere/at all")).unwrap_err().to_string();
        assert!(error.contains("/nowhere/at all"), "{error}");
    }
}
