//! Databases of bolt (bbolt), which containerd keeps its records in. Read only.
//!
//! ```text
//! file    page 0: meta | page 1: meta | pages: branches, leaves, free lists
//!
//! page    id u64 | flags u16 | count u16 | overflow u32 | elements… | keys and values…
//!           `overflow` is the number of further pages that it takes
//! branch  element: pos u32, key size u32, page u64                       pos counts from the element
//! leaf    element: flags u32, pos u32, key size u32, value size u32      flag 1: the value is a bucket
//! bucket  root page u64, sequence u64; root page 0: a leaf page follows, inside the value
//! meta    magic u32 | version u32 | page size u32 | flags u32 | root bucket | free list u64 |
//!           pages u64 | transaction u64 | FNV-1a of all that, u64
//! ```
//!
//! Numbers have the byte order of the machine. Source: bbolt, `page.go`, `db.go`, `bucket.go`.
//!
//! **Without the lock.** A writer locks its database, containerd as long as it runs. A transaction
//! leaves the pages of the one before it alone, but later ones reuse what it freed. So the file is
//! copied, and the copy is valid if no transaction was committed meanwhile, which the two meta
//! pages show.

use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::EngineError;

const MAGIC: u32 = 0xED0C_DAED;
const VERSION: u32 = 2;
/// Bytes of a page's header, of an element of either kind, of a bucket's header.
const HEAD: usize = 16;
/// Bytes of a meta page's fields behind the header; the last 8 are their checksum.
const META: usize = 64;
const IS_BRANCH: u16 = 1;
const IS_LEAF: u16 = 2;
const IS_META: u16 = 4;
const HOLDS_BUCKET: u32 = 1;
/// Page sizes that are looked for: that of the kernel that wrote it.
const PAGE_SIZES: Range<u32> = 9..21;
/// Buckets in buckets. containerd has 8.
const DEPTH_MAX: usize = 16;
/// Pages below one another. A page has two children at least.
const BELOW_MAX: usize = 24;
/// Largest database that is read, in bytes.
const FILE_MAX: u64 = 1 << 30;
/// How often a copy is tried while transactions go on.
const TRIES: u32 = 100;

/// A copy of a database, of one moment.
pub(super) struct Database {
    bytes: Vec<u8>,
    meta: Meta,
}

/// A bucket, with all that is in it, in the order of the keys.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Bucket<'a>(Vec<(&'a [u8], Value<'a>)>);

/// What a key stands for.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Value<'a> {
    Bytes(&'a [u8]),
    Bucket(Bucket<'a>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Meta {
    page_size: usize,
    root: u64,
    /// Pages that are in use, or were.
    pages: u64,
    transaction: u64,
}

/// The error names the damage in a database, and the page.
type Result<T> = std::result::Result<T, String>;

impl Database {
    /// Copies a database, past the page cache.
    pub(super) fn copy(path: &Path) -> std::result::Result<Self, EngineError> {
        let failed = |source| EngineError::Io { path: path.to_owned(), source };
        let wrong = |what| EngineError::Document { path: path.to_owned(), what };
        let file = super::open_regular(path).map_err(failed)?;
        let mut found = Err("transactions went on all the time while it was read".to_owned());
        for _ in 0..TRIES {
            let bytes = super::read_aside(&file, FILE_MAX).map_err(failed)?;
            found = Self::new(bytes);
            let Ok(copied) = &found else { continue };
            let mut head = vec![0; 2 * copied.meta.page_size];
            match file.read_exact_at(&mut head, 0) {
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                    return Err(wrong("it is cut off".to_owned()));
                }
                read => read.map_err(failed)?,
            }
            // A meta page that is being written has a wrong checksum; the other one is older.
            if newest(&head) == Ok(copied.meta) {
                return found.map_err(wrong);
            }
            found = Err("transactions went on all the time while it was read".to_owned());
        }
        found.map_err(wrong)
    }

    pub(super) fn new(bytes: Vec<u8>) -> Result<Self> {
        let meta = newest(&bytes)?;
        Ok(Self { bytes, meta })
    }

    /// Everything that is in it.
    pub(super) fn root(&self) -> Result<Bucket<'_>> {
        let mut walk =
            Walk { database: self, seen: vec![false; self.bytes.len() / self.meta.page_size] };
        walk.tree(self.meta.root, 0)
    }
}

