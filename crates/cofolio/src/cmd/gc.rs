use cofolio_node::size::Size;
use cofolio_node::upkeep::{self, Report};
use cofolio_store::{GcReport, ITSELF, TrimPlan};

use crate::cmd::Outcome;
use crate::context::Context;
use crate::exit::{Exit, mending};
use crate::trim;
use crate::ui::{Cell, Table, human_count, human_size, plural};

/// Remove what no name, mount or lease keeps
///
/// Looks at refs, leases and at what the kernel has mounted. If an image, layer or record cannot be read,
/// everything that it might need stays, it is named, and the exit code is 4. An image that is mounted stays
/// whoever mounted it, from another store perhaps: the kernel does not say from which. Leftovers of interrupted
/// imports go too; exit code 1 if any stay. Imports and mounts go on meanwhile.
///
/// Segments (see `pack`) that no pack needs go, and are written anew where packs need less than half of
/// one: their images are packed again first. Segments of images that are mounted stay, as their room would not come back.
///
/// Images that share layers get a base: what they have in common is in memory once from their next mount
/// on. The first time after the machine has started, the sizes of all objects are compared with what images
/// say, at low priority; exit code 4 if one is wrong.
///
/// With --to or --older-than, names of images go first: those whose last import, mount or unmount is
/// longest ago. Images that are mounted, leased or pinned (`cofolio tag --keep`) stay, as do those that
/// kept changes are of (`cofolio mounts` lists them) and those used within `store.limit.keep_days`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  cofolio gc --dry-run\n  cofolio gc\n  \
    cofolio gc --to \"50 GiB\" --dry-run\n  cofolio gc --older-than 30")]
pub(crate) struct Args {
    /// Only say what would be removed; segments are listed only if already under half used
    #[arg(long, short = 'n')]
    dry_run: bool,
    /// Do not wait for imports that are being published; exit code 7 instead
    #[arg(long)]
    no_wait: bool,
    /// Remove images, least recently used first, until the trust domain takes at most this on disk
    #[arg(long, value_name = "SIZE")]
    to: Option<Size>,
    /// Remove images that were not used for so many days
    #[arg(long, value_name = "DAYS")]
    older_than: Option<u32>,
}

pub(crate) fn run(args: &Args, context: &Context<'_>) -> Outcome {
    let domain = context.domain()?;
    let options = upkeep::Options {
        dry_run: args.dry_run,
        wait: !args.no_wait,
        size: args.to.map(|size| size.0),
        older_than_days: args.older_than,
    };
    let announce = |plan: &TrimPlan| trim::announce(context, &domain, plan, args.dry_run);
    let mut report = Report::default();
    let upkeep = context.upkeep(&domain)?;
    let ended = context
        .work("packing anew", "file", |task| upkeep.run(&options, &announce, &mut report, task));
    let told = tell(context, &report, ended.is_ok());
    ended?;
    told?;
    Ok(exit(&report))
}

fn tell(context: &Context<'_>, report: &Report, is_complete: bool) -> anyhow::Result<()> {
    for failed in &report.failed {
        context.ui.error(&format!("left for the next gc: {failed}"), None);
    }
    for (image, reason) in &report.rewritten.failed {
        context.ui.error(&format!("image {image} could not be packed anew: {reason}"), None);
    }
    for reason in &report.bases.failed {
        context.ui.note(format!("images share no base: {reason}"));
    }
    if !is_complete && report.gc == GcReport::default() {
        return Ok(());
    }
    if context.ui.json {
        return context.ui.json(&json(report)?).map(|_| ());
    }
    show(context, report)
}

fn json(report: &Report) -> anyhow::Result<serde_json::Value> {
    let mut value = serde_json::to_value(&report.gc)?;
    value["bytes"] = report.gc.bytes().into();
    value["rewritten"] = serde_json::to_value(&report.rewritten)?;
    value["based"] = serde_json::to_value(&report.bases.based)?;
    value["sizes"] = serde_json::to_value(&report.sizes)?;
    value["failed"] = serde_json::to_value(&report.failed)?;
    if let Some(plan) = &report.trim {
        value["trim"] = serde_json::to_value(plan)?;
    }
    Ok(value)
}

/// What cannot be read is damage, though the collection did what it could.
fn exit(report: &Report) -> Exit {
    let is_sound = report.sizes.as_ref().is_none_or(|sizes| sizes.findings.is_empty());
    match report.gc.unreadable.is_empty() && is_sound {
        false => Exit::Corrupt,
        true if report.failed.is_empty() && report.rewritten.failed.is_empty() => Exit::Ok,
        true => Exit::Failure,
    }
}

fn show(context: &Context<'_>, report: &Report) -> anyhow::Result<()> {
    let Report { gc: report, rewritten, bases, sizes, .. } = report;
    for finding in sizes.iter().flat_map(|sizes| &sizes.findings) {
        let said = format!("{} {}: {}", finding.path, finding.kind, finding.detail);
        context.ui.error(&said, Some(mending(&finding.path)));
    }
    if let Some(more) = sizes.as_ref().map(|sizes| sizes.more).filter(|more| *more > 0) {
        context.ui.error(&format!("and {} more", human_count(more)), None);
    }
    for it in &report.unreadable {
        let said = it.to_string();
        let hint = mending(it.what.trim_matches('`'));
        context.ui.error(&said, (it.kept != ITSELF).then_some(hint));
    }
    if context.ui.quiet {
        return Ok(());
    }
    let mut table =
        Table::new(&["", if report.dry_run { "WOULD GO" } else { "REMOVED" }, "SIZE", "KEPT"]);
    let mut row = |name: &str, removed: u64, bytes: Option<u64>, kept: Option<u64>| {
        table.row(vec![
            Cell::left(name),
            Cell::right(human_count(removed)),
            bytes.map_or_else(|| Cell::left(""), Cell::size),
            Cell::right(kept.map_or_else(String::new, human_count)),
        ]);
    };
    let kept = report.kept_images - report.kept_bases;
    row("images", report.images - report.bases, Some(report.image_bytes), Some(kept));
    if report.bases + report.kept_bases > 0 {
        row("bases and deltas", report.bases, None, Some(report.kept_bases));
    }
    row("layers", report.layers, Some(report.layer_bytes), Some(report.kept_layers));
    row("objects", report.objects, Some(report.object_bytes), Some(report.kept_objects));
    if report.packs + report.segments + report.kept_segments > 0 {
        let kept = Some(report.kept_segments);
        row("segments and packs", report.packs + report.segments, Some(report.segment_bytes), kept);
    }
    row("leftovers", report.leftovers, Some(report.leftover_bytes), None);
    context.ui.table(&table)?;
    for root in &report.roots {
        context
            .ui
            .line(format!("root {root}: its process has ended, or it is of an earlier boot"))?;
    }
    if !rewritten.segments.is_empty() {
        let segments = plural(rewritten.segments.len() as u64, "segment");
        context.ui.line(match report.dry_run {
            true => format!("{segments} with less than half in use would be written anew"),
            false => format!(
                "{segments} with less than half in use: {} written anew",
                human_size(rewritten.new_bytes)
            ),
        })?;
    }
    if !bases.based.is_empty() {
        let images = plural(bases.based.len() as u64, "image");
        context.ui.line(format!("{images} mounted over a base from now on"))?;
    }
    let verb = if report.dry_run { "would be freed" } else { "freed" };
    Ok(context.ui.line(format!("{} {verb}", human_size(report.bytes())))?)
}
