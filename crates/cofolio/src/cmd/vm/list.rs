use cofolio_node::vm::Origin;

use crate::cmd::Outcome;
use crate::cmd::running::{command_cell, image_cell, pid_cell, state_cell};
use crate::context::Context;
use crate::exit::{self, Exit};
use crate::ui::{Cell, Table, Tone, ago, human_size};

/// List virtual machines
///
/// STATE is `running` while `cofolio` waits for the machine's end, `unattended` if that process was
/// killed, and `ended`, with the exit status of the image's program. One that somebody else started
/// (`vm attach`) has no image; it is `running` until its VMM ends. --json names the file with a
/// detached machine's output, and the control socket of its VMM.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  cofolio vm ps\n  \
    cofolio vm ps --json | jq -r '.[] | select(.name == \"cache\").output'")]
pub(crate) struct Args {}

pub(crate) fn run(_args: &Args, context: &Context<'_>) -> Outcome {
    let domain = context.domain()?;
    let machines = super::machines(&domain, context)?;
    let mut failed = Vec::new();
    let list = machines.list(&mut failed)?;
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
            context.ui.note("no virtual machines");
        }
        return Ok(exit);
    }
    let mut table =
        Table::new(&["NAME", "IMAGE", "STATE", "PID", "MEMORY", "CPUS", "SINCE", "COMMAND"]);
    for status in &list {
        let record = &status.record;
        let (image, command) = match &record.origin {
            Origin::Started(it) => {
                (image_cell(&it.image_name, &it.image), command_cell(&it.command))
            }
            Origin::Attached(it) => {
                let attached = format!("attached to {}", it.socket.display());
                (Cell::left("-"), command_cell(&[attached]))
            }
        };
        table.row(vec![
            Cell::left(&record.name).tone(Tone::Bold),
            image,
            state_cell(status.state, status.exit_status),
            pid_cell(status.pid),
            Cell::right(human_size(record.memory_bytes)),
            Cell::right(record.cpus.to_string()),
            Cell::left(ago(record.created)),
            command,
        ]);
    }
    context.ui.table(&table)?;
    Ok(exit)
}
