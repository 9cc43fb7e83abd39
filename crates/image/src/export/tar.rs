//! A tree as a tar archive: the layer of an image that was imported from a directory and has none.
//!
//! The bytes depend on the tree and the holes of the store's objects: depth first, names sorted,
//! PAX records where the header does not do. An import restores all that the tree says.

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
    Head { meta: PLAIN, size, ..Head::of(b'0', name.as_bytes()) }.block()
}

/// Writes the archive of a tree. A file with large holes is sparse in GNU's PAX format 1.0.
pub(crate) fn write(
    domain: &Domain,
    tree: &Tree,
    (user, cancel): (&str, &Cancel),
    sink: &mut Sink<'_>,
) -> Result<(), ExportError> {
    let mut firsts: HashMap<InodeId, Vec<u8>> = HashMap::new();
    let root = tree.root();
    Head { meta: tree.meta(root), ..Head::of(b'5', b"./") }.write(tree.xattrs(root), sink)?;
    for visit in tree.walk() {
        let inode = visit.inode;
        let path = tree.path(visit.entry);
        let mut name = path.strip_prefix(b"/").unwrap_or(&path).to_vec();
        if visit.name.starts_with(WHITEOUT) {
            return Err(refused(&name, "a layer means the removal of another file by such a name"));
        }
        if tree.is_dir(inode) {
            name.push(b'/');
        } else if tree.nlink(inode) > 1 {
            if let Some(first) = firsts.get(&inode) {
                let head = Head { meta: tree.meta(inode), link: first, ..Head::of(b'1', &name) };
                head.write(std::iter::empty(), sink)?;
                continue;
            }
            firsts.insert(inode, name.clone());
        }
        let head = |flag| Head { meta: tree.meta(inode), ..Head::of(flag, &name) };
        let xattrs = tree.xattrs(inode);
        match tree.content(inode) {
            Content::Directory => head(b'5').write(xattrs, sink)?,
            Content::Symlink(link) => Head { link, ..head(b'2') }.write(xattrs, sink)?,
            Content::CharDevice(device) => Head { device, ..head(b'3') }.write(xattrs, sink)?,
            Content::BlockDevice(device) => Head { device, ..head(b'4') }.write(xattrs, sink)?,
            Content::Fifo => head(b'6').write(xattrs, sink)?,
            Content::Socket => return Err(refused(&name, "tar has no sockets")),
            Content::Inline(bytes) => {
                let size = bytes.len() as u64;
                Head { size, ..head(b'0') }.write(xattrs, sink)?;
                sink(bytes)?;
                sink(&[0; BLOCK][..pad(size)])?;
            }
            Content::External { size, digest, .. } => {
                let digest =
                    digest.ok_or_else(|| refused(&name, "the image does not name its object"))?;
                let mut object = Object::open(domain, Digest(*digest), size, (user, cancel))?;
                let written = match object.sparse_extents()? {
                    None => {
                        Head { size, ..head(b'0') }.write(xattrs, sink)?;
                        object.take(size, Some(&mut *sink))?;
                        size
                    }
                    Some(extents) => {
                        let map = sparse_map(&extents, size);
                        let data: u64 = extents.iter().map(|(_, length)| length).sum();
                        let written = map.len() as u64 + data;
                        let head = Head { size: written, sparse: Some(size), ..head(b'0') };
                        head.write(xattrs, sink)?;
                        sink(&map)?;
                        let mut at = 0;
                        for (offset, length) in extents {
                            object.take(offset - at, None)?;
                            object.take(length, Some(&mut *sink))?;
                            at = offset + length;
                        }
                        object.take(size - at, None)?;
                        written
                    }
                };
                object.check()?;
                sink(&[0; BLOCK][..pad(written)])?;
            }
        }
    }
    sink(&[0; 2 * BLOCK])
}

/// The map at the head of a sparse file's data: numbers in lines, padded to a block. As GNU tar
/// does it, an empty extent at the end says how large the file is.
fn sparse_map(extents: &[(u64, u64)], size: u64) -> Vec<u8> {
    let mut map = format!("{}\n", extents.len() + 1);
    for (offset, length) in extents.iter().chain([&(size, 0)]) {
        map.push_str(&format!("{offset}\n{length}\n"));
    }
    let mut map = map.into_bytes();
    map.resize(map.len().next_multiple_of(BLOCK), 0);
    map
}

fn refused(name: &[u8], what: &str) -> ExportError {
    let path = format!("/{}", String::from_utf8_lossy(name));
    ExportError::Entry { path, what: what.to_owned() }
}

/// Metadata of entries that are no files of the image.
const PLAIN: Meta = Meta { mode: 0o644, uid: 0, gid: 0, mtime: 0, mtime_nsec: 0 };

/// What an entry says, as the tree has it.
struct Head<'a> {
    name: &'a [u8],
    flag: u8,
    meta: Meta,
    /// Bytes that follow in the archive.
    size: u64,
    /// Of a sparse file: the size of the file itself.
    sparse: Option<u64>,
    link: &'a [u8],
    /// As `new_encode_dev` puts it: 12 bits of major, 20 bits of minor.
    device: u32,
}

impl<'a> Head<'a> {
    fn of(flag: u8, name: &'a [u8]) -> Self {
        Self { name, flag, meta: PLAIN, size: 0, sparse: None, link: b"", device: 0 }
    }

    /// The header, with PAX records before it for what it cannot say.
    fn write<'x>(
        &self,
        xattrs: impl Iterator<Item = (&'x [u8], &'x [u8])>,
        sink: &mut Sink<'_>,
    ) -> Result<(), ExportError> {
        let mut pax = Vec::new();
        let Meta { uid, gid, mtime, mtime_nsec, .. } = self.meta;
        if let Some(size) = self.sparse {
            record(&mut pax, b"GNU.sparse.major", b"1");
            record(&mut pax, b"GNU.sparse.minor", b"0");
            record(&mut pax, b"GNU.sparse.name", self.name);
            record(&mut pax, b"GNU.sparse.realsize", size.to_string().as_bytes());
        }
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
                return Err(refused(self.name, "tar holds no attribute with `=` in its name"));
            }
            record(&mut pax, &[b"SCHILY.xattr.", name].concat(), value);
        }
        if !pax.is_empty() {
            let size = pax.len() as u64;
            pax.resize(pax.len() + pad(size), 0);
            sink(&Head { size, ..Head::of(b'x', b"././@PaxHeader") }.block())?;
            sink(&pax)?;
        }
        sink(&self.block())
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

/// Seconds with their fraction, which counts forward in `Meta` before 1970, backward here.
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
