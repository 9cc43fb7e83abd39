//! Sequences of what people do to a store, against a model that is three maps.
//!
//! The story: images come and go under names that are moved about, leases keep some of them, garbage is collected
//! at any time, or the oldest trimmed away. Whatever the order, a name stands for the image that it was last given,
//! everything that a name or a lease keeps is there to the byte, and after a collection nothing else is.
//!
//! What fails is shrunk to the shortest sequence that still does. `COFOLIO_SOAK=n` multiplies the number of sequences.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use cofolio_store::task::Task;
use cofolio_store::{
    Digest, Domain, Error, FsckOptions, GcOptions, ImportOptions, InitOptions, Lease, Ref,
    RootKind, Store, TrimOptions, verity,
};
use common::sim::SimDisk;
use common::{Lines, content, import_split, nothing_live, replaced};
use proptest::prelude::*;

/// Contents there are; an image is a set of them, so that images share.
const CONTENTS: u8 = 6;
const NAMES: usize = 4;

#[derive(Clone, Debug)]
enum Operation {
    /// An image of these contents under a name, with or without a layer.
    Import {
        name: usize,
        contents: BTreeSet<u8>,
        layer: bool,
    },
    /// The image of one name gets another.
    Tag {
        from: usize,
        to: usize,
    },
    Remove {
        name: usize,
    },
    Lease {
        id: usize,
        name: usize,
    },
    EndLease {
        id: usize,
    },
    /// An import that comes to nothing.
    Abandon {
        contents: BTreeSet<u8>,
    },
    Gc {
        dry_run: bool,
    },
    /// An image comes under a name while garbage is collected, and goes again or not.
    GcBeside {
        name: usize,
        contents: BTreeSet<u8>,
        layer: bool,
        stays: bool,
    },
    /// The image of a name was used at a time.
    Use {
        name: usize,
        at: i64,
    },
    /// What was not used since goes.
    Trim {
        unused_since: i64,
    },
}

/// Further apart than what counts as the same time.
fn time() -> impl Strategy<Value = i64> {
    (1..20i64).prop_map(|at| at * 100)
}

fn operation() -> impl Strategy<Value = Operation> {
    let contents = || proptest::collection::btree_set(0..CONTENTS, 0..4);
    prop_oneof![
        4 => (0..NAMES, contents(), any::<bool>())
            .prop_map(|(name, contents, layer)| Operation::Import { name, contents, layer }),
        2 => (0..NAMES, 0..NAMES).prop_map(|(from, to)| Operation::Tag { from, to }),
        3 => (0..NAMES).prop_map(|name| Operation::Remove { name }),
        1 => (0..2usize, 0..NAMES).prop_map(|(id, name)| Operation::Lease { id, name }),
        1 => (0..2usize).prop_map(|id| Operation::EndLease { id }),
        1 => contents().prop_map(|contents| Operation::Abandon { contents }),
        2 => any::<bool>().prop_map(|dry_run| Operation::Gc { dry_run }),
        2 => (0..NAMES, contents(), any::<bool>(), any::<bool>()).prop_map(
            |(name, contents, layer, stays)| Operation::GcBeside { name, contents, layer, stays }
        ),
        1 => (0..NAMES, time()).prop_map(|(name, at)| Operation::Use { name, at }),
        1 => time().prop_map(|unused_since| Operation::Trim { unused_since }),
    ]
}

/// An image, and the layer that its ref names.
type Image = (BTreeSet<u8>, Option<String>);

#[derive(Debug, Default)]
struct Model {
    names: BTreeMap<String, Image>,
    /// Images only: a lease that names no layer keeps none.
    leases: BTreeMap<usize, (BTreeSet<u8>, Lease)>,
    last_used: BTreeMap<BTreeSet<u8>, i64>,
}

impl Model {
    /// The images that must be there.
    fn images(&self) -> impl Iterator<Item = &BTreeSet<u8>> {
        let leased = self.leases.values().map(|(contents, _)| contents);
        self.names.values().map(|(contents, _)| contents).chain(leased)
    }

