//! A filesystem tree in a compact arena: what an image holds, before or after it is bytes.
//!
//! Inodes and names are apart, as in a filesystem: a hard link is a second name of one inode, and
//! an inode lives as long as a name leads to it. A million entries fit in some 120 MB:
//!
//! ```text
//! inodes   48 bytes each   owner, mode, mtime, and a reference to the content
//! entries  16 bytes each   one per name: its directory, its inode, the next name in the directory
//! names    1 + length      all names in one buffer, addressed by the entry
//! digests  32 bytes each   of external files, each once, and 5..10 bytes of index
//! index     5..10 bytes    one hash table of entry ids over (directory, name)
//! xattrs   interned        one attribute (name, value) once; one set of attributes once
//! ```
//!
//! Names within a directory are unsorted here; they are enumerated sorted by their bytes. Removed
//! bytes stay in the arena until the tree is dropped: trees are built once and written.

mod content;
mod delta;
mod digests;
mod edit;
mod error;
mod names;
mod walk;
mod xattr;

use std::collections::HashMap;

pub use content::{
    Content, EXTERNAL_MAX, INLINE_MAX, Meta, NAME_MAX, PATH_MAX, Payload, S_IFBLK, S_IFCHR,
    S_IFDIR, S_IFIFO, S_IFLNK, S_IFMT, S_IFREG, S_IFSOCK, TARGET_MAX, object_path,
};
pub use delta::{Delta, delta};
pub use error::TreeError;
pub use walk::{Visit, Walk};
pub use xattr::{XATTRS_MAX, Xattrs};

pub(crate) use digests::DigestId;
pub(crate) use xattr::{SetId, XattrTable, hash_pair};

use content::mode_bits;
use digests::Digests;
use names::NameIndex;

/// An inode of one tree. Never valid in another tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InodeId(pub(crate) u32);

/// A name of one tree: the pair of a directory and a name in it. Never valid in another tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EntryId(pub(crate) u32);

impl InodeId {
    pub(crate) const ROOT: InodeId = InodeId(0);

    /// Dense index, from 0 (the root) up to [`Tree::inode_capacity`]; for side tables.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// One name of a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Child<'a> {
    /// The name, 1 to [`NAME_MAX`] bytes, without `/` and NUL, neither `.` nor `..`.
    pub name: &'a [u8],
    /// The inode it leads to.
    pub inode: InodeId,
    /// The entry itself.
    pub entry: EntryId,
}

#[derive(Clone, Copy)]
pub(crate) struct External {
    pub(crate) digest: Option<DigestId>,
    pub(crate) object: Option<DigestId>,
}

/// Marks the absence of an id in a 32-bit field.
const NONE: u32 = u32::MAX;
/// The inode of an entry that is reserved for a hard link whose target is not known yet.
const PENDING: u32 = u32::MAX - 1;
/// Ids stay below this, so that the writer has room to mark ids of its own.
const ID_LIMIT: u32 = 1 << 31;

/// Regular file whose content is external.
const EXTERNAL: u16 = 1 << 0;
/// External: `b` is the digest whose object path the payload is.
const BY_DIGEST: u16 = 1 << 1;
/// External: `b` is an explicit path.
const BY_PATH: u16 = 1 << 2;
/// `Inode::entry` was given as the name under which the inode is stored, not chosen.
const PRIMARY_GIVEN: u16 = 1 << 3;
/// More than one name, or a link count of its own: look into `Tree::links`.
const LINKED: u16 = 1 << 4;
/// A special file that claims more than 4 GiB: it makes mkcomposefs choose the long inode form.
const ODD_SIZE: u16 = 1 << 5;
/// No name leads here any more.
const DEAD: u16 = 1 << 6;

