//! Databases of bolt (bbolt), which containerd keeps its records in. Read only.
//!
//! ```text
//! file    page 0: meta | page 1: meta | pages: branches, leaves, free lists
//!
//! page    id u64 | flags u16 | count u16 | overflow u32 | elements… | keys and values…
//!           it goes on over so many (overflow) further pages
//! branch  element: pos u32, key size u32, page u64                       pos counts from the element
//! leaf    element: flags u32, pos u32, key size u32, value size u32      flag 1: the value is a bucket
//! bucket  root page u64, sequence u64; root page 0: a leaf page follows, inside the value
//! meta    magic u32 | version u32 | page size u32 | flags u32 | root bucket | free list u64 |
//!           pages u64 | transaction u64 | FNV-1a of all that, u64
//! ```
//!
//! Numbers are in the byte order of the machine that wrote it: bolt maps the file. (Source: bbolt, `page.go`,
//! `db.go`, `bucket.go`.)
//!
//! **Without the lock.** Who has a database open for writing keeps a lock on it, containerd as long as it
//! runs. A transaction leaves the pages of the one before it alone; pages that it has freed are written
//! over by later ones, which do not know of this reader. So the file is copied, and the copy is good if no
//! transaction was committed meanwhile: the next one can only have begun, and it does not touch what the
//! last one had. That is seen from the two meta pages, before and after.

use std::fs::File;
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

/// What is wrong with a database, and in which page.
type Result<T> = std::result::Result<T, String>;

impl Database {
    /// Copies a database. It stays as it is, and so does the page cache.
    pub(super) fn copy(path: &Path) -> std::result::Result<Self, EngineError> {
        let failed = |source| EngineError::Io { path: path.to_owned(), source };
        let wrong = |what| EngineError::Document { path: path.to_owned(), what };
        let file = super::open(path).map_err(failed)?;
        let mut found = Err("transactions went on all the time while it was read".to_owned());
        for _ in 0..TRIES {
            let bytes = super::read_aside(&file, FILE_MAX).map_err(failed)?;
            found = Self::new(bytes);
            let Ok(copied) = &found else { continue };
            // A meta page that is being written now has a wrong checksum, and the other one is older.
            if newest(&head(&file, copied.meta.page_size).map_err(failed)?) == Ok(copied.meta) {
                return found.map_err(wrong);
            }
            found = Err("transactions went on all the time while it was read".to_owned());
        }
        found.map_err(wrong)
    }

    /// Takes the bytes of a database.
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
    /// Everything in it.
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

    /// A bucket in it.
    pub(super) fn bucket(&self, key: &str) -> Option<&Bucket<'a>> {
        match self.get(key)? {
            Value::Bucket(bucket) => Some(bucket),
            Value::Bytes(_) => None,
        }
    }

    /// The bytes of a value.
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

/// The beginning of the file, as far as the second meta page goes.
fn head(file: &File, page_size: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; 2 * page_size];
    file.read_exact_at(&mut bytes, 0)?;
    Ok(bytes)
}

/// The valid meta page of the latest transaction. The second one's place depends on the page size, which
/// the first one tells, if it is whole.
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

/// The elements of a page. What they point to is one behind the other, as bolt writes it: buckets in
/// buckets cannot be larger together than the page that they are in.
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

    /// What an element points to: a key, and what is behind it.
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

/// A database that has one of each: two meta pages, a branch, a leaf of two pages, buckets in a page of their
/// own and in another's.
#[cfg(any(test, fuzzing))]
mod sample {
    use super::{HEAD, HOLDS_BUCKET, IS_BRANCH, IS_LEAF, IS_META, MAGIC, META, VERSION, fnv1a};

    pub(super) const PAGE: usize = 512;

    fn join(parts: &[&[u8]]) -> Vec<u8> {
        parts.concat()
    }

