//! Usage lists: which objects a cgroup uses of a mount, in order of their last use.
//!
//! They are a sparse (mount × cgroup) matrix of LRU lists, like the kernel's list_lru since 5.18
//! (`mm/list_lru.c`; "Optimize list lru memory consumption", 2021). A pair has a list from its
//! first entry to its last, and an unused pair takes no memory. When a cgroup is removed, its lists
//! are handed to its parent.
//!
//! The matrix is sharded by mount. A list that changes its cgroup therefore stays in its shard, and
//! no operation holds two locks. An operation on a cgroup, or on everything, locks one shard after
//! the other, so it is atomic for each mount but not as a whole. Threads that use the same mount
//! wait for each other. (The ledger has one thread so far.)

#[cfg(all(test, loom))]
mod loom_tests;
mod shard;
mod slab;
#[cfg(all(test, not(loom)))]
mod tests;

use std::{
    iter::Sum,
    ops::{ControlFlow, Deref, DerefMut},
    sync::{
        PoisonError,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use self::{
    shard::{Axis, Shard},
    sync::{Mutex, MutexGuard},
};

mod sync {
    #[cfg(all(test, loom))]
    pub(super) use loom::sync::{Mutex, MutexGuard};
    #[cfg(not(all(test, loom)))]
    pub(super) use std::sync::{Mutex, MutexGuard};
}

/// A superblock, by a number of the caller's. The lists take it for the mount. Consecutive numbers
/// are spread evenly over the shards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SuperblockId(pub u32);

/// A cgroup, by a number of the caller's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CgroupId(pub u32);

/// An object of a mount, by a number of the caller's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectId(pub u32);

/// The last use of an object by a cgroup through a mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Usage {
    /// The mount.
    pub mount: SuperblockId,
    /// The cgroup that used it, or that got its lists.
    pub cgroup: CgroupId,
    /// The object.
    pub object: ObjectId,
    /// When, in a unit and since an epoch of the caller's.
    pub time: u32,
}

/// Numbers of lists and entries: of a mount, of a cgroup, or in total.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Count {
    /// Pairs of a mount and a cgroup that have a list.
    pub lists: usize,
    /// Entries in these lists.
    pub entries: usize,
}

impl Count {
    /// Bytes that so many lists and entries take at most while nothing is removed, but for what a
    /// table takes while it grows. What removed ones took may be kept for later ones:
    /// [`UsageLists::memory_bytes`] says what is held.
    pub fn bytes_max(&self) -> u64 {
        // Of a slab, a fifth may be free. A table has five bytes a place, and 7 of 16 in use at
        // least; an entry is in one table, a list in three at most.
        const ENTRY: usize = shard::ENTRY_SIZE * 5 / 4 + 12;
        const LIST: usize = shard::LIST_SIZE * 5 / 4 + 3 * 12;
        (self.entries * ENTRY + self.lists * LIST) as u64
    }
}

impl Sum for Count {
    fn sum<I: Iterator<Item = Count>>(counts: I) -> Count {
        counts.fold(Count::default(), |sum, count| Count {
            lists: sum.lists + count.lists,
            entries: sum.entries + count.entries,
        })
    }
}

/// Shards of the ledger's own lists.
pub const SHARDS: usize = 16;

/// The lists of all pairs. See the [module](self).
#[derive(Debug)]
pub struct UsageLists {
    shards: Box<[Mutex<Shard>]>,
    /// Of all shards together.
    held: Held,
    /// How often [`Self::for_each`] was called.
    #[cfg(test)]
    walks: AtomicUsize,
}

/// What shards hold, as it was when each of them was last unlocked.
#[derive(Debug, Default)]
struct Held {
    lists: AtomicUsize,
    entries: AtomicUsize,
    bytes: AtomicUsize,
}