/// `word`, `a` and `b` by content:
///
/// | content | word | a | b |
/// |---|---|---|---|
/// | directory | number of names | first entry | length of its path in bytes, slash in front included; 0: the root |
/// | symlink, inline | offset into `text` | length | |
/// | external | size | digest to check | digest, or index into `payloads`, or nothing |
/// | device | | device number | |
#[derive(Clone, Copy)]
struct Inode {
    mtime: i64,
    word: u64,
    uid: u32,
    gid: u32,
    mtime_nsec: u32,
    a: u32,
    b: u32,
    xattrs: SetId,
    /// The first name that it got (or the given primary one); `NONE` for the root.
    entry: u32,
    mode: u16,
    flags: u16,
}

#[derive(Clone, Copy)]
struct Entry {
    /// Offset of the name in `names`: a length byte, then the bytes.
    name: u32,
    parent: u32,
    /// `NONE` once removed, `PENDING` while reserved.
    inode: u32,
    next_sibling: u32,
}

const _: () = assert!(size_of::<Inode>() == 48 && size_of::<Entry>() == 16);

/// What only hard-linked inodes need: all names, and a link count that was given.
#[derive(Default, Clone)]
struct Links {
    /// May hold removed entries; `live` says how many are not.
    names: Vec<u32>,
    live: u32,
    nlink: Option<u32>,
}

/// A filesystem tree. See the module's text for the representation.
///
/// ```
/// use cofolio_erofs::tree::{Content, Meta, Tree};
/// let meta = |mode| Meta { mode, uid: 0, gid: 0, mtime: 0, mtime_nsec: 0 };
/// let mut tree = Tree::new(meta(0o755));
/// let etc = tree.insert(tree.root(), b"etc", meta(0o755), Content::Directory)?;
/// let file = tree.insert(etc, b"hostname", meta(0o644), Content::Inline(b"node\n"))?;
/// tree.link(etc, b"name", file)?;
/// assert_eq!(tree.resolve(b"/etc/name"), Some(file));
/// assert_eq!(tree.nlink(file), 2);
/// # Ok::<(), cofolio_erofs::tree::TreeError>(())
/// ```
pub struct Tree {
    inodes: Vec<Inode>,
    entries: Vec<Entry>,
    names: Vec<u8>,
    index: NameIndex,
    text: Vec<u8>,
    digests: Digests,
    payloads: Vec<(u64, u32)>,
    links: HashMap<u32, Links>,
    xattrs: XattrTable,
    live_inodes: u32,
    live_entries: u32,
}

impl Tree {
    /// A tree with a root directory only. The type in `root.mode` is set to directory.
    pub fn new(root: Meta) -> Tree {
        let mut tree = Tree {
            inodes: Vec::new(),
            entries: Vec::new(),
            names: Vec::new(),
            index: NameIndex::new(),
            text: Vec::new(),
            digests: Digests::new(),
            payloads: Vec::new(),
            links: HashMap::new(),
            xattrs: XattrTable::new(),
            live_inodes: 1,
            live_entries: 0,
        };
        tree.inodes.push(Inode {
            mtime: root.mtime,
            word: 0,
            uid: root.uid,
            gid: root.gid,
            mtime_nsec: root.mtime_nsec,
            a: NONE,
            b: 0,
            xattrs: SetId::EMPTY,
            entry: NONE,
            mode: mode_bits(root.mode, S_IFDIR),
            flags: 0,
        });
        tree
    }

    /// The root directory.
    pub fn root(&self) -> InodeId {
        InodeId(0)
    }

    /// Number of inodes, the root included.
    pub fn inode_count(&self) -> usize {
        self.live_inodes as usize
    }

    /// Number of names, the root excluded. At least `inode_count() - 1`.
    pub fn entry_count(&self) -> usize {
        self.live_entries as usize
    }

    /// Bound of [`InodeId::index`]: inodes that ever were in the tree.
    pub fn inode_capacity(&self) -> usize {
        self.inodes.len()
    }

    /// The inode of `name` in the directory `dir`; `None` where there is none, or where `dir` is
    /// not a directory. Does not know `.` and `..`.
    pub fn lookup(&self, dir: InodeId, name: &[u8]) -> Option<InodeId> {
        self.lookup_entry(dir, name).and_then(|e| self.entry_inode(e))
    }

