use super::{EntryId, InodeId, Tree};

/// One name met by a [`Walk`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Visit<'a> {
    /// The name in its directory.
    pub name: &'a [u8],
    /// The entry.
    pub entry: EntryId,
    /// Its inode; a hard-linked one is met once per name.
    pub inode: InodeId,
    /// The directory it is in.
    pub parent: InodeId,
    /// Number of directories above, the root included: 1 for names in the root.
    pub depth: usize,
}

/// Iterator of [`Tree::walk`].
pub struct Walk<'a> {
    tree: &'a Tree,
    /// Per open directory the names that are still to come, last first.
    open: Vec<Vec<u32>>,
}

impl<'a> Walk<'a> {
    pub(super) fn new(tree: &'a Tree) -> Walk<'a> {
        let mut walk = Walk { tree, open: Vec::new() };
        walk.enter(tree.root());
        walk
    }

    fn enter(&mut self, dir: InodeId) {
        let mut names = self.tree.sorted_entries(dir);
        names.reverse();
        self.open.push(names);
    }
}

impl<'a> Iterator for Walk<'a> {
    type Item = Visit<'a>;

    fn next(&mut self) -> Option<Visit<'a>> {
        loop {
            let Some(entry) = self.open.last_mut()?.pop() else {
                self.open.pop();
                continue;
            };
            let entry = EntryId(entry);
            let Some(inode) = self.tree.entry_inode(entry) else { continue };
            let depth = self.open.len();
            if self.tree.is_dir(inode) {
                self.enter(inode);
            }
            return Some(Visit {
                name: self.tree.entry_name(entry),
                entry,
                inode,
                parent: self.tree.entry_parent(entry),
                depth,
            });
        }
    }
}
