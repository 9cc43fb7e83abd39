use std::collections::BTreeMap;
use std::os::unix::ffi::OsStrExt as _;

use cofolio_node::container::Containers;
use cofolio_node::mount::{Backing, MountState, MountStatus, Mounts, PinRecord};
use cofolio_node::run_dir::RunDir;
use cofolio_node::settings::Backend;
use cofolio_store::Digest;

use crate::cmd::Outcome;
use crate::context::{Context, short};
use crate::exit::Exit;
use crate::ui::{Cell, Table, Tone, ago, printable};

/// List what is mounted
///
/// VERIFIED says what stands between a mount and an altered file: `kernel` checks every read (fs-verity),
/// `hashed` means that all content was hashed when it was mounted (--verify), `immutable` that nobody can
/// change the files without clearing their immutable flag, `sizes` that the sizes of all files were compared
/// (`inode-share`: of the pack all, and of its segments the sizes), `-` that it cannot be seen from this mount
/// namespace.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  cofolio mounts\n  \
    cofolio mounts --json | jq -r '.mounts[].record.target'")]
pub(crate) struct Args {
    /// Put right what killed processes and a reboot have left
    #[arg(long)]
    reconcile: bool,
}

/// What images are called.
type Names = BTreeMap<Digest, String>;

pub(crate) fn run(args: &Args, context: &Context<'_>) -> Outcome {
    let domain = context.domain()?;
    let mounter = context.mounter(&domain)?;
    let mut failed = Vec::new();
    if args.reconcile {
        context.needs_root("cleaning up")?;
        Containers::new(context.mounter(&domain)?).reconcile(&mut failed)?;
        failed.extend(mounter.reconcile()?.failed);
        for failed in &failed {
            context.ui.error(&format!("could not be cleaned up: {failed}"), None);
        }
    }
    let mut list = mounter.list()?;
    let exit = if failed.is_empty() { Exit::Ok } else { Exit::Failure };
    if context.ui.json {
        let mut value = serde_json::to_value(&list)?;
        value["failed"] = failed.into();
        context.ui.json(&value)?;
        return Ok(exit);
    }
    let refs = domain.readable_refs()?.into_iter().rev();
    let names: Names = refs.map(|(name, record)| (record.image, name)).collect();
    let pins = list.pins.iter().filter_map(|pin| Some((pin.image, pin.record.as_ref()?)));
    let pins: BTreeMap<_, _> = pins.collect();
    if list.mounts.is_empty() && list.orphans.is_empty() {
        context.ui.note("nothing is mounted");
    } else if list.mounts.is_empty() {
        context.ui.note("no mount has a record");
    } else {
        let headers = ["TARGET", "IMAGE", "MODE", "BACKEND", "VERIFIED", "SINCE", "STATE"];
        let mut table = Table::new(&headers);
        for status in &list.mounts {
            let image = &status.record.image;
            let name = names.get(image).filter(|_| status.record.domain == domain.name());
            table.row(row(status, name, pins.get(image).copied()));
        }
        context.ui.table(&table)?;
    }
    // Those were named above.
    list.damaged.retain(|damaged| !failed.contains(damaged));
    remarks(&list, &names, mounter.run_dir())
        .into_iter()
        .for_each(|remark| context.ui.note(remark));
    Ok(exit)
}