    /// The entry of `name` in the directory `dir`.
    pub fn lookup_entry(&self, dir: InodeId, name: &[u8]) -> Option<EntryId> {
        self.index.find(dir.0, name, |id| self.entry_key(id)).map(EntryId)
    }

    /// The inode at `path` from the root. Empty components are skipped; symbolic links are not
    /// followed; `.` and `..` are not found.
    pub fn resolve(&self, path: &[u8]) -> Option<InodeId> {
        path.split(|&b| b == b'/')
            .filter(|name| !name.is_empty())
            .try_fold(self.root(), |dir, name| self.lookup(dir, name))
    }

    /// Owner, mode and time of an inode.
    pub fn meta(&self, inode: InodeId) -> Meta {
        let i = &self.inodes[inode.index()];
        Meta {
            mode: u32::from(i.mode),
            uid: i.uid,
            gid: i.gid,
            mtime: i.mtime,
            mtime_nsec: i.mtime_nsec,
        }
    }

    /// Whether an inode is a directory.
    pub fn is_dir(&self, inode: InodeId) -> bool {
        u32::from(self.inodes[inode.index()].mode) & S_IFMT == S_IFDIR
    }

    /// What an inode is and holds.
    pub fn content(&self, inode: InodeId) -> Content<'_> {
        let i = &self.inodes[inode.index()];
        match u32::from(i.mode) & S_IFMT {
            S_IFDIR => Content::Directory,
            S_IFLNK => Content::Symlink(self.text(i.word, i.a)),
            S_IFCHR => Content::CharDevice(i.a),
            S_IFBLK => Content::BlockDevice(i.a),
            S_IFIFO => Content::Fifo,
            S_IFSOCK => Content::Socket,
            _ if i.flags & EXTERNAL == 0 => Content::Inline(self.text(i.word, i.a)),
            _ => Content::External {
                size: i.word,
                digest: self.digests.get(i.a),
                payload: match (self.digests.get(i.b), self.payloads.get(i.b as usize)) {
                    (Some(digest), _) if i.flags & BY_DIGEST != 0 => Payload::Object(digest),
                    (_, Some(&(start, len))) if i.flags & BY_PATH != 0 => {
                        Payload::Path(self.text(start, len))
                    }
                    _ => Payload::None,
                },
            },
        }
    }

    /// The extended attributes of an inode as (complete name, value), sorted by name.
    pub fn xattrs(&self, inode: InodeId) -> Xattrs<'_> {
        self.xattrs.set(self.inodes[inode.index()].xattrs)
    }

    /// The value of one extended attribute.
    pub fn xattr(&self, inode: InodeId, name: &[u8]) -> Option<&[u8]> {
        self.xattrs(inode).find(|(n, _)| *n == name).map(|(_, value)| value)
    }

    /// The names of a directory, sorted by their bytes; empty for anything else.
    pub fn children(&self, dir: InodeId) -> Vec<Child<'_>> {
        self.sorted_entries(dir).into_iter().filter_map(|e| self.child(EntryId(e))).collect()
    }

    /// How many names a directory has; 0 for anything else.
    pub fn child_count(&self, dir: InodeId) -> usize {
        if self.is_dir(dir) {
            usize::try_from(self.inodes[dir.index()].word).unwrap_or(usize::MAX)
        } else {
            0
        }
    }

    /// All names of an inode, in the order in which they came; none for the root.
    pub fn links(&self, inode: InodeId) -> impl Iterator<Item = EntryId> + '_ {
        let i = &self.inodes[inode.index()];
        let many = self.links.get(&inode.0).filter(|_| i.flags & LINKED != 0);
        let one = (many.is_none() && i.entry != NONE).then_some(i.entry);
        many.into_iter()
            .flat_map(|l| l.names.iter().copied())
            .chain(one)
            .filter(move |&e| self.entries[e as usize].inode == inode.0)
            .map(EntryId)
    }

    /// Inodes that have lost all names, in the order in which they came; their content is known.
    pub fn nameless(&self) -> impl Iterator<Item = InodeId> + '_ {
        let ids = 0u32..;
        ids.zip(&self.inodes).filter(|(_, i)| i.flags & DEAD != 0).map(|(id, _)| InodeId(id))
    }

    /// The link count that an image shows: for a directory 2 plus its subdirectories, for others
    /// the number of names, unless a dump or an image gave another number.
    pub fn nlink(&self, inode: InodeId) -> u32 {
        if self.is_dir(inode) {
            let subdirs = self
                .child_ids(inode)
                .filter(|&e| self.is_dir(InodeId(self.entries[e as usize].inode)))
                .count();
            return u32::try_from(subdirs).unwrap_or(u32::MAX).saturating_add(2);
        }
        self.file_nlink(inode)
    }

    /// The directory that an entry is in, its name, and its inode. `None` once it was removed.
    pub fn child(&self, entry: EntryId) -> Option<Child<'_>> {
        let inode = self.entry_inode(entry)?;
        Some(Child { name: self.entry_name(entry), inode, entry })
    }

    /// The directory that holds an entry.
    pub fn entry_parent(&self, entry: EntryId) -> InodeId {
        InodeId(self.entries[entry.0 as usize].parent)
    }

    /// The directory that holds an inode (its first name, if it has several); `None` for the root.
    pub fn parent(&self, inode: InodeId) -> Option<InodeId> {
        let entry = self.inodes[inode.index()].entry;
        (entry != NONE).then(|| InodeId(self.entries[entry as usize].parent))
    }

    /// The absolute path of an entry.
    pub fn path(&self, entry: EntryId) -> Vec<u8> {
        let mut parts = vec![self.entry_name(entry)];
        let mut dir = self.entry_parent(entry);
        while let (Some(above), e) = (self.parent(dir), self.inodes[dir.index()].entry) {
            parts.push(self.entry_name(EntryId(e)));
            dir = above;
        }
        let mut path = Vec::with_capacity(parts.iter().map(|p| p.len() + 1).sum());
        for part in parts.iter().rev() {
            path.push(b'/');
            path.extend_from_slice(part);
        }
        path
    }

    /// All names below the root, depth first, each directory's names sorted, a directory before
    /// what it holds. Needs no recursion, however deep the tree.
    pub fn walk(&self) -> Walk<'_> {
        Walk::new(self)
    }

    /// For every inode with more than one name: the name under which an image stores it.
    ///
    /// Where a dump or an image gave it, that one. Otherwise the first in the order in which an
    /// image stores inodes (breadth first, names sorted), which depends on the tree alone and not
    /// on the order in which it was built.
    pub fn primary_names(&self) -> HashMap<InodeId, EntryId> {
        let mut primary = HashMap::new();
        if self.links.is_empty() {
            return primary;
        }
        let mut queue = std::collections::VecDeque::from([self.root()]);
        while let Some(dir) = queue.pop_front() {
            for entry in self.sorted_entries(dir) {
                let Some(inode) = self.entry_inode(EntryId(entry)) else { continue };
                let i = &self.inodes[inode.index()];
                if self.is_dir(inode) {
                    queue.push_back(inode);
                } else if i.flags & LINKED != 0
                    && (i.flags & PRIMARY_GIVEN == 0 || i.entry == entry)
                {
                    primary.entry(inode).or_insert(EntryId(entry));
                }
            }
        }
        primary
    }
}

