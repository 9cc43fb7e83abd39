//! Layers over layers against a model of a filesystem that is a map: whiteouts, opaque directories,
//! replacements of everything by everything, hard links across layers, in any order.
//!
//! What fails is shrunk to the fewest entries that still do. `COFOLIO_SOAK=n` multiplies the number
//! of images.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use proptest::prelude::*;
use proptest::sample::Index;

use crate::support::*;

/// A model of a filesystem: paths to inodes, nothing clever.
#[derive(Clone, Default, Debug)]
struct Model {
    names: BTreeMap<String, usize>,
    /// What an inode is (`dir` or content), and its mtime.
    inodes: Vec<(String, i64)>,
}

impl Model {
    fn is_dir(&self, path: &str) -> bool {
        path.is_empty() || self.names.get(path).is_some_and(|&i| self.inodes[i].0 == "dir")
    }

    fn remove(&mut self, path: &str) {
        let below = format!("{path}/");
        self.names.retain(|name, _| name != path && !name.starts_with(&below));
    }

    fn insert(&mut self, path: &str, what: &str, mtime: i64) {
        self.inodes.push((what.to_owned(), mtime));
        self.names.insert(path.to_owned(), self.inodes.len() - 1);
    }

    /// Makes missing parents; false if something else is in the way.
    fn parents(&mut self, path: &str) -> bool {
        for (at, _) in path.match_indices('/') {
            let parent = &path[..at];
            if !self.names.contains_key(parent) {
                self.insert(parent, "dir", 0);
            } else if !self.is_dir(parent) {
                return false;
            }
        }
        true
    }
}

/// A path of up to three names out of five: short enough that most of them meet.
fn path() -> impl Strategy<Value = String> {
    proptest::collection::vec(proptest::sample::select(&["a", "b", "c", "d", "e"][..]), 1..=3)
        .prop_map(|parts| parts.join("/"))
}

/// What an archive brings.
#[derive(Clone, Debug)]
enum Brings {
    File,
    Directory,
    Fifo,
    /// One of the names that are there, by its place among them.
    LinkTo(Index),
}

#[derive(Clone, Debug)]
struct Layer {
    /// Names to hide; or, if true, all that lower layers have in the directory of that name.
    hides: Vec<(String, bool)>,
    brings: Vec<(String, Brings)>,
    /// Where in the archive the whiteouts stand.
    places: Vec<Index>,
}

fn layer() -> impl Strategy<Value = Layer> {
    let brings = prop_oneof![
        2 => Just(Brings::File),
        1 => Just(Brings::Directory),
        1 => Just(Brings::Fifo),
        2 => any::<Index>().prop_map(Brings::LinkTo),
    ];
    let hides = proptest::collection::vec((path(), prop::bool::weighted(0.3)), 0..4);
    let brings = proptest::collection::vec((path(), brings), 0..14);
    let places = proptest::collection::vec(any::<Index>(), 3);
    (hides, brings, places).prop_map(|(hides, brings, places)| Layer { hides, brings, places })
}

impl Layer {
    /// The archive. What makes no sense over what `model` has is left out; the rest is done to the
    /// model.
    fn archive(&self, model: &mut Model, clock: &mut i64) -> Tar {
        // What the layer hides goes first in the model, and anywhere in the archive.
        let mut hidden = Vec::new();
        for (path, all) in &self.hides {
            let (parent, name) = path.rsplit_once('/').unwrap_or(("", path));
            // Below something that is no directory a whiteout is an error in any implementation.
            if !(parent.is_empty() || model.is_dir(parent)) {
                continue;
            }
            if *all && !parent.is_empty() {
                let below = format!("{parent}/");
                model.names.retain(|name, _| !name.starts_with(&below));
                hidden.push((format!("{parent}/.wh..wh..opq"), parent));
            } else {
                model.remove(path);
                let name = format!("{parent}/.wh.{name}");
                hidden.push((name.trim_start_matches('/').to_owned(), parent));
            }
        }
        // A whiteout whose directory another one took away would make it again, in model and
        // import.
        for (_, dir) in hidden.iter().filter(|(_, dir)| !dir.is_empty()) {
            model.parents(&format!("{dir}/x"));
        }
        let mut entries: Vec<Tar> = Vec::new();
        for (path, brings) in &self.brings {
            *clock += 1;
            let mut next = model.clone();
            let Some(entry) = bring(path, brings, &mut next, *clock) else { continue };
            // Nothing may take the place of a directory that a whiteout of this layer stands in:
            // the archive's order would decide, and whiteouts have none.
            if hidden.iter().any(|(_, dir)| !next.is_dir(dir)) {
                continue;
            }
            *model = next;
            entries.push(entry);
        }
        for ((name, _), place) in hidden.iter().zip(&self.places) {
            entries.insert(place.index(entries.len() + 1), Tar::new().file(name, b""));
        }
        Tar(entries.into_iter().flat_map(|tar| tar.0).collect())
    }
}

