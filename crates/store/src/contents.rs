//! What the store cannot know itself: which objects an image or a layer names.

use crate::error::{BoxError, Error, Result};
use crate::{Digest, Domain, StoredFile};

/// Reads images and layers for the store, which does not know their formats.
pub trait Contents: Sync {
    /// Calls `visit` with every object that a metadata image names and the size in bytes that it says
    /// the object has; in any order, with repetitions as they come.
    ///
    /// # Errors
    /// Whatever is wrong with the image. Nothing is collected then, so an image that cannot be read in
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
}

/// An image, a layer, or the split of one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Part {
    Image(Digest),
    Layer(String),
    Split(String),
}

impl Part {
    /// The image, if it is one.
    pub(crate) fn image(&self) -> Option<Digest> {
        match self {
            Self::Image(digest) => Some(*digest),
            Self::Layer(_) | Self::Split(_) => None,
        }
    }

    /// Visits the objects of the part.
    pub(crate) fn visit(
        &self,
        domain: &Domain,
        contents: &dyn Contents,
        visit: &mut dyn FnMut(Digest, u64),
    ) -> Result<(), BoxError> {
        match self {
            Self::Image(digest) => contents.image_objects(&domain.open_image(digest)?, visit),
            Self::Layer(chain_id) => contents.layer_objects(&domain.open_layer(chain_id)?, visit),
            Self::Split(chain_id) => contents.split_objects(&domain.open_split(chain_id)?, visit),
        }
    }

    /// The same; of a layer also those of its split, if it has one.
    pub(crate) fn visit_whole(
        &self,
        domain: &Domain,
        contents: &dyn Contents,
        visit: &mut dyn FnMut(Digest, u64),
    ) -> Result<(), BoxError> {
        self.visit(domain, contents, visit)?;
        match self {
            Self::Layer(chain_id) if domain.has_split(chain_id)? => Self::Split(chain_id.clone())
                .visit(domain, contents, visit)
                .map_err(|error| format!("its split: {error}").into()),
            _ => Ok(()),
        }
    }

    /// An error that names the part and who keeps it.
    pub(crate) fn unreadable(&self, kept_by: &str, source: BoxError) -> Error {
        Error::Unreadable { what: format!("{self} (kept by {kept_by})"), source }
    }
}

impl std::fmt::Display for Part {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Image(digest) => write!(f, "image {digest}"),
            Self::Layer(chain_id) => write!(f, "layer {chain_id}"),
            Self::Split(chain_id) => write!(f, "split of layer {chain_id}"),
        }
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

    /// To be called after the last `insert` and before the first `contains`.
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
