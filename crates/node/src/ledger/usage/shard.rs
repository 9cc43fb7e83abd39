//! One shard of the matrix: all lists of some of the mounts, without any locking.
//!
//! ```text
//!            cgroup 1     cgroup 2     cgroup 3
//! mount 1    [list] ────────────────── [list]       one ring per mount
//! mount 2                 [list] ───── [list]
//!               │            │            │         one ring per cgroup
//!            coldest ─> entry ─> … ─> most recent   one ring per list, in order of use
//! ```
//!
//! Knuth calls this representation of a sparse matrix orthogonal lists (The Art of Computer
//! Programming 1, section 2.2.6). Hash tables of slots find the list of a pair, the entry of an
//! object in a list, and one list of each mount and of each cgroup.

use std::{cmp::Reverse, mem};

use hashbrown::HashTable;

use super::{
    CgroupId, Count, ObjectId, SuperblockId, Usage,
    slab::{Node, Slab, Slot},
};

/// Each list has two rings, and a key of two numbers.
#[derive(Debug, Clone, Copy)]
pub(super) enum Axis {
    Mount,
    Cgroup,
}

/// A mount and a cgroup, by [`Axis`].
pub(super) type Key = [u32; 2];

#[derive(Debug)]
struct Entry {
    list: Slot,
    object: u32,
    time: u32,
}

#[derive(Debug)]
struct List {
    key: Key,
    /// The least recently used entry. The ring goes on to more recent ones.
    coldest: Slot,
    /// The number of entries. It is 0 only during an operation, and in a free slot.
    len: u32,
}

/// The only ring of an entry.
const BY_TIME: usize = 0;

/// Bytes of an entry and of a list in their slabs.
pub(super) const ENTRY_SIZE: usize = size_of::<Node<Entry, 1>>();
pub(super) const LIST_SIZE: usize = size_of::<Node<List, 2>>();

const _: () = assert!(ENTRY_SIZE == 20 && LIST_SIZE == 32);

#[derive(Debug, Default)]
pub(super) struct Shard {
    entries: Slab<Entry, 1>,
    lists: Slab<List, 2>,
    by_object: HashTable<Slot>,
    by_key: HashTable<Slot>,
    /// One list of each mount's ring and of each cgroup's, by [`Axis`].
    heads: [HashTable<Slot>; 2],
}

impl Shard {
    /// Records a use at the time `now`, or at that of the list's most recent use if that is later.
    pub(super) fn touch(&mut self, key: Key, object: u32, now: u32) -> Option<u32> {
        assert!(self.entries.used() < Slot::MAX as usize, "a shard has at most 2^32 - 1 entries");
        let list = self.find_list(key).unwrap_or_else(|| self.add_list(key));
        let latest = self.coldest(list).map(|first| self.entries.prev(BY_TIME, first));
        let time = latest.map_or(now, |entry| now.max(self.entries[entry].time));
        self.record(list, object, time)
    }

    /// As [`Self::touch`], but does nothing if the object is not on the list.
    pub(super) fn touch_listed(&mut self, key: Key, object: u32, now: u32) -> Option<u32> {
        self.find_entry(self.find_list(key)?, object)?;
        self.touch(key, object, now)
    }

    /// Drops all lists of a mount.
    pub(super) fn remove_mount(&mut self, mount: u32) {
        while let Some(list) = self.first(Axis::Mount, mount) {
            self.remove_list(list);
        }
        self.shrink();
    }

    /// Hands the lists of a cgroup to its parent, another cgroup. Returns the number of lists.
    pub(super) fn reparent(&mut self, cgroup: u32, parent: u32) -> usize {
        let mut lists = 0;
        while let Some(list) = self.first(Axis::Cgroup, cgroup) {
            let key = [self.lists[list].key[Axis::Mount as usize], parent];
            match self.find_list(key) {
                Some(into) => self.merge(list, into),
                None => self.rename(list, key),
            }
            lists += 1;
        }
        self.shrink();
        lists
    }

    /// Removes the entries that are not to be kept. Returns their number.
    pub(super) fn retain(&mut self, keep: &mut impl FnMut(Usage) -> bool) -> usize {
        let before = self.entries.used();
        for list in (0..).take(self.lists.slots()) {
            // Empty only in a free slot. With its last entry a list goes.
            let List { len, mut coldest, .. } = self.lists[list];
            for _ in 0..len {
                let entry = coldest;
                coldest = self.entries.next(BY_TIME, entry);
                if !keep(self.usage(entry)) {
                    self.remove_entry(entry);
                }
            }
        }
        let removed = before - self.entries.used();
        self.shrink();
        removed
    }

    /// All uses, list by list in any order, and within a list the least recent first.
    pub(super) fn usages(&self) -> impl Iterator<Item = Usage> {
        self.by_key.iter().flat_map(|&list| self.usages_of_list(list))
    }

    /// As [`Self::usages`], for one mount or cgroup.
    pub(super) fn usages_of(&self, axis: Axis, id: u32) -> impl Iterator<Item = Usage> {
        self.lists_of(axis, id).flat_map(|list| self.usages_of_list(list))
    }

