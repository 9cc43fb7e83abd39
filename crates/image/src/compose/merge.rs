//! Puts one layer's tree over the merged tree of the layers below it (OCI image spec, "Layers").
//!
//! Three passes, whatever the archive's order: link targets in lower layers must be held before
//! they are hidden, and lower names hidden before the layer's own entries come.
//!
//! 1. targets of hard links into lower layers get a second name in a hidden directory;
//! 2. opaque marks and whiteouts remove lower names;
//! 3. the layer's own entries come.
//!
//! The first two look at the layer's marks only, the third reads its dump ([`DumpedLayer`]).

use std::collections::HashMap;
use std::io;

use cofolio_erofs::dump::{Record, What};
use cofolio_erofs::tree::{Content, InodeId, Tree, TreeError};

use cofolio_store::{Domain, FileKind, FileName};

use crate::error::{ImportError, shown};
use crate::layer::dumped::{
    Dirs, DumpedLayer, LayerDump, NO_META, dump_error, is_dir, is_implicit, lower_link,
    not_in_order,
};
use crate::layer::unpack::store_error;
use crate::layer::{DEFAULT_DIR, IMPLICIT, LOWER_LINK, OPAQUE, WHITEOUT, make_dirs, walk};

/// Holds inodes that may get more names during a merge. No whiteout reaches a merged tree.
const HELD: &[u8] = b".wh..wh..held";

#[derive(Debug)]
pub(crate) enum MergeError {
    /// An entry of the layer conflicts with the layers below: its path, and why.
    Entry {
        path: Vec<u8>,
        what: String,
    },
    Dump(io::Error),
}

fn at(path: &[u8], what: impl ToString) -> MergeError {
    MergeError::Entry { path: path.to_vec(), what: what.to_string() }
}

/// Hidden or replaced objects, with sizes. Layers' trees and splits name them, so they must exist.
pub(crate) type Hidden = Vec<([u8; 32], u64)>;

/// Puts `layer` over `lower`. After an error `lower` is of no use.
pub(crate) fn apply(
    lower: &mut Tree,
    layer: &DumpedLayer,
    hidden: &mut Hidden,
) -> Result<(), MergeError> {
    let mut held = Held::default();
    let (links, hides) = hold_link_targets(lower, &layer.marks, &mut held)?;
    if hides {
        hide(lower, &layer.marks, hidden);
    }
    Bring { lower, links, held, hidden, shared: HashMap::new() }.run(layer)?;
    let root = lower.root();
    lower.unlink(root, HELD);
    Ok(())
}

/// The hidden directory, once something is in it.
#[derive(Default)]
struct Held {
    dir: Option<InodeId>,
    count: usize,
}

impl Held {
    /// Gives an inode a name that nothing can hide or replace.
    fn hold(&mut self, lower: &mut Tree, inode: InodeId) -> Result<(), TreeError> {
        let dir = match self.dir {
            Some(dir) => dir,
            None => {
                let root = lower.root();
                let dir = lower.insert(root, HELD, DEFAULT_DIR, Content::Directory)?;
                *self.dir.insert(dir)
            }
        };
        lower.link(dir, self.count.to_string().as_bytes(), inode)?;
        self.count += 1;
        Ok(())
    }
}

/// Removes a name and all below it, noting the objects that go.
fn remove(tree: &mut Tree, dir: InodeId, name: &[u8], hidden: &mut Hidden) {
    let Some(inode) = tree.lookup(dir, name) else { return };
    let mut todo = vec![inode];
    while let Some(inode) = todo.pop() {
        match tree.content(inode) {
            Content::Directory => todo.extend(tree.children(inode).iter().map(|c| c.inode)),
            Content::External { size, digest: Some(digest), .. } => hidden.push((*digest, size)),
            _ => {}
        }
    }
    tree.unlink(dir, name);
}

/// The tree of a chain of layers that are all in the store.
pub(crate) fn merged(domain: &Domain, chain: &[String]) -> Result<Tree, ImportError> {
    let mut tree = Tree::new(DEFAULT_DIR);
    for chain_id in chain {
        let dump =
            LayerDump::File(domain.open_named(&FileName::chain(FileKind::Layer, chain_id)?)?);
        let layer = DumpedLayer::read(dump).map_err(store_error)?;
        apply(&mut tree, &layer, &mut Hidden::new()).map_err(|error| match error {
            MergeError::Dump(error) => store_error(error),
            MergeError::Entry { path, what } => {
                ImportError::Image { what: format!("layer {chain_id}: {}: {what}", shown(&path)) }
            }
        })?;
    }
    Ok(tree)
}

