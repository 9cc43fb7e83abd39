use cofolio_image::pack::segment::Form;
use cofolio_image::pack::{PackOptions, PackReport, pack};
use cofolio_node::backend;

use crate::cmd::Outcome;
use crate::context::Context;
use crate::exit::{Exit, Fail};
use crate::ui::{Table, human_size, plural};

/// Pack an image: make of it one that carries its data, over segments
///
/// A pack is an EROFS image whose files lie in segments, files that packs of one trust domain share: what images have in
/// common is in them once. It is what `inode-share` mounts. Where the filesystem can (`doctor` says so), segments share
/// their blocks with the objects; elsewhere, and compressed, they take room of their own. Both are made from objects, are removed with
/// their image by `gc`, and can be made again at any time. All content is checked on the way.
///
/// With --vm, the pack is one for virtual machines, which have its segments as devices and share them by the page; `vm run`
/// makes it if it is missing. It shares nothing with packs for mounts, and an image can have both.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  cofolio pack redis:7.0.15\n  cofolio pack --again redis:7.0.15 && cofolio gc\n  \
    cofolio pack --remove redis:7.0.15\n  cofolio pack --vm redis:7.0.15"
)]
pub(crate) struct Args {
    /// Refs or first digits of digests
    #[arg(required = true)]
    images: Vec<String>,
    /// Pack images that have a pack anew, without segments of which they need less than half
    #[arg(long)]
    again: bool,
    /// Make or remove the pack for virtual machines
    #[arg(long, conflicts_with = "lz4")]
    vm: bool,
    /// Compress contents with LZ4, and replace packs that are not [default: as the packs of the trust domain are, see
    /// `backend`]
    #[arg(long, conflicts_with = "remove")]
    lz4: bool,
    /// Remove packs; what only they needed goes with the next `gc`
    #[arg(long, conflicts_with = "again")]
    remove: bool,
}

pub(crate) fn run(args: &Args, context: &Context<'_>) -> Outcome {
    let domain = context.domain()?;
    // A name that is not there stops it before anything is done.
    let images = args.images.iter().map(|image| context.image(&domain, image));
    let images = images.collect::<anyhow::Result<Vec<_>>>()?;
    let form = if args.vm { Form::Dax } else { backend::form(&domain, args.lz4)? };
    if args.remove {
        for image in &images {
            let packs = domain.packs_of(form.pack_kind(), &image.digest)?;
            if packs.is_empty() {
                return Err(Fail::not_found(format!("{} has no pack", image.shown())).into());
            }
            domain.remove_named(&packs)?;
        }
        return Ok(Exit::Ok);
    }
    let options = PackOptions { again: args.again, form, ..PackOptions::default() };
    let mut reports = Vec::new();
    for image in &images {
        let report =
            context.work("packing", "file", |task| pack(&domain, &image.digest, &options, task))?;
        if !context.ui.json {
            show(context, &report)?;
        }
        reports.push(report);
    }
    if context.ui.json {
        context.ui.json(&reports)?;
    }
    Ok(Exit::Ok)
}

fn show(context: &Context<'_>, report: &PackReport) -> anyhow::Result<()> {
    context.ui.line(report.pack.to_string())?;
    if context.ui.quiet {
        return Ok(());
    }
    let mut table = Table::plain();
    let segments = plural(report.segments.len() as u64, "segment");
    table.detail(
        "over",
        match report.new_segments {
            0 => segments,
            new => format!("{segments}, {new} new with {}", human_size(report.new_bytes)),
        },
    );
    if report.form == Form::Lz4 {
        table.detail("compressed", "LZ4".to_owned());
    }
    context.ui.table(&table).map(drop)
}