    /// Whether one more entry on the list of a pair needs no new slot.
    pub(super) fn has_free_place(&self, key: Key) -> bool {
        self.entries.used() < self.entries.slots()
            && (self.lists.used() < self.lists.slots() || self.find_list(key).is_some())
    }

    pub(super) fn count(&self) -> Count {
        Count { lists: self.lists.used(), entries: self.entries.used() }
    }

    /// The time this takes grows with the lists of the mount or cgroup, not with their entries.
    pub(super) fn count_of(&self, axis: Axis, id: u32) -> Count {
        self.lists_of(axis, id).fold(Count::default(), |count, list| Count {
            lists: count.lists + 1,
            entries: count.entries + self.lists[list].len as usize,
        })
    }

    pub(super) fn allocated_bytes(&self) -> usize {
        let [mounts, cgroups] = &self.heads;
        let tables = [&self.by_object, &self.by_key, mounts, cgroups];
        let tables: usize = tables.iter().map(|table| table.allocation_size()).sum();
        tables + self.entries.allocated_bytes() + self.lists.allocated_bytes()
    }

    fn find_list(&self, key: Key) -> Option<Slot> {
        self.by_key.find(hash(key), |&list| self.lists[list].key == key).copied()
    }

    fn find_entry(&self, list: Slot, object: u32) -> Option<Slot> {
        let is_it = |entry: &Entry| (entry.list, entry.object) == (list, object);
        self.by_object.find(hash([list, object]), |&slot| is_it(&self.entries[slot])).copied()
    }

    /// The list that a walk of the mount's or cgroup's ring starts with.
    fn first(&self, axis: Axis, id: u32) -> Option<Slot> {
        let axis = axis as usize;
        self.heads[axis].find(hash([id, 0]), |&list| self.lists[list].key[axis] == id).copied()
    }

    fn lists_of(&self, axis: Axis, id: u32) -> impl Iterator<Item = Slot> {
        self.first(axis, id)
            .into_iter()
            .flat_map(move |first| self.lists.ring(axis as usize, first))
    }

    fn coldest(&self, list: Slot) -> Option<Slot> {
        let List { coldest, len, .. } = self.lists[list];
        (len > 0).then_some(coldest)
    }

    fn usages_of_list(&self, list: Slot) -> impl Iterator<Item = Usage> {
        let entries =
            self.coldest(list).into_iter().flat_map(|first| self.entries.ring(BY_TIME, first));
        entries.map(|entry| self.usage(entry))
    }

    fn usage(&self, entry: Slot) -> Usage {
        let Entry { list, object, time } = self.entries[entry];
        let [mount, cgroup] = self.lists[list].key;
        Usage {
            mount: SuperblockId(mount),
            cgroup: CgroupId(cgroup),
            object: ObjectId(object),
            time,
        }
    }

    /// Objects and times of a list, the most recent first.
    fn recent(&self, list: Slot) -> impl Iterator<Item = (u32, u32)> {
        let first = self.coldest(list).into_iter();
        let entries = first.flat_map(|first| self.entries.ring_back(BY_TIME, first));
        entries.map(|entry| (self.entries[entry].object, self.entries[entry].time))
    }

    /// Makes an object the most recent one of its list. Returns the time of its previous use.
    fn record(&mut self, list: Slot, object: u32, time: u32) -> Option<u32> {
        let Some(entry) = self.find_entry(list, object) else {
            let entry = self.entries.insert(Entry { list, object, time });
            self.by_object.insert_unique(hash([list, object]), entry, |&slot| {
                let Entry { list, object, .. } = self.entries[slot];
                hash([list, object])
            });
            self.append(list, entry);
            return None;
        };
        self.take_out(list, entry);
        self.append(list, entry);
        Some(mem::replace(&mut self.entries[entry].time, time))
    }

    /// Links an entry as the most recent one of its list.
    fn append(&mut self, list: Slot, entry: Slot) {
        match self.coldest(list) {
            Some(first) => self.entries.link(BY_TIME, entry, first),
            None => self.lists[list].coldest = entry,
        }
        self.lists[list].len += 1;
    }

    /// Unlinks an entry from its list, which may leave the list empty.
    fn take_out(&mut self, list: Slot, entry: Slot) {
        let next = self.entries.unlink(BY_TIME, entry);
        let list = &mut self.lists[list];
        list.len -= 1;
        if let Some(next) = next
            && list.coldest == entry
        {
            list.coldest = next;
        }
    }

    /// Removes an entry, and its list if it was the last one.
    fn remove_entry(&mut self, entry: Slot) {
        let Entry { list, object, .. } = self.entries[entry];
        self.take_out(list, entry);
        remove_slot(&mut self.by_object, hash([list, object]), entry);
        self.entries.remove(entry);
        if self.lists[list].len == 0 {
            self.detach(list);
            self.lists.remove(list);
        }
    }

