//! Bases: lower layers that images have in common are mounted once; each image is a delta.
//!
//! ```text
//! layers   1 ─ 2 ─ 3 ─ 4     image a        base of a and b: layers 1 to 3
//!                  └ 5 ─ 6   image b        base of c, and of that base: layer 1
//!          └ 7               image c
//! ```
//!
//! A base is an image of its own where the chains of two images part, or one ends. A delta follows
//! from the two trees alone ([`cofolio_erofs::tree::delta`]).

use cofolio_erofs::tree::{Tree, delta};
use cofolio_erofs::write::{WriteError, WriteOptions, write, write_layer};
use cofolio_store::task::Cancel;
use cofolio_store::{Base, Digest, Domain, Error, Publish, Staging};
use serde::Serialize;

use super::merge::merged;
use crate::compose::named_objects::open_image;
use crate::error::ImportError;
use crate::layer::unpack::objects;

/// A base with fewer inodes saves less than a superblock of its own and longer lookups cost.
const BASE_INODES_MIN: u64 = 1000;
/// At least one in this many inodes of an image must be the base's.
const BASE_SHARE: u64 = 4;
/// Larger images get none: the trees of image, base and delta take 120 bytes an inode each.
const IMAGE_INODES_MAX: u64 = 500_000;

/// An image that got a base.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Based {
    /// The image.
    pub image: Digest,
    /// What it is mounted over from now on.
    pub base: Digest,
    /// What goes over that.
    pub delta: Digest,
    /// Names that the image has.
    pub names: usize,
    /// How many of them are the base's.
    pub shared: usize,
}

/// Why images did not get a base. Mounts are unaffected.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the message of a variant says what its fields are")]
pub enum BaseError {
    /// An image or a layer cannot be read.
    #[error("{what}")]
    Unreadable { what: String },
    /// The store refused.
    #[error(transparent)]
    Store(#[from] Error),
}

impl From<ImportError> for BaseError {
    fn from(error: ImportError) -> Self {
        match error {
            ImportError::Store(error) => Self::Store(error),
            other => Self::Unreadable { what: other.to_string() },
        }
    }
}

/// The image at the end of a chain of layers, and putting other images over it.
pub struct Over<'a> {
    domain: &'a Domain,
    chain: &'a [String],
    /// The image, if the store has it.
    image: Option<Digest>,
    /// Its tree, once it was needed.
    tree: Option<Tree>,
}

impl<'a> Over<'a> {
    /// For the image of `chain`, which is `image` if the store has it.
    pub fn new(domain: &'a Domain, chain: &'a [String], image: Option<Digest>) -> Self {
        Self { domain, chain, image, tree: None }
    }

    /// Puts the image of a longer chain over it, `image` if the store has it. `None`: not worth it.
    pub fn put(
        &mut self,
        chain: &[String],
        image: Option<Digest>,
        cancel: &Cancel,
    ) -> Result<Option<Based>, BaseError> {
        let domain = self.domain;
        if image.is_some() && image == self.image {
            return Ok(None);
        }
        // Trees are read only where the numbers of inodes do not speak against it already.
        let own = image.map(|image| inodes(domain, &image)).transpose()?;
        let is_worth_it = |base: u64| {
            base >= BASE_INODES_MIN
                && own.is_none_or(|own| own <= IMAGE_INODES_MAX && base >= own / BASE_SHARE)
        };
        if let Some(base) = self.image
            && !is_worth_it(inodes(domain, &base)?)
        {
            return Ok(None);
        }
        let base_tree = match self.tree.take() {
            Some(tree) => tree,
            None => read_tree(domain, self.chain, self.image)?,
        };
        let base_tree = &*self.tree.insert(base_tree);
        if !is_worth_it(base_tree.inode_count() as u64) {
            return Ok(None);
        }
        let tree = read_tree(domain, chain, image)?;
        let found = delta(base_tree, &tree)
            .map_err(|error| BaseError::Unreadable { what: format!("delta: {error}") })?;
        let names = tree.entry_count();
        let share = usize::try_from(BASE_SHARE).unwrap_or(usize::MAX);
        let Some(found) = found.filter(|found| found.shared >= names / share) else {
            return Ok(None);
        };
        let staging = domain.begin_import(Default::default())?.cancelled_by(cancel);
        let base = put_image(&staging, base_tree, self.image)?;
        let image = put_image(&staging, &tree, image)?;
        let mut writer = staging.image_writer()?;
        write_layer(&found.tree, &mut writer).map_err(|error| sink_error(&image, error))?;
        let digest = writer.finish()?;
        let chain_id = self.chain.last().cloned().unwrap_or_default();
        let record = Base { base, delta: digest, chain_id };
        let publish = Publish { bases: vec![(image, record)], ..Publish::default() };
        staging.commit(&publish, objects(base_tree).chain(objects(&tree)))?;
        self.image = Some(base);
        Ok(Some(Based { image, base, delta: digest, names, shared: found.shared }))
    }
}

/// The tree of a chain of layers; `image` if the store has it as an image.
fn read_tree(domain: &Domain, chain: &[String], image: Option<Digest>) -> Result<Tree, BaseError> {
    let Some(image) = image else { return Ok(merged(domain, chain)?) };
    let file = domain.open_image(&image)?;
    let read = open_image(&file).and_then(|image| image.to_tree());
    read.map_err(|error| BaseError::Unreadable { what: format!("image {image}: {error}") })
}

fn inodes(domain: &Domain, image: &Digest) -> Result<u64, BaseError> {
    let file = domain.open_image(image)?;
    let opened = open_image(&file).map(|image| image.superblock().inodes);
    opened.map_err(|error| BaseError::Unreadable { what: format!("image {image}: {error}") })
}

/// Stages the metadata image of a tree, unless the store has it; gives its digest.
fn put_image(staging: &Staging, tree: &Tree, known: Option<Digest>) -> Result<Digest, BaseError> {
    if let Some(known) = known {
        return Ok(known);
    }
    let mut writer = staging.image_writer()?;
    write(tree, &WriteOptions::default(), &mut writer)
        .map_err(|error| sink_error(&"a base", error))?;
    Ok(writer.finish()?)
}

fn sink_error(what: &dyn std::fmt::Display, error: WriteError) -> BaseError {
    match error {
        WriteError::Sink(source) => match source.downcast::<Error>() {
            Ok(error) => BaseError::Store(error),
            Err(source) => BaseError::Unreadable { what: format!("{what}: {source}") },
        },
        other => BaseError::Unreadable { what: format!("{what}: {other}") },
    }
}