    /// A page of elements: their first numbers, and how many of these the place of the data is behind.
    fn page(id: u64, flags: u16, elements: &[(Vec<u8>, usize, Vec<u8>)]) -> Vec<u8> {
        let mut at = HEAD + elements.len() * HEAD;
        let (mut heads, mut data) = (Vec::new(), Vec::new());
        for (index, (element, pos, content)) in elements.iter().enumerate() {
            let mut element = element.clone();
            let from = u32::try_from(at - HEAD - index * HEAD).unwrap_or_default();
            element[*pos..*pos + 4].copy_from_slice(&from.to_ne_bytes());
            heads.extend(element);
            data.extend_from_slice(content);
            at += content.len();
        }
        let count = u16::try_from(elements.len()).unwrap_or_default();
        let overflow = u32::try_from(at.div_ceil(PAGE) - 1).unwrap_or_default();
        let head = join(&[
            &id.to_ne_bytes(),
            &flags.to_ne_bytes(),
            &count.to_ne_bytes(),
            &overflow.to_ne_bytes(),
        ]);
        join(&[&head, &heads, &data])
    }

    pub(super) fn leaf(id: u64, entries: &[(&str, bool, &[u8])]) -> Vec<u8> {
        let element = |&(key, bucket, value): &(&str, bool, &[u8])| {
            let size = |bytes: &[u8]| u32::try_from(bytes.len()).unwrap_or_default().to_ne_bytes();
            let flags = if bucket { HOLDS_BUCKET } else { 0 };
            let head = join(&[&flags.to_ne_bytes(), &[0; 4], &size(key.as_bytes()), &size(value)]);
            (head, 4, join(&[key.as_bytes(), value]))
        };
        page(id, IS_LEAF, &entries.iter().map(element).collect::<Vec<_>>())
    }

    pub(super) fn branch(id: u64, children: &[(&str, u64)]) -> Vec<u8> {
        let element = |&(key, child): &(&str, u64)| {
            let size = u32::try_from(key.len()).unwrap_or_default();
            let head = join(&[&[0; 4], &size.to_ne_bytes(), &child.to_ne_bytes()]);
            (head, 0, key.as_bytes().to_vec())
        };
        page(id, IS_BRANCH, &children.iter().map(element).collect::<Vec<_>>())
    }

    pub(super) fn bucket(root: u64, inline: &[u8]) -> Vec<u8> {
        join(&[&root.to_ne_bytes(), &[0; 8], inline])
    }

    pub(super) fn meta(id: u64, transaction: u64, root: u64, pages: u64) -> Vec<u8> {
        let head = join(&[&id.to_ne_bytes(), &IS_META.to_ne_bytes(), &[0; 6]]);
        let size = u32::try_from(PAGE).unwrap_or_default();
        let fields: Vec<u8> =
            [MAGIC, VERSION, size, 0].iter().flat_map(|n| n.to_ne_bytes()).collect();
        let more = [root, 0, u64::MAX, pages, transaction];
        let fields = join(&[&fields, &more.map(u64::to_ne_bytes).concat()]);
        debug_assert_eq!(fields.len(), META - 8);
        join(&[&head, &fields, &fnv1a(&fields).to_ne_bytes()])
    }

    /// Pages one behind the other, each filled up; metas for them in front, of transactions 6 and 7.
    pub(super) fn file(root: u64, pages: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = vec![0; 2 * PAGE];
        for page in pages {
            bytes.extend_from_slice(page);
            bytes.resize(bytes.len().next_multiple_of(PAGE), 0);
        }
        let count = (bytes.len() / PAGE) as u64;
        for (at, meta) in [(0, meta(0, 6, root, count)), (PAGE, meta(1, 7, root, count))] {
            bytes[at..at + meta.len()].copy_from_slice(&meta);
        }
        bytes
    }

    pub(super) fn database() -> Vec<u8> {
        let inline = leaf(0, &[("digest", false, b"sha256:1"), ("empty", false, b"")]);
        file(
            2,
            &[
                leaf(2, &[("other", false, b"x"), ("v1", true, &bucket(3, &[]))]),
                branch(3, &[("a", 4), ("k", 6)]),
                leaf(4, &[("a", false, &[b'a'; 700]), ("b", false, b"bb")]),
                leaf(6, &[("k", true, &bucket(0, &inline)), ("l", true, &bucket(7, &[]))]),
                leaf(7, &[]),
            ],
        )
    }