    fn remove_list(&mut self, list: Slot) {
        while let Some(entry) = self.coldest(list) {
            self.remove_entry(entry);
        }
    }

    fn add_list(&mut self, key: Key) -> Slot {
        let list = self.lists.insert(List { key, coldest: 0, len: 0 });
        self.attach(list);
        list
    }

    /// Gives a list to another pair, which has none, without a look at its entries.
    fn rename(&mut self, list: Slot, key: Key) {
        self.detach(list);
        self.lists[list].key = key;
        self.attach(list);
    }

    /// Makes a list known under its key, and links it to those of the same mount and cgroup.
    fn attach(&mut self, list: Slot) {
        let lists = &mut self.lists;
        let key = lists[list].key;
        self.by_key.insert_unique(hash(key), list, |&list| hash(lists[list].key));
        for (axis, heads) in self.heads.iter_mut().enumerate() {
            let hash_of = |list: Slot| hash([lists[list].key[axis], 0]);
            let first = heads.find(hash_of(list), |&first| lists[first].key[axis] == key[axis]);
            match first {
                Some(&first) => lists.link(axis, list, first),
                None => _ = heads.insert_unique(hash_of(list), list, |&list| hash_of(list)),
            }
        }
    }

    /// The reverse of [`Self::attach`].
    fn detach(&mut self, list: Slot) {
        let key = self.lists[list].key;
        remove_slot(&mut self.by_key, hash(key), list);
        for (axis, heads) in self.heads.iter_mut().enumerate() {
            let next = self.lists.unlink(axis, list);
            let first = heads.find_entry(hash([key[axis], 0]), |&first| first == list);
            match (first, next) {
                (Ok(mut first), Some(next)) => *first.get_mut() = next,
                (Ok(first), None) => _ = first.remove(),
                (Err(_), _) => {}
            }
        }
    }

    /// Moves the entries of a list into another list of the same mount, in order of time.
    ///
    /// Entries of the other list keep their place if they are older than every moved entry. Later
    /// ones are recorded again in order, so an object in both lists ends at its later use.
    fn merge(&mut self, list: Slot, into: Slot) {
        let mut uses: Vec<_> = self.recent(list).collect();
        let oldest = uses.last().map_or(0, |&(_, time)| time);
        uses.extend(self.recent(into).take_while(|&(_, time)| time > oldest));
        self.remove_list(list);
        uses.sort_by_key(|&(_, time)| Reverse(time));
        for (object, time) in uses.into_iter().rev() {
            self.record(into, object, time);
        }
    }

    /// Gives memory back once less than a quarter of the slots is used, by a rebuild of the shard.
    ///
    /// Three removals have paid for each copied item. Tables need no rule of their own, as they
    /// have never held more items than there are slots.
    fn shrink(&mut self) {
        let used = self.entries.used() + self.lists.used();
        let slots = self.entries.slots() + self.lists.slots();
        if used * 4 >= slots {
            return;
        }
        for Usage { mount, cgroup, object, time } in mem::take(self).usages() {
            self.touch([mount.0, cgroup.0], object.0, time);
        }
    }
}

fn remove_slot(table: &mut HashTable<Slot>, hash: u64, slot: Slot) {
    if let Ok(found) = table.find_entry(hash, |&other| other == slot) {
        found.remove();
    }
}

/// The finaliser of splitmix64. Callers number their ids, so nobody chooses them to collide.
fn hash([high, low]: [u32; 2]) -> u64 {
    let mut bits = u64::from(high) << 32 | u64::from(low);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

#[cfg(test)]
impl Shard {
    /// Walks all rings and looks everything up.
    pub(super) fn check(&self) {
        for &list in &self.by_key {
            let List { key, coldest, len } = self.lists[list];
            assert_eq!(self.find_list(key), Some(list));
            assert!(len > 0, "an empty list was left");
            assert_eq!(self.entries.check_ring(BY_TIME, coldest), len as usize);
            let mut latest = 0;
            for entry in self.entries.ring(BY_TIME, coldest) {
                let Entry { list: of, object, time } = self.entries[entry];
                assert_eq!((of, self.find_entry(list, object)), (list, Some(entry)));
                assert!(latest <= time, "not in order of time");
                latest = time;
            }
        }
        for (axis, heads) in self.heads.iter().enumerate() {
            let mut linked = 0;
            for &first in heads {
                linked += self.lists.check_ring(axis, first);
                let id = self.lists[first].key[axis];
                assert!(self.lists.ring(axis, first).all(|list| self.lists[list].key[axis] == id));
            }
            assert_eq!(linked, self.lists.used());
        }
        assert_eq!(self.by_key.len(), self.lists.used());
        assert_eq!(self.by_object.len(), self.entries.used());
        assert_eq!(self.usages().count(), self.entries.used());
        self.entries.check_free();
        self.lists.check_free();
        let used = self.entries.used() + self.lists.used();
        assert!(used * 4 >= self.entries.slots() + self.lists.slots(), "not shrunk");
    }
}
