mod sharing;

use std::collections::{BTreeMap, BTreeSet};

use cofolio_image::pack::ImageContents;
use cofolio_store::task::Task;
use cofolio_store::{Digest, DuReport, ImageUsage};
use serde_json::json;

use crate::cmd::Outcome;
use crate::context::{Context, short};
use crate::ui::{Cell, Table, Tone, ago, human_count};

/// List the images of the store
///
/// With --size, which reads every image and looks at every file of the store: SIZE is what an image's
/// files and metadata take; UNIQUE is the part of it that no other image uses, so what removing the image
/// would free; SHARED is the rest.
///
/// With --sharing, which reads every image's metadata only: what each image has in common with each other
/// one, in percent of its content; ALONE is what no other has.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  cofolio images\n  cofolio images --size\n  cofolio images --sharing\n  \
    cofolio images --json | jq -r '.[].name'"
)]
pub(crate) struct Args {
    /// Show what the images take
    #[arg(long, short)]
    size: bool,
    /// Show how much of each image the others have, as a matrix
    #[arg(long, conflicts_with = "size")]
    sharing: bool,
    /// Print full digests
    #[arg(long)]
    digests: bool,
}

pub(crate) fn run(args: &Args, context: &Context<'_>) -> Outcome {
    let domain = context.domain()?;
    if args.sharing {
        return sharing::run(&domain, args.digests, context);
    }
    let (refs, exit) = context.refs(&domain)?;
    let images = domain.images()?;
    let report =
        if args.size { domain.du(&ImageContents, &Task::default())? } else { DuReport::default() };
    let usage: BTreeMap<Digest, &ImageUsage> =
        report.images.iter().map(|image| (image.image, image)).collect();

    let mut rows = Vec::new();
    let mut named = BTreeSet::new();
    for (name, record) in &refs {
        named.insert(record.image);
        rows.push((Some(name.as_str()), record.image, record.created));
    }
    // Images that nothing but a mount or a lease keeps, or that gc will take.
    rows.extend(
        images.iter().filter(|image| !named.contains(image)).map(|image| (None, *image, 0)),
    );

    if context.ui.json {
        let list: Vec<_> = rows
            .iter()
            .map(|(name, image, created)| {
                let mut row = json!({"name": name, "image": image, "created": created});
                if args.size {
                    let usage = usage.get(image);
                    row["objects"] = usage.map(|u| u.objects).into();
                    row["bytes"] = usage.map(|u| u.bytes + u.metadata_bytes).into();
                    row["unique_bytes"] =
                        usage.map(|u| u.exclusive_bytes + u.metadata_bytes).into();
                    row["shared_bytes"] = usage.map(|u| u.shared_bytes()).into();
                }
                row
            })
            .collect();
        context.ui.json(&list)?;
        return Ok(exit);
    }
    if rows.is_empty() {
        context.ui.note("no images (`cofolio import SOURCE` brings one in)");
        return Ok(exit);
    }
    let mut table = Table::new(match args.size {
        true => &["NAME", "IMAGE", "CREATED", "OBJECTS", "SIZE", "UNIQUE", "SHARED"],
        false => &["NAME", "IMAGE", "CREATED"],
    });
    for (name, image, created) in rows {
        let name = match name {
            Some(name) => Cell::left(name).tone(Tone::Bold),
            None => Cell::left("<none>").tone(Tone::Dim),
        };
        let digest = if args.digests { image.to_string() } else { short(&image) };
        let mut row = vec![name, Cell::left(digest), Cell::left(ago(created))];
        match usage.get(&image) {
            _ if !args.size => {}
            Some(u) => row.extend([
                Cell::right(human_count(u.objects)),
                Cell::size(u.bytes + u.metadata_bytes),
                Cell::size(u.exclusive_bytes + u.metadata_bytes),
                Cell::size(u.shared_bytes()),
            ]),
            None => row.extend((0..4).map(|_| Cell::right("?").tone(Tone::Bad))),
        }
        table.row(row);
    }
    context.ui.table(&table)?;
    Ok(exit)
}
