use std::collections::{HashMap, HashSet, VecDeque};

use super::dir::Guard;
use super::xattr::Xattr;
use super::{Image, Inode, ReadAt, ReadError};
use crate::format::{
    ESCAPED_WHITEOUT, ESCAPED_WHITEOUTS, METACOPY_HEADER, OVERLAY_ESCAPED_PREFIX, OVERLAY_METACOPY,
    OVERLAY_PREFIX, OVERLAY_REDIRECT, USER_WHITEOUT, USER_WHITEOUTS,
};
use crate::tree::{
    Content, EntryId, INLINE_MAX, InodeId, Meta, Payload, S_IFCHR, S_IFMT, S_IFREG, Tree,
};

/// Attributes may be shared, so they can be larger together than the image is; but not by much.
const XATTR_FACTOR: u64 = 64;
const XATTR_SLACK: u64 = 16 << 20;

impl<S: ReadAt> Image<S> {
    /// The tree of a composefs image: what dump text of it describes. Attributes for overlayfs
    /// become payload and digest, escaped ones are restored, whiteouts are character devices
    /// again, and the whiteouts that composefs adds to the root are left out.
    ///
    /// Writing the tree again gives the same bytes, if mkcomposefs or this crate wrote the image.
    ///
    /// # Errors
    /// [`ReadError::NotComposefs`] for other images; [`ReadError::Corrupt`] and
    /// [`ReadError::Tree`] for content that no composefs image has; [`ReadError::Source`].
    pub fn to_tree(&self) -> Result<Tree, ReadError> {
        if self.superblock().composefs_version.is_none() {
            return Err(ReadError::NotComposefs);
        }
        let root = self.root()?;
        let mut builder = Builder {
            image: self,
            tree: Tree::new(meta_of(&root)),
            known: HashMap::from([(root.nid, InodeId::ROOT)]),
            order: Order::default(),
            guard: Guard::new(self.size()),
            text_left: self.size(),
            xattrs_left: self.size().saturating_mul(XATTR_FACTOR).saturating_add(XATTR_SLACK),
        };
        let found = builder.attributes(&root)?;
        builder.set_xattrs(InodeId::ROOT, &root, &found)?;
        let mut queue = VecDeque::from([(root.nid, InodeId::ROOT)]);
        while let Some((nid, id)) = queue.pop_front() {
            builder.fill_dir(nid, id, &mut queue)?;
        }
        let Builder { mut tree, known, order, .. } = builder;
        restore_primary_names(&mut tree, known, order);
        Ok(tree)
    }
}

struct Builder<'i, S> {
    image: &'i Image<S>,
    tree: Tree,
    /// Inodes that are in the tree, by their number in the image.
    known: HashMap<u64, InodeId>,
    order: Order,
    guard: Guard,
    /// Bytes of inline content and symbolic links that may still come: each has its own place in
    /// an image, so together they are smaller than it.
    text_left: u64,
    xattrs_left: u64,
}

/// What tells the order of inodes beside the tree.
#[derive(Default)]
struct Order {
    /// Whiteouts of the root that composefs added: they take their turns among the inodes.
    ghosts: Vec<(Vec<u8>, u64)>,
    /// Directories that are marked as holding a whiteout.
    whiteout_dirs: HashSet<InodeId>,
}

#[derive(Default)]
struct Attributes {
    digest: Option<[u8; 32]>,
    payload: Vec<u8>,
    whiteout: bool,
    holds_whiteouts: bool,
    kept: Vec<Xattr>,
}