/// A mount in the table; `name` is what its image is called now.
fn row(status: &MountStatus, name: Option<&String>, pin: Option<&PinRecord>) -> Vec<Cell> {
    let MountStatus { record, state, .. } = status;
    let image =
        record.options.name.as_ref().or(name).cloned().unwrap_or_else(|| short(&record.image));
    let mode = match &record.upper {
        None => "ro",
        Some(upper) if upper.keep && !upper.dirs.is_empty() => "rw in part, kept",
        Some(upper) if !upper.dirs.is_empty() => "rw in part",
        Some(upper) if upper.keep => "rw, kept",
        Some(_) => "rw",
    };
    let backend = match pin.map(|pin| pin.backing) {
        Some(Backing::Loop) => format!("{} (loop)", record.backend),
        _ => record.backend.to_string(),
    };
    // Without fs-verity objects are not looked at only where they are immutable.
    let is_unchecked =
        |pin: &PinRecord| pin.backend == Backend::Overlay && pin.objects_checked == 0;
    let verified = match (record.verity, record.verified) {
        (true, _) => Cell::left("kernel").tone(Tone::Good),
        (false, true) => Cell::left("hashed").tone(Tone::Good),
        (false, false) => match pin {
            None => Cell::left("-"),
            Some(pin) if is_unchecked(pin) => Cell::left("immutable"),
            Some(_) => Cell::left("sizes"),
        },
    };
    let (word, tone) = match state {
        MountState::Live if !status.missing_parts.is_empty() => ("in part", Tone::Bad),
        MountState::Live => ("live", Tone::Good),
        MountState::InFlight => ("in flight", Tone::Warn),
        MountState::Covered => ("covered", Tone::Warn),
        MountState::Gone => ("gone", Tone::Bad),
        MountState::OtherNamespace => ("other namespace", Tone::Dim),
    };
    vec![
        Cell::left(printable(status.place().as_os_str().as_bytes())).tone(Tone::Bold),
        Cell::left(image),
        Cell::left(mode),
        Cell::left(backend),
        verified,
        Cell::left(ago(record.created)),
        Cell::left(word).tone(tone),
    ]
}

/// What `umount` does not unmount.
pub(super) fn orphans(list: &Mounts, run: &RunDir) -> impl Iterator<Item = String> {
    list.orphans.iter().map(|orphan| {
        let target = printable(orphan.target.as_os_str().as_bytes());
        if orphan.target.starts_with(run.path()) {
            return format!(
                "{target} shows {} and has no record: `cofolio ps` says how to end its container",
                orphan.source
            );
        }
        format!(
            "{target} shows {} and has no record: `umount {target}` unmounts it, and \
             `cofolio mounts --reconcile` cleans up after it",
            orphan.source
        )
    })
}

/// What is not in the table: mounts without a record, missing parts, kept changes, damaged records.
fn remarks(list: &Mounts, names: &Names, run: &RunDir) -> Vec<String> {
    let kept = list.kept.iter().map(|kept| match kept.image {
        None => format!(
            "changes of an unknown image are kept in {0}, whose file `keep` cannot be read: \
             `umount --discard {0}` removes them",
            kept.dir.display()
        ),
        Some(image) => {
            let dirs = kept.writable_dirs.iter().map(|dir| dir.as_os_str().as_bytes());
            let dirs: String = dirs.map(|dir| format!("--writable {} ", printable(dir))).collect();
            let dirs = if dirs.is_empty() { "--rw " } else { &dirs };
            format!(
                "changes of {0}, which was at {1}, are kept: `cofolio mount {dirs}--upper {2} \
                 {image} TARGET` mounts it with them, `cofolio umount --discard {2}` removes them",
                names.get(&image).cloned().unwrap_or_else(|| short(&image)),
                printable(kept.target.as_os_str().as_bytes()),
                kept.dir.display()
            )
        }
    });
    let missing = list.mounts.iter().flat_map(|status| {
        let whole = printable(status.place().as_os_str().as_bytes());
        status.missing_parts.iter().map(move |part| {
            format!(
                "{} cannot be written to: somebody unmounted this part of the mount at {whole}; \
                 `cofolio umount {whole}` unmounts the rest",
                printable(part.as_os_str().as_bytes())
            )
        })
    });
    let damaged = list.damaged.iter().map(|damaged| format!("damaged record: {damaged}"));
    let mut gone = list.mounts.iter().filter(|status| status.state == MountState::Gone);
    let gone =
        gone.next().map(|_| "`cofolio mounts --reconcile` cleans up what is gone".to_owned());
    orphans(list, run).chain(missing).chain(kept).chain(damaged).chain(gone).collect()
}
