use super::*;

fn meta(mode: u32) -> Meta {
    Meta { mode, uid: 1, gid: 2, mtime: 3, mtime_nsec: 4 }
}

fn names(tree: &Tree, dir: InodeId) -> Vec<Vec<u8>> {
    tree.children(dir).iter().map(|c| c.name.to_vec()).collect()
}

#[test]
fn children_come_sorted_by_bytes() {
    let mut tree = Tree::new(meta(0o755));
    for name in [&b"b"[..], b"\xff", b"a", b"aaaaaaaaab", b"aaaaaaaaaa", b"B", b"!"] {
        tree.insert(tree.root(), name, meta(0o644), Content::Fifo).unwrap();
    }
    let sorted: Vec<&[u8]> = vec![b"!", b"B", b"a", b"aaaaaaaaaa", b"aaaaaaaaab", b"b", b"\xff"];
    assert_eq!(names(&tree, tree.root()), sorted);
}

#[test]
fn an_inode_lives_as_long_as_a_name_leads_to_it() {
    let mut tree = Tree::new(meta(0o755));
    let root = tree.root();
    let dir = tree.insert(root, b"d", meta(0o755), Content::Directory).unwrap();
    let file = tree.insert(dir, b"f", meta(0o644), Content::Inline(b"x")).unwrap();
    tree.link(root, b"l", file).unwrap();
    assert_eq!((tree.nlink(file), tree.inode_count(), tree.entry_count()), (2, 3, 3));
    assert!(tree.unlink(root, b"d"));
    assert_eq!(tree.lookup(root, b"l"), Some(file));
    assert_eq!((tree.nlink(file), tree.inode_count(), tree.entry_count()), (1, 2, 1));
    assert_eq!(tree.content(file), Content::Inline(b"x"));
    assert_eq!(tree.links(file).count(), 1);
    assert_eq!(tree.parent(file), Some(root));
    assert!(!tree.unlink(root, b"d"));
    assert_eq!(tree.insert(dir, b"x", meta(0), Content::Fifo), Err(TreeError::NotDirectory));
    assert!(tree.unlink(root, b"l"));
    assert_eq!((tree.inode_count(), tree.entry_count()), (1, 0));
}

#[test]
fn a_removed_name_can_come_back_as_something_else() {
    let mut tree = Tree::new(meta(0o755));
    let root = tree.root();
    let old = tree.insert(root, b"n", meta(0o755), Content::Directory).unwrap();
    tree.insert(old, b"below", meta(0o644), Content::Socket).unwrap();
    tree.unlink(root, b"n");
    let new = tree.insert(root, b"n", meta(0o777), Content::Symlink(b"t")).unwrap();
    assert_eq!(tree.resolve(b"/n"), Some(new));
    assert_eq!(tree.resolve(b"/n/below"), None);
    assert_eq!(tree.child_count(root), 1);
}

#[test]
fn directories_are_as_deep_as_a_path_can_say() {
    let mut tree = Tree::new(meta(0o755));
    let mut dir = tree.root();
    for _ in 0..2048 {
        dir = tree.insert(dir, b"d", meta(0o755), Content::Directory).unwrap();
    }
    let error = tree.insert(dir, b"d", meta(0o755), Content::Directory).unwrap_err();
    let start = b"/d".repeat(32).into();
    assert_eq!(error, TreeError::PathTooLong { len: 4097, start });
    assert_eq!(tree.walk().count(), 2048);
    tree.unlink(tree.root(), b"d");
    assert_eq!(tree.inode_count(), 1);
}

#[test]
fn names_of_one_inode_can_go_one_by_one_in_linear_time() {
    let mut tree = Tree::new(meta(0o755));
    let root = tree.root();
    let file = tree.insert(root, b"f", meta(0o644), Content::Fifo).unwrap();
    for i in 0..100_000_u32 {
        tree.link(root, i.to_string().as_bytes(), file).unwrap();
    }
    assert_eq!(tree.nlink(file), 100_001);
    for i in 0..100_000_u32 {
        tree.unlink(root, i.to_string().as_bytes());
    }
    assert_eq!((tree.nlink(file), tree.links(file).count()), (1, 1));
}

#[test]
fn the_primary_name_does_not_depend_on_the_order_of_building() {
    let build = |flip: bool| {
        let mut tree = Tree::new(meta(0o755));
        let root = tree.root();
        let a = tree.insert(root, b"a", meta(0o755), Content::Directory).unwrap();
        let names = [(a, &b"first"[..]), (root, b"z")];
        let (one, two) = if flip { (names[1], names[0]) } else { (names[0], names[1]) };
        let file = tree.insert(one.0, one.1, meta(0o644), Content::Fifo).unwrap();
        tree.link(two.0, two.1, file).unwrap();
        let primary = tree.primary_names()[&file];
        tree.path(primary)
    };
    // Breadth first: the root's own names come before anything deeper.
    assert_eq!(build(false), b"/z");
    assert_eq!(build(true), b"/z");
}

