use crate::cmd::Outcome;
use crate::context::Context;
use crate::exit::Exit;

/// Leave a virtual machine alone that was attached
///
/// It goes on, and its balloon is as it was before `vm attach`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  cofolio vm detach web")]
pub(crate) struct Args {
    /// Its name, as `vm ps` shows it
    name: String,
}

pub(crate) fn run(args: &Args, context: &Context<'_>) -> Outcome {
    context.needs_root("detaching a virtual machine")?;
    let domain = context.domain()?;
    super::machines(&domain, context)?.detach(&args.name)?;
    Ok(Exit::Ok)
}
