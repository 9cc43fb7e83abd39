use cofolio_node::container::{Containers, State};

use crate::cmd::Outcome;
use crate::context::{Context, short};
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
        let (word, tone) = match (status.state, status.exit_status) {
            (State::Running, _) => ("running".to_owned(), Tone::Good),
            (State::Unattended, _) => ("unattended".to_owned(), Tone::Good),
            (State::Ended, None) => ("ended".to_owned(), Tone::Dim),
            (State::Ended, Some(status)) => (format!("ended ({status})"), Tone::Dim),
        };
        let record = &status.record;
        // A digest is shortened as everywhere, a ref is not.
        let image = match record.image_name.is_empty() {
            true => short(&record.image),
            false => record.image_name.clone(),
        };
        let command: String = record.command.join(" ").chars().take(40).collect();
        table.row(vec![
            Cell::left(&record.name).tone(Tone::Bold),
            Cell::left(image),
            Cell::left(word).tone(tone),
            Cell::right(status.pid.map_or_else(|| "-".to_owned(), |pid| pid.to_string())),
            Cell::left(ago(record.created)),
            Cell::left(crate::ui::printable(command.as_bytes())),
        ]);
    }
    context.ui.table(&table)?;
    Ok(exit)
}