    /// When an image was used goes with it.
    fn forget(&mut self) {
        let Self { names, leases, last_used } = self;
        last_used.retain(|image, _| {
            names.values().any(|(named, _)| named == image)
                || leases.values().any(|(leased, _)| leased == image)
        });
    }
}

fn piece(number: u8) -> Vec<u8> {
    content([0, 1, 600, 1500, 4096, 9000][usize::from(number)], u64::from(number) + 1)
}

fn image_of(contents: &BTreeSet<u8>) -> Digest {
    let lines = contents.iter().map(|number| {
        let piece = piece(*number);
        format!("{} {}\n", verity::digest(&piece), piece.len())
    });
    verity::digest(format!("{}end\n", lines.collect::<String>()).as_bytes())
}

fn name_of(number: usize) -> String {
    format!("team/image-{number}:1")
}

fn gc_options(dry_run: bool) -> GcOptions {
    GcOptions { dry_run, ..GcOptions::default() }
}

/// Does it to the store and to the model.
fn apply(operation: &Operation, domain: &Domain, model: &mut Model) {
    // Large enough contents go the other way, through a temporary file.
    let options = ImportOptions { buffer_bytes_max: 1024, ..ImportOptions::default() };
    match operation {
        Operation::Import { name, contents, layer } => {
            let name = name_of(*name);
            let layer = layer.then(|| format!("sha256:{contents:?}"));
            let pieces: Vec<_> = contents.iter().map(|number| piece(*number)).collect();
            let image = import_split(domain, &name, &pieces, layer.as_deref(), options).unwrap();
            assert_eq!(image, image_of(contents));
            model.names.insert(name, (contents.clone(), layer));
        }
        Operation::Tag { from, to } => {
            let (from, to) = (name_of(*from), name_of(*to));
            let Some(record) = domain.get_ref(&from).unwrap() else {
                assert!(!model.names.contains_key(&from));
                // A record of what is not there is refused; of what is there but has no name it would not be.
                let missing = Ref::new(Digest([7; 32]));
                assert!(matches!(domain.put_ref(&to, &missing), Err(Error::NoSuch(_))));
                return;
            };
            domain.put_ref(&to, &record).unwrap();
            let image = model.names[&from].clone();
            model.names.insert(to, image);
        }
        Operation::Remove { name } => {
            let name = name_of(*name);
            match domain.remove_ref(&name) {
                Ok(()) => assert!(model.names.remove(&name).is_some()),
                Err(Error::NoSuchRef(_)) => assert!(!model.names.contains_key(&name)),
                Err(error) => panic!("{error}"),
            }
        }
        Operation::Lease { id, name } => {
            let Some((contents, _)) = model.names.get(&name_of(*name)) else { return };
            let lease = domain.lease(&image_of(contents), Vec::new(), "").unwrap();
            model.leases.insert(*id, (contents.clone(), lease));
        }
        Operation::EndLease { id } => {
            drop(model.leases.remove(id));
            assert_eq!(domain.roots(RootKind::Lease).unwrap().len(), model.leases.len());
        }
        Operation::Abandon { contents } => {
            let staging = domain.begin_import(options).unwrap();
            for number in contents {
                staging.put_object(&piece(*number)).unwrap();
            }
        }
        Operation::Gc { dry_run } => {
            domain.gc(&Lines, &nothing_live, &gc_options(*dry_run)).unwrap();
            if !dry_run {
                model.forget();
                nothing_is_left_over(domain, model);
            }
        }
        Operation::GcBeside { name, contents, layer, stays } => {
            let import =
                Operation::Import { name: *name, contents: contents.clone(), layer: *layer };
            let shared = std::cell::RefCell::new(&mut *model);
            let live = || {
                apply(&import, domain, &mut shared.borrow_mut());
                if !stays {
                    apply(&Operation::Remove { name: *name }, domain, &mut shared.borrow_mut());
                }
                Ok(Vec::new())
            };
            domain.gc(&Lines, &live, &gc_options(false)).unwrap();
            // What came under the name before may have gone with it or not: the next collection says.
            domain.gc(&Lines, &nothing_live, &gc_options(false)).unwrap();
            model.forget();
            nothing_is_left_over(domain, model);
        }
        Operation::Use { name, at } => {
            let Some((contents, _)) = model.names.get(&name_of(*name)) else { return };
            domain.note_use(&image_of(contents), *at).unwrap();
            model.last_used.insert(contents.clone(), *at);
        }
        Operation::Trim { unused_since } => {
            let options = TrimOptions {
                unused_since: Some(*unused_since),
                gc: gc_options(false),
                ..TrimOptions::default()
            };
            domain.trim(&Lines, &nothing_live, &options, &|_| ()).unwrap();
            let Model { names, leases, last_used } = model;
            names.retain(|_, (contents, _)| {
                let used = last_used.get(contents).copied().unwrap_or(0);
                used >= *unused_since || leases.values().any(|(leased, _)| leased == contents)
            });
            model.forget();
            nothing_is_left_over(domain, model);
        }
    }
}