/// A shard that may be changed.
struct Changing<'l> {
    shard: MutexGuard<'l, Shard>,
    held: &'l Held,
    /// What the shard held before.
    before: (Count, usize),
}

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        let (count, bytes) = self.before;
        let now = self.shard.count();
        let add = |held: &AtomicUsize, now: usize, before: usize| {
            held.fetch_add(now.wrapping_sub(before), Relaxed);
        };
        add(&self.held.lists, now.lists, count.lists);
        add(&self.held.entries, now.entries, count.entries);
        add(&self.held.bytes, self.shard.allocated_bytes(), bytes);
    }
}

impl Deref for Changing<'_> {
    type Target = Shard;

    fn deref(&self) -> &Shard {
        &self.shard
    }
}

impl DerefMut for Changing<'_> {
    fn deref_mut(&mut self) -> &mut Shard {
        &mut self.shard
    }
}

impl UsageLists {
    /// Makes an empty matrix of at least one shard. A few shards per processor keep threads from
    /// waiting for each other.
    pub fn new(shards: usize) -> UsageLists {
        let shards = (0..shards.max(1)).map(|_| Mutex::default()).collect();
        UsageLists {
            shards,
            held: Held::default(),
            #[cfg(test)]
            walks: AtomicUsize::default(),
        }
    }

    /// Records that a cgroup uses an object through a mount at the time `now`. Returns the time of
    /// its previous use, or `None` if the object was not on the pair's list.
    ///
    /// Time does not go back within a list: a use that arrives late gets the time of the list's
    /// most recent use.
    ///
    /// # Panics
    /// When the shard has 2^32 - 1 entries.
    pub fn touch(
        &self,
        mount: SuperblockId,
        cgroup: CgroupId,
        object: ObjectId,
        now: u32,
    ) -> Option<u32> {
        self.change(self.shard_of(mount)).touch([mount.0, cgroup.0], object.0, now)
    }

    /// As [`Self::touch`], but does nothing if the object is not on the pair's list.
    pub fn touch_listed(
        &self,
        mount: SuperblockId,
        cgroup: CgroupId,
        object: ObjectId,
        now: u32,
    ) -> Option<u32> {
        self.change(self.shard_of(mount)).touch_listed([mount.0, cgroup.0], object.0, now)
    }

    /// Drops all lists of a mount.
    pub fn remove_mount(&self, mount: SuperblockId) {
        self.change(self.shard_of(mount)).remove_mount(mount.0);
    }

    /// Hands all lists of a cgroup to another one, its parent. Returns the number of lists.
    ///
    /// If the parent has no list for the mount, it gets the cgroup's list as a whole, in constant
    /// time. Otherwise the two lists are merged in order of time, and an object in both keeps its
    /// later time. A merge sorts the cgroup's entries and those of the parent's entries that were
    /// used after the oldest of them.
    ///
    /// The caller resolves cgroups, and no removed cgroup is remembered here. A late
    /// [touch](Self::touch) of a removed cgroup makes a new list, so the caller reparents again
    /// once no thread can hold the old id. `reparent(a, b)` in a race with `reparent(b, c)` may
    /// leave lists in `b` in the same way.
    pub fn reparent(&self, cgroup: CgroupId, parent: CgroupId) -> usize {
        if cgroup == parent {
            return 0;
        }
        self.shards.iter().map(|shard| self.change(shard).reparent(cgroup.0, parent.0)).sum()
    }

    /// Removes the entries for which `keep` returns false, and returns their number. It looks at every
    /// entry. As `visit` of [`Self::for_each`], `keep` runs under the lock of a shard.
    pub fn retain(&self, mut keep: impl FnMut(Usage) -> bool) -> usize {
        self.shards.iter().map(|shard| self.change(shard).retain(&mut keep)).sum()
    }

    /// Calls `visit` for every entry until it breaks: list by list in any order, and within a list
    /// the least recent first.
    ///
    /// An entry that exists throughout is visited once, even if it is reparented meanwhile. `visit`
    /// runs under the lock of a shard: it must be quick, and deadlocks if it calls these methods.
    pub fn for_each<B>(&self, mut visit: impl FnMut(Usage) -> ControlFlow<B>) -> ControlFlow<B> {
        #[cfg(test)]
        self.walks.fetch_add(1, Relaxed);
        self.locked().try_for_each(|shard| shard.usages().try_for_each(&mut visit))
    }

