//! Pools: sealed files in memory with one copy of each content that guests of a trust domain share.
//!
//! Nobody, not even root, can write to a sealed pool, so a page that was compared stays the same. A
//! pool cannot give up single pages. So pools are small, and a pool is dropped when no guest uses
//! it.
//!
//! A new merger adopts the pools that an earlier one left in VMMs.

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::sync::Mutex;
use std::thread::ScopedJoinHandle;

use cofolio_shim::protocol::PAGE;
use cofolio_sys::memory::{is_sealed, sealed};
use rustix::fs::fstatfs;

use super::plan::{Slot, Slots, contents};
use super::scan::hash_of;
use super::{lock, next};
use crate::vm::ram::TMPFS_MAGIC;

/// Pages of a pool: 4 MiB.
pub(super) const POOL_PAGES: usize = 1024;
/// Numbers from here on are those of images.
pub(super) const IMAGES: u32 = 1 << 31;

/// One pool.
#[derive(Debug)]
pub(super) struct Pool {
    /// Open for reading: what guests get.
    pub(super) file: File,
    pub(super) pages: u32,
    /// Inode of the file. `/proc/PID/maps` identifies a pool by it.
    pub(super) inode: u64,
    /// Processes that have it.
    pub(super) users: HashSet<u32>,
}

/// The pools of a trust domain.
#[derive(Debug, Default)]
pub(super) struct Pools {
    /// By number.
    pub(super) pools: BTreeMap<u32, Pool>,
    /// Slots of contents.
    pub(super) slots: Slots,
    next: u32,
}

impl Pools {
    /// The number of the next pool.
    pub(super) fn next(&self) -> u32 {
        self.next
    }

    /// Bytes of all pools.
    pub(super) fn bytes(&self) -> u64 {
        self.pools.values().map(|pool| u64::from(pool.pages) * PAGE as u64).sum()
    }

