//! Digests of external files, each kept once: files of equal content are what images are full of.

use std::hash::{BuildHasher, RandomState};

use hashbrown::HashTable;

use super::NONE;

/// A digest of the table. Equal digests have equal ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct DigestId(pub(crate) u32);

impl DigestId {
    pub(super) fn some(raw: u32) -> Option<DigestId> {
        (raw != NONE).then_some(DigestId(raw))
    }

    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

pub(super) struct Digests {
    all: Vec<[u8; 32]>,
    index: HashTable<u32>,
    seed: RandomState,
}

impl Digests {
    pub(super) fn new() -> Digests {
        Digests { all: Vec::new(), index: HashTable::new(), seed: RandomState::new() }
    }

    /// The raw id of a digest. There are fewer of them than inodes, whose number is bounded, or
    /// contents that were replaced; should ids run out, the digest counts as absent.
    pub(super) fn intern(&mut self, digest: &[u8; 32]) -> u32 {
        // Digests look random, but the image's maker chose them.
        let hash = self.seed.hash_one(digest);
        if let Some(&id) = self.index.find(hash, |&id| self.all[id as usize] == *digest) {
            return id;
        }
        let id = u32::try_from(self.all.len()).unwrap_or(NONE);
        self.all.push(*digest);
        let (all, seed) = (&self.all, &self.seed);
        self.index.insert_unique(hash, id, |&id| seed.hash_one(all[id as usize]));
        id
    }

    pub(super) fn get(&self, raw: u32) -> Option<&[u8; 32]> {
        self.all.get(raw as usize)
    }

    pub(super) fn at(&self, id: DigestId) -> &[u8; 32] {
        &self.all[id.index()]
    }

    pub(super) fn len(&self) -> usize {
        self.all.len()
    }
}
