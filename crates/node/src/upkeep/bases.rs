//! Bases of a trust domain: images, named or not, where layer chains of two images part or one
//! ends.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use cofolio_image::compose::base::{BaseError, Based, Over};
use cofolio_store::ErrorKind::{Caller, Conflict, Corrupt};
use cofolio_store::task::Task;
use cofolio_store::{Digest, Domain, Ref, with_causes};
use serde::Serialize;

use super::UpkeepError;

/// What was done about bases.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct BasesReport {
    /// Images that are mounted over a base from now on.
    pub based: Vec<Based>,
    /// Why some got none. They are mounted as before.
    pub failed: Vec<String>,
}

/// Gives images with common layers a base where that pays. Reports unreadable ones and goes on. If
/// it is cancelled, the deltas that were complete stay.
pub fn find(domain: &Domain, task: &Task) -> Result<BasesReport, UpkeepError> {
    let chain = |record: Ref| record.layers.into_iter().map(|layer| layer.chain_id).collect();
    let refs = domain.readable_refs()?.into_iter();
    let chains: Vec<(Digest, Vec<String>)> =
        refs.map(|(_, record)| (record.image, chain(record))).collect();
    let forks = Forks::of(&chains);
    let known = domain.bases()?;
    // Images that have no ref, by the chain that they are the image of.
    let mut unnamed: HashMap<String, Digest> =
        known.values().map(|base| (base.chain_id.clone(), base.base)).collect();
    let mut report = BasesReport::default();
    for (base, children) in &forks.above {
        let Some(base_id) = base.last() else { continue };
        let image_of = |unnamed: &HashMap<String, Digest>, chain: &[String]| {
            let last = chain.last()?;
            forks.image(last).or_else(|| unnamed.get(last).copied())
        };
        let mut over = Over::new(domain, base, image_of(&unnamed, base));
        for child in children {
            task.check()?;
            let image = image_of(&unnamed, child);
            let has = image.and_then(|image| Some((image, known.get(&image)?)));
            if has.is_some_and(|(image, has)| {
                has.chain_id == *base_id
                    || forks
                        .below
                        .get(&image)
                        .is_some_and(|ids| ids.contains(has.chain_id.as_str()))
            }) {
                continue;
            }
            match over.put(child, image, &task.cancel) {
                Ok(None) => {}
                Ok(Some(based)) => {
                    unnamed.insert(base_id.clone(), based.base);
                    if let Some(last) = child.last() {
                        unnamed.insert(last.clone(), based.image);
                    }
                    report.based.push(based);
                }
                // An image may be damaged, or collected meanwhile.
                Err(BaseError::Store(error))
                    if !matches!(error.kind(), Corrupt | Caller | Conflict) =>
                {
                    return Err(error.into());
                }
                Err(error) => report.failed.push(with_causes(&error)),
            }
        }
    }
    Ok(report)
}

/// Where chains of layers part.
struct Forks<'c> {
    nodes: HashMap<&'c str, Node<'c>>,
    /// By chain of a base: the chains of the images and bases that are next above it.
    above: BTreeMap<&'c [String], BTreeSet<&'c [String]>>,
    /// By image: the ids of the bases that are next below it, by one of its chains each.
    below: HashMap<Digest, HashSet<&'c str>>,
}

#[derive(Default)]
struct Node<'c> {
    image: Option<Digest>,
    next: HashSet<&'c str>,
}

impl Node<'_> {
    fn is_base(&self) -> bool {
        self.next.len() + usize::from(self.image.is_some()) > 1
    }
}

impl<'c> Forks<'c> {
    fn of(chains: &'c [(Digest, Vec<String>)]) -> Self {
        let mut nodes: HashMap<&str, Node<'_>> = HashMap::new();
        for (image, chain) in chains {
            for pair in chain.windows(2) {
                nodes.entry(&pair[0]).or_default().next.insert(&pair[1]);
            }
            if let Some(last) = chain.last() {
                nodes.entry(last).or_default().image = Some(*image);
            }
        }
        let mut above: BTreeMap<_, BTreeSet<_>> = BTreeMap::new();
        let mut below: HashMap<_, HashSet<_>> = HashMap::new();
        for (image, chain) in chains {
            let mut last: Option<&[String]> = None;
            for end in 1..=chain.len() {
                let this = &chain[..end];
                let is_image = end == chain.len();
                let is_base = nodes.get(this[end - 1].as_str()).is_some_and(Node::is_base);
                if !is_base && !is_image {
                    continue;
                }
                if let Some(base) = last {
                    above.entry(base).or_default().insert(this);
                    if is_image {
                        let ids = base.last().map(String::as_str);
                        below.entry(*image).or_default().extend(ids);
                    }
                }
                last = Some(this);
            }
        }
        Self { nodes, above, below }
    }

    /// The named image whose chain ends in a layer.
    fn image(&self, chain_id: &str) -> Option<Digest> {
        self.nodes.get(chain_id)?.image
    }
}
