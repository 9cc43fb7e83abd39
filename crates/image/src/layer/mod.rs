//! A layer's own tree, in OCI form: what its tar archive says, whiteouts kept as entries.
//!
//! This is what `layers/<chain-id>.dump.zst` holds, so it must not depend on the layers below, and
//! yet what an entry means can depend on them. Three things are therefore kept for the merge:
//!
//! - whiteouts stay empty files `.wh.<name>` and `.wh..wh..opq`, as in the archive;
//! - a directory that no entry made, but that has entries in it, carries [`IMPLICIT`]: below it may
//!   be a directory whose metadata must stay, or a symbolic link that must be followed;
//! - a hard link whose target is not in this layer is an empty file that carries [`LOWER_LINK`].
//!
//! The two marks are extended attributes without a namespace, which no archive can smuggle in: an
//! entry's attributes outside of the kernel's namespaces are left out.
//!
//! # Names
//! Paths are taken as containerd and umoci take them: relative to the root whether or not they
//! begin with `/`; `.` means nothing; symbolic links in the parents are followed, but never out of
//! the root; the last name is not followed. An entry that is there already is replaced, except that
//! a directory over a directory only sets its metadata. Missing parents are made, 0755 and root's,
//! with time 0, so that an image always gives the same digest. `..` in a name is refused.

mod acl;
pub(crate) mod blob;
pub(crate) mod dumped;
pub(crate) mod objects;
mod pax;
pub(crate) mod split;
pub(crate) mod tar;
pub(crate) mod tar_split;
pub(crate) mod unpack;

use cofolio_erofs::tree::{Content, InodeId, Meta, Tree};

use crate::digest::{ChainId, DiffId};
use crate::error::shown;
use crate::layer::dumped::NO_META;
use crate::layer::tar::{Entry, Kind};

/// A layer of an image that was found in a source.
pub(crate) struct FoundLayer {
    pub(crate) blob: blob::Blob,
    pub(crate) media_type: String,
    pub(crate) diff_id: DiffId,
    pub(crate) chain_id: ChainId,
}

pub(crate) const WHITEOUT: &[u8] = b".wh.";
/// Whiteout of all that lower layers have in a directory.
pub(crate) const OPAQUE: &[u8] = b".wh..wh..opq";
/// Prefix of AUFS's own bookkeeping, which old layers carry and everybody ignores.
const AUFS: &[u8] = b".wh..wh.";
/// Mark of directories that no entry made.
pub(crate) const IMPLICIT: &[u8] = b"cofolio.implicit";
/// Mark of hard links to lower layers; its value is the target.
pub(crate) const LOWER_LINK: &[u8] = b"cofolio.lower-link";
/// Symbolic links that are followed for one name, as in Linux (`MAXSYMLINKS`).
pub(crate) const SYMLINKS_MAX: usize = 40;
/// Longest path of an entry, in bytes: what Linux takes at a time.
const PATH_MAX: usize = 4095;

/// Metadata of directories without an entry.
pub(crate) const DEFAULT_DIR: Meta = Meta { mode: 0o755, uid: 0, gid: 0, mtime: 0, mtime_nsec: 0 };

/// What an entry became.
pub(crate) enum Made {
    /// A regular file that waits for its content.
    File(InodeId),
    /// All that there is to it.
    Done,
    /// Nothing: AUFS bookkeeping.
    Ignored,
}

/// Builds the tree of one layer from its entries, in their order.
pub(crate) struct LayerTree {
    pub(crate) tree: Tree,
    /// Attributes left out because they are in no namespace that Linux knows.
    pub(crate) foreign_xattrs: u64,
    path: Vec<Vec<u8>>,
}

impl LayerTree {
    pub(crate) fn new() -> Self {
        let mut tree = Tree::new(DEFAULT_DIR);
        let root = tree.root();
        // Cannot fail: the attribute is short, and fixed.
        let _ = tree.set_xattrs(root, [(IMPLICIT, &b""[..])]);
        Self { tree, foreign_xattrs: 0, path: Vec::new() }
    }

    pub(crate) fn add(&mut self, entry: &Entry) -> Result<Made, String> {
        let mut path = std::mem::take(&mut self.path);
        let made = split(&entry.path, &mut path).and_then(|()| self.add_at(entry, &path));
        self.path = path;
        made
    }