impl Tree {
    pub(crate) fn has_odd_size(&self, inode: InodeId) -> bool {
        self.inodes[inode.index()].flags & ODD_SIZE != 0
    }

    pub(crate) fn xattr_set(&self, inode: InodeId) -> SetId {
        self.inodes[inode.index()].xattrs
    }

    pub(crate) fn xattr_table(&self) -> &XattrTable {
        &self.xattrs
    }

    /// The names of a directory as raw entry ids, sorted by their bytes.
    pub(crate) fn sorted_entries(&self, dir: InodeId) -> Vec<u32> {
        // Most comparisons are settled by the first bytes, kept beside the id, so that sorting a
        // big directory does not jump about in the buffer of names.
        let mut keyed: Vec<(u64, u32)> = Vec::with_capacity(self.child_count(dir));
        keyed.extend(self.child_ids(dir).map(|e| {
            let name = self.entry_name(EntryId(e));
            let mut key = [0; 8];
            let len = name.len().min(8);
            key[..len].copy_from_slice(&name[..len]);
            (u64::from_be_bytes(key), e)
        }));
        keyed.sort_unstable_by(|a, b| {
            a.0.cmp(&b.0)
                .then_with(|| self.entry_name(EntryId(a.1)).cmp(self.entry_name(EntryId(b.1))))
        });
        keyed.into_iter().map(|(_, e)| e).collect()
    }

