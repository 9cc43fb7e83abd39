//! What two images have in common and what differs: by content ([`Diff::of`]), path by path
//! ([`Change`]), and page by page ([`pages`]).
//!
//! Content is compared by digests, so only metadata is read, except for pages.

pub mod pages;
mod paths;

use std::collections::{HashMap, HashSet};

use cofolio_erofs::read::Inode;
use cofolio_store::task::Cancelled;
use cofolio_store::{BoxError, Digest, Domain};
use serde::Serialize;

use crate::compose::named_objects;

pub use paths::{Aspect, Change, ChangeKind, PathCounts};

/// Pages are counted in this size, whatever this machine's is.
pub const PAGE_SIZE: u64 = 4096;

/// Why images cannot be compared.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message of a variant says what its fields are")]
pub enum DiffError {
    /// The store.
    #[error(transparent)]
    Store(#[from] cofolio_store::Error),
    /// An image cannot be read.
    #[error("image {image}")]
    Image { image: Digest, source: BoxError },
    /// An object cannot be read.
    #[error("object {object}")]
    Object { object: Digest, source: std::io::Error },
    /// The caller cancelled it.
    #[error(transparent)]
    Cancelled(#[from] Cancelled),
}

/// Objects, by count and size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Tally {
    /// How many.
    pub objects: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Their pages, of [`PAGE_SIZE`] bytes, the last of each counted in full.
    pub pages: u64,
}

impl Tally {
    fn add(&mut self, size: u64) {
        self.objects += 1;
        self.bytes = self.bytes.saturating_add(size);
        self.pages = self.pages.saturating_add(size.div_ceil(PAGE_SIZE));
    }
}

/// One of the two images.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Side {
    /// Names, the root not counted.
    pub entries: u64,
    /// Names of regular files.
    pub files: u64,
    /// Those of them that have content, and the same content under some name in the other image.
    pub files_shared: u64,
    /// Its distinct contents.
    #[serde(flatten)]
    pub content: Tally,
    /// Pages of its files with one copy per inode, as where the image is unpacked.
    pub unpacked_pages: u64,
}

/// What two images have in common, by content.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Diff {
    /// The first image.
    pub a: Side,
    /// The second.
    pub b: Side,
    /// Contents that both have, wherever.
    pub shared: Tally,
    /// Contents that only the first has.
    pub only_a: Tally,
    /// Contents that only the second has.
    pub only_b: Tally,
    /// Path by path.
    pub paths: PathCounts,
    /// Every distinct content of both, sorted by digest: what [`pages`] reads.
    #[serde(skip)]
    contents: Vec<(Digest, Content)>,
}

/// A distinct content and the images that have it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Content {
    size: u64,
    /// Names of it in each image.
    names: [u64; 2],
}

impl Diff {
    /// Compares two images of a domain. Calls `change` for every path that differs, in path order
    /// (a directory before what it holds). Memory grows with distinct contents, not with paths.
    ///
    /// # Errors
    /// [`DiffError::Store`] if an image is missing, [`DiffError::Image`] if one cannot be read.
    pub fn of(
        domain: &Domain,
        images: [&Digest; 2],
        change: &mut dyn FnMut(&Change<'_>),
    ) -> Result<Self, DiffError> {
        let _lock = domain.lock_shared()?;
        let files = [domain.open_image(images[0])?, domain.open_image(images[1])?];
        let unreadable =
            |side: usize| move |source| DiffError::Image { image: *images[side], source };
        let open = |side: usize| -> Result<_, DiffError> {
            let image = named_objects::open_image(&files[side]);
            image.map_err(|error| unreadable(side)(error.into()))
        };
        let opened = [open(0)?, open(1)?];
        let mut content = HashMap::new();
        let mut diff = Self::default();
        let mut sides = [Side::default(); 2];
        // Files with several names that were counted.
        let mut seen = [HashSet::new(), HashSet::new()];
        let mut see = |number: usize, inode: &Inode| -> Result<(), BoxError> {
            let side = &mut sides[number];
            side.entries += 1;
            if !inode.is_file() {
                return Ok(());
            }
            side.files += 1;
            if inode.nlink < 2 || seen[number].insert(inode.nid) {
                let pages = inode.size.div_ceil(PAGE_SIZE);
                side.unpacked_pages = side.unpacked_pages.saturating_add(pages);
            }
            if let Some(object) = named_objects::object_of(&opened[number], inode)? {
                let content: &mut Content = content.entry(object).or_default();
                content.size = inode.size;
                content.names[number] += 1;
            }
            Ok(())
        };
        diff.paths = paths::merge([&opened[0], &opened[1]], &mut see, change)
            .map_err(|(side, source)| unreadable(side)(source))?;
        [diff.a, diff.b] = sides;
        for Content { size, names } in content.values() {
            let tally = match names {
                [0, _] => &mut diff.only_b,
                [_, 0] => &mut diff.only_a,
                _ => {
                    diff.a.files_shared += names[0];
                    diff.b.files_shared += names[1];
                    &mut diff.shared
                }
            };
            tally.add(*size);
            if names[0] > 0 {
                diff.a.content.add(*size);
            }
            if names[1] > 0 {
                diff.b.content.add(*size);
            }
        }
        diff.contents = content.into_iter().collect();
        diff.contents.sort_unstable_by_key(|(digest, _)| *digest);
        Ok(diff)
    }

    /// Pages of both images' distinct contents: the cost of reading both with shared files.
    pub fn pages_by_file(&self) -> u64 {
        self.shared.pages.saturating_add(self.only_a.pages).saturating_add(self.only_b.pages)
    }

    /// Pages that reading both takes where each is unpacked on its own.
    pub fn pages_unshared(&self) -> u64 {
        self.a.unpacked_pages.saturating_add(self.b.unpacked_pages)
    }
}
