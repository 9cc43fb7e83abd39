//! Two images path by path: both are walked at once, in order, so that neither is held in memory.

use std::cmp::Ordering;

use cofolio_erofs::read::{Image, Inode, Walk, Xattr};
use cofolio_store::BoxError;
use serde::Serialize;

use crate::compose::named_objects;
use crate::stored::StoredImage;

/// Attributes that say where content is, which is compared as content.
const ABOUT_CONTENT: [&[u8]; 2] = [b"trusted.overlay.redirect", b"trusted.overlay.metacopy"];

/// Paths by what happened to them from the first image to the second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PathCounts {
    /// The same in every respect.
    pub same: u64,
    /// Only the second image has them.
    pub added: u64,
    /// Only the first has them.
    pub removed: u64,
    /// Type, content, link target or device number differ.
    pub content: u64,
    /// Only mode, owner, times, attributes or link counts differ.
    pub metadata: u64,
    /// Those of `metadata` where nothing but the modification time differs.
    pub only_mtime: u64,
}

/// What happened to a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ChangeKind {
    /// Only the second image has it.
    Added,
    /// Only the first has it.
    Removed,
    /// It is something else, or holds something else.
    Content,
    /// The same content under other metadata.
    Metadata,
}

/// In what respect a path differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Aspect {
    /// File type.
    Type,
    /// Content, link target or device number.
    Content,
    /// Permissions.
    Mode,
    /// User or group.
    Owner,
    /// Modification time.
    Mtime,
    /// Extended attributes.
    Xattrs,
    /// Number of hard links.
    Links,
}

impl Aspect {
    /// The word for it, as in JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Type => "type",
            Self::Content => "content",
            Self::Mode => "mode",
            Self::Owner => "owner",
            Self::Mtime => "mtime",
            Self::Xattrs => "xattrs",
            Self::Links => "links",
        }
    }
}

/// A path that is not the same in both images.
#[derive(Clone, Copy, Debug)]
pub struct Change<'a> {
    /// Absolute path.
    pub path: &'a [u8],
    /// What happened.
    pub kind: ChangeKind,
    /// In what respects it differs; empty unless both images have it.
    pub aspects: &'a [Aspect],
    /// The inode in the first image.
    pub a: Option<&'a Inode>,
    /// The inode in the second.
    pub b: Option<&'a Inode>,
}

type Stored<'f> = Image<StoredImage<'f>>;

/// An error, and the image that it is about.
type OfSide = (usize, BoxError);

