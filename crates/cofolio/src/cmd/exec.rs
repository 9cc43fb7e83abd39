use std::io::IsTerminal as _;

use anyhow::Context as _;
use cofolio_node::container::{Containers, Streams};

use crate::context::Context;
use crate::exit::{Ended, Fail};

/// Start a process in a container that runs
///
/// It has the user, working directory, environment and capabilities of the container's own process. The
/// container's runtime starts it (`crun exec`), and the exit status is the process's. Signals to `exec` end
/// `exec` alone; Ctrl-C ends both.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  cofolio exec cache redis-cli ping\n  \
    cofolio exec -it cache sh")]
pub(crate) struct Args {
    /// Name of the container, as `ps` shows it
    name: String,
    #[command(flatten)]
    process: BesideArgs,
}

/// A process beside the image's own.
#[derive(Debug, clap::Args)]
pub(crate) struct BesideArgs {
    /// Program and its arguments
    #[arg(trailing_var_arg = true, required = true)]
    pub(crate) command: Vec<String>,
    /// Give it this process's standard input
    #[arg(long, short)]
    pub(crate) interactive: bool,
    /// Give it a terminal; standard input must be one
    #[arg(long, short)]
    pub(crate) tty: bool,
}

impl BesideArgs {
    /// Refuses a terminal that is not there.
    pub(crate) fn check(&self) -> Result<(), Fail> {
        match self.tty && !std::io::stdin().is_terminal() {
            true => Err(Fail::usage("--tty: standard input is not a terminal")),
            false => Ok(()),
        }
    }
}

pub(crate) fn run(args: &Args, context: &Context<'_>) -> anyhow::Result<Ended> {
    context.needs_root("starting a process in a container")?;
    let BesideArgs { command, interactive, tty } = &args.process;
    args.process.check()?;
    let streams = if *tty { Streams::Terminal } else { Streams::Ours { input: *interactive } };
    let domain = context.domain()?;
    let containers = Containers::new(context.mounter(&domain)?);
    let (status, refusal) = containers.exec(&args.name, command, &streams)?.wait();
    let status = status.context("waiting for the runtime")?;
    super::run::ended(status, refusal)
}
