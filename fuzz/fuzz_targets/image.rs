//! Any bytes as an image.
//!
//! Invariants:
//! - nothing panics, loops or takes more memory than the bounds that `cargo fuzz` is given;
//! - a walk ends; extents are not empty and cover a file from its start on;
//! - `lookup` finds each name that a directory lists, if the directory can be listed to its end;
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
            let names = if inode.is_dir() { image.readdir(&inode).ok() } else { None };
            let names: Result<Vec<_>, _> = names.into_iter().flatten().collect();
            for entry in names.unwrap_or_default().into_iter().take(20) {
                assert_eq!(image.lookup(&inode, &entry.name).unwrap(), Some(entry));
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
