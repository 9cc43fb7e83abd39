mod sharing;

use std::collections::BTreeSet;

use serde_json::json;

use crate::cmd::Outcome;
use crate::context::{Context, short};
use crate::ui::{Cell, Table, Tone, ago};

/// List the images of the store
///
/// What they take is what `du` shows. With --sharing, which reads every image's metadata only: what each image has in common with each other
/// one, in percent of its content; ALONE is what no other has.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  cofolio images\n  cofolio images --sharing\n  \
    cofolio images --json | jq -r '.[].name'")]
pub(crate) struct Args {
    /// Show how much of each image the others have, as a matrix
    #[arg(long)]
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
            .map(|(name, image, created)| json!({"name": name, "image": image, "created": created}))
            .collect();
        context.ui.json(&list)?;
        return Ok(exit);
    }
    if rows.is_empty() {
        context.ui.note("no images (`cofolio import SOURCE` brings one in)");
        return Ok(exit);
    }
    let mut table = Table::new(&["NAME", "IMAGE", "CREATED"]);
    for (name, image, created) in rows {
        let name = match name {
            Some(name) => Cell::left(name).tone(Tone::Bold),
            None => Cell::left("<none>").tone(Tone::Dim),
        };
        let digest = if args.digests { image.to_string() } else { short(&image) };
        table.row(vec![name, Cell::left(digest), Cell::left(ago(created))]);
    }
    context.ui.table(&table)?;
    Ok(exit)
}