impl<S: ReadAt> Builder<'_, S> {
    fn fill_dir(
        &mut self,
        nid: u64,
        id: InodeId,
        queue: &mut VecDeque<(u64, InodeId)>,
    ) -> Result<(), ReadError> {
        let image = self.image;
        let dir = image.inode(nid)?;
        self.guard.enter(&dir)?;
        for entry in image.readdir(&dir)? {
            let entry = entry?;
            let fail = |source| ReadError::Tree { offset: dir.offset, source };
            if let Some(&known) = self.known.get(&entry.nid) {
                // A directory cannot have a second name: `resolve_link` says so.
                let name = self.tree.reserve(id, &entry.name).map_err(fail)?;
                self.tree.resolve_link(name, known).map_err(fail)?;
                continue;
            }
            let inode = image.inode(entry.nid)?;
            if inode.mode & S_IFMT == S_IFCHR && inode.rdev == 0 {
                // A whiteout that composefs added; those of the tree itself are stored as files.
                if id == InodeId::ROOT {
                    self.order.ghosts.push((entry.name, entry.nid));
                }
                continue;
            }
            let child = self.insert(id, &entry.name, &inode)?;
            self.known.insert(entry.nid, child);
            if inode.is_dir() {
                queue.push_back((entry.nid, child));
            }
        }
        Ok(())
    }

    fn insert(&mut self, dir: InodeId, name: &[u8], inode: &Inode) -> Result<InodeId, ReadError> {
        let found = self.attributes(inode)?;
        let mut meta = meta_of(inode);
        let text;
        let content = if found.whiteout {
            meta.mode = S_IFCHR | (meta.mode & !S_IFMT);
            Content::CharDevice(0)
        } else if inode.is_symlink() {
            text = self.image.readlink(inode)?;
            Content::Symlink(&text)
        } else if inode.is_file() && inode.is_chunk_based() && inode.size > 0 {
            Content::External {
                size: inode.size,
                digest: found.digest.as_ref(),
                payload: match found.payload.as_slice() {
                    [] => Payload::None,
                    path => Payload::Path(path),
                },
            }
        } else if inode.is_file() {
            text = self.image.read_small(inode, INLINE_MAX)?.ok_or(ReadError::corrupt(
                inode.offset,
                "a file has more content in the image than composefs allows",
            ))?;
            Content::Inline(&text)
        } else {
            special(inode)
        };
        if let Content::Symlink(text) | Content::Inline(text) = content {
            let left = self.text_left.checked_sub(text.len() as u64);
            self.text_left = left.ok_or(ReadError::corrupt(
                inode.offset,
                "files have together more content than the image",
            ))?;
        }
        let id = self
            .tree
            .insert(dir, name, meta, content)
            .map_err(|source| ReadError::Tree { offset: inode.offset, source })?;
        self.tree.give_links(id, inode.nlink);
        let is_special = matches!(
            content,
            Content::CharDevice(_) | Content::BlockDevice(_) | Content::Fifo | Content::Socket
        );
        if is_special && !found.whiteout && self.is_needlessly_long(inode) {
            self.tree.mark_odd_size(id);
        }
        self.set_xattrs(id, inode, &found)?;
        Ok(id)
    }

    /// Whether an inode has the long form although the short one would do: then the special file
    /// had a size of more than 4 GiB in the dump from which mkcomposefs made the image.
    fn is_needlessly_long(&self, inode: &Inode) -> bool {
        let sb = self.image.superblock();
        inode.is_long()
            && (inode.mtime, inode.mtime_nsec) == (sb.epoch, sb.fixed_nsec)
            && [inode.nlink, inode.uid, inode.gid].iter().all(|&n| n <= u32::from(u16::MAX))
    }

    fn set_xattrs(
        &mut self,
        id: InodeId,
        inode: &Inode,
        found: &Attributes,
    ) -> Result<(), ReadError> {
        if found.holds_whiteouts {
            self.order.whiteout_dirs.insert(id);
        }
        let pairs = found.kept.iter().map(|x| (x.name.as_slice(), x.value.as_slice()));
        self.tree
            .set_xattrs(id, pairs)
            .map_err(|source| ReadError::Tree { offset: inode.offset, source })
    }

    /// Undoes what composefs does to attributes (see [`crate::format`]).
    fn attributes(&mut self, inode: &Inode) -> Result<Attributes, ReadError> {
        let is_file = inode.mode & S_IFMT == S_IFREG;
        let mut found = Attributes::default();
        let mut left = self.xattrs_left;
        self.image.each_xattr(inode, |mut xattr| {
            let size = (xattr.name.len() + xattr.value.len()) as u64;
            left = left.checked_sub(size).ok_or(ReadError::corrupt(
                inode.offset,
                "extended attributes are together far larger than the image",
            ))?;
            match xattr.name.as_slice() {
                OVERLAY_REDIRECT if is_file => found.payload = payload_of(xattr.value),
                OVERLAY_METACOPY => {
                    let digest = xattr.value.get(METACOPY_HEADER.len()..);
                    if is_file && let Some(Ok(digest)) = digest.map(<[u8; 32]>::try_from) {
                        found.digest = Some(digest);
                    }
                }
                ESCAPED_WHITEOUT if is_file => found.whiteout = true,
                ESCAPED_WHITEOUTS => found.holds_whiteouts = true,
                USER_WHITEOUT | USER_WHITEOUTS => {}
                name => {
                    if let Some(rest) = name.strip_prefix(OVERLAY_ESCAPED_PREFIX) {
                        xattr.name = [OVERLAY_PREFIX, rest].concat();
                    } else if name.starts_with(OVERLAY_PREFIX) {
                        return Ok(());
                    }
                    found.kept.push(xattr);
                }
            }
            Ok(())
        })?;
        self.xattrs_left = left;
        Ok(found)
    }
}

