use cofolio_node::container::{Containers, State};

use crate::cmd::Outcome;
use crate::context::{Context, short};
use crate::exit::Exit;
use crate::ui::{Cell, Table, Tone, ago};

/// List the containers that `run` started
///
/// STATE is `running` while `cofolio run` or its runtime waits for the container's end, `unattended` where nobody
/// does (it was started with --detach, or both were killed), `ended` for what the next `run`, `stop` or `gc`
/// removes. To enter one: `crun --root /run/cofolio/STORE-ID/crun exec -t NAME sh`; --json says `runtime_root`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  cofolio ps\n  cofolio ps --json | jq -r '.[].name'")]
pub(crate) struct Args {}

pub(crate) fn run(_args: &Args, context: &Context<'_>) -> Outcome {
    let domain = context.domain()?;
    let containers = Containers::new(context.mounter(&domain));
    let list = containers.list()?;
    if context.ui.json {
        context.ui.json(&list)?;
        return Ok(Exit::Ok);
    }
    if list.is_empty() {
        context.ui.note("no containers");
        return Ok(Exit::Ok);
    }
    let mut table = Table::new(&["NAME", "IMAGE", "STATE", "PID", "SINCE", "COMMAND"]);
    for status in &list {
        let (word, tone) = match status.state {
            State::Running => ("running", Tone::Good),
            State::Unattended => ("unattended", Tone::Good),
            State::Ended => ("ended", Tone::Dim),
        };
        let record = &status.record;
        // A digest is shown as everywhere; a ref is what it is.
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
    Ok(Exit::Ok)
}