    /// As [`Self::for_each`], for one mount.
    pub fn for_each_of_mount<B>(
        &self,
        mount: SuperblockId,
        visit: impl FnMut(Usage) -> ControlFlow<B>,
    ) -> ControlFlow<B> {
        lock(self.shard_of(mount)).usages_of(Axis::Mount, mount.0).try_for_each(visit)
    }

    /// As [`Self::for_each`], for one cgroup.
    pub fn for_each_of_cgroup<B>(
        &self,
        cgroup: CgroupId,
        mut visit: impl FnMut(Usage) -> ControlFlow<B>,
    ) -> ControlFlow<B> {
        self.locked()
            .try_for_each(|shard| shard.usages_of(Axis::Cgroup, cgroup.0).try_for_each(&mut visit))
    }

    /// Counts everything, in constant time and without a lock.
    pub fn count(&self) -> Count {
        let Held { lists, entries, .. } = &self.held;
        Count { lists: lists.load(Relaxed), entries: entries.load(Relaxed) }
    }

    /// Whether an insert into the list of this pair needs no allocation.
    pub fn has_free_place(&self, mount: SuperblockId, cgroup: CgroupId) -> bool {
        lock(self.shard_of(mount)).has_free_place([mount.0, cgroup.0])
    }

    /// Counts the lists of a mount and their entries, in time that grows with the lists only.
    pub fn count_of_mount(&self, mount: SuperblockId) -> Count {
        lock(self.shard_of(mount)).count_of(Axis::Mount, mount.0)
    }

    /// As [`Self::count_of_mount`], for one cgroup.
    pub fn count_of_cgroup(&self, cgroup: CgroupId) -> Count {
        self.locked().map(|shard| shard.count_of(Axis::Cgroup, cgroup.0)).sum()
    }

    /// The memory in bytes that lists and entries have allocated, used or not, without the
    /// allocator's own overhead. In constant time and without a lock.
    pub fn memory_bytes(&self) -> usize {
        self.held.bytes.load(Relaxed)
    }

    fn shard_of(&self, mount: SuperblockId) -> &Mutex<Shard> {
        &self.shards[mount.0 as usize % self.shards.len()]
    }

    fn change<'l>(&'l self, shard: &'l Mutex<Shard>) -> Changing<'l> {
        let shard = lock(shard);
        let before = (shard.count(), shard.allocated_bytes());
        Changing { shard, held: &self.held, before }
    }

    /// Locks one shard after the other.
    fn locked(&self) -> impl Iterator<Item = MutexGuard<'_, Shard>> {
        self.shards.iter().map(lock)
    }
}

#[cfg(test)]
impl UsageLists {
    pub(super) fn walks(&self) -> usize {
        self.walks.load(Relaxed)
    }

    /// Checks the invariants of all shards.
    fn check(&self) {
        let (mut count, mut bytes) = (Count::default(), 0);
        for (index, shard) in self.shards.iter().enumerate() {
            let shard = lock(shard);
            shard.check();
            count = [count, shard.count()].into_iter().sum();
            bytes += shard.allocated_bytes();
            let shard_of = |usage: Usage| usage.mount.0 as usize % self.shards.len();
            assert!(shard.usages().all(|usage| shard_of(usage) == index), "in a wrong shard");
        }
        assert_eq!((self.count(), self.memory_bytes()), (count, bytes));
    }

    /// All entries as (mount, cgroup, object, time), sorted.
    fn sorted(&self) -> Vec<(u32, u32, u32, u32)> {
        let mut entries = Vec::new();
        let _ = self.for_each(|Usage { mount, cgroup, object, time }| {
            entries.push((mount.0, cgroup.0, object.0, time));
            ControlFlow::<()>::Continue(())
        });
        entries.sort_unstable();
        entries
    }
}

/// Ignores poison: no panic leaves a shard half changed, as only `visit` and a full shard panic.
fn lock(shard: &Mutex<Shard>) -> MutexGuard<'_, Shard> {
    shard.lock().unwrap_or_else(PoisonError::into_inner)
}
