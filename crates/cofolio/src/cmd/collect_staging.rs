use crate::cmd::Outcome;
use crate::context::Context;
use crate::exit::Exit;

/// Remove what interrupted imports left, after one was interrupted
///
/// What `cofolio import` becomes when it is interrupted (see `interrupt.rs`); nobody else calls it.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {}

pub(crate) fn run(_args: &Args, context: &Context<'_>) -> Outcome {
    // What cannot be removed now is removed by the next gc, so there is nothing to say about it.
    let _ = context.store().map(|store| store.collect_staging());
    Ok(Exit::Interrupted)
}
