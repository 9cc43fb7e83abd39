use std::io::{self, Write};

use clap_complete::{Generator, Shell};

use crate::cli;
use crate::cmd::Outcome;
use crate::exit::Exit;

/// Print a completion script for a shell
///
/// `make install` puts them where the shells look for them.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  cofolio completions bash > /usr/share/bash-completion/completions/cofolio\n  \
    source <(cofolio completions bash)"
)]
pub(crate) struct Args {
    /// Which shell
    #[arg(value_enum)]
    shell: For,
}

/// Shells that are tested.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum For {
    Bash,
    Zsh,
    Fish,
}

pub(crate) fn run(args: &Args) -> Outcome {
    let shell = match args.shell {
        For::Bash => Shell::Bash,
        For::Zsh => Shell::Zsh,
        For::Fish => Shell::Fish,
    };
    let mut command = <cli::Cli as clap::CommandFactory>::command();
    command.set_bin_name("cofolio");
    command.build();
    let mut script = Vec::new();
    // Into memory, since it panics where it cannot write.
    shell.try_generate(&command, &mut script)?;
    io::stdout().lock().write_all(&script)?;
    Ok(Exit::Ok)
}
