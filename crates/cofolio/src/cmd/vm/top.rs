use cofolio_daemon::Client;
use cofolio_node::vm::account::{Latency, VmReport};

use crate::cmd::Outcome;
use crate::context::Context;
use crate::exit::Exit;
use crate::ui::{Cell, Table, Tone, human_size};

/// Say what the host holds for each virtual machine, and why
///
/// Private pages of a guest's memory are those that its kernel and programs USE, its CACHE of
/// files, and those that it has FREE and the host still holds; how they divide is what the guest
/// says. EMULATOR is what the VMM takes for itself. MERGED pages are those that pools have, and
/// IMAGE those of its image: others may have both, too, and they are in memory once. PROPORTIONAL
/// is all of this, with each shared page divided among those that have it. ZERO pages take nothing.
/// The figures are the daemon's (`cofolio serve`), some seconds old.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  cofolio vm top\n  cofolio vm top --json | jq '.machines[] | {name, merged_bytes}'"
)]
pub(crate) struct Args {}

pub(crate) fn run(_args: &Args, context: &Context<'_>) -> Outcome {
    let report: VmReport = Client::at(context.socket()).get("/v1/machines")?;
    if context.ui.json {
        return context.ui.json(&report);
    }
    if report.machines.is_empty() {
        context.ui.note("no virtual machines");
        return Ok(Exit::Ok);
    }
    let mut table = Table::new(&[
        "NAME",
        "OF",
        "MEMORY",
        "USE",
        "CACHE",
        "FREE",
        "EMULATOR",
        "MERGED",
        "IMAGE",
        "PROPORTIONAL",
        "ZERO",
    ]);
    for it in &report.machines {
        let mut row = vec![
            Cell::left(&it.name).tone(Tone::Bold),
            Cell::left(if it.image_name.is_empty() { "-" } else { &it.image_name }),
            Cell::right(human_size(it.memory_bytes)),
        ];
        row.extend(
            [
                it.used_bytes,
                it.cache_bytes,
                it.unreturned_bytes,
                it.emulator_bytes,
                it.merged_bytes,
                it.image_bytes,
                it.proportional_bytes,
                it.zero_bytes,
            ]
            .map(|bytes| Cell::right(human_size(bytes))),
        );
        table.row(row);
    }
    context.ui.table(&table)?;
    if context.ui.quiet {
        return Ok(Exit::Ok);
    }
    let private: u64 = report.machines.iter().map(|it| it.private_bytes()).sum();
    let merged: u64 = report.machines.iter().map(|it| it.merged_bytes).sum();
    context.ui.line(format!(
        "{} in all: {} private, {} of images, {} of pools that {} were merged into",
        human_size(report.host_bytes()),
        human_size(private),
        human_size(report.image_bytes),
        human_size(report.pool_bytes),
        human_size(merged),
    ))?;
    for it in &report.machines {
        if let Some(why) = &it.recycling.refusal {
            context.ui.note(format!("{}: free memory is not taken: {why}", it.name));
        }
        if let Some(why) = &it.merging.refusal {
            context.ui.note(format!("{}: its pages are not merged: {why}", it.name));
        }
    }
    if report.latency.bytes.iter().any(|bytes| *bytes > 0) {
        let Latency { p50_ms, p99_ms, .. } = report.latency;
        let within = |ms: Option<u64>| match ms {
            Some(ms) => format!("within {} s", ms as f64 / 1e3),
            None => "later than in a minute".to_owned(),
        };
        context.ui.line(format!(
            "{} returned by pulses; half of freed memory {}, 99 % {}",
            human_size(report.returned_bytes),
            within(p50_ms),
            within(p99_ms),
        ))?;
    }
    Ok(Exit::Ok)
}