/// Walks both images. `see` is called for every name of either, `change` for what differs.
pub(super) fn merge(
    images: [&Stored<'_>; 2],
    see: &mut dyn FnMut(usize, &Inode) -> Result<(), BoxError>,
    change: &mut dyn FnMut(&Change<'_>),
) -> Result<PathCounts, OfSide> {
    let mut counts = PathCounts::default();
    let mut heads = [Head::new(images[0], 0)?, Head::new(images[1], 1)?];
    let mut told = |path: &[u8], a: Option<&Inode>, b: Option<&Inode>| -> Result<(), OfSide> {
        let mut aspects = Vec::new();
        let kind = match (a, b) {
            (None, _) => ChangeKind::Added,
            (_, None) => ChangeKind::Removed,
            (Some(a), Some(b)) => {
                aspects = compare(images, [a, b])?;
                match aspects[..] {
                    [] => {
                        counts.same += 1;
                        return Ok(());
                    }
                    [Aspect::Type | Aspect::Content, ..] => ChangeKind::Content,
                    _ => ChangeKind::Metadata,
                }
            }
        };
        match kind {
            ChangeKind::Added => counts.added += 1,
            ChangeKind::Removed => counts.removed += 1,
            ChangeKind::Content => counts.content += 1,
            ChangeKind::Metadata => counts.metadata += 1,
        }
        counts.only_mtime += u64::from(aspects == [Aspect::Mtime]);
        change(&Change { path, kind, aspects: &aspects, a, b });
        Ok(())
    };
    let root = |side: usize| images[side].root().map_err(|error| (side, error.into()));
    told(b"/", Some(&root(0)?), Some(&root(1)?))?;
    let mut step = |head: &mut Head<'_, '_>| -> Result<(), OfSide> {
        if let Some(inode) = &head.inode {
            see(head.side, inode).map_err(|error| (head.side, error))?;
        }
        head.advance()
    };
    loop {
        let [a, b] = &mut heads;
        let order = match (a.inode, b.inode) {
            (None, None) => return Ok(counts),
            (Some(_), None) => Ordering::Less,
            (None, Some(_)) => Ordering::Greater,
            (Some(_), Some(_)) => order(&a.path, &b.path),
        };
        let of_a = a.inode.filter(|_| order != Ordering::Greater);
        let of_b = b.inode.filter(|_| order != Ordering::Less);
        let path = if of_a.is_some() { &a.path } else { &b.path };
        told(path, of_a.as_ref(), of_b.as_ref())?;
        if of_a.is_some() {
            step(a)?;
        }
        if of_b.is_some() {
            step(b)?;
        }
    }
}

struct Head<'i, 'f> {
    image: &'i Stored<'f>,
    side: usize,
    walk: Walk<'i, StoredImage<'f>>,
    path: Vec<u8>,
    /// `None` at the end.
    inode: Option<Inode>,
}

impl<'i, 'f> Head<'i, 'f> {
    fn new(image: &'i Stored<'f>, side: usize) -> Result<Self, OfSide> {
        let walk = image.walk().map_err(|error| (side, error.into()))?;
        let mut head = Self { image, side, walk, path: Vec::new(), inode: None };
        head.advance()?;
        Ok(head)
    }

    fn advance(&mut self) -> Result<(), OfSide> {
        self.inode = None;
        while let Some(found) = self.walk.advance().map_err(|error| (self.side, error.into()))? {
            // One pass needs sorted names, and so does the kernel.
            if order(&self.path, found.path) != Ordering::Less {
                let what = format!(
                    "the names of a directory are not in order at `{}`",
                    String::from_utf8_lossy(found.path)
                );
                return Err((self.side, what.into()));
            }
            self.path.clear();
            self.path.extend_from_slice(found.path);
            if !named_objects::is_added(self.image, &found.inode) {
                self.inode = Some(found.inode);
                break;
            }
        }
        Ok(())
    }
}

/// The order in which walks meet paths: by components, so `a/b` is before `a.c`.
fn order(a: &[u8], b: &[u8]) -> Ordering {
    // Names hold no NUL, so `/` comes before every byte of a name.
    let key = |byte: &u8| if *byte == b'/' { 0 } else { *byte };
    a.iter().map(key).cmp(b.iter().map(key))
}

/// In what respects two inodes differ, in the order of [`Aspect`].
fn compare(images: [&Stored<'_>; 2], inodes: [&Inode; 2]) -> Result<Vec<Aspect>, OfSide> {
    let [a, b] = inodes;
    let mut aspects = Vec::new();
    let kind = |inode: &Inode| inode.mode & 0o170_000;
    let mut note = |differs: bool, aspect| {
        if differs {
            aspects.push(aspect);
        }
    };
    if kind(a) != kind(b) {
        note(true, Aspect::Type);
    } else {
        let holds = |side: usize| holds(images[side], inodes[side]).map_err(|error| (side, error));
        note(a.rdev != b.rdev || holds(0)? != holds(1)?, Aspect::Content);
    }
    note((a.mode ^ b.mode) & 0o7777 != 0, Aspect::Mode);
    note((a.uid, a.gid) != (b.uid, b.gid), Aspect::Owner);
    note((a.mtime, a.mtime_nsec) != (b.mtime, b.mtime_nsec), Aspect::Mtime);
    let xattrs = |side: usize| -> Result<Vec<Xattr>, OfSide> {
        let xattrs = images[side].xattrs(inodes[side]);
        let mut xattrs = xattrs.map_err(|error| (side, error.into()))?;
        xattrs.retain(|xattr| !ABOUT_CONTENT.contains(&xattr.name.as_slice()));
        xattrs.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(xattrs)
    };
    note(xattrs(0)? != xattrs(1)?, Aspect::Xattrs);
    // A directory's link count follows from its names.
    note(!a.is_dir() && !b.is_dir() && a.nlink != b.nlink, Aspect::Links);
    Ok(aspects)
}

/// What an inode holds: equal values are equal contents.
#[derive(PartialEq, Eq)]
enum Holds {
    Nothing,
    Object(cofolio_store::Digest),
    Bytes(Vec<u8>),
}

/// Most bytes of a file that an image of ours holds itself: a block.
const INLINE_MAX: usize = 1 << 16;

fn holds(image: &Stored<'_>, inode: &Inode) -> Result<Holds, BoxError> {
    if inode.is_symlink() {
        return Ok(Holds::Bytes(image.readlink(inode)?));
    }
    if !inode.is_file() {
        return Ok(Holds::Nothing);
    }
    if let Some(object) = named_objects::object_of(image, inode)? {
        return Ok(Holds::Object(object));
    }
    let bytes = image.read_small(inode, INLINE_MAX)?;
    Ok(Holds::Bytes(bytes.ok_or("a file's content is neither small nor an object")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `a.c` is before `a/b` for bytes, since `.` is before `/`; a walk meets all of `a` first.
    #[test]
    fn paths_are_in_the_order_of_a_walk() {
        let walked: [&[u8]; 7] = [b"", b"/a", b"/a/b", b"/a/b/c", b"/a/b.c", b"/a.c", b"/b"];
        for (i, a) in walked.iter().enumerate() {
            for (j, b) in walked.iter().enumerate() {
                assert_eq!(order(a, b), i.cmp(&j), "{i} {j}");
            }
        }
    }
}