impl<'a> Bucket<'a> {
    pub(super) fn entries(&self) -> impl Iterator<Item = (&'a [u8], &Value<'a>)> {
        self.0.iter().map(|(key, value)| (*key, value))
    }

    /// The buckets in it, by their keys as text.
    pub(super) fn buckets(&self) -> impl Iterator<Item = (String, &Bucket<'a>)> {
        self.entries().filter_map(|(key, value)| match value {
            Value::Bucket(bucket) => Some((String::from_utf8_lossy(key).into_owned(), bucket)),
            Value::Bytes(_) => None,
        })
    }

    pub(super) fn bucket(&self, key: &str) -> Option<&Bucket<'a>> {
        match self.get(key)? {
            Value::Bucket(bucket) => Some(bucket),
            Value::Bytes(_) => None,
        }
    }

    pub(super) fn bytes(&self, key: &str) -> Option<&'a [u8]> {
        match self.get(key)? {
            Value::Bytes(bytes) => Some(bytes),
            Value::Bucket(_) => None,
        }
    }

    /// A value that is text; empty if there is none.
    pub(super) fn text(&self, key: &str) -> String {
        String::from_utf8_lossy(self.bytes(key).unwrap_or_default()).into_owned()
    }

    fn get(&self, key: &str) -> Option<&Value<'a>> {
        self.0.iter().find(|(have, _)| *have == key.as_bytes()).map(|(_, value)| value)
    }
}

/// The valid meta page of the latest transaction. The second one's place depends on the page size,
/// which the first one tells, if it is whole.
fn newest(bytes: &[u8]) -> Result<Meta> {
    let first = meta_at(bytes, 0);
    let second = PAGE_SIZES.filter_map(|shift| {
        let at = 1 << shift;
        meta_at(bytes, at)
            .filter(|meta| meta.page_size == at && first.is_none_or(|first| first.page_size == at))
    });
    let newest = first.into_iter().chain(second).max_by_key(|meta| meta.transaction);
    newest.ok_or_else(|| "no database of bolt's: neither of its first two pages is whole".into())
}

fn meta_at(bytes: &[u8], at: usize) -> Option<Meta> {
    let page = bytes.get(at..at.checked_add(HEAD + META)?)?;
    let flags = u16_at(page, 8)?;
    let fields = &page[HEAD..];
    let (magic, version) = (u32_at(fields, 0)?, u32_at(fields, 4)?);
    let whole = u64_at(fields, META - 8)? == fnv1a(&fields[..META - 8]);
    if flags != IS_META || magic != MAGIC || version != VERSION || !whole {
        return None;
    }
    let page_size = u32_at(fields, 8)?;
    let known = PAGE_SIZES.into_iter().any(|shift| page_size == 1 << shift);
    Some(Meta {
        page_size: usize::try_from(page_size).ok().filter(|_| known)?,
        root: u64_at(fields, 16)?,
        pages: u64_at(fields, 40)?,
        transaction: u64_at(fields, 48)?,
    })
}

/// Takes each page once at most, so that it ends, whatever the pages say.
struct Walk<'a> {
    database: &'a Database,
    seen: Vec<bool>,
}

