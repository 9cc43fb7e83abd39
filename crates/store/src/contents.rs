//! What the store cannot know itself: which objects an image or a layer names.

use crate::error::{BoxError, Error};
use crate::kinds::{FileKind, FileName};
use crate::{Digest, Domain, StoredFile};

/// Reads images and layers for the store, which does not know their formats.
pub trait Contents: Sync {
    /// Calls `visit` with every object that a metadata image names and the size in bytes that it says
    /// the object has; in any order, with repetitions as they come.
    ///
    /// # Errors
    /// Whatever is wrong with the image. No object is collected then, so an image that cannot be read in
    /// full must be an error and never end early.
    fn image_objects(
        &self,
        image: &StoredFile,
        visit: &mut dyn FnMut(Digest, u64),
    ) -> Result<(), BoxError>;

    /// The same for a layer's tree.
    ///
    /// # Errors
    /// As above.
    fn layer_objects(
        &self,
        layer: &StoredFile,
        visit: &mut dyn FnMut(Digest, u64),
    ) -> Result<(), BoxError>;

    /// The same for a layer's split: what its archive holds beside the content of its files. It can name
    /// objects that the tree does not, of files that the same archive replaces later.
    ///
    /// # Errors
    /// As above.
    fn split_objects(
        &self,
        split: &StoredFile,
        visit: &mut dyn FnMut(Digest, u64),
    ) -> Result<(), BoxError>;

    /// The segments that a pack needs, in its own order.
    ///
    /// # Errors
    /// Whatever is wrong with the pack. It is as good as not there then.
    fn pack_segments(&self, pack: &StoredFile) -> Result<Vec<Digest>, BoxError>;

    /// Calls `found` with the path of each file of an image whose content is one of the `wanted` objects.
    /// Used to say what damage hits; nothing depends on it.
    ///
    /// # Errors
    /// Whatever is wrong with the image.
    fn image_paths(
        &self,
        image: &StoredFile,
        wanted: &dyn Fn(&Digest) -> bool,
        found: &mut dyn FnMut(Digest, &[u8]),
    ) -> Result<(), BoxError> {
        let _ = (image, wanted, found);
        Ok(())
    }

    /// Reads a segment as one; its blocks are not looked at.
    ///
    /// # Errors
    /// Whatever is wrong with the segment.
    fn check_segment(&self, segment: &StoredFile) -> Result<(), BoxError>;
}

impl FileName {
    /// Visits what the file names: objects with their sizes, or segments of a pack. Objects and segments
    /// name nothing.
    ///
    /// # Errors
    /// Whatever is wrong with the file: see [`crate::error::is_damage`].
    pub(crate) fn visit(
        &self,
        domain: &Domain,
        contents: &dyn Contents,
        visit: &mut dyn FnMut(Digest, u64),
    ) -> Result<(), BoxError> {
        let file = domain.open_named(self)?;
        match self.kind() {
            FileKind::Object | FileKind::Segment => Ok(()),
            FileKind::Image => contents.image_objects(&file, visit),
            FileKind::Layer => contents.layer_objects(&file, visit),
            FileKind::Split => contents.split_objects(&file, visit),
            FileKind::Pack => {
                let segments = contents.pack_segments(&file)?;
                segments.into_iter().for_each(|segment| visit(segment, 0));
                Ok(())
            }
        }
    }

    /// The same; of a layer also what its split names, if it has one.
    pub(crate) fn visit_whole(
        &self,
        domain: &Domain,
        contents: &dyn Contents,
        visit: &mut dyn FnMut(Digest, u64),
    ) -> Result<(), BoxError> {
        self.visit(domain, contents, visit)?;
        let split = self.with_kind(FileKind::Split);
        if self.kind() != FileKind::Layer || domain.named_size(&split)?.is_none() {
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
        // A hundred images on one base bring every digest a hundred times: throw repetitions out
        // whenever the list has doubled, so that it never holds more than twice what is unique.
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
