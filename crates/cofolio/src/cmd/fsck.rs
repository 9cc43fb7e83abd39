use cofolio_cli::interrupt;
use cofolio_image::source::Source;
use cofolio_node::upkeep::repair::Checked;
use cofolio_store::{FindingKind, Store};
use serde_json::Value;

use crate::cmd::pull::RegistryArgs;
use crate::cmd::{Outcome, findings_table, note_mending};
use crate::context::Context;
use crate::exit::Exit;
use crate::ui::{Tone, human_count, human_size, plural};

/// Unprotected files that are listed: a copied store has nothing else.
const UNPROTECTED_MAX: usize = 3;

/// Check the store for missing, truncated and altered content
///
/// Reads and hashes everything, unless --quick, and names the refs and files that damage hits. Changes
/// nothing, unless --repair. Exit code 4 if something that was stored is lost or wrong; what is merely
/// untidy is listed and does not count.
///
/// With --repair, objects, images and layers that are missing, truncated or altered are brought back from
/// a source that has the image: only layers that something is wrong with are read, only what is wrong is
/// written, and all of it is checked before it takes the place. A mount that is there keeps the files that
/// it has open or has looked up; it is listed. Later mounts of its image share these files, until all of
/// them are unmounted; only with --verify a mount never serves an old file. Records of refs, with
/// configuration and layers of their images, cannot be brought back: import the image again under its name.
/// Unprotected content is verified, then protected (fs-verity, the immutable flag); that needs no source.
/// Packs and segments that are damaged are removed: `pack` makes them again. Bases that are damaged are
/// made again here. If a source fails, the next one is tried. The list and the exit code show the damage
/// that is left.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  cofolio fsck\n  cofolio fsck --quick --json\n  \
    cofolio fsck --repair --from oci:layouts/redis:7.0.15")]
pub(crate) struct Args {
    /// Look at names, sizes and records only, do not read content
    #[arg(long)]
    quick: bool,
    /// Bring back what is missing or altered, and protect what is not protected
    #[arg(long)]
    repair: bool,
    /// Where from: any source that `import` takes; may be given several times
    #[arg(long, value_name = "SOURCE", requires = "repair")]
    from: Vec<String>,
}

pub(crate) fn run(args: &Args, context: &Context<'_>) -> Outcome {
    let config = &context.config.config;
    let sources = args.from.iter().map(|text| {
        let source = Source::parse(text)?;
        let registry = RegistryArgs::default().options(&source, config)?;
        Ok((source, registry))
    });
    let sources = sources.collect::<anyhow::Result<Vec<_>>>()?;
    if args.repair && Store::mend_meta(&context.global.store)? {
        let done = context.ui.paint(Tone::Good, "repaired");
        context.ui.note(format!("{done} meta.json: it was damaged, and is made again"));
    }
    let (store, of_meta) = Store::open_damaged(&context.global.store)?;
    let domain = store.waits_until(interrupt::cancel()).domain(&context.global.domain)?;
    let doing = if args.repair { "repairing" } else { "checking" };
    let repair = args.repair.then_some(&sources[..]);
    let upkeep = context.upkeep(&domain)?;
    let fsck = |task: &_| upkeep.fsck(!args.quick, repair, task);
    let mut checked = context.work(doing, "object", fsck)?;
    checked.report.findings.extend(of_meta);
    for (number, why) in &checked.failed {
        context.ui.error(&format!("--from {}: {why}", args.from[*number]), None);
    }
    if context.ui.json {
        context.ui.json(&json(args, &checked)?)?;
    } else {
        show(args, context, &checked)?;
    }
    Ok(if checked.report.is_damaged() { Exit::Corrupt } else { Exit::Ok })
}

fn json(args: &Args, checked: &Checked) -> serde_json::Result<Value> {
    let mut value = serde_json::to_value(&checked.report)?;
    value["damaged"] = checked.report.is_damaged().into();
    if checked.had_damage || !checked.repaired.is_empty() {
        value["repaired"] = serde_json::to_value(&checked.repaired)?;
        value["mounted_before"] = serde_json::to_value(&checked.mounts)?;
    }
    if args.repair {
        value["protected"] = checked.protected.into();
        value["unpacked"] = serde_json::to_value(&checked.unpacked)?;
    }
    Ok(value)
}

fn show(args: &Args, context: &Context<'_>, checked: &Checked) -> anyhow::Result<()> {
    let report = &checked.report;
    for finding in &checked.repaired {
        let done = context.ui.paint(Tone::Good, "repaired");
        context.ui.line(format!("{done} {} ({})", finding.path, finding.kind))?;
        if finding.kind == FindingKind::DirectoryMissing && finding.path.ends_with("/refs") {
            context.ui.note(
                "the names of images were lost: they are called `recovered-` and their digest now, \
                 and `cofolio tag` gives others. Their configuration (command, user, environment) \
                 is lost too, and `gc` removes their layers: import or pull each image again",
            );
        }
    }
    for target in &checked.mounts {
        context.ui.note(format!(
            "{} was mounted before: files that it has open or has looked up stay as they were, \
             also in later mounts of its image, until all of these are unmounted",
            target.display()
        ));
    }
    for image in &checked.unpacked {
        context.ui.note(format!(
            "the pack of {image} was damaged and is removed: `cofolio pack {image}` makes it again"
        ));
    }
    if checked.protected > 0 {
        let done = context.ui.paint(Tone::Good, "protected");
        context.ui.line(format!("{done} {}", plural(checked.protected, "file")))?;
    }
    if !report.findings.is_empty() {
        let mut unprotected = 0;
        let shown = report.findings.iter().filter(|finding| {
            unprotected += usize::from(finding.kind == FindingKind::Unprotected);
            finding.kind != FindingKind::Unprotected || unprotected <= UNPROTECTED_MAX
        });
        context.ui.table(&findings_table(shown))?;
        if unprotected > 0 {
            let text = match args.repair {
                // It protected the others.
                true => "damaged files, and then images too, stay so until the files are restored",
                false => "`cofolio fsck --repair` protects them",
            };
            let files = plural(unprotected as u64, "file");
            context.ui.line(format!("{files} unprotected: {text}; --json lists them"))?;
        }
        if report.more > 0 {
            context.ui.line(format!("and {} more", human_count(report.more)))?;
        }
    }
    note_mending(context, &report.findings);
    if context.ui.quiet {
        return Ok(());
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
        "{verdict}; looked at {}, {}, {}, {}, {}, {}; {hashed}",
        plural(report.objects, "object"),
        plural(report.images, "image"),
        plural(report.layers, "layer"),
        plural(report.refs, "ref"),
        plural(report.roots, "root"),
        plural(report.segments, "segment"),
    ))?;
    Ok(())
}
