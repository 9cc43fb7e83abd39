//! A tree as a tar archive: the layer of an image that was imported from a directory and has none.
//!
//! The bytes depend on the tree alone: depth first, names sorted, PAX records only where the old header
//! cannot say it. Everything that the tree says is in it, and comes back with an import.

use std::collections::HashMap;

use cofolio_erofs::tree::{Content, InodeId, Meta, Tree};
use cofolio_store::task::Cancel;
use cofolio_store::{Digest, Domain};

use super::assemble::{Object, Sink};
use super::error::ExportError;
use crate::layer::WHITEOUT;
use crate::layer::tar::{BLOCK, pad};

/// Room for names in a header, in bytes.
const NAME_MAX: usize = 100;
/// Largest owner that a header can say: seven octal digits.
const ID_MAX: u32 = 0o7_777_777;
/// Largest size and time: eleven octal digits.
const WORD_MAX: u64 = 0o77_777_777_777;

/// Header of a regular file in an archive that holds an image.
pub(crate) fn header(name: &str, size: u64) -> [u8; BLOCK] {
    let meta = Meta { mode: 0o644, uid: 0, gid: 0, mtime: 0, mtime_nsec: 0 };
    Head { name: name.as_bytes(), flag: b'0', meta, size, link: b"", device: 0 }.block()
}

/// Writes the archive of a tree.
///
/// # Errors
/// [`ExportError::Entry`] for what no layer can hold, [`ExportError::Object`], and those of the sink.
pub(crate) fn write(
    domain: &Domain,
    tree: &Tree,
    (user, cancel): (&str, &Cancel),
    sink: &mut Sink<'_>,
) -> Result<(), ExportError> {
    let mut firsts: HashMap<InodeId, Vec<u8>> = HashMap::new();
    let root = tree.root();
    entry(tree, root, b"./", b'5', b"", 0, sink)?;
    for visit in tree.walk() {
        let inode = visit.inode;
        let path = tree.path(visit.entry);
        let fail = |what: &str| ExportError::Entry {
            path: String::from_utf8_lossy(&path).into_owned(),
            what: what.to_owned(),
        };
        if visit.name.starts_with(WHITEOUT) {
            return Err(fail("a layer means the removal of another file by such a name"));
        }
        let mut name = path.strip_prefix(b"/").unwrap_or(&path).to_vec();
        if !tree.is_dir(inode) && tree.nlink(inode) > 1 {
            if let Some(first) = firsts.get(&inode) {
                let head = Head {
                    name: &name,
                    flag: b'1',
                    meta: tree.meta(inode),
                    size: 0,
                    link: first,
                    device: 0,
                };
                head.write(std::iter::empty(), sink).map_err(|what| what.or(&fail))?;
                continue;
            }
            firsts.insert(inode, name.clone());
        }
        match tree.content(inode) {
            Content::Directory => {
                name.push(b'/');
                entry(tree, inode, &name, b'5', b"", 0, sink)?;
            }
            Content::Symlink(target) => entry(tree, inode, &name, b'2', target, 0, sink)?,
            Content::CharDevice(_) => entry(tree, inode, &name, b'3', b"", 0, sink)?,
            Content::BlockDevice(_) => entry(tree, inode, &name, b'4', b"", 0, sink)?,
            Content::Fifo => entry(tree, inode, &name, b'6', b"", 0, sink)?,
            Content::Socket => return Err(fail("tar has no sockets")),
            Content::Inline(bytes) => {
                let size = bytes.len() as u64;
                entry(tree, inode, &name, b'0', b"", size, sink)?;
                sink(bytes)?;
                sink(&[0; BLOCK][..pad(size)])?;
            }
            Content::External { size, digest, .. } => {
                let digest = *digest.ok_or_else(|| fail("the image does not name its object"))?;
                entry(tree, inode, &name, b'0', b"", size, sink)?;
                let mut object = Object::open(domain, Digest(digest), size, (user, cancel))?;
                object.take(size, Some(&mut *sink))?;
                object.check()?;
                sink(&[0; BLOCK][..pad(size)])?;
            }
        }
    }
    sink(&[0; 2 * BLOCK])
}

fn entry(
    tree: &Tree,
    inode: InodeId,
    name: &[u8],
    flag: u8,
    link: &[u8],
    size: u64,
    sink: &mut Sink<'_>,
) -> Result<(), ExportError> {
    let device = match tree.content(inode) {
        Content::CharDevice(device) | Content::BlockDevice(device) => device,
        _ => 0,
    };
    let head = Head { name, flag, meta: tree.meta(inode), size, link, device };
    head.write(tree.xattrs(inode), sink).map_err(|what| {
        what.or(&|what| ExportError::Entry {
            path: String::from_utf8_lossy(name).into_owned(),
            what: what.to_owned(),
        })
    })
}

/// What an entry says, as the tree has it.
struct Head<'a> {
    name: &'a [u8],
    flag: u8,
    meta: Meta,
    size: u64,
    link: &'a [u8],
    /// As `new_encode_dev` puts it: 12 bits of major, 20 bits of minor.
    device: u32,
}