/// What the model has is there, whatever else is.
fn everything_is_there(domain: &Domain, model: &Model) {
    let refs: BTreeMap<_, _> = domain.refs().unwrap().into_iter().collect();
    let expected: Vec<_> = model.names.keys().collect();
    assert_eq!(refs.keys().collect::<Vec<_>>(), expected);
    for (name, (contents, layer)) in &model.names {
        assert_eq!(refs[name].image, image_of(contents), "{name}");
        let layers: Vec<_> = refs[name].layers.iter().map(|layer| &layer.chain_id).collect();
        assert_eq!(layers, layer.iter().collect::<Vec<_>>(), "{name}");
    }
    let report = domain.fsck(&Lines, FsckOptions { rehash: true }, &Task::default()).unwrap();
    assert_eq!(report.findings, []);
    for contents in model.images() {
        assert!(domain.has_image(&image_of(contents)).unwrap());
        for number in contents {
            let piece = piece(*number);
            let stored = domain.open_object(&verity::digest(&piece)).unwrap();
            assert!(stored.read_all(1 << 20).unwrap() == piece);
        }
    }
}

/// And nothing else is there.
fn nothing_is_left_over(domain: &Domain, model: &Model) {
    let kept: BTreeSet<_> = model.images().collect();
    let images: BTreeSet<_> = kept.iter().map(|contents| image_of(contents)).collect();
    assert_eq!(domain.images().unwrap(), images.into_iter().collect::<Vec<_>>());
    let layers: BTreeSet<_> = model.names.values().filter_map(|(_, layer)| layer.clone()).collect();
    let mut objects: BTreeSet<_> =
        kept.into_iter().flatten().map(|number| verity::digest(&piece(*number))).collect();
    objects.extend(layers.iter().map(|layer| verity::digest(&replaced(layer))));
    for layer in &layers {
        // A layer names what its image did.
        let image = model.names.values().find(|(_, other)| other.as_ref() == Some(layer)).unwrap();
        objects.extend(image.0.iter().map(|number| verity::digest(&piece(*number))));
    }
    assert_eq!(common::layers(domain), layers.into_iter().collect::<Vec<_>>());
    let report = domain.fsck(&Lines, FsckOptions { rehash: false }, &Task::default()).unwrap();
    assert_eq!(report.objects, objects.len() as u64);
    for object in objects {
        assert!(domain.object_size(&object).unwrap().is_some(), "{object}");
    }
}

fn cases() -> u32 {
    let soak = std::env::var("COFOLIO_SOAK").ok().and_then(|n| n.parse().ok()).unwrap_or(1);
    300u32.saturating_mul(soak)
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: cases(),
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn a_store_does_what_its_model_does(
        operations in proptest::collection::vec(operation(), 1..30),
    ) {
        let disk = SimDisk::new(1);
        let store = Store::init_on(Arc::new(disk), &InitOptions::default()).unwrap();
        let domain = store.domain("default").unwrap();
        let mut model = Model::default();
        for operation in &operations {
            apply(operation, &domain, &mut model);
            everything_is_there(&domain, &model);
        }
        domain.gc(&Lines, &nothing_live, &gc_options(false)).unwrap();
        everything_is_there(&domain, &model);
        nothing_is_left_over(&domain, &model);
    }
}
