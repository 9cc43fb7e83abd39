use super::*;
use crate::write::{WriteOptions, write};
use crate::{dump, tree::Tree};

fn image_of(text: &str) -> Vec<u8> {
    bytes_of(&dump::parse(text.as_bytes()).unwrap())
}

fn bytes_of(tree: &Tree) -> Vec<u8> {
    let mut bytes = Vec::new();
    write(tree, &WriteOptions::default(), &mut bytes).unwrap();
    bytes
}

const ROOT: &str = "/ 0 40755 2 0 0 0 0.0 - - -\n";

#[test]
fn a_hard_link_keeps_the_name_it_is_stored_under() {
    // The second name in breadth-first order is the one under which the dump stores it.
    let text = format!(
        "{ROOT}/a 0 @100644 1 0 0 0 0.0 /d/f - -\n/b 0 100644 1 0 0 0 0.0 - - -\n\
         /d 0 40755 2 0 0 0 0.0 - - -\n/d/f 1 100644 7 0 0 0 0.0 - x -\n"
    );
    let bytes = image_of(&text);
    let tree = Image::open(&bytes).unwrap().to_tree().unwrap();
    let file = tree.resolve(b"/a").unwrap();
    assert_eq!(tree.nlink(file), 7);
    assert_eq!(tree.path(tree.primary_names()[&file]), b"/d/f");
    assert_eq!(bytes_of(&tree), bytes);
}

#[test]
fn lookup_finds_every_name_of_a_big_directory_and_no_other() {
    let mut text = String::from(ROOT);
    for i in 0..5000 {
        text += &format!("/n{i} 0 100644 1 0 0 0 0.0 - - -\n");
    }
    let bytes = image_of(&text);
    let image = Image::open(&bytes).unwrap();
    let root = image.root().unwrap();
    let names: Vec<_> = image.readdir(&root).unwrap().map(Result::unwrap).collect();
    assert_eq!(names.len(), 5256);
    for entry in &names {
        assert_eq!(image.lookup(&root, &entry.name).unwrap().as_ref(), Some(entry));
    }
    for name in [&b"n"[..], b"n5000", b"zz", b"!", b"n00"] {
        assert_eq!(image.lookup(&root, name).unwrap(), None);
    }
    assert!(image.resolve(b"/n77/x").unwrap().is_none());
}

#[test]
fn a_loop_of_directories_is_refused() {
    let mut bytes = image_of(&format!("{ROOT}/d 0 40755 2 0 0 0 0.0 - - -\n"));
    let image = Image::open(&bytes).unwrap();
    let root = image.root().unwrap();
    let entry = image.lookup(&root, b"d").unwrap().unwrap();
    // Make `/d` lead to the root.
    let needle = [&entry.nid.to_le_bytes()[..]].concat();
    let at = (bytes.len() - 4096..bytes.len() - 8)
        .filter(|&i| bytes[i..i + 8] == needle)
        .chain(1152..bytes.len() - 8)
        .find(|&i| bytes[i..i + 8] == needle)
        .unwrap();
    bytes[at..at + 8].copy_from_slice(&root.nid.to_le_bytes());
    let image = Image::open(&bytes).unwrap();
    assert!(matches!(image.to_tree(), Err(ReadError::Tree { .. } | ReadError::Corrupt { .. })));
    let mut walk = image.walk().unwrap();
    let mut steps = 0;
    let end = loop {
        match walk.advance() {
            Ok(Some(_)) => steps += 1,
            Ok(None) => break None,
            Err(error) => break Some(error),
        }
    };
    assert!(matches!(end, Some(ReadError::Corrupt { .. })), "after {steps} steps");
}

#[test]
fn unknown_features_are_refused_by_name() {
    let mut bytes = image_of(ROOT);
    bytes[1024 + 81] = 0x04;
    let error = Image::open(&bytes).unwrap_err().to_string();
    assert!(error.contains("0x400"), "{error}");
    bytes[1024 + 81] = 0x01;
    let error = Image::open(&bytes).unwrap_err().to_string();
    assert!(error.contains("metabox"), "{error}");
    assert!(matches!(Image::open(&b"no"[..]), Err(ReadError::NotErofs)));
    assert!(matches!(Image::open(&[0; 4096][..]), Err(ReadError::NotErofs)));
}

/// An image can have 65,535 bytes of attributes for each inode; mkcomposefs takes 32,767 from a
/// dump. Layers are kept as dumps and were read with the smaller limit, so one attribute of 40 kB
/// in an archive made each later gc of the store fail.
#[test]
fn layers_are_read_with_the_limit_of_images() {
    use crate::tree::{TreeError, XATTRS_MAX};
    // 12 bytes for all, 7 for each, and the name.
    let most = XATTRS_MAX - 12 - 7 - "user.x".len();
    let file = |len: usize| {
        let mut tree =
            dump::parse(format!("{ROOT}/f 0 100644 1 0 0 0 0.0 - - -\n").as_bytes()).unwrap();
        let file = tree.resolve(b"/f").unwrap();
        tree.set_xattrs(file, [(&b"user.x"[..], &vec![0; len][..])]).map(|()| tree)
    };
    let tree = file(most).unwrap();
    let read = Image::open(&bytes_of(&tree)).unwrap().to_tree().unwrap();
    let inode = read.resolve(b"/f").unwrap();
    assert_eq!(read.xattr(inode, b"user.x"), Some(&vec![0; most][..]));
    let refused = file(most + 1).map(|tree| tree.inode_count());
    assert_eq!(refused, Err(TreeError::XattrSpace { space: XATTRS_MAX + 1 }));

    let mut text = Vec::new();
    dump::write(&read, &mut text).unwrap();
    let mut records = dump::Records::new(&text[..]);
    let mut lines = 0;
    while records.next().unwrap().is_some() {
        lines += 1;
    }
    assert_eq!(lines, 2);
    assert!(matches!(
        dump::parse(&text[..]),
        Err(dump::DumpError::Line { problem: dump::Problem::XattrsTooLong(XATTRS_MAX), .. })
    ));
}