impl<'a> Walk<'a> {
    /// All that is in a bucket, from its root page on.
    fn tree(&mut self, root: u64, depth: usize) -> Result<Bucket<'a>> {
        let mut bucket = Bucket::default();
        self.page(root, depth, 0, &mut bucket)?;
        Ok(bucket)
    }

    fn page(&mut self, id: u64, depth: usize, below: usize, into: &mut Bucket<'a>) -> Result<()> {
        let wrong = |what: &str| format!("page {id}: {what}");
        if below > BELOW_MAX {
            return Err(wrong("too far below its root"));
        }
        let size = self.database.meta.page_size;
        let index = usize::try_from(id).ok().filter(|_| id > 1 && id < self.database.meta.pages);
        let index = index.ok_or_else(|| wrong("no page of the database"))?;
        let bytes = index.checked_mul(size).and_then(|at| self.database.bytes.get(at..));
        let bytes = bytes.unwrap_or_default();
        let pages = u32_at(bytes, 12).and_then(|more| usize::try_from(more).ok()?.checked_add(1));
        let part = pages.and_then(|pages| {
            let seen = self.seen.get_mut(index..index.checked_add(pages)?)?;
            Some((seen, bytes.get(..pages * size)?))
        });
        let (seen, page) = part.ok_or_else(|| wrong("behind the end of the file"))?;
        if seen.contains(&true) {
            return Err(wrong("there is more than one way to it"));
        }
        seen.fill(true);
        if u64_at(page, 0) != Some(id) {
            return Err(wrong("it says that it is another one"));
        }
        match u16_at(page, 8) {
            Some(IS_LEAF) => self.leaf(page, id, depth, into),
            Some(IS_BRANCH) => {
                let mut elements = Elements::new(page).map_err(|what| wrong(&what))?;
                for index in 0..elements.count {
                    elements.data(index, 0, &[4]).map_err(|what| wrong(&what))?;
                    let child = u64_at(elements.element(index), 8).unwrap_or_default();
                    self.page(child, depth, below + 1, into)?;
                }
                Ok(())
            }
            _ => Err(wrong("neither a branch nor a leaf")),
        }
    }

    /// A leaf page, in a page of its own or in a value of page `id`.
    fn leaf(&mut self, page: &'a [u8], id: u64, depth: usize, into: &mut Bucket<'a>) -> Result<()> {
        let wrong = |what: &str| format!("page {id}: {what}");
        let mut elements = Elements::new(page).map_err(|what| wrong(&what))?;
        for index in 0..elements.count {
            let (key, value) = elements.data(index, 4, &[8, 12]).map_err(|what| wrong(&what))?;
            let value = match u32_at(elements.element(index), 0) {
                Some(flags) if flags & HOLDS_BUCKET == 0 => Value::Bytes(value),
                _ if depth == DEPTH_MAX => return Err(wrong("too many buckets in buckets")),
                _ => Value::Bucket(self.bucket(value, id, depth + 1)?),
            };
            into.0.push((key, value));
        }
        Ok(())
    }

    fn bucket(&mut self, value: &'a [u8], id: u64, depth: usize) -> Result<Bucket<'a>> {
        let root = u64_at(value, 0).filter(|_| value.len() >= HEAD);
        let root = root.ok_or_else(|| format!("page {id}: a bucket of {} bytes", value.len()))?;
        if root != 0 {
            return self.tree(root, depth);
        }
        let page = &value[HEAD..];
        if u16_at(page, 8) != Some(IS_LEAF) || page.len() < HEAD {
            return Err(format!("page {id}: a bucket in it is no leaf"));
        }
        let mut bucket = Bucket::default();
        self.leaf(page, id, depth, &mut bucket)?;
        Ok(bucket)
    }
}

/// The elements of a page. What they point to is one behind the other, as bolt writes it: buckets
/// in buckets cannot be larger together than the page that they are in.
struct Elements<'a> {
    page: &'a [u8],
    count: usize,
    /// Behind the elements, and behind the data of those that are done.
    data: usize,
}

impl<'a> Elements<'a> {
    fn new(page: &'a [u8]) -> Result<Self> {
        let count = usize::from(u16_at(page, 10).unwrap_or_default());
        let data = HEAD + count * HEAD;
        if data > page.len() {
            return Err(format!("{count} elements, more than fit into it"));
        }
        Ok(Self { page, count, data })
    }

    /// An element's numbers.
    fn element(&self, index: usize) -> &'a [u8] {
        &self.page[HEAD + index * HEAD..][..HEAD]
    }

    /// The data of an element: a key, and its value if it has one.
    fn data(&mut self, index: usize, pos: usize, sizes: &[usize]) -> Result<(&'a [u8], &'a [u8])> {
        let number = |at| u32_at(self.element(index), at).and_then(|n| usize::try_from(n).ok());
        let parts = (|| {
            let start = (HEAD + index * HEAD).checked_add(number(pos)?)?;
            let middle = start.checked_add(number(*sizes.first()?)?)?;
            let end = middle.checked_add(sizes.get(1).map_or(Some(0), |&at| number(at))?)?;
            let parts = (self.page.get(start..middle)?, self.page.get(middle..end)?);
            (start >= self.data).then_some((parts, end))
        })();
        let (parts, end) = parts.ok_or_else(|| {
            format!("element {index} points out of the page, or to data of others")
        })?;
        self.data = end;
        Ok(parts)
    }
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..)?.first_chunk().copied()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..)?.first_chunk().copied()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(bytes.get(at..)?.first_chunk().copied()?))
}

fn fnv1a(bytes: &[u8]) -> u64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, step)
}

#[cfg(any(test, fuzzing))]
pub(super) mod tests;
