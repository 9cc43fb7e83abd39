//! Pools: sealed files in memory with one copy of each content that guests of a trust domain share.
//!
//! Nobody can write to a sealed one, root included, so what was compared stays what it was. A pool
//! cannot lose single pages. So there are many small ones, and each goes when no guest has it.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::File;
use std::io;
use std::sync::Mutex;
use std::thread::ScopedJoinHandle;

use cofolio_shim::protocol::PAGE;
use cofolio_sys::memory::sealed;

use super::plan::Content;
use super::scan::hash_of;
use super::{lock, next};

/// Pages of a pool: 4 MiB.
pub(super) const POOL_PAGES: u64 = 1024;
const POOL_LEN: usize = 1024;
const _: () = assert!(POOL_LEN as u64 == POOL_PAGES);

/// One pool.
#[derive(Debug)]
pub(super) struct Pool {
    /// Open for reading: what guests get.
    pub(super) file: File,
    pub(super) pages: u32,
    /// Processes that have it.
    pub(super) users: HashSet<u32>,
}

/// The pools of a trust domain.
#[derive(Debug, Default)]
pub(super) struct Pools {
    /// By number, which is that of the first slot by [`POOL_PAGES`].
    pub(super) pools: BTreeMap<u32, Pool>,
    /// Where contents are.
    pub(super) slots: HashMap<Content, u64>,
    next: u32,
}

impl Pools {
    /// The first slot of the next pool.
    pub(super) fn next_slot(&self) -> u64 {
        u64::from(self.next) * POOL_PAGES
    }

    /// Bytes of all pools.
    pub(super) fn bytes(&self) -> u64 {
        self.pools.values().map(|pool| u64::from(pool.pages) * PAGE as u64).sum()
    }

    /// Makes pools of new contents, whose slots begin with [`Pools::next_slot`], on so many threads:
    /// `copies` says which of several equal ones each is, and `read` fills in the pages from one of them
    /// on. Each thread has one pool in this process's memory.
    pub(super) fn add(
        &mut self,
        copies: &[u8],
        threads: usize,
        read: impl Fn(usize, &mut [u8]) + Sync,
    ) -> io::Result<()> {
        let parts = Mutex::new(copies.chunks(POOL_LEN).zip(self.next..).collect::<Vec<_>>());
        let made = Mutex::new(Vec::new());
        let make = || -> io::Result<()> {
            let mut pages = vec![0; POOL_LEN.min(copies.len()) * PAGE];
            while let Some((copies, number)) = next(&parts) {
                let pages = &mut pages[..copies.len() * PAGE];
                read((number - self.next) as usize * POOL_LEN, pages);
                // What has changed since it was hashed is as good a content as any other.
                let content =
                    |(page, copy): (&[u8], &u8)| Content { hash: hash_of(page), copy: *copy };
                let contents: Vec<_> = pages.chunks(PAGE).zip(copies).map(content).collect();
                lock(&made).push((number, sealed("cofolio-pool", pages)?, contents));
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
        for (number, file, contents) in made.into_inner().unwrap_or_default() {
            let pages = u32::try_from(contents.len()).unwrap_or(u32::MAX);
            self.slots.extend(contents.into_iter().zip(u64::from(number) * POOL_PAGES..));
            self.pools.insert(number, Pool { file, pages, users: HashSet::new() });
            self.next = self.next.max(number + 1);
        }
        Ok(())
    }

    /// Drops pools that only processes had that have ended.
    pub(super) fn retain_living(&mut self, lives: impl Fn(u32) -> bool) {
        for pool in self.pools.values_mut() {
            pool.users.retain(|pid| lives(*pid));
        }
        let before = self.pools.len();
        self.pools.retain(|_, pool| !pool.users.is_empty());
        if self.pools.len() < before {
            let pools = &self.pools;
            let number = |slot: u64| u32::try_from(slot / POOL_PAGES).unwrap_or(u32::MAX);
            self.slots.retain(|_, slot| pools.contains_key(&number(*slot)));
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests may panic")]

    use super::*;

    #[test]
    fn a_pool_goes_with_its_last_user() {
        let mut pools = Pools::default();
        pools.add(&[0], 1, |_, pages| pages.fill(1)).unwrap();
        assert_eq!(pools.next_slot(), POOL_PAGES);
        pools.add(&[3], 1, |_, pages| pages.fill(2)).unwrap();
        pools.pools.get_mut(&0).unwrap().users.insert(10);
        pools.pools.get_mut(&1).unwrap().users.extend([10, 11]);
        pools.retain_living(|pid| pid == 11);
        let content = Content { hash: hash_of(&[2; PAGE]), copy: 3 };
        assert_eq!(pools.slots, [(content, POOL_PAGES)].into());
        assert_eq!(pools.bytes(), PAGE as u64);
    }
}
