use cofolio_image::pack::ImageContents;
use cofolio_store::{Domain, Finding, ScrubOptions};
use serde_json::Value;

use crate::cmd::{Outcome, findings_table, note_mending};
use crate::context::Context;
use crate::exit::{Exit, Fail};
use crate::ui::{Tone, human_size, plural};
use cofolio_node::size::Size;

/// Hash an image and every file of it again, and compare
///
/// Reads all content from the store. Exit code 4 if anything is missing, truncated or altered.
///
/// With --scrub it is done quietly, for a machine that is at work: past the page cache (or leaving it as it
/// was, where the filesystem does not allow that), with idle I/O priority, on one processor, at most --rate
/// bytes per second. So it tells what the disk has, where plain `verify` may be told what memory has. Garbage
/// collection and imports go on meanwhile. A scrub that was killed goes on where it was when it is started
/// again with the same images; what it had found is told at the end.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  cofolio verify redis:7.0.15\n  \
    cofolio verify --scrub --all --rate 20MiB")]
pub(crate) struct Args {
    /// Ref or first digits of a digest; with --scrub, any number of them
    #[arg(required_unless_present = "all")]
    images: Vec<String>,
    /// Read slowly and quietly, and remember how far
    #[arg(long)]
    scrub: bool,
    /// With --scrub: everything in the trust domain, layers and objects that only they name included
    #[arg(long, requires = "scrub", conflicts_with = "images")]
    all: bool,
    /// With --scrub: bytes per second, as 500K or 20MiB
    #[arg(long, value_name = "SIZE", requires = "scrub")]
    rate: Option<Size>,
}

pub(crate) fn run(args: &Args, context: &Context<'_>) -> Outcome {
    let domain = context.domain()?;
    if args.scrub {
        return scrub(args, context, &domain);
    }
    let [image] = &args.images[..] else {
        return Err(Fail::usage("one image at a time").hint("--scrub takes several").into());
    };
    let image = context.image(&domain, image)?;
    let verify = |task: &_| domain.verify_image(&image.digest, &ImageContents, task);
    let report = context.work("verifying", "file", verify)?;
    if context.ui.json {
        let mut value = serde_json::to_value(&report)?;
        value["image"] = serde_json::to_value(image.digest)?;
        return json(context, value, &report.findings);
    }
    let read = format!("{}, {} hashed", plural(report.objects, "object"), human_size(report.bytes));
    show(context, &image.shown(), &report.findings, &read)
}

fn scrub(args: &Args, context: &Context<'_>, domain: &Domain) -> Outcome {
    let named = args.images.iter().map(|image| context.image(domain, image));
    let named = named.collect::<anyhow::Result<Vec<_>>>()?;
    let images = (!args.all).then(|| named.iter().map(|image| image.digest).collect());
    if args.rate == Some(Size(0)) {
        return Err(Fail::usage("--rate 0 would never end").into());
    }
    // If the kernel refuses these requests, the rate still limits the scrub.
    let _ = cofolio_sys::priority::set_idle_io();
    let _ = rustix::process::nice(19);
    let options = ScrubOptions { images, rate: args.rate.map(|rate| rate.0) };
    let scrub = |task: &_| domain.scrub(&ImageContents, &options, task);
    let report = context.work("scrubbing", "object", scrub)?;
    if context.ui.json {
        return json(context, serde_json::to_value(&report)?, &report.findings);
    }
    if report.bytes_before > 0 {
        let before = human_size(report.bytes_before);
        context.ui.note(format!("{before} of it were read by an earlier run that did not end"));
    }
    let what = match args.all {
        true => format!("domain `{}`", domain.name()),
        false => named.iter().map(crate::context::Named::shown).collect::<Vec<_>>().join(", "),
    };
    if report.more > 0 {
        context.ui.note(format!("{} are not listed", plural(report.more, "finding")));
    }
    let read = format!("{}, {} read", plural(report.objects, "object"), human_size(report.bytes));
    show(context, &what, &report.findings, &read)
}

fn json(context: &Context<'_>, mut value: Value, findings: &[Finding]) -> Outcome {
    value["sound"] = findings.is_empty().into();
    context.ui.json(&value)?;
    Ok(exit(findings))
}

fn exit(findings: &[Finding]) -> Exit {
    if findings.is_empty() { Exit::Ok } else { Exit::Corrupt }
}

fn show(context: &Context<'_>, what: &str, findings: &[Finding], read: &str) -> Outcome {
    let exit = exit(findings);
    if findings.is_empty() {
        if !context.ui.quiet {
            let good = context.ui.paint(Tone::Good, "sound");
            context.ui.line(format!("{what}: {good}: {read}"))?;
        }
        return Ok(exit);
    }
    context.ui.table(&findings_table(findings))?;
    let bad = context.ui.paint(Tone::Bad, "damaged");
    context.ui.line(format!("{what}: {bad}: {}", plural(findings.len() as u64, "finding")))?;
    note_mending(context, findings);
    Ok(exit)
}
