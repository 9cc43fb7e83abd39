use cofolio_node::contents::ImageContents;

use crate::cmd::Outcome;
use crate::context::Context;
use crate::exit::Exit;
use crate::progress::Counter;
use crate::ui::{Cell, Table, Tone, human_count, human_size, plural};

/// Hash an image and every file of it again, and compare
///
/// Reads all content from the store. Exit code 4 if anything is missing, truncated or altered.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  cofolio verify redis:7.0.15")]
pub(crate) struct Args {
    /// Ref or first digits of a digest
    image: String,
}

pub(crate) fn run(args: &Args, context: &Context<'_>) -> Outcome {
    let domain = context.domain()?;
    let image = context.image(&domain, &args.image)?;
    let counter = Counter::new(context.ui, "verifying");
    let report = domain.verify_image(&image.digest, &ImageContents, &|progress| {
        counter.set_of(progress.bytes, progress.bytes_total, || {
            format!(
                "{} of {} files",
                human_count(progress.objects),
                human_count(progress.objects_total)
            )
        });
    })?;
    drop(counter);
    let sound = report.findings.is_empty();
    let exit = if sound { Exit::Ok } else { Exit::Corrupt };
    if context.ui.json {
        let mut value = serde_json::to_value(&report)?;
        value["image"] = serde_json::to_value(image.digest)?;
        value["sound"] = sound.into();
        context.ui.json(&value)?;
        return Ok(exit);
    }
    if sound && context.ui.quiet {
        return Ok(exit);
    }
    if sound {
        let good = context.ui.paint(Tone::Good, "sound");
        context.ui.line(format!(
            "{}: {good}: {}, {} hashed",
            image.shown(),
            plural(report.objects, "object"),
            human_size(report.bytes)
        ))?;
        return Ok(exit);
    }
    let mut table = Table::new(&["FINDING", "FILE", "DETAIL"]);
    for finding in &report.findings {
        table.row(vec![
            Cell::left(finding.kind.as_str()).tone(Tone::Bad),
            Cell::left(&finding.path),
            Cell::left(&finding.detail),
        ]);
    }
    context.ui.table(&table)?;
    let bad = context.ui.paint(Tone::Bad, "damaged");
    context.ui.line(format!(
        "{}: {bad}: {}",
        image.shown(),
        plural(report.findings.len() as u64, "finding")
    ))?;
    context.ui.note("`cofolio fsck --repair --from SOURCE` brings back what is wrong");
    Ok(exit)
}
