//! Puts one layer's tree over the merged tree of the layers below it (OCI image spec, "Layers").
//!
//! Three passes over the layer, because what it hides must go before anything of it comes, whatever the
//! order in the archive, and what it links to in lower layers must be held before it is hidden:
//!
//! 1. targets of hard links into lower layers get a second name in a hidden directory;
//! 2. opaque marks and whiteouts remove lower names;
//! 3. the layer's own entries come.

use std::collections::HashMap;

use cofolio_erofs::tree::{Content, InodeId, Tree, TreeError};

use super::error::shown;
use super::layer::{DEFAULT_DIR, IMPLICIT, LOWER_LINK, OPAQUE, WHITEOUT, Walked, make_dirs, walk};

/// Holds link targets during a merge. Cannot clash: whiteouts never reach a merged tree.
const HELD: &[u8] = b".wh..wh..held";

/// Why a layer does not fit.
#[derive(Debug)]
pub(crate) struct MergeError {
    /// Path of the entry in the layer.
    pub(crate) path: Vec<u8>,
    pub(crate) what: String,
}

/// Objects of lower layers that upper layers hide: digest and size. The image does not show them, but
/// the layers' own trees name them, so they must be there, too.
pub(crate) type Hidden = Vec<([u8; 32], u64)>;

/// Puts `layer` over `lower`. After an error `lower` is of no use.
///
/// # Errors
/// A hard link without a target, a path through something that is no directory, too many entries.
pub(crate) fn apply(lower: &mut Tree, layer: &Tree, hidden: &mut Hidden) -> Result<(), MergeError> {
    let (held, hides) = hold_link_targets(lower, layer)?;
    if hides {
        hide(lower, layer, hidden);
    }
    bring(lower, layer, &held, hidden)?;
    let root = lower.root();
    lower.unlink(root, HELD);
    Ok(())
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

/// The first layer has nothing below it: its tree becomes the merged tree, without the marks.
///
/// # Errors
/// A hard link whose target is nowhere.
pub(crate) fn base(mut layer: Tree) -> Result<Tree, MergeError> {
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
    MergeError {
        path: layer.path(entry),
        what: format!("hard link to {:?}, which does not exist", shown(target)),
    }
}

/// First pass. Maps each link of the layer to the lower inode that it means; says whether the layer has
/// whiteouts.
fn hold_link_targets(
    lower: &mut Tree,
    layer: &Tree,
) -> Result<(HashMap<InodeId, InodeId>, bool), MergeError> {
    let mut held = HashMap::new();
    let mut hold = None;
    let mut hides = false;
    for visit in layer.walk() {
        hides |= visit.name.starts_with(WHITEOUT);
        let Some(target) = layer.xattr(visit.inode, LOWER_LINK) else { continue };
        if held.contains_key(&visit.inode) {
            continue;
        }
        let fail = |what: String| MergeError { path: layer.path(visit.entry), what };
        let path: Vec<Vec<u8>> = target.split(|&b| b == b'/').map(<[u8]>::to_vec).collect();
        let found = path.split_last().and_then(|(name, parents)| {
            match walk(lower, lower.root(), parents) {
                Walked::Dir(dir) => lower.lookup(dir, name),
                Walked::Missing | Walked::NotDirectory(_) => None,
            }
        });
        let Some(inode) = found else {
            return Err(no_target(layer, visit.entry, visit.inode));
        };
        if lower.is_dir(inode) {
            return Err(fail(format!("hard link to the directory {:?}", shown(target))));
        }
        let dir = match hold {
            Some(dir) => dir,
            None => {
                let root = lower.root();
                *hold.insert(
                    lower
                        .insert(root, HELD, DEFAULT_DIR, Content::Directory)
                        .map_err(|e| fail(e.to_string()))?,
                )
            }
        };
        lower
            .link(dir, held.len().to_string().as_bytes(), inode)
            .map_err(|e| fail(e.to_string()))?;
        held.insert(visit.inode, inode);
    }
    Ok((held, hides))
}

/// Second pass: removes what the layer hides.
fn hide(lower: &mut Tree, layer: &Tree, removed: &mut Hidden) {
    // Per open directory of the layer, the lower directory that it is about, if there is one.
    let mut dirs: Vec<Option<InodeId>> = vec![Some(lower.root())];
    for visit in layer.walk() {
        dirs.truncate(visit.depth);
        let here = dirs.last().copied().flatten();
        if layer.is_dir(visit.inode) {
            dirs.push(here.and_then(|dir| lower_dir(lower, layer, dir, visit.name, visit.inode)));
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

/// The lower directory that a layer's directory is laid over: the one of that name, or the one that a
/// symbolic link of that name leads to if the layer has no entry of its own for it.
fn lower_dir(
    lower: &Tree,
    layer: &Tree,
    dir: InodeId,
    name: &[u8],
    of_layer: InodeId,
) -> Option<InodeId> {
    let inode = lower.lookup(dir, name)?;
    if lower.is_dir(inode) {
        return Some(inode);
    }
    layer.xattr(of_layer, IMPLICIT)?;
    match walk(lower, dir, &[name.to_vec()]) {
        Walked::Dir(dir) => Some(dir),
        Walked::Missing | Walked::NotDirectory(_) => None,
    }
}

/// Third pass: the layer's own entries.
fn bring(
    lower: &mut Tree,
    layer: &Tree,
    held: &HashMap<InodeId, InodeId>,
    hidden: &mut Hidden,
) -> Result<(), MergeError> {
    let root = lower.root();
    if layer.xattr(layer.root(), IMPLICIT).is_none() {
        copy_meta(lower, root, layer, layer.root())
            .map_err(|e| MergeError { path: b"/".to_vec(), what: e.to_string() })?;
    }
    let mut dirs = vec![root];
    // Inodes with several names in the layer, once one of them has come.
    let mut brought: HashMap<InodeId, InodeId> = HashMap::new();
    for visit in layer.walk() {
        let fail = |what: String| MergeError { path: layer.path(visit.entry), what };
        dirs.truncate(visit.depth);
        let dir = dirs.last().copied().unwrap_or(root);
        if visit.name.starts_with(WHITEOUT) {
            continue;
        }
        if layer.is_dir(visit.inode) {
            let there = if layer.xattr(visit.inode, IMPLICIT).is_some() {
                make_dirs(lower, dir, &[visit.name.to_vec()], false).map_err(fail)?
            } else {
                let there = match lower.lookup(dir, visit.name) {
                    Some(there) if lower.is_dir(there) => there,
                    _ => {
                        remove(lower, dir, visit.name, hidden);
                        lower
                            .insert(dir, visit.name, DEFAULT_DIR, Content::Directory)
                            .map_err(|e| fail(e.to_string()))?
                    }
                };
                copy_meta(lower, there, layer, visit.inode).map_err(|e| fail(e.to_string()))?;
                there
            };
            dirs.push(there);
            continue;
        }
        remove(lower, dir, visit.name, hidden);
        let known = held.get(&visit.inode).or_else(|| brought.get(&visit.inode)).copied();
        match known {
            // A name in the layer can have been replaced through a symbolic link of a lower layer.
            Some(inode) if lower.links(inode).next().is_some() => {
                lower.link(dir, visit.name, inode).map_err(|e| fail(e.to_string()))?;
            }
            _ => {
                let inode = lower
                    .insert(dir, visit.name, layer.meta(visit.inode), layer.content(visit.inode))
                    .map_err(|e| fail(e.to_string()))?;
                lower
                    .set_xattrs(inode, layer.xattrs(visit.inode))
                    .map_err(|e| fail(e.to_string()))?;
                if layer.links(visit.inode).nth(1).is_some() {
                    brought.insert(visit.inode, inode);
                }
            }
        }
    }
    Ok(())
}

fn copy_meta(lower: &mut Tree, to: InodeId, layer: &Tree, from: InodeId) -> Result<(), TreeError> {
    lower.set_meta(to, layer.meta(from));
    lower.set_xattrs(to, layer.xattrs(from))
}