    /// Records as containerd has them: two images, and a container's snapshot on two layers.
    #[cfg(fuzzing)]
    pub(super) fn containerd() -> Vec<u8> {
        let all = |entries: &[(&str, bool, &[u8])]| bucket(0, &leaf(0, entries));
        let target = |digest: &[u8]| {
            let fields: [(&str, bool, &[u8]); 3] = [
                ("digest", false, digest),
                ("mediatype", false, b"m"),
                ("size", false, &[0xac, 2]),
            ];
            all(&[("target", true, &all(&fields))])
        };
        let snapshot = |id: u8, kind: u8, parent: &str| {
            all(&[
                ("id", false, &[id]),
                ("kind", false, &[kind]),
                ("parent", false, parent.as_bytes()),
            ])
        };
        let images = all(&[
            ("docker.io/library/a:1", true, &target(b"sha256:aaa1")),
            ("docker.io/library/b@sha256:aaa1", true, &target(b"sha256:aaa1")),
            ("registry/c:2", true, &target(b"sha256:bbb2")),
        ]);
        let used = all(&[("k", true, &all(&[("name", false, b"n")]))]);
        let namespace = all(&[
            ("images", true, &images),
            ("snapshots", true, &all(&[("other", true, &used), ("overlayfs", true, &used)])),
        ]);
        let snapshots = all(&[
            ("default/1/x", true, &snapshot(1, 3, "")),
            ("default/2/y", true, &snapshot(2, 3, "default/1/x")),
            ("default/3/c", true, &snapshot(3, 2, "default/2/y")),
            ("default/4/extract-d", true, &snapshot(4, 2, "default/1/x")),
            ("default/5/e", true, &snapshot(5, 1, "default/2/y")),
        ]);
        let version = leaf(3, &[("default", true, &namespace), ("snapshots", true, &snapshots)]);
        file(2, &[leaf(2, &[("v1", true, &bucket(3, &[]))]), version])
    }
}

/// What `fuzz/fuzz_targets/bolt.rs` calls: any bytes behind good metas, any bytes, or a sample with some bytes
/// changed. What is in the database goes to `read`.
#[cfg(fuzzing)]
pub(super) fn fuzz(data: &[u8], read: impl Fn(&Bucket<'_>)) {
    let mut bytes = match data.split_first() {
        Some((0, pages)) => sample::file(2, &[pages.to_vec()]),
        Some((1, raw)) => raw.to_vec(),
        Some((2, _)) => sample::database(),
        _ => sample::containerd(),
    };
    if let Some((2.., changes)) = data.split_first() {
        let end = bytes.len() - 2 * sample::PAGE;
        for change in changes.chunks_exact(3) {
            let at = usize::from(u16::from_le_bytes([change[0], change[1]])) % end;
            bytes[2 * sample::PAGE + at] = change[2];
        }
    }
    let length = bytes.len();
    let Ok(database) = Database::new(bytes) else { return };
    if let Ok(root) = database.root() {
        assert!(held(&root) <= length, "it holds more than the file");
        read(&root);
    }
}

/// Bytes of all keys and values.
#[cfg(any(test, fuzzing))]
fn held(bucket: &Bucket<'_>) -> usize {
    let value = |value: &Value<'_>| match value {
        Value::Bytes(bytes) => bytes.len(),
        Value::Bucket(bucket) => held(bucket),
    };
    bucket.entries().map(|(key, of)| key.len() + value(of)).sum()
}

#[cfg(test)]
mod tests {
    use super::sample::{PAGE, branch, bucket, file, leaf};
    use super::*;

    fn error(bytes: Vec<u8>) -> String {
        Database::new(bytes).and_then(|database| database.root().map(|_| ())).unwrap_err()
    }

    #[test]
    fn all_that_a_database_can_have() {
        let database = Database::new(sample::database()).unwrap();
        assert_eq!(database.meta.transaction, 7);
        let root = database.root().unwrap();
        assert_eq!(root.bytes("other"), Some(&b"x"[..]));
        let v1 = root.bucket("v1").unwrap();
        assert_eq!(v1.entries().map(|(key, _)| key).collect::<Vec<_>>(), [b"a", b"b", b"k", b"l"]);
        assert_eq!(v1.bytes("a").unwrap(), [b'a'; 700]);
        assert_eq!(v1.bucket("k").unwrap().text("digest"), "sha256:1");
        assert_eq!(v1.bucket("k").unwrap().bytes("empty"), Some(&b""[..]));
        assert_eq!(v1.buckets().map(|(key, _)| key).collect::<Vec<_>>(), ["k", "l"]);
        assert_eq!(v1.bucket("l").unwrap().entries().count(), 0);
        assert!(v1.bucket("a").is_none() && v1.bytes("k").is_none() && v1.bytes("z").is_none());
    }