    fn add_at(&mut self, entry: &Entry, path: &[Vec<u8>]) -> Result<Made, String> {
        let Some((name, parents)) = path.split_last() else {
            return self.root_entry(entry);
        };
        if path.iter().any(|part| part.starts_with(AUFS) && part != OPAQUE) {
            return Ok(Made::Ignored);
        }
        let root = self.tree.root();
        let dir = make_dirs(&mut self.tree, root, parents, true)?;
        if name.starts_with(WHITEOUT) {
            return self.whiteout(dir, name);
        }
        let meta = meta_of(entry);
        let content = match entry.kind {
            Kind::HardLink => return self.hard_link(entry, dir, name),
            Kind::Directory => return self.directory(entry, dir, name),
            Kind::File => Content::Inline(b""),
            Kind::Symlink => Content::Symlink(&entry.link),
            Kind::CharDevice => Content::CharDevice(device(entry.device)?),
            Kind::BlockDevice => Content::BlockDevice(device(entry.device)?),
            Kind::Fifo => Content::Fifo,
        };
        self.tree.unlink(dir, name);
        let inode = self.tree.insert(dir, name, meta, content).map_err(|e| e.to_string())?;
        self.set_xattrs(inode, entry)?;
        Ok(if entry.kind == Kind::File { Made::File(inode) } else { Made::Done })
    }

    fn root_entry(&mut self, entry: &Entry) -> Result<Made, String> {
        if entry.kind != Kind::Directory {
            return Err("the root must be a directory".into());
        }
        let root = self.tree.root();
        self.tree.set_meta(root, meta_of(entry));
        self.set_xattrs(root, entry)?;
        Ok(Made::Done)
    }

    fn directory(&mut self, entry: &Entry, dir: InodeId, name: &[u8]) -> Result<Made, String> {
        let meta = meta_of(entry);
        let inode = match self.tree.lookup(dir, name) {
            Some(old) if self.tree.is_dir(old) => {
                self.tree.set_meta(old, meta);
                old
            }
            old => {
                self.tree.unlink(dir, name);
                let new = self.tree.insert(dir, name, meta, Content::Directory);
                let new = new.map_err(|e| e.to_string())?;
                if old.is_some() {
                    // An entry before this one has replaced what lower layers have there, directory
                    // or not, so nothing of theirs may show in this directory.
                    self.whiteout(new, OPAQUE)?;
                }
                new
            }
        };
        // Replaces all attributes, and with them the mark of an implicit directory.
        self.set_xattrs(inode, entry)?;
        Ok(Made::Done)
    }

    fn whiteout(&mut self, dir: InodeId, name: &[u8]) -> Result<Made, String> {
        let hidden = &name[WHITEOUT.len()..];
        if matches!(hidden, b"" | b"." | b"..") {
            return Err("a whiteout of no name".into());
        }
        if self.tree.lookup(dir, name).is_none() {
            let made = self.tree.insert(dir, name, NO_META, Content::Inline(b""));
            made.map_err(|e| e.to_string())?;
        }
        Ok(Made::Done)
    }

    /// The target is looked for in this layer first; if it may be in one below, that is noted.
    fn hard_link(&mut self, entry: &Entry, dir: InodeId, name: &[u8]) -> Result<Made, String> {
        let mut target = Vec::new();
        split(&entry.link, &mut target).map_err(|e| format!("hard link target: {e}"))?;
        let (last, parents) = target.split_last().ok_or("hard link to the root")?;
        if last.starts_with(WHITEOUT) {
            return Err(format!("hard link to the whiteout {:?}", shown(&entry.link)));
        }
        let there = walk(&self.tree, self.tree.root(), parents)?;
        let there = there.and_then(|dir| self.tree.lookup(dir, last));
        if there.is_some_and(|inode| self.tree.is_dir(inode)) {
            return Err(format!("hard link to the directory {:?}", shown(&entry.link)));
        }
        match there {
            Some(inode) => {
                if self.tree.lookup(dir, name) == Some(inode) {
                    return Ok(Made::Done);
                }
                self.tree.unlink(dir, name);
                if self.tree.links(inode).next().is_none() {
                    return Err(format!(
                        "hard link that replaces the directory of its target {:?}",
                        shown(&entry.link)
                    ));
                }
                self.tree.link(dir, name, inode).map_err(|e| e.to_string())?;
            }
            None => {
                let path = target.join(&b'/');
                self.tree.unlink(dir, name);
                let inode = self.tree.insert(dir, name, NO_META, Content::Inline(b""));
                let inode = inode.map_err(|e| e.to_string())?;
                let marked = self.tree.set_xattrs(inode, [(LOWER_LINK, path.as_slice())]);
                marked.map_err(|e| e.to_string())?;
            }
        }
        Ok(Made::Done)
    }

    fn set_xattrs(&mut self, inode: InodeId, entry: &Entry) -> Result<(), String> {
        let kept = entry.xattrs.iter().filter(|(name, _)| in_namespace(name));
        self.foreign_xattrs += (entry.xattrs.len() - kept.clone().count()) as u64;
        self.tree
            .set_xattrs(inode, kept.map(|(name, value)| (name.as_slice(), value.as_slice())))
            .map_err(|e| e.to_string())
    }
}

/// A path that is followed through directories, and symbolic links within the root of the tree.
struct Steps {
    dir: InodeId,
    /// Names to come, last first. `..` of a link stays until it is known what it is relative to.
    todo: Vec<Vec<u8>>,
    links: usize,
}

