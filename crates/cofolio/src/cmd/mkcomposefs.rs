use std::ffi::OsString;
use std::fs::File;
use std::io::{self, BufRead, BufReader, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use clap::Parser as _;
use cofolio_erofs::dump;
use cofolio_erofs::tree::Tree;
use cofolio_erofs::write::{WriteOptions, write};
use cofolio_image::tree_scan::{self, DigestOnly, DigestStore, ScanOptions};
use cofolio_store::task::Task;
use cofolio_store::verity::Hasher;

use crate::cmd::Outcome;
use crate::context::Context;
use crate::exit::Exit;
use crate::image::Hashing;

/// Make a composefs image with mkcomposefs' own arguments
///
/// Byte for byte what mkcomposefs 1.0.8 does, also when this program is called by that name: scripts and
/// test suites can be pointed at it. Hard links inside a directory stay hard links, which mkcomposefs
/// loses (github.com/composefs/composefs issue 444). Nothing goes into the store: `cofolio import DIR`
/// does that.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  cofolio mkcomposefs --digest-store=objects --print-digest rootfs rootfs.cfs",
    disable_help_flag = true
)]
pub(crate) struct Args {
    /// Copy the files' content to this composefs object directory
    #[arg(long, value_name = "DIR")]
    digest_store: Option<PathBuf>,
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
    /// Print the digest of the image
    #[arg(long)]
    print_digest: bool,
    /// Print the digest of the image, don't write image
    #[arg(long)]
    print_digest_only: bool,
    /// The source is a dump file, not a directory
    #[arg(long)]
    from_file: bool,
    /// Use this minimal format version (default: 0)
    #[arg(long, value_name = "N")]
    min_version: Option<i64>,
    /// Use this maximum format version (default: 1, or 0 with --min-version)
    #[arg(long, value_name = "N")]
    max_version: Option<i64>,
    /// Directory or dump file; `-` is standard input
    source: PathBuf,
    /// Image file; `-` is standard output
    #[arg(required_unless_present = "print_digest_only", conflicts_with = "print_digest_only")]
    image: Option<PathBuf>,
}

/// `getopt_long` lets long options be cut short, and given again.
#[derive(Debug, clap::Parser)]
#[command(
    name = "mkcomposefs",
    infer_long_args = true,
    args_override_self = true,
    disable_help_flag = true
)]
struct Alone {
    #[command(flatten)]
    args: Args,
}

/// The whole program, with the arguments from its name on. Exit code 0 or 1, the digest on standard
/// output, messages on standard error.
pub(crate) fn main(args: &[OsString]) -> ExitCode {
    match Alone::try_parse_from(args) {
        Ok(alone) => make_or_say_why_not(&alone.args).into(),
        Err(error) => {
            let _ = write!(io::stderr(), "{error}");
            ExitCode::FAILURE
        }
    }
}

/// Reached with a global option first, which mkcomposefs lacks; [`main`] handles all else.
pub(crate) fn run(args: &Args, _context: &Context<'_>) -> Outcome {
    Ok(make_or_say_why_not(args))
}

fn make_or_say_why_not(args: &Args) -> Exit {
    make(args).map_or_else(
        |error| {
            let _ = writeln!(io::stderr(), "mkcomposefs: {error:#}");
            Exit::Failure
        },
        |()| Exit::Ok,
    )
}

fn make(args: &Args) -> anyhow::Result<()> {
    // Opened before the source is looked at, as mkcomposefs does.
    let mut sink: Box<dyn Write> = match args.image.as_deref() {
        None => Box::new(io::sink()),
        Some(image) if image.as_os_str() == "-" => {
            let stdout = io::stdout();
            anyhow::ensure!(!stdout.is_terminal(), "stdout is a tty.  Refusing to use it");
            Box::new(stdout.lock())
        }
        Some(image) => Box::new(File::create(image).context("failed to open output file")?),
    };
    let source = args.source.as_path();
    let tree = if args.from_file {
        let strict = std::env::var_os("CFS_PARSE_STRICT").is_some();
        let input: Box<dyn BufRead> = if source.as_os_str() == "-" {
            Box::new(io::stdin().lock())
        } else {
            let file =
                File::open(source).with_context(|| format!("open `{}`", source.display()))?;
            Box::new(BufReader::with_capacity(1 << 17, file))
        };
        dump::parse_with(input, strict)?
    } else {
        // mkcomposefs does not follow the source itself.
        if source.symlink_metadata().is_ok_and(|meta| meta.is_symlink()) {
            anyhow::bail!("cannot write file: {} is a symbolic link", source.display());
        }
        tree_from_directory(source, args)?
    };
    // mkcomposefs keeps versions in 32 bits without a sign, so a negative one is simply too large.
    let version = |number: Option<i64>| u32::try_from(number.unwrap_or(0)).unwrap_or(u32::MAX);
    let options = match (args.min_version, args.max_version) {
        (None, None) => WriteOptions { min_version: 0, max_version: 1 },
        (min, max) => WriteOptions { min_version: version(min), max_version: version(max) },
    };
    let mut hashing = Hashing { sink: &mut sink, hasher: Hasher::new() };
    write(&tree, &options, &mut hashing).context("cannot write file")?;
    let digest = hashing.hasher.finish();
    sink.flush().context("cannot write file")?;
    if args.print_digest || args.print_digest_only {
        drop(sink);
        writeln!(io::stdout(), "{digest}")?;
    }
    Ok(())
}

/// Reads a directory, and stores its files as objects in the digest store if there is to be one.
fn tree_from_directory(path: &Path, args: &Args) -> anyhow::Result<Tree> {
    anyhow::ensure!(
        !(args.skip_xattrs && args.user_xattrs),
        "--skip-xattrs contradicts --user-xattrs"
    );
    let options = &ScanOptions {
        use_epoch: args.use_epoch,
        skip_devices: args.skip_devices,
        skip_xattrs: args.skip_xattrs,
        user_xattrs: args.user_xattrs,
        threads: args.threads.map_or(0, usize::from),
        ..ScanOptions::like_mkcomposefs()
    };
    let task = &Task::default();
    let scanned = match &args.digest_store {
        Some(store) => tree_scan::scan(path, options, &DigestStore::open(store)?, task)?,
        None => tree_scan::scan(path, options, &DigestOnly, task)?,
    };
    Ok(scanned.tree)
}
