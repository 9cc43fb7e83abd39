use std::collections::BTreeMap;

use cofolio_node::container::Containers;
use cofolio_node::mount::{Backing, MountState, MountStatus};

use crate::cmd::Outcome;
use crate::context::{Context, short};
use crate::exit::Exit;
use crate::ui::{Cell, Table, Tone, ago};

/// List what is mounted
///
/// VERIFIED says what stands between a mount and an altered file: `kernel` checks every read (fs-verity),
/// `hashed` means that all content was hashed when it was mounted (--verify), `sizes` that the sizes of all
/// files were compared (`inode-share`: of the pack all, and of its segments the sizes).
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  cofolio mounts\n  \
    cofolio mounts --json | jq -r '.mounts[].record.target'")]
pub(crate) struct Args {
    /// Put right what killed processes and a reboot have left
    #[arg(long)]
    reconcile: bool,
}

pub(crate) fn run(args: &Args, context: &Context<'_>) -> Outcome {
    let domain = context.domain()?;
    let mounter = context.mounter(&domain);
    if args.reconcile {
        let mut failed = Vec::new();
        Containers::new(context.mounter(&domain)).reconcile(&mut failed)?;
        failed.extend(mounter.reconcile()?.failed);
        for failed in &failed {
            context.ui.error(&format!("could not be cleaned up: {failed}"), None);
        }
    }
    let list = mounter.list()?;
    if context.ui.json {
        context.ui.json(&list)?;
        return Ok(Exit::Ok);
    }
    let names: BTreeMap<_, _> = domain
        .readable_refs()?
        .into_iter()
        .rev()
        .map(|(name, record)| (record.image, name))
        .collect();
    let backings: BTreeMap<_, _> = list
        .pins
        .iter()
        .map(|pin| (pin.image, pin.record.as_ref().map(|record| record.backing)))
        .collect();
    if list.mounts.is_empty() {
        context.ui.note("nothing is mounted");
    } else {
        let headers = ["TARGET", "IMAGE", "MODE", "BACKEND", "VERIFIED", "SINCE", "STATE"];
        let mut table = Table::new(&headers);
        for MountStatus { record, state } in &list.mounts {
            let image = match names.get(&record.image) {
                Some(name) if record.domain == domain.name() => name.clone(),
                _ => short(&record.image),
            };
            let mode = match &record.upper {
                None => "ro",
                Some(upper) if upper.keep => "rw, kept",
                Some(_) => "rw",
            };
            let backend = match backings.get(&record.image).copied().flatten() {
                Some(Backing::Loop) => format!("{} (loop)", record.backend),
                _ => record.backend.to_string(),
            };
            let verified = match (record.verity, record.verified) {
                (true, _) => Cell::left("kernel").tone(Tone::Good),
                (false, true) => Cell::left("hashed").tone(Tone::Good),
                (false, false) => Cell::left("sizes"),
            };
            let (word, tone) = match state {
                MountState::Live => ("live", Tone::Good),
                MountState::InFlight => ("in flight", Tone::Warn),
                MountState::Covered => ("covered", Tone::Warn),
                MountState::Gone => ("gone", Tone::Bad),
                MountState::OtherNamespace => ("other namespace", Tone::Dim),
            };
            table.row(vec![
                Cell::left(record.target.display().to_string()).tone(Tone::Bold),
                Cell::left(image),
                Cell::left(mode),
                Cell::left(backend),
                verified,
                Cell::left(ago(record.created)),
                Cell::left(word).tone(tone),
            ]);
        }
        context.ui.table(&table)?;
    }
    for orphan in &list.orphans {
        let target = orphan.target.display();
        context.ui.note(format!("{target} shows {} and is not ours to unmount", orphan.source));
    }
    for damaged in &list.damaged {
        context.ui.note(format!("damaged record: {damaged}"));
    }
    if list.mounts.iter().any(|status| status.state == MountState::Gone) {
        context.ui.note("`cofolio mounts --reconcile` cleans up what is gone");
    }
    Ok(Exit::Ok)
}