    /// Makes pools for a number of new pages. Their numbers begin with [`Pools::next`]. `read`
    /// fills in pages, beginning with a given one. Each of the threads has one pool in this
    /// process's memory.
    pub(super) fn add(
        &mut self,
        pages: usize,
        threads: usize,
        read: impl Fn(usize, &mut [u8]) + Sync,
    ) -> io::Result<()> {
        let parts = (0..pages).step_by(POOL_PAGES).zip(self.next..IMAGES);
        let parts = Mutex::new(parts.collect::<Vec<_>>());
        let made = Mutex::new(Vec::new());
        let make = || -> io::Result<()> {
            let mut buffer = vec![0; POOL_PAGES.min(pages) * PAGE];
            while let Some((first, number)) = next(&parts) {
                let content = &mut buffer[..POOL_PAGES.min(pages - first) * PAGE];
                read(first, content);
                // A page may have changed since it was hashed. The shims compare, so any content is
                // safe.
                let hashes: Vec<_> = content.chunks(PAGE).map(|page| Some(hash_of(page))).collect();
                lock(&made).push((number, sealed("cofolio-pool", content)?, hashes));
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..threads).map(|_| scope.spawn(make)).collect();
            let join = |thread: ScopedJoinHandle<'_, io::Result<()>>| {
                thread.join().unwrap_or_else(|_| Err(io::Error::other("a thread has panicked")))
            };
            threads.into_iter().map(join).collect::<io::Result<Vec<()>>>()
        })?;
        for (number, file, hashes) in made.into_inner().unwrap_or_default() {
            self.keep(number, file, &hashes)?;
        }
        Ok(())
    }

    fn keep(&mut self, number: u32, file: File, hashes: &[super::plan::Hash]) -> io::Result<()> {
        let pages = u32::try_from(hashes.len()).map_err(io::Error::other)?;
        for (page, content) in (0..).zip(contents(hashes).flatten()) {
            self.slots.entry(content).or_insert(Slot { pool: number, page });
        }
        let inode = file.metadata()?.ino();
        self.pools.insert(number, Pool { file, pages, inode, users: HashSet::new() });
        self.next = self.next.max(number + 1);
        Ok(())
    }

    /// Adopts a pool that a process has, under a number of its own: a hostile process could name
    /// the last number, or another pool's. Ignores files that are no sealed pool. A hostile process
    /// can offer any content: shims compare before they map it.
    pub(super) fn adopt(&mut self, file: File, pid: u32) -> io::Result<()> {
        // Its inode stands for a pool, and memory of huge pages has inodes of its own. They could
        // not be mapped in place of small pages either.
        let is_small = fstatfs(&file)?.f_type.cast_unsigned() == TMPFS_MAGIC;
        if !(is_small && is_sealed(&file)) {
            return Ok(());
        }
        let stat = file.metadata()?;
        if let Some(pool) = self.pools.values_mut().find(|pool| pool.inode == stat.ino()) {
            pool.users.insert(pid);
            return Ok(());
        }
        let most = (POOL_PAGES * PAGE) as u64;
        let is_whole = stat.len() > 0 && stat.len() <= most && stat.len() % PAGE as u64 == 0;
        if !is_whole || self.next >= IMAGES {
            return Ok(());
        }
        let mut content = vec![0; usize::try_from(stat.len()).unwrap_or(0)];
        file.read_exact_at(&mut content, 0)?;
        let hashes: Vec<_> = content.chunks(PAGE).map(|page| Some(hash_of(page))).collect();
        let number = self.next;
        self.keep(number, file, &hashes)?;
        self.pools.entry(number).and_modify(|pool| _ = pool.users.insert(pid));
        Ok(())
    }

    /// Drops pools whose processes have all ended.
    pub(super) fn retain_living(&mut self, lives: impl Fn(u32) -> bool) {
        for pool in self.pools.values_mut() {
            pool.users.retain(|pid| lives(*pid));
        }
        self.take(|pool| pool.users.is_empty());
    }

    /// Merges no more pages with these pools.
    pub(super) fn retire(&mut self, is_retired: impl Fn(u64) -> bool) {
        let is_one = |number| self.pools.get(&number).is_some_and(|pool| is_retired(pool.inode));
        self.slots.retain(|_, slot| !is_one(slot.pool));
    }

    /// Removes pools, and returns them.
    pub(super) fn take(&mut self, is_taken: impl Fn(&Pool) -> bool) -> BTreeMap<u32, Pool> {
        let all = std::mem::take(&mut self.pools);
        let (taken, kept): (BTreeMap<_, _>, _) = all.into_iter().partition(|(_, it)| is_taken(it));
        self.pools = kept;
        self.slots.retain(|_, slot| !taken.contains_key(&slot.pool));
        taken
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests may panic")]

    use super::*;

    #[test]
    fn a_pool_goes_with_its_last_user() {
        let mut pools = Pools::default();
        pools.add(1, 1, |_, pages| pages.fill(1)).unwrap();
        assert_eq!(pools.next(), 1);
        pools.add(1, 1, |_, pages| pages.fill(2)).unwrap();
        pools.pools.get_mut(&0).unwrap().users.insert(10);
        pools.pools.get_mut(&1).unwrap().users.extend([10, 11]);
        pools.retain_living(|pid| pid == 11);
        let slots: Vec<_> = pools.slots.iter().collect();
        assert_eq!(slots, [(&hash_of(&[2; PAGE]), &Slot { pool: 1, page: 0 })]);
        assert_eq!(pools.bytes(), PAGE as u64);
    }

    #[test]
    fn pools_of_an_earlier_merger_are_taken_over() {
        let mut before = Pools::default();
        before.add(3, 1, |_, pages| pages[..PAGE].fill(5)).unwrap();
        let file = || before.pools[&0].file.try_clone().unwrap();
        let mut pools = Pools::default();
        pools.add(1, 1, |_, pages| pages.fill(6)).unwrap();
        pools.adopt(file(), 10).unwrap();
        pools.adopt(file(), 11).unwrap();
        assert_eq!((pools.next(), pools.bytes()), (2, 4 * PAGE as u64));
        let is_adopted = |(content, slot): (_, &Slot)| {
            pools.slots.get(content) == Some(&Slot { pool: 1, ..*slot })
        };
        assert!(before.slots.iter().all(is_adopted));
        assert_eq!(pools.pools[&1].users, [10, 11].into());
        // A file that can change, and a device.
        let open = tempfile::tempfile().unwrap();
        open.set_len(PAGE as u64).unwrap();
        pools.adopt(open, 12).unwrap();
        pools.adopt(File::open("/dev/null").unwrap(), 12).unwrap();
        assert_eq!((pools.next(), pools.bytes()), (2, 4 * PAGE as u64));
    }
}
