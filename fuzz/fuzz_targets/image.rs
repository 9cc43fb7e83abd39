//! Any bytes as an image.
//!
//! Invariants:
//! - nothing panics, loops or takes more memory than the bounds that `cargo fuzz` is given;
//! - a walk ends; extents are not empty and cover a file from its start on;
//! - what a directory lists, `lookup` may miss (an unsorted directory) but never answers otherwise;
//! - an image that becomes a tree can be written and read again, and that is a fixed point:
//!   writing what was read gives the same bytes.
#![no_main]

use cofolio_erofs::read::Image;
use cofolio_erofs::tree::Tree;
use cofolio_erofs::write::{WriteOptions, write};
use libfuzzer_sys::fuzz_target;

fn bytes_of(tree: &Tree) -> Vec<u8> {
    let mut bytes = Vec::new();
    // Version 1 throughout, so that whiteouts that appear do not change it.
    let options = WriteOptions { min_version: 1, max_version: 1 };
    write(tree, &options, &mut bytes).unwrap();
    bytes
}

fuzz_target!(|data: &[u8]| {
    let Ok(image) = Image::open(data) else { return };
    if let Ok(mut walk) = image.walk() {
        let mut buffer = [0; 5000];
        let mut left = 1000;
        while let Ok(Some(found)) = walk.advance() {
            left -= 1;
            if left == 0 {
                break;
            }
            let inode = found.inode;
            let _ = image.xattrs(&inode);
            let _ = image.readlink(&inode);
            let _ = image.read(&inode, 0, &mut buffer);
            let _ = image.read(&inode, inode.size.saturating_sub(10), &mut buffer);
            let mut offset = 0;
            for _ in 0..20 {
                let Ok(Some(extent)) = image.extent(&inode, offset) else { break };
                assert!(extent.offset == offset && extent.len > 0);
                offset += extent.len;
            }
            if inode.is_dir() && let Ok(names) = image.readdir(&inode) {
                for entry in names.take(20).flatten() {
                    if let Ok(Some(same)) = image.lookup(&inode, &entry.name) {
                        assert_eq!(same.name, entry.name);
                    }
                }
            }
        }
    }
    if let Ok(tree) = image.to_tree() {
        let first = bytes_of(&tree);
        let again = Image::open(&first).unwrap().to_tree().unwrap();
        let second = bytes_of(&again);
        let third = bytes_of(&Image::open(&second).unwrap().to_tree().unwrap());
        assert!(second == third);
    }
});