/// The path of an object: what a redirect says, without the slash in front.
fn payload_of(value: Vec<u8>) -> Vec<u8> {
    match value.split_first() {
        Some((b'/', rest)) if !rest.is_empty() => rest.to_vec(),
        _ => value,
    }
}

fn special(inode: &Inode) -> Content<'static> {
    use crate::tree::{S_IFBLK, S_IFDIR, S_IFIFO};
    match inode.mode & S_IFMT {
        S_IFDIR => Content::Directory,
        S_IFCHR => Content::CharDevice(inode.rdev),
        S_IFBLK => Content::BlockDevice(inode.rdev),
        S_IFIFO => Content::Fifo,
        _ => Content::Socket,
    }
}

fn meta_of(inode: &Inode) -> Meta {
    Meta {
        mode: inode.mode,
        uid: inode.uid,
        gid: inode.gid,
        mtime: inode.mtime,
        mtime_nsec: inode.mtime_nsec,
    }
}

/// Finds under which name each hard-linked inode is stored. An image does not say it, but inodes
/// lie in the order of those names: so, going through all names breadth first, the name at which
/// the next inode is due is the one.
fn restore_primary_names(tree: &mut Tree, known: HashMap<u64, InodeId>, order: Order) {
    let Order { mut ghosts, whiteout_dirs } = order;
    if known.len() == tree.entry_count() + 1 {
        return;
    }
    let mut due: Vec<(u64, Option<InodeId>)> =
        known.into_iter().map(|(nid, inode)| (nid, Some(inode))).collect();
    due.extend(ghosts.iter().map(|&(_, nid)| (nid, None)));
    due.sort_unstable();
    let mut due = due.into_iter().map(|(_, inode)| inode).peekable();
    due.next_if_eq(&Some(InodeId::ROOT));
    // Last first, so that the next one can be taken off the end.
    ghosts.sort_unstable_by(|a, b| b.cmp(a));
    let mut primary: Vec<(InodeId, EntryId)> = Vec::new();
    let mut queue = VecDeque::from([InodeId::ROOT]);
    while let Some(dir) = queue.pop_front() {
        for child in tree.children(dir) {
            while dir == InodeId::ROOT && ghosts.pop_if(|(name, _)| **name < *child.name).is_some()
            {
                due.next_if_eq(&None);
            }
            // Only the directory under which a whiteout is stored has the mark of it.
            let here = !tree.content(child.inode).is_whiteout() || whiteout_dirs.contains(&dir);
            if !here || due.next_if_eq(&Some(child.inode)).is_none() {
                continue;
            }
            if tree.is_dir(child.inode) {
                queue.push_back(child.inode);
            } else if tree.is_primary(child.inode, child.entry) != Some(true) {
                primary.push((child.inode, child.entry));
            }
        }
        while dir == InodeId::ROOT && ghosts.pop().is_some() {
            due.next_if_eq(&None);
        }
    }
    // An image in another order keeps the names that were met first.
    if due.peek().is_none() {
        for (inode, entry) in primary {
            tree.give_primary(inode, entry);
        }
    }
}
