use std::ops::ControlFlow;
use std::sync::atomic::Ordering::Relaxed;

use clap::ValueEnum;
use cofolio_node::export::{Compression, Destination, ExportOptions, Exported, export};

use crate::cmd::Outcome;
use crate::context::Context;
use crate::exit::Exit;
use crate::interrupt;
use crate::progress::Counter;
use crate::ui::{Cell, Table, Tone, human_size};

/// Write an image to an OCI layout or archive
///
/// The layers' archives and the config are those that were imported, to the byte, so other engines know the
/// image by the same id; blobs are compressed anew, so its manifest has another digest than the one that
/// it came from; those of a docker-archive are never compressed. An image that was imported from a directory
/// becomes one layer. All content is checked on the way, and nothing is to be seen at the destination before
/// it is complete. The same image gives the same bytes every time.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  \
    cofolio export redis:7.0.15 oci:layouts/redis:7.0.15\n  \
    cofolio export redis:7.0.15 oci-archive:redis.tar --compress zstd\n  \
    cofolio export redis:7.0.15 docker-archive:redis.tar && docker load -i redis.tar")]
pub(crate) struct Args {
    /// Ref, or first digits of a digest
    image: String,
    #[arg(help = "oci:DIR[:TAG], oci-archive:FILE[:TAG] or docker-archive:FILE[:TAG] \
                  [default tag: the image's name]")]
    destination: String,
    #[command(flatten)]
    compress: CompressArgs,
}

/// How layers are written, wherever they go.
#[derive(Debug, clap::Args)]
pub(crate) struct CompressArgs {
    /// How to compress layers that are written
    #[arg(long, value_name = "HOW", default_value = "gzip")]
    compress: How,
    #[arg(
        help = "Threads that compress [default: one per processor, up to 16]",
        long,
        value_name = "N",
        default_value_t = 0,
        hide_default_value = true
    )]
    pub(crate) threads: usize,
}

impl CompressArgs {
    pub(crate) fn compression(&self) -> Compression {
        match self.compress {
            How::Gzip => Compression::Gzip,
            How::Zstd => Compression::Zstd,
            How::None => Compression::None,
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
    let destination = Destination::parse(&args.destination)?;
    let domain = context.domain()?;
    let named = context.image(&domain, &args.image)?;
    let exported = Exported {
        image: &named.digest,
        record: named.record.as_ref(),
        name: named.ref_name.as_deref(),
    };
    let options =
        ExportOptions { compression: args.compress.compression(), threads: args.compress.threads };
    let stop = interrupt::flag()?;
    let counter = Counter::new(context.ui, "exporting");
    let report = export(&domain, exported, &destination, &options, &mut |done| {
        counter.set(done.bytes, || format!("layer {} of {}", done.layer + 1, done.layers));
        match stop.load(Relaxed) {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    })?;
    drop(counter);
    if context.ui.json {
        context.ui.json(&report)?;
        return Ok(Exit::Ok);
    }
    context.ui.line(&report.manifest)?;
    if context.ui.quiet {
        return Ok(Exit::Ok);
    }
    let mut table = Table::plain();
    let mut row = |name: &str, value: String| {
        table.row(vec![Cell::left(format!("  {name}")).tone(Tone::Dim), Cell::left(value)]);
    };
    if let Some(name) = &report.name {
        row("name", name.clone());
    }
    row("image id", report.config.clone());
    let size = report.layers.iter().map(|layer| layer.size).sum();
    let uncompressed = report.layers.iter().map(|layer| layer.uncompressed).sum();
    let layers = report.layers.len();
    row("layers", format!("{layers}, {} of {}", human_size(size), human_size(uncompressed)));
    context.ui.table(&table)?;
    Ok(Exit::Ok)
}
