//! Reads dump text from standard input and writes the metadata image to standard output:
//! `cargo run -p cofolio-erofs --example dump2image < tree.dump > tree.erofs`.

use std::error::Error;
use std::io::{stdin, stdout};

use cofolio_erofs::write::WriteOptions;
use cofolio_erofs::{dump, write};

fn main() -> Result<(), Box<dyn Error>> {
    let tree = dump::parse(stdin().lock())?;
    let mut options = WriteOptions::default();
    if let Some(version) = std::env::args().nth(1) {
        let version = version.parse()?;
        options = WriteOptions { min_version: version, max_version: version };
    }
    let report = write::write(&tree, &options, stdout().lock())?;
    eprintln!("version {}, {} bytes, {} inodes", report.version, report.bytes, report.inodes);
    Ok(())
}
