use std::io;
use std::path::PathBuf;

use anyhow::Context as _;
use cofolio_erofs::write::{VERSION_MAX, WriteOptions};
use cofolio_image::export::OutputFile;

use crate::cmd::Outcome;
use crate::compose::{self, ScanArgs};
use crate::context::Context;
use crate::exit::{Exit, Fail};
use crate::progress::Work;
use crate::ui::human_size;

/// Build a metadata image file from a directory or a composefs dump
///
/// Writes what `mkcomposefs` writes, byte for byte: files of up to 64 bytes go into the image, larger
/// ones are named by their digest and copied to --digest-store if one is given. Nothing goes into the
/// store: `cofolio import DIR` does that.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  \
    cofolio build rootfs rootfs.erofs --digest-store objects --print-digest\n  \
    cofolio dump redis:7 | cofolio build - --print-digest")]
pub(crate) struct Args {
    /// Directory or dump file to build from; `-` is a dump on standard input
    source: PathBuf,
    /// Image file to write; `-` is standard output; may be left out with --print-digest
    image: Option<PathBuf>,
    /// Replace IMAGE if it exists
    #[arg(long, requires = "image")]
    replace: bool,
    /// Print the image's fs-verity digest
    #[arg(long)]
    print_digest: bool,
    #[command(flatten)]
    scan: ScanArgs,
    /// Lowest format version
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=i64::from(VERSION_MAX)))]
    min_version: u32,
    /// Highest format version
    #[arg(long, value_name = "N", default_value_t = VERSION_MAX, value_parser = clap::value_parser!(u32).range(0..=i64::from(VERSION_MAX)))]
    max_version: u32,
}

pub(crate) fn run(args: &Args, context: &Context<'_>) -> Outcome {
    if args.image.is_none() && !args.print_digest && !context.ui.json {
        return Err(Fail::usage("nothing to do: no IMAGE to write and no --print-digest")
            .hint("cofolio build SOURCE IMAGE")
            .into());
    }
    let dump = args.source.as_os_str() == "-" || !args.source.is_dir();
    if dump && args.scan.digest_store.is_some() {
        return Err(Fail::usage("--digest-store needs a directory: a dump has no content").into());
    }
    let to_stdout = args.image.as_deref().is_some_and(|path| path.as_os_str() == "-");
    if to_stdout && (args.print_digest || context.ui.json) {
        let what = "the image and its digest cannot both go to standard output";
        return Err(Fail::usage(what).into());
    }
    // A destination that cannot be written to ends it before anything is read.
    let output = args.image.as_deref().map(|path| OutputFile::create(path, args.replace));
    let output = output.transpose()?;
    let tree = if dump {
        compose::tree_from_dump(&args.source)
            .with_context(|| format!("reading {}", args.source.display()))?
    } else {
        let work = Work::begin(context.ui, "reading", "file")?;
        compose::tree_from_directory(&args.source, &args.scan, &work.task)?
    };

    let options = WriteOptions { min_version: args.min_version, max_version: args.max_version };
    let (report, digest) = match output {
        None => compose::write_image(&tree, &options, io::sink())?,
        Some(output) => {
            let written = compose::write_image(&tree, &options, output.file())
                .context("writing the image file")?;
            output.publish()?;
            written
        }
    };

    if context.ui.json {
        context.ui.json(&serde_json::json!({
            "digest": digest,
            "image": args.image,
            "version": report.version,
            "bytes": report.bytes,
            "inodes": report.inodes,
            "entries": tree.entry_count(),
        }))?;
    } else if args.print_digest {
        context.ui.line(digest.to_string())?;
    }
    if let Some(image) = args.image.as_ref().filter(|_| !context.ui.json) {
        context.ui.note(format!(
            "{}: {}, {} inodes, format version {}",
            image.display(),
            human_size(report.bytes),
            report.inodes,
            report.version
        ));
    }
    Ok(Exit::Ok)
}
