//! Which blocks of segments are used: contents of several objects can have blocks in common.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;

use cofolio_store::{Digest, Domain, Error, is_damage};

use super::segment::{IndexEntry, Segment};

/// How many blocks the segments of a domain have; damaged ones and those in `without` are left out.
pub(super) fn sizes(
    domain: &Domain,
    without: &BTreeSet<Digest>,
) -> Result<BTreeMap<Digest, u32>, Error> {
    let mut sizes = BTreeMap::new();
    for digest in domain.segments()?.into_iter().filter(|digest| !without.contains(digest)) {
        sizes.extend(readable(Segment::blocks_of(domain, &digest))?.map(|blocks| (digest, blocks)));
    }
    Ok(sizes)
}

/// `None` for a segment that is gone, or damaged, which fsck reports.
pub(super) fn readable<T>(read: Result<T, Error>) -> Result<Option<T>, Error> {
    match read {
        Err(Error::Corrupt { .. } | Error::NoSuch(_)) => Ok(None),
        Err(error) if is_damage(&error) => Ok(None),
        other => other.map(Some),
    }
}

/// Segments, and which of their blocks are used.
pub(super) struct Usage<'s> {
    /// How many blocks they have.
    sizes: &'s BTreeMap<Digest, u32>,
    /// For each block of those of which any is used.
    used: HashMap<Digest, Vec<bool>>,
}

impl<'s> Usage<'s> {
    /// Of these segments, none used yet.
    pub(super) fn new(sizes: &'s BTreeMap<Digest, u32>) -> Self {
        Self { sizes, used: HashMap::new() }
    }

    /// Marks the blocks that a content of a segment takes, there and in others.
    pub(super) fn mark(&mut self, digest: &Digest, segment: &Segment, entry: &IndexEntry) {
        for run in entry.runs() {
            if let Some(place) = run.at {
                let start = place.block as usize;
                let blocks = start..start + run.blocks as usize;
                self.mark_blocks(segment.holder(digest, place), blocks);
            }
        }
    }

    pub(super) fn mark_blocks(&mut self, digest: Digest, blocks: Range<usize>) {
        let Some(size) = self.sizes.get(&digest).map(|size| *size as usize) else { return };
        let used = self.used.entry(digest).or_insert_with(|| vec![false; size]);
        used[blocks.start.min(size)..blocks.end.min(size)].fill(true);
    }

    /// Of which segments any block is used: how many, and how many they have.
    pub(super) fn counts(&self) -> Vec<(Digest, usize, usize)> {
        let count = |used: &Vec<bool>| used.iter().filter(|used| **used).count();
        let used = self.used.iter().map(|(digest, it)| (*digest, count(it), it.len()));
        let mut used: Vec<_> = used.filter(|(_, used, _)| *used > 0).collect();
        used.sort_unstable();
        used
    }

    /// Segments of which less than half is used, but for those of a single block: if all contents
    /// lie in other segments, nothing uses that block, and they would be written anew for ever.
    pub(super) fn sparse(&self) -> BTreeSet<Digest> {
        let used = |digest| self.used.get(digest).into_iter().flatten().filter(|used| **used);
        let sparse = self
            .sizes
            .iter()
            .filter(|(digest, size)| **size > 1 && used(*digest).count() * 2 < **size as usize);
        sparse.map(|(digest, _)| *digest).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A segment of which every content is in others has one block that nobody uses. gc found it
    /// sparse, packed its images again, got the same segment, and did so each time.
    #[test]
    fn a_segment_of_one_block_is_not_sparse() {
        let [filler, sparse, used] = [1, 2, 3].map(|byte| Digest([byte; 32]));
        let sizes = [(filler, 1), (sparse, 4), (used, 4)].into();
        let mut usage = Usage::new(&sizes);
        usage.mark_blocks(sparse, 0..1);
        usage.mark_blocks(used, 2..4);
        assert_eq!(usage.sparse(), [sparse].into());
    }
}
