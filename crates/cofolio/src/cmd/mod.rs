//! The subcommands, a file each. `source` is shared by `top` and `reclaim`.

pub(crate) mod backend;
pub(crate) mod bundle;
pub(crate) mod cat;
pub(crate) mod completions;
pub(crate) mod config;
pub(crate) mod diff;
pub(crate) mod doctor;
pub(crate) mod du;
pub(crate) mod dump;
pub(crate) mod exec;
pub(crate) mod export;
pub(crate) mod fsck;
pub(crate) mod gc;
pub(crate) mod images;
pub(crate) mod import;
pub(crate) mod inspect;
pub(crate) mod ksm_exec;
pub(crate) mod ls;
pub(crate) mod man;
pub(crate) mod mkcomposefs;
pub(crate) mod mount;
pub(crate) mod mounts;
pub(crate) mod pack;
pub(crate) mod profile;
pub(crate) mod ps;
pub(crate) mod pull;
pub(crate) mod push;
pub(crate) mod reclaim;
pub(crate) mod rm;
pub(crate) mod run;
mod running;
pub(crate) mod serve;
pub(crate) mod sign;
mod source;
pub(crate) mod stop;
pub(crate) mod survey;
pub(crate) mod tag;
pub(crate) mod top;
pub(crate) mod umount;
pub(crate) mod verify;
pub(crate) mod vm;
pub(crate) mod warm;

use std::collections::BTreeSet;

use crate::context::Context;
use crate::exit::{DAMAGED, Exit, MISSING_DIRECTORY, mending};
use crate::ui::{Cell, Table, Tone};
use cofolio_store::{Finding, FindingKind};

/// What a command gives back: how to exit, or an error that says so.
pub(crate) type Outcome = anyhow::Result<Exit>;

/// What a check found, a line each.
fn findings_table<'a>(findings: impl IntoIterator<Item = &'a Finding>) -> Table {
    let mut table = Table::new(&["FINDING", "FILE", "DETAIL"]);
    for finding in findings {
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
    table
}

/// Says what mends what a check found, once for each command.
fn note_mending(context: &Context<'_>, findings: &[Finding]) {
    let damage = findings.iter().filter(|finding| finding.kind.is_damage());
    let mends = damage.map(|finding| match finding.kind {
        FindingKind::DirectoryMissing => MISSING_DIRECTORY,
        FindingKind::RefDangling | FindingKind::RootDangling => DAMAGED,
        kind if kind.is_derived() => "`cofolio fsck --repair` removes it, or makes it again",
        _ => mending(&finding.path),
    });
    for mends in mends.collect::<BTreeSet<_>>() {
        context.ui.note(mends);
    }
}
