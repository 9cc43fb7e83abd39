use std::time::{SystemTime, UNIX_EPOCH};

use cofolio_node::contents::ImageContents;
use cofolio_store::GcOptions;

use crate::cmd::Outcome;
use crate::context::Context;
use crate::exit::Exit;
use crate::ui::{Cell, Table, human_count, human_size};

/// Remove what no name, mount or lease keeps
///
/// Looks at refs, leases, snapshots, virtual machines and at what the kernel has mounted. An image, layer
/// or record that cannot be read stops it before anything is removed. Leftovers of interrupted imports go
/// too.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  cofolio gc --dry-run\n  cofolio gc")]
pub(crate) struct Args {
    /// Only say what would be removed
    #[arg(long, short = 'n')]
    dry_run: bool,
    /// Do not wait for imports that are being published; exit code 7 instead
    #[arg(long)]
    no_wait: bool,
}

pub(crate) fn run(args: &Args, context: &Context<'_>) -> Outcome {
    let domain = context.domain()?;
    let mounter = context.mounter(&domain);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok();
    let options = GcOptions {
        dry_run: args.dry_run,
        wait: !args.no_wait,
        now: i64::try_from(now).unwrap_or(0),
        boot_id: boot_id.map(|id| id.trim().to_owned()),
    };
    // What killed processes left would count as in use.
    if !args.dry_run {
        for failed in mounter.reconcile()?.failed {
            context.ui.note(format!("could not be cleaned up: {failed}"));
        }
    }
    let report = domain.gc(&ImageContents, &|| Ok(mounter.live_images()?), &options)?;
    if context.ui.json {
        let mut value = serde_json::to_value(&report)?;
        value["bytes"] = report.bytes().into();
        context.ui.json(&value)?;
        return Ok(Exit::Ok);
    }
    let mut table =
        Table::new(&["", if report.dry_run { "WOULD GO" } else { "REMOVED" }, "SIZE", "KEPT"]);
    let mut row = |name: &str, removed: u64, bytes: u64, kept: Option<u64>| {
        table.row(vec![
            Cell::left(name),
            Cell::right(human_count(removed)),
            Cell::size(bytes),
            Cell::right(kept.map_or_else(String::new, human_count)),
        ]);
    };
    row("images", report.images, report.image_bytes, Some(report.kept_images));
    row("layers", report.layers, report.layer_bytes, Some(report.kept_layers));
    row("objects", report.objects, report.object_bytes, Some(report.kept_objects));
    row("leftovers", report.leftovers, report.leftover_bytes, None);
    context.ui.table(&table)?;
    for root in &report.roots {
        context.ui.line(format!("root {root}: ran out, or of an earlier boot"))?;
    }
    let verb = if report.dry_run { "would be freed" } else { "freed" };
    context.ui.line(format!("{} {verb}", human_size(report.bytes())))?;
    Ok(Exit::Ok)
}
