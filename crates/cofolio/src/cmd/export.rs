use std::path::Path;

use clap::ValueEnum;
use cofolio_image::export::{
    Compression, Destination, ExportOptions, FilesystemOptions, export, export_filesystem,
};
use cofolio_node::links;

use crate::cmd::Outcome;
use crate::context::Context;
use crate::exit::{Exit, Fail};
use crate::ui::{Table, human_size};

/// Write an image to an OCI layout or archive, or as a filesystem in a file
///
/// The layers' archives and the config are those that were imported, to the byte, so other engines know the
/// image by the same id; blobs are compressed anew, so its manifest has another digest than the one that
/// it came from; those of a docker-archive are never compressed. An image that was imported from a directory
/// becomes one layer. All content is checked on the way. A file appears only once it is complete, and a layout
/// gets its index last. The same image gives the same bytes every time.
///
/// A FILE that exists is replaced only with --replace, and only if it is a regular file. `-` as FILE is
/// standard output. An OCI layout that exists gets the image in addition.
///
/// `erofs:FILE` is an EROFS filesystem with all of the image's files in it, to be mounted without a store (`mount -o loop,ro
/// FILE DIR`), by a virtual machine for instance. Each content is in it once, and has a fingerprint, by which Linux 7.0 shares
/// the page cache of such filesystems (`inode_share`). Attributes `trusted.overlay.*` of the image get names that overlayfs
/// leaves alone.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  \
    cofolio export redis:7.0.15 oci:layouts/redis:7.0.15\n  \
    cofolio export redis:7.0.15 oci-archive:redis.tar --compress zstd\n  \
    cofolio export redis:7.0.15 docker-archive:- | docker load\n  \
    cofolio export redis:7.0.15 erofs:redis.erofs --lz4")]
pub(crate) struct Args {
    /// Ref, or first digits of a digest
    image: String,
    #[arg(help = "oci:DIR[:TAG], oci-archive:FILE[:TAG], docker-archive:FILE[:TAG] \
                  [default tag: the image's name] or erofs:FILE")]
    destination: String,
    /// Compress the files of an erofs:FILE
    ///
    /// Mounted with inode_share (Linux 7.0) such a file shares its pages with files that are compressed, too, and not with
    /// plain ones.
    #[arg(long)]
    lz4: bool,
    /// Replace FILE if it exists
    #[arg(long)]
    replace: bool,
    #[command(flatten)]
    compress: CompressArgs,
}

/// How layers are written, wherever they go.
#[derive(Debug, clap::Args)]
pub(crate) struct CompressArgs {
    /// How to compress layers that are written (default: gzip)
    #[arg(long, value_name = "HOW")]
    compress: Option<How>,
    /// Threads that compress (default: one per processor, up to 16)
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    pub(crate) threads: usize,
}

impl CompressArgs {
    pub(crate) fn compression(&self) -> Compression {
        match self.compress {
            None | Some(How::Gzip) => Compression::Gzip,
            Some(How::Zstd) => Compression::Zstd,
            Some(How::None) => Compression::None,
        }
    }
}

/// How to compress layers.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum How {
    /// What everybody reads
    Gzip,
    /// Smaller and faster
    Zstd,
    /// Not at all
    None,
}

pub(crate) fn run(args: &Args, context: &Context<'_>) -> Outcome {
    let filesystem = args.destination.strip_prefix("erofs:").map(Path::new);
    if filesystem.is_some() && args.compress.compress.is_some() {
        let what = "--compress is for layers; --lz4 compresses the files of an erofs:FILE";
        return Err(Fail::usage(what).into());
    }
    if filesystem.is_none() && args.lz4 {
        let what = "--lz4 is for the files of an erofs:FILE; --compress compresses layers";
        return Err(Fail::usage(what).into());
    }
    if let Some(path) = filesystem {
        return write_filesystem(args, path, context);
    }
    let mut destination = Destination::parse(&args.destination)?;
    if let Destination::Layout { path, .. } = &mut destination {
        *path = links::resolve(path)?;
    }
    let to_stdout = match &destination {
        Destination::Layout { .. } if args.replace => {
            let what = "--replace is for files; an OCI layout gets the image in addition";
            return Err(Fail::usage(what).into());
        }
        Destination::Layout { .. } => false,
        Destination::Archive { path, .. } | Destination::DockerArchive { path, .. } => {
            is_stdout(path, context)?
        }
    };
    check_outside(destination.path(), context)?;
    let domain = context.domain()?;
    let named = context.image(&domain, &args.image)?;
    let options = ExportOptions {
        compression: args.compress.compression(),
        threads: args.compress.threads,
        replace: args.replace,
    };
    let report = context.work("exporting", "layer", |task| {
        export(&domain, named.exported(), &destination, &options, task)
    })?;
    if to_stdout {
        context.ui.note(report.manifest.to_string());
        return Ok(Exit::Ok);
    }
    if context.ui.json {
        return context.ui.json(&report);
    }
    context.ui.line(report.manifest.to_string())?;
    if context.ui.quiet {
        return Ok(Exit::Ok);
    }
    let mut table = Table::plain();
    if let Some(name) = &report.name {
        table.detail("name", name.clone());
    }
    table.detail("image id", report.config.to_string());
    let size = report.layers.iter().map(|layer| layer.size).sum();
    let uncompressed = report.layers.iter().map(|layer| layer.uncompressed).sum();
    let layers = report.layers.len();
    table.detail(
        "layers",
        format!("{layers}, {} of {}", human_size(size), human_size(uncompressed)),
    );
    context.ui.table(&table)
}

/// With --replace, one wrong path would replace what all images need.
fn check_outside(path: &Path, context: &Context<'_>) -> anyhow::Result<()> {
    // A layout need not exist, and a file does not.
    let mut places =
        path.ancestors().map(|it| if it == Path::new("") { Path::new(".") } else { it });
    let place = places.find_map(|it| it.canonicalize().ok()).unwrap_or_default();
    let store = context.global.store.canonicalize();
    if path != Path::new("-") && store.is_ok_and(|store| place.starts_with(store)) {
        let what = format!("{}: it is in the store, so nothing is exported there", path.display());
        return Err(Fail::new(Exit::Failure, what).into());
    }
    Ok(())
}

/// Whether the file itself goes to standard output, which then takes nothing else.
fn is_stdout(path: &Path, context: &Context<'_>) -> anyhow::Result<bool> {
    let to_stdout = path.as_os_str() == "-";
    if to_stdout && context.ui.json {
        let what = "the file and its report cannot both go to standard output";
        return Err(Fail::usage(what).into());
    }
    Ok(to_stdout)
}

fn write_filesystem(args: &Args, path: &Path, context: &Context<'_>) -> Outcome {
    let to_stdout = is_stdout(path, context)?;
    check_outside(path, context)?;
    let domain = context.domain()?;
    let image = context.image(&domain, &args.image)?.digest;
    let options = FilesystemOptions { compress: args.lz4, replace: args.replace };
    let report = context.work("exporting", "file", |task| {
        export_filesystem(&domain, &image, path, options, task)
    })?;
    if to_stdout {
        context.ui.note(report.digest.to_string());
        return Ok(Exit::Ok);
    }
    if context.ui.json {
        return context.ui.json(&report);
    }
    context.ui.line(report.digest.to_string())?;
    if !context.ui.quiet {
        let (size, content) = (human_size(report.size), human_size(report.content));
        context.ui.line(format!("  {}: {size} for {content} of files", path.display()))?;
    }
    Ok(Exit::Ok)
}
