use cofolio_image::pack::ImageContents;

use crate::cmd::Outcome;
use crate::context::{Context, short};
use crate::ui::{Cell, Table, Tone, human_count, human_size, plural};

/// Show what the store's images take on disk
///
/// Sizes are blocks on disk. Per image: all that it uses, and the part that is its own (what removing it
/// would free). In all: what the store takes, changes that were kept (`umount --keep`) included, and what the
/// images would take without sharing.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  cofolio du\n  cofolio du --json | jq .object_bytes")]
pub(crate) struct Args {}

pub(crate) fn run(_args: &Args, context: &Context<'_>) -> Outcome {
    let domain = context.domain()?;
    let report = context.work("counting", "image", |task| domain.du(&ImageContents, task))?;
    let kept = context.mounter(&domain)?.kept()?;
    let kept_bytes = kept.iter().map(|(bytes, _)| bytes).sum::<u64>();
    if context.ui.json {
        let mut value = serde_json::to_value(&report)?;
        value["kept_changes"] = kept.len().into();
        value["kept_bytes"] = kept_bytes.into();
        return context.ui.json(&value);
    }
    if !report.images.is_empty() {
        let mut table =
            Table::new(&["IMAGE", "METADATA", "OBJECTS", "CONTENT", "UNIQUE", "SHARED"]);
        for image in &report.images {
            let name = match image.refs.first() {
                Some(name) if image.refs.len() > 1 => {
                    Cell::left(format!("{name} (+{})", image.refs.len() - 1))
                }
                Some(name) => Cell::left(name),
                None => Cell::left(short(&image.image)).tone(Tone::Dim),
            };
            table.row(vec![
                name,
                Cell::size(image.metadata_bytes),
                Cell::right(human_count(image.objects)),
                Cell::size(image.bytes),
                Cell::size(image.exclusive_bytes),
                Cell::size(image.shared_bytes()),
            ]);
        }
        context.ui.table(&table)?;
        context.ui.line("")?;
    }
    let mut table = Table::plain();
    let counted =
        |bytes, count, what: &str| format!("{} in {}", human_size(bytes), plural(count, what));
    table.pair("objects", counted(report.object_bytes, report.objects, "file"));
    if report.unnamed_objects > 0 {
        let unused = counted(report.unnamed_bytes, report.unnamed_objects, "file");
        table.pair(
            "  in no image",
            format!("{unused} (`cofolio gc` removes what no layer keeps either)"),
        );
    }
    table.pair("metadata images", human_size(report.metadata_bytes));
    table.pair("layer trees", counted(report.layer_bytes, report.layers, "layer"));
    if report.segments > 0 {
        let packs = plural(report.packs, "pack");
        let counted = counted(report.segment_bytes, report.segments, "segment");
        table.pair("packs", format!("{counted} for {packs}"));
    }
    if !kept.is_empty() {
        let count = format!("{} of {}", human_size(kept_bytes), plural(kept.len() as u64, "mount"));
        table.pair("kept changes", format!("{count} (see `cofolio mounts`)"));
    }
    table.pair("together", human_size(report.bytes() + kept_bytes));
    let unshared = report.unshared_bytes();
    let taken = report.object_bytes - report.unnamed_bytes + report.metadata_bytes;
    if unshared > taken {
        table.pair(
            "saved by sharing",
            format!("{} of {}", human_size(unshared - taken), human_size(unshared)),
        );
    }
    context.ui.table(&table)
}
