//! Bases: what images have in common below is mounted once, and each of them is a small delta over it.
//!
//! ```text
//! layers   1 ─ 2 ─ 3 ─ 4     image a        base of a and b: layers 1 to 3
//!                  └ 5 ─ 6   image b        base of c, and of that base: layer 1
//!          └ 7               image c
//! ```
//!
//! Where the chains of two images part, or the chain of one ends, is a base: an image of its own, whether it has a name or
//! not. What is over it follows from the two trees ([`cofolio_erofs::tree::delta`]), whatever the layers between them did.

use std::collections::{BTreeSet, HashMap};

use cofolio_erofs::tree::{Tree, delta};
use cofolio_erofs::write::{WriteError, WriteOptions, write, write_layer};
use cofolio_store::{Base, Digest, Domain, Error, Publish, Ref, Staging};
use serde::Serialize;

use super::merge::merged;
use crate::compose::contents::open_image;
use crate::error::ImportError;
use crate::layer::unpack::objects;

/// A base with fewer inodes saves less than a superblock of its own and longer lookups cost.
const BASE_INODES_MIN: u64 = 1000;
/// And of an image at least one inode in so many must be the base's.
const BASE_SHARE: u64 = 4;
/// An image with more inodes gets none: its tree, the base's and the delta's are in memory together, 120 bytes an inode each.
const IMAGE_INODES_MAX: u64 = 500_000;
/// Deltas that are made at once. An import is not to wait for all images of a store that has had none before.
const AT_ONCE: usize = 8;

/// An image that got a base.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Based {
    /// The image.
    pub image: Digest,
    /// What it is mounted over from now on.
    pub base: Digest,
    /// What goes over that.
    pub delta: Digest,
    /// Names that the image has, and how many of them are the base's.
    pub names: usize,
    /// See there.
    pub shared: usize,
}

/// Why images did not get a base. What is mounted, and how, is as it was.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BaseError {
    /// An image or a layer cannot be read.
    #[error("{what}")]
    Unreadable {
        /// Which, and why.
        what: String,
    },
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

/// Gives an image, and those that have layers in common with it, a base where that is worth it.
///
/// # Errors
/// [`BaseError`].
pub fn find_bases(domain: &Domain, image: &Digest) -> Result<Vec<Based>, BaseError> {
    let chain = |record: Ref| record.layers.into_iter().map(|layer| layer.chain_id).collect();
    let refs = domain.readable_refs()?.into_iter();
    let chains: Vec<(Digest, Vec<String>)> =
        refs.map(|(_, record)| (record.image, chain(record))).collect();
    let fork = Fork::new(&chains);
    // Only there something can have changed.
    let own = chains.iter().filter(|(other, _)| other == image);
    let bases: BTreeSet<&[String]> = own
        .flat_map(|(_, chain)| (1..=chain.len()).map(move |length| &chain[..length]))
        .filter(|chain| fork.is_base(chain))
        .collect();
    let mut done = Vec::new();
    for base in bases {
        let mut over = Over { domain, fork: &fork, chain: base, known: None };
        for child in fork.above(base) {
            if done.len() < AT_ONCE {
                done.extend(over.put(child)?);
            }
        }
    }
    Ok(done)
}

/// Where chains of layers part.
struct Fork<'c> {
    chains: &'c [(Digest, Vec<String>)],
    nodes: HashMap<&'c str, Node<'c>>,
}

#[derive(Default)]
struct Node<'c> {
    /// The image that ends here.
    image: Option<Digest>,
    next: BTreeSet<&'c str>,
}

impl<'c> Fork<'c> {
    fn new(chains: &'c [(Digest, Vec<String>)]) -> Self {
        let mut nodes: HashMap<&str, Node<'_>> = HashMap::new();
        for (image, chain) in chains {
            for pair in chain.windows(2) {
                nodes.entry(&pair[0]).or_default().next.insert(&pair[1]);
            }
            if let Some(last) = chain.last() {
                nodes.entry(last).or_default().image = Some(*image);
            }
        }
        Self { chains, nodes }
    }

    fn image(&self, chain: &[String]) -> Option<Digest> {
        self.nodes.get(chain.last()?.as_str())?.image
    }

    fn is_base(&self, chain: &[String]) -> bool {
        let node = chain.last().and_then(|last| self.nodes.get(last.as_str()));
        node.is_some_and(|node| node.next.len() + usize::from(node.image.is_some()) > 1)
    }

    /// Whether a base is next below an image, by one of the chains that the image has.
    fn rests(&self, image: &Digest, base_id: &str) -> bool {
        let own = self.chains.iter().filter(|(other, _)| other == image);
        own.filter_map(|(_, chain)| {
            let mut below = (1..chain.len()).rev().map(|end| &chain[..end]);
            below.find(|chain| self.is_base(chain))?.last()
        })
        .any(|last| last == base_id)
    }