#[test]
fn content_survives() {
    let mut tree = Tree::new(meta(0o755));
    let root = tree.root();
    let own = [7; 32];
    let other = [8; 32];
    let own_path = object_path(&own);
    let cases = [
        Content::object(5, &own),
        Content::External { size: 5, digest: None, payload: Payload::Object(&own) },
        Content::External { size: 5, digest: Some(&own), payload: Payload::None },
        Content::External { size: 5, digest: Some(&own), payload: Payload::Path(b"x/y") },
        Content::External { size: EXTERNAL_MAX, digest: None, payload: Payload::None },
        Content::CharDevice(0),
        Content::BlockDevice(u32::MAX),
        Content::Symlink(&[b'x'; 4095]),
        Content::Inline(&[0; 5000]),
    ];
    let file = tree.insert(root, b"f", meta(0o640), Content::Fifo).unwrap();
    for content in cases {
        tree.set_content(file, content).unwrap();
        assert_eq!(tree.content(file), content);
        assert_eq!(tree.meta(file).mode, 0o640 | content.type_bits());
    }
    // Equivalent forms read back as the shorter one.
    let path = Content::External { size: 5, digest: Some(&own), payload: Payload::Path(&own_path) };
    tree.set_content(file, path).unwrap();
    assert_eq!(tree.content(file), Content::object(5, &own));
    let foreign =
        Content::External { size: 5, digest: Some(&own), payload: Payload::Object(&other) };
    tree.set_content(file, foreign).unwrap();
    assert_eq!(tree.content(file), foreign);
    tree.set_content(file, Content::object(0, &own)).unwrap();
    assert_eq!(tree.content(file), Content::Inline(b""));
}

#[test]
fn xattrs_are_sorted_and_the_last_of_a_name_counts() {
    let mut tree = Tree::new(meta(0o755));
    let root = tree.root();
    let given: [(&[u8], &[u8]); 3] = [(b"user.b", b"1"), (b"user.a", b""), (b"user.b", b"2")];
    tree.set_xattrs(root, given).unwrap();
    let got: Vec<_> = tree.xattrs(root).collect();
    assert_eq!(got, [(&b"user.a"[..], &b""[..]), (b"user.b", b"2")]);
    assert_eq!(tree.xattr(root, b"user.b"), Some(&b"2"[..]));
    let big = vec![0; 65_536];
    let too_big = tree.set_xattrs(root, [(&b"user.a"[..], &big[..])]);
    assert!(matches!(too_big, Err(TreeError::XattrSpace { .. })));
    let nameless = tree.set_xattrs(root, [(&b""[..], &b""[..])]);
    assert_eq!(nameless, Err(TreeError::XattrName { len: 0 }));
    assert_eq!(tree.xattrs(root).count(), 2);
    tree.set_xattrs(root, []).unwrap();
    assert_eq!(tree.xattrs(root).count(), 0);
}

#[test]
fn bad_input_is_refused_and_changes_nothing() {
    let mut tree = Tree::new(meta(0o755));
    let root = tree.root();
    let long = [b'x'; 256];
    for name in [&b""[..], b".", b"..", b"a/b", b"a\0", &long] {
        let error = tree.insert(root, name, meta(0o644), Content::Fifo).unwrap_err();
        let expected =
            matches!(error, TreeError::Name { .. } | TreeError::NameTooLong { len: 256 });
        assert!(expected, "{error}");
    }
    let nul = Content::Symlink(b"a\0b");
    for (content, expected) in [
        (Content::Symlink(b""), TreeError::Target { len: 0 }),
        (nul, TreeError::Target { len: 3 }),
        (Content::Inline(&[0; 5001]), TreeError::InlineTooBig { len: 5001 }),
    ] {
        assert_eq!(tree.insert(root, b"n", meta(0o644), content), Err(expected));
    }
    let mode = tree.insert(root, b"n", meta(S_IFDIR), Content::Fifo);
    assert_eq!(mode, Err(TreeError::TypeMismatch { mode: S_IFDIR }));
    let directory = tree.link(root, b"n", root);
    assert_eq!(directory, Err(TreeError::LinkToDirectory { name: b"n"[..].into() }));
    assert_eq!((tree.inode_count(), tree.entry_count()), (1, 0));
}
