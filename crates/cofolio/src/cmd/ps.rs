use cofolio_node::container::Containers;

use crate::cmd::Outcome;
use crate::cmd::running::{command_cell, image_cell, pid_cell, state_cell};
use crate::context::Context;
use crate::exit::{self, Exit};
use crate::ui::{Cell, Table, Tone, ago};

/// List the containers that `run` started
///
/// STATE is `running` while `cofolio` or the runtime waits for the container's end, `unattended` if both were killed, and
/// `ended`, with the exit status of a detached container. --json names the file with a detached container's output.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  cofolio ps\n  \
    cofolio ps --json | jq -r '.[] | select(.name == \"cache\").output'")]
pub(crate) struct Args {}

pub(crate) fn run(_args: &Args, context: &Context<'_>) -> Outcome {
    let domain = context.domain()?;
    let containers = Containers::new(context.mounter(&domain)?);
    let mut failed = Vec::new();
    let list = containers.list(&mut failed)?;
    let exit = if failed.is_empty() { Exit::Ok } else { Exit::Corrupt };
    for error in failed {
        exit::report(&error.into(), context.ui);
    }
    if context.ui.json {
        context.ui.json(&list)?;
        return Ok(exit);
    }
    if list.is_empty() {
        // Those that cannot be read were named.
        if exit == Exit::Ok {
            context.ui.note("no containers");
        }
        return Ok(exit);
    }
    let mut table = Table::new(&["NAME", "IMAGE", "STATE", "PID", "SINCE", "COMMAND"]);
    for status in &list {
        let record = &status.record;
        table.row(vec![
            Cell::left(&record.name).tone(Tone::Bold),
            image_cell(&record.image_name, &record.image),
            state_cell(status.state, status.exit_status),
            pid_cell(status.pid),
            Cell::left(ago(record.created)),
            command_cell(&record.command),
        ]);
    }
    context.ui.table(&table)?;
    Ok(exit)
}