/// The first layer has nothing below it: its tree becomes the merged tree, without the marks.
pub(crate) fn lowest(mut layer: Tree) -> Result<Tree, MergeError> {
    let mut implicit = Vec::new();
    let mut marks = Vec::new();
    let root = layer.root();
    if layer.xattr(root, IMPLICIT).is_some() {
        implicit.push(root);
    }
    for visit in layer.walk() {
        if layer.xattr(visit.inode, LOWER_LINK).is_some() {
            return Err(no_target(&layer, visit.entry, visit.inode));
        }
        if visit.name.starts_with(WHITEOUT) {
            marks.push((visit.parent, visit.name.to_vec()));
        } else if layer.xattr(visit.inode, IMPLICIT).is_some() {
            implicit.push(visit.inode);
        }
    }
    for dir in implicit {
        // Only directories that no entry made have the mark, and those have no other attribute.
        let _ = layer.set_xattrs(dir, std::iter::empty());
    }
    for (dir, name) in marks {
        layer.unlink(dir, &name);
    }
    Ok(layer)
}

fn no_target(layer: &Tree, entry: cofolio_erofs::tree::EntryId, inode: InodeId) -> MergeError {
    let target = layer.xattr(inode, LOWER_LINK).unwrap_or_default();
    at(&layer.path(entry), missing(target))
}

fn missing(target: &[u8]) -> String {
    format!("hard link to {:?}, which does not exist", shown(target))
}

/// First pass. Maps the marked links to lower inodes; says whether the layer has whiteouts.
fn hold_link_targets(
    lower: &mut Tree,
    marks: &Tree,
    held: &mut Held,
) -> Result<(HashMap<InodeId, InodeId>, bool), MergeError> {
    let mut links = HashMap::new();
    let mut hides = false;
    for visit in marks.walk() {
        hides |= visit.name.starts_with(WHITEOUT);
        let Some(target) = marks.xattr(visit.inode, LOWER_LINK) else { continue };
        let fail = |what: String| at(&marks.path(visit.entry), what);
        let path: Vec<Vec<u8>> = target.split(|&b| b == b'/').map(<[u8]>::to_vec).collect();
        let found = path.split_last().and_then(|(name, parents)| {
            lower.lookup(walk(lower, lower.root(), parents).ok()??, name)
        });
        let Some(inode) = found else {
            return Err(no_target(marks, visit.entry, visit.inode));
        };
        if lower.is_dir(inode) {
            return Err(fail(format!("hard link to the directory {:?}", shown(target))));
        }
        held.hold(lower, inode).map_err(|e| fail(e.to_string()))?;
        links.insert(visit.inode, inode);
    }
    Ok((links, hides))
}

/// Second pass: removes what the layer hides.
fn hide(lower: &mut Tree, marks: &Tree, removed: &mut Hidden) {
    // Per open directory of the layer, the lower directory that it is about, if there is one.
    let mut dirs: Vec<Option<InodeId>> = vec![Some(lower.root())];
    for visit in marks.walk() {
        dirs.truncate(visit.depth);
        let here = dirs.last().copied().flatten();
        if marks.is_dir(visit.inode) {
            dirs.push(here.and_then(|dir| lower_dir(lower, marks, dir, visit.name, visit.inode)));
            continue;
        }
        let (Some(dir), Some(hidden)) = (here, visit.name.strip_prefix(WHITEOUT)) else { continue };
        if visit.name != OPAQUE {
            remove(lower, dir, hidden, removed);
            continue;
        }
        let names: Vec<Vec<u8>> = lower.children(dir).iter().map(|c| c.name.to_vec()).collect();
        for name in names.iter().filter(|name| *name != HELD) {
            remove(lower, dir, name, removed);
        }
    }
}

/// The lower directory that a layer's directory is laid over: the one of that name, or the one that
/// a symbolic link of that name leads to if the layer has no entry of its own for it.
fn lower_dir(
    lower: &Tree,
    marks: &Tree,
    dir: InodeId,
    name: &[u8],
    of_layer: InodeId,
) -> Option<InodeId> {
    let inode = lower.lookup(dir, name)?;
    if lower.is_dir(inode) {
        return Some(inode);
    }
    marks.xattr(of_layer, IMPLICIT)?;
    walk(lower, dir, &[name.to_vec()]).ok()?
}