    pub(crate) fn entry_name(&self, entry: EntryId) -> &[u8] {
        let start = self.entries[entry.0 as usize].name as usize;
        let len = usize::from(self.names[start]);
        &self.names[start + 1..start + 1 + len]
    }

    /// `None` for a removed or reserved entry.
    pub(crate) fn entry_inode(&self, entry: EntryId) -> Option<InodeId> {
        let inode = self.entries[entry.0 as usize].inode;
        (inode < ID_LIMIT).then_some(InodeId(inode))
    }

    /// Whether an inode has the name `entry` stored with it, as far as that is given: `None`
    /// means that it is for the caller to choose among several.
    pub(crate) fn is_primary(&self, inode: InodeId, entry: EntryId) -> Option<bool> {
        let i = &self.inodes[inode.index()];
        if i.flags & LINKED == 0 {
            Some(true)
        } else {
            (i.flags & PRIMARY_GIVEN != 0).then_some(i.entry == entry.0)
        }
    }

    /// Digest to check and digest that names the object, of an external file.
    pub(crate) fn external(&self, inode: InodeId) -> Option<External> {
        let i = &self.inodes[inode.index()];
        (i.flags & EXTERNAL != 0).then(|| External {
            digest: DigestId::some(i.a),
            object: DigestId::some(i.b).filter(|_| i.flags & BY_DIGEST != 0),
        })
    }

    /// Bound of [`DigestId::index`].
    pub(crate) fn digest_count(&self) -> usize {
        self.digests.len()
    }

    pub(crate) fn digest(&self, id: DigestId) -> &[u8; 32] {
        self.digests.at(id)
    }

    /// The link count of anything but a directory.
    pub(crate) fn file_nlink(&self, inode: InodeId) -> u32 {
        if self.inodes[inode.index()].flags & LINKED == 0 {
            return 1;
        }
        self.links.get(&inode.0).map_or(1, |l| l.nlink.unwrap_or(l.live))
    }
}

impl Tree {
    fn text(&self, start: u64, len: u32) -> &[u8] {
        let start = usize::try_from(start).unwrap_or(usize::MAX);
        self.text.get(start..start.saturating_add(len as usize)).unwrap_or_default()
    }

    fn entry_key(&self, entry: u32) -> (u32, &[u8]) {
        (self.entries[entry as usize].parent, self.entry_name(EntryId(entry)))
    }

    fn child_ids(&self, dir: InodeId) -> impl Iterator<Item = u32> + '_ {
        let mut next = if self.is_dir(dir) { self.inodes[dir.index()].a } else { NONE };
        std::iter::from_fn(move || {
            while next != NONE {
                let id = next;
                let entry = &self.entries[id as usize];
                next = entry.next_sibling;
                if entry.inode < ID_LIMIT {
                    return Some(id);
                }
            }
            None
        })
    }
}

fn small_id(len: usize) -> Result<u32, TreeError> {
    u32::try_from(len).ok().filter(|&id| id < ID_LIMIT).ok_or(TreeError::Full)
}

#[cfg(test)]
mod tests;