/// Why an entry was not written.
enum Failed {
    What(&'static str),
    Sink(ExportError),
}

impl Failed {
    fn or(self, error: &dyn Fn(&str) -> ExportError) -> ExportError {
        match self {
            Self::What(what) => error(what),
            Self::Sink(error) => error,
        }
    }
}

impl Head<'_> {
    /// The header, with PAX records before it for what it cannot say.
    fn write<'x>(
        &self,
        xattrs: impl Iterator<Item = (&'x [u8], &'x [u8])>,
        sink: &mut Sink<'_>,
    ) -> Result<(), Failed> {
        let mut pax = Vec::new();
        let Meta { uid, gid, mtime, mtime_nsec, .. } = self.meta;
        if self.name.len() > NAME_MAX {
            record(&mut pax, b"path", self.name);
        }
        if self.link.len() > NAME_MAX {
            record(&mut pax, b"linkpath", self.link);
        }
        for (key, id) in [("uid", uid), ("gid", gid)] {
            if id > ID_MAX {
                record(&mut pax, key.as_bytes(), id.to_string().as_bytes());
            }
        }
        if self.size > WORD_MAX {
            record(&mut pax, b"size", self.size.to_string().as_bytes());
        }
        if mtime_nsec != 0 || !u64::try_from(mtime).is_ok_and(|time| time <= WORD_MAX) {
            record(&mut pax, b"mtime", decimal_time(mtime, mtime_nsec).as_bytes());
        }
        for (name, value) in xattrs {
            if name.contains(&b'=') {
                return Err(Failed::What("tar cannot hold an attribute with `=` in its name"));
            }
            record(&mut pax, &[b"SCHILY.xattr.", name].concat(), value);
        }
        if !pax.is_empty() {
            let size = pax.len() as u64;
            let meta = Meta { mode: 0o644, uid: 0, gid: 0, mtime: 0, mtime_nsec: 0 };
            let name = b"././@PaxHeader";
            let head = Head { name, flag: b'x', meta, size, link: b"", device: 0 };
            pax.resize(pax.len() + pad(size), 0);
            sink(&head.block()).and_then(|()| sink(&pax)).map_err(Failed::Sink)?;
        }
        sink(&self.block()).map_err(Failed::Sink)
    }

    /// The header itself; what does not fit is cut, or 0.
    fn block(&self) -> [u8; BLOCK] {
        let Meta { mode, uid, gid, mtime, .. } = self.meta;
        let mut block = [0u8; BLOCK];
        let mut put = |at: usize, bytes: &[u8]| block[at..at + bytes.len()].copy_from_slice(bytes);
        let fitting = |id: u32| if id > ID_MAX { 0 } else { id };
        let time = u64::try_from(mtime).ok().filter(|&time| time <= WORD_MAX).unwrap_or(0);
        let size = if self.size > WORD_MAX { 0 } else { self.size };
        put(0, &self.name[..self.name.len().min(NAME_MAX)]);
        put(100, format!("{:07o}\0", mode & 0o7777).as_bytes());
        put(108, format!("{:07o}\0", fitting(uid)).as_bytes());
        put(116, format!("{:07o}\0", fitting(gid)).as_bytes());
        put(124, format!("{size:011o}\0").as_bytes());
        put(136, format!("{time:011o}\0").as_bytes());
        put(148, b"        ");
        put(156, &[self.flag]);
        put(157, &self.link[..self.link.len().min(NAME_MAX)]);
        put(257, b"ustar\x0000");
        let (major, minor) =
            ((self.device >> 8) & 0xfff, (self.device & 0xff) | ((self.device >> 12) & 0xf_ff00));
        put(329, format!("{major:07o}\0").as_bytes());
        put(337, format!("{minor:07o}\0").as_bytes());
        let sum: u32 = block.iter().map(|&byte| u32::from(byte)).sum();
        block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        block
    }
}

/// Adds `<length> <key>=<value>\n`, where the length counts itself.
fn record(pax: &mut Vec<u8>, key: &[u8], value: &[u8]) {
    let body = key.len() + value.len() + 3;
    let mut length = body + 1;
    while length != body + length.to_string().len() {
        length = body + length.to_string().len();
    }
    pax.extend_from_slice(format!("{length} ").as_bytes());
    pax.extend_from_slice(key);
    pax.push(b'=');
    pax.extend_from_slice(value);
    pax.push(b'\n');
}

/// Seconds with their fraction. Before 1970 the fraction still counts forward in `Meta`, backward here.
fn decimal_time(seconds: i64, nanoseconds: u32) -> String {
    let (sign, whole, part) = match (seconds < 0, nanoseconds) {
        (true, 1..) => ("-", (seconds + 1).unsigned_abs(), 1_000_000_000 - nanoseconds),
        (true, 0) => ("-", seconds.unsigned_abs(), 0),
        (false, _) => ("", seconds.unsigned_abs(), nanoseconds),
    };
    if part == 0 {
        return format!("{sign}{whole}");
    }
    let digits = format!("{part:09}");
    format!("{sign}{whole}.{}", digits.trim_end_matches('0'))
}
