//! The order in which an image stores inodes and names, and facts about the whole tree.

use super::data::Checked;
use crate::tree::{Content, EntryId, InodeId, Meta, S_IFCHR, Tree};

/// Marks a name of the root as a ghost: one of the 256 whiteouts `00` to `ff` that composefs puts
/// there to hide the directories of the object store, which lie in the overlay's lowest layer.
const GHOST: u32 = 1 << 31;

pub(super) const GHOST_MODE: u32 = S_IFCHR | 0o644;

static GHOST_NAMES: [[u8; 2]; 256] = {
    let hex = b"0123456789abcdef";
    let mut names = [[0; 2]; 256];
    let mut i = 0;
    while i < 256 {
        names[i] = [hex[i >> 4], hex[i & 15]];
        i += 1;
    }
    names
};

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Node {
    Inode(InodeId),
    /// A whiteout of the root that is not in the tree.
    Ghost(u8),
}

/// An inode at its place in the order, with the names below it.
pub(super) struct NodeAt<'p> {
    pub(super) node: Node,
    /// Raw names for [`DirNames`]; empty unless it is a directory.
    pub(super) names: &'p [u32],
}

pub(crate) struct Plan<'t> {
    pub(super) tree: &'t Tree,
    /// The file data of an image that is mounted by itself; `None` for one over an object store.
    pub(super) data: Option<&'t Checked<'t>>,
    /// Whether the root has whiteouts that hide the object store, and other whiteouts are escaped.
    pub(super) is_metadata: bool,
    /// The names of all directories, sorted within each, directories in breadth-first order.
    names: Vec<u32>,
    /// All inodes but the root, in the order in which they are stored: as in `names`, but with
    /// the inode in the place of the name, and each once.
    order: Vec<u32>,
    /// By inode: directories with whiteouts in them.
    whiteout_dirs: Vec<bool>,
    pub(super) has_whiteouts: bool,
    pub(super) inode_count: u64,
    /// The earliest modification time: that of compact inodes.
    pub(super) min_time: (i64, u32),
}

impl<'t> Plan<'t> {
    /// The order of a metadata image, or (not `is_metadata`) of an image with data or a layer.
    pub(super) fn new(
        tree: &'t Tree,
        data: Option<&'t Checked<'t>>,
        is_metadata: bool,
    ) -> Plan<'t> {
        let ghosts = if is_metadata { 256 } else { 0 };
        let mut plan = Plan {
            tree,
            data,
            is_metadata,
            names: Vec::with_capacity(tree.entry_count() + ghosts),
            order: Vec::with_capacity(tree.inode_count() + ghosts),
            whiteout_dirs: vec![false; tree.inode_capacity()],
            has_whiteouts: false,
            inode_count: 1,
            min_time: time_of(tree.meta(tree.root())),
        };
        let mut stored = vec![false; tree.inode_capacity()];
        append_names(tree, tree.root(), is_metadata, &mut plan.names);
        let mut at = 0;
        while let Some(&raw) = plan.names.get(at) {
            match node_of(tree, raw) {
                Node::Inode(inode) => {
                    let entry = EntryId(raw);
                    let here = tree
                        .is_primary(inode, entry)
                        .unwrap_or_else(|| !std::mem::replace(&mut stored[inode.index()], true));
                    if here {
                        plan.note_inode(inode, entry);
                    }
                }
                Node::Ghost(_) => {
                    plan.order.push(raw);
                    plan.inode_count += 1;
                }
            }
            at += 1;
        }
        plan
    }

    fn note_inode(&mut self, inode: InodeId, entry: EntryId) {
        self.order.push(inode.0);
        self.inode_count += 1;
        self.min_time = self.min_time.min(time_of(self.tree.meta(inode)));
        match self.tree.content(inode) {
            Content::Directory => {
                append_names(self.tree, inode, false, &mut self.names);
            }
            content if self.is_metadata && content.is_whiteout() => {
                self.has_whiteouts = true;
                self.whiteout_dirs[self.tree.entry_parent(entry).index()] = true;
            }
            _ => {}
        }
    }

    /// All inodes in the order in which they are stored.
    pub(super) fn nodes(&self) -> Nodes<'_> {
        Nodes { plan: self, next: None, dir_names: 0 }
    }

    pub(super) fn holds_whiteouts(&self, dir: InodeId) -> bool {
        self.whiteout_dirs[dir.index()]
    }
}

pub(super) struct Nodes<'p> {
    plan: &'p Plan<'p>,
    /// Position in the order; `None` before the root.
    next: Option<usize>,
    /// Where the names of the next directory begin.
    dir_names: usize,
}

impl<'p> Iterator for Nodes<'p> {
    type Item = NodeAt<'p>;