    /// Chains of the images and bases that are next above a base.
    fn above(&self, base: &[String]) -> BTreeSet<&'c [String]> {
        let longer = self.chains.iter().map(|(_, chain)| chain.as_slice());
        let longer = longer.filter(|c| c.len() > base.len() && c.starts_with(base));
        longer
            .map(|chain| {
                let ends = base.len() + 1..chain.len();
                let mut below = ends.map(|end| &chain[..end]);
                let first = below.find(|chain| self.is_base(chain));
                first.unwrap_or(chain)
            })
            .collect()
    }
}

/// A base, and putting images over it.
struct Over<'a> {
    domain: &'a Domain,
    fork: &'a Fork<'a>,
    chain: &'a [String],
    /// Its tree, and its digest if it is in the store.
    known: Option<(Tree, Option<Digest>)>,
}

impl Over<'_> {
    /// Puts an image over the base, unless it is there already or that is not worth it.
    fn put(&mut self, chain: &[String]) -> Result<Option<Based>, BaseError> {
        let (domain, base_id) = (self.domain, self.chain.last().cloned().unwrap_or_default());
        let image = self.digest(chain)?;
        if let Some(image) = image {
            let rests =
                |has: Base| has.chain_id == base_id || self.fork.rests(&image, &has.chain_id);
            if domain.base_of(&image)?.is_some_and(rests) || !self.is_worth_it(&image)? {
                return Ok(None);
            }
        }
        let tree = self.tree(chain, image)?;
        let base_image = self.digest(self.chain)?;
        let (base_tree, base_image) = match self.known.take() {
            Some(known) => known,
            None => (self.tree(self.chain, base_image)?, base_image),
        };
        let worth = base_tree.inode_count() as u64 >= BASE_INODES_MIN
            && (image.is_none() || image != base_image);
        if !worth {
            self.known = Some((base_tree, base_image));
            return Ok(None);
        }
        let found = delta(&base_tree, &tree)
            .map_err(|error| BaseError::Unreadable { what: format!("delta: {error}") })?;
        let names = tree.entry_count();
        let share = usize::try_from(BASE_SHARE).unwrap_or(usize::MAX);
        let Some(found) = found.filter(|found| found.shared >= names / share) else {
            self.known = Some((base_tree, base_image));
            return Ok(None);
        };
        let staging = domain.begin_import(Default::default())?;
        let base = put_image(&staging, &base_tree, base_image)?;
        let image = put_image(&staging, &tree, image)?;
        let mut writer = staging.image_writer()?;
        write_layer(&found.tree, &mut writer).map_err(|error| sink_error(&image, error))?;
        let digest = writer.finish()?;
        let record = Base { base, delta: digest, chain_id: base_id };
        let publish = Publish { bases: vec![(image, record)], ..Publish::default() };
        staging.commit(&publish, objects(&base_tree).chain(objects(&tree)))?;
        self.known = Some((base_tree, Some(base)));
        Ok(Some(Based { image, base, delta: digest, names, shared: found.shared }))
    }

    /// The image of a chain, if the store has it.
    fn digest(&self, chain: &[String]) -> Result<Option<Digest>, BaseError> {
        if let Some(image) = self.fork.image(chain) {
            return Ok(Some(image));
        }
        let mut bases = self.domain.bases()?.into_values();
        Ok(bases.find(|base| chain.last() == Some(&base.chain_id)).map(|base| base.base))
    }

    fn tree(&self, chain: &[String], image: Option<Digest>) -> Result<Tree, BaseError> {
        let Some(image) = image else { return Ok(merged(self.domain, chain)?) };
        let file = self.domain.open_image(&image)?;
        let read = open_image(&file).and_then(|image| image.to_tree());
        read.map_err(|error| BaseError::Unreadable { what: format!("image {image}: {error}") })
    }

    /// As far as the numbers of inodes tell.
    fn is_worth_it(&self, image: &Digest) -> Result<bool, BaseError> {
        let inodes = |image: &Digest| -> Result<u64, BaseError> {
            let file = self.domain.open_image(image)?;
            let opened = open_image(&file).map(|image| image.superblock().inodes);
            opened
                .map_err(|error| BaseError::Unreadable { what: format!("image {image}: {error}") })
        };
        let own = inodes(image)?;
        let Some(base) = self.digest(self.chain)? else { return Ok(own <= IMAGE_INODES_MAX) };
        let base = inodes(&base)?;
        let enough = base >= BASE_INODES_MIN && base >= own / BASE_SHARE;
        Ok(enough && own <= IMAGE_INODES_MAX)
    }
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
