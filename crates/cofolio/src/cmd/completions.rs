use std::ffi::OsStr;
use std::io::{self, Write};
use std::path::Path;

use clap::builder::PossibleValuesParser;
use clap::{Arg, CommandFactory as _};
use clap_complete::engine::{ArgValueCompleter, CompletionCandidate};
use clap_complete::env::{CompleteEnv, Shells};
use cofolio_node::config::{DEFAULT_PATH, Loaded};
use cofolio_store::Store;

use crate::cli;
use crate::cmd::Outcome;
use crate::context::Context;
use crate::exit::{Exit, Fail};

/// Variable that tells this program to complete a command line.
const VARIABLE: &str = "COMPLETE";
/// Shells that are tested.
const SHELLS: [&str; 3] = ["bash", "zsh", "fish"];

/// Print a completion script for a shell
///
/// The script asks this program, which completes commands, options and refs of the store.
/// `make install` puts the scripts where the shells look for them.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  cofolio completions bash > /usr/share/bash-completion/completions/cofolio\n  \
    source <(cofolio completions bash)"
)]
pub(crate) struct Args {
    /// Which shell
    #[arg(value_parser = PossibleValuesParser::new(SHELLS))]
    shell: String,
}

pub(crate) fn run(args: &Args, _context: &Context<'_>) -> Outcome {
    let shells = Shells::builtins();
    let shell = shells.completer(&args.shell).ok_or_else(|| Fail::usage("no such shell"))?;
    let mut script = Vec::new();
    shell.write_registration(VARIABLE, "cofolio", "cofolio", "cofolio", &mut script)?;
    io::stdout().lock().write_all(&script)?;
    Ok(Exit::Ok)
}

/// Completes a command line and ends the process, if a completion script has started it.
pub(crate) fn complete() {
    CompleteEnv::with_factory(command).var(VARIABLE).complete();
}

/// All commands; arguments that name images are completed with refs.
fn command() -> clap::Command {
    let with_refs = |arg: Arg| {
        let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
        match help.starts_with("Ref") || help.starts_with("The image to compare") {
            true => arg.add(ArgValueCompleter::new(refs)),
            false => arg,
        }
    };
    cli::Cli::command().mut_subcommands(|sub| sub.mut_args(with_refs))
}

/// Refs that begin so, of the store and domain of the configuration. What cannot be read offers nothing.
fn refs(start: &OsStr) -> Vec<CompletionCandidate> {
    let config = Loaded::read(Path::new(DEFAULT_PATH)).ok().flatten().unwrap_or_default();
    let settings = config.config.store;
    let path = std::env::var_os("COFOLIO_STORE").map_or(settings.path, Into::into);
    let domain = Store::open(&path).and_then(|store| store.domain(&settings.domain));
    let refs = domain.and_then(|domain| domain.readable_refs()).unwrap_or_default();
    let names = refs.into_iter().map(|(name, _)| name);
    let matching = names.filter(|name| start.to_str().is_some_and(|start| name.starts_with(start)));
    matching.map(CompletionCandidate::new).collect()
}