/// One entry, done to the model; `None` if it makes no sense there.
fn bring(path: &str, brings: &Brings, model: &mut Model, clock: i64) -> Option<Tar> {
    if !model.parents(path) {
        return None;
    }
    let head = |flag, link| Head { mtime: clock, link, ..Head::new(flag, path.as_bytes()) };
    Some(match brings {
        Brings::File => {
            let content = clock.to_string();
            model.remove(path);
            model.insert(path, &content, clock);
            let size = content.len() as u64;
            Tar::new().head(&Head { size, ..head(b'0', b"") }).data(content.as_bytes())
        }
        Brings::Directory => {
            if model.is_dir(path) {
                let inode = model.names[path];
                model.inodes[inode].1 = clock;
            } else {
                model.remove(path);
                model.insert(path, "dir", clock);
            }
            Tar::new().head(&head(b'5', b""))
        }
        Brings::Fifo => {
            model.remove(path);
            model.insert(path, "fifo", clock);
            Tar::new().head(&head(b'6', b""))
        }
        Brings::LinkTo(index) => {
            let files: Vec<_> = model.names.keys().filter(|name| !model.is_dir(name)).collect();
            if files.is_empty() {
                return None;
            }
            let target = (*index.get(&files)).clone();
            if target.starts_with(&format!("{path}/")) {
                return None;
            }
            let inode = model.names[&target];
            if target != path {
                model.remove(path);
                model.names.insert(path.to_owned(), inode);
            }
            Tar::new().head(&head(b'1', target.as_bytes()))
        }
    })
}

/// What a path is: kind or content, time, and the first name of its inode.
type Shown = BTreeMap<String, (String, i64, String)>;

fn shown_by_model(model: &Model) -> Shown {
    let mut firsts = BTreeMap::new();
    let names = model.names.iter().map(|(name, inode)| {
        let (what, mtime) = &model.inodes[*inode];
        let what = match what.as_str() {
            "dir" | "fifo" => what.clone(),
            content => format!("file {}", sha256(content.as_bytes())),
        };
        let first = firsts.entry(*inode).or_insert_with(|| format!("/{name}")).clone();
        (format!("/{name}"), (what, *mtime, first))
    });
    names.collect()
}

/// First names go by the order of the paths, as those of the model do.
fn shown_by_image(view: &View) -> Shown {
    let mut firsts = BTreeMap::new();
    let nodes = view.0.iter().filter(|(path, _)| *path != "/").map(|(path, node)| {
        let first = firsts.entry(&node.first).or_insert(path).clone();
        (path.clone(), (node.what.clone(), node.mtime.0, first))
    });
    nodes.collect()
}

#[test]
fn layers_do_what_their_model_does() {
    let soak = std::env::var("COFOLIO_SOAK").ok().and_then(|n| n.parse().ok()).unwrap_or(1u32);
    let config = ProptestConfig {
        cases: 400u32.saturating_mul(soak),
        failure_persistence: None,
        max_shrink_iters: 2000,
        ..ProptestConfig::default()
    };
    let (bench, images, links) = (Bench::fast(), AtomicUsize::new(0), AtomicUsize::new(0));
    let layers = proptest::collection::vec(layer(), 1..=6);
    proptest!(config, |(layers in layers, prefix_is_known in any::<bool>())| {
        let image = images.fetch_add(1, Relaxed);
        let (mut model, mut clock, mut blobs) = (Model::default(), 1, Vec::new());
        for (at, layer) in layers.iter().enumerate() {
            blobs.push(Blob::plain(layer.archive(&mut model, &mut clock).end()));
            // Of some images the first two layers are imported before, so that they are known.
            if at == 1 && prefix_is_known {
                bench.layers(&format!("{image}-prefix"), &blobs).unwrap();
            }
        }
        let view = bench.layers(&image.to_string(), &blobs).unwrap();
        let expected = shown_by_model(&model);
        let is_linked = |(path, (_, _, first)): (&String, &(String, i64, String))| path != first;
        links.fetch_add(expected.iter().filter(|entry| is_linked(*entry)).count(), Relaxed);
        prop_assert_eq!(shown_by_image(&view), expected);
    });
    assert!(links.into_inner() > 10, "the generator makes no links");
}
