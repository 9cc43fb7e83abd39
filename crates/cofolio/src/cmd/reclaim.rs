use clap::builder::NonEmptyStringValueParser;
use cofolio_node::ledger::{ReclaimRequest, ReclaimTarget, Reclaimed};
use cofolio_node::size::Size;

use crate::cmd::Outcome;
use crate::cmd::source::Source;
use crate::context::Context;
use crate::exit::Exit;
use crate::ui::{human_size, plural};

/// Drop files from the page cache that one container, image or trust domain alone uses
///
/// The least recently used files go first. They stay on disk, and whoever reads them again waits
/// for the disk. Files that other containers use, or with --image that other images name, stay
/// unless --shared is given.
///
/// Mapped files go, too: their pages are taken from the processes. Pages that are locked or that several processes map
/// stay, and so does what a process has changed of its mapping. The output says how much went and how much stayed.
///
/// A running `cofolio serve` is asked, which knows who opened files; whoever may connect to its
/// socket may do that. Without one it takes root, and only processes that map a file count as its
/// users. For an hour after the daemon's start, and after it has missed opened files, nobody knows who
/// uses what was resident then: --container leaves it alone unless --shared is given.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  cofolio reclaim --container web --bytes \"64 MiB\"\n  \
        cofolio reclaim --image redis:7.0.15 --dry-run",
    group = clap::ArgGroup::new("target").required(true)
)]
pub(crate) struct Args {
    /// Name of a container of `run`, or path of a memory cgroup (as `top` shows it)
    #[arg(long, value_name = "NAME|/CGROUP", group = "target",
        value_parser = NonEmptyStringValueParser::new())]
    container: Option<String>,
    /// Ref or first digits of a digest
    #[arg(long, group = "target")]
    image: Option<String>,
    /// All images of the trust domain (that of --domain)
    #[arg(long, group = "target")]
    all: bool,
    /// How much to free (default: all of it)
    #[arg(long, value_name = "SIZE")]
    bytes: Option<Size>,
    /// Also drop what other containers use, or other images name
    #[arg(long)]
    shared: bool,
    /// Only say what would be dropped
    #[arg(long, short = 'n')]
    dry_run: bool,
}

pub(crate) fn run(args: &Args, context: &Context<'_>) -> Outcome {
    let mut source = Source::open(context, false)?;
    let target = match (&args.container, &args.image) {
        (Some(container), _) => ReclaimTarget::Container(container.clone()),
        (None, Some(image)) => ReclaimTarget::Image(source.image(context, image)?),
        (None, None) => ReclaimTarget::Domain(context.global.domain.clone()),
    };
    let request = ReclaimRequest {
        target,
        bytes: args.bytes.map(|size| size.0),
        shared: args.shared,
        dry_run: args.dry_run,
    };
    let reclaimed = source.reclaim(&request)?;
    if context.ui.json {
        return context.ui.json(&reclaimed);
    }
    if args.dry_run || !context.ui.quiet {
        context.ui.line(sentence(&reclaimed))?;
    }
    if reclaimed.unsure_objects > 0 {
        let unsure = plural(reclaimed.unsure_objects, "skipped object");
        context.ui.note(format!(
            "{unsure} may be in use: in the last hour the ledger missed opened files, or did not know \
             who opened them (--shared drops them)"
        ));
    }
    if !source.is_daemon() {
        context.ui.note("no daemon: files that were opened and not mapped have no known user");
    }
    Ok(Exit::Ok)
}

fn sentence(reclaimed: &Reclaimed) -> String {
    let Reclaimed { dry_run, objects, resident_bytes, freed_bytes, kept_bytes, .. } = *reclaimed;
    let objects = plural(objects, "object");
    let resident = human_size(resident_bytes);
    let mut said = match dry_run {
        true => format!("at most {resident} of {objects} would be dropped"),
        false => format!("{} of {objects} freed", human_size(freed_bytes)),
    };
    if kept_bytes > 0 {
        let kept = human_size(kept_bytes);
        said.push_str(&format!("; {kept} stayed: mapped, locked or read again"));
    }
    if reclaimed.shared_objects > 0 {
        let shared = plural(reclaimed.shared_objects, "object");
        let bytes = human_size(reclaimed.shared_bytes);
        said.push_str(&format!("; skipped {shared} ({bytes}) that others use or may use"));
    }
    if reclaimed.unread_processes > 0 {
        let unread = reclaimed.unread_processes;
        said.push_str(&format!("; processes that may map more than could be read: {unread}"));
    }
    said
}
