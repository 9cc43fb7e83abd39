//! Making a metadata image from a directory or a dump: what `build` and `mkcomposefs` share.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::path::Path;

use anyhow::Context as _;
use cofolio_erofs::dump;
use cofolio_erofs::tree::Tree;
use cofolio_erofs::write::{WriteOptions, WriteReport, write};
use cofolio_image::tree_scan::{self, DigestOnly, DigestStore, ScanOptions};
use cofolio_store::Digest;
use cofolio_store::task::Task;
use cofolio_store::verity::Hasher;

/// Read a dump; `-` is standard input.
pub(crate) fn tree_from_dump(path: &Path) -> anyhow::Result<Tree> {
    let strict = std::env::var_os("CFS_PARSE_STRICT").is_some();
    let input: Box<dyn BufRead> = if path.as_os_str() == "-" {
        Box::new(io::stdin().lock())
    } else {
        let file = File::open(path).with_context(|| format!("open `{}`", path.display()))?;
        Box::new(BufReader::with_capacity(1 << 17, file))
    };
    Ok(dump::parse_with(input, dump::ParseOptions { strict })?)
}

/// Write the image of a tree, and tell its fs-verity digest.
pub(crate) fn write_image(
    tree: &Tree,
    options: &WriteOptions,
    sink: impl Write,
) -> anyhow::Result<(WriteReport, Digest)> {
    let mut hashing = Hashing { sink, hasher: Hasher::new() };
    let report = write(tree, options, &mut hashing)?;
    hashing.sink.flush()?;
    Ok((report, hashing.hasher.finish()))
}

/// Hashes what is written to a sink.
pub(crate) struct Hashing<W> {
    pub(crate) sink: W,
    pub(crate) hasher: Hasher,
}

impl<W: Write> Write for Hashing<W> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let len = self.sink.write(data)?;
        self.hasher.update(&data[..len]);
        Ok(len)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.sink.flush()
    }
}

/// Read a directory, and store its files as objects in `digest_store` if there is to be one.
pub(crate) fn tree_from_directory(
    path: &Path,
    options: &ScanOptions,
    digest_store: Option<&Path>,
    task: &Task,
) -> anyhow::Result<Tree> {
    let scanned = match digest_store {
        Some(store) => tree_scan::scan(path, options, &DigestStore::open(store)?, task)?,
        None => tree_scan::scan(path, options, &DigestOnly, task)?,
    };
    Ok(scanned.tree)
}