    fn next(&mut self) -> Option<NodeAt<'p>> {
        let Plan { tree, names, order, .. } = self.plan;
        let node = match self.next {
            None => {
                self.next = Some(0);
                Node::Inode(tree.root())
            }
            Some(at) => {
                self.next = Some(at + 1);
                match *order.get(at)? {
                    ghost if ghost & GHOST != 0 => ghost_of(ghost),
                    inode => Node::Inode(InodeId(inode)),
                }
            }
        };
        let count = match node {
            Node::Inode(inode) if inode == tree.root() && self.plan.is_metadata => {
                root_name_count(tree)
            }
            Node::Inode(inode) => tree.child_count(inode),
            Node::Ghost(_) => 0,
        };
        let start = self.dir_names;
        self.dir_names += count;
        Some(NodeAt { node, names: names.get(start..start + count).unwrap_or_default() })
    }
}

fn time_of(meta: Meta) -> (i64, u32) {
    (meta.mtime, meta.mtime_nsec)
}

fn node_of(tree: &Tree, raw: u32) -> Node {
    if raw & GHOST != 0 {
        return ghost_of(raw);
    }
    // Only names that lead somewhere are ever listed.
    Node::Inode(tree.entry_inode(EntryId(raw)).unwrap_or(tree.root()))
}

fn ghost_of(raw: u32) -> Node {
    Node::Ghost(u8::try_from(raw & 0xff).unwrap_or(0))
}

fn name_of(tree: &Tree, raw: u32) -> &[u8] {
    if raw & GHOST != 0 {
        &GHOST_NAMES[(raw & 0xff) as usize]
    } else {
        tree.entry_name(EntryId(raw))
    }
}

fn ghosts(tree: &Tree) -> impl Iterator<Item = u32> + '_ {
    let root = tree.root();
    let missing = move |&k: &u32| tree.lookup(root, &GHOST_NAMES[k as usize]).is_none();
    (0..256).filter(missing).map(|k| k | GHOST)
}

fn root_name_count(tree: &Tree) -> usize {
    tree.child_count(tree.root()) + ghosts(tree).count()
}

/// Appends the names that an image has in a directory, sorted, `.` and `..` left out.
fn append_names(tree: &Tree, dir: InodeId, with_ghosts: bool, names: &mut Vec<u32>) {
    let start = names.len();
    names.extend(tree.sorted_entries(dir));
    if with_ghosts {
        names.extend(ghosts(tree));
        names[start..].sort_by(|&a, &b| name_of(tree, a).cmp(name_of(tree, b)));
    }
}

/// The names of a directory as an image has them: with `.` and `..` in their sorted places.
pub(super) struct DirNames<'a> {
    tree: &'a Tree,
    names: &'a [u32],
    dot: usize,
    dotdot: usize,
}

#[derive(Clone, Copy)]
pub(super) enum Target {
    Itself,
    Parent,
    Node(Node),
}

impl<'a> DirNames<'a> {
    pub(super) fn new(tree: &'a Tree, names: &'a [u32]) -> DirNames<'a> {
        // Hardly any name sorts before `..`, so the first one mostly tells.
        let above = names.first().is_none_or(|&raw| name_of(tree, raw) > b"..".as_slice());
        let before = |limit: &[u8]| match above {
            true => 0,
            false => names.partition_point(|&raw| name_of(tree, raw) < limit),
        };
        DirNames { tree, names, dot: before(b"."), dotdot: before(b"..") + 1 }
    }

    pub(super) fn len(&self) -> usize {
        self.names.len() + 2
    }

    pub(super) fn get(&self, i: usize) -> (&'a [u8], Target) {
        if i == self.dot {
            return (b".", Target::Itself);
        }
        if i == self.dotdot {
            return (b"..", Target::Parent);
        }
        let raw = self.names[i - usize::from(i > self.dot) - usize::from(i > self.dotdot)];
        (name_of(self.tree, raw), Target::Node(node_of(self.tree, raw)))
    }

    pub(super) fn subdirs(&self) -> usize {
        let is_dir = |&&raw: &&u32| match node_of(self.tree, raw) {
            Node::Inode(inode) => self.tree.is_dir(inode),
            Node::Ghost(_) => false,
        };
        self.names.iter().filter(is_dir).count()
    }
}

/// Size in bytes that a directory of the tree has in an image: what dump text shows as its size.
pub(crate) fn dir_size(tree: &Tree, dir: InodeId) -> u64 {
    let mut names = Vec::new();
    append_names(tree, dir, dir == tree.root(), &mut names);
    let (blocks, tail) = super::layout::dir_extent(&DirNames::new(tree, &names));
    u64::from(blocks) * crate::format::BLOCK_SIZE + u64::from(tail)
}
