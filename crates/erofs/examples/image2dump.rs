//! Reads a composefs metadata image from standard input and writes it as dump text:
//! `cargo run -p cofolio-erofs --example image2dump < tree.erofs > tree.dump`.

use std::error::Error;
use std::io::{Read, stdin, stdout};

use cofolio_erofs::{dump, read::Image};

fn main() -> Result<(), Box<dyn Error>> {
    let mut bytes = Vec::new();
    stdin().lock().read_to_end(&mut bytes)?;
    let tree = Image::open(&bytes)?.to_tree()?;
    dump::write(&tree, stdout().lock())?;
    Ok(())
}
