use std::time::Duration;

use cofolio_node::container::Containers;

use crate::cmd::Outcome;
use crate::cmd::running::stop_all;
use crate::context::Context;

/// End containers that `run` started, and remove them
///
/// Sends the image's stop signal (else SIGTERM), and SIGKILL if the container has not ended in time. Removes a
/// detached container that has ended, with its exit status and output.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  cofolio stop cache\n  cofolio stop --time 0 cache worker")]
pub(crate) struct Args {
    /// Names, as `ps` shows them
    #[arg(required = true)]
    names: Vec<String>,
    /// Seconds to wait before SIGKILL
    #[arg(long, short = 't', value_name = "SECONDS", default_value_t = 10)]
    time: u32,
}

pub(crate) fn run(args: &Args, context: &Context<'_>) -> Outcome {
    context.needs_root("ending a container")?;
    let domain = context.domain()?;
    let containers = Containers::new(context.mounter(&domain)?);
    let patience = Duration::from_secs(args.time.into());
    stop_all(&args.names, context, |name| containers.stop(name, patience))
}
