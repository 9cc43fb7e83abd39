//! The same tree in another order gives the same image.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on stops")]

mod common;

use cofolio_erofs::tree::{Content, InodeId, Tree};
use cofolio_erofs::write::WriteOptions;
use common::random::{self, Rng};
use common::{image, parse, rounds};

/// Builds a copy of a tree, its names inserted in an order that `seed` chooses, with detours:
/// names that are removed again, and hard links made from either end.
fn rebuilt(tree: &Tree, seed: u64) -> Tree {
    let mut rng = Rng::new(seed);
    let mut copy = Tree::new(tree.meta(tree.root()));
    copy.set_xattrs(copy.root(), tree.xattrs(tree.root())).unwrap();
    let mut known: std::collections::HashMap<InodeId, InodeId> = Default::default();
    let mut open = vec![(tree.root(), copy.root())];
    while !open.is_empty() {
        let (dir, new_dir) = open.swap_remove(rng.index(open.len()));
        let mut children = tree.children(dir);
        rng.shuffle(&mut children);
        for child in children {
            if rng.once_in(10) {
                let detour =
                    copy.insert(new_dir, child.name, tree.meta(dir), Content::Directory).unwrap();
                copy.insert(detour, b"below", tree.meta(dir), Content::Directory).unwrap();
                assert!(copy.unlink(new_dir, child.name));
            }
            if let Some(&inode) = known.get(&child.inode) {
                copy.link(new_dir, child.name, inode).unwrap();
                continue;
            }
            let meta = tree.meta(child.inode);
            let new = copy.insert(new_dir, child.name, meta, tree.content(child.inode)).unwrap();
            copy.set_xattrs(new, tree.xattrs(child.inode)).unwrap();
            known.insert(child.inode, new);
            if tree.is_dir(child.inode) {
                open.push((child.inode, new));
            }
        }
    }
    copy
}

#[test]
fn the_order_of_building_does_not_matter() {
    for seed in 0..rounds("COFOLIO_ORDERS", 150) {
        let tree = parse(random::dump(seed).as_bytes());
        let first = image(&rebuilt(&tree, 1), &WriteOptions::default());
        for order in 2..5 {
            let again = image(&rebuilt(&tree, order), &WriteOptions::default());
            assert!(first == again, "seed {seed}, order {order}");
        }
    }
}

#[test]
fn a_built_tree_and_its_dump_give_one_image() {
    for seed in 0..rounds("COFOLIO_ORDERS", 150) {
        let built = rebuilt(&parse(random::dump(seed).as_bytes()), seed);
        let first = image(&built, &WriteOptions::default());
        let from_text = image(&parse(&common::text(&built)), &WriteOptions::default());
        assert!(first == from_text, "seed {seed}");
    }
}