/// Third pass: the layer's own entries.
struct Bring<'a> {
    lower: &'a mut Tree,
    /// From the links among the marks to what they mean.
    links: HashMap<InodeId, InodeId>,
    held: Held,
    hidden: &'a mut Hidden,
    /// Inodes with several names in the layer, by the path of their description. They are held: an
    /// entry that comes through a lower symbolic link can replace a name of the layer.
    shared: HashMap<Vec<u8>, Shared>,
}

#[derive(Clone, Copy)]
struct Shared {
    inode: InodeId,
    /// Its description is still to come: another name came first.
    waits: bool,
}

impl Bring<'_> {
    fn run(mut self, layer: &DumpedLayer) -> Result<(), MergeError> {
        let mut dirs = Dirs::new(self.lower.root());
        let mut records = layer.records().map_err(MergeError::Dump)?;
        while let Some(record) = records.next().map_err(|e| MergeError::Dump(dump_error(e)))? {
            if record.path == b"/" {
                let root = self.lower.root();
                if !is_implicit(&record) {
                    self.describe(root, &record).map_err(|e| at(b"/", e))?;
                }
                continue;
            }
            let name = dirs.enter_parent(record.path);
            let (Some(name), Some(&dir)) = (name, dirs.last()) else {
                return Err(MergeError::Dump(not_in_order()));
            };
            if name.starts_with(WHITEOUT) {
                continue;
            }
            if is_dir(&record) {
                let there = self.directory(dir, name, &record).map_err(|e| at(record.path, e))?;
                dirs.enter(name, there);
            } else {
                remove(self.lower, dir, name, self.hidden);
                self.other(dir, name, &record, &layer.marks).map_err(|e| at(record.path, e))?;
            }
        }
        match self.shared.iter().find(|(_, shared)| shared.waits) {
            Some((path, _)) => Err(at(path, missing(path))),
            None => Ok(()),
        }
    }

    /// Makes a directory of the layer, or describes the existing one.
    fn directory(
        &mut self,
        dir: InodeId,
        name: &[u8],
        record: &Record<'_>,
    ) -> Result<InodeId, String> {
        if is_implicit(record) {
            return make_dirs(self.lower, dir, &[name.to_vec()], false);
        }
        let there = match self.lower.lookup(dir, name) {
            Some(there) if self.lower.is_dir(there) => there,
            _ => {
                remove(self.lower, dir, name, self.hidden);
                self.lower
                    .insert(dir, name, DEFAULT_DIR, Content::Directory)
                    .map_err(|e| e.to_string())?
            }
        };
        self.describe(there, record).map_err(|e| e.to_string())?;
        Ok(there)
    }

    /// Anything else, whose name is free by now.
    fn other(
        &mut self,
        dir: InodeId,
        name: &[u8],
        record: &Record<'_>,
        marks: &Tree,
    ) -> Result<(), TreeError> {
        // Where the dump describes the inode.
        let path = match record.what {
            What::Link(target) => target,
            What::Inode { .. } => record.path,
        };
        let marked = match record.what {
            What::Link(_) => marks.resolve(path).filter(|&mark| !marks.is_dir(mark)),
            What::Inode { .. } => lower_link(record).and_then(|_| marks.resolve(path)),
        };
        if let Some(&inode) = marked.and_then(|mark| self.links.get(&mark)) {
            self.lower.link(dir, name, inode)?;
            return Ok(());
        }
        let known = self.shared.get(path).copied();
        let inode = match known {
            Some(Shared { inode, .. }) => {
                self.lower.link(dir, name, inode)?;
                inode
            }
            None => self.lower.insert(dir, name, NO_META, Content::Inline(b""))?,
        };
        let described = match &record.what {
            What::Inode { .. } => {
                self.describe(inode, record)?;
                true
            }
            // A whiteout is an empty file for those that link to it.
            What::Link(_) => marked.is_some() || known.is_some_and(|shared| !shared.waits),
        };
        let several = match record.what {
            What::Inode { nlink, .. } => nlink > 1,
            What::Link(_) => true,
        };
        if several && known.is_none() {
            self.held.hold(self.lower, inode)?;
        }
        if several || known.is_some() {
            let shared = Shared { inode, waits: !described };
            match self.shared.get_mut(path) {
                Some(known) => *known = shared,
                None => _ = self.shared.insert(path.to_vec(), shared),
            }
        }
        Ok(())
    }

    fn describe(&mut self, inode: InodeId, record: &Record<'_>) -> Result<(), TreeError> {
        let What::Inode { meta, content, xattrs, .. } = &record.what else { return Ok(()) };
        self.lower.set_meta(inode, *meta);
        self.lower.set_content(inode, *content)?;
        self.lower.set_xattrs(inode, xattrs.iter().copied())
    }
}
