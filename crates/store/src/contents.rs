//! What the store cannot know itself: which objects an image or a layer names.

use crate::error::{BoxError, Error};
use crate::kinds::{FileKind, FileName};
use crate::{Digest, Domain, StoredFile};

/// Reads files for the store, which does not know their formats.
pub trait Contents: Sync {
    /// Calls `visit` with everything that a file of this kind names, unordered and repeatedly:
    ///
    /// - an image, a layer or a split: objects, with the size in bytes that it claims. A split can
    ///   name objects that the tree lacks, of files that the same archive replaces later;
    /// - a pack: its segments, in its own order, with size 0;
    /// - a segment: nothing, but its index is checked to be readable. Its blocks are not read.
    ///
    /// # Errors
    /// Any damage of the file. Nothing that it may name is collected then, so an unreadable part
    /// must be an error and never an early end.
    fn names(
        &self,
        kind: FileKind,
        file: &StoredFile,
        visit: &mut dyn FnMut(Digest, u64),
    ) -> Result<(), BoxError>;

    /// [`Contents::names`], after a look at all bytes of a file whose name does not tell its digest.
    fn check(
        &self,
        kind: FileKind,
        file: &StoredFile,
        visit: &mut dyn FnMut(Digest, u64),
    ) -> Result<(), BoxError> {
        self.names(kind, file, visit)
    }

    /// Calls `found` with the path of each file of an image whose content is one of the `wanted`
    /// objects. Only reports of damage depend on it.
    ///
    /// # Errors
    /// Any damage of the image.
    fn image_paths(
        &self,
        image: &StoredFile,
        wanted: &dyn Fn(&Digest) -> bool,
        found: &mut dyn FnMut(Digest, &[u8]),
    ) -> Result<(), BoxError> {
        let _ = (image, wanted, found);
        Ok(())
    }
}

impl FileName {
    /// [`Contents::names`] of this file.
    pub(crate) fn visit(
        &self,
        domain: &Domain,
        contents: &dyn Contents,
        visit: &mut dyn FnMut(Digest, u64),
    ) -> Result<(), BoxError> {
        contents.names(self.kind(), &domain.open_named(self)?, visit)
    }

    /// The same; for a layer also the names in its split, if it has one.
    pub(crate) fn visit_whole(
        &self,
        domain: &Domain,
        contents: &dyn Contents,
        visit: &mut dyn FnMut(Digest, u64),
    ) -> Result<(), BoxError> {
        self.visit(domain, contents, visit)?;
        let split = self.with_kind(FileKind::Split);
        if self.kind() != FileKind::Layer || !domain.has_named(&split)? {
            return Ok(());
        }
        split.visit(domain, contents, visit).map_err(|error| {
            Error::Unreadable { what: "its split".to_owned(), source: error }.into()
        })
    }
}

/// A set of digests at little more than their own size: 256 sorted lists, by first byte.
#[derive(Debug)]
pub(crate) struct DigestSet {
    shards: Vec<Shard>,
}

#[derive(Clone, Debug, Default)]
struct Shard {
    /// The digests without their first byte. Sorted and unique up to `sorted`.
    list: Vec<[u8; 31]>,
    sorted: usize,
}

impl DigestSet {
    pub(crate) fn new() -> Self {
        Self { shards: vec![Shard::default(); 256] }
    }

    pub(crate) fn insert(&mut self, digest: Digest) {
        let shard = &mut self.shards[usize::from(digest.0[0])];
        let mut rest = [0; 31];
        rest.copy_from_slice(&digest.0[1..]);
        shard.list.push(rest);
        // A hundred images on one base bring every digest a hundred times: when the list has
        // doubled, repetitions go, so that it holds at most twice the unique digests.
        if shard.list.len() > 64 && shard.list.len() >= shard.sorted * 2 {
            shard.sort();
        }
    }

    /// To be called after the last `insert` and before the next `contains`.
    pub(crate) fn seal(&mut self) {
        self.shards.iter_mut().for_each(Shard::sort);
    }

    pub(crate) fn contains(&self, digest: &Digest) -> bool {
        let shard = &self.shards[usize::from(digest.0[0])];
        shard.list.binary_search_by(|rest| rest[..].cmp(&digest.0[1..])).is_ok()
    }
}

impl Shard {
    fn sort(&mut self) {
        if self.sorted == self.list.len() {
            return;
        }
        self.list.sort_unstable();
        self.list.dedup();
        self.sorted = self.list.len();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_set_holds_what_was_put_in_and_nothing_else() {
        let digest = |n: u32| {
            let mut bytes = [0; 32];
            bytes[..2].copy_from_slice(&n.to_le_bytes()[..2]);
            bytes[20..24].copy_from_slice(&(n / 3).to_le_bytes());
            Digest(bytes)
        };
        let mut set = DigestSet::new();
        for _ in 0..20 {
            (0..5000).for_each(|n| set.insert(digest(n)));
        }
        set.seal();
        assert!((0..5000).all(|n| set.contains(&digest(n))));
        assert!((5000..10_000).all(|n| !set.contains(&digest(n))));
        let held: usize = set.shards.iter().map(|shard| shard.list.len()).sum();
        assert_eq!(held, 5000);
    }
}
