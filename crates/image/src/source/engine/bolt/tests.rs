//! Databases made here: good ones, which the fuzz target changes too, and bad ones.

use super::*;

pub(in super::super) const PAGE: usize = 512;

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

pub(in super::super) fn leaf(id: u64, entries: &[(&str, bool, &[u8])]) -> Vec<u8> {
    let element = |&(key, bucket, value): &(&str, bool, &[u8])| {
        let size = |bytes: &[u8]| u32::try_from(bytes.len()).unwrap_or_default().to_ne_bytes();
        let flags = if bucket { HOLDS_BUCKET } else { 0 };
        let head = join(&[&flags.to_ne_bytes(), &[0; 4], &size(key.as_bytes()), &size(value)]);
        (head, 4, join(&[key.as_bytes(), value]))
    };
    page(id, IS_LEAF, &entries.iter().map(element).collect::<Vec<_>>())
}

pub(in super::super) fn branch(id: u64, children: &[(&str, u64)]) -> Vec<u8> {
    let element = |&(key, child): &(&str, u64)| {
        let size = u32::try_from(key.len()).unwrap_or_default();
        let head = join(&[&[0; 4], &size.to_ne_bytes(), &child.to_ne_bytes()]);
        (head, 0, key.as_bytes().to_vec())
    };
    page(id, IS_BRANCH, &children.iter().map(element).collect::<Vec<_>>())
}

pub(in super::super) fn bucket(root: u64, inline: &[u8]) -> Vec<u8> {
    join(&[&root.to_ne_bytes(), &[0; 8], inline])
}

pub(in super::super) fn meta(id: u64, transaction: u64, root: u64, pages: u64) -> Vec<u8> {
    let head = join(&[&id.to_ne_bytes(), &IS_META.to_ne_bytes(), &[0; 6]]);
    let size = u32::try_from(PAGE).unwrap_or_default();
    let fields: Vec<u8> = [MAGIC, VERSION, size, 0].iter().flat_map(|n| n.to_ne_bytes()).collect();
    let more = [root, 0, u64::MAX, pages, transaction];
    let fields = join(&[&fields, &more.map(u64::to_ne_bytes).concat()]);
    debug_assert_eq!(fields.len(), META - 8);
    join(&[&head, &fields, &fnv1a(&fields).to_ne_bytes()])
}

/// Pages one behind the other, each filled up; metas for them in front, of transactions 6 and 7.
pub(in super::super) fn file(root: u64, pages: &[Vec<u8>]) -> Vec<u8> {
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

/// A database that has one of each: two meta pages, a branch, a leaf of two pages, buckets in a
/// page of their own and in another's.
pub(in super::super) fn database() -> Vec<u8> {
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

/// Bytes of all keys and values.
pub(in super::super) fn held(bucket: &Bucket<'_>) -> usize {
    let value = |value: &Value<'_>| match value {
        Value::Bytes(bytes) => bytes.len(),
        Value::Bucket(bucket) => held(bucket),
    };
    bucket.entries().map(|(key, of)| key.len() + value(of)).sum()
}

#[cfg(test)]
fn error(bytes: Vec<u8>) -> String {
    Database::new(bytes).and_then(|database| database.root().map(|_| ())).unwrap_err()
}

#[test]
fn all_that_a_database_can_have() {
    let database = Database::new(database()).unwrap();
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
        let mut bytes = database();
        bytes[torn + 50] ^= 1;
        let database = Database::new(bytes).unwrap();
        assert_eq!((database.meta.transaction, database.meta.page_size), (transaction, PAGE));
        assert!(database.root().is_ok());
    }
    let mut bytes = database();
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
    let good = database();
    for at in 0..good.len() {
        for value in [0, 1, 2, 16, 0x7f, 0xff] {
            let mut bytes = good.clone();
            bytes[at] = value;
            if let Ok(database) = Database::new(bytes) {
                assert!(database.root().is_ok_and(|root| held(&root) <= good.len()) || at >= PAGE);
            }
        }
        if let Ok(database) = Database::new(good[..at].to_vec()) {
            assert!(database.root().is_err());
        }
    }
}

/// One that was cut off in its second page was no damaged one: "failed to fill whole buffer".
#[test]
fn a_file_that_is_cut_off_is_damaged() {
    let path = tempfile::NamedTempFile::new().unwrap();
    let good = database();
    for at in (0..good.len()).step_by(PAGE / 2) {
        std::fs::write(&path, &good[..at]).unwrap();
        let read = Database::copy(path.path()).and_then(|database| {
            let wrong = |what| EngineError::Document { path: path.path().to_owned(), what };
            database.root().map(drop).map_err(wrong)
        });
        assert!(matches!(read, Err(EngineError::Document { .. })), "{at}: {read:?}");
    }
}
