use std::time::Duration;

use crate::cmd::Outcome;
use crate::cmd::running::stop_all;
use crate::context::Context;

/// End virtual machines, and remove them
///
/// Sends the image's program its stop signal (else SIGTERM), and kills the virtual machine if it has not ended in time.
/// Removes a detached one that has ended, with its exit status and output.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  cofolio vm stop cache\n  cofolio vm stop --time 0 cache worker"
)]
pub(crate) struct Args {
    /// Names, as `vm ps` shows them
    #[arg(required = true)]
    names: Vec<String>,
    /// Seconds to wait before it is killed
    #[arg(long, short = 't', value_name = "SECONDS", default_value_t = 10)]
    time: u32,
}

pub(crate) fn run(args: &Args, context: &Context<'_>) -> Outcome {
    context.needs_root("ending a virtual machine")?;
    let domain = context.domain()?;
    let machines = super::machines(&domain, context)?;
    let patience = Duration::from_secs(args.time.into());
    stop_all(&args.names, context, |name| machines.stop(name, patience))
}
