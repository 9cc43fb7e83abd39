//! What is in memory of the images' files, and how much of it twice.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsStr,
    fs::File,
    io,
    os::unix::ffi::OsStrExt,
    path::PathBuf,
};

use anyhow::{Context, Result};
use cofolio_sys::resident::Resident;

use crate::source::{ContentHash, Unpacked};

/// For each distinct content, the files that hold it, each inode once.
pub(super) struct Holders(Vec<Vec<PathBuf>>);

/// Pages of the images' files in memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub(super) struct Pages {
    pub(super) resident: u64,
    /// Of these, the ones that another file with the same content has too: what sharing by file can save at most.
    pub(super) again: u64,
}

impl Holders {
    /// The images unpacked on their own.
    pub(super) fn unpacked(images: [&Unpacked; 2]) -> Self {
        let mut inodes = BTreeSet::new();
        let mut holders: BTreeMap<(u64, ContentHash), Vec<PathBuf>> = BTreeMap::new();
        for (which, image) in images.into_iter().enumerate() {
            for (path, entry) in &image.listing {
                if entry.content.size > 0 && inodes.insert((which, entry.inode)) {
                    let file = image.layers[entry.inode.0].join(OsStr::from_bytes(path));
                    let content = (entry.content.size, entry.content.hash);
                    holders.entry(content).or_default().push(file);
                }
            }
        }
        Self(holders.into_values().collect())
    }

    /// One file for each content.
    pub(super) fn one_each(files: &[PathBuf]) -> Self {
        Self(files.iter().map(|file| vec![file.clone()]).collect())
    }

    /// Counts by mincore(2), which brings in inodes and no pages.
    pub(super) fn count(&self) -> Result<Pages> {
        let mut pages = Pages::default();
        for files in &self.0 {
            let (mut all, mut sum) = (Resident::default(), 0);
            for path in files {
                let ask = || -> io::Result<Resident> {
                    let file = File::open(path)?;
                    Resident::of(&file, file.metadata()?.len())
                };
                let resident = match ask() {
                    // Through a mount that a container has changed: it is not the image's any more.
                    Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                    other => other.with_context(|| format!("asking for {}", path.display()))?,
                };
                sum += resident.count();
                all.add(&resident);
            }
            pages.resident += sum;
            pages.again += sum - all.count();
        }
        Ok(pages)
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::FileExt};

    use super::*;

    /// Two files of 16 pages with one content: the first has pages 0 to 7 in memory, the second 4 to 11.
    #[test]
    fn pages_of_one_content_count_once() {
        let page = cofolio_sys::cache::page_size();
        let dir = std::env::current_exe().unwrap().parent().unwrap().to_owned();
        let dir = tempfile::tempdir_in(dir).unwrap();
        let paths = ["a", "b"].map(|name| dir.path().join(name));
        for (path, first) in paths.iter().zip([0, 4]) {
            fs::write(path, vec![7; usize::try_from(16 * page).unwrap()]).unwrap();
            let file = File::open(path).unwrap();
            file.sync_all().unwrap();
            rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
            rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random).unwrap();
            if Resident::of(&file, 16 * page).unwrap().count() > 0 {
                println!("SKIP pages_of_one_content_count_once: this filesystem drops no pages");
                return;
            }
            for index in first..first + 8 {
                file.read_exact_at(&mut [0; 1], index * page).unwrap();
            }
        }
        let both = Holders(vec![paths.to_vec()]).count().unwrap();
        assert_eq!(both, Pages { resident: 16, again: 4 });
        let each = Holders::one_each(&paths).count().unwrap();
        assert_eq!(each, Pages { resident: 16, again: 0 });
        let gone = Holders::one_each(&[dir.path().join("c")]).count().unwrap();
        assert_eq!(gone, Pages::default());
    }
}
