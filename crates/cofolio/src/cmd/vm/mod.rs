mod attach;
mod console;
mod detach;
mod exec;
mod list;
mod run;
mod stop;
mod terminal;
mod top;

use clap::Subcommand;
use cofolio_node::vm::Machines;
use cofolio_store::Domain;

use crate::context::Context;
use crate::exit::{Ended, Exit};

/// Run images in virtual machines
///
/// A virtual machine boots a distribution's kernel; its root filesystem is the image, mapped from the host's page cache
/// (virtio-pmem, DAX), so that the guest caches nothing of it and machines of one trust domain share every page of their
/// images. The program is the image's own.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  cofolio vm run redis:7.0.15 -- redis-server --version\n  \
    cofolio vm run -d --name cache --memory 256M redis:7.0.15\n  cofolio vm exec cache -- redis-cli ping\n  cofolio vm ps\n  \
    cofolio vm stop cache")]
pub(crate) struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    Run(Box<run::Args>),
    Ps(list::Args),
    Exec(exec::Args),
    Console(console::Args),
    Stop(stop::Args),
    Top(top::Args),
    Attach(attach::Args),
    Detach(detach::Args),
}

pub(crate) fn run(args: &Args, context: &Context<'_>) -> anyhow::Result<Ended> {
    match &args.action {
        Action::Run(args) => run::run(args, context),
        Action::Ps(args) => list::run(args, context).map(Exit::into),
        Action::Exec(args) => exec::run(args, context),
        Action::Console(args) => console::run(args, context),
        Action::Stop(args) => stop::run(args, context).map(Exit::into),
        Action::Top(args) => top::run(args, context).map(Exit::into),
        Action::Attach(args) => attach::run(args, context).map(Exit::into),
        Action::Detach(args) => detach::run(args, context).map(Exit::into),
    }
}

/// The virtual machines of a domain.
fn machines<'d>(domain: &'d Domain, context: &Context<'_>) -> anyhow::Result<Machines<'d>> {
    Ok(Machines::new(domain, context.run_dir_of(domain.store())?))
}
