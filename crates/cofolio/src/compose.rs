//! Making a metadata image from a directory or a dump: for `mkcomposefs`.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use cofolio_erofs::dump;
use cofolio_erofs::tree::Tree;
use cofolio_erofs::write::{WriteOptions, WriteReport, write};
use cofolio_image::tree_scan::{self, DigestOnly, DigestStore, ScanOptions};
use cofolio_store::Digest;
use cofolio_store::task::Task;
use cofolio_store::verity::Hasher;

use crate::exit::Fail;

/// Read a dump; `-` is standard input.
pub(crate) fn tree_from_dump(path: &Path) -> anyhow::Result<Tree> {
    let strict = std::env::var_os("CFS_PARSE_STRICT").is_some();
    let input: Box<dyn BufRead> = if path.as_os_str() == "-" {
        Box::new(io::stdin().lock())
    } else {
        let file = File::open(path).with_context(|| format!("open `{}`", path.display()))?;
        Box::new(BufReader::with_capacity(1 << 17, file))
    };
    Ok(dump::parse_with(input, strict)?)
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

/// How a directory becomes an image.
#[derive(Debug, clap::Args)]
pub(crate) struct ScanArgs {
    /// Copy the files' content to this composefs object directory
    #[arg(long, value_name = "DIR")]
    pub(crate) digest_store: Option<PathBuf>,
    /// Set all modification times to zero
    #[arg(long)]
    use_epoch: bool,
    /// Leave block and character devices out
    #[arg(long)]
    skip_devices: bool,
    /// Leave extended attributes out
    #[arg(long)]
    skip_xattrs: bool,
    /// Keep only extended attributes that start with `user.`
    #[arg(long)]
    user_xattrs: bool,
    /// Threads that read files (default: one per processor)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    threads: Option<u16>,
}

/// Read a directory, and store its files as objects in the digest store if there is to be one.
pub(crate) fn tree_from_directory(
    path: &Path,
    args: &ScanArgs,
    task: &Task,
) -> anyhow::Result<Tree> {
    if args.skip_xattrs && args.user_xattrs {
        return Err(Fail::usage("--skip-xattrs contradicts --user-xattrs").into());
    }
    let options = &ScanOptions {
        use_epoch: args.use_epoch,
        skip_devices: args.skip_devices,
        skip_xattrs: args.skip_xattrs,
        user_xattrs: args.user_xattrs,
        threads: args.threads.map_or(0, usize::from),
        ..ScanOptions::like_mkcomposefs()
    };
    let scanned = match &args.digest_store {
        Some(store) => tree_scan::scan(path, options, &DigestStore::open(store)?, task)?,
        None => tree_scan::scan(path, options, &DigestOnly, task)?,
    };
    Ok(scanned.tree)
}
