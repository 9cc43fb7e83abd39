use std::io::{self, BufWriter, Write};

use anyhow::Context as _;
use cofolio_erofs::dump;

use crate::cmd::Outcome;
use crate::context::Context;
use crate::exit::Exit;
use crate::image;

/// Print an image as composefs dump text
///
/// One line per file: path, size, mode, owner, time, digest, attributes (see composefs-dump(5)).
/// `cofolio mkcomposefs --from-file` makes the same image of it again.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  cofolio dump redis:7.0.15 | grep ' 104755 '\n  \
    diff <(cofolio dump redis:7.0.14) <(cofolio dump redis:7.0.15)")]
pub(crate) struct Args {
    /// Ref, first digits of a digest, or path of an EROFS image file
    image: String,
}

pub(crate) fn run(args: &Args, context: &Context<'_>) -> Outcome {
    context.refuse_json("a dump is text of its own; `ls -R --json` describes files")?;
    let opened = image::open(context, &args.image, None)?;
    let tree = opened.image.to_tree().with_context(|| opened.label.clone())?;
    let mut stdout = BufWriter::with_capacity(1 << 16, io::stdout().lock());
    dump::write(&tree, &mut stdout)?;
    stdout.flush()?;
    Ok(Exit::Ok)
}