impl Steps {
    fn new(dir: InodeId, path: &[Vec<u8>]) -> Self {
        Self { dir, todo: path.iter().rev().cloned().collect(), links: 0 }
    }

    /// Goes on to the first name that does not exist, or to the end: `None`.
    fn next_missing(&mut self, tree: &Tree) -> Result<Option<Vec<u8>>, String> {
        while let Some(name) = self.todo.pop() {
            if name == b".." {
                self.dir = tree.parent(self.dir).unwrap_or(self.dir);
                continue;
            }
            // Of the path, or of a symbolic link.
            if name.starts_with(WHITEOUT) {
                return Err(format!("{:?} is a whiteout and cannot be a directory", shown(&name)));
            }
            let Some(next) = tree.lookup(self.dir, &name) else { return Ok(Some(name)) };
            match tree.content(next) {
                Content::Directory => self.dir = next,
                Content::Symlink(target) => {
                    self.links += 1;
                    if self.links > SYMLINKS_MAX {
                        return Err(format!("too many symbolic links at {:?}", shown(&name)));
                    }
                    let names = target.split(|&b| b == b'/').filter(|p| !matches!(*p, b"" | b"."));
                    self.todo.extend(names.rev().map(<[u8]>::to_vec));
                    if target.starts_with(b"/") {
                        self.dir = tree.root();
                    }
                }
                _ => return Err(format!("{:?} is not a directory", shown(&name))),
            }
        }
        Ok(None)
    }
}

/// The directory at a path; `None` if there is none. The error says what is in the way.
pub(crate) fn walk(
    tree: &Tree,
    from: InodeId,
    path: &[Vec<u8>],
) -> Result<Option<InodeId>, String> {
    let mut steps = Steps::new(from, path);
    Ok(steps.next_missing(tree)?.is_none().then_some(steps.dir))
}

/// As [`walk`], making what is missing; with `mark`, as [`IMPLICIT`] directories.
pub(crate) fn make_dirs(
    tree: &mut Tree,
    from: InodeId,
    path: &[Vec<u8>],
    mark: bool,
) -> Result<InodeId, String> {
    // Nearly always all parents are there and are directories: no allocation for those.
    let mut dir = from;
    let mut rest = path;
    while let Some((name, after)) = rest.split_first() {
        match tree.lookup(dir, name) {
            Some(next) if tree.is_dir(next) => (dir, rest) = (next, after),
            _ => break,
        }
    }
    let mut steps = Steps::new(dir, rest);
    while let Some(name) = steps.next_missing(tree)? {
        let new = tree.insert(steps.dir, &name, DEFAULT_DIR, Content::Directory);
        steps.dir = new.map_err(|e| e.to_string())?;
        if mark {
            tree.set_xattrs(steps.dir, [(IMPLICIT, &b""[..])]).map_err(|e| e.to_string())?;
        }
    }
    Ok(steps.dir)
}

/// Splits a path into names; refuses `..`, NUL, and names or paths that are too long.
fn split(path: &[u8], parts: &mut Vec<Vec<u8>>) -> Result<(), String> {
    parts.clear();
    if path.len() > PATH_MAX {
        return Err(format!("a path of {} bytes is longer than {PATH_MAX}", path.len()));
    }
    for part in path.split(|&b| b == b'/') {
        match part {
            b"" | b"." => {}
            b".." => return Err("a path with `..` could leave the root".into()),
            _ if part.contains(&0) => return Err("a name with a NUL".into()),
            _ if part.len() > cofolio_erofs::tree::NAME_MAX => {
                return Err(format!("a name of {} bytes is longer than 255", part.len()));
            }
            _ => parts.push(part.to_vec()),
        }
    }
    Ok(())
}

fn meta_of(entry: &Entry) -> Meta {
    Meta {
        mode: u32::from(entry.mode),
        uid: entry.uid,
        gid: entry.gid,
        mtime: entry.mtime,
        mtime_nsec: entry.mtime_nsec,
    }
}

/// A device number as the kernel's `new_encode_dev` puts it: 12 bits of major, 20 bits of minor.
fn device((major, minor): (u32, u32)) -> Result<u32, String> {
    if major >= 1 << 12 || minor >= 1 << 20 {
        return Err(format!("there is no device {major}:{minor} in Linux"));
    }
    Ok((minor & 0xff) | (major << 8) | ((minor & !0xff) << 12))
}

/// Whether Linux can hold an attribute of that name (xattr(7)). containerd drops others too.
fn in_namespace(name: &[u8]) -> bool {
    let user = [&b"user."[..], b"trusted.", b"security."]
        .iter()
        .any(|prefix| name.len() > prefix.len() && name.starts_with(prefix));
    user || matches!(name, b"system.posix_acl_access" | b"system.posix_acl_default")
}
