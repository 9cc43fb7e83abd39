use std::time::Duration;

use crate::cmd::Outcome;
use crate::context::Context;
use crate::exit::Exit;

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
    let mut first = None;
    for name in &args.names {
        // If one does not end, the others are stopped nevertheless.
        if let Err(error) = machines.stop(name, patience) {
            match first {
                None => first = Some(error),
                Some(_) => context.ui.error(&error.to_string(), None),
            }
        }
    }
    first.map_or(Ok(Exit::Ok), |error| Err(error.into()))
}
