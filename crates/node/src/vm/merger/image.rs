//! Pages of images that guests also have in their own memory, such as copies of files whose owner
//! they changed. The merger maps the pack or segment in their place, like a pool.
//!
//! Only pages in the host's page cache are compared, so that comparing reads nothing from disk.

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};

use cofolio_shim::file::is_immutable;
use cofolio_shim::protocol::PAGE;
use cofolio_sys::resident::Resident;

use super::plan::{Hash, Slot, Slots, contents};
use super::pool::IMAGES;
use super::scan::hash_of;

/// Most pages of all images of a trust domain. Tables take some 40 bytes for each.
const PAGES_MAX: usize = 1 << 20;
/// Pages that are read at once.
const READ_PAGES: usize = 64;

/// A pack or a segment.
#[derive(Debug)]
pub(super) struct Image {
    pub(super) file: File,
    pub(super) pages: u32,
    /// Device and inode.
    id: (u64, u64),
    hashes: Vec<Hash>,
    /// Processes whose guests have it.
    users: HashSet<u32>,
}

/// The images of a trust domain.
#[derive(Debug, Default)]
pub(super) struct Images {
    /// By number, which differs from all numbers of pools.
    pub(super) images: BTreeMap<u32, Image>,
    /// Slots of contents.
    pub(super) slots: Slots,
    next: u32,
}

impl Images {
    /// Adds a file of a guest's image if nobody can change it. Shims refuse other files.
    pub(super) fn add(&mut self, file: File, pid: u32) -> io::Result<()> {
        if is_immutable(&file) { self.keep(file, pid) } else { Ok(()) }
    }

    fn keep(&mut self, file: File, pid: u32) -> io::Result<()> {
        let stat = file.metadata()?;
        let id = (stat.dev(), stat.ino());
        if let Some(known) = self.images.values_mut().find(|image| image.id == id) {
            known.users.insert(pid);
            return Ok(());
        }
        let pages = usize::try_from(stat.len() / PAGE as u64).unwrap_or(usize::MAX);
        let all: usize = self.images.values().map(|image| image.hashes.len()).sum();
        if pages > PAGES_MAX.saturating_sub(all) {
            return Ok(());
        }
        let hashes = vec![None; pages];
        let pages = u32::try_from(pages).map_err(io::Error::other)?;
        let image = Image { file, pages, id, hashes, users: [pid].into() };
        self.images.insert(IMAGES + self.next, image);
        // Numbers are not reused: a shim may still have a file under an old one.
        self.next += 1;
        Ok(())
    }

    /// Hashes pages that are new in the page cache. Returns failures; a later look tries these
    /// pages again.
    pub(super) fn look(&mut self, zeros: NonZeroU64) -> Vec<String> {
        let mut failures = Vec::new();
        for (number, image) in &mut self.images {
            match image.hash() {
                Ok(0) => continue,
                Ok(_) => {}
                Err(error) => failures.push(format!("pages of an image are not merged: {error}")),
            }
            for (page, content) in (0..).zip(contents(&image.hashes)) {
                if let Some(content) = content.filter(|content| *content != zeros) {
                    self.slots.entry(content).or_insert(Slot { pool: *number, page });
                }
            }
        }
        failures
    }

    /// Drops files whose processes have all ended.
    pub(super) fn retain_living(&mut self, lives: impl Fn(u32) -> bool) {
        for image in self.images.values_mut() {
            image.users.retain(|pid| lives(*pid));
        }
        let before = self.images.len();
        self.images.retain(|_, image| !image.users.is_empty());
        if self.images.len() < before {
            let images = &self.images;
            self.slots.retain(|_, slot| images.contains_key(&slot.pool));
        }
    }
}

impl Image {
    /// Hashes resident pages that have no hash yet. Returns their number.
    fn hash(&mut self) -> io::Result<usize> {
        let resident = Resident::of(&self.file, u64::from(self.pages) * PAGE as u64)?;
        let is_due =
            |page: usize, hashes: &[Hash]| hashes[page].is_none() && resident.has(page as u64);
        let mut buffer = vec![0; READ_PAGES * PAGE];
        let (mut page, mut hashed) = (0, 0);
        while page < self.hashes.len() {
            let most = self.hashes.len().min(page + READ_PAGES);
            let count = (page..most).take_while(|page| is_due(*page, &self.hashes)).count();
            let content = &mut buffer[..count * PAGE];
            self.file.read_exact_at(content, (page * PAGE) as u64)?;
            for (hash, content) in self.hashes[page..].iter_mut().zip(content.chunks(PAGE)) {
                *hash = Some(hash_of(content));
            }
            hashed += count;
            page += count.max(1);
        }
        Ok(hashed)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests may panic")]

    use std::io::Write as _;

    use rustix::fs::{IFlags, ioctl_setflags};

    use super::*;

    #[test]
    fn pages_in_the_page_cache_are_found() {
        let mut file = tempfile::tempfile().unwrap();
        for page in [1_u8, 0, 2, 2] {
            file.write_all(&[page; PAGE]).unwrap();
        }
        let mut images = Images::default();
        images.add(file.try_clone().unwrap(), 9).unwrap();
        assert_eq!(images.images.len(), 0, "anybody can change it");
        images.keep(file.try_clone().unwrap(), 10).unwrap();
        images.keep(file, 11).unwrap();
        assert!(images.look(hash_of(&[0; PAGE])).is_empty());
        assert_eq!((images.images.len(), images.slots.len()), (1, 3));
        let slot = |content: u8| images.slots.get(&hash_of(&[content; PAGE])).copied();
        assert_eq!(slot(1), Some(Slot { pool: IMAGES, page: 0 }));
        assert_eq!(slot(2), Some(Slot { pool: IMAGES, page: 2 }));
        images.retain_living(|pid| pid == 11);
        assert_eq!(images.slots.len(), 3);
        images.retain_living(|_| false);
        assert_eq!((images.images.len(), images.slots.len()), (0, 0));
    }

    /// The attributes of a file were believed wherever it was, also where a server makes them up.
    /// Here the kernel itself says them of a file in memory, which stands for those.
    #[test]
    fn files_of_other_filesystems_are_not_taken() {
        let test = "files_of_other_filesystems_are_not_taken";
        let Ok(file) = tempfile::NamedTempFile::new_in("/dev/shm") else {
            return println!("SKIP {test}: there is no /dev/shm");
        };
        file.as_file().set_len(PAGE as u64).unwrap();
        let set = |flags: IFlags| ioctl_setflags(&file, flags);
        if set(IFlags::IMMUTABLE).is_err() {
            return println!("SKIP {test}: not root, or files in memory cannot be immutable");
        }
        let mut images = Images::default();
        let added = images.add(File::open(file.path()).unwrap(), 9);
        set(IFlags::empty()).unwrap();
        added.unwrap();
        assert_eq!(images.images.len(), 0);
    }
}
