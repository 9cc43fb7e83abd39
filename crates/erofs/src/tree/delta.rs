//! The difference between two trees.

use super::{Content, InodeId, Meta, Payload, S_IFCHR, Tree, TreeError};

/// The difference between a tree and its base: the layer that overlayfs puts over the base to show
/// the tree. Whiteouts are character devices with number 0; there are no opaque directories.
pub struct Delta {
    /// The layer.
    pub tree: Tree,
    /// How many names of the tree are those of the base.
    pub shared: usize,
}

/// Computes the delta from `base` to `image`. `None` if no overlayfs layer can express it: either
/// tree has whiteouts, a changed file has no payload, or the root of the base has a name like a
/// directory of objects, which overlayfs would find instead of the objects below it.
///
/// An inode with several names is the same only with all its names.
///
/// # Errors
/// [`TreeError`], if the layer does not fit into an arena.
pub fn delta(base: &Tree, image: &Tree) -> Result<Option<Delta>, TreeError> {
    let is_shard = |name: &[u8]| name.len() == 2 && name.iter().all(u8::is_ascii_hexdigit);
    if base.children(base.root()).iter().any(|child| is_shard(child.name)) {
        return Ok(None);
    }
    if has_whiteouts(base) || has_whiteouts(image) {
        return Ok(None);
    }
    let compared = Compared::new(base, image);
    let changed = |inode: InodeId| compared.changed[inode.index()];
    let files = image.walk().map(|visit| visit.inode).filter(|&inode| changed(inode));
    for inode in files {
        if matches!(image.content(inode), Content::External { payload: Payload::None, .. }) {
            return Ok(None);
        }
    }
    compared.layer().map(Some)
}

fn has_whiteouts(tree: &Tree) -> bool {
    tree.walk().any(|visit| tree.content(visit.inode).is_whiteout())
}

struct Compared<'t> {
    base: &'t Tree,
    image: &'t Tree,
    /// By inode of the image: the one of the base that has its first name.
    twins: Vec<Option<InodeId>>,
    /// By inode of the image: whether it, or something below it, is not as in the base.
    changed: Vec<bool>,
}

impl<'t> Compared<'t> {
    fn new(base: &'t Tree, image: &'t Tree) -> Self {
        let count = image.inode_capacity();
        let mut compared =
            Self { base, image, twins: vec![None; count], changed: vec![false; count] };
        let root = image.root();
        compared.twins[root.index()] = Some(base.root());
        compared.changed[root.index()] = !compared.same(root, base.root());
        let mut met = vec![false; count];
        let visits: Vec<_> = image.walk().collect();
        for visit in &visits {
            let above = compared.twins[visit.parent.index()];
            let twin = above.and_then(|dir| base.lookup(dir, visit.name));
            let at = visit.inode.index();
            if !std::mem::replace(&mut met[at], true) {
                compared.twins[at] = twin;
                compared.changed[at] = !twin.is_some_and(|twin| compared.same(visit.inode, twin));
            } else if compared.twins[at] != twin {
                compared.changed[at] = true;
            }
        }
        // From the leaves up; of an inode with many names all have been met.
        for visit in visits.iter().rev() {
            compared.changed[visit.parent.index()] |= compared.changed[visit.inode.index()];
        }
        compared
    }

    /// Whether two inodes are equal, apart from what is below directories. A file must have as many
    /// names as its twin: since each of them leads to the twin, the names are the same.
    fn same(&self, inode: InodeId, twin: InodeId) -> bool {
        let (base, image) = (self.base, self.image);
        let names_agree = || match image.is_dir(inode) {
            // Nothing was taken away: what was added is found from below.
            true => base.children(twin).iter().all(|c| image.lookup(inode, c.name).is_some()),
            false => {
                base.nlink(twin) == image.nlink(inode)
                    && base.links(twin).count() == image.links(inode).count()
            }
        };
        base.meta(twin) == image.meta(inode)
            && base.content(twin) == image.content(inode)
            && base.has_odd_size(twin) == image.has_odd_size(inode)
            && base.xattrs(twin).eq(image.xattrs(inode))
            && names_agree()
    }

    fn layer(&self) -> Result<Delta, TreeError> {
        let image = self.image;
        let mut tree = Tree::new(image.meta(image.root()));
        tree.set_xattrs(tree.root(), image.xattrs(image.root()))?;
        // By inode of the image: that of the layer.
        let mut placed = vec![None; image.inode_capacity()];
        placed[image.root().index()] = Some(tree.root());
        self.hide(image.root(), &mut tree, InodeId::ROOT)?;
        let mut shared = 0;
        for visit in image.walk() {
            let inode = visit.inode;
            let dir = placed[visit.parent.index()].filter(|_| self.changed[inode.index()]);
            let Some(dir) = dir else {
                shared += 1;
                continue;
            };
            if let Some(known) = placed[inode.index()] {
                tree.link(dir, visit.name, known)?;
                continue;
            }
            let new = tree.insert(dir, visit.name, image.meta(inode), image.content(inode))?;
            tree.set_xattrs(new, image.xattrs(inode))?;
            placed[inode.index()] = Some(new);
            self.hide(inode, &mut tree, new)?;
        }
        Ok(Delta { tree, shared })
    }

    /// Whiteouts for what the base has in a directory and the image has not.
    fn hide(&self, dir: InodeId, tree: &mut Tree, at: InodeId) -> Result<(), TreeError> {
        let twin = self.twins[dir.index()].filter(|_| self.image.is_dir(dir));
        let Some(twin) = twin.filter(|twin| self.base.is_dir(*twin)) else { return Ok(()) };
        let meta = Meta { mode: S_IFCHR, uid: 0, gid: 0, ..tree.meta(tree.root()) };
        for child in self.base.children(twin) {
            if self.image.lookup(dir, child.name).is_none() {
                tree.insert(at, child.name, meta, Content::CharDevice(0))?;
            }
        }
        Ok(())
    }
}
