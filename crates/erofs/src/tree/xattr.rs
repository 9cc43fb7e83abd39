//! Extended attributes, interned: real trees have a handful of different sets for millions of
//! files (one security label each), so an inode holds the number of its set.

use std::hash::{BuildHasher, Hasher, RandomState};

use hashbrown::HashTable;

use super::{NONE, TreeError};

/// Most bytes of attributes of one inode: names, values, 7 bytes for each attribute and 12 for all,
/// as libcomposefs counts them. mkcomposefs takes half of it from a dump, and keeps the rest for
/// what it adds.
pub const XATTRS_MAX: usize = 0xffff;
/// Longest attribute name (`XATTR_NAME_MAX`).
const NAME_MAX: usize = 255;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct SetId(pub(crate) u32);

impl SetId {
    pub(crate) const EMPTY: SetId = SetId(NONE);
}

/// One attribute: the name and then the value in the table's buffer.
#[derive(Clone, Copy)]
struct Pair {
    start: u64,
    name_len: u16,
    value_len: u16,
}

pub(crate) struct XattrTable {
    bytes: Vec<u8>,
    pairs: Vec<Pair>,
    pair_index: HashTable<u32>,
    /// The pairs of all sets, one set after the other, each sorted by name.
    items: Vec<u32>,
    sets: Vec<(u32, u32)>,
    set_index: HashTable<u32>,
    seed: RandomState,
}

impl XattrTable {
    pub(crate) fn new() -> XattrTable {
        XattrTable {
            bytes: Vec::new(),
            pairs: Vec::new(),
            pair_index: HashTable::new(),
            items: Vec::new(),
            sets: Vec::new(),
            set_index: HashTable::new(),
            seed: RandomState::new(),
        }
    }

    /// Number of different sets; ids of sets other than the empty one are below it.
    pub(crate) fn set_count(&self) -> usize {
        self.sets.len()
    }

    pub(crate) fn set(&self, id: SetId) -> Xattrs<'_> {
        let (start, len) = self.sets.get(id.0 as usize).copied().unwrap_or((0, 0));
        Xattrs { table: self, items: self.items[start as usize..][..len as usize].iter() }
    }

    /// The number of a set of attributes, of which the last with one name counts.
    pub(crate) fn intern_set<'x>(
        &mut self,
        xattrs: impl IntoIterator<Item = (&'x [u8], &'x [u8])>,
    ) -> Result<SetId, TreeError> {
        let mut list: Vec<(&[u8], &[u8])> = Vec::new();
        for (name, value) in xattrs {
            if name.is_empty() || name.len() > NAME_MAX || name.contains(&0) {
                return Err(TreeError::XattrName { len: name.len() });
            }
            list.push((name, value));
        }
        if list.is_empty() {
            return Ok(SetId::EMPTY);
        }
        list.sort_by_key(|&(name, _)| name);
        list.reverse();
        list.dedup_by_key(|&mut (name, _)| name);
        list.reverse();
        // 12 bytes of header, per attribute 4 of its own and up to 3 of alignment.
        let space = 12 + list.iter().map(|(n, v)| 7 + n.len() + v.len()).sum::<usize>();
        if space > XATTRS_MAX {
            return Err(TreeError::XattrSpace { space });
        }
        let mut ids = Vec::with_capacity(list.len());
        for (name, value) in list {
            ids.push(self.intern_pair(name, value)?);
        }
        self.intern_ids(&ids)
    }

    fn intern_pair(&mut self, name: &[u8], value: &[u8]) -> Result<u32, TreeError> {
        let hash = hash_pair(&self.seed, name, value);
        let found = self.pair_index.find(hash, |&id| self.pair(id) == (name, value));
        if let Some(&id) = found {
            return Ok(id);
        }
        let id = super::small_id(self.pairs.len())?;
        self.pairs.push(Pair {
            start: self.bytes.len() as u64,
            name_len: u16::try_from(name.len()).map_err(|_| TreeError::Full)?,
            value_len: u16::try_from(value.len()).map_err(|_| TreeError::Full)?,
        });
        self.bytes.extend_from_slice(name);
        self.bytes.extend_from_slice(value);
        let (bytes, pairs, seed) = (&self.bytes, &self.pairs, &self.seed);
        self.pair_index.insert_unique(hash, id, |&id| {
            let (name, value) = pair_of(bytes, &pairs[id as usize]);
            hash_pair(seed, name, value)
        });
        Ok(id)
    }

    fn intern_ids(&mut self, ids: &[u32]) -> Result<SetId, TreeError> {
        let hash = hash_ids(&self.seed, ids);
        let found = self.set_index.find(hash, |&set| {
            let (start, len) = self.sets[set as usize];
            self.items[start as usize..][..len as usize] == *ids
        });
        if let Some(&set) = found {
            return Ok(SetId(set));
        }
        let set = super::small_id(self.sets.len())?;
        let start = super::small_id(self.items.len())?;
        self.items.extend_from_slice(ids);
        self.sets.push((start, super::small_id(ids.len())?));
        let (items, sets, seed) = (&self.items, &self.sets, &self.seed);
        self.set_index.insert_unique(hash, set, |&set| {
            let (start, len) = sets[set as usize];
            hash_ids(seed, &items[start as usize..][..len as usize])
        });
        Ok(SetId(set))
    }

    fn pair(&self, id: u32) -> (&[u8], &[u8]) {
        pair_of(&self.bytes, &self.pairs[id as usize])
    }
}

fn pair_of<'b>(bytes: &'b [u8], pair: &Pair) -> (&'b [u8], &'b [u8]) {
    let start = usize::try_from(pair.start).unwrap_or(usize::MAX);
    let name_end = start + usize::from(pair.name_len);
    (&bytes[start..name_end], &bytes[name_end..name_end + usize::from(pair.value_len)])
}

/// The hash of one attribute.
pub(crate) fn hash_pair(seed: &RandomState, name: &[u8], value: &[u8]) -> u64 {
    let mut hasher = seed.build_hasher();
    hasher.write_usize(name.len());
    hasher.write(name);
    hasher.write(value);
    hasher.finish()
}

fn hash_ids(seed: &RandomState, ids: &[u32]) -> u64 {
    let mut hasher = seed.build_hasher();
    for &id in ids {
        hasher.write_u32(id);
    }
    hasher.finish()
}

/// The extended attributes of an inode as (name, value), sorted by name.
#[derive(Clone)]
pub struct Xattrs<'a> {
    table: &'a XattrTable,
    items: std::slice::Iter<'a, u32>,
}

impl<'a> Iterator for Xattrs<'a> {
    type Item = (&'a [u8], &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        self.items.next().map(|&id| self.table.pair(id))
    }
}
