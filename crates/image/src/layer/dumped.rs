//! A layer as the merge takes it: its dump, to be read as a stream, and a tree of its marks.
//!
//! Only the merged tree may be as large as the image, so a layer's own tree is dropped once its
//! dump is written. A small tree keeps what the merge must know before the first entry: whiteouts,
//! links into lower layers, and the directories above them.

use std::io::{self, BufRead, BufReader, Read};

use cofolio_erofs::dump::{DumpError, Record, Records, What};
use cofolio_erofs::tree::{Content, InodeId, Meta, Tree, TreeError};
use cofolio_store::StoredFile;

use crate::layer::{DEFAULT_DIR, IMPLICIT, LOWER_LINK, WHITEOUT};

/// Metadata of marks, and of inodes whose description is still to come.
pub(crate) const NO_META: Meta = Meta { mode: 0, uid: 0, gid: 0, mtime: 0, mtime_nsec: 0 };

#[derive(Debug)]
pub(crate) enum LayerDump {
    /// Of a layer that is in the store or staged for it.
    File(StoredFile),
    /// The disk is full; the import goes on only to say how much is missing.
    Memory(Vec<u8>),
}

/// One layer, ready to be merged.
pub(crate) struct DumpedLayer {
    dump: LayerDump,
    /// Whiteouts and links into lower layers in their directories, [`IMPLICIT`] ones marked.
    pub(crate) marks: Tree,
}

impl LayerDump {
    fn records(&self) -> io::Result<Records<impl BufRead + '_>> {
        let reader: Box<dyn Read + '_> = match self {
            Self::File(file) => Box::new(file.reader()),
            Self::Memory(bytes) => Box::new(&bytes[..]),
        };
        let decoder = zstd::stream::read::Decoder::new(reader)?;
        Ok(Records::new(BufReader::with_capacity(256 << 10, decoder)))
    }
}

impl DumpedLayer {
    /// Reads the whole dump once.
    pub(crate) fn read(dump: LayerDump) -> io::Result<Self> {
        let mut marks = Tree::new(DEFAULT_DIR);
        let mut records = dump.records()?;
        let mut dirs = Dirs::new(Dir { implicit: false, mark: Some(marks.root()) });
        while let Some(record) = records.next().map_err(dump_error)? {
            if record.path == b"/" {
                if is_implicit(&record) {
                    let root = marks.root();
                    marks.set_xattrs(root, [(IMPLICIT, &b""[..])]).map_err(tree_error)?;
                }
                continue;
            }
            let name = dirs.enter_parent(record.path).ok_or_else(not_in_order)?;
            let target = lower_link(&record);
            if name.starts_with(WHITEOUT) || target.is_some() {
                let dir = mark_dirs(&mut marks, &mut dirs).map_err(tree_error)?;
                let mark = marks.insert(dir, name, NO_META, Content::Inline(b""));
                let mark = mark.map_err(tree_error)?;
                if let Some(target) = target {
                    marks.set_xattrs(mark, [(LOWER_LINK, target)]).map_err(tree_error)?;
                }
            } else if is_dir(&record) {
                dirs.enter(name, Dir { implicit: is_implicit(&record), mark: None });
            }
        }
        drop(records);
        Ok(Self { dump, marks })
    }

    /// The entries, each directory before what it holds.
    pub(crate) fn records(&self) -> io::Result<Records<impl BufRead + '_>> {
        self.dump.records()
    }
}

pub(crate) fn is_dir(record: &Record<'_>) -> bool {
    matches!(record.what, What::Inode { content: Content::Directory, .. })
}

pub(crate) fn is_implicit(record: &Record<'_>) -> bool {
    xattr(record, IMPLICIT).is_some()
}

pub(crate) fn lower_link<'a>(record: &Record<'a>) -> Option<&'a [u8]> {
    xattr(record, LOWER_LINK)
}

fn xattr<'a>(record: &Record<'a>, name: &[u8]) -> Option<&'a [u8]> {
    match &record.what {
        What::Inode { xattrs, .. } => xattrs.iter().find(|(n, _)| *n == name).map(|&(_, v)| v),
        What::Link(_) => None,
    }
}

/// An open directory of the layer, for the marks.
#[derive(Clone, Copy)]
struct Dir {
    implicit: bool,
    /// The same directory in the tree of marks, once it is there.
    mark: Option<InodeId>,
}

/// Makes the open directories in the tree of marks; returns the last one.
fn mark_dirs(marks: &mut Tree, dirs: &mut Dirs<Dir>) -> Result<InodeId, TreeError> {
    let mut above = marks.root();
    let Dirs { path, open } = dirs;
    let mut start = 0;
    for (end, dir) in open {
        above = match dir.mark {
            Some(mark) => mark,
            None => {
                let name = &path[start + 1..*end];
                let mark = marks.insert(above, name, DEFAULT_DIR, Content::Directory)?;
                if dir.implicit {
                    marks.set_xattrs(mark, [(IMPLICIT, &b""[..])])?;
                }
                *dir.mark.insert(mark)
            }
        };
        start = *end;
    }
    Ok(above)
}

/// The directories above the entry at hand, while a dump is read from its start to its end.
pub(crate) struct Dirs<T> {
    /// Path of the last one; the root's is empty.
    path: Vec<u8>,
    /// Where the path of each ends, and what there is to know about it. Never empty.
    open: Vec<(usize, T)>,
}

impl<T> Dirs<T> {
    pub(crate) fn new(root: T) -> Self {
        Self { path: Vec::new(), open: vec![(0, root)] }
    }

    /// Leaves directories until the last one is the one that holds `path`; returns the name in it.
    /// `None` if it is not open: then the dump is not depth first, or the directory is missing.
    pub(crate) fn enter_parent<'p>(&mut self, path: &'p [u8]) -> Option<&'p [u8]> {
        let slash = path.iter().rposition(|&b| b == b'/')?;
        while let Some(&(end, _)) = self.open.last() {
            self.path.truncate(end);
            if self.path == path[..slash] {
                return Some(&path[slash + 1..]);
            }
            if end == 0 {
                break;
            }
            self.open.pop();
        }
        None
    }

    pub(crate) fn enter(&mut self, name: &[u8], dir: T) {
        self.path.push(b'/');
        self.path.extend_from_slice(name);
        self.open.push((self.path.len(), dir));
    }

    pub(crate) fn last(&self) -> Option<&T> {
        self.open.last().map(|(_, dir)| dir)
    }
}

pub(crate) fn dump_error(error: DumpError) -> io::Error {
    match error {
        DumpError::Read(error) => error,
        other => io::Error::new(io::ErrorKind::InvalidData, other),
    }
}

fn tree_error(error: TreeError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

pub(crate) fn not_in_order() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "a layer's dump whose entries are out of order")
}
