//! The index over (directory, name): a hash table of entry ids, whose keys stay in the arena.

use std::hash::{BuildHasher, Hasher, RandomState};

use hashbrown::HashTable;

/// The hash is keyed at random, because images could hold names chosen to collide.
#[derive(Clone)]
pub(super) struct NameIndex {
    table: HashTable<u32>,
    seed: RandomState,
}

impl NameIndex {
    pub(super) fn new() -> NameIndex {
        NameIndex { table: HashTable::new(), seed: RandomState::new() }
    }

    pub(super) fn find<'k>(
        &self,
        dir: u32,
        name: &[u8],
        key: impl Fn(u32) -> (u32, &'k [u8]),
    ) -> Option<u32> {
        self.table.find(hash(&self.seed, (dir, name)), |&id| key(id) == (dir, name)).copied()
    }

    /// Adds an entry whose key is known not to be there.
    pub(super) fn insert<'k>(
        &mut self,
        id: u32,
        dir: u32,
        name: &[u8],
        key: impl Fn(u32) -> (u32, &'k [u8]),
    ) {
        let seed = &self.seed;
        self.table.insert_unique(hash(seed, (dir, name)), id, |&id| hash(seed, key(id)));
    }

    pub(super) fn remove(&mut self, id: u32, dir: u32, name: &[u8]) {
        let hash = hash(&self.seed, (dir, name));
        if let Ok(found) = self.table.find_entry(hash, |&other| other == id) {
            found.remove();
        }
    }
}

fn hash(seed: &RandomState, (dir, name): (u32, &[u8])) -> u64 {
    let mut hasher = seed.build_hasher();
    hasher.write_u32(dir);
    hasher.write(name);
    hasher.finish()
}
