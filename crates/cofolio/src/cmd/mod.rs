//! The subcommands, a file each.

pub(crate) mod backend;
pub(crate) mod build;
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
pub(crate) mod ls;
pub(crate) mod man;
pub(crate) mod mkcomposefs;
pub(crate) mod mount;
pub(crate) mod mounts;
pub(crate) mod pack;
pub(crate) mod ps;
pub(crate) mod pull;
pub(crate) mod push;
pub(crate) mod rm;
pub(crate) mod run;
pub(crate) mod sign;
pub(crate) mod stop;
pub(crate) mod survey;
pub(crate) mod tag;
pub(crate) mod umount;
pub(crate) mod verify;

use std::collections::BTreeSet;

use crate::cli::{Cli, Command};
use crate::context::Context;
use crate::exit::{DAMAGED, Ended, Exit, mending};
use crate::ui::{Cell, Table, Tone, Ui};
use cofolio_node::config::Loaded;
use cofolio_store::{Finding, FindingKind};

/// What a command gives back: how to exit, or an error that says so.
pub(crate) type Outcome = anyhow::Result<Exit>;

pub(crate) fn run(cli: Cli, config: Loaded, ui: &Ui) -> anyhow::Result<Ended> {
    let context = Context { global: cli.global, config, ui };
    let exit = match cli.command {
        // It ends as its container does.
        Command::Run(args) => return Ok(run::run(&args, &context)),
        Command::Exec(args) => return exec::run(&args, &context),
        // Reached with a global option first, which mkcomposefs lacks; `main` handles all else.
        Command::Mkcomposefs(args) => {
            let failed = mkcomposefs::run(&args) != std::process::ExitCode::SUCCESS;
            Ok(if failed { Exit::Failure } else { Exit::Ok })
        }
        Command::Ps(args) => ps::run(&args, &context),
        Command::Stop(args) => stop::run(&args, &context),
        Command::Import(args) => import::run(&args, &context),
        Command::Pull(args) => pull::run(&args, &context),
        Command::Build(args) => build::run(&args, &context),
        Command::Export(args) => export::run(&args, &context),
        Command::Push(args) => push::run(&args, &context),
        Command::Pack(args) => pack::run(&args, &context),
        Command::Backend(args) => backend::run(&args, &context),
        Command::Mount(args) => mount::run(&args, &context),
        Command::Umount(args) => umount::run(&args, &context),
        Command::Mounts(args) => mounts::run(&args, &context),
        Command::Images(args) => images::run(&args, &context),
        Command::Inspect(args) => inspect::run(&args, &context),
        Command::Diff(args) => diff::run(&args, &context),
        Command::Ls(args) => ls::run(&args, &context),
        Command::Cat(args) => cat::run(&args, &context),
        Command::Dump(args) => dump::run(&args, &context),
        Command::Sign(args) => sign::run(&args, &context),
        Command::Verify(args) => verify::run(&args, &context),
        Command::Tag(args) => tag::run(&args, &context),
        Command::Rm(args) => rm::run(&args, &context),
        Command::Gc(args) => gc::run(&args, &context),
        Command::Fsck(args) => fsck::run(&args, &context),
        Command::Du(args) => du::run(&args, &context),
        Command::Survey(args) => survey::run(&args, &context),
        Command::Bundle(args) => bundle::run(&args, &context),
        Command::Doctor(args) => doctor::run(&args, &context),
        Command::Config(args) => config::run(&args, &context),
        Command::Completions(args) => completions::run(&args),
        Command::Man(args) => man::run(&args, &context),
    };
    exit.map(Ended::from)
}

/// What a check found, a line each.
fn findings_table(findings: &[Finding]) -> Table {
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
        FindingKind::RefDangling | FindingKind::RootDangling | FindingKind::DirectoryMissing => {
            DAMAGED
        }
        kind if kind.is_derived() => "`cofolio fsck --repair` removes it, or makes it again",
        _ => mending(&finding.path),
    });
    for mends in mends.collect::<BTreeSet<_>>() {
        context.ui.note(mends);
    }
}
