//! Any bytes as dump text.
//!
//! Invariants:
//! - nothing panics, loops or takes more memory than the bounds that `cargo fuzz` is given;
//! - strict mode accepts nothing that the other does not;
//! - a tree can be written as text, and that text reads back to a tree with the same image;
//! - a tree can be written as an image, and that image reads back.
#![no_main]

use cofolio_erofs::dump;
use cofolio_erofs::read::Image;
use cofolio_erofs::tree::Tree;
use cofolio_erofs::write::{WriteOptions, write};
use libfuzzer_sys::fuzz_target;

fn bytes_of(tree: &Tree) -> Vec<u8> {
    let mut bytes = Vec::new();
    write(tree, &WriteOptions::default(), &mut bytes).unwrap();
    bytes
}

fuzz_target!(|data: &[u8]| {
    let tree = dump::parse(data);
    let strict = dump::parse_with(data, true);
    assert!(tree.is_ok() || strict.is_err());
    let Ok(tree) = tree else { return };
    let image = bytes_of(&tree);
    let mut text = Vec::new();
    dump::write(&tree, &mut text).unwrap();
    assert!(bytes_of(&dump::parse(&text[..]).unwrap()) == image);
    Image::open(&image).unwrap().to_tree().unwrap();
});
