use cofolio_node::contents::ImageContents;
use cofolio_store::FsckOptions;

use crate::cmd::Outcome;
use crate::context::Context;
use crate::exit::Exit;
use crate::progress::Counter;
use crate::ui::{Cell, Table, Tone, human_count, human_size, plural};

/// Check the store for missing, truncated and altered content
///
/// Reads and hashes everything, unless --quick. Changes nothing. Exit code 4 if something that was stored
/// is lost or wrong; what is merely untidy is listed and does not count.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  cofolio fsck\n  cofolio fsck --quick --json")]
pub(crate) struct Args {
    /// Look at names, sizes and records only, do not read content
    #[arg(long)]
    quick: bool,
}

pub(crate) fn run(args: &Args, context: &Context<'_>) -> Outcome {
    let domain = context.domain()?;
    let counter = Counter::new(context.ui, "checking");
    let report =
        domain.fsck(&ImageContents, FsckOptions { rehash: !args.quick }, &|objects, bytes| {
            counter.set(bytes, || format!("{} objects", human_count(objects)));
        })?;
    drop(counter);
    let exit = if report.is_damaged() { Exit::Corrupt } else { Exit::Ok };
    if context.ui.json {
        let mut value = serde_json::to_value(&report)?;
        value["damaged"] = report.is_damaged().into();
        context.ui.json(&value)?;
        return Ok(exit);
    }
    if !report.findings.is_empty() {
        let mut table = Table::new(&["FINDING", "FILE", "DETAIL"]);
        for finding in &report.findings {
            let tone = if finding.kind.is_damage() { Tone::Bad } else { Tone::Warn };
            let detail = match &finding.user {
                Some(user) => format!("{} (used by {user})", finding.detail),
                None => finding.detail.clone(),
            };
            table.row(vec![
                Cell::left(finding.kind.as_str()).tone(tone),
                Cell::left(&finding.path),
                Cell::left(detail),
            ]);
        }
        context.ui.table(&table)?;
        if report.more > 0 {
            context.ui.line(format!("and {} more", human_count(report.more)))?;
        }
    }
    if context.ui.quiet {
        return Ok(exit);
    }
    let verdict = match (report.is_damaged(), report.findings.is_empty()) {
        (true, _) => context.ui.paint(Tone::Bad, "damaged"),
        (false, false) => context.ui.paint(Tone::Warn, "no damage, see above"),
        (false, true) => context.ui.paint(Tone::Good, "no damage"),
    };
    let hashed = match args.quick {
        true => "content not read (--quick)".to_owned(),
        false => format!("{} hashed", human_size(report.hashed_bytes)),
    };
    context.ui.line(format!(
        "{verdict}: {}, {}, {}, {}, {}; {hashed}",
        plural(report.objects, "object"),
        plural(report.images, "image"),
        plural(report.layers, "layer"),
        plural(report.refs, "ref"),
        plural(report.roots, "root"),
    ))?;
    Ok(exit)
}
