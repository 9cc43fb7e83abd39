use cofolio_daemon::Client;
use cofolio_node::vm::account::VmReport;
use cofolio_node::vm::recycler::LATENCY_MS;

use crate::cmd::Outcome;
use crate::context::Context;
use crate::exit::Exit;
use crate::ui::{Cell, Table, Tone, human_size};

/// Say what the host holds for each virtual machine, and why
///
/// Private pages of a guest's memory are those that its kernel and programs USE, its CACHE of files, and those that it has
/// FREE and the host still holds; how they divide is what the guest says. MERGED pages are those that pools have, and IMAGE
/// those of its image: others may have both, too, and they are in memory once. ZERO pages take nothing. EMULATOR is what the
/// VMM takes for itself. The figures are the daemon's (`cofolio serve`), some seconds old.
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
        "NAME", "IMAGE", "MEMORY", "USE", "CACHE", "FREE", "MERGED", "IMAGE", "ZERO", "EMULATOR",
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
                it.merged_bytes,
                it.image_bytes,
                it.zero_bytes,
                it.emulator_bytes,
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
        "{} private, {} merged into {} of pools, {} returned by pulses",
        human_size(private),
        human_size(merged),
        human_size(report.pool_bytes),
        human_size(report.returned_bytes),
    ))?;
    for it in &report.machines {
        if let Some(why) = &it.recycling.refusal {
            context.ui.note(format!("{}: free memory is not taken: {why}", it.name));
        }
    }
    if let Some(seconds) = within(&report.latency_bytes, 0.99) {
        let what = format!("99 % of freed memory was returned within {seconds} s");
        context.ui.line(what)?;
    }
    Ok(Exit::Ok)
}

/// Within how many seconds this share of what was freed was returned.
fn within(latency_bytes: &[u64], share: f64) -> Option<f64> {
    let all: u64 = latency_bytes.iter().sum();
    let mut sum = 0;
    let reached = latency_bytes.iter().position(|bytes| {
        sum += bytes;
        sum as f64 >= all as f64 * share
    })?;
    LATENCY_MS.get(reached).filter(|_| all > 0).map(|ms| *ms as f64 / 1000.0)
}
