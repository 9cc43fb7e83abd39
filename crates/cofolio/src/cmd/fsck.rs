use std::collections::HashMap;
use std::path::PathBuf;

use cofolio_image::compose::contents::ImageContents;
use cofolio_image::import::{self, ImportOptions};
use cofolio_image::source::Source;
use cofolio_node::mount::MountState;
use cofolio_node::upkeep::bases;
use cofolio_store::task::Task;
use cofolio_store::{
    Contents, Damage, Digest, Domain, FileKind, Finding, FindingKind, FsckOptions, FsckReport,
    Store,
};

use crate::cmd::Outcome;
use crate::cmd::pull::RegistryArgs;
use crate::context::Context;
use crate::exit::Exit;
use crate::progress::Work;
use crate::ui::{Cell, Table, Tone, human_count, human_size, plural};

/// Check the store for missing, truncated and altered content
///
/// Reads and hashes everything, unless --quick, and names the refs and files that damage hits. Changes nothing, unless --repair. Exit code 4 if something
/// that was stored is lost or wrong; what is merely untidy is listed and does not count.
///
/// With --repair, objects, images and layers that are missing, truncated or altered are brought back from
/// a source that has the image: only layers that something is wrong with are read, only what is wrong is
/// written, and all of it is checked before it takes the place. A mount that is there keeps the files that
/// it has open or has looked up; it is listed, and sees the new ones once it is mounted again. Records of
/// refs cannot be brought back: import the image again under its name. Content that lacks the protection of
/// this store (fs-verity on a filesystem that has got it since, the immutable flag) is given it after it was
/// checked; that needs no source. Packs and segments that are damaged are removed: `pack` makes them again. Bases that are damaged are made again here. What is listed, and the exit code, are what is left.
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
    let sources: Vec<_> =
        args.from.iter().map(|text| Source::parse(text)).collect::<Result<_, _>>()?;
    if args.repair && Store::mend_meta(&context.global.store)? {
        let done = context.ui.paint(Tone::Good, "repaired");
        context.ui.note(format!("{done} meta.json: it was damaged, and is made again"));
    }
    let (store, of_meta) = Store::open_damaged(&context.global.store)?;
    let domain = store.domain(&context.global.domain)?;
    let work = Work::begin(context.ui, "checking", "object")?;
    let options = FsckOptions { rehash: !args.quick };
    let mut report = domain.fsck(&ImageContents, options, &work.task)?;
    report.findings.extend(of_meta);
    let unpacked = match args.repair && report.findings.iter().any(|it| it.kind.is_derived()) {
        true => remove_derived(&domain, &mut report, &work.task)?,
        false => Vec::new(),
    };
    drop(work);
    let has_damage = args.repair && report.is_damaged();
    let repaired = match has_damage {
        true => Some(repair(context, &domain, &sources, &mut report)?),
        false => None,
    };
    let unprotected = |finding: &Finding| {
        finding.kind == FindingKind::Unprotected
            || (finding.kind == FindingKind::Permissions && finding.path == ".")
    };
    let protected =
        match args.repair && (report.more > 0 || report.findings.iter().any(unprotected)) {
            true => protect(context, &domain, &mut report)?,
            false => 0,
        };
    let exit = if report.is_damaged() { Exit::Corrupt } else { Exit::Ok };
    if context.ui.json {
        let mut value = serde_json::to_value(&report)?;
        value["damaged"] = report.is_damaged().into();
        if let Some(repaired) = &repaired {
            value["repaired"] = serde_json::to_value(&repaired.findings)?;
            value["mounted_before"] = serde_json::to_value(&repaired.mounts)?;
        }
        if args.repair {
            value["protected"] = protected.into();
            value["unpacked"] = serde_json::to_value(&unpacked)?;
        }
        context.ui.json(&value)?;
        return Ok(exit);
    }
    if let Some(repaired) = &repaired {
        for finding in repaired.findings.iter().filter(|finding| finding.kind.is_damage()) {
            context.ui.line(format!(
                "{} {} ({})",
                context.ui.paint(Tone::Good, "repaired"),
                finding.path,
                finding.kind
            ))?;
        }
        for target in &repaired.mounts {
            context.ui.note(format!(
                "{} was mounted before: files that it has open or has looked up stay as they were \
                 until it is unmounted and mounted again",
                target.display()
            ));
        }
    }
    for image in &unpacked {
        context.ui.note(format!(
            "the pack of {image} was damaged and is removed: `cofolio pack {image}` makes it again"
        ));
    }
    if protected > 0 {
        let done = context.ui.paint(Tone::Good, "protected");
        context.ui.line(format!("{done} {}", plural(protected, "file")))?;
    }
    if report.is_damaged() && has_damage && sources.is_empty() {
        context.ui.note("nothing was brought back: --from SOURCE says where from");
    }
    if !report.findings.is_empty() {
        let mut table = Table::new(&["FINDING", "FILE", "DETAIL"]);
        for finding in &report.findings {
            let tone = if finding.kind.is_damage() { Tone::Bad } else { Tone::Warn };
            let mut detail = match &finding.user {
                Some(user) => format!("{} (used by {user})", finding.detail),
                None => finding.detail.clone(),
            };
            for (what, names) in [("refs", &finding.refs), ("files", &finding.files)] {
                if !names.is_empty() {
                    detail.push_str(&format!("; {what}: {}", names.join(", ")));
                }
            }
            table.row(vec![
                Cell::left(finding.kind.to_string()).tone(tone),
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
        "{verdict}: {}, {}, {}, {}, {}, {}; {hashed}",
        plural(report.objects, "object"),
        plural(report.images, "image"),
        plural(report.layers, "layer"),
        plural(report.refs, "ref"),
        plural(report.roots, "root"),
        plural(report.segments, "segment"),
    ))?;
    Ok(exit)
}

/// What a repair did.
struct Repaired {
    /// What was found before and is not there any more.
    findings: Vec<Finding>,
    /// Mounts that may still show files that were replaced.
    mounts: Vec<PathBuf>,
}

/// Brings back what the sources have of what is damaged; afterwards `report` says what is left.
fn repair(
    context: &Context<'_>,
    domain: &Domain,
    sources: &[Source],
    report: &mut FsckReport,
) -> anyhow::Result<Repaired> {
    let before = std::mem::take(report);
    let work = Work::begin(context.ui, "repairing", "file")?;
    let task = work.task.clone();
    let mut damage = domain.damage(&before, &ImageContents, &task)?;
    let first = damage.clone();
    for source in sources {
        if damage.is_empty() {
            break;
        }
        let registry = RegistryArgs::default().options(source, &context.config.config)?;
        let options = ImportOptions { repair: Some(damage), registry, ..ImportOptions::default() };
        import::import(domain, source, &options, &task)?;
        let left = domain.recheck(&first, &ImageContents, &task)?;
        damage = domain.damage(&left, &ImageContents, &task)?;
    }
    let left = domain.recheck(&first, &ImageContents, &task)?;
    drop(work);
    let is_mended = |finding: &&Finding| {
        !left
            .findings
            .iter()
            .any(|other| (other.kind, &other.path) == (finding.kind, &finding.path))
    };
    let findings: Vec<_> = before.findings.iter().filter(is_mended).cloned().collect();
    // The whole store was looked at before; now only what had been wrong.
    // What was not even listed can only be mended by doing it again.
    let (more, more_damage) = (before.more.max(left.more), before.more_damage || left.more_damage);
    *report = FsckReport { hashed_bytes: before.hashed_bytes, more, more_damage, ..left };
    let mounts = mounts_of(context, domain, &first)?;
    Ok(Repaired { findings, mounts })
}

/// Removes what is derived and damaged; gives the images that have no pack any more. Afterwards `report` says
/// what is left.
fn remove_derived(
    domain: &Domain,
    report: &mut FsckReport,
    task: &Task,
) -> anyhow::Result<Vec<Digest>> {
    let images = domain.remove_derived(report, &ImageContents, task)?;
    let is_base =
        |it: &Finding| matches!(it.kind, FindingKind::BaseAltered | FindingKind::BaseIncomplete);
    if report.findings.iter().any(is_base) {
        // Bases are made again here and now; where that fails, images are mounted without.
        let _ = bases::find(domain, task);
        task.check()?;
    }
    report.findings.retain(|finding| !finding.kind.is_derived());
    Ok(images.into_iter().collect())
}

/// Protects what is not; afterwards `report` says what is left.
fn protect(context: &Context<'_>, domain: &Domain, report: &mut FsckReport) -> anyhow::Result<u64> {
    let work = Work::begin(context.ui, "protecting", "object")?;
    let protected = domain.protect_all(&work.task)?;
    let now = domain.fsck(&ImageContents, FsckOptions { rehash: false }, &work.task)?;
    let still = |finding: &Finding| {
        !matches!(finding.kind, FindingKind::Unprotected | FindingKind::Permissions)
            || now
                .findings
                .iter()
                .any(|other| other.kind == finding.kind && other.path == finding.path)
    };
    report.findings.retain(still);
    if !report.more_damage {
        report.more = now.more;
    }
    Ok(protected)
}

/// Mounts of images that name something of this.
fn mounts_of(
    context: &Context<'_>,
    domain: &Domain,
    damage: &Damage,
) -> anyhow::Result<Vec<PathBuf>> {
    let mut images: HashMap<Digest, bool> = HashMap::new();
    let mut targets = Vec::new();
    for status in context.mounter(domain).list()?.mounts {
        let (record, gone) = (status.record, status.state == MountState::Gone);
        if gone || record.domain != domain.name() {
            continue;
        }
        let hit =
            *images.entry(record.image).or_insert_with(|| names_any(domain, &record.image, damage));
        if hit {
            targets.push(record.target);
        }
    }
    Ok(targets)
}

/// Whether an image is, or names, something of this. One that cannot be read might.
fn names_any(domain: &Domain, image: &Digest, damage: &Damage) -> bool {
    let mut hit = damage.images.contains(image);
    let read = domain.open_image(image).map_err(Into::into).and_then(|file| {
        ImageContents.names(FileKind::Image, &file, &mut |digest, _| {
            hit |= damage.objects.contains(&digest);
        })
    });
    hit || read.is_err()
}
