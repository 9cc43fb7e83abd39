use std::path::{Path, PathBuf};

use cofolio_node::container::Containers;
use cofolio_node::mount::{MountError, Mounter, UmountOptions, Unmounted};
use serde_json::json;

use crate::cmd::Outcome;
use crate::context::Context;
use crate::exit::{self, Exit, Fail};

/// Unmount what `mount` or `bundle` mounted
///
/// The image's own mount goes with its last user. What was unmounted behind our back, or left half-way by
/// a process that was killed, is cleaned up. With --all, mounts without a record are named, and the exit code is 1.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  cofolio umount /mnt/redis\n  cofolio umount --all")]
pub(crate) struct Args {
    /// Directories (or mount ids, as `mounts --json` shows them)
    #[arg(required_unless_present = "all")]
    targets: Vec<PathBuf>,
    /// Unmount everything of this trust domain
    #[arg(long, conflicts_with = "targets")]
    all: bool,
    /// Detach it even if it is in use
    #[arg(long, short)]
    force: bool,
    /// Leave the directory with the changes in place
    #[arg(long)]
    keep: bool,
    /// Remove changes that were kept; the targets are their directories, as `mounts` shows them
    #[arg(long, conflicts_with_all = ["all", "force", "keep"])]
    discard: bool,
}

pub(crate) fn run(args: &Args, context: &Context<'_>) -> Outcome {
    context.needs_root("unmounting")?;
    let domain = context.domain()?;
    let mounter = context.mounter(&domain)?;
    if args.discard {
        for dir in &args.targets {
            mounter.discard_kept(dir)?;
            context.ui.note(format!("changes in {} are gone", dir.display()));
        }
        return Ok(Exit::Ok);
    }
    let containers = Containers::new(context.mounter(&domain)?);
    let mut exit = Exit::Ok;
    let targets = match args.all {
        false => args.targets.clone(),
        true => {
            let list = mounter.list()?;
            for orphan in super::mounts::orphans(&list, mounter.run_dir()) {
                context.ui.error(&orphan, None);
                exit = Exit::Failure;
            }
            let mounts = list.mounts.into_iter().map(|status| status.record);
            let ours = mounts.filter(|record| record.domain == domain.name());
            let mut ids: Vec<PathBuf> = ours.map(|record| record.id.into()).collect();
            // They are in the order of their targets: one inside another goes first.
            ids.reverse();
            ids
        }
    };
    let options = UmountOptions { force: args.force, keep_upper: args.keep };
    let (mut done, mut failed) = (Vec::new(), Vec::new());
    for target in &targets {
        let checked = refuse_living(target, &mounter, &containers);
        match checked.and_then(|()| Ok(mounter.umount(target, &options)?)) {
            Ok(unmounted) => {
                note(&unmounted, context);
                done.push(json!({
                    "target": unmounted.record.target.display().to_string(),
                    "id": unmounted.record.id,
                    "was_gone": unmounted.was_gone,
                    "upper": unmounted.upper,
                    "unpinned": unmounted.unpinned,
                    "in_use": unmounted.in_use,
                }));
            }
            // Somebody else has just done it.
            Err(error)
                if args.all && matches!(error.downcast_ref(), Some(MountError::NotMounted(_))) => {}
            Err(error) => {
                let whole = whole_of(&error, &mounter);
                failed.push(whole.map_or(error, Into::into));
            }
        }
    }
    if context.ui.json {
        context.ui.json(&done)?;
    }
    // One that is busy does not keep the others mounted.
    for error in failed {
        let failure = exit::report(&error, context.ui);
        exit = if exit == Exit::Ok { failure } else { exit };
    }
    Ok(exit)
}

/// Refuses the root of a container that runs. The kernel would unmount it: the container has its own
/// mount, but would lose its changes.
fn refuse_living(
    target: &Path,
    mounter: &Mounter<'_>,
    containers: &Containers<'_>,
) -> anyhow::Result<()> {
    let Ok(record) = mounter.run_dir().find(target) else { return Ok(()) };
    let Some(name) = containers.living_at(&record.target)? else { return Ok(()) };
    let what = format!("container `{name}` runs in {}", record.target.display());
    let hint = format!("`cofolio stop {name}` ends and removes it");
    Err(Fail::new(Exit::Busy, what).hint(hint).into())
}

/// What to unmount instead of a writable directory of a mount: whoever unmounts that alone loses
/// its changes.
fn whole_of(error: &anyhow::Error, mounter: &Mounter<'_>) -> Option<Fail> {
    let Some(MountError::NoRecord(part)) = error.downcast_ref() else { return None };
    let mounts = mounter.list().ok()?.mounts;
    let whole = mounts.iter().find(|it| it.parts().any(|it| it == *part))?;
    let at = whole.place().display();
    let what = format!("{} is a part of the mount at {at}", part.display());
    Some(Fail::usage(what).hint(format!("`cofolio umount {at}` unmounts all of it")))
}

/// Says what is unusual about it.
fn note(unmounted: &Unmounted, context: &Context<'_>) {
    let path = unmounted.record.target.display();
    if unmounted.was_gone {
        context.ui.note(format!("{path} was not mounted any more; cleaned up after it"));
    }
    if let Some(upper) = &unmounted.upper {
        context.ui.note(format!("changes are in {}", upper.display()));
    }
    if unmounted.in_use {
        context.ui.note(format!(
            "{path} is still in use elsewhere (another mount of it, another mount namespace or an \
             open descriptor): what that needs stays until it ends"
        ));
    }
}