    /// A meta page that is only half written is not looked at; the other one says what was before.
    #[test]
    fn the_last_whole_meta_page_counts() {
        for (torn, transaction) in [(0, 7), (PAGE, 6)] {
            let mut bytes = sample::database();
            bytes[torn + 50] ^= 1;
            let database = Database::new(bytes).unwrap();
            assert_eq!((database.meta.transaction, database.meta.page_size), (transaction, PAGE));
            assert!(database.root().is_ok());
        }
        let mut bytes = sample::database();
        bytes[50] ^= 1;
        bytes[PAGE + 50] ^= 1;
        assert!(error(bytes).contains("neither of its first two pages"));
    }

    #[test]
    fn what_cannot_be_is_refused_with_its_page() {
        let one = |page: Vec<u8>| error(file(2, &[page]));
        let says = |error: String, what: &str| assert!(error.contains(what), "{error}: {what}");
        says(error(Vec::new()), "neither of its first two pages");
        says(one(leaf(3, &[])), "page 2: it says that it is another one");
        says(one(branch(2, &[("a", 2)])), "page 2: there is more than one way to it");
        says(one(branch(2, &[("a", 1)])), "page 1: no page of the database");
        says(one(branch(2, &[("a", 9)])), "page 9: no page of the database");
        says(one(leaf(2, &[("a", true, &bucket(2, &[]))])), "page 2: there is more than one way");
        says(one(leaf(2, &[("a", true, b"short")])), "page 2: a bucket of 5 bytes");
        says(one(leaf(2, &[("a", true, &bucket(0, &[]))])), "page 2: a bucket in it is no leaf");
        let mut many = leaf(2, &[]);
        many[10] = 200;
        says(one(many), "page 2: 200 elements, more than fit");
        let mut long = leaf(2, &[]);
        long[12] = 1;
        says(one(long), "page 2: behind the end of the file");
        let mut other = leaf(2, &[]);
        other[8] = 16;
        says(one(other), "page 2: neither a branch nor a leaf");
        // Two keys with the same bytes: a bucket that two elements have could be had by millions.
        let mut twice = leaf(2, &[("a", false, b"x"), ("b", false, b"y")]);
        let from = u32::from_ne_bytes(twice[HEAD + 4..HEAD + 8].try_into().unwrap()) - 16;
        twice[2 * HEAD + 4..2 * HEAD + 8].copy_from_slice(&from.to_ne_bytes());
        says(one(twice), "page 2: element 1 points out of the page, or to data of others");
        let mut inside = leaf(0, &[]);
        for _ in 0..=DEPTH_MAX {
            inside = leaf(0, &[("b", true, &bucket(0, &inside))]);
        }
        inside[..8].copy_from_slice(&2u64.to_ne_bytes());
        says(error(file(2, &[inside])), "page 2: too many buckets in buckets");
        let chain: Vec<_> = (2..40).map(|id| branch(id, &[("a", id + 1)])).collect();
        says(error(file(2, &chain)), "too far below its root");
    }

    /// Whatever is changed in it, it is read or refused, and nothing is taken twice.
    #[test]
    fn any_byte_changed_and_any_end_cut_off() {
        let good = sample::database();
        for at in 0..good.len() {
            for value in [0, 1, 2, 16, 0x7f, 0xff] {
                let mut bytes = good.clone();
                bytes[at] = value;
                if let Ok(database) = Database::new(bytes) {
                    assert!(
                        database.root().is_ok_and(|root| held(&root) <= good.len()) || at >= PAGE
                    );
                }
            }
            if let Ok(database) = Database::new(good[..at].to_vec()) {
                assert!(database.root().is_err());
            }
        }
    }
}
